// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/kernel.cuh"
#include "cuda/attention/decode/launch.hpp"

namespace bifolio::inline v0_2::cuda {

const decode_entry decode_bf16_64 = decode::make_entry<__nv_bfloat16, 64, 4, false>();
const decode_entry decode_bf16_64_padded = decode::make_entry<__nv_bfloat16, 64, 4, true>();
const decode_entry decode_f16_64 = decode::make_entry<__half, 64, 4, false>();
const decode_entry decode_f16_64_padded = decode::make_entry<__half, 64, 4, true>();

}  // namespace bifolio::inline v0_2::cuda
