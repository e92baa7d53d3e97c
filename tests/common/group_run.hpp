// SPDX-License-Identifier: Apache-2.0
#pragma once

/// One long random mix of all calls of a manager with several layer groups, side by side with the oracle. Each group
/// has a simulated memory: K and V slots hold a hash of all that a token depends on, a state's block the hash of all
/// tokens that it has taken in. Whatever was computed must read back in every group, also what came from the prefix
/// cache.

#include <algorithm>
#include <bifolio/kv_cache_manager.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/cache_logic_helpers.hpp"
#include "reference/group_oracle.hpp"
#include "support/random.hpp"

namespace bifolio::test {

struct group_run_shape {
  std::vector<group_config> groups;
  std::int32_t max_sequences;
  std::int64_t longest;  ///< tokens of a fresh sequence
  bool prefix = false;
  bool fences = false;
};

/// How often what happened, so that a test can say that its mix is worth its name.
struct group_run_tally {
  std::int64_t num_hits = 0, num_shorter_hits = 0, num_cross_hits = 0, num_copies = 0, num_refusals = 0;
  std::int64_t num_swaps = 0, num_kept_states = 0, num_lost_states = 0, num_null_hits = 0;
};

class group_run {
 public:
  group_run(const group_run_shape& how, std::uint64_t seed)
      : how_(how),
        config_(config_of(how, seed)),
        manager_(config_),
        oracle_(config_of_oracle(how, seed)),
        random_(seed) {
    for (const group_config& group : how.groups) {
      const auto size = to_size(group.kind == group_kind::state ? 1 : group.block_size);
      memory_.emplace_back(to_size(group.num_blocks) * size, 0);
      host_memory_.emplace_back(to_size(group.num_host_blocks) * size, 0);
    }
    for (int i = 0; i < 3; ++i) inputs_.push_back("an encoder's input, number " + std::to_string(i));
  }

  /// The first difference as text; empty when there was none.
  std::string run(std::int64_t num_operations) {
    for (std::int64_t i = 0; i < num_operations; ++i) {
      std::string problem = one_operation();
      for (std::size_t g = 0; problem.empty() && g < how_.groups.size(); ++g) {
        if (oracle_.pool(g).num_free() != manager_.num_free_blocks(static_cast<std::int32_t>(g))) {
          problem = "number of free blocks of group " + std::to_string(g);
        }
      }
      if (problem.empty() && i % 2048 == 2047) problem = compare_everything();
      if (!problem.empty()) return "operation " + std::to_string(i) + ": " + problem;
    }
    std::string problem = compare_everything();
    while (problem.empty() && !open_.empty()) problem = free_one(0);
    while (problem.empty() && !fences_.empty()) problem = retire_one();
    if (problem.empty()) problem = compare_everything();
    for (std::size_t g = 0; problem.empty() && g < how_.groups.size(); ++g) {
      const auto group = static_cast<std::int32_t>(g);
      if (manager_.num_free_blocks(group) != how_.groups[g].num_blocks) problem = "blocks were lost";
      if (manager_.num_free_host_blocks(group) != how_.groups[g].num_host_blocks) problem = "host blocks were lost";
    }
    if (problem.empty() && !manager_.reset_prefix_cache()) problem = "an idle cache was not reset";
    if (problem.empty()) problem = manager_.check();
    return problem;
  }

  [[nodiscard]] const group_run_tally& tally() const { return tally_; }

 private:
  struct open_sequence {
    seq_id id = invalid_seq;
    group_oracle::handle twin = 0;
    int document = 0;
    int input = -1;  ///< of the encoder
    std::int64_t num_cross = 0;
    std::vector<token_id> tokens;
    std::vector<std::uint64_t> contents;
    std::int64_t num_computed = 0;
    bool has_cross = false;  ///< the encoder's output is stored
    bool swapped = false;
  };

