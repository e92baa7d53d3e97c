// SPDX-License-Identifier: Apache-2.0
/// Pool, tables and manager against the oracle of maps and vectors, under long random mixes of all operations. A
/// simulated cache memory holds one number per slot: every append writes through the manager's slots, every reported
/// copy is carried out, and every token of every sequence must read back as it was written.

#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/kv_cache_manager.hpp>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "reference/manager_oracle.hpp"
#include "support/random.hpp"

namespace bifolio::test {
namespace {

struct shape {
  std::int32_t block_size;
  std::int64_t num_blocks;
  std::int32_t sliding_window;
  std::int32_t max_sequences;
  std::int64_t longest;  ///< tokens of a fresh sequence
  int percent_full;      ///< above this the run opens no new sequences; 100: the pool runs dry all the time
};

class random_run {
 public:
  random_run(const shape& how, std::uint64_t seed)
      : how_(how),
        config_{.block_size = how.block_size,
                .num_blocks = how.num_blocks,
                .watermark = 0.05,
                .sliding_window = how.sliding_window,
                .max_sequences = how.max_sequences,
                .max_seq_len = 1 << 16},
        manager_(config_),
        oracle_(config_),
        random_(seed),
        memory_(static_cast<std::size_t>(how.num_blocks * how.block_size), 0) {}

  /// The first difference as text; empty when there was none.
  std::string run(std::int64_t num_operations) {
    for (std::int64_t i = 0; i < num_operations; ++i) {
      std::string problem = one_operation();
      if (problem.empty() && oracle_.free_blocks().size() != static_cast<std::size_t>(manager_.num_free_blocks())) {
        problem = "number of free blocks";
      }
      if (problem.empty() && i % 8192 == 8191) problem = compare_everything();
      if (!problem.empty()) return "operation " + std::to_string(i) + ": " + problem;
    }
    std::string problem = compare_everything();
    while (problem.empty() && !open_.empty()) problem = free_one();
    if (problem.empty()) problem = compare_everything();
    if (problem.empty() && manager_.num_free_blocks() != config_.num_blocks) problem = "blocks were lost";
    return problem;
  }

  [[nodiscard]] cache_stats stats() const { return manager_.stats(); }

 private:
  struct open_sequence {
    seq_id id;
    manager_oracle::handle twin;
    std::vector<std::uint64_t> tokens;  ///< what was written at each position
  };

  std::string one_operation() {
    const std::int64_t used = config_.num_blocks - manager_.num_free_blocks();
    const bool crowded = used * 100 > config_.num_blocks * how_.percent_full;
    if (open_.empty()) return allocate_one();
    switch (random_.between(0, 19)) {
      case 0:
      case 1:
      case 2:
        return crowded ? free_one() : allocate_one();
      case 3:
      case 4:
        return random_.one_in(3) ? free_one() : fork_one();
      case 5:
      case 6:
        return truncate_one();
      case 7:
        return ask();
      case 8:
      case 9:
      case 10:
        return commit_one();
      default:
        return append_one();
    }
  }

  open_sequence& any() {
    return open_[static_cast<std::size_t>(random_.between(0, static_cast<std::int64_t>(open_.size()) - 1))];
  }

  void write(open_sequence& one, std::int64_t first) {
    for (std::int64_t p = first; p < static_cast<std::int64_t>(one.tokens.size()); ++p) {
      one.tokens[static_cast<std::size_t>(p)] = ++last_token_;
      memory_[static_cast<std::size_t>(to_index(manager_.slot_at(one.id, p)))] = last_token_;
    }
  }

  std::string allocate_one() {
    const std::int64_t n = random_.one_in(50) ? how_.num_blocks * how_.block_size + random_.between(0, 2)
                                              : random_.between(1, how_.longest);
    const allocate_result got = manager_.allocate(n);
    const manager_oracle::answer expected = oracle_.allocate(n);
    if (got.status != expected.status) return "allocate answered " + std::string(to_string(got.status));
    if (got.status != alloc_status::ok) return free_one();  // a full pool: make room now and then
    open_.push_back({got.seq, expected.opened, std::vector<std::uint64_t>(static_cast<std::size_t>(n))});
    write(open_.back(), 0);
    return compare(open_.back(), 0);
  }

