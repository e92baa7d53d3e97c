// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention on vector registers: for each KV tile its keys transposed into scratch, scores, softmax row by row,
/// outputs; in float32, by dot products of pairs for calls of bfloat16 throughout, or with scores of bytes.

#include "common/attention/logits.hpp"
#include "cpu/kernels/attention/code_micro.hpp"
#include "cpu/kernels/attention/mainloop.hpp"
#include "cpu/kernels/attention/quads.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

/// KC: dims of K that are transposed at a time. 64 keys × 32 floats leave room in L1 for what the rows read; with many
/// rows, and where two dims share 32 bits, a larger KC loads and stores the scores less often. Even, so that no pair is
/// divided.
inline constexpr int decode_kc = 32;
inline constexpr int prefill_kc = 128;
inline constexpr int pair_kc = 64;
inline constexpr int quad_kc = 128;
/// Up to this many rows, V is widened again for each row group rather than once into scratch.
inline constexpr int in_place_rows = 12;

/// How scores and outputs are summed: in float32; by dot products of pairs, which scale scores afterwards and round
/// probabilities; or scores in integers, and outputs as the instruction set does best.
enum class vector_sums { widened, dots, integers };

template <class Key, vector_sums Sums>
class vector_mainloop : public mainloop<Key, vector_mainloop<Key, Sums>> {
  using base = mainloop<Key, vector_mainloop>;
  friend base;
  static constexpr bool scores_by_fours = Sums == vector_sums::integers;
  static constexpr bool scores_by_dots = Sums == vector_sums::dots;
  static constexpr bool sums_by_dots = scores_by_dots || (scores_by_fours && has_pair_dot);
  static constexpr bool pairs_columns = sums_by_dots && transposes_half_rows;
  static constexpr bool may_keep_codes = sums_by_dots && multiplies_codes;
  static constexpr bool may_keep_pairs = sizeof(Key) == 2 && !scores_by_fours && (scores_by_dots || keeps_pairs);

 public:
  vector_mainloop(const attention_args& args, const attention_item& item, const attention_scratch& scratch) noexcept
      : base(args, item, scratch),
        num_groups_(groups_of(head_rows_)),
        base_rows_(head_rows_ / num_groups_),
        extra_rows_(head_rows_ % num_groups_),
        pairs_(may_keep_pairs && (scores_by_dots || head_rows_ <= in_place_rows)),
        query_values_(scores_by_fours  ? (args.qk_head_dim + 3) / 4 + query_step_floats
                      : scores_by_dots ? (args.qk_head_dim + 1) / 2
                      : pairs_         ? (args.qk_head_dim + 1) / 2 * 2
                                       : args.qk_head_dim),
        v_in_place_(!(pairs_columns && v_columns_) && (head_rows_ <= in_place_rows || sizeof(Key) == 4)),
        k_transposed_(k_widened_ && pairs_ && base::has_runs(args.k_strides, args.qk_head_dim) &&
                      transposes_codes(args.k_code.type, args.qk_head_dim)),
        k_in_codes_(may_keep_codes && scores_by_dots && k_transposed_ && num_groups_ == 1),
        v_in_codes_(may_keep_codes && v_widened_ && num_groups_ == 1 &&
                    base::has_runs(args.v_strides, args.v_head_dim)) {}

 private:
  using base::args_;
  using base::clip;
  using base::column_polls;
  using base::dims_;
  using base::find_values;
  using base::head_rows_;
  using base::item_;
  using base::k_contiguous_;
  using base::k_pieces_;
  using base::k_scale;
  using base::k_tails_;
  using base::k_widened_;
  using base::k_zeros_;
  using base::maximum_of;
  using base::num_heads_;
  using base::num_rows;
  using base::padded_;
  using base::piece_dims;
  using base::polls_of_columns;
  using base::prefetcher_;
  using base::qk_padded_;
  using base::query_head;
  using base::query_offset;
  using base::range_of_token;
  using base::read_k_scales;
  using base::read_v_scales;
  using base::scratch_;
  using base::stage_key;
  using base::stage_value;
  using base::state_of;
  using base::states_;
  using base::stride_;
  using base::sum_of;
  using base::token_of;
  using base::v_columns_;
  using base::v_tails_;
  using base::v_widened_;
  using base::v_zeros_;
  using base::widen_keys;
  using base::widens_codes;

