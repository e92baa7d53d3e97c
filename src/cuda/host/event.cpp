// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/event.hpp"

#include <typeinfo>

namespace bifolio::inline v0_2::cuda {
cuda_event::cuda_event(std::shared_ptr<const device_state> state) : state_(std::move(state)) {
  state_->require_health();
  const device_guard guard(state_->api(), state_->index());
  state_->require(guard.status(), "the device cannot be made current");
  state_->require(state_->api().event_create(&handle_, cudaEventDisableTiming), "an event cannot be created");
}

cuda_event::~cuda_event() {
  if (state_->health() == errc::failed_precondition) return;  // CUDA cannot be used in a forked child
  const device_guard guard(state_->api(), state_->index());
  // Waits for nothing: an event that is still pending is released when it is done.
  (void)state_->report(state_->api().event_destroy(handle_));
}

errc cuda_event::query(bool& done) const noexcept {
  const device_scope scope(*state_);
  if (scope.status() != errc::ok) return scope.status();
  if (captured_) return errc::failed_precondition;
  const cudaError_t status = state_->api().event_query(handle_);
  const errc code = state_->report(status);
  if (code == errc::ok) done = status == cudaSuccess;
  return code;
}

errc cuda_event::synchronize() const noexcept {
  const device_scope scope(*state_);
  if (scope.status() != errc::ok) return scope.status();
  return captured_ ? errc::failed_precondition : state_->report(state_->api().event_synchronize(handle_));
}

cuda_event* cuda_event_of(const event& point) noexcept {
  if (point.empty()) return nullptr;
  event_state& state = *point.state();
  return typeid(state) == typeid(cuda_event) ? static_cast<cuda_event*>(&state) : nullptr;
}

}  // namespace bifolio::inline v0_2::cuda
