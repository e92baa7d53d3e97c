// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of one work item: over the positions of K and V in KV tiles, through the block table; all KV heads of a
/// tile, then the next tile. One *iteration* processes one tile of one KV head. The mainloop prefetches what later
/// iterations read, begins and ends splits, combines their partial results and writes the rows. How a tile is computed
/// is up to the derived class: vectors.hpp, tiles.hpp.

#include "cpu/kernels/attention/codes.hpp"
#include "cpu/kernels/attention/kernels.hpp"
#include "cpu/kernels/attention/micro.hpp"
#include "cpu/kernels/attention/prefetch_queue.hpp"
#include "cpu/kernels/attention/rows.hpp"
#include "cpu/kernels/simd/simd.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

/// Where the keys of one KV tile are, without the head: element offsets from the start of the K and V planes. Entries
/// outside [begin, end) are not set.
struct kv_tile_offsets {
  std::int64_t first = 0;  // position of the tile's first key
  int begin = 0;           // first key visible to some row of the item, relative to `first`
  int end = 0;
  bool ends_split = false;     // it is the item's last tile of its split
  bool uniform[tile_vectors];  // the keys of one vector are all valid and in one block: one stride between them
  std::int64_t k[tile_keys];
  std::int64_t v[tile_keys];
  // Of planes with tails: bytes from the start of the plane to the scales, without the head.
  std::int64_t k_tail[tile_keys];
  std::int64_t v_tail[tile_keys];
};

/// The mainloop over one item. `Key` is the KV cache's element. `Self` derives from this and has
///   pack_queries(): packs the item's queries into scratch;
///   clear(): resets the states of all rows, in its own form, to those of no key;
///   process_tile(tile, head): adds one KV tile of one head to them;
///   partial_of(head, row): → the row's state of the split in the form of partial results;
///   order(a, b): puts 2·lanes dims of such a state in order;
///   polls_per_tile(tile): → about how often `process_tile` polls `prefetcher_`.
template <class Key, class Self>
class mainloop {
 protected:
  /// Planes of 8-bit codes are read as elements of `Key`; scales come later.
  static constexpr bool widens_codes = __is_same(Key, bfloat16);

 public:
  mainloop(const attention_args& args, const attention_item& item, const attention_scratch& scratch) noexcept
      : args_(args),
        item_(item),
        scratch_(scratch),
        qk_padded_(padded_dims(args.qk_head_dim)),
        padded_(padded_dims(args.v_head_dim)),
        dims_((args.v_head_dim + 2 * lanes - 1) / (2 * lanes) * (2 * lanes)),
        stride_(partial_stride(args.v_head_dim)),
        head_rows_(item.num_tokens * args.group_size),
        num_heads_(item.kv_head_end - item.kv_head_begin),
        k_widened_(widens_codes && args.is_coded && size_of(args.k_code.type) == 1),
        v_widened_(widens_codes && args.is_coded && size_of(args.v_code.type) == 1),
        k_contiguous_(!k_widened_ && (widens_codes || !args.is_coded) && has_runs(args.k_strides, args.qk_head_dim)),
        v_contiguous_(!v_widened_ && (widens_codes || !args.is_coded) && has_runs(args.v_strides, args.v_head_dim)),
        k_pieces_(!k_widened_ && (widens_codes || !args.is_coded) && has_pieces(args.k_strides, args.qk_head_dim)),
        v_columns_(!v_widened_ && (widens_codes || !args.is_coded) && args.v_strides.token == 1 &&
                   args.v_strides.chunk >= args.v_head_dim),
        v_in_k_(args.v == args.k),
        whole_tokens_(num_heads_ > 1 && has_whole_tokens(args.k_strides, args.qk_head_dim) &&
                      has_whole_tokens(args.v_strides, args.v_head_dim)),
        k_tails_(k_widened_ && args.k_code.tail_floats > 0),
        v_tails_(v_widened_ && args.v_code.tail_floats > 0),
        k_zeros_(k_tails_ && args.k_code.tail_floats > 1),
        v_zeros_(v_tails_ && args.v_code.tail_floats > 1),
        visible_(visible_to(item)) {}

  void run() noexcept {
    self().pack_queries();
    run_tiles();
    if (item_.partials == nullptr) write_rows(scratch_.totals);
  }

  /// Combines the splits of each row in order of position, after all items of these rows have run.
  void combine_items() noexcept {
    if (visible_.begin < visible_.end) combine_splits();
    write_rows(scratch_.totals);
  }

