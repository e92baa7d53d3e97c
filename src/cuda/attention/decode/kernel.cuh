// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Decode attention on tensor cores over a paged cache. One kernel for MHA, GQA and MQA: the query heads of a KV head
/// (and the few tokens of a speculative step) are the 16 rows of an m16n8k16 product, so K and V are read once whatever
/// the group. Four or eight warps split the 64 keys of a tile; each keeps its own running maximum, sum and output,
/// warp_result once a work_tile. Tiles stream through a ring of shared-memory stages by cp.async, across work_tile
/// borders, so that the memory system never sees where one sequence ends and the next begins. decode_plan.hpp says how
/// work is cut.

#include <cstdint>

#include "common/attention/visibility.hpp"
#include "cuda/attention/decode/launch.hpp"
#include "cuda/attention/decode/plan.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm80.cuh"

namespace bifolio::cuda {

/// Everything the kernel reads. K and V have equal strides and head_dim contiguous.
struct decode_args {
  const void* q;  // [num_tokens, num_q_heads, head_dim]
  void* out;      // like q
  float* lse;     // [num_tokens, num_q_heads] or null
  const void* k;  // [num_blocks, …] at the strides below
  const void* v;
  const std::int32_t* block_tables;  // [num_seqs, block_table_stride]
  const std::int32_t* metadata;      // of the scheduler: plan.hpp
  float* workspace;                  // [num_partials, 16, head_dim] outputs, then [.., 16, 2] maxima (base 2) and sums
  std::uint32_t* semaphores;         // [2, num_partials], zero between launches
  const float* alibi_slopes;         // [num_q_heads] or null
  const float* sinks;                // [num_q_heads] or null
  std::int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride;  // elements
  std::int64_t block_stride, head_stride, token_stride;                           // elements
  std::int64_t block_table_stride;
  std::int64_t num_blocks;
  std::int32_t num_q_heads, num_kv_heads, group_size, block_size;
  std::int32_t window_left, window_right;  // < 0: none
  bool causal;
  float scale;
  float soft_cap;  // 0: none
};

namespace decode {

inline constexpr int combine_fan_in = decode_combine_fan_in;
inline constexpr int combine_batch = 16;  // partials that a thread has on their way at once

template <int HeadDim, int Warps>
struct shape {
  static_assert(Warps == 4 || Warps == 8);
  static constexpr int warps = Warps;
  static constexpr int threads = 32 * Warps;
  static constexpr int stages = HeadDim == 64 ? 6 : 3;
  static constexpr int ctas_per_sm = HeadDim == 256 ? 1 : 2;
  static constexpr int warp_keys = decode_tile_tokens / Warps;
  static constexpr int chunks = HeadDim / 8;         // of 16 bytes in a row
  static constexpr int rows_per_pass = 32 / chunks;  // of one warp
  static constexpr int passes = warp_keys / rows_per_pass;
  static constexpr int tile_bytes = decode_tile_tokens * HeadDim * 2;
  static constexpr int stage_bytes = 2 * tile_bytes;
  static constexpr int q_bytes = decode_tile_rows * HeadDim * 2;
  static_assert(stage_bytes == 4 * decode_tile_rows * HeadDim * 4, "a stage holds the outputs of four warps");
  static constexpr int sums_bytes = Warps * decode_tile_rows * 8;
  static constexpr int shared_bytes = stages * (stage_bytes + q_bytes) + sums_bytes + 16;
  // Where registers are short the queries stay in shared memory.
  static constexpr bool q_in_registers = HeadDim == 64 || (HeadDim == 128 && Warps == 4);
};

/// The part of one unit that this thread block does.
struct work_tile {
  int head;  // KV head
  int row_tile;
  int item;  // of the unit
  int tile, tile_end;
  int work_begin, work_length;  // on the line
  bool starts, ends;            // holds the unit's first and last tile
};

/// The last block whose raw cut is <= position.
__device__ __forceinline__ int cta_at(int total, int num_ctas, int position) {
  const std::int64_t n = (static_cast<std::int64_t>(position) + 1) * num_ctas;
  const int block = static_cast<int>((n + total - 1) / total) - 1;
  return block < num_ctas - 1 ? block : num_ctas - 1;
}

/// Two partial results a and b as one: its maximum, and the weights of what each has summed.
struct fold {
  float max, a, b;
  __device__ __forceinline__ fold(float max_a, float max_b) {
    max = fmaxf(max_a, max_b);
    a = max_a == -INFINITY ? 0.0f : device::exp2_fast(max_a - max);
    b = max_b == -INFINITY ? 0.0f : device::exp2_fast(max_b - max);
  }
  /// The same instructions wherever results are folded.
  [[nodiscard]] __device__ __forceinline__ float of(float sum_a, float sum_b) const {
    return __fmaf_rn(sum_b, b, __fmul_rn(sum_a, a));
  }
  [[nodiscard]] __device__ __forceinline__ float4 of(const float4& x, const float4& y) const {
    return make_float4(of(x.x, y.x), of(x.y, y.y), of(x.z, y.z), of(x.w, y.w));
  }
};

template <class T, int HeadDim, int Warps, bool Masked>
class worker {
  using S = shape<HeadDim, Warps>;
  static constexpr int k_steps = HeadDim / 16;
  static constexpr int n_tiles = HeadDim / 8;
  static constexpr int key_tiles = S::warp_keys / 8;

