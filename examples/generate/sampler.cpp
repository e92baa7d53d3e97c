// SPDX-License-Identifier: Apache-2.0
#include "sampler.hpp"

#include <algorithm>
#include <cmath>

#include "input_error.hpp"

namespace generate {
namespace {

using bifolio::token_id;

/// SplitMix64 (Steele, Lea, Flood 2014): small, and the same on every platform.
std::uint64_t next(std::uint64_t& state) noexcept {
  state += 0x9e3779b97f4a7c15u;
  std::uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

token_id largest_logit(std::span<const float> logits) noexcept {
  std::size_t best = 0;
  for (std::size_t i = 1; i < logits.size(); ++i) {
    if (logits[i] > logits[best] || std::isnan(logits[best])) best = i;
  }
  return token_id{static_cast<std::int32_t>(best)};
}

double negative_log_likelihood(std::span<const float> logits, token_id target) noexcept {
  const double largest = logits[static_cast<std::size_t>(to_index(largest_logit(logits)))];
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - largest);
  return largest + std::log(sum) - static_cast<double>(logits[static_cast<std::size_t>(to_index(target))]);
}

sampler::sampler(const sampling& how, std::uint64_t seed, std::uint64_t stream) noexcept : how_(how), state_(seed) {
  state_ = next(state_) ^ (stream * 0xd1342543de82ef95u);
  next(state_);
}

double sampler::random() noexcept { return static_cast<double>(next(state_) >> 11) * 0x1p-53; }

token_id sampler::choose(std::span<const float> logits) {
  const token_id best = largest_logit(logits);
  const float largest = logits[static_cast<std::size_t>(to_index(best))];
  if (!std::isfinite(largest)) {
    throw input_error("the model gives logits that are not finite numbers: its weights are damaged");
  }
  if (how_.temperature == 0) return best;

  candidates_.clear();
  double sum = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const float weight = std::exp((logits[i] - largest) / how_.temperature);
    if (!(weight > 0)) continue;
    sum += static_cast<double>(weight);
    candidates_.emplace_back(weight, static_cast<std::int32_t>(i));
  }
  if (how_.top_p < 1) {
    // Tokens that are each below (1 − p) / n of the whole are together below 1 − p: the nucleus is full without them,
    // and sorting the few others is cheap.
    const auto least =
        static_cast<float>((1 - static_cast<double>(how_.top_p)) * sum / static_cast<double>(logits.size()));
    std::erase_if(candidates_, [least](const auto& candidate) { return candidate.first < least; });
    std::sort(candidates_.begin(), candidates_.end(), [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first > b.first : a.second < b.second;
    });
    const double enough = static_cast<double>(how_.top_p) * sum;
    double kept = 0;
    std::size_t count = 0;
    while (count < candidates_.size() && (count == 0 || kept < enough)) {
      kept += static_cast<double>(candidates_[count++].first);
    }
    candidates_.resize(count);
    sum = kept;
  }
  double left = random() * sum;
  for (const auto& [weight, id] : candidates_) {
    left -= static_cast<double>(weight);
    if (left < 0) return token_id{id};
  }
  return token_id{candidates_.back().second};
}

}  // namespace generate
