// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Prefill attention in float32. Work tiles, queue and epilogue are those of the 16-bit kernels (kernel.cuh); the
/// products are three of TensorFloat-32 each.

#include <type_traits>

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/epilogue.cuh"
#include "cuda/attention/prefill/f32_mainloop.cuh"
#include "cuda/attention/prefill/f32_producer.cuh"
#include "cuda/attention/prefill/f32_shape.hpp"
#include "cuda/attention/prefill/f32_tree_mainloop.cuh"
#include "cuda/attention/prefill/launch.hpp"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

template <class Shape, bool Transform>
__device__ __forceinline__ void consume_f32(const prefill_args& args, const f32_ring<Shape>& ring, work_queue queue,
                                            int warpgroup) {
  const int thread = static_cast<int>(threadIdx.x) & 127;
  using mainloop_type = std::conditional_t<Shape::has_tree, f32_tree_mainloop<Shape>, f32_mainloop<Shape, Transform>>;
  mainloop_type loop(args, ring, warpgroup, thread);
  const epilogue<float, Shape> end(args, thread);
  row_state rows;
  float o[Shape::out_registers];
  for (; queue.next(); queue.release()) {
    const prefill_work_tile work = queue.work();
    const kv_range e = kv_range_of<Shape>(args, work);
    const bool few_rows = (Shape::num_consumers * work.row_tile + 1) * args.tokens_per_warpgroup >= work.query_len;
    rows.begin<Shape, Transform>(args, work, few_rows ? 0 : warpgroup, thread);
#pragma unroll
    for (int j = 0; j < Shape::out_registers; ++j) o[j] = 0;
    if (e.tile_begin < e.tile_end) loop.process(work, e, few_rows, rows, o);
    if (few_rows && warpgroup > 0) continue;
    if (work.partial < 0) {
      end.store(work, rows, o);
    } else {
      end.store_partial(work, rows, warpgroup, o);
    }
  }
}

template <class Shape, bool Transform>
__global__ void __launch_bounds__(Shape::num_threads, 1)
    prefill_f32_kernel(const __grid_constant__ prefill_args args, const __grid_constant__ tensor_map /*q*/,
                       const __grid_constant__ tensor_map /*k*/, const __grid_constant__ tensor_map /*v*/) {
  extern __shared__ __align__(16) char shared[];
  __shared__ work_slots slots;
  const f32_ring<Shape> ring(shared);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  if (threadIdx.x == 0) {
    ring.init_barriers();
    slots.init_barriers(4 * Shape::num_consumers + 3);
  }
  __syncthreads();
  device::grid_dependency_launch();
  if (warpgroup == 0) {
    device::setmaxnreg_dec<Shape::producer_registers>();
    // The plan was uploaded before the previous kernel started. What follows the wait may be that kernel's work.
    if (threadIdx.x < 32) {
      const work_source source(args, slots);
      device::grid_dependency_wait();
      f32_producer<Shape>(args, ring).run(source);
    } else {
      device::grid_dependency_wait();
      f32_producer<Shape>(args, ring).run(work_queue(slots));
    }
  } else {
    device::setmaxnreg_inc<Shape::consumer_registers>();
    device::grid_dependency_wait();
    consume_f32<Shape, Transform>(args, ring, work_queue(slots), warpgroup - 1);
  }
}

template <int TileDims>
[[nodiscard]] constexpr prefill_entry make_f32_entry() noexcept {
  using of = f32_shape<TileDims>;
  prefill_entry entry;
  entry.plain[0] = {prefill_f32_kernel<of, false>, of::shared_bytes, of::num_threads};
  entry.plain[1] = {prefill_f32_kernel<of, true>, of::shared_bytes, of::num_threads};
  entry.deterministic = {prefill_f32_kernel<f32_shape<TileDims, true>, true>, of::shared_bytes, of::num_threads};
  return entry;
}

}  // namespace bifolio::inline v0_2::cuda::prefill
