// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/kernel.cuh"
#include "cuda/attention/decode/launch.hpp"

namespace bifolio::inline v0_2::cuda {

const decode_entry decode_f32_64_padded = decode::make_entry<float, 64, 4, true>();
const decode_entry decode_f32_128_padded = decode::make_entry<float, 128, 8, true>();

}  // namespace bifolio::inline v0_2::cuda
