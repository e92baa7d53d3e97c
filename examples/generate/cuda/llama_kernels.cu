// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/llama_kernels.hpp"

namespace generate {
namespace {

constexpr int row_threads = 256;
constexpr int num_warps = row_threads / 32;

unsigned grid_of(std::int64_t num_items, int per_block) {
  return static_cast<unsigned>((num_items + per_block - 1) / per_block);
}

__global__ void embed_kernel(const float* __restrict__ table, const std::int32_t* __restrict__ tokens,
                             std::int64_t num_tokens, std::int32_t dim, float scale, float* __restrict__ x) {
  const std::int64_t row = blockIdx.x;
  const float* from = row < num_tokens ? table + std::int64_t{tokens[row]} * dim : nullptr;
  for (std::int32_t i = threadIdx.x; i < dim; i += blockDim.x)
    x[row * dim + i] = from != nullptr ? scale * from[i] : 0.0f;
}

template <bool Accumulates>
__global__ void normalise_kernel(const float* __restrict__ x, const std::int32_t* __restrict__ rows,
                                 const float* __restrict__ weight, float epsilon, std::int32_t dim,
                                 float* __restrict__ out) {
  __shared__ float sums[num_warps];
  const float* row = x + (rows != nullptr ? std::int64_t{rows[blockIdx.x]} : std::int64_t{blockIdx.x}) * dim;
  float squares = 0;
  for (std::int32_t i = threadIdx.x; i < dim; i += row_threads) squares += row[i] * row[i];
  for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, distance);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  float total = 0;
  for (int warp = 0; warp < num_warps; ++warp) total += sums[warp];
  const float scale = 1.0f / sqrtf(total / static_cast<float>(dim) + epsilon);
  float* result = out + std::int64_t{blockIdx.x} * dim;
  for (std::int32_t i = threadIdx.x; i < dim; i += row_threads) {
    const float value = weight[i] * (scale * row[i]);
    result[i] = Accumulates ? result[i] + value : value;
  }
}

__global__ void add_bias_kernel(float* __restrict__ rows, const float* __restrict__ bias, std::int64_t num_items,
                                std::int64_t width) {
  const std::int64_t item = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (item < num_items) rows[item] += bias[item % width];
}

__global__ void soft_cap_kernel(float* __restrict__ x, std::int64_t num_items, float cap) {
  const std::int64_t item = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (item < num_items) x[item] = cap * tanhf(x[item] / cap);
}

/// One thread for a pair of a token.
__global__ void angles_kernel(const std::int32_t* __restrict__ positions, const float* __restrict__ frequencies,
                              std::int64_t num_pairs, std::int32_t half, float* __restrict__ table) {
  const std::int64_t item = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (item >= num_pairs) return;
  const std::int64_t token = item / half;
  const std::int64_t pair = item - token * half;
  float* const row = table + token * 2 * half;
  sincosf(static_cast<float>(positions[token]) * frequencies[pair], row + half + pair, row + pair);
}

template <activation Kind>
__global__ void gate_kernel(const float* __restrict__ gate_up, std::int64_t num_items, std::int32_t hidden_dim,
                            float* __restrict__ hidden) {
  const std::int64_t item = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (item >= num_items) return;
  const std::int64_t token = item / hidden_dim;
  const float gate = gate_up[item + token * hidden_dim];
  const float up = gate_up[item + (token + 1) * hidden_dim];
  if constexpr (Kind == activation::silu) {
    hidden[item] = gate / (1.0f + expf(-gate)) * up;
  } else {
    constexpr float root = 0.797884560802865f;  // √(2/π)
    hidden[item] = 0.5f * gate * (1.0f + tanhf(root * (gate + 0.044715f * gate * gate * gate))) * up;
  }
}

template <class Storage>
struct storage;
template <>
struct storage<__half> {
  static __device__ float widen(__half x) { return __half2float(x); }
};
template <>
struct storage<__nv_bfloat16> {
  static __device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
};

template <class Storage>
__global__ void widen_kernel(const Storage* __restrict__ in, std::int64_t num_items, float* __restrict__ out) {
  const std::int64_t item = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (item < num_items) out[item] = storage<Storage>::widen(in[item]);
}

}  // namespace

