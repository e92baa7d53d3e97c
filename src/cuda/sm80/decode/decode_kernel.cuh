// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Decode attention on tensor cores over a paged cache. One kernel for MHA, GQA and MQA: the query heads of a KV head
/// (and the few tokens of a speculative step) are the 16 rows of an m16n8k16 product, so K and V are read once whatever
/// the group. Four warps split the 64 keys of a tile; each keeps its own running maximum, sum and output, joined once a
/// segment. Tiles stream through a ring of shared-memory stages by cp.async, across segment borders, so that the memory
/// system never sees where one sequence ends and the next begins. decode_plan.hpp says how work is cut.

#include <cstdint>

#include "cuda/device/mma.cuh"
#include "cuda/sm80/decode/decode_launch.hpp"
#include "cuda/sm80/decode/decode_plan.hpp"

namespace bifolio::cuda {

/// Everything the kernel reads. K and V have equal strides and head_dim contiguous.
struct decode_args {
  const void* q;  // [num_tokens, num_q_heads, head_dim]
  void* out;      // like q
  float* lse;     // [num_tokens, num_q_heads] or null
  const void* k;  // [num_blocks, …] at the strides below
  const void* v;
  const std::int32_t* block_tables;  // [num_seqs, block_table_stride]
  const std::int32_t* words;         // the plan: decode_plan.hpp
  float* workspace;                  // [slots, 16, head_dim] outputs, then [slots, 16, 2] maxima (base 2) and sums
  std::uint32_t* arrivals;           // [2, num_slots], zero between launches
  const float* alibi_slopes;         // [num_q_heads] or null
  const float* sinks;                // [num_q_heads] or null
  std::int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride;  // elements
  std::int64_t block_stride, head_stride, token_stride;                           // elements
  std::int64_t block_table_stride;
  std::int32_t num_q_heads, num_kv_heads, group_size, block_size;
  std::int32_t window_left, window_right;  // < 0: none
  bool causal;
  float scale;
  float soft_cap;  // 0: none
};

namespace decode {

inline constexpr int num_warps = 4;
inline constexpr int num_threads = 32 * num_warps;
inline constexpr int merge_fan = 16;   // more partials than 1.5 × this are merged in two levels
inline constexpr int merge_batch = 8;  // partials that a thread has on their way at once

template <int HeadDim>
struct shape {
  static constexpr int stages = HeadDim == 64 ? 6 : 3;
  static constexpr int ctas_per_sm = HeadDim == 256 ? 1 : 2;
  static constexpr int chunks = HeadDim / 8;         // of 16 bytes in a row
  static constexpr int rows_per_pass = 32 / chunks;  // of one warp
  static constexpr int passes = decode_tile_tokens / (num_warps * rows_per_pass);
  static constexpr int tile_bytes = decode_tile_tokens * HeadDim * 2;
  static constexpr int stage_bytes = 2 * tile_bytes;
  static constexpr int q_bytes = decode_tile_rows * HeadDim * 2;
  static_assert(stage_bytes == num_warps * decode_tile_rows * HeadDim * 4, "a stage holds the outputs of all warps");
  static constexpr int sums_bytes = num_warps * decode_tile_rows * 8;
  static constexpr int shared_bytes = stages * (stage_bytes + q_bytes) + sums_bytes + 16;
};

/// The part of one unit that this thread block does.
struct segment {
  int head;  // KV head
  int row_tile;
  int chunk;
  int tile, tile_end;
  int unit_start, unit_length;  // on the line
  bool starts, ends;            // holds the unit's first and last tile
};

/// The last block whose raw cut is <= position.
__device__ __forceinline__ int block_at(int total, int num_ctas, int position) {
  const std::int64_t n = (static_cast<std::int64_t>(position) + 1) * num_ctas;
  const int block = static_cast<int>((n + total - 1) / total) - 1;
  return block < num_ctas - 1 ? block : num_ctas - 1;
}

/// Takes the segment at `position` (< end) and moves `position` behind it, to the next sequence of the list if need be.
__device__ __forceinline__ segment next_segment(const decode_seq* seqs, int num_kv_heads, bool chunked, int& position,
                                                int end, int& index, decode_seq& s) {
  if (position >= s.start + num_kv_heads * s.row_tiles * s.num_chunks * s.unit_length) s = seqs[++index];
  segment g;
  const int unit = (position - s.start) / s.unit_length;
  g.unit_length = s.unit_length;
  g.unit_start = s.start + unit * s.unit_length;
  const int in_head = s.row_tiles * s.num_chunks;
  g.head = unit / in_head;
  const int rest = unit - g.head * in_head;
  g.chunk = rest / s.row_tiles;
  g.row_tile = rest - g.chunk * s.row_tiles;
  const int x0 = position - g.unit_start;
  const int x1 = min(end - g.unit_start, s.unit_length);
  g.starts = x0 == 0;
  g.ends = x1 == s.unit_length;
  if (chunked) {
    const int last = s.first_tile + s.num_tiles;
    const int first_chunk = s.first_tile / decode_chunk_tiles;
    g.tile = s.num_chunks == 1 ? s.first_tile : max((first_chunk + g.chunk) * decode_chunk_tiles, s.first_tile);
    g.tile_end = s.num_chunks == 1 ? last : min((first_chunk + g.chunk + 1) * decode_chunk_tiles, last);
  } else {
    g.tile = s.first_tile + max(x0 - decode_unit_charge, 0);
    g.tile_end = s.first_tile + x1 - decode_unit_charge;
  }
  position = g.unit_start + x1;
  return g;
}

template <class T, int HeadDim, bool Features>
class worker {
  using S = shape<HeadDim>;
  using traits = device::half_traits<T>;
  static constexpr int k_steps = HeadDim / 16;
  static constexpr int n_tiles = HeadDim / 8;

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
    header_ = *reinterpret_cast<const decode_header*>(a_.words);
    const decode_cta mine = reinterpret_cast<const decode_cta*>(a_.words + sizeof(decode_header) / 4)[blockIdx.x];
    seqs_ = reinterpret_cast<const decode_seq*>(a_.words + decode_seqs_offset(static_cast<int>(gridDim.x)));
    partial_out_ = a_.workspace;
    const std::int64_t slots = static_cast<std::int64_t>(header_.chunked != 0 ? 2 : 3) * header_.num_slots;
    partial_sum_ = reinterpret_cast<float2*>(a_.workspace + slots * decode_tile_rows * HeadDim);
    if (mine.position >= mine.end) return;
    end_ = mine.end;
    device::grid_dependency_wait();