  static std::size_t to_size(std::int64_t n) { return static_cast<std::size_t>(n); }
  static kv_cache_config config_of(const group_run_shape& how, std::uint64_t seed) {
    kv_cache_config config{.watermark = 0.05, .max_sequences = how.max_sequences, .max_seq_len = 1 << 14};
    config.prefix.enabled = how.prefix;
    config.prefix.seed = hash_seed{seed, 2};
    config.prefix.record_events = seed % 2 == 0;  // appends in place need it to be off
    config.groups = how.groups;
    return config;
  }
  static kv_cache_config config_of_oracle(const group_run_shape& how, std::uint64_t seed) {
    kv_cache_config config = config_of(how, seed);
    config.block_size = how.groups[0].block_size;
    return config;
  }
  [[nodiscard]] bool is_table(std::size_t g) const {
    return how_.groups[g].kind == group_kind::full || how_.groups[g].kind == group_kind::window;
  }
  [[nodiscard]] bool has_cross() const {
    return std::any_of(how_.groups.begin(), how_.groups.end(),
                       [](const group_config& group) { return group.kind == group_kind::cross; });
  }
  [[nodiscard]] std::size_t cross_group() const {
    std::size_t g = 0;
    while (how_.groups[g].kind != group_kind::cross) ++g;
    return g;
  }

  std::string one_operation() {
    if (how_.fences && random_.one_in(12)) return fence_or_retire();
    if (how_.prefix && random_.one_in(2000)) {
      const bool done = manager_.reset_prefix_cache();
      return done == oracle_.reset_prefix_cache() ? "" : "reset answered otherwise";
    }
    if (open_.empty()) return start_one();
    const std::size_t at = any();
    open_sequence& one = open_[at];
    if (one.swapped) return random_.one_in(3) ? swap({at}, false) : random_.one_in(6) ? free_one(at) : "";
    switch (random_.between(0, 19)) {
      case 0:
      case 1:
      case 2:
        return start_one();
      case 3:
        return free_one(at);
      case 4:
        return fork_one(one);
      case 5:
      case 6:
        return truncate_one(one);
      case 7:
        return how_.groups[0].num_host_blocks > 0 ? swap_out_some(at) : append_one(one);
      case 8:
      case 9:
      case 10:
      case 11:
      case 12:
        return commit_one(one);
      default:
        return append_one(one);
    }
  }

  std::size_t any() { return to_size(random_.between(0, static_cast<std::int64_t>(open_.size()) - 1)); }
  static std::int64_t length(const open_sequence& one) { return static_cast<std::int64_t>(one.tokens.size()); }
  [[nodiscard]] std::uint64_t digest_sometimes() {
    sampled_ = random_.one_in(16);
    return sampled_ ? manager_.digest() : 0;
  }
  std::string after_refusal(std::uint64_t before, bool makes_room = false) {
    ++tally_.num_refusals;
    if (sampled_ && manager_.digest() != before) return "a refused call changed the state";
    return makes_room && !open_.empty() ? free_one(any()) : "";
  }

  // --- texts and their contents

  void add_token(open_sequence& one) {
    const std::int64_t p = length(one);
    const bool strays = random_.one_in(400);
    const auto id = static_cast<std::int32_t>((strays ? random_.next() : hash_of(7, one.document / 2, p)) % 3);
    std::uint64_t h = p == 0 ? hash_of(1, one.document % 2, one.input, one.num_cross) : one.contents[to_size(p) - 1];
    one.tokens.push_back(token_id{id});
    one.contents.push_back(hash_of(h, id));
  }
  std::vector<int> ints(const open_sequence& one, std::int64_t first, std::int64_t last) const {
    std::vector<int> ids;
    for (std::int64_t p = first; p < last; ++p) ids.push_back(to_index(one.tokens[to_size(p)]));
    return ids;
  }
  [[nodiscard]] std::uint64_t cross_content(const open_sequence& one, std::int64_t p) const {
    return hash_of(99, one.input < 0 ? 1000000 + static_cast<int>(one.twin) : one.input, one.document % 2,
                   one.num_cross, p);
  }
  /// As a step would: K and V of the positions up to `end`, and the states there.
  void compute(open_sequence& one, std::int64_t end) {
    for (std::size_t g = 0; g < how_.groups.size(); ++g) {
      const auto group = static_cast<std::int32_t>(g);
      if (is_table(g)) {
        for (std::int64_t p = one.num_computed; p < end; ++p) {
          memory_[g][to_size(to_index(manager_.slot_at(one.id, p, group)))] = one.contents[to_size(p)];
        }
      } else if (how_.groups[g].kind == group_kind::state) {
        for (std::int64_t p = one.num_computed + 1; p <= end; ++p) {
          const block_id slot = manager_.state_at(one.id, p, group);
          if (slot != invalid_block) memory_[g][to_size(to_index(slot))] = one.contents[to_size(p) - 1];
        }
      }
    }
    if (end > one.num_computed) store_cross(one);
    one.num_computed = std::max(one.num_computed, end);
  }
  void store_cross(open_sequence& one) {
    for (std::int64_t p = 0; p < one.num_cross && !one.has_cross; ++p) {
      const slot_id slot = manager_.slot_at(one.id, p, static_cast<std::int32_t>(cross_group()));
      memory_[cross_group()][to_size(to_index(slot))] = cross_content(one, p);
    }
    one.has_cross = true;
  }
  void copy(std::size_t g, std::vector<std::vector<std::uint64_t>>& from, int src,
            std::vector<std::vector<std::uint64_t>>& to, int dst) const {
    const std::ptrdiff_t size = how_.groups[g].kind == group_kind::state ? 1 : how_.groups[g].block_size;
    std::copy_n(from[g].begin() + src * size, size, to[g].begin() + dst * size);
  }

