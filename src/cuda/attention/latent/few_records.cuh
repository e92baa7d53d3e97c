// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of a consumer warpgroup for few query rows over records (kv_record). Products are transposed as in
/// few_rows.cuh, so that K and V are the operand that tensor cores take from registers: codes are read from shared
/// memory as they are and become float16, exactly. Scales are no part of the products of K: those of each 128 dims have
/// sums of their own. V's are multiplied into probabilities, which are stored once for each 128 dims, over a unit that
/// keeps them within float16.
///
/// ldmatrix moves pairs of codes as if they were elements of 16 bits. So a thread has four neighbouring dims of a key
/// of K where the operand has two pairs 8 dims apart, and queries are stored in that order; and of V two neighbouring
/// dims where the operand has two rows 8 apart, which is the order of output registers.

#include <bifolio/kv_layout.hpp>
#include <cstdint>

#include "cuda/attention/latent/column_softmax.cuh"
#include "cuda/attention/latent/pipeline.cuh"
#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/device/code_pairs.cuh"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm80.cuh"
#include "cuda/device/sm90.cuh"
#include "cuda/device/sm90_narrow.cuh"

namespace bifolio::inline v0_2::cuda::latent {

class few_records_mainloop : column_softmax<few_records> {
  using S = few_records;
  using base = column_softmax<few_records>;
  static constexpr int record_bytes = static_cast<int>(kv_record::bytes);
  static constexpr int chunk_steps = 4;  // of 16 dims of K or keys of V, for 64 of either

 public:
  using base::base;
  using base::out_array;

  /// Adds this warpgroup's key tiles of `e` to o and the rows' maxima (base 2) and sums.
  __device__ __forceinline__ void process(const prefill::kv_range& e, column_state& rows, out_array& o) {
    if (e.tile_begin >= e.tile_end) return;
    const int num_tiles = e.tile_end - e.tile_begin;
    begin_units();
    float s[S::score_registers];
    device::mbarrier_wait_parity(stages_.q_full(), q_phase_);
    float powers[S::columns];
#pragma unroll
    for (int c = 0; c < S::columns; ++c) {
      powers[c] = __uint_as_float(device::load_shared_4(stages_.powers() + column_state::row_of(c) * 4));
    }
    for (int n = (warpgroup_ ^ tiles_) & 1; n < num_tiles; n += S::num_warpgroups) {
      const int tile = e.tile_end - 1 - n;
      const int stage = (tiles_ + n) % S::stages;
      device::mbarrier_wait_parity(stages_.full(stage), (tiles_ + n) / S::stages & 1);
      float4 scales[2];  // of the thread's keys
#pragma unroll
      for (int i = 0; i < 2; ++i) scales[i] = load_scales(stage, i);
      scores(s, stage, scales, powers);
      mask(s, tile, e, rows);
      softmax(s, rows, o, exceed_units(scales), [&] { raise_units(scales, o); });
      hand_over(s, scales);
      device::fence_async_proxy();
      device::named_barrier_sync(own_barrier + warpgroup_, 128);
      values(o, stage);
      // The products are done, so all that the warp has read is in registers: the next rows may come.
      if (lane_ == 0) device::mbarrier_arrive(stages_.empty(stage));
    }
    if (thread_ == 0) device::mbarrier_arrive(stages_.q_empty());
    q_phase_ ^= 1;
    tiles_ += num_tiles;
    for (float& m : rows.max) m *= scale_;
#pragma unroll
    for (int c = 0; c < S::value_chunks; ++c) {
#pragma unroll
      for (float& x : o[c]) x *= units_[c / 2];
    }
  }

 private:
  using base::score_array;
  using operand = std::uint32_t[chunk_steps][4];

  [[nodiscard]] __device__ __forceinline__ static float part_of(const float4& scales, int part) {
    const float of_parts[] = {scales.x, scales.y, scales.z, scales.w};
    return of_parts[part];
  }
  // Of the thread's key i.
  [[nodiscard]] __device__ __forceinline__ float4 load_scales(int stage, int i) const {
    return device::load_shared_f32x4(stages_.kv(stage) + key_of(2 * i) * record_bytes +
                                     static_cast<int>(kv_record::scales_offset));
  }