    load_position_ = mine.position;
    load_index_ = mine.index;
    load_seq_ = mine.first;
    open_load_segment();
#pragma unroll
    for (int stage = 0; stage < S::stages - 1; ++stage) load_tile(stage);

    seq_ = mine.first;
    int position = mine.position;
    int index = mine.index;
    int stage = 0;
    while (position < end_) {
      segment g = next_segment(seqs_, a_.num_kv_heads, header_.chunked != 0, position, end_, index, seq_);
      begin_segment(g);
      for (int tile = g.tile; tile < g.tile_end; ++tile) {
        device::copy_async_wait<S::stages - 2>();
        __syncthreads();
        load_tile(stage == 0 ? S::stages - 1 : stage - 1);
        if (tile == g.tile) load_q(stage);
        compute_tile(stage, tile);
        stage = stage + 1 == S::stages ? 0 : stage + 1;
      }
      end_segment(g, stage == 0 ? S::stages - 1 : stage - 1);
    }
    device::copy_async_wait<0>();
  }

 private:
  // ---- loading -------------------------------------------------------------------------------------------------

  // Opens the next segment that has tiles; afterwards load_valid_ says whether there is one.
  __device__ void open_load_segment() {
    load_valid_ = false;
    while (load_position_ < end_) {
      load_ = next_segment(seqs_, a_.num_kv_heads, header_.chunked != 0, load_position_, end_, load_index_, load_seq_);
      if (load_.tile < load_.tile_end) {
        load_valid_ = true;
        load_first_ = true;
        look_up();
        return;
      }
    }
  }

