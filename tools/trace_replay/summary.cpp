// SPDX-License-Identifier: Apache-2.0
#include "summary.hpp"

#include <fmt/format.h>

#include <filesystem>

namespace trace_replay {
namespace {

std::string name_of(policy_kind policy) { return policy == policy_kind::lru ? "lru" : "priority"; }

std::string trace_name(const options& chosen) { return std::filesystem::path(chosen.trace_path).filename().string(); }

double share(std::int64_t part, std::int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0.0;
}

}  // namespace

report summarize(const options& chosen, const cache_only_result& result) {
  report said;
  said.title = fmt::format("{}, prefix cache alone, {} blocks", trace_name(chosen), result.num_blocks);
  said.facts = {
      {"mode", "mode", std::string("cache-only")},
      {"trace", "trace", trace_name(chosen)},
      {"requests", "requests", result.num_requests},
      {"refused", "of these larger than the pool", result.num_refused},
      {"policy", "eviction policy", name_of(chosen.policy)},
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

}  // namespace trace_replay
