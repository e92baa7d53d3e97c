// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/attention/visibility.hpp"
#include "cuda/attention/x_split/args.hpp"
#include "cuda/attention/x_split/products.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/host/runtime.hpp"

namespace bifolio::cuda {

/// Numbers of one kernel instance. Product: tensor_core_product or float_product.
template <class Element, int Dims, template <class> class ProductOf>
struct x_split_shape {
  using T = Element;
  using product = ProductOf<T>;
  using operand = typename product::operand;
  static constexpr int head_dim = Dims;
  static constexpr int vec = 16 / sizeof(T);
  static constexpr int chunks = x_split_positions / vec;  ///< of a partition
  static constexpr int blocks_per_sm = x_split_blocks_per_sm(head_dim);
  /// Each owns 16 dims of the output, or two times 16.
  static constexpr int warps = 16 / blocks_per_sm;
  static constexpr int threads = warps * 32;
  static constexpr int dim_tiles = head_dim / 16 / warps;
  static constexpr int max_heads = x_split_max_heads(product::on_tensor_cores);
  static constexpr int head_tiles = max_heads / product_heads;

  // Loads of 16 bytes that are under way per lane, as many as there are registers for. Two rows of 16 bytes each go
  // into a product.
  static constexpr int loads = product::on_tensor_cores ? 16 : 8;
  static constexpr int k_chunks = head_dim / vec / 4;  ///< of a token and lane
  static constexpr int k_batch = k_chunks < loads / 2 ? k_chunks : loads / 2;
  static constexpr int k_tiles = product::on_tensor_cores ? loads / 2 / k_batch : 1;
  static constexpr int v_step = 4 * vec;  ///< positions that a product sums over
  static constexpr int v_batch = loads / 2 / dim_tiles;

  /// Positions whose weights are computed by one warp at a time, four a lane.
  static constexpr int section = 128;
  static constexpr int sections = x_split_positions / section;

  // Shared memory. A pitch of 64 bytes more than a multiple of 128 lets eight lanes of two rows read 16 bytes each
  // from different banks; 4 floats more than a multiple of 32 lets a warp store 8 tokens of 4 heads.
  static constexpr int q_pitch = head_dim + 64 / static_cast<int>(sizeof(operand));
  static constexpr int logit_pitch = x_split_positions + 4;
  /// Weights take the place of the logits where they are of the same type.
  static constexpr int weight_pitch =
      product::on_tensor_cores ? x_split_positions + 64 / static_cast<int>(sizeof(operand)) : logit_pitch;
  struct chunk_offsets {
    std::int64_t k;
    std::int64_t v;
  };
  struct per_head {
    float maxima[warps];
    float sums[sections];
    float slope;
  };
  [[nodiscard]] static constexpr std::size_t offsets_bytes() noexcept { return 2 * chunks * sizeof(chunk_offsets); }
  [[nodiscard]] static constexpr std::size_t q_bytes(std::size_t rows) noexcept {
    return rows * q_pitch * sizeof(operand);
  }
  [[nodiscard]] static constexpr std::size_t logit_bytes(std::size_t rows) noexcept {
    return rows * logit_pitch * sizeof(float);
  }
  [[nodiscard]] static constexpr std::size_t weight_bytes(std::size_t rows) noexcept {
    return product::on_tensor_cores ? rows * weight_pitch * sizeof(operand) : 0;
  }
  /// Heads in whole products.
  [[nodiscard]] static constexpr std::int32_t rows_of(std::int32_t num_heads) noexcept {
    return (num_heads + product_heads - 1) / product_heads * product_heads;
  }
  [[nodiscard]] static constexpr std::size_t shared_bytes(std::int32_t num_heads) noexcept {
    const auto rows = static_cast<std::size_t>(rows_of(num_heads));
    return offsets_bytes() + q_bytes(rows) + logit_bytes(rows) + weight_bytes(rows) + rows * sizeof(per_head);
  }

  static_assert(k_chunks % k_batch == 0 && x_split_positions % (v_step * v_batch) == 0 && section % v_step == 0);
  static_assert(x_split_positions % (16 * k_tiles) == 0 && chunks <= threads && dim_tiles <= 4);
  static_assert(dim_tiles * warps * 16 == head_dim);
};

/// One thread block's rows: up to max_heads query heads of one KV head over the keys of one sequence.
template <class Shape>
class x_split_rows {
  using T = typename Shape::T;
  using product = typename Shape::product;
  using operand = typename Shape::operand;
  using chunk_offsets = typename Shape::chunk_offsets;
  using per_head = typename Shape::per_head;

 public:
  /// The visible part of a partition, counted from its base; empty where first >= end.
  struct range {
    std::int32_t first;
    std::int32_t end;
    std::int32_t from_own;  ///< of the partition's base, counted from the row's own position
  };
  /// Where a chunk of `vec` positions lies.
  struct chunk_place {
    std::int32_t block;
    std::int32_t in_block;
  };
  struct head_state {
    float m;
    float l;
  };
  /// Values of this lane: dims as of the products' rows, heads as of their columns.
  struct row_values {
    float at[Shape::dim_tiles][Shape::head_tiles][4];
  };
  /// The partitions folded so far: states of this lane's heads, and values.
  struct row_totals {
    head_state states[Shape::head_tiles][2];
    row_values values;
  };

  __device__ __forceinline__ x_split_rows(const x_split_args& args, unsigned char* shared) : args_(args) {
    const attention_kernel_args& call = args.call;
    const auto head_tiles = static_cast<unsigned>(x_split_head_tiles(call.group_size, product::on_tensor_cores));
    const unsigned of_kv_head = blockIdx.x / head_tiles;
    const auto tile = static_cast<std::int32_t>(blockIdx.x - of_kv_head * head_tiles);
    seq_ = static_cast<std::int32_t>(of_kv_head / static_cast<unsigned>(call.num_kv_heads));
    const auto kv_head =
        static_cast<std::int32_t>(of_kv_head - static_cast<unsigned>(seq_) * static_cast<unsigned>(call.num_kv_heads));
    first_head_ = kv_head * call.group_size + tile * Shape::max_heads;
    num_heads_ = min(Shape::max_heads, call.group_size - tile * Shape::max_heads);
    token_ = call.query_start_loc[seq_];
    is_decode_ = call.query_start_loc[seq_ + 1] - token_ == 1;
    end_ = call.seq_lens[seq_];  // the row is the last position: nothing lies right of it
    own_position_ = end_ - 1;
    begin_ = static_cast<std::int32_t>(attn::window_of(call).of(own_position_, end_).begin);
    table_ = call.block_tables + seq_ * call.block_table_stride;
    k_ = static_cast<const T*>(call.k) + kv_head * call.k_strides.head;
    v_ = static_cast<const T*>(call.v) + kv_head * call.v_strides.head;

    const auto rows = static_cast<std::size_t>(Shape::rows_of(num_heads_));
    offsets_ = reinterpret_cast<chunk_offsets*>(shared);
    shared += Shape::offsets_bytes();
    q_ = reinterpret_cast<operand*>(shared);
    shared += Shape::q_bytes(rows);
    logits_ = reinterpret_cast<float*>(shared);
    weights_ = reinterpret_cast<operand*>(shared);
    shared += Shape::logit_bytes(rows);
    if constexpr (product::on_tensor_cores) weights_ = reinterpret_cast<operand*>(shared);
    shared += Shape::weight_bytes(rows);
    heads_ = reinterpret_cast<per_head*>(shared);
  }

