// SPDX-License-Identifier: Apache-2.0
#include "traffic.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace block_map {

using bifolio::request;
using bifolio::request_id;
using bifolio::token_id;

std::int64_t traffic::between(std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(high - low + 1));
}

bool traffic::happens(double probability) { return static_cast<double>(random_() >> 11) * 0x1p-53 < probability; }

void traffic::append_text(tokens& to, std::int64_t length) {
  for (; length > 0; --length) to.push_back(token_id{static_cast<std::int32_t>(between(1000, 50000))});
}

traffic::tokens traffic::system_prompt(std::int64_t which) const {
  tokens result;
  for (std::int64_t i = 0; i < 40 + 24 * which; ++i) {
    result.push_back(token_id{static_cast<std::int32_t>(100 * which + i)});
  }
  return result;
}

request traffic::ask(tokens prompt) {
  const auto length = static_cast<std::int64_t>(prompt.size());
  const auto answer = std::max<std::int64_t>(1, std::min(between(10, 150), options_.max_tokens - length));
  request result;
  result.prompt = prompt;
  result.max_new_tokens = static_cast<std::int32_t>(answer);
  result.num_samples = happens(0.15) ? static_cast<std::int32_t>(between(2, 4)) : 1;
  pending_.push_back(std::move(prompt));
  return result;
}

std::vector<request> traffic::arrivals(std::int64_t step) {
  now_ = step;
  pending_.clear();
  num_answered_ = 0;
  std::vector<request> result;
  while (!next_turns_.empty() && next_turns_.begin()->first <= step) {
    tokens prompt = std::move(next_turns_.begin()->second);
    next_turns_.erase(next_turns_.begin());
    append_text(prompt, between(5, 30));
    result.push_back(ask(std::move(prompt)));
  }
  // Half of what arrives continues an earlier turn; a day has 240 steps.
  const double wave = 1 + 0.9 * std::sin(static_cast<double>(step) * 6.283185307179586 / 240);
  for (double expected = 0.5 * options_.load * wave; expected > 0; expected -= 1) {
    if (!happens(std::min(expected, 1.0))) continue;
    tokens prompt = system_prompt(between(0, 2));
    append_text(prompt, between(5, 60));
    result.push_back(ask(std::move(prompt)));
  }
  return result;
}

void traffic::accepted(request_id id) {
  prompts_[id] = std::move(pending_[num_answered_++]);
  if (happens(0.08)) departures_.emplace(now_ + between(1, 40), id);
}

void traffic::answered(const bifolio::finished_sequence& answer, std::int64_t step) {
  const auto found = prompts_.find(answer.request);
  if (found == prompts_.end()) return;  // another of its samples was continued
  tokens history = std::move(found->second);
  prompts_.erase(found);
  history.insert(history.end(), answer.tokens.begin(), answer.tokens.end());
  if (static_cast<std::int64_t>(history.size()) + 110 > options_.max_tokens || !happens(0.5)) return;
  next_turns_.emplace(step + between(4, 60), std::move(history));
}

std::vector<request_id> traffic::departures(std::int64_t step) {
  std::vector<request_id> result;
  while (!departures_.empty() && departures_.begin()->first <= step) {
    result.push_back(departures_.begin()->second);
    prompts_.erase(result.back());
    departures_.erase(departures_.begin());
  }
  return result;
}

bifolio::sampled_token traffic::sample() {
  bifolio::sampled_token result;
  result.token = token_id{static_cast<std::int32_t>(between(1000, 50000))};
  result.stop = happens(0.01);
  return result;
}

}  // namespace block_map
