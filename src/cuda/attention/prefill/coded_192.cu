// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/prefill/kernel.cuh"
#include "cuda/attention/prefill/launch.hpp"

namespace bifolio::inline v0_2::cuda {

const prefill_entry prefill_coded_192 = prefill::make_coded_entry<192>();

}  // namespace bifolio::inline v0_2::cuda