  [[nodiscard]] __device__ __forceinline__ bool is_decode() const { return is_decode_; }
  [[nodiscard]] __device__ __forceinline__ std::int32_t first_partition() const { return begin_ / x_split_positions; }
  [[nodiscard]] __device__ __forceinline__ std::int32_t end_partition() const { return x_split_partitions(end_); }
  /// Of a partition before `end_partition`.
  [[nodiscard]] __device__ __forceinline__ range range_of(std::int32_t partition) const {
    const std::int32_t base = partition * x_split_positions;
    return {max(begin_ - base, 0), min(end_ - base, x_split_positions), base - own_position_};
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

  /// Looks up this thread's chunk of a partition. The load is under way when the call returns.
  [[nodiscard]] __device__ __forceinline__ chunk_place look_up(std::int32_t partition) const {
    const range seen = range_of(partition);
    const int first = thread() * Shape::vec;
    if (thread() >= Shape::chunks || first + Shape::vec <= seen.first || first >= seen.end) return {0, 0};
    const std::int32_t position = partition * x_split_positions + first;
    const std::int32_t entry = position / args_.call.block_size;
    return {table_[entry], position - entry * args_.call.block_size};
  }
  /// Leaves it where the others find it, in the half `parity`. A barrier must follow.
  __device__ __forceinline__ void publish(const chunk_place& place, int parity) const {
    if (thread() >= Shape::chunks) return;
    // The plan checked the host's table; a different one on the device must not lead out of the cache.
    const std::int64_t last = args_.call.num_blocks - 1;
    const std::int64_t block = place.block < 0 ? 0 : min(static_cast<std::int64_t>(place.block), last);
    offsets_[parity * Shape::chunks + thread()] = {
        block * args_.call.k_strides.block + std::int64_t{place.in_block} * Shape::vec,
        block * args_.call.v_strides.block + place.in_block};
  }

  /// Logits of all heads, and each warp's largest ones. Warps share out the tokens.
  __device__ __forceinline__ void compute_logits(const range& seen, int parity) const {
    constexpr int tokens = 16 * Shape::k_tiles;
    float largest[Shape::head_tiles][2];
#pragma unroll
    for (int n = 0; n < Shape::head_tiles; ++n) largest[n][0] = largest[n][1] = minus_infinity();
    for (int start = (seen.first / tokens + warp()) * tokens; start < seen.end; start += Shape::warps * tokens) {
      product sums[Shape::k_tiles][Shape::head_tiles];
      const T* from[Shape::k_tiles][2];
      bool there[Shape::k_tiles][2];
#pragma unroll
      for (int t = 0; t < Shape::k_tiles; ++t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int here = start + 16 * t + 8 * r + lane_row();
          there[t][r] = here >= seen.first && here < seen.end;
          from[t][r] = k_ + offsets_[parity * Shape::chunks + here / Shape::vec].k + here % Shape::vec * Shape::vec +
                       lane_chunk() * args_.call.k_strides.chunk_stride;
        }
      }
#pragma unroll
      for (int batch = 0; batch < Shape::k_chunks; batch += Shape::k_batch) {
        uint4 held[Shape::k_tiles][Shape::k_batch][2];
#pragma unroll
        for (int t = 0; t < Shape::k_tiles; ++t) {
#pragma unroll
          for (int j = 0; j < Shape::k_batch; ++j) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              held[t][j][r] =
                  load_16_once_if(from[t][r] + 4 * (batch + j) * args_.call.k_strides.chunk_stride, there[t][r]);
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
              sums[t][n].add(held[t][j][0], held[t][j][1], q, Shape::q_pitch, num_heads_ - n * product_heads);
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
          to_logits(sums[t][n].sums, first_head, seen.from_own + first_here);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float logit = sums[t][n].sums[e];
            logits_[(first_head + e % 2) * Shape::logit_pitch + first_here + 8 * (e / 2)] = logit;
            if (there[t][e / 2]) largest[n][e % 2] = fmaxf(largest[n][e % 2], logit);
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

  /// Weights of all positions of the partition, 0 where they are not seen, and their sums by sections.
  __device__ __forceinline__ void compute_weights(const range& seen) const {
    for (int task = warp(); task < num_heads_ * Shape::sections; task += Shape::warps) {
      const int head = task / Shape::sections;
      const int section = task % Shape::sections;
      const float subtracted = attn::finite_max(max_of(head));
      const int first = section * Shape::section + 4 * lane();
      const float4 held = *reinterpret_cast<const float4*>(logits_ + head * Shape::logit_pitch + first);
      const float logits[4] = {held.x, held.y, held.z, held.w};
      float weights[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool visible = first + e >= seen.first && first + e < seen.end;
        weights[e] = visible ? expf(__fsub_rn(logits[e], subtracted)) : 0.0f;
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
  [[nodiscard]] static __device__ __forceinline__ int first_value_batch(const range& seen) {
    constexpr int positions = Shape::v_step * Shape::v_batch;
    return seen.first / positions * positions;
  }
  __device__ __forceinline__ void load_values(const range& seen, int parity, int start, value_batch& held) const {
#pragma unroll
    for (int s = 0; s < Shape::v_batch; ++s) {
      const int here = start + s * Shape::v_step + lane_chunk() * Shape::vec;
      const bool there = here + Shape::vec > seen.first && here < seen.end;
      const T* const from = v_ + offsets_[parity * Shape::chunks + here / Shape::vec].v;
#pragma unroll
      for (int d = 0; d < Shape::dim_tiles; ++d) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          held.at[s][d][r] = load_16_once_if(from + dim_of(d, r) * args_.call.v_strides.dim, there);
        }
      }
    }
  }
  /// Sums of the weighted values; `held` has the first batch.
  __device__ __forceinline__ row_values compute_values(const range& seen, int parity, value_batch& held) const {
    constexpr int positions = Shape::v_step * Shape::v_batch;
    product sums[Shape::dim_tiles][Shape::head_tiles];
    for (int start = first_value_batch(seen);;) {
#pragma unroll
      for (int s = 0; s < Shape::v_batch; ++s) {
        const int step = start + s * Shape::v_step;
        // What lies out of sight may be anything, NaN included. All lanes take the same branch.
        if (step < seen.first || step + Shape::v_step > seen.end) {
          const int here = step + lane_chunk() * Shape::vec;
#pragma unroll
          for (int d = 0; d < Shape::dim_tiles; ++d) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              held.at[s][d][r] = keep_elements<T>(held.at[s][d][r], seen.first - here, seen.end - here);
            }
          }
        }
#pragma unroll
        for (int n = 0; n < Shape::head_tiles; ++n) {
          if (n * product_heads >= num_heads_) break;
          const operand* const weights = weights_ + n * product_heads * Shape::weight_pitch + step;
#pragma unroll
          for (int d = 0; d < Shape::dim_tiles; ++d) {
            sums[d][n].add(held.at[s][d][0], held.at[s][d][1], weights, Shape::weight_pitch,
                           num_heads_ - n * product_heads);
          }
        }
      }
      start += positions;
      if (start >= seen.end) break;
      load_values(seen, parity, start, held);
    }
    row_values result;
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

  [[nodiscard]] __device__ __forceinline__ float* partial(int head, std::int32_t partition) const {
    const std::int64_t row = static_cast<std::int64_t>(seq_) * args_.call.num_q_heads + first_head_ + head;
    return x_split_partial(args_, row, partition);
  }
  __device__ __forceinline__ void write_empty_partial(std::int32_t partition) const {
    if (thread() >= num_heads_) return;
    float* const to = partial(thread(), partition);
    to[0] = minus_infinity();
    to[1] = 0.0f;
  }
  __device__ __forceinline__ void write_partial(std::int32_t partition, const row_values& values) const {
    if (thread() < num_heads_) {
      const head_state state = state_of(thread());
      float* const to = partial(thread(), partition);
      to[0] = state.m;
      to[1] = state.l;
    }
#pragma unroll
    for (int n = 0; n < Shape::head_tiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int head = n * product_heads + 2 * lane_chunk() + e % 2;
        if (head >= num_heads_) continue;
        float* const to = partial(head, partition) + 2;
#pragma unroll
        for (int d = 0; d < Shape::dim_tiles; ++d) to[dim_of(d, e / 2)] = values.at[d][n][e];
      }
    }
  }
  [[nodiscard]] static __device__ __forceinline__ row_totals nothing() {
    row_totals totals = {};
#pragma unroll
    for (int n = 0; n < Shape::head_tiles; ++n) totals.states[n][0].m = totals.states[n][1].m = minus_infinity();
    return totals;
  }
  __device__ __forceinline__ void fold(row_totals& totals, const row_values& own) const {
#pragma unroll
    for (int n = 0; n < Shape::head_tiles; ++n) {
      if (n * product_heads >= num_heads_) break;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        head_state& total = totals.states[n][c];
        const head_state state = state_of(n * product_heads + 2 * lane_chunk() + c);
        const attn::combine_weights<float> w = attn::combine_any_state<device_math>(total.m, total.l, state.m, state.l);
#pragma unroll
        for (int d = 0; d < Shape::dim_tiles; ++d) {
#pragma unroll
          for (int e = c; e < 4; e += 2) {
            totals.values.at[d][n][e] = attn::combine_value<device_math>(w, totals.values.at[d][n][e], own.at[d][n][e]);
          }
        }
      }
    }
  }
  /// Output and LSE of all rows.
  __device__ __forceinline__ void write_rows(const row_totals& totals) const {
    const attention_kernel_args& call = args_.call;
#pragma unroll
    for (int n = 0; n < Shape::head_tiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = n * product_heads + 2 * lane_chunk() + c;
        if (row >= num_heads_) continue;
        const std::int32_t head = first_head_ + row;
        const bool has_sink = call.sinks != nullptr;
        const head_state& total = totals.states[n][c];
        const auto finish =
            attn::finish_row<device_math>(total.m, total.l, has_sink, has_sink ? call.sinks[head] : 0.0f);
        if (warp() == 0 && lane_row() == 0 && call.lse != nullptr) {
          call.lse[token_ * call.num_q_heads + head] = finish.lse;
        }
        const std::int64_t to = token_ * call.out_token_stride + head * call.out_head_stride;
#pragma unroll
        for (int d = 0; d < Shape::dim_tiles; ++d) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            store_from_float(call.out, to + dim_of(d, r), call.out_type,
                             attn::output_of<device_math>(finish, totals.values.at[d][n][2 * r + c]));
          }
        }
      }
    }
  }

