// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The softmax of prefill: masks, the logits transform, and a running maximum for each row, over scores as the tensor
/// cores leave them.

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/results.cuh"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/attention/prefill/transform.cuh"
#include "cuda/attention/value_units.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/shared_vectors.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// A thread's two rows of its warpgroup's 64.
struct row_state {
  int token[2], head[2];
  int position[2];  // of the token in the sequence
  float slope[2];   // of the head; with a transform only
  float power[2];   // that queries were divided by; over codes only. In token_softmax.cuh over the usual one
  float query[2];   // sum of the query's elements, so divided (there: over the usual one); with zero points only
  float shift[2];   // this lane's share of probabilities times shifts of V; with zero points only
  float max[2];     // of scores in the row's unit; when all keys are done, of base-2 logits. At most 8 below
  float sum[2];     // this lane's share

  template <class Shape, bool Transform>
  __device__ __forceinline__ void begin(const prefill_args& a, const prefill_work_tile& work, int warpgroup,
                                        int thread) {
    const int first_token = (Shape::num_consumers * work.row_tile + warpgroup) * a.tokens_per_warpgroup;
    const int first_row = (thread / 32) * 16 + (thread & 31) / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + 8 * i;
      const int of_warpgroup = row / a.packed_heads;
      head[i] = work.head + row - of_warpgroup * a.packed_heads;
      // Rows that no token of the warpgroup has belong to none of the sequence.
      token[i] = of_warpgroup < a.tokens_per_warpgroup ? first_token + of_warpgroup : work.query_len;
      position[i] = work.seq_len - work.query_len + token[i];
      max[i] = -INFINITY;
      sum[i] = 0;
      if constexpr (Transform) slope[i] = a.alibi_slopes != nullptr ? a.alibi_slopes[head[i]] : 0.0f;
    }
  }
};

/// How far a row's maximum may stay below its scores, in base 2.
inline constexpr float max_slack = 8.0f;

/// Score register j of a thread is of row (j / 2) % 2 of its two, and of key 8 · (j / 4) + j % 2 from its first column.
template <class Shape, bool Transform>
class softmax {
  using S = Shape;

 protected:
  using units_of_rows = value_units;

  __device__ __forceinline__ softmax(const prefill_args& args, int thread)
      : a_(args), transform_(transform_options(args)), thread_(thread) {}

  // With static scales of K per head, those of the head.
  __device__ __forceinline__ void take_head(int kv_head) {
    if (a_.k_scales.static_step != 0) transform_ = logits_transform<Transform>(transform_options(a_, kv_head));
  }

  // Queries of bfloat16 were divided by powers. Where scores are products, these join the unit; elsewhere products are
  // multiplied with them first.
  [[nodiscard]] __device__ __forceinline__ bool powers_join_units() const {
    if constexpr (Transform) {
      return transform_.keeps_products() && a_.alibi_slopes == nullptr;
    } else {
      return true;
    }
  }
  __device__ __forceinline__ void multiply_powers(float (&s)[S::score_registers], const row_state& rows) const {
    if (powers_join_units() || a_.q_type != dtype::bf16) return;
#pragma unroll
    for (int j = 0; j < S::score_registers; ++j) s[j] *= rows.power[(j >> 1) & 1];
  }
  // Of the scores of this thread's i-th row, in base 2.
  [[nodiscard]] __device__ __forceinline__ float unit_of(const row_state& rows, int i) const {
    if constexpr (!S::is_coded) {
      return transform_.scale_log2;
    } else {
      if (!powers_join_units()) return transform_.scale_log2;
      // Rows of zeros have the smallest power. −inf times the unit must not be NaN.
      const float unit = transform_.scale_log2 * rows.power[i];
      return fabsf(unit) < 0x1p-126f ? 0x1p-126f : unit;
    }
  }

  // The key of score register j, from the tile's first, for this thread's first column.
  [[nodiscard]] __device__ __forceinline__ static constexpr int key_of(int j) { return (j >> 2) * 8 + (j & 1); }

