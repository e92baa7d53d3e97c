// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What a child made by fork() can no longer use: it has the memory of its parent, and none of its threads or device
/// contexts. Whoever starts such a thing notes the generation of the process, and compares it before each use.

#include <atomic>

namespace bifolio::inline v0_2::detail {

/// Forks between this process and the one that called this first; the same for all threads. Counted by a handler of
/// pthread_atfork, so that asking costs a load. Thread-safe.
[[nodiscard]] unsigned fork_generation() noexcept;

/// Threads that the process shares: those of one runtime. Thread-safe.
class process_threads {
 public:
  /// To be called before the runtime may start threads.
  void note_use() noexcept {
    if (used_in_.load(std::memory_order_relaxed) == never) {
      used_in_.store(fork_generation(), std::memory_order_relaxed);
    }
  }
  /// Whether they were started in a process that this one was forked from.
  [[nodiscard]] bool are_lost() const noexcept {
    const unsigned used_in = used_in_.load(std::memory_order_relaxed);
    return used_in != never && used_in != fork_generation();
  }

 private:
  static constexpr unsigned never = ~0U;
  // A number alone: what a fork copies of it is from before the fork.
  std::atomic<unsigned> used_in_{never};
};

}  // namespace bifolio::inline v0_2::detail
