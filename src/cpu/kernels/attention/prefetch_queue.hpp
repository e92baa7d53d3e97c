// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Asking for memory ahead of its use, woven into other work. What was measured: docs/kernels/attention_cpu.md,
/// "Prefetching".

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/simd/inline.hpp"

namespace bifolio::cpu::BIFOLIO_ISA {
namespace {

inline constexpr int cache_line_bytes = 64;
/// Runs of memory that are asked for side by side.
inline constexpr int stream_ways = 8;

/// Towards L1. A hint for L2 alone would leave L1 to what is being worked on, but a Zen 5 loses 8–12 % of such requests
/// (none of these), and each costs a DRAM latency later; L2 keeps what L1 evicts. Followed by a volatile use, because
/// GCC 12 deletes a function whose only effect is a prefetch. (No memory clobber: it would make the loops around it
/// load what they hold in registers.)
struct prefetch_line {
  BIFOLIO_INLINE void operator()(std::uintptr_t address) const noexcept {
    __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 3);
    __asm__ volatile("" : : "r"(address));
  }
};

/// A queue of runs of memory whose lines are asked for by batches, one line of each of eight runs, so that several DRAM
/// pages and page walks are under way at once. Runs begin one after the other at even distances, not together: one
/// waits for its page walk while the others go on. `Ask` is called with an address in each line.
template <class Ask>
class run_queue {
 public:
  /// One run or more of `run_lines` after those that are there, which must be as long. The list must stay until all
  /// have begun; at most one may wait behind another.
  BIFOLIO_INLINE void push(const char* const* runs, int num_runs, int run_lines) noexcept {
    run_lines_ = run_lines;
    if (num_left_ == 0) {
      next_ = runs;
      num_left_ = num_runs;
    } else {
      later_ = runs;
      num_later_ = num_runs;
    }
    if (done_) begin();
  }
  [[nodiscard]] BIFOLIO_INLINE bool done() const noexcept { return done_; }
  BIFOLIO_INLINE void batch() noexcept {
    if (done_) return;
#pragma GCC unroll 8
    for (int i = 0; i < stream_ways; ++i) Ask{}(ways_[i] + byte_);
    byte_ += cache_line_bytes;
    lines_to_next_ -= stream_ways;
    while (__builtin_expect(lines_to_next_ <= 0, 0)) take_run();
  }

 private:
  BIFOLIO_INLINE void begin() noexcept {
    done_ = false;
    num_idle_ = stream_ways;
    lines_to_next_ = 0;
    take_run();
  }
  // The way that began first is at its end: it takes the next run. When there is none it is idle, which means that it
  // goes along the run that began last. When all are idle nothing is left. Not inlined, as turns are many.
  [[gnu::noinline]] void take_run() noexcept {
    lines_to_next_ += run_lines_;
    if (num_left_ > 0) {
      newest_ = oldest_;
      const std::uintptr_t way = reinterpret_cast<std::uintptr_t>(*next_++) - byte_;
      for (; num_idle_ > 0; --num_idle_) ways_[(oldest_ + stream_ways - num_idle_) % stream_ways] = way;
      ways_[oldest_] = way;
      if (--num_left_ == 0) {
        next_ = later_;
        num_left_ = num_later_;
        num_later_ = 0;
      }
    } else {
      ways_[oldest_] = ways_[newest_];
      done_ = ++num_idle_ >= stream_ways;
    }
    oldest_ = (oldest_ + 1) % stream_ways;
  }

  std::uintptr_t ways_[static_cast<std::size_t>(stream_ways)] = {};  // less `byte_`: all are asked for at one offset
  std::uintptr_t byte_ = 0;
  int run_lines_ = 0;
  int lines_to_next_ = 0;  // of all ways, until the next run begins
  int oldest_ = 0;
  int newest_ = 0;
  int num_idle_ = 0;  // ways that found no run, since one did
  bool done_ = true;
  const char* const* next_ = nullptr;
  const char* const* later_ = nullptr;
  int num_left_ = 0;   // at `next_`
  int num_later_ = 0;  // at `later_`
};

/// Such a queue, its batches spread evenly over the turns of other work. That work is done unit by unit; each reads the
/// runs that `push` got two units earlier.
template <class Ask>
class paced_runs {
 public:
  /// The runs of the unit after the next one (as run_queue::push); before the first unit also those of the next one. By
  /// the end of this unit all lines of those before are to be asked for and a quarter of these.
  BIFOLIO_INLINE void push(const char* const* runs, int num_runs, int run_bytes) noexcept {
    const int run_lines = (run_bytes + cache_line_bytes - 1) / cache_line_bytes;
    const int lines = num_runs * run_lines;
    goal_ = pushed_ + lines / 4;
    if (num_runs == 0) return;
    while (run_lines != run_lines_ && !queue_.done()) queue_.batch();
    if (queue_.done()) asked_ = pushed_;
    queue_.push(runs, num_runs, run_lines);
    run_lines_ = run_lines;
    pushed_ += lines;
  }
  /// There is no such unit. By the end of this one everything is to be asked for, the last run to its end.
  BIFOLIO_INLINE void push_none() noexcept { goal_ = pushed_ + stream_ways * run_lines_; }
  /// This unit's work has so many turns.
  BIFOLIO_INLINE void spread(int turns) noexcept {
    const std::int64_t lines = goal_ - asked_;
    const std::int64_t period = lines > 0 ? std::int64_t{turns} * (stream_ways * one_turn) / lines + 1 : never;
    period_ = static_cast<int>(period < never ? period : never);
    wait_ = period_;
  }
  BIFOLIO_INLINE void turn() noexcept {
    wait_ -= one_turn;
    for (; __builtin_expect(wait_ <= 0, 0); wait_ += period_) ask();
  }
  /// The unit's work is done: asks for what its turns did not.
  BIFOLIO_INLINE void catch_up() noexcept {
    while (asked_ < goal_) ask();
    wait_ = never;
  }

 private:
  template <class>
  friend class loop_turns;
  static constexpr int never = 0x3fffffff;
  static constexpr int one_turn = 256;

  BIFOLIO_INLINE void ask() noexcept {
    queue_.batch();
    asked_ += stream_ways;
  }

  run_queue<Ask> queue_;
  std::int64_t asked_ = 0;   // lines
  std::int64_t pushed_ = 0;  // lines
  std::int64_t goal_ = 0;    // what `asked_` is to be after this unit
  int run_lines_ = 0;        // of what was pushed last
  int period_ = never;       // of a batch, in parts of a turn
  int wait_ = never;         // to the next batch
};

/// Turns of such runs for the length of one loop, counted in a register. One batch a turn at most, as such turns are
/// many: a loop here makes the register kernels 3 % slower.
template <class Ask>
class loop_turns {
 public:
  BIFOLIO_INLINE explicit loop_turns(paced_runs<Ask>& stream) noexcept : stream_(stream), wait_(stream.wait_) {}
  BIFOLIO_INLINE ~loop_turns() { stream_.wait_ = wait_; }
  loop_turns(const loop_turns&) = delete;
  loop_turns& operator=(const loop_turns&) = delete;
  BIFOLIO_INLINE void turn(int turns = 1) noexcept {
    wait_ -= turns * paced_runs<Ask>::one_turn;
    if (__builtin_expect(wait_ > 0, 1)) return;
    stream_.ask();
    wait_ += stream_.period_;
  }

 private:
  paced_runs<Ask>& stream_;
  int wait_;
};

using line_stream = paced_runs<prefetch_line>;
using line_turns = loop_turns<prefetch_line>;

}  // namespace
}  // namespace bifolio::cpu::BIFOLIO_ISA
