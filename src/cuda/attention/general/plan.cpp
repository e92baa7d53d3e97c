// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/general/plan.hpp"

#include <algorithm>
#include <limits>

#include "common/base/refuse.hpp"
#include "cuda/host/divisor.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

// CTAs of the general kernel that run at once on one SM, roughly.
constexpr std::int64_t ctas_per_sm = 4;

std::int64_t divide_up(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

/// Calls visit(item) with every row tile as one item, the last tokens of a sequence first, because under a causal mask
/// they attend to most.
template <class Visit>
void for_each_tile(const plan_input& input, std::int32_t rows_per_tile, const Visit& visit) {
  const std::int32_t group = input.spec.num_q_heads / input.spec.num_kv_heads;
  const divisor by_group(group);
  const auto token_of = [&](std::int64_t row) -> std::int64_t {
    return row <= std::numeric_limits<std::int32_t>::max() ? by_group.quotient(static_cast<std::int32_t>(row))
                                                           : row / group;
  };
  const attn::attention_window window = attn::window_of(input.spec);
  const int tile_shift = rows_per_tile == few_rows ? 2 : 4;
  static_assert(few_rows == 1 << 2 && many_rows == 1 << 4);
  for (std::int32_t seq = 0; seq < input.num_seqs; ++seq) {
    const std::int64_t query_len = input.query_start_loc[seq + 1] - input.query_start_loc[seq];
    const std::int64_t seq_len = input.seq_lens[seq];
    const std::int64_t first = attn::first_query_position(input.query_positions, seq, query_len, seq_len);
    const std::int64_t num_rows = query_len * group;
    for (std::int64_t tile = ((num_rows + rows_per_tile - 1) >> tile_shift) - 1; tile >= 0; --tile) {
      general_item item = {};
      item.seq = seq;
      item.tile = -1;
      const std::int64_t first_row = tile * rows_per_tile;
      item.first_row = static_cast<std::int32_t>(first_row);
      const std::int64_t last_row = std::min(first_row + rows_per_tile, num_rows) - 1;
      set_splits(item, window, first + token_of(first_row), first + token_of(last_row), seq_len);
      visit(item);
    }
  }
}

std::int32_t rows_per_tile_for(std::int64_t most_rows) noexcept { return most_rows <= few_rows ? few_rows : many_rows; }

std::int32_t dim_tiles_of(const attention_spec& spec) noexcept {
  return static_cast<std::int32_t>(divide_up(spec.v_head_dim, dims_per_tile));
}

std::int64_t ctas_per_item(const attention_spec& spec) noexcept {
  return static_cast<std::int64_t>(spec.num_kv_heads) * dim_tiles_of(spec);
}

/// Row tiles that are worked on at the same time.
std::int64_t concurrent_tiles(const attention_spec& spec, const device_numbers& device) noexcept {
  return std::max<std::int64_t>(1, device.num_sms * ctas_per_sm / ctas_per_item(spec));
}

/// Bytes of the partial results of one split, over all KV heads.
std::int64_t partial_bytes(const attention_spec& spec, std::int32_t rows_per_tile) noexcept {
  return ctas_per_item(spec) * partial_floats(rows_per_tile, spec.v_head_dim) *
         static_cast<std::int64_t>(sizeof(float));
}

std::int64_t max_num_partials(const attention_spec& spec, std::int32_t rows_per_tile) noexcept {
  return static_cast<std::int64_t>(max_partial_bytes) / partial_bytes(spec, rows_per_tile);
}

void make_items(const plan_input& input, general_plan& plan) {
  std::int64_t num_splits = 0;
  for_each_tile(input, plan.rows_per_tile, [&](const general_item& tile) { num_splits += tile.num_splits; });
  // Splits that each of the tiles that are worked on at the same time would have if all had equally many. Longer tiles
  // are cut.
  const std::int64_t even_share = std::max<std::int64_t>(1, num_splits / concurrent_tiles(input.spec, input.device));
  const std::int64_t max_partials = max_num_partials(input.spec, plan.rows_per_tile);

  for_each_tile(input, plan.rows_per_tile, [&](const general_item& tile) {
    if (2 * tile.num_splits <= 3 * even_share || plan.num_partials + tile.num_splits > max_partials) {
      plan.items.push_back(tile);
      return;
    }
    general_item item = tile;
    item.tile = static_cast<std::int32_t>(plan.num_tiles++);
    item.first_partial = static_cast<std::int32_t>(plan.num_partials);
    item.num_partials = item.num_splits;
    item.num_splits = 1;
    for (std::int32_t split = 0; split < item.num_partials; ++split) {
      item.partial = item.first_partial + split;
      plan.items.push_back(item);
      ++item.first_split;
    }
    plan.num_partials += item.num_partials;
  });
}

}  // namespace

