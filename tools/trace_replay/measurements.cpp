// SPDX-License-Identifier: Apache-2.0
#include "measurements.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace trace_replay {

percentiles percentiles_of(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const auto count = static_cast<double>(values.size());
  const auto at = [&](double share) {
    return values[static_cast<std::size_t>(std::max(0.0, std::ceil(share * count) - 1))];
  };
  return {std::accumulate(values.begin(), values.end(), 0.0) / count, at(0.5), at(0.9), at(0.99), values.back()};
}

void timeline::add(const pool_sample& sample) {
  if (samples_.size() == max_samples) {
    for (std::size_t i = 0; 2 * i < samples_.size(); ++i) samples_[i] = samples_[2 * i];
    samples_.resize(max_samples / 2);
    distance_ = std::max(2 * distance_, (samples_.back().at - samples_.front().at) / (max_samples / 2));
  }
  samples_.push_back(sample);
  next_ = sample.at + distance_;
}

void timeline::finish(const pool_sample& sample) {
  if (!samples_.empty() && samples_.back().at >= sample.at) samples_.pop_back();
  add(sample);
}

std::vector<pool_sample> timeline::thinned(std::size_t count) const {
  if (samples_.size() <= count) return samples_;
  std::vector<pool_sample> result;
  for (std::size_t i = 0; i < count; ++i) result.push_back(samples_[i * (samples_.size() - 1) / (count - 1)]);
  return result;
}

}  // namespace trace_replay
