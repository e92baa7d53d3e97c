// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The attention calls of the CPU backend: planning, running the work items, merging. The contracts are those of
/// `backend`.

#include <bifolio/attention.hpp>
#include <bifolio/executor.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/step.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/kernels/kernel_table.hpp"

namespace bifolio::inline v0_2::cpu {

/// Plans the step for `num_workers` workers; the workspace comes from `memory`. `forced`: the implementation that the
/// environment names.
void plan_attention(const kernel_table& table, std::string_view forced, std::int32_t num_workers,
                    memory_resource& memory, attention_plan& plan, const attention_spec& spec,
                    const host_step_view& batch, std::int64_t num_blocks);
[[nodiscard]] errc attention(const kernel_table& table, executor& workers, const attention_plan& plan,
                             const attention_params& params) noexcept;
[[nodiscard]] std::vector<std::string> attention_kernel_names(const kernel_table& table);
[[nodiscard]] std::vector<std::string> describe(const kernel_table& table, const attention_plan& plan,
                                                const attention_params& params);
[[nodiscard]] std::vector<std::string> explain(const kernel_table& table, const attention_plan& plan);
[[nodiscard]] errc merge_states(const kernel_table& table, executor& workers, const merge_params& params) noexcept;

}  // namespace bifolio::inline v0_2::cpu
