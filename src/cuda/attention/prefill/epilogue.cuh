// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The epilogue of a prefill consumer warpgroup. Complete rows: sink, LSE, division by the sum, and stores of 16 bytes.
/// Rows of a part of their keys: a partial result for the combine.

#include <cstdint>
#include <type_traits>

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/mainloop.cuh"
#include "cuda/attention/prefill/results.cuh"
#include "cuda/attention/prefill/shape.hpp"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/ptx.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// `T`: of the products; over codes the type of the output is the call's.
template <class T, class Shape>
class epilogue {
  using S = Shape;

 public:
  /// `first_column`: of the rows' dims, what `o` begins with; those with the first write the LSE and the sums.
  __device__ __forceinline__ epilogue(const prefill_args& args, int thread, int first_column = 0)
      : a_(args), thread_(thread), first_column_(first_column) {}

  /// Writes the LSE and the output of this thread's rows.
  __device__ __forceinline__ void store(const prefill_work_tile& work, const row_state& rows,
                                        const float (&o)[S::out_registers]) const {
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const row_sums sums = sums_of(rows, i);
      const bool valid = rows.token[i] < work.query_len;
      const finished_row row(sums, a_.sinks != nullptr && valid ? a_.sinks + rows.head[i] : nullptr,
                             S::is_coded ? static_value_scale(a_, work.head) : nullptr);
      inverse[i] = row.factor;
      if (a_.lse != nullptr && valid && writes_sums()) {
        a_.lse[static_cast<std::int64_t>(work.query_start + rows.token[i]) * a_.num_q_heads + rows.head[i]] = row.lse;
      }
    }
    if constexpr (std::is_same_v<T, float>) {
      store_pairs(work, rows, inverse, o);
    } else if (S::is_coded && a_.out_type == dtype::bf16) {
      store_packed<__nv_bfloat16>(work, rows, inverse, o);
    } else {
      store_packed<T>(work, rows, inverse, o);
    }
  }

  /// Writes this thread's rows as they are to the partial result of `work`.
  __device__ __forceinline__ void store_partial(const prefill_work_tile& work, const row_state& rows, int warpgroup,
                                                const float (&o)[S::out_registers]) const {
    const partial_results partials(a_);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const row_sums sums = sums_of(rows, i);
      if (rows.token[i] >= work.query_len) continue;
      const int row = warpgroup * prefill_warpgroup_rows + (thread_ / 32) * 16 + (thread_ & 31) / 4 + 8 * i;
      if (writes_sums()) __stcg(partials.sums(work.partial, row), make_float2(sums.max, sums.sum));
      float* const dst = partials.row(work.partial, row);
#pragma unroll
      for (int block = 0; block < S::tile_dims / 8; ++block) {
        const int column = first_column_ + block * 8 + (thread_ & 3) * 2;
        if (column >= a_.head_dim) continue;
        const int j = block * 4 + 2 * i;
        __stcg(reinterpret_cast<float2*>(dst + column), make_float2(o[j], o[j + 1]));
      }
    }
  }

 private:
  template <class Out>
  __device__ __forceinline__ void store_packed(const prefill_work_tile& work, const row_state& rows,
                                               const float (&inverse)[2], const float (&o)[S::out_registers]) const {
    // Four lanes hold 2 columns each of every 8; after the exchange lane q holds all 8 of number 4b + q.
    const int q = thread_ & 3;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int b = 0; b < S::tile_dims / 32; ++b) {
        std::uint32_t mine[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int j = (b * 4 + r) * 4 + 2 * i;
          mine[r] = device::pack<Out>(o[j] * inverse[i], o[j + 1] * inverse[i]);
        }
        transpose(mine, q);
        const int column = first_column_ + (b * 4 + q) * 8;
        if (rows.token[i] < work.query_len && column < a_.head_dim) {
          Out* dst = static_cast<Out*>(a_.out) + (work.query_start + rows.token[i]) * a_.out_token_stride +
                     rows.head[i] * a_.out_head_stride + column;
          *reinterpret_cast<uint4*>(dst) = make_uint4(mine[0], mine[1], mine[2], mine[3]);
        }
      }
    }
  }

  // Two columns a lane, 32 bytes of four lanes.
  __device__ __forceinline__ void store_pairs(const prefill_work_tile& work, const row_state& rows,
                                              const float (&inverse)[2], const float (&o)[S::out_registers]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (rows.token[i] >= work.query_len) continue;
      T* const row = static_cast<T*>(a_.out) + (work.query_start + rows.token[i]) * a_.out_token_stride +
                     rows.head[i] * a_.out_head_stride;
#pragma unroll
      for (int block = 0; block < S::tile_dims / 8; ++block) {
        const int column = first_column_ + block * 8 + (thread_ & 3) * 2;
        if (column >= a_.head_dim) continue;
        const int j = block * 4 + 2 * i;
        *reinterpret_cast<float2*>(row + column) = make_float2(o[j] * inverse[i], o[j + 1] * inverse[i]);
      }
    }
  }

  // One lane for each row.
  [[nodiscard]] __device__ __forceinline__ bool writes_sums() const { return (thread_ & 3) == 0 && first_column_ == 0; }

  // Of this thread's i-th row, over all lanes that have columns of it.
  [[nodiscard]] __device__ __forceinline__ row_sums sums_of(const row_state& rows, int i) const {
    float l = rows.sum[i];
    l += __shfl_xor_sync(0xffffffffu, l, 1);
    l += __shfl_xor_sync(0xffffffffu, l, 2);
    return {rows.max[i], l};
  }

  // Transposes 4 × 4 words across a quad of lanes: lane q ends with word q of every lane, in the order of lanes.
  __device__ __forceinline__ static void transpose(std::uint32_t (&x)[4], int q) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if ((r & step) != 0) continue;
        const bool upper = (q & step) != 0;
        const std::uint32_t send = upper ? x[r] : x[r + step];
        const std::uint32_t got = __shfl_xor_sync(0xffffffffu, send, step);
        if (upper)
          x[r] = got;
        else
          x[r + step] = got;
      }
    }
  }

  const prefill_args& a_;
  int thread_, first_column_;
};

}  // namespace bifolio::inline v0_2::cuda::prefill
