// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The library's scheduler and manager under made-up traffic, without a model: steps are scheduled and committed as an
/// engine would do it, with random tokens for sampled ones.

#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/scheduler.hpp>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "frame.hpp"
#include "traffic.hpp"

namespace block_map {

struct serving_options {
  std::int64_t num_blocks = 256;
  std::int64_t num_host_blocks = 64;
  std::int32_t block_size = 16;
  std::int32_t max_running = 48;
  std::int32_t max_tokens_per_step = 192;
  std::int32_t steps_in_flight = 2;
  bool swap = true;  ///< preempt by swapping where it is possible
  traffic_options traffic;
};

class serving {
 public:
  /// Throws `bifolio::error` for options outside their range.
  explicit serving(const serving_options& options);

  /// Schedules one step; commits the oldest one when no more may be in flight.
  void step();
  [[nodiscard]] frame snapshot() const;
  /// The first broken invariant of scheduler and manager; empty when all hold.
  [[nodiscard]] std::string check() const;

 private:
  /// One continuation of a request.
  using who = std::pair<bifolio::request_id, std::int32_t>;

  void take_arrivals();
  void look_at(const bifolio::step_plan& plan);
  void commit_oldest();
  void report(std::string what);
  char letter_of(const who& one);
  void end(const who& one);
  [[nodiscard]] char known_letter(const who& one) const;
  void count_users(std::vector<std::int32_t>& users, std::vector<char>& letters, bool swapped) const;

  serving_options options_;
  bifolio::kv_cache_manager manager_;
  bifolio::scheduler scheduler_;
  traffic traffic_;
  std::int64_t now_ = 0;
  std::deque<bifolio::step_plan> in_flight_;
  std::map<bifolio::seq_id, who> sequences_;  // of the manager
  std::map<who, char> letters_;
  std::set<who> seen_;
  std::deque<std::string> news_;
  std::int64_t num_tokens_ = 0;
  std::vector<bifolio::sampled_token> sampled_;
};

}  // namespace block_map
