// SPDX-License-Identifier: Apache-2.0
#include "simulation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/scheduler.hpp>
#include <chrono>
#include <deque>
#include <numeric>

#include "input_error.hpp"
#include "prompt_tokens.hpp"

namespace trace_replay {
namespace {

using namespace bifolio;
using wall_clock = std::chrono::steady_clock;

constexpr std::int64_t max_open_sequences = 1 << 24;  // the manager's limit

/// So many blocks that everything computed can stay: of each id once, and of each request its sampled tokens, its last
/// blocks, which end elsewhere than the trace's, and tokens without id.
std::int64_t blocks_for_everything(const trace& what, const simulation_options& options) {
  const auto blocks_of = [&](std::int64_t tokens) { return (tokens + options.block_size - 1) / options.block_size; };
  std::int64_t num_blocks = 0;
  for (const trace_request& one : what.requests) {
    const std::int64_t with_ids = std::min<std::int64_t>(one.num_input_tokens, one.num_ids * options.trace_block_size);
    num_blocks += blocks_of(one.num_input_tokens - with_ids) + blocks_of(one.num_output_tokens) + 2;
    // Blocks of the prompt that span two ids are not shared by requests that share the first one only.
    if (options.trace_block_size % options.block_size != 0 || !options.prefix_caching)
      num_blocks += blocks_of(with_ids);
  }
  num_blocks += what.num_distinct_ids * blocks_of(options.trace_block_size);
  if (num_blocks > max_num_blocks) {
    throw input_error(fmt::format("without --blocks this trace needs a pool of {} blocks of {} tokens, allowed are {}",
                                  num_blocks, options.block_size, max_num_blocks));
  }
  return num_blocks;
}

kv_cache_config cache_config(const simulation_options& options, std::int64_t num_blocks, std::int64_t longest,
                             const eviction_policy& policy) {
  kv_cache_config config;
  config.block_size = options.block_size;
  config.num_blocks = num_blocks;
  config.max_sequences = options.max_running;
  // Sequences that are swapped out keep a record; more of them than blocks there cannot be.
  if (options.num_host_blocks > 0) {
    config.max_sequences = static_cast<std::int32_t>(
        std::min<std::int64_t>(options.max_running + options.num_host_blocks, max_open_sequences));
  }
  config.max_seq_len = static_cast<std::int32_t>(longest);
  config.first_generation = 1;
  config.prefix.enabled = options.prefix_caching;
  config.prefix.seed = hash_seed{};
  config.prefix.policy = &policy;
  config.num_host_blocks = options.num_host_blocks;
  config.groups = options.groups;
  return config;
}

scheduler_config steps_config(const simulation_options& options) {
  scheduler_config config;
  config.max_tokens_per_step = options.max_tokens_per_step;
  config.max_running = options.max_running;
  config.max_steps_in_flight = options.steps_in_flight;
  config.preemption = options.preemption;
  // There and back, in tokens that could be computed meanwhile.
  if (options.costs.per_token > 0) {
    config.swap_block_cost = 2 * options.block_size * options.costs.per_swapped_token / options.costs.per_token;
  }
  return config;
}

std::int64_t longest_sequence(const trace& what) {
  std::int64_t longest = 1;
  for (const trace_request& one : what.requests) {
    longest = std::max(longest, std::int64_t{one.num_input_tokens} + one.num_output_tokens);
  }
  return longest;
}

class simulation {
 public:
  simulation(const trace& what, const simulation_options& options, progress_bar& progress)
      : trace_(what),
        options_(options),
        progress_(progress),
        policy_(make_policy(options.policy, options.num_kept)),
        manager_(cache_config(options,
                              options.num_blocks > 0 || !options.groups.empty() ? options.num_blocks
                                                                                : blocks_for_everything(what, options),
                              longest_sequence(what), *policy_)),
        scheduler_(manager_, steps_config(options)),
        capacity_(manager_.config().num_blocks * options.block_size),
        order_(what.requests.size()),
        over_time_(arrival_us(what, options) / 1e6) {
    std::iota(order_.begin(), order_.end(), std::int64_t{0});
    std::stable_sort(order_.begin(), order_.end(), [&](std::int64_t a, std::int64_t b) {
      return request_at(a).arrival_us < request_at(b).arrival_us;
    });
    now_us_ = first_us_ = arrival_of(order_.front());
  }

  simulation_result run() {
    const auto start = wall_clock::now();
    for (accept_arrivals(); has_work(); accept_arrivals()) {
      if (num_in_flight() == options_.steps_in_flight || !schedule_step()) pass_time();
      sample_pool();
      show_progress();
    }
    over_time_.finish(pool_now());
    progress_.wipe();
    return summed_up(std::chrono::duration<double>(wall_clock::now() - start).count());
  }

 private:
  /// A request that the scheduler accepted. Times in simulated µs.
  struct record {
    std::int64_t request = 0;  ///< in the trace
    std::int32_t num_sampled = 0;
    std::int32_t num_cached_tokens = 0;  ///< when first admitted
    double arrival = 0;
    double first_step = -1;
    double first_token = 0;
    double last_token = 0;
  };

