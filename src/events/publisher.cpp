// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <bifolio/error.hpp>
#include <bifolio/kv_event_publisher.hpp>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <deque>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>
#include <zmq.hpp>

#include "common/base/log.hpp"
#include "common/base/refuse.hpp"
#include "common/base/require.hpp"
#include "common/base/translate.hpp"

namespace bifolio::inline v0_2 {
namespace {

constexpr std::uint64_t end_of_replay = UINT64_MAX;  // −1

zmq::message_t number_frame(std::uint64_t number) {
  zmq::message_t frame(8);
  for (int i = 0; i < 8; ++i) frame.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(number >> (56 - 8 * i));
  return frame;
}

std::uint64_t number_of(const zmq::message_t& frame) {
  std::uint64_t number = 0;
  for (std::size_t i = 0; i < 8; ++i) number = number << 8 | frame.data<std::uint8_t>()[i];
  return number;
}

/// A call that a signal interrupts is made again: between the frames of a message giving up would join what is left of
/// it to the next one.
template <class Call>
auto whatever_signals(const Call& call) {
  for (;;) {
    try {
      return call();
    } catch (const zmq::error_t& problem) {
      if (problem.num() != EINTR) throw;
    }
  }
}
zmq::send_result_t send(zmq::socket_t& socket, zmq::message_t& frame, zmq::send_flags flags) {
  return whatever_signals([&] { return socket.send(frame, flags); });
}
/// The last frame.
void send(zmq::socket_t& socket, zmq::message_t& frame) { (void)send(socket, frame, zmq::send_flags::none); }
zmq::recv_result_t receive(zmq::socket_t& socket, zmq::message_t& frame, zmq::recv_flags flags = {}) {
  return whatever_signals([&] { return socket.recv(frame, flags); });
}

/// Signals are for the program's own threads, and the new thread inherits the mask.
template <class Function>
std::thread thread_without_signals(Function function) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  const auto restore = [&] { ::pthread_sigmask(SIG_SETMASK, &before, nullptr); };
  try {
    std::thread made(std::move(function));
    restore();
    return made;
  } catch (...) {
    restore();
    throw;
  }
}

void bind(zmq::socket_t& socket, const std::string& endpoint) {
  try {
    socket.bind(endpoint);
  } catch (const zmq::error_t& problem) {
    detail::refuse(errc::unsupported, "the endpoint '", endpoint, "' cannot be bound: ", std::string(problem.what()));
  }
}

std::uint64_t first_number_of(const kv_event_publisher_options& options) {
  if (options.first_number != 0) return options.first_number;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(now).count());
}

}  // namespace

struct kv_event_publisher::state {
  explicit state(const kv_event_publisher_options& given)
      : options(given),
        next_number(first_number_of(given)),
        sent(context, zmq::socket_type::pub),
        replays(context, zmq::socket_type::router),
        inside(context, zmq::socket_type::pull),
        given_batches(context, zmq::socket_type::push) {
    sent.set(zmq::sockopt::sndhwm, options.high_water_mark);
    sent.set(zmq::sockopt::linger, 1000);
    replays.set(zmq::sockopt::linger, 0);
    // A whole replay and its end; what is more is dropped. Twice as many, since ZeroMQ learns that messages were
    // fetched only when half of this number were.
    replays.set(zmq::sockopt::sndhwm, options.num_kept < INT32_MAX / 2 ? 2 * (options.num_kept + 1) : 0);
    inside.set(zmq::sockopt::rcvhwm, 0);
    given_batches.set(zmq::sockopt::sndhwm, 0);
    given_batches.set(zmq::sockopt::linger, 0);
    bind(sent, options.endpoint);
    endpoint = sent.get(zmq::sockopt::last_endpoint);
    if (!options.replay_endpoint.empty()) {
      bind(replays, options.replay_endpoint);
      replay_endpoint = replays.get(zmq::sockopt::last_endpoint);
    }
    bind(inside, "inproc://batches");
    given_batches.connect("inproc://batches");
    thread = thread_without_signals([this] { run(); });
  }

  /// The thread: sends what comes in, and answers requests, until an empty message. When ZeroMQ fails for good it ends,
  /// and `publish` refuses what nobody would send.
  void run() {
    for (;;) {
      try {
        zmq::pollitem_t items[] = {{inside.handle(), 0, ZMQ_POLLIN, 0}, {replays.handle(), 0, ZMQ_POLLIN, 0}};
        zmq::poll(items, 2, std::chrono::milliseconds(-1));
        if ((items[0].revents & ZMQ_POLLIN) != 0 && !send_next()) return;
        if ((items[1].revents & ZMQ_POLLIN) != 0) answer();
      } catch (const zmq::error_t& problem) {
        // Without memory a batch or an answer is lost: listeners see the gap.
        if (problem.num() == EINTR || problem.num() == EHOSTUNREACH || problem.num() == ENOMEM) continue;
        failure.store(problem.num());
        if (detail::is_logging()) log_end(problem);
        return;
      } catch (const std::bad_alloc&) {  // the same
      }
    }
  }

