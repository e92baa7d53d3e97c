// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Sends batches of KV events (kv_events.hpp) to routers over ZeroMQ, as vLLM does. A target of its own,
/// bifolio::events, which is built with -DBIFOLIO_EVENTS=ON and needs cppzmq; the library itself knows no sockets.
///
///   PUB      topic, number of the batch (8 bytes, big endian), batch
///   ROUTER   a request has the number of a batch; the answer is each kept batch from there on, and −1 at the end
///
/// Numbers begin with the time at which the publisher was made, in microseconds, so that they grow over restarts: a
/// listener sees a gap then, asks for what it missed, and gets the batches of the new process, whose first one should
/// say that all blocks are cleared. A listener that asks for a batch which is not kept any more is the reason for
/// `snapshot_wanted`.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace bifolio::inline v0_2 {

struct kv_event_publisher_options {
  std::string endpoint = "tcp://*:5557";  ///< bound; port 0 or * takes a free one
  std::string replay_endpoint{};          ///< bound; empty: no replays
  std::string topic{};
  std::int32_t num_kept = 10000;          ///< batches for replays, ≥ 1
  std::int32_t high_water_mark = 100000;  ///< batches that wait for one slow listener; more are lost to it
  std::uint64_t first_number = 0;         ///< 0: the time
};

/// Thread-safety: one thread at a time; a thread of its own owns the sockets.
class kv_event_publisher {
 public:
  /// Throws `error`: invalid_argument (a number out of range), unsupported (an endpoint that cannot be bound, with what
  /// ZeroMQ says; no socket or no thread to be had), out_of_memory.
  explicit kv_event_publisher(const kv_event_publisher_options& options = {});
  kv_event_publisher(const kv_event_publisher&) = delete;
  kv_event_publisher& operator=(const kv_event_publisher&) = delete;
  /// Sends what was given, for at most a second.
  ~kv_event_publisher();

  /// Hands a batch to the sending thread and returns its number. Waits for no listener. Throws `error`: out_of_memory,
  /// failed_precondition (ZeroMQ failed, and the sending thread has ended).
  std::uint64_t publish(std::string_view batch);

  /// Whether a listener asked for a batch that is not kept, since this was called last. Publish a batch of one
  /// `cleared` event and then `prefix_cache::list_contents`.
  [[nodiscard]] bool snapshot_wanted() noexcept;

  /// As bound, with the port.
  [[nodiscard]] const std::string& endpoint() const noexcept;
  [[nodiscard]] const std::string& replay_endpoint() const noexcept;

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace bifolio::inline v0_2