  struct step_in_flight {
    step_plan plan;
    double end = 0;  ///< in simulated µs
  };

  static double arrival_us(const trace& what, const simulation_options& options) {
    double last = 0;
    for (const trace_request& one : what.requests) last = std::max(last, one.arrival_us);
    return last / options.speed;
  }
  [[nodiscard]] const trace_request& request_at(std::int64_t i) const {
    return trace_.requests[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] double arrival_of(std::int64_t i) const { return request_at(i).arrival_us / options_.speed; }

  /// Not when the last arrivals were larger than the pool: those were refused and left nothing behind.
  [[nodiscard]] bool has_work() const { return num_arrived_ < order_.size() || scheduler_.has_work(); }

  void accept_arrivals() {
    for (; num_arrived_ < order_.size() && arrival_of(order_[num_arrived_]) <= now_us_; ++num_arrived_) {
      const std::int64_t i = order_[num_arrived_];
      if (request_at(i).num_input_tokens > capacity_) {  // `never`, for which its tokens need not be made
        ++num_refused_;
        continue;
      }
      // Even a request that wants no token gets one: prefill ends with it.
      const submit_result answer = scheduler_.submit({.prompt = make_prompt(trace_, i, options_.trace_block_size),
                                                      .max_new_tokens = std::max(request_at(i).num_output_tokens, 1)});
      if (answer.status != alloc_status::ok) {
        ++num_refused_;
        continue;
      }
      num_prompt_tokens_ += request_at(i).num_input_tokens;
      // Ids are given in the order of submission, from 1.
      records_.push_back({.request = i, .arrival = arrival_of(i)});
      if (to_index(answer.id) != records_.size()) throw std::logic_error("request ids are not consecutive");
    }
  }

  [[nodiscard]] std::int32_t num_in_flight() const noexcept { return static_cast<std::int32_t>(steps_.size()); }

  /// Whether there was anything to do. Steps run one after another, whenever they were scheduled.
  bool schedule_step() {
    const auto start = wall_clock::now();
    const step_plan& plan = scheduler_.schedule();
    if (options_.build_batches && !plan.seqs.empty()) scheduler_.build(inputs_);
    bookkeeping_ += wall_clock::now() - start;
    if (plan.empty()) return false;
    const double ready = now_us_ + options_.costs.of_host;
    const double begin = steps_.empty() ? ready : std::max(ready, steps_.back().end);
    steps_.push_back({plan, begin + step_us(options_.costs, plan, options_.block_size)});
    for (const scheduled_seq& row : plan.seqs) {
      record& one = records_[to_index(row.request) - 1];
      if (one.first_step >= 0) continue;
      one.first_step = begin;
      one.num_cached_tokens = row.num_cached_tokens;
    }
    return true;
  }

  /// On to the end of the oldest step, or to an arrival that comes before it while there is room for another step.
  void pass_time() {
    const bool more_to_come = num_arrived_ < order_.size();
    const double next_arrival = more_to_come ? arrival_of(order_[num_arrived_]) : 0;
    if (steps_.empty()) {
      if (!more_to_come) throw std::logic_error("the scheduler stands still with work left");
      now_us_ = std::max(now_us_, next_arrival);
    } else if (more_to_come && num_in_flight() < options_.steps_in_flight && next_arrival < steps_.front().end) {
      now_us_ = std::max(now_us_, next_arrival);
    } else {
      now_us_ = steps_.front().end;
      commit_oldest();
    }
  }

  void commit_oldest() {
    const step_plan& plan = steps_.front().plan;
    sampled_.clear();
    for (const scheduled_seq& row : plan.seqs) {
      if (row.num_samples == 0) continue;
      record& one = records_[to_index(row.request) - 1];
      sampled_.push_back({make_sampled_token(one.request, one.num_sampled)});
      // A step that was scheduled before the last token was known computes one in vain.
      if (one.num_sampled == std::max(request_at(one.request).num_output_tokens, 1)) continue;
      if (one.num_sampled++ == 0) one.first_token = now_us_;
      one.last_token = now_us_;
    }
    const auto start = wall_clock::now();
    const std::vector<finished_sequence> finished = scheduler_.commit(plan, sampled_);
    bookkeeping_ += wall_clock::now() - start;
    num_finished_ += static_cast<std::int64_t>(finished.size());
    steps_.pop_front();
  }

  [[nodiscard]] pool_sample pool_now() const {
    const cache_stats blocks = manager_.stats();
    const scheduler_stats sequences = scheduler_.stats();
    pool_sample sample{.at = (now_us_ - first_us_) / 1e6,
                       .used_blocks = blocks.num_used_blocks,
                       .host_blocks = blocks.num_host_blocks - blocks.num_free_host_blocks,
                       .running = sequences.num_running,
                       .waiting = sequences.num_waiting};
    if (const prefix_cache* cache = manager_.prefix(); cache != nullptr) {
      for (std::int64_t i = 0; i < blocks.num_blocks; ++i) {
        const block_id block{static_cast<std::int32_t>(i)};
        if (cache->holds(block) && manager_.pool().num_refs(block) == 0) ++sample.cached_blocks;
      }
      sample.hits = cache->stats().num_hit_blocks;
      sample.lookups = cache->stats().num_looked_up_blocks;
    }
    return sample;
  }

  void sample_pool() {
    if (over_time_.due((now_us_ - first_us_) / 1e6)) over_time_.add(pool_now());
  }

  void show_progress() {
    if (++num_shown_ % 64 != 0 || !progress_.due()) return;
    const scheduler_stats stats = scheduler_.stats();
    progress_.show(num_finished_ + num_refused_, static_cast<std::int64_t>(order_.size()),
                   fmt::format("{:.0f} s simulated, {} running, {} waiting", (now_us_ - first_us_) / 1e6,
                               stats.num_running, stats.num_waiting));
  }

  [[nodiscard]] simulation_result summed_up(double wall_seconds) {
    simulation_result result;
    const cache_stats blocks = manager_.stats();
    const scheduler_stats steps = scheduler_.stats();
    result.num_blocks = blocks.num_blocks;
    result.num_requests = static_cast<std::int64_t>(order_.size());
    result.num_refused = num_refused_;
    result.num_finished = num_finished_;
    result.num_prompt_tokens = num_prompt_tokens_;
    result.num_sampled_tokens = steps.num_sampled_tokens;
    result.num_computed_tokens = steps.num_scheduled_tokens;
    result.num_steps = steps.num_steps;
    if (const prefix_cache* cache = manager_.prefix(); cache != nullptr) {
      result.lookups = cache->stats().num_looked_up_blocks;
      result.hits = cache->stats().num_hit_blocks;
      result.evictions = cache->stats().num_evicted_blocks;
    }
    result.preemptions = steps.num_preemptions;
    result.num_swapped_out_blocks = blocks.num_swapped_out_blocks;
    result.num_swapped_in_blocks = blocks.num_swapped_in_blocks;
    result.peak_used_blocks = blocks.peak_used_blocks;
    result.simulated_seconds = (now_us_ - first_us_) / 1e6;
    std::vector<double> queueing, first_token, per_token, latency;
    result.first_cached_tokens.resize(trace_.requests.size(), 0);
    for (const record& one : records_) {
      result.first_cached_tokens[static_cast<std::size_t>(one.request)] = one.num_cached_tokens;
      queueing.push_back((one.first_step - one.arrival) / 1e3);
      first_token.push_back((one.first_token - one.arrival) / 1e3);
      if (one.num_sampled > 1) per_token.push_back((one.last_token - one.first_token) / 1e3 / (one.num_sampled - 1));
      latency.push_back((one.last_token - one.arrival) / 1e3);
    }
    result.queueing_ms = percentiles_of(std::move(queueing));
    result.time_to_first_token_ms = percentiles_of(std::move(first_token));
    result.time_per_token_ms = percentiles_of(std::move(per_token));
    result.latency_ms = percentiles_of(std::move(latency));
    result.num_cached_tokens = steps.num_cached_tokens;
    for (std::size_t g = 0; g < options_.groups.size(); ++g) {
      const auto group = static_cast<std::int32_t>(g);
      const cache_stats own = manager_.stats(group);
      group_result& one = result.groups.emplace_back();
      one.kind = options_.groups[g].kind;
      one.num_blocks = own.num_blocks;
      one.peak_used_blocks = own.peak_used_blocks;
      if (const prefix_cache* cache = manager_.prefix(group); cache != nullptr) {
        one.lookups = cache->stats().num_looked_up_blocks;
        one.hits = cache->stats().num_hit_blocks;
        one.evictions = cache->stats().num_evicted_blocks;
      }
    }
    result.wall_seconds = wall_seconds;
    result.bookkeeping_us_per_step = std::chrono::duration<double, std::micro>(bookkeeping_).count() /
                                     static_cast<double>(std::max<std::int64_t>(steps.num_steps, 1));
    result.over_time = std::move(over_time_);
    return result;
  }

  const trace& trace_;
  const simulation_options& options_;
  progress_bar& progress_;
  std::unique_ptr<eviction_policy> policy_;
  kv_cache_manager manager_;
  scheduler scheduler_;
  std::int64_t capacity_;            // tokens of the pool
  std::vector<std::int64_t> order_;  // requests of the trace by arrival
  std::size_t num_arrived_ = 0;
  std::vector<record> records_;  // by request id - 1
  std::deque<step_in_flight> steps_;
  std::vector<sampled_token> sampled_;
  step_inputs inputs_;
  timeline over_time_;
  double first_us_ = 0;
  double now_us_ = 0;
  std::int64_t num_refused_ = 0;
  std::int64_t num_finished_ = 0;
  std::int64_t num_prompt_tokens_ = 0;
  std::int64_t num_shown_ = 0;
  wall_clock::duration bookkeeping_{};
};

}  // namespace

simulation_result simulate(const trace& what, const simulation_options& options, progress_bar& progress) {
  return simulation(what, options, progress).run();
}

}  // namespace trace_replay
