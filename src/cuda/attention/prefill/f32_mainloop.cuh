// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of a consumer warpgroup of float32's prefill: 64 query rows against the key tiles of a work tile, from
/// the last to the first, by products of three TensorFloat-32 ones (f32_shape.hpp). Tensor cores round sums towards
/// zero, so that a tile's products with V have sums of their own, which are added to the output by ordinary additions.
/// Rows that one warpgroup holds are computed by both, each with every second tile.

#include <cstdint>

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/f32_producer.cuh"
#include "cuda/attention/prefill/f32_shape.hpp"
#include "cuda/attention/prefill/pipeline.cuh"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/attention/prefill/softmax.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm80.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

template <class Shape, bool Transform>
class f32_mainloop : protected softmax<Shape, Transform> {
  using S = Shape;
  using base = softmax<Shape, Transform>;
  using base::transform_;

 public:
  /// `thread`: of its warpgroup.
  __device__ __forceinline__ f32_mainloop(const prefill_args& args, const f32_ring<Shape>& ring, int warpgroup,
                                          int thread)
      : base(args, thread), warpgroup_(warpgroup), ring_(ring), queries_(ring.queries(warpgroup, thread)) {}

  /// Adds all key tiles of `e`, which is not empty, to o and the rows' maxima and sums. `few_rows`: the warpgroups have
  /// the same rows; the results are then warpgroup 0's.
  __device__ __forceinline__ void process(const prefill_work_tile& work, const kv_range& e, bool few_rows,
                                          row_state& rows, float (&o)[S::out_registers]) {
    put_queries(work, rows);
    for (int tile = e.tile_end - 1; tile >= e.tile_begin; --tile) {
      if (few_rows && ((e.tile_end - 1 - tile) & 1) != warpgroup_) {
        skip_tile();
        continue;
      }
      float s[S::score_registers];
      float rescale[2];
      scores(wait_stage(), s);
      release_stage();
      base::probabilities(s, tile, e, rows, rescale);
      if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int j = 0; j < S::out_registers; ++j) o[j] *= rescale[(j >> 1) & 1];
      }
      operand p[S::tile_keys / 8];
      split_probabilities(s, p);
      float sum[S::out_registers];
      values(p, wait_stage(), sum);
      release_stage();
#pragma unroll
      for (int j = 0; j < S::out_registers; ++j) o[j] += sum[j];
    }
    for (float& m : rows.max) m *= transform_.scale_log2;
    if (few_rows) merge(rows, o);
  }

 protected:
  using base::a_, base::thread_;

  // 16 × 8 elements of a warp's rows: of rows lane / 4 and 8 below, columns t = lane % 4, then those 4 further on.
  struct operand {
    std::uint32_t large[4], small[4];
    __device__ __forceinline__ void set(int i, float x) {
      const device::tf32_pair pair = device::split_tf32(x);
      large[i] = pair.large;
      small[i] = pair.small;
    }
  };

  [[nodiscard]] __device__ __forceinline__ std::uint32_t wait_stage() const {
    device::mbarrier_wait_parity(ring_.full(state_.stage), state_.phase);
    return ring_.stage(state_.stage);
  }
  __device__ __forceinline__ void release_stage() {
    __syncwarp();
    if ((thread_ & 31) == 0) device::mbarrier_arrive(ring_.empty(state_.stage));
    state_.advance();
  }

  // The other warpgroup's.
  __device__ __forceinline__ void skip_tile() {
    for (int n = 0; n < 2; ++n) {
      (void)wait_stage();
      release_stage();
    }
  }

  // Warpgroup 1 hands its results over in place of its queries, thread by thread: both hold the rows in the same
  // places.
  __device__ __forceinline__ void merge(row_state& rows, float (&o)[S::out_registers]) const {
    if (warpgroup_ > 0) {
#pragma unroll
      for (int j = 0; j < S::out_registers / 4; ++j) {
        device::store_shared_f32x4(queries_ + j * 2048,
                                   make_float4(o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = rows.sum[i];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if ((thread_ & 3) == 0) device::store_shared_f32x2(ring_.sums(row_of(i)), make_float2(rows.max[i], sum));
      }
    }
    device::named_barrier_sync(merge_barrier, 256);
    if (warpgroup_ == 0) {
      float mine[2], other[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 sums = device::load_shared_f32x2(ring_.sums(row_of(i)));
        const float top = fmaxf(rows.max[i], sums.x);
        mine[i] = rows.max[i] == -INFINITY ? 0.0f : device::exp2_fast(rows.max[i] - top);
        other[i] = sums.x == -INFINITY ? 0.0f : device::exp2_fast(sums.x - top);
        rows.max[i] = top;
        rows.sum[i] = rows.sum[i] * mine[i] + ((thread_ & 3) == 0 ? sums.y * other[i] : 0.0f);
      }
#pragma unroll
      for (int j = 0; j < S::out_registers / 4; ++j) {
        const float4 x = device::load_shared_f32x4(ring_.queries(1, thread_) + j * 2048);
        o[4 * j] = fmaf(x.x, other[0], o[4 * j] * mine[0]);
        o[4 * j + 1] = fmaf(x.y, other[0], o[4 * j + 1] * mine[0]);
        o[4 * j + 2] = fmaf(x.z, other[1], o[4 * j + 2] * mine[1]);
        o[4 * j + 3] = fmaf(x.w, other[1], o[4 * j + 3] * mine[1]);
      }
    }
    device::named_barrier_sync(merge_barrier, 256);  // before the next queries
  }
  [[nodiscard]] __device__ __forceinline__ int row_of(int i) const {
    return (thread_ / 32) * 16 + (thread_ & 31) / 4 + 8 * i;
  }

  // Vector n of this thread is its operand of dims 8n to 8n + 7, before it is split.
  __device__ __forceinline__ void put_queries(const prefill_work_tile& work, const row_state& rows) const {
    const float* row[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row[i] = rows.token[i] < work.query_len
                   ? static_cast<const float*>(a_.q) + (work.query_start + rows.token[i]) * a_.q_token_stride +
                         rows.head[i] * a_.q_head_stride
                   : nullptr;
    }
#pragma unroll 4
    for (int n = 0; n < S::tile_dims / 8; ++n) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int dim = n * 8 + (thread_ & 3) + i / 2 * 4;
        x[i] = row[i & 1] != nullptr && dim < a_.head_dim ? __ldg(row[i & 1] + dim) : 0.0f;
      }
      device::store_shared_f32x4(queries_ + n * 2048, make_float4(x[0], x[1], x[2], x[3]));
    }
  }
  __device__ __forceinline__ void load_queries(int n, operand& q) const {
    const float4 x = device::load_shared_f32x4(queries_ + n * 2048);
    q.set(0, x.x);
    q.set(1, x.y);
    q.set(2, x.z);
    q.set(3, x.w);
  }

  // Products of larger parts and those with a smaller one have sums of their own. Operands of 32 dims are made while
  // the products of the 32 before run.
  __device__ __forceinline__ void scores(std::uint32_t k, float (&s)[S::score_registers]) const {
    constexpr int steps = 4;  // of 8 dims, in a chunk
    float small[S::score_registers];
    operand q[2][steps];
    const std::uint64_t keys = device::wgmma_descriptor(k, 16, 1024);
#pragma unroll
    for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
      for (int i = 0; i < steps; ++i) load_queries(c * steps + i, q[c & 1][i]);
      device::wgmma_fence();
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        const operand& a = q[c & 1][i];
        const std::uint64_t large = device::wgmma_descriptor_after(keys, c * S::chunk_bytes + i * 32);
        device::wgmma_m64k8_tf32_rs(small, a.small, large, c + i > 0);
        device::wgmma_m64k8_tf32_rs(small, a.large, device::wgmma_descriptor_after(large, S::part_bytes));
        device::wgmma_m64k8_tf32_rs(s, a.large, large, c + i > 0);
      }
      device::wgmma_commit_group();
      device::wgmma_wait_group<1>();
    }
    device::wgmma_wait_group<0>();
    device::wgmma_fence_operands(s);
    device::wgmma_fence_operands(small);
