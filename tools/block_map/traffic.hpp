// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Made-up conversations: what a small chat service might be asked. Three system prompts that many share, turns that
/// repeat all that was said before, requests for several answers, users who leave, hours with more and with less to do.

#include <bifolio/scheduler.hpp>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

namespace block_map {

struct traffic_options {
  std::uint64_t seed = 1;
  double load = 0.6;            ///< requests a step, in the mean
  std::int32_t max_tokens = 0;  ///< of a prompt and its answer
};

class traffic {
 public:
  explicit traffic(const traffic_options& options) : options_(options), random_(options.seed) {}

  /// Requests that arrive with this step.
  [[nodiscard]] std::vector<bifolio::request> arrivals(std::int64_t step);
  /// What became of each of them, in their order.
  void accepted(bifolio::request_id id);
  void refused() { ++num_answered_; }
  /// An answer is there; it may be followed by another turn later on.
  void answered(const bifolio::finished_sequence& answer, std::int64_t step);
  /// Requests whose users leave with this step.
  [[nodiscard]] std::vector<bifolio::request_id> departures(std::int64_t step);
  [[nodiscard]] bifolio::sampled_token sample();

 private:
  using tokens = std::vector<bifolio::token_id>;

  /// Uniform, both ends included. Written out, because the library's distributions differ between implementations.
  std::int64_t between(std::int64_t low, std::int64_t high);
  bool happens(double probability);
  void append_text(tokens& to, std::int64_t length);
  [[nodiscard]] tokens system_prompt(std::int64_t which) const;
  bifolio::request ask(tokens prompt);

  traffic_options options_;
  std::mt19937_64 random_;
  std::vector<tokens> pending_;                     // prompts of the arrivals that have no id yet
  std::map<bifolio::request_id, tokens> prompts_;   // of requests that are not answered
  std::multimap<std::int64_t, tokens> next_turns_;  // by the step they arrive with
  std::multimap<std::int64_t, bifolio::request_id> departures_;
  std::size_t num_answered_ = 0;
  std::int64_t now_ = 0;
};

}  // namespace block_map
