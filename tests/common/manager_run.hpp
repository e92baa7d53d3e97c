// SPDX-License-Identifier: Apache-2.0
#pragma once

/// One long random mix of all calls of a manager, side by side with the oracle. A simulated cache memory holds one
/// number per slot, a hash of all that the token's K and V depend on: every token is written through the manager's
/// slots some time between its append and its commit, every reported pair is copied at once, and whatever was computed
/// must read back, also when it came from the prefix cache, from the host or through a fork.

#include <algorithm>
#include <bifolio/kv_cache_manager.hpp>
#include <string>
#include <utility>
#include <vector>

#include "common/cache_logic_helpers.hpp"
#include "reference/manager_oracle.hpp"
#include "support/random.hpp"

namespace bifolio::test {

struct manager_shape {
  std::int32_t block_size;
  std::int64_t num_blocks;
  std::int32_t sliding_window;
  std::int32_t max_sequences;
  std::int64_t longest;  ///< tokens of a fresh sequence
  int percent_full;      ///< above this the run opens no new sequences; 100: the pool runs dry all the time
  int key_bits = 0;      ///< 0: no prefix caching
  bool deduplicate = false;
  std::int64_t num_host_blocks = 0;
  bool fences = false;
};

/// How often what happened, so that a test can say that its mix is worth its name.
struct manager_tally {
  cache_stats cache;
  prefix_stats prefix;
  std::int64_t num_refusals = 0, num_copied_prompts = 0, num_fenced = 0, num_resets = 0, num_failed_swaps = 0;
};

class manager_run {
 public:
  manager_run(const manager_shape& how, std::uint64_t seed) : manager_run(how, seed, random_source(seed)) {}
  /// The same with choices of the caller's.
  manager_run(const manager_shape& how, std::uint64_t seed, const random_source& random)
      : how_(how),
        config_(config_of(how, seed)),
        manager_(config_),
        oracle_(config_),
        random_(random),
        memory_(to_size(how.num_blocks * how.block_size), 0),
        host_memory_(to_size(how.num_host_blocks * how.block_size), 0),
        num_users_(to_size(how.num_blocks), 0) {
    for (const char* text : {"digest of one image", "digest of another"}) images_.emplace_back(text);
  }

  /// The first difference as text; empty when there was none.
  std::string run(std::int64_t num_operations) {
    for (std::int64_t i = 0; i < num_operations; ++i) {
      std::string problem = one_operation();
      if (problem.empty() && oracle_.pool().num_free() != manager_.num_free_blocks()) problem = "number of free blocks";
      if (problem.empty() && i % 4096 == 4095) problem = compare_everything();
      if (!problem.empty()) return "operation " + std::to_string(i) + ": " + problem;
    }
    std::string problem = compare_everything();
    while (problem.empty() && !open_.empty()) problem = free_one();
    while (problem.empty() && !fences_.empty()) problem = retire_one();
    if (problem.empty()) problem = compare_everything();
    if (problem.empty() && manager_.num_free_blocks() != config_.num_blocks) problem = "blocks were lost";
    if (problem.empty() && manager_.num_free_host_blocks() != config_.num_host_blocks)
      problem = "host blocks were lost";
    if (problem.empty() && !manager_.reset_prefix_cache()) problem = "an idle cache was not reset";
    if (problem.empty()) problem = manager_.check();
    return problem;
  }

  [[nodiscard]] manager_tally tally() const {
    manager_tally all = tally_;
    all.cache = manager_.stats();
    if (manager_.prefix() != nullptr) all.prefix = manager_.prefix()->stats();
    return all;
  }

 private:
  struct open_sequence {
    seq_id id;
    manager_oracle::handle twin;
    int document = 0;
    std::vector<token_id> tokens;         ///< of all positions with slots
    std::vector<std::uint64_t> contents;  ///< what their slots hold once they are computed
    std::int64_t num_computed = 0;
    std::vector<extra_key> extras;
    bool swapped = false;
  };
  struct prompt {
    open_sequence parts;
    prompt_view view;
    oracle_prompt twin;
  };

