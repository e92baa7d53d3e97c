// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention on tile registers, for calls of one 16-bit dtype throughout: row groups of 16 rows of a KV head, two at a
/// time where there are two (tile_micro.hpp).

#include "cpu/kernels/attention/mainloop.hpp"
#include "cpu/kernels/attention/tile_micro.hpp"

namespace bifolio::cpu::BIFOLIO_ISA {
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
        num_groups_((head_rows_ + row_group_rows - 1) / row_group_rows),
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

  // K or V of the tile's keys, 16 keys each.
  using tile_key_rows = key_rows[key_tiles];

  [[nodiscard]] float* group_queries(int head, int group) const noexcept {
    return scratch_.queries + (static_cast<std::int64_t>(head) * num_groups_ + group) * (qk_padded_ / 2 * tile_rows);
  }
  [[nodiscard]] row_group_state state_of_group(int head, int group) const noexcept {
    const std::int64_t number = static_cast<std::int64_t>(head) * num_groups_ + group;
    return {scratch_.states + number * row_group_floats(args_.v_head_dim), padded_};
  }
  [[nodiscard]] int group_end(int group) const noexcept {
    const int end = (group + 1) * row_group_rows;
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
      for (int group = 0; group < num_groups_; ++group) state_of_group(head, group).clear();
    }
  }

  float* partial_of(int head, int row) noexcept {
    float* state = item_.partials == nullptr ? scratch_.values : state_of(states_, head, row);
    const row_group_state from = state_of_group(head, row / row_group_rows);
    from.read_row(row % row_group_rows, probability_factor<Key>, state);
    maximum_of(state, padded_) = from.maxima()[row % row_group_rows];
    sum_of(state, padded_) = from.sums()[row % row_group_rows];
    return state;
  }

  static BIFOLIO_INLINE void order(vf&, vf&) noexcept {}  // `partial_of` has done it

  [[nodiscard]] int polls_per_tile() const noexcept {
    const int scores = key_tiles * (qk_padded_ / tile_dims);
    const int outputs = key_steps * (padded_ / output_dims);
    return num_groups_ * (scores + outputs + softmax_polls);
  }

  // Where the products read K of the tile: in place, or in scratch ([tile_keys][padded] elements) where the cache
  // cannot be read in place, with 0 for keys outside the tile.
  void find_keys(const kv_tile_offsets& tile, int head, tile_key_rows& rows) const noexcept {
    const Key* k = static_cast<const Key*>(args_.k) + (item_.kv_head_begin + head) * args_.k_strides.head;
    const std::int64_t staged_bytes = std::int64_t{2} * qk_padded_;
    for (int column = 0; column < tile_keys; column += tile_rows) {
      key_rows& keys = rows[column / tile_rows];
      if (k_contiguous_ && tile.uniform[column / lanes] && args_.qk_head_dim == qk_padded_) {
        keys = {reinterpret_cast<const char*>(k + tile.k[column]), args_.k_strides.token * 2};
        continue;
      }
      char* to = reinterpret_cast<char*>(scratch_.keys) + column * staged_bytes;
      keys = {to, staged_bytes};
      for (int key = column; key < column + tile_rows; ++key, to += staged_bytes) {
        const bool visible = key >= tile.begin && key < tile.end;
        const Key* row = visible ? k + tile.k[key] : static_cast<const Key*>(scratch_.zero_row);
        if (visible && !k_contiguous_) {
          store(reinterpret_cast<float*>(to + 2 * (qk_padded_ - tile_dims)), vf(0.0f));
          stage_row(row, args_.k_strides, args_.qk_head_dim, reinterpret_cast<Key*>(to));
          continue;
        }
        for (int d = 0; d < qk_padded_; d += tile_dims) {
          store(reinterpret_cast<float*>(to + 2 * d), load_elements(row + d, args_.qk_head_dim - d));
        }
      }
    }
  }

  // Steps [first, last) of 32 keys, with all keys in `visible`.
  struct step_range {
    int first;
    int last;
  };
  static BIFOLIO_INLINE step_range steps_of(visible_range visible) noexcept {
    return {static_cast<int>(visible.begin) / 32, (static_cast<int>(visible.end) + 31) / 32};
  }

  // V of the tile's keys in `visible` in pairs of keys, the others 0, for `add_outputs`.
  void pair_values(const Key* const* value_rows_of, visible_range visible) const noexcept {
    const step_range steps = steps_of(visible);
    for (int pair = steps.first * 16; pair < steps.last * 16; ++pair) {
      const Key* rows[2];
      for (int i = 0; i < 2; ++i) {
        const int key = 2 * pair + i;
        rows[i] =
            key < visible.begin || key >= visible.end ? static_cast<const Key*>(scratch_.zero_row) : value_rows_of[key];
      }
      float* to = scratch_.values + pair * lanes;
      for (int d = 0; d < padded_; d += tile_dims, to += 2 * key_steps * tile_floats) {
        vf a;
        vf b;
        pair_rows(load_elements(rows[0] + d, args_.v_head_dim - d), load_elements(rows[1] + d, args_.v_head_dim - d), a,
                  b);
        store(to, a);
        store(to + key_steps * tile_floats, b);
      }
    }
  }

  [[nodiscard]] bool has_finite_values(const kv_tile_offsets& tile, const Key* const* rows) const noexcept {
    for (int key = tile.begin; key < tile.end; ++key) {
      if (!all_finite(rows[key], args_.v_head_dim)) return false;
    }
    return true;
  }

  // The keys of the tile that the rows of a row group attend to.
  struct row_group_view {
    bool any = false;   // some row attends to some key
    bool alike = true;  // all rows attend to all keys that some row of the item attends to
    row_group_lanes lanes_of;
    visible_range visible[static_cast<std::size_t>(row_group_rows)];  // set unless all rows attend to the whole tile
  };

  void view_group(const kv_tile_offsets& tile, int head, int group, row_group_view& view) const noexcept {
    const int begin = group * row_group_rows;
    row_group_lanes& of = view.lanes_of;
    of.rows = group_end(group) - begin;
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
      const int i = lane < of.rows ? lane : 0;
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
    const visible_range all{tile.begin, tile.end};
    const step_range used = steps_of(all);
    const Key* rows[tile_keys];
    find_keys(tile, head, keys);
    find_values(tile, head, rows);
    pair_values(rows, all);
    alignas(64) float scores[2 * tile_keys * tile_rows];  // [group][key][row]
    alignas(64) float p[2 * key_steps * tile_floats];     // [group][step][row][pair of keys]
    const softmax_terms terms{args_.scale, args_.soft_cap};
    const int steps = qk_padded_ / tile_dims;
    bool known_finite = false;
    const auto soften = [&](int group, const row_group_view& view, int place) {
      softmax_group<Key>(scores + place * tile_keys * tile_rows, terms, view.lanes_of, state_of_group(head, group),
                         p + place * key_steps * tile_floats, prefetcher_);
      // A probability of 0 masks a key, unless its V is not finite.
      if (!view.alike && !known_finite) known_finite = has_finite_values(tile, rows);
      return view.alike || known_finite;
    };
    const auto add = [&](int group, const row_group_view& view, int place, bool together) {
      const row_group_state state = state_of_group(head, group);
      const float* probabilities = p + place * key_steps * tile_floats;
      if (!together) return add_outputs_row_by_row(rows, all, view, probabilities, state);
      add_outputs<Key>(probabilities, scratch_.values, used.first, used.last, padded_, state.accumulators(),
                       prefetcher_);
    };
    for (int group = 0; group < num_groups_;) {
      row_group_view view[2];
      view_group(tile, head, group, view[0]);
      if (!view[0].any) {
        ++group;
        continue;
      }
      if (group + 1 < num_groups_) view_group(tile, head, group + 1, view[1]);
      if (!view[1].any) {
        score_group<Key>(group_queries(head, group), keys, steps, scores, prefetcher_);
        add(group, view[0], 0, soften(group, view[0], 0));
        ++group;
        continue;
      }
      score_two_groups<Key>(group_queries(head, group), group_queries(head, 1) - group_queries(head, 0), keys, steps,
                            scores, prefetcher_);
      const bool one = soften(group, view[0], 0);
      const bool two = soften(group + 1, view[1], 1);
      if (one && two) {
        add_outputs_of_two<Key>(p, scratch_.values, used.first, used.last, padded_,
                                state_of_group(head, group).accumulators(),
                                state_of_group(head, group + 1).accumulators(), prefetcher_);
      } else {
        add(group, view[0], 0, one);
        add(group + 1, view[1], 1, two);
      }
      group += 2;
    }
  }

  // Row by row, with V cleared for the keys that the row does not attend to.
  void add_outputs_row_by_row(const Key* const* rows, visible_range all, const row_group_view& view, const float* p,
                              const row_group_state& state) noexcept {
    for (int i = 0; i < view.lanes_of.rows; ++i) {
      if (view.visible[i].begin >= view.visible[i].end) continue;
      const step_range used = steps_of(view.visible[i]);
      pair_values(rows, view.visible[i]);
      float* const all_rows = scratch_.values + tile_keys / 2 * padded_;  // behind the pairs
      for (int d = 0; d < row_group_rows * padded_; d += lanes) store(all_rows + d, load(state.accumulators() + d));
      add_outputs<Key>(p, scratch_.values, used.first, used.last, padded_, all_rows, prefetcher_);
      state.take_row(i, all_rows);
    }
    pair_values(rows, all);
  }

  tile_scope own_tiles_;
  int num_groups_;        // per KV head
  visible_range common_;  // positions that all rows attend to
};

#endif

}  // namespace
}  // namespace bifolio::cpu::BIFOLIO_ISA
