// SPDX-License-Identifier: Apache-2.0
#pragma once

/// One CUDA device as the backend sees it: its numbers, and whether it is still usable. Every CUDA status passes
/// through `report`, which leaves the runtime's last-error slot clean and keeps the first sticky error.

#include <atomic>
#include <bifolio/device.hpp>
#include <bifolio/error.hpp>
#include <string>

#include "cuda/host/plan_input.hpp"
#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {

/// Thread-safe.
class device_state {
 public:
  /// Opens device `index`, without touching the current device. Throws `error`: unsupported when there is no driver, no
  /// such device, or one that is too old; device_lost and out_of_memory as the driver says.
  device_state(const runtime_api& api, std::int32_t index);

  [[nodiscard]] const runtime_api& api() const noexcept { return api_; }
  [[nodiscard]] std::int32_t index() const noexcept { return index_; }
  [[nodiscard]] device where() const noexcept { return {device_type::cuda, index_}; }
  [[nodiscard]] const device_numbers& numbers() const noexcept { return numbers_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// The attention implementation that BIFOLIO_ATTENTION named when the device was opened; empty where it named none.
  [[nodiscard]] const std::string& forced_implementation() const noexcept { return forced_implementation_; }

  /// ok; device_lost after a sticky error; failed_precondition in a child made by fork(), where CUDA cannot be used.
  [[nodiscard]] errc health() const noexcept;

  /// What to tell the caller about `status`.
  errc report(cudaError_t status) const noexcept;

  /// The first sticky error, cudaSuccess while there was none.
  [[nodiscard]] cudaError_t first_cause() const noexcept { return first_cause_.load(std::memory_order_relaxed); }

  /// Throws `error` unless `status` is success, with a sentence that begins with `what`.
  void require(cudaError_t status, const char* what) const;
  /// Throws `error` unless health() is ok.
  void require_health() const;

 private:
  const runtime_api& api_;
  std::int32_t index_;
  device_numbers numbers_;
  std::string name_;
  std::string forced_implementation_;
  unsigned fork_generation_;
  mutable std::atomic<cudaError_t> first_cause_{cudaSuccess};
};

/// A CUDA error as "name (text)".
[[nodiscard]] std::string describe(cudaError_t status);

/// Entry of every call: health, then the device made current until the end of the scope.
class device_scope {
 public:
  explicit device_scope(const device_state& state) noexcept
      : guard_(state.api(), state.index()),
        status_(state.health() != errc::ok ? state.health() : state.report(guard_.status())) {}
  [[nodiscard]] errc status() const noexcept { return status_; }

 private:
  device_guard guard_;
  errc status_;
};

}  // namespace bifolio::inline v0_2::cuda
