// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Memory of a CUDA device and pinned host memory as `memory_resource`s. All are thread-safe, keep the device's state
/// alive, and restore the current device. In a child made by fork() they give nothing back, because CUDA cannot be used
/// there.

#include <bifolio/memory_resource.hpp>
#include <memory>

#include "cuda/host/device_state.hpp"

namespace bifolio::inline v0_2::cuda {

/// What cudaMalloc guarantees; larger alignments are refused.
inline constexpr std::size_t device_alignment = 256;

/// cudaMalloc. Releasing waits for the device, as cudaFree does.
class device_memory_resource final : public memory_resource {
 public:
  explicit device_memory_resource(std::shared_ptr<const device_state> state) noexcept : state_(std::move(state)) {}
  /// Throws also device_lost and failed_precondition (see device_state::health).
  [[nodiscard]] void* allocate(std::size_t num_bytes, std::size_t alignment) override;
  void deallocate(void* pointer, std::size_t num_bytes, std::size_t alignment) noexcept override;
  [[nodiscard]] device where() const noexcept override { return state_->where(); }

 private:
  std::shared_ptr<const device_state> state_;
};

/// Pinned, portable host memory: readable by every device, fast to transfer.
class pinned_memory_resource final : public memory_resource {
 public:
  explicit pinned_memory_resource(std::shared_ptr<const device_state> state) noexcept : state_(std::move(state)) {}
  [[nodiscard]] void* allocate(std::size_t num_bytes, std::size_t alignment) override;
  void deallocate(void* pointer, std::size_t num_bytes, std::size_t alignment) noexcept override;
  [[nodiscard]] device where() const noexcept override { return {}; }

 private:
  std::shared_ptr<const device_state> state_;
};

/// cudaMallocAsync in one borrowed stream. Never waits.
class stream_memory_resource final : public memory_resource {
 public:
  stream_memory_resource(std::shared_ptr<const device_state> state, stream_ref stream) noexcept
      : state_(std::move(state)), stream_(handle_of(stream)) {}
  [[nodiscard]] void* allocate(std::size_t num_bytes, std::size_t alignment) override;
  void deallocate(void* pointer, std::size_t num_bytes, std::size_t alignment) noexcept override;
  [[nodiscard]] device where() const noexcept override { return state_->where(); }

 private:
  std::shared_ptr<const device_state> state_;
  cudaStream_t stream_;
};

}  // namespace bifolio::inline v0_2::cuda
