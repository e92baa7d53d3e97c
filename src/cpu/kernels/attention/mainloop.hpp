// SPDX-License-Identifier: Apache-2.0
#pragma once

/// One work item's walk over K and V: tile by tile through the block table, all KV heads of a tile, then the next one;
/// with the lines of what comes asked for ahead, splits begun, ended and folded, rows written. What is computed of one
/// unit (a tile × a KV head), and how, is the derived class's: attention_vectors.hpp, attention_tiles.hpp.

#include "cpu/kernels/attention/kernels.hpp"
#include "cpu/kernels/attention/micro.hpp"
#include "cpu/kernels/attention/prefetch_queue.hpp"
#include "cpu/kernels/attention/rows.hpp"
#include "cpu/kernels/simd/simd.hpp"

namespace bifolio::cpu::BIFOLIO_ISA {
namespace {

/// Where the keys of one tile lie, without the head: element offsets from the start of the K and V planes. Entries
/// outside [begin, end) are not set.
struct tile_place {
  std::int64_t first = 0;  // position of the tile's first key
  int begin = 0;           // visible to some row of the item, relative to `first`
  int end = 0;
  bool even[tile_vectors];  // keys of one vector are all there and lie in one block
  std::int64_t k[tile_keys];
  std::int64_t v[tile_keys];
};

/// The loops of one item. `Key` is the KV cache's element. `Self` derives from this and has
///   pack_queries(): brings the item's queries into scratch;
///   clear(): the states of all rows, in its own form: nothing seen;
///   run_unit(place, head): adds one unit to them;
///   end_row(head, row): → the row's state of the split in the form of partial results;
///   order(a, b): puts 2·lanes dims of such a state in order;
///   unit_turns(): → about how often `run_unit` gives `ahead_` a turn.
template <class Key, class Self>
class item_walk {
 public:
  item_walk(const attention_args& args, const attention_item& item, const attention_scratch& scratch) noexcept
      : args_(args),
        item_(item),
        scratch_(scratch),
        qk_padded_(padded_dims(args.qk_head_dim)),
        padded_(padded_dims(args.v_head_dim)),
        dims_((args.v_head_dim + 2 * lanes - 1) / (2 * lanes) * (2 * lanes)),
        stride_(partial_stride(args.v_head_dim)),
        head_rows_(item.num_tokens * args.group_size),
        num_heads_(item.kv_head_end - item.kv_head_begin),
        k_contiguous_(args.k_strides.dim == 1 && args.k_strides.chunk >= args.qk_head_dim),
        v_contiguous_(args.v_strides.dim == 1 && args.v_strides.chunk >= args.v_head_dim),
        v_in_k_(args.v == args.k) {
    const visible_range first = range_of_token(0);
    const visible_range last = range_of_token(item.num_tokens - 1);
    seen_ = {first.begin, last.end};
  }

  void run() noexcept {
    self().pack_queries();
    run_tiles();
    if (item_.partials == nullptr) write_rows(scratch_.totals);
  }

  /// Folds the splits of each row in order of position.
  void finish() noexcept {
    if (seen_.begin < seen_.end) fold_splits();
    write_rows(scratch_.totals);
  }

 protected:
  [[nodiscard]] std::int64_t num_rows() const noexcept { return static_cast<std::int64_t>(num_heads_) * head_rows_; }
  [[nodiscard]] std::int64_t first_split() const noexcept { return seen_.begin / split_keys; }

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

  // One row of K or V from any layout.
  static void stage_row(const Key* from, const kv_strides& strides, int head_dim, Key* to) noexcept {
    for (int d = 0; d < head_dim;) {
      const int run = head_dim - d < strides.chunk ? head_dim - d : strides.chunk;
      for (int i = 0; i < run; ++i) to[d + i] = from[i * strides.dim];
      from += strides.chunk_stride;
      d += run;
    }
  }

  // V of one of the tile's keys; a row whose dims are not contiguous is brought to scratch, as row `slot` there.
  [[nodiscard]] const Key* value_row(const tile_place& place, int head, int key, int slot) const noexcept {
    const Key* row =
        static_cast<const Key*>(args_.v) + (item_.kv_head_begin + head) * args_.v_strides.head + place.v[key];
    if (v_contiguous_) return row;
    Key* staging = static_cast<Key*>(scratch_.staging) + static_cast<std::int64_t>(slot) * padded_;
    stage_row(row, args_.v_strides, args_.v_head_dim, staging);
    return staging;
  }

 private:
  [[nodiscard]] Self& self() noexcept { return static_cast<Self&>(*this); }

