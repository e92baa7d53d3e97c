// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/prefill/kernel.cuh"
#include "cuda/attention/prefill/launch.hpp"

namespace bifolio::inline v0_2::cuda {

const prefill_entry prefill_bf16_64 = prefill::make_entry<__nv_bfloat16, 64>();
const prefill_entry prefill_f16_64 = prefill::make_entry<__half, 64>();

}  // namespace bifolio::inline v0_2::cuda