  static std::size_t to_size(std::int64_t n) { return static_cast<std::size_t>(n); }
  static kv_cache_config config_of(const manager_shape& how, std::uint64_t seed) {
    kv_cache_config config{.block_size = how.block_size,
                           .num_blocks = how.num_blocks,
                           .watermark = 0.05,
                           .sliding_window = how.sliding_window,
                           .max_sequences = how.max_sequences,
                           .max_seq_len = 1 << 16,
                           .num_host_blocks = how.num_host_blocks};
    config.prefix.enabled = how.key_bits > 0;
    config.prefix.seed = hash_seed{seed, 1};
    config.prefix.key_bits = std::max(how.key_bits, 1);
    config.prefix.record_events = true;
    config.prefix.deduplicate = how.deduplicate;
    return config;
  }

  std::string one_operation() {
    const std::int64_t used = config_.num_blocks - manager_.num_free_blocks();
    const bool crowded = used * 100 > config_.num_blocks * how_.percent_full;
    if (how_.fences && random_.one_in(12)) return fence_or_retire();
    if (how_.key_bits > 0 && random_.one_in(64)) return tend_cache();
    if (open_.empty()) return start_one();
    open_sequence& one = any();
    if (one.swapped) return random_.one_in(3) ? swap_in_some() : random_.one_in(6) ? free_one() : "";
    switch (random_.between(0, 21)) {
      case 0:
      case 1:
      case 2:
        return crowded ? free_one() : start_one();
      case 3:
      case 4:
        return random_.one_in(3) ? free_one() : fork_one(one);
      case 5:
      case 6:
        return truncate_one(one);
      case 7:
        return ask();
      case 8:
      case 9:
      case 10:
        return commit_one(one);
      case 11:
        return how_.num_host_blocks > 0 ? swap_out_some() : append_one(one);
      case 12:
        compute(one, random_.between(one.num_computed, length(one)));
        return compare(one, one.num_computed - 1);
      default:
        return append_one(one);
    }
  }

  open_sequence& any() { return open_[to_size(random_.between(0, static_cast<std::int64_t>(open_.size()) - 1))]; }
  static std::int64_t length(const open_sequence& one) { return static_cast<std::int64_t>(one.tokens.size()); }

  /// A digest now and then, against which a refusal is held.
  [[nodiscard]] std::uint64_t digest_sometimes() {
    sampled_ = random_.one_in(16);
    return sampled_ ? manager_.digest() : 0;
  }
  std::string after_refusal(std::uint64_t before, bool makes_room = false) {
    ++tally_.num_refusals;
    if (sampled_ && manager_.digest() != before) return "a refused call changed the state";
    return makes_room ? free_one() : "";
  }

  // --- texts and their contents

  static prefix_scope scope_of(int document) {
    return document % 4 == 3 ? prefix_scope{"a tenant", 0} : document % 4 == 2 ? prefix_scope{"", 5} : prefix_scope{};
  }
  static std::string scope_text(int document) { return document % 4 == 3 ? "a tenant" : document % 4 == 2 ? "5" : ""; }
  /// The token at a position of a document, or now and then something else.
  token_id token_at(int document, std::int64_t position) {
    const bool strays = random_.one_in(40);
    return token_id{static_cast<std::int32_t>((strays ? random_.next() : hash_of(7, document / 8, position)) % 3)};
  }
  /// Appends a token and the hash of all that its K and V depend on.
  void add_token(open_sequence& one, token_id token) {
    const std::int64_t p = length(one);
    std::uint64_t h = p == 0 ? hash_of(1, one.document % 4 == 3   ? 1
                                          : one.document % 4 == 2 ? 2
                                                                  : 3)
                             : one.contents[to_size(p) - 1];
    h = hash_of(h, to_index(token));
    for (const extra_key& extra : one.extras) {
      if (extra.position == p) h = hash_of(h, extra.kind, extra.value.size());
    }
    one.tokens.push_back(token);
    one.contents.push_back(h);
  }
  std::vector<int> ints(const open_sequence& one, std::int64_t first, std::int64_t last) const {
    std::vector<int> ids;
    for (std::int64_t p = first; p < last; ++p) ids.push_back(to_index(one.tokens[to_size(p)]));
    return ids;
  }
  void compute(open_sequence& one, std::int64_t end) {
    for (std::int64_t p = one.num_computed; p < end; ++p) {
      memory_[to_size(to_index(manager_.slot_at(one.id, p)))] = one.contents[to_size(p)];
    }
    one.num_computed = std::max(one.num_computed, end);
  }
  void copy(std::vector<std::uint64_t>& from, int src, std::vector<std::uint64_t>& to, int dst) const {
    std::copy_n(from.begin() + std::ptrdiff_t{src} * how_.block_size, how_.block_size,
                to.begin() + std::ptrdiff_t{dst} * how_.block_size);
  }

  prompt make_prompt() {
    prompt made;
    open_sequence& parts = made.parts;
    parts.document = static_cast<int>(random_.between(0, 23));
    std::int64_t n = random_.one_in(80) ? how_.num_blocks * how_.block_size + random_.between(0, 2)
                                        : random_.between(1, how_.longest);
    if (random_.one_in(4)) n = std::max<std::int64_t>(1, n / how_.block_size) * how_.block_size;  // full blocks only
    if (parts.document % 8 >= 6) {  // images at fixed places of the text
      const auto kind = static_cast<std::uint32_t>(parts.document % 2);
      for (std::int64_t p = 2; p < n; p += 3 * how_.block_size + 1) {
        const std::string& image = images_[to_size(p % 2)];
        parts.extras.push_back({p, kind, std::as_bytes(std::span(image.data(), image.size()))});
        made.twin.extras[p / how_.block_size] +=
            std::to_string(p % how_.block_size) + "," + std::to_string(kind) + "," + image + ";";
      }
    }
    for (std::int64_t p = 0; p < n; ++p) add_token(parts, token_at(parts.document, p));
    made.twin.tokens = ints(parts, 0, n);
    made.twin.scope = scope_text(parts.document);
    made.twin.hint.priority = static_cast<block_level>(random_.one_in(4) ? random_.between(0, 9) : 4);
    made.twin.hint.expires_at = random_.one_in(2) ? clock_ + random_.between(-1, 6) : 0;
    made.view = {
        .tokens = parts.tokens, .scope = scope_of(parts.document), .extras = parts.extras, .retention = made.twin.hint};
    return made;
  }

  // --- calls

  std::string start_one() { return random_.one_in(4) ? allocate_one() : open_one(); }

  std::string allocate_one() {
    open_sequence one;
    one.document = 8 * static_cast<int>(random_.between(0, 2));  // in the default scope
    const std::int64_t n = random_.between(1, how_.longest);
    const std::uint64_t before = digest_sometimes();
    const allocate_result got = manager_.allocate(n);
    const manager_oracle::answer expected = oracle_.allocate(n);
    if (got.status != expected.status) return "allocate answered " + std::string(to_string(got.status));
    if (got.status != alloc_status::ok) return after_refusal(before, true);
    one.id = got.seq;
    one.twin = expected.opened;
    for (std::int64_t p = 0; p < n; ++p) add_token(one, token_at(one.document, p));
    open_.push_back(std::move(one));
    if (random_.one_in(2)) compute(open_.back(), n);
    return compare(open_.back(), 0);
  }

  std::string open_one() {
    prompt asked = make_prompt();
    std::vector<content_key> keys;
    if (how_.key_bits > 0 && random_.one_in(4)) {
      manager_.prefix()->append_keys(asked.view, keys);
      keys.resize(to_size(random_.between(0, static_cast<std::int64_t>(keys.size()))));
      asked.view.keys = keys;
    }
    const auto n = static_cast<std::int64_t>(asked.view.tokens.size());
    const std::int64_t step = random_.one_in(2) ? 0 : random_.between(1, 2 * how_.block_size);
    const std::int64_t promised = random_.one_in(3) ? random_.between(0, how_.num_blocks / 2) : 0;
    const std::int64_t num_new = step == 0 ? random_.between(1, n) : random_.between(1, step);
    const std::uint64_t before = digest_sometimes();
    const admission foretold = manager_.can_open(asked.view, step, promised);
    const manager_oracle::answer admitted = oracle_.can_open(asked.twin, step, promised);
    if (foretold.status != admitted.status) return "can_open answered " + std::string(to_string(foretold.status));
    if (foretold.num_cached_tokens != admitted.num_cached) return "can_open foretells other hits";
    if (sampled_ && manager_.digest() != before) return "can_open changed the state";
    const open_result got = manager_.open(asked.view, num_new);
    const manager_oracle::answer expected = oracle_.open(asked.twin, num_new);
    if (got.status != expected.status) return "open answered " + std::string(to_string(got.status));
    if (foretold.status == alloc_status::ok && got.status != alloc_status::ok)
      return "open refuses whom can_open lets in";
    if (got.status != alloc_status::ok) return after_refusal(before, true);
    if (got.num_cached_tokens != expected.num_cached) return "another number of cached tokens";
    if (got.num_cached_tokens != foretold.num_cached_tokens) return "can_open and open found different numbers";
    if (got.num_cached_tokens >= n) return "nothing is left to compute";
    if (std::string problem = compare_copy(got.has_copy(), got.copy, expected); !problem.empty()) return problem;
    if (got.has_copy()) ++tally_.num_copied_prompts;
    open_sequence one = std::move(asked.parts);
    one.id = got.seq;
    one.twin = expected.opened;
    one.tokens.resize(to_size(manager_.num_tokens(got.seq)));
    one.contents.resize(one.tokens.size());
    one.num_computed = got.num_cached_tokens;
    open_.push_back(std::move(one));
    if (random_.one_in(2)) compute(open_.back(), length(open_.back()));
    return compare(open_.back(), 0);
  }

