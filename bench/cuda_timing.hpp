// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Time of work on a CUDA stream: several calls captured into one graph, replayed, measured with events.

#include <bifolio/device.hpp>
#include <cstdint>
#include <functional>

#include "report.hpp"

namespace bifolio::bench {

class graph_timer {
 public:
  /// Makes the device current for the thread. Throws `error`.
  explicit graph_timer(std::int32_t device_index);
  ~graph_timer();
  graph_timer(const graph_timer&) = delete;
  graph_timer& operator=(const graph_timer&) = delete;

  [[nodiscard]] stream_ref stream() const noexcept { return {stream_}; }

  /// Seconds of one call: `enqueue(i)` puts the i-th of `calls` into `stream()`; the graph of all is replayed at least
  /// `repeats` times and for `seconds`. Throws `error`.
  [[nodiscard]] summary time(std::int32_t calls, const std::function<void(std::int32_t)>& enqueue, std::int32_t repeats,
                             double seconds);
  /// The same without a graph: median seconds of one of `calls` calls in a row. For long calls only.
  [[nodiscard]] double time_calls(std::int32_t calls, std::int32_t repeats, const std::function<void()>& enqueue);

 private:
  void* stream_ = nullptr;
  void* start_ = nullptr;
  void* stop_ = nullptr;
};

/// Memory on the device that is filled with ordinary numbers of `type`.
void fill_on_device(void* data, std::size_t num_bytes, int type, std::uint64_t seed);

/// GB/s of each, measured with `timer` over buffers of `num_bytes`.
struct memory_speeds {
  double read = 0;
  double set = 0;
  double copy = 0;  ///< bytes read and bytes written
};
[[nodiscard]] memory_speeds measure_memory(graph_timer& timer, std::size_t num_bytes, double seconds);

/// A run of memory that one warp reads at a time.
struct gather_chunk {
  const void* data = nullptr;  ///< aligned to 16 bytes
  std::int32_t num_loads = 0;  ///< of 16 bytes, up to gather_chunk_bytes / 16
  std::int32_t unused = 0;
};
inline constexpr std::int64_t gather_chunk_bytes = 4096;

/// Reading shuffled blocks of K and V: the calls of `timer.time` take turns among `num_sets` lists of chunks. Addresses
/// come from a table, so that nothing but loads is in the way: a floor of what attention over the same blocks can take.
struct gather_work {
  const gather_chunk* chunks = nullptr;  ///< [num_sets, chunks_per_set] on the device
  std::int64_t chunks_per_set = 0;
  std::int64_t bytes_per_set = 0;
  std::int32_t num_sets = 1;
};
[[nodiscard]] double measure_gather(graph_timer& timer, const gather_work& work, double seconds);

/// Throws `error` for a cudaError_t that is not success.
void require_launched(int status);

// Kernels, in cuda_probe_kernels.cu; each returns a cudaError_t.
int launch_read(const void* data, std::size_t num_bytes, void* sink, void* stream);
/// 1.5 us on every SM, without programmatic launch.
int launch_filler(void* stream);
int launch_gather(const gather_work& work, std::int32_t set, void* sink, void* stream);

}  // namespace bifolio::bench