 private:
  [[nodiscard]] static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
  [[nodiscard]] static __device__ __forceinline__ int lane() { return thread() % 32; }
  [[nodiscard]] static __device__ __forceinline__ int warp() { return thread() / 32; }
  [[nodiscard]] static __device__ __forceinline__ int lane_row() { return lane() / 4; }
  [[nodiscard]] static __device__ __forceinline__ int lane_chunk() { return lane() % 4; }
  [[nodiscard]] static __device__ __forceinline__ int dim_of(int tile, int r) {
    return (warp() * Shape::dim_tiles + tile) * 16 + 8 * r + lane_row();
  }

  /// Of elements as `product` leaves them; `distance`: of the first one's position from the row's own.
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

  const x_split_args& args_;
  std::int32_t seq_;
  std::int32_t first_head_;
  std::int32_t num_heads_;
  std::int64_t token_;
  std::int32_t own_position_;
  std::int32_t begin_;
  std::int32_t end_;
  const std::int32_t* table_;
  const T* k_;
  const T* v_;
  chunk_offsets* offsets_;
  operand* q_;
  float* logits_;
  operand* weights_;
  per_head* heads_;
  bool is_decode_;
};

/// Grid: x over sequences, KV heads and tiles of their query heads; z deals out the partitions in turn (v2).
template <class Shape>
__global__ void __launch_bounds__(Shape::threads, Shape::blocks_per_sm)
    x_split_decode(const __grid_constant__ x_split_args args) {
  extern __shared__ __align__(16) unsigned char x_split_shared[];
  using rows_type = x_split_rows<Shape>;
  device::grid_dependency_wait();
  device::grid_dependency_launch();
  const rows_type rows(args, x_split_shared);
  if (!rows.is_decode()) return;
  const bool is_split = args.num_splits > 1;
  std::int32_t partition = rows.first_partition();
  std::int32_t end_partition = rows.end_partition();
  if (is_split) {
    end_partition = min(end_partition, args.max_partitions);
    partition = static_cast<std::int32_t>(blockIdx.z);
    for (; partition < min(rows.first_partition(), end_partition); partition += args.num_splits) {  // before the window
      rows.write_empty_partial(partition);
    }
    if (partition >= end_partition) return;
  }

  typename rows_type::row_totals totals = rows.nothing();
  typename rows_type::chunk_place place = {0, 0};
  if (partition < end_partition) place = rows.look_up(partition);
  rows.load_queries();
  for (int parity = 0; partition < end_partition; partition += args.num_splits, parity ^= 1) {
    rows.publish(place, parity);
    if (partition + args.num_splits < end_partition) place = rows.look_up(partition + args.num_splits);
    const typename rows_type::range seen = rows.range_of(partition);
    __syncthreads();  // queries and offsets are there; everyone has done with the partition before this one
    rows.compute_logits(seen, parity);
    typename rows_type::value_batch held;
    rows.load_values(seen, parity, rows_type::first_value_batch(seen), held);
    __syncthreads();
    rows.compute_weights(seen);
    __syncthreads();
    const typename rows_type::row_values own = rows.compute_values(seen, parity, held);
    if (is_split) {
      rows.write_partial(partition, own);
    } else {
      rows.fold(totals, own);
    }
  }
  if (!is_split) rows.write_rows(totals);
}

