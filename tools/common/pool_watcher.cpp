// SPDX-License-Identifier: Apache-2.0
#include "tools/common/pool_watcher.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

namespace tools {
namespace {

using namespace bifolio;

constexpr std::string_view all_letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
constexpr char no_letter = '#';  // when more sequences are there than letters
constexpr std::size_t max_news = 6;

}  // namespace

void pool_watcher::look_at(const step_plan& plan, std::int64_t step) {
  step_ = step;
  num_tokens_ = plan.num_tokens;
  for (const request_id id : plan.aborted) {
    std::string names;
    for (auto one = letters_.lower_bound({id, 0}); one != letters_.end() && one->first.first == id;) {
      names += one->second;
      one = letters_.erase(one);
    }
    std::erase_if(seen_, [id](const who& one) { return one.first == id; });  // those without a letter, too
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
  forget_gone();
}

void pool_watcher::look_at(std::span<const finished_sequence> finished) {
  for (const finished_sequence& one : finished) {
    const who name{one.request, one.sample};
    if (const auto found = letters_.find(name); found != letters_.end()) {
      report(fmt::format("{} ends", found->second));
      letters_.erase(found);
    }
    seen_.erase(name);
  }
  forget_gone();
}

void pool_watcher::forget_gone() {
  std::erase_if(sequences_, [&](const auto& one) { return !manager_->contains(one.first); });
}

void pool_watcher::report(std::string what) {
  news_.push_back(fmt::format("{:6}  {}", step_, what));
  if (news_.size() > max_news) news_.pop_front();
}

char pool_watcher::letter(request_id request, std::int32_t sample) const {
  const auto found = letters_.find({request, sample});
  return found != letters_.end() ? found->second : no_letter;
}

char pool_watcher::letter_of(const who& one) {
  if (const auto found = letters_.find(one); found != letters_.end()) return found->second;
  if (letters_.size() == all_letters.size()) return no_letter;
  for (const char letter : all_letters) {
    if (std::none_of(letters_.begin(), letters_.end(), [&](const auto& other) { return other.second == letter; })) {
      letters_[one] = letter;
      return letter;
    }
  }
  return no_letter;
}

template <class Visit>
void pool_watcher::for_each_block(seq_id seq, std::int32_t group, Visit visit) const {
  const std::vector<group_config>& groups = manager_->config().groups;
  if (!groups.empty() && groups[static_cast<std::size_t>(group)].kind == group_kind::state) {
    for (std::int64_t p = std::max<std::int64_t>(1, manager_->num_committed(seq)); p <= manager_->num_tokens(seq);
         ++p) {
      if (const block_id block = manager_->state_at(seq, p, group); block != invalid_block) visit(block);
    }
    return;
  }
  for (std::int64_t i = manager_->num_released_blocks(seq, group); i < manager_->num_table_blocks(seq, group); ++i) {
    visit(manager_->block_at(seq, i, group));
  }
}

void pool_watcher::mark_users(std::int32_t group, std::vector<cell>& cells, bool swapped) const {
  std::vector<std::int32_t> users(cells.size());
  std::vector<char> letters(cells.size(), no_letter);
  for (const auto& [seq, one] : sequences_) {
    if (manager_->is_swapped_out(seq) != swapped) continue;
    const char letter = known_letter(one);
    for_each_block(seq, group, [&](block_id block) {
      ++users[static_cast<std::size_t>(to_index(block))];
      letters[static_cast<std::size_t>(to_index(block))] = letter;
    });
  }
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (users[i] == 1) cells[i] = {cell_state::used, letters[i]};
    if (users[i] > 1) cells[i] = {cell_state::shared, users[i] > 9 ? '+' : static_cast<char>('0' + users[i])};
  }
}

std::vector<cell> pool_watcher::device_cells(std::int32_t group) const {
  const block_pool& pool = manager_->pool(group);
  const prefix_cache* prefix = manager_->prefix(group);
  // A block without references that is not in the free queue waits for a fence.
  std::vector<cell> cells(static_cast<std::size_t>(pool.num_blocks()), {cell_state::fenced, '~'});
  std::vector<block_id> free(static_cast<std::size_t>(pool.num_free()));
  (void)pool.peek_free(free);
  for (const block_id block : free) {
    cells[static_cast<std::size_t>(to_index(block))] =
        prefix != nullptr && prefix->holds(block) ? cell{cell_state::cached, ':'} : cell{};
  }
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const block_id block{static_cast<std::int32_t>(i)};
    // In use by a sequence that no step has computed yet, such as a fresh fork.
    if (pool.num_refs(block) > 0) cells[i] = {cell_state::used, no_letter};
  }
  mark_users(group, cells, false);
  return cells;
}

std::vector<cell> pool_watcher::host_cells(std::int32_t group) const {
  std::vector<cell> cells(static_cast<std::size_t>(manager_->stats(group).num_host_blocks));
  mark_users(group, cells, true);
  return cells;
}

pool_frame pool_watcher::snapshot() const {
  pool_frame result;
  const cache_stats blocks = manager_->stats();
  const prefix_cache* prefix = manager_->prefix();
  result.step = step_;
  result.block_size = manager_->config().block_size;
  result.device = device_cells(0);
  result.host = host_cells(0);
  for (std::int32_t group = 1; group < manager_->num_groups(); ++group) {
    const group_config& what = manager_->config().groups[static_cast<std::size_t>(group)];
    const prefix_stats found = manager_->prefix(group) != nullptr ? manager_->prefix(group)->stats() : prefix_stats{};
    result.others.push_back({std::string(to_string(what.kind)), what.block_size, device_cells(group), host_cells(group),
                             found.num_hit_blocks, found.num_evicted_blocks});
  }

  const scheduler_stats steps = scheduler_->stats();
  const prefix_stats cached = prefix != nullptr ? prefix->stats() : prefix_stats{};
  for (const auto& [seq, one] : sequences_) {
    (manager_->is_swapped_out(seq) ? result.swapped : result.running) += known_letter(one);
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

}  // namespace tools
