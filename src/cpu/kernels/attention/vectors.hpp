// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention on vector registers: for each KV tile its keys transposed into scratch, scores, softmax row by row,
/// outputs; in float32 or, for calls that are bfloat16 throughout, by the hardware's dot products of pairs.

#include "common/attention/logits.hpp"
#include "cpu/kernels/attention/mainloop.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

/// KC: dims of K that are transposed at a time. 64 keys × 32 floats leave room in L1 for what the rows read; with many
/// rows, and where two dims share 32 bits, a larger KC loads and stores the scores less often. Even, so that no pair is
/// divided.
inline constexpr int decode_kc = 32;
inline constexpr int prefill_kc = 128;
inline constexpr int pair_kc = 64;
/// Up to this many rows, V is widened again for each row group rather than once into scratch.
inline constexpr int in_place_rows = 12;

/// How scores and outputs are summed: in float32 or by dot products of pairs, which scale scores afterwards and round
/// probabilities.
enum class vector_sums { widened, dots };

template <class Key, vector_sums Sums>
class vector_mainloop : public mainloop<Key, vector_mainloop<Key, Sums>> {
  using base = mainloop<Key, vector_mainloop>;
  friend base;
  static constexpr bool uses_dots = Sums == vector_sums::dots;
  static constexpr bool pairs_columns = uses_dots && transposes_half_rows;
  static constexpr bool may_keep_pairs = sizeof(Key) == 2 && (uses_dots || keeps_pairs);

 public:
  vector_mainloop(const attention_args& args, const attention_item& item, const attention_scratch& scratch) noexcept
      : base(args, item, scratch),
        num_groups_(groups_of(head_rows_)),
        base_rows_(head_rows_ / num_groups_),
        extra_rows_(head_rows_ % num_groups_),
        pairs_(may_keep_pairs && (uses_dots || head_rows_ <= in_place_rows)),
        query_values_(uses_dots ? (args.qk_head_dim + 1) / 2
                      : pairs_  ? (args.qk_head_dim + 1) / 2 * 2
                                : args.qk_head_dim),
        v_in_place_(!(pairs_columns && v_columns_) && (head_rows_ <= in_place_rows || sizeof(Key) == 4)),
        k_transposed_(k_widened_ && pairs_ && base::has_runs(args.k_strides, args.qk_head_dim) &&
                      transposes_codes(args.k_code.type, args.qk_head_dim)) {}

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

  void pack_queries() noexcept {
    float* row_values = scratch_.values;
    for (int head = 0; head < num_heads_; ++head) {
      float* queries = scratch_.queries + static_cast<std::int64_t>(head) * head_rows_ * query_values_;
      for (int g = 0; g < num_groups_; ++g) {
        const int begin = group_begin(g);
        const int rows = group_begin(g + 1) - begin;
        float* packed = queries + static_cast<std::int64_t>(begin) * query_values_;
        for (int i = 0; i < rows; ++i) {
          const std::int64_t offset = query_offset(head, begin + i);
          if constexpr (uses_dots) {
            if (k_zeros_) note_query_sum(offset, head, begin + i, 1.0f);
            pair_row(static_cast<const bfloat16*>(args_.q) + offset, args_.qk_head_dim, row_values);
          } else {
            if (k_zeros_) note_query_sum(offset, head, begin + i, args_.scale);
            widen_any(args_.q_type, args_.q, offset, args_.qk_head_dim, args_.scale * k_scale(head), row_values);
            if (query_values_ > args_.qk_head_dim) row_values[args_.qk_head_dim] = 0;
          }
          for (int d = 0; d < query_values_; ++d) packed[static_cast<std::int64_t>(d) * rows + i] = row_values[d];
        }
      }
    }
  }