 public:
  __device__ worker(const decode_args& args, char* shared)
      : a_(args),
        stages_(device::shared_address(shared)),
        q_shared_(stages_ + S::stages * S::stage_bytes),
        shared_(shared),
        sums_(reinterpret_cast<float2*>(shared + S::stages * (S::stage_bytes + S::q_bytes))),
        flag_(reinterpret_cast<int*>(shared + S::shared_bytes - 16)),
        lane_(static_cast<int>(threadIdx.x) & 31),
        warp_(static_cast<int>(threadIdx.x) >> 5) {}

  __device__ void run() {
    device::grid_dependency_launch();
    header_ = *reinterpret_cast<const decode_header*>(a_.metadata);
    const decode_cta mine = reinterpret_cast<const decode_cta*>(a_.metadata + sizeof(decode_header) / 4)[blockIdx.x];
    seqs_ = reinterpret_cast<const decode_seq*>(a_.metadata + decode_seqs_offset(static_cast<int>(gridDim.x)));
    partial_out_ = a_.workspace;
    const std::int64_t slots =
        decode_num_partials(header_.split_tiles != 0, header_.num_partials, static_cast<std::int64_t>(gridDim.x));
    partial_sum_ = reinterpret_cast<float2*>(a_.workspace + slots * decode_tile_rows * HeadDim);
    if (mine.begin >= mine.end) return;
    end_ = mine.end;
    load_position_ = mine.begin;
    load_index_ = mine.seq_index;
    load_seq_ = mine.first;
    load_q_buffer_ = S::stages - 1;
    find_load_tile();
    // The plan is older than the kernel before this one. What follows may be its work.
    if (load_valid_) prefetch_first_tile();
    device::grid_dependency_wait();
    if (load_valid_) load_table_entries();
#pragma unroll
    for (int stage = 0; stage < S::stages - 1; ++stage) load_tile(stage);

    // Plans whose items span several chunks fold them here; in others a work_tile is one part.
    const bool folds = header_.split_tiles > decode_leaf_tiles;
    seq_ = mine.first;
    int position = mine.begin;
    int index = mine.seq_index;
    int stage = 0;
    int q_buffer = S::stages - 1;
    while (position < end_) {
      const work_tile g = next_work_tile(position, index, seq_);
      begin_work_tile(g);
      if (g.tile < g.tile_end) q_buffer = q_buffer + 1 == S::stages ? 0 : q_buffer + 1;
      int tile = g.tile;
      do {
        const int stop = folds ? min(g.tile_end, (tile / decode_leaf_tiles + 1) * decode_leaf_tiles) : g.tile_end;
        const bool any = tile < stop;
        clear_sums();
        for (; tile < stop; ++tile) {
          device::cp_async_wait_group<S::stages - 2>();
          __syncthreads();
          load_tile(stage == 0 ? S::stages - 1 : stage - 1);
          if (S::q_in_registers && tile == g.tile) load_q(q_buffer);
          compute_tile(stage, tile, q_buffer);
          stage = stage + 1 == S::stages ? 0 : stage + 1;
        }
        store_part(g, tile, any, folds, stage == 0 ? S::stages - 1 : stage - 1);
      } while (tile < g.tile_end);
    }
    device::cp_async_wait_group<0>();
  }

 private:
  // Takes the work_tile at `position` (< end_) and moves `position` behind it, to the next sequence of the list if need
  // be.
  __device__ __forceinline__ work_tile next_work_tile(int& position, int& index, decode_seq& s) const {
    if (position >= s.work_begin + a_.num_kv_heads * s.row_tiles * s.num_splits * s.work_length) s = seqs_[++index];
    work_tile g;
    const int unit = (position - s.work_begin) / s.work_length;
    g.work_length = s.work_length;
    g.work_begin = s.work_begin + unit * s.work_length;
    const int in_head = s.row_tiles * s.num_splits;
    g.head = unit / in_head;
    const int rest = unit - g.head * in_head;
    g.item = rest / s.row_tiles;
    g.row_tile = rest - g.item * s.row_tiles;
    const int x0 = position - g.work_begin;
    const int x1 = min(end_ - g.work_begin, s.work_length);
    g.starts = x0 == 0;
    g.ends = x1 == s.work_length;
    position = g.work_begin + x1;
    if (header_.split_tiles == 0) {
      g.tile = s.first_tile + max(x0 - header_.overhead, 0);
      g.tile_end = s.first_tile + x1 - header_.overhead;
      return g;
    }
    // Tiles in which no row of this row tile sees anything would change no bit.
    const int item = s.first_tile / header_.split_tiles + g.item;
    const int first_row = g.row_tile * decode_tile_rows;
    const int last_row = min(first_row + decode_tile_rows, s.query_len * a_.group_size) - 1;
    const int offset = s.seq_len - s.query_len;
    int first = s.first_tile;
    int last = s.first_tile + s.num_tiles;
    if (a_.causal) {
      last = min(last, (max(offset + last_row / a_.group_size + 1, 0) + decode_tile_tokens - 1) / decode_tile_tokens);
    }
    if (Masked && a_.window_left >= 0) {
      first = max(first, (offset + first_row / a_.group_size - a_.window_left) / decode_tile_tokens);
    }
    g.tile = max(item * header_.split_tiles, first);
    g.tile_end = max(min((item + 1) * header_.split_tiles, last), g.tile);
    return g;
  }

  // ---- loading -------------------------------------------------------------------------------------------------

  [[nodiscard]] __device__ const std::int32_t* table_entry(int position) const {
    const unsigned block = static_cast<unsigned>(position) / static_cast<unsigned>(a_.block_size);
    return a_.block_tables + load_seq_.row * a_.block_table_stride + block;
  }

