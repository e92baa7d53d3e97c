// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What a replay is summed up from: shares, percentiles of durations, and the pool over time.

#include <cstdint>
#include <vector>

namespace trace_replay {

struct percentiles {
  double mean = 0;
  double p50 = 0;
  double p90 = 0;
  double p99 = 0;
  double max = 0;
};

/// Nearest-rank percentiles: p90 is the smallest value that at least 90 % of the values do not exceed. All zero without
/// values.
[[nodiscard]] percentiles percentiles_of(std::vector<double> values);

/// 0 of nothing.
[[nodiscard]] inline double share(std::int64_t part, std::int64_t whole) noexcept {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0.0;
}

/// The state at one moment.
struct pool_sample {
  double at = 0;                   ///< simulated seconds; requests done when the cache is replayed alone
  std::int64_t used_blocks = 0;    ///< of requests that run
  std::int64_t cached_blocks = 0;  ///< kept for later, used by nobody
  std::int64_t host_blocks = 0;    ///< of the host pool, in use
  std::int64_t running = 0;        ///< sequences
  std::int64_t waiting = 0;
  std::int64_t hits = 0;     ///< blocks found so far
  std::int64_t lookups = 0;  ///< blocks looked up so far
};

/// Samples at about equal distances, never more than max_samples: when they are too many, every other one goes and the
/// distance doubles.
class timeline {
 public:
  static constexpr std::size_t max_samples = 1024;

  /// `span` is about how far the moments will reach; half of max_samples fit into it.
  explicit timeline(double span = 0) : distance_(span / (max_samples / 2)) {}

  /// Whether a sample at this moment would be kept.
  [[nodiscard]] bool due(double at) const noexcept { return samples_.empty() || at >= next_; }
  void add(const pool_sample& sample);
  /// Keeps the last moment whether it is due or not.
  void finish(const pool_sample& sample);

  [[nodiscard]] const std::vector<pool_sample>& samples() const noexcept { return samples_; }
  /// At most `count` of them, evenly spread, the first and the last included.
  [[nodiscard]] std::vector<pool_sample> thinned(std::size_t count) const;

 private:
  std::vector<pool_sample> samples_;
  double distance_;
  double next_ = 0;
};

}  // namespace trace_replay