std::size_t general_plan::workspace_bytes(const attention_spec& spec) const noexcept {
  return static_cast<std::size_t>(num_partials * ctas_per_item(spec) * partial_floats(rows_per_tile, spec.v_head_dim)) *
         sizeof(float);
}

std::size_t general_plan::num_counters(const attention_spec& spec) const noexcept {
  return static_cast<std::size_t>(num_tiles * ctas_per_item(spec));
}

void plan_general(const plan_input& input, bool with_items, general_plan& plan) {
  const attention_spec& spec = input.spec;
  const std::int64_t group = spec.num_q_heads / spec.num_kv_heads;
  plan.rows_per_tile = rows_per_tile_for(input.max_query_len * group);
  plan.num_dim_tiles = dim_tiles_of(spec);
  plan.has_items = with_items;
  plan.has_query_positions = input.query_positions != nullptr;
  plan.num_seqs = input.num_seqs;
  plan.items.clear();
  plan.num_tiles = 0;
  plan.num_partials = 0;
  constexpr std::int64_t max_rows = std::numeric_limits<std::int32_t>::max();
  if (with_items) make_items(input, plan);
  if (input.max_query_len * group > max_rows || static_cast<std::int64_t>(plan.items.size()) > max_rows) {
    detail::refuse(errc::unsupported, "a sequence of ", input.max_query_len, " new tokens with ", group,
                   " query heads per KV head has more rows than the largest allowed number, ", max_rows);
  }
}

general_room max_general_room(const attention_spec& spec, const step_limits& limits,
                              const device_numbers& device) noexcept {
  general_room room;
  const std::int64_t group = spec.num_q_heads / spec.num_kv_heads;
  const std::int64_t num_seqs = limits.num_seqs_with_tokens();
  if (num_seqs <= 0) return room;
  const std::int64_t concurrent = concurrent_tiles(spec, device);
  for (const std::int32_t rows : {few_rows, many_rows}) {
    // Tiles of few rows are taken where every sequence has one tile at most.
    if (rows == few_rows ? group > few_rows : limits.num_tokens * group <= few_rows) continue;
    // Σ ⌈query_len · group / rows⌉ over the sequences with tokens.
    const std::int64_t tiles = rows == few_rows ? num_seqs : (limits.num_tokens * group + num_seqs * (rows - 1)) / rows;

    // Splits that one tile attends to: those of the longest sequence, or those that its window can touch.
    std::int64_t tile_splits = divide_up(limits.seq_len, split_positions);
    if (spec.window_left >= 0 && (spec.causal || spec.window_right >= 0)) {
      const std::int64_t tokens = (rows - 1) / group + 2;  // a tile may begin and end within a token
      const std::int64_t positions = std::int64_t{spec.window_left} + (spec.causal ? 0 : spec.window_right) + tokens;
      tile_splits = std::min(tile_splits, divide_up(positions - 1, split_positions) + 1);
    }

    // Let e be the even share, N the splits of all tiles: e = max(1, ⌊N / concurrent⌋), so N < (e + 1) · concurrent.
    // A tile is cut where it has more than 1.5 e splits, that is ⌊1.5 e⌋ + 1 or more, all of which are counted in N.
    // So fewer than concurrent · (e + 1) / (⌊1.5 e⌋ + 1) ≤ concurrent tiles are cut; and since ⌊1.5 e⌋ + 1 ≤
    // tile_splits needs 3 e < 2 · tile_splits, they have fewer than (max_share + 1) · concurrent splits.
    std::int64_t cut_tiles = 0;
    std::int64_t partials = 0;
    if (tile_splits > 1) {
      const std::int64_t max_share = (2 * tile_splits - 1) / 3;
      cut_tiles = std::min(tiles, concurrent);
      partials = std::min({cut_tiles * tile_splits, (max_share + 1) * concurrent, max_num_partials(spec, rows)});
    }
    room.num_items = std::max(room.num_items, tiles + partials);
    room.num_counters = std::max(room.num_counters, static_cast<std::size_t>(cut_tiles * ctas_per_item(spec)));
    room.workspace_bytes =
        std::max(room.workspace_bytes, static_cast<std::size_t>(partials * partial_bytes(spec, rows)));
  }
  return room;
}

}  // namespace bifolio::inline v0_2::cuda
