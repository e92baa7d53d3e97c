// SPDX-License-Identifier: Apache-2.0
#pragma once

/// How vectors.hpp makes probabilities of the scores of a row.

#include "common/attention/logits.hpp"
#include "cpu/kernels/attention/vectors.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

template <class Key, vector_sums Sums>
inline void vector_mainloop<Key, Sums>::read_bias(visible_range visible, std::int64_t tile_first, int head, int row,
                                                  float* bias) const noexcept {
  for (int key = 0; key < tile_keys; key += lanes) store(bias + key, vf(0.0f));
  const std::int64_t offset = token_of(row) * args_.bias_token_stride + query_head(head, row) * args_.bias_head_stride +
                              tile_first + visible.begin;
  widen_any(args_.bias_type, args_.bias, offset, static_cast<int>(visible.end - visible.begin), 1.0f,
            bias + visible.begin);
}

template <class Key, vector_sums Sums>
BIFOLIO_INLINE void vector_mainloop<Key, Sums>::softmax_row(float* scores, visible_range visible,
                                                            std::int64_t tile_first, int head, int row,
                                                            [[maybe_unused]] const query_step& query, float* state,
                                                            float* sums) const noexcept {
  vf s[tile_vectors];
#pragma GCC unroll 16
  for (int c = 0; c < tile_vectors; ++c) s[c] = load(scores + c * lanes);
  if constexpr (scores_by_fours) {
    const vf step(query.step);
#pragma GCC unroll 16
    for (int c = 0; c < tile_vectors; ++c) s[c] = sums_as_floats(s[c], query.offset) * step;
  }
  if constexpr (widens_codes) {
    if (k_tails_) {
#pragma GCC unroll 16
      for (int c = 0; c < tile_vectors; ++c) s[c] = s[c] * load(k_scales_.scale + c * lanes);
    }
    if (k_zeros_) {
      const vf sum(scratch_.query_sums[static_cast<std::int64_t>(head) * head_rows_ + row]);
#pragma GCC unroll 16
      for (int c = 0; c < tile_vectors; ++c) s[c] = fma(sum, load(k_scales_.zero + c * lanes), s[c]);
    }
  }
  if constexpr (scores_by_dots || scores_by_fours) {
    const vf scale(args_.scale * k_scale(head));
#pragma GCC unroll 16
    for (int c = 0; c < tile_vectors; ++c) s[c] = s[c] * scale;
  }
  if (args_.soft_cap > 0) {
    const vf cap(args_.soft_cap);
    for (int c = 0; c < tile_vectors; ++c) s[c] = attn::soft_capped<vector_math>(s[c], cap);
  }
  if (args_.alibi_slopes != nullptr) {
    const int q_head = (item_.kv_head_begin + head) * args_.group_size + row % args_.group_size;
    const std::int64_t position = item_.first_position + row / args_.group_size;
    const vf slope(args_.alibi_slopes[q_head]);
    const vf distance = lane_numbers() + vf(static_cast<float>(tile_first - position));
    for (int c = 0; c < tile_vectors; ++c) {
      s[c] = attn::with_alibi<vector_math>(s[c], slope, distance + vf(static_cast<float>(c * lanes)));
    }
  }
  if (args_.bias != nullptr) {
    alignas(64) float bias[tile_keys];
    read_bias(visible, tile_first, head, row, bias);
    for (int c = 0; c < tile_vectors; ++c) s[c] = attn::with_bias<vector_math>(s[c], load(bias + c * lanes));
  }
  if (visible.begin > 0 || visible.end < tile_keys) {
    for (int c = 0; c < tile_vectors; ++c) {
      s[c] = keep_lanes(s[c], static_cast<int>(visible.begin) - c * lanes, static_cast<int>(visible.end) - c * lanes);
    }
  }
  vf highest = s[0];
#pragma GCC unroll 16
  for (int c = 1; c < tile_vectors; ++c) highest = max(highest, s[c]);
  const float tile_maximum = reduce_max(highest);
  vf sum = load(sums);
  float& maximum = maximum_of(state, padded_);
  if (tile_maximum > maximum + rescale_threshold) {
    const vf alpha(scalar_math::exp(maximum - tile_maximum));
    maximum = tile_maximum;
    sum = sum * alpha;
    for (int d = 0; d < dims_; d += lanes) store(state + d, load(state + d) * alpha);
  }
  const vf shift(attn::finite_max(maximum));
  if constexpr (widens_codes) {
    if (v_tails_) {
#pragma GCC unroll 16
      for (int c = 0; c < tile_vectors; ++c) {
        s[c] = exp(s[c] - shift);
        sum = sum + s[c];
      }
      store(sums, sum);
      vf zeros(0.0f);
      if (v_zeros_) zeros = sum_zeros(s, visible);
#pragma GCC unroll 16
      for (int c = 0; c < tile_vectors; ++c) s[c] = s[c] * load(v_scales_.scale + c * lanes);
      store_probabilities(s, scores);
      if (!v_zeros_) return;
      if constexpr (sums_by_dots) zeros = zeros + sum_ratios(scores, visible);
      const vf all(reduce_add(zeros));
      for (int d = 0; d < dims_; d += lanes) store(state + d, load(state + d) + all);
      return;
    }
  }
#pragma GCC unroll 16
  for (int c = 0; c < tile_vectors; ++c) {
    s[c] = exp(s[c] - shift);
    if constexpr (!sums_by_dots) store(scores + c * lanes, s[c]);
    sum = sum + s[c];
  }
  if constexpr (sums_by_dots) store_probabilities(s, scores);
  store(sums, sum);
}

template <class Key, vector_sums Sums>
BIFOLIO_INLINE void vector_mainloop<Key, Sums>::store_probabilities(const vf* p, float* to) noexcept {
  if constexpr (sums_by_dots) {
#pragma GCC unroll 8
    for (int c = 0; c < tile_vectors; c += 2) store(to + c / 2 * lanes, narrow_pairs(p[c], p[c + 1]));
  } else {
#pragma GCC unroll 16
    for (int c = 0; c < tile_vectors; ++c) store(to + c * lanes, p[c]);
  }
}

template <class Key, vector_sums Sums>
BIFOLIO_INLINE vf vector_mainloop<Key, Sums>::sum_zeros(const vf* p, visible_range visible) const noexcept {
  vf zeros(0.0f);
#pragma GCC unroll 16
  for (int c = 0; c < tile_vectors; ++c) {
    const vf part = p[c] * load(v_scales_.zero + c * lanes);
    zeros = zeros + keep_lanes(part, static_cast<int>(visible.begin) - c * lanes,
                               static_cast<int>(visible.end) - c * lanes, 0.0f);
  }
  return zeros;
}

template <class Key, vector_sums Sums>
BIFOLIO_INLINE vf vector_mainloop<Key, Sums>::sum_ratios(const float* rounded, visible_range visible) const noexcept {
  vf zeros(0.0f);
  for (int c = 0; c < tile_vectors; c += 2) {
    vf p[2];
    split_pair<bfloat16>(load(rounded + c / 2 * lanes), p[0], p[1]);
    for (int odd = 0; odd < 2; ++odd) {
      const vf part = p[odd] * load(v_ratios_ + (c + odd) * lanes);
      // Lane i is key 2·i + odd.
      const auto lane_of = [&](std::int64_t key) { return static_cast<int>((key - c * lanes - odd + 1) >> 1); };
      zeros = zeros + keep_lanes(part, lane_of(visible.begin), lane_of(visible.end), 0.0f);
    }
  }
  return zeros;
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA
