// SPDX-License-Identifier: Apache-2.0
// Lanes in a oneTBB arena of their own, for programs that already live on TBB.
#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include "cpu/executors.hpp"

namespace bifolio::cpu {
namespace {

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
    arena_.execute([&] {
      tbb::parallel_for(
          std::int32_t{0}, num_lanes, [&](std::int32_t lane) { function(context, lane); }, tbb::simple_partitioner{});
    });
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
