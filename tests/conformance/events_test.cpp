// SPDX-License-Identifier: Apache-2.0
// Events of every backend: what they promise without a stream of their own, and every misuse. What needs two streams,
// or a stream that is busy, is in tests/cuda.
#include <doctest/doctest.h>

#include <bifolio/backend.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/event.hpp>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "support/backends.hpp"

namespace {

using namespace bifolio;
using namespace bifolio::test;

bool answer_of(const event& point) {
  bool done = false;
  CHECK(point.query(done) == errc::ok);
  return done;
}

TEST_CASE("an event that is waited for covers all that its stream was given before") {
  for (const tested_backend* tested : one_per_family(0)) {
    CAPTURE(tested->name);
    backend& where = tested->get();
    constexpr std::size_t num_bytes = std::size_t{8} << 20;
    buffer device(where.memory(), num_bytes);
    buffer host(where.staging_memory(), num_bytes);
    buffer back(where.staging_memory(), num_bytes);
    event point = where.make_event();
    CHECK(!point.empty());
    CHECK(point.state()->where() == where.where());
    CHECK(answer_of(point));  // never recorded: nothing to wait for
    CHECK(point.synchronize() == errc::ok);
    CHECK(where.wait(point) == errc::ok);
    for (int round = 1; round < 6; ++round) {  // recorded again and again
      std::memset(host.data(), round, num_bytes);
      std::memset(back.data(), 0, num_bytes);
      REQUIRE(where.upload(device.data(), host.data(), num_bytes, {}) == errc::ok);
      REQUIRE(where.download(back.data(), device.data(), num_bytes, {}) == errc::ok);
      REQUIRE(where.record(point) == errc::ok);
      CHECK(where.wait(point) == errc::ok);
      if (round % 2 == 0) {
        CHECK(point.synchronize() == errc::ok);
      } else {
        while (!answer_of(point)) {
        }
      }
      CHECK(answer_of(point));
      CHECK(std::memcmp(back.data(), host.data(), num_bytes) == 0);
    }
  }
}

TEST_CASE("an empty event, one that was moved from and one of another device are refused") {
  for (const tested_backend* tested : one_per_family(1)) {
    CAPTURE(tested->name);
    backend& where = tested->get();
    event made = where.make_event();
    event taken = std::move(made);
    event never;
    for (event* empty : {&made, &never}) {
      CHECK(empty->empty());
      bool done = false;
      CHECK(empty->query(done) == errc::invalid_argument);
      CHECK(!done);
      CHECK(empty->synchronize() == errc::invalid_argument);
      CHECK(where.record(*empty) == errc::invalid_argument);
      CHECK(where.wait(*empty) == errc::invalid_argument);
    }
    CHECK(where.record(taken) == errc::ok);
    made = std::move(taken);
    CHECK(where.record(made) == errc::ok);
    CHECK(taken.empty());
    for (const tested_backend& other : all_backends()) {
      if (other.get().where() == where.where()) continue;
      CHECK(other.get().record(made) == errc::invalid_argument);
    }
  }
}

TEST_CASE("every backend waits for the events of every other one") {
  for (const tested_backend* first : one_per_family(2)) {
    for (const tested_backend* second : one_per_family(3)) {
      CAPTURE(first->name);
      CAPTURE(second->name);
      event point = first->get().make_event();
      REQUIRE(first->get().record(point) == errc::ok);
      CHECK(second->get().wait(point) == errc::ok);
      CHECK(point.synchronize() == errc::ok);
      CHECK(answer_of(point));
      // Backends of one device record each other's events.
      const bool one_device = first->get().where() == second->get().where();
      CHECK((second->get().record(point) == errc::ok) == one_device);
    }
  }
}

}  // namespace
