// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The latent kernels for caches of records: the consumers of the others, and producers that make bfloat16 of codes.

#include "cuda/attention/latent/kernel.cuh"
#include "cuda/attention/latent/launch.hpp"
#include "cuda/attention/latent/pipeline.cuh"
#include "cuda/attention/latent/record_producer.cuh"
#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::latent {

template <class R>
__global__ void __launch_bounds__(R::num_threads, 1)
    latent_record_kernel(const __grid_constant__ prefill_args args, const __grid_constant__ tensor_map q_map,
                         const __grid_constant__ tensor_map) {
  using S = typename R::tile_shape;
  extern __shared__ char shared[];
  __shared__ prefill::work_slots slots;
  const shared_stages<S> stages(shared);
  const int warpgroup = prefill::uniform(static_cast<int>(threadIdx.x) / 128);
  if (threadIdx.x == 0) {
    stages.init_barriers(record_producer<R>::arrivals);
    arriving_records<R>(stages).init_barriers();
    slots.init_barriers(R::num_threads / 32 - 1);
  }
  __syncthreads();
  device::grid_dependency_launch();
  if (warpgroup < R::num_producers) {
    device::setmaxnreg_dec<R::producer_registers>();
    if (threadIdx.x < 32) {
      const prefill::work_source source(args, slots);
      device::grid_dependency_wait();
      record_producer<R>(args, stages, &q_map, warpgroup).run(source);
    } else {
      device::grid_dependency_wait();
      record_producer<R>(args, stages, &q_map, warpgroup).run(prefill::work_queue(slots));
    }
  } else {
    device::setmaxnreg_inc<R::consumer_registers>();
    device::grid_dependency_wait();
    consume<__nv_bfloat16>(args, stages, prefill::work_queue(slots), warpgroup - R::num_producers);
  }
}

template <class R>
[[nodiscard]] constexpr latent_kernel_entry make_record_entry() noexcept {
  return {latent_record_kernel<R>, record_parts<R>.bytes, R::num_threads};
}

}  // namespace bifolio::inline v0_2::cuda::latent
