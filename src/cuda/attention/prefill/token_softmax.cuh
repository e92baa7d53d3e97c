// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The softmax of prefill over codes with scales per token, without a logits transform. Scales cost one instruction a
/// score, that of V: the product with K's scale, which has the unit of base-2 logits in it, is the multiply-add that
/// subtracts the maximum; V's unit is a part of what it subtracts. Planes without scales of tokens have those that the
/// producer makes (coded_producer.cuh).

#include <cstdint>

#include "cuda/attention/prefill/softmax.cuh"
#include "cuda/attention/value_units.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// Units of V's scales, of which exponents have as much as sums of float32 have room for: probabilities come out as
/// 2^lift times what they are, and so do their sums. The rest, if there is one, multiplies them.
struct lifted_units : value_units {
  float lift[2];

  // Weights 2^126 times lighter than a row's heaviest are 0: 2^-114 of the published bound is for those and max_slack.
  static constexpr std::uint32_t lowest = 127 - 64, highest = 127 + 4;

  __device__ __forceinline__ void clear(bool has_scales) {
    value_units::clear(has_scales);
#pragma unroll
    for (int i = 0; i < 2; ++i) set_lift(i);
  }
  /// After the unit has grown.
  __device__ __forceinline__ void set_lift(int i) { lift[i] = 127.0f - static_cast<float>(part(i)); }

  /// 2^-lift.
  [[nodiscard]] __device__ __forceinline__ float inverse_lift(int i) const { return __uint_as_float(part(i) << 23); }
  [[nodiscard]] __device__ __forceinline__ bool has_rest(int i) const { return exponent[i] != part(i); }
  [[nodiscard]] __device__ __forceinline__ float inverse_rest(int i) const {
    return __uint_as_float((127 + part(i) - exponent[i]) << 23);
  }

 private:
  // The exponent of what exponents have of the unit, biased.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t part(int i) const {
    return min(max(exponent[i], lowest), highest);
  }
};

template <class Shape>
class token_softmax : protected softmax<Shape, false> {
  using S = Shape;
  using base = softmax<Shape, false>;

 protected:
  using base::base;
  using units_of_rows = lifted_units;

