// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention for Hopper over a paged cache in which V is the first 512 of K's 576 dims (the absorbed form of multi-head
/// latent attention, DeepSeek-V2, 2024). A tile of keys is in shared memory once and read twice, for the scores and as
/// values. As in FlashMLA's kernel, two warpgroups share the dims of the output, which no registers of one would hold.

#include "cuda/attention/latent/few_rows.cuh"
#include "cuda/attention/latent/few_rows_epilogue.cuh"
#include "cuda/attention/latent/launch.hpp"
#include "cuda/attention/latent/mainloop.cuh"
#include "cuda/attention/latent/pipeline.cuh"
#include "cuda/attention/latent/producer.cuh"
#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/epilogue.cuh"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::latent {

template <class T>
__device__ __forceinline__ void consume(const prefill_args& args, const shared_stages<many_rows>& stages,
                                        prefill::work_queue queue, int warpgroup) {
  const int thread = static_cast<int>(threadIdx.x) & 127;
  mainloop<T> loop(args, stages, warpgroup, thread);
  const prefill::epilogue<T, value_part> end(args, thread, warpgroup * many_rows::part_dims);
  prefill::row_state rows;
  float o[many_rows::out_registers];
  for (; queue.next(); queue.release()) {
    const prefill_work_tile work = queue.work();
    const prefill::kv_range e = prefill::kv_range_of<many_rows>(args, work);
    rows.begin<many_rows, false>(args, work, 0, thread);
#pragma unroll
    for (int j = 0; j < many_rows::out_registers; ++j) o[j] = 0;
    if (e.tile_begin < e.tile_end) loop.process(e, rows, o);
    if (work.partial < 0) {
      end.store(work, rows, o);
    } else {
      end.store_partial(work, rows, 0, o);
    }
  }
}

template <class T>
__device__ __forceinline__ void consume(const prefill_args& args, const shared_stages<few_rows>& stages,
                                        prefill::work_queue queue, int warpgroup) {
  const int thread = static_cast<int>(threadIdx.x) & 127;
  few_rows_mainloop<T> loop(args, stages, warpgroup, thread);
  const few_rows_epilogue<T, few_rows> end(args, stages, warpgroup, thread);
  column_state rows;
  typename few_rows_mainloop<T>::out_array o;
  for (; queue.next(); queue.release()) {
    const prefill_work_tile work = queue.work();
    rows.begin(args, work);
#pragma unroll
    for (auto& chunk : o)
#pragma unroll
      for (float& x : chunk) x = 0;
    loop.process(prefill::kv_range_of<few_rows>(args, work), rows, o);
    end.store(work, rows, o);
  }
}

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::num_threads, 1)
    latent_kernel(const __grid_constant__ prefill_args args, const __grid_constant__ tensor_map q_map,
                  const __grid_constant__ tensor_map k_map) {
  extern __shared__ char shared[];
  __shared__ prefill::work_slots slots;
  const shared_stages<Shape> stages(shared);
  const int warpgroup = prefill::uniform(static_cast<int>(threadIdx.x) / 128);
  const bool by_copy = args.loading.by_copy;
  if (threadIdx.x == 0) {
    stages.init_barriers(by_copy ? 128 : 1);
    slots.init_barriers(4 * Shape::num_warpgroups + (by_copy ? 3 : 0));
  }
  __syncthreads();
  device::grid_dependency_launch();
  if (warpgroup == 0) {
    device::setmaxnreg_dec<Shape::producer_registers>();
    // The plan was uploaded before the previous kernel started. What follows the wait may be that kernel's work.
    if (threadIdx.x < 32) {
      const prefill::work_source source(args, slots);
      device::grid_dependency_wait();
      if (by_copy) {
        copy_producer<Shape>(args, stages, &q_map).run(source);
      } else {
        tma_producer<Shape>(args, stages, &q_map, &k_map).run(source);
      }
    } else if (by_copy) {
      device::grid_dependency_wait();
      copy_producer<Shape>(args, stages, &q_map).run(prefill::work_queue(slots));
    }
  } else {
    device::setmaxnreg_inc<Shape::consumer_registers>();
    device::grid_dependency_wait();
    consume<T>(args, stages, prefill::work_queue(slots), warpgroup - 1);
  }
}

template <class T>
[[nodiscard]] constexpr latent_entry make_entry() noexcept {
  return {{latent_kernel<T, many_rows>, shared_parts<many_rows>.bytes, many_rows::num_threads},
          {latent_kernel<T, few_rows>, shared_parts<few_rows>.bytes, few_rows::num_threads}};
}

}  // namespace bifolio::inline v0_2::cuda::latent
