// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention_plan.hpp"

#include <algorithm>
#include <bifolio/error.hpp>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"
#include "common/engine/validate_attention.hpp"
#include "cpu/attention.hpp"

namespace bifolio::cpu {
namespace {

// Rows of a KV head up to which all KV heads go into one unit: the pass over K and V costs more than the rows.
constexpr std::int32_t decode_rows = 16;
// Rows of one unit of prefill: 16 row groups, so that packing a tile costs 2–3 % of using it.
constexpr std::int32_t prefill_rows = 96;
// Rows of all KV heads in one unit: bounds the scratch.
constexpr std::int64_t max_unit_rows = 512;
// Items of a lane, so that lanes of unequal speed end together.
constexpr std::int64_t items_per_lane = 6;
// No item shorter than this (about 256 KiB of keys and values), no parallel region for less than the other.
constexpr std::int64_t min_item_ns = 10'000;
constexpr std::int64_t min_parallel_ns = 20'000;
// Rough speeds of one lane, for weights alone.
constexpr double bytes_per_ns = 20;
constexpr double flops_per_ns = 100;

constexpr std::int64_t all_positions = std::int64_t{1} << 40;

std::int64_t divide_up(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

struct unit {
  std::int32_t seq = 0;
  std::int64_t first_token = 0;
  std::int64_t first_position = 0;
  std::int64_t seq_len = 0;
  std::int32_t num_tokens = 0;
  std::int32_t head_begin = 0;
  std::int32_t head_end = 0;
  std::int32_t split_begin = 0;
  std::int32_t split_end = 0;  // ≥ split_begin; equal when nothing is visible
  std::int64_t cost = 0;
};

// Calls visit(unit) for all units of the step, always in the same order.
template <class Visit>
void for_each_unit(const attention_spec& spec, const attention_window& window, const step_batch_view& batch,
                   const Visit& visit) {
  const std::int32_t group = spec.num_q_heads / spec.num_kv_heads;
  for (std::int32_t seq = 0; seq < batch.num_seqs; ++seq) {
    const std::int64_t query_len = batch.query_start_loc[seq + 1] - batch.query_start_loc[seq];
    if (query_len == 0) continue;
    const std::int64_t seq_len = batch.seq_lens[seq];
    const bool together = query_len * group <= decode_rows;
    const std::int64_t wanted = together ? query_len : std::max<std::int64_t>(1, prefill_rows / group);
    const std::int64_t num_tiles = divide_up(query_len, wanted);
    const std::int64_t tokens = divide_up(query_len, num_tiles);
    const std::int64_t heads =
        together
            ? std::min<std::int64_t>(spec.num_kv_heads, std::max<std::int64_t>(1, max_unit_rows / (query_len * group)))
            : 1;
    for (std::int64_t token = 0; token < query_len; token += tokens) {
      unit u;
      u.seq = seq;
      u.first_token = batch.query_start_loc[seq] + token;
      u.first_position = seq_len - query_len + token;
      u.seq_len = seq_len;
      u.num_tokens = static_cast<std::int32_t>(std::min(tokens, query_len - token));
      const visible_range first = window.of(u.first_position, seq_len);
      const visible_range last = window.of(u.first_position + u.num_tokens - 1, seq_len);
      const std::int64_t keys = std::max<std::int64_t>(0, last.end - first.begin);
      u.split_begin = static_cast<std::int32_t>(first.begin / split_keys);
      u.split_end = keys == 0 ? u.split_begin : static_cast<std::int32_t>(divide_up(last.end, split_keys));
      for (std::int64_t head = 0; head < spec.num_kv_heads; head += heads) {
        u.head_begin = static_cast<std::int32_t>(head);
        u.head_end = static_cast<std::int32_t>(std::min<std::int64_t>(head + heads, spec.num_kv_heads));
        const double heads_of_keys = static_cast<double>(keys) * (u.head_end - u.head_begin);
        const double dims = static_cast<double>(spec.qk_head_dim) + static_cast<double>(spec.v_head_dim);
        const double values = heads_of_keys * dims;
        const double read_values = spec.v_in_k ? heads_of_keys * spec.qk_head_dim : values;
        const double read = read_values * static_cast<double>(size_of(spec.k_code.type)) / bytes_per_ns;
        const double computed = 2 * values * u.num_tokens * group / flops_per_ns;
        u.cost = static_cast<std::int64_t>(std::max(read, computed)) + 100;
        visit(u);
      }
    }
  }
}

// How one unit is cut: `heads` KV heads and `splits` splits to an item, as even as possible.
struct unit_cut {
  std::int32_t head_parts = 1;
  std::int32_t split_parts = 1;
};

unit_cut cut_of(const unit& u, std::int64_t item_cost) noexcept {
  const std::int64_t wanted = divide_up(u.cost, item_cost);
  const std::int64_t splits = std::max(1, u.split_end - u.split_begin);
  unit_cut cut;
  cut.split_parts = static_cast<std::int32_t>(std::min(wanted, splits));
  if (wanted > splits) {
    cut.head_parts =
        static_cast<std::int32_t>(std::min<std::int64_t>(divide_up(wanted, splits), u.head_end - u.head_begin));
  }
  return cut;
}

std::int32_t part_begin(std::int32_t begin, std::int32_t end, std::int32_t parts, std::int32_t part) noexcept {
  return begin + static_cast<std::int32_t>(std::int64_t{end - begin} * part / parts);
}

std::int64_t rows_of(const unit& u, std::int32_t group, std::int32_t heads) noexcept {
  return std::int64_t{u.num_tokens} * group * heads;
}

// What the fill needs, found by counting first.
struct plan_totals {
  std::int64_t num_items = 0;
  std::int64_t num_countdowns = 0;
  std::int64_t partial_floats = 0;
  std::int64_t max_head_rows = 0;
  std::int64_t max_rows = 0;
  std::int64_t max_padded_rows = 0;  // with those of each KV head in whole groups of `row_align`
  std::int64_t max_octets = 0;       // of all KV heads
};

cpu_attention_plan::scratch_sizes sizes_of(const attention_spec& spec, const plan_totals& totals) noexcept {
  const std::int64_t qk_padded = padded_dims(spec.qk_head_dim);
  const std::int64_t v_padded = padded_dims(spec.v_head_dim);
  const std::int64_t larger = std::max(qk_padded, v_padded);
  const std::int64_t stride = partial_stride(spec.v_head_dim);
  cpu_attention_plan::scratch_sizes sizes;
  sizes.keys = qk_padded * tile_keys;
  // A row of q passes through here as well, and a row of a partial result.
  sizes.values = std::max(v_padded * tile_keys, std::max(qk_padded, stride));
  sizes.queries = std::max(totals.max_rows, totals.max_padded_rows / 2) * qk_padded;
  sizes.scores = divide_up(totals.max_head_rows, row_align) * row_align * tile_keys;
  sizes.states = std::max(totals.max_rows * stride, totals.max_octets * octet_floats(spec.v_head_dim));
  sizes.sums = totals.max_rows * workspace_align;
  sizes.totals = totals.max_rows * stride;
  sizes.staging = larger * tile_keys;
  sizes.zero_row = larger;
  return sizes;
}

std::int64_t sum_of(const cpu_attention_plan::scratch_sizes& s) noexcept {
  return s.keys + s.values + s.queries + s.scores + s.states + s.sums + s.totals + s.staging + s.zero_row;
}

void fill(cpu_attention_plan& state, const attention_spec& spec, const step_batch_view& batch,
          std::int64_t item_cost) noexcept {
  const std::int32_t group = spec.num_q_heads / spec.num_kv_heads;
  std::int64_t partials = 0;
  std::int32_t num_countdowns = 0;
  planned_item* next = state.items.data();
  for_each_unit(spec, state.window, batch, [&](const unit& u) noexcept {
    const unit_cut cut = cut_of(u, item_cost);
    const std::int64_t head_cost = u.cost / cut.head_parts;
    for (std::int32_t h = 0; h < cut.head_parts; ++h) {
      planned_item item;
      item.first_token = u.first_token;
      item.first_position = u.first_position;
      item.seq_len = u.seq_len;
      item.seq = u.seq;
      item.num_tokens = u.num_tokens;
      item.kv_head_begin = part_begin(u.head_begin, u.head_end, cut.head_parts, h);
      item.kv_head_end = part_begin(u.head_begin, u.head_end, cut.head_parts, h + 1);
      if (cut.split_parts > 1) {
        item.partials = partials;
        item.unit = num_countdowns;
        partials += (u.split_end - u.split_begin) * rows_of(u, group, item.kv_head_end - item.kv_head_begin) *
                    partial_stride(spec.v_head_dim);
        unit_countdown* countdown = state.countdowns.data() + num_countdowns++;
        new (countdown) unit_countdown{cut.split_parts, cut.split_parts};
      }
      for (std::int32_t s = 0; s < cut.split_parts; ++s) {
        item.split_begin = part_begin(u.split_begin, u.split_end, cut.split_parts, s);
        item.split_end = part_begin(u.split_begin, u.split_end, cut.split_parts, s + 1);
        item.cost = head_cost * (item.split_end - item.split_begin) / std::max(1, u.split_end - u.split_begin);
        new (next++) planned_item(item);
      }
    }
  });
  // Long items first, so that the end is made of short ones. The order decides no bit.
  std::sort(state.items.data(), next, [](const planned_item& a, const planned_item& b) {
    if (a.cost != b.cost) return a.cost > b.cost;
    if (a.first_token != b.first_token) return a.first_token > b.first_token;
    if (a.split_begin != b.split_begin) return a.split_begin < b.split_begin;
    return a.kv_head_begin < b.kv_head_begin;
  });
}

void make_plan(std::int32_t num_lanes, memory_resource& memory, attention_plan& plan, const attention_spec& spec,
               const step_batch_view& batch, std::int64_t num_blocks) {
  std::string sentence;
  if (const errc code = validate::attention_spec_alone(spec, &sentence); code != errc::ok)
    detail::refuse(code, sentence);
  if (const errc code = validate::attention_batch(spec, batch, num_blocks, &sentence); code != errc::ok) {
    detail::refuse(code, sentence);
  }

  attention_window window{all_positions, all_positions};
  if (spec.window_left >= 0) window.left = spec.window_left;
  if (spec.window_right >= 0) window.right = spec.window_right;
  if (spec.causal) window.right = 0;

  const std::int32_t group = spec.num_q_heads / spec.num_kv_heads;
  std::int64_t total_cost = 0;
  for_each_unit(spec, window, batch, [&](const unit& u) { total_cost += u.cost; });
  if (total_cost < min_parallel_ns) num_lanes = 1;
  const std::int64_t item_cost = num_lanes == 1
                                     ? std::max<std::int64_t>(1, total_cost)
                                     : std::max(min_item_ns, divide_up(total_cost, num_lanes * items_per_lane));

  plan_totals totals;
  for_each_unit(spec, window, batch, [&](const unit& u) {
    const unit_cut cut = cut_of(u, item_cost);
    totals.num_items += std::int64_t{cut.head_parts} * cut.split_parts;
    const std::int32_t heads = static_cast<std::int32_t>(divide_up(u.head_end - u.head_begin, cut.head_parts));
    totals.max_head_rows = std::max(totals.max_head_rows, rows_of(u, group, 1));
    totals.max_rows = std::max(totals.max_rows, rows_of(u, group, heads));
    totals.max_padded_rows =
        std::max(totals.max_padded_rows, divide_up(rows_of(u, group, 1), row_align) * row_align * heads);
    totals.max_octets = std::max(totals.max_octets, divide_up(rows_of(u, group, 1), octet_rows) * heads);
    if (cut.split_parts > 1) {
      totals.num_countdowns += cut.head_parts;
      totals.partial_floats += (u.split_end - u.split_begin) * rows_of(u, group, u.head_end - u.head_begin) *
                               partial_stride(spec.v_head_dim);
    }
  });
  num_lanes = static_cast<std::int32_t>(std::max<std::int64_t>(1, std::min<std::int64_t>(num_lanes, totals.num_items)));
  const cpu_attention_plan::scratch_sizes sizes = sizes_of(spec, totals);
  const std::int64_t lane_floats = totals.num_items == 0 ? 0 : sum_of(sizes);

  // Everything that can fail comes before anything of the plan is touched: new arrays stand beside the old ones.
  auto* state = dynamic_cast<cpu_attention_plan*>(plan.state.get());
  std::unique_ptr<cpu_attention_plan> fresh;
  if (state == nullptr) {
    fresh = std::make_unique<cpu_attention_plan>();
    state = fresh.get();
  }
  grown_array<planned_item> items;
  grown_array<unit_countdown> countdowns;
  grown_array<float> partials;
  grown_array<float> scratch;
  const auto grow = [&memory](auto& array, const auto& held, std::int64_t count) {
    if (static_cast<std::size_t>(count) > held.capacity()) array.require(memory, static_cast<std::size_t>(count));
  };
  grow(items, state->items, totals.num_items);
  grow(countdowns, state->countdowns, totals.num_countdowns);
  grow(partials, state->partials, totals.partial_floats);
  grow(scratch, state->scratch, lane_floats * num_lanes);

  const auto adopt = [](auto& held, auto& array) {
    if (array.capacity() > 0) held.swap(array);
  };
  adopt(state->items, items);
  adopt(state->countdowns, countdowns);
  adopt(state->partials, partials);
  adopt(state->scratch, scratch);
  state->window = window;
  state->num_items = static_cast<std::int32_t>(totals.num_items);
  state->num_lanes = num_lanes;
  state->lane_floats = lane_floats;
  state->sizes = sizes;
  fill(*state, spec, batch, item_cost);
  if (lane_floats > 0) {
    for (std::int32_t lane = 0; lane < num_lanes; ++lane) {
      auto* zeros = static_cast<float*>(state->scratch_of(lane).zero_row);
      std::fill(zeros, zeros + sizes.zero_row, 0.0f);
    }
  }
  if (fresh != nullptr) plan.state = std::move(fresh);
  plan.spec = spec;
  plan.num_seqs = batch.num_seqs;
  plan.num_tokens = batch.num_tokens;
  plan.num_blocks = num_blocks;
  plan.max_seq_len = 0;
  for (std::int32_t seq = 0; seq < batch.num_seqs; ++seq) {
    plan.max_seq_len = std::max(plan.max_seq_len, batch.seq_lens[seq]);
  }
  plan.num_table_entries = blocks_for(plan.max_seq_len, spec.block_size);
}

}  // namespace

attention_scratch cpu_attention_plan::scratch_of(std::int32_t lane) noexcept {
  float* at = scratch.data() + lane * lane_floats;
  const auto take = [&at](std::int64_t floats) { return std::exchange(at, at + floats); };
  attention_scratch parts;
  parts.keys = take(sizes.keys);
  parts.values = take(sizes.values);
  parts.queries = take(sizes.queries);
  parts.scores = take(sizes.scores);
  parts.states = take(sizes.states);
  parts.sums = take(sizes.sums);
  parts.totals = take(sizes.totals);
  parts.staging = take(sizes.staging);
  parts.zero_row = take(sizes.zero_row);
  return parts;
}

void plan_attention(std::int32_t num_lanes, memory_resource& memory, attention_plan& plan, const attention_spec& spec,
                    const step_batch_view& batch, std::int64_t num_blocks) {
  detail::translate_bad_alloc("plan_attention", [&] { make_plan(num_lanes, memory, plan, spec, batch, num_blocks); });
}

}  // namespace bifolio::cpu
