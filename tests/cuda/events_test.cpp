// SPDX-License-Identifier: Apache-2.0
// Events and uploads on a GPU, after copies that take long.
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/backend.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/cache_engine.hpp>
#include <bifolio/cuda.hpp>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/own_stream.hpp"
#include "support/skip.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

using clock_type = std::chrono::steady_clock;

double milliseconds_since(clock_type::time_point start) {
  return std::chrono::duration<double, std::milli>(clock_type::now() - start).count();
}

/// Keeps a stream busy: copies of 256 MiB to pinned memory, some 5 ms each over PCIe 5.
class long_copies {
 public:
  explicit long_copies(backend& where)
      : where_(&where), on_device_(where.memory(), num_bytes), on_host_(where.staging_memory(), num_bytes) {}

  void start(int num_copies, stream_ref stream) {
    for (int i = 0; i < num_copies; ++i) {
      REQUIRE(where_->download(on_host_.data(), on_device_.data(), num_bytes, stream) == errc::ok);
    }
  }

 private:
  static constexpr std::size_t num_bytes = std::size_t{256} << 20;
  backend* where_;
  buffer on_device_;
  buffer on_host_;
};

bool done(const event& point) {
  bool answer = false;
  REQUIRE(point.query(answer) == errc::ok);
  return answer;
}

/// A step whose arrays are those of no other number.
step_batch numbered_batch(std::int32_t number) {
  step_batch batch;
  batch.query_start_loc.push_back(0);
  batch.block_table_stride = 64;
  for (std::int32_t i = 0; i < 64; ++i) {
    batch.seq_lens.push_back(1000 * number + i);
    batch.query_start_loc.push_back(i + 1);
    for (std::int32_t j = 0; j < 64; ++j) batch.block_tables.push_back(100000 * number + 64 * i + j);
    batch.slot_mapping.push_back(7000000000 + 1000 * number + i);
  }
  return batch;
}

}  // namespace

TEST_CASE("an event is not done while its stream is busy, done afterwards, and a second stream waits for it alone") {
  if (cuda::num_devices() == 0) return skip("no CUDA device");
  const auto gpu = make_backend({device_type::cuda, 0});
  backend& where = *gpu;
  long_copies copies(where);
  own_stream first;
  own_stream second;
  buffer place(where.memory(), 64);
  buffer source(where.staging_memory(), 64);
  buffer seen(where.staging_memory(), 64);
  std::memset(source.data(), 0, 64);
  REQUIRE(where.upload(place.data(), source.data(), 64, first.ref()) == errc::ok);
  REQUIRE(where.synchronize(first.ref()) == errc::ok);
  std::memset(source.data(), 0x5a, 64);
  std::memset(seen.data(), 0, 64);
  event written = where.make_event();
  event later = where.make_event();
  CHECK(done(written));

  // first: long copies, then the mark, then more long copies. second: waits for the mark, and reads it.
  copies.start(8, first.ref());
  REQUIRE(where.upload(place.data(), source.data(), 64, first.ref()) == errc::ok);
  REQUIRE(where.record(written, first.ref()) == errc::ok);
  copies.start(8, first.ref());
  REQUIRE(where.record(later, first.ref()) == errc::ok);
  CHECK(!done(written));
  REQUIRE(where.wait(written, second.ref()) == errc::ok);
  event reached = where.make_event();
  REQUIRE(where.record(reached, second.ref()) == errc::ok);
  REQUIRE(where.download(seen.data(), place.data(), 64, second.ref()) == errc::ok);
  CHECK(!done(written));  // neither call has waited
  REQUIRE(reached.synchronize() == errc::ok);
  CHECK(done(written));
  CHECK(!done(later));                                   // what came after the mark was not waited for
  REQUIRE(where.synchronize(second.ref()) == errc::ok);  // its download may queue after the copies of the first stream
  CHECK(std::memcmp(seen.data(), source.data(), 64) == 0);
  CHECK(cudaPeekAtLastError() == cudaSuccess);

  // The host waits for one event, and a CPU backend does so as well.
  const auto cpu = make_backend();
  CHECK(cpu->wait(later) == errc::ok);
  CHECK(done(later));
  event host = cpu->make_event();
  CHECK(cpu->record(host) == errc::ok);
  CHECK(where.wait(host, first.ref()) == errc::ok);
}

TEST_CASE("a captured wait and record become edges of the graph, and the event cannot be asked") {
  if (cuda::num_devices() == 0) return skip("no CUDA device");
  const auto gpu = make_backend({device_type::cuda, 0});
  backend& where = *gpu;
  own_stream main_stream;
  own_stream side;
  buffer place(where.memory(), 64);
  buffer source(where.staging_memory(), 64);
  buffer seen(where.staging_memory(), 64);
  event fork = where.make_event();
  event join = where.make_event();
  const auto handle = static_cast<cudaStream_t>(main_stream.ref().handle);
  REQUIRE(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  CHECK(where.record(fork, main_stream.ref()) == errc::ok);
  CHECK(where.wait(fork, side.ref()) == errc::ok);
  CHECK(where.upload(place.data(), source.data(), 64, side.ref()) == errc::ok);
  CHECK(where.record(join, side.ref()) == errc::ok);
  CHECK(where.wait(join, main_stream.ref()) == errc::ok);
  CHECK(where.download(seen.data(), place.data(), 64, main_stream.ref()) == errc::ok);
  cudaGraph_t graph = nullptr;
  REQUIRE(cudaStreamEndCapture(handle, &graph) == cudaSuccess);
  cudaGraphExec_t executable = nullptr;
  REQUIRE(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
  for (int value = 1; value < 4; ++value) {
    std::memset(source.data(), value, 64);
    REQUIRE(cudaGraphLaunch(executable, handle) == cudaSuccess);
    REQUIRE(where.synchronize(main_stream.ref()) == errc::ok);
    CHECK(std::memcmp(seen.data(), source.data(), 64) == 0);
  }
  bool answer = false;
  CHECK(join.query(answer) == errc::failed_precondition);
  CHECK(!answer);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  (void)cudaGraphExecDestroy(executable);
  (void)cudaGraphDestroy(graph);
  // Recorded outside a capture, the event is an ordinary one again.
  CHECK(where.record(join, main_stream.ref()) == errc::ok);
  CHECK(join.synchronize() == errc::ok);
  CHECK(done(join));
}

TEST_CASE("four uploads after a long copy do not hold up the host, each step reads its own arrays, the fifth waits") {
  if (cuda::num_devices() == 0) return skip("no CUDA device");
  const auto gpu = make_backend({device_type::cuda, 0});
  backend& where = *gpu;
  long_copies copies(where);
  own_stream stream;
  constexpr std::int32_t num_steps = 5;
  const cache_engine_config config{1, 4, make_layout(layout_kind::hnd, dtype::f16, 1, 8, 4)};
  cache_engine engine(where, config);
  engine.reserve_upload(64, 64, 64, stream.ref());
  std::vector<step_batch> batches;
  std::vector<buffer> read;  // what the kernels of each step would read
  const std::size_t table_bytes = 64 * 64 * sizeof(std::int32_t);
  const std::size_t slot_bytes = 64 * sizeof(std::int64_t);
  for (std::int32_t step = 0; step < num_steps; ++step) {
    batches.push_back(numbered_batch(step + 1));
    read.emplace_back(where.staging_memory(), table_bytes + slot_bytes);
  }
  const auto submit = [&](std::size_t step) {
    const device_step_view view = engine.upload(batches[step], stream.ref());
    auto* const to = read[step].as<std::byte>();
    REQUIRE(where.download(to, view.block_tables, table_bytes, stream.ref()) == errc::ok);
    REQUIRE(where.download(to + table_bytes, view.slot_mapping, slot_bytes, stream.ref()) == errc::ok);
  };
  for (std::size_t step = 0; step < num_steps; ++step) submit(step);  // everything once, as in a running engine
  REQUIRE(where.synchronize(stream.ref()) == errc::ok);
  for (buffer& one : read) std::memset(one.data(), 0, one.num_bytes());

  const auto start = clock_type::now();
  copies.start(16, stream.ref());
  const double submitted = milliseconds_since(start);
  for (std::size_t step = 0; step < 4; ++step) submit(step);
  const double four_uploads = milliseconds_since(start) - submitted;
  submit(4);
  const double five_uploads = milliseconds_since(start) - submitted;
  REQUIRE(where.synchronize(stream.ref()) == errc::ok);
  const double all = milliseconds_since(start);

  const std::string figures = "the copies took " + std::to_string(all) + " ms; host time of four uploads behind them " +
                              std::to_string(four_uploads) + " ms, of the fifth " +
                              std::to_string(five_uploads - four_uploads) + " ms";
  MESSAGE(figures);
  CHECK_MESSAGE(four_uploads < 0.1 * all, figures);
  CHECK_MESSAGE(five_uploads > 0.5 * (all - submitted), figures);
  for (std::size_t step = 0; step < num_steps; ++step) {
    CAPTURE(step);
    CHECK(std::memcmp(read[step].data(), batches[step].block_tables.data(), table_bytes) == 0);
    CHECK(std::memcmp(read[step].as<std::byte>() + table_bytes, batches[step].slot_mapping.data(), slot_bytes) == 0);
  }
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE("an upload in a stream that captures is refused on a GPU, and the engine goes on") {
  if (cuda::num_devices() == 0) return skip("no CUDA device");
  const auto gpu = make_backend({device_type::cuda, 0});
  backend& where = *gpu;
  own_stream stream;
  const cache_engine_config config{1, 4, make_layout(layout_kind::hnd, dtype::f16, 1, 8, 4)};
  cache_engine engine(where, config);
  const step_batch batch = numbered_batch(1);
  (void)engine.upload(batch, stream.ref());
  const auto handle = static_cast<cudaStream_t>(stream.ref().handle);
  REQUIRE(cudaStreamBeginCapture(handle, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  try {
    (void)engine.upload(batch, stream.ref());
    FAIL("an upload was captured");
  } catch (const error& problem) {
    CHECK(problem.code() == errc::failed_precondition);
  }
  cudaGraph_t graph = nullptr;
  (void)cudaStreamEndCapture(handle, &graph);  // the refusal has ended it
  if (graph != nullptr) (void)cudaGraphDestroy(graph);
  (void)cudaGetLastError();
  for (int step = 0; step < 9; ++step) CHECK_NOTHROW((void)engine.upload(batch, stream.ref()));
  CHECK(where.synchronize(stream.ref()) == errc::ok);
  CHECK(where.health() == errc::ok);
}