  std::string compare_copy(bool has_copy, const block_copy& got, const manager_oracle::answer& expected) {
    if (has_copy != expected.copy.has_value()) return "a copy was missed or one too many";
    if (!has_copy) return {};
    if (to_index(got.src) != expected.copy->first || to_index(got.dst) != expected.copy->second) {
      return "the copy names other blocks";
    }
    copy(memory_, to_index(got.src), memory_, to_index(got.dst));
    return {};
  }

  std::string append_one(open_sequence& one) {
    const std::int64_t n = random_.one_in(8) ? random_.between(0, 3 * how_.block_size) : 1;
    const std::int64_t lookahead = random_.one_in(6) ? random_.between(0, 2 * how_.block_size) : 0;
    if (length(one) + n + lookahead > config_.max_seq_len) return {};
    const std::uint64_t before = digest_sometimes();
    const alloc_status foretold = manager_.can_append(one.id, n, lookahead);
    const std::int64_t to_take = manager_.blocks_to_append(one.id, n, lookahead);
    const std::int64_t taken = manager_.stats().num_allocated_blocks;
    if (manager_.has_room(one.id, n + lookahead) && (to_take != 0 || foretold != alloc_status::ok)) return "has_room";
    const append_result got = manager_.append(one.id, n, lookahead);
    const manager_oracle::answer expected = oracle_.append(one.twin, n, lookahead);
    if (got.status != expected.status) return "append answered " + std::string(to_string(got.status));
    if (got.status != foretold) return "can_append and append differ";
    if (got.status == alloc_status::ok && manager_.stats().num_allocated_blocks != taken + to_take) {
      return "append took another number of blocks than blocks_to_append told";
    }
    if (std::string problem = compare_copy(got.has_copy(), got.copy, expected); !problem.empty()) return problem;
    if (got.status != alloc_status::ok) return after_refusal(before);
    const std::int64_t first = length(one);
    for (std::int64_t p = first; p < first + n; ++p) add_token(one, token_at(one.document, p));
    if (random_.one_in(2)) compute(one, length(one));
    return compare(one, first - 1);
  }

  std::string commit_one(open_sequence& one) {
    const std::int64_t done = manager_.num_committed(one.id);
    const std::int64_t room = length(one) - done;
    const std::int64_t n = random_.one_in(2) ? room : random_.between(0, room);
    compute(one, done + n);
    if (random_.one_in(50) || (how_.key_bits == 0 && random_.one_in(2))) {
      manager_.commit(one.id, n);
      oracle_.commit(one.twin, n);
    } else {
      manager_.commit(one.id, std::span(one.tokens).subspan(to_size(done), to_size(n)));
      oracle_.commit(one.twin, ints(one, done, done + n));
    }
    return compare(one, std::min(done, done + n - 1));  // a duplicate may have taken up another block
  }