  // The part of the tile at `first` that lies in [begin, end), through a block table.
  void place_tile(tile_place& place, std::int64_t first, std::int64_t begin, std::int64_t end,
                  const std::int32_t* block_table) const noexcept {
    place.first = first;
    place.begin = static_cast<int>((begin > first ? begin : first) - first);
    place.end = static_cast<int>((end < first + tile_keys ? end : first + tile_keys) - first);
    auto token = static_cast<std::int32_t>(first % args_.block_size);
    for (int c = 0; c < tile_vectors; ++c) {
      place.even[c] = c * lanes >= place.begin && (c + 1) * lanes <= place.end && token + lanes <= args_.block_size;
      token = (token + lanes) % args_.block_size;
    }
    int key = place.begin;
    std::int64_t logical = (first + key) / args_.block_size;
    token = static_cast<std::int32_t>(first + key - logical * args_.block_size);
    while (key < place.end) {
      // The plan checked the host's table; another one now must not lead out of the cache.
      std::int64_t physical = block_table[logical++];
      physical = physical < 0 ? 0 : physical >= args_.num_blocks ? args_.num_blocks - 1 : physical;
      const int left_in_block = args_.block_size - token;
      const int run = left_in_block < place.end - key ? left_in_block : place.end - key;
      std::int64_t k = physical * args_.k_strides.block + token * args_.k_strides.token;
      std::int64_t v = physical * args_.v_strides.block + token * args_.v_strides.token;
      for (int i = 0; i < run; ++i) {
        place.k[key + i] = k;
        place.v[key + i] = v;
        k += args_.k_strides.token;
        v += args_.v_strides.token;
      }
      key += run;
      token = 0;
    }
  }

  void run_tiles() noexcept {
    const std::int64_t items_first = static_cast<std::int64_t>(item_.split_begin) * split_keys;
    const std::int64_t items_end = static_cast<std::int64_t>(item_.split_end) * split_keys;
    const std::int64_t begin = seen_.begin > items_first ? seen_.begin : items_first;
    const std::int64_t end = seen_.end < items_end ? seen_.end : items_end;
    if (begin >= end) return;

    // Units: all KV heads of a tile, then the next tile. The stream gets each one two units before it is worked on.
    const std::int64_t first_tile = begin / tile_keys;
    const std::int64_t num_tiles = (end + tile_keys - 1) / tile_keys - first_tile;
    const std::int64_t num_units = num_tiles * num_heads_;
    const auto place = [&](std::int64_t t) {
      if (t < num_tiles) place_tile(places_[t % 3], (first_tile + t) * tile_keys, begin, end, item_.block_table);
    };
    for (std::int64_t t = 0; t < 3; ++t) place(t);
    const int turns = self().unit_turns();
    ask_for(1, num_units);
    begin_split(begin / split_keys);
    std::int64_t unit = 0;
    for (std::int64_t t = 0; t < num_tiles; ++t) {
      for (int head = 0; head < num_heads_; ++head, ++unit) {
        ask_for(unit + 2, num_units);
        ahead_.spread(turns);
        self().run_unit(places_[t % 3], head);
        ahead_.catch_up();
      }
      place(t + 3);
      const std::int64_t next = (first_tile + t + 1) * tile_keys;
      if (next >= end || next % split_keys == 0) {
        end_split((next - 1) / split_keys);
        if (next >= end) return;
        begin_split(next / split_keys);
      }
    }
  }

  void begin_split(std::int64_t split) noexcept {
    states_ =
        item_.partials == nullptr ? scratch_.states : item_.partials + (split - first_split()) * num_rows() * stride_;
    self().clear();
  }

  // Folds the split into the totals when the item holds all splits of its rows.
  void end_split(std::int64_t split) noexcept {
    for (int head = 0; head < num_heads_; ++head) {
      for (int row = 0; row < head_rows_; ++row) {
        float* state = self().end_row(head, row);
        if (item_.partials == nullptr) fold_seen(split, head, row, state);
      }
    }
  }

  // Folds a row's state of a split into its total, if it sees something of it.
  void fold_seen(std::int64_t split, int head, int row, float* state) const noexcept {
    const std::int64_t first = split * split_keys;
    const visible_range range = range_of_row(row);
    if (range.begin >= first + split_keys || range.end <= first || range.begin >= range.end) return;
    fold(state_of(scratch_.totals, head, row), state, range.begin >= first);
  }

  // total ← total ⊕ partial; `first`: total ← partial.
  void fold(float* total, float* partial, bool first) const noexcept {
    if (first) {
      for (int d = 0; d < dims_; d += lanes) store(total + d, load(partial + d));
      maximum_of(total, padded_) = maximum_of(partial, padded_);
      sum_of(total, padded_) = sum_of(partial, padded_);
      return;
    }
    const merge_weights weights = weights_of(maximum_of(total, padded_), maximum_of(partial, padded_));
    const vf a(weights.a);
    const vf b(weights.b);
    for (int d = 0; d < dims_; d += lanes) store(total + d, fma(load(partial + d), b, load(total + d) * a));
    sum_of(total, padded_) = sum_of(partial, padded_) * weights.b + sum_of(total, padded_) * weights.a;
  }

  // The memory that one unit will read: a run a row, or a run for the keys of one vector where they lie side by side.
  struct run_list {
    int count = 0;
    int bytes = 0;  // of each
    const char* runs[2 * tile_keys];
  };