  // Row r of the packed tile is token r / group_size, head r % group_size. Queries travel with their segment's first
  // tile, in the buffer of that tile's stage.
  __device__ void load_queries(const segment& g, int stage) {
    const decode_seq& s = load_seq_;
    const int rows = s.query_len * a_.group_size;
    for (int i = static_cast<int>(threadIdx.x); i < decode_tile_rows * S::chunks; i += num_threads) {
      const int r = i / S::chunks;
      const int chunk = i % S::chunks;
      const int row = g.row_tile * decode_tile_rows + r;
      const bool valid = row < rows;
      const int token = valid ? row / a_.group_size : 0;
      const int head = g.head * a_.group_size + (valid ? row - token * a_.group_size : 0);
      const T* src = static_cast<const T*>(a_.q) + (s.query_start + token) * a_.q_token_stride +
                     head * a_.q_head_stride + chunk * 8;
      device::copy_async_16(q_shared_ + stage * S::q_bytes + r * HeadDim * 2 + ((chunk ^ (r & 7)) << 4), src, valid);
    }
  }

  // Lanes 0 … 15 find where the warp's 16 rows of the tile at load_.tile lie; −1 for a row that must not be read.
  __device__ void look_up() {
    const int l = lane_ & 15;
    const int row = ((l / S::rows_per_pass) * num_warps + warp_) * S::rows_per_pass + l % S::rows_per_pass;
    const int position = load_.tile * decode_tile_tokens + row;
    row_offset_ = -1;
    // Blocks left of every row's window may have been given back: their table entries are not read either.
    const int first = Features && a_.window_left >= 0 ? load_seq_.seq_len - load_seq_.query_len - a_.window_left : 0;
    if (position >= first && position < load_seq_.seq_len) {
      const unsigned block = static_cast<unsigned>(position) / static_cast<unsigned>(a_.block_size);
      const int id = __ldg(a_.block_tables + load_seq_.row * a_.block_table_stride + block);
      row_offset_ = id * a_.block_stride + (position - static_cast<int>(block) * a_.block_size) * a_.token_stride +
                    load_.head * a_.head_stride;
    }
  }

  // Requests the tile that look_up found and looks up the one after it. Always commits a group, empty at the end.
  __device__ void load_tile(int stage) {
    if (load_valid_) {
      if (load_first_) load_queries(load_, stage);
      load_first_ = false;
      const std::uint32_t base = stages_ + stage * S::stage_bytes;
      const int chunk = lane_ % S::chunks;
#pragma unroll
      for (int pass = 0; pass < S::passes; ++pass) {
        const std::int64_t offset = __shfl_sync(0xffffffffu, row_offset_, pass * S::rows_per_pass + lane_ / S::chunks);
        const int row = (pass * num_warps + warp_) * S::rows_per_pass + lane_ / S::chunks;
        const std::uint32_t dst = base + row * HeadDim * 2 + ((chunk ^ (row & 7)) << 4);
        const bool valid = offset >= 0;
        const std::int64_t element = valid ? offset + chunk * 8 : 0;
        device::copy_async_16(dst, static_cast<const T*>(a_.k) + element, valid);
        device::copy_async_16(dst + S::tile_bytes, static_cast<const T*>(a_.v) + element, valid);
      }
      if (++load_.tile < load_.tile_end) {
        look_up();
      } else {
        open_load_segment();
      }
    }
    device::copy_async_commit();
  }

  // ---- computing -----------------------------------------------------------------------------------------------

