// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The latent kernels for caches of records. With many query rows producers make bfloat16 of codes, and the consumers
/// are those of the other kernels; with few rows consumers widen codes in registers.

#include "cuda/attention/latent/few_records.cuh"
#include "cuda/attention/latent/few_records_producer.cuh"
#include "cuda/attention/latent/few_rows_epilogue.cuh"
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

__global__ void __launch_bounds__(many_rows::num_threads, 1)
    many_records_kernel(const __grid_constant__ prefill_args args, const __grid_constant__ tensor_map q_map,
                        const __grid_constant__ tensor_map) {
  extern __shared__ char shared[];
  __shared__ prefill::work_slots slots;
  const shared_stages<many_rows> stages(shared);
  const int warpgroup = prefill::uniform(static_cast<int>(threadIdx.x) / 128);
  if (threadIdx.x == 0) {
    stages.init_barriers(record_producer::arrivals);
    record_producer::init_barriers(stages);
    slots.init_barriers(many_rows::num_threads / 32 - 1);
  }
  __syncthreads();
  device::grid_dependency_launch();
  if (warpgroup == 0) {
    device::setmaxnreg_dec<many_record_rows::producer_registers>();
    if (threadIdx.x < 32) {
      const prefill::work_source source(args, slots);
      device::grid_dependency_wait();
      record_producer(args, stages, &q_map).run(source);
    } else {
      device::grid_dependency_wait();
      record_producer(args, stages, &q_map).run(prefill::work_queue(slots));
    }
  } else {
    device::setmaxnreg_inc<many_record_rows::consumer_registers>();
    device::grid_dependency_wait();
    consume<__nv_bfloat16>(args, stages, prefill::work_queue(slots), warpgroup - 1);
  }
}

__global__ void __launch_bounds__(few_records::num_threads, 1)
    few_records_kernel(const __grid_constant__ prefill_args args, const __grid_constant__ tensor_map,
                       const __grid_constant__ tensor_map) {
  extern __shared__ char shared[];
  __shared__ prefill::work_slots slots;
  const shared_stages<few_records> stages(shared);
  const int warpgroup = prefill::uniform(static_cast<int>(threadIdx.x) / 128);
  if (threadIdx.x == 0) {
    stages.init_barriers(few_records_producer::arrivals, few_records_producer::arrivals);
    slots.init_barriers(few_records::num_threads / 32 - 1);
  }
  __syncthreads();
  device::grid_dependency_launch();
  if (warpgroup == 0) {
    device::setmaxnreg_dec<few_records::producer_registers>();
    if (threadIdx.x < 32) {
      const prefill::work_source source(args, slots);
      device::grid_dependency_wait();
      few_records_producer(args, stages).run(source);
    } else {
      device::grid_dependency_wait();
      few_records_producer(args, stages).run(prefill::work_queue(slots));
    }
    return;
  }
  device::setmaxnreg_inc<few_records::consumer_registers>();
  device::grid_dependency_wait();
  const int consumer = warpgroup - 1;
  const int thread = static_cast<int>(threadIdx.x) & 127;
  few_records_mainloop loop(args, stages, consumer, thread);
  const few_rows_epilogue<__nv_bfloat16, few_records> end(args, stages, consumer, thread);
  column_state rows;
  few_records_mainloop::out_array o;
  for (prefill::work_queue queue(slots); queue.next(); queue.release()) {
    const prefill_work_tile work = queue.work();
    rows.begin(args, work);
#pragma unroll
    for (auto& chunk : o)
#pragma unroll
      for (float& x : chunk) x = 0;
    loop.process(prefill::kv_range_of<few_records>(args, work), rows, o);
    end.store(work, rows, o);
  }
}

}  // namespace bifolio::inline v0_2::cuda::latent
