// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/kernel.cuh"
#include "cuda/attention/decode/launch.hpp"

namespace bifolio::inline v0_2::cuda {

const decode_entry decode_coded_k_64_padded = decode::make_entry<decode::coded_keys_alone<2>, 64, 4, true>();
const decode_entry decode_coded_k_96_padded = decode::make_entry<decode::coded_keys_alone<2>, 96, 4, true>();
const decode_entry decode_coded_k_128_padded = decode::make_entry<decode::coded_keys_alone<2>, 128, 4, true>();

}  // namespace bifolio::inline v0_2::cuda
