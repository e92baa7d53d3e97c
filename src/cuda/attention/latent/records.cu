// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/latent/launch.hpp"
#include "cuda/attention/latent/record_kernel.cuh"

namespace bifolio::inline v0_2::cuda {

const latent_entry latent_records = {latent::make_record_entry<latent::many_record_rows>(),
                                     latent::make_record_entry<latent::few_record_rows>()};

}  // namespace bifolio::inline v0_2::cuda
