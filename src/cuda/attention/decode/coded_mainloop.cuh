// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of decode over codes. As in mainloop.cuh the warps split the 64 keys of a tile; but each loads the keys
/// that it multiplies, so that no barrier is between tiles, and the product with V is transposed (coded_rows.cuh).

#include <cstdint>
#include <type_traits>

#include "cuda/attention/decode/coded_rows.cuh"
#include "cuda/attention/decode/mainloop.cuh"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/attention/value_units.cuh"
#include "cuda/device/code_pairs.cuh"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm80.cuh"

namespace bifolio::inline v0_2::cuda::decode {

/// One warp's partial results: maximum and sum of row lane / 4 of each group, and outputs as coded_rows.cuh says.
template <class Shape>
struct coded_accumulators {
  static constexpr int row_groups = Shape::row_groups;
  value_units units;
  float max[row_groups];    // of base-2 logits
  float sum[row_groups];    // this lane's share
  float shift[row_groups];  // the same of probabilities times what V's origins stand for (zero_codes.cuh)
  float out[row_groups][Shape::row_vectors][4];

  __device__ __forceinline__ void clear(const decode_args& args) {
    units.clear(!Shape::has_wide_values && args.v_scales.tail_floats > 0);
#pragma unroll
    for (int g = 0; g < row_groups; ++g) {
      max[g] = -INFINITY;
      sum[g] = 0;
      shift[g] = 0;
#pragma unroll
      for (int n = 0; n < Shape::row_vectors; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[g][n][e] = 0;
    }
  }
};

template <class T, class Shape, class Scheduler>
class coded_mainloop : public mainloop<T, Shape, Scheduler> {
  using S = Shape;
  using base = mainloop<T, Shape, Scheduler>;
  using base::a_, base::lane_, base::warp_, base::stage_, base::stages_, base::queries_, base::zeros_, base::q_buffer_;
  using base::loader_, base::slope_, base::row_position_, base::common_begin_, base::common_end_;
  using base::max_of_row, base::visible, base::next_stage;
  static constexpr int row_groups = S::row_groups;

 public:
  __device__ __forceinline__ coded_mainloop(const decode_args& args, const Scheduler& scheduler, char* shared)
      : base(args, scheduler, shared),
        query_rows_(reinterpret_cast<coded_query_rows*>(shared + S::shared.query_rows)),
        static_scales_(reinterpret_cast<const float*>(shared + S::shared.static_scales)),
        has_scales_(device::kept(args.k_scales.tail_floats > 0 || args.v_scales.tail_floats > 0 ? 1 : 0)),
        transforms_logits_(device::kept(args.soft_cap > 0 || args.alibi_slopes != nullptr ? 1 : 0)),
        key_place_(device::kept(S::key_tiles == 2
                                    ? S::k_rows::place(warp_ * 16 + (lane_ & 7) + (lane_ >> 4 & 1) * 8, lane_ >> 3 & 1)
                                    : S::k_rows::place(warp_ * 8 + (lane_ & 7), lane_ >> 3))),
        value_place_(device::kept(S::k_tile_bytes + values_of<S>::place(warp_, lane_))) {
    if constexpr (S::is_mixed) {
      const bool has_zeros = (S::has_wide_keys ? args.v_type : args.k_type) == dtype::u8;
      variant_ = device::kept(has_zeros ? zeros_of_mix : has_scales_);
      return;
    }
    const int code = args.k_type == dtype::e4m3 ? 0 : args.k_type == dtype::e5m2 ? 1 : args.k_type == dtype::i8 ? 2 : 3;
    variant_ = device::kept(args.k_type == args.v_type ? 2 * code + has_scales_ : mixed_codes);
  }

  /// Takes the queries of a work tile that has tiles, between `begin` and the first of them: the tiles after it should
  /// ask nothing.
  __device__ __forceinline__ void take_queries() {
    device::cp_async_wait_group<S::stages - 2>();
    __syncthreads();
    if constexpr (S::has_wide_keys) {
#pragma unroll
      for (int g = 0; g < row_groups; ++g) factors_[g] = a_.product_factor;
      base::load_q(q_buffer_);
      return;
    }
    const float static_scale = a_.k_scales.static_scales == nullptr ? 1.0f : static_scales_[q_buffer_];
    prepare_queries<S>(a_, queries_ + q_buffer_ * S::q_bytes, static_scale, *query_rows_);
    __syncthreads();
#pragma unroll
    for (int g = 0; g < row_groups; ++g) factors_[g] = query_rows_->factors[g * decode_few_rows + lane_ / 4];
    base::load_q(q_buffer_);
  }

