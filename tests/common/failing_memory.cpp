// SPDX-License-Identifier: Apache-2.0
#include "common/failing_memory.hpp"

#include <cstdlib>

namespace bifolio::test {

std::int64_t calls_until_failure = 0;
bool fails_for_good = false;
std::int64_t num_failures = 0;

}  // namespace bifolio::test

namespace {

using namespace bifolio::test;

void* allocate_or_throw(std::size_t size, std::size_t alignment) {
  if (calls_until_failure == 1) {
    if (!fails_for_good) calls_until_failure = 0;
    ++num_failures;
    throw std::bad_alloc();
  }
  if (calls_until_failure > 1) --calls_until_failure;
  size = (size + alignment) / alignment * alignment;
  void* pointer = std::aligned_alloc(alignment, size);
  if (pointer == nullptr) throw std::bad_alloc();
  return pointer;
}

void* allocate_or_null(std::size_t size) noexcept {
  try {
    return allocate_or_throw(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace

void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return allocate_or_null(size); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return allocate_or_null(size); }
void* operator new(std::size_t size) { return allocate_or_throw(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new[](std::size_t size) { return allocate_or_throw(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate_or_throw(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return allocate_or_throw(size, static_cast<std::size_t>(alignment));
}
#if defined(__GNUC__) && !defined(__clang__)
// GCC inlines these without the operators new above, and then takes std::free for the wrong function.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif
void operator delete(void* pointer) noexcept { std::free(pointer); }
void operator delete[](void* pointer) noexcept { std::free(pointer); }
void operator delete(void* pointer, std::size_t) noexcept { std::free(pointer); }
void operator delete[](void* pointer, std::size_t) noexcept { std::free(pointer); }
void operator delete(void* pointer, std::align_val_t) noexcept { std::free(pointer); }
void operator delete(void* pointer, std::size_t, std::align_val_t) noexcept { std::free(pointer); }
void operator delete[](void* pointer, std::align_val_t) noexcept { std::free(pointer); }
void operator delete[](void* pointer, std::size_t, std::align_val_t) noexcept { std::free(pointer); }
