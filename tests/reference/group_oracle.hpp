// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The manager with layer groups said with maps and vectors: one manager_oracle per group with block tables, one map of
/// positions to slots per sequence and state group. It predicts every answer, every block, pair and statistic of all
/// groups. What groups other than the first register is named by the first group's contents and a number.

#include <algorithm>
#include <bifolio/kv_cache_manager.hpp>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "reference/manager_oracle.hpp"

namespace bifolio::test {

/// A group with block tables, opened up for the joint oracle.
class table_oracle : public manager_oracle {
 public:
  using manager_oracle::admit;
  using manager_oracle::config_;
  using manager_oracle::div_up;
  using manager_oracle::first_seen;
  using manager_oracle::manager_oracle;
  using manager_oracle::peak_blocks;
  using manager_oracle::pool_;
  using manager_oracle::prefix_;

  one_sequence& at(handle h) { return sequences_.at(h); }
  /// A sequence with these blocks (−1: null), which get a user more, and fresh ones up to `num_tokens`.
  handle open_with(const std::vector<int>& kept, std::int64_t num_cached, std::int64_t num_tokens) {
    one_sequence& one = sequences_[++last_handle_];
    one.blocks = kept;
    for (const int b : kept) {
      if (b >= 0) pool_.add_user(b);
    }
    while (static_cast<std::int64_t>(one.blocks.size()) < div_up(num_tokens)) one.blocks.push_back(take());
    one.num_tokens = num_tokens;
    one.num_committed = num_cached;
    one.publishes = false;
    note_peak();
    return last_handle_;
  }
  void commit_and_slide(handle h, std::int64_t num_tokens, std::int64_t kept_to) {
    one_sequence& one = sequences_.at(h);
    one.num_committed += num_tokens;
    slide(one, kept_to);
  }
  [[nodiscard]] std::int64_t num_null(handle h) const {
    const auto& blocks = sequences_.at(h).blocks;
    return std::count(blocks.begin(), blocks.end(), -1);
  }
  [[nodiscard]] std::int64_t moving(const std::vector<handle>& seqs, bool out) const {
    return blocks_to_move(seqs, out ? on_host_ : on_device_, out ? host_ : pool_);
  }
};

/// A group with states.
struct state_oracle {
  explicit state_oracle(const group_config& what)
      : config(what), pool(what.num_blocks), host(what.num_host_blocks), prefix(pool, 1) {}
  using handle = manager_oracle::handle;
  group_config config;
  pool_oracle pool, host;
  prefix_oracle prefix;
  std::map<handle, std::map<std::int64_t, int>> slots;  ///< by position
  std::set<handle> swapped;
  bool caches = false;

  [[nodiscard]] std::int64_t count_for(std::int64_t n) const { return n <= 1 + config.num_draft_slots ? n : 1; }
  [[nodiscard]] std::size_t most() const { return 17 * (1 + static_cast<std::size_t>(config.num_draft_slots)) + 1; }
  int take() { return caches ? prefix.take() : pool.take(); }
  void drop(int slot, bool out) { out ? host.drop(slot, false) : pool.drop(slot, caches && prefix.holds(slot)); }
  void append(handle h, std::int64_t from, std::int64_t n) {
    for (std::int64_t i = count_for(n); i > 0; --i) slots[h][from + n - i + 1] = take();
  }
  void commit(handle h, std::int64_t position) {
    std::map<std::int64_t, int>& own = slots[h];
    while (own.size() > 1 && std::next(own.begin())->first <= position) {
      drop(own.begin()->second, false);
      own.erase(own.begin());
    }
  }
  void truncate(handle h, std::int64_t position) {
    std::map<std::int64_t, int>& own = slots[h];
    while (!own.empty() && own.rbegin()->first > position) {
      drop(own.rbegin()->second, false);
      own.erase(std::prev(own.end()));
    }
  }
  [[nodiscard]] bool resumes(handle h, std::int64_t position) const {
    return position == 0 || slots.at(h).count(position) != 0;
  }
};

class group_oracle {
 public:
  using handle = manager_oracle::handle;
  using pair = manager_oracle::pair;
  using node = prefix_oracle::node;

