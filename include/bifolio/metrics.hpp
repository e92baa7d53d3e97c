// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Counters as text, for scrapers and logs. docs/metrics.md lists the names, with those that vLLM's dashboards use.

#include <bifolio/export.hpp>
#include <bifolio/stats.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace bifolio::inline v0_2 {

/// What there is to say of one cache.
struct metrics {
  cache_stats cache{};                         ///< `kv_cache_manager::stats`
  std::optional<prefix_stats> prefix{};        ///< `prefix_cache::stats`
  std::optional<scheduler_stats> scheduler{};  ///< `scheduler::stats`
};

/// A label's name and value.
using metric_label = std::pair<std::string_view, std::string_view>;

/// Prometheus' text format (0.0.4): a # HELP and a # TYPE line and a sample for each metric, in a fixed order. Values
/// of labels are escaped. Throws `error`: invalid_argument (a label's name that is none, or begins with "__"; a value
/// that is not UTF-8 is the caller's), out_of_memory.
[[nodiscard]] BIFOLIO_API std::string prometheus_text(const metrics& what, std::span<const metric_label> labels = {});

/// One line of JSON: {"cache":{"num_blocks":…,…},"prefix":{…},"scheduler":{…}}, with the names of stats.hpp; what is
/// not there is left out. Throws `error` (out_of_memory).
[[nodiscard]] BIFOLIO_API std::string json_text(const metrics& what);

}  // namespace bifolio::inline v0_2
