// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The library's own threads. The workers of a call are *claimed*, by the caller and by the threads that are there in
/// time, so that a call never waits for a thread that has not begun a worker. Threads without work spin for a bounded
/// time and then sleep. Both keep calls short on a busy machine (docs/threads.md): a thread that spins uses up its
/// share of a processor and is preempted when there is work, and a thread that has to arrive may have to wait for a
/// processor.

#include <pthread.h>

#include <atomic>
#include <bifolio/executor.hpp>
#include <chrono>
#include <cstdint>
#include <memory>

namespace bifolio::inline v0_2::cpu {

/// How long one thread spins before it sleeps. When it was preempted while it spun, another program needs its
/// processor, and the next waits do without. For one thread.
class patience {
 public:
  using clock = std::chrono::steady_clock;

  /// Spins until `is_over()`; false: it was not over in time.
  template <class Condition>
  [[nodiscard]] bool spin(clock::duration longest, const Condition& is_over) noexcept {
    if (is_over()) return true;
    if (num_to_skip_ > 0) {
      --num_to_skip_;
      return false;
    }
    const clock::time_point begin = clock::now();
    for (clock::time_point last = begin; last - begin < longest;) {
      for (int i = 0; i < pauses_per_look; ++i) pause();
      const bool over = is_over();
      const clock::time_point now = clock::now();
      if (now - last > preempted_for) {
        skipped_ = skipped_ < most_skipped / 2 ? 2 * skipped_ + 1 : most_skipped;
        num_to_skip_ = skipped_;
        return over;
      }
      if (over) {
        skipped_ /= 2;
        return true;
      }
      last = now;
    }
    return false;
  }

 private:
  static void pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }

  static constexpr int pauses_per_look = 8;
  /// Between two looks at the clock, which are less than a microsecond apart on a processor of one's own.
  static constexpr std::chrono::microseconds preempted_for{100};
  static constexpr std::int32_t most_skipped = 1023;

  std::int32_t num_to_skip_ = 0;  ///< waits that will not spin
  std::int32_t skipped_ = 0;      ///< what num_to_skip_ was last set to, halved by each spin that paid
};

/// Thread-safe. In a child made by fork() it has no threads and must only be leaked.
class thread_pool {
 public:
  /// Its threads are made by the first call that can use them; where the system refuses some, calls do with fewer and
  /// try again later. Throws `error` (out_of_memory).
  explicit thread_pool(std::int32_t num_threads);
  /// No call may be running.
  ~thread_pool();
  thread_pool(const thread_pool&) = delete;
  thread_pool& operator=(const thread_pool&) = delete;

  /// As executor::run. Calls at the same time share the threads; beyond `num_calls` of them a call has its own thread
  /// alone.
  void run(std::int32_t num_workers, executor::worker_function function, void* context) noexcept;

 private:
  static constexpr int num_calls = 4;

  /// A call under way. `function` and `context` are written by its caller before `unclaimed` is released, and stay
  /// until `unfinished` is 0: who claimed a worker may read them.
  struct alignas(64) call {
    std::atomic<bool> taken{false};
    executor::worker_function function = nullptr;
    void* context = nullptr;
    alignas(64) std::atomic<std::int32_t> unfinished{0};      ///< workers that have not returned
    std::unique_ptr<std::atomic<std::uint64_t>[]> unclaimed;  ///< a bit for each worker that nobody has begun
  };

  void start_threads(std::int32_t wanted) noexcept;
  void wake(std::int32_t wanted) noexcept;
  void serve(std::int32_t thread) noexcept;
  [[nodiscard]] call* take_call() noexcept;
  [[nodiscard]] std::int32_t claim(call& from, std::int32_t wish) const noexcept;
  bool work_on(call& from, std::int32_t wish) const noexcept;

  call calls_[num_calls];
  /// Changes with every call and at the end; threads without work wait for that.
  alignas(64) std::atomic<std::uint32_t> news_{0};
  std::atomic<std::int32_t> num_asleep_{0};
  std::atomic<std::int32_t> next_number_{0};  ///< of a thread that begins to serve
  std::atomic<bool> is_ending_{false};

  alignas(64) std::atomic<bool> is_starting_{false};  ///< some caller owns what follows
  std::int32_t max_threads_;
  std::int32_t num_words_;  ///< of a call's `unclaimed`
  std::unique_ptr<pthread_t[]> threads_;
  std::chrono::steady_clock::time_point next_try_{};
  std::atomic<std::int32_t> num_threads_{0};
};

}  // namespace bifolio::inline v0_2::cpu