  std::string fork_one(open_sequence& parent) {
    const std::uint64_t before = digest_sometimes();
    const allocate_result got = manager_.fork(parent.id);
    const manager_oracle::answer expected = oracle_.fork(parent.twin);
    if (got.status != expected.status) return "fork answered " + std::string(to_string(got.status));
    if (got.status != alloc_status::ok) return after_refusal(before, true);
    open_sequence child = parent;
    child.id = got.seq;
    child.twin = expected.opened;
    open_.push_back(std::move(child));
    return compare(open_.back(), 0);
  }

  std::string truncate_one(open_sequence& one) {
    const std::int64_t before_length = length(one);
    const std::int64_t n = random_.one_in(3) ? random_.between(0, before_length)
                                             : std::max<std::int64_t>(0, before_length - random_.between(0, 6));
    if (!oracle_.can_truncate(one.twin, n)) {
      const std::uint64_t before = digest_sometimes();
      try {
        manager_.truncate(one.id, n);
        return "truncate into what the window gave back was accepted";
      } catch (const error& refused) {
        return refused.code() == errc::invalid_argument ? after_refusal(before)
                                                        : "truncate was refused with another code";
      }
    }
    manager_.truncate(one.id, n);
    oracle_.truncate(one.twin, n);
    one.tokens.resize(to_size(n));
    one.contents.resize(to_size(n));
    one.num_computed = std::min(one.num_computed, n);
    return compare(one, n - 1);
  }

  std::string free_one() {
    if (open_.empty()) return {};
    open_sequence& one = any();
    std::vector<late_access> accesses;
    if (!fences_.empty() && !one.swapped) accesses = accesses_of(one);
    manager_.free(one.id);
    leave_in_flight(accesses);
    oracle_.free(one.twin);
    const seq_id stale = one.id;
    if (&one != &open_.back()) std::swap(one, open_.back());
    open_.pop_back();
    return manager_.contains(stale) ? "a freed handle is still valid" : "";
  }

  /// Up to three different sequences on one side.
  std::vector<std::size_t> some(bool swapped) {
    std::vector<std::size_t> chosen;
    const std::size_t begin = to_size(random_.between(0, static_cast<std::int64_t>(open_.size()) - 1));
    const std::size_t most = to_size(random_.between(1, 3));
    for (std::size_t i = 0; i < open_.size() && chosen.size() < most; ++i) {
      const std::size_t at = (begin + i) % open_.size();
      if (open_[at].swapped == swapped) chosen.push_back(at);
    }
    return chosen;
  }

  std::string swap_out_some() { return swap(some(false), true); }
  std::string swap_in_some() { return swap(some(true), false); }
  std::string swap(const std::vector<std::size_t>& chosen, bool out) {
    std::vector<seq_id> seqs;
    std::vector<manager_oracle::handle> twins;
    for (const std::size_t at : chosen) {
      seqs.push_back(open_[at].id);
      twins.push_back(open_[at].twin);
    }
    std::vector<block_copy> copies{{block_id{1}, block_id{2}}};  // pairs are appended
    std::vector<manager_oracle::pair> expected;
    const std::uint64_t before = digest_sometimes();
    if (!out && manager_.blocks_to_swap_in(seqs) != oracle_.blocks_to_swap_in(twins)) return "blocks_to_swap_in";
    const alloc_status got = out ? manager_.swap_out(seqs, copies) : manager_.swap_in(seqs, copies);
    const alloc_status wanted = out ? oracle_.swap_out(twins, expected) : oracle_.swap_in(twins, expected);
    const std::string name = out ? "swap_out" : "swap_in";
    if (got != wanted) return name + " answered " + std::string(to_string(got));
    if (copies.size() != expected.size() + 1 || copies[0].src != block_id{1}) return name + " copies another number";
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const auto [src, dst] = expected[i];
      if (to_index(copies[i + 1].src) != src || to_index(copies[i + 1].dst) != dst) return name + " names other blocks";
      copy(out ? memory_ : host_memory_, src, out ? host_memory_ : memory_, dst);
    }
    if (got != alloc_status::ok) return after_refusal(before);
    if (random_.one_in(30)) return fail_swap(chosen, std::span(copies).subspan(1), expected, out);
    for (const std::size_t at : chosen) {
      open_[at].swapped = out;
      if (manager_.is_swapped_out(open_[at].id) != out) return "is_swapped_out";
      if (std::string problem = compare(open_[at], 0); !problem.empty()) return name + ": " + problem;
    }
    return {};
  }