  /// Adds the next KV tile, which is number `tile` of the sequence, to the accumulators.
  __device__ __forceinline__ void process_tile(int tile, coded_accumulators<S>& acc) {
    device::cp_async_wait_group<S::stages - 2>();
    __syncwarp();  // a warp loads the keys that it multiplies
    loader_.load_tile(base::free_stage());
    if constexpr (S::is_mixed) {
      add_mixed_tile(stages_ + stage_ * S::stage_bytes, tile, acc);
    } else {
      add_tile(stages_ + stage_ * S::stage_bytes, tile, acc);
    }
    stage_ = next_stage();
  }

 private:
  static constexpr int mixed_codes = 6;   // u8 without scales is none, and e5m2 with them (3)
  static constexpr int zeros_of_mix = 2;  // beside a plane of 16 bits

  // One test where codes are e4m3 without scales per token.
  __device__ __forceinline__ void add_tile(std::uint32_t k_base, int tile, coded_accumulators<S>& acc) const {
    const auto add = [&](const auto& pairs, auto has_scales) {
      const auto visit = [&](const auto& /*origins*/, const auto& body) { body(pairs); };
      compute_tile<decltype(has_scales)::value, false>(visit, visit, k_base, tile, acc);
    };
    if (variant_ == 0) {
      add(device::e4m3_pairs{}, std::false_type{});
    } else if (variant_ == 1) {
      add(device::e4m3_pairs{}, std::true_type{});
    } else if (variant_ == 5) {
      add(device::i8_pairs{}, std::true_type{});
    } else if (variant_ == 4) {
      add(device::i8_pairs{}, std::false_type{});
    } else if (variant_ == 2) {
      add(device::e5m2_pairs{}, std::false_type{});
    } else if (variant_ == 7) {
      const auto visit = [](const auto& origins, const auto& body) { body(origins); };
      compute_tile<true, true>(visit, visit, k_base, tile, acc);
    } else {
      // Scales that are not there are ones, and zero points zeros.
      compute_tile<true, true>([&](const auto& origins, const auto& body) { visit_pairs(a_.k_type, origins, body); },
                               [&](const auto& origins, const auto& body) { visit_pairs(a_.v_type, origins, body); },
                               k_base, tile, acc);
    }
  }

  // The same where codes are those of one plane alone. The other one's visitor gives its type.
  __device__ __forceinline__ void add_mixed_tile(std::uint32_t k_base, int tile, coded_accumulators<S>& acc) const {
    const auto add = [&](auto has_scales, auto has_zeros, const auto& visit_codes) {
      const auto visit_type = [&](const auto& /*origins*/, const auto& body) {
        if ((S::has_wide_keys ? a_.k_type : a_.v_type) == dtype::bf16) {
          body(std::type_identity<__nv_bfloat16>{});
        } else {
          body(std::type_identity<__half>{});
        }
      };
      constexpr bool scales = decltype(has_scales)::value;
      constexpr bool zeros = decltype(has_zeros)::value;
      if constexpr (S::has_wide_keys) {
        compute_tile<scales, zeros>(visit_type, visit_codes, k_base, tile, acc);
      } else {
        compute_tile<scales, zeros>(visit_codes, visit_type, k_base, tile, acc);
      }
    };
    const auto visit_codes = [&](const auto& /*origins*/, const auto& body) {
      device::visit_code_pairs(S::has_wide_keys ? a_.v_type : a_.k_type, body);
    };
    if (variant_ == 0) {
      add(std::false_type{}, std::false_type{}, visit_codes);
    } else if (variant_ == 1) {
      add(std::true_type{}, std::false_type{}, visit_codes);
    } else {
      add(std::true_type{}, std::true_type{}, [](const auto& origins, const auto& body) { body(origins); });
    }
  }

  // Calls body with the pairs of a plane of this type.
  template <class Body>
  static __device__ __forceinline__ void visit_pairs(dtype type, const u8_origins<S>& origins, const Body& body) {
    if (type == dtype::u8) {
      body(origins);
    } else {
      device::visit_code_pairs(type, body);
    }
  }