  struct answer {
    alloc_status status = alloc_status::ok;
    handle opened = 0;
    std::vector<std::optional<pair>> copies;  ///< per group
    std::int64_t num_cached = 0;
    std::int64_t num_cached_cross = 0;
  };
  struct marks {
    std::int64_t longer_hit = 0, last_spaced = 0, last_border = 0;  ///< where later prompts may go on; 0: none
    node rolling = 0;
    std::string cross;  ///< what identifies the encoder's input; empty: nothing
    bool cached = true;
    std::int64_t num_cross = 0;
  };

  /// The first state group; 0 without any.
  [[nodiscard]] std::size_t first_states() const {
    for (std::size_t g = 1; g < states_.size(); ++g) {
      if (states_[g]) return g;
    }
    return 0;
  }

  explicit group_oracle(const kv_cache_config& config) : config_(config), tables_(config.groups.size()) {
    states_.resize(config.groups.size());
    for (std::size_t g = 0; g < config.groups.size(); ++g) {
      const group_config& what = config.groups[g];
      if (what.kind == group_kind::state) {
        states_[g] = std::make_unique<state_oracle>(what);
        states_[g]->caches = config.prefix.enabled;
        interval_ = std::max<std::int64_t>(interval_, what.snapshot_interval);
        continue;
      }
      kv_cache_config own = config;
      own.groups.clear();
      own.block_size = what.block_size;
      own.num_blocks = what.num_blocks;
      own.num_host_blocks = what.num_host_blocks;
      own.sliding_window = what.kind == group_kind::window ? what.window : 0;
      tables_[g] = std::make_unique<table_oracle>(own, g == 0 ? 0 : 1);
      if (what.kind != group_kind::cross) alignment_ = std::lcm(alignment_, std::int64_t{what.block_size});
      interval_ = std::max<std::int64_t>(interval_, what.snapshot_interval);
    }
    if (interval_ > 0) interval_ = std::lcm(interval_, alignment_);
    tables_[0]->prefix_.on_removal = [this](node lost) {
      for (std::size_t g = 1; g < tables_.size(); ++g) {
        if (kind(g) == group_kind::cross) continue;
        for (int k = 0; k < 64; ++k) {
          const int b = prefix(g).find_after(lost, {k});
          if (b >= 0) prefix(g).unregister(b);
        }
      }
    };
  }

  [[nodiscard]] std::size_t num_groups() const { return tables_.size(); }
  [[nodiscard]] group_kind kind(std::size_t g) const { return config_.groups[g].kind; }
  [[nodiscard]] const table_oracle& table(std::size_t g) const { return *tables_[g]; }
  [[nodiscard]] const state_oracle& states(std::size_t g) const { return *states_[g]; }
  [[nodiscard]] const pool_oracle& pool(std::size_t g) const {
    return tables_[g] ? tables_[g]->pool() : states_[g]->pool;
  }
  [[nodiscard]] prefix_oracle& prefix(std::size_t g) { return tables_[g] ? tables_[g]->prefix_ : states_[g]->prefix; }
  [[nodiscard]] const marks& marks_of(handle h) const { return marks_.at(h); }

  // --- opening

  answer allocate(std::int64_t num_tokens, std::int64_t num_cross) {
    alloc_status status = alloc_status::ok;
    each([&](std::size_t g) {
      const std::int64_t needed =
          states_[g] ? states_[g]->count_for(num_tokens) : tables_[g]->div_up(is_cross(g) ? num_cross : num_tokens);
      status = std::max(status, status_for(g, needed));
    });
    if (status == alloc_status::ok && is_full()) status = alloc_status::later;
    if (status != alloc_status::ok) return {status, 0, {}, 0, 0};
    ++last_handle_;
    each([&](std::size_t g) {
      if (states_[g]) {
        states_[g]->append(last_handle_, 0, num_tokens);
      } else {
        tables_[g]->open_with({}, 0, is_cross(g) ? num_cross : num_tokens);
      }
    });
    if (num_cross == 0) tables_[0]->at(last_handle_).publishes = true;
    marks_[last_handle_] = {};
    marks_[last_handle_].cached = num_cross == 0;
    marks_[last_handle_].num_cross = num_cross;
    return {alloc_status::ok, last_handle_, {}, 0, 0};
  }