  std::string append_one() {
    open_sequence& one = any();
    const std::int64_t n = random_.one_in(8) ? random_.between(0, 3 * how_.block_size) : 1;
    const std::int64_t lookahead = random_.one_in(6) ? random_.between(0, 2 * how_.block_size) : 0;
    if (static_cast<std::int64_t>(one.tokens.size()) + n + lookahead > config_.max_seq_len) return {};
    const alloc_status foretold = manager_.can_append(one.id, n, lookahead);
    const append_result got = manager_.append(one.id, n, lookahead);
    const manager_oracle::answer expected = oracle_.append(one.twin, n, lookahead);
    if (got.status != expected.status) return "append answered " + std::string(to_string(got.status));
    if (got.status != foretold) return "can_append and append differ";
    if (got.has_copy() != expected.copy.has_value()) return "a copy was missed or one too many";
    if (got.has_copy()) {
      if (to_index(got.copy.src) != expected.copy->first || to_index(got.copy.dst) != expected.copy->second) {
        return "the copy names other blocks";
      }
      const auto size = static_cast<std::size_t>(config_.block_size);
      const auto src = memory_.begin() + got_offset(got.copy.src);
      std::copy(src, src + static_cast<std::ptrdiff_t>(size), memory_.begin() + got_offset(got.copy.dst));
    }
    if (got.status != alloc_status::ok) return {};
    const auto first = static_cast<std::int64_t>(one.tokens.size());
    one.tokens.resize(one.tokens.size() + static_cast<std::size_t>(n));
    write(one, first);
    return compare(one, first - 1);
  }

  std::string commit_one() {
    open_sequence& one = any();
    const std::int64_t room = manager_.num_tokens(one.id) - manager_.num_committed(one.id);
    const std::int64_t n = random_.one_in(2) ? room : random_.between(0, room);
    manager_.commit(one.id, n);
    oracle_.commit(one.twin, n);
    return {};
  }

  std::string fork_one() {
    const std::size_t parent =
        static_cast<std::size_t>(random_.between(0, static_cast<std::int64_t>(open_.size()) - 1));
    const allocate_result got = manager_.fork(open_[parent].id);
    const manager_oracle::answer expected = oracle_.fork(open_[parent].twin);
    if (got.status != expected.status) return "fork answered " + std::string(to_string(got.status));
    if (got.status != alloc_status::ok) return free_one();
    std::vector<std::uint64_t> tokens = open_[parent].tokens;
    open_.push_back({got.seq, expected.opened, std::move(tokens)});
    return {};
  }

  std::string truncate_one() {
    open_sequence& one = any();
    const auto length = static_cast<std::int64_t>(one.tokens.size());
    const std::int64_t n =
        random_.one_in(3) ? random_.between(0, length) : std::max<std::int64_t>(0, length - random_.between(0, 6));
    if (!oracle_.can_truncate(one.twin, n)) {
      try {
        manager_.truncate(one.id, n);
        return "truncate into what the window gave back was accepted";
      } catch (const error& refused) {
        return refused.code() == errc::invalid_argument ? "" : "truncate was refused with another code";
      }
    }
    manager_.truncate(one.id, n);
    oracle_.truncate(one.twin, n);
    one.tokens.resize(static_cast<std::size_t>(n));
    return compare(one, n - 1);
  }

  std::string free_one() {
    if (open_.empty()) return {};
    open_sequence& one = any();
    manager_.free(one.id);
    oracle_.free(one.twin);
    const seq_id stale = one.id;
    std::swap(one, open_.back());
    open_.pop_back();
    return manager_.contains(stale) ? "a freed handle is still valid" : "";
  }

  std::string ask() {
    const std::int64_t n = random_.between(1, how_.num_blocks * how_.block_size + how_.block_size);
    const std::int64_t step = random_.between(0, 3 * how_.block_size);
    if (n > config_.max_seq_len) return {};
    return manager_.can_allocate(n, step) == oracle_.can_allocate(n, step) ? "" : "can_allocate differs";
  }

  [[nodiscard]] std::ptrdiff_t got_offset(block_id block) const {
    return static_cast<std::ptrdiff_t>(to_index(block)) * config_.block_size;
  }