  // Products of queries and codes of K become what codes of V are multiplied with: probabilities times V's scales, in
  // units that follow the largest scale of the tokens that a row attends to. Tokens that it does not attend to may have
  // any scale. `rescale`: of older outputs. `scales`: of K, which V's follow, in shared memory.
  __device__ __forceinline__ void take(float (&s)[S::score_registers], std::uint32_t scales, int tile,
                                       const kv_range& e, row_state& rows, lifted_units& units,
                                       float (&rescale)[2]) const {
    const int column = tile * S::tile_keys + (this->thread_ & 3) * 2;
    const std::uint32_t of_v = scales + S::tile_keys * S::scale_bytes;
    const bool is_border = base::ends_in(tile, e) || base::begins_in(tile, e);
    rescale[0] = rescale[1] = 1.0f;
    const float largest = base::largest_of_warps(scales + S::largest_scales);
    if (__any_sync(0xffffffffu, largest >= units.limit(0) || largest >= units.limit(1))) {
      float of_rows[2] = {largest, largest};
      if (is_border) base::find_largest_scales(of_v, base::visible(column, e, rows), of_rows);
      raise(of_rows, units, rows, rescale);
    }

    // −(what exponents subtract)
    float from[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) from[i] = units.lift[i] - (rows.max[i] == -INFINITY ? 0.0f : rows.max[i]);
    int top[2];  // the largest of the tile, as integers
    scale_products(s, scales, from, rows, top);
    bool rises = is_border;  // or may. Rows that have seen a NaN are NaN, whatever their maxima
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float limit = rows.max[i] == -INFINITY ? -INFINITY : max_slack + units.lift[i];
      rises = rises || __int_as_float(top[i]) >= limit;
    }
    if (__any_sync(0xffffffffu, rises)) {
      if (is_border) base::mask(s, tile, column, e, rows);
      raise_maxima(s, from, units, rows, rescale);
    }
    if (is_border) {
      const typename base::visible_keys keys = base::visible(column, e, rows);
      exponentials(s, of_v, rows, [&](int j) { return keys.contains(j); });
    } else {
      exponentials(s, of_v, rows, [](int) { return true; });
    }
    if (__any_sync(0xffffffffu, units.has_rest(0) || units.has_rest(1))) {
      const float inverse[2] = {units.inverse_rest(0), units.inverse_rest(1)};
#pragma unroll
      for (int j = 0; j < S::score_registers; ++j) s[j] *= inverse[(j >> 1) & 1];
    }
  }

  // When all keys are done: sums without lift.
  __device__ __forceinline__ void finish(row_state& rows, const lifted_units& units) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.sum[i] *= units.inverse_lift(i);
      if constexpr (S::has_zeros) rows.shift[i] *= units.inverse_lift(i);
    }
  }

 private:
  __device__ __forceinline__ static void rescale_sums(row_state& rows, int i, float factor) {
    rows.sum[i] *= factor;
    if constexpr (S::has_zeros) rows.shift[i] *= factor;
  }
  __device__ __forceinline__ static void raise(float (&largest)[2], lifted_units& units, row_state& rows,
                                               float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 1));
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 2));
      const float lift = units.lift[i];
      rescale[i] = units.raise(i, largest[i]);
      units.set_lift(i);
      rescale_sums(rows, i, device::exp2_fast(units.lift[i] - lift));
    }
  }

  static constexpr int lowest_integer = -0x7fffffff - 1;
  static_assert(max_slack > lifted_units::highest - 127, "limits of maxima are positive");

  // Logits less the maximum, plus lift.
  __device__ __forceinline__ void scale_products(float (&s)[S::score_registers], std::uint32_t scales,
                                                 const float (&from)[2], const row_state& rows, int (&top)[2]) const {
    top[0] = top[1] = lowest_integer;
    const auto with = [&](const auto& scale_of) {
#pragma unroll
      for (int h = 0; h < S::tile_keys / 16; ++h) {
        const typename base::key_scales of_keys = base::scales_of_keys(scales, h);
#pragma unroll
        for (int j = 8 * h; j < 8 * h + 8; ++j) {
          const int i = (j >> 1) & 1;
          const int key = base::key_among_four(j);
          const float less = S::has_zeros ? fmaf(of_keys.shift[key], rows.query[i], from[i]) : from[i];
          s[j] = fmaf(s[j], scale_of(of_keys.scale[key], i), less);
        }
#pragma unroll
        for (int j = 8 * h; j < 8 * h + 8; j += 4) {
          top[0] = larger_as_integers(top[0], s[j], s[j + 1]);
          top[1] = larger_as_integers(top[1], s[j + 2], s[j + 3]);
        }
      }
    };
    if (__any_sync(0xffffffffu, rows.power[0] != 1.0f || rows.power[1] != 1.0f)) {
      with([&](float scale, int i) { return scale * rows.power[i]; });
    } else {
      with([](float scale, int) { return scale; });
    }
  }

  // Of three numbers, one instruction. As integers, positive numbers are above all others and in order, and NaN is
  // above them (what instructions give has no sign). Written as it is because the compiler would keep the floats as
  // integers as well.
  [[nodiscard]] __device__ __forceinline__ static int larger_as_integers(int top, float a, float b) {
    asm("{\n.reg .s32 x, y;\nmov.b32 x, %1;\nmov.b32 y, %2;\nmax.s32 x, x, y;\nmax.s32 %0, %0, x;\n}\n"
        : "+r"(top)
        : "f"(a), "f"(b));
    return top;
  }

  // Lets each row's maximum follow its largest score where that is more than max_slack above it, or the first.
  __device__ __forceinline__ static void raise_maxima(float (&s)[S::score_registers], const float (&from)[2],
                                                      const lifted_units& units, row_state& rows, float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = -INFINITY;
#pragma unroll
      for (int j = 2 * i; j < S::score_registers; j += 4) m = fmaxf(m, fmaxf(s[j], s[j + 1]));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      const bool is_first = rows.max[i] == -INFINITY;
      const float by = m - units.lift[i];
      float less = 0;
      if (is_first ? m > -INFINITY : by > max_slack) {
        rows.max[i] = is_first ? by : rows.max[i] + by;
        less = from[i] - (units.lift[i] - rows.max[i]);  // as the next tiles will have it
        const float factor = is_first ? 1.0f : device::exp2_fast(-less);
        rescale_sums(rows, i, factor);
        rescale[i] *= factor;
      }
#pragma unroll
      for (int j = 2 * i; j < S::score_registers; j += 4) {
        s[j] -= less;
        s[j + 1] -= less;
      }
    }
  }

  // `counts`: whether the row attends to the key of a score register; where it does not, scales may be anything.
  template <class Counts>
  __device__ __forceinline__ void exponentials(float (&s)[S::score_registers], std::uint32_t of_v, row_state& rows,
                                               const Counts& counts) const {
    float sum[2] = {0, 0};
    [[maybe_unused]] float shift[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < S::tile_keys / 16; ++h) {
      const typename base::key_scales of_keys = base::scales_of_keys(of_v, h);
#pragma unroll
      for (int j = 8 * h; j < 8 * h + 8; j += 2) {
        const int i = (j >> 1) & 1;
        const float p[2] = {device::exp2_fast(s[j]), device::exp2_fast(s[j + 1])};
        sum[i] += p[0] + p[1];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int key = base::key_among_four(j + n);
          if constexpr (S::has_zeros) {
            if (counts(j + n)) shift[i] = fmaf(p[n], of_keys.shift[key], shift[i]);
          }
          s[j + n] = counts(j + n) ? p[n] * of_keys.scale[key] : 0.0f;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.sum[i] += sum[i];
      if constexpr (S::has_zeros) rows.shift[i] += shift[i];
    }
  }
};

}  // namespace bifolio::inline v0_2::cuda::prefill
