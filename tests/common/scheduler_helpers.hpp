// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Small words for tests that drive a scheduler by hand.

#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/scheduler.hpp>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

namespace bifolio::test {

inline std::vector<token_id> tokens_from(std::int32_t first, std::size_t count) {
  std::vector<token_id> tokens;
  for (std::size_t i = 0; i < count; ++i) tokens.push_back(token_id{first + static_cast<std::int32_t>(i)});
  return tokens;
}

inline request_id ask(scheduler& plans, request what) {
  const submit_result got = plans.submit(std::move(what));
  REQUIRE(got.status == alloc_status::ok);
  return got.id;
}

inline std::vector<sampled_token> any_tokens(const step_plan& plan) {
  std::vector<sampled_token> tokens;
  for (const scheduled_seq& row : plan.seqs) {
    for (std::int32_t k = 0; k < row.num_samples; ++k) tokens.push_back({token_id{900 + k}});
  }
  return tokens;
}

/// Whether a sequence is in a step twice.
inline bool repeats_a_sequence(const step_plan& plan) {
  std::set<seq_id> seqs;
  return !std::all_of(plan.seqs.begin(), plan.seqs.end(), [&](const auto& row) { return seqs.insert(row.seq).second; });
}

inline step_plan step(scheduler& plans, std::vector<finished_sequence>* finished = nullptr) {
  const step_plan& plan = plans.schedule();
  REQUIRE(plans.check() == "");
  REQUIRE_FALSE(repeats_a_sequence(plan));
  std::vector<finished_sequence> done = plans.commit(plan, any_tokens(plan));
  if (finished != nullptr) finished->insert(finished->end(), done.begin(), done.end());
  REQUIRE(plans.check() == "");
  return plan;
}

inline const scheduled_seq* row_of(const step_plan& plan, request_id id, std::int32_t sample = 0) {
  const auto found = std::find_if(plan.seqs.begin(), plan.seqs.end(),
                                  [&](const auto& row) { return row.request == id && row.sample == sample; });
  return found == plan.seqs.end() ? nullptr : &*found;
}

inline void require_baseline([[maybe_unused]] const kv_cache_manager& manager) {
  CHECK(manager.num_free_blocks() == manager.config().num_blocks);
  CHECK(manager.num_free_host_blocks() == manager.config().num_host_blocks);
  CHECK(manager.stats().num_sequences == 0);
  CHECK(manager.pool().num_fenced() == 0);
  CHECK(manager.pool().num_open_fences() == 0);
}

inline kv_cache_config caching(std::int64_t num_blocks, std::int64_t num_host_blocks = 0) {
  return {.block_size = 4,
          .num_blocks = num_blocks,
          .watermark = 0,
          .first_generation = 1000,
          .prefix = {.enabled = true, .seed = hash_seed{1, 2}},
          .num_host_blocks = num_host_blocks};
}

}  // namespace bifolio::test
