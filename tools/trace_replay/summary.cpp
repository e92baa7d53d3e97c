// SPDX-License-Identifier: Apache-2.0
#include "summary.hpp"

#include <fmt/format.h>

#include <filesystem>

namespace trace_replay {
namespace {

std::string name_of(policy_kind policy) {
  switch (policy) {
    case policy_kind::lru:
      return "lru";
    case policy_kind::priority:
      return "priority";
    case policy_kind::s3_fifo:
      return "s3_fifo";
  }
  return {};
}

std::string name_of(bifolio::preemption_mode mode) {
  switch (mode) {
    case bifolio::preemption_mode::recompute:
      return "recompute";
    case bifolio::preemption_mode::swap:
      return "swap";
    case bifolio::preemption_mode::automatic:
      return "automatic";
  }
  return "";
}

std::string trace_name(const options& chosen) { return std::filesystem::path(chosen.trace_path).filename().string(); }

}  // namespace

report summarize(const options& chosen, const cache_only_result& result) {
  report said;
  said.title = fmt::format("{}, prefix cache alone, {} blocks", trace_name(chosen), result.num_blocks);
  said.facts = {
      {"mode", "mode", std::string("cache-only")},
      {"trace", "trace", trace_name(chosen)},
      {"requests", "requests", result.num_requests},
      {"refused", "of these larger than the pool", result.num_refused},
      {"policy", "eviction policy", name_of(chosen.simulation.policy)},
      {"full_blocks", "full blocks only", std::string(chosen.full_blocks_only ? "yes" : "no")},
      {"blocks", "blocks of the pool", result.num_blocks},
      {"lookups", "blocks looked up", result.lookups},
      {"hits", "found", result.hits},
      {"hit_rate", "hit rate", share(result.hits, result.lookups)},
      {"evictions", "evictions", result.evictions},
      {"cached_blocks", "blocks cached at the end", result.cached_blocks},
      {"wall_seconds", "wall time, s", result.wall_seconds},
  };
  said.over_time = result.over_time;
  said.time_name = "requests_done";
  said.time_label = "requests done";
  said.num_blocks = result.num_blocks;
  return said;
}

report summarize(const options& chosen, const simulation_result& result) {
  const simulation_options& with = chosen.simulation;
  const std::int64_t num_tokens = result.num_prompt_tokens + result.num_sampled_tokens;
  const auto per_second = [&](std::int64_t count) {
    return result.simulated_seconds > 0 ? static_cast<double>(count) / result.simulated_seconds : 0.0;
  };
  report said;
  said.title = fmt::format("{}, {} blocks of {} tokens", trace_name(chosen), result.num_blocks, with.block_size);
  said.facts = {
      {"mode", "mode", std::string("simulation")},
      {"trace", "trace", trace_name(chosen)},
      {"speed", "times as fast as in the trace", with.speed},
      {"requests", "requests", result.num_requests},
      {"refused", "of these larger than the pool", result.num_refused},
      {"finished", "finished", result.num_finished},
      {"prompt_tokens", "prompt tokens", result.num_prompt_tokens},
      {"sampled_tokens", "sampled tokens", result.num_sampled_tokens},
      {"computed_tokens", "computed tokens", result.num_computed_tokens},
      {"block_size", "tokens of a block", std::int64_t{with.block_size}},
      {"blocks", "blocks of the pool", result.num_blocks},
      {"peak_used_blocks", "most blocks in use", result.peak_used_blocks},
      {"policy", "eviction policy", std::string(with.prefix_caching ? name_of(with.policy) : "no prefix caching")},
      {"lookups", "blocks looked up", result.lookups},
      {"hits", "found", result.hits},
      {"hit_rate", "hit rate", share(result.hits, result.lookups)},
      {"evictions", "evictions", result.evictions},
      {"preemption", "preemption by", name_of(with.preemption)},
      {"preemptions", "preemptions", result.preemptions},
      {"host_blocks", "blocks of the host's pool", with.num_host_blocks},
      {"swapped_out_blocks", "blocks swapped out", result.num_swapped_out_blocks},
      {"swapped_in_blocks", "blocks swapped in", result.num_swapped_in_blocks},
      {"steps_in_flight", "steps in flight", std::int64_t{with.steps_in_flight}},
      {"steps", "steps", result.num_steps},
      {"simulated_seconds", "simulated time, s", result.simulated_seconds},
      {"tokens_per_second", "prompt and sampled tokens a simulated second", per_second(num_tokens)},
      {"sampled_tokens_per_second", "sampled tokens a simulated second", per_second(result.num_sampled_tokens)},
      {"wall_seconds", "wall time, s", result.wall_seconds},
      {"bookkeeping_us_per_step", "wall time in scheduler and manager, µs a step", result.bookkeeping_us_per_step},
  };
  if (!result.groups.empty())
    said.facts.push_back({"cached_tokens", "tokens found in all groups", result.num_cached_tokens});
  for (std::size_t g = 0; g < result.groups.size(); ++g) {
    const group_result& group = result.groups[g];
    const auto add = [&](const char* name, const char* label, const auto& value) {
      said.facts.push_back({fmt::format("group_{}_{}", g, name), fmt::format("group {}: {}", g, label), value});
    };
    add("kind", "kind", std::string(to_string(group.kind)));
    add("blocks", "blocks of the pool", group.num_blocks);
    add("peak_used_blocks", "most blocks in use", group.peak_used_blocks);
    add("lookups", "blocks looked up", group.lookups);
    add("hits", "taken by hits", group.hits);
    add("evictions", "evictions", group.evictions);
  }
  said.durations = {
      {"queueing_ms", "queueing", result.queueing_ms},
      {"time_to_first_token_ms", "time to first token", result.time_to_first_token_ms},
      {"time_per_token_ms", "time per further token", result.time_per_token_ms},
      {"latency_ms", "whole request", result.latency_ms},
  };
  said.over_time = result.over_time;
  said.time_name = "seconds";
  said.time_label = "simulated seconds";
  said.num_blocks = result.num_blocks;
  said.num_host_blocks = with.num_host_blocks;
  return said;
}

}  // namespace trace_replay
