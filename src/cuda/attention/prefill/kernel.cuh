// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Prefill attention for Hopper over a paged cache, in the structure of FlashAttention-3 (Shah et al., 2024,
/// sections 3.1 and 3.2): a producer keeps the stages full, consumer warpgroups have 64 query rows each (above 256
/// dims the same 64), with S, P and O in registers. docs/kernels/attention_cuda_prefill.md has the picture.

#include <type_traits>

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/coded_producer.cuh"
#include "cuda/attention/prefill/copy_producer.cuh"
#include "cuda/attention/prefill/epilogue.cuh"
#include "cuda/attention/prefill/held_coded_producer.cuh"
#include "cuda/attention/prefill/launch.hpp"
#include "cuda/attention/prefill/mainloop.cuh"
#include "cuda/attention/prefill/part_mainloop.cuh"
#include "cuda/attention/prefill/pipeline.cuh"
#include "cuda/attention/prefill/plane_producer.cuh"
#include "cuda/attention/prefill/producer.cuh"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/attention/prefill/shape.hpp"
#include "cuda/attention/prefill/tree_mainloop.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// The mainloop of a kernel: with or without the logits transform, or that of deterministic plans.
template <class T, class Shape, bool Transform>
struct mainloop_choice {
  using type = mainloop<T, Shape, Transform>;
};
template <class T, class Shape, bool Transform>
requires(Shape::has_tree) struct mainloop_choice<T, Shape, Transform> {
  using type = tree_mainloop<T, Shape>;
};
template <class T, class Shape, bool Transform>
requires(Shape::has_parts) struct mainloop_choice<T, Shape, Transform> {
  using type = part_mainloop<T, Shape, Transform>;
};

template <class T, class Shape, bool Transform>
__device__ __forceinline__ void consume(const prefill_args& args, const shared_stages<Shape>& stages, work_queue queue,
                                        int warpgroup) {
  const int thread = static_cast<int>(threadIdx.x) & 127;
  const int row_part = Shape::row_part(warpgroup);
  typename mainloop_choice<T, Shape, Transform>::type loop(args, stages, warpgroup, thread);
  const epilogue<T, output_part<Shape>> end(args, thread, Shape::first_dim(warpgroup));
  row_state rows;
  float o[Shape::out_registers];
  loop.start();
  for (; queue.next(); queue.release()) {
    const prefill_work_tile work = queue.work();
    const kv_range e = kv_range_of<Shape>(args, work);
    const bool has_keys = e.tile_begin < e.tile_end;
    if ((Shape::num_consumers * work.row_tile + row_part) * args.tokens_per_warpgroup >= work.query_len) {
      if (has_keys) loop.skip(e);
      continue;
    }
    rows.begin<Shape, Transform>(args, work, row_part, thread);
#pragma unroll
    for (int j = 0; j < Shape::out_registers; ++j) o[j] = 0;
    if (has_keys) loop.process(e, work.head / args.group_size, rows, o);
    if (work.partial < 0) {
      end.store(work, rows, o);
    } else {
      end.store_partial(work, rows, row_part, o);
    }
  }
  loop.finish();
}

// The producer's first warp has a work_source, the others a work_queue.
template <class Shape, bool Transform, class Source>
__device__ __forceinline__ void produce_in_four_warps(const prefill_args& args, const shared_stages<Shape>& stages,
                                                      const tensor_map* q_map, const Source& source) {
  if constexpr (Shape::is_coded) {
    constexpr bool folds_scales = has_token_softmax<Shape, Transform>;
    using staged = std::conditional_t<Shape::has_plane_producers, plane_producer<Shape, folds_scales>,
                                      coded_producer<Shape, folds_scales>>;
    std::conditional_t<Shape::has_raw_codes, staged, held_coded_producer<Shape, folds_scales>> producer(args, stages,
                                                                                                        q_map);
    if constexpr (Shape::num_producers == 1) {
      producer.run_both(source);
    } else if (uniform(static_cast<int>(threadIdx.x) / 128) == 0) {
      producer.template run_plane<true>(source);
    } else {
      producer.template run_plane<false>(source);
    }
  } else {
    copy_producer<Shape>(args, stages, q_map).run(source);
  }
}

