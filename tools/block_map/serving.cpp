// SPDX-License-Identifier: Apache-2.0
#include "serving.hpp"

#include <algorithm>

namespace block_map {
namespace {

using namespace bifolio;

kv_cache_config cache_config(const serving_options& options) {
  kv_cache_config config;
  config.block_size = options.block_size;
  config.num_blocks = options.num_blocks;
  config.num_host_blocks = options.num_host_blocks;
  config.max_sequences = 2 * options.max_running;  // those that are swapped out keep a record
  config.first_generation = 1;
  config.watermark = 0;  // fills up to the last block, so that preemption is seen
  config.prefix.enabled = true;
  config.prefix.seed = hash_seed{};
  if (options.window == 0 && options.num_states == 0) return config;
  const group_config first{.kind = group_kind::full,
                           .block_size = options.block_size,
                           .num_blocks = options.num_blocks,
                           .num_host_blocks = options.num_host_blocks};
  config.groups = {first};
  if (options.window > 0) {
    config.groups.push_back(first);
    config.groups.back().kind = group_kind::window;
    config.groups.back().window = options.window;
  }
  if (options.num_states > 0) {
    config.groups.push_back({.kind = group_kind::state,
                             .block_size = 1,
                             .num_blocks = options.num_states,
                             .num_host_blocks = options.num_host_blocks,
                             .snapshot_interval = 4 * options.block_size});
  }
  return config;
}

scheduler_config steps_config(const serving_options& options) {
  scheduler_config config;
  config.max_running = options.max_running;
  config.max_tokens_per_step = options.max_tokens_per_step;
  config.max_steps_in_flight = options.steps_in_flight;
  config.preemption = options.swap ? preemption_mode::swap : preemption_mode::recompute;
  return config;
}

traffic_options traffic_config(const serving_options& options) {
  traffic_options traffic = options.traffic;
  const std::int64_t most = options.num_blocks * options.block_size / 3;
  traffic.max_tokens = static_cast<std::int32_t>(std::clamp<std::int64_t>(most, 1, 1 << 16));
  return traffic;
}

}  // namespace

serving::serving(const serving_options& options)
    : options_(options),
      manager_(cache_config(options)),
      scheduler_(manager_, steps_config(options)),
      watcher_(manager_, scheduler_),
      traffic_(traffic_config(options)) {}

void serving::step() {
  ++now_;
  if (scheduler_.num_steps_in_flight() >= options_.steps_in_flight) commit_oldest();
  take_arrivals();
  const step_plan* plan = &scheduler_.schedule();
  if (plan->empty() && !in_flight_.empty()) {
    commit_oldest();
    plan = &scheduler_.schedule();
  }
  watcher_.look_at(*plan, now_);
  if (!plan->empty()) in_flight_.push_back(*plan);
}

void serving::take_arrivals() {
  for (request& one : traffic_.arrivals(now_)) {
    const submit_result answer = scheduler_.submit(std::move(one));
    if (answer.status == alloc_status::ok) {
      traffic_.accepted(answer.id);
    } else {
      traffic_.refused();
    }
  }
  for (const request_id id : traffic_.departures(now_)) scheduler_.post_abort(id);
}

void serving::commit_oldest() {
  const step_plan& plan = in_flight_.front();
  std::size_t num_sampled = 0;
  for (const scheduled_seq& row : plan.seqs) num_sampled += static_cast<std::size_t>(row.num_samples);
  sampled_.clear();
  while (sampled_.size() < num_sampled) sampled_.push_back(traffic_.sample());
  const std::vector<finished_sequence> finished = scheduler_.commit(plan, sampled_);
  for (const finished_sequence& one : finished) traffic_.answered(one, now_);
  watcher_.look_at(finished);
  in_flight_.pop_front();
}

std::string serving::check() const {
  const std::string broken = scheduler_.check();
  return broken.empty() ? manager_.check() : broken;
}

}  // namespace block_map