cudaError_t launch_embed(const float* table, const std::int32_t* tokens, std::int64_t num_tokens, std::int64_t num_rows,
                         std::int32_t dim, float scale, float* x, cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  embed_kernel<<<grid_of(num_rows, 1), row_threads, 0, stream>>>(table, tokens, num_tokens, dim, scale, x);
  return cudaGetLastError();
}

cudaError_t launch_normalise(const float* x, const std::int32_t* rows, const float* weight, float epsilon,
                             std::int64_t num_rows, std::int32_t dim, float* out, cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  normalise_kernel<false><<<grid_of(num_rows, 1), row_threads, 0, stream>>>(x, rows, weight, epsilon, dim, out);
  return cudaGetLastError();
}

cudaError_t launch_normalise_and_add(const float* x, const float* weight, float epsilon, std::int64_t num_rows,
                                     std::int32_t dim, float* out, cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  normalise_kernel<true><<<grid_of(num_rows, 1), row_threads, 0, stream>>>(x, nullptr, weight, epsilon, dim, out);
  return cudaGetLastError();
}

cudaError_t launch_add_bias(float* rows, const float* bias, std::int64_t num_rows, std::int64_t width,
                            cudaStream_t stream) {
  const std::int64_t num_items = num_rows * width;
  if (num_items == 0) return cudaSuccess;
  add_bias_kernel<<<grid_of(num_items, row_threads), row_threads, 0, stream>>>(rows, bias, num_items, width);
  return cudaGetLastError();
}

cudaError_t launch_soft_cap(float* x, std::int64_t count, float cap, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  soft_cap_kernel<<<grid_of(count, row_threads), row_threads, 0, stream>>>(x, count, cap);
  return cudaGetLastError();
}

cudaError_t launch_angles(const std::int32_t* positions, const float* frequencies, std::int64_t num_tokens,
                          std::int32_t head_dim, float* table, cudaStream_t stream) {
  const std::int32_t half = head_dim / 2;
  const std::int64_t num_pairs = num_tokens * half;
  if (num_pairs == 0) return cudaSuccess;
  angles_kernel<<<grid_of(num_pairs, row_threads), row_threads, 0, stream>>>(positions, frequencies, num_pairs, half,
                                                                             table);
  return cudaGetLastError();
}

cudaError_t launch_gate(const float* gate_up, activation kind, std::int64_t num_tokens, std::int32_t hidden_dim,
                        float* hidden, cudaStream_t stream) {
  const std::int64_t num_items = num_tokens * hidden_dim;
  if (num_items == 0) return cudaSuccess;
  const unsigned grid = grid_of(num_items, row_threads);
  switch (kind) {
    case activation::silu:
      gate_kernel<activation::silu><<<grid, row_threads, 0, stream>>>(gate_up, num_items, hidden_dim, hidden);
      break;
    case activation::gelu_tanh:
      gate_kernel<activation::gelu_tanh><<<grid, row_threads, 0, stream>>>(gate_up, num_items, hidden_dim, hidden);
      break;
  }
  return cudaGetLastError();
}

cudaError_t launch_widen(const void* in, std::int64_t count, bifolio::dtype type, float* out, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const unsigned grid = grid_of(count, row_threads);
  switch (type) {
    case bifolio::dtype::f32:
    case bifolio::dtype::e4m3:
    case bifolio::dtype::e5m2:
    case bifolio::dtype::i8:
    case bifolio::dtype::u8:
      return cudaErrorInvalidValue;
    case bifolio::dtype::f16:
      widen_kernel<<<grid, row_threads, 0, stream>>>(static_cast<const __half*>(in), count, out);
      break;
    case bifolio::dtype::bf16:
      widen_kernel<<<grid, row_threads, 0, stream>>>(static_cast<const __nv_bfloat16*>(in), count, out);
      break;
  }
  return cudaGetLastError();
}

}  // namespace generate