  answer can_open(const oracle_prompt& prompt, const std::string& cross, std::int64_t num_cross, std::int64_t step,
                  const group_blocks& promised) {
    const hits found = look_up(prompt, cross, num_cross);
    answer result{alloc_status::ok, 0, {}, found.length, 0};
    if (is_full()) result.status = alloc_status::later;
    bool never = false;
    each([&](std::size_t g) {
      const auto n = static_cast<std::int64_t>(prompt.tokens.size());
      const std::int64_t peak = states_[g]    ? 2 + states_[g]->config.num_draft_slots
                                : is_cross(g) ? tables_[g]->div_up(num_cross)
                                              : tables_[g]->peak_blocks(n, step);
      const std::int64_t watermark = watermark_of(g);
      if (peak + watermark > pool(g).num_blocks()) never = true;
      std::int64_t used = 0;
      for (const int b : found.blocks[g]) used += b >= 0 && !pool(g).is_free(b) ? 1 : 0;
      if (std::max<std::int64_t>(0, peak - used) + watermark + promised[g] > pool(g).num_free()) {
        result.status = std::max(result.status, alloc_status::later);
      }
    });
    if (never) result.status = alloc_status::never;
    return result;
  }

  answer open(const oracle_prompt& prompt, const std::string& cross, std::int64_t num_cross, std::int64_t num_new) {
    const hits found = look_up(prompt, cross, num_cross);
    const auto length = static_cast<std::int64_t>(prompt.tokens.size());
    marks own;
    own.cached = found.cached;
    own.cross = found.cached ? cross : "";
    own.num_cross = num_cross;
    if (found.cached) {
      own.last_border = (length - 1) / alignment_ * alignment_;
      if (found.first_length > found.length) own.longer_hit = found.first_length;
      if (interval_ > 0) own.last_spaced = (length - 1) / interval_ * interval_;
    }
    std::int64_t num_tokens = std::min(length, found.length + std::min(num_new, length));
    num_tokens = std::min(num_tokens, next_cut(own, found.length));
    alloc_status status = is_full() ? alloc_status::later : alloc_status::ok;
    each([&](std::size_t g) {
      const std::vector<int>& taken = found.blocks[g];
      std::int64_t live = 0, idle = 0;
      for (const int b : taken) {
        live += b >= 0 ? 1 : 0;
        idle += b >= 0 && pool(g).is_free(b) ? 1 : 0;
      }
      std::int64_t fresh = 0;
      if (states_[g]) {
        fresh = states_[g]->count_for(num_tokens - found.length);
      } else {
        fresh = tables_[g]->div_up(is_cross(g) ? num_cross : num_tokens) - static_cast<std::int64_t>(taken.size());
      }
      if (live + fresh > pool(g).num_blocks()) status = alloc_status::never;
      if (idle + fresh > pool(g).num_free()) status = std::max(status, alloc_status::later);
    });
    if (status != alloc_status::ok) return {status, 0, {}, 0, 0};
    answer result{alloc_status::ok, ++last_handle_, {}, found.length, found.has_cross ? num_cross : 0};
    each([&](std::size_t g) {
      std::int64_t num_hits = 0;
      for (const int b : found.blocks[g]) num_hits += b >= 0 ? 1 : 0;
      if (states_[g]) {
        if (num_hits > 0) {
          pool_of(g).add_user(found.blocks[g][0]);
          states_[g]->slots[last_handle_][found.length] = found.blocks[g][0];
        }
        states_[g]->append(last_handle_, found.length, num_tokens - found.length);
        if (config_.prefix.enabled) prefix(g).count_lookup(1, static_cast<std::size_t>(num_hits));
        return;
      }
      const std::int64_t tokens = is_cross(g) ? num_cross : num_tokens;
      const std::int64_t cached = is_cross(g) ? result.num_cached_cross : found.length;
      tables_[g]->open_with(found.blocks[g], cached, tokens);
      if (!config_.prefix.enabled) return;
      const std::int64_t asked = is_cross(g) ? tables_[g]->div_up(num_cross) : length / config_.groups[g].block_size;
      prefix(g).count_lookup(static_cast<std::size_t>(asked), static_cast<std::size_t>(num_hits));
    });
    auto& first = tables_[0]->at(last_handle_);
    first.publishes = found.cached;
    first.names = found.names;
    first.tokens.assign(prompt.tokens.begin(), prompt.tokens.begin() + found.length);
    first.prompt = with_cross(prompt, cross);
    marks_[last_handle_] = own;
    if (first_states() > 0 && found.first_length > 0) {
      const std::vector<int>& taken = found.blocks[first_states()];
      if (!taken.empty() && taken[0] >= 0 && left_by_decoding_.count(taken[0]) != 0) ++num_rolling_taken_;
      if (++num_rolling_asked_ == 1024) num_rolling_asked_ /= 2, num_rolling_taken_ /= 2;
    }
    each([&](std::size_t g) {
      if (g == 0 || is_cross(g)) return;
      for (const int b : found.blocks[g]) {
        if (b >= 0) raise(g, b, prompt.hint.priority);
      }
    });
    return result;
  }