  // Rows that share a micro-kernel, and the keys of a tile that each of them attends to.
  struct row_group {
    int begin = 0;
    int rows = 0;
    bool any = false;                                         // some row attends to some key
    visible_range common{0, tile_keys};                       // to all rows; empty when begin ≥ end
    visible_range visible[static_cast<std::size_t>(max_mr)];  // relative to the tile
  };

  [[nodiscard]] static int groups_of(int rows) noexcept { return rows <= max_mr ? 1 : (rows + mr - 1) / mr; }
  // Rows of group `g` of one KV head: as even as possible.
  [[nodiscard]] int group_begin(int g) const noexcept { return g * base_rows_ + (g < extra_rows_ ? g : extra_rows_); }

  void pack_queries() noexcept;

  // For zero points of K: what a constant in all of a key's dims adds to the score.
  void note_query_sum(std::int64_t offset, int head, int row, float factor) const noexcept;

  void clear() noexcept {
    for (std::int64_t row = 0; row < num_rows(); ++row) {
      float* state = states_ + row * stride_;
      for (int d = 0; d < dims_; d += lanes) store(state + d, vf(0.0f));
      maximum_of(state, padded_) = minus_infinity;
      store(scratch_.sums + row * workspace_align, vf(0.0f));
    }
  }

  float* partial_of(int head, int row) noexcept {
    float* state = state_of(states_, head, row);
    const std::int64_t index = static_cast<std::int64_t>(head) * head_rows_ + row;
    sum_of(state, padded_) = reduce_add(load(scratch_.sums + index * workspace_align));
    return state;
  }

  static BIFOLIO_INLINE void order(vf& a, vf& b) noexcept {
    if constexpr (sums_by_dots) {
      order_dims(a, b, a, b);
    } else if constexpr (pair_is_interleaved<Key>) {
      interleave(a, b, a, b);
    }
  }

  // One poll per column of a transposition, per dim of the scores, per key and register pass of the accumulation.
  [[nodiscard]] int polls_per_tile(const kv_tile_offsets&) const noexcept {
    const int rows = base_rows_ + (extra_rows_ > 0 ? 1 : 0);
    const int vectors = nr_of(rows);
    const int value_vectors = v_in_codes_ ? code_nr_of(rows) : vectors;
    const int passes = (dims_ + value_vectors * lanes - 1) / (value_vectors * lanes);
    const int values =
        polls_of_columns() + num_groups_ * tile_keys * passes + (v_widened_ && !v_in_codes_ ? 2 * tile_keys : 0);
    if (k_in_codes_) return tile_vectors * args_.qk_head_dim / 4 * (code_column_polls + code_score_polls) + values;
    const int columns =
        tile_keys / lanes * args_.qk_head_dim * (scores_by_fours ? 1 : static_cast<int>(sizeof(Key))) / 4;
    const int scores = num_groups_ * args_.qk_head_dim * (tile_vectors / vectors);
    return (k_widened_ && !scores_by_fours ? 2 * tile_keys : 0) + columns + scores + values;
  }

  // The same for codes that are transposed before they are widened, or not widened here.
  template <class Code>
  void pack_codes(const kv_tile_offsets& tile, int head, int dim, int dims) noexcept;

  // The same for codes that stay integers, in any layout.
  void pack_fours(const kv_tile_offsets& tile, int head, int dim, int dims) noexcept;

  // Dims [dim, dim + dims) of the tile's keys, transposed, into scratch.
  void pack_keys(const kv_tile_offsets& tile, int head, int dim, int dims) noexcept;

  template <class Rows>
  BIFOLIO_INLINE void transpose_rows(const Rows& rows, int dims, float* keys) noexcept;

  BIFOLIO_INLINE void transpose_pieces(const Key* from, int dims, float* keys) noexcept;

  // V rows of the tile as float32 in value order in scratch.
  void widen_values(const kv_tile_offsets& tile, const Key* const* rows) noexcept;

  // V rows of keys [begin, end) of the tile in pairs of keys in scratch; a key without a partner is paired with 0.
  void pair_values(int begin, int end, const Key* const* value_rows_of) noexcept;

