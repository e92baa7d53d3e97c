// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/prefill/kernel.cuh"
#include "cuda/attention/prefill/launch.hpp"

namespace bifolio::inline v0_2::cuda {

const prefill_entry prefill_bf16_128 = prefill::make_entry<__nv_bfloat16, 128>();
const prefill_entry prefill_f16_128 = prefill::make_entry<__half, 128>();

}  // namespace bifolio::inline v0_2::cuda