  // s = k · qᵀ.
  __device__ __forceinline__ void scores(score_array& s, int stage, const float4 (&scales)[2],
                                         const float (&powers)[S::columns]) const {
    const std::uint32_t keys = stages_.kv(stage) + (warp_ * 16 + lane_ % 16) * record_bytes + lane_ / 16 * 16;
    const std::uint64_t q = device::wgmma_descriptor(stages_.q(), 16, 1024);
    float parts[S::scales][S::score_registers];
    operand a[2];
#pragma unroll
    for (int c = 0; c < S::value_chunks; ++c) {
      std::uint32_t codes[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) device::ldmatrix_x4(codes[i], keys + c * 64 + i * 32);
      if (c >= 2) device::wgmma_wait_group<1>();  // a[c % 2] has been read
#pragma unroll
      for (int step = 0; step < chunk_steps; ++step) {
        const device::half_pairs upper = device::e4m3_pairs::neighbours(codes[step / 2][step % 2 * 2]);
        const device::half_pairs lower = device::e4m3_pairs::neighbours(codes[step / 2][step % 2 * 2 + 1]);
        a[c & 1][step][0] = upper.first;
        a[c & 1][step][1] = lower.first;
        a[c & 1][step][2] = upper.second;
        a[c & 1][step][3] = lower.second;
      }
      multiply<__half>(parts[c / 2], a[c & 1], device::wgmma_descriptor_after(q, c * S::q_chunk_bytes), c % 2 > 0);
    }
    device::wgmma_wait_group<1>();
#pragma unroll
    for (int step = 0; step < chunk_steps; ++step) {
      device::ldmatrix_x4(a[0][step], keys + static_cast<int>(kv_record::rotated_offset) + step * 32);
    }
    multiply<__nv_bfloat16>(s, a[0], device::wgmma_descriptor_after(q, S::value_chunks * S::q_chunk_bytes), false);
    device::wgmma_wait_group<0>();
    device::wgmma_fence_operands(s);
#pragma unroll
    for (int part = 0; part < S::scales; ++part) device::wgmma_fence_operands(parts[part]);
#pragma unroll
    for (int j = 0; j < S::score_registers; ++j) {
      float sum = parts[0][j] * scales[j / 2 & 1].x;
      sum = fmaf(parts[1][j], scales[j / 2 & 1].y, sum);
      sum = fmaf(parts[2][j], scales[j / 2 & 1].z, sum);
      sum = fmaf(parts[3][j], scales[j / 2 & 1].w, sum);
      s[j] = fmaf(sum, powers[column_of(j)], s[j]);
    }
  }

  // d (+)= a · b, 64 of the shared dimension; committed, not waited for.
  template <class T>
  __device__ __forceinline__ static void multiply(float (&d)[S::score_registers], const operand& a, std::uint64_t b,
                                                  bool accumulate) {
    device::wgmma_fence_operands(d);
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < chunk_steps; ++step) {
      device::wgmma_m64n16k16_rs<T>(d, a[step], device::wgmma_descriptor_after(b, step * 32), accumulate || step > 0);
    }
    device::wgmma_commit_group();
  }

  // o += vᵀ · pᵀ.
  __device__ __forceinline__ void values(out_array& o, int stage) const {
    const std::uint32_t dims = stages_.kv(stage) + lane_ * record_bytes + warp_ * 16;
    const std::uint64_t p = device::wgmma_descriptor(probabilities(), 16, 1024);
    operand a[2];
#pragma unroll
    for (int c = 0; c < S::value_chunks; ++c) {
      std::uint32_t codes[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) device::ldmatrix_x4_trans(codes[i], dims + c * 64 + i * 32 * record_bytes);
      if (c >= 2) device::wgmma_wait_group<1>();  // a[c % 2] has been read
#pragma unroll
      for (int step = 0; step < chunk_steps; ++step) {
        const device::half_pairs first = device::e4m3_pairs::alternate(codes[step / 2][step % 2 * 2]);
        const device::half_pairs second = device::e4m3_pairs::alternate(codes[step / 2][step % 2 * 2 + 1]);
        a[c & 1][step][0] = first.first;
        a[c & 1][step][1] = first.second;
        a[c & 1][step][2] = second.first;
        a[c & 1][step][3] = second.second;
      }
      multiply<__half>(o[c], a[c & 1], device::wgmma_descriptor_after(p, c / 2 * S::operand_bytes), true);
    }
    device::wgmma_wait_group<0>();
#pragma unroll
    for (int c = 0; c < S::value_chunks; ++c) device::wgmma_fence_operands(o[c]);
  }

