// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/latent/kernel.cuh"
#include "cuda/attention/latent/launch.hpp"

namespace bifolio::inline v0_2::cuda {

const latent_entry latent_f16 = latent::make_entry<__half>();

}  // namespace bifolio::inline v0_2::cuda
