// SPDX-License-Identifier: Apache-2.0
// Lanes in a oneTBB arena of their own, for programs that already live on TBB.
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include "cpu/executors.hpp"

// The TBB library is not built with the thread sanitizer, which therefore sees none of its synchronisation. Under it
// (BIFOLIO_TSAN, from CMake) this file is compiled without it as well, and these two say instead what the executor's
// contract promises: what came before `run` happens before every lane, and every lane before what follows.
#if BIFOLIO_TSAN
extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

namespace bifolio::cpu {
namespace {

#if BIFOLIO_TSAN
void note_acquire(void* address) noexcept { __tsan_acquire(address); }
void note_release(void* address) noexcept { __tsan_release(address); }
#else
void note_acquire(void*) noexcept {}
void note_release(void*) noexcept {}
#endif

class tbb_executor final : public executor {
 public:
  explicit tbb_executor(int num_threads) : arena_(num_threads > 0 ? num_threads : tbb::task_arena::automatic) {
    arena_.initialize();
  }
  [[nodiscard]] std::int32_t width() const noexcept override { return arena_.max_concurrency(); }

  void run(std::int32_t num_lanes, lane_function function, void* context) noexcept override {
    if (num_lanes == 1) {
      function(context, 0);
      return;
    }
    note_release(context);
    arena_.execute([&] {
      tbb::parallel_for(
          std::int32_t{0}, num_lanes,
          [&](std::int32_t lane) {
            note_acquire(context);
            function(context, lane);
            note_release(context);
          },
          tbb::simple_partitioner{});
    });
    note_acquire(context);
  }
  [[nodiscard]] std::string_view name() const noexcept override { return "tbb"; }

 private:
  tbb::task_arena arena_;
};

}  // namespace

std::unique_ptr<executor> make_tbb_executor(std::int32_t num_threads) {
  return std::make_unique<tbb_executor>(num_threads);
}

}  // namespace bifolio::cpu