  // The same of V whose keys lie side by side (x_split): they are in pairs there, dim by dim.
  void pair_columns(const kv_tile_offsets& tile, int head) noexcept;

  void pair_uniform_columns(const Key* from, float* to) noexcept;

  // All scores of the tile, then group by group softmax and accumulation.
  void process_tile(const kv_tile_offsets& tile, int head) noexcept {
    // The transposed keys of KC dims stay in L1 while they are used.
    const bool by_dims = k_contiguous_ || k_transposed_ || k_pieces_;
    const int kc = scores_by_fours || k_in_codes_ ? quad_kc
                   : !by_dims                     ? args_.qk_head_dim
                   : pairs_                       ? pair_kc
                   : head_rows_ <= in_place_rows  ? decode_kc
                                                  : prefill_kc;
    for (int dim = 0; dim < args_.qk_head_dim; dim += kc) {
      const int dims = args_.qk_head_dim - dim < kc ? args_.qk_head_dim - dim : kc;
      pack_keys(tile, head, dim, dims);
      for (int g = 0; g < num_groups_; ++g) score_group(tile, head, g, dim, dims);
    }

    if constexpr (widens_codes) {
      if (k_tails_) read_k_scales(tile, head, k_scales_);
      if (v_tails_) read_v_scales(tile, head, v_scales_);
      if (sums_by_dots && v_zeros_) divide_zeros(v_scales_, v_ratios_);
    }
    const Key* rows[tile_keys];
    const float* widened[tile_keys];
    const bool by_columns = pairs_columns && v_columns_;
    if (!by_columns && !v_in_codes_) find_values(tile, head, rows);
    if (v_in_codes_) {
      // Read by accumulate_codes.
    } else if (by_columns) {
      if constexpr (pairs_columns) pair_columns(tile, head);
    } else if (v_in_place_) {
      // The other key of a pair may be outside the tile: it is loaded, never multiplied.
      if (sums_by_dots && tile.begin % 2 != 0) rows[tile.begin - 1] = static_cast<const Key*>(scratch_.zero_row);
      if (sums_by_dots && tile.end % 2 != 0) rows[tile.end] = static_cast<const Key*>(scratch_.zero_row);
    } else if constexpr (sums_by_dots) {
      pair_values(tile.begin, tile.end, rows);
    } else {
      widen_values(tile, rows);
      for (int key = tile.begin; key < tile.end; ++key) {
        widened[key] = scratch_.values + static_cast<std::int64_t>(key) * padded_;
      }
    }
    for (int g = 0; g < num_groups_; ++g) {
      const row_group group = group_of(tile, g);
      if (!group.any) continue;
      float* scores = scratch_.scores + static_cast<std::int64_t>(group.begin) * tile_keys;
      const std::int64_t row_index = static_cast<std::int64_t>(head) * head_rows_ + group.begin;
      float* group_states = states_ + row_index * stride_;
      for (int i = 0; i < group.rows; ++i) {
        if (group.visible[i].begin >= group.visible[i].end) continue;
        softmax_row(scores + i * tile_keys, group.visible[i], tile.first, head, group.begin + i,
                    step_of(group, head, i), group_states + i * stride_,
                    scratch_.sums + (row_index + i) * workspace_align);
      }
      if constexpr (sums_by_dots) {
        if (v_in_codes_) {
          accumulate_codes(scores, tile, head, group, group_states);
        } else if (v_in_place_) {
          accumulate_dot(scores, value_rows{rows}, args_.v_head_dim, group, group_states);
        } else {
          accumulate_dot(scores, value_pairs{scratch_.values, padded_}, dims_, group, group_states);
        }
      } else if (v_in_place_) {
        accumulate(scores, rows, args_.v_head_dim, group, group_states);
      } else {
        accumulate(scores, widened, dims_, group, group_states);
      }
    }
  }

  [[nodiscard]] BIFOLIO_INLINE row_group group_of(const kv_tile_offsets& tile, int g) const noexcept {
    row_group group;
    group.begin = group_begin(g);
    group.rows = group_begin(g + 1) - group.begin;
    int token = group.begin / args_.group_size;
    int left_of_token = (token + 1) * args_.group_size - group.begin;
    visible_range visible = clip(range_of_token(token), tile.first);
    for (int i = 0; i < group.rows; ++i, --left_of_token) {
      if (left_of_token == 0) {
        visible = clip(range_of_token(++token), tile.first);
        left_of_token = args_.group_size;
      }
      group.visible[i] = visible;
      group.any = group.any || visible.begin < visible.end;
      if (visible.begin > group.common.begin) group.common.begin = visible.begin;
      if (visible.end < group.common.end) group.common.end = visible.end;
    }
    return group;
  }