  // Moves on to the next work_tile that has tiles; afterwards load_valid_ says whether there is one.
  __device__ void find_load_tile() {
    load_valid_ = false;
    while (load_position_ < end_) {
      load_ = next_work_tile(load_position_, load_index_, load_seq_);
      if (load_.tile < load_.tile_end) {
        load_valid_ = true;
        load_first_ = true;
        load_q_buffer_ = load_q_buffer_ + 1 == S::stages ? 0 : load_q_buffer_ + 1;
        return;
      }
    }
  }

  // Row r of the packed tile is token r / group_size, head r % group_size. Queries travel with their work_tile's first
  // tile; segments take turns among the buffers, of which as many are ahead as stages.
  __device__ void load_queries(const work_tile& g) {
    const decode_seq& s = load_seq_;
    const int rows = s.query_len * a_.group_size;
    for (int i = static_cast<int>(threadIdx.x); i < decode_tile_rows * S::chunks; i += S::threads) {
      const int r = i / S::chunks;
      const int chunk = i % S::chunks;
      const int row = g.row_tile * decode_tile_rows + r;
      const bool valid = row < rows;
      const int token = valid ? row / a_.group_size : 0;
      const int head = g.head * a_.group_size + (valid ? row - token * a_.group_size : 0);
      const T* src = static_cast<const T*>(a_.q) + (s.query_start + token) * a_.q_token_stride +
                     head * a_.q_head_stride + chunk * 8;
      device::cp_async_16(q_shared_ + load_q_buffer_ * S::q_bytes + r * HeadDim * 2 + ((chunk ^ (r & 7)) << 4), src,
                          valid);
    }
  }

  // The position of one of the warp's rows of the tile at load_.tile, a lane each; −1 if it must not be read.
  [[nodiscard]] __device__ int find_position() const {
    const int l = lane_ % S::warp_keys;
    const int row = ((l / S::rows_per_pass) * S::warps + warp_) * S::rows_per_pass + l % S::rows_per_pass;
    const int position = load_.tile * decode_tile_tokens + row;
    // Blocks left of every row's window may have been given back: their table entries are not read either.
    const int first = Masked && a_.window_left >= 0 ? load_seq_.seq_len - load_seq_.query_len - a_.window_left : 0;
    return position >= first && position < load_seq_.seq_len ? position : -1;
  }

  [[nodiscard]] __device__ int slot_in_block(int position) const {
    return static_cast<int>(static_cast<unsigned>(position) % static_cast<unsigned>(a_.block_size));
  }

  // The plan checked the host's table; a different one on the device must not lead out of the cache.
  [[nodiscard]] __device__ int bounded(int id) const {
    return static_cast<int>(min(static_cast<unsigned>(id), static_cast<unsigned>(a_.num_blocks - 1)));
  }

  // Where K and V have the row of load_.head in this slot of block `id`.
  [[nodiscard]] __device__ std::int64_t row_offset(int id, int slot) const {
    return id * a_.block_stride + slot * a_.token_stride + load_.head * a_.head_stride;
  }

  // A lane finds block and slot of one of the warp's rows of the tile at load_.tile; slot −1 for a row that must not be
  // read. Nothing is computed from the block here: that would wait for the table, with a tile to work on at hand.
  __device__ void load_table_entries() {
    const int position = find_position();
    load_slot_ = position < 0 ? -1 : slot_in_block(position);
    load_block_ = position < 0 ? 0 : __ldg(table_entry(position));
  }

  // Sends for the first tile, towards L2, while the kernel before this one still runs. What the table says now is a
  // guess, because it may be that kernel's work, so the id is bounded and read past L1, which would keep it.
  __device__ void prefetch_first_tile() const {
    const int position = find_position();
    const int id = position < 0 ? -1 : __ldcg(table_entry(position));
    if (id < 0 || id >= a_.num_blocks) return;
    const std::int64_t offset = row_offset(id, slot_in_block(position));
    constexpr int lines = HeadDim * 2 / 128;
    for (int line = lane_ / S::warp_keys; line < 2 * lines; line += 32 / S::warp_keys) {
      const T* plane = static_cast<const T*>(line < lines ? a_.k : a_.v);
      device::prefetch_l2(plane + offset + line % lines * 64);
    }
  }

  // Requests the tile that load_table_entries found and looks up the one after it. Always commits a group, empty at the
  // end.
  __device__ void load_tile(int stage) {
    if (load_valid_) {
      if (load_first_) load_queries(load_);
      load_first_ = false;
      const std::uint32_t base = stages_ + stage * S::stage_bytes;
      const int chunk = lane_ % S::chunks;
      const std::int64_t offset_here = load_slot_ < 0 ? -1 : row_offset(bounded(load_block_), load_slot_);
#pragma unroll
      for (int pass = 0; pass < S::passes; ++pass) {
        const std::int64_t offset = __shfl_sync(0xffffffffu, offset_here, pass * S::rows_per_pass + lane_ / S::chunks);
        const int row = (pass * S::warps + warp_) * S::rows_per_pass + lane_ / S::chunks;
        const std::uint32_t dst = base + row * HeadDim * 2 + ((chunk ^ (row & 7)) << 4);
        const bool valid = offset >= 0;
        const std::int64_t element = valid ? offset + chunk * 8 : 0;
        device::cp_async_16_evict_first(dst, static_cast<const T*>(a_.k) + element, valid);
        device::cp_async_16_evict_first(dst + S::tile_bytes, static_cast<const T*>(a_.v) + element, valid);
      }
      if (++load_.tile < load_.tile_end) {
        load_table_entries();
      } else {
        find_load_tile();
        if (load_valid_) load_table_entries();
      }
    }
    device::cp_async_commit_group();
  }

