// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A CUDA event as the state of a `bifolio::event`. Keeps its device's state alive, not its backend: two backends of
/// one device use each other's events.

#include <bifolio/event.hpp>
#include <memory>

#include "cuda/host/device_state.hpp"

namespace bifolio::inline v0_2::cuda {

class cuda_event final : public event_state {
 public:
  /// Without timing, which costs a write of the time stamp. Throws `error` as `backend::make_event`.
  explicit cuda_event(std::shared_ptr<const device_state> state);
  ~cuda_event() override;

  [[nodiscard]] device where() const noexcept override { return state_->where(); }
  [[nodiscard]] errc query(bool& done) const noexcept override;
  [[nodiscard]] errc synchronize() const noexcept override;

  [[nodiscard]] const device_state& state() const noexcept { return *state_; }
  [[nodiscard]] cudaEvent_t handle() const noexcept { return handle_; }
  /// Whether it was last recorded in a stream that captures; CUDA does not answer for it then.
  void set_captured(bool captured) noexcept { captured_ = captured; }

 private:
  std::shared_ptr<const device_state> state_;
  cudaEvent_t handle_ = nullptr;
  bool captured_ = false;
};

/// Null when the event is empty or of another backend than CUDA.
[[nodiscard]] cuda_event* cuda_event_of(const event& point) noexcept;

}  // namespace bifolio::inline v0_2::cuda