  // The keys of a tile that this thread's rows attend to, as score registers count them. The same as attn::attends and
  // is_in_window.
  struct visible_keys {
    int begin[2], end[2];
    [[nodiscard]] __device__ __forceinline__ bool contains(int j) const {
      return key_of(j) >= begin[(j >> 1) & 1] && key_of(j) < end[(j >> 1) & 1];
    }
  };
  [[nodiscard]] __device__ __forceinline__ visible_keys visible(int column, const kv_range& e,
                                                                const row_state& rows) const {
    visible_keys keys;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int end = a_.causal ? min(e.seq_len, rows.position[i] + 1) : e.seq_len;
      if (a_.window_right >= 0) end = min(end, rows.position[i] + a_.window_right + 1);
      keys.end[i] = end - column;
      keys.begin[i] = a_.window_left >= 0 ? rows.position[i] - a_.window_left - column : 0;
    }
    return keys;
  }
  // Whether there are keys in the tile that some row does not attend to: at its end, at its beginning.
  [[nodiscard]] __device__ __forceinline__ static bool ends_in(int tile, const kv_range& e) {
    return (tile + 1) * S::tile_keys > e.common_limit;
  }
  [[nodiscard]] __device__ __forceinline__ static bool begins_in(int tile, const kv_range& e) {
    return tile * S::tile_keys < e.common_begin;
  }

  // Scores of keys that a row does not attend to become −inf, in tiles where there are any.
  __device__ __forceinline__ void mask(float (&s)[S::score_registers], int tile, int column, const kv_range& e,
                                       const row_state& rows) const {
    if (ends_in(tile, e)) {
      const visible_keys keys = visible(column, e, rows);
#pragma unroll
      for (int j = 0; j < S::score_registers; ++j) {
        if (key_of(j) >= keys.end[(j >> 1) & 1]) s[j] = -INFINITY;
      }
    }
    if (begins_in(tile, e)) {
      const visible_keys keys = visible(column, e, rows);
#pragma unroll
      for (int j = 0; j < S::score_registers; ++j) {
        if (key_of(j) < keys.begin[(j >> 1) & 1]) s[j] = -INFINITY;
      }
    }
  }

  // Scores become probabilities against the running maximum; `rescale` is what older results must be multiplied with.
  // The maximum follows only where a score is more than max_slack above it, which is rare after the first tile: mostly
  // rescale is 1, and the lanes of a row need not exchange their maxima.
  __device__ __forceinline__ void probabilities(float (&s)[S::score_registers], int tile, const kv_range& e,
                                                row_state& rows, float (&rescale)[2]) {
    const int column = tile * S::tile_keys + (thread_ & 3) * 2;
    float from_row[2] = {0, 0};  // what all scores of this thread's row lack
    if constexpr (Transform) {
      if (transform_.rising) return capped_probabilities(s, tile, column, e, rows, rescale);
      transform_.apply(s);
      if (a_.alibi_slopes != nullptr) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float slope = rows.slope[i] * transform_.alibi_factor;
          from_row[i] = product(slope, static_cast<float>(column - rows.position[i]));
#pragma unroll
          for (int j = 0; j < S::score_registers; j += 4) {
            s[j + 2 * i] = fmaf(slope, static_cast<float>(key_of(j)), s[j + 2 * i]);
            s[j + 2 * i + 1] = fmaf(slope, static_cast<float>(key_of(j + 1)), s[j + 2 * i + 1]);
          }
        }
      }
    }
    mask(s, tile, column, e, rows);
    const float unit[2] = {unit_of(rows, 0), unit_of(rows, 1)};
    float m[2] = {-INFINITY, -INFINITY};  // of this lane