template <class T, class Shape, bool Transform>
__global__ void __launch_bounds__(Shape::num_threads, 1)
    prefill_kernel(const __grid_constant__ prefill_args args, const __grid_constant__ tensor_map q_map,
                   const __grid_constant__ tensor_map k_map, const __grid_constant__ tensor_map v_map) {
  extern __shared__ char shared[];
  __shared__ work_slots slots;
  const shared_stages<Shape> stages(shared);
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / 128);
  const bool by_copy = Shape::is_coded || args.loading.by_copy;
  if (threadIdx.x == 0) {
    const int arrivals = Shape::is_coded ? coded_producer_arrivals : by_copy ? 128 : 1;
    stages.init_barriers(arrivals, more_arrivals_for_keys<Shape>(args));
    slots.init_barriers(4 * Shape::num_warpgroups + (by_copy ? 4 * Shape::num_producers - 1 : 0));
  }
  __syncthreads();
  device::grid_dependency_launch();
  if (warpgroup < Shape::num_producers) {
    device::setmaxnreg_dec<Shape::producer_registers>();
    // The plan was uploaded before the previous kernel started. What follows the wait may be that kernel's work.
    if (threadIdx.x < 32) {
      const work_source source(args, slots);
      device::grid_dependency_wait();
      if (by_copy) {
        produce_in_four_warps<Shape, Transform>(args, stages, &q_map, source);
      } else {
        tma_producer<Shape>(args, stages, &q_map, &k_map, &v_map).run(source);
      }
    } else if (by_copy) {
      device::grid_dependency_wait();
      produce_in_four_warps<Shape, Transform>(args, stages, &q_map, work_queue(slots));
    }
  } else {
    device::setmaxnreg_inc<Shape::consumer_registers>();
    device::grid_dependency_wait();
    consume<T, Shape, Transform>(args, stages, work_queue(slots), warpgroup - Shape::num_producers);
  }
}

template <class T, class Shape, bool Transform>
[[nodiscard]] constexpr prefill_choice choice_of() noexcept {
  return {prefill_kernel<T, Shape, Transform>, Shape::shared.bytes, Shape::num_threads};
}

template <class T, int TileDims>
[[nodiscard]] constexpr prefill_entry make_entry() noexcept {
  using plain = shape<TileDims>;
  prefill_entry entry;
  entry.plain[0] = choice_of<T, plain, false>();
  entry.plain[1] = choice_of<T, plain, true>();
  if constexpr (prefill_has_tree(TileDims)) {
    entry.deterministic = choice_of<T, shape<TileDims, prefill_kind::tree>, true>();
  } else {
    using parts = shape<TileDims, prefill_kind::parts>;
    entry.deterministic = choice_of<T, parts, false>();
    entry.deterministic_transform = choice_of<T, parts, true>();
  }
  return entry;
}

/// Those over codes, for queries of either type: codes and probabilities are float16, and queries become it.
template <int TileDims>
[[nodiscard]] constexpr prefill_entry make_coded_entry() noexcept {
  static_assert(prefill_has_codes(TileDims));
  using coded = shape<TileDims, prefill_kind::coded>;
  prefill_entry entry;
  entry.coded[0] = choice_of<__half, coded, false>();
  entry.coded[1] = choice_of<__half, coded, true>();
  using by_token = shape<TileDims, prefill_kind::coded_by_token>;
  entry.coded_by_token[0] = choice_of<__half, by_token, false>();
  entry.coded_by_token[1] = choice_of<__half, by_token, true>();
  using by_zero = shape<TileDims, prefill_kind::coded_by_zero>;
  entry.coded_by_zero[0] = choice_of<__half, by_zero, false>();
  entry.coded_by_zero[1] = choice_of<__half, by_zero, true>();
  return entry;
}

}  // namespace bifolio::inline v0_2::cuda::prefill
