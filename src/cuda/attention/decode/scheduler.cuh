// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The device side of the stream-K tile scheduler (plan.hpp is the host's): which KV tiles of which output tiles a CTA
/// processes, and where the partial results of an output tile are. Two policies with one interface: `stream_k` splits
/// an output tile wherever the even shares of the CTAs end; `fixed_split`, for deterministic plans, splits it at fixed
/// positions, so that the combine tree is that of the sequence alone.

#include <cstdint>

#include "cuda/attention/decode/args.hpp"
#include "cuda/attention/decode/metadata.hpp"

namespace bifolio::inline v0_2::cuda::decode {

/// KV tiles of one output tile, for one CTA.
struct work_tile {
  int head;  // KV head
  int row_tile;
  int split;                    // of the output tile, or piece of the CTA's part of it; fixed_split only
  int node;                     // of the piece
  bool ends_part;               // the last piece
  int piece_begin, part_end;    // of parts that are taken whole: in tiles that may be outside tile … tile_end
  int tile, tile_end;           // may be empty
  int work_begin, work_length;  // of the output tile (fixed_split: of the split) in the work range
  bool is_first, is_last;       // has the first and the last KV tile of those
};

/// A place in the CTA's share of the work range. Sequences are read where they are used, which keeps registers free:
/// the first one from shared memory, others from L1.
struct work_cursor {
  int position;
  int seq_index;
  const decode_seq* seq;
};

/// The splits of an output tile, 0 … count − 1 in the order of their KV tiles.
struct output_splits {
  int first;  // CTA, or ordinal of the split
  int count;
  int step;  // ordinals from one split to the next
};

/// What a CTA needs of the plan.
struct decode_cta_plan {
  decode_header header;
  decode_cta cta;
  decode_parts parts;
};

static_assert(sizeof(decode_cta_plan) <= 144);

/// Copies it to shared memory, all of it in one round trip to L2.
template <bool WithParts>
__device__ __forceinline__ void copy_plan(const decode_metadata& metadata, decode_cta_plan* to) {
  constexpr int header_words = sizeof(decode_header) / 4;
  constexpr int cta_words = sizeof(decode_cta) / 4;
  constexpr int words = header_words + cta_words + (WithParts ? sizeof(decode_parts) / 4 : 0);
  static_assert(words <= 128);
  const int word = static_cast<int>(threadIdx.x);
  if (word < words) {
    const void* const from = word < header_words               ? static_cast<const void*>(metadata.header)
                             : word < header_words + cta_words ? metadata.ctas + blockIdx.x
                                                               : static_cast<const void*>(metadata.parts + blockIdx.x);
    const int first = word < header_words               ? 0
                      : word < header_words + cta_words ? header_words
                                                        : header_words + cta_words;
    reinterpret_cast<int*>(to)[word] = static_cast<const int*>(from)[word - first];
  }
  __syncthreads();
}

/// What both policies share.
class scheduler_base {
 public:
  /// `plan`: what copy_plan has put into shared memory.
  __device__ __forceinline__ scheduler_base(const decode_args& args, const decode_cta_plan& plan)
      : a_(args),
        header_(plan.header),
        parts_(plan.parts),
        seqs_(args.metadata.seqs),
        first_{plan.cta.begin, plan.cta.seq_index, &plan.cta.first},
        end_(plan.cta.end) {}

  [[nodiscard]] __device__ __forceinline__ const work_cursor& first() const { return first_; }
  [[nodiscard]] __device__ __forceinline__ bool has_work(const work_cursor& c) const { return c.position < end_; }
  /// Of one of the workspace's ranges of partial results.
  [[nodiscard]] __device__ __forceinline__ int num_partials() const { return header_.num_partials; }

 protected:
  // The CTA's share of an output tile (fixed_split: of a split), from its beginning.
  struct share {
    int index;  // in its sequence
    int begin, end;
  };

