// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The device side of the stream-K tile scheduler (plan.hpp is the host's): which KV tiles of which output tiles a CTA
/// processes, and where the partial results of an output tile are. Two policies with one interface: `stream_k` splits
/// an output tile wherever the even shares of the CTAs end; `fixed_split`, for deterministic plans, splits it at fixed
/// positions, so that the combine tree is that of the sequence alone.

#include <cstdint>

#include "cuda/attention/decode/args.hpp"
#include "cuda/attention/decode/plan.hpp"

namespace bifolio::cuda::decode {

/// KV tiles of one output tile, for one CTA.
struct work_tile {
  int head;  // KV head
  int row_tile;
  int split;                    // of the output tile; fixed_split only
  int tile, tile_end;           // may be empty
  int work_begin, work_length;  // of the output tile (fixed_split: of the split) in the work range
  bool is_first, is_last;       // has the first and the last KV tile of those
};

/// A place in the CTA's share of the work range.
struct work_cursor {
  int position;
  int seq_index;
  decode_seq seq;
};

/// The splits of an output tile, 0 … count − 1 in the order of their KV tiles.
struct output_splits {
  int first;  // CTA, or ordinal of the split
  int count;
  int step;  // ordinals from one split to the next
};

/// What both policies share.
class scheduler_base {
 public:
  __device__ __forceinline__ explicit scheduler_base(const decode_args& args)
      : a_(args), header_(*args.metadata.header), seqs_(args.metadata.seqs) {
    const decode_cta mine = args.metadata.ctas[blockIdx.x];
    first_ = {mine.begin, mine.seq_index, mine.first};
    end_ = mine.end;
  }

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
    decode_seq& s = c.seq;
    if (c.position >= s.work_begin + a_.num_kv_heads * s.row_tiles * s.num_splits * s.work_length) {
      s = seqs_[++c.seq_index];
    }
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
  decode_header header_;

 private:
  const decode_seq* seqs_;
  work_cursor first_;
  int end_;
};

/// Splits anywhere. A CTA has at most two partial results: its first share may end an output tile that earlier CTAs
/// began, its last may begin one that later CTAs go on with.
template <bool Masked>
class stream_k : public scheduler_base {
 public:
  static constexpr bool has_fixed_tree = false;
  using scheduler_base::scheduler_base;

  /// The work tile at the cursor, which moves on.
  __device__ __forceinline__ work_tile next(work_cursor& c) const {
    work_tile w;
    const share r = advance(c, w);
    w.head = r.index / c.seq.row_tiles;
    w.row_tile = r.index - w.head * c.seq.row_tiles;
    w.split = 0;
    w.tile = c.seq.first_tile + max(r.begin - header_.overhead, 0);
    w.tile_end = c.seq.first_tile + r.end - header_.overhead;
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

 private:
  // The last CTA whose even share begins at or before `position`.
  [[nodiscard]] __device__ __forceinline__ int cta_at(int position) const {
    const std::int64_t n = (static_cast<std::int64_t>(position) + 1) * header_.num_ctas;
    const int cta = static_cast<int>((n + header_.total - 1) / header_.total) - 1;
    return cta < header_.num_ctas - 1 ? cta : header_.num_ctas - 1;
  }
};

/// Splits at multiples of header.split_tiles, counted from position 0: a leaf, a node or the root of the combine tree.
template <bool Masked>
class fixed_split : public scheduler_base {
 public:
  static constexpr bool has_fixed_tree = true;
  using scheduler_base::scheduler_base;

  __device__ __forceinline__ work_tile next(work_cursor& c) const {
    work_tile w;
    const share r = advance(c, w);
    const decode_seq& s = c.seq;
    const int splits_per_head = s.row_tiles * s.num_splits;
    w.head = r.index / splits_per_head;
    const int rest = r.index - w.head * splits_per_head;
    w.split = rest / s.row_tiles;
    w.row_tile = rest - w.split * s.row_tiles;
    // Tiles that no row of this row tile attends to would change no bit.
    const int split = s.first_tile / header_.split_tiles + w.split;
    const int first_row = w.row_tile * decode_tile_rows;
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
    w.tile = max(split * header_.split_tiles, first);
    w.tile_end = max(min((split + 1) * header_.split_tiles, last), w.tile);
    return w;
  }

  /// Splits of several leaves are folded leaf by leaf.
  [[nodiscard]] __device__ __forceinline__ int accumulate_until(const work_tile& w, int tile) const {
    return folds_leaves() ? min(w.tile_end, (tile / decode_leaf_tiles + 1) * decode_leaf_tiles) : w.tile_end;
  }
  [[nodiscard]] __device__ __forceinline__ bool folds_leaves() const { return header_.split_tiles > decode_leaf_tiles; }
  [[nodiscard]] __device__ __forceinline__ bool is_whole(const work_tile& /*w*/, const decode_seq& s) const {
    return s.num_splits == 1;
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
    return split_partial(splits_of(w, s), w.split);
  }
  [[nodiscard]] __device__ __forceinline__ int split_partial(const output_splits& o, int split) const {
    return o.first + split * o.step;
  }
  [[nodiscard]] __device__ __forceinline__ int node_partials() const { return header_.num_partials; }
  /// The CTA's running result of a node (0) or of the root (1).
  [[nodiscard]] __device__ __forceinline__ std::int64_t running_partial(int which) const {
    return std::int64_t{2} * header_.num_partials + 2 * static_cast<int>(blockIdx.x) + which;
  }

  /// Nodes are those of the whole sequence, or splits are nodes themselves.
  [[nodiscard]] __device__ __forceinline__ int missing_splits(const decode_seq& s) const {
    return header_.split_tiles == decode_leaf_tiles ? s.first_tile / decode_leaf_tiles % decode_combine_fan_in : 0;
  }
  [[nodiscard]] __device__ __forceinline__ bool combines_in_one_level(const output_splits& o, int missing) const {
    return header_.split_tiles != decode_leaf_tiles || missing + o.count <= decode_combine_fan_in;
  }
};

}  // namespace bifolio::cuda::decode
