// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention.hpp"

namespace bifolio::cpu {

void plan_attention(const kernel_table&, std::int32_t, memory_resource&, attention_plan&, const attention_spec&,
                    const step_batch_view&, std::int64_t) {
  throw error(errc::unsupported, "attention is not there yet");
}
errc attention(const kernel_table&, executor&, const attention_plan&, const attention_params&) noexcept {
  return errc::unsupported;
}
errc merge_states(const kernel_table&, executor&, const merge_params&) noexcept { return errc::unsupported; }

}  // namespace bifolio::cpu