template <class Shape>
[[nodiscard]] cudaError_t launch_x_split(const runtime_api& api, const x_split_args& args, bool dependent,
                                         cudaStream_t stream) noexcept {
  const attention_kernel_args& call = args.call;
  const std::int64_t blocks = static_cast<std::int64_t>(call.num_seqs) * call.num_kv_heads *
                              x_split_head_tiles(call.group_size, Shape::product::on_tensor_cores);
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>(blocks), 1, static_cast<unsigned>(args.num_splits));
  const std::size_t shared_bytes =
      Shape::shared_bytes(call.group_size < Shape::max_heads ? call.group_size : Shape::max_heads);
  constexpr std::size_t without_asking = 48 << 10;
  if (shared_bytes > without_asking) {
    const cudaError_t status =
        api.func_set_attribute(reinterpret_cast<const void*>(x_split_decode<Shape>),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (status != cudaSuccess) return status;
  }
  return launch(api, x_split_decode<Shape>, grid, dim3(Shape::threads), shared_bytes, stream, dependent, args);
}

template <class T, template <class> class ProductOf>
[[nodiscard]] cudaError_t launch_x_split_dims(const runtime_api& api, const x_split_args& args, bool dependent,
                                              cudaStream_t stream) noexcept {
  switch (args.call.head_dim) {
    case 64:
      return launch_x_split<x_split_shape<T, 64, ProductOf>>(api, args, dependent, stream);
    case 128:
      return launch_x_split<x_split_shape<T, 128, ProductOf>>(api, args, dependent, stream);
    case 256:
      return launch_x_split<x_split_shape<T, 256, ProductOf>>(api, args, dependent, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

/// A type's launcher: tensor cores where the call's types allow.
template <class T>
[[nodiscard]] cudaError_t launch_x_split_16_bit(const runtime_api& api, const x_split_args& args, bool dependent,
                                                cudaStream_t stream) noexcept {
  const attention_kernel_args& call = args.call;
  if (x_split_on_tensor_cores(call.q_type, call.kv_type, call.out_type)) {
    return launch_x_split_dims<T, tensor_core_product>(api, args, dependent, stream);
  }
  return launch_x_split_dims<T, float_product>(api, args, dependent, stream);
}

}  // namespace bifolio::cuda