  // Adds dims [dim, dim + dims) to the scores of one row group; the first dims start them.
  BIFOLIO_INLINE void score_group(const kv_tile_offsets& tile, int head, int g, int dim, int dims) noexcept {
    const row_group group = group_of(tile, g);
    if (!group.any) return;
    float* scores = scratch_.scores + static_cast<std::int64_t>(group.begin) * tile_keys;
    constexpr int dims_of_value = scores_by_fours ? 4 : scores_by_dots ? 2 : 1;
    const float* queries = queries_of(group, head) + static_cast<std::int64_t>(dim / dims_of_value) * group.rows;
    if constexpr (scores_by_dots && may_keep_codes) {
      if (k_in_codes_) {
        return with_code(
            args_.k_code.type, [&]<class Code>() __attribute__((always_inline)) {
              with_rows(
                  group.rows, [&]<int Rows>() __attribute__((always_inline)) {
                    score_codes<Code, Rows>(queries, scratch_.keys, dims / 4, dim > 0, scores, prefetcher_);
                  });
            });
      }
    }
    with_rows(
        group.rows, [&]<int Rows>() __attribute__((always_inline)) {
          const auto add = [&]<class Column>(Column) __attribute__((always_inline)) {
            const int columns = (dims + Column::dims - 1) / Column::dims;
            score_rows<Column, Rows>(queries, scratch_.keys, columns, dim > 0, scores, prefetcher_);
          };
          if constexpr (scores_by_fours) {
            add(quad_column{});
          } else if constexpr (scores_by_dots) {
            add(dot_column{});
          } else if constexpr (may_keep_pairs) {
            if (pairs_) {
              add(pair_column<Key>{});
            } else {
              add(wide_column{});
            }
          } else {
            add(wide_column{});
          }
        });
  }

  [[nodiscard]] const float* queries_of(const row_group& group, int head) const noexcept {
    return scratch_.queries + (static_cast<std::int64_t>(head) * head_rows_ + group.begin) * query_values_;
  }
  // Of row i of a group, whose queries were rounded.
  [[nodiscard]] BIFOLIO_INLINE query_step step_of(const row_group& group, int head, int i) const noexcept {
    if constexpr (!scores_by_fours) return {};
    const float* const at =
        queries_of(group, head) + static_cast<std::int64_t>(query_values_ - query_step_floats) * group.rows + i;
    return {at[0], __builtin_bit_cast(std::int32_t, at[group.rows])};
  }

  // The row's bias for the keys of a tile that it attends to, 0 elsewhere.
  void read_bias(visible_range visible, std::int64_t tile_first, int head, int row, float* bias) const noexcept;

  // Logits → probabilities in place, against the row's running maximum; updates maximum, sums and, when the maximum
  // rises, the accumulator.
  BIFOLIO_INLINE void softmax_row(float* scores, visible_range visible, std::int64_t tile_first, int head, int row,
                                  const query_step& query, float* state, float* sums) const noexcept;

  static BIFOLIO_INLINE void store_probabilities(const vf* p, float* to) noexcept;

  // Zero points of V: each adds its probability times itself to all dims. Per lane.
  BIFOLIO_INLINE vf sum_zeros(const vf* p, visible_range visible) const noexcept;

  // The other part, of rounded probabilities (`divide_zeros`).
  BIFOLIO_INLINE vf sum_ratios(const float* rounded, visible_range visible) const noexcept;

