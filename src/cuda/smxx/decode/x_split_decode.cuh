// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/device/convert.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/general_items.hpp"
#include "cuda/kernel_args.hpp"
#include "cuda/runtime.hpp"

namespace bifolio::cuda {

inline constexpr int x_split_threads = 128;
inline constexpr int x_split_warps = x_split_threads / 32;

struct x_split_args {
  attention_kernel_args call;
  std::int32_t max_partitions;
  bool partitioned;
};

/// Partial result of (sequence · num_q_heads + head, partition): m, l, then head_dim values.
__device__ __forceinline__ float* x_split_partial(const x_split_args& args, std::int64_t row, std::int32_t partition) {
  return args.call.workspace + (row * args.max_partitions + partition) * (args.call.head_dim + 2);
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, mask));
  return value;
}
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, mask));
  return value;
}

/// Output and LSE of one row, by the whole thread block.
template <int HeadDim>
__device__ __forceinline__ void write_row(const attention_kernel_args& call, std::int64_t token, std::int32_t head,
                                          float m, float l, const float* values) {
  const bool has_sink = call.sinks != nullptr;
  const row_finish finish = finish_row(m, l, has_sink, has_sink ? call.sinks[head] : 0.0f);
#pragma unroll
  for (int c = 0; c < (HeadDim + x_split_threads - 1) / x_split_threads; ++c) {
    const int dim = c * x_split_threads + static_cast<int>(threadIdx.x);
    if (dim < HeadDim) {
      store_from_float(call.out, token * call.out_token_stride + head * call.out_head_stride + dim, call.out_type,
                       finish_value(finish, values[c]));
    }
  }
  if (threadIdx.x == 0 && call.lse != nullptr) call.lse[token * call.num_q_heads + head] = finish.lse;
}

