// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Decode attention on tensor cores over a paged cache: one kernel for MHA, GQA and MQA. Persistent CTAs walk their
/// share of a stream-K schedule; docs/kernels/attention_cuda_decode.md has the picture.

#include "cuda/attention/decode/args.hpp"
#include "cuda/attention/decode/epilogue.cuh"
#include "cuda/attention/decode/launch.hpp"
#include "cuda/attention/decode/mainloop.cuh"
#include "cuda/attention/decode/scheduler.cuh"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm80.cuh"

namespace bifolio::cuda::decode {

// __maxnreg__ and __launch_bounds__ exclude each other. Two CTAs of 128 threads per SM would allow 255 registers.
template <class T, int HeadDim, int Warps, bool Masked, template <bool> class SchedulerOf>
__global__ void
#if CUDART_VERSION >= 12040
__maxnreg__((shape<HeadDim, Warps>::max_registers))
#else
__launch_bounds__(32 * Warps, shape<HeadDim, Warps>::ctas_per_sm)
#endif
    decode_kernel(const __grid_constant__ decode_args args) {
  extern __shared__ __align__(128) char shared[];
  using Shape = shape<HeadDim, Warps>;
  using Scheduler = SchedulerOf<Masked>;

  device::grid_dependency_launch();
  const Scheduler scheduler(args);
  work_cursor cursor = scheduler.first();
  if (!scheduler.has_work(cursor)) return;
  mainloop<T, Shape, Masked, Scheduler> loop(args, scheduler, shared);
  epilogue<T, Shape, Masked, Scheduler> end(args, scheduler, shared);
  accumulators<Shape> acc;

  // The plan was uploaded before the previous kernel started. What follows the wait may be that kernel's work.
  loop.prefetch_first_tile();
  device::grid_dependency_wait();
  loop.fill_pipeline();

  while (scheduler.has_work(cursor)) {
    const work_tile work = scheduler.next(cursor);
    loop.begin(work, cursor.seq);
    int tile = work.tile;
    do {
      const int stop = scheduler.accumulate_until(work, tile);
      const bool any = tile < stop;
      acc.clear();
      for (; tile < stop; ++tile) loop.process_tile(tile, acc);
      end.store(work, cursor.seq, acc, tile, any, loop.free_stage());
    } while (tile < work.tile_end);
  }
  device::cp_async_wait_group<0>();
}

template <class T, int HeadDim, int Warps>
[[nodiscard]] constexpr decode_entry make_entry() noexcept {
  using S = shape<HeadDim, Warps>;
  return {{{decode_kernel<T, HeadDim, Warps, false, stream_k>, decode_kernel<T, HeadDim, Warps, false, fixed_split>},
           {decode_kernel<T, HeadDim, Warps, true, stream_k>, decode_kernel<T, HeadDim, Warps, true, fixed_split>}},
          S::threads,
          S::shared.bytes,
          S::ctas_per_sm};
}

}  // namespace bifolio::cuda::decode
