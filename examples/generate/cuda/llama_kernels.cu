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
                             std::int64_t num_tokens, std::int32_t dim, float* __restrict__ x) {
  const std::int64_t row = blockIdx.x;
  const float* from = row < num_tokens ? table + std::int64_t{tokens[row]} * dim : nullptr;
  for (std::int32_t i = threadIdx.x; i < dim; i += blockDim.x) x[row * dim + i] = from != nullptr ? from[i] : 0.0f;
}

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
  for (std::int32_t i = threadIdx.x; i < dim; i += row_threads) result[i] = weight[i] * (scale * row[i]);
}

/// One thread for a pair of a head of a token. Each computes its angle anew: a loop over the heads, which share it,
/// waits longer for memory.
__global__ void rotate_kernel(float* __restrict__ heads, std::int64_t row_stride,
                              const std::int32_t* __restrict__ positions, const float* __restrict__ frequencies,
                              std::int64_t num_pairs, std::int32_t num_heads, std::int32_t head_dim, bool neighbours) {
  const std::int64_t item = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (item >= num_pairs) return;
  const std::int32_t half = head_dim / 2;
  const auto i = static_cast<std::int32_t>(item % half);
  const std::int64_t token = item / half / num_heads;
  float* head = heads + token * row_stride + item / half % num_heads * head_dim;
  float& a = neighbours ? head[2 * i] : head[i];
  float& b = neighbours ? head[2 * i + 1] : head[i + half];
  float sine, cosine;
  sincosf(static_cast<float>(positions[token]) * frequencies[i], &sine, &cosine);
  const float turned = a * cosine - b * sine;
  b = a * sine + b * cosine;
  a = turned;
}

__global__ void swiglu_kernel(const float* __restrict__ gate_up, std::int64_t num_items, std::int32_t hidden_dim,
                              float* __restrict__ hidden) {
  const std::int64_t item = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (item >= num_items) return;
  const std::int64_t token = item / hidden_dim;
  const float gate = gate_up[item + token * hidden_dim];
  const float up = gate_up[item + (token + 1) * hidden_dim];
  hidden[item] = gate / (1.0f + expf(-gate)) * up;
}

template <class Storage>
struct storage;
template <>
struct storage<__half> {
  static constexpr float largest = 65504.0f;
  static __device__ __half narrow(float x) { return __float2half_rn(x); }
  static __device__ float widen(__half x) { return __half2float(x); }
};
template <>
struct storage<__nv_bfloat16> {
  static constexpr float largest = 0x1.fep127f;
  static __device__ __nv_bfloat16 narrow(float x) { return __float2bfloat16_rn(x); }
  static __device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
};

template <class Storage>
__global__ void narrow_kernel(const float* __restrict__ rows, std::int64_t row_stride, std::int64_t num_items,
                              std::int64_t width, Storage* __restrict__ out) {
  const std::int64_t item = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (item >= num_items) return;
  const std::int64_t row = item / width;
  const float x = rows[row * row_stride + (item - row * width)];
  const bool finite = fabsf(x) <= 0x1.fffffep127f;
  constexpr float most = storage<Storage>::largest;
  out[item] = storage<Storage>::narrow(finite ? fminf(fmaxf(x, -most), most) : x);
}

template <class Storage>
__global__ void widen_kernel(const Storage* __restrict__ in, std::int64_t num_items, float* __restrict__ out) {
  const std::int64_t item = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (item < num_items) out[item] = storage<Storage>::widen(in[item]);
}

}  // namespace

cudaError_t launch_embed(const float* table, const std::int32_t* tokens, std::int64_t num_tokens, std::int64_t num_rows,
                         std::int32_t dim, float* x, cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  embed_kernel<<<grid_of(num_rows, 1), row_threads, 0, stream>>>(table, tokens, num_tokens, dim, x);
  return cudaGetLastError();
}

cudaError_t launch_normalise(const float* x, const std::int32_t* rows, const float* weight, float epsilon,
                             std::int64_t num_rows, std::int32_t dim, float* out, cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  normalise_kernel<<<grid_of(num_rows, 1), row_threads, 0, stream>>>(x, rows, weight, epsilon, dim, out);
  return cudaGetLastError();
}

cudaError_t launch_rotate(float* heads, std::int64_t row_stride, const std::int32_t* positions,
                          const float* frequencies, std::int64_t num_tokens, std::int32_t num_heads,
                          std::int32_t head_dim, rope_pairs pairs, cudaStream_t stream) {
  const std::int64_t num_pairs = num_tokens * num_heads * (head_dim / 2);
  if (num_pairs == 0) return cudaSuccess;
  constexpr int threads = 128;
  rotate_kernel<<<grid_of(num_pairs, threads), threads, 0, stream>>>(
      heads, row_stride, positions, frequencies, num_pairs, num_heads, head_dim, pairs == rope_pairs::neighbours);
  return cudaGetLastError();
}

cudaError_t launch_swiglu(const float* gate_up, std::int64_t num_tokens, std::int32_t hidden_dim, float* hidden,
                          cudaStream_t stream) {
  const std::int64_t num_items = num_tokens * hidden_dim;
  if (num_items == 0) return cudaSuccess;
  swiglu_kernel<<<grid_of(num_items, row_threads), row_threads, 0, stream>>>(gate_up, num_items, hidden_dim, hidden);
  return cudaGetLastError();
}

cudaError_t launch_narrow(const float* rows, std::int64_t row_stride, std::int64_t num_rows, std::int64_t width,
                          bifolio::dtype type, void* out, cudaStream_t stream) {
  const std::int64_t num_items = num_rows * width;
  if (num_items == 0) return cudaSuccess;
  const unsigned grid = grid_of(num_items, row_threads);
  switch (type) {
    case bifolio::dtype::f32:
      return cudaErrorInvalidValue;
    case bifolio::dtype::f16:
      narrow_kernel<<<grid, row_threads, 0, stream>>>(rows, row_stride, num_items, width, static_cast<__half*>(out));
      break;
    case bifolio::dtype::bf16:
      narrow_kernel<<<grid, row_threads, 0, stream>>>(rows, row_stride, num_items, width,
                                                      static_cast<__nv_bfloat16*>(out));
      break;
  }
  return cudaGetLastError();
}

cudaError_t launch_widen(const void* in, std::int64_t count, bifolio::dtype type, float* out, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const unsigned grid = grid_of(count, row_threads);
  switch (type) {
    case bifolio::dtype::f32:
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
