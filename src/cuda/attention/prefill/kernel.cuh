// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Prefill attention for Hopper over a paged cache. One warpgroup produces: it turns block ids into tensor-map boxes,
/// one block of one KV head at a time, and keeps a ring of K and V tiles full. Two warpgroups consume, 64 query rows
/// each, with S, P and O in registers: the scores of the next tile are on the tensor cores while this tile's softmax
/// runs, and the two warpgroups take turns so that one's softmax hides behind the other's products (Shah et al.,
/// FlashAttention-3, 2024, sections 3.1 and 3.2). Key tiles go from the last, which needs masks, to the first.

#include <cstdint>

#include "common/attention/visibility.hpp"
#include "cuda/attention/prefill/launch.hpp"
#include "cuda/attention/prefill/plan.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::cuda {

struct prefill_args {
  void* out;                                       // [num_tokens, num_q_heads, head_dim]
  float* lse;                                      // [num_tokens, num_q_heads] or null
  const std::int32_t* block_tables;                // [num_seqs, block_table_stride]
  const std::int32_t* words;                       // the plan: a prefill_header and its items
  const float* alibi_slopes;                       // [num_q_heads] or null
  const float* sinks;                              // [num_q_heads] or null
  std::int64_t out_token_stride, out_head_stride;  // elements
  std::int64_t block_table_stride;
  std::int32_t num_q_heads, group_size, packed_heads, block_size;
  std::int32_t box_tokens;  // min(block_size, 128); block_size is a multiple of it
  std::int32_t window_left, window_right;
  bool causal;
  float scale;
  float soft_cap;
};

namespace prefill {

inline constexpr int num_consumers = 2;
inline constexpr int num_threads = 128 * (1 + num_consumers);

/// How the keys of a tile lie in shared memory. A box costs the copy engine about 120 cycles however small it is, so K
/// and V take one box a block where that is possible, all 64-element chunks of the head in it:
/// [block][chunk][token][128 bytes]. V is read that way whatever the block. K needs the rows of a chunk at one stride:
/// `rows` loads it chunk by chunk, [chunk][key][128 bytes]; `pairs`, for boxes of 16 tokens, takes whole boxes and
/// computes two products of 64 keys, the first 8 tokens of each block and the last 8.
enum class key_order { rows, pairs };

template <int HeadDim>
struct shape {
  static constexpr int stages = 2;
  static constexpr int q_stages = 2;
  static constexpr int chunks = HeadDim / 64;     // of 128 bytes in a row
  static constexpr int q_chunk_bytes = 64 * 128;  // 64 rows of one warpgroup
  static constexpr int kv_chunk_bytes = prefill_tile_keys * 128;
  static constexpr int q_bytes = num_consumers * chunks * q_chunk_bytes;
  static constexpr int kv_bytes = chunks * kv_chunk_bytes;
  static constexpr int num_barriers = 2 * q_stages + 4 * stages;
  static constexpr int shared_bytes = 1024 + q_stages * q_bytes + 2 * stages * kv_bytes + num_barriers * 8;
};

/// What one item asks for, the same in producer and consumers.
struct extent {
  int tile_begin, tile_end;  // of keys
  int begin;                 // keys below it are outside every row's window; their blocks may have been given back
  int common_limit;          // keys below it are visible to all rows, as far as causality goes
};

__device__ __forceinline__ extent extent_of(const prefill_args& a, const prefill_item& item) {
  const int first_token = item.row_tile * prefill_tile_rows / a.packed_heads;
  const int last_token = min(item.query_len - 1, ((item.row_tile + 1) * prefill_tile_rows - 1) / a.packed_heads);
  const int offset = item.seq_len - item.query_len;
  extent e;
  int end = item.seq_len;
  e.common_limit = item.seq_len;
  if (a.causal) {
    end = min(end, offset + last_token + 1);
    e.common_limit = min(e.common_limit, offset + first_token + 1);
  }
  if (a.window_right >= 0) end = min(end, offset + last_token + a.window_right + 1);
  e.begin = a.window_left >= 0 ? max(0, offset + first_token - a.window_left) : 0;
  e.tile_begin = e.begin / prefill_tile_keys;
  e.tile_end = end > e.begin ? (end + prefill_tile_keys - 1) / prefill_tile_keys : e.tile_begin;
  return e;
}

/// The n-th item of this block: a snake through the list.
__device__ __forceinline__ int item_index(int n) {
  const int width = static_cast<int>(gridDim.x);
  const int column = static_cast<int>(blockIdx.x);
  return n * width + ((n & 1) != 0 ? width - 1 - column : column);
}

/// A position in the ring of stages.
template <int Stages>
struct ring {
  int stage = 0;
  int phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <class T, int HeadDim, key_order Order, bool Features>
class worker {
  using S = shape<HeadDim>;
  static constexpr int score_registers = prefill_tile_keys / 2;
  static constexpr int out_registers = HeadDim / 2;
  static constexpr float log2e = 1.4426950408889634f;

