// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <sys/time.h>

#include <bifolio/error.hpp>
#include <bifolio/kv_event_publisher.hpp>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <utility>
#include <vector>
#include <zmq.hpp>

namespace bifolio::test {
namespace {

using batch = std::pair<std::uint64_t, std::string>;

std::uint64_t number_of(const zmq::message_t& frame) {
  REQUIRE(frame.size() == 8);
  std::uint64_t number = 0;
  for (std::size_t i = 0; i < 8; ++i) number = number << 8 | frame.data<std::uint8_t>()[i];
  return number;
}

std::string frame_of(std::uint64_t number) {
  std::string frame;
  for (int shift = 56; shift >= 0; shift -= 8) frame.push_back(static_cast<char>(number >> shift));
  return frame;
}

/// Three frames, or REQUIRE fails after some seconds.
batch receive(zmq::socket_t& socket, const std::string& first) {
  zmq::message_t topic, number, payload;
  REQUIRE(socket.recv(topic));
  CHECK(topic.to_string() == first);
  REQUIRE(socket.recv(number));
  REQUIRE(socket.recv(payload));
  CHECK(!payload.more());
  return {number_of(number), payload.to_string()};
}

zmq::socket_t connected(zmq::context_t& context, zmq::socket_type type, const std::string& endpoint) {
  zmq::socket_t socket(context, type);
  socket.set(zmq::sockopt::rcvtimeo, 10000);
  socket.set(zmq::sockopt::linger, 0);
  if (type == zmq::socket_type::sub) socket.set(zmq::sockopt::subscribe, "");
  socket.connect(endpoint);
  return socket;
}

/// Publishes until the subscriber, whose subscription takes its time, gets something; its number.
std::uint64_t wait_for_subscriber(kv_event_publisher& publisher, zmq::socket_t& subscriber, const std::string& topic) {
  zmq::pollitem_t item{subscriber.handle(), 0, ZMQ_POLLIN, 0};
  std::uint64_t last = 0;
  for (int i = 0; i < 1000; ++i) {
    last = publisher.publish("are you there");
    if (zmq::poll(&item, 1, std::chrono::milliseconds(10)) > 0) break;
  }
  while (receive(subscriber, topic).first != last) {
  }
  return last;
}

/// What a listener gets that asks for the batches from `first` on.
std::vector<batch> replayed(zmq::socket_t& dealer, std::uint64_t first, bool with_delimiter) {
  if (with_delimiter) (void)dealer.send(zmq::message_t(), zmq::send_flags::sndmore);
  (void)dealer.send(zmq::buffer(frame_of(first)), zmq::send_flags::none);
  std::vector<batch> got;
  for (;;) {
    got.push_back(receive(dealer, ""));
    if (got.back().first == UINT64_MAX) break;
  }
  CHECK(got.back().second.empty());
  got.pop_back();
  return got;
}

}  // namespace

TEST_CASE("batches arrive in order with numbers that follow one another, and are replayed from the one asked for") {
  kv_event_publisher publisher(
      {.endpoint = "tcp://127.0.0.1:*", .replay_endpoint = "tcp://127.0.0.1:*", .topic = "kv"});
  CHECK(publisher.endpoint().substr(0, 16) == "tcp://127.0.0.1:");
  zmq::context_t context;
  zmq::socket_t subscriber = connected(context, zmq::socket_type::sub, publisher.endpoint());
  const std::uint64_t last = wait_for_subscriber(publisher, subscriber, "kv");
  for (int i = 0; i < 100; ++i)
    CHECK(publisher.publish("batch " + std::to_string(i)) == last + 1 + static_cast<unsigned>(i));
  for (int i = 0; i < 100; ++i) {
    CHECK(receive(subscriber, "kv") == batch{last + 1 + static_cast<unsigned>(i), "batch " + std::to_string(i)});
  }
  zmq::socket_t dealer = connected(context, zmq::socket_type::dealer, publisher.replay_endpoint());
  for (const bool with_delimiter : {true, false}) {
    const std::vector<batch> got = replayed(dealer, last + 98, with_delimiter);
    REQUIRE(got.size() == 3);
    CHECK(got[0] == batch{last + 98, "batch 97"});
    CHECK(got[2] == batch{last + 100, "batch 99"});
  }
  CHECK(replayed(dealer, last + 101, true).empty());
  CHECK(!publisher.snapshot_wanted());
  // What is no request is not answered and harms nothing.
  (void)dealer.send(zmq::buffer(std::string("what?")), zmq::send_flags::none);
  CHECK(replayed(dealer, last + 100, true).size() == 1);
}

TEST_CASE("a request for a batch that is not kept says so, and numbers grow over a restart") {
  std::uint64_t before = 0;
  {
    kv_event_publisher publisher(
        {.endpoint = "tcp://127.0.0.1:*", .replay_endpoint = "tcp://127.0.0.1:*", .num_kept = 3});
    zmq::context_t context;
    zmq::socket_t dealer = connected(context, zmq::socket_type::dealer, publisher.replay_endpoint());
    std::uint64_t first = publisher.publish("0");
    for (int i = 1; i < 10; ++i) before = publisher.publish(std::to_string(i));
    std::vector<batch> got;
    for (int i = 0; i < 100 && (got.empty() || got.back().second != "9"); ++i) got = replayed(dealer, first, true);
    CHECK(got.size() == 3);
    CHECK(publisher.snapshot_wanted());
    CHECK(!publisher.snapshot_wanted());
  }
  kv_event_publisher again({.endpoint = "tcp://127.0.0.1:*"});
  CHECK(again.publish("cleared") > before);
}

TEST_CASE("a replay of everything that is kept is not cut short, however long") {
  constexpr int count = 6000;  // ZeroMQ's own limit of a queue is 1000
  kv_event_publisher publisher(
      {.endpoint = "tcp://127.0.0.1:*", .replay_endpoint = "tcp://127.0.0.1:*", .num_kept = count});
  std::uint64_t first = 0;
  const std::string filler(2000, '.');  // more in all than sockets buffer
  for (int i = 0; i < count; ++i) {
    const std::uint64_t number = publisher.publish(std::to_string(i) + filler);
    if (i == 0) first = number;
  }
  zmq::context_t context;
  zmq::socket_t dealer = connected(context, zmq::socket_type::dealer, publisher.replay_endpoint());
  std::vector<batch> got;
  for (int i = 0; i < 100 && got.size() != count; ++i) got = replayed(dealer, first, true);  // until all were taken in
  REQUIRE(got.size() == count);
  for (int i = 0; i < count; ++i) {
    REQUIRE(got[static_cast<std::size_t>(i)] ==
            batch{first + static_cast<std::uint64_t>(i), std::to_string(i) + filler});
  }
}

TEST_CASE("replays one after another on one connection are whole, each of them") {
  constexpr std::uint64_t count = 6;
  kv_event_publisher publisher(
      {.endpoint = "tcp://127.0.0.1:*", .replay_endpoint = "tcp://127.0.0.1:*", .num_kept = count, .first_number = 1});
  for (std::uint64_t i = 0; i < count; ++i) (void)publisher.publish(std::to_string(i));
  zmq::context_t context;
  {
    zmq::socket_t dealer = connected(context, zmq::socket_type::dealer, publisher.replay_endpoint());
    while (replayed(dealer, count, true).empty()) std::this_thread::yield();  // until all were taken in
  }
  // ZeroMQ learns late that messages were fetched, and how late depends on how many were before.
  for (std::uint64_t first = 1; first <= count; ++first) {
    zmq::socket_t dealer = connected(context, zmq::socket_type::dealer, publisher.replay_endpoint());
    CAPTURE(first);
    CHECK(replayed(dealer, first, true).size() == count + 1 - first);
    for (int again = 0; again < 20; ++again) REQUIRE(replayed(dealer, 1, true).size() == count);
  }
}

TEST_CASE("signals interrupt neither the thread that sends nor the one that publishes between the frames of a batch") {
  // Without SA_RESTART, every 50 microseconds, for whichever thread takes them.
  struct sigaction none = {}, before = {};
  none.sa_handler = [](int) {};
  REQUIRE(::sigaction(SIGALRM, &none, &before) == 0);
  sigset_t alarms;
  ::sigemptyset(&alarms);
  ::sigaddset(&alarms, SIGALRM);
  for (const bool for_publisher : {true, false}) {
    CAPTURE(for_publisher);
    kv_event_publisher publisher({.endpoint = "tcp://127.0.0.1:*", .replay_endpoint = "tcp://127.0.0.1:*"});
    zmq::context_t context;
    zmq::socket_t subscriber = connected(context, zmq::socket_type::sub, publisher.endpoint());
    std::uint64_t last = wait_for_subscriber(publisher, subscriber, "");
    if (for_publisher) ::pthread_sigmask(SIG_BLOCK, &alarms, nullptr);
    const itimerval often{{0, 50}, {0, 50}}, never{};
    REQUIRE(::setitimer(ITIMER_REAL, &often, nullptr) == 0);
    std::uint64_t num_published = 0;
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(400);
    for (; num_published < 50000 && std::chrono::steady_clock::now() < until; ++num_published)
      (void)publisher.publish("12345678");
    ::setitimer(ITIMER_REAL, &never, nullptr);
    ::pthread_sigmask(SIG_UNBLOCK, &alarms, nullptr);
    for (std::uint64_t i = 0; i < num_published; ++i) REQUIRE(receive(subscriber, "") == batch{++last, "12345678"});
  }
  ::sigaction(SIGALRM, &before, nullptr);
}

TEST_CASE("publishers refuse what they cannot bind, and wait for nobody") {
  CHECK_THROWS_AS(kv_event_publisher({.endpoint = "nonsense"}), error);
  CHECK_THROWS_AS(kv_event_publisher({.num_kept = 0}), error);
  const auto begin = std::chrono::steady_clock::now();
  {
    kv_event_publisher publisher({.endpoint = "tcp://127.0.0.1:*"});
    for (int i = 0; i < 10000; ++i) (void)publisher.publish(std::string(1000, 'x'));
  }
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
}

}  // namespace bifolio::test