  // --- calls

  std::string start_one() {
    open_sequence one;
    one.document = static_cast<int>(random_.between(0, 7));
    if (has_cross() && !random_.one_in(3)) {
      one.input = static_cast<int>(random_.between(-1, 2));
      one.num_cross = one.input < 0 ? random_.between(1, 5) : 3 + one.input;
    }
    return random_.one_in(6) ? allocate_one(std::move(one)) : open_one(std::move(one));
  }

  std::string allocate_one(open_sequence one) {
    one.document = 0;
    one.input = -1;
    const std::int64_t n = random_.between(1, how_.longest);
    const std::uint64_t before = digest_sometimes();
    const allocate_result got = manager_.allocate(n, one.num_cross);
    const group_oracle::answer expected = oracle_.allocate(n, one.num_cross);
    if (got.status != expected.status) return "allocate answered " + std::string(to_string(got.status));
    if (got.status != alloc_status::ok) return after_refusal(before, true);
    one.id = got.seq;
    one.twin = expected.opened;
    if (one.num_cross > 0) one.document = 1000 + 2 * static_cast<int>(one.twin);  // like no other
    for (std::int64_t p = 0; p < n; ++p) add_token(one);
    open_.push_back(std::move(one));
    return compare(open_.back());
  }

  std::string open_one(open_sequence one) {
    const std::int64_t n = random_.one_in(4) ? how_.longest : random_.between(1, how_.longest);
    for (std::int64_t p = 0; p < n; ++p) add_token(one);
    oracle_prompt twin;
    twin.tokens = ints(one, 0, n);
    twin.scope = one.document % 2 == 1 ? "a tenant" : "";
    twin.hint.priority = static_cast<block_level>(random_.one_in(4) ? random_.between(1, 7) : 4);
    prompt_view prompt{.tokens = one.tokens, .retention = twin.hint};
    if (one.document % 2 == 1) prompt.scope = {"a tenant", 0};
    const std::string cross = one.input >= 0 ? inputs_[to_size(one.input)] : "";
    prompt.cross = {static_cast<std::int32_t>(one.num_cross), std::as_bytes(std::span(cross.data(), cross.size()))};
    std::vector<content_key> keys;
    if (how_.prefix && random_.one_in(3)) {
      manager_.append_keys(prompt, keys);
      prompt.keys = keys;
    }
    const std::int64_t step = random_.one_in(2) ? 0 : random_.between(1, 24);
    const std::int64_t num_new = step == 0 ? random_.between(1, n) : random_.between(1, step);
    group_blocks promised{};
    for (std::size_t g = 0; g < how_.groups.size(); ++g) {
      if (random_.one_in(3)) promised[g] = random_.between(0, how_.groups[g].num_blocks / 2);
    }
    const std::uint64_t before = digest_sometimes();
    const admission foretold = manager_.can_open(prompt, step, promised);
    const group_oracle::answer admitted = oracle_.can_open(twin, cross, one.num_cross, step, promised);
    if (foretold.status != admitted.status) return "can_open answered " + std::string(to_string(foretold.status));
    if (foretold.num_cached_tokens != admitted.num_cached) return "can_open foretells other hits";
    if (sampled_ && manager_.digest() != before) return "can_open changed the state";
    const open_result got = manager_.open(prompt, num_new);
    const group_oracle::answer expected = oracle_.open(twin, cross, one.num_cross, num_new);
    if (got.status != expected.status) return "open answered " + std::string(to_string(got.status));
    if (got.status != alloc_status::ok) return after_refusal(before, true);
    if (got.num_cached_tokens != expected.num_cached) return "another number of cached tokens";
    if (got.num_cached_cross_tokens != expected.num_cached_cross) return "another number of cached encoder tokens";
    if (got.num_cached_tokens >= n) return "nothing is left to compute";
    if (got.has_copy()) return "a hit copies a block";
    one.id = got.seq;
    one.twin = expected.opened;
    one.tokens.resize(to_size(manager_.num_tokens(got.seq)));
    one.contents.resize(one.tokens.size());
    one.num_computed = got.num_cached_tokens;
    one.has_cross = one.num_cross == 0 || got.num_cached_cross_tokens > 0;
    tally_.num_hits += one.num_computed > 0 ? 1 : 0;
    tally_.num_cross_hits += got.num_cached_cross_tokens > 0 ? 1 : 0;
    if (oracle_.marks_of(one.twin).longer_hit > 0) ++tally_.num_shorter_hits;
    for (std::size_t g = 1; g < how_.groups.size(); ++g) {
      if (is_table(g) && manager_.num_released_blocks(one.id, static_cast<std::int32_t>(g)) > 0) ++tally_.num_null_hits;
    }
    open_.push_back(std::move(one));
    return compare(open_.back());
  }

