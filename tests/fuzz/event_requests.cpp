// SPDX-License-Identifier: Apache-2.0
// Messages of any frames to the socket that answers requests for past batches of events: what is a request is answered
// with what is kept, whatever else comes is not, and the publisher goes on.
#include <bifolio/kv_event_publisher.hpp>
#include <cerrno>
#include <string>
#include <vector>
#include <zmq.hpp>

#include "choices.hpp"
#include "fuzz_target.hpp"
#include "scratch_files.hpp"

namespace {

using namespace bifolio::fuzz;
using frame = std::vector<std::uint8_t>;

constexpr std::uint64_t num_published = 20;  // numbered from 1
constexpr std::uint64_t num_kept = 6;
constexpr std::uint64_t end_of_replay = UINT64_MAX;

std::uint64_t number_of(std::span<const std::uint8_t> bytes) {
  std::uint64_t number = 0;
  for (const std::uint8_t byte : bytes) number = number << 8 | byte;
  return number;
}
frame frame_of(std::uint64_t number) {
  frame bytes(8);
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<std::uint8_t>(number >> (56 - 8 * i));
  return bytes;
}

void send(zmq::socket_t& socket, const std::vector<frame>& frames) {
  for (std::size_t i = 0; i < frames.size(); ++i) {
    const auto more = i + 1 < frames.size() ? zmq::send_flags::sndmore : zmq::send_flags::none;
    if (!socket.send(zmq::buffer(frames[i]), more)) flaw("a message is not taken");
  }
}

zmq::message_t receive(zmq::socket_t& socket) {
  zmq::message_t got;
  for (;;) {
    try {
      if (!socket.recv(got)) flaw("the publisher does not answer");
      return got;
    } catch (const zmq::error_t& problem) {
      if (problem.num() != EINTR) throw;  // the fuzzer's timer
    }
  }
}

struct running_publisher {
  bifolio::kv_event_publisher publisher{{.endpoint = "ipc://" + (scratch_folder() / "events").string(),
                                         .replay_endpoint = "ipc://" + (scratch_folder() / "replays").string(),
                                         .topic = "kv",
                                         .num_kept = num_kept,
                                         .first_number = 1}};
  zmq::context_t context;

  running_publisher() {
    for (std::uint64_t n = 1; n <= num_published; ++n) {
      if (publisher.publish("batch " + std::to_string(n)) != n) flaw("a batch has another number");
    }
    // Until its thread has taken the last one.
    zmq::socket_t socket = connected();
    for (bool has_last = false; !has_last;) {
      send(socket, {{}, frame_of(num_published)});
      for (std::uint64_t number = 0; number != end_of_replay;) {
        (void)receive(socket);
        const zmq::message_t answer = receive(socket);
        number = number_of({answer.data<std::uint8_t>(), answer.size()});
        has_last = has_last || number == num_published;
        (void)receive(socket);
      }
    }
  }

  zmq::socket_t connected() {
    zmq::socket_t socket(context, zmq::socket_type::dealer);
    socket.set(zmq::sockopt::linger, 0);
    socket.set(zmq::sockopt::rcvtimeo, 60000);
    socket.set(zmq::sockopt::sndtimeo, 60000);
    socket.connect(publisher.replay_endpoint());
    return socket;
  }
};

/// [empty, number, batch] of each kept batch from `first` on, then of the end.
void expect_replay(zmq::socket_t& socket, std::uint64_t first) {
  for (std::uint64_t n = num_published - num_kept + 1;; ++n) {
    if (n > num_published) n = end_of_replay;
    if (n < first) continue;
    if (receive(socket).size() != 0) flaw("an answer without its delimiter");
    const zmq::message_t number = receive(socket);
    if (number_of({number.data<std::uint8_t>(), number.size()}) != n) flaw("an answer has another number");
    const zmq::message_t batch = receive(socket);
    if (batch.to_string() != (n == end_of_replay ? "" : "batch " + std::to_string(n))) flaw("another batch");
    if (batch.more()) flaw("an answer has more frames");
    if (n == end_of_replay) return;
  }
}

}  // namespace

BIFOLIO_FUZZ_TARGET(event_requests) {
  static running_publisher running;
  zmq::socket_t socket = running.connected();
  choices from(input);
  for (int messages = from.below(6); messages > 0; --messages) {
    std::vector<frame> frames(std::size_t{1} + from.below(4));
    for (frame& one : frames) {
      const std::uint8_t form = from.below(8);
      if (form < 3) one = frame_of(form == 0 ? from.below(32) : std::uint64_t{from.word()} << 32 | from.word());
      if (form > 4) one.assign(from.byte(), from.byte());
    }
    send(socket, frames);
    const bool has_delimiter = frames.size() == 2 && frames[0].empty();
    // One after another: answers that nobody fetches are dropped past a whole replay.
    if ((frames.size() == 1 || has_delimiter) && frames.back().size() == 8) {
      expect_replay(socket, number_of(frames.back()));
    }
  }
  send(socket, {{}, frame_of(1)});
  expect_replay(socket, 1);
  // Any request for what was, and is not kept, is one for a snapshot: number 1 at least.
  if (!running.publisher.snapshot_wanted()) flaw("a request for what is not kept asks for no snapshot");
}
