// SPDX-License-Identifier: Apache-2.0
#include <string_view>

#include "common/engine/backend_registry.hpp"
#include "cpu/backend.hpp"

namespace bifolio::inline v0_2 {
namespace {

constexpr std::string_view options[] = {"num_threads", "executor_choice", "own_executor", "isa", "host_memory"};

}  // namespace

constinit const detail::backend_registration detail::cpu_registration{
    cpu_row,
    [](device, const backend_options& chosen) -> std::unique_ptr<backend> {
      return std::make_unique<cpu::cpu_backend>(chosen);
    },
    options};

}  // namespace bifolio::inline v0_2
