// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bifolio/executor.hpp>
#include <cstdint>
#include <memory>

namespace bifolio::cpu {

[[nodiscard]] std::unique_ptr<executor> make_serial_executor();
[[nodiscard]] std::unique_ptr<executor> make_openmp_executor(std::int32_t num_threads);
[[nodiscard]] std::unique_ptr<executor> make_tbb_executor(std::int32_t num_threads);

}  // namespace bifolio::cpu
