// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention on tile registers, for calls of one 16-bit dtype throughout: groups of 16 rows of a KV head share products
/// for their scores, octets of them softmax and products for their outputs (attention_tile_micro.hpp).

#include "cpu/kernels/attention/mainloop.hpp"
#include "cpu/kernels/attention/tile_micro.hpp"

namespace bifolio::cpu::BIFOLIO_ISA {
namespace {

/// Whether calls of this dtype throughout run on tiles.
template <class Key>
inline constexpr bool has_tiles = false;
template <class Key>
class tile_item;

#if BIFOLIO_TILES

template <>
inline constexpr bool has_tiles<bfloat16> = true;
#if BIFOLIO_ISA_AMX_FP16
template <>
inline constexpr bool has_tiles<float16> = true;
#endif

template <class Key>
class tile_item : public item_walk<Key, tile_item<Key>> {
  using walk = item_walk<Key, tile_item>;
  friend walk;
  static_assert(sizeof(Key) == 2);

 public:
  tile_item(const attention_args& args, const attention_item& item, const attention_scratch& scratch) noexcept
      : walk(args, item, scratch),
        num_groups_((head_rows_ + tile_rows - 1) / tile_rows),
        num_octets_((head_rows_ + octet_rows - 1) / octet_rows),
        common_{range_of_token(item.num_tokens - 1).begin, range_of_token(0).end} {}

 private:
  using walk::ahead_;
  using walk::args_;
  using walk::clip;
  using walk::head_rows_;
  using walk::item_;
  using walk::k_contiguous_;
  using walk::maximum_of;
  using walk::num_heads_;
  using walk::padded_;
  using walk::qk_padded_;
  using walk::query_head;
  using walk::query_offset;
  using walk::range_of_row;
  using walk::range_of_token;
  using walk::scratch_;
  using walk::stage_row;
  using walk::state_of;
  using walk::states_;
  using walk::sum_of;
  using walk::v_contiguous_;
  using walk::value_row;

  // 16 keys each of the unit's keys, K or V.
  using unit_rows = key_rows[key_tiles];

  [[nodiscard]] float* group_queries(int head, int group) const noexcept {
    return scratch_.queries + (static_cast<std::int64_t>(head) * num_groups_ + group) * (qk_padded_ / 2 * tile_rows);
  }
  [[nodiscard]] octet_state octet(int head, int index) const noexcept {
    const std::int64_t number = static_cast<std::int64_t>(head) * num_octets_ + index;
    return {scratch_.states + number * octet_floats(args_.v_head_dim), padded_};
  }
  [[nodiscard]] int octet_end(int index) const noexcept {
    const int end = (index + 1) * octet_rows;
    return end < head_rows_ ? end : head_rows_;
  }

  // [groups][pairs of dims][16 rows]; what is missing is 0.
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
      for (int i = 0; i < num_octets_; ++i) octet(head, i).clear();
    }
  }

  float* end_row(int head, int row) noexcept {
    float* state = item_.partials == nullptr ? scratch_.values : state_of(states_, head, row);
    const octet_state from = octet(head, row / octet_rows);
    from.read_row(row % octet_rows, probability_factor<Key>, state);
    maximum_of(state, padded_) = from.maxima()[row % octet_rows];
    sum_of(state, padded_) = from.sums()[row % octet_rows];
    return state;
  }

  static BIFOLIO_INLINE void order(vf&, vf&) noexcept {}  // `end_row` has done it

  [[nodiscard]] int unit_turns() const noexcept {
    const int scores = key_tiles * (qk_padded_ / tile_dims);
    const int outputs = key_tiles * (padded_ / tile_dims);
    return num_groups_ * scores + num_octets_ * (outputs + softmax_turns);
  }

  // Where K or V of the unit lies for the products: in place, or in `staged` ([tile_keys][padded] elements) what does
  // not lie ready there, with 0 for keys that are not in `seen`.
  void find_rows(const tile_place& place, const Key* plane, int head_dim, const kv_strides& strides, bool contiguous,
                 const std::int64_t* offsets, visible_range seen, void* staged, unit_rows& rows) const noexcept {
    const int padded = padded_dims(head_dim);
    const std::int64_t staged_bytes = std::int64_t{2} * padded;
    for (int column = 0; column < tile_keys; column += tile_rows) {
      key_rows& keys = rows[column / tile_rows];
      if (contiguous && place.even[column / lanes] && head_dim == padded && seen.begin <= column &&
          seen.end >= column + tile_rows) {
        keys = {reinterpret_cast<const char*>(plane + offsets[column]), strides.token * 2};
        continue;
      }
      char* to = static_cast<char*>(staged) + column * staged_bytes;
      keys = {to, staged_bytes};
      for (int key = column; key < column + tile_rows; ++key, to += staged_bytes) {
        const Key* row = static_cast<const Key*>(scratch_.zero_row);
        if (key >= seen.begin && key < seen.end) {
          row = plane + offsets[key];
          if (!contiguous) {
            auto* staging = static_cast<Key*>(scratch_.staging);
            stage_row(row, strides, head_dim, staging);
            row = staging;
          }
        }
        for (int d = 0; d < padded; d += tile_dims) {
          store(reinterpret_cast<float*>(to + 2 * d), load_elements(row + d, head_dim - d));
        }
      }
    }
  }

