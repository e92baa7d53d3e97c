// SPDX-License-Identifier: Apache-2.0
#include "cuda_timing.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bifolio/error.hpp>
#include <chrono>
#include <string>
#include <vector>

#include "attention_setting.hpp"
#include "probe.hpp"

namespace bifolio::bench {
namespace {

void require(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw error(status == cudaErrorMemoryAllocation ? errc::out_of_memory : errc::internal,
              std::string(what) + ": " + cudaGetErrorString(status));
}

/// Device memory for the length of a measurement.
class device_block {
 public:
  explicit device_block(std::size_t num_bytes) { require(cudaMalloc(&data_, num_bytes), "no device memory"); }
  ~device_block() { (void)cudaFree(data_); }
  device_block(const device_block&) = delete;
  device_block& operator=(const device_block&) = delete;
  [[nodiscard]] void* data() const noexcept { return data_; }

 private:
  void* data_ = nullptr;
};

}  // namespace

graph_timer::graph_timer(std::int32_t device_index) {
  require(cudaSetDevice(device_index), "the device cannot be opened");
  cudaStream_t stream = nullptr;
  cudaEvent_t start = nullptr;
  cudaEvent_t stop = nullptr;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "no stream");
  require(cudaEventCreate(&start), "no event");
  require(cudaEventCreate(&stop), "no event");
  stream_ = stream;
  start_ = start;
  stop_ = stop;
}

graph_timer::~graph_timer() {
  (void)cudaEventDestroy(static_cast<cudaEvent_t>(start_));
  (void)cudaEventDestroy(static_cast<cudaEvent_t>(stop_));
  (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
}

summary graph_timer::time(std::int32_t calls, const std::function<void(std::int32_t)>& enqueue, std::int32_t repeats,
                          double seconds) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  enqueue(0);  // loads kernels, and shows errors outside of the capture
  require(cudaStreamSynchronize(stream), "the first call failed");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "no capture");
  for (std::int32_t i = 0; i < calls; ++i) enqueue(i);
  require(cudaStreamEndCapture(stream, &graph), "the capture failed");
  require(cudaGraphInstantiate(&executable, graph, 0), "the graph cannot be made");
  std::vector<double> samples;
  const auto begin = std::chrono::steady_clock::now();
  for (std::int32_t i = 0; static_cast<std::int32_t>(samples.size()) < repeats || seconds_since(begin) < seconds; ++i) {
    require(cudaEventRecord(static_cast<cudaEvent_t>(start_), stream), "an event failed");
    require(cudaGraphLaunch(executable, stream), "a replay failed");
    require(cudaEventRecord(static_cast<cudaEvent_t>(stop_), stream), "an event failed");
    require(cudaEventSynchronize(static_cast<cudaEvent_t>(stop_)), "a replay failed");
    float milliseconds = 0;
    require(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(start_), static_cast<cudaEvent_t>(stop_)),
            "an event failed");
    if (i >= 2) samples.push_back(static_cast<double>(milliseconds) * 1e-3 / calls);
  }
  (void)cudaGraphExecDestroy(executable);
  (void)cudaGraphDestroy(graph);
  return summarize(samples);
}

double graph_timer::time_calls(std::int32_t calls, std::int32_t repeats, const std::function<void()>& enqueue) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  std::vector<double> samples;
  for (std::int32_t i = 0; i < repeats; ++i) {
    require(cudaEventRecord(static_cast<cudaEvent_t>(start_), stream), "an event failed");
    for (std::int32_t call = 0; call < calls; ++call) enqueue();
    require(cudaEventRecord(static_cast<cudaEvent_t>(stop_), stream), "an event failed");
    require(cudaEventSynchronize(static_cast<cudaEvent_t>(stop_)), "a call failed");
    float milliseconds = 0;
    require(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(start_), static_cast<cudaEvent_t>(stop_)),
            "an event failed");
    if (i >= 2) samples.push_back(static_cast<double>(milliseconds) * 1e-3 / calls);
  }
  return summarize(samples).median;
}

void fill_on_device(void* data, std::size_t num_bytes, int type, std::uint64_t seed) {
  const auto element = size_of(static_cast<dtype>(type));
  // Of an odd length, so that no two blocks are alike; of codes one that leaves scales where they are.
  const std::size_t run = std::min(num_bytes, (std::size_t{32} << 20) - 37 * std::max(element, sizeof(float)));
  std::vector<std::byte> pattern(run);
  fill_values(pattern.data(), static_cast<dtype>(type), static_cast<std::int64_t>(run / element), seed);
  require(cudaMemcpy(data, pattern.data(), run, cudaMemcpyHostToDevice), "contents cannot be uploaded");
  for (std::size_t at = run; at < num_bytes; at += run) {
    require(
        cudaMemcpy(static_cast<std::byte*>(data) + at, data, std::min(run, num_bytes - at), cudaMemcpyDeviceToDevice),
        "contents cannot be copied");
  }
}

memory_speeds measure_memory(graph_timer& timer, std::size_t num_bytes, double seconds) {
  const device_block a(num_bytes);
  const device_block b(num_bytes);
  const device_block sink(64);
  const auto stream = static_cast<cudaStream_t>(timer.stream().handle);
  require(cudaMemset(a.data(), 1, num_bytes), "memory cannot be set");
  const auto gb = static_cast<double>(num_bytes) * 1e-9;
  memory_speeds speeds;
  const auto timed = [&](const std::function<void(std::int32_t)>& call) {
    return timer.time(4, call, 10, seconds).median;
  };
  speeds.read = gb / timed([&](std::int32_t) {
                  require(static_cast<cudaError_t>(launch_read(a.data(), num_bytes, sink.data(), stream)), "read");
                });
  speeds.set = gb / timed([&](std::int32_t i) { require(cudaMemsetAsync(b.data(), i, num_bytes, stream), "memset"); });
  // Not in a graph, whose copies between device buffers were seen at 2.7 instead of 4.2 TB/s.
  speeds.copy = 2 * gb / timer.time_calls(4, 10, [&] {
    require(cudaMemcpyAsync(b.data(), a.data(), num_bytes, cudaMemcpyDeviceToDevice, stream), "memcpy");
  });
  return speeds;
}

void require_launched(int status) { require(static_cast<cudaError_t>(status), "a kernel was not launched"); }

double measure_gather(graph_timer& timer, const gather_work& work, double seconds) {
  const device_block sink(64);
  const summary time = timer.time(
      std::clamp(work.num_sets, 4, 512),
      [&](std::int32_t call) {
        require_launched(launch_gather(work, call % work.num_sets, sink.data(), timer.stream().handle));
      },
      5, seconds);
  return static_cast<double>(work.bytes_per_set) / time.median * 1e-9;
}

}  // namespace bifolio::bench