  [[nodiscard]] std::int64_t step_limit(handle h) const {
    const std::int64_t at = tables_[0]->sequences().at(h).num_tokens;
    const std::int64_t next = next_cut(marks_.at(h), at);
    return next == INT64_MAX ? next : next - at;
  }

  // --- growing, committing, shrinking

  /// Whether the state groups have room for another step that is not committed.
  [[nodiscard]] bool can_keep_states(handle h, std::int64_t num_tokens) const {
    for (const auto& group : states_) {
      if (group && group->slots.count(h) != 0 &&
          group->slots.at(h).size() + static_cast<std::size_t>(group->count_for(num_tokens)) > group->most()) {
        return false;
      }
    }
    return true;
  }

  answer append(handle h, std::int64_t num_tokens, std::int64_t num_lookahead) {
    answer result;
    std::vector<manager_oracle::tail_choice> tails(num_groups());
    each([&](std::size_t g) {
      if (is_cross(g)) return;
      if (states_[g]) {
        result.status = std::max(result.status, status_for(g, states_[g]->count_for(num_tokens)));
        return;
      }
      const manager_oracle::answer asked = tables_[g]->append(h, num_tokens, num_lookahead, true);
      result.status = std::max(result.status, asked.status);
      tails[g] = asked.tail;
    });
    if (result.status != alloc_status::ok) return result;
    result.copies.resize(num_groups());
    const std::int64_t from = tables_[0]->at(h).num_tokens;
    each([&](std::size_t g) {
      if (states_[g]) states_[g]->append(h, from, num_tokens);
    });
    each([&](std::size_t g) {
      if (tables_[g] && !is_cross(g)) {
        result.copies[g] = tables_[g]->append(h, num_tokens, num_lookahead, false, &tails[g]).copy;
      }
    });
    return result;
  }

  void commit(handle h, std::int64_t num_tokens) {
    if (num_tokens > 0) tables_[0]->at(h).publishes = false;
    commit_positions(h, num_tokens, true);
  }
  void commit(handle h, const std::vector<int>& tokens) {
    auto& first = tables_[0]->at(h);
    tables_[0]->commit(h, tokens, [&](std::size_t i, node contents) { publish(h, first, i, contents); });
    commit_positions(h, static_cast<std::int64_t>(tokens.size()), false);
  }