  std::string append_one(open_sequence& one) {
    std::int64_t n = random_.one_in(6) ? random_.between(0, 12) : 1;
    const std::int64_t lookahead = random_.one_in(8) ? random_.between(0, 8) : 0;
    if (manager_.step_limit(one.id) != oracle_.step_limit(one.twin)) return "step_limit";
    if (random_.one_in(2)) n = std::min(n, manager_.step_limit(one.id));
    if (length(one) + n + lookahead > config_.max_seq_len) return {};
    const std::uint64_t before = digest_sometimes();
    if (!oracle_.can_keep_states(one.twin, n)) {
      const errc code = code_of([&] { (void)manager_.append(one.id, n, lookahead); });
      return code == errc::failed_precondition ? after_refusal(before) : "steps without end are not refused";
    }
    const alloc_status foretold = manager_.can_append(one.id, n, lookahead);
    std::vector<std::int64_t> taken;
    for (std::size_t g = 0; g < how_.groups.size(); ++g) {
      const auto group = static_cast<std::int32_t>(g);
      taken.push_back(manager_.stats(group).num_allocated_blocks +
                      manager_.blocks_to_append(one.id, n, lookahead, group));
    }
    const append_result got = manager_.append(one.id, n, lookahead);
    const group_oracle::answer expected = oracle_.append(one.twin, n, lookahead);
    if (got.status != expected.status) return "append answered " + std::string(to_string(got.status));
    if (got.status != foretold) return "can_append and append differ";
    if (got.status != alloc_status::ok) return after_refusal(before);
    for (std::size_t g = 0; g < how_.groups.size(); ++g) {
      const auto group = static_cast<std::int32_t>(g);
      if (manager_.stats(group).num_allocated_blocks != taken[g]) return "append took another number of blocks";
      std::vector<block_copy> copies;
      if (g > 0) manager_.drain_copies(group, copies);
      if (g == 0 && got.has_copy()) copies.push_back(got.copy);
      if (copies.size() != (expected.copies[g].has_value() ? 1U : 0U)) return "a copy was missed or one too many";
      if (copies.empty()) continue;
      if (to_index(copies[0].src) != expected.copies[g]->first ||
          to_index(copies[0].dst) != expected.copies[g]->second) {
        return "the copy names other blocks";
      }
      copy(g, memory_, to_index(copies[0].src), memory_, to_index(copies[0].dst));
      ++tally_.num_copies;
    }
    for (std::int64_t i = 0; i < n; ++i) add_token(one);
    return compare(one);
  }

  std::string commit_one(open_sequence& one) {
    const std::int64_t done = manager_.num_committed(one.id);
    const std::int64_t room = length(one) - done;
    const std::int64_t n = random_.one_in(5) ? random_.between(0, room) : room;
    compute(one, done + n);
    if (random_.one_in(50) || (!how_.prefix && random_.one_in(2))) {
      manager_.commit(one.id, n);
      oracle_.commit(one.twin, n);
    } else {
      manager_.commit(one.id, std::span(one.tokens).subspan(to_size(done), to_size(n)));
      oracle_.commit(one.twin, ints(one, done, done + n));
    }
    return compare(one);
  }

