// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of decode on x_split, one partition of 512 keys at a time: logits of all heads to shared memory, their
/// softmax weights, and the weighted sums of values. Keys and values go from global memory into the registers of the
/// products, 16 bytes per load.

#include <cstdint>

#include "cuda/attention/x_split/args.hpp"
#include "cuda/attention/x_split/products.cuh"
#include "cuda/attention/x_split/scheduler.cuh"
#include "cuda/attention/x_split/shape.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/softmax.cuh"

namespace bifolio::inline v0_2::cuda::x_split {

template <class Shape>
class mainloop : public scheduler<Shape> {
  using T = typename Shape::T;
  using product = typename Shape::product;
  using operand = typename Shape::operand;
  using chunk_offsets = typename Shape::chunk_offsets;
  using per_head = typename Shape::per_head;

 protected:
  using base = scheduler<Shape>;
  using base::args_, base::seq_, base::kv_head_, base::first_head_, base::num_heads_, base::token_;

 public:
  /// The block, and the first position in it, of a chunk of `vec` positions.
  struct table_entry {
    std::int32_t block;
    std::int32_t in_block;
  };

  __device__ __forceinline__ mainloop(const x_split_args& args, unsigned char* shared) : base(args) {
    const attention_kernel_args& call = args.call;
    table_ = call.block_tables + seq_ * call.block_table_stride;
    k_ = static_cast<const T*>(call.k) + kv_head_ * call.k_strides.head;
    v_ = static_cast<const T*>(call.v) + kv_head_ * call.v_strides.head;
    const typename Shape::shared_layout l = Shape::make_shared_layout(num_heads_);
    offsets_ = reinterpret_cast<chunk_offsets*>(shared + l.offsets);
    q_ = reinterpret_cast<operand*>(shared + l.q);
    logits_ = reinterpret_cast<float*>(shared + l.logits);
    weights_ = reinterpret_cast<operand*>(shared + l.weights);
    heads_ = reinterpret_cast<per_head*>(shared + l.heads);
  }

  /// Queries and slopes to shared memory. A barrier must follow.
  __device__ __forceinline__ void load_queries() const {
    const attention_kernel_args& call = args_.call;
    const std::int64_t start = token_ * call.q_token_stride + first_head_ * call.q_head_stride;
    for (int at = thread(); at < num_heads_ * Shape::head_dim; at += Shape::threads) {
      const int head = at / Shape::head_dim;
      const int dim = at % Shape::head_dim;
      const std::int64_t from = start + head * call.q_head_stride + dim;
      if constexpr (product::on_tensor_cores) {
        q_[head * Shape::q_pitch + dim] = static_cast<const T*>(call.q)[from];
      } else {
        q_[head * Shape::q_pitch + dim] = load_as_float(call.q, from, call.q_type);
      }
    }
    if (call.alibi_slopes != nullptr && thread() < num_heads_) {
      heads_[thread()].slope = call.alibi_slopes[first_head_ + thread()];
    }
  }

  /// Loads the block-table entry of this thread's chunk of a partition. The load is in flight when the call returns.
  [[nodiscard]] __device__ __forceinline__ table_entry load_table_entry(std::int32_t partition) const {
    const key_range visible = this->visible_part(partition);
    const int first = thread() * Shape::vec;
    if (thread() >= Shape::chunks || first + Shape::vec <= visible.first || first >= visible.end) return {0, 0};
    const std::int32_t position = partition * x_split_positions + first;
    const std::int32_t entry = position / args_.call.block_size;
    return {table_[entry], position - entry * args_.call.block_size};
  }
  /// Writes the chunk's offsets to shared memory, buffer `parity`. A barrier must follow.
  __device__ __forceinline__ void publish_offset(const table_entry& place, int parity) const {
    if (thread() >= Shape::chunks) return;
    // The plan checked the host's table; a different one on the device must not lead out of the cache.
    const std::int64_t last = args_.call.num_blocks - 1;
    const std::int64_t block = place.block < 0 ? 0 : min(static_cast<std::int64_t>(place.block), last);
    offsets_[parity * Shape::chunks + thread()] = {
        block * args_.call.k_strides.block + std::int64_t{place.in_block} * Shape::vec,
        block * args_.call.v_strides.block + place.in_block};
  }

