// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/kernel.cuh"
#include "cuda/attention/decode/launch.hpp"

namespace bifolio::inline v0_2::cuda {

const decode_entry decode_coded_k_160_padded = decode::make_entry<decode::coded_keys_alone<2>, 160, 8, true>();
const decode_entry decode_coded_k_192_padded = decode::make_entry<decode::coded_keys_alone<2>, 192, 8, true>();
const decode_entry decode_coded_k_256_padded = decode::make_entry<decode::coded_keys_alone<2>, 256, 8, true>();

}  // namespace bifolio::inline v0_2::cuda
