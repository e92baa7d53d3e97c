// SPDX-License-Identifier: Apache-2.0
#include "support/allocation_count.hpp"

#include <atomic>
#include <cstdlib>
#include <new>

namespace bifolio::test {
namespace {

std::atomic<std::int64_t> allocations{0};
thread_local std::int64_t countdown = 0;

void* allocate(std::size_t num_bytes, std::size_t alignment) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (countdown > 0 && --countdown == 0) throw std::bad_alloc();
  void* pointer = nullptr;
  if (alignment < sizeof(void*)) alignment = sizeof(void*);
  if (::posix_memalign(&pointer, alignment, num_bytes == 0 ? 1 : num_bytes) != 0) throw std::bad_alloc();
  return pointer;
}

}  // namespace

std::int64_t num_allocations() noexcept { return allocations.load(std::memory_order_relaxed); }

failing_new::failing_new(std::int64_t nth) noexcept : nth_(nth) { countdown = nth; }
failing_new::~failing_new() { countdown = 0; }
bool failing_new::happened() const noexcept { return nth_ > 0 && countdown == 0; }

}  // namespace bifolio::test

void* operator new(std::size_t num_bytes) {
  return bifolio::test::allocate(num_bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
void* operator new(std::size_t num_bytes, std::align_val_t alignment) {
  return bifolio::test::allocate(num_bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* pointer) noexcept { std::free(pointer); }
void operator delete(void* pointer, std::size_t) noexcept { std::free(pointer); }
void operator delete(void* pointer, std::align_val_t) noexcept { std::free(pointer); }
void operator delete(void* pointer, std::size_t, std::align_val_t) noexcept { std::free(pointer); }
