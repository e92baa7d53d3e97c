// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Where results of decode go: finished rows to the output and the LSE, partial results to the workspace.

#include <cstdint>
#include <type_traits>

#include "cuda/attention/decode/scheduler.cuh"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/ptx.cuh"

namespace bifolio::inline v0_2::cuda::decode {

/// The workspace: per partial result 16 rows of outputs, the maximum (base 2) and sum of each row, and its node.
template <class Shape>
struct partial_results {
  float* out;
  float2* sums;
  int* nodes;  // of pieces; deterministic plans only

  __device__ __forceinline__ partial_results(float* workspace, std::int64_t num_partials)
      : out(workspace),
        sums(reinterpret_cast<float2*>(workspace + num_partials * decode_tile_rows * Shape::head_dim)),
        nodes(reinterpret_cast<int*>(sums + num_partials * decode_tile_rows)) {}

  [[nodiscard]] __device__ __forceinline__ float* row(std::int64_t partial, int row) const {
    return out + (partial * decode_tile_rows + row) * Shape::head_dim;
  }
};

/// The rows of one output tile: row r is token (first + r) / group_size, head (first + r) % group_size of the KV head.
template <class T, class Shape>
class output_rows {
  using S = Shape;

 public:
  struct row_place {
    int token;  // of the sequence
    int head;
  };

  __device__ __forceinline__ output_rows(const decode_args& args, const work_tile& w, const decode_seq& s)
      : a_(args),
        query_start_(s.query_start),
        first_row_(w.row_tile * decode_tile_rows),
        first_head_(w.head * args.group_size),
        num_rows_(min(s.query_len * args.group_size - first_row_, decode_tile_rows)) {
    if constexpr (S::is_coded) {
      const code_scales& v = args.v_scales;
      if (v.static_scales != nullptr) static_scale_ = __ldg(v.static_scales + w.head * v.static_step);
    }
  }

  [[nodiscard]] __device__ __forceinline__ int num_rows() const { return num_rows_; }

  [[nodiscard]] __device__ __forceinline__ row_place place_of(int row) const {
    const int packed = first_row_ + row;
    const int token = a_.by_group_size.quotient(packed);
    return {token, first_head_ + packed - token * a_.group_size};
  }

  /// Applies the sink and writes the LSE of a row with maximum m (base 2) and sum l. Returns what its values must be
  /// multiplied with.
  __device__ __forceinline__ float finish(const row_place& p, float m, float l, bool writes_lse) const {
    constexpr float ln2 = 0.6931471805599453f;
    constexpr float log2e = 1.4426950408889634f;
    float scale = 1.0f;
    if (a_.sinks != nullptr) {
      const float sink = a_.sinks[p.head] * log2e;
      const float top = fmaxf(m, sink);
      if (top != -INFINITY) {
        scale = m == -INFINITY ? 0.0f : device::exp2_fast(m - top);
        l = l * scale + device::exp2_fast(sink - top);
        m = top;
      }
    }
    if (writes_lse && a_.lse != nullptr) {
      a_.lse[static_cast<std::int64_t>(query_start_ + p.token) * a_.num_q_heads + p.head] =
          l != 0 ? m * ln2 + logf(l) : -INFINITY;  // NaN stays NaN
    }
    const float factor = l != 0 ? scale / l : 0.0f;
    if constexpr (S::is_coded) return factor * static_scale_;
    return factor;
  }

  /// 2 columns, of float32.
  __device__ __forceinline__ void store(const row_place& p, int column, const float2& x, float factor) const {
    *reinterpret_cast<float2*>(at(p, column)) = make_float2(x.x * factor, x.y * factor);
  }
  /// 4 columns.
  __device__ __forceinline__ void store(const row_place& p, int column, const float4& x, float factor) const {
    if constexpr (std::is_same_v<T, float>) {
      *reinterpret_cast<float4*>(at(p, column)) = make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
    } else {
      *reinterpret_cast<uint2*>(at(p, column)) =
          make_uint2(pack(x.x * factor, x.y * factor), pack(x.z * factor, x.w * factor));
    }
  }
  /// 8 columns.
  __device__ __forceinline__ void store(const row_place& p, int column, const float4& lo, const float4& hi,
                                        float factor) const {
    if constexpr (std::is_same_v<T, float>) {
      store(p, column, lo, factor);
      if (column + 4 < S::row_dims(a_)) store(p, column + 4, hi, factor);
    } else {
      *reinterpret_cast<uint4*>(at(p, column)) =
          make_uint4(pack(lo.x * factor, lo.y * factor), pack(lo.z * factor, lo.w * factor),
                     pack(hi.x * factor, hi.y * factor), pack(hi.z * factor, hi.w * factor));
    }
  }

 private:
  using element = std::conditional_t<S::is_coded, std::uint16_t, T>;

  [[nodiscard]] __device__ __forceinline__ std::uint32_t pack(float lo, float hi) const {
    if constexpr (S::is_coded) {
      return a_.out_type == dtype::bf16 ? device::pack<__nv_bfloat16>(lo, hi) : device::pack<__half>(lo, hi);
    } else {
      return device::pack<T>(lo, hi);
    }
  }

  [[nodiscard]] __device__ __forceinline__ element* at(const row_place& p, int column) const {
    return static_cast<element*>(a_.out) + (query_start_ + p.token) * a_.out_token_stride +
           p.head * a_.out_head_stride + column;
  }

  const decode_args& a_;
  int query_start_, first_row_, first_head_, num_rows_;
  float static_scale_ = 1;  // of V; codes only
};

}  // namespace bifolio::inline v0_2::cuda::decode
