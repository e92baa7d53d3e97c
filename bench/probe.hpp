// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the machine can give at most: reading memory in order, and multiplying.

#include <bifolio/executor.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "report.hpp"

namespace bifolio::bench {

[[nodiscard]] inline double seconds_since(std::chrono::steady_clock::time_point start) noexcept {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Reads every byte of [begin, begin + num_bytes), in order, a cache line a load where there is AVX-512 and 16 bytes
/// elsewhere; lines `ahead` bytes on are prefetched unless that is 0. Returns a value made of all bytes.
[[nodiscard]] std::uint64_t read_bytes(const void* begin, std::size_t num_bytes, std::size_t ahead = 0) noexcept;

/// Keeps `value` alive in the eyes of the optimiser.
void consume(std::uint64_t value) noexcept;

/// Sequential reads of memory that the last-level cache does not hold, one contiguous part per worker.
class read_probe {
 public:
  /// Both are borrowed. A figure is to be compared with a probe of the memory that it was measured on: buffers of one
  /// process can differ by some per cent (docs/measurements/xeon-2026-11-22.md).
  read_probe(executor& workers, const void* memory, std::size_t num_bytes) noexcept
      : workers_(&workers), memory_(static_cast<const std::byte*>(memory)), num_bytes_(num_bytes) {}
  /// GB/s of passes over it for about `seconds`: the better median of those with loads alone and those that prefetch.
  [[nodiscard]] double gb_per_second(double seconds);

 private:
  executor* workers_;
  const std::byte* memory_;
  std::size_t num_bytes_;
};

/// Fused multiply-adds on registers alone, widest vectors of this machine, all workers: GFLOP/s (2 per element).
[[nodiscard]] double fma_gflop_per_second(executor& workers, double seconds = 0.3);

/// What a CUDA device's memory gives: one row for reading, setting, copying, and reading shuffled chunks. Throws
/// `error`: unsupported without one.
void run_cuda_probe(std::int32_t device_index, std::int64_t mebibytes, report& out);

/// The vectors that `fma_gflop_per_second` uses: "avx512", "avx2", "neon" or "baseline".
[[nodiscard]] const char* fma_vectors() noexcept;

}  // namespace bifolio::bench
