// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Software prefetch of the memory that later mainloop iterations read, interleaved with the work of the current one.
///
/// `prefetch_queue` holds ranges of memory and walks eight of them at once: eight *streams*, one cache line of each per
/// *batch*. `basic_prefetcher` paces the batches: the mainloop pushes the ranges of an iteration two iterations ahead,
/// and the kernels *poll*; every so many polls a batch is issued. Reasons and measurements:
/// docs/kernels/attention_cpu.md, "Prefetching".

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/simd/inline.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

inline constexpr int cache_line_bytes = 64;
/// Ranges of memory that are walked at the same time.
inline constexpr int num_streams = 8;

/// Prefetches into L1. A hint for L2 alone would leave L1 to the data in use, but a Zen 5 drops 8–12 % of such hints
/// (none of these), and each dropped line costs a DRAM latency later; L2 keeps what L1 evicts. A volatile use of the
/// address follows, because GCC 12 deletes a function whose only effect is a prefetch. (No memory clobber: it would
/// force the surrounding loops to reload what they hold in registers.)
struct prefetch_line {
  BIFOLIO_INLINE void operator()(std::uintptr_t address) const noexcept {
    __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 3);
    __asm__ volatile("" : : "r"(address));
  }
};

/// A queue of ranges of memory, prefetched in batches of one line per stream, so that several DRAM pages and page walks
/// are in flight at once. Streams start their ranges one after another, evenly spaced, not together: one waits for its
/// page walk while the others proceed. `Prefetch` is called with an address in each line.
template <class Prefetch>
class prefetch_queue {
 public:
  /// Appends ranges of `range_lines` lines; those already queued must be as long. The list must stay valid until all of
  /// its ranges have started; at most one list may wait for another.
  BIFOLIO_INLINE void push(const char* const* ranges, int num_ranges, int range_lines) noexcept {
    range_lines_ = range_lines;
    if (num_next_ == 0) {
      next_ = ranges;
      num_next_ = num_ranges;
    } else {
      later_ = ranges;
      num_later_ = num_ranges;
    }
    if (empty_) start();
  }
  [[nodiscard]] BIFOLIO_INLINE bool empty() const noexcept { return empty_; }
  /// Prefetches the next line of each stream.
  BIFOLIO_INLINE void issue() noexcept {
    if (empty_) return;
#pragma GCC unroll 8
    for (int i = 0; i < num_streams; ++i) Prefetch{}(streams_[i] + offset_);
    offset_ += cache_line_bytes;
    lines_to_next_range_ -= num_streams;
    while (__builtin_expect(lines_to_next_range_ <= 0, 0)) start_next_range();
  }

 private:
  BIFOLIO_INLINE void start() noexcept {
    empty_ = false;
    num_idle_ = num_streams;
    lines_to_next_range_ = 0;
    start_next_range();
  }
  // The stream that started first has reached its end and takes the next range. If there is none it is idle, which
  // means that it follows the stream that started last. When all streams are idle the queue is empty. Not inlined,
  // because `issue` is inlined at many places.
  [[gnu::noinline]] void start_next_range() noexcept {
    lines_to_next_range_ += range_lines_;
    if (num_next_ > 0) {
      newest_ = oldest_;
      const std::uintptr_t stream = reinterpret_cast<std::uintptr_t>(*next_++) - offset_;
      for (; num_idle_ > 0; --num_idle_) {
        streams_[(oldest_ + num_streams - num_idle_) % num_streams] = stream;
        __asm__ volatile("");  // keeps GCC from vectorising: the kernels around calls keep their vector registers
      }
      streams_[oldest_] = stream;
      if (--num_next_ == 0) {
        next_ = later_;
        num_next_ = num_later_;
        num_later_ = 0;
      }
    } else {
      streams_[oldest_] = streams_[newest_];
      empty_ = ++num_idle_ >= num_streams;
    }
    oldest_ = (oldest_ + 1) % num_streams;
  }

  std::uintptr_t streams_[static_cast<std::size_t>(num_streams)] = {};  // less `offset_`, which all streams share
  std::uintptr_t offset_ = 0;
  int range_lines_ = 0;
  int lines_to_next_range_ = 0;  // of all streams, until the next range starts
  int oldest_ = 0;
  int newest_ = 0;
  int num_idle_ = 0;  // streams that found no range since one did
  bool empty_ = true;
  const char* const* next_ = nullptr;
  const char* const* later_ = nullptr;
  int num_next_ = 0;   // ranges left at `next_`
  int num_later_ = 0;  // ranges at `later_`
};

