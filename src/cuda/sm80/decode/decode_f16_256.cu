// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/decode/decode_kernel.cuh"
#include "cuda/sm80/decode/decode_launch.hpp"

namespace bifolio::cuda {

const decode_entry decode_f16_256 = decode::make_entry<__half, 256, 8>();

}  // namespace bifolio::cuda
