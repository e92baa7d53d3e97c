// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include "cuda/attention/x_split/args.hpp"
#include "cuda/device/convert.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/softmax.cuh"

namespace bifolio::inline v0_2::cuda {
namespace {

constexpr int reduce_batch = 8;

/// Combines the partial results of a row in the order of partitions. Grid: x over sequences and query heads; one thread
/// per dim.
__global__ void __launch_bounds__(256, 8) x_split_reduce(const __grid_constant__ x_split_args args) {
  device::grid_dependency_wait();
  const attention_kernel_args& call = args.call;
  const auto seq = static_cast<std::int32_t>(blockIdx.x / static_cast<unsigned>(call.num_q_heads));
  const auto head = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(call.num_q_heads));
  const std::int64_t row = blockIdx.x;
  const std::int64_t token = call.query_start_loc[seq];
  if (call.query_start_loc[seq + 1] - token != 1) return;
  const std::int32_t num_partitions = min(x_split_partitions(call.seq_lens[seq]), args.max_partitions);
  const int dim = static_cast<int>(threadIdx.x);
  float m = minus_infinity();
  float l = 0.0f;
  float value = 0.0f;
  for (std::int32_t first = 0; first < num_partitions; first += reduce_batch) {
    float ms[reduce_batch];
    float ls[reduce_batch];
    float values[reduce_batch];
#pragma unroll
    for (int i = 0; i < reduce_batch; ++i) {
      const float* const partial = x_split_partial(args, row, first + i);
      const bool valid = first + i < num_partitions;
      ms[i] = valid ? partial[0] : minus_infinity();
      ls[i] = valid ? partial[1] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < reduce_batch; ++i) {
      const bool has_keys = ms[i] != minus_infinity() || ls[i] != 0.0f;
      values[i] = has_keys ? x_split_partial(args, row, first + i)[2 + dim] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < reduce_batch; ++i) {
      const auto w = attn::combine_any_state<device_math>(m, l, ms[i], ls[i]);
      value = attn::combine_value<device_math>(w, value, values[i]);
    }
  }
  const bool has_sink = call.sinks != nullptr;
  const auto finish = attn::finish_row<device_math>(m, l, has_sink, has_sink ? call.sinks[head] : 0.0f);
  store_from_float(call.out, token * call.out_token_stride + head * call.out_head_stride + dim, call.out_type,
                   attn::output_of<device_math>(finish, value));
  if (dim == 0 && call.lse != nullptr) call.lse[token * call.num_q_heads + head] = finish.lse;
}

}  // namespace

cudaError_t launch_x_split_reduce(const runtime_api& api, const x_split_args& args, bool dependent,
                                  cudaStream_t stream) noexcept {
  const std::int64_t rows = static_cast<std::int64_t>(args.call.num_seqs) * args.call.num_q_heads;
  if (rows > 0x7fffffff) return cudaErrorInvalidValue;
  return launch(api, x_split_reduce, dim3(static_cast<unsigned>(rows)), dim3(static_cast<unsigned>(args.call.head_dim)),
                0, stream, dependent, args);
}

}  // namespace bifolio::inline v0_2::cuda
