// SPDX-License-Identifier: Apache-2.0
#include "support/fenced_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <bifolio/error.hpp>
#include <cstdint>

namespace bifolio::test {
namespace {

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

void* fenced_memory_resource::allocate(std::size_t num_bytes, std::size_t alignment) {
  if (num_bytes == 0) return nullptr;
  const std::size_t payload = round_up(round_up(num_bytes, alignment), page_bytes());
  const std::size_t mapped = payload + page_bytes();
  void* base = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw error(errc::out_of_memory, "no mapping for fenced test memory");
  auto* fence = static_cast<std::byte*>(base) + payload;
  if (::mprotect(fence, page_bytes(), PROT_NONE) != 0) {
    ::munmap(base, mapped);
    throw error(errc::out_of_memory, "no fence for test memory");
  }
  return fence - round_up(num_bytes, alignment);
}

void fenced_memory_resource::deallocate(void* pointer, std::size_t num_bytes, std::size_t alignment) noexcept {
  if (pointer == nullptr) return;
  const std::size_t payload = round_up(round_up(num_bytes, alignment), page_bytes());
  auto* fence = static_cast<std::byte*>(pointer) + round_up(num_bytes, alignment);
  ::munmap(fence - payload, payload + page_bytes());
}

}  // namespace bifolio::test
