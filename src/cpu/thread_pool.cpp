// SPDX-License-Identifier: Apache-2.0
#include "cpu/thread_pool.hpp"

#include <signal.h>

#include <algorithm>
#include <bit>
#include <new>

#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2::cpu {
namespace {

// Waking a thread takes tens of microseconds. Measured on 16 virtual processors: with a patience of 100 us a prefill of
// 12 ms took 14. Threads find out by themselves when they are in the way.
constexpr std::chrono::microseconds idle_patience{4000};
// A worker that was begun ends about when the caller's own do; its patience is at least this, and the time that the
// call has taken.
constexpr std::chrono::microseconds caller_patience{50};
constexpr std::chrono::milliseconds between_tries{100};
constexpr std::int32_t word_bits = 64;

}  // namespace

thread_pool::thread_pool(std::int32_t num_threads)
    : max_threads_(num_threads), num_words_(num_threads / word_bits + 1) {
  bool complete = true;
  threads_.reset(new (std::nothrow) pthread_t[static_cast<std::size_t>(num_threads)]);
  for (call& c : calls_) {
    c.unclaimed.reset(new (std::nothrow) std::atomic<std::uint64_t>[static_cast<std::size_t>(num_words_)] {});
    complete = complete && c.unclaimed != nullptr;
  }
  if (threads_ == nullptr || !complete) detail::refuse(errc::out_of_memory, "no memory for ", num_threads, " threads");
}

thread_pool::~thread_pool() {
  is_ending_.store(true);
  news_.fetch_add(1);
  news_.notify_all();
  for (std::int32_t i = 0; i < num_threads_.load(); ++i) ::pthread_join(threads_[static_cast<std::size_t>(i)], nullptr);
}

// Signals of the program are for its own threads.
void thread_pool::start_threads(std::int32_t wanted) noexcept {
  wanted = std::min(wanted, max_threads_);
  if (num_threads_.load(std::memory_order_relaxed) >= wanted ||
      is_starting_.exchange(true, std::memory_order_acquire)) {
    return;
  }
  std::int32_t started = num_threads_.load(std::memory_order_relaxed);
  if (started < wanted && std::chrono::steady_clock::now() >= next_try_) {
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    const auto serve_pool = [](void* opaque) -> void* {
      auto* const pool = static_cast<thread_pool*>(opaque);
      pool->serve(pool->next_number_.fetch_add(1, std::memory_order_relaxed) + 1);
      return nullptr;
    };
    while (started < wanted &&
           ::pthread_create(&threads_[static_cast<std::size_t>(started)], nullptr, serve_pool, this) == 0) {
      num_threads_.store(++started, std::memory_order_relaxed);
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (started < wanted) next_try_ = std::chrono::steady_clock::now() + between_tries;
  }
  is_starting_.store(false, std::memory_order_release);
}

// Wakes threads unless enough of them spin. Sequentially consistent with `serve`: either it sees the news before it
// sleeps, or it is seen asleep here.
void thread_pool::wake(std::int32_t wanted) noexcept {
  news_.fetch_add(1);
  const std::int32_t asleep = num_asleep_.load();
  const std::int32_t awake = num_threads_.load(std::memory_order_relaxed) - asleep;
  if (asleep == 0 || awake >= wanted) return;
  if (wanted - awake >= asleep) return news_.notify_all();
  for (std::int32_t i = awake; i < wanted; ++i) news_.notify_one();
}

// A thread wishes for the same worker in every call, so that what its processor caches is used again. −1: none is left.
std::int32_t thread_pool::claim(call& from, std::int32_t wish) const noexcept {
  const auto take = [](std::atomic<std::uint64_t>& word, std::uint64_t bit) {
    return (word.fetch_and(~bit, std::memory_order_acquire) & bit) != 0;
  };
  std::atomic<std::uint64_t>& wished = from.unclaimed[static_cast<std::size_t>(wish / word_bits)];
  const std::uint64_t wished_bit = std::uint64_t{1} << wish % word_bits;
  if ((wished.load(std::memory_order_relaxed) & wished_bit) != 0 && take(wished, wished_bit)) return wish;
  for (std::int32_t i = num_words_ - 1; i >= 0; --i) {
    std::atomic<std::uint64_t>& word = from.unclaimed[static_cast<std::size_t>(i)];
    for (std::uint64_t left; (left = word.load(std::memory_order_relaxed)) != 0;) {
      const std::int32_t last = word_bits - 1 - std::countl_zero(left);
      if (take(word, std::uint64_t{1} << last)) return i * word_bits + last;
    }
  }
  return -1;
}

bool thread_pool::work_on(call& from, std::int32_t wish) const noexcept {
  const std::int32_t worker = claim(from, wish);
  if (worker < 0) return false;
  from.function(from.context, worker);
  if (from.unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) from.unfinished.notify_all();
  return true;
}

void thread_pool::serve(std::int32_t thread) noexcept {
  patience idle;
  for (;;) {
    const std::uint32_t news = news_.load();  // before anything that it announces
    if (is_ending_.load(std::memory_order_relaxed)) return;
    bool found = false;
    for (call& c : calls_) found = work_on(c, thread) || found;
    if (found) continue;
    if (idle.spin(idle_patience, [&] { return news_.load(std::memory_order_relaxed) != news; })) continue;
    num_asleep_.fetch_add(1);
    news_.wait(news);
    num_asleep_.fetch_sub(1);
  }
}

thread_pool::call* thread_pool::take_call() noexcept {
  for (call& c : calls_) {
    if (!c.taken.load(std::memory_order_relaxed) && !c.taken.exchange(true, std::memory_order_acquire)) return &c;
  }
  return nullptr;
}

void thread_pool::run(std::int32_t num_workers, executor::worker_function function, void* context) noexcept {
  start_threads(num_workers - 1);
  call* const mine = take_call();
  if (mine == nullptr) {
    for (std::int32_t worker = 0; worker < num_workers; ++worker) function(context, worker);
    return;
  }
  const patience::clock::time_point begin = patience::clock::now();
  mine->function = function;
  mine->context = context;
  mine->unfinished.store(num_workers, std::memory_order_relaxed);
  for (std::int32_t i = 0; i <= (num_workers - 1) / word_bits; ++i) {
    const std::int32_t left = num_workers - i * word_bits;
    const std::uint64_t bits = left < word_bits ? (std::uint64_t{1} << left) - 1 : ~std::uint64_t{0};
    mine->unclaimed[static_cast<std::size_t>(i)].store(bits, std::memory_order_release);
  }
  wake(num_workers - 1);
  while (work_on(*mine, 0)) {
  }
  static thread_local patience waiting;
  const auto all_returned = [&] { return mine->unfinished.load(std::memory_order_acquire) == 0; };
  if (!waiting.spin(std::max<patience::clock::duration>(caller_patience, patience::clock::now() - begin),
                    all_returned)) {
    for (std::int32_t left; (left = mine->unfinished.load(std::memory_order_acquire)) != 0;)
      mine->unfinished.wait(left);
  }
  mine->taken.store(false, std::memory_order_release);
}

}  // namespace bifolio::inline v0_2::cpu
