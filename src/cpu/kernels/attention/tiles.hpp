// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention on tile registers, for calls of one 16-bit dtype throughout, and for 8-bit codes beside bfloat16, whose
/// rows are widened into scratch. Row groups of 16 rows of a KV head share softmax and products. Items of one group
/// (decode) read V in place, others pair it (tile_micro.hpp); both give the same bits.
///
/// Those others, which have one KV head, go through four KV tiles in phases:
///   scores and softmax of all groups for one tile, then for the next ones, the scores of two groups at a time, between
///   the vector instructions of the softmax of the two before;
///   outputs of all groups over all four tiles, two groups at a time.
/// In between the probabilities of all groups and the paired V of these tiles are in scratch, and outputs are
/// *pending*. A group's pending outputs are added earlier where the order of its sums demands it: before a maximum that
/// rises scales its accumulators, before rows are computed one by one, and at the end of the split.

#include "cpu/kernels/attention/mainloop.hpp"
#include "cpu/kernels/attention/tile_micro.hpp"
#include "cpu/kernels/attention/tile_softmax.hpp"

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
        num_groups_((head_rows_ + row_group_rows - 1) / row_group_rows),
        in_place_(num_groups_ == 1),
        common_{range_of_token(item.num_tokens - 1).begin, range_of_token(0).end} {}

 private:
  using base::args_;
  using base::clip;
  using base::find_values;
  using base::head_rows_;
  using base::item_;
  using base::k_contiguous_;
  using base::k_scale;
  using base::k_tails_;
  using base::k_widened_;
  using base::maximum_of;
  using base::num_heads_;
  using base::padded_;
  using base::polls_of_columns;
  using base::prefetcher_;
  using base::qk_padded_;
  using base::query_head;
  using base::query_offset;
  using base::range_of_row;
  using base::range_of_token;
  using base::read_k_scales;
  using base::read_v_scales;
  using base::scratch_;
  using base::stage_row;
  using base::state_of;
  using base::states_;
  using base::sum_of;
  using base::v_contiguous_;
  using base::v_tails_;
  using base::v_widened_;
  using base::widen_keys;

  // K or V of the tile's keys, 16 keys each.
  using tile_key_rows = key_rows[key_tiles];

  [[nodiscard]] float* group_queries(int head, int group) const noexcept {
    return scratch_.queries + (static_cast<std::int64_t>(head) * num_groups_ + group) * (qk_padded_ / 2 * tile_rows);
  }
  [[nodiscard]] row_group_state state_of_group(int head, int group) const noexcept {
    const std::int64_t number = static_cast<std::int64_t>(head) * num_groups_ + group;
    return {scratch_.states + number * row_group_floats(args_.v_head_dim), padded_, in_place_};
  }
  [[nodiscard]] int rows_of_group(int group) const noexcept {
    const int left = head_rows_ - group * row_group_rows;
    return left < row_group_rows ? left : row_group_rows;
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
      for (int group = 0; group < num_groups_; ++group) state_of_group(head, group).clear(rows_of_group(group));
    }
    if (in_place_) return;
    for (int group = 0; group < num_groups_; ++group) scratch_.pending[group] = 0;
  }

  // The totals of a row group are combined together as far as maxima and sums go.
  void end_split(std::int64_t split) noexcept {
    for (int head = 0; head < num_heads_; ++head) {
      for (int group = 0; group < num_groups_; ++group) {
        const row_group_state state = state_of_group(head, group);
        const int rows = rows_of_group(group);
        if (item_.partials == nullptr) {
          combine_group(split, head, group * row_group_rows, rows, state);
        } else {
          for (int i = 0; i < rows; ++i) copy_state(state, i, state_of(states_, head, group * row_group_rows + i));
        }
      }
    }
  }

  // Row `i` of a group in the form of totals and partial results.
  void copy_state(const row_group_state& from, int i, float* state) noexcept {
    from.read_row(
        i, probability_factor<Key>, [&](int d, vf x) __attribute__((always_inline)) { store(state + d, x); });
    maximum_of(state, padded_) = from.maxima()[i];
    sum_of(state, padded_) = from.sums()[i];
  }

  // `combine` of the base for the rows of a group that attend to some key of the split, with the same bits.
  void combine_group(std::int64_t split, int head, int first_row, int rows, const row_group_state& from) noexcept {
    alignas(64) float total_maxima[lanes];
    alignas(64) float total_sums[lanes];
    store(total_maxima, vf(-__builtin_inff()));
    store(total_sums, vf(0.0f));
    for (int i = 0; i < rows; ++i) {
      float* const total = state_of(scratch_.totals, head, first_row + i);
      total_maxima[i] = maximum_of(total, padded_);
      total_sums[i] = sum_of(total, padded_);
    }
    const vf m = load(from.maxima());
    const vf l = load(from.sums());
    const vf total_m = load(total_maxima);
    const vf joint = xsimd::select(m > total_m, m, total_m);
    const vf base = xsimd::select(joint == vf(-__builtin_inff()), vf(0.0f), joint);
    const vf total_weight = exp(total_m - base);
    const vf weight = exp(m - base);
    alignas(64) float total_weights[lanes];
    alignas(64) float weights[lanes];
    store(total_weights, total_weight);
    store(weights, weight);
    store(total_maxima, joint);
    store(total_sums, l * weight + load(total_sums) * total_weight);
    const std::int64_t first_key = split * split_keys;
    for (int i = 0; i < rows; ++i) {
      const visible_range range = range_of_row(first_row + i);
      if (range.begin >= first_key + split_keys || range.end <= first_key || range.begin >= range.end) continue;
      float* const total = state_of(scratch_.totals, head, first_row + i);
      if (range.begin >= first_key) {
        copy_state(from, i, total);
        continue;
      }
      const vf a(total_weights[i]);
      const vf b(weights[i]);
      from.read_row(
          i, probability_factor<Key>, [&](int d, vf x) __attribute__((always_inline)) {
            store(total + d, attn::combine_value<vector_math>(a, b, load(total + d), x));
          });
      maximum_of(total, padded_) = total_maxima[i];
      sum_of(total, padded_) = total_sums[i];
    }
  }

  static BIFOLIO_INLINE void order(vf&, vf&) noexcept {}  // `partial_of` has done it

  [[nodiscard]] int polls_per_tile(const kv_tile_offsets& tile) const noexcept {
    const int scores = key_tiles * (qk_padded_ / tile_dims);
    const int outputs = key_steps * (padded_ / output_dims);
    const int staged = polls_of_columns() + 2 * tile_keys * ((k_widened_ ? 1 : 0) + (v_widened_ ? 1 : 0));
    if (in_place_) return staged + scores + num_blocks() * outputs + softmax_polls(head_rows_);
    const int output_tiles = adds_outputs_after(tile) ? num_pending_ + 1 : 0;
    return staged + tile_keys / 2 + num_groups_ * (scores + output_tiles * outputs) +
           (num_groups_ - 1) * softmax_polls(row_group_rows) + softmax_polls(rows_of_group(num_groups_ - 1));
  }
  // Row blocks of an item in place.
  [[nodiscard]] int num_blocks() const noexcept { return (head_rows_ + row_block_rows - 1) / row_block_rows; }

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

  void place_keys(const kv_tile_offsets& tile, int head, tile_key_rows& keys) noexcept {
    const Key* k = static_cast<const Key*>(args_.k) + (item_.kv_head_begin + head) * args_.k_strides.head;
    auto* staging = reinterpret_cast<Key*>(scratch_.keys) + std::int64_t{tile_keys} * qk_padded_;  // behind `staged`
    if (k_widened_) {
      widen_keys(tile, head, tile.begin, tile.end, staging + std::int64_t{tile.begin} * qk_padded_, qk_padded_);
    }
    const Key* row_of[tile_keys];
    for (int key = tile.begin; key < tile.end; ++key) {
      row_of[key] = k + tile.k[key];
      if (k_contiguous_) continue;
      Key* const row = staging + std::int64_t{key} * qk_padded_;
      if (!k_widened_) stage_row(row_of[key], args_.k_strides, args_.qk_head_dim, row);
      row_of[key] = row;
    }
    find_rows(tile, row_of, args_.qk_head_dim, k_contiguous_ ? args_.k_strides.token : qk_padded_,
              {tile.begin, tile.end}, scratch_.keys, keys);
  }
  // The logits transform of a head, and the scales of the tile's tokens.
  [[nodiscard]] softmax_terms terms_of(const kv_tile_offsets& tile, int head) noexcept {
    softmax_terms terms{args_.scale * k_scale(head), args_.soft_cap};
    if (k_tails_) {
      read_k_scales(tile, head, k_scales_);
      terms.key_scales = k_scales_.scale;
    }
    if (v_tails_) {
      read_v_scales(tile, head, v_scales_);
      terms.value_scales = v_scales_.scale;
    }
    return terms;
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

  // The keys of the tile that the rows of a row group attend to.
  struct row_group_view {
    bool any;    // some row attends to some key
    bool alike;  // all rows attend to all keys that some row of the item attends to
    row_group_lanes lanes_of;
    visible_range visible[static_cast<std::size_t>(row_group_rows)];  // set unless all rows attend to the whole tile
  };

  void view_group(const kv_tile_offsets& tile, int head, int group, row_group_view& view) const noexcept {
    const int begin = group * row_group_rows;
    row_group_lanes& of = view.lanes_of;
    of.rows = rows_of_group(group);
    of.width = vector_rows(of.rows);
    const bool all_visible = tile.first >= common_.begin && tile.first + tile_keys <= common_.end;
    view.any = all_visible;
    view.alike = true;
    of.all_visible = true;
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
      const int i = lane % of.width < of.rows ? lane % of.width : 0;
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

  // Steps [first, last) of 32 keys, with all keys in `visible`.
  struct step_range {
    int first;
    int last;
  };
  static BIFOLIO_INLINE step_range steps_of(visible_range visible) noexcept {
    return {static_cast<int>(visible.begin) / 32, (static_cast<int>(visible.end) + 31) / 32};
  }

  // V of the tile's keys in `visible` in pairs of keys, the others 0, for `add_outputs`; steps of which none is visible
  // are left out.
  void pair_values(const Key* const* row_of, visible_range visible, float* paired) noexcept {
    const step_range steps = steps_of(visible);
    for (int pair = steps.first * 16; pair < steps.last * 16; ++pair) {
      const Key* rows[2];
      for (int i = 0; i < 2; ++i) {
        const int key = pair / 16 * 32 + i * 16 + pair % 16;
        const bool is_visible = key >= visible.begin && key < visible.end;
        rows[i] = is_visible ? row_of[key] : static_cast<const Key*>(scratch_.zero_row);
      }
      float* to = paired + pair * lanes;
      prefetcher_.poll();
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

  void process_tile(const kv_tile_offsets& tile, int head) noexcept {
    if (in_place_) return process_in_place(tile, head);
    process_paired(tile, head);
  }

  void process_in_place(const kv_tile_offsets& tile, int head) noexcept {
    row_group_view view;
    view_group(tile, head, 0, view);
    if (!view.any) return;
    tile_key_rows keys;
    tile_key_rows values;
    const visible_range all{tile.begin, tile.end};
    const Key* row_of[tile_keys];
    place_keys(tile, head, keys);
    find_values(tile, head, row_of);
    place_values(tile, row_of, all, values);
    constexpr int num_floats = 2 * key_steps * tile_floats;
    alignas(64) float scores[2 * num_floats];  // [key][row], then what `add_outputs_in_place` needs
    alignas(64) float p[2 * num_floats];       // [row block][keys / 16][16][16 pairs]
    score_group<Key>(group_queries(head, 0), keys, qk_padded_ / tile_dims, scores, prefetcher_);
    const row_group_state state = state_of_group(head, 0);
    softmax_group<Key>(scores, terms_of(tile, head), view.lanes_of, state, true, {}, p, prefetcher_);
    // A probability of 0 masks a key, unless its V is not finite.
    if (view.alike || has_finite_values(tile, row_of)) {
      return add_in_place(tile, p, values, state.accumulators(), scores);
    }
    // Row by row, with V cleared for the keys that the row does not attend to.
    float* const all_rows = scratch_.values + tile_keys / 2 * padded_;  // behind the staged rows
    for (int i = 0; i < view.lanes_of.rows; ++i) {
      place_values(tile, row_of, view.visible[i], values);
      for (int d = 0; d < row_group_rows * padded_; d += lanes) store(all_rows + d, load(state.accumulators() + d));
      add_in_place(tile, p, values, all_rows, scores);
      state.take_row(i, all_rows);
    }
  }

  void add_in_place(const kv_tile_offsets& tile, const float* p, const tile_key_rows& values, float* accumulators,
                    float* products) noexcept {
    for (int row = 0; row < head_rows_; row += row_block_rows) {
      const int rows = head_rows_ - row < row_block_rows ? head_rows_ - row : row_block_rows;
      add_outputs_in_place<Key>(p + row / row_block_rows * (key_tiles * tile_floats), values, tile.begin / tile_rows,
                                (tile.end + tile_rows - 1) / tile_rows, padded_, rows, accumulators + row * padded_,
                                products, prefetcher_);
    }
  }

  // Otherwise the outputs of this tile wait for those of the next one.
  [[nodiscard]] bool adds_outputs_after(const kv_tile_offsets& tile) const noexcept {
    return num_pending_ + 1 == output_tiles_together || tile.ends_split || num_heads_ > 1;
  }

  void process_paired(const kv_tile_offsets& tile, int head) noexcept {
    const bool adds_outputs = adds_outputs_after(tile);
    if (add_probabilities(tile, head)) ++num_pending_;
    if (adds_outputs) add_pending(head);
  }

  // Up to two row groups that attend to some key of a KV tile.
  struct viewed_groups {
    int count = 0;
    int groups[2];
    row_group_view views[2];
  };
  // The next ones from `group` on; returns where to go on.
  int find_groups(const kv_tile_offsets& tile, int head, int group, viewed_groups& found) const noexcept {
    found.count = 0;
    for (; group < num_groups_ && found.count < 2; ++group) {
      row_group_view& view = found.views[found.count];
      view_group(tile, head, group, view);
      if (view.any) found.groups[found.count++] = group;
    }
    return group;
  }

  // Part 0 or 1 of the scores of such groups: of two one half of the keys each, of one all keys and nothing.
  [[nodiscard]] BIFOLIO_INLINE score_pieces<Key> scores_of(const viewed_groups& groups, int part, int head,
                                                           const tile_key_rows& keys,
                                                           float (&scores)[2][tile_keys * tile_rows]) const noexcept {
    score_pieces<Key> pieces;
    if (groups.count <= part && groups.count < 2) return pieces;
    pieces.count = qk_padded_ / tile_dims;
    pieces.keys = keys + part * (key_tiles / 2);
    pieces.queries = group_queries(head, groups.groups[0]);
    pieces.scores = scores[0] + part * (tile_keys / 2 * tile_rows);
    if (groups.count < 2) return pieces;
    pieces.queries2 = group_queries(head, groups.groups[1]);
    pieces.scores2 = scores[1] + part * (tile_keys / 2 * tile_rows);
    return pieces;
  }

  // Scores and softmax of all row groups, and V in pairs: all that their outputs need, which become pending. False:
  // no row attends to a key of the tile.
  bool add_probabilities(const kv_tile_offsets& tile, int head) noexcept {
    alignas(64) float scores[2][2][tile_keys * tile_rows];  // [key][row] of two groups and of the next two
    viewed_groups viewed[2];
    int next = find_groups(tile, head, 0, viewed[0]);
    if (viewed[0].count == 0) return false;
    tile_key_rows keys;
    place_keys(tile, head, keys);
    for (int part = 0; part < 2; ++part) issue_all(scores_of(viewed[0], part, head, keys, scores[0]), prefetcher_);
    const std::int32_t bit = 1 << num_pending_;
    bool all_alike = true;
    const softmax_terms terms = terms_of(tile, head);
    for (int place = 0; viewed[place].count > 0; place = 1 - place) {
      const viewed_groups& now = viewed[place];
      viewed_groups& after = viewed[1 - place];
      next = find_groups(tile, head, next, after);
      for (int i = 0; i < now.count; ++i) {
        const int group = now.groups[i];
        std::int32_t& pending = scratch_.pending[group];
        const output_steps before = steps_of_tiles(pending);
        products_between<Key> between;
        between.scores = scores_of(after, i, head, keys, scores[1 - place]);
        if (pending != 0) between.pending = &before;
        between.p = probabilities_of(group);
        const bool rises =
            softmax_group<Key>(scores[place][i], terms, now.views[i].lanes_of, state_of_group(head, group), false,
                               between, probabilities_of(group) + pending_place(num_pending_), prefetcher_);
        pending = (rises ? 0 : pending) | bit;
        all_alike = all_alike && now.views[i].alike;
      }
    }
    // As late as possible: V is what was prefetched last.
    const Key* row_of[tile_keys];
    const visible_range all{tile.begin, tile.end};
    find_values(tile, head, row_of);
    used_steps_[num_pending_] = steps_of(all);
    pair_values(row_of, all, pairs_of(num_pending_));
    // A probability of 0 masks a key, unless its V is not finite.
    if (!all_alike && !has_finite_values(tile, row_of)) add_row_by_row(tile, head, row_of);
    return true;
  }

  // The probabilities of a row group; those of pending KV tile `i` are `pending_place(i)` floats after them.
  [[nodiscard]] float* probabilities_of(int group) const noexcept {
    return scratch_.probabilities + group * row_group_probabilities;
  }
  [[nodiscard]] std::int64_t pending_place(int i) const noexcept { return i * num_groups_ * row_group_probabilities; }
  // V in pairs of pending KV tile `i`.
  [[nodiscard]] float* pairs_of(int i) const noexcept {
    return scratch_.value_pairs + std::int64_t{i} * (tile_keys / 2) * padded_;
  }

  // Those of pending KV tile `i`, with V from `paired`.
  void append_steps(output_steps& to, int i, step_range steps, const float* paired) const noexcept {
    for (int step = steps.first; step < steps.last; ++step) {
      to.steps[to.count++] = {pending_place(i) + step * tile_floats, paired + step * tile_floats};
    }
  }
  // Those of the KV tiles whose bits are set.
  [[nodiscard]] output_steps steps_of_tiles(std::int32_t bits) const noexcept {
    output_steps steps;
    for (int i = 0; i < output_tiles_together; ++i) {
      if ((bits >> i & 1) != 0) append_steps(steps, i, used_steps_[i], pairs_of(i));
    }
    return steps;
  }

  // The first group from `group` on that has pending outputs.
  [[nodiscard]] int next_pending(int group) const noexcept {
    while (group < num_groups_ && scratch_.pending[group] == 0) ++group;
    return group;
  }

  // All pending outputs.
  void add_pending(int head) noexcept {
    for (int group = next_pending(0); group < num_groups_;) {
      const std::int32_t tiles = scratch_.pending[group];
      const output_steps steps = steps_of_tiles(tiles);
      float* const accumulators = state_of_group(head, group).accumulators();
      const int other = next_pending(group + 1);
      if (other < num_groups_ && scratch_.pending[other] == tiles) {
        add_outputs_of_two<Key>(steps, probabilities_of(group), probabilities_of(other), padded_, accumulators,
                                state_of_group(head, other).accumulators(), prefetcher_);
        scratch_.pending[other] = 0;
      } else {
        add_outputs<Key>(steps, probabilities_of(group), padded_, accumulators, prefetcher_);
      }
      scratch_.pending[group] = 0;
      group = next_pending(other);
    }
    num_pending_ = 0;
  }

  // The outputs of this KV tile, the last pending one, and of those before, of the groups whose rows attend to
  // different keys: row by row, with V cleared for the keys that the row does not attend to.
  void add_row_by_row(const kv_tile_offsets& tile, int head, const Key* const* row_of) noexcept {
    float* const paired = scratch_.values;
    float* const all_rows = scratch_.values + tile_keys / 2 * padded_;  // behind the pairs
    const std::int32_t bit = 1 << num_pending_;
    for (int group = 0; group < num_groups_; ++group) {
      std::int32_t& pending = scratch_.pending[group];
      row_group_view view;
      view_group(tile, head, group, view);
      if (!view.any || view.alike) continue;
      const row_group_state state = state_of_group(head, group);
      const float* const p = probabilities_of(group);
      const std::int32_t before = pending & ~bit;
      if (before != 0) add_outputs<Key>(steps_of_tiles(before), p, padded_, state.accumulators(), prefetcher_);
      pending = 0;
      for (int i = 0; i < view.lanes_of.rows; ++i) {
        if (view.visible[i].begin >= view.visible[i].end) continue;
        pair_values(row_of, view.visible[i], paired);
        output_steps steps;
        append_steps(steps, num_pending_, steps_of(view.visible[i]), paired);
        for (int d = 0; d < row_group_rows * padded_; d += lanes) store(all_rows + d, load(state.accumulators() + d));
        add_outputs<Key>(steps, p, padded_, all_rows, prefetcher_);
        state.take_row(i, all_rows);
      }
    }
  }

  tile_scope own_tiles_;
  int num_groups_;        // per KV head
  bool in_place_;         // how V enters the products
  visible_range common_;  // positions that all rows attend to
  // Of the tile, where codes have scales per token.
  tile_scales k_scales_;
  tile_scales v_scales_;
  // Of an item that pairs V: KV tiles whose outputs are pending, and their steps.
  int num_pending_ = 0;
  step_range used_steps_[std::size_t{output_tiles_together}] = {};
};

#endif

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA
