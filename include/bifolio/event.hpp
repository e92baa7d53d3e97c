// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A point in the order of a stream. Another stream, another device or the host waits for that point, and not for all
/// that the stream was given later. `backend::make_event` makes one, `backend::record` sets it, and it is set again and
/// again without an allocation: callers keep their events.

#include <bifolio/device.hpp>
#include <bifolio/error.hpp>
#include <bifolio/export.hpp>
#include <memory>
#include <utility>

namespace bifolio::inline v0_2 {

/// What a backend keeps for one event.
class BIFOLIO_API event_state {
 public:
  virtual ~event_state();
  event_state(const event_state&) = delete;
  event_state& operator=(const event_state&) = delete;

  [[nodiscard]] virtual device where() const noexcept = 0;
  /// See `event`.
  [[nodiscard]] virtual errc query(bool& done) const noexcept = 0;
  [[nodiscard]] virtual errc synchronize() const noexcept = 0;

 protected:
  event_state() = default;
};

/// Owns one event; moves, never copies. May outlive its backend.
/// Thread-safety: `record` is externally synchronised against everything else; query, synchronize and `wait` may run at
/// once.
class event {
 public:
  /// Empty: every call with it returns invalid_argument. So is what an event was moved from.
  event() = default;
  /// For backends.
  explicit event(std::unique_ptr<event_state> state) noexcept : state_(std::move(state)) {}

  [[nodiscard]] bool empty() const noexcept { return state_ == nullptr; }

  /// Whether everything that its stream was given before the last `record` is finished; true when it was never
  /// recorded. Never waits. device_lost, or failed_precondition in a child made by fork() and for an event that was
  /// last recorded in a stream that captures: `done` is then as before.
  [[nodiscard]] errc query(bool& done) const noexcept {
    return state_ == nullptr ? errc::invalid_argument : state_->query(done);
  }
  /// The host waits until `query` would say so. The same codes.
  [[nodiscard]] errc synchronize() const noexcept {
    return state_ == nullptr ? errc::invalid_argument : state_->synchronize();
  }

  /// Null when empty.
  [[nodiscard]] event_state* state() const noexcept { return state_.get(); }

 private:
  std::unique_ptr<event_state> state_;
};

}  // namespace bifolio::inline v0_2