  void find_keys(const tile_place& place, int head, unit_rows& keys) const noexcept {
    const Key* k = static_cast<const Key*>(args_.k) + (item_.kv_head_begin + head) * args_.k_strides.head;
    find_rows(place, k, args_.qk_head_dim, args_.k_strides, k_contiguous_, place.k, {place.begin, place.end},
              scratch_.keys, keys);
  }
  void find_values(const tile_place& place, int head, visible_range seen, unit_rows& values) const noexcept {
    const Key* v = static_cast<const Key*>(args_.v) + (item_.kv_head_begin + head) * args_.v_strides.head;
    find_rows(place, v, args_.v_head_dim, args_.v_strides, v_contiguous_, place.v, seen, scratch_.values, values);
  }

  [[nodiscard]] bool has_finite_values(const tile_place& place, int head) const noexcept {
    for (int key = place.begin; key < place.end; ++key) {
      if (!all_finite(value_row(place, head, key, 0), args_.v_head_dim)) return false;
    }
    return true;
  }

  // What the octet's rows see of the unit.
  struct octet_view {
    bool any = false;   // some row sees some key
    bool alike = true;  // all rows see all keys that some row of the item sees
    octet_lanes lanes_of;
    visible_range seen[static_cast<std::size_t>(octet_rows)];  // set unless all rows see the whole tile
  };

  void view_octet(const tile_place& place, int head, int index, octet_view& view) const noexcept {
    const int begin = index * octet_rows;
    octet_lanes& of = view.lanes_of;
    of.rows = octet_end(index) - begin;
    const bool see_all = place.first >= common_.begin && place.first + tile_keys <= common_.end;
    view.any = see_all;
    for (int i = 0; i < of.rows && !see_all; ++i) {
      const visible_range seen = clip(range_of_row(begin + i), place.first);
      view.seen[i] = seen;
      view.any = view.any || seen.begin < seen.end;
      view.alike = view.alike && seen.begin <= place.begin && seen.end >= place.end;
      of.see_all = of.see_all && seen.begin <= 0 && seen.end >= tile_keys;
    }
    of.has_alibi = args_.alibi_slopes != nullptr;
    if (of.see_all && !of.has_alibi) return;
    for (int lane = 0; lane < lanes; ++lane) {
      const int i = lane % octet_rows < of.rows ? lane % octet_rows : 0;
      if (!of.see_all) {
        of.begin[lane] = static_cast<float>(view.seen[i].begin);
        of.end[lane] = static_cast<float>(view.seen[i].end);
      }
      if (!of.has_alibi) continue;
      const int row = begin + i;
      of.slopes[lane] = args_.alibi_slopes[query_head(head, row)];
      of.distance[lane] = static_cast<float>(place.first - item_.first_position - row / args_.group_size);
    }
  }

  void run_unit(const tile_place& place, int head) noexcept {
    unit_rows keys;
    unit_rows values;
    const visible_range all{place.begin, place.end};
    find_keys(place, head, keys);
    find_values(place, head, all, values);
    alignas(64) float scores[tile_keys * tile_rows];  // [key][row]
    alignas(64) float p[key_tiles * tile_floats];
    const softmax_terms terms{args_.scale, args_.soft_cap};
    bool known_finite = false;
    for (int group = 0; group < num_groups_; ++group) {
      bool has_scores = false;
      for (int index = 2 * group; index < 2 * group + 2 && index < num_octets_; ++index) {
        octet_view view;
        view_octet(place, head, index, view);
        if (!view.any) continue;
        if (!has_scores) {
          score_tiles<Key>(group_queries(head, group), keys, qk_padded_ / tile_dims, scores, ahead_);
          has_scores = true;
        }
        const octet_state state = octet(head, index);
        softmax_octet<Key>(scores + (index - 2 * group) * octet_rows, terms, view.lanes_of, state, p, ahead_);
        // A probability of 0 hides what a row does not see, unless that is not finite.
        if (!view.alike && !known_finite) known_finite = has_finite_values(place, head);
        if (view.alike || known_finite) {
          add_outputs<Key>(p, values, place.begin / tile_rows, (place.end + tile_rows - 1) / tile_rows, padded_,
                           state.accumulators(), ahead_);
          continue;
        }
        add_apart(place, head, view, p, state);
        find_values(place, head, all, values);
      }
    }
  }

  // Row by row, each with V cleared where that row does not see it.
  void add_apart(const tile_place& place, int head, const octet_view& view, const float* p,
                 const octet_state& state) noexcept {
    for (int i = 0; i < view.lanes_of.rows; ++i) {
      unit_rows values;
      find_values(place, head, view.seen[i], values);
      auto* all_rows = static_cast<float*>(scratch_.staging);  // used by nothing else by now
      for (int d = 0; d < octet_rows * padded_; d += lanes) store(all_rows + d, load(state.accumulators() + d));
      add_outputs<Key>(p, values, place.begin / tile_rows, (place.end + tile_rows - 1) / tile_rows, padded_, all_rows,
                       ahead_);
      state.take_row(i, all_rows);
    }
  }

  tile_scope own_tiles_;
  int num_groups_;        // of 16 rows,
  int num_octets_;        // of 8, of a KV head
  visible_range common_;  // what all rows see
};

#endif

}  // namespace
}  // namespace bifolio::cpu::BIFOLIO_ISA
