// SPDX-License-Identifier: Apache-2.0
// Events and uploads over a pretended CUDA runtime: which calls they make, what never waits, and how they take
// failures.
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/cache_engine.hpp>
#include <bifolio/cuda.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cuda/fake_runtime.hpp"
#include "cuda/host/backend.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

/// Two devices of one runtime, device 1 current.
struct two_devices {
  fake_runtime runtime;
  cuda::cuda_backend opened{runtime.api(), 0};
  cuda::cuda_backend opened_too{runtime.api(), 1};
  backend& where = opened;
  backend& other = opened_too;

  two_devices() {
    runtime.current_device = 1;
    runtime.forget_counts();
  }
  [[nodiscard]] bool done(const event& point, errc expected = errc::ok) const {
    bool answer = false;
    CHECK(point.query(answer) == expected);
    return answer;
  }
};

/// A step of `num_seqs` sequences whose arrays differ from those of every other number.
step_batch batch_of(std::int32_t num_seqs) {
  step_batch batch;
  batch.query_start_loc.push_back(0);
  batch.block_table_stride = 3;
  for (std::int32_t i = 0; i < num_seqs; ++i) {
    batch.seq_lens.push_back(1000 * num_seqs + i);
    batch.query_start_loc.push_back(i + 1);
    for (std::int32_t j = 0; j < 3; ++j) batch.block_tables.push_back(i * 10 + j + num_seqs);
    batch.slot_mapping.push_back(7000000000 + 100 * num_seqs + i);
  }
  return batch;
}

bool equals(const device_step_view& on_device, const step_batch& batch) {
  const auto same = [](const auto* copied, const auto& original) {
    return std::equal(original.begin(), original.end(), copied);
  };
  return same(on_device.query_start_loc, batch.query_start_loc) && same(on_device.seq_lens, batch.seq_lens) &&
         same(on_device.block_tables, batch.block_tables) && same(on_device.slot_mapping, batch.slot_mapping);
}

const cache_engine_config small{1, 4, make_layout(layout_kind::hnd, dtype::f16, 1, 8, 4)};

}  // namespace

TEST_CASE("an event is made once, without timing, on its own device, and given back") {
  two_devices w;
  {
    event point = w.where.make_event();
    CHECK(!point.empty());
    CHECK(point.state()->where() == device{device_type::cuda, 0});
    CHECK(w.runtime.event_flags == cudaEventDisableTiming);
    CHECK(w.runtime.live_events == 1);
    CHECK(w.done(point));  // never recorded
    for (int i = 0; i < 10; ++i) CHECK(w.where.record(point) == errc::ok);
    event moved(std::move(point));
    CHECK(point.empty());
    CHECK(w.where.record(moved) == errc::ok);
    CHECK(w.runtime.count("event_create") == 1);
    CHECK(w.runtime.live_events == 1);
  }
  CHECK(w.runtime.live_events == 0);
  CHECK(w.runtime.current_device == 1);

  w.runtime.fail_at(1, cudaErrorMemoryAllocation);
  try {
    (void)w.where.make_event();
    FAIL("an event that failed was made");
  } catch (const error& problem) {
    CHECK(problem.code() == errc::out_of_memory);
    CHECK(std::string(problem.what()).find("an event cannot be created") != std::string::npos);
  }
  CHECK(w.runtime.live_events == 0);
  CHECK(w.runtime.last_error == cudaSuccess);
  CHECK(w.runtime.current_device == 1);
}

TEST_CASE("an event outlives its backend") {
  fake_runtime runtime;
  event point;
  {
    cuda::cuda_backend opened(runtime.api(), 0);
    point = static_cast<backend&>(opened).make_event();
  }
  CHECK(point.synchronize() == errc::ok);
  point = event();
  CHECK(runtime.live_events == 0);
}

TEST_CASE("a query says whether the stream has come that far, waits for nothing and leaves the last-error slot clean") {
  two_devices w;
  event point = w.where.make_event();
  w.runtime.streams_stopped = true;
  REQUIRE(w.where.record(point) == errc::ok);
  CHECK(!w.done(point));
  CHECK(!w.done(point));
  CHECK(w.runtime.last_error == cudaSuccess);
  CHECK(w.where.health() == errc::ok);
  CHECK(w.runtime.count("event_synchronize") == 0);
  CHECK(w.runtime.count("stream_synchronize") == 0);
  CHECK(point.synchronize() == errc::ok);
  CHECK(w.done(point));
  CHECK(w.runtime.count("event_synchronize") == 1);
}

TEST_CASE("a CUDA stream waits for events of any CUDA device by itself, for others on the host") {
  two_devices w;
  event here = w.where.make_event();
  event there = w.other.make_event();
  w.runtime.forget_counts();
  CHECK(w.where.wait(here) == errc::ok);
  CHECK(w.where.wait(there) == errc::ok);
  CHECK(w.other.wait(here) == errc::ok);
  CHECK(w.runtime.count("stream_wait_event") == 3);
  CHECK(w.runtime.count("event_synchronize") == 0);

  // Two backends of one device use each other's events; another device's cannot be recorded.
  cuda::cuda_backend twin(w.runtime.api(), 0);
  CHECK(static_cast<backend&>(twin).record(here) == errc::ok);
  CHECK(w.where.record(there) == errc::invalid_argument);

  const auto cpu = make_backend();
  event host = cpu->make_event();
  CHECK(w.where.record(host) == errc::invalid_argument);
  CHECK(cpu->record(here) == errc::invalid_argument);
  w.runtime.forget_counts();
  CHECK(w.where.wait(host) == errc::ok);  // always done
  CHECK(w.runtime.count("stream_wait_event") == 0);
  w.runtime.streams_stopped = true;
  REQUIRE(w.where.record(here) == errc::ok);
  CHECK(cpu->wait(here) == errc::ok);
  CHECK(w.runtime.count("event_synchronize") == 1);
  CHECK(w.done(here));
}