  static void log_end(const zmq::error_t& problem) noexcept {
    try {
      detail::log(log_level::error, std::string("no more events of the cache are sent: ") + problem.what());
    } catch (const std::bad_alloc&) {  // `publish` says it
    }
  }

  bool send_next() {
    zmq::message_t number, batch, copy,
        topic(options.topic);  // before a frame is read: what is left would be the next batch
    (void)receive(inside, number);
    if (number.size() != 8) return false;
    (void)receive(inside, batch);
    copy.copy(batch);
    kept.emplace_back(number_of(number), std::move(copy));
    if (kept.size() > static_cast<std::size_t>(options.num_kept)) kept.pop_front();
    (void)send(sent, topic, zmq::send_flags::sndmore);
    (void)send(sent, number, zmq::send_flags::sndmore);
    send(sent, batch);
    return true;
  }

  /// A request is [identity, (empty,) number]; whatever else comes is not answered.
  void answer() {
    std::vector<zmq::message_t> frames;
    do {
      frames.emplace_back();
      if (!receive(replays, frames.back(), zmq::recv_flags::dontwait)) return;
    } while (frames.back().more());
    const bool has_delimiter = frames.size() == 3 && frames[1].size() == 0;
    if ((frames.size() != 2 && !has_delimiter) || frames.back().size() != 8) return;
    const std::uint64_t from = number_of(frames.back());
    if (from < next_number && (kept.empty() || from < kept.front().first)) is_snapshot_wanted = true;
    const auto reply = [&](zmq::message_t number, zmq::message_t batch) {
      zmq::message_t identity, delimiter;
      identity.copy(frames.front());
      // dontwait: a listener that is gone is no reason to wait.
      if (!send(replays, identity, zmq::send_flags::sndmore | zmq::send_flags::dontwait)) return;
      (void)send(replays, delimiter, zmq::send_flags::sndmore);
      (void)send(replays, number, zmq::send_flags::sndmore);
      send(replays, batch);
    };
    for (auto& [number, batch] : kept) {
      if (number < from) continue;
      zmq::message_t copy;
      copy.copy(batch);
      reply(number_frame(number), std::move(copy));
    }
    reply(number_frame(end_of_replay), zmq::message_t());
  }

  kv_event_publisher_options options;
  std::atomic<std::uint64_t> next_number;
  std::atomic<bool> is_snapshot_wanted{false};
  std::atomic<int> failure{0};  // ZeroMQ's number of what ended the thread
  std::string endpoint;
  std::string replay_endpoint;
  zmq::context_t context;
  // Of the thread, once it runs.
  zmq::socket_t sent;
  zmq::socket_t replays;
  zmq::socket_t inside;
  std::deque<std::pair<std::uint64_t, zmq::message_t>> kept;
  zmq::socket_t given_batches;  // of the caller
  std::thread thread;
};

kv_event_publisher::kv_event_publisher(const kv_event_publisher_options& options) {
  detail::require_between("num_kept", options.num_kept, 1, INT32_MAX - 1);
  detail::require_between("high_water_mark", options.high_water_mark, 0, INT32_MAX);
  try {
    detail::translate_bad_alloc("kv_event_publisher", [&] { state_ = std::make_unique<state>(options); });
  } catch (const zmq::error_t& problem) {
    detail::refuse(errc::unsupported, "ZeroMQ gives no socket: ", problem.what());
  } catch (const std::system_error& problem) {
    detail::refuse(errc::unsupported, "the system gives no thread: ", problem.what());
  }
}

kv_event_publisher::~kv_event_publisher() {
  try {
    zmq::message_t end;
    send(state_->given_batches, end);
  } catch (const zmq::error_t&) {  // cannot be: the queue inside the process has no limit
  }
  state_->thread.join();
}

std::uint64_t kv_event_publisher::publish(std::string_view batch) {
  if (const int failure = state_->failure.load(); failure != 0) {
    detail::refuse(errc::failed_precondition, "nothing is sent any more: ", zmq_strerror(failure));
  }
  return detail::translate_bad_alloc("publish", [&] {
    try {
      // Both before the first is sent: half of a message would be the beginning of the next one.
      zmq::message_t payload(batch.data(), batch.size());
      zmq::message_t number = number_frame(state_->next_number);
      (void)send(state_->given_batches, number, zmq::send_flags::sndmore);
      send(state_->given_batches, payload);
    } catch (const zmq::error_t&) {  // of an allocation; the queue inside the process has no limit
      throw std::bad_alloc();
    }
    return state_->next_number++;
  });
}

bool kv_event_publisher::snapshot_wanted() noexcept { return state_->is_snapshot_wanted.exchange(false); }

const std::string& kv_event_publisher::endpoint() const noexcept { return state_->endpoint; }
const std::string& kv_event_publisher::replay_endpoint() const noexcept { return state_->replay_endpoint; }

}  // namespace bifolio::inline v0_2