  // ---- computing -----------------------------------------------------------------------------------------------

  __device__ void begin_work_tile(const work_tile& g) {
    const decode_seq& s = seq_;
    seq_len_ = s.seq_len;
    query_len_ = s.query_len;
    query_start_ = s.query_start;
    num_rows_ = min(s.query_len * a_.group_size - g.row_tile * decode_tile_rows, decode_tile_rows);
    // Keys below this are visible to every row of the tile, as far as causality goes.
    const int first_token = g.row_tile * decode_tile_rows / a_.group_size;
    common_limit_ = a_.causal ? min(seq_len_, seq_len_ - query_len_ + first_token + 1) : seq_len_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = g.row_tile * decode_tile_rows + lane_ / 4 + 8 * i;
      const int token = row / a_.group_size;
      row_position_[i] = seq_len_ - query_len_ + token;
      if constexpr (Masked) {
        const int head = g.head * a_.group_size + row - token * a_.group_size;
        slope_[i] = a_.alibi_slopes != nullptr && token < query_len_ ? a_.alibi_slopes[head] : 0.0f;
      }
    }
  }

  __device__ void clear_sums() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      max_[i] = -INFINITY;
      sum_[i] = 0;
    }
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_[n][e] = 0;
  }

  __device__ void load_q_step(std::uint32_t (&q)[4], int buffer, int kk) const {
    const int row = (lane_ & 7) + ((lane_ >> 3) & 1) * 8;
    const std::uint32_t base = q_shared_ + buffer * S::q_bytes + row * HeadDim * 2;
    device::ldmatrix_x4(q, base + (((2 * kk + (lane_ >> 4)) ^ (row & 7)) << 4));
  }
  __device__ void load_q(int buffer) {
#pragma unroll
    for (int kk = 0; kk < (S::q_in_registers ? k_steps : 0); ++kk) load_q_step(q_[kk], buffer, kk);
  }

  __device__ bool visible(int key, int i) const {
    const bool ok = attn::attends(key, row_position_[i], seq_len_, a_.causal);
    if constexpr (Masked) return ok && attn::is_in_window(key, row_position_[i], a_.window_left, a_.window_right);
    return ok;
  }

  // Step kk of the queries, from registers or shared memory.
  __device__ void take_q(std::uint32_t (&q)[4], int buffer, int kk) const {
    if constexpr (S::q_in_registers) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q[i] = q_[kk][i];
    } else {
      load_q_step(q, buffer, kk);
    }
  }

  // Scores of this warp's keys: s[n] has those of 8.
  __device__ void compute_scores(float (&s)[key_tiles][4], std::uint32_t k_base, int q_buffer) const {
#pragma unroll
    for (int n = 0; n < key_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = 0;
    if constexpr (key_tiles == 2) {
      const int row = warp_ * 16 + (lane_ & 7) + ((lane_ >> 4) & 1) * 8;
      const std::uint32_t row_base = k_base + row * HeadDim * 2;
#pragma unroll
      for (int kk = 0; kk < k_steps; ++kk) {
        std::uint32_t b[4];
        std::uint32_t q[4];
        device::ldmatrix_x4(b, row_base + (((2 * kk + ((lane_ >> 3) & 1)) ^ (row & 7)) << 4));
        take_q(q, q_buffer, kk);
        device::mma_m16n8k16<T>(s[0], q, b[0], b[1]);
        device::mma_m16n8k16<T>(s[1], q, b[2], b[3]);
      }
    } else {
      // Even and odd steps are sums of their own: two chains of products, each half as long.
      float odd[4] = {};
      const int row = warp_ * 8 + (lane_ & 7);
      const std::uint32_t row_base = k_base + row * HeadDim * 2;
#pragma unroll
      for (int kk = 0; kk < k_steps; kk += 2) {
        std::uint32_t b[4];
        std::uint32_t q[4];
        device::ldmatrix_x4(b, row_base + (((2 * kk + (lane_ >> 3)) ^ (row & 7)) << 4));
        take_q(q, q_buffer, kk);
        device::mma_m16n8k16<T>(s[0], q, b[0], b[1]);
        take_q(q, q_buffer, kk + 1);
        device::mma_m16n8k16<T>(odd, q, b[2], b[3]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][e] += odd[e];
    }
  }

  // Adds this warp's probabilities times its rows of V.
  __device__ void add_values(const std::uint32_t (&p)[2 * key_tiles], std::uint32_t v_base) {
    if constexpr (key_tiles == 2) {
      const int row = warp_ * 16 + (lane_ & 7) + ((lane_ >> 3) & 1) * 8;
      const std::uint32_t row_base = v_base + row * HeadDim * 2;
#pragma unroll
      for (int j = 0; j < k_steps; ++j) {
        std::uint32_t b[4];
        device::ldmatrix_x4_trans(b, row_base + (((2 * j + (lane_ >> 4)) ^ (row & 7)) << 4));
        device::mma_m16n8k16<T>(acc_[2 * j], p, b[0], b[1]);
        device::mma_m16n8k16<T>(acc_[2 * j + 1], p, b[2], b[3]);
      }
    } else {
      const int row = warp_ * 8 + (lane_ & 7);
      const std::uint32_t row_base = v_base + row * HeadDim * 2;
#pragma unroll
      for (int j = 0; j < n_tiles; j += 4) {
        std::uint32_t b[4];
        device::ldmatrix_x4_trans(b, row_base + (((j + (lane_ >> 3)) ^ (row & 7)) << 4));
#pragma unroll
        for (int i = 0; i < 4; ++i) device::mma_m16n8k8<T>(acc_[j + i], p[0], p[1], b[i]);
      }
    }
  }

  // Scores of this warp's keys, softmax against the running maximum, and their share of the output.
  __device__ void compute_tile(int stage, int tile, int q_buffer) {
    const std::uint32_t k_base = stages_ + stage * S::stage_bytes;
    float s[key_tiles][4];
    compute_scores(s, k_base, q_buffer);

    constexpr float log2e = 1.4426950408889634f;
    const int first_key = tile * decode_tile_tokens + warp_ * S::warp_keys;
    if constexpr (Masked) {
#pragma unroll
      for (int n = 0; n < key_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = first_key + n * 8 + (lane_ & 3) * 2 + (e & 1);
          float x = s[n][e] * a_.scale;
          if (a_.soft_cap > 0) x = a_.soft_cap * tanhf(x / a_.soft_cap);
          x += slope_[e >> 1] * static_cast<float>(key - row_position_[e >> 1]);
          s[n][e] = visible(key, e >> 1) ? x * log2e : -INFINITY;
        }
    } else {
      const float scale = a_.scale * log2e;
#pragma unroll
      for (int n = 0; n < key_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] *= scale;
      if (first_key + S::warp_keys > common_limit_) {
#pragma unroll
        for (int n = 0; n < key_tiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (!visible(first_key + n * 8 + (lane_ & 3) * 2 + (e & 1), e >> 1)) s[n][e] = -INFINITY;
          }
      }
    }

    float shift[2];
    bool grows = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = fmaxf(s[0][2 * i], s[0][2 * i + 1]);
      if constexpr (key_tiles == 2) m = fmaxf(m, fmaxf(s[1][2 * i], s[1][2 * i + 1]));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      shift[i] = fmaxf(max_[i], m);
      grows = grows || shift[i] > max_[i];
    }
    if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float alpha = shift[i] > max_[i] ? device::exp2_fast(max_[i] - shift[i]) : 1.0f;
        max_[i] = shift[i];
        sum_[i] *= alpha;
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
          acc_[n][2 * i] *= alpha;
          acc_[n][2 * i + 1] *= alpha;
        }
      }
    }
    std::uint32_t p[2 * key_tiles];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float m = max_[i] == -INFINITY ? 0.0f : max_[i];
