// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/latent/launch.hpp"
#include "cuda/attention/latent/record_kernel.cuh"

namespace bifolio::inline v0_2::cuda {

const latent_entry latent_records = {
    {latent::many_records_kernel, latent::record_parts.bytes, latent::many_rows::num_threads},
    {latent::few_records_kernel, latent::shared_parts<latent::few_records>.bytes, latent::few_records::num_threads}};

}  // namespace bifolio::inline v0_2::cuda