  // What the zero points of a plane's tile make of its codes, of scores and of values.
  struct tile_origins {
    u8_origins<S> codes;
    float2 shifts[S::key_tiles];  // of the lane's keys
  };

  // Scores of this warp's keys, softmax against the running maximum, and their share of the output. `HasScales`: per
  // token, of K or V or both; `HasZeros`: the same of zero points. visit_k(origins, body) and visit_v(origins, body)
  // call body with K's and V's pairs.
  template <bool HasScales, bool HasZeros, class VisitK, class VisitV>
  __device__ __forceinline__ void compute_tile(const VisitK& visit_k, const VisitV& visit_v, std::uint32_t k_base,
                                               int tile, coded_accumulators<S>& acc) const {
    values_of<S> stored;
    stored.read(k_base + value_place_);
    [[maybe_unused]] tile_origins of_k, of_v;
    if constexpr (HasZeros) find_origins(k_base, of_k, of_v);
    [[maybe_unused]] float2 k_scales[S::key_tiles];
    [[maybe_unused]] float2 v_scales[S::key_tiles];
    if constexpr (HasScales) {
#pragma unroll
      for (int n = 0; n < S::key_tiles; ++n) {
        k_scales[n] = load_scales(k_base, 0, n);
        v_scales[n] = load_scales(k_base, 1, n);
        if (!S::is_mixed && a_.k_scales.tail_floats == 0) k_scales[n] = make_float2(1, 1);
        if (!S::is_mixed && a_.v_scales.tail_floats == 0) v_scales[n] = make_float2(1, 1);
      }
    }
    // Of four scores two are of each group of rows, or the last two of no row.
    float s[S::key_tiles][4] = {};
    if constexpr (S::has_wide_keys) {
      visit_k(of_k.codes, [&](auto of_keys) { add_wide_scores<typename decltype(of_keys)::type>(s, k_base); });
    } else {
      visit_k(of_k.codes, [&](const auto& pairs) {
        add_coded_scores<S>(
            pairs, s, [&](auto first) { return key_address(k_base, first); },
            [&](std::uint32_t(&q)[4], int kk) { base::take_q(q, q_buffer_, kk); });
      });
    }
#pragma unroll
    for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2 * row_groups; ++e) {
        if constexpr (HasScales && !S::has_wide_keys) s[n][e] *= e % 2 == 0 ? k_scales[n].x : k_scales[n].y;
        if constexpr (HasZeros && !S::has_wide_keys) {
          s[n][e] = fmaf(e % 2 == 0 ? of_k.shifts[n].x : of_k.shifts[n].y, query_sum(e / 2), s[n][e]);
        }
        s[n][e] *= factors_[e / 2];
      }
    const int first_key = tile * decode_tile_tokens + warp_ * S::warp_keys;
    constexpr bool scales_values = HasScales && !S::has_wide_values;
    const bool is_border = first_key < common_begin_ || first_key + S::warp_keys > common_end_;
    if (is_border || transforms_logits_ != 0) {
      transform_scores(s, first_key);
      if (is_border) mask_scores(s, first_key);
    }