 public:
  __device__ worker(const prefill_args& args, char* shared) : a_(args) {
    const std::uint32_t base = (device::shared_address(shared) + 1023) & ~1023u;
    q_ = base;
    k_ = q_ + S::q_stages * S::q_bytes;
    v_ = k_ + S::stages * S::kv_bytes;
    barriers_ = v_ + S::stages * S::kv_bytes;
  }

  __device__ void run(const tensor_map* q_map, const tensor_map* k_map, const tensor_map* v_map) {
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    if (threadIdx.x == 0) {
      for (int s = 0; s < S::q_stages; ++s) {
        device::mbarrier_init(q_full(s), 1);
        device::mbarrier_init(q_empty(s), num_consumers);
      }
      for (int s = 0; s < S::stages; ++s) {
        device::mbarrier_init(k_full(s), 1);
        device::mbarrier_init(k_empty(s), num_consumers);
        device::mbarrier_init(v_full(s), 1);
        device::mbarrier_init(v_empty(s), num_consumers);
      }
      device::mbarrier_init_fence();
    }
    __syncthreads();
    device::grid_dependency_launch();
    device::grid_dependency_wait();
    num_items_ = reinterpret_cast<const prefill_header*>(a_.words)->num_items;
    items_ = reinterpret_cast<const prefill_item*>(a_.words + sizeof(prefill_header) / 4);
    if (warpgroup == 0) {
      device::setmaxnreg_dec<40>();
      if (threadIdx.x < 32) produce(q_map, k_map, v_map);
    } else {
      device::setmaxnreg_inc<232>();
      consume(warpgroup - 1);
    }
  }

 private:
  [[nodiscard]] __device__ std::uint32_t barrier(int i) const { return barriers_ + 8 * i; }
  [[nodiscard]] __device__ std::uint32_t k_full(int s) const { return barrier(s); }
  [[nodiscard]] __device__ std::uint32_t k_empty(int s) const { return barrier(S::stages + s); }
  [[nodiscard]] __device__ std::uint32_t v_full(int s) const { return barrier(2 * S::stages + s); }
  [[nodiscard]] __device__ std::uint32_t v_empty(int s) const { return barrier(3 * S::stages + s); }
  [[nodiscard]] __device__ std::uint32_t q_full(int s) const { return barrier(4 * S::stages + s); }
  [[nodiscard]] __device__ std::uint32_t q_empty(int s) const { return barrier(4 * S::stages + S::q_stages + s); }

  // ---- producer: one warp ----------------------------------------------------------------------------------------

  __device__ void produce(const tensor_map* q_map, const tensor_map* k_map, const tensor_map* v_map) {
    const int lane = static_cast<int>(threadIdx.x);
    ring<S::stages> k_ring, v_ring;
    ring<S::q_stages> q_ring;
    for (int n = 0, i = item_index(0); i < num_items_; i = item_index(++n)) {
      const prefill_item item = items_[i];
      const extent e = extent_of(a_, item);
      if (e.tile_begin >= e.tile_end) continue;
      const int kv_head = item.head / a_.group_size;
      boxes last;

      if (lane == 0) {
        device::mbarrier_wait_parity(q_empty(q_ring.stage), q_ring.phase ^ 1);
        device::mbarrier_arrive_expect_tx(q_full(q_ring.stage), S::q_bytes);
        const int rows = 64 / a_.packed_heads;
        const int token = item.query_start + item.row_tile * (prefill_tile_rows / a_.packed_heads);
        for (int w = 0; w < num_consumers; ++w) {
          for (int c = 0; c < S::chunks; ++c) {
            device::tma_load_3d(q_ + q_ring.stage * S::q_bytes + (w * S::chunks + c) * S::q_chunk_bytes, q_map,
                                q_full(q_ring.stage), c * 64, item.head, token + w * rows);
          }
        }
      }
      __syncwarp();
      q_ring.advance();

      // V of a tile is asked for after K of the next one, as it is used. Block ids are looked up a tile ahead.
      boxes next = look_up(item, e, e.tile_end - 1, lane);
      for (int tile = e.tile_end - 1; tile >= e.tile_begin; --tile) {
        const boxes here = next;
        if (tile > e.tile_begin) next = look_up(item, e, tile - 1, lane);
        load<Order == key_order::pairs>(k_map, k_, k_full(k_ring.stage), k_empty(k_ring.stage), k_ring, here, kv_head,
                                        lane);
        k_ring.advance();
        if (tile + 1 < e.tile_end) {
          load<true>(v_map, v_, v_full(v_ring.stage), v_empty(v_ring.stage), v_ring, last, kv_head, lane);
          v_ring.advance();
        }
        last = here;
      }
      load<true>(v_map, v_, v_full(v_ring.stage), v_empty(v_ring.stage), v_ring, last, kv_head, lane);
      v_ring.advance();
    }
  }

