// SPDX-License-Identifier: Apache-2.0
#include "serving.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

namespace block_map {
namespace {

using namespace bifolio;

constexpr std::string_view all_letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
constexpr char no_letter = '#';  // when more sequences are there than letters
constexpr std::size_t max_news = 6;

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
  look_at(*plan);
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

void serving::look_at(const step_plan& plan) {
  num_tokens_ = plan.num_tokens;
  for (const request_id id : plan.aborted) {
    std::string names;
    for (auto one = letters_.lower_bound({id, 0}); one != letters_.end() && one->first.first == id;) {
      names += one->second;
      seen_.erase(one->first);
      one = letters_.erase(one);
    }
    if (!names.empty()) report(fmt::format("{} is aborted", names));
  }
  const auto name = [&](seq_id seq) {
    const auto found = sequences_.find(seq);
    return found != sequences_.end() ? known_letter(found->second) : no_letter;
  };
  for (const seq_id seq : plan.preempted)
    report(fmt::format("{} gives its blocks up, to be computed again", name(seq)));
  for (const seq_id seq : plan.swapped_out) {
    report(fmt::format("{} moves to the host", name(seq)));
  }
  for (const seq_id seq : plan.swapped_in) report(fmt::format("{} comes back from the host", name(seq)));
  for (const scheduled_seq& row : plan.seqs) {
    const who one{row.request, row.sample};
    const bool is_new = seen_.insert(one).second;
    sequences_[row.seq] = one;
    const char letter = letter_of(one);
    if (is_new && row.sample > 0) {
      report(fmt::format("{} forks from {}", letter, known_letter({row.request, 0})));
    } else if (is_new && row.num_cached_tokens > 0) {
      report(
          fmt::format("{} begins, {} of its first {} tokens were cached", letter, row.num_cached_tokens, row.seq_len));
    } else if (is_new) {
      report(fmt::format("{} begins", letter));
    }
  }
  std::erase_if(sequences_, [&](const auto& one) { return !manager_.contains(one.first); });
}

void serving::commit_oldest() {
  const step_plan& plan = in_flight_.front();
  std::size_t num_sampled = 0;
  for (const scheduled_seq& row : plan.seqs) num_sampled += static_cast<std::size_t>(row.num_samples);
  sampled_.clear();
  while (sampled_.size() < num_sampled) sampled_.push_back(traffic_.sample());
  for (const finished_sequence& one : scheduler_.commit(plan, sampled_)) {
    traffic_.answered(one, now_);
    end({one.request, one.sample});
  }
  in_flight_.pop_front();
  std::erase_if(sequences_, [&](const auto& one) { return !manager_.contains(one.first); });
}

void serving::report(std::string what) {
  news_.push_back(fmt::format("{:6}  {}", now_, what));
  if (news_.size() > max_news) news_.pop_front();
}

char serving::known_letter(const who& one) const {
  const auto found = letters_.find(one);
  return found != letters_.end() ? found->second : no_letter;
}

char serving::letter_of(const who& one) {
  if (const auto found = letters_.find(one); found != letters_.end()) return found->second;
  for (const char letter : all_letters) {
    if (std::none_of(letters_.begin(), letters_.end(), [&](const auto& other) { return other.second == letter; })) {
      letters_[one] = letter;
      return letter;
    }
  }
  return no_letter;
}

void serving::end(const who& one) {
  if (const auto found = letters_.find(one); found != letters_.end()) {
    report(fmt::format("{} ends", found->second));
    letters_.erase(found);
  }
  seen_.erase(one);
}

void serving::count_users(std::vector<std::int32_t>& users, std::vector<char>& letters, bool swapped) const {
  for (const auto& [seq, one] : sequences_) {
    if (manager_.is_swapped_out(seq) != swapped) continue;
    for (std::int64_t i = manager_.num_released_blocks(seq); i < manager_.num_table_blocks(seq); ++i) {
      const auto block = static_cast<std::size_t>(to_index(manager_.block_at(seq, i)));
      ++users[block];
      letters[block] = known_letter(one);
    }
  }
}

frame serving::snapshot() const {
  frame result;
  const cache_stats blocks = manager_.stats();
  result.step = now_;
  result.block_size = options_.block_size;
  const auto mark_users = [&](std::vector<cell>& cells, bool swapped) {
    std::vector<std::int32_t> users(cells.size());
    std::vector<char> letters(cells.size(), no_letter);
    count_users(users, letters, swapped);
    for (std::size_t i = 0; i < cells.size(); ++i) {
      if (users[i] == 1) cells[i] = {cell_state::used, letters[i]};
      if (users[i] > 1) cells[i] = {cell_state::shared, users[i] > 9 ? '+' : static_cast<char>('0' + users[i])};
    }
  };

  // A block without references that is not in the free queue waits for a fence.
  result.device.assign(static_cast<std::size_t>(blocks.num_blocks), {cell_state::fenced, '~'});
  std::vector<block_id> free(static_cast<std::size_t>(blocks.num_free_blocks));
  (void)manager_.pool().peek_free(free);
  for (const block_id block : free) {
    result.device[static_cast<std::size_t>(to_index(block))] =
        manager_.prefix()->holds(block) ? cell{cell_state::cached, ':'} : cell{};
  }
  for (std::size_t i = 0; i < result.device.size(); ++i) {
    const block_id block{static_cast<std::int32_t>(i)};
    // In use by a sequence that no step has computed yet, such as a fresh fork.
    if (manager_.pool().num_refs(block) > 0) result.device[i] = {cell_state::used, no_letter};
  }
  mark_users(result.device, false);
  result.host.assign(static_cast<std::size_t>(blocks.num_host_blocks), {});
  mark_users(result.host, true);

  const scheduler_stats steps = scheduler_.stats();
  const prefix_stats& cached = manager_.prefix()->stats();
  for (const auto& [seq, one] : sequences_) {
    (manager_.is_swapped_out(seq) ? result.swapped : result.running) += known_letter(one);
  }
  result.num_waiting = steps.num_waiting;
  result.num_tokens = num_tokens_;
  result.lookups = cached.num_looked_up_blocks;
  result.hits = cached.num_hit_blocks;
  result.evictions = cached.num_evicted_blocks;
  result.preemptions = steps.num_preemptions;
  result.swapped_out_blocks = blocks.num_swapped_out_blocks;
  result.swapped_in_blocks = blocks.num_swapped_in_blocks;
  result.copies = blocks.num_copied_blocks;
  result.news.assign(news_.begin(), news_.end());
  return result;
}

std::string serving::check() const {
  const std::string broken = scheduler_.check();
  return broken.empty() ? manager_.check() : broken;
}

}  // namespace block_map
