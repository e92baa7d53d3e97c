// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The attention calls of the CUDA backend: planning and running. The contracts are those of `backend`.

#include <bifolio/attention.hpp>
#include <bifolio/step.hpp>
#include <memory>
#include <string>
#include <vector>

#include "cuda/host/attention_plan.hpp"

namespace bifolio::inline v0_2::cuda {

void plan_attention(const std::shared_ptr<const device_state>& state, attention_plan& plan, const attention_spec& spec,
                    const host_step_view& host_batch, std::int64_t num_blocks, stream_ref stream);
void reserve_attention(const std::shared_ptr<const device_state>& state, attention_plan& plan,
                       const attention_spec& spec, std::int32_t max_num_seqs, std::int64_t max_num_tokens,
                       std::int32_t max_seq_len);
[[nodiscard]] errc attention(const device_state& state, const attention_plan& plan, const attention_params& params,
                             stream_ref stream) noexcept;
[[nodiscard]] std::vector<std::string> attention_kernel_names(const device_state& state);
[[nodiscard]] std::vector<std::string> describe(const device_state& state, const attention_plan& plan,
                                                const attention_params& params);
[[nodiscard]] std::vector<std::string> explain(const device_state& state, const attention_plan& plan);
[[nodiscard]] errc merge_states(const device_state& state, const merge_params& params, stream_ref stream) noexcept;

}  // namespace bifolio::inline v0_2::cuda