 protected:
  [[nodiscard]] std::int64_t num_rows() const noexcept { return static_cast<std::int64_t>(num_heads_) * head_rows_; }
  [[nodiscard]] std::int64_t first_split() const noexcept { return visible_.begin / split_keys; }

  // The positions that some token of an item attends to.
  [[nodiscard]] visible_range visible_to(const attention_item& item) const noexcept {
    return args_.window.of_run(item.first_position, item.first_position + item.num_tokens - 1, item.seq_len);
  }
  [[nodiscard]] visible_range range_of_token(int token) const noexcept {
    return args_.window.of(item_.first_position + token, item_.seq_len);
  }
  [[nodiscard]] visible_range range_of_row(int row) const noexcept { return range_of_token(row / args_.group_size); }

  [[nodiscard]] float* state_of(float* base, int head, int row) const noexcept {
    return base + (static_cast<std::int64_t>(head) * head_rows_ + row) * stride_;
  }
  static BIFOLIO_INLINE float& maximum_of(float* state, int padded) noexcept { return state[padded]; }
  static BIFOLIO_INLINE float& sum_of(float* state, int padded) noexcept { return state[padded + 1]; }

  [[nodiscard]] int query_head(int head, int row) const noexcept {
    return (item_.kv_head_begin + head) * args_.group_size + row % args_.group_size;
  }
  [[nodiscard]] std::int64_t query_offset(int head, int row) const noexcept {
    return token_of(row) * args_.q_token_stride + query_head(head, row) * args_.q_head_stride;
  }
  [[nodiscard]] std::int64_t token_of(int row) const noexcept { return item_.first_token + row / args_.group_size; }

  static BIFOLIO_INLINE visible_range clip(visible_range range, std::int64_t first) noexcept {
    std::int64_t begin = range.begin - first;
    std::int64_t end = range.end - first;
    begin = begin < 0 ? 0 : begin;
    end = end > tile_keys ? tile_keys : end;
    return {begin, end};
  }

  static BIFOLIO_INLINE bool has_runs(const kv_strides& strides, int head_dim) noexcept {
    return strides.dim == 1 && strides.chunk >= head_dim;
  }

  // Whether a token's heads are adjacent and its neighbour is not: nhd, or blocks of one token.
  [[nodiscard]] bool has_whole_tokens(const kv_strides& strides, int head_dim) const noexcept {
    return has_runs(strides, head_dim) && strides.head == head_dim &&
           (strides.token != head_dim || args_.block_size == 1);
  }

  // x_split's K: pieces of 16 bytes, those of neighbouring tokens side by side.
  static constexpr int piece_dims = 16 / static_cast<int>(sizeof(Key));
  static BIFOLIO_INLINE bool has_pieces(const kv_strides& strides, int head_dim) noexcept {
    return strides.dim == 1 && strides.chunk == piece_dims && strides.token == piece_dims && head_dim % piece_dims == 0;
  }

  // K of one of the tile's keys in a cache whose rows cannot be read in place.
  void stage_key(const kv_tile_offsets& tile, int head, int key, Key* to) const noexcept;

  // K of keys [begin, end) of the tile, which is stored in codes, as elements: key `begin + i` to `to + i · stride`.
  void widen_keys(const kv_tile_offsets& tile, int head, int begin, int end, Key* to, std::int64_t stride) noexcept;

  // The scale that all elements of K or V of a head have in common.
  [[nodiscard]] float k_scale(int head) const noexcept { return k_widened_ ? static_scale(args_.k_code, head) : 1.0f; }
  [[nodiscard]] float v_scale(int head) const noexcept { return v_widened_ ? static_scale(args_.v_code, head) : 1.0f; }

  // The scales of the tile's keys, of planes that have them per token.
  void read_k_scales(const kv_tile_offsets& tile, int head, tile_scales& to) const noexcept {
    read_scales(args_.k_code, args_.k, (item_.kv_head_begin + head) * args_.k_code.tail.head, tile.k_tail, tile.uniform,
                tile.begin, tile.end, to);
  }
  void read_v_scales(const kv_tile_offsets& tile, int head, tile_scales& to) const noexcept {
    read_scales(args_.v_code, args_.v, (item_.kv_head_begin + head) * args_.v_code.tail.head, tile.v_tail, tile.uniform,
                tile.begin, tile.end, to);
  }

  // One row of K or V from any layout.
  static void stage_row(const Key* from, const kv_strides& strides, int head_dim, Key* to) noexcept;

