// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bifolio/executor.hpp>
#include <cstdint>
#include <memory>
#include <string_view>

namespace bifolio::inline v0_2::cpu {

/// Throws `error` (failed_precondition): this process is a child made by fork(), and `name` had threads in its parent.
[[noreturn]] void refuse_lost_threads(std::string_view name);

[[nodiscard]] std::unique_ptr<executor> make_serial_executor();
[[nodiscard]] std::unique_ptr<executor> make_threads_executor(std::int32_t num_threads);
[[nodiscard]] std::unique_ptr<executor> make_openmp_executor(std::int32_t num_threads);
[[nodiscard]] std::unique_ptr<executor> make_tbb_executor(std::int32_t num_threads);

}  // namespace bifolio::inline v0_2::cpu
