// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Decode attention on tensor cores over a paged cache: one kernel for MHA, GQA and MQA. Persistent CTAs walk their
/// share of a stream-K schedule; docs/kernels/attention_cuda_decode.md has the picture.

#include <type_traits>

#include "cuda/attention/decode/args.hpp"
#include "cuda/attention/decode/coded_mainloop.cuh"
#include "cuda/attention/decode/epilogue.cuh"
#include "cuda/attention/decode/f32_tree_epilogue.cuh"
#include "cuda/attention/decode/f32_tree_mainloop.cuh"
#include "cuda/attention/decode/fma_mainloop.cuh"
#include "cuda/attention/decode/launch.hpp"
#include "cuda/attention/decode/mainloop.cuh"
#include "cuda/attention/decode/scheduler.cuh"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/attention/decode/tree_epilogue.cuh"
#include "cuda/attention/decode/tree_mainloop.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm80.cuh"

namespace bifolio::inline v0_2::cuda::decode {

template <class T, class Shape, class Scheduler, bool SplitsDims>
struct mainloop_of {
  using type = std::conditional_t<SplitsDims, tree_mainloop<T, Shape, Scheduler>, mainloop<T, Shape, Scheduler>>;
};
template <class Shape, class Scheduler>
struct mainloop_of<float, Shape, Scheduler, true> {
  using type = f32_tree_mainloop<Shape, Scheduler>;
};
template <class T, class Shape, class Scheduler>
requires(Shape::is_coded) struct mainloop_of<T, Shape, Scheduler, false> {
  using type = coded_mainloop<T, Shape, Scheduler>;
};
template <class T, class Shape, class Scheduler>
requires(Shape::by_fma) struct mainloop_of<T, Shape, Scheduler, false> {
  using type = fma_mainloop<T, Shape, Scheduler>;
};

// __maxnreg__ and __launch_bounds__ exclude each other. Two CTAs of 128 threads per SM would allow 255 registers.
template <class T, class Shape, class Scheduler>
__global__ void
#if CUDART_VERSION >= 12040
__maxnreg__((Shape::max_registers))
#else
__launch_bounds__(Shape::threads, Shape::ctas_per_sm)
#endif
    decode_kernel(const __grid_constant__ decode_args args) {
  extern __shared__ __align__(256) char shared[];

  device::grid_dependency_launch();
  auto* const plan = reinterpret_cast<decode_cta_plan*>(shared + Shape::shared.plan);
  copy_plan<Scheduler::has_fixed_tree>(args.metadata, plan);
  const Scheduler scheduler(args, *plan);
  work_cursor cursor = scheduler.first();
  if (!scheduler.has_work(cursor)) return;
  constexpr bool splits_dims = Scheduler::has_fixed_tree && Shape::splits_dims;
  using mainloop_type = typename mainloop_of<T, Shape, Scheduler, splits_dims>::type;
  mainloop_type loop(args, scheduler, shared);

  // The plan was uploaded before the previous kernel started. What follows the wait may be that kernel's work.
  loop.prefetch_first_tile();
  device::grid_dependency_wait();
  loop.fill_pipeline();

  if constexpr (splits_dims && Shape::takes_parts) {
    f32_tree_epilogue<Shape, Scheduler> end(args, scheduler, shared);
    running_tree<Shape> leaves;
    tree_rows<Shape> leaf;
    while (scheduler.has_work(cursor)) {
      work_tile work = scheduler.template next<true>(cursor);
      loop.begin(work, *cursor.seq);
      if (work.tile < work.tile_end) loop.take_queries();
      for (int tile = work.tile;; ++work.split) {
        const int piece_end = scheduler.find_piece(work, *cursor.seq);
        leaves.clear();
        while (tile < piece_end) {
          const int stop = scheduler.accumulate_until(work, tile);
          leaf.clear();
          for (; tile < stop; ++tile) loop.process_tile(tile, tile + 1 == stop, leaf);
          leaves.add(leaf, (stop - 1) / decode_leaf_tiles);
        }
        end.store(work, *cursor.seq, leaves.finish());
        if (work.ends_part) break;
      }
      end.arrive(work, *cursor.seq);
    }
  } else if constexpr (splits_dims) {
    tree_epilogue<T, Shape, Scheduler> end(args, scheduler, shared);
    running_tree<Shape> leaves;
    tree_rows<Shape> leaf;
    while (scheduler.has_work(cursor)) {
      const work_tile work = scheduler.next(cursor);
      loop.begin(work, *cursor.seq);
      leaves.clear();
      for (int tile = work.tile; tile < work.tile_end;) {
        const int stop = scheduler.accumulate_until(work, tile);
        leaf.clear();
        for (; tile < stop; ++tile) loop.process_tile(tile, tile + 1 == stop, leaf);
        leaves.add(leaf, (stop - 1) / decode_leaf_tiles);
      }
      end.store(work, *cursor.seq, leaves.finish(), loop.free_stage());
    }
  } else {
    epilogue<T, Shape, Scheduler> end(args, scheduler, shared);
    accumulators_of<Shape> acc;
    while (scheduler.has_work(cursor)) {
      const work_tile work = scheduler.next(cursor);
      loop.begin(work, *cursor.seq);
      int tile = work.tile;
      if constexpr (Shape::takes_queries_before) {
        if (tile < work.tile_end) loop.take_queries();
      }
      do {
        const int stop = scheduler.accumulate_until(work, tile);
        const bool any = tile < stop;
        acc.clear(args);
        for (; tile < stop; ++tile) loop.process_tile(tile, acc);
        end.store(work, *cursor.seq, acc, tile, any, loop.free_stage());
      } while (tile < work.tile_end);
    }
  }
  device::cp_async_wait_group<0>();
}

template <class T, int HeadDim, int Warps, bool Padded>
[[nodiscard]] constexpr decode_entry make_entry() noexcept {
  using S = shape<T, HeadDim, Warps, Padded>;
  decode_entry entry = {{decode_kernel<T, S, stream_k>, decode_kernel<T, S, fixed_split>},
                        {},
                        HeadDim,
                        Padded,
                        S::threads,
                        S::shared.bytes,
                        S::ctas_per_sm};
  if constexpr (S::is_coded) {
    using few_rows = typename few_rows_of<T>::type;
    using few = shape<few_rows, HeadDim, Warps, Padded>;
    static_assert(few::shared.bytes == S::shared.bytes && few::ctas_per_sm == S::ctas_per_sm);
    entry.few_rows[0] = decode_kernel<few_rows, few, stream_k>;
    entry.few_rows[1] = decode_kernel<few_rows, few, fixed_split>;
  }
  if constexpr (std::is_same_v<T, float>) {
    using few = shape<f32_few_rows, HeadDim, Warps, Padded>;
    using few_tree = shape<f32_few_tree_rows, HeadDim, Warps, Padded>;
    static_assert(few::ctas_per_sm == S::ctas_per_sm && few_tree::shared.bytes <= S::shared.bytes);
    entry.few_rows[0] = decode_kernel<float, few, stream_k>;
    entry.few_rows[1] = decode_kernel<float, few_tree, fixed_split>;
    if (entry.shared_bytes < few::shared.bytes) entry.shared_bytes = few::shared.bytes;
  }
  return entry;
}

}  // namespace bifolio::inline v0_2::cuda::decode
