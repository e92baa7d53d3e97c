// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention on tile registers, for calls of one 16-bit dtype throughout: groups of 16 rows of a KV head share the
/// products of their scores, row blocks of 8 share softmax and the products of their outputs (tile_micro.hpp).

#include "cpu/kernels/attention/mainloop.hpp"
#include "cpu/kernels/attention/tile_micro.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

/// Whether calls of this dtype throughout run on tiles.
template <class Key>
inline constexpr bool has_tiles = false;
template <class Key>
class tile_mainloop;

#if BIFOLIO_TILES

template <>
inline constexpr bool has_tiles<bfloat16> = true;
#if BIFOLIO_F16_TILES
template <>
inline constexpr bool has_tiles<float16> = true;
#endif

template <class Key>
class tile_mainloop : public mainloop<Key, tile_mainloop<Key>> {
  using base = mainloop<Key, tile_mainloop>;
  friend base;
  static_assert(__is_same(Key, float16) || __is_same(Key, bfloat16));

 public:
  tile_mainloop(const attention_args& args, const attention_item& item, const attention_scratch& scratch) noexcept
      : base(args, item, scratch),
        num_groups_((head_rows_ + tile_rows - 1) / tile_rows),
        num_row_blocks_((head_rows_ + row_block_rows - 1) / row_block_rows),
        common_{range_of_token(item.num_tokens - 1).begin, range_of_token(0).end} {}

 private:
  using base::args_;
  using base::clip;
  using base::find_values;
  using base::head_rows_;
  using base::item_;
  using base::k_contiguous_;
  using base::maximum_of;
  using base::num_heads_;
  using base::padded_;
  using base::prefetcher_;
  using base::qk_padded_;
  using base::query_head;
  using base::query_offset;
  using base::range_of_row;
  using base::range_of_token;
  using base::scratch_;
  using base::stage_row;
  using base::state_of;
  using base::states_;
  using base::sum_of;
  using base::v_contiguous_;

  // K or V of the tile's keys, 16 keys each.
  using tile_key_rows = key_rows[key_tiles];

  [[nodiscard]] float* group_queries(int head, int group) const noexcept {
    return scratch_.queries + (static_cast<std::int64_t>(head) * num_groups_ + group) * (qk_padded_ / 2 * tile_rows);
  }
  [[nodiscard]] row_block_state row_block(int head, int index) const noexcept {
    const std::int64_t number = static_cast<std::int64_t>(head) * num_row_blocks_ + index;
    return {scratch_.states + number * row_block_floats(args_.v_head_dim), padded_};
  }
  [[nodiscard]] int row_block_end(int index) const noexcept {
    const int end = (index + 1) * row_block_rows;
    return end < head_rows_ ? end : head_rows_;
  }

  // [groups][pairs of dims][16 rows], padded with 0.
  void pack_queries() noexcept {
    for (int head = 0; head < num_heads_; ++head) {
      for (int group = 0; group < num_groups_; ++group) {
        float* queries = group_queries(head, group);
        const Key* rows[std::size_t{tile_rows}];
        for (int i = 0; i < tile_rows; ++i) {
          const int row = group * tile_rows + i;
          rows[i] = row < head_rows_ ? static_cast<const Key*>(args_.q) + query_offset(head, row) : nullptr;
        }
        for (int d = 0; d < qk_padded_; d += tile_dims) {
          transpose(
              [&](int i) __attribute__((always_inline)) {
                return rows[i] == nullptr ? vf(0.0f) : load_elements(rows[i] + d, args_.qk_head_dim - d);
              },
              [&](int pair, vf column)
                  __attribute__((always_inline)) { store(queries + (d / 2 + pair) * tile_rows, column); });
        }
      }
    }
  }

  void clear() noexcept {
    for (int head = 0; head < num_heads_; ++head) {
      for (int i = 0; i < num_row_blocks_; ++i) row_block(head, i).clear();
    }
  }

  float* partial_of(int head, int row) noexcept {
    float* state = item_.partials == nullptr ? scratch_.values : state_of(states_, head, row);
    const row_block_state from = row_block(head, row / row_block_rows);
    from.read_row(row % row_block_rows, probability_factor<Key>, state);
    maximum_of(state, padded_) = from.maxima()[row % row_block_rows];
    sum_of(state, padded_) = from.sums()[row % row_block_rows];
    return state;
  }

