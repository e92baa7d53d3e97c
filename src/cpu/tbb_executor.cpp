// SPDX-License-Identifier: Apache-2.0
// Workers in a oneTBB arena of their own, for programs that already use TBB.
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <atomic>

#include "common/base/fork_generation.hpp"
#include "cpu/executors.hpp"
#include "cpu/spare_threads.hpp"

// The TBB library is not built with the thread sanitizer, which therefore detects none of its synchronisation. Under
// it (BIFOLIO_TSAN, from CMake) this file is compiled without it as well, and these two functions state instead what
// the executor's contract promises: what came before `run` happens before every worker, and every worker before what
// follows.
#if BIFOLIO_TSAN
extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

namespace bifolio::inline v0_2::cpu {
namespace {

#if BIFOLIO_TSAN
void note_acquire(void* address) noexcept { __tsan_acquire(address); }
void note_release(void* address) noexcept { __tsan_release(address); }
#else
void note_acquire(void*) noexcept {}
void note_release(void*) noexcept {}
#endif

detail::process_threads runtime_threads;

// Threads that oneTBB has, or could have had when they were requested. It keeps those that it created.
std::atomic<std::int32_t> num_threads_tried{0};

// oneTBB ends the process when a thread cannot be created, perhaps in another of its threads, where nothing catches the
// exception. So threads that it may still have to create are tried first.
bool can_have_threads(std::int32_t concurrency) noexcept {
  const auto most =
      static_cast<std::int32_t>(tbb::global_control::active_value(tbb::global_control::max_allowed_parallelism));
  const std::int32_t wanted = std::min(concurrency, most) - 1;
  const std::int32_t tried = num_threads_tried.load(std::memory_order_relaxed);  // a number alone
  if (wanted <= tried) return true;
  if (num_spare_threads(wanted - tried) < wanted - tried) return false;
  num_threads_tried.store(wanted, std::memory_order_relaxed);
  return true;
}

class tbb_executor final : public executor {
 public:
  explicit tbb_executor(int num_threads) : arena_(num_threads > 0 ? num_threads : tbb::task_arena::automatic) {
    arena_.initialize();
  }
  [[nodiscard]] std::int32_t concurrency() const noexcept override { return arena_.max_concurrency(); }

  void run(std::int32_t num_workers, worker_function function, void* context) noexcept override {
    if (num_workers == 1 || runtime_threads.are_lost() || !can_have_threads(concurrency())) {
      for (std::int32_t worker = 0; worker < num_workers; ++worker) function(context, worker);
      return;
    }
    runtime_threads.note_use();
    note_release(context);
    arena_.execute([&] {
      tbb::parallel_for(
          std::int32_t{0}, num_workers,
          [&](std::int32_t worker) {
            note_acquire(context);
            function(context, worker);
            note_release(context);
          },
          tbb::simple_partitioner{});
    });
    note_acquire(context);
  }
  [[nodiscard]] std::string_view name() const noexcept override { return "tbb"; }
  [[nodiscard]] errc health() const noexcept override {
    return runtime_threads.are_lost() ? errc::failed_precondition : errc::ok;
  }

 private:
  tbb::task_arena arena_;
};

}  // namespace

std::unique_ptr<executor> make_tbb_executor(std::int32_t num_threads) {
  if (runtime_threads.are_lost()) refuse_lost_threads("tbb");
  return std::make_unique<tbb_executor>(num_threads);
}

}  // namespace bifolio::inline v0_2::cpu
