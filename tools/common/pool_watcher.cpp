// SPDX-License-Identifier: Apache-2.0
#include "tools/common/pool_watcher.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "tools/common/pool_cells.hpp"

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

pool_frame pool_watcher::snapshot() const {
  pool_frame result;
  result.step = step_;
  std::vector<lettered_sequence> sequences;
  for (const auto& [seq, one] : sequences_) {
    sequences.push_back({seq, known_letter(one)});
    (manager_->is_swapped_out(seq) ? result.swapped : result.running) += known_letter(one);
  }
  mark_cells(result, *manager_, sequences);
  count_blocks(result, *manager_);
  const scheduler_stats steps = scheduler_->stats();
  result.num_waiting = steps.num_waiting;
  result.num_tokens = num_tokens_;
  result.preemptions = steps.num_preemptions;
  result.news.assign(news_.begin(), news_.end());
  return result;
}

}  // namespace tools