  // The blocks of one tile, a lane each. Blocks that begin past the sequence or end before the window are not looked up
  // and not copied.
  struct boxes {
    int first, count;  // those that are copied: first … count − 1
    int id;
    int offset;  // tokens into the block
  };

  __device__ __forceinline__ boxes look_up(const prefill_item& item, const extent& e, int tile, int lane) const {
    const int first_key = tile * prefill_tile_keys;
    const int key = first_key + lane * a_.box_tokens;
    const int block = key / a_.block_size;
    boxes b;
    b.count = min(prefill_tile_keys, item.seq_len - first_key + a_.box_tokens - 1) / a_.box_tokens;
    b.first = Features ? max(0, (e.begin - first_key) / a_.box_tokens) : 0;
    b.offset = key - block * a_.block_size;
    b.id = lane >= b.first && lane < b.count ? __ldg(a_.block_tables + item.seq * a_.block_table_stride + block) : 0;
    return b;
  }

  template <bool WholeHead>
  __device__ __forceinline__ void load(const tensor_map* map, std::uint32_t buffer, std::uint32_t full,
                                       std::uint32_t empty, const ring<S::stages>& r, const boxes& b, int kv_head,
                                       int lane) {
    device::mbarrier_wait_parity(empty, r.phase ^ 1);
    const int chunk_bytes = a_.box_tokens * 128;
    if (lane == 0) device::mbarrier_arrive_expect_tx(full, (b.count - b.first) * S::chunks * chunk_bytes);
    __syncwarp();
    const std::uint32_t dst = buffer + r.stage * S::kv_bytes;
    if constexpr (WholeHead) {
      if (lane >= b.first && lane < b.count) {
        device::tma_load_5d(dst + lane * S::chunks * chunk_bytes, map, full, 0, b.offset, 0, kv_head, b.id);
      }
    } else {
      // Lane (box · chunks + chunk): the chunks of a block are asked for side by side (asked for one after the other,
      // prefill ran at 427 instead of 491 TFLOP/s).
#pragma unroll
      for (int first = 0; first < prefill_tile_keys / 8 * S::chunks; first += 32) {
        const int i = first + lane;
        const int box = i / S::chunks;
        const int id = __shfl_sync(0xffffffffu, b.id, box & 31);
        const int offset = __shfl_sync(0xffffffffu, b.offset, box & 31);
        if (box >= b.first && box < b.count) {
          const int chunk = i % S::chunks;
          device::tma_load_5d(dst + chunk * S::kv_chunk_bytes + box * chunk_bytes, map, full, 0, offset, chunk, kv_head,
                              id);
        }
      }
    }
    __syncwarp();
  }

  // ---- consumers: 64 rows a warpgroup ----------------------------------------------------------------------------