  void list_runs(run_list& list, const tile_place& place, int head) const noexcept {
    bool whole = k_contiguous_ && args_.k_strides.token == args_.qk_head_dim;
    whole = whole && v_contiguous_ && args_.v_strides.token == (v_in_k_ ? args_.qk_head_dim : args_.v_head_dim);
    for (int c = 0; c < tile_vectors; ++c) whole = whole && place.even[c];
    list.count = 0;
    // All runs are of one length: where the longer rows of a plane go on, they are found when they are read.
    const int dims = v_in_k_ || args_.qk_head_dim < args_.v_head_dim ? args_.qk_head_dim : args_.v_head_dim;
    list.bytes = static_cast<int>(sizeof(Key)) * dims * (whole ? lanes : 1);
    if (k_contiguous_) add_runs(list, args_.k, args_.k_strides.head, head, place, place.k, whole);
    if (v_contiguous_ && !v_in_k_) add_runs(list, args_.v, args_.v_strides.head, head, place, place.v, whole);
  }

  void add_runs(run_list& list, const void* plane, std::int64_t head_stride, int head, const tile_place& place,
                const std::int64_t* offsets, bool whole) const noexcept {
    const Key* base = static_cast<const Key*>(plane) + (item_.kv_head_begin + head) * head_stride;
    for (int key = place.begin; key < place.end; key += whole ? lanes : 1) {
      list.runs[list.count++] = reinterpret_cast<const char*>(base + offsets[key]);
    }
  }

  // The first unit of the item that this lane will probably run next, if there is one.
  bool list_next_item(run_list& list) const noexcept {
    attention_item next;
    if (item_.guess_next == nullptr || !item_.guess_next(item_.guess_context, next)) return false;
    const std::int64_t splits_first = static_cast<std::int64_t>(next.split_begin) * split_keys;
    const std::int64_t splits_end = static_cast<std::int64_t>(next.split_end) * split_keys;
    const visible_range first = args_.window.of(next.first_position, next.seq_len);
    const visible_range last = args_.window.of(next.first_position + next.num_tokens - 1, next.seq_len);
    const std::int64_t begin = first.begin > splits_first ? first.begin : splits_first;
    const std::int64_t end = last.end < splits_end ? last.end : splits_end;
    if (begin >= end) return false;
    tile_place place;
    place_tile(place, begin / tile_keys * tile_keys, begin, end, next.block_table);
    list_runs(list, place, next.kv_head_begin - item_.kv_head_begin);
    return true;
  }

  // Puts the lines of `unit` into the stream. Of the item that is probably next the first unit counts as this one's.
  void ask_for(std::int64_t unit, std::int64_t num_units) noexcept {
    run_list& list = lists_[unit % 2];
    if (unit < num_units) {
      list_runs(list, places_[unit / num_heads_ % 3], static_cast<int>(unit % num_heads_));
    } else if (unit > num_units || !list_next_item(list)) {
      return ahead_.push_none();
    }
    ahead_.push(list.runs, list.count, list.bytes);
  }

  // Folds the splits of all rows, in the order in which they lie in memory.
  void fold_splits() noexcept {
    const std::int64_t end = (seen_.end + split_keys - 1) / split_keys;
    for (std::int64_t split = first_split(); split < end; ++split) {
      float* states = item_.partials + (split - first_split()) * num_rows() * stride_;
      for (int head = 0; head < num_heads_; ++head) {
        for (int row = 0; row < head_rows_; ++row) fold_seen(split, head, row, state_of(states, head, row));
      }
    }
  }

  // Writes all rows; `states` holds one state a row.
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

  void write_empty_row(int head, int row) noexcept {
    float* values = scratch_.values;
    for (int d = 0; d < dims_; d += lanes) store(values + d, vf(0.0f));
    write_out(head, row, values, args_.sinks == nullptr ? minus_infinity : args_.sinks[query_head(head, row)]);
  }

  void write_row(int head, int row, float* state) noexcept {
    float maximum = maximum_of(state, padded_);
    float sum = sum_of(state, padded_);
    float factor = 1.0f;
    if (args_.sinks != nullptr) {
      const float sink = args_.sinks[query_head(head, row)];
      const merge_weights weights = weights_of(maximum, sink);
      sum = sum * weights.a + weights.b;
      factor = weights.a;
    }
    const vf scale(sum == 0 ? 0.0f : factor / sum);  // 0: every score was −inf
    float* values = scratch_.values;
    for (int d = 0; d < dims_; d += 2 * lanes) {
      vf a = load(state + d) * scale;
      vf b = load(state + d + lanes) * scale;
      self().order(a, b);
      store(values + d, a);
      store(values + d + lanes, b);
    }
    write_out(head, row, values, maximum + __builtin_logf(sum));
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
  bool k_contiguous_;
  bool v_contiguous_;
  bool v_in_k_;
  float* states_ = nullptr;  // of the running split, [rows] of `stride_`
  line_stream ahead_;

 private:
  visible_range seen_;    // by any row of the item
  tile_place places_[3];  // tile t at t % 3
  run_list lists_[2];     // of unit u at u % 2
};

}  // namespace
}  // namespace bifolio::cpu::BIFOLIO_ISA