  // Takes the share at the cursor and moves the cursor past it, to the next sequence of the list if need be.
  __device__ __forceinline__ share advance(work_cursor& c, work_tile& w) const {
    if (c.position >= c.seq->work_begin + a_.num_kv_heads * c.seq->row_tiles * c.seq->num_splits * c.seq->work_length) {
      c.seq = seqs_ + ++c.seq_index;
    }
    const decode_seq& s = *c.seq;
    share r;
    r.index = (c.position - s.work_begin) / s.work_length;
    w.work_length = s.work_length;
    w.work_begin = s.work_begin + r.index * s.work_length;
    r.begin = c.position - w.work_begin;
    r.end = min(end_ - w.work_begin, s.work_length);
    w.is_first = r.begin == 0;
    w.is_last = r.end == s.work_length;
    c.position = w.work_begin + r.end;
    return r;
  }

  const decode_args& a_;
  const decode_header& header_;
  const decode_parts& parts_;

 private:
  const decode_seq* seqs_;
  work_cursor first_;
  int end_;
};

/// Splits anywhere. A CTA has at most two partial results: its first share may end an output tile that earlier CTAs
/// began, its last may begin one that later CTAs go on with.
class stream_k : public scheduler_base {
 public:
  static constexpr bool has_fixed_tree = false;
  using scheduler_base::scheduler_base;

  /// The work tile at the cursor, which moves on.
  template <bool /*WholeParts*/ = false>
  __device__ __forceinline__ work_tile next(work_cursor& c) const {
    work_tile w;
    const share r = advance(c, w);
    w.head = r.index / c.seq->row_tiles;
    w.row_tile = r.index - w.head * c.seq->row_tiles;
    w.split = 0;
    w.tile = c.seq->first_tile + max(r.begin - header_.overhead, 0);
    w.tile_end = c.seq->first_tile + r.end - header_.overhead;
    return w;
  }

  /// The KV tile before which the accumulators go to the epilogue.
  [[nodiscard]] __device__ __forceinline__ int accumulate_until(const work_tile& w, int /*tile*/) const {
    return w.tile_end;
  }
  /// Whether this CTA has all of the output tile's work.
  [[nodiscard]] __device__ __forceinline__ bool is_whole(const work_tile& w, const decode_seq& /*s*/) const {
    return w.is_first && w.is_last;
  }
  /// Whether the combine learns of the work tile's partial result, and of those before it.
  [[nodiscard]] __device__ __forceinline__ bool arrives(const work_tile& /*w*/) const { return true; }

  [[nodiscard]] __device__ __forceinline__ std::int64_t workspace_partials() const {
    return decode_num_partials(false, header_.num_partials, static_cast<std::int64_t>(gridDim.x));
  }
  [[nodiscard]] __device__ __forceinline__ output_splits splits_of(const work_tile& w, const decode_seq& /*s*/) const {
    const int first = cta_at(w.work_begin + header_.overhead);
    const int last = cta_at(w.work_begin + w.work_length - 1);
    return {first, max(last - first, 0) + 1, 1};
  }
  /// This CTA's split of the output tile.
  [[nodiscard]] __device__ __forceinline__ int own_split(const work_tile& /*w*/, const output_splits& o) const {
    return static_cast<int>(blockIdx.x) - o.first;
  }
  [[nodiscard]] __device__ __forceinline__ int own_partial(const work_tile& w, const decode_seq& /*s*/) const {
    return 2 * static_cast<int>(blockIdx.x) + (w.is_first ? 1 : 0);
  }
  /// A CTA's second partial result is of the output tile that begins in it and goes on.
  [[nodiscard]] __device__ __forceinline__ int split_partial(const output_splits& o, int split) const {
    return 2 * (o.first + split) + (split == 0 ? 1 : 0);
  }
  /// First of the range in which results of the combine's first level are.
  [[nodiscard]] __device__ __forceinline__ int node_partials() const { return 2 * header_.num_partials; }

