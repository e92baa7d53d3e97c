// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Loops over bifolio's executor, so that the model's own arithmetic and the attention share one set of threads.

#include <algorithm>
#include <bifolio/executor.hpp>
#include <cstdint>
#include <memory>

namespace generate {

/// Threads of an executor. 0: as many as it takes by itself.
/// Throws `bifolio::error` (invalid_argument, unsupported).
[[nodiscard]] std::unique_ptr<bifolio::executor> make_workers(
    std::int32_t num_threads, bifolio::executor_kind kind = bifolio::default_executor());

/// Calls function(begin, end) for ranges that cover 0 … count − 1 once, on up to one worker per `grain` items. The
/// function must not throw, and must give the same result for an item in whatever range it falls.
template <class Function>
void parallel_ranges(bifolio::executor& workers, std::int64_t count, std::int64_t grain, const Function& function) {
  struct call {
    const Function& function;
    std::int64_t count;
    std::int64_t num_workers;
  };
  const std::int64_t wanted =
      std::clamp<std::int64_t>(count / std::max<std::int64_t>(grain, 1), 1, workers.concurrency());
  const call context{function, count, wanted};
  const auto run_worker = [](void* opaque, std::int32_t worker) noexcept {
    const call& c = *static_cast<const call*>(opaque);
    const std::int64_t begin = c.count * worker / c.num_workers;
    const std::int64_t end = c.count * (worker + 1) / c.num_workers;
    if (begin < end) c.function(begin, end);
  };
  if (wanted == 1) {
    if (count > 0) function(std::int64_t{0}, count);
    return;
  }
  workers.run(static_cast<std::int32_t>(wanted), run_worker, const_cast<call*>(&context));
}

}  // namespace generate