  answer fork(handle h) {
    if (is_full()) return {alloc_status::later, 0, {}, 0, 0};
    ++last_handle_;
    each([&](std::size_t g) {
      if (tables_[g]) {
        (void)tables_[g]->fork(h);
        return;
      }
      states_[g]->slots[last_handle_] = states_[g]->slots[h];
      for (const auto& [position, slot] : states_[g]->slots[h]) pool_of(g).add_user(slot);
    });
    marks_[last_handle_] = marks_[h];
    marks_[last_handle_].rolling = 0;
    return {alloc_status::ok, last_handle_, {}, 0, 0};
  }

  [[nodiscard]] bool can_truncate(handle h, std::int64_t num_tokens) {
    bool possible = true;
    each([&](std::size_t g) {
      if (states_[g]) possible = possible && (states_[g]->slots[h], states_[g]->resumes(h, num_tokens));
      if (tables_[g] && !is_cross(g)) possible = possible && tables_[g]->can_truncate(h, num_tokens);
    });
    return possible;
  }
  void truncate(handle h, std::int64_t num_tokens) {
    each([&](std::size_t g) {
      if (states_[g]) states_[g]->truncate(h, num_tokens);
      if (tables_[g] && !is_cross(g)) tables_[g]->truncate(h, num_tokens);
    });
  }

  void free(handle h) {
    each([&](std::size_t g) {
      if (tables_[g]) {
        tables_[g]->free(h);
        return;
      }
      const bool out = states_[g]->swapped.count(h) != 0;
      std::map<std::int64_t, int>& own = states_[g]->slots[h];
      for (auto at = own.rbegin(); at != own.rend(); ++at) states_[g]->drop(at->second, out);
      states_[g]->slots.erase(h);
      states_[g]->swapped.erase(h);
    });
    marks_.erase(h);
  }

  // --- swapping, fences

  alloc_status swap(const std::vector<handle>& seqs, bool out, std::vector<std::vector<pair>>& copies) {
    alloc_status status = alloc_status::ok;
    each([&](std::size_t g) {
      const pool_oracle& to =
          tables_[g] ? (out ? tables_[g]->host() : tables_[g]->pool()) : (out ? states_[g]->host : states_[g]->pool);
      std::int64_t needed = 0;
      if (tables_[g]) {
        needed = tables_[g]->moving(seqs, out);
      } else {
        std::set<int> moving;
        for (const handle h : seqs) {
          for (const auto& [position, slot] : states_[g]->slots[h]) moving.insert(slot);
        }
        needed = static_cast<std::int64_t>(moving.size());
      }
      status = std::max(status, needed > to.num_blocks() ? alloc_status::never
                                : needed > to.num_free() ? alloc_status::later
                                                         : alloc_status::ok);
    });
    copies.assign(num_groups(), {});
    if (status != alloc_status::ok) return status;
    each([&](std::size_t g) {
      if (tables_[g]) {
        (void)(out ? tables_[g]->swap_out(seqs, copies[g]) : tables_[g]->swap_in(seqs, copies[g]));
        return;
      }
      state_oracle& own = *states_[g];
      std::map<int, int> moved;
      for (const handle h : seqs) {
        for (auto& [position, slot] : own.slots[h]) {
          const int before = slot;
          if (moved.count(before) != 0) {
            slot = moved[before];
            (out ? own.host : own.pool).add_user(slot);
          } else {
            slot = moved[before] = out ? own.host.take() : own.take();
            copies[g].emplace_back(before, slot);
          }
          own.drop(before, !out);
        }
        if (out) {
          own.swapped.insert(h);
        } else {
          own.swapped.erase(h);
        }
      }
    });
    return status;
  }
  void open_fence() {
    each([&](std::size_t g) {
      if (tables_[g]) {
        (void)tables_[g]->open_fence();
        return;
      }
      states_[g]->pool.open_fence();
      if (states_[g]->config.num_host_blocks > 0) states_[g]->host.open_fence();
    });
  }
  void retire() {
    each([&](std::size_t g) {
      if (tables_[g]) {
        tables_[g]->retire();
        return;
      }
      states_[g]->pool.retire();
      if (states_[g]->config.num_host_blocks > 0) states_[g]->host.retire();
    });
  }
  bool reset_prefix_cache() {
    bool idle = true;
    each([&](std::size_t g) {
      for (const int b : prefix(g).held()) idle = idle && pool(g).users(b) == 0;
    });
    if (!idle) return false;
    for (std::size_t g = num_groups(); g-- > 0;) (void)prefix(g).reset();
    return true;
  }

