// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/memory.hpp"

#include <bit>
#include <string>

#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

void require_alignment(std::size_t alignment) {
  if (!std::has_single_bit(alignment) || alignment > device_alignment) {
    detail::refuse(errc::invalid_argument, "alignment ", alignment, " is not a power of two up to ", device_alignment);
  }
}

template <class Call>
void* allocate_with(const device_state& state, std::size_t num_bytes, std::size_t alignment, const char* kind,
                    Call call) {
  require_alignment(alignment);
  if (num_bytes == 0) return nullptr;
  state.require_health();
  const device_guard guard(state.api(), state.index());
  state.require(guard.status(), "the device cannot be made current");
  void* pointer = nullptr;
  const cudaError_t status = call(&pointer);
  if (const errc code = state.report(status); code != errc::ok) {
    detail::refuse(code, "cannot allocate ", num_bytes, " bytes of ", kind, " on ", to_string(state.where()), ": ",
                   [&](std::string& sentence) { sentence += describe(status); });
  }
  return pointer;
}

template <class Call>
void release_with(const device_state& state, void* pointer, Call call) noexcept {
  if (pointer == nullptr || state.health() == errc::failed_precondition) return;
  const device_guard guard(state.api(), state.index());
  // After a sticky error the driver has given the memory up already and repeats that error.
  (void)state.report(call());
}

}  // namespace

void* device_memory_resource::allocate(std::size_t num_bytes, std::size_t alignment) {
  return allocate_with(*state_, num_bytes, alignment, "device memory",
                       [&](void** pointer) { return state_->api().malloc_device(pointer, num_bytes); });
}

void device_memory_resource::deallocate(void* pointer, std::size_t, std::size_t) noexcept {
  release_with(*state_, pointer, [&] { return state_->api().free_device(pointer); });
}

void* pinned_memory_resource::allocate(std::size_t num_bytes, std::size_t alignment) {
  return allocate_with(*state_, num_bytes, alignment, "pinned host memory",
                       [&](void** pointer) { return state_->api().malloc_host(pointer, num_bytes); });
}

void pinned_memory_resource::deallocate(void* pointer, std::size_t, std::size_t) noexcept {
  release_with(*state_, pointer, [&] { return state_->api().free_host(pointer); });
}

void* stream_memory_resource::allocate(std::size_t num_bytes, std::size_t alignment) {
  return allocate_with(*state_, num_bytes, alignment, "stream-ordered device memory",
                       [&](void** pointer) { return state_->api().malloc_async(pointer, num_bytes, stream_); });
}

void stream_memory_resource::deallocate(void* pointer, std::size_t, std::size_t) noexcept {
  release_with(*state_, pointer, [&] { return state_->api().free_async(pointer, stream_); });
}

}  // namespace bifolio::inline v0_2::cuda