  /// Splits are combined in nodes of decode_combine_fan_in, the first of which lacks this many.
  [[nodiscard]] __device__ __forceinline__ int missing_splits(const decode_seq& /*s*/) const { return 0; }
  [[nodiscard]] __device__ __forceinline__ bool combines_in_one_level(const output_splits& o, int /*missing*/) const {
    return o.count <= decode_max_flat_splits;
  }
  /// Whether the CTAs of every output tile have one split each and nothing else, and combine together.
  [[nodiscard]] __device__ __forceinline__ bool combines_together() const { return header_.together != 0; }
  [[nodiscard]] __device__ __forceinline__ int patience() const { return header_.patience; }

 private:
  // The last CTA whose even share begins at or before `position`.
  [[nodiscard]] __device__ __forceinline__ int cta_at(int position) const {
    const std::int64_t n = (static_cast<std::int64_t>(position) + 1) * header_.num_ctas;
    const int cta = static_cast<int>((n + header_.total - 1) / header_.total) - 1;
    return cta < header_.num_ctas - 1 ? cta : header_.num_ctas - 1;
  }
};

/// Splits are leaves of the combine tree, or output tiles are not split but cut into parts of whole leaves, which are
/// taken piece by piece.
class fixed_split : public scheduler_base {
 public:
  static constexpr bool has_fixed_tree = true;
  using scheduler_base::scheduler_base;

  /// `WholeParts`: a part of an output tile is one work tile, whose pieces `find_piece` finds.
  template <bool WholeParts = false>
  __device__ __forceinline__ work_tile next(work_cursor& c) const {
    work_tile w;
    const share r = advance(c, w);
    const decode_seq& s = *c.seq;
    if (cuts_parts()) {
      w.head = r.index / s.row_tiles;
      w.row_tile = r.index - w.head * s.row_tiles;
      if constexpr (WholeParts) {
        w.split = 0;
        w.piece_begin = s.first_tile + max(r.begin - header_.overhead, 0);
        w.part_end = s.first_tile + r.end - header_.overhead;
        set_tiles(w, s, w.piece_begin, w.part_end);
      } else {
        take_piece(w, r, c);
      }
      return w;
    }
    const int splits_per_head = s.row_tiles * s.num_splits;
    w.head = r.index / splits_per_head;
    const int rest = r.index - w.head * splits_per_head;
    w.split = rest / s.row_tiles;
    w.row_tile = rest - w.split * s.row_tiles;
    const int split = s.first_tile / header_.split_tiles + w.split;
    w.ends_part = true;
    w.piece_begin = split * header_.split_tiles;
    w.part_end = w.piece_begin + header_.split_tiles;
    set_tiles(w, s, w.piece_begin, w.part_end);
    return w;
  }

  /// Of a part that has been taken whole the piece at w.piece_begin, which moves on. Returns where its tiles end.
  __device__ __forceinline__ int find_piece(work_tile& w, const decode_seq& s) const {
    const int begin = w.piece_begin;
    const bool is_one = !cuts_parts() || is_whole(w, s);
    w.piece_begin = is_one ? w.part_end : decode_piece_end(s.first_tile, begin, w.part_end);
    w.node = begin / decode_node_tiles;
    w.ends_part = w.piece_begin == w.part_end;
    return min(w.piece_begin, w.tile_end);
  }

  /// Several leaves are combined leaf by leaf.
  [[nodiscard]] __device__ __forceinline__ int accumulate_until(const work_tile& w, int tile) const {
    return min(w.tile_end, (tile / decode_leaf_tiles + 1) * decode_leaf_tiles);
  }
  [[nodiscard]] __device__ __forceinline__ bool cuts_parts() const { return header_.split_tiles == decode_root_tiles; }
  [[nodiscard]] __device__ __forceinline__ bool is_whole(const work_tile& w, const decode_seq& s) const {
    return cuts_parts() ? w.is_first && w.is_last : s.num_splits == 1;
  }
  [[nodiscard]] __device__ __forceinline__ bool arrives(const work_tile& w) const { return w.ends_part; }
  /// The CTA's part of an output tile that it shares with others.
  [[nodiscard]] __device__ __forceinline__ const decode_part& part_of(const work_tile& w) const {
    return w.is_first ? parts_.begun : parts_.continued;
  }

