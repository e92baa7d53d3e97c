// SPDX-License-Identifier: Apache-2.0
// The only file that sees OpenMP. Thread counts are asked for by clause; the program's own settings are left alone.
#include <omp.h>

#include <algorithm>

#include "common/base/fork_generation.hpp"
#include "cpu/executors.hpp"
#include "cpu/spare_threads.hpp"

namespace bifolio::cpu {
namespace {

detail::process_threads runtime_threads;

// What the calling thread last asked for, itself included: GCC's runtime keeps those threads for its next team.
thread_local std::int32_t team_size = 1;

// The runtimes of GCC and Clang end the process when a thread of a team cannot be made. So threads that are to be added
// to the caller's last team are tried before.
std::int32_t possible_team(std::int32_t width) noexcept {
  return width <= team_size ? width : team_size + num_spare_threads(width - team_size);
}

class openmp_executor final : public executor {
 public:
  explicit openmp_executor(std::int32_t width) noexcept : width_(width) {}
  [[nodiscard]] std::int32_t width() const noexcept override { return width_; }

  void run(std::int32_t num_lanes, lane_function function, void* context) noexcept override {
    if (num_lanes == 1 || runtime_threads.are_lost()) {
      for (std::int32_t lane = 0; lane < num_lanes; ++lane) function(context, lane);
      return;
    }
    runtime_threads.note_use();
    // The team always has the full width, and threads beyond the lanes find nothing to do: GCC's runtime ends threads
    // when a team shrinks and makes new ones when it grows, which cost a model with layers of all sizes on 16 cores
    // nine tenths of its time. The runtime may give fewer threads than asked for (nested regions, OMP_THREAD_LIMIT);
    // every lane still runs.
    team_size = possible_team(width_);
#pragma omp parallel for num_threads(team_size) schedule(static, 1)
    for (std::int32_t lane = 0; lane < num_lanes; ++lane) function(context, lane);
  }
  [[nodiscard]] std::string_view name() const noexcept override { return "openmp"; }
  [[nodiscard]] errc health() const noexcept override {
    return runtime_threads.are_lost() ? errc::failed_precondition : errc::ok;
  }

 private:
  std::int32_t width_;
};

}  // namespace

std::unique_ptr<executor> make_openmp_executor(std::int32_t num_threads) {
  if (runtime_threads.are_lost()) refuse_lost_threads("openmp");
  return std::make_unique<openmp_executor>(num_threads > 0 ? num_threads : std::max(1, omp_get_max_threads()));
}

}  // namespace bifolio::cpu