  /// The copies went wrong: what they were to fill holds anything, and whose it was ends.
  std::string fail_swap(std::vector<std::size_t> chosen, std::span<const block_copy> copies,
                        const std::vector<manager_oracle::pair>& expected, bool out) {
    for (const block_copy& one : copies) {
      std::vector<std::uint64_t>& memory = out ? host_memory_ : memory_;
      std::fill_n(memory.begin() + std::ptrdiff_t{to_index(one.dst)} * how_.block_size, how_.block_size,
                  random_.next());
    }
    const std::span<const block_copy> none;
    manager_.forget_copies(out ? copies : none, out ? none : copies);
    oracle_.forget_copies(expected, out);
    ++tally_.num_failed_swaps;
    std::sort(chosen.rbegin(), chosen.rend());
    for (const std::size_t at : chosen) {
      manager_.free(open_[at].id);
      oracle_.free(open_[at].twin);
      if (at + 1 != open_.size()) std::swap(open_[at], open_.back());
      open_.pop_back();
    }
    return {};
  }

  /// A step in flight goes on writing the uncommitted positions of a sequence that ends, and reading all of them.
  struct late_access {
    std::int64_t slot;
    std::uint64_t content;
    bool writes;
    int num_users;  ///< of the block, so far
  };
  std::vector<late_access> accesses_of(const open_sequence& one) {
    std::vector<late_access> accesses;
    const std::int64_t done = manager_.num_committed(one.id);
    for (std::int64_t p = 0; p < length(one); ++p) {
      const std::int64_t slot = to_index(manager_.slot_at(one.id, p));
      if (slot < 0 || (p < done && p >= one.num_computed)) continue;
      accesses.push_back({slot, one.contents[to_size(p)], p >= done, num_users_[to_size(slot / how_.block_size)]});
    }
    return accesses;
  }
  [[nodiscard]] bool waits_for_fence(std::int64_t slot) const {
    const block_id block{static_cast<std::int32_t>(slot / how_.block_size)};
    return manager_.pool().num_refs(block) == 0 && !manager_.pool().is_free(block);
  }
  void leave_in_flight(const std::vector<late_access>& accesses) {
    for (const late_access& one : accesses) {
      if (waits_for_fence(one.slot)) in_flight_.back().push_back(one);
    }
  }
  /// What the step of the oldest fence still had to do, done at the last moment.
  std::string finish_oldest() {
    const std::vector<late_access> accesses = std::move(in_flight_.front());
    in_flight_.erase(in_flight_.begin());
    for (const late_access& one : accesses) {
      if (one.writes) {
        memory_[to_size(one.slot)] = one.content;
      } else if (num_users_[to_size(one.slot / how_.block_size)] == one.num_users &&
                 memory_[to_size(one.slot)] != one.content) {
        return "a block that nobody took up was written while a step in flight could read it";
      }
    }
    return {};
  }

  std::string fence_or_retire() {
    if (!fences_.empty() && random_.between(0, 3) < static_cast<std::int64_t>(fences_.size())) return retire_one();
    fences_.push_back(manager_.open_fence());
    in_flight_.emplace_back();
    const std::int64_t number = oracle_.open_fence();
    return static_cast<std::int64_t>(fences_.back()) == number ? "" : "another number of a fence";
  }
  std::string retire_one() {
    tally_.num_fenced += manager_.pool().num_fenced();
    if (std::string problem = finish_oldest(); !problem.empty()) return problem;
    manager_.retire(fences_.front());
    oracle_.retire();
    fences_.erase(fences_.begin());
    return manager_.pool().num_fenced() == oracle_.pool().num_waiting() ? "" : "number of fenced blocks";
  }

  std::string tend_cache() {
    if (random_.one_in(40)) {
      const std::uint64_t before = digest_sometimes();
      const bool done = manager_.reset_prefix_cache();
      if (done != oracle_.reset_prefix_cache()) return "reset answered otherwise";
      if (!done) return after_refusal(before);
      ++tally_.num_resets;
      return {};
    }
    clock_ += random_.between(0, 2);
    manager_.advance_clock(clock_);
    oracle_.advance_clock(clock_);
    return replay_events();
  }

