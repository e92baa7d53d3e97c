// SPDX-License-Identifier: Apache-2.0
/// kv_cache_manager::build: from the decisions of a step to the arrays that kernels read.

#include <bifolio/detail/manager_core.hpp>

#include "common/cache/manager_steps.hpp"

namespace bifolio::inline v0_2::detail {

void manager_core::build(step_batch& batch, const step_plan& plan) const {
  fill_batch(batch, plan, prepare_build(batch, plan));
}

}  // namespace bifolio::inline v0_2::detail