  std::string fork_one(open_sequence& parent) {
    // The parent's step stores the encoder's output for both.
    store_cross(parent);
    const std::uint64_t before = digest_sometimes();
    const allocate_result got = manager_.fork(parent.id);
    const group_oracle::answer expected = oracle_.fork(parent.twin);
    if (got.status != expected.status) return "fork answered " + std::string(to_string(got.status));
    if (got.status != alloc_status::ok) return after_refusal(before, true);
    open_sequence child = parent;
    child.id = got.seq;
    child.twin = expected.opened;
    child.has_cross = true;
    open_.push_back(std::move(child));
    return compare(open_.back());
  }
  std::string truncate_one(open_sequence& one) {
    const std::int64_t n = random_.one_in(3)   ? random_.between(0, length(one))
                           : random_.one_in(2) ? manager_.num_committed(one.id)
                                               : std::max<std::int64_t>(0, length(one) - random_.between(0, 4));
    if (!oracle_.can_truncate(one.twin, n)) {
      const std::uint64_t before = digest_sometimes();
      ++tally_.num_lost_states;
      return code_of([&] { manager_.truncate(one.id, n); }) == errc::invalid_argument
                 ? after_refusal(before)
                 : "truncate to what is not kept was accepted";
    }
    if (n < length(one)) ++tally_.num_kept_states;
    manager_.truncate(one.id, n);
    oracle_.truncate(one.twin, n);
    one.tokens.resize(to_size(n));
    one.contents.resize(to_size(n));
    one.num_computed = std::min(one.num_computed, n);
    return compare(one);
  }

  std::string free_one(std::size_t at) {
    manager_.free(open_[at].id);
    oracle_.free(open_[at].twin);
    const seq_id stale = open_[at].id;
    if (at + 1 != open_.size()) std::swap(open_[at], open_.back());
    open_.pop_back();
    return manager_.contains(stale) ? "a freed handle is still valid" : "";
  }

  std::string swap_out_some(std::size_t at) {
    std::vector<std::size_t> chosen{at};
    const std::size_t other = any();
    if (other != at && !open_[other].swapped) chosen.push_back(other);
    return swap(chosen, true);
  }
  std::string swap(const std::vector<std::size_t>& chosen, bool out) {
    std::vector<seq_id> seqs;
    std::vector<group_oracle::handle> twins;
    for (const std::size_t at : chosen) {
      seqs.push_back(open_[at].id);
      twins.push_back(open_[at].twin);
    }
    std::vector<std::vector<block_copy>> copies(how_.groups.size());
    std::vector<std::vector<group_oracle::pair>> expected;
    const std::uint64_t before = digest_sometimes();
    const alloc_status got = out ? manager_.swap_out(seqs, copies) : manager_.swap_in(seqs, copies);
    const alloc_status wanted = oracle_.swap(twins, out, expected);
    const std::string name = out ? "swap_out" : "swap_in";
    if (got != wanted) return name + " answered " + std::string(to_string(got));
    for (std::size_t g = 0; g < copies.size(); ++g) {
      if (copies[g].size() != expected[g].size()) return name + " copies another number in group " + std::to_string(g);
      for (std::size_t i = 0; i < copies[g].size(); ++i) {
        const auto [src, dst] = expected[g][i];
        if (to_index(copies[g][i].src) != src || to_index(copies[g][i].dst) != dst) return name + " names other blocks";
        copy(g, out ? memory_ : host_memory_, src, out ? host_memory_ : memory_, dst);
      }
    }
    if (got != alloc_status::ok) return after_refusal(before);
    ++tally_.num_swaps;
    for (const std::size_t at : chosen) {
      open_[at].swapped = out;
      if (manager_.is_swapped_out(open_[at].id) != out) return "is_swapped_out";
      if (std::string problem = compare(open_[at]); !problem.empty()) return name + ": " + problem;
    }
    return {};
  }

  std::string fence_or_retire() {
    if (!fences_.empty() && random_.between(0, 3) < static_cast<std::int64_t>(fences_.size())) return retire_one();
    fences_.push_back(manager_.open_fence());
    oracle_.open_fence();
    return {};
  }
  std::string retire_one() {
    manager_.retire(fences_.front());
    oracle_.retire();
    fences_.erase(fences_.begin());
    return {};
  }