  __device__ void begin_segment(const segment& g) {
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
      max_[i] = -INFINITY;
      sum_[i] = 0;
      const int row = g.row_tile * decode_tile_rows + lane_ / 4 + 8 * i;
      const int token = row / a_.group_size;
      row_position_[i] = seq_len_ - query_len_ + token;
      if constexpr (Features) {
        const int head = g.head * a_.group_size + row - token * a_.group_size;
        slope_[i] = a_.alibi_slopes != nullptr && token < query_len_ ? a_.alibi_slopes[head] : 0.0f;
      }
    }
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_[n][e] = 0;
  }

  __device__ void load_q(int stage) {
    const int row = (lane_ & 7) + ((lane_ >> 3) & 1) * 8;
    const std::uint32_t base = q_shared_ + stage * S::q_bytes + row * HeadDim * 2;
#pragma unroll
    for (int kk = 0; kk < k_steps; ++kk) {
      device::load_matrix_x4(q_[kk], base + (((2 * kk + (lane_ >> 4)) ^ (row & 7)) << 4));
    }
  }

  __device__ bool visible(int key, int i) const {
    bool ok = key < seq_len_ && (!a_.causal || key <= row_position_[i]);
    if constexpr (Features) {
      ok = ok && (a_.window_left < 0 || key >= row_position_[i] - a_.window_left) &&
           (a_.window_right < 0 || key <= row_position_[i] + a_.window_right);
    }
    return ok;
  }

  // Scores of this warp's 16 keys, softmax against the running maximum, and their share of the output.
  __device__ void compute_tile(int stage, int tile) {
    const std::uint32_t k_base = stages_ + stage * S::stage_bytes;
    float s[2][4] = {};
    {
      const int row = warp_ * 16 + (lane_ & 7) + ((lane_ >> 4) & 1) * 8;
      const std::uint32_t row_base = k_base + row * HeadDim * 2;
#pragma unroll
      for (int kk = 0; kk < k_steps; ++kk) {
        std::uint32_t b[4];
        device::load_matrix_x4(b, row_base + (((2 * kk + ((lane_ >> 3) & 1)) ^ (row & 7)) << 4));
        traits::mma(s[0], q_[kk], b[0], b[1]);
        traits::mma(s[1], q_[kk], b[2], b[3]);
      }
    }

    constexpr float log2e = 1.4426950408889634f;
    const int first_key = tile * decode_tile_tokens + warp_ * 16;
    if constexpr (Features) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
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
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] *= scale;
      if (first_key + 16 > common_limit_) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
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
      float m = fmaxf(fmaxf(s[0][2 * i], s[0][2 * i + 1]), fmaxf(s[1][2 * i], s[1][2 * i + 1]));
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
    std::uint32_t p[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float m = max_[i] == -INFINITY ? 0.0f : max_[i];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float p0 = device::exp2_fast(s[n][2 * i] - m);
        const float p1 = device::exp2_fast(s[n][2 * i + 1] - m);
        sum_[i] += p0 + p1;
        p[2 * n + i] = traits::pack(p0, p1);
      }
    }

    {
      const int row = warp_ * 16 + (lane_ & 7) + ((lane_ >> 3) & 1) * 8;
      const std::uint32_t row_base = k_base + S::tile_bytes + row * HeadDim * 2;
#pragma unroll
      for (int j = 0; j < k_steps; ++j) {
        std::uint32_t b[4];
        device::load_matrix_x4_trans(b, row_base + (((2 * j + (lane_ >> 4)) ^ (row & 7)) << 4));
        traits::mma(acc_[2 * j], p, b[0], b[1]);
        traits::mma(acc_[2 * j + 1], p, b[2], b[3]);
      }
    }
  }

  // ---- joining -------------------------------------------------------------------------------------------------

  // Where (row, column) of a warp's output lies in the stage that the segment's last tile has left free.
  [[nodiscard]] __device__ float* joined(int stage, int warp, int row, int column) const {
    return reinterpret_cast<float*>(shared_ + stage * S::stage_bytes) + (warp * decode_tile_rows + row) * HeadDim +
           (column ^ ((row & 7) * 8));
  }

  // Joins the four warps and writes the segment's result: to the output if the unit is whole, else to workspace.
  __device__ void end_segment(const segment& g, int stage) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum_[i] += __shfl_xor_sync(0xffffffffu, sum_[i], 1);
      sum_[i] += __shfl_xor_sync(0xffffffffu, sum_[i], 2);
      if ((lane_ & 3) == 0) sums_[warp_ * decode_tile_rows + lane_ / 4 + 8 * i] = make_float2(max_[i], sum_[i]);
    }
    __syncthreads();  // also: every warp has read the last tile
    const bool any = g.tile < g.tile_end;
    if (any) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = lane_ / 4 + 8 * i;
        float m = -INFINITY;