  static BIFOLIO_INLINE void order(vf&, vf&) noexcept {}  // `partial_of` has done it

  [[nodiscard]] int polls_per_tile() const noexcept {
    const int scores = key_tiles * (qk_padded_ / tile_dims);
    const int outputs = key_tiles * (padded_ / tile_dims);
    return num_groups_ * scores + num_row_blocks_ * (outputs + softmax_polls);
  }

  // Where the products read K or V of the tile: where `row_of` says, `stride` elements apart where keys of a vector are
  // in one block, or in `staged` ([tile_keys][padded] elements) where they cannot be read like that, with 0 for keys
  // that are not in `visible`.
  void find_rows(const kv_tile_offsets& tile, const Key* const* row_of, int head_dim, std::int64_t stride,
                 visible_range visible, void* staged, tile_key_rows& rows) const noexcept {
    const int padded = padded_dims(head_dim);
    const std::int64_t staged_bytes = std::int64_t{2} * padded;
    for (int column = 0; column < tile_keys; column += tile_rows) {
      key_rows& keys = rows[column / tile_rows];
      if (tile.uniform[column / lanes] && head_dim == padded && visible.begin <= column &&
          visible.end >= column + tile_rows) {
        keys = {reinterpret_cast<const char*>(row_of[column]), stride * 2};
        continue;
      }
      char* to = static_cast<char*>(staged) + column * staged_bytes;
      keys = {to, staged_bytes};
      for (int key = column; key < column + tile_rows; ++key, to += staged_bytes) {
        const bool is_visible = key >= visible.begin && key < visible.end;
        const Key* row = is_visible ? row_of[key] : static_cast<const Key*>(scratch_.zero_row);
        for (int d = 0; d < padded; d += tile_dims) {
          store(reinterpret_cast<float*>(to + 2 * d), load_elements(row + d, head_dim - d));
        }
      }
    }
  }

  void place_keys(const kv_tile_offsets& tile, int head, tile_key_rows& keys) const noexcept {
    const Key* k = static_cast<const Key*>(args_.k) + (item_.kv_head_begin + head) * args_.k_strides.head;
    auto* staging = reinterpret_cast<Key*>(scratch_.keys) + std::int64_t{tile_keys} * qk_padded_;  // behind `staged`
    const Key* row_of[tile_keys];
    for (int key = tile.begin; key < tile.end; ++key) {
      row_of[key] = k + tile.k[key];
      if (k_contiguous_) continue;
      Key* const row = staging + std::int64_t{key} * qk_padded_;
      stage_row(row_of[key], args_.k_strides, args_.qk_head_dim, row);
      row_of[key] = row;
    }
    find_rows(tile, row_of, args_.qk_head_dim, k_contiguous_ ? args_.k_strides.token : qk_padded_,
              {tile.begin, tile.end}, scratch_.keys, keys);
  }
  void place_values(const kv_tile_offsets& tile, const Key* const* row_of, visible_range visible,
                    tile_key_rows& values) const noexcept {
    find_rows(tile, row_of, args_.v_head_dim, v_contiguous_ ? args_.v_strides.token : padded_, visible, scratch_.values,
              values);
  }

  [[nodiscard]] bool has_finite_values(const kv_tile_offsets& tile, const Key* const* row_of) const noexcept {
    for (int key = tile.begin; key < tile.end; ++key) {
      if (!all_finite(row_of[key], args_.v_head_dim)) return false;
    }
    return true;
  }

  // The keys of the tile that the rows of a row block attend to.
  struct row_block_view {
    bool any = false;   // some row attends to some key
    bool alike = true;  // all rows attend to all keys that some row of the item attends to
    row_block_lanes lanes_of;
    visible_range visible[static_cast<std::size_t>(row_block_rows)];  // set unless all rows attend to the whole tile
  };