  // --- comparing

  std::string compare(const open_sequence& one) {
    for (std::size_t g = 0; g < how_.groups.size(); ++g) {
      std::string problem = compare_in(one, g);
      if (!problem.empty()) return problem + " (group " + std::to_string(g) + ")";
    }
    return {};
  }
  std::string compare_in(const open_sequence& one, std::size_t g) {
    const auto group = static_cast<std::int32_t>(g);
    const std::vector<std::uint64_t>& memory = one.swapped ? host_memory_[g] : memory_[g];
    if (how_.groups[g].kind == group_kind::state) {
      const auto at = oracle_.states(g).slots.find(one.twin);
      for (std::int64_t p = 1; p <= length(one); ++p) {
        const bool kept = at != oracle_.states(g).slots.end() && at->second.count(p) != 0;
        const int slot = kept ? at->second.at(p) : -1;
        if (to_index(manager_.state_at(one.id, p, group)) != slot) return "state after " + std::to_string(p);
        if (kept && p <= one.num_computed && memory[to_size(slot)] != one.contents[to_size(p) - 1]) {
          return "the state after " + std::to_string(p) + " tokens is another text's";
        }
      }
      return {};
    }
    const auto& expected = oracle_.table(g).sequences().at(one.twin);
    if (manager_.num_table_blocks(one.id, group) != static_cast<std::int64_t>(expected.blocks.size()))
      return "table size";
    const bool cross = how_.groups[g].kind == group_kind::cross;
    if (!cross && (manager_.num_tokens(one.id) != expected.num_tokens ||
                   manager_.num_committed(one.id) != expected.num_committed || expected.num_tokens != length(one))) {
      return "numbers of tokens";
    }
    const std::int64_t size = how_.groups[g].block_size;
    for (std::size_t i = 0; i < expected.blocks.size(); ++i) {
      const int block = expected.blocks[i];
      if (to_index(manager_.block_at(one.id, static_cast<std::int64_t>(i), group)) != block) return "table entry";
      if (block < 0) continue;
      for (std::int64_t k = 0; k < size; ++k) {
        const std::int64_t p = static_cast<std::int64_t>(i) * size + k;
        if (cross ? (!one.has_cross || one.input < 0 || p >= one.num_cross) : p >= one.num_computed) break;
        const std::uint64_t wanted = cross ? cross_content(one, p) : one.contents[to_size(p)];
        if (memory[to_size(block * size + k)] != wanted) return "contents of position " + std::to_string(p);
      }
    }
    return {};
  }

  std::string compare_everything() {
    if (std::string problem = manager_.check(); !problem.empty()) return "check(): " + problem;
    for (const open_sequence& one : open_) {
      if (std::string problem = compare(one); !problem.empty()) return problem;
    }
    for (std::size_t g = 0; g < how_.groups.size(); ++g) {
      const auto group = static_cast<std::int32_t>(g);
      const std::string name = " of group " + std::to_string(g);
      if (free_order(manager_.pool(group)) != oracle_.pool(g).order()) return "eviction order" + name;
      if (how_.groups[g].kind != group_kind::state && !(manager_.stats(group) == oracle_.table(g).stats())) {
        return "statistics" + name;
      }
      if (!how_.prefix) continue;
      if (!(manager_.prefix(group)->stats() == oracle_.prefix(g).stats())) return "statistics of the cache" + name;
      for (const int b : oracle_.prefix(g).held()) {
        if (!manager_.prefix(group)->holds(block_id{b})) return "a block is not held" + name;
      }
      std::vector<cache_event> events;
      manager_.drain_events(events, group);
    }
    return {};
  }

  group_run_shape how_;
  kv_cache_config config_;
  kv_cache_manager manager_;
  group_oracle oracle_;
  random_source random_;
  std::vector<std::vector<std::uint64_t>> memory_;       // [group][blocks · block size]
  std::vector<std::vector<std::uint64_t>> host_memory_;  // the same
  std::vector<std::string> inputs_;
  std::vector<open_sequence> open_;
  std::vector<fence_id> fences_;
  bool sampled_ = false;
  group_run_tally tally_;
};

}  // namespace bifolio::test
