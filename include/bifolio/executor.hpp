// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Runs the workers of one CPU call. Kernels name no threading runtime; they hand work to an executor. A process should
/// compute on one kind of executor: OpenMP and oneTBB alternating on one critical path cost 1.6 ×.

#include <bifolio/error.hpp>
#include <bifolio/export.hpp>
#include <cstdint>
#include <memory>
#include <string_view>

namespace bifolio::inline v0_2 {

/// Implement this to run bifolio on your own thread pool.
class BIFOLIO_API executor {
 public:
  using worker_function = void (*)(void* context, std::int32_t worker) noexcept;

  virtual ~executor();

  /// How many workers can make progress at once, ≥ 1. Does not change while a call is running.
  [[nodiscard]] virtual std::int32_t concurrency() const noexcept = 0;

  /// Calls `function(context, worker)` exactly once for each worker 0 … num_workers − 1, at once or one after another
  /// in any order, and returns when all have returned. Workers never wait for one another. `num_workers` ≤
  /// concurrency(). May be called from several threads at once; num_workers == 1 should run on the caller.
  virtual void run(std::int32_t num_workers, worker_function function, void* context) noexcept = 0;

  [[nodiscard]] virtual std::string_view name() const noexcept = 0;

  /// ok, or failed_precondition in a child made by fork() that lacks the threads of its parent. A backend asks before
  /// each call that would use the executor, and refuses with this code. As inherited: ok in the process that made the
  /// executor, refused in its children. Override it in an executor that has no threads, or starts new ones in a child.
  [[nodiscard]] virtual errc health() const noexcept;

 protected:
  executor() noexcept;

 private:
  unsigned fork_generation_;
};

/// `threads` are the library's own and the default; `openmp` and `tbb` are for programs that live on that runtime.
enum class executor_kind : std::uint8_t { threads, openmp, tbb, serial };

/// "threads", "openmp", "tbb" or "serial".
[[nodiscard]] BIFOLIO_API std::string_view to_string(executor_kind kind) noexcept;
/// Throws `error` (invalid_argument).
[[nodiscard]] BIFOLIO_API executor_kind parse_executor(std::string_view text);

/// `threads`.
[[nodiscard]] BIFOLIO_API executor_kind default_executor() noexcept;

/// `num_threads` 0: `threads` takes the processors of the calling thread's affinity mask, or the lower quota of the
/// process's control groups; `openmp` and `tbb` what their runtime takes (OMP_NUM_THREADS, the arena's default).
/// `serial` is always one worker. `openmp` and `tbb` are refused in a child made by fork() if workers ran on that
/// runtime in the parent: its threads are gone. A child whose parent had not used it may. `threads` starts new ones in
/// a child, and `serial` has none. (That something else in the program used OpenMP or oneTBB before the fork cannot be
/// seen from here.) Throws `error`: invalid_argument when negative or above 4096, unsupported when that runtime was
/// left out of the build, failed_precondition in such a child.
[[nodiscard]] BIFOLIO_API std::unique_ptr<executor> make_executor(executor_kind kind, std::int32_t num_threads = 0);

}  // namespace bifolio::inline v0_2
