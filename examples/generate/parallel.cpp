// SPDX-License-Identifier: Apache-2.0
#include "parallel.hpp"

namespace generate {

std::unique_ptr<bifolio::executor> make_workers(std::int32_t num_threads, bifolio::executor_kind kind) {
  return bifolio::make_executor(kind, num_threads);
}

}  // namespace generate