/// Grid: x over sequences and query heads, z over partitions (v2). Group: threads that share a token, each taking every
/// Group-th 16-byte chunk of its K. Lanes: those that share one dim's V of a block.
template <class T, int HeadDim, int Group, int Lanes>
__global__ void __launch_bounds__(x_split_threads, HeadDim == 256 ? 4 : 6)
    x_split_decode(const __grid_constant__ x_split_args args) {
  constexpr int vec = 16 / sizeof(T);
  constexpr int tokens_at_once = 32 / Group;
  constexpr int chunks_per_lane = HeadDim / vec / Group;
  constexpr int k_batch = chunks_per_lane < 8 ? chunks_per_lane : 8;  // loads under way per lane
  constexpr int rows_at_once = 32 / Lanes;
  constexpr int rows_per_lane = HeadDim / rows_at_once;
  constexpr int v_batch = rows_per_lane < 8 ? rows_per_lane : 8;
  constexpr int dims_per_thread = (HeadDim + x_split_threads - 1) / x_split_threads;
  static_assert(chunks_per_lane % k_batch == 0 && rows_per_lane % v_batch == 0);
  __shared__ __align__(16) float q[HeadDim];
  __shared__ __align__(16) float logits[split_positions];
  __shared__ float values[x_split_warps][HeadDim];
  __shared__ float warp_results[2][x_split_warps];
  __shared__ std::int32_t blocks[split_positions / vec + 2];

  const attention_kernel_args& call = args.call;
  const auto seq = static_cast<std::int32_t>(blockIdx.x / static_cast<unsigned>(call.num_q_heads));
  const auto head = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(call.num_q_heads));
  const std::int64_t row_index = blockIdx.x;
  const std::int64_t token = call.query_start_loc[seq];
  if (call.query_start_loc[seq + 1] - token != 1) return;
  const std::int32_t kv_head = head / call.group_size;
  const std::int32_t seq_len = call.seq_lens[seq];
  const std::int64_t own_position = static_cast<std::int64_t>(seq_len) - 1;
  std::int64_t begin = 0;
  std::int64_t end = seq_len;
  if (call.window_left >= 0) begin = max(begin, own_position - call.window_left);
  if (call.window_right >= 0) end = min(end, own_position + call.window_right + 1);
  const auto num_partitions = static_cast<std::int32_t>((end + split_positions - 1) / split_positions);
  const std::int32_t first_partition =
      args.partitioned ? static_cast<std::int32_t>(blockIdx.z) : static_cast<std::int32_t>(begin / split_positions);
  const std::int32_t partition_step = args.partitioned ? static_cast<std::int32_t>(gridDim.z) : 1;
  if (args.partitioned && first_partition >= num_partitions) return;

  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const std::int32_t* const table = call.block_tables + seq * call.block_table_stride;
  const T* const k_half = static_cast<const T*>(call.k) + kv_head * call.k_strides.head;
  const T* const v_half = static_cast<const T*>(call.v) + kv_head * call.v_strides.head;
  const float slope = call.alibi_slopes != nullptr ? call.alibi_slopes[head] : 0.0f;

  for (int d = thread; d < HeadDim; d += x_split_threads) {
    q[d] = load_as_float(call.q, token * call.q_token_stride + head * call.q_head_stride + d, call.q_type);
  }

  float total_m = minus_infinity();
  float total_l = 0.0f;
  float total[dims_per_thread] = {};
  for (std::int32_t partition = first_partition; partition < num_partitions; partition += partition_step) {
    const std::int64_t base = static_cast<std::int64_t>(partition) * split_positions;
    const std::int64_t first = max(begin, base);
    const std::int64_t last = min(end, base + split_positions);
    if (first >= last) {  // before the window
      if (args.partitioned && thread == 0) {
        float* const partial = x_split_partial(args, row_index, partition);
        partial[0] = minus_infinity();
        partial[1] = 0.0f;
      }
      continue;
    }
    const auto first_block = static_cast<std::int32_t>(first / call.block_size);
    const auto end_block = static_cast<std::int32_t>((last + call.block_size - 1) / call.block_size);
    // Positions of the partition, counted from its base.
    const auto first_here = static_cast<std::int32_t>(first - base);
    const auto last_here = static_cast<std::int32_t>(last - base);
    for (std::int32_t i = thread; i < end_block - first_block; i += x_split_threads) {
      // The plan checked the host's table; a different one on the device must not lead out of the cache.
      const std::int64_t block = table[first_block + i];
      blocks[i] = static_cast<std::int32_t>(block < 0 ? 0 : block >= call.num_blocks ? call.num_blocks - 1 : block);
    }
    __syncthreads();  // q and the blocks are there; the partition before this one has been used

    // Logits. Lanes: tokens fastest, then the members of the group that shares them.
    const int member = lane / tokens_at_once;
    float largest = minus_infinity();
    for (std::int32_t entry = first_block + warp; entry < end_block; entry += x_split_warps) {
      const T* const block = k_half + blocks[entry - first_block] * call.k_strides.block;
      const auto block_here = static_cast<std::int32_t>(static_cast<std::int64_t>(entry) * call.block_size - base);
      for (std::int32_t start = 0; start < call.block_size; start += tokens_at_once) {
        const std::int32_t in_block = start + lane % tokens_at_once;
        const std::int32_t here = block_here + in_block;
        const bool seen = in_block < call.block_size && here >= first_here && here < last_here;
        const T* const mine = block + in_block * call.k_strides.token + member * call.k_strides.chunk_stride;
        float sum = 0.0f;
#pragma unroll
        for (int batch = 0; batch < chunks_per_lane; batch += k_batch) {
          uint4 held[k_batch];
#pragma unroll
          for (int i = 0; i < k_batch; ++i) {
            held[i] = load_16_if(mine + (batch + i) * Group * call.k_strides.chunk_stride, seen);
          }
#pragma unroll
          for (int i = 0; i < k_batch; ++i) {
            const unpacked<T> k(held[i]);
#pragma unroll
            for (int e = 0; e < vec; e += 4) {
              const float4 x = *reinterpret_cast<const float4*>(&q[((batch + i) * Group + member) * vec + e]);
              sum = __fmaf_rn(x.x, k.values[e], sum);
              sum = __fmaf_rn(x.y, k.values[e + 1], sum);
              sum = __fmaf_rn(x.z, k.values[e + 2], sum);
              sum = __fmaf_rn(x.w, k.values[e + 3], sum);
            }
          }
        }
#pragma unroll
        for (int mask = 16; mask >= tokens_at_once; mask /= 2) {
          sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
        }
        if (seen && member == 0) {
          float logit = __fmul_rn(sum, call.scale);
          if (call.soft_cap > 0.0f) logit = __fmul_rn(call.soft_cap, tanhf(__fdiv_rn(logit, call.soft_cap)));
          if (call.alibi_slopes != nullptr) {
            logit = __fmaf_rn(slope, static_cast<float>(base + here - own_position), logit);
          }
          logits[here] = logit;
          largest = fmaxf(largest, logit);
        }
      }
    }
    largest = warp_max(largest);
    if (lane == 0) warp_results[0][warp] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < x_split_warps; ++w) largest = fmaxf(largest, warp_results[0][w]);

    const float subtracted = finite_max(largest);
    float sum = 0.0f;
    for (std::int32_t i = first_here + thread; i < last_here; i += x_split_threads) {
      const float weight = expf(__fsub_rn(logits[i], subtracted));
      logits[i] = weight;
      sum = __fadd_rn(sum, weight);
    }
    sum = warp_sum(sum);
    if (lane == 0) warp_results[1][warp] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < x_split_warps; ++w) sum = __fadd_rn(sum, warp_results[1][w]);

    // Values. Lanes: vectors of a row fastest, then rows (dims).
    float accumulated[rows_per_lane];
