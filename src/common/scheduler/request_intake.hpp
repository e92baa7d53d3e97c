// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The one place where other threads meet the scheduler: a queue of new requests and of requests to be dropped, filled
/// by any thread and emptied by the scheduler's owner. With oneTBB it takes no lock.

#include <bifolio/types.hpp>
#include <memory>

namespace bifolio::inline v0_2::detail {

struct request_state;

/// Either a new request, owned by the message, or the id of one to drop.
struct intake_message {
  request_state* arrived = nullptr;
  request_id dropped = invalid_request;
};

class request_intake {
 public:
  request_intake();
  ~request_intake();
  request_intake(const request_intake&) = delete;
  request_intake& operator=(const request_intake&) = delete;

  /// Thread-safe. Throws std::bad_alloc; the message then stays the caller's.
  void push(const intake_message& message);
  /// Owner thread only. False when nothing is there.
  [[nodiscard]] bool try_pop(intake_message& message) noexcept;

 private:
  struct queue;
  std::unique_ptr<queue> queue_;
};

}  // namespace bifolio::inline v0_2::detail