  __device__ void consume(int warpgroup) {
    thread_ = static_cast<int>(threadIdx.x) & 127;
    warpgroup_ = warpgroup;
    if (warpgroup_ == 0) device::named_barrier_arrive(turn(0), 256);
    ring<S::stages> k_ring, v_ring;
    ring<S::q_stages> q_ring;
    float s[score_registers];
    float o[out_registers];
    std::uint32_t p[prefill_tile_keys / 16][4];

    for (int n = 0, i = item_index(0); i < num_items_; i = item_index(++n)) {
      const prefill_item item = items_[i];
      const extent e = extent_of(a_, item);
      begin_item(item);
#pragma unroll
      for (int j = 0; j < out_registers; ++j) o[j] = 0;
      if (e.tile_begin < e.tile_end) {
        device::mbarrier_wait_parity(q_full(q_ring.stage), q_ring.phase);
        int tile = e.tile_end - 1;

        device::mbarrier_wait_parity(k_full(k_ring.stage), k_ring.phase);
        take_turn();
        scores(s, q_ring.stage, k_ring.stage);
        device::wgmma_wait_group<0>();
        device::wgmma_fence_operands(s);
        give_turn();
        release(k_empty(k_ring.stage));
        k_ring.advance();
        float rescale[2];
        softmax(s, tile, e, item, rescale);
        pack(s, p);

        for (; tile > e.tile_begin; --tile) {
          device::mbarrier_wait_parity(k_full(k_ring.stage), k_ring.phase);
          take_turn();
          scores(s, q_ring.stage, k_ring.stage);
          wait_values(v_ring, tile, e, item);
          values(o, p, v_ring.stage);
          give_turn();
          device::wgmma_wait_group<1>();
          device::wgmma_fence_operands(s);
          release(k_empty(k_ring.stage));
          k_ring.advance();
          softmax(s, tile - 1, e, item, rescale);
          device::wgmma_wait_group<0>();
          device::wgmma_fence_operands(o);
          release(v_empty(v_ring.stage));
          v_ring.advance();
          pack(s, p);
#pragma unroll
          for (int j = 0; j < out_registers; ++j) o[j] *= rescale[(j >> 1) & 1];
        }
        release(q_empty(q_ring.stage));
        q_ring.advance();
        wait_values(v_ring, tile, e, item);
        values(o, p, v_ring.stage);
        device::wgmma_wait_group<0>();
        device::wgmma_fence_operands(o);
        release(v_empty(v_ring.stage));
        v_ring.advance();
      }
      store(o, item);
    }
    if (warpgroup_ == 0) take_turn();  // the other one has given it a last time
  }

  [[nodiscard]] __device__ static int turn(int warpgroup) { return 1 + warpgroup; }
  // The tensor cores are used in turns, so that the other warpgroup's softmax runs meanwhile.
  __device__ void take_turn() { device::named_barrier_sync(turn(warpgroup_), 256); }
  __device__ void give_turn() { device::named_barrier_arrive(turn(1 - warpgroup_), 256); }

  __device__ void release(std::uint32_t barrier) {
    if (thread_ == 0) device::mbarrier_arrive(barrier);
  }

  __device__ void begin_item(const prefill_item& item) {
    const int packed = item.row_tile * prefill_tile_rows + warpgroup_ * 64 + (thread_ / 32) * 16 + (thread_ & 31) / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = packed + 8 * i;
      token_[i] = row / a_.packed_heads;
      head_[i] = item.head + row - token_[i] * a_.packed_heads;
      position_[i] = item.seq_len - item.query_len + token_[i];
      max_[i] = -INFINITY;
      sum_[i] = 0;
      if constexpr (Features) slope_[i] = a_.alibi_slopes != nullptr ? a_.alibi_slopes[head_[i]] : 0.0f;
    }
  }