    float largest[row_groups];
    [[maybe_unused]] float largest_scale[row_groups];
    bool grows = false;
#pragma unroll
    for (int g = 0; g < row_groups; ++g) {
      largest[g] = -INFINITY;
      largest_scale[g] = 0;
#pragma unroll
      for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          largest[g] = fmaxf(largest[g], s[n][2 * g + e]);
          if constexpr (scales_values) {
            const float scale = fabsf(e == 0 ? v_scales[n].x : v_scales[n].y);
            if (!is_border || s[n][2 * g + e] != -INFINITY) largest_scale[g] = fmaxf(largest_scale[g], scale);
          }
        }
      grows = grows || largest[g] > acc.max[g];
      if constexpr (scales_values) {
        grows = grows || (a_.v_scales.tail_floats > 0 && largest_scale[g] >= acc.units.limit(g));
      }
    }
    // The lanes of a row need not exchange their maxima where none of them is a new one.
    if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
      for (int g = 0; g < row_groups; ++g) {
        const float shift = fmaxf(acc.max[g], max_of_row(largest[g]));
        float alpha = shift > acc.max[g] ? device::exp2_fast(acc.max[g] - shift) : 1.0f;
        acc.max[g] = shift;
        acc.sum[g] *= alpha;
        if constexpr (HasZeros && !S::has_wide_values) acc.shift[g] *= alpha;
        if constexpr (scales_values) {
          if (a_.v_scales.tail_floats > 0) alpha *= acc.units.raise(g, max_of_row(largest_scale[g]));
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float out_alpha = of_output_row(alpha, lane_, r);
#pragma unroll
          for (int n = 0; n < S::row_vectors; ++n) {
            acc.out[g][n][r] *= out_alpha;
            acc.out[g][n][2 + r] *= out_alpha;
          }
        }
      }
    }
    typename values_of<S>::pair p[row_groups][S::key_tiles];
#pragma unroll
    for (int g = 0; g < row_groups; ++g) {
      const float m = acc.max[g] == -INFINITY ? 0.0f : acc.max[g];
#pragma unroll
      for (int n = 0; n < S::key_tiles; ++n) {
        const float(&own)[4] = s[n];
        float p0 = device::exp2_fast(own[2 * g] - m);
        float p1 = device::exp2_fast(own[2 * g + 1] - m);
        acc.sum[g] += p0 + p1;
        if constexpr (HasZeros && !S::has_wide_values) {
          if (own[2 * g] != -INFINITY) acc.shift[g] = fmaf(p0, of_v.shifts[n].x, acc.shift[g]);
          if (own[2 * g + 1] != -INFINITY) acc.shift[g] = fmaf(p1, of_v.shifts[n].y, acc.shift[g]);
        }
        if constexpr (scales_values) {
          // Without scales of V the unit is 1. A token that is not seen may have a scale that is no number.
          const float inverse = acc.units.inverse_unit(g);
          if (own[2 * g] != -INFINITY) p0 *= v_scales[n].x * inverse;
          if (own[2 * g + 1] != -INFINITY) p1 *= v_scales[n].y * inverse;
        }
        p[g][n] = values_of<S>::pair_of(p0, p1);
      }
    }
    visit_v(of_v.codes, [&](const auto& pairs) { stored.multiply(pairs, p, acc.out); });
  }

  // s += queries · keys of their own type.
  template <class Type>
  __device__ __forceinline__ void add_wide_scores(float (&s)[S::key_tiles][4], std::uint32_t k_base) const {
    constexpr int load_vectors = 4 / S::key_tiles;
    float odd[4] = {};  // as in add_coded_scores
    device::for_each_step<0, 2 * S::k_steps / load_vectors>([&](auto step) {
      constexpr int first = decltype(step)::value * load_vectors;
      std::uint32_t place = S::k_rows::vectors_later(k_base + key_place_, first);
      if constexpr (first + load_vectors > 2 * S::least_row_vectors) {
        const int own = first + (S::key_tiles == 2 ? lane_ >> 3 & 1 : lane_ >> 3);
        if (own >= S::row_dims(a_) / S::k_rows::vector_dims) place = zeros_;
      }
      std::uint32_t b[4];
      std::uint32_t q[4];
      device::ldmatrix_x4(b, place);
      base::take_q(q, q_buffer_, first / 2);
      device::mma_m16n8k16<Type>(s[0], q, b[0], b[1]);
      if constexpr (S::key_tiles == 2) {
        device::mma_m16n8k16<Type>(s[1], q, b[2], b[3]);
      } else {
        base::take_q(q, q_buffer_, first / 2 + 1);
        device::mma_m16n8k16<Type>(odd, q, b[2], b[3]);
      }
    });
    if constexpr (S::key_tiles == 1) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][e] += odd[e];
    }
  }

  // What the lane reads of vector `first` of the keys and those after it: zeros past the rows' ends.
  template <class First>
  [[nodiscard]] __device__ __forceinline__ std::uint32_t key_address(std::uint32_t k_base, First /*first*/) const {
    constexpr int vectors = 4 / S::key_tiles;
    constexpr int from = First::value;
    const std::uint32_t place = S::kv_rows::vectors_later(k_base + key_place_, from);
    if constexpr (from + vectors <= S::least_row_vectors) return place;
    const int own = from + (S::key_tiles == 2 ? lane_ >> 3 & 1 : lane_ >> 3);
    return own < S::vectors_of_row(a_) ? place : zeros_;
  }

  // Scales of V (plane 1) or K (0) of the lane's keys: of key 2 · (lane % 4) of each 8 and the next.
  [[nodiscard]] __device__ __forceinline__ float2 load_scales(std::uint32_t stage_base, int plane, int n) const {
    const int key = warp_ * S::warp_keys + n * 8 + (lane_ & 3) * 2;
    return device::load_shared_f32x2(stage_base + S::scale_place(plane, key));
  }

  // The sum of row lane / 4 of group g of the queries.
  [[nodiscard]] __device__ __forceinline__ float query_sum(int g) const {
    return query_rows_->sums[g * decode_few_rows + lane_ / 4];
  }

  // Each lane finds the origin of one token of K or V and puts its shift in the place of the zero point.
  __device__ __forceinline__ void find_origins(std::uint32_t stage_base, tile_origins& of_k, tile_origins& of_v) const {
    if (a_.k_type != dtype::u8 && a_.v_type != dtype::u8) {
      of_k = of_v = {};
      return;
    }
    const int plane = lane_ / S::warp_keys & 1;
    const int row = warp_ * S::warp_keys + lane_ % S::warp_keys;
    const bool has_zero = (plane == 0 ? a_.k_type : a_.v_type) == dtype::u8;  // 16 bits have none
    device::code_origin origin;
    if (has_zero) {
      origin = device::code_origin({device::load_shared_f32(stage_base + S::scale_place(plane, row)),
                                    device::load_shared_f32(stage_base + S::zero_place(plane, row))});
    }
    __syncwarp();
    if (lane_ < 2 * S::warp_keys) {
      device::store_shared_4(stage_base + S::zero_place(plane, row), __float_as_uint(origin.shift));
    }
    // The token's and the next one's.
    const std::uint32_t next = __shfl_down_sync(0xffffffffu, origin.pair, 1);
    const std::uint32_t both = __byte_perm(origin.pair, next, 0x5410);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < S::key_tiles; ++n) {
      of_k.codes.pairs[n] = __shfl_sync(0xffffffffu, origin.pair, n * 8 + lane_ / 4);
      of_v.codes.pairs[n] = __shfl_sync(0xffffffffu, both, S::warp_keys + n * 8 + 2 * (lane_ & 3));
      const int key = warp_ * S::warp_keys + n * 8 + 2 * (lane_ & 3);
      of_k.shifts[n] = device::load_shared_f32x2(stage_base + S::zero_place(0, key));
      of_v.shifts[n] = device::load_shared_f32x2(stage_base + S::zero_place(1, key));
    }
  }

  __device__ __forceinline__ void transform_scores(float (&s)[S::key_tiles][4], int first_key) const {
#pragma unroll
    for (int g = 0; g < row_groups; ++g) {
      const auto distance = static_cast<float>(first_key + (lane_ & 3) * 2 - row_position_[g]);
#pragma unroll
      for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[n][2 * g + e];
          if (a_.soft_cap > 0) x = a_.cap_log2e * device::tanh_fast(x);
          if (a_.alibi_slopes != nullptr) x = fmaf(slope_[g], distance + static_cast<float>(n * 8 + e), x);
        }
    }
  }

  // Scores of keys that a row does not attend to become −inf.
  __device__ __forceinline__ void mask_scores(float (&s)[S::key_tiles][4], int first_key) const {
#pragma unroll
    for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 2 * row_groups; ++e) {
        if (!visible(first_key + n * 8 + (lane_ & 3) * 2 + (e & 1), e >> 1)) s[n][e] = -INFINITY;
      }
  }

  coded_query_rows* query_rows_;
  const float* static_scales_;
  int has_scales_, transforms_logits_;     // 0 or 1
  std::uint32_t key_place_, value_place_;  // in the stage: what the lane's first ldmatrix of K and of V reads
  int variant_;                // 2 · (0 e4m3, 1 e5m2, 2 i8, 3 u8), and 1 more with scales per token; or mixed_codes
  float factors_[row_groups];  // from products to base-2 logits or arguments of tanh, of the work tile
};

}  // namespace bifolio::inline v0_2::cuda::decode
