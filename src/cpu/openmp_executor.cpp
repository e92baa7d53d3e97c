// SPDX-License-Identifier: Apache-2.0
// The only file that sees OpenMP. Thread counts are asked for by clause; the program's own settings are left alone.
#include <omp.h>

#include <algorithm>

#include "cpu/executors.hpp"

namespace bifolio::cpu {
namespace {

class openmp_executor final : public executor {
 public:
  explicit openmp_executor(std::int32_t width) noexcept : width_(width) {}
  [[nodiscard]] std::int32_t width() const noexcept override { return width_; }

  void run(std::int32_t num_lanes, lane_function function, void* context) noexcept override {
    if (num_lanes == 1) {
      function(context, 0);
      return;
    }
    // The team always has the full width, and threads beyond the lanes find nothing to do: GCC's runtime ends threads
    // when a team shrinks and makes new ones when it grows, which cost a model with layers of all sizes on 16 cores
    // nine tenths of its time. The runtime may give fewer threads than asked for (nested regions, OMP_THREAD_LIMIT);
    // every lane still runs.
#pragma omp parallel for num_threads(width_) schedule(static, 1)
    for (std::int32_t lane = 0; lane < num_lanes; ++lane) function(context, lane);
  }
  [[nodiscard]] std::string_view name() const noexcept override { return "openmp"; }

 private:
  std::int32_t width_;
};

}  // namespace

std::unique_ptr<executor> make_openmp_executor(std::int32_t num_threads) {
  return std::make_unique<openmp_executor>(num_threads > 0 ? num_threads : std::max(1, omp_get_max_threads()));
}

}  // namespace bifolio::cpu
