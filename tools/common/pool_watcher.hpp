// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Looks over a scheduler's shoulder and draws what it sees: which letter a sequence has, what happened in the last
/// steps, who uses which block. It changes nothing. One thread, the scheduler's own.

#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/scheduler.hpp>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tools/common/pool_frame.hpp"

namespace tools {

class pool_watcher {
 public:
  /// Both are borrowed.
  pool_watcher(const bifolio::kv_cache_manager& manager, const bifolio::scheduler& scheduler)
      : manager_(&manager), scheduler_(&scheduler) {}

  /// After every `schedule`. `step` is the number that frames show.
  void look_at(const bifolio::step_plan& plan, std::int64_t step);
  /// After every `commit`, with what it returned.
  void look_at(std::span<const bifolio::finished_sequence> finished);

  [[nodiscard]] pool_frame snapshot() const;
  /// The letter of a sequence that has one; else '#'.
  [[nodiscard]] char letter(bifolio::request_id request, std::int32_t sample) const;

 private:
  /// One continuation of a request.
  using who = std::pair<bifolio::request_id, std::int32_t>;

  void report(std::string what);
  [[nodiscard]] char known_letter(const who& one) const { return letter(one.first, one.second); }
  char letter_of(const who& one);
  void forget_gone();

  const bifolio::kv_cache_manager* manager_;
  const bifolio::scheduler* scheduler_;
  std::int64_t step_ = 0;
  std::map<bifolio::seq_id, who> sequences_;  // of the manager
  std::map<who, char> letters_;
  std::set<who> seen_;
  std::deque<std::string> news_;
  std::int64_t num_tokens_ = 0;
};

}  // namespace tools