  std::string ask() {
    const std::int64_t n = random_.between(1, how_.num_blocks * how_.block_size + how_.block_size);
    const std::int64_t step = random_.between(0, 3 * how_.block_size);
    const std::int64_t promised = random_.one_in(2) ? random_.between(0, how_.num_blocks) : 0;
    if (n > config_.max_seq_len) return {};
    return manager_.can_allocate(n, step, promised) == oracle_.can_allocate(n, step, promised) ? ""
                                                                                               : "can_allocate differs";
  }

  // --- comparing

  /// The positions from `first` on: block, slot and contents.
  std::string compare(const open_sequence& one, std::int64_t first) {
    const auto& expected = oracle_.sequences().at(one.twin);
    if (manager_.num_tokens(one.id) != expected.num_tokens) return "num_tokens";
    if (manager_.num_committed(one.id) != expected.num_committed) return "num_committed";
    if (manager_.num_table_blocks(one.id) != static_cast<std::int64_t>(expected.blocks.size())) return "table size";
    if (expected.num_tokens != length(one)) return "the test lost count";
    const std::vector<std::uint64_t>& memory = one.swapped ? host_memory_ : memory_;
    for (std::int64_t p = std::max<std::int64_t>(first, 0); p < expected.num_tokens; ++p) {
      const int block = expected.blocks[to_size(p / config_.block_size)];
      const std::int64_t slot =
          block < 0 ? to_index(no_slot) : std::int64_t{block} * config_.block_size + p % config_.block_size;
      if (!one.swapped && block >= 0) ++num_users_[to_size(block)];
      if (!one.swapped && to_index(manager_.slot_at(one.id, p)) != slot) return "slot of position " + std::to_string(p);
      if (block >= 0 && p < one.num_computed && memory[to_size(slot)] != one.contents[to_size(p)]) {
        return "contents of position " + std::to_string(p) + " are another text's";
      }
    }
    return {};
  }

  std::string compare_everything() {
    if (std::string problem = manager_.check(); !problem.empty()) return "check(): " + problem;
    for (const open_sequence& one : open_) {
      if (std::string problem = compare(one, 0); !problem.empty()) return problem;
      const auto& expected = oracle_.sequences().at(one.twin).blocks;
      if (manager_.num_released_blocks(one.id) != std::count(expected.begin(), expected.end(), -1))
        return "first block";
      for (std::size_t i = 0; i < expected.size(); ++i) {
        if (to_index(manager_.block_at(one.id, static_cast<std::int64_t>(i))) != expected[i]) return "table entry";
      }
    }
    std::vector<block_id> order(to_size(config_.num_blocks));
    order.resize(to_size(manager_.pool().peek_free(order)));
    const std::vector<int> expected = oracle_.pool().order();
    if (order.size() != expected.size()) return "length of the free queue";
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (to_index(order[i]) != expected[i]) return "eviction order at " + std::to_string(i);
    }
    if (!(manager_.stats() == oracle_.stats())) return "statistics";
    if (how_.key_bits == 0) return {};
    if (!(manager_.prefix()->stats() == oracle_.prefix().stats())) return "statistics of the prefix cache";
    return replay_events();
  }

  std::string replay_events() {
    std::vector<cache_event> events;
    manager_.drain_events(events);
    for (const int b : oracle_.prefix().held()) {
      if (!manager_.prefix()->holds(block_id{b})) return "a block is not held";
    }
    return events_.add(events, *manager_.prefix(), oracle_.prefix().held());
  }

  manager_shape how_;
  kv_cache_config config_;
  kv_cache_manager manager_;
  manager_oracle oracle_;
  random_source random_;
  std::vector<std::uint64_t> memory_;       // [num_blocks · block_size]
  std::vector<std::uint64_t> host_memory_;  // [num_host_blocks · block_size]
  std::vector<std::string> images_;
  std::vector<open_sequence> open_;
  std::vector<fence_id> fences_;
  std::vector<std::vector<late_access>> in_flight_;  // by fence
  std::vector<int> num_users_;                       // [num_blocks], looks at a block in somebody's table
  event_replay events_;
  std::int64_t clock_ = 1;
  bool sampled_ = false;
  manager_tally tally_;
};

}  // namespace bifolio::test