  // Rows together for the keys that all of them attend to, one by one before and after those; keys ascend in each row.
  template <class Value>
  BIFOLIO_INLINE void accumulate(const float* p, const Value* const* values, int dims, const row_group& group,
                                 float* states) noexcept {
    const visible_range* visible = group.visible;
    const visible_range common = group.common;
    const int rows = group.rows;
    const bool together = common.begin < common.end;
    const auto alone = [&](int row, std::int64_t begin, std::int64_t end) {
      if (begin >= end) return;
      accumulate_rows<1>(p + row * tile_keys, values, static_cast<int>(begin), static_cast<int>(end), dims,
                         states + row * stride_, stride_, prefetcher_);
    };
    for (int i = 0; i < rows; ++i) alone(i, visible[i].begin, together ? common.begin : visible[i].end);
    if (!together) return;
    with_rows(
        rows, [&]<int Rows>() __attribute__((always_inline)) {
          accumulate_rows<Rows>(p, values, static_cast<int>(common.begin), static_cast<int>(common.end), dims, states,
                                stride_, prefetcher_);
        });
    for (int i = 0; i < rows; ++i) alone(i, common.end, visible[i].end);
  }

  // The same by pairs of keys. If a row attends to one key of a pair, the bits of the other key are cleared.
  template <class Values>
  BIFOLIO_INLINE void accumulate_dot(const float* p, const Values& values, int dims, const row_group& group,
                                     float* states) noexcept {
    const visible_range* visible = group.visible;
    const visible_range common{(group.common.begin + 1) / 2 * 2, group.common.end / 2 * 2};
    const int rows = group.rows;
    const bool together = common.begin < common.end;
    const auto alone = [&](int row, std::int64_t begin, std::int64_t end) {
      const auto some = [&](std::int64_t first, std::int64_t last, std::uint32_t keep) {
        accumulate_pairs<1>(p + row * tile_keys, values, static_cast<int>(first), static_cast<int>(last), keep, dims,
                            states + row * stride_, stride_, prefetcher_);
      };
      if (begin >= end) return;
      if (begin % 2 != 0) {
        some(begin / 2, begin / 2 + 1, 0xffff0000u);
        ++begin;
      }
      if (begin / 2 < end / 2) some(begin / 2, end / 2, 0xffffffffu);
      if (end % 2 != 0 && begin < end) some(end / 2, end / 2 + 1, 0xffffu);
    };
    for (int i = 0; i < rows; ++i) alone(i, visible[i].begin, together ? common.begin : visible[i].end);
    if (!together) return;
    with_rows(
        rows, [&]<int Rows>() __attribute__((always_inline)) {
          accumulate_pairs<Rows>(p, values, static_cast<int>(common.begin / 2), static_cast<int>(common.end / 2),
                                 0xffffffffu, dims, states, stride_, prefetcher_);
        });
    for (int i = 0; i < rows; ++i) alone(i, common.end, visible[i].end);
  }

  // The same of codes in place.
  void accumulate_codes(const float* p, const kv_tile_offsets& tile, int head, const row_group& group,
                        float* states) noexcept {
    if constexpr (may_keep_codes) {
      with_code(
          args_.v_code.type, [&]<class Code>() __attribute__((always_inline)) {
            const Code* const v =
                static_cast<const Code*>(args_.v) + (item_.kv_head_begin + head) * args_.v_strides.head;
            const Code* rows[tile_keys];
            for (int key = tile.begin; key < tile.end; ++key) rows[key] = v + tile.v[key];
            // The other key of a pair may be outside the tile: it is loaded, never multiplied.
            if (tile.begin % 2 != 0) rows[tile.begin - 1] = static_cast<const Code*>(scratch_.zero_row);
            if (tile.end % 2 != 0) rows[tile.end] = static_cast<const Code*>(scratch_.zero_row);
            accumulate_dot(p, value_codes<Code>{rows, {}}, args_.v_head_dim, group, states);
          });
    }
  }

  int num_groups_;
  int base_rows_;  // of each group; the first `extra_rows_` groups have one more
  int extra_rows_;
  bool pairs_;        // transposed keys of 16 bits stay in pairs
  int query_values_;  // floats of a row in scratch
  bool v_in_place_;
  bool k_transposed_;  // codes of K are widened after the transposition,
  bool k_in_codes_;    // where they are multiplied
  bool v_in_codes_;    // codes of V are
  // Of the tile, where codes have scales per token.
  tile_scales k_scales_;
  tile_scales v_scales_;
  alignas(64) float v_ratios_[tile_keys];
};

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

#include "cpu/kernels/attention/vectors_pack.hpp"
#include "cpu/kernels/attention/vectors_softmax.hpp"
