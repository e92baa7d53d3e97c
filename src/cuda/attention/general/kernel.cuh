// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The general attention kernel. A CTA of 128 threads takes an item (items.hpp) for one KV head and up to 256
/// output dims, and walks its splits in tiles of 64 positions:
///
///   offsets   where each position's K and V are, through the block table; positions that no row attends to are
///             never looked up
///   K, V      128 dims of the tile to shared memory as float32, 16 bytes a load where strides and alignment allow;
///             for codes with their scales, by a branch per load on the type of the plane: one instance for all
///   scores    thread = one position and half of the rows; dims beyond 128 take further rounds
///   softmax   one warp a row; running maximum and sum in shared memory
///   values    thread = one dim (and the one 128 further), all rows, accumulated in registers
///
/// The order of every sum depends on the head dims alone: not on the batch, the tile of rows or the number of thread
/// blocks. Positions that a row must not see carry the weight −0, which selects their V away instead of multiplying it.

#include <cstdint>

#include "common/attention/visibility.hpp"
#include "cuda/attention/general/items.hpp"
#include "cuda/attention/general/loader.cuh"
#include "cuda/device/codes.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/paged.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/host/kernel_args.hpp"

namespace bifolio::inline v0_2::cuda {

/// One position's V into all rows; with Select, rows whose weight is −0 do not look at it.
template <int Rows, bool Select>
__device__ __forceinline__ void add_values(float* accumulated, const float* weights, float value) {
#pragma unroll
  for (int r = 0; r < Rows; r += 4) {
    const float4 w = *reinterpret_cast<const float4*>(weights + r);
    const auto visible = [&](float weight) {
      return Select && __float_as_int(weight) == static_cast<int>(0x80000000u) ? 0.0f : value;
    };
    accumulated[r] = __fmaf_rn(w.x, visible(w.x), accumulated[r]);
    accumulated[r + 1] = __fmaf_rn(w.y, visible(w.y), accumulated[r + 1]);
    accumulated[r + 2] = __fmaf_rn(w.z, visible(w.z), accumulated[r + 2]);
    accumulated[r + 3] = __fmaf_rn(w.w, visible(w.w), accumulated[r + 3]);
  }
}

/// Whether there is an item of this ordinal; it is then in shared memory. Called by one thread.
template <int Rows>
__device__ __forceinline__ bool find_item(general_shared<Rows>& shared, const general_args& args,
                                          std::int64_t ordinal) {
  const general_header header = *args.metadata.header;
  if (header.num_items < 0) return shared.tiles.find(args.call, header.num_seqs, Rows, ordinal, shared.item);
  if (ordinal >= header.num_items) return false;
  shared.item = args.metadata.items[ordinal];
  return true;
}

template <class T, int Rows>
__global__ void __launch_bounds__(general_threads, Rows == few_rows ? 3 : 2)
    attention_general(const __grid_constant__ general_args args) {
  constexpr int rows_per_half = Rows / 2;  // of one thread in the score phase
  constexpr int dims_per_thread = dims_per_tile / general_threads;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<general_shared<Rows>*>(shared_bytes);
  const attention_kernel_args& call = args.call;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;

  const std::int32_t parts = call.num_kv_heads * args.num_dim_tiles;
  if (thread == 0) shared.tiles = {0, 0};
  const bool queries_fit = call.head_dim <= dims_per_tile;

  for (std::int64_t work = blockIdx.x;; work += gridDim.x) {
    __syncthreads();  // the work before this one is done with shared memory
    if (thread == 0) shared.has_item = find_item<Rows>(shared, args, work / parts);
    __syncthreads();
    if (!shared.has_item) break;
    const general_item& item = shared.item;
    const auto part = static_cast<std::int32_t>(work % parts);
    const std::int32_t kv_head = part / args.num_dim_tiles;
    const std::int32_t dim_tile = part % args.num_dim_tiles;
    const std::int32_t first_out_dim = dim_tile * dims_per_tile;
    const std::int32_t num_out_dims = min(dims_per_tile, call.v_head_dim - first_out_dim);

    const std::int32_t first_token = call.query_start_loc[item.seq];
    const std::int32_t query_len = call.query_start_loc[item.seq + 1] - first_token;
    if (query_len < call.min_query_len) continue;
    const std::int32_t seq_len = call.seq_lens[item.seq];
    const std::int64_t rows_left = static_cast<std::int64_t>(query_len) * call.group_size - item.first_row;
    const auto num_rows = static_cast<std::int32_t>(min(static_cast<std::int64_t>(Rows), rows_left));
    const std::int32_t* const table = call.block_tables + item.seq * call.block_table_stride;

    if (thread < Rows) {
      const bool used = thread < num_rows;
      const std::int32_t row = item.first_row + (used ? thread : 0);
      const auto position = static_cast<std::int32_t>(
          attn::first_query_position(call.query_positions, item.seq, query_len, seq_len) + row / call.group_size);
      const std::int32_t head = kv_head * call.group_size + row % call.group_size;
      const auto [begin, end] = attn::window_of(call).of(position, seq_len);
      shared.row_position[thread] = position;
      shared.row_begin[thread] = used && begin < end ? static_cast<std::int32_t>(begin) : 0;
      shared.row_end[thread] = used && begin < end ? static_cast<std::int32_t>(end) : 0;
      shared.row_slope[thread] = used && call.alibi_slopes != nullptr ? call.alibi_slopes[head] : 0.0f;
      shared.row_bias[thread] =
          (first_token + row / call.group_size) * call.bias_token_stride + head * call.bias_head_stride;
      shared.total_m[thread] = minus_infinity();
      shared.total_l[thread] = 0.0f;
    }
    if (queries_fit) {
      load_queries<Rows>(shared, call, first_token, item.first_row, num_rows, kv_head, 0, call.head_dim);
      // The score phase reads whole float4s.
      const std::int32_t padded = (call.head_dim + 3) / 4 * 4 - call.head_dim;
      for (std::int32_t i = thread; i < Rows * padded; i += general_threads) {
        shared.q[i / padded][call.head_dim + i % padded] = 0.0f;
      }
    }
    __syncthreads();

    // Positions that some row attends to. Rows are in the order of their positions, and so are their bounds; rows that
    // see nothing have end 0.
    std::int32_t tile_begin = 0x7fffffff;
    std::int32_t tile_end = 0;
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      if (shared.row_end[r] == 0) continue;
      tile_begin = min(tile_begin, shared.row_begin[r]);
      tile_end = max(tile_end, shared.row_end[r]);
    }

    float total[dims_per_thread][Rows];
    float accumulated[dims_per_thread][Rows];
#pragma unroll
    for (int c = 0; c < dims_per_thread; ++c) {
#pragma unroll
      for (int r = 0; r < Rows; ++r) total[c][r] = accumulated[c][r] = 0.0f;
    }

    for (std::int32_t split = item.first_split; split < item.first_split + item.num_splits; ++split) {
      const std::int64_t split_begin = static_cast<std::int64_t>(split) * split_positions;
      if (thread < Rows) {
        shared.m[thread] = minus_infinity();
        shared.l[thread] = 0.0f;
      }
#pragma unroll
      for (int c = 0; c < dims_per_thread; ++c) {
#pragma unroll
        for (int r = 0; r < Rows; ++r) accumulated[c][r] = 0.0f;
      }

      for (std::int32_t step = 0; step < split_positions; step += general_keys) {
        const std::int64_t first = split_begin + step;
        if (first >= tile_end) break;
        if (first + general_keys <= tile_begin) continue;

        __syncthreads();  // the tile before this one has been used
        if (thread < general_keys) {
          const std::int64_t position = first + thread;
          std::int64_t k_offset = -1;
          std::int64_t v_offset = -1;
          if (position >= tile_begin && position < tile_end) {
            const auto entry = static_cast<std::int32_t>(position) / call.block_size;
            const std::int32_t in_block = static_cast<std::int32_t>(position) - entry * call.block_size;
            // The plan checked the host's table; a different one on the device must not lead out of the cache.
            std::int64_t block = table[entry];
            block = block < 0 ? 0 : block >= call.num_blocks ? call.num_blocks - 1 : block;
            k_offset = token_offset(call.k_strides, block, kv_head, in_block);
            v_offset = token_offset(call.v_strides, block, kv_head, in_block);
            if constexpr (__is_same(T, any_code)) {
              shared.k_scale[thread] = scales_of(call.k_scales, call.k, call.k_strides, block, kv_head, in_block);
              shared.v_scale[thread] = scales_of(call.v_scales, call.v, call.v_strides, block, kv_head, in_block);
            }
          }
          shared.k_offset[thread] = k_offset;
          shared.v_offset[thread] = v_offset;
        }
        __syncthreads();

        // Scores.
        const int key = thread % general_keys;
        const int first_own_row = thread / general_keys * rows_per_half;
        float scores[rows_per_half];
#pragma unroll
        for (int r = 0; r < rows_per_half; ++r) scores[r] = 0.0f;
        for (std::int32_t dim = 0; dim < call.head_dim; dim += general_round) {
          if (dim > 0) __syncthreads();
          load_k<T>(shared, call, args.k_mode, dim);
          if (dim == 0) load_v<T>(shared, call, args.v_mode, first_out_dim);
          const std::int32_t round = min(general_round, (call.head_dim - dim + 3) / 4 * 4);
          if (!queries_fit) {
            load_queries<Rows>(shared, call, first_token, item.first_row, num_rows, kv_head, dim,
                               min(general_round, call.head_dim - dim));
            const std::int32_t real = min(general_round, call.head_dim - dim);
            for (std::int32_t i = thread; i < Rows * (round - real); i += general_threads) {
              shared.q[i / (round - real)][real + i % (round - real)] = 0.0f;
            }
          }
          __syncthreads();
          const std::int32_t q_dim = queries_fit ? dim : 0;
          for (std::int32_t d = 0; d < round; d += 4) {
            const float4 k = *reinterpret_cast<const float4*>(&shared.k[key][d]);
#pragma unroll
            for (int r = 0; r < rows_per_half; ++r) {
              const float4 q = *reinterpret_cast<const float4*>(&shared.q[first_own_row + r][q_dim + d]);
              scores[r] = __fmaf_rn(q.x, k.x, scores[r]);
              scores[r] = __fmaf_rn(q.y, k.y, scores[r]);
              scores[r] = __fmaf_rn(q.z, k.z, scores[r]);
              scores[r] = __fmaf_rn(q.w, k.w, scores[r]);
            }
          }
        }
        const std::int64_t position = first + key;
#pragma unroll
        for (int r = 0; r < rows_per_half; ++r) {
          const int row = first_own_row + r;
          const attn::logit_terms<float> terms{call.scale, call.soft_cap, call.alibi_slopes != nullptr,
                                               shared.row_slope[row]};
          float score =
              attn::logit_of<device_math>(scores[r], terms, static_cast<float>(position - shared.row_position[row]));
          const bool visible = position >= shared.row_begin[row] && position < shared.row_end[row];
          if (call.bias != nullptr && visible) {
            score = attn::with_bias<device_math>(
                score, load_as_float(call.bias, shared.row_bias[row] + position, call.bias_type));
          }
          shared.weights[key][row] = visible ? score : __int_as_float(mask_sentinel);
        }
        __syncthreads();

        // Softmax: one warp a row.
        for (int row = warp; row < Rows; row += general_threads / 32) {
          float low = shared.weights[lane][row];
          float high = shared.weights[lane + 32][row];
          const bool low_visible = __float_as_int(low) != mask_sentinel;
          const bool high_visible = __float_as_int(high) != mask_sentinel;
          low = low_visible ? low : minus_infinity();
          high = high_visible ? high : minus_infinity();
          float largest = fmaxf(low, high);
#pragma unroll
          for (int mask = 16; mask > 0; mask /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
          const float before = shared.m[row];
          const float joint = fmaxf(before, largest);
          const float base = attn::finite_max(joint);
          low = low_visible ? expf(__fsub_rn(low, base)) : -0.0f;
          high = high_visible ? expf(__fsub_rn(high, base)) : -0.0f;
          shared.weights[lane][row] = low;
          shared.weights[lane + 32][row] = high;
          float sum = __fadd_rn(low, high);
#pragma unroll
          for (int mask = 16; mask > 0; mask /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
          __syncwarp();
          if (lane == 0) {
            const float rescale = expf(__fsub_rn(before, base));
            shared.rescale[row] = rescale;
            shared.l[row] = __fmaf_rn(shared.l[row], rescale, sum);
            shared.m[row] = joint;
          }
        }
        __syncthreads();

        // Values. Where every row attends to every position of the tile nothing has to be masked.
        bool select = first < tile_begin || first + general_keys > tile_end;
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
          select = select || shared.row_begin[r] > first || shared.row_end[r] < first + general_keys;
        }
#pragma unroll
        for (int c = 0; c < dims_per_thread; ++c) {
          if (c * general_threads >= num_out_dims) break;
          if (c > 0) {  // the first dims came together with K
            __syncthreads();
            load_v<T>(shared, call, args.v_mode, first_out_dim + c * general_threads);
            __syncthreads();
          }
#pragma unroll
          for (int r = 0; r < Rows; ++r) accumulated[c][r] = __fmul_rn(accumulated[c][r], shared.rescale[r]);
          if (select) {
            for (int k = 0; k < general_keys; ++k) {
              add_values<Rows, true>(accumulated[c], shared.weights[k], shared.v[k][thread]);
            }
          } else {
#pragma unroll 4
            for (int k = 0; k < general_keys; ++k) {
              add_values<Rows, false>(accumulated[c], shared.weights[k], shared.v[k][thread]);
            }
          }
        }
      }

      // Combine the split, unless another CTA combines its tile.
      __syncthreads();
      if (item.tile < 0) {
        if (thread < Rows) {
          shared.combine[thread] = attn::combine_any_state<device_math>(shared.total_m[thread], shared.total_l[thread],
                                                                        shared.m[thread], shared.l[thread]);
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
          const attn::combine_weights<float> w = shared.combine[r];
#pragma unroll
          for (int c = 0; c < dims_per_thread; ++c)
            total[c][r] = attn::combine_value<device_math>(w, total[c][r], accumulated[c][r]);
        }
      }
    }

    if (item.tile >= 0) {
      // Partial results: m and l of all rows, then [rows, dims].
      const std::int64_t stride = partial_floats(Rows, call.v_head_dim);
      const std::int64_t row_floats = stride / Rows - 2;
      float* const own = call.workspace + (static_cast<std::int64_t>(item.partial) * parts + part) * stride;
      if (thread < Rows) {
        own[thread] = shared.m[thread];
        own[Rows + thread] = shared.l[thread];
      }
#pragma unroll
      for (int c = 0; c < dims_per_thread; ++c) {
        const int dim = c * general_threads + thread;
        if (dim >= num_out_dims) continue;
#pragma unroll
        for (int r = 0; r < Rows; ++r) own[2 * Rows + r * row_floats + dim] = accumulated[c][r];
      }
      __threadfence();
      __syncthreads();
      std::uint32_t* const counter = call.counters + static_cast<std::int64_t>(item.tile) * parts + part;
      if (thread == 0) shared.arrived = atomicAdd(counter, 1u);
      __syncthreads();
      if (shared.arrived != static_cast<std::uint32_t>(item.num_partials) - 1) continue;
      if (thread == 0) *counter = 0;
      __threadfence();
      for (std::int32_t p = 0; p < item.num_partials; ++p) {
        const float* const partial =
            call.workspace + (static_cast<std::int64_t>(item.first_partial + p) * parts + part) * stride;
        __syncthreads();
        if (thread < Rows) {
          shared.combine[thread] =
              attn::combine_any_state<device_math>(shared.total_m[thread], shared.total_l[thread],
                                                   __ldcg(partial + thread), __ldcg(partial + Rows + thread));
        }
        __syncthreads();
#pragma unroll
        for (int c = 0; c < dims_per_thread; ++c) {
          const int dim = c * general_threads + thread;
          if (dim >= num_out_dims) continue;
#pragma unroll
          for (int r = 0; r < Rows; ++r) {
            total[c][r] = attn::combine_value<device_math>(shared.combine[r], total[c][r],
                                                           __ldcg(partial + 2 * Rows + r * row_floats + dim));
          }
        }
      }
      __syncthreads();
    }

    if (thread < num_rows) {
      const std::int32_t row = item.first_row + thread;
      const std::int32_t head = kv_head * call.group_size + row % call.group_size;
      const bool has_sink = call.sinks != nullptr;
      const attn::row_epilogue<float> finish = attn::finish_row<device_math>(
          shared.total_m[thread], shared.total_l[thread], has_sink, has_sink ? call.sinks[head] : 0.0f);
      shared.finish[thread] = finish;
      if (call.lse != nullptr && dim_tile == 0) {
        const std::int64_t token = first_token + row / call.group_size;
        call.lse[token * call.num_q_heads + head] = finish.lse;
      }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      if (r >= num_rows) break;
      const std::int32_t row = item.first_row + r;
      const std::int64_t token = first_token + row / call.group_size;
      const std::int64_t head = static_cast<std::int64_t>(kv_head) * call.group_size + row % call.group_size;
      const attn::row_epilogue<float> finish = shared.finish[r];
#pragma unroll
      for (int c = 0; c < dims_per_thread; ++c) {
        const int dim = c * general_threads + thread;
        if (dim >= num_out_dims) continue;
        store_from_float(call.out, token * call.out_token_stride + head * call.out_head_stride + first_out_dim + dim,
                         call.out_type, attn::output_of<device_math>(finish, total[c][r]));
      }
    }
  }
}

}  // namespace bifolio::inline v0_2::cuda
