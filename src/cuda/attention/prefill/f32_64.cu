// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/prefill/f32_kernel.cuh"
#include "cuda/attention/prefill/launch.hpp"

namespace bifolio::inline v0_2::cuda {

const prefill_entry prefill_f32_64 = prefill::make_f32_entry<64>();

}  // namespace bifolio::inline v0_2::cuda
