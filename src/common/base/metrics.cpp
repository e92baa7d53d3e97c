// SPDX-License-Identifier: Apache-2.0
#include <bifolio/error.hpp>
#include <bifolio/metrics.hpp>
#include <cstdint>

#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"

namespace bifolio::inline v0_2 {
namespace {

/// One number of a struct of stats. A counter only grows; its metric's name ends in _total.
template <class Stats>
struct metric_row {
  std::int64_t Stats::*value;
  std::string_view field;   ///< its name in stats.hpp, and in JSON
  std::string_view metric;  ///< its name for Prometheus
  bool is_counter;
  std::string_view help;
};

// clang-format off
#define BIFOLIO_ROW(Stats, field, metric, is_counter, help) {&Stats::field, #field, metric, is_counter, help}
constexpr metric_row<cache_stats> cache_rows[] = {
  BIFOLIO_ROW(cache_stats, num_blocks, "bifolio_blocks", false, "Blocks of the pool."),
  BIFOLIO_ROW(cache_stats, num_free_blocks, "bifolio_free_blocks", false, "Blocks that can be handed out, cached ones included."),
  BIFOLIO_ROW(cache_stats, num_used_blocks, "bifolio_used_blocks", false, "Blocks in use."),
  BIFOLIO_ROW(cache_stats, peak_used_blocks, "bifolio_peak_used_blocks", false, "Most blocks that were in use at once."),
  BIFOLIO_ROW(cache_stats, num_sequences, "bifolio_sequences", false, "Open sequences, swapped ones included."),
  BIFOLIO_ROW(cache_stats, num_tokens, "bifolio_sequence_tokens", false, "Tokens of open sequences, shared ones counted for each."),
  BIFOLIO_ROW(cache_stats, num_table_entries, "bifolio_table_entries", false, "Blocks of open sequences, shared ones counted for each."),
  BIFOLIO_ROW(cache_stats, num_allocated_blocks, "bifolio_allocated_blocks_total", true, "Blocks taken from the pool."),
  BIFOLIO_ROW(cache_stats, num_copied_blocks, "bifolio_copied_blocks_total", true, "Blocks copied on write."),
  BIFOLIO_ROW(cache_stats, num_forks, "bifolio_forks_total", true, "Sequences forked."),
  BIFOLIO_ROW(cache_stats, num_host_blocks, "bifolio_host_blocks", false, "Blocks of the host pool."),
  BIFOLIO_ROW(cache_stats, num_free_host_blocks, "bifolio_free_host_blocks", false, "Host blocks that can be handed out."),
  BIFOLIO_ROW(cache_stats, num_swapped_sequences, "bifolio_swapped_sequences", false, "Sequences in host blocks."),
  BIFOLIO_ROW(cache_stats, num_swapped_out_blocks, "bifolio_swapped_out_blocks_total", true, "Blocks copied to the host."),
  BIFOLIO_ROW(cache_stats, num_swapped_in_blocks, "bifolio_swapped_in_blocks_total", true, "Blocks copied from the host."),
};
constexpr metric_row<prefix_stats> prefix_rows[] = {
  BIFOLIO_ROW(prefix_stats, num_lookups, "bifolio_prefix_lookups_total", true, "Prompts looked up in the prefix cache."),
  BIFOLIO_ROW(prefix_stats, num_looked_up_blocks, "bifolio_prefix_looked_up_blocks_total", true, "Full blocks of those prompts."),
  BIFOLIO_ROW(prefix_stats, num_hit_blocks, "bifolio_prefix_hit_blocks_total", true, "Of these, blocks that were found."),
  BIFOLIO_ROW(prefix_stats, num_published_blocks, "bifolio_prefix_published_blocks_total", true, "Blocks registered for later prompts."),
  BIFOLIO_ROW(prefix_stats, num_duplicate_blocks, "bifolio_prefix_duplicate_blocks_total", true, "Blocks computed although their contents were cached."),
  BIFOLIO_ROW(prefix_stats, num_evicted_blocks, "bifolio_prefix_evicted_blocks_total", true, "Cached contents lost because their block was handed out."),
  BIFOLIO_ROW(prefix_stats, num_cached_blocks, "bifolio_prefix_cached_blocks", false, "Blocks registered now."),
};
constexpr metric_row<scheduler_stats> scheduler_rows[] = {
  BIFOLIO_ROW(scheduler_stats, num_waiting, "bifolio_waiting_sequences", false, "Sequences without blocks, preempted ones included."),
  BIFOLIO_ROW(scheduler_stats, num_running, "bifolio_running_sequences", false, "Sequences with blocks of the device."),
  BIFOLIO_ROW(scheduler_stats, num_swapped, "bifolio_scheduler_swapped_sequences", false, "Sequences of the scheduler in host blocks."),
  BIFOLIO_ROW(scheduler_stats, num_steps, "bifolio_steps_total", true, "Steps committed."),
  BIFOLIO_ROW(scheduler_stats, num_scheduled_tokens, "bifolio_computed_tokens_total", true, "Tokens computed, recomputed ones included."),
  BIFOLIO_ROW(scheduler_stats, num_cached_tokens, "bifolio_cached_tokens_total", true, "Prompt tokens found in the prefix cache."),
  BIFOLIO_ROW(scheduler_stats, num_sampled_tokens, "bifolio_sampled_tokens_total", true, "Tokens appended to outputs."),
  BIFOLIO_ROW(scheduler_stats, num_draft_tokens, "bifolio_draft_tokens_total", true, "Draft tokens computed."),
  BIFOLIO_ROW(scheduler_stats, num_accepted_drafts, "bifolio_accepted_draft_tokens_total", true, "Of these, tokens that were kept."),
  BIFOLIO_ROW(scheduler_stats, num_preemptions, "bifolio_preemptions_total", true, "Sequences preempted, by recomputation or swapping."),
  BIFOLIO_ROW(scheduler_stats, num_swap_outs, "bifolio_swap_outs_total", true, "Of these, sequences moved to the host."),
  BIFOLIO_ROW(scheduler_stats, num_swap_ins, "bifolio_swap_ins_total", true, "Sequences that came back from the host."),
  BIFOLIO_ROW(scheduler_stats, num_failed_swaps, "bifolio_failed_swaps_total", true, "Sequences computed again because their copies failed."),
  BIFOLIO_ROW(scheduler_stats, num_finished, "bifolio_finished_sequences_total", true, "Sequences that ended by length or by a stop."),
  BIFOLIO_ROW(scheduler_stats, num_aborted, "bifolio_aborted_sequences_total", true, "Sequences that were aborted."),
};
#undef BIFOLIO_ROW
// clang-format on

// A new field does not compile until it has a row: the structs hold 64-bit numbers and nothing else.
static_assert(std::size(cache_rows) * sizeof(std::int64_t) == sizeof(cache_stats));
static_assert(std::size(prefix_rows) * sizeof(std::int64_t) == sizeof(prefix_stats));
static_assert(std::size(scheduler_rows) * sizeof(std::int64_t) == sizeof(scheduler_stats));

bool is_label_name(std::string_view name) noexcept {
  const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
  if (name.empty() || !is_letter(name[0]) || name.substr(0, 2) == "__") return false;
  for (const char c : name) {
    if (!is_letter(c) && (c < '0' || c > '9')) return false;
  }
  return true;
}

/// {name="value",…}, or nothing without labels.
std::string label_text(std::span<const metric_label> labels) {
  std::string text;
  for (const auto& [name, value] : labels) {
    if (!is_label_name(name)) {
      detail::refuse(errc::invalid_argument, "'", name,
                     "' is no name of a label: letters, digits and _, not a digit first, and not __ at the beginning");
    }
    text.append(text.empty() ? "{" : ",").append(name).append("=\"");
    for (const char c : value) {
      if (c == '\\' || c == '"') text.push_back('\\');
      c == '\n' ? text.append("\\n") : text.append(1, c);
    }
    text.push_back('"');
  }
  if (!text.empty()) text.push_back('}');
  return text;
}

template <class Stats>
void append_samples(std::string& text, const Stats& stats, std::span<const metric_row<Stats>> rows,
                    std::string_view labels) {
  for (const metric_row<Stats>& row : rows) {
    text.append("# HELP ").append(row.metric).append(" ").append(row.help);
    text.append("\n# TYPE ").append(row.metric).append(row.is_counter ? " counter\n" : " gauge\n");
    text.append(row.metric).append(labels).append(" ").append(std::to_string(stats.*row.value)).append("\n");
  }
}

template <class Stats>
void append_object(std::string& text, std::string_view name, const Stats& stats,
                   std::span<const metric_row<Stats>> rows) {
  text.append(text.empty() ? "{\"" : ",\"").append(name).append("\":");
  char separator = '{';
  for (const metric_row<Stats>& row : rows) {
    text.append(1, separator).append("\"").append(row.field).append("\":").append(std::to_string(stats.*row.value));
    separator = ',';
  }
  text.push_back('}');
}

}  // namespace

std::string prometheus_text(const metrics& what, std::span<const metric_label> labels) {
  return detail::translate_bad_alloc("prometheus_text", [&] {
    const std::string of_all = label_text(labels);
    std::string text;
    append_samples<cache_stats>(text, what.cache, cache_rows, of_all);
    if (what.prefix) append_samples<prefix_stats>(text, *what.prefix, prefix_rows, of_all);
    if (what.scheduler) append_samples<scheduler_stats>(text, *what.scheduler, scheduler_rows, of_all);
    return text;
  });
}

std::string json_text(const metrics& what) {
  return detail::translate_bad_alloc("json_text", [&] {
    std::string text;
    append_object<cache_stats>(text, "cache", what.cache, cache_rows);
    if (what.prefix) append_object<prefix_stats>(text, "prefix", *what.prefix, prefix_rows);
    if (what.scheduler) append_object<scheduler_stats>(text, "scheduler", *what.scheduler, scheduler_rows);
    return text.append("}");
  });
}

}  // namespace bifolio::inline v0_2