  // Polls of a step of `stage_columns`.
  static constexpr int column_polls = lanes;
  [[nodiscard]] int polls_of_columns() const noexcept {
    constexpr int step = lanes * 4 / static_cast<int>(sizeof(Key));
    return v_columns_ ? tile_vectors * ((args_.v_head_dim + step - 1) / step) * column_polls : 0;
  }

  // Rows of V of `lanes` keys that lie side by side, dim by dim (x_split's V), transposed: to [keys][padded_].
  void stage_columns(const Key* from, Key* to) noexcept;

  // V of one of the tile's keys in a cache whose rows cannot be read in place.
  void stage_value(const kv_tile_offsets& tile, int head, int key, Key* to) const noexcept;

  // V of the tile's keys: rows[key] for each that some row of the item attends to, in place or, where it cannot be read
  // there, copied to staging.
  void find_values(const kv_tile_offsets& tile, int head, const Key** rows) noexcept;

 private:
  [[nodiscard]] float static_scale(const coded_plane& plane, int head) const noexcept {
    if (plane.static_scales == nullptr) return 1.0f;
    return plane.static_scales[plane.scale_per_head ? item_.kv_head_begin + head : 0];
  }

  [[nodiscard]] Self& self() noexcept { return static_cast<Self&>(*this); }

  // The part of the tile at `first` that is in [begin, end), through a block table.
  void locate_tile(kv_tile_offsets& tile, std::int64_t first, std::int64_t begin, std::int64_t end,
                   const std::int32_t* block_table) const noexcept {
    tile.first = first;
    tile.begin = static_cast<int>((begin > first ? begin : first) - first);
    tile.end = static_cast<int>((end < first + tile_keys ? end : first + tile_keys) - first);
    auto token = static_cast<std::int32_t>(first % args_.block_size);
    for (int c = 0; c < tile_vectors; ++c) {
      tile.uniform[c] = c * lanes >= tile.begin && (c + 1) * lanes <= tile.end && token + lanes <= args_.block_size;
      token = (token + lanes) % args_.block_size;
    }
    tile.ends_split = first + tile_keys >= end || (first + tile_keys) % split_keys == 0;
    int key = tile.begin;
    std::int64_t logical = (first + key) / args_.block_size;
    token = static_cast<std::int32_t>(first + key - logical * args_.block_size);
    while (key < tile.end) {
      // The plan checked the host's table; a different table now must not address memory outside the cache.
      std::int64_t physical = block_table[logical++];
      physical = physical < 0 ? 0 : physical >= args_.num_blocks ? args_.num_blocks - 1 : physical;
      const int left_in_block = args_.block_size - token;
      const int run = left_in_block < tile.end - key ? left_in_block : tile.end - key;
      std::int64_t k = physical * args_.k_strides.block + token * args_.k_strides.token;
      std::int64_t v = physical * args_.v_strides.block + token * args_.v_strides.token;
      for (int i = 0; i < run; ++i) {
        tile.k[key + i] = k;
        tile.v[key + i] = v;
        k += args_.k_strides.token;
        v += args_.v_strides.token;
      }
      if constexpr (__is_same(Key, float) || widens_codes) {
        if (args_.is_coded) {
          locate_tails(args_.k_code, args_.k_strides, physical, token, run, tile.k_tail + key);
          locate_tails(args_.v_code, args_.v_strides, physical, token, run, tile.v_tail + key);
        }
      }
      key += run;
      token = 0;
    }
  }

  // Codes with tails are of one byte: strides in elements are in bytes.
  static BIFOLIO_INLINE void locate_tails(const coded_plane& plane, const kv_strides& strides, std::int64_t block,
                                          int token, int count, std::int64_t* tails) noexcept {
    if (widens_codes && plane.tail_floats == 0) return;  // rows that are decoded one by one read theirs anyway
    const std::int64_t first = block * strides.block + plane.tail.offset + token * plane.tail.token;
    for (int i = 0; i < count; ++i) tails[i] = first + i * plane.tail.token;
  }

