// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/prefill/prefill_kernel.cuh"
#include "cuda/sm90/prefill/prefill_launch.hpp"

namespace bifolio::cuda {

const prefill_entry prefill_f16_64 = prefill::make_entry<__half, 64>();

}  // namespace bifolio::cuda