#pragma unroll
    for (int j = 0; j < S::score_registers; ++j) s[j] += small[j];
  }

  // Of each 8 keys a thread has 2t and 2t + 1, t = lane % 4, which are columns t and t + 4 in V's order of keys.
  __device__ __forceinline__ static void split_probabilities(const float (&s)[S::score_registers],
                                                             operand (&p)[S::tile_keys / 8]) {
#pragma unroll
    for (int n = 0; n < S::tile_keys / 8; ++n) {
      p[n].set(0, s[4 * n]);
      p[n].set(1, s[4 * n + 2]);
      p[n].set(2, s[4 * n + 1]);
      p[n].set(3, s[4 * n + 3]);
    }
  }

  // The small products come first, so that few additions are made to large sums.
  __device__ __forceinline__ static void values(const operand (&p)[S::tile_keys / 8], std::uint32_t v,
                                                float (&sum)[S::out_registers]) {
    const std::uint64_t large = device::wgmma_descriptor(v, 16, 1024);
    device::wgmma_fence();
#pragma unroll
    for (int n = 0; n < S::tile_keys / 8; ++n) {
      const std::uint64_t at = device::wgmma_descriptor_after(large, n * 32);
      device::wgmma_m64k8_tf32_rs(sum, p[n].small, at, n > 0);
      device::wgmma_m64k8_tf32_rs(sum, p[n].large, device::wgmma_descriptor_after(at, S::part_bytes));
    }
#pragma unroll
    for (int n = 0; n < S::tile_keys / 8; ++n) {
      device::wgmma_m64k8_tf32_rs(sum, p[n].large, device::wgmma_descriptor_after(large, n * 32));
    }
    device::wgmma_commit_group();
    device::wgmma_wait_group<0>();
    device::wgmma_fence_operands(sum);
  }

  int warpgroup_;

 private:
  static constexpr int merge_barrier = 1;

  const f32_ring<Shape>& ring_;
  std::uint32_t queries_;
  pipeline_state<S::stages> state_;
};

}  // namespace bifolio::inline v0_2::cuda::prefill
