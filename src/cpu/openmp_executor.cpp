// SPDX-License-Identifier: Apache-2.0
// The only file that uses OpenMP. Thread counts are requested by clause; the program's own settings stay as they are.
#include <omp.h>

#include <algorithm>

#include "common/base/fork_generation.hpp"
#include "cpu/executors.hpp"
#include "cpu/spare_threads.hpp"

namespace bifolio::inline v0_2::cpu {
namespace {

detail::process_threads runtime_threads;

// What the calling thread last requested, itself included: GCC's runtime keeps those threads for its next team.
thread_local std::int32_t team_size = 1;

// The runtimes of GCC and Clang end the process when a thread of a team cannot be created. So threads that would be
// added to the caller's last team are tried first.
std::int32_t possible_team(std::int32_t concurrency) noexcept {
  return concurrency <= team_size ? concurrency : team_size + num_spare_threads(concurrency - team_size);
}

class openmp_executor final : public executor {
 public:
  explicit openmp_executor(std::int32_t concurrency) noexcept : concurrency_(concurrency) {}
  [[nodiscard]] std::int32_t concurrency() const noexcept override { return concurrency_; }

  void run(std::int32_t num_workers, worker_function function, void* context) noexcept override {
    if (num_workers == 1 || runtime_threads.are_lost()) {
      for (std::int32_t worker = 0; worker < num_workers; ++worker) function(context, worker);
      return;
    }
    runtime_threads.note_use();
    // The team always has the full concurrency, and threads beyond the workers have nothing to do: GCC's runtime ends
    // threads when a team shrinks and makes new ones when it grows, which took nine tenths of the time of a model with
    // layers of all sizes on 16 cores. The runtime may give fewer threads than requested (nested regions,
    // OMP_THREAD_LIMIT); every worker still runs.
    team_size = possible_team(concurrency_);
#pragma omp parallel for num_threads(team_size) schedule(static, 1)
    for (std::int32_t worker = 0; worker < num_workers; ++worker) function(context, worker);
  }
  [[nodiscard]] std::string_view name() const noexcept override { return "openmp"; }
  [[nodiscard]] errc health() const noexcept override {
    return runtime_threads.are_lost() ? errc::failed_precondition : errc::ok;
  }

 private:
  std::int32_t concurrency_;
};

}  // namespace

std::unique_ptr<executor> make_openmp_executor(std::int32_t num_threads) {
  if (runtime_threads.are_lost()) refuse_lost_threads("openmp");
  return std::make_unique<openmp_executor>(num_threads > 0 ? num_threads : std::max(1, omp_get_max_threads()));
}

}  // namespace bifolio::inline v0_2::cpu