/// Paces a prefetch queue: spreads its batches evenly over the polls of a mainloop iteration. Each iteration reads the
/// ranges that were pushed two iterations earlier.
template <class Prefetch>
class basic_prefetcher {
 public:
  /// The ranges of the iteration after the next one (as prefetch_queue::push); before the first iteration also those of
  /// the next one. By the end of the current iteration all lines pushed before are issued, and a quarter of these.
  BIFOLIO_INLINE void push(const char* const* ranges, int num_ranges, int range_bytes) noexcept {
    const int range_lines = (range_bytes + cache_line_bytes - 1) / cache_line_bytes;
    const int lines = num_ranges * range_lines;
    target_ = pushed_ + lines / 4;
    if (num_ranges == 0) return;
    while (range_lines != range_lines_ && !queue_.empty()) queue_.issue();
    if (queue_.empty()) issued_ = pushed_;
    queue_.push(ranges, num_ranges, range_lines);
    range_lines_ = range_lines;
    pushed_ += lines;
  }
  /// There is no such iteration. By the end of the current one everything is issued, the last range to its end.
  BIFOLIO_INLINE void push_end() noexcept { target_ = pushed_ + num_streams * range_lines_; }
  /// The current iteration polls about `polls` times.
  BIFOLIO_INLINE void pace(int polls) noexcept {
    const std::int64_t lines = target_ - issued_;
    const std::int64_t period = lines > 0 ? std::int64_t{polls} * (num_streams * poll_ticks) / lines + 1 : never;
    period_ = static_cast<int>(period < never ? period : never);
    wait_ = period_;
  }
  BIFOLIO_INLINE void poll() noexcept {
    wait_ -= poll_ticks;
    for (; __builtin_expect(wait_ <= 0, 0); wait_ += period_) issue();
  }
  /// The iteration's work is done: issues what its polls did not.
  BIFOLIO_INLINE void flush() noexcept {
    while (issued_ < target_) issue();
    wait_ = never;
  }

 private:
  template <class>
  friend class basic_prefetch_poller;
  static constexpr int never = 0x3fffffff;
  static constexpr int poll_ticks = 256;  // ticks per poll: the period between batches is not a whole number of polls

  BIFOLIO_INLINE void issue() noexcept {
    queue_.issue();
    issued_ += num_streams;
  }

  prefetch_queue<Prefetch> queue_;
  std::int64_t issued_ = 0;  // lines
  std::int64_t pushed_ = 0;  // lines
  std::int64_t target_ = 0;  // what `issued_` reaches by the end of this iteration
  int range_lines_ = 0;      // of what was pushed last
  int period_ = never;       // ticks from batch to batch
  int wait_ = never;         // ticks to the next batch
};

/// Polls for the length of one loop with the wait in a register. At most one batch per poll, because such polls are
/// frequent: a loop here makes the micro-kernels 3 % slower.
template <class Prefetch>
class basic_prefetch_poller {
 public:
  BIFOLIO_INLINE explicit basic_prefetch_poller(basic_prefetcher<Prefetch>& prefetch) noexcept
      : prefetch_(prefetch), wait_(prefetch.wait_) {}
  BIFOLIO_INLINE ~basic_prefetch_poller() { prefetch_.wait_ = wait_; }
  basic_prefetch_poller(const basic_prefetch_poller&) = delete;
  basic_prefetch_poller& operator=(const basic_prefetch_poller&) = delete;
  BIFOLIO_INLINE void poll(int polls = 1) noexcept {
    wait_ -= polls * basic_prefetcher<Prefetch>::poll_ticks;
    if (__builtin_expect(wait_ > 0, 1)) return;
    prefetch_.issue();
    wait_ += prefetch_.period_;
  }

 private:
  basic_prefetcher<Prefetch>& prefetch_;
  int wait_;
};

using prefetcher = basic_prefetcher<prefetch_line>;
using prefetch_poller = basic_prefetch_poller<prefetch_line>;

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA
