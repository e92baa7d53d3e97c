// SPDX-License-Identifier: Apache-2.0
/// The prefix cache in long random mixes against one that spells all contents out, also with keys of 8 bits and 1 bit,
/// where nearly everything collides: what is found, duplicates, eviction order, statistics, events.

#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/prefix_cache.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/cache_logic_helpers.hpp"
#include "reference/prefix_oracle.hpp"
#include "support/random.hpp"
#include "support/token_ids.hpp"

namespace bifolio::test {
namespace {

struct mix {
  int block_size;
  int num_blocks;
  int key_bits;
  int alphabet;               ///< tokens are 0 … alphabet − 1
  bool in_order;              ///< release tail first, as the manager does; else by single blocks in any order
  double small_fraction = 0;  ///< of S3-FIFO; 0: the default policy
};

class random_run {
 public:
  random_run(const mix& how, std::uint64_t seed)
      : how_(how),
        pool_(how.num_blocks),
        policy_(how.small_fraction > 0 ? make_s3_fifo_policy(how.small_fraction) : nullptr),
        cache_(pool_, {.block_size = how.block_size,
                       .seed = hash_seed{seed, 2},
                       .key_bits = how.key_bits,
                       .record_events = true,
                       .policy = policy_.get()}),
        pool_oracle_(how.num_blocks),
        policy_oracle_(pool_oracle_, how.small_fraction),
        oracle_(pool_oracle_, how.block_size, policy_ ? &policy_oracle_ : nullptr),
        random_(seed) {
    scopes_ = {{"", 0}, {"salt", 0}, {"salt", 7}};
  }

  std::string run(int num_operations) {
    for (int i = 0; i < num_operations; ++i) {
      std::string problem = one_operation();
      if (problem.empty()) problem = compare(i % 256 == 255);
      if (!problem.empty()) return "operation " + std::to_string(i) + ": " + problem;
    }
    while (!holders_.empty()) release_one();
    if (!cache_.reset() || !oracle_.reset()) return "reset was refused";
    return compare(true);
  }
  [[nodiscard]] const prefix_stats& stats() const { return cache_.stats(); }
  [[nodiscard]] const s3_fifo_oracle& policy() const { return policy_oracle_; }
  [[nodiscard]] std::uint64_t digest() const { return hash_of(pool_.digest(), cache_.digest()); }

 private:
  struct holder {
    std::vector<block_id> blocks;
  };
  using texts = prefix_oracle::extra_texts;

  std::string one_operation() {
    switch (random_.between(0, 15)) {
      case 0:
        if (holders_.size() > 1 && !random_.one_in(4)) return release_one();
        cache_.advance_clock(++clock_);
        oracle_.advance_clock(clock_);
        return {};
      case 1:
        if (!random_.one_in(40)) return forget_one();
        return cache_.reset() == oracle_.reset() ? "" : "reset answered otherwise";
      case 2:
      case 3:
      case 4:
      case 5:
      case 6:
      case 7:
        return release_one();
      default:
        return open_one();
    }
  }

  std::string open_one() {
    const auto size = static_cast<std::size_t>(how_.block_size);
    const std::size_t which = static_cast<std::size_t>(random_.between(0, 2));
    const prefix_scope& scope = scopes_[which];
    std::vector<int> ids;
    for (std::int64_t i = random_.between(0, 6 * how_.block_size); i > 0; --i) {
      ids.push_back(random_.one_in(3) ? static_cast<int>(random_.between(0, how_.alphabet - 1)) : 0);
    }
    std::vector<extra_key> extras;
    texts extra_texts;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (!random_.one_in(12)) continue;
      const auto kind = static_cast<std::uint32_t>(random_.between(0, 1));
      extras.push_back({static_cast<std::int64_t>(i), kind, {}});
      extra_texts[static_cast<std::int64_t>(i / size)] += std::to_string(i) + ":" + std::to_string(kind) + " ";
    }
    const std::vector<token_id> tokens = to_ids(ids);
    const std::size_t num_full = ids.size() / size;
    const retention_hint hint{static_cast<block_level>(random_.between(0, 9)),
                              random_.one_in(2) ? clock_ + random_.between(0, 9) : 0};

    const scope_id handle = cache_.acquire_scope(scope);
    std::vector<block_id> blocks(num_full);
    // Now and then nobody looks up what is there, and the same is computed again.
    std::span<block_id> out = random_.one_in(5) ? std::span<block_id>() : std::span(blocks);
    const prefix_match match = cache_.match_and_pin({.tokens = tokens, .scope = scope, .extras = extras}, out);
    const std::string scope_text = std::string(scope.salt) + std::to_string(scope.adapter_id);
    const prefix_oracle::found expected =
        oracle_.match(scope_text, out.empty() ? std::vector<int>() : ids, extra_texts);
    const auto num_hits = static_cast<std::size_t>(match.num_blocks);
    if (num_hits != expected.blocks.size()) {
      return "found " + std::to_string(num_hits) + " instead of " + std::to_string(expected.blocks.size());
    }
    for (std::size_t i = 0; i < num_hits; ++i) {
      if (to_index(blocks[i]) != expected.blocks[i]) return "found another block";
      pool_oracle_.add_user(expected.blocks[i]);
      oracle_.hit(expected.blocks[i]);
    }
    oracle_.count_lookup(num_full, num_hits);
    blocks.resize(num_hits);
    prefix_chain end = match.end;
    prefix_oracle::node node = expected.end;
    cache_.reserve_events(2 * static_cast<std::int64_t>(num_full));
    for (std::size_t i = num_hits; i < num_full; ++i) {
      const block_id block = cache_.allocate_one();
      if ((block == invalid_block) != (pool_oracle_.num_free() == 0)) return "allocated a block or none";
      if (block == invalid_block) break;
      if (to_index(block) != oracle_.take()) return "allocated another block";
      blocks.push_back(block);
      std::vector<extra_key> own;
      const auto first = static_cast<std::int64_t>(i * size);
      for (const extra_key& extra : extras) {
        if (extra.position >= first && extra.position < first + how_.block_size) own.push_back(extra);
      }
      const extras_id extra = cache_.acquire_extras(own, first);
      const publish_result got = cache_.publish(block, end, std::span(tokens).subspan(i * size, size),
                                                static_cast<std::int64_t>(i), hint, extra);
      cache_.release_extras(extra);
      const prefix_oracle::published wanted =
          oracle_.publish(to_index(block), node, &ids[i * size], extra_texts, i, hint);
      if (to_index(got.duplicate_of) != wanted.duplicate_of) return "a duplicate was missed or invented";
      end = got.end;
      node = wanted.end;
    }
    cache_.release_scope(handle);
    if (!blocks.empty()) holders_.push_back({blocks});
    return {};
  }

  std::string release_one() {
    if (holders_.empty()) return {};
    holder& one =
        holders_[static_cast<std::size_t>(random_.between(0, static_cast<std::int64_t>(holders_.size()) - 1))];
    if (how_.in_order) {
      pool_.release(one.blocks);
      for (std::size_t i = one.blocks.size(); i-- > 0;) pool_oracle_.drop(to_index(one.blocks[i]), true);
      one.blocks.clear();
    } else {
      const auto at = random_.between(0, static_cast<std::int64_t>(one.blocks.size()) - 1);
      const block_id block = one.blocks[static_cast<std::size_t>(at)];
      const bool to_back = random_.one_in(2);
      pool_.release(block, to_back ? reuse_order::last : reuse_order::first);
      pool_oracle_.drop(to_index(block), to_back);
      one.blocks.erase(one.blocks.begin() + at);
    }
    if (one.blocks.empty()) {
      std::swap(one, holders_.back());
      holders_.pop_back();
    }
    return {};
  }

  std::string forget_one() {
    const auto block = static_cast<int>(random_.between(0, how_.num_blocks - 1));
    cache_.reserve_events(1);
    cache_.unregister(block_id{block});
    oracle_.unregister(block);
    return {};
  }

  std::string compare(bool everything) {
    if (!(cache_.stats() == oracle_.stats())) return "statistics";
    if (pool_.num_free() != pool_oracle_.num_free()) return "number of free blocks";
    if (!everything) return {};
    if (std::string problem = pool_.check(); !problem.empty()) return problem;
    if (std::string problem = cache_.check(); !problem.empty()) return problem;
    if (free_order(pool_) != pool_oracle_.order()) return "eviction order";
    for (int b = 0; b < how_.num_blocks; ++b) {
      if (cache_.holds(block_id{b}) != oracle_.holds(b)) return "block " + std::to_string(b) + " is held or not";
      if (!oracle_.holds(b)) continue;
      const std::vector<token_id> tokens = to_ids(oracle_.tokens_of(b));
      if (!std::ranges::equal(cache_.tokens_of(block_id{b}), tokens)) return "tokens of block " + std::to_string(b);
    }
    return replay_events();
  }

  std::string replay_events() {
    std::vector<cache_event> events;
    cache_.drain_events(events);
    return events_.add(events, cache_, oracle_.held());
  }

  mix how_;
  block_pool pool_;
  std::unique_ptr<eviction_policy> policy_;
  prefix_cache cache_;
  pool_oracle pool_oracle_;
  s3_fifo_oracle policy_oracle_;
  prefix_oracle oracle_;
  random_source random_;
  std::vector<prefix_scope> scopes_;
  std::vector<holder> holders_;
  event_replay events_;
  std::int64_t clock_ = 0;
};

TEST_CASE("random mixes find exactly what a cache without hashing finds, whatever collides") {
  MESSAGE(seed_note());
  const mix mixes[] = {
      {1, 20, 128, 3, true}, {2, 60, 128, 3, true}, {4, 200, 128, 2, false},
      {3, 40, 8, 3, true},   {2, 100, 8, 4, false}, {1, 30, 1, 9, true},
      {2, 60, 1, 3, false},  {16, 50, 4, 2, true},  {1, 10, 128, 60, false},
  };
  prefix_stats all;
  for (std::size_t i = 0; i < std::size(mixes); ++i) {
    CAPTURE(i);
    random_run run(mixes[i], hash_of(test_seed(), i));
    CHECK(run.run(50000) == "");
    all.num_hit_blocks += run.stats().num_hit_blocks;
    all.num_evicted_blocks += run.stats().num_evicted_blocks;
    all.num_duplicate_blocks += run.stats().num_duplicate_blocks;
  }
  // The mix is worth its name.
  CHECK(all.num_hit_blocks > 60000);
  CHECK(all.num_evicted_blocks > 30000);
  CHECK(all.num_duplicate_blocks > 5000);
}

TEST_CASE("random mixes under S3-FIFO evict exactly what a naive one evicts, and again the same when replayed") {
  MESSAGE(seed_note());
  const mix mixes[] = {
      {1, 20, 128, 3, true, 0.1},   {2, 60, 128, 3, true, 0.1},    {2, 60, 128, 3, true, 0.5},
      {4, 200, 128, 2, false, 0.1}, {1, 10, 128, 60, false, 0.01}, {16, 50, 128, 2, true, 0.3},
      {1, 400, 128, 5, true, 0.1},
  };
  prefix_stats all;
  int num_promoted = 0, num_reinserted = 0, num_parked = 0;
  for (std::size_t i = 0; i < std::size(mixes); ++i) {
    CAPTURE(i);
    random_run run(mixes[i], hash_of(test_seed(), 100 + i));
    CHECK(run.run(20000) == "");
    random_run again(mixes[i], hash_of(test_seed(), 100 + i));
    CHECK(again.run(20000) == "");
    CHECK(run.digest() == again.digest());
    all.num_hit_blocks += run.stats().num_hit_blocks;
    all.num_evicted_blocks += run.stats().num_evicted_blocks;
    num_promoted += run.policy().num_promoted;
    num_reinserted += run.policy().num_reinserted;
    num_parked += run.policy().num_parked;
  }
  CHECK(all.num_hit_blocks > 10000);
  CHECK(all.num_evicted_blocks > 10000);
  CHECK(num_promoted > 500);
  CHECK(num_reinserted > 500);
  CHECK(num_parked > 500);
}

}  // namespace
}  // namespace bifolio::test