#pragma unroll
    for (int j = 0; j < S::score_registers; j += 4) {
      m[0] = fmaxf(m[0], fmaxf(s[j], s[j + 1]));
      m[1] = fmaxf(m[1], fmaxf(s[j + 2], s[j + 3]));
    }
    if constexpr (Transform) {
      m[0] += from_row[0];
      m[1] += from_row[1];
    }
    rescale[0] = rescale[1] = 1.0f;
    const bool rises = (m[0] - rows.max[0]) * unit[0] > max_slack || (m[1] - rows.max[1]) * unit[1] > max_slack;
    if (__any_sync(0xffffffffu, rises)) raise_maxima(m, unit, rows, rescale);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float from = Transform ? rows.max[i] - from_row[i] : rows.max[i];
      const float shift = rows.max[i] == -INFINITY ? 0.0f : from * unit[i];
      float sum = 0;
#pragma unroll
      for (int j = 0; j < S::score_registers; j += 4) {
        s[j + 2 * i] = device::exp2_fast(fmaf(s[j + 2 * i], unit[i], -shift));
        s[j + 2 * i + 1] = device::exp2_fast(fmaf(s[j + 2 * i + 1], unit[i], -shift));
        sum += s[j + 2 * i] + s[j + 2 * i + 1];
      }
      rows.sum[i] = S::has_parts ? __fmaf_rn(rows.sum[i], rescale[i], sum) : rows.sum[i] * rescale[i] + sum;
    }
  }

  // In deterministic plans no multiplication that a later addition could be fused with: a tile must have the same bits
  // as the first of a work tile and as another.
  [[nodiscard]] __device__ __forceinline__ static float product(float a, float b) {
    return S::has_parts ? __fmul_rn(a, b) : a * b;
  }

  // Lets each row's maximum follow its largest score, of which `m` is this lane's, where that is more than max_slack
  // above it.
  __device__ __forceinline__ static void raise_maxima(float (&m)[2], const float (&unit)[2], row_state& rows,
                                                      float (&rescale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      m[i] = fmaxf(m[i], __shfl_xor_sync(0xffffffffu, m[i], 1));
      m[i] = fmaxf(m[i], __shfl_xor_sync(0xffffffffu, m[i], 2));
      if ((m[i] - rows.max[i]) * unit[i] > max_slack) {
        rescale[i] = device::exp2_fast((rows.max[i] - m[i]) * unit[i]);
        rows.max[i] = m[i];
      }
    }
  }

  // The same for logits with a soft cap and nothing after it. They rise with the products, so that maxima are found
  // among those, and the cap is in the multiply-add of the exponential. The largest magnitude tells both whether all
  // products are short and whether a maximum may rise; where it may, the largest of the keys that count is found.
  __device__ __forceinline__ void capped_probabilities(float (&s)[S::score_registers], int tile, int column,
                                                       const kv_range& e, row_state& rows, float (&rescale)[2]) {
    const bool is_border = ends_in(tile, e) || begins_in(tile, e);
    bool is_short = !is_border;
    bool rises = is_border;
    if (!is_border) {
      float size[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < S::score_registers; j += 4) {
        size[0] = fmaxf(size[0], fmaxf(fabsf(s[j]), fabsf(s[j + 1])));
        size[1] = fmaxf(size[1], fmaxf(fabsf(s[j + 2]), fabsf(s[j + 3])));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (rows.position[i] >= e.seq_len) continue;  // an unused row holds whatever was in shared memory
        is_short = is_short && transform_.is_short(size[i]);
        rises = rises || !(transform_.short_logit(size[i], rows.max[i]) <= max_slack);
      }
    }
    rescale[0] = rescale[1] = 1.0f;
    const bool all_short = __all_sync(0xffffffffu, is_short);
    visible_keys keys;
    if (!all_short || __any_sync(0xffffffffu, rises)) {
      keys = visible(column, e, rows);
      float m[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int j = 0; j < S::score_registers; ++j) {
        if (keys.contains(j)) m[(j >> 1) & 1] = fmaxf(m[(j >> 1) & 1], s[j]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) m[i] = m[i] == -INFINITY ? m[i] : transform_.capped_logit(m[i], 0.0f);
      raise_maxima(m, {1.0f, 1.0f}, rows, rescale);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = rows.max[i] == -INFINITY ? 0.0f : rows.max[i];
      float sum = 0;
      if (all_short) {
#pragma unroll
        for (int j = 2 * i; j < S::score_registers; j += 4) {
          s[j] = device::exp2_fast(transform_.short_logit(s[j], shift));
          s[j + 1] = device::exp2_fast(transform_.short_logit(s[j + 1], shift));
          sum += s[j] + s[j + 1];
        }
      } else {
#pragma unroll
        for (int j = 2 * i; j < S::score_registers; j += 4) {
          const float logit[2] = {transform_.capped_logit(s[j], shift), transform_.capped_logit(s[j + 1], shift)};
          s[j] = device::exp2_fast(keys.contains(j) ? logit[0] : -INFINITY);
          s[j + 1] = device::exp2_fast(keys.contains(j + 1) ? logit[1] : -INFINITY);
          sum += s[j] + s[j + 1];
        }
      }
      rows.sum[i] = rows.sum[i] * rescale[i] + sum;
    }
  }

  // Of four keys of this thread, those of score registers 8h to 8h + 7: their scales, and their shifts where there are
  // zero points. `scales`: of a plane and tile, in shared memory.
  struct key_scales {
    float scale[4];
    float shift[4];
  };
  [[nodiscard]] __device__ __forceinline__ static constexpr int key_among_four(int j) {
    return (j >> 2 & 1) * 2 + (j & 1);
  }
  [[nodiscard]] __device__ __forceinline__ key_scales scales_of_keys(std::uint32_t scales, int h) const {
    if constexpr (S::has_zeros) {
      const std::uint32_t at = scales + (h * 16 + (thread_ & 3) * 2) * 8;
      const float4 first = device::load_shared_f32x4(at);
      const float4 second = device::load_shared_f32x4(at + 8 * 8);
      return {{first.x, first.z, second.x, second.z}, {first.y, first.w, second.y, second.w}};
    } else {
      const float4 of_keys = device::load_shared_f32x4(scales + (h * 16 + (thread_ & 3) * 4) * 4);
      return {{of_keys.x, of_keys.y, of_keys.z, of_keys.w}, {}};
    }
  }

  // Products of queries and codes of K become those of queries and K.
  __device__ __forceinline__ void scale_products(float (&s)[S::score_registers], std::uint32_t scales,
                                                 [[maybe_unused]] const row_state& rows) const {
    if (a_.k_scales.tail_floats == 0) return;
#pragma unroll
    for (int h = 0; h < S::tile_keys / 16; ++h) {
      const key_scales of_keys = scales_of_keys(scales, h);
#pragma unroll
      for (int j = 8 * h; j < 8 * h + 8; ++j) {
        s[j] *= of_keys.scale[key_among_four(j)];
        if constexpr (S::has_zeros) s[j] = fmaf(of_keys.shift[key_among_four(j)], rows.query[(j >> 1) & 1], s[j]);
      }
    }
  }

  // Of a tile at a border: the largest finite magnitude of scales of this lane's tokens that each row attends to.
  __device__ __forceinline__ void find_largest_scales(std::uint32_t of_v, const visible_keys& keys,
                                                      float (&largest)[2]) const {
    largest[0] = largest[1] = 0;
#pragma unroll
    for (int h = 0; h < S::tile_keys / 16; ++h) {
      const key_scales of_keys = scales_of_keys(of_v, h);
#pragma unroll
      for (int j = 8 * h; j < 8 * h + 8; ++j) {
        const float size = fabsf(of_keys.scale[key_among_four(j)]);
        if (keys.contains(j) && size < INFINITY) largest[j >> 1 & 1] = fmaxf(largest[j >> 1 & 1], size);
      }
    }
  }
  __device__ __forceinline__ static void raise_units(float (&largest)[2], value_units& units, float (&rescale)[2]) {
    const bool grows = largest[0] >= units.limit(0) || largest[1] >= units.limit(1);
    if (!__any_sync(0xffffffffu, grows)) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 1));
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 2));
      rescale[i] *= units.raise(i, largest[i]);
    }
  }

  // Adds probabilities times the shifts of V's tokens to the rows' shares of them, which follow maxima as sums do.
  __device__ __forceinline__ void add_shifts(const float (&p)[S::score_registers], std::uint32_t of_v, bool is_border,
                                             const visible_keys& keys, row_state& rows,
                                             const float (&rescale)[2]) const {
    if (a_.v_scales.tail_floats == 1) return;
    float shift[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < S::tile_keys / 16; ++h) {
      const key_scales of_keys = scales_of_keys(of_v, h);
#pragma unroll
      for (int j = 8 * h; j < 8 * h + 8; ++j) {
        const int i = (j >> 1) & 1;
        if (!is_border || keys.contains(j)) shift[i] = fmaf(p[j], of_keys.shift[key_among_four(j)], shift[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) rows.shift[i] = rows.shift[i] * rescale[i] + shift[i];
  }

  // Probabilities become what codes of V are multiplied with, in units that follow the scales of visible tokens;
  // `rescale` of older outputs, not of sums, includes what units have grown. Tokens that a row does not attend to may
  // have any scale. `scales`: those of K, which V's follow.
  __device__ __forceinline__ void scale_probabilities(float (&s)[S::score_registers], std::uint32_t scales, int tile,
                                                      const kv_range& e, row_state& rows, value_units& units,
                                                      float (&rescale)[2]) const {
    if (a_.v_scales.tail_floats == 0) return;
    const std::uint32_t of_v = scales + S::tile_keys * S::scale_bytes;
    const bool is_border = ends_in(tile, e) || begins_in(tile, e);
    visible_keys keys = {};
    float largest[2];  // finite magnitude of this lane's tokens that the row attends to; of all lanes' without a border
    if (is_border) {
      keys = visible(tile * S::tile_keys + (thread_ & 3) * 2, e, rows);
      find_largest_scales(of_v, keys, largest);
    } else {
      largest[0] = largest[1] = largest_of_warps(scales + S::largest_scales);
    }
    if constexpr (S::has_zeros) add_shifts(s, of_v, is_border, keys, rows, rescale);
    raise_units(largest, units, rescale);
    const float inverse[2] = {units.inverse_unit(0), units.inverse_unit(1)};
    if (__all_sync(0xffffffffu, inverse[0] == inverse[1])) {
#pragma unroll
      for (int h = 0; h < S::tile_keys / 16; ++h) {
        key_scales of_keys = scales_of_keys(of_v, h);
#pragma unroll
        for (int i = 0; i < 4; ++i) of_keys.scale[i] *= inverse[0];
#pragma unroll
        for (int j = 8 * h; j < 8 * h + 8; ++j) s[j] *= of_keys.scale[key_among_four(j)];
      }
    } else {
#pragma unroll
      for (int h = 0; h < S::tile_keys / 16; ++h) {
        const key_scales of_keys = scales_of_keys(of_v, h);
#pragma unroll
        for (int j = 8 * h; j < 8 * h + 8; ++j) s[j] *= of_keys.scale[key_among_four(j)] * inverse[(j >> 1) & 1];
      }
    }
    if (is_border) {
#pragma unroll
      for (int j = 0; j < S::score_registers; ++j) {
        if (!keys.contains(j)) s[j] = 0;
      }
    }
  }

  [[nodiscard]] __device__ __forceinline__ static float largest_of_warps(std::uint32_t at) {
    const float4 of_warps = device::load_shared_f32x4(at);
    return fmaxf(fmaxf(of_warps.x, of_warps.y), fmaxf(of_warps.z, of_warps.w));
  }

  const prefill_args& a_;
  logits_transform<Transform> transform_;
  int thread_;
};

}  // namespace bifolio::inline v0_2::cuda::prefill