 private:
  template <class What>
  void each(What what) {
    for (std::size_t g = 0; g < num_groups(); ++g) what(g);
  }
  [[nodiscard]] bool is_cross(std::size_t g) const { return kind(g) == group_kind::cross; }
  [[nodiscard]] bool is_full() const { return static_cast<std::int64_t>(marks_.size()) == config_.max_sequences; }
  [[nodiscard]] pool_oracle& pool_of(std::size_t g) { return tables_[g] ? tables_[g]->pool_ : states_[g]->pool; }
  [[nodiscard]] std::int64_t watermark_of(std::size_t g) const {
    return static_cast<std::int64_t>(config_.watermark * static_cast<double>(pool(g).num_blocks()));
  }
  [[nodiscard]] alloc_status status_for(std::size_t g, std::int64_t needed) const {
    return needed > pool(g).num_blocks() ? alloc_status::never
           : needed > pool(g).num_free() ? alloc_status::later
                                         : alloc_status::ok;
  }
  static oracle_prompt with_cross(const oracle_prompt& prompt, const std::string& cross) {
    oracle_prompt whole = prompt;
    if (!cross.empty()) whole.extras[0] = "cross " + cross + ";" + whole.extras[0];
    return whole;
  }

  struct hits {
    std::int64_t length = 0;               ///< that every group has
    std::int64_t first_length = 0;         ///< that the first has
    std::vector<std::vector<int>> blocks;  ///< per group, −1 for those that no later token needs
    std::vector<node> names;
    bool has_cross = false;
    bool cached = false;
  };
  /// By trying every length, the longest first.
  hits look_up(const oracle_prompt& prompt, const std::string& cross, std::int64_t num_cross) {
    hits result;
    result.blocks.resize(num_groups());
    if (!config_.prefix.enabled) return result;
    result.cached = num_cross == 0 || !cross.empty();
    if (!result.cached) return result;
    const oracle_prompt whole = with_cross(prompt, cross);
    const prefix_oracle::found first = tables_[0]->prefix_.match(whole.scope, whole.tokens, whole.extras);
    const auto n = static_cast<std::int64_t>(prompt.tokens.size());
    const std::int64_t bs = config_.block_size;
    const std::int64_t most = std::min(static_cast<std::int64_t>(first.blocks.size()) * bs, n - 1);
    result.first_length = most / alignment_ * alignment_;
    for (std::int64_t length = result.first_length; length > 0; length -= alignment_) {
      bool everywhere = true;
      std::vector<std::vector<int>> blocks(num_groups());
      for (std::int64_t i = 0; i < length / bs; ++i) blocks[0].push_back(first.blocks[static_cast<std::size_t>(i)]);
      for (std::size_t g = 1; g < num_groups(); ++g) {
        if (is_cross(g)) continue;
        if (states_[g]) {
          blocks[g] = {prefix(g).find_after(first.names[static_cast<std::size_t>(length / bs - 1)], {0})};
          everywhere = everywhere && blocks[g][0] >= 0;
          continue;
        }
        const std::int64_t size = config_.groups[g].block_size;
        for (std::int64_t i = 0; i < length / size; ++i) {
          if (i < static_cast<std::int64_t>(tables_[g]->first_seen(length))) {
            blocks[g].push_back(-1);
            continue;
          }
          // Which block of the first group it ends in, and how many of this group's end there before it.
          const std::int64_t at = ((i + 1) * size - 1) / bs;
          int before = 0;
          for (std::int64_t k = 0; k < i; ++k) before += ((k + 1) * size - 1) / bs == at ? 1 : 0;
          blocks[g].push_back(prefix(g).find_after(first.names[static_cast<std::size_t>(at)], {before}));
          everywhere = everywhere && blocks[g].back() >= 0;
        }
      }
      if (!everywhere) continue;
      result.length = length;
      result.blocks = std::move(blocks);
      result.names.assign(first.names.begin(), first.names.begin() + length / bs);
      break;
    }
    for (std::size_t g = 1; g < num_groups(); ++g) {
      if (!is_cross(g) || num_cross == 0) continue;
      std::vector<int> count(static_cast<std::size_t>(tables_[g]->div_up(num_cross)));
      std::iota(count.begin(), count.end(), 0);
      const prefix_oracle::found found = tables_[g]->prefix_.match("", count, {{0, cross_text(prompt.scope, cross)}});
      result.has_cross = found.blocks.size() == count.size();
      if (result.has_cross) result.blocks[g] = found.blocks;
    }
    return result;
  }
  static std::string cross_text(const std::string& scope, const std::string& cross) { return scope + "/" + cross; }
  [[nodiscard]] std::int64_t next_cut(const marks& own, std::int64_t position) const {
    bool has_states = false;
    for (const auto& group : states_) has_states = has_states || group;
    std::int64_t next = INT64_MAX;
    if (!has_states || !config_.prefix.enabled || !own.cached) return next;
    for (const std::int64_t place : {own.longer_hit, own.last_spaced, own.last_border}) {
      if (place > position) next = std::min(next, place);
    }
    if (interval_ > 0) next = std::min(next, (position / interval_ + 1) * interval_);
    return next;
  }

