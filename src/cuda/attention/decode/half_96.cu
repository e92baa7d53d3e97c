// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/kernel.cuh"
#include "cuda/attention/decode/launch.hpp"

namespace bifolio::inline v0_2::cuda {

const decode_entry decode_bf16_80_padded = decode::make_entry<__nv_bfloat16, 80, 4, true>();
const decode_entry decode_bf16_96_padded = decode::make_entry<__nv_bfloat16, 96, 4, true>();
const decode_entry decode_f16_80_padded = decode::make_entry<__half, 80, 4, true>();
const decode_entry decode_f16_96_padded = decode::make_entry<__half, 96, 4, true>();

}  // namespace bifolio::inline v0_2::cuda
