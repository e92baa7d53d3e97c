// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The library's scheduler and manager under made-up traffic, without a model: steps are scheduled and committed as an
/// engine would do it, with random tokens for sampled ones.

#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/scheduler.hpp>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "tools/common/pool_watcher.hpp"
#include "traffic.hpp"

namespace block_map {

struct serving_options {
  std::int64_t num_blocks = 256;
  std::int64_t num_host_blocks = 64;
  std::int32_t block_size = 16;
  std::int32_t max_running = 48;
  std::int32_t max_tokens_per_step = 192;
  std::int32_t steps_in_flight = 2;
  std::int32_t window = 0;      ///< tokens of a second layer group, which slides; 0: there is none
  std::int64_t num_states = 0;  ///< of a layer group with recurrent states; 0: there is none
  bool swap = true;             ///< preempt by swapping where it is possible
  traffic_options traffic;
};

class serving {
 public:
  /// Throws `bifolio::error` for options outside their range.
  explicit serving(const serving_options& options);

  /// Schedules one step; commits the oldest one when no more may be in flight.
  void step();
  [[nodiscard]] tools::pool_frame snapshot() const { return watcher_.snapshot(); }
  /// The first broken invariant of scheduler and manager; empty when all hold.
  [[nodiscard]] std::string check() const;

 private:
  void take_arrivals();
  void commit_oldest();

  serving_options options_;
  bifolio::kv_cache_manager manager_;
  bifolio::scheduler scheduler_;
  tools::pool_watcher watcher_;
  traffic traffic_;
  std::int64_t now_ = 0;
  std::deque<bifolio::step_plan> in_flight_;
  std::vector<bifolio::sampled_token> sampled_;
};

}  // namespace block_map
