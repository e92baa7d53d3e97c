// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention_plan.hpp"

#include <algorithm>
#include <bifolio/error.hpp>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "common/attention/implementations.hpp"
#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"
#include "common/engine/validate_attention.hpp"
#include "cpu/attention.hpp"
#include "cpu/implementations.hpp"

namespace bifolio::inline v0_2::cpu {
namespace {

// Rows of a KV head up to which a query tile holds all KV heads: the pass over K and V costs more than the rows.
constexpr std::int32_t decode_rows = 16;
// Rows of a query tile of prefill: the implementation's are halved down to these while there would be too few items.
constexpr std::int32_t low_prefill_rows = 96;
// Rows of all KV heads of a query tile: bounds the scratch.
constexpr std::int64_t max_tile_rows = 512;
// Items per worker, so that workers of unequal speed finish together.
constexpr std::int64_t items_per_worker = 6;
// The shortest item (about 256 KiB of keys and values), and the least work that is worth a parallel region.
constexpr std::int64_t min_item_ns = 10'000;
constexpr std::int64_t min_parallel_ns = 20'000;
// Rough speeds of one worker; only the proportions matter.
constexpr double bytes_per_ns = 20;
constexpr double flops_per_ns = 100;

std::int64_t divide_up(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

struct query_tile {
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

// Calls visit(tile) for all query tiles of the step, those of prefill of up to `prefill_rows` rows, always in the same
// order.
template <class Visit>
void for_each_query_tile(const attention_spec& spec, const attention_window& window, const host_step_view& batch,
                         std::int32_t prefill_rows, const Visit& visit) {
  const std::int32_t group = spec.num_q_heads / spec.num_kv_heads;
  for (std::int32_t seq = 0; seq < batch.num_seqs; ++seq) {
    const std::int64_t query_len = batch.query_start_loc[seq + 1] - batch.query_start_loc[seq];
    if (query_len == 0) continue;
    const std::int64_t seq_len = batch.seq_lens[seq];
    const std::int64_t first = attn::first_query_position(batch.query_positions, seq, query_len, seq_len);
    const bool together = query_len * group <= decode_rows;
    const std::int64_t wanted = together ? query_len : std::max<std::int64_t>(1, prefill_rows / group);
    const std::int64_t num_tiles = divide_up(query_len, wanted);
    const std::int64_t tokens = divide_up(query_len, num_tiles);
    const std::int64_t heads =
        together
            ? std::min<std::int64_t>(spec.num_kv_heads, std::max<std::int64_t>(1, max_tile_rows / (query_len * group)))
            : 1;
    for (std::int64_t token = 0; token < query_len; token += tokens) {
      query_tile t;
      t.seq = seq;
      t.first_token = batch.query_start_loc[seq] + token;
      t.first_position = first + token;
      t.seq_len = seq_len;
      t.num_tokens = static_cast<std::int32_t>(std::min(tokens, query_len - token));
      const visible_range visible = window.of_run(t.first_position, t.first_position + t.num_tokens - 1, seq_len);
      const std::int64_t keys = std::max<std::int64_t>(0, visible.end - visible.begin);
      t.split_begin = static_cast<std::int32_t>(visible.begin / split_keys);
      t.split_end = keys == 0 ? t.split_begin : static_cast<std::int32_t>(divide_up(visible.end, split_keys));
      for (std::int64_t head = 0; head < spec.num_kv_heads; head += heads) {
        t.head_begin = static_cast<std::int32_t>(head);
        t.head_end = static_cast<std::int32_t>(std::min<std::int64_t>(head + heads, spec.num_kv_heads));
        const double head_keys = static_cast<double>(keys) * (t.head_end - t.head_begin);
        const double values = head_keys * (static_cast<double>(spec.qk_head_dim) + spec.v_head_dim);
        const double read_values = spec.v_in_k ? head_keys * spec.qk_head_dim : values;
        const double read = read_values * static_cast<double>(size_of(spec.k_code.type)) / bytes_per_ns;
        const double computed = 2 * values * t.num_tokens * group / flops_per_ns;
        t.cost = static_cast<std::int64_t>(std::max(read, computed)) + 100;
        visit(t);
      }
    }
  }
}

// Into how many parts a query tile is split over its KV heads and over the splits of its keys, as even as possible;
// each pair of parts is an item.
struct tile_parts {
  std::int32_t head_parts = 1;
  std::int32_t split_parts = 1;
};

tile_parts parts_of(const query_tile& t, std::int64_t item_cost) noexcept {
  const std::int64_t wanted = divide_up(t.cost, item_cost);
  const std::int64_t splits = std::max(1, t.split_end - t.split_begin);
  tile_parts parts;
  parts.split_parts = static_cast<std::int32_t>(std::min(wanted, splits));
  if (wanted > splits) {
    parts.head_parts =
        static_cast<std::int32_t>(std::min<std::int64_t>(divide_up(wanted, splits), t.head_end - t.head_begin));
  }
  return parts;
}

std::int32_t part_begin(std::int32_t begin, std::int32_t end, std::int32_t parts, std::int32_t part) noexcept {
  return begin + static_cast<std::int32_t>(std::int64_t{end - begin} * part / parts);
}

std::int64_t rows_of(const query_tile& t, std::int32_t group, std::int32_t heads) noexcept {
  return std::int64_t{t.num_tokens} * group * heads;
}

// What `fill` needs, counted first.
struct plan_totals {
  std::int64_t num_items = 0;
  std::int64_t num_counters = 0;
  std::int64_t partial_floats = 0;
  std::int64_t max_head_rows = 0;
  std::int64_t max_rows = 0;
  std::int64_t max_padded_rows = 0;  // with those of each KV head padded to `row_align`
  std::int64_t max_row_groups = 0;   // of all KV heads
};

cpu_attention_plan::scratch_sizes sizes_of(const attention_spec& spec, const plan_totals& totals) noexcept {
  const std::int64_t qk_padded = padded_dims(spec.qk_head_dim);
  const std::int64_t v_padded = padded_dims(spec.v_head_dim);
  const std::int64_t larger = std::max(qk_padded, v_padded);
  const std::int64_t stride = partial_stride(spec.v_head_dim);
  cpu_attention_plan::scratch_sizes sizes;
  sizes.keys = qk_padded * tile_keys;
  // A row of q passes through here as well.
  sizes.values = std::max(v_padded * tile_keys, qk_padded);
  sizes.queries = std::max(totals.max_rows, totals.max_padded_rows / 2) * qk_padded;
  sizes.scores = divide_up(totals.max_head_rows, row_align) * row_align * tile_keys;
  sizes.states = std::max(totals.max_rows * stride, totals.max_row_groups * row_group_floats(spec.v_head_dim));
  sizes.sums = totals.max_rows * workspace_align;
  sizes.totals = totals.max_rows * stride;
  if (spec.k_code.type == dtype::u8) {
    const std::int64_t rows = std::max(totals.max_rows, totals.max_row_groups * workspace_align);
    sizes.query_sums = divide_up(rows, workspace_align) * workspace_align;
  }
  sizes.staging = larger * tile_keys;
  // Whatever implementation this plan is for: backends with other instruction sets take it too.
  const std::int64_t head_groups = divide_up(totals.max_head_rows, row_group_rows);
  if (size_of(spec.k_code.type) <= 2 && head_groups > 1) {
    sizes.probabilities = output_tiles_together * head_groups * row_group_probabilities;
    sizes.value_pairs = output_tiles_together * v_padded * (tile_keys / 2);
    sizes.pending = divide_up(head_groups, workspace_align) * workspace_align;
  }
  sizes.zero_row = larger;
  return sizes;
}

std::int64_t sum_of(const cpu_attention_plan::scratch_sizes& s) noexcept {
  return s.keys + s.values + s.queries + s.scores + s.states + s.sums + s.totals + s.query_sums + s.staging +
         s.probabilities + s.value_pairs + s.pending + s.zero_row;
}

void fill(cpu_attention_plan& state, const attention_spec& spec, const host_step_view& batch, std::int32_t prefill_rows,
          std::int64_t item_cost) noexcept {
  const std::int32_t group = spec.num_q_heads / spec.num_kv_heads;
  std::int64_t partials = 0;
  std::int32_t num_counters = 0;
  planned_item* next = state.items.data();
  for_each_query_tile(spec, state.window, batch, prefill_rows, [&](const query_tile& t) noexcept {
    const tile_parts parts = parts_of(t, item_cost);
    const std::int64_t head_cost = t.cost / parts.head_parts;
    for (std::int32_t h = 0; h < parts.head_parts; ++h) {
      planned_item item;
      item.first_token = t.first_token;
      item.first_position = t.first_position;
      item.seq_len = t.seq_len;
      item.seq = t.seq;
      item.num_tokens = t.num_tokens;
      item.kv_head_begin = part_begin(t.head_begin, t.head_end, parts.head_parts, h);
      item.kv_head_end = part_begin(t.head_begin, t.head_end, parts.head_parts, h + 1);
      if (parts.split_parts > 1) {
        item.partials = partials;
        item.counter = num_counters;
        partials += (t.split_end - t.split_begin) * rows_of(t, group, item.kv_head_end - item.kv_head_begin) *
                    partial_stride(spec.v_head_dim);
        completion_counter* counter = state.counters.data() + num_counters++;
        new (counter) completion_counter{parts.split_parts, parts.split_parts};
      }
      for (std::int32_t s = 0; s < parts.split_parts; ++s) {
        item.split_begin = part_begin(t.split_begin, t.split_end, parts.split_parts, s);
        item.split_end = part_begin(t.split_begin, t.split_end, parts.split_parts, s + 1);
        item.cost = head_cost * (item.split_end - item.split_begin) / std::max(1, t.split_end - t.split_begin);
        new (next++) planned_item(item);
      }
    }
  });
  // Long items first, so that short ones come at the end. The order changes no bit of a result.
  std::sort(state.items.data(), next, [](const planned_item& a, const planned_item& b) {
    if (a.cost != b.cost) return a.cost > b.cost;
    if (a.first_token != b.first_token) return a.first_token > b.first_token;
    if (a.split_begin != b.split_begin) return a.split_begin < b.split_begin;
    return a.kv_head_begin < b.kv_head_begin;
  });
}

void make_plan(const kernel_table& table, std::string_view environment, std::int32_t num_workers,
               memory_resource& memory, attention_plan& plan, const attention_spec& spec, const host_step_view& batch,
               std::int64_t num_blocks) {
  std::string sentence;
  if (const errc code = validate::attention_spec_alone(spec, &sentence); code != errc::ok)
    detail::refuse(code, sentence);
  if (const errc code = validate::attention_batch(spec, batch, num_blocks, &sentence); code != errc::ok) {
    detail::refuse(code, sentence);
  }

  const detail::forced_implementation forced = detail::forced_by(spec, environment);
  const attention_problem problem = problem_of(table, spec);
  std::string_view implementation;
  if (!forced.name.empty()) {
    implementation = detail::forced_entry(attention_implementations(), problem, forced).name;
  }

  const attention_window window = attn::window_of(spec);

  const std::int32_t group = spec.num_q_heads / spec.num_kv_heads;
  const attention_implementation* taken = implementation_of(problem, implementation);
  std::int32_t prefill_rows = taken == nullptr ? low_prefill_rows : taken->prefill_rows;
  std::int64_t total_cost = 0;
  for (;; prefill_rows = std::max(low_prefill_rows, prefill_rows / 2)) {
    total_cost = 0;
    std::int64_t num_parts = 0;  // at most
    for_each_query_tile(spec, window, batch, prefill_rows, [&](const query_tile& t) {
      total_cost += t.cost;
      num_parts += std::max(1, t.split_end - t.split_begin) * (t.head_end - t.head_begin);
    });
    if (total_cost < min_parallel_ns) num_workers = 1;
    if (num_workers == 1 || num_parts >= num_workers * items_per_worker || prefill_rows <= low_prefill_rows) break;
  }
  const std::int64_t item_cost = num_workers == 1
                                     ? std::max<std::int64_t>(1, total_cost)
                                     : std::max(min_item_ns, divide_up(total_cost, num_workers * items_per_worker));

  plan_totals totals;
  for_each_query_tile(spec, window, batch, prefill_rows, [&](const query_tile& t) {
    const tile_parts parts = parts_of(t, item_cost);
    totals.num_items += std::int64_t{parts.head_parts} * parts.split_parts;
    const std::int32_t heads = static_cast<std::int32_t>(divide_up(t.head_end - t.head_begin, parts.head_parts));
    totals.max_head_rows = std::max(totals.max_head_rows, rows_of(t, group, 1));
    totals.max_rows = std::max(totals.max_rows, rows_of(t, group, heads));
    totals.max_padded_rows =
        std::max(totals.max_padded_rows, divide_up(rows_of(t, group, 1), row_align) * row_align * heads);
    totals.max_row_groups = std::max(totals.max_row_groups, divide_up(rows_of(t, group, 1), row_group_rows) * heads);
    if (parts.split_parts > 1) {
      totals.num_counters += parts.head_parts;
      totals.partial_floats += (t.split_end - t.split_begin) * rows_of(t, group, t.head_end - t.head_begin) *
                               partial_stride(spec.v_head_dim);
    }
  });
  num_workers =
      static_cast<std::int32_t>(std::max<std::int64_t>(1, std::min<std::int64_t>(num_workers, totals.num_items)));
  const cpu_attention_plan::scratch_sizes sizes = sizes_of(spec, totals);
  const std::int64_t worker_floats = totals.num_items == 0 ? 0 : sum_of(sizes);

  // Everything that can fail comes before the plan is changed: new arrays are made next to the old ones.
  auto* state = detail::state_of<cpu_attention_plan>(plan, &cpu_attention_plan::owner_address);
  std::unique_ptr<cpu_attention_plan> fresh;
  if (state == nullptr) {
    fresh = std::make_unique<cpu_attention_plan>();
    state = fresh.get();
  }
  grown_array<planned_item> items;
  grown_array<completion_counter> counters;
  grown_array<float> partials;
  grown_array<float> scratch;
  const auto grow = [&memory](auto& array, const auto& held, std::int64_t count) {
    if (static_cast<std::size_t>(count) > held.capacity()) array.require(memory, static_cast<std::size_t>(count));
  };
  grow(items, state->items, totals.num_items);
  grow(counters, state->counters, totals.num_counters);
  grow(partials, state->partials, totals.partial_floats);
  grow(scratch, state->scratch, worker_floats * num_workers);

  const auto adopt = [](auto& held, auto& array) {
    if (array.capacity() > 0) held.swap(array);
  };
  adopt(state->items, items);
  adopt(state->counters, counters);
  adopt(state->partials, partials);
  adopt(state->scratch, scratch);
  state->window = window;
  state->num_items = static_cast<std::int32_t>(totals.num_items);
  state->num_workers = num_workers;
  state->worker_floats = worker_floats;
  state->sizes = sizes;
  fill(*state, spec, batch, prefill_rows, item_cost);
  if (worker_floats > 0) {
    for (std::int32_t worker = 0; worker < num_workers; ++worker) {
      auto* zeros = static_cast<float*>(state->scratch_of(worker).zero_row);
      std::fill(zeros, zeros + sizes.zero_row, 0.0f);
    }
  }
  if (fresh != nullptr) plan.state = std::move(fresh);
  plan.spec = spec;
  plan.spec.implementation = implementation;
  plan.num_seqs = batch.num_seqs;
  plan.num_tokens = batch.num_tokens;
  plan.num_blocks = num_blocks;
  plan.has_query_positions = batch.query_positions != nullptr;
  plan.max_seq_len = 0;
  for (std::int32_t seq = 0; seq < batch.num_seqs; ++seq) {
    plan.max_seq_len = std::max(plan.max_seq_len, batch.seq_lens[seq]);
  }
  plan.num_table_entries = blocks_for(plan.max_seq_len, spec.block_size);
}

}  // namespace

attention_scratch cpu_attention_plan::scratch_of(std::int32_t worker) noexcept {
  float* at = scratch.data() + worker * worker_floats;
  const auto take = [&at](std::int64_t floats) { return std::exchange(at, at + floats); };
  attention_scratch parts;
  parts.keys = take(sizes.keys);
  parts.values = take(sizes.values);
  parts.queries = take(sizes.queries);
  parts.scores = take(sizes.scores);
  parts.states = take(sizes.states);
  parts.sums = take(sizes.sums);
  parts.totals = take(sizes.totals);
  parts.query_sums = take(sizes.query_sums);
  parts.staging = take(sizes.staging);
  parts.probabilities = take(sizes.probabilities);
  parts.value_pairs = take(sizes.value_pairs);
  parts.pending = reinterpret_cast<std::int32_t*>(take(sizes.pending));
  parts.zero_row = take(sizes.zero_row);
  return parts;
}

void plan_attention(const kernel_table& table, std::string_view forced, std::int32_t num_workers,
                    memory_resource& memory, attention_plan& plan, const attention_spec& spec,
                    const host_step_view& batch, std::int64_t num_blocks) {
  detail::translate_bad_alloc("plan_attention",
                              [&] { make_plan(table, forced, num_workers, memory, plan, spec, batch, num_blocks); });
}

}  // namespace bifolio::inline v0_2::cpu