  void run_tiles() noexcept {
    const std::int64_t items_first = static_cast<std::int64_t>(item_.split_begin) * split_keys;
    const std::int64_t items_end = static_cast<std::int64_t>(item_.split_end) * split_keys;
    const std::int64_t begin = visible_.begin > items_first ? visible_.begin : items_first;
    const std::int64_t end = visible_.end < items_end ? visible_.end : items_end;
    if (begin >= end) return;

    // Each iteration's memory is pushed to the prefetcher two iterations earlier; where whole tokens are, a tile and
    // one iteration, because every head of a tile reads all of its tokens.
    const std::int64_t first_tile = begin / tile_keys;
    const std::int64_t num_tiles = (end + tile_keys - 1) / tile_keys - first_tile;
    const std::int64_t num_iterations = num_tiles * num_heads_;
    const auto locate = [&](std::int64_t t) {
      if (t < num_tiles) locate_tile(tiles_[t % 3], (first_tile + t) * tile_keys, begin, end, item_.block_table);
    };
    for (std::int64_t t = 0; t < 3; ++t) locate(t);
    const int ahead = whole_tokens_ ? num_heads_ + 1 : 2;
    if (whole_tokens_ && !item_.is_prefetched) {
      prefetch_first_tile(num_tiles);
    } else {
      prefetch(ahead - 1, num_iterations);
    }
    begin_split(begin / split_keys);
    std::int64_t iteration = 0;
    for (std::int64_t t = 0; t < num_tiles; ++t) {
      const int polls = self().polls_per_tile(tiles_[t % 3]);
      const bool ends_split = tiles_[t % 3].ends_split;
      for (int head = 0; head < num_heads_; ++head, ++iteration) {
        prefetch(iteration + ahead, num_iterations);
        prefetcher_.pace(polls);
        self().process_tile(tiles_[t % 3], head);
        prefetcher_.flush();
      }
      locate(t + 3);
      if (!ends_split) continue;
      const std::int64_t next = (first_tile + t + 1) * tile_keys;
      self().end_split((next - 1) / split_keys);
      if (next >= end) return;
      begin_split(next / split_keys);
    }
  }

  void begin_split(std::int64_t split) noexcept {
    states_ =
        item_.partials == nullptr ? scratch_.states : item_.partials + (split - first_split()) * num_rows() * stride_;
    self().clear();
  }

  // Combines the split with the totals when the item holds all splits of its rows.
  void end_split(std::int64_t split) noexcept {
    for (int head = 0; head < num_heads_; ++head) {
      for (int row = 0; row < head_rows_; ++row) {
        float* state = self().partial_of(head, row);
        if (item_.partials == nullptr) combine_visible(split, head, row, state);
      }
    }
  }

  // Combines a row's state of a split with its total, if the row attends to any key of the split.
  void combine_visible(std::int64_t split, int head, int row, float* state) const noexcept {
    const std::int64_t first = split * split_keys;
    const visible_range range = range_of_row(row);
    if (range.begin >= first + split_keys || range.end <= first || range.begin >= range.end) return;
    combine(state_of(scratch_.totals, head, row), state, range.begin >= first);
  }

  // total ← total ⊕ partial; `first`: total ← partial.
  void combine(float* total, float* partial, bool first) const noexcept {
    if (first) {
      for (int d = 0; d < dims_; d += lanes) store(total + d, load(partial + d));
      maximum_of(total, padded_) = maximum_of(partial, padded_);
      sum_of(total, padded_) = sum_of(partial, padded_);
      return;
    }
    const auto weights = attn::combine_state<scalar_math>(maximum_of(total, padded_), sum_of(total, padded_),
                                                          maximum_of(partial, padded_), sum_of(partial, padded_));
    const vf a(weights.total);
    const vf b(weights.partial);
    for (int d = 0; d < dims_; d += lanes) {
      store(total + d, attn::combine_value<vector_math>(a, b, load(total + d), load(partial + d)));
    }
  }

  // The memory that one iteration reads: one range per row, or one for all keys of a vector where they are adjacent.
  struct range_list {
    int count = 0;
    int bytes = 0;  // of each
    const char* ranges[3 * tile_keys];
  };

  void list_ranges(range_list& list, const kv_tile_offsets& tile, int head) const noexcept;

  // Whole tokens of several heads: those of part `part` of `num_parts` of the tile's tokens.
  void add_tokens(range_list& list, const kv_tile_offsets& tile, int part, int num_parts, int first_head,
                  int num_heads) const noexcept;

  void add_blocks(range_list& list, const void* plane, int element, const kv_strides& strides, int head,
                  const kv_tile_offsets& tile, const std::int64_t* offsets) const noexcept;

  void add_ranges(range_list& list, const void* plane, int element, std::int64_t head_stride, int head,
                  const kv_tile_offsets& tile, const std::int64_t* offsets, bool whole) const noexcept;

  // The first iteration of the item that this worker will probably run next, if there is one; of whole tokens a part of
  // its first tile.
  bool list_next_item(range_list& list, int part) const noexcept;