TEST_CASE("the event of a lost device is refused by everyone, and the others stay healthy") {
  two_devices w;
  const auto cpu = make_backend();
  event there = w.other.make_event();
  event here = w.where.make_event();
  w.runtime.fail_at(1, cudaErrorLaunchFailure);
  CHECK(there.synchronize() == errc::device_lost);
  CHECK(w.other.health() == errc::device_lost);
  w.runtime.forget_counts();
  CHECK(w.where.wait(there) == errc::device_lost);
  CHECK(cpu->wait(there) == errc::device_lost);
  CHECK(w.other.wait(here) == errc::device_lost);
  CHECK(w.other.record(there) == errc::device_lost);
  CHECK(!w.done(there, errc::device_lost));
  for (const char* name : {"event_record", "event_query", "event_synchronize", "stream_wait_event"}) {
    CHECK(w.runtime.count(name) == 0);
  }
  CHECK(w.where.health() == errc::ok);
  CHECK(w.where.wait(here) == errc::ok);
  CHECK_THROWS_WITH_AS((void)w.other.make_event(), doctest::Contains("cudaErrorLaunchFailure"), error);
  CHECK(w.runtime.last_error == cudaSuccess);
}

TEST_CASE("four steps in flight: uploads make no call that waits, the fifth waits for the first copy") {
  two_devices w;
  cache_engine engine(w.where, small);
  engine.reserve_upload(16, 16, 3);
  w.runtime.streams_stopped = true;
  w.runtime.forget_counts();
  const void* place = nullptr;
  for (std::int32_t step = 1; step <= 4; ++step) {
    const step_batch batch = batch_of(step);
    const device_step_view view = engine.upload(batch);
    CHECK(equals(view, batch));
    if (place == nullptr) place = view.query_start_loc;
    CHECK(view.query_start_loc == place);
  }
  CHECK(w.runtime.count("memcpy_async") == 4);
  for (const char* name : {"event_synchronize", "stream_synchronize", "event_create", "malloc_device", "malloc_host"}) {
    CAPTURE(std::string(name));
    CHECK(w.runtime.count(name) == 0);
  }
  CHECK(w.runtime.events_not_ready.size() == 4);
  (void)engine.upload(batch_of(5));
  CHECK(w.runtime.count("event_synchronize") == 1);
  CHECK(w.runtime.count("stream_synchronize") == 0);
  CHECK(w.runtime.last_error == cudaSuccess);
  CHECK(w.runtime.current_device == 1);
}

TEST_CASE("whichever call of an upload fails, the step is uploaded, or the one before is still there") {
  for (const bool grows : {false, true}) {
    CAPTURE(grows);
    int num_refused = 0;
    for (std::int64_t nth = 1;; ++nth) {
      REQUIRE(nth < 50);
      CAPTURE(nth);
      two_devices w;
      {
        cache_engine engine(w.where, small);
        w.runtime.streams_stopped = true;
        std::vector<step_batch> steps;
        device_step_view view;
        for (std::int32_t step = 1; step <= 4; ++step) {
          steps.push_back(batch_of(step));
          view = engine.upload(steps.back());
        }
        const step_batch next = batch_of(grows ? 900 : 9);
        const std::int64_t device_blocks = w.runtime.live_device_blocks;
        const std::int64_t host_blocks = w.runtime.live_host_blocks;
        w.runtime.fail_at(nth, cudaErrorInvalidValue);
        bool refused = false;
        try {
          CHECK(equals(engine.upload(next), next));
        } catch (const error& problem) {
          refused = true;
          CHECK(problem.code() == errc::invalid_argument);
          CHECK(equals(view, steps.back()));
        }
        const bool failed = w.runtime.fail_at(0, cudaSuccess) == 0;
        CHECK(w.runtime.last_error == cudaSuccess);
        CHECK(w.runtime.live_device_blocks == device_blocks);
        CHECK(w.runtime.live_host_blocks == host_blocks);
        for (std::int32_t step = 1; step <= 6; ++step) {
          const step_batch later = batch_of(step);
          CHECK(equals(engine.upload(later), later));
        }
        num_refused += refused ? 1 : 0;
        if (!failed) break;  // there were fewer calls
      }
      CHECK(w.runtime.live_device_blocks == 0);
      CHECK(w.runtime.live_host_blocks == 0);
      CHECK(w.runtime.live_events == 0);
    }
    // Waiting for the oldest copy, and the copy itself; to grow: the stream, four copies, two allocations, and the
    // copy. Without an event, or an answer from it, the upload waits for the stream and goes on.
    CHECK(num_refused == (grows ? 8 : 2));
  }
}

TEST_CASE("an upload in a stream that captures is refused, and the engine goes on after the capture") {
  two_devices w;
  cache_engine engine(w.where, small);
  engine.reserve_upload(16, 16, 3);
  w.runtime.capture = cudaStreamCaptureStatusActive;
  try {
    (void)engine.upload(batch_of(3));
    FAIL("an upload was captured");
  } catch (const error& problem) {
    CHECK(problem.code() == errc::failed_precondition);
  }
  w.runtime.capture = cudaStreamCaptureStatusNone;
  w.runtime.streams_stopped = true;
  for (std::int32_t step = 1; step <= 9; ++step) {
    const step_batch batch = batch_of(step);
    CHECK(equals(engine.upload(batch), batch));
  }
  CHECK(w.runtime.last_error == cudaSuccess);
  CHECK(w.where.health() == errc::ok);
}