#pragma unroll
      for (int n = 0; n < key_tiles; ++n) {
        const float p0 = device::exp2_fast(s[n][2 * i] - m);
        const float p1 = device::exp2_fast(s[n][2 * i + 1] - m);
        sum_[i] += p0 + p1;
        p[2 * n + i] = device::pack<T>(p0, p1);
      }
    }
    add_values(p, k_base + S::tile_bytes);
  }

  // ---- joining -------------------------------------------------------------------------------------------------

  // Where (row, column) of a warp's output lies in the stage that the work_tile's last tile has left free.
  [[nodiscard]] __device__ float* warp_result(int stage, int warp, int row, int column) const {
    return reinterpret_cast<float*>(shared_ + stage * S::stage_bytes) + (warp * decode_tile_rows + row) * HeadDim +
           (column ^ ((row & 7) * 8));
  }

  // Joins the warps behind the last tile of a part, which is the whole work_tile or a chunk of it, and writes the
  // work_tile's result: to the output if the unit is whole, else to workspace. `next_tile`: the one behind the part.
  __device__ void store_part(const work_tile& g, int next_tile, bool any, bool folds, int stage) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum_[i] += __shfl_xor_sync(0xffffffffu, sum_[i], 1);
      sum_[i] += __shfl_xor_sync(0xffffffffu, sum_[i], 2);
      if ((lane_ & 3) == 0) sums_[warp_ * decode_tile_rows + lane_ / 4 + 8 * i] = make_float2(max_[i], sum_[i]);
    }
    __syncthreads();  // also: every warp has read the last tile
    if (any) {
      float weight[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = lane_ / 4 + 8 * i;
        float m = -INFINITY;
#pragma unroll
        for (int w = 0; w < S::warps; ++w) m = fmaxf(m, sums_[w * decode_tile_rows + row].x);
        weight[i] = max_[i] == -INFINITY ? 0.0f : device::exp2_fast(max_[i] - m);
      }
      // Calls body(place in the stage, accumulators) for this lane's pairs of columns.
      const auto for_each_pair = [&](auto body) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = lane_ / 4 + 8 * i;
          if (row >= num_rows_) continue;
#pragma unroll
          for (int n = 0; n < n_tiles; ++n) {
            float2& place = *reinterpret_cast<float2*>(warp_result(stage, warp_ & 3, row, n * 8 + (lane_ & 3) * 2));
            body(place, make_float2(acc_[n][2 * i] * weight[i], acc_[n][2 * i + 1] * weight[i]));
          }
        }
      };
      if constexpr (S::warps == 8) {
        // The stage has room for four: the others go first.
        if (warp_ >= 4) for_each_pair([](float2& place, const float2& value) { place = value; });
        __syncthreads();
        if (warp_ < 4) {
          for_each_pair(
              [](float2& place, const float2& value) { place = make_float2(place.x + value.x, place.y + value.y); });
        }
      } else {
        for_each_pair([](float2& place, const float2& value) { place = value; });
      }
    }

    // From here a thread has one row and some runs of 8 columns.
    constexpr int row_threads = S::threads / decode_tile_rows;
    constexpr int column_parts = (HeadDim + row_threads * 8 - 1) / (row_threads * 8);
    const int row = static_cast<int>(threadIdx.x) / row_threads;
    const int row_thread = static_cast<int>(threadIdx.x) % row_threads;
    float m = -INFINITY;
