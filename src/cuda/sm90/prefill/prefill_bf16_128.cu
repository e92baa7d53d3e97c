// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/prefill/prefill_kernel.cuh"
#include "cuda/sm90/prefill/prefill_launch.hpp"

namespace bifolio::cuda {

const prefill_entry prefill_bf16_128 = prefill::make_entry<__nv_bfloat16, 128>();

}  // namespace bifolio::cuda