#pragma unroll
        for (int w = 0; w < num_warps; ++w) m = fmaxf(m, sums_[w * decode_tile_rows + row].x);
        const float weight = max_[i] == -INFINITY ? 0.0f : device::exp2_fast(max_[i] - m);
        if (row < num_rows_) {
#pragma unroll
          for (int n = 0; n < n_tiles; ++n) {
            *reinterpret_cast<float2*>(joined(stage, warp_, row, n * 8 + (lane_ & 3) * 2)) =
                make_float2(acc_[n][2 * i] * weight, acc_[n][2 * i + 1] * weight);
          }
        }
      }
    }

    // From here a thread has one row and every eighth run of 8 columns.
    const int row = static_cast<int>(threadIdx.x) / 8;
    float m = -INFINITY;
#pragma unroll
    for (int w = 0; w < num_warps; ++w) m = fmaxf(m, sums_[w * decode_tile_rows + row].x);
    float l = 0;
#pragma unroll
    for (int w = 0; w < num_warps; ++w) {
      const float2 part = sums_[w * decode_tile_rows + row];
      l += part.x == -INFINITY ? 0.0f : part.y * device::exp2_fast(part.x - m);
    }
    const bool whole = header_.chunked == 0 ? g.starts && g.ends : seq_.num_chunks == 1;
    const int slot = whole ? 0 : slot_of(g);
    const int packed = g.row_tile * decode_tile_rows + row;
    const int token = packed / a_.group_size;
    const int head = g.head * a_.group_size + packed - token * a_.group_size;
    __syncthreads();
    if (row < num_rows_) {
      const bool first = (threadIdx.x & 7) == 0;
      const float inverse = whole ? finish_row(token, head, m, l, first) : 0;
#pragma unroll
      for (int part = 0; part < HeadDim / 64; ++part) {
        const int column = part * 64 + (static_cast<int>(threadIdx.x) & 7) * 8;
        float4 lo = make_float4(0, 0, 0, 0);
        float4 hi = lo;
        if (any) {
#pragma unroll
          for (int w = 0; w < num_warps; ++w) {
            const float4 a = *reinterpret_cast<const float4*>(joined(stage, w, row, column));
            const float4 b = *reinterpret_cast<const float4*>(joined(stage, w, row, column) + 4);
            lo.x += a.x, lo.y += a.y, lo.z += a.z, lo.w += a.w;
            hi.x += b.x, hi.y += b.y, hi.z += b.z, hi.w += b.w;
          }
        }
        if (whole) {
          store_row(token, head, column, lo, hi, inverse);
        } else {
          float* dst = partial_out_ + (static_cast<std::int64_t>(slot) * decode_tile_rows + row) * HeadDim + column;
          __stcg(reinterpret_cast<float4*>(dst), lo);
          __stcg(reinterpret_cast<float4*>(dst + 4), hi);
        }
      }
      if (!whole && first) __stcg(partial_sum_ + slot * decode_tile_rows + row, make_float2(m, l));
    }
    if (whole) {
      __syncthreads();  // the stage and the sums are written again
    } else {
      merge_if_last(g);
    }
  }

  // A unit's partials, by index 0 … parts − 1 in the order of their tiles.
  struct unit_parts {
    int first;  // block, or unit ordinal if chunked
    int parts;
    int step;  // ordinals from one chunk to the next
  };

  __device__ unit_parts parts_of(const segment& g) const {
    if (header_.chunked != 0) {
      const decode_seq& s = seq_;
      return {s.first_unit + g.head * s.row_tiles * s.num_chunks + g.row_tile, s.num_chunks, s.row_tiles};
    }
    const int first = block_at(header_.total, header_.num_ctas, g.unit_start + decode_unit_charge);
    const int last = block_at(header_.total, header_.num_ctas, g.unit_start + g.unit_length - 1);
    return {first, max(last - first, 0) + 1, 1};
  }

  __device__ int slot_of(const segment& g) const {
    if (header_.chunked != 0) {
      const unit_parts u = parts_of(g);
      return u.first + g.chunk * u.step;
    }
    return 2 * static_cast<int>(blockIdx.x) + (g.starts ? 1 : 0);
  }

  // Slot of part i. A block's second slot is for the unit that begins in it and goes on.
  __device__ int part_slot(const unit_parts& u, int i) const {
    if (header_.chunked != 0) return u.first + i * u.step;
    return 2 * (u.first + i) + (i == 0 ? 1 : 0);
  }

  // Slot of the join of parts run … run + merge_fan − 1: of its own, unless that is one part.
  __device__ int run_slot(const unit_parts& u, int run) const {
    if (run + 1 == u.parts) return part_slot(u, run);
    return (header_.chunked != 0 ? 1 : 2) * header_.num_slots + u.first + run * u.step;
  }

  // Counts this block's arrival; true in the block that completes `expected`.
  __device__ bool arrive(std::uint32_t* counter, int expected) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      const bool last = atomicAdd(counter, 1u) == static_cast<std::uint32_t>(expected - 1);
      if (last) *counter = 0;
      *flag_ = last;
    }
    __syncthreads();
    const bool last = *flag_ != 0;
    if (last) __threadfence();
    return last;
  }

  __device__ void merge_if_last(const segment& g) {
    const unit_parts u = parts_of(g);
    const int self = header_.chunked != 0 ? g.chunk : static_cast<int>(blockIdx.x) - u.first;
    if (u.parts <= merge_fan + merge_fan / 2) {
      if (arrive(a_.arrivals + u.first, u.parts)) {
        merge(g, u.parts, -1, [&](int i) { return part_slot(u, i); });
      }
      return;
    }
    const int run = self / merge_fan * merge_fan;
    const int run_parts = min(merge_fan, u.parts - run);
    if (run_parts > 1) {
      if (!arrive(a_.arrivals + header_.num_slots + u.first + run * u.step, run_parts)) return;
      merge(g, run_parts, run_slot(u, run), [&](int i) { return part_slot(u, run + i); });
    }
    const int runs = (u.parts + merge_fan - 1) / merge_fan;
    if (arrive(a_.arrivals + u.first, runs)) {
      merge(g, runs, -1, [&](int i) { return run_slot(u, i * merge_fan); });
    }
  }

  // Joins `count` partials in order of index, into the slot `to` or, if that is negative, into the output.
  template <class SlotOf>
  __device__ void merge(const segment& g, int count, int to, const SlotOf& slot_of_part) {
    constexpr int quads = HeadDim / 4;
    for (int task = static_cast<int>(threadIdx.x); task < num_rows_ * quads; task += num_threads) {
      const int row = task / quads;
      const int column = task % quads * 4;
      float m = -INFINITY;
      float l = 0;
      float4 sum = make_float4(0, 0, 0, 0);
      for (int base = 0; base < count; base += merge_batch) {
        float2 part[merge_batch];
        float4 o[merge_batch];
#pragma unroll
        for (int i = 0; i < merge_batch; ++i) {  // all loads of a batch on their way before the first is used
          part[i] = make_float2(-INFINITY, 0);
          o[i] = make_float4(0, 0, 0, 0);
          if (base + i < count) {
            const std::int64_t at = static_cast<std::int64_t>(slot_of_part(base + i)) * decode_tile_rows + row;
            part[i] = __ldcg(partial_sum_ + at);
            o[i] = __ldcg(reinterpret_cast<const float4*>(partial_out_ + at * HeadDim + column));
          }
        }
        float top = m;
#pragma unroll
        for (int i = 0; i < merge_batch; ++i) top = fmaxf(top, part[i].x);
        if (top == -INFINITY) continue;
        const float keep = device::exp2_fast(m - top);
        m = top;
        l *= keep;
        sum.x *= keep, sum.y *= keep, sum.z *= keep, sum.w *= keep;
#pragma unroll
        for (int i = 0; i < merge_batch; ++i) {
          const float weight = device::exp2_fast(part[i].x - m);
          l += part[i].y * weight;
          sum.x += o[i].x * weight;
          sum.y += o[i].y * weight;
          sum.z += o[i].z * weight;
          sum.w += o[i].w * weight;
        }
      }
      if (to >= 0) {
        __stcg(reinterpret_cast<float4*>(partial_out_ +
                                         (static_cast<std::int64_t>(to) * decode_tile_rows + row) * HeadDim + column),
               sum);
        if (column == 0) __stcg(partial_sum_ + to * decode_tile_rows + row, make_float2(m, l));
        continue;
      }
      const int packed = g.row_tile * decode_tile_rows + row;
      const int token = packed / a_.group_size;
      const int head = g.head * a_.group_size + packed - token * a_.group_size;
      const float inverse = finish_row(token, head, m, l, column == 0);
      uint2 value;
      value.x = traits::pack(sum.x * inverse, sum.y * inverse);
      value.y = traits::pack(sum.z * inverse, sum.w * inverse);
      *reinterpret_cast<uint2*>(static_cast<T*>(a_.out) + (query_start_ + token) * a_.out_token_stride +
                                head * a_.out_head_stride + column) = value;
    }
  }

  // Applies the sink, writes the LSE, returns what the row must be multiplied with.
  __device__ float finish_row(int token, int head, float m, float l, bool writes_lse) const {
    constexpr float ln2 = 0.6931471805599453f;
    constexpr float log2e = 1.4426950408889634f;
    float scale = 1.0f;
    if constexpr (Features) {
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
          l > 0 ? m * ln2 + logf(l) : -INFINITY;
    }
    return l > 0 ? scale / l : 0.0f;
  }

  __device__ void store_row(int token, int head, int column, const float4& lo, const float4& hi, float inverse) {
    T* dst =
        static_cast<T*>(a_.out) + (query_start_ + token) * a_.out_token_stride + head * a_.out_head_stride + column;
    uint4 value;
    value.x = traits::pack(lo.x * inverse, lo.y * inverse);
    value.y = traits::pack(lo.z * inverse, lo.w * inverse);
    value.z = traits::pack(hi.x * inverse, hi.y * inverse);
    value.w = traits::pack(hi.z * inverse, hi.w * inverse);
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

  segment load_;
  int load_position_, load_index_;
  decode_seq load_seq_, seq_;
  bool load_valid_, load_first_;
  std::int64_t row_offset_;

  int seq_len_, query_len_, query_start_, num_rows_, common_limit_;
  int row_position_[2];
  float slope_[2];
  float max_[2], sum_[2];
  std::uint32_t q_[k_steps][4];
  float acc_[n_tiles][4];
};

template <class T, int HeadDim, bool Features>
__global__ void __launch_bounds__(num_threads, shape<HeadDim>::ctas_per_sm)
    decode_kernel(const __grid_constant__ decode_args args) {
  extern __shared__ __align__(128) char shared[];
  worker<T, HeadDim, Features>(args, shared).run();
}

template <class T, int HeadDim>
[[nodiscard]] constexpr decode_entry make_entry() noexcept {
  using S = shape<HeadDim>;
  return {decode_kernel<T, HeadDim, false>, decode_kernel<T, HeadDim, true>, S::shared_bytes, S::ctas_per_sm};
}

}  // namespace decode
}  // namespace bifolio::cuda