  __device__ __forceinline__ void hand_over(const score_array& s, const float4 (&scales)[2]) const {
#pragma unroll
    for (int part = 0; part < S::scales; ++part) {
      float factors[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) factors[i] = part_of(scales[i], part) * inverse_of(units_[part]);
      std::uint32_t p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[i] = device::pack<__half>(s[2 * i] * factors[i & 1], s[2 * i + 1] * factors[i & 1]);
      }
      store_probabilities(probabilities() + part * S::operand_bytes, p);
    }
  }

  // Units of V's scales: powers of two, of each 128 dims. Outputs lack them. A unit follows where a scale is more than
  // max_scale of it: times the largest probability, 2^max_slack, that stays within float16. It is then 2^-6 of the
  // scale, so that scales down to 2^-20 of the largest are not too small for float16 where probabilities are large.
  static constexpr float max_scale = 128, scale_in_units = 64;
  static_assert(max_scale * 256 < 65504 && prefill::max_slack == 8);
  static constexpr float least_unit = 0x1p-126f, largest_unit = 0x1p126f;

  __device__ __forceinline__ void begin_units() {
#pragma unroll
    for (float& unit : units_) unit = least_unit;
  }
  [[nodiscard]] __device__ __forceinline__ static float inverse_of(float unit) {
    return __uint_as_float(0x7f000000u - __float_as_uint(unit));
  }
  [[nodiscard]] __device__ __forceinline__ bool exceed_units(const float4 (&scales)[2]) const {
    bool exceed = false;
#pragma unroll
    for (int part = 0; part < S::scales; ++part) {
#pragma unroll
      for (int i = 0; i < 2; ++i) exceed = exceed || part_of(scales[i], part) * inverse_of(units_[part]) > max_scale;
    }
    return exceed;
  }
  // All threads of the warpgroup.
  __device__ void raise_units(const float4 (&scales)[2], out_array& o) {
    const std::uint32_t largest = stages_.scales() + warpgroup_ * 4 * S::scales * 4;
#pragma unroll
    for (int part = 0; part < S::scales; ++part) {
      float top = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scale = part_of(scales[i], part);
        if (scale <= 0x1.fffffep127f) top = fmaxf(top, scale);
      }
      // Not negative: their bits are in the same order.
      const std::uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(top));
      if (lane_ == 0) device::store_shared_4(largest + (warp_ * S::scales + part) * 4, bits);
    }
    device::named_barrier_sync(own_barrier + warpgroup_, 128);
#pragma unroll
    for (int part = 0; part < S::scales; ++part) {
      std::uint32_t top = 0;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
        top = max(top, device::load_shared_4(largest + (warp * S::scales + part) * 4));
      }
      if (!(__uint_as_float(top) * inverse_of(units_[part]) > max_scale)) continue;
      const float unit = fminf(fmaxf(__uint_as_float(top & 0x7f800000u) / scale_in_units, least_unit), largest_unit);
      const float rescale = units_[part] * inverse_of(unit);
      units_[part] = unit;
#pragma unroll
      for (int c = 2 * part; c < 2 * part + 2; ++c) {
#pragma unroll
        for (float& x : o[c]) x *= rescale;
      }
    }
  }

  float units_[S::scales];
  int q_phase_ = 0;
  int tiles_ = 0;  // of the work tiles before
};

}  // namespace bifolio::inline v0_2::cuda::latent