#pragma unroll
    for (int w = 0; w < S::warps; ++w) m = fmaxf(m, sums_[w * decode_tile_rows + row].x);
    float l = 0;
#pragma unroll
    for (int w = 0; w < S::warps; ++w) {
      const float2 part = sums_[w * decode_tile_rows + row];
      l += part.x == -INFINITY ? 0.0f : part.y * device::exp2_fast(part.x - m);
    }
    const bool last = next_tile >= g.tile_end;
    const bool whole = header_.split_tiles == 0 ? g.starts && g.ends : seq_.num_splits == 1;
    const int slot = whole ? 0 : slot_of(g);
    const int packed = g.row_tile * decode_tile_rows + row;
    const int token = packed / a_.group_size;
    const int head = g.head * a_.group_size + packed - token * a_.group_size;

    // The chunk joins those of its run before it, and a complete run the runs before it. What was summed so far lies in
    // two slots of this thread block, where every thread reads back what it wrote itself.
    bool begins_run = true;
    bool ends_run = true;
    bool begins_unit = true;
    if (folds) {
      const int chunk = (next_tile - 1) / decode_leaf_tiles;
      const int first_chunk = g.tile / decode_leaf_tiles;
      begins_run = chunk % combine_fan_in == 0 || chunk == first_chunk;
      ends_run = chunk % combine_fan_in == combine_fan_in - 1 || last;
      begins_unit = chunk / combine_fan_in == first_chunk / combine_fan_in;
    }
    const fold with_run(begins_run ? -INFINITY : run_max_, m);
    if (!begins_run) {
      l = with_run.of(run_sum_, l);
      m = with_run.max;
    }
    run_max_ = m;
    run_sum_ = l;
    const fold with_unit(begins_unit ? -INFINITY : unit_max_, m);
    if (ends_run) {
      if (!begins_unit) {
        l = with_unit.of(unit_sum_, l);
        m = with_unit.max;
      }
      unit_max_ = m;
      unit_sum_ = l;
    }
    float* const run_total = running(0, row);
    float* const unit_total = running(1, row);
    __syncthreads();
    if (row < num_rows_) {
      const bool first = row_thread == 0;
      const float inverse = whole && last ? finish_row(token, head, m, l, first) : 0;
#pragma unroll
      for (int part = 0; part < column_parts; ++part) {
        const int column = (part * row_threads + row_thread) * 8;
        if (column >= HeadDim) continue;
        float4 lo = make_float4(0, 0, 0, 0);
        float4 hi = lo;
        if (any) {
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float4 a = *reinterpret_cast<const float4*>(warp_result(stage, w, row, column));
            const float4 b = *reinterpret_cast<const float4*>(warp_result(stage, w, row, column) + 4);
            lo.x += a.x, lo.y += a.y, lo.z += a.z, lo.w += a.w;
            hi.x += b.x, hi.y += b.y, hi.z += b.z, hi.w += b.w;
          }
        }
        if (!begins_run) {
          lo = with_run.of(__ldcg(reinterpret_cast<const float4*>(run_total + column)), lo);
          hi = with_run.of(__ldcg(reinterpret_cast<const float4*>(run_total + column + 4)), hi);
        }
        if (ends_run && !begins_unit) {
          lo = with_unit.of(__ldcg(reinterpret_cast<const float4*>(unit_total + column)), lo);
          hi = with_unit.of(__ldcg(reinterpret_cast<const float4*>(unit_total + column + 4)), hi);
        }
        if (!last) {
          float* const dst = ends_run ? unit_total : run_total;
          __stcg(reinterpret_cast<float4*>(dst + column), lo);
          __stcg(reinterpret_cast<float4*>(dst + column + 4), hi);
        } else if (whole) {
          store_row(token, head, column, lo, hi, inverse);
        } else {
          float* dst = partial_out_ + (static_cast<std::int64_t>(slot) * decode_tile_rows + row) * HeadDim + column;
          __stcg(reinterpret_cast<float4*>(dst), lo);
          __stcg(reinterpret_cast<float4*>(dst + 4), hi);
        }
      }
      if (last && !whole && first) __stcg(partial_sum_ + slot * decode_tile_rows + row, make_float2(m, l));
    }
    if (last && !whole) {
      combine_if_last(g);
    } else {
      __syncthreads();  // the stage and the sums are written again
    }
  }

  // This row's place in the running result of a run (0) or of the unit (1).
  [[nodiscard]] __device__ float* running(int which, int row) const {
    const std::int64_t slot = std::int64_t{2} * header_.num_partials + 2 * static_cast<int>(blockIdx.x) + which;
    return partial_out_ + (slot * decode_tile_rows + row) * HeadDim;
  }

  // A unit's partials, by index 0 … parts − 1 in the order of their tiles.
  struct unit_parts {
    int first;  // block, or ordinal of the item
    int parts;
    int step;  // ordinals from one part to the next
  };

  __device__ unit_parts parts_of(const work_tile& g) const {
    if (header_.split_tiles != 0) {
      const decode_seq& s = seq_;
      return {s.first_split + g.head * s.row_tiles * s.num_splits + g.row_tile, s.num_splits, s.row_tiles};
    }
    const int first = cta_at(header_.total, header_.num_ctas, g.work_begin + header_.overhead);
    const int last = cta_at(header_.total, header_.num_ctas, g.work_begin + g.work_length - 1);
    return {first, max(last - first, 0) + 1, 1};
  }

  __device__ int slot_of(const work_tile& g) const {
    if (header_.split_tiles != 0) {
      const unit_parts u = parts_of(g);
      return u.first + g.item * u.step;
    }
    return 2 * static_cast<int>(blockIdx.x) + (g.starts ? 1 : 0);
  }

  // Slot of part i. A block's second slot is for the unit that begins in it and goes on.
  __device__ int part_slot(const unit_parts& u, int i) const {
    if (header_.split_tiles != 0) return u.first + i * u.step;
    return 2 * (u.first + i) + (i == 0 ? 1 : 0);
  }

  // Slot of the join of parts begin … end − 1: of its own, unless that is one part.
  __device__ int run_slot(const unit_parts& u, int begin, int end) const {
    if (begin + 1 == end) return part_slot(u, begin);
    return (header_.split_tiles != 0 ? 1 : 2) * header_.num_partials + u.first + begin * u.step;
  }

  // Counts this block's arrival behind all that its threads have written; true in the block that completes `expected`,
  // whose threads then see what the others wrote.
  __device__ bool arrive(std::uint32_t* counter, int expected) {
    __syncthreads();
    if (threadIdx.x == 0) {
      const bool last = device::atomic_add_acq_rel(counter, 1u) == static_cast<std::uint32_t>(expected - 1);
      if (last) *counter = 0;
      *flag_ = last;
    }
    __syncthreads();
    return *flag_ != 0;
  }

  __device__ void combine_if_last(const work_tile& g) {
    const unit_parts u = parts_of(g);
    const bool fixed = header_.split_tiles != 0;
    // Parts are warp_result in runs of combine_fan_in, counted from part −before. In deterministic plans runs are those
    // of the chunks of the whole sequence, or parts are runs themselves.
    const int before =
        header_.split_tiles == decode_leaf_tiles ? seq_.first_tile / decode_leaf_tiles % combine_fan_in : 0;
    const bool one_level = fixed ? header_.split_tiles != decode_leaf_tiles || before + u.parts <= combine_fan_in
                                 : u.parts <= decode_max_flat_splits;
    if (one_level) {
      if (arrive(a_.semaphores + u.first, u.parts)) {
        const auto slot = [&](int i) { return part_slot(u, i); };
        if (u.parts <= 8) {
          combine<2, 8>(g, u.parts, -1, slot);
        } else {
          combine<1, combine_batch>(g, u.parts, -1, slot);
        }
      }
      return;
    }
    const int self = before + (fixed ? g.item : static_cast<int>(blockIdx.x) - u.first);
    const auto begin_of = [&](int run) { return max(run * combine_fan_in - before, 0); };
    const auto end_of = [&](int run) { return min((run + 1) * combine_fan_in - before, u.parts); };
    const int run = self / combine_fan_in;
    const int begin = begin_of(run);
    const int run_parts = end_of(run) - begin;
    if (run_parts > 1) {
      if (!arrive(a_.semaphores + header_.num_partials + u.first + begin * u.step, run_parts)) return;
      combine<1, combine_batch>(g, run_parts, run_slot(u, begin, begin + run_parts),
                                [&](int i) { return part_slot(u, begin + i); });
    }
    const int runs = (before + u.parts + combine_fan_in - 1) / combine_fan_in;
    if (arrive(a_.semaphores + u.first, runs)) {
      combine<1, combine_batch>(g, runs, -1, [&](int i) { return run_slot(u, begin_of(i), end_of(i)); });
    }
  }

  // Joins `count` partials in order of index, into the slot `to` or, if that is negative, into the output. A thread has
  // `Tasks` × `Batch` of them on their way at once; no bit depends on that.
  template <int Tasks, int Batch, class SlotOf>
  __device__ void combine(const work_tile& g, int count, int to, const SlotOf& slot_of_part) {
    constexpr int quads = HeadDim / 4;
    const int num_tasks = num_rows_ * quads;
    for (int first = static_cast<int>(threadIdx.x); first < num_tasks; first += Tasks * S::threads) {
      float m[Tasks];
      float l[Tasks];
      float4 sum[Tasks];
#pragma unroll
      for (int t = 0; t < Tasks; ++t) {
        m[t] = -INFINITY;
        l[t] = 0;
        sum[t] = make_float4(0, 0, 0, 0);
      }
      for (int base = 0; base < count; base += Batch) {
        float2 part[Tasks][Batch];
        float4 o[Tasks][Batch];
#pragma unroll
        for (int i = 0; i < Batch; ++i) {  // all loads of a batch on their way before the first is used
#pragma unroll
          for (int t = 0; t < Tasks; ++t) {
            const int task = first + t * S::threads;
            part[t][i] = make_float2(-INFINITY, 0);
            o[t][i] = make_float4(0, 0, 0, 0);
            if (base + i < count && task < num_tasks) {
              const std::int64_t at =
                  static_cast<std::int64_t>(slot_of_part(base + i)) * decode_tile_rows + task / quads;
              part[t][i] = __ldcg(partial_sum_ + at);
              o[t][i] = __ldcg(reinterpret_cast<const float4*>(partial_out_ + at * HeadDim + task % quads * 4));
            }
          }
        }
#pragma unroll
        for (int t = 0; t < Tasks; ++t) fold_batch<Batch>(part[t], o[t], m[t], l[t], sum[t]);
      }
#pragma unroll
      for (int t = 0; t < Tasks; ++t) {
        const int task = first + t * S::threads;
        if (task < num_tasks) write_combined(g, to, task / quads, task % quads * 4, m[t], l[t], sum[t]);
      }
    }
  }

  // m, l, sum ← that and the parts.
  template <int Batch>
  __device__ void fold_batch(const float2 (&part)[Batch], const float4 (&o)[Batch], float& m, float& l, float4& sum) {
    if (header_.split_tiles != 0) {
      // One after another, as a thread block that does several of them itself.
#pragma unroll
      for (int i = 0; i < Batch; ++i) {
        const fold both(m, part[i].x);
        m = both.max;
        l = both.of(l, part[i].y);
        sum = both.of(sum, o[i]);
      }
      return;
    }
    float top = m;
#pragma unroll
    for (int i = 0; i < Batch; ++i) top = fmaxf(top, part[i].x);
    if (top == -INFINITY) return;
    const float keep = device::exp2_fast(m - top);
    m = top;
    l *= keep;
    sum.x *= keep, sum.y *= keep, sum.z *= keep, sum.w *= keep;
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
      const float weight = device::exp2_fast(part[i].x - m);
      l += part[i].y * weight;
      sum.x += o[i].x * weight;
      sum.y += o[i].y * weight;
      sum.z += o[i].z * weight;
      sum.w += o[i].w * weight;
    }
  }

  __device__ void write_combined(const work_tile& g, int to, int row, int column, float m, float l, const float4& sum) {
    if (to >= 0) {
      const std::int64_t at = static_cast<std::int64_t>(to) * decode_tile_rows + row;
      __stcg(reinterpret_cast<float4*>(partial_out_ + at * HeadDim + column), sum);
      if (column == 0) __stcg(partial_sum_ + at, make_float2(m, l));
      return;
    }
    const int packed = g.row_tile * decode_tile_rows + row;
    const int token = packed / a_.group_size;
    const int head = g.head * a_.group_size + packed - token * a_.group_size;
    const float inverse = finish_row(token, head, m, l, column == 0);
    uint2 value;
    value.x = device::pack<T>(sum.x * inverse, sum.y * inverse);
    value.y = device::pack<T>(sum.z * inverse, sum.w * inverse);
    *reinterpret_cast<uint2*>(static_cast<T*>(a_.out) + (query_start_ + token) * a_.out_token_stride +
                              head * a_.out_head_stride + column) = value;
  }

  // Applies the sink, writes the LSE, returns what the row must be multiplied with.
  __device__ float finish_row(int token, int head, float m, float l, bool writes_lse) const {
    constexpr float ln2 = 0.6931471805599453f;
    constexpr float log2e = 1.4426950408889634f;
    float scale = 1.0f;
    if constexpr (Masked) {
      if (a_.sinks != nullptr) {
        const float sink = a_.sinks[head] * log2e;
        const float top = fmaxf(m, sink);
        if (top != -INFINITY) {
          scale = m == -INFINITY ? 0.0f : device::exp2_fast(m - top);
          l = l * scale + device::exp2_fast(sink - top);
          m = top;
        }
      }
    }
    if (writes_lse && a_.lse != nullptr) {
      a_.lse[static_cast<std::int64_t>(query_start_ + token) * a_.num_q_heads + head] =
          l != 0 ? m * ln2 + logf(l) : -INFINITY;  // NaN stays NaN
    }
    return l != 0 ? scale / l : 0.0f;
  }

  __device__ void store_row(int token, int head, int column, const float4& lo, const float4& hi, float inverse) {
    T* dst =
        static_cast<T*>(a_.out) + (query_start_ + token) * a_.out_token_stride + head * a_.out_head_stride + column;
    uint4 value;
    value.x = device::pack<T>(lo.x * inverse, lo.y * inverse);
    value.y = device::pack<T>(lo.z * inverse, lo.w * inverse);
    value.z = device::pack<T>(hi.x * inverse, hi.y * inverse);
    value.w = device::pack<T>(hi.z * inverse, hi.w * inverse);
    *reinterpret_cast<uint4*>(dst) = value;
  }

  const decode_args& a_;
  std::uint32_t stages_, q_shared_;
  char* shared_;
  float2* sums_;
  int* flag_;
  int lane_, warp_;
  decode_header header_;
  const decode_seq* seqs_;
  float* partial_out_;
  float2* partial_sum_;
  int end_;

  work_tile load_;
  int load_position_, load_index_, load_q_buffer_;
  decode_seq load_seq_, seq_;
  bool load_valid_, load_first_;
  int load_block_, load_slot_;  // of this lane's row of the tile at load_.tile

  int seq_len_, query_len_, query_start_, num_rows_, common_limit_;
  int row_position_[2];
  float slope_[2];
  float max_[2], sum_[2];
  float run_max_, run_sum_, unit_max_, unit_sum_;  // of this thread's row in store_part
  std::uint32_t q_[S::q_in_registers ? k_steps : 1][4];
  float acc_[n_tiles][4];
};

// Two blocks of 128 threads leave room for a small block of another stream's kernel, such as a swap.
template <class T, int HeadDim, int Warps, bool Masked>
__global__ void
#if CUDART_VERSION >= 12040
__maxnreg__(Warps == 4       ? 224
            : HeadDim == 256 ? 255
                             : 128)
#else
__launch_bounds__(32 * Warps, shape<HeadDim, Warps>::ctas_per_sm)
#endif
    decode_kernel(const __grid_constant__ decode_args args) {
  extern __shared__ __align__(128) char shared[];
  worker<T, HeadDim, Warps, Masked>(args, shared).run();
}

template <class T, int HeadDim, int Warps>
[[nodiscard]] constexpr decode_entry make_entry() noexcept {
  using S = shape<HeadDim, Warps>;
  return {decode_kernel<T, HeadDim, Warps, false>, decode_kernel<T, HeadDim, Warps, true>, S::threads, S::shared_bytes,
          S::ctas_per_sm};
}

}  // namespace decode
}  // namespace bifolio::cuda