  // All of the first tile, and the first part of the next one.
  void prefetch_first_tile(std::int64_t num_tiles) noexcept;

  // Pushes the memory of `iteration` to the prefetcher. The first iteration (of whole tokens, tile) of the item that is
  // probably next follows this item's last one.
  void prefetch(std::int64_t iteration, std::int64_t num_iterations) noexcept;

  // Scales of a tile are a line or two per block: too little for the queue.
  static void prefetch_tails(const void* base, std::int64_t head_offset, const std::int64_t* tails,
                             const kv_tile_offsets& tile) noexcept;

  // Combines the splits of all rows, in the order of their addresses.
  void combine_splits() noexcept {
    const std::int64_t end = (visible_.end + split_keys - 1) / split_keys;
    for (std::int64_t split = first_split(); split < end; ++split) {
      float* states = item_.partials + (split - first_split()) * num_rows() * stride_;
      for (int head = 0; head < num_heads_; ++head) {
        for (int row = 0; row < head_rows_; ++row) combine_visible(split, head, row, state_of(states, head, row));
      }
    }
  }

  // Writes all rows; `states` holds one state per row.
  void write_rows(float* states) noexcept {
    for (int head = 0; head < num_heads_; ++head) {
      for (int row = 0; row < head_rows_; ++row) {
        const visible_range range = range_of_row(row);
        if (range.begin >= range.end) {
          write_empty_row(head, row);
        } else {
          write_row(head, row, state_of(states, head, row));
        }
      }
    }
  }

  void write_out(int head, int row, const float* values, float lse) noexcept {
    const int q_head = query_head(head, row);
    const std::int64_t token = token_of(row);
    narrow_any(args_.out_type, values, args_.v_head_dim, args_.out,
               token * args_.out_token_stride + q_head * args_.out_head_stride);
    if (args_.lse != nullptr) args_.lse[token * args_.num_q_heads + q_head] = lse;
  }

  // 0 without sinks.
  [[nodiscard]] float sink_of(int head, int row) const noexcept {
    return args_.sinks == nullptr ? 0.0f : args_.sinks[query_head(head, row)];
  }

  void write_empty_row(int head, int row) noexcept {
    float* values = scratch_.values;
    for (int d = 0; d < dims_; d += lanes) store(values + d, vf(0.0f));
    write_out(head, row, values, attn::empty_row_lse(args_.sinks != nullptr, sink_of(head, row)));
  }

  void write_row(int head, int row, float* state) noexcept {
    const auto end = attn::finish_row<scalar_math>(maximum_of(state, padded_), sum_of(state, padded_),
                                                   args_.sinks != nullptr, sink_of(head, row));
    // 0: every score was −inf
    const vf scale(end.denominator == 0 ? 0.0f : end.numerator / end.denominator * v_scale(head));
    float* values = scratch_.values;
    for (int d = 0; d < dims_; d += 2 * lanes) {
      vf a = load(state + d) * scale;
      vf b = load(state + d + lanes) * scale;
      self().order(a, b);
      store(values + d, a);
      store(values + d + lanes, b);
    }
    write_out(head, row, values, end.lse);
  }

 protected:
  const attention_args& args_;
  const attention_item& item_;
  const attention_scratch& scratch_;
  int qk_padded_;  // of K and the queries
  int padded_;     // of V and the states
  int dims_;       // v_head_dim in whole pairs of vectors
  std::int64_t stride_;
  int head_rows_;  // rows of one KV head
  int num_heads_;
  bool k_widened_;  // 8-bit codes
  bool v_widened_;
  bool k_contiguous_;
  bool v_contiguous_;
  bool k_pieces_;   // x_split's K
  bool v_columns_;  // x_split's V: keys side by side, dim by dim
  bool v_in_k_;
  bool whole_tokens_;  // prefetched: rows of all heads of a token are adjacent, rows of tokens are not (nhd)
  bool k_tails_;       // scales per token, …
  bool v_tails_;
  bool k_zeros_;  // … and zero points
  bool v_zeros_;
  float* states_ = nullptr;  // of the running split, [rows] of `stride_`
  prefetcher prefetcher_;

 private:
  visible_range visible_;     // to any row of the item
  kv_tile_offsets tiles_[3];  // tile t at t % 3
  range_list lists_[2];       // of iteration i at i % 2
};

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

#include "cpu/kernels/attention/mainloop_prefetch.hpp"
#include "cpu/kernels/attention/mainloop_stage.hpp"
