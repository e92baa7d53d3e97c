// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/kernel.cuh"
#include "cuda/attention/decode/launch.hpp"

namespace bifolio::inline v0_2::cuda {

const decode_entry decode_bf16_128 = decode::make_entry<__nv_bfloat16, 128, 4, false>();
const decode_entry decode_bf16_128_padded = decode::make_entry<__nv_bfloat16, 128, 4, true>();
const decode_entry decode_f16_128 = decode::make_entry<__half, 128, 4, false>();
const decode_entry decode_f16_128_padded = decode::make_entry<__half, 128, 4, true>();

}  // namespace bifolio::inline v0_2::cuda