  // For zero points of K: what a constant in all of a key's dims adds to the score.
  void note_query_sum(std::int64_t offset, int head, int row, float factor) const noexcept {
    float* const values = scratch_.values;
    widen_any(args_.q_type, args_.q, offset, args_.qk_head_dim, factor, values);
    float sum = 0;
    for (int d = 0; d < args_.qk_head_dim; ++d) sum += values[d];
    scratch_.query_sums[static_cast<std::int64_t>(head) * head_rows_ + row] = sum;
  }

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
    if constexpr (uses_dots) {
      order_dims(a, b, a, b);
    } else if constexpr (pair_is_interleaved<Key>) {
      interleave(a, b, a, b);
    }
  }

  // One poll per column of a transposition, per dim of the scores, per key and register pass of the accumulation.
  [[nodiscard]] int polls_per_tile() const noexcept {
    const int vectors = nr_of(base_rows_ + (extra_rows_ > 0 ? 1 : 0));
    const int passes = (dims_ + vectors * lanes - 1) / (vectors * lanes);
    const int columns = tile_keys / lanes * args_.qk_head_dim * static_cast<int>(sizeof(Key)) / 4;
    const int widened = 2 * tile_keys * ((k_widened_ ? 1 : 0) + (v_widened_ ? 1 : 0));
    return widened + columns + polls_of_columns() +
           num_groups_ * (args_.qk_head_dim * (tile_vectors / vectors) + tile_keys * passes);
  }

  // The same for codes that are transposed before they are widened.
  template <class Code>
  void pack_codes(const kv_tile_offsets& tile, int head, int dim, int dims) noexcept {
    const code_widener<Code> widener;
    const Code* const k = static_cast<const Code*>(args_.k) + (item_.kv_head_begin + head) * args_.k_strides.head + dim;
    const Code* const zeros = static_cast<const Code*>(scratch_.zero_row);
    for (int column = 0; column < tile_keys; column += lanes) {
      if (tile.uniform[column / lanes]) {
        const uniform_rows<Code> rows(k + tile.k[column], args_.k_strides.token);
        transpose_codes(widener, rows, dims, scratch_.keys + column, prefetcher_);
        continue;
      }
      scattered_rows<Code> rows;
      for (int i = 0; i < lanes; ++i) {
        const int key = column + i;
        rows.row[i] = key < tile.begin || key >= tile.end ? zeros : k + tile.k[key];
      }
      transpose_codes(widener, rows, dims, scratch_.keys + column, prefetcher_);
    }
  }

  // Dims [dim, dim + dims) of the tile's keys, transposed, into scratch.
  void pack_keys(const kv_tile_offsets& tile, int head, int dim, int dims) noexcept {
    if constexpr (widens_codes && may_keep_pairs) {
      if (k_transposed_) {
        return visit_dtype(args_.k_code.type, [&](auto traits) {
          using code = typename decltype(traits)::storage;
          if constexpr (sizeof(code) == 1 && widens_quads<code>) pack_codes<code>(tile, head, dim, dims);
        });
      }
    }
    const Key* k = static_cast<const Key*>(args_.k);
    if (k_contiguous_ || k_pieces_) k += (item_.kv_head_begin + head) * args_.k_strides.head;
    if (k_contiguous_) k += dim;
    if (k_pieces_) k += dim / piece_dims * args_.k_strides.chunk_stride;
    auto* staging = static_cast<Key*>(scratch_.staging);
    const Key* zeros = static_cast<const Key*>(scratch_.zero_row);
    for (int column = 0; column < tile_keys; column += lanes) {
      float* keys = scratch_.keys + column;
      if (k_pieces_ && tile.uniform[column / lanes]) {
        transpose_pieces(k + tile.k[column], dims, keys);
        continue;
      }
      if (k_contiguous_ && tile.uniform[column / lanes]) {
        const uniform_rows<Key> rows(k + tile.k[column], args_.k_strides.token);
        transpose_rows(rows, dims, keys);
        continue;
      }
      if constexpr (widens_codes) {
        if (k_widened_ && column >= tile.begin && column + lanes <= tile.end) {
          widen_keys(tile, head, column, column + lanes, staging, qk_padded_);
          transpose_rows(uniform_rows<Key>(staging, qk_padded_), dims, keys);
          continue;
        }
      }
      scattered_rows<Key> rows;
      for (int i = 0; i < lanes; ++i) {
        const int key = column + i;
        if (key < tile.begin || key >= tile.end) {
          rows.row[i] = zeros;
        } else if (k_contiguous_) {
          rows.row[i] = k + tile.k[key];
        } else {
          Key* row = staging + static_cast<std::int64_t>(i) * qk_padded_;
          if (k_widened_) {
            widen_keys(tile, head, key, key + 1, row, qk_padded_);
          } else {
            stage_key(tile, head, key, row);
          }
          rows.row[i] = row + dim;
        }
      }
      transpose_rows(rows, dims, keys);
    }
  }

  template <class Rows>
  BIFOLIO_INLINE void transpose_rows(const Rows& rows, int dims, float* keys) noexcept {
    if constexpr (!uses_dots) {
      if (!pairs_) return transpose_keys<Key, true>(rows, dims, keys, prefetcher_);
    }
    if constexpr (may_keep_pairs) transpose_keys<Key, false>(rows, dims, keys, prefetcher_);
  }

  BIFOLIO_INLINE void transpose_pieces(const Key* from, int dims, float* keys) noexcept {
    const std::int64_t apart = args_.k_strides.chunk_stride;
    if constexpr (!uses_dots) {
      if (!pairs_) return cpu::BIFOLIO_ISA::transpose_pieces<Key, true>(from, apart, dims, keys, prefetcher_);
    }
    if constexpr (may_keep_pairs) {
      cpu::BIFOLIO_ISA::transpose_pieces<Key, false>(from, apart, dims, keys, prefetcher_);
    }
  }

  // V rows of the tile as float32 in value order in scratch.
  void widen_values(const kv_tile_offsets& tile, const Key* const* rows) noexcept {
    const int whole = args_.v_head_dim / (2 * lanes) * (2 * lanes);
    for (int key = tile.begin; key < tile.end; ++key) {
      const Key* row = rows[key];
      float* to = scratch_.values + static_cast<std::int64_t>(key) * padded_;
      vf a;
      vf b;
      for (int d = 0; d < dims_; d += 2 * lanes) {
        if (d < whole) {
          load_pair(row + d, a, b);
        } else {
          load_first_of_pair(row + d, args_.v_head_dim - d, a, b);
        }
        store(to + d, a);
        store(to + d + lanes, b);
      }
    }
  }

  // V rows of keys [begin, end) of the tile in pairs of keys in scratch; a key without a partner is paired with 0.
  void pair_values(int begin, int end, const Key* const* value_rows_of) noexcept {
    const int whole = args_.v_head_dim / (2 * lanes) * (2 * lanes);
    for (int pair = begin / 2; 2 * pair < end; ++pair) {
      const Key* rows[2];
      for (int i = 0; i < 2; ++i) {
        const int key = 2 * pair + i;
        rows[i] = key < begin || key >= end ? static_cast<const Key*>(scratch_.zero_row) : value_rows_of[key];
      }
      float* to = scratch_.values + static_cast<std::int64_t>(pair) * padded_;
      vf a;
      vf b;
      for (int d = 0; d < dims_; d += 2 * lanes) {
        if (d < whole) {
          pair_rows(load_bits(rows[0] + d), load_bits(rows[1] + d), a, b);
        } else {
          const int num_bytes = 2 * (args_.v_head_dim - d);
          pair_rows(load_first(rows[0] + d, num_bytes), load_first(rows[1] + d, num_bytes), a, b);
        }
        store(to + d, a);
        store(to + d + lanes, b);
      }
    }
  }

  // The same of V whose keys lie side by side (x_split): they are in pairs there, dim by dim.
  void pair_columns(const kv_tile_offsets& tile, int head) noexcept {
    const Key* const v = static_cast<const Key*>(args_.v) + (item_.kv_head_begin + head) * args_.v_strides.head;
    auto* const staging = static_cast<Key*>(scratch_.staging);
    for (int column = 0; column < tile_keys; column += lanes) {
      if (tile.uniform[column / lanes]) {
        pair_uniform_columns(v + tile.v[column], scratch_.values + std::int64_t{column / 2} * padded_);
        continue;
      }
      const int begin = column > tile.begin ? column : tile.begin;
      const int end = column + lanes < tile.end ? column + lanes : tile.end;
      const Key* rows[tile_keys];
      for (int key = begin; key < end; ++key) {
        Key* const row = staging + std::int64_t{key} * padded_;
        stage_value(tile, head, key, row);
        rows[key] = row;
      }
      pair_values(begin, end, rows);
    }
  }

  void pair_uniform_columns(const Key* from, float* to) noexcept {
    const std::int64_t apart = args_.v_strides.dim;
    const int head_dim = args_.v_head_dim;
    const Key* const zeros = static_cast<const Key*>(scratch_.zero_row);
    prefetch_poller poller(prefetcher_);
    const auto pair = [&]<bool IsWhole>(int d, int half) __attribute__((always_inline)) {
      transpose_half_rows(
          [&](int lane) __attribute__((always_inline)) {
            const int dim = d + paired_dim(half, lane);
            return IsWhole || dim < head_dim ? from + dim * apart : zeros;
          },
          [&](int key_pair, vf dims) __attribute__((always_inline)) {
            store(to + std::int64_t{key_pair} * padded_ + d + half * lanes, dims);
          });
      poller.poll(column_polls / 2);
    };
    int d = 0;
    for (; d + 2 * lanes <= head_dim; d += 2 * lanes) {
      pair.template operator()<true>(d, 0);
      pair.template operator()<true>(d, 1);
    }
    if (d == head_dim) return;
    pair.template operator()<false>(d, 0);
    pair.template operator()<false>(d, 1);
  }

  // All scores of the tile, then group by group softmax and accumulation.
  void process_tile(const kv_tile_offsets& tile, int head) noexcept {
    // The transposed keys of KC dims stay in L1 while they are used.
    const bool by_dims = k_contiguous_ || k_transposed_ || k_pieces_;
    const int kc = !by_dims                      ? args_.qk_head_dim
                   : pairs_                      ? pair_kc
                   : head_rows_ <= in_place_rows ? decode_kc
                                                 : prefill_kc;
    for (int dim = 0; dim < args_.qk_head_dim; dim += kc) {
      const int dims = args_.qk_head_dim - dim < kc ? args_.qk_head_dim - dim : kc;
      pack_keys(tile, head, dim, dims);
      for (int g = 0; g < num_groups_; ++g) score_group(tile, head, g, dim, dims);
    }

    if constexpr (widens_codes) {
      if (k_tails_) read_k_scales(tile, head, k_scales_);
      if (v_tails_) read_v_scales(tile, head, v_scales_);
      if (uses_dots && v_zeros_) divide_zeros(v_scales_, v_ratios_);
    }
    const Key* rows[tile_keys];
    const float* widened[tile_keys];
    const bool by_columns = pairs_columns && v_columns_;
    if (!by_columns) find_values(tile, head, rows);
    if (by_columns) {
      if constexpr (pairs_columns) pair_columns(tile, head);
    } else if (v_in_place_) {
      // The other key of a pair may be outside the tile: it is loaded, never multiplied.
      if (uses_dots && tile.begin % 2 != 0) rows[tile.begin - 1] = static_cast<const Key*>(scratch_.zero_row);
      if (uses_dots && tile.end % 2 != 0) rows[tile.end] = static_cast<const Key*>(scratch_.zero_row);
    } else if constexpr (uses_dots) {
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
                    group_states + i * stride_, scratch_.sums + (row_index + i) * workspace_align);
      }
      if constexpr (uses_dots) {
        if (v_in_place_) {
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
    const float* queries = scratch_.queries +
                           (static_cast<std::int64_t>(head) * head_rows_ + group.begin) * query_values_ +
                           static_cast<std::int64_t>(uses_dots ? dim / 2 : dim) * group.rows;
    with_rows(
        group.rows, [&]<int Rows>() __attribute__((always_inline)) {
          const auto add = [&]<class Column>(Column) __attribute__((always_inline)) {
            const int columns = (dims + Column::dims - 1) / Column::dims;
            score_rows<Column, Rows>(queries, scratch_.keys, columns, dim > 0, scores, prefetcher_);
          };
          if constexpr (uses_dots) {
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

  // The row's bias for the keys of a tile that it attends to, 0 elsewhere.
  void read_bias(visible_range visible, std::int64_t tile_first, int head, int row, float* bias) const noexcept {
    for (int key = 0; key < tile_keys; key += lanes) store(bias + key, vf(0.0f));
    const std::int64_t offset = token_of(row) * args_.bias_token_stride +
                                query_head(head, row) * args_.bias_head_stride + tile_first + visible.begin;
    widen_any(args_.bias_type, args_.bias, offset, static_cast<int>(visible.end - visible.begin), 1.0f,
              bias + visible.begin);
  }

  // Logits → probabilities in place, against the row's running maximum; updates maximum, sums and, when the maximum
  // rises, the accumulator.
  BIFOLIO_INLINE void softmax_row(float* scores, visible_range visible, std::int64_t tile_first, int head, int row,
                                  float* state, float* sums) const noexcept {
    vf s[tile_vectors];
#pragma GCC unroll 16
    for (int c = 0; c < tile_vectors; ++c) s[c] = load(scores + c * lanes);
    if constexpr (widens_codes) {
      if (k_tails_) {
#pragma GCC unroll 16
        for (int c = 0; c < tile_vectors; ++c) s[c] = s[c] * load(k_scales_.scale + c * lanes);
      }
      if (k_zeros_) {
        const vf sum(scratch_.query_sums[static_cast<std::int64_t>(head) * head_rows_ + row]);
#pragma GCC unroll 16
        for (int c = 0; c < tile_vectors; ++c) s[c] = fma(sum, load(k_scales_.zero + c * lanes), s[c]);
      }
    }
    if constexpr (uses_dots) {
      const vf scale(args_.scale * k_scale(head));
#pragma GCC unroll 16
      for (int c = 0; c < tile_vectors; ++c) s[c] = s[c] * scale;
    }
    if (args_.soft_cap > 0) {
      const vf cap(args_.soft_cap);
      for (int c = 0; c < tile_vectors; ++c) s[c] = attn::soft_capped<vector_math>(s[c], cap);
    }
    if (args_.alibi_slopes != nullptr) {
      const int q_head = (item_.kv_head_begin + head) * args_.group_size + row % args_.group_size;
      const std::int64_t position = item_.first_position + row / args_.group_size;
      const vf slope(args_.alibi_slopes[q_head]);
      const vf distance = lane_numbers() + vf(static_cast<float>(tile_first - position));
      for (int c = 0; c < tile_vectors; ++c) {
        s[c] = attn::with_alibi<vector_math>(s[c], slope, distance + vf(static_cast<float>(c * lanes)));
      }
    }
    if (args_.bias != nullptr) {
      alignas(64) float bias[tile_keys];
      read_bias(visible, tile_first, head, row, bias);
      for (int c = 0; c < tile_vectors; ++c) s[c] = attn::with_bias<vector_math>(s[c], load(bias + c * lanes));
    }
    if (visible.begin > 0 || visible.end < tile_keys) {
      for (int c = 0; c < tile_vectors; ++c) {
        s[c] = keep_lanes(s[c], static_cast<int>(visible.begin) - c * lanes, static_cast<int>(visible.end) - c * lanes);
      }
    }
    vf highest = s[0];
#pragma GCC unroll 16
    for (int c = 1; c < tile_vectors; ++c) highest = xsimd::max(highest, s[c]);
    const float tile_maximum = reduce_max(highest);
    vf sum = load(sums);
    float& maximum = maximum_of(state, padded_);
    if (tile_maximum > maximum + rescale_threshold) {
      const vf alpha(scalar_math::exp(maximum - tile_maximum));
      maximum = tile_maximum;
      sum = sum * alpha;
      for (int d = 0; d < dims_; d += lanes) store(state + d, load(state + d) * alpha);
    }
    const vf shift(attn::finite_max(maximum));
    if constexpr (widens_codes) {
      if (v_tails_) {
#pragma GCC unroll 16
        for (int c = 0; c < tile_vectors; ++c) {
          s[c] = exp(s[c] - shift);
          sum = sum + s[c];
        }
        store(sums, sum);
        vf zeros(0.0f);
        if (v_zeros_) zeros = sum_zeros(s, visible);
#pragma GCC unroll 16
        for (int c = 0; c < tile_vectors; ++c) s[c] = s[c] * load(v_scales_.scale + c * lanes);
        store_probabilities(s, scores);
        if (!v_zeros_) return;
        if constexpr (uses_dots) zeros = zeros + sum_ratios(scores, visible);
        const vf all(reduce_add(zeros));
        for (int d = 0; d < dims_; d += lanes) store(state + d, load(state + d) + all);
        return;
      }
    }
#pragma GCC unroll 16
    for (int c = 0; c < tile_vectors; ++c) {
      s[c] = exp(s[c] - shift);
      if constexpr (!uses_dots) store(scores + c * lanes, s[c]);
      sum = sum + s[c];
    }
    if constexpr (uses_dots) store_probabilities(s, scores);
    store(sums, sum);
  }

  static BIFOLIO_INLINE void store_probabilities(const vf* p, float* to) noexcept {
    if constexpr (uses_dots) {
#pragma GCC unroll 8
      for (int c = 0; c < tile_vectors; c += 2) store(to + c / 2 * lanes, narrow_pairs(p[c], p[c + 1]));
    } else {
#pragma GCC unroll 16
      for (int c = 0; c < tile_vectors; ++c) store(to + c * lanes, p[c]);
    }
  }

  // Zero points of V: each adds its probability times itself to all dims. Per lane.
  BIFOLIO_INLINE vf sum_zeros(const vf* p, visible_range visible) const noexcept {
    vf zeros(0.0f);
#pragma GCC unroll 16
    for (int c = 0; c < tile_vectors; ++c) {
      const vf part = p[c] * load(v_scales_.zero + c * lanes);
      zeros = zeros + keep_lanes(part, static_cast<int>(visible.begin) - c * lanes,
                                 static_cast<int>(visible.end) - c * lanes, 0.0f);
    }
    return zeros;
  }

  // The other part, of rounded probabilities (`divide_zeros`).
  BIFOLIO_INLINE vf sum_ratios(const float* rounded, visible_range visible) const noexcept {
    vf zeros(0.0f);
    for (int c = 0; c < tile_vectors; c += 2) {
      vf p[2];
      split_pair<bfloat16>(load(rounded + c / 2 * lanes), p[0], p[1]);
      for (int odd = 0; odd < 2; ++odd) {
        const vf part = p[odd] * load(v_ratios_ + (c + odd) * lanes);
        // Lane i is key 2·i + odd.
        const auto lane_of = [&](std::int64_t key) { return static_cast<int>((key - c * lanes - odd + 1) >> 1); };
        zeros = zeros + keep_lanes(part, lane_of(visible.begin), lane_of(visible.end), 0.0f);
      }
    }
    return zeros;
  }

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

  int num_groups_;
  int base_rows_;  // of each group; the first `extra_rows_` groups have one more
  int extra_rows_;
  bool pairs_;        // transposed keys of 16 bits stay in pairs
  int query_values_;  // floats of a row in scratch
  bool v_in_place_;
  bool k_transposed_;  // codes of K are widened after the transposition
  // Of the tile, where codes have scales per token.
  tile_scales k_scales_;
  tile_scales v_scales_;
  alignas(64) float v_ratios_[tile_keys];
};

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA
