// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/kernel.cuh"
#include "cuda/attention/decode/launch.hpp"

namespace bifolio::inline v0_2::cuda {

const decode_entry decode_bf16_160_padded = decode::make_entry<__nv_bfloat16, 160, 8, true>();
const decode_entry decode_bf16_192_padded = decode::make_entry<__nv_bfloat16, 192, 8, true>();
const decode_entry decode_f16_160_padded = decode::make_entry<__half, 160, 8, true>();
const decode_entry decode_f16_192_padded = decode::make_entry<__half, 192, 8, true>();

}  // namespace bifolio::inline v0_2::cuda
