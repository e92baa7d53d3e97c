// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The products of decode on x_split: 16 rows of the cache (tokens of K, dims of V), read from global memory straight
/// into the registers of a warp, times up to 8 query heads, whose operands are in shared memory, one row per head.
///
/// Lane 4·g + i holds 16 bytes of rows g and g + 8: chunk i of four. `add` multiplies them with chunk i of every head;
/// `finish` leaves sums[2·r + c] = row g + 8·r, head 2·i + c. That is how the m16n8k16 product distributes its
/// operands, with the elements of four chunks in another order, which is the same one on both sides. Every sum is of
/// one row and one head, in an order that depends on neither.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bifolio/dtype.hpp>
#include <cstdint>

#include "cuda/device/convert.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/sm80.cuh"

namespace bifolio::inline v0_2::cuda {

/// Heads of one product.
inline constexpr int product_heads = 8;

/// CUDA's type of the same bits.
template <class T>
struct device_type;
template <>
struct device_type<float16> {
  using type = __half;
};
template <>
struct device_type<bfloat16> {
  using type = __nv_bfloat16;
};

/// On tensor cores, for a call whose tensors are all of one 16-bit type.
template <class T>
struct tensor_core_product {
  using operand = T;
  static constexpr bool on_tensor_cores = true;
  using native = typename device_type<T>::type;

  float sums[4] = {};

  /// `heads`: the first head's first of four chunks. Rows past `num_heads` can be read and may hold anything.
  __device__ __forceinline__ void add(const uint4& low, const uint4& high, const T* heads, int pitch, int num_heads) {
    (void)num_heads;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint4 b = *reinterpret_cast<const uint4*>(heads + lane / 4 * pitch + lane % 4 * (16 / sizeof(T)));
    device::mma_m16n8k16<native>(sums, {low.x, high.x, low.y, high.y}, b.x, b.y);
    device::mma_m16n8k16<native>(sums, {low.z, high.z, low.w, high.w}, b.z, b.w);
  }
  __device__ __forceinline__ void finish() {}
};

/// In float32, for all other types.
template <class T>
struct float_product {
  using operand = float;
  static constexpr bool on_tensor_cores = false;

  float sums[4] = {};

  __device__ __forceinline__ void add(const uint4& low, const uint4& high, const float* heads, int pitch,
                                      int num_heads) {
    constexpr int vec = 16 / sizeof(T);
    const unpacked<T> a(low);
    const unpacked<T> b(high);
    const float* const mine = heads + static_cast<int>(threadIdx.x) % 4 * vec;
#pragma unroll
    for (int head = 0; head < product_heads; ++head) {
      if (head >= num_heads) break;
#pragma unroll
      for (int e = 0; e < vec; e += 4) {
        const float4 x = *reinterpret_cast<const float4*>(mine + head * pitch + e);
        low_[head] = fma4(x, a.values + e, low_[head]);
        high_[head] = fma4(x, b.values + e, high_[head]);
      }
    }
  }

  /// Adds what the four lanes of a row hold: ((i) + (i ^ 2)) + ((i ^ 1) + (i ^ 3)), the same bits for every i.
  __device__ __forceinline__ void finish() {
    deal(low_, sums[0], sums[1]);
    deal(high_, sums[2], sums[3]);
  }

 private:
  static __device__ __forceinline__ float fma4(const float4& x, const float* y, float sum) {
    sum = __fmaf_rn(x.x, y[0], sum);
    sum = __fmaf_rn(x.y, y[1], sum);
    sum = __fmaf_rn(x.z, y[2], sum);
    return __fmaf_rn(x.w, y[3], sum);
  }
  static __device__ __forceinline__ float keep_and_give(bool upper, float lower_value, float upper_value, int mask) {
    const float given = __shfl_xor_sync(0xffffffffu, upper ? lower_value : upper_value, mask);
    return __fadd_rn(upper ? upper_value : lower_value, given);
  }
  static __device__ __forceinline__ void deal(const float (&all)[product_heads], float& first, float& second) {
    const bool upper_half = (threadIdx.x & 2u) != 0;
    const bool upper_pair = (threadIdx.x & 1u) != 0;
    float half[4];
#pragma unroll
    for (int h = 0; h < 4; ++h) half[h] = keep_and_give(upper_half, all[h], all[h + 4], 2);
    first = keep_and_give(upper_pair, half[0], half[2], 1);
    second = keep_and_give(upper_pair, half[1], half[3], 1);
  }

  float low_[product_heads] = {};
  float high_[product_heads] = {};
};

/// Weights in the product's type.
__device__ __forceinline__ void store_weights(float* to, const float (&w)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(w[0], w[1], w[2], w[3]);
}
template <class T>
__device__ __forceinline__ void store_weights(T* to, const float (&w)[4]) {
  using native = typename tensor_core_product<T>::native;
  *reinterpret_cast<uint2*>(to) = make_uint2(device::pack<native>(w[0], w[1]), device::pack<native>(w[2], w[3]));
}

/// 16 bytes of T with the elements outside [first, end) set to zero.
template <class T>
__device__ __forceinline__ uint4 keep_elements(const uint4& bits, int first, int end) {
  std::uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  const auto inside = [&](int e) { return e >= first && e < end; };
  static_assert(sizeof(T) == 4 || sizeof(T) == 2);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (sizeof(T) == 4) {
      words[w] = inside(w) ? words[w] : 0u;
    } else {
      words[w] &= (inside(2 * w) ? 0x0000ffffu : 0u) | (inside(2 * w + 1) ? 0xffff0000u : 0u);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace bifolio::inline v0_2::cuda