  void publish(handle h, const manager_oracle::one_sequence& first, std::size_t i, node contents) {
    const std::int64_t bs = config_.block_size;
    const std::int64_t begin = static_cast<std::int64_t>(i) * bs, end = begin + bs;
    if (end % alignment_ == 0) publish_states(h, first.prompt.hint, end, contents);
    for (std::size_t g = 1; g < num_groups(); ++g) {
      if (!tables_[g] || is_cross(g)) continue;
      const std::int64_t size = config_.groups[g].block_size;
      const std::vector<int>& blocks = tables_[g]->at(h).blocks;
      int number = 0;
      for (std::int64_t k = 0; (k + 1) * size <= end; ++k) {
        if ((k + 1) * size <= begin) continue;
        const auto index = static_cast<std::size_t>(k);
        if (index < blocks.size() && blocks[index] >= 0) {
          retention_hint hint = first.prompt.hint;
          if (kind(g) == group_kind::window) {
            hint.priority = std::min(hint.priority,
                                     level_in_window(marks_.at(h), k * size, (k + 1) * size, config_.groups[g].window));
          }
          publish_as(g, blocks[index], contents, number, index, hint);
        }
        ++number;
      }
    }
  }
  /// The highest level that what is at a place may have, 7 where a prompt is likely to go on.
  [[nodiscard]] block_level level_of_state(const marks& own, std::int64_t position) const {
    if (interval_ == 0 || position == own.longer_hit || position == own.last_spaced) return 7;
    if (position % interval_ != 0) return position == own.last_border ? 1 : 7;
    for (std::int64_t back = interval_; back <= own.last_spaced; back *= 2) {
      if (position == own.last_spaced - back) return 2;
    }
    return 1;
  }
  [[nodiscard]] block_level level_in_window(const marks& own, std::int64_t begin, std::int64_t end,
                                            std::int64_t window) const {
    if (begin >= own.last_border) return 7;
    block_level best = 1;
    for (std::int64_t length = 1; length <= own.last_border; ++length) {
      const bool sees = begin < length && end > length - window + 1;
      const bool is_spaced = interval_ > 0 && length % interval_ == 0;
      const bool is_place = length == own.longer_hit || is_spaced || (interval_ == 0 && length == own.last_border);
      if (sees && is_place) best = std::max(best, level_of_state(own, length));
    }
    return best;
  }
  void raise(std::size_t g, int block, block_level level) {
    level = std::clamp(level, retention_hint::lowest, retention_hint::highest);
    if (pool(g).level(block) < level) pool_of(g).set_level(block, level);
  }
  /// Whether it was not registered before.
  bool publish_as(std::size_t g, int block, node contents, int offset, std::size_t index, const retention_hint& hint) {
    const int duplicate = prefix(g).publish(block, contents, &offset, {}, index, hint).duplicate_of;
    if (duplicate >= 0 && hint.expires_at == 0) raise(g, duplicate, hint.priority);
    return duplicate < 0;
  }
  void publish_states(handle h, retention_hint hint, std::int64_t position, node contents) {
    marks& own = marks_[h];
    bool is_first = true, rolls = false;
    for (std::size_t g = 1; g < num_groups(); ++g) {
      if (!states_[g]) continue;
      if (states_[g]->slots[h].count(position) == 0) return;
      if (is_first && own.rolling != 0) {
        for (std::size_t k = 1; k < num_groups(); ++k) {
          if (!states_[k]) continue;
          const int before = prefix(k).find_after(own.rolling, {0});
          if (before < 0) continue;
          const int mine = states_[k]->slots[h].begin()->second == before ? 1 : 0;
          if (pool(k).users(before) <= mine) prefix(k).unregister(before);
        }
        own.rolling = 0;
      }
      const bool is_place = position == own.longer_hit || position == own.last_spaced || position == own.last_border;
      const bool spaced = interval_ > 0 && position % interval_ == 0;
      hint.priority = std::min(hint.priority, level_of_state(own, position));
      if (is_first) {
        rolls = !is_place && !spaced;
        // Where fewer than one prompt in 32 goes on from what decoding left, one such state in 16 waits with the
        // others.
        const bool is_unlikely = num_rolling_asked_ >= 64 && num_rolling_taken_ * 32 < num_rolling_asked_;
        if (rolls && is_unlikely && ++num_rolling_left_ % 16 != 0) hint.priority = retention_hint::lowest;
      }
      const int slot = states_[g]->slots[h][position];
      const bool is_new = publish_as(g, slot, contents, 0, 0, hint);
      if (is_first && is_new) {
        rolls ? (void)left_by_decoding_.insert(slot) : (void)left_by_decoding_.erase(slot);
      }
      is_first = false;
      rolls = is_new && rolls;
    }
    if (rolls) own.rolling = contents;
  }
  void commit_positions(handle h, std::int64_t num_tokens, bool first_too) {
    const marks& own = marks_[h];
    each([&](std::size_t g) {
      if (is_cross(g)) return;
      if (states_[g]) {
        states_[g]->commit(h, tables_[0]->at(h).num_committed);
        return;
      }
      if (g > 0 || first_too) tables_[g]->commit_and_slide(h, num_tokens, own.last_border);
    });
    if (num_tokens == 0) return;
    for (std::size_t g = 1; g < num_groups(); ++g) {
      if (!is_cross(g)) continue;
      auto& one = tables_[g]->at(h);
      if (one.num_committed == one.num_tokens) continue;
      one.num_committed = one.num_tokens;
      if (own.cross.empty()) continue;
      node end = tables_[g]->prefix_.root("");
      for (std::size_t i = 0; i < one.blocks.size(); ++i) {
        const int token = static_cast<int>(i);
        prefix_oracle::extra_texts key;
        if (i == 0) key[0] = cross_text(tables_[0]->at(h).prompt.scope, own.cross);
        end = tables_[g]->prefix_.publish(one.blocks[i], end, &token, key, i, {}).end;
      }
    }
  }

  kv_cache_config config_;
  std::vector<std::unique_ptr<table_oracle>> tables_;  // null for state groups
  std::vector<std::unique_ptr<state_oracle>> states_;  // null for others
  std::set<int> left_by_decoding_;                     // of the first state group
  std::int64_t num_rolling_asked_ = 0, num_rolling_taken_ = 0, num_rolling_left_ = 0;
  std::map<handle, marks> marks_;
  std::int64_t alignment_ = 1;
  std::int64_t interval_ = 0;
  handle last_handle_ = 0;
};

}  // namespace bifolio::test