  // s = q · kᵀ for the tile in `stage`; committed, not waited for.
  __device__ void scores(float (&s)[score_registers], int q_stage, int stage) {
    device::wgmma_fence_operands(s);
    device::wgmma_fence();
    const std::uint32_t k = k_ + stage * S::kv_bytes;
#pragma unroll
    for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const std::uint64_t a = device::wgmma_descriptor(
            q_ + q_stage * S::q_bytes + (warpgroup_ * S::chunks + c) * S::q_chunk_bytes + step * 32, 16, 1024);
        const bool accumulate = c + step > 0;
        if constexpr (Order == key_order::rows) {
          const std::uint64_t b = device::wgmma_descriptor(k + c * S::kv_chunk_bytes + step * 32, 16, 1024);
          device::wgmma_m64n128k16<T, 0>(s, a, b, accumulate);
        } else {
          const std::uint32_t first = k + c * 2048 + step * 32;
          device::wgmma_m64n64k16<T, 0>(s, a, device::wgmma_descriptor(first, 16, S::chunks * 2048), accumulate);
          device::wgmma_m64n64k16<T, 32>(s, a, device::wgmma_descriptor(first + 1024, 16, S::chunks * 2048),
                                         accumulate);
        }
      }
    }
    device::wgmma_commit_group();
  }

  // The key of score register j, from the tile's first, for this thread's first column.
  [[nodiscard]] __device__ static constexpr int key_of(int j) {
    if (Order == key_order::rows) return (j >> 2) * 8 + (j & 1);
    return ((j & 31) >> 2) * 16 + (j >> 5) * 8 + (j & 1);
  }

  // o += p · v for the tile in `stage`; committed, not waited for.
  __device__ void values(float (&o)[out_registers], const std::uint32_t (&p)[prefill_tile_keys / 16][4], int stage) {
    const int chunk_bytes = a_.box_tokens * 128;
    const int group_bytes = a_.box_tokens == 8 ? S::chunks * 1024 : 1024;  // between groups of 8 tokens
    device::wgmma_fence_operands(o);
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < prefill_tile_keys / 16; ++step) {
      device::wgmma_m64k16_rs<T>(
          o, p[step],
          device::wgmma_descriptor(v_ + stage * S::kv_bytes + v_offset(step * 16), chunk_bytes, group_bytes));
    }
    device::wgmma_commit_group();
  }

  // Where the first chunk of a token of V lies in its stage.
  [[nodiscard]] __device__ int v_offset(int token) const {
    const int box = token / a_.box_tokens;
    return box * S::chunks * a_.box_tokens * 128 + (token - box * a_.box_tokens) * 128;
  }

  // Waits for a tile of V. Rows past the sequence or before the window become zero, because 0 · NaN is NaN and slots
  // that nobody sees hold anything.
  __device__ void wait_values(const ring<S::stages>& r, int tile, const extent& e, const prefill_item& item) {
    device::mbarrier_wait_parity(v_full(r.stage), r.phase);
    const int first_key = tile * prefill_tile_keys;
    const int below = Features ? max(0, e.begin - first_key) : 0;
    const int valid = min(prefill_tile_keys, item.seq_len - first_key);
    if (below == 0 && valid == prefill_tile_keys) return;
    for (int row = thread_ / 8; row < prefill_tile_keys; row += 16) {
      if (row >= below && row < valid) continue;
      for (int chunk = 0; chunk < S::chunks; ++chunk) {
        const std::uint32_t address = v_ + r.stage * S::kv_bytes + v_offset(row) + chunk * a_.box_tokens * 128;
        device::store_shared_zeros_16(address + (thread_ & 7) * 16);
      }
    }
    device::fence_async_proxy();
    device::named_barrier_sync(3 + warpgroup_, 128);
  }

  [[nodiscard]] __device__ bool visible(int key, int i, const prefill_item& item) const {
    const bool ok = attn::attends(key, position_[i], item.seq_len, a_.causal);
    if constexpr (Features) return ok && attn::is_in_window(key, position_[i], a_.window_left, a_.window_right);
    return ok;
  }

  // Scores become probabilities against the running maximum; `rescale` is what older results must be multiplied with.
  __device__ __forceinline__ void softmax(float (&s)[score_registers], int tile, const extent& e,
                                          const prefill_item& item, float (&rescale)[2]) {
    const int column = tile * prefill_tile_keys + (thread_ & 3) * 2;
    const float scale = Features ? 1.0f : a_.scale * log2e;
    if constexpr (Features) {
#pragma unroll
      for (int j = 0; j < score_registers; ++j) {
        const int key = column + key_of(j);
        const int i = (j >> 1) & 1;
        float x = s[j] * a_.scale;
        if (a_.soft_cap > 0) x = a_.soft_cap * tanhf(x / a_.soft_cap);
        x += slope_[i] * static_cast<float>(key - position_[i]);
        s[j] = visible(key, i, item) ? x * log2e : -INFINITY;
      }
    } else if ((tile + 1) * prefill_tile_keys > e.common_limit) {
#pragma unroll
      for (int j = 0; j < score_registers; ++j) {
        if (!visible(column + key_of(j), (j >> 1) & 1, item)) s[j] = -INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = max_[i];
#pragma unroll
      for (int j = 0; j < score_registers; j += 4) m = fmaxf(m, fmaxf(s[j + 2 * i], s[j + 2 * i + 1]));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      const float shift = m == -INFINITY ? 0.0f : m * scale;
      rescale[i] = device::exp2_fast(max_[i] * scale - shift);
      max_[i] = m;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < score_registers; j += 4) {
        s[j + 2 * i] = device::exp2_fast(fmaf(s[j + 2 * i], scale, -shift));
        s[j + 2 * i + 1] = device::exp2_fast(fmaf(s[j + 2 * i + 1], scale, -shift));
        sum += s[j + 2 * i] + s[j + 2 * i + 1];
      }
      sum_[i] = sum_[i] * rescale[i] + sum;
    }
  }

  __device__ __forceinline__ static void pack(const float (&s)[score_registers],
                                              std::uint32_t (&p)[prefill_tile_keys / 16][4]) {
#pragma unroll
    for (int step = 0; step < prefill_tile_keys / 16; ++step)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int from = Order == key_order::rows ? step * 8 + 2 * j : (j >> 1) * 32 + step * 4 + 2 * (j & 1);
        p[step][j] = device::pack<T>(s[from], s[from + 1]);
      }
  }

  __device__ void store(float (&o)[out_registers], const prefill_item& item) {
    constexpr float ln2 = 0.6931471805599453f;
    float inverse[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float l = sum_[i];
      l += __shfl_xor_sync(0xffffffffu, l, 1);
      l += __shfl_xor_sync(0xffffffffu, l, 2);
      float m = max_[i] * (Features ? 1.0f : a_.scale * log2e);  // base 2
      float factor = 1.0f;
      const bool valid = token_[i] < item.query_len;
      if constexpr (Features) {
        if (a_.sinks != nullptr && valid) {
          const float sink = a_.sinks[head_[i]] * log2e;
          const float top = fmaxf(m, sink);
          if (top != -INFINITY) {
            factor = m == -INFINITY ? 0.0f : device::exp2_fast(m - top);
            l = l * factor + device::exp2_fast(sink - top);
            m = top;
          }
        }
      }
      inverse[i] = l != 0 ? factor / l : 0.0f;  // NaN stays NaN
      if (a_.lse != nullptr && valid && (thread_ & 3) == 0) {
        a_.lse[static_cast<std::int64_t>(item.query_start + token_[i]) * a_.num_q_heads + head_[i]] =
            l != 0 ? m * ln2 + logf(l) : -INFINITY;
      }
    }
    // Four lanes hold 2 columns each of every run of 8; after the exchange lane q holds all 8 of run 4b + q.
    const int q = thread_ & 3;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int b = 0; b < HeadDim / 32; ++b) {
        std::uint32_t mine[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int j = (b * 4 + r) * 4 + 2 * i;
          mine[r] = device::pack<T>(o[j] * inverse[i], o[j + 1] * inverse[i]);
        }
        transpose(mine, q);
        if (token_[i] < item.query_len) {
          T* dst = static_cast<T*>(a_.out) + (item.query_start + token_[i]) * a_.out_token_stride +
                   head_[i] * a_.out_head_stride + (b * 4 + q) * 8;
          *reinterpret_cast<uint4*>(dst) = make_uint4(mine[0], mine[1], mine[2], mine[3]);
        }
      }
    }
  }

  // 4 × 4 words across a quad of lanes: lane q ends with word q of every lane, in the order of lanes.
  __device__ static void transpose(std::uint32_t (&x)[4], int q) {
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
  std::uint32_t q_, k_, v_, barriers_;
  int num_items_;
  const prefill_item* items_;
  int thread_, warpgroup_;
  int token_[2], head_[2], position_[2];
  float slope_[2], max_[2], sum_[2];
};

template <class T, int HeadDim, key_order Order, bool Features>
__global__ void __launch_bounds__(num_threads, 1)
    prefill_kernel(const __grid_constant__ prefill_args args, const __grid_constant__ tensor_map q_map,
                   const __grid_constant__ tensor_map k_map, const __grid_constant__ tensor_map v_map) {
  extern __shared__ char shared[];
  worker<T, HeadDim, Order, Features>(args, shared).run(&q_map, &k_map, &v_map);
}

template <class T, int HeadDim>
[[nodiscard]] constexpr prefill_entry make_entry() noexcept {
  constexpr key_order rows = key_order::rows;
  constexpr key_order pairs = key_order::pairs;
  return {{prefill_kernel<T, HeadDim, rows, false>, prefill_kernel<T, HeadDim, rows, true>},
          {prefill_kernel<T, HeadDim, pairs, false>, prefill_kernel<T, HeadDim, pairs, true>},
          shape<HeadDim>::shared_bytes};
}

}  // namespace prefill
}  // namespace bifolio::cuda