  /// The positions from `first` on: block, slot and contents.
  std::string compare(const open_sequence& one, std::int64_t first) {
    const auto& expected = oracle_.sequences().at(one.twin);
    if (manager_.num_tokens(one.id) != expected.num_tokens) return "num_tokens";
    if (manager_.num_committed(one.id) != expected.num_committed) return "num_committed";
    if (manager_.num_table_blocks(one.id) != static_cast<std::int64_t>(expected.blocks.size())) return "table size";
    for (std::int64_t p = std::max<std::int64_t>(first, 0); p < expected.num_tokens; ++p) {
      const int block = expected.blocks[static_cast<std::size_t>(p / config_.block_size)];
      const std::int64_t slot = to_index(manager_.slot_at(one.id, p));
      if (block < 0 ? slot >= 0 : slot != std::int64_t{block} * config_.block_size + p % config_.block_size) {
        return "slot of position " + std::to_string(p);
      }
      if (slot >= 0 && memory_[static_cast<std::size_t>(slot)] != one.tokens[static_cast<std::size_t>(p)]) {
        return "contents of position " + std::to_string(p) + " were overwritten";
      }
    }
    return {};
  }

  std::string compare_everything() {
    if (std::string problem = manager_.check(); !problem.empty()) return "check(): " + problem;
    for (const open_sequence& one : open_) {
      if (std::string problem = compare(one, 0); !problem.empty()) return problem;
      const auto& expected = oracle_.sequences().at(one.twin).blocks;
      for (std::size_t i = 0; i < expected.size(); ++i) {
        if (to_index(manager_.block_at(one.id, static_cast<std::int64_t>(i))) != expected[i]) return "table entry";
      }
    }
    std::vector<block_id> order(static_cast<std::size_t>(config_.num_blocks));
    const auto count = static_cast<std::size_t>(manager_.pool().peek_free(order));
    if (count != oracle_.free_blocks().size()) return "length of the free queue";
    for (std::size_t i = 0; i < count; ++i) {
      if (to_index(order[i]) != oracle_.free_blocks()[i]) return "eviction order at " + std::to_string(i);
    }
    std::int64_t users = 0;
    for (const int n : oracle_.users()) users += n;
    const cache_stats stats = manager_.stats();
    if (stats.num_table_entries != users) return "num_table_entries";
    if (stats.num_sequences != static_cast<std::int64_t>(open_.size())) return "num_sequences";
    return {};
  }

  shape how_;
  kv_cache_config config_;
  kv_cache_manager manager_;
  manager_oracle oracle_;
  random_source random_;
  std::vector<std::uint64_t> memory_;  // [num_blocks · block_size]
  std::vector<open_sequence> open_;
  std::uint64_t last_token_ = 0;
};

TEST_CASE("two million random operations give the oracle's blocks, answers, contents and eviction order") {
  constexpr shape shapes[] = {
      {1, 1, 0, 3, 2, 90},          {1, 7, 0, 8, 8, 90},        {4, 24, 0, 8, 40, 90},     {16, 64, 0, 16, 300, 80},
      {5, 40, 0, 300, 30, 100},     {1, 600, 0, 12, 300, 80},   {2, 900, 0, 20, 500, 100}, {1, 2000, 0, 24, 900, 60},
      {3, 200, 0, 64, 60, 100},     {4, 30, 9, 8, 60, 90},      {1, 300, 5, 16, 200, 100}, {2, 700, 150, 12, 900, 90},
      {1, 1500, 400, 16, 1000, 80}, {16, 100, 64, 32, 400, 90}, {1, 1, 1, 2, 3, 100},      {7, 50, 1, 16, 80, 100},
  };
  constexpr std::int64_t operations_each = 130000;
  static_assert(operations_each * static_cast<std::int64_t>(std::size(shapes)) >= 2000000);
  MESSAGE(seed_note());
  std::int64_t forks = 0, copies = 0, taken = 0;
  for (std::size_t i = 0; i < std::size(shapes); ++i) {
    CAPTURE(i);
    random_run run(shapes[i], hash_of(test_seed(), i));
    CHECK(run.run(operations_each) == "");
    forks += run.stats().num_forks;
    copies += run.stats().num_copied_blocks;
    taken += run.stats().num_allocated_blocks;
  }
  // The mix is worth its name.
  CHECK(forks > 50000);
  CHECK(copies > 20000);
  CHECK(taken > 1000000);
}

}  // namespace
}  // namespace bifolio::test
