// SPDX-License-Identifier: Apache-2.0
#include "parallel.hpp"

#include <bifolio/error.hpp>

namespace generate {

std::unique_ptr<bifolio::executor> make_workers(std::int32_t num_threads) {
  using bifolio::executor_kind;
  for (const executor_kind kind : {executor_kind::openmp, executor_kind::tbb}) {
    try {
      return bifolio::make_executor(kind, num_threads);
    } catch (const bifolio::error& problem) {
      if (problem.code() != bifolio::errc::unsupported) throw;  // left out of the build: try the next
    }
  }
  return bifolio::make_executor(executor_kind::serial);
}

}  // namespace generate