  [[nodiscard]] __device__ __forceinline__ std::int64_t workspace_partials() const {
    return decode_num_partials(true, header_.num_partials, static_cast<std::int64_t>(gridDim.x));
  }
  [[nodiscard]] __device__ __forceinline__ output_splits splits_of(const work_tile& w, const decode_seq& s) const {
    return {s.first_split + w.head * s.row_tiles * s.num_splits + w.row_tile, s.num_splits, s.row_tiles};
  }
  [[nodiscard]] __device__ __forceinline__ int own_split(const work_tile& w, const output_splits& /*o*/) const {
    return w.split;
  }
  [[nodiscard]] __device__ __forceinline__ int own_partial(const work_tile& w, const decode_seq& s) const {
    return cuts_parts() ? part_of(w).partial + w.split : split_partial(splits_of(w, s), w.split);
  }
  [[nodiscard]] __device__ __forceinline__ int split_partial(const output_splits& o, int split) const {
    return o.first + split * o.step;
  }
  [[nodiscard]] __device__ __forceinline__ int node_partials() const { return header_.num_partials; }
  /// The CTA's running result of a node (0) or of the root (1).
  [[nodiscard]] __device__ __forceinline__ std::int64_t running_partial(int which) const {
    return std::int64_t{2} * header_.num_partials + 2 * static_cast<int>(blockIdx.x) + which;
  }

  /// Nodes are those of the whole sequence.
  [[nodiscard]] __device__ __forceinline__ int missing_splits(const decode_seq& s) const {
    return s.first_tile / decode_leaf_tiles % decode_combine_fan_in;
  }
  [[nodiscard]] __device__ __forceinline__ bool combines_in_one_level(const output_splits& o, int missing) const {
    return missing + o.count <= decode_combine_fan_in;
  }

 private:
  // The piece at r.begin of the CTA's share of an output tile. The cursor moves on to the next piece.
  __device__ __forceinline__ void take_piece(work_tile& w, const share& r, work_cursor& c) const {
    const decode_seq& s = *c.seq;
    const int part_begin = max(first().position - w.work_begin, 0);
    const int tile = s.first_tile + max(r.begin - header_.overhead, 0);
    const int end = s.first_tile + r.end - header_.overhead;
    w.is_first = part_begin == 0;
    int piece_end = end;
    if (!is_whole(w, s)) {
      const int part_tile = s.first_tile + max(part_begin - header_.overhead, 0);
      piece_end = decode_piece_end(s.first_tile, tile, end);
      w.split = decode_piece_ordinal(s.first_tile, part_tile, tile);
      w.node = tile / decode_node_tiles;
      if (piece_end < end) c.position = w.work_begin + piece_end - s.first_tile + header_.overhead;
    }
    w.ends_part = piece_end == end;
    set_tiles(w, s, tile, piece_end);
  }

  // Leaves out tiles that no row of the row tile attends to: they would change no bit.
  __device__ __forceinline__ void set_tiles(work_tile& w, const decode_seq& s, int begin, int end) const {
    const int first_row = w.row_tile * decode_tile_rows;
    const int last_row = min(first_row + decode_tile_rows, s.query_len * a_.group_size) - 1;
    const int offset = s.seq_len - s.query_len;
    int first = s.first_tile;
    int last = s.first_tile + s.num_tiles;
    if (a_.causal) {
      last = min(last, (max(offset + a_.by_group_size.quotient(last_row) + 1, 0) + decode_tile_tokens - 1) /
                           decode_tile_tokens);
    }
    if (a_.window_left >= 0) {
      first = max(first, (offset + a_.by_group_size.quotient(first_row) - a_.window_left) / decode_tile_tokens);
    }
    w.tile = max(begin, first);
    w.tile_end = max(min(end, last), w.tile);
  }
};

}  // namespace bifolio::inline v0_2::cuda::decode