  void view_row_block(const kv_tile_offsets& tile, int head, int index, row_block_view& view) const noexcept {
    const int begin = index * row_block_rows;
    row_block_lanes& of = view.lanes_of;
    of.rows = row_block_end(index) - begin;
    const bool all_visible = tile.first >= common_.begin && tile.first + tile_keys <= common_.end;
    view.any = all_visible;
    for (int i = 0; i < of.rows && !all_visible; ++i) {
      const visible_range visible = clip(range_of_row(begin + i), tile.first);
      view.visible[i] = visible;
      view.any = view.any || visible.begin < visible.end;
      view.alike = view.alike && visible.begin <= tile.begin && visible.end >= tile.end;
      of.all_visible = of.all_visible && visible.begin <= 0 && visible.end >= tile_keys;
    }
    of.has_alibi = args_.alibi_slopes != nullptr;
    if (of.all_visible && !of.has_alibi) return;
    for (int lane = 0; lane < lanes; ++lane) {
      const int i = lane % row_block_rows < of.rows ? lane % row_block_rows : 0;
      if (!of.all_visible) {
        of.begin[lane] = static_cast<float>(view.visible[i].begin);
        of.end[lane] = static_cast<float>(view.visible[i].end);
      }
      if (!of.has_alibi) continue;
      const int row = begin + i;
      of.slopes[lane] = args_.alibi_slopes[query_head(head, row)];
      of.distance[lane] = static_cast<float>(tile.first - item_.first_position - row / args_.group_size);
    }
  }

  void process_tile(const kv_tile_offsets& tile, int head) noexcept {
    tile_key_rows keys;
    tile_key_rows values;
    const visible_range all{tile.begin, tile.end};
    const Key* row_of[tile_keys];
    place_keys(tile, head, keys);
    find_values(tile, head, row_of);
    place_values(tile, row_of, all, values);
    alignas(64) float scores[tile_keys * tile_rows];  // [key][row]
    alignas(64) float p[key_tiles * tile_floats];
    const softmax_terms terms{args_.scale, args_.soft_cap};
    bool known_finite = false;
    for (int group = 0; group < num_groups_; ++group) {
      bool has_scores = false;
      for (int index = 2 * group; index < 2 * group + 2 && index < num_row_blocks_; ++index) {
        row_block_view view;
        view_row_block(tile, head, index, view);
        if (!view.any) continue;
        if (!has_scores) {
          score_tiles<Key>(group_queries(head, group), keys, qk_padded_ / tile_dims, scores, prefetcher_);
          has_scores = true;
        }
        const row_block_state state = row_block(head, index);
        softmax_row_block<Key>(scores + (index - 2 * group) * row_block_rows, terms, view.lanes_of, state, p,
                               prefetcher_);
        // A probability of 0 masks a key, unless its V is not finite.
        if (!view.alike && !known_finite) known_finite = has_finite_values(tile, row_of);
        if (view.alike || known_finite) {
          add_outputs<Key>(p, values, tile.begin / tile_rows, (tile.end + tile_rows - 1) / tile_rows, padded_,
                           state.accumulators(), prefetcher_);
          continue;
        }
        add_outputs_row_by_row(tile, row_of, view, p, state);
        place_values(tile, row_of, all, values);
      }
    }
  }

  // Row by row, with V cleared for the keys that the row does not attend to.
  void add_outputs_row_by_row(const kv_tile_offsets& tile, const Key* const* row_of, const row_block_view& view,
                              const float* p, const row_block_state& state) noexcept {
    for (int i = 0; i < view.lanes_of.rows; ++i) {
      tile_key_rows values;
      place_values(tile, row_of, view.visible[i], values);
      float* const all_rows = scratch_.values + tile_keys / 2 * padded_;  // behind the staged rows
      for (int d = 0; d < row_block_rows * padded_; d += lanes) store(all_rows + d, load(state.accumulators() + d));
      add_outputs<Key>(p, values, tile.begin / tile_rows, (tile.end + tile_rows - 1) / tile_rows, padded_, all_rows,
                       prefetcher_);
      state.take_row(i, all_rows);
    }
  }

  tile_scope own_tiles_;
  int num_groups_;        // of 16 rows, per KV head
  int num_row_blocks_;    // of 8 rows, per KV head
  visible_range common_;  // positions that all rows attend to
};

#endif

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA
