// SPDX-License-Identifier: Apache-2.0
#include <bifolio/memory_resource.hpp>
#include <bit>
#include <cstdlib>
#include <new>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <bifolio/error.hpp>

#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2 {
namespace {

constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

void require_alignment(std::size_t alignment) {
  if (!std::has_single_bit(alignment)) {
    detail::refuse(errc::invalid_argument, "alignment ", alignment, " is not a power of two");
  }
}

[[noreturn]] void throw_out_of_memory(std::size_t num_bytes, const char* why) {
  detail::refuse(errc::out_of_memory, "cannot allocate ", num_bytes, " bytes: ", why);
}

}  // namespace

memory_resource::~memory_resource() = default;

void* host_memory_resource::allocate(std::size_t num_bytes, std::size_t alignment) {
  require_alignment(alignment);
  if (num_bytes == 0) return nullptr;
  if (num_bytes >= huge_page_bytes && alignment < huge_page_bytes) alignment = huge_page_bytes;
  if (alignment < sizeof(void*)) alignment = sizeof(void*);
  if (num_bytes > SIZE_MAX - alignment) throw_out_of_memory(num_bytes, "the size wraps");
  void* pointer = nullptr;
  if (::posix_memalign(&pointer, alignment, num_bytes) != 0)
    throw_out_of_memory(num_bytes, "the host has no such memory");
#if defined(__linux__)
  // A hint: where the kernel does not give huge pages everything works with small ones.
  if (num_bytes >= huge_page_bytes) (void)::madvise(pointer, num_bytes, MADV_HUGEPAGE);
#endif
  return pointer;
}

void host_memory_resource::deallocate(void* pointer, std::size_t, std::size_t) noexcept { std::free(pointer); }

memory_resource& default_host_memory() noexcept {
  // Never destroyed, so that buffers with static storage may be released after it would have been.
  alignas(host_memory_resource) static std::byte storage[sizeof(host_memory_resource)];
  static host_memory_resource* const resource = ::new (static_cast<void*>(storage)) host_memory_resource;
  return *resource;
}

limiting_memory_resource::limiting_memory_resource(memory_resource& upstream, std::size_t limit_bytes) noexcept
    : upstream_(&upstream), limit_bytes_(limit_bytes) {}

void* limiting_memory_resource::allocate(std::size_t num_bytes, std::size_t alignment) {
  std::size_t used = used_.load(std::memory_order_relaxed);
  do {
    if (num_bytes > limit_bytes_ - used) {
      throw_out_of_memory(
          num_bytes,
          ("the limit is " + std::to_string(limit_bytes_) + " bytes, " + std::to_string(used) + " in use").c_str());
    }
  } while (!used_.compare_exchange_weak(used, used + num_bytes, std::memory_order_relaxed));
  try {
    return upstream_->allocate(num_bytes, alignment);
  } catch (...) {
    used_.fetch_sub(num_bytes, std::memory_order_relaxed);
    throw;
  }
}

void limiting_memory_resource::deallocate(void* pointer, std::size_t num_bytes, std::size_t alignment) noexcept {
  if (pointer == nullptr) return;
  upstream_->deallocate(pointer, num_bytes, alignment);
  used_.fetch_sub(num_bytes, std::memory_order_relaxed);
}

counting_memory_resource::counting_memory_resource(memory_resource& upstream) noexcept : upstream_(&upstream) {}

void* counting_memory_resource::allocate(std::size_t num_bytes, std::size_t alignment) {
  void* pointer = upstream_->allocate(num_bytes, alignment);
  num_allocations_.fetch_add(1);
  if (pointer == nullptr) return pointer;
  num_live_.fetch_add(1);
  const std::int64_t live =
      live_bytes_.fetch_add(static_cast<std::int64_t>(num_bytes)) + static_cast<std::int64_t>(num_bytes);
  std::int64_t peak = peak_bytes_.load();
  while (peak < live && !peak_bytes_.compare_exchange_weak(peak, live)) {
  }
  return pointer;
}

void counting_memory_resource::deallocate(void* pointer, std::size_t num_bytes, std::size_t alignment) noexcept {
  if (pointer == nullptr) return;
  upstream_->deallocate(pointer, num_bytes, alignment);
  num_live_.fetch_sub(1);
  live_bytes_.fetch_sub(static_cast<std::int64_t>(num_bytes));
}

failing_memory_resource::failing_memory_resource(memory_resource& upstream) noexcept : upstream_(&upstream) {}

void* failing_memory_resource::allocate(std::size_t num_bytes, std::size_t alignment) {
  std::int64_t left = countdown_.load();
  while (left > 0 && !countdown_.compare_exchange_weak(left, left - 1)) {
  }
  if (left == 1) throw_out_of_memory(num_bytes, "the failure that was asked for");
  return upstream_->allocate(num_bytes, alignment);
}

void failing_memory_resource::deallocate(void* pointer, std::size_t num_bytes, std::size_t alignment) noexcept {
  upstream_->deallocate(pointer, num_bytes, alignment);
}

}  // namespace bifolio::inline v0_2
