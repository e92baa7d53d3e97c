// SPDX-License-Identifier: Apache-2.0
#include "cost_model.hpp"

namespace trace_replay {

double step_us(const cost_model& costs, const bifolio::step_plan& plan, std::int64_t block_size) noexcept {
  double num_read = 0;
  double num_scores = 0;
  for (const bifolio::scheduled_seq& one : plan.seqs) {
    const auto query = static_cast<double>(one.query_len);
    const auto visible = static_cast<double>(one.seq_len);
    num_read += visible;
    num_scores += query * (visible - (query - 1) / 2);
  }
  const auto num_moved =
      static_cast<double>(block_size) * static_cast<double>(plan.swap_outs.size() + plan.swap_ins.size());
  return (plan.seqs.empty() ? 0.0 : costs.per_step) + costs.per_token * static_cast<double>(plan.num_tokens) +
         costs.per_kv_token * num_read + costs.per_score * num_scores + costs.per_swapped_token * num_moved;
}

}  // namespace trace_replay
