// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/general/plan.hpp"

#include <algorithm>
#include <limits>

#include "common/base/refuse.hpp"
#include "common/engine/validate_attention.hpp"
#include "cuda/host/divisor.hpp"

namespace bifolio::cuda {
namespace {

// Thread blocks of the general kernel that run at once on one multiprocessor, roughly.
constexpr std::int64_t blocks_per_sm = 4;

std::int64_t divide_up(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

/// Rows of one sequence that one thread block takes, and the splits that they see together.
struct row_tile {
  std::int32_t seq = 0;
  std::int64_t first_row = 0;
  std::int64_t first_split = 0;
  std::int64_t num_splits = 0;
};

/// Calls visit(row_tile) in the order of the items: the last tokens of a sequence first, because under a causal mask
/// they see most.
template <class Visit>
void for_each_tile(const plan_input& input, std::int32_t rows_per_tile, const Visit& visit) {
  const std::int32_t group = input.spec.num_q_heads / input.spec.num_kv_heads;
  const divisor by_group(group);
  const auto token_of = [&](std::int64_t row) -> std::int64_t {
    return row <= std::numeric_limits<std::int32_t>::max() ? by_group.quotient(static_cast<std::int32_t>(row))
                                                           : row / group;
  };
  const int tile_shift = rows_per_tile == few_rows ? 2 : 4;
  static_assert(few_rows == 1 << 2 && many_rows == 1 << 4);
  for (std::int32_t seq = 0; seq < input.num_seqs; ++seq) {
    const std::int64_t query_len = input.query_start_loc[seq + 1] - input.query_start_loc[seq];
    const std::int64_t seq_len = input.seq_lens[seq];
    const std::int64_t num_rows = query_len * group;
    for (std::int64_t tile = ((num_rows + rows_per_tile - 1) >> tile_shift) - 1; tile >= 0; --tile) {
      row_tile t;
      t.seq = seq;
      t.first_row = tile * rows_per_tile;
      const std::int64_t last_row = std::min(t.first_row + rows_per_tile, num_rows) - 1;
      const std::int64_t first_position = seq_len - query_len + token_of(t.first_row);
      const std::int64_t last_position = seq_len - query_len + token_of(last_row);
      const std::int64_t begin = validate::visible_positions(input.spec, first_position, seq_len).begin;
      const std::int64_t end = validate::visible_positions(input.spec, last_position, seq_len).end;
      if (begin < end) {
        t.first_split = begin / split_positions;
        t.num_splits = divide_up(end, split_positions) - t.first_split;
      }
      visit(t);
    }
  }
}

}  // namespace

std::size_t general_plan::workspace_floats(const attention_spec& spec) const noexcept {
  return static_cast<std::size_t>(num_partials * spec.num_kv_heads * num_dim_tiles *
                                  partial_floats(rows_per_tile, spec.head_dim));
}

std::size_t general_plan::num_counters(const attention_spec& spec) const noexcept {
  return static_cast<std::size_t>(num_tiles * spec.num_kv_heads * num_dim_tiles);
}

void plan_general(const plan_input& input, general_plan& plan) {
  const attention_spec& spec = input.spec;
  const std::int64_t group = spec.num_q_heads / spec.num_kv_heads;
  plan.rows_per_tile = input.max_query_len * group <= few_rows ? few_rows : many_rows;
  plan.num_dim_tiles = static_cast<std::int32_t>(divide_up(spec.head_dim, dims_per_tile));
  plan.items.clear();
  plan.num_tiles = 0;
  plan.num_partials = 0;

  std::int64_t num_tiles = 0;
  std::int64_t num_splits = 0;
  for_each_tile(input, plan.rows_per_tile, [&](const row_tile& t) {
    ++num_tiles;
    num_splits += t.num_splits;
  });
  // Splits that one of the tiles working at the same time would take in an even share. Longer tiles are cut.
  const std::int64_t blocks_per_item = static_cast<std::int64_t>(spec.num_kv_heads) * plan.num_dim_tiles;
  const std::int64_t at_once = std::max<std::int64_t>(1, input.device.num_sms * blocks_per_sm / blocks_per_item);
  const std::int64_t even_share = std::max<std::int64_t>(1, num_splits / at_once);
  const std::int64_t partial_bytes =
      blocks_per_item * partial_floats(plan.rows_per_tile, spec.head_dim) * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t max_partials = static_cast<std::int64_t>(max_partial_bytes) / partial_bytes;

  for_each_tile(input, plan.rows_per_tile, [&](const row_tile& t) {
    general_item item = {};
    item.seq = t.seq;
    item.first_row = static_cast<std::int32_t>(t.first_row);
    item.first_split = static_cast<std::int32_t>(t.first_split);
    item.num_splits = static_cast<std::int32_t>(t.num_splits);
    item.tile = -1;
    if (2 * t.num_splits <= 3 * even_share || plan.num_partials + t.num_splits > max_partials) {
      plan.items.push_back(item);
      return;
    }
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

  constexpr std::int64_t max_rows = std::numeric_limits<std::int32_t>::max();
  if (input.max_query_len * group > max_rows || static_cast<std::int64_t>(plan.items.size()) > max_rows) {
    detail::refuse(errc::unsupported, "a sequence of ", input.max_query_len, " new tokens with ", group,
                   " query heads to a KV head has more rows than the largest allowed number, ", max_rows);
  }
}

}  // namespace bifolio::cuda