  /// Logits of all heads, and each warp's largest ones. Each warp takes every num_warps-th tile of tokens.
  __device__ __forceinline__ void compute_logits(const key_range& visible, int parity) const {
    constexpr int tokens = 16 * Shape::k_tiles;
    float largest[Shape::head_tiles][2];
#pragma unroll
    for (int n = 0; n < Shape::head_tiles; ++n) largest[n][0] = largest[n][1] = minus_infinity();
    for (int start = (visible.first / tokens + warp()) * tokens; start < visible.end; start += Shape::warps * tokens) {
      product sums[Shape::k_tiles][Shape::head_tiles];
      const T* from[Shape::k_tiles][2];
      bool valid[Shape::k_tiles][2];
#pragma unroll
      for (int t = 0; t < Shape::k_tiles; ++t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int here = start + 16 * t + 8 * r + lane_row();
          valid[t][r] = here >= visible.first && here < visible.end;
          from[t][r] = k_ + offsets_[parity * Shape::chunks + here / Shape::vec].k + here % Shape::vec * Shape::vec +
                       lane_chunk() * args_.call.k_strides.chunk_stride;
        }
      }
#pragma unroll
      for (int batch = 0; batch < Shape::k_chunks; batch += Shape::k_batch) {
        uint4 loaded[Shape::k_tiles][Shape::k_batch][2];
#pragma unroll
        for (int t = 0; t < Shape::k_tiles; ++t) {
#pragma unroll
          for (int j = 0; j < Shape::k_batch; ++j) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              loaded[t][j][r] =
                  load_16_once_if(from[t][r] + 4 * (batch + j) * args_.call.k_strides.chunk_stride, valid[t][r]);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < Shape::k_batch; ++j) {
#pragma unroll
          for (int n = 0; n < Shape::head_tiles; ++n) {
            if (n * product_heads >= num_heads_) break;
            const operand* const q = q_ + n * product_heads * Shape::q_pitch + 4 * (batch + j) * Shape::vec;
#pragma unroll
            for (int t = 0; t < Shape::k_tiles; ++t) {
              sums[t][n].add(loaded[t][j][0], loaded[t][j][1], q, Shape::q_pitch, num_heads_ - n * product_heads);
            }
          }
        }
      }
#pragma unroll
      for (int n = 0; n < Shape::head_tiles; ++n) {
        if (n * product_heads >= num_heads_) break;
#pragma unroll
        for (int t = 0; t < Shape::k_tiles; ++t) {
          sums[t][n].finish();
          const int first_head = n * product_heads + 2 * lane_chunk();
          const int first_here = start + 16 * t + lane_row();
          to_logits(sums[t][n].sums, first_head, visible.from_own + first_here);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float logit = sums[t][n].sums[e];
            logits_[(first_head + e % 2) * Shape::logit_pitch + first_here + 8 * (e / 2)] = logit;
            if (valid[t][e / 2]) largest[n][e % 2] = fmaxf(largest[n][e % 2], logit);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < Shape::head_tiles; ++n) {
      if (n * product_heads >= num_heads_) break;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float value = largest[n][c];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, mask));
        if (lane_row() == 0) heads_[n * product_heads + 2 * lane_chunk() + c].maxima[warp()] = value;
      }
    }
  }

  /// Weights of all positions of the partition, 0 where they are not visible, and their sums by sections.
  __device__ __forceinline__ void compute_weights(const key_range& visible) const {
    for (int task = warp(); task < num_heads_ * Shape::sections; task += Shape::warps) {
      const int head = task / Shape::sections;
      const int section = task % Shape::sections;
      const float subtracted = attn::finite_max(max_of(head));
      const int first = section * Shape::section + 4 * lane();
      const float4 loaded = *reinterpret_cast<const float4*>(logits_ + head * Shape::logit_pitch + first);
      const float logits[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      float weights[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool is_visible = first + e >= visible.first && first + e < visible.end;
        weights[e] = is_visible ? expf(__fsub_rn(logits[e], subtracted)) : 0.0f;
      }
      float sum = __fadd_rn(__fadd_rn(weights[0], weights[1]), __fadd_rn(weights[2], weights[3]));
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, mask));
      if (lane() == 0) heads_[head].sums[section] = sum;
      store_weights(weights_ + head * Shape::weight_pitch + first, weights);
    }
  }

  /// The loads of one batch of V: rows of dims, chunks of positions.
  struct value_batch {
    uint4 at[Shape::v_batch][Shape::dim_tiles][2];
  };
  [[nodiscard]] static __device__ __forceinline__ int first_value_batch(const key_range& visible) {
    constexpr int positions = Shape::v_step * Shape::v_batch;
    return visible.first / positions * positions;
  }
  __device__ __forceinline__ void load_values(const key_range& visible, int parity, int start,
                                              value_batch& loaded) const {
#pragma unroll
    for (int s = 0; s < Shape::v_batch; ++s) {
      const int here = start + s * Shape::v_step + lane_chunk() * Shape::vec;
      const bool valid = here + Shape::vec > visible.first && here < visible.end;
      const T* const from = v_ + offsets_[parity * Shape::chunks + here / Shape::vec].v;
#pragma unroll
      for (int d = 0; d < Shape::dim_tiles; ++d) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          loaded.at[s][d][r] = load_16_once_if(from + dim_of<Shape>(d, r) * args_.call.v_strides.dim, valid);
        }
      }
    }
  }
  /// Sums of the weighted values; `loaded` has the first batch.
  __device__ __forceinline__ row_values<Shape> compute_values(const key_range& visible, int parity,
                                                              value_batch& loaded) const {
    constexpr int positions = Shape::v_step * Shape::v_batch;
    product sums[Shape::dim_tiles][Shape::head_tiles];
    for (int start = first_value_batch(visible);;) {
#pragma unroll
      for (int s = 0; s < Shape::v_batch; ++s) {
        const int step = start + s * Shape::v_step;
        // Elements that are not visible may be anything, NaN included. All lanes take the same branch.
        if (step < visible.first || step + Shape::v_step > visible.end) {
          const int here = step + lane_chunk() * Shape::vec;
#pragma unroll
          for (int d = 0; d < Shape::dim_tiles; ++d) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              loaded.at[s][d][r] = keep_elements<T>(loaded.at[s][d][r], visible.first - here, visible.end - here);
            }
          }
        }
#pragma unroll
        for (int n = 0; n < Shape::head_tiles; ++n) {
          if (n * product_heads >= num_heads_) break;
          const operand* const weights = weights_ + n * product_heads * Shape::weight_pitch + step;
#pragma unroll
          for (int d = 0; d < Shape::dim_tiles; ++d) {
            sums[d][n].add(loaded.at[s][d][0], loaded.at[s][d][1], weights, Shape::weight_pitch,
                           num_heads_ - n * product_heads);
          }
        }
      }
      start += positions;
      if (start >= visible.end) break;
      load_values(visible, parity, start, loaded);
    }
    row_values<Shape> result;
#pragma unroll
    for (int d = 0; d < Shape::dim_tiles; ++d) {
#pragma unroll
      for (int n = 0; n < Shape::head_tiles; ++n) {
        sums[d][n].finish();
#pragma unroll
        for (int e = 0; e < 4; ++e) result.at[d][n][e] = sums[d][n].sums[e];
      }
    }
    return result;
  }

  /// Maximum and sum of a head over the partition.
  [[nodiscard]] __device__ __forceinline__ head_state state_of(int head) const {
    float l = heads_[head].sums[0];
#pragma unroll
    for (int s = 1; s < Shape::sections; ++s) l = __fadd_rn(l, heads_[head].sums[s]);
    return {max_of(head), l};
  }

 private:
  /// Scores, as `product` leaves them, to logits; `distance`: of the first key's position from the row's own.
  __device__ __forceinline__ void to_logits(float (&x)[4], int head, std::int32_t distance) const {
    const attention_kernel_args& call = args_.call;
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = __fmul_rn(x[e], call.scale);
    if (call.soft_cap > 0.0f) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = attn::soft_capped<device_math>(x[e], call.soft_cap);
    }
    if (call.alibi_slopes != nullptr) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e] =
            attn::with_alibi<device_math>(x[e], heads_[head + e % 2].slope, static_cast<float>(distance + 8 * (e / 2)));
      }
    }
  }
  [[nodiscard]] __device__ __forceinline__ float max_of(int head) const {
    float m = heads_[head].maxima[0];
#pragma unroll
    for (int w = 1; w < Shape::warps; ++w) m = fmaxf(m, heads_[head].maxima[w]);
    return m;
  }

  const std::int32_t* table_;
  const T* k_;
  const T* v_;
  chunk_offsets* offsets_;
  operand* q_;
  float* logits_;
  operand* weights_;
  per_head* heads_;
};

}  // namespace bifolio::inline v0_2::cuda::x_split
