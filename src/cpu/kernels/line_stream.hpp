// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Asking for memory ahead of its use, woven into other work: at counted steps of a loop (`line_steps`) or at the turns
/// of a unit (`spread`, `turn`). What was measured: docs/kernels/attention_cpu.md, "Prefetching".

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/simd.hpp"

namespace bifolio::cpu::BIFOLIO_ISA {
namespace {

inline constexpr int cache_line_bytes = 64;

/// Runs of memory that will be needed soon, asked for by batches of cache lines between other work: a burst overruns
/// the core's queue of outstanding misses. The runs are walked in four or eight parts side by side, so that several
/// DRAM pages and page walks are under way at once (4 KiB runs in random places: 22 GB/s a core instead of 15). Where
/// `asks_twice`, beside each line goes one of a second set of runs that was asked for before: 2–3 % of first requests
/// are lost, and a line that is there costs next to nothing.
template <int Ways>
class line_stream {
 public:
  /// `runs` and `again` (`num_runs` each, of `run_bytes`) must outlive the stream.
  BIFOLIO_INLINE void start(const char* const* runs, const char* const* again, int num_runs, int run_bytes) noexcept {
    next_ = runs;
    again_ = again - runs;
    part_ = num_runs / Ways;
    end_ = runs + part_;
    run_bytes_ = run_bytes;
    byte_ = 0;
    pace_ = 0;
    due_ = 0;
    take_runs();
    wait_ = never;
  }
  /// Batches that the stream has from its start on.
  [[nodiscard]] BIFOLIO_INLINE std::int64_t num_batches() const noexcept {
    return part_ * ((run_bytes_ + cache_line_bytes - 1) / cache_line_bytes);
  }
  /// `line_steps` are to ask for a batch every `period` steps.
  BIFOLIO_INLINE void every(int period) noexcept {
    period_ = period;
    wait_ = done_ ? never : period;
  }
  BIFOLIO_INLINE void stop() noexcept {
    done_ = true;
    wait_ = never;
  }
  /// One of the turns of `spread`.
  BIFOLIO_INLINE void turn() noexcept {
    due_ += pace_;
    for (; due_ >= one_batch; due_ -= one_batch) batch();
  }
  /// What there is is to be spread over so many turns.
  BIFOLIO_INLINE void spread(int turns) noexcept {
    pace_ = static_cast<int>((num_batches() * one_batch + turns - 1) / turns);
  }
  /// Asks for all that is left.
  BIFOLIO_INLINE void finish() noexcept {
    while (!done_) batch();
  }

 private:
  template <int>
  friend class line_steps;
  static constexpr int never = 0x7fffffff;
  static constexpr int one_batch = 256;

  // Asks for the next batch, if there is one.
  BIFOLIO_INLINE void batch() noexcept {
    if (done_) return;
#pragma GCC unroll 8
    for (int i = 0; i < Ways; ++i) {
      prefetch_line(run_[i] + byte_);
      if constexpr (asks_twice) prefetch_line(run_again_[i] + byte_);
    }
    byte_ += cache_line_bytes;
    if (__builtin_expect(byte_ < run_bytes_, 1)) return;
    byte_ = 0;
    take_runs();
  }

  // The next run of each part.
  BIFOLIO_INLINE void take_runs() noexcept {
    done_ = next_ == end_;
    if (done_) return;
    const char* const* run = next_++;
#pragma GCC unroll 8
    for (int i = 0; i < Ways; ++i, run += part_) {
      run_[i] = run[0];
      if constexpr (asks_twice) run_again_[i] = run[again_];
    }
  }

  const char* run_[std::size_t{Ways}] = {};  // one of each part
  const char* run_again_[std::size_t{Ways}] = {};
  const char* const* next_ = nullptr;  // of the first part
  const char* const* end_ = nullptr;
  std::ptrdiff_t again_ = 0;  // from a run to its neighbour in the second set
  int part_ = 0;              // runs from part to part
  std::int64_t byte_ = 0;
  std::int64_t run_bytes_ = 0;
  bool done_ = true;
  int period_ = 0;
  int wait_ = never;  // steps to the next batch
  int pace_ = 0;      // parts of a batch a turn
  int due_ = 0;       // parts of the next one
};

/// Steps of a stream for the length of one loop, counted in a register.
template <int Ways>
class line_steps {
 public:
  BIFOLIO_INLINE explicit line_steps(line_stream<Ways>& stream) noexcept : stream_(stream), wait_(stream.wait_) {}
  BIFOLIO_INLINE ~line_steps() { stream_.wait_ = wait_; }
  line_steps(const line_steps&) = delete;
  line_steps& operator=(const line_steps&) = delete;
  BIFOLIO_INLINE void step(int steps = 1) noexcept {
    wait_ -= steps;
    if (__builtin_expect(wait_ > 0, 1)) return;
    stream_.batch();
    wait_ = stream_.done_ ? line_stream<Ways>::never : wait_ + stream_.period_;
  }

 private:
  line_stream<Ways>& stream_;
  int wait_;
};

}  // namespace
}  // namespace bifolio::cpu::BIFOLIO_ISA
