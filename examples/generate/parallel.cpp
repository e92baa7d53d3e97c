// SPDX-License-Identifier: Apache-2.0
#include "parallel.hpp"

namespace generate {

std::unique_ptr<bifolio::executor> make_workers(std::int32_t num_threads) {
  return bifolio::make_executor(bifolio::default_executor(), num_threads);
}

}  // namespace generate