#pragma unroll
    for (int i = 0; i < rows_per_lane; ++i) accumulated[i] = 0.0f;
    const int row = lane / Lanes;
    for (std::int32_t entry = first_block + warp; entry < end_block; entry += x_split_warps) {
      const T* const block = v_half + blocks[entry - first_block] * call.v_strides.block + row * call.v_strides.dim;
      const auto block_here = static_cast<std::int32_t>(static_cast<std::int64_t>(entry) * call.block_size - base);
      for (std::int32_t in_block = lane % Lanes * vec; in_block < call.block_size; in_block += Lanes * vec) {
        const std::int32_t here = block_here + in_block;
        if (here + vec <= first_here || here >= last_here) continue;
        const bool whole = here >= first_here && here + vec <= last_here;
        float weights[vec];
#pragma unroll
        for (int e = 0; e < vec; ++e) {
          const bool seen = whole || (here + e >= first_here && here + e < last_here);
          weights[e] = seen ? logits[here + e] : -0.0f;
        }
#pragma unroll
        for (int batch = 0; batch < rows_per_lane; batch += v_batch) {
          uint4 held[v_batch];
#pragma unroll
          for (int i = 0; i < v_batch; ++i) {
            held[i] = load_16_if(block + (batch + i) * rows_at_once * call.v_strides.dim + in_block, true);
          }
#pragma unroll
          for (int i = 0; i < v_batch; ++i) {
            const unpacked<T> v(held[i]);
#pragma unroll
            for (int e = 0; e < vec; ++e) {
              // What lies out of sight may be anything, NaN included.
              const float value =
                  whole || __float_as_int(weights[e]) != static_cast<int>(0x80000000u) ? v.values[e] : 0.0f;
              accumulated[batch + i] = __fmaf_rn(weights[e], value, accumulated[batch + i]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < rows_per_lane; ++i) {
#pragma unroll
      for (int mask = Lanes / 2; mask > 0; mask /= 2) {
        accumulated[i] = __fadd_rn(accumulated[i], __shfl_xor_sync(0xffffffffu, accumulated[i], mask));
      }
      if (lane % Lanes == 0) values[warp][row + i * rows_at_once] = accumulated[i];
    }
    __syncthreads();

    float own[dims_per_thread] = {};
#pragma unroll
    for (int c = 0; c < dims_per_thread; ++c) {
      const int dim = c * x_split_threads + thread;
      if (dim >= HeadDim) continue;
#pragma unroll
      for (int w = 0; w < x_split_warps; ++w) own[c] = __fadd_rn(own[c], values[w][dim]);
    }
    if (args.partitioned) {
      float* const partial = x_split_partial(args, row_index, partition);
#pragma unroll
      for (int c = 0; c < dims_per_thread; ++c) {
        const int dim = c * x_split_threads + thread;
        if (dim < HeadDim) partial[2 + dim] = own[c];
      }
      if (thread == 0) {
        partial[0] = largest;
        partial[1] = sum;
      }
    } else {
      const fold_weights w = fold_into(total_m, total_l, largest, sum);
#pragma unroll
      for (int c = 0; c < dims_per_thread; ++c) total[c] = fold_value(w, total[c], own[c]);
    }
  }
  if (!args.partitioned) write_row<HeadDim>(call, token, head, total_m, total_l, total);
}

/// Grid: x over sequences and query heads.
template <int HeadDim>
__global__ void __launch_bounds__(x_split_threads, 8) x_split_reduce(const __grid_constant__ x_split_args args) {
  constexpr int dims_per_thread = (HeadDim + x_split_threads - 1) / x_split_threads;
  const attention_kernel_args& call = args.call;
  const auto seq = static_cast<std::int32_t>(blockIdx.x / static_cast<unsigned>(call.num_q_heads));
  const auto head = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(call.num_q_heads));
  const std::int64_t row_index = blockIdx.x;
  const std::int64_t token = call.query_start_loc[seq];
  if (call.query_start_loc[seq + 1] - token != 1) return;
  std::int64_t end = call.seq_lens[seq];
  if (call.window_right >= 0) end = min(end, end - 1 + call.window_right + 1);
  const auto num_partitions = static_cast<std::int32_t>((end + split_positions - 1) / split_positions);
  float total_m = minus_infinity();
  float total_l = 0.0f;
  float total[dims_per_thread] = {};
#pragma unroll 4
  for (std::int32_t partition = 0; partition < num_partitions; ++partition) {
    const float* const partial = x_split_partial(args, row_index, partition);
    const fold_weights w = fold_into(total_m, total_l, partial[0], partial[1]);
#pragma unroll
    for (int c = 0; c < dims_per_thread; ++c) {
      const int dim = c * x_split_threads + static_cast<int>(threadIdx.x);
      if (dim < HeadDim) total[c] = fold_value(w, total[c], w.skip ? 0.0f : partial[2 + dim]);
    }
  }
  write_row<HeadDim>(call, token, head, total_m, total_l, total);
}

template <class T, int HeadDim>
[[nodiscard]] cudaError_t launch_x_split(const runtime_api& api, const x_split_args& args,
                                         cudaStream_t stream) noexcept {
  const attention_kernel_args& call = args.call;
  const std::int64_t rows = static_cast<std::int64_t>(call.num_seqs) * call.num_q_heads;
  if (rows > 0x7fffffff) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(rows), 1, args.partitioned ? static_cast<unsigned>(args.max_partitions) : 1u);
  constexpr std::int32_t vec = 16 / sizeof(T);
  const auto decode = [&](auto kernel) {
    return launch(api, kernel, grid, dim3(x_split_threads), 0, stream, false, args);
  };
  // As many threads share a token as leave a warp with the tokens of one block.
  cudaError_t status = cudaSuccess;
  if (call.block_size >= 32) {
    status = decode(x_split_decode<T, HeadDim, 1, 2>);
  } else if (call.block_size >= 16) {
    status = decode(x_split_decode<T, HeadDim, 2, 2>);
  } else if (call.block_size >= 2 * vec) {
    status = decode(x_split_decode<T, HeadDim, 4, 2>);
  } else {
    status = decode(x_split_decode<T, HeadDim, 4, 1>);
  }
  if (status != cudaSuccess || !args.partitioned) return status;
  return launch(api, x_split_reduce<HeadDim>, dim3(grid.x), dim3(x_split_threads), 0, stream, false, args);
}

/// One instance a file.
[[nodiscard]] cudaError_t launch_x_split_f32(const runtime_api&, const x_split_args&, cudaStream_t) noexcept;
[[nodiscard]] cudaError_t launch_x_split_f16(const runtime_api&, const x_split_args&, cudaStream_t) noexcept;
[[nodiscard]] cudaError_t launch_x_split_bf16(const runtime_api&, const x_split_args&, cudaStream_t) noexcept;

template <class T>
[[nodiscard]] cudaError_t launch_x_split_dims(const runtime_api& api, const x_split_args& args,
                                              cudaStream_t stream) noexcept {
  switch (args.call.head_dim) {
    case 64:
      return launch_x_split<T, 64>(api, args, stream);
    case 128:
      return launch_x_split<T, 128>(api, args, stream);
    case 256:
      return launch_x_split<T, 256>(api, args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace bifolio::cuda
