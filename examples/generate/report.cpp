// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "tools/common/program.hpp"

namespace generate {
namespace {

double rate(std::int64_t count, double seconds) { return seconds > 0 ? static_cast<double>(count) / seconds : 0; }

}  // namespace

std::string format_bytes(std::int64_t num_bytes) {
  constexpr std::array<const char*, 4> units{"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(num_bytes) / 1024;
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < units.size()) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.1f} {}", value, units[unit]);
}

void progress_line::show(const generation_progress& now) {
  if (style_ == style::none || now.seconds < next_seconds_) return;
  next_seconds_ = now.seconds + (style_ == style::live ? 0.1 : seconds_between_lines);
  const std::string line =
      fmt::format("step {}: {} of {} sequences done, {} running, {} waiting; {} of {} blocks used; {:.0f} tokens/s",
                  now.num_steps, now.num_finished, num_sequences_, now.num_running, now.num_waiting, now.used_blocks,
                  num_blocks_, rate(now.num_fed, now.seconds));
  if (style_ == style::live) {
    line_.show(line);
  } else {
    tools::write_stderr(line + "\n");
  }
}

std::string format_report(const report_input& input, bool detailed) {
  const generation_stats& s = input.stats;
  const std::vector<pool_facts> pools = pools_of(s.config);
  std::int64_t held = s.cache.peak_used_blocks * pools[0].block_bytes;
  std::int64_t position_bytes = 0, state_bytes = 0;  // of all layers, were all their tokens kept
  for (std::size_t g = 0; g < pools.size(); ++g) {
    if (g > 0) held += s.more_groups[g - 1].peak_used_blocks * pools[g].block_bytes;
    if (pools[g].kind == bifolio::group_kind::state) {
      state_bytes += pools[g].block_bytes;
    } else {
      position_bytes += pools[g].block_bytes / pools[g].block_size;
    }
  }
  // What the same sequences would take side by side: each with room for the longest that may come, or each with
  // exactly what it has.
  const std::int64_t of_states = s.record.peak_sequences * state_bytes;
  const std::int64_t of_maximum = s.record.peak_sequences * input.max_positions * position_bytes + of_states;
  const std::int64_t of_true_length = s.record.peak_positions * position_bytes + of_states;
  const auto times_held = [&](std::int64_t num_bytes) {
    return held > 0 ? static_cast<double>(num_bytes) / static_cast<double>(held) : 0.0;
  };

  std::vector<std::pair<std::string, std::string>> rows;
  const auto add = [&](const char* name, std::string value) { rows.emplace_back(name, std::move(value)); };
  add("prefill", fmt::format("{:.0f} tokens/s ({} tokens)", rate(s.record.num_prefill_tokens, s.record.prefill_seconds),
                             s.record.num_prefill_tokens));
  add("decode", fmt::format("{:.0f} tokens/s ({} tokens)", rate(s.record.num_decode_tokens, s.record.decode_seconds),
                            s.record.num_decode_tokens));
  add("blocks used at the peak",
      fmt::format("{} of {}, each {} tokens", s.cache.peak_used_blocks, s.cache.num_blocks, pools[0].block_size));
  for (std::size_t g = 1; g < pools.size(); ++g) {
    const bifolio::cache_stats& group = s.more_groups[g - 1];
    const bool has_states = pools[g].kind == bifolio::group_kind::state;
    add(has_states ? "states used at the peak" : "  for windows",
        has_states
            ? fmt::format("{} of {}", group.peak_used_blocks, group.num_blocks)
            : fmt::format("{} of {}, for windows of {}", group.peak_used_blocks, group.num_blocks, pools[g].window));
  }
  add("bytes of KV held", fmt::format("{} at the peak", format_bytes(held)));
  add("contiguous, maximum length",
      fmt::format("{} for {} sequences of {} positions: {:.1f} times as much", format_bytes(of_maximum),
                  s.record.peak_sequences, input.max_positions, times_held(of_maximum)));
  add("contiguous, true length",
      fmt::format("{} for their {} positions: {:.1f} times as much", format_bytes(of_true_length),
                  s.record.peak_positions, times_held(of_true_length)));
  if (s.record.peak_table_entries > s.cache.peak_used_blocks) {
    add("entries of block tables", fmt::format("{} at the peak, for {} blocks: the others are shared",
                                               s.record.peak_table_entries, s.cache.peak_used_blocks));
  }
  add("copy-on-write copies", fmt::format("{} blocks", s.cache.num_copied_blocks));
  add("preemptions", fmt::format("{}", s.schedule.num_preemptions));
  if (s.prefix.num_lookups > 0) {
    add("prompt blocks found cached", fmt::format("{} of {}", s.prefix.num_hit_blocks, s.prefix.num_looked_up_blocks));
    add("prompt tokens not computed", fmt::format("{}", s.schedule.num_cached_tokens));
  }
  if (s.cache.num_host_blocks > 0) {
    add("blocks swapped out and in",
        fmt::format("{} and {}", s.cache.num_swapped_out_blocks, s.cache.num_swapped_in_blocks));
  }
  if (detailed) {
    add("sequences", fmt::format("{}", s.num_sequences));
    add("steps", fmt::format("{} of {:.1f} tokens", s.schedule.num_steps,
                             rate(s.schedule.num_scheduled_tokens, static_cast<double>(s.schedule.num_steps))));
    add("forks", fmt::format("{}", s.cache.num_forks));
    add("blocks taken in all", fmt::format("{}", s.cache.num_allocated_blocks));
    const bifolio::model_group stored =
        s.config.groups.empty() ? bifolio::model_group{.layout = s.config.layout, .attention = s.config.attention}
                                : *std::ranges::find_if(s.config.groups, [](const auto& group) {
                                    return group.state_bytes == 0 && !group.layers.empty();
                                  });
    const auto& [k_code, v_code] = std::pair(stored.attention.k_code, stored.attention.v_code);
    const std::string codes = k_code == v_code ? std::string(short_name(k_code))
                                               : fmt::format("{} and {}", short_name(k_code), short_name(v_code));
    add("cache", fmt::format("{} {}, {} a block in {} layers, {} a token", codes, to_string(stored.layout),
                             format_bytes(pools[0].block_bytes), pools[0].num_layers, format_bytes(position_bytes)));
    add("time", fmt::format("{:.3f} s, of which prefill {:.3f}, decode {:.3f}", s.seconds, s.record.prefill_seconds,
                            s.record.decode_seconds));
    add("time in attention", fmt::format("{:.3f} s, appends included", s.attention_seconds));
  }
  std::size_t width = 0;
  for (const auto& row : rows) width = std::max(width, row.first.size());
  std::string table;
  for (const auto& [name, value] : rows) table += fmt::format("  {:<{}}  {}\n", name, width, value);
  return table;
}

}  // namespace generate
