// SPDX-License-Identifier: Apache-2.0
/// The prefix cache by itself: each call with its contract.

#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/error.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/prefix_cache.hpp>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "common/cache/interned_bytes.hpp"
#include "common/cache_logic_helpers.hpp"
#include "support/token_ids.hpp"

namespace bifolio::test {
namespace {

std::vector<int> counting(int count, int from = 0) {
  std::vector<int> ids;
  for (int i = 0; i < count; ++i) ids.push_back(from + i);
  return ids;
}

struct world {
  block_pool pool;
  prefix_cache cache;
  explicit world(std::int64_t num_blocks, prefix_cache_config config = {.block_size = 2})
      : pool(num_blocks), cache(pool, config) {}

  /// Allocates and publishes the blocks of `ids` from the `skip`-th on after `after`; the caller holds them.
  std::vector<block_id> publish(const std::vector<int>& ids, prefix_chain after, std::size_t skip = 0,
                                const retention_hint& hint = {}) {
    const auto size = static_cast<std::size_t>(cache.block_size());
    std::vector<block_id> blocks(ids.size() / size - skip);
    cache.reserve_events(2 * static_cast<std::int64_t>(blocks.size()));
    REQUIRE(cache.allocate(blocks) == alloc_status::ok);
    const std::vector<token_id> tokens = to_ids(ids);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const auto row = std::span(tokens).subspan((skip + i) * size, size);
      after = cache.publish(blocks[i], after, row, static_cast<std::int64_t>(skip + i), hint).end;
    }
    return blocks;
  }
  std::vector<block_id> publish(const std::vector<int>& ids, const retention_hint& hint = {}) {
    return publish(ids, cache.root(default_scope), 0, hint);
  }
  /// What a look-up finds, without taking it.
  std::vector<block_id> find(const std::vector<int>& ids, const prefix_scope& scope = {},
                             std::span<const extra_key> extras = {}) {
    const std::vector<token_id> tokens = to_ids(ids);
    std::vector<block_id> hits(ids.size() / static_cast<std::size_t>(cache.block_size()));
    const prefix_match match = cache.match({.tokens = tokens, .scope = scope, .extras = extras}, hits);
    hits.resize(static_cast<std::size_t>(match.num_blocks));
    return hits;
  }
  std::vector<int> free_order() { return test::free_order(pool); }
};

TEST_CASE("published blocks are found from the first one on, as far as they are full and the same") {
  world w(12, {.block_size = 4});
  const std::vector<block_id> blocks = w.publish(counting(12));
  CHECK(w.find(counting(12)) == blocks);
  CHECK(w.find(counting(15)) == blocks);
  CHECK(w.find(counting(11)) == std::vector(blocks.begin(), blocks.begin() + 2));
  CHECK(w.find(counting(3)).empty());
  CHECK(w.find({}).empty());
  std::vector<int> other = counting(12);
  other[7] = 99;
  CHECK(w.find(other) == std::vector(blocks.begin(), blocks.begin() + 1));
  other[0] = 99;
  CHECK(w.find(other).empty());
  CHECK(w.find(counting(4, 4)).empty());  // the second block's tokens at the beginning are other contents
  const std::vector<token_id> tokens = to_ids(counting(12));
  std::vector<block_id> two(2);
  CHECK(w.cache.match({.tokens = tokens}, two).num_blocks == 2);  // no more than there is room for
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    CHECK(w.cache.holds(blocks[i]));
    CHECK(std::ranges::equal(w.cache.tokens_of(blocks[i]), std::span(tokens).subspan(4 * i, 4)));
  }
  CHECK_FALSE(w.cache.holds(block_id{3}));
  CHECK(w.cache.check() == "");
}

TEST_CASE("looking up takes nothing, taking counts, and what was found is taken from anywhere in the queue") {
  world w(8);
  const std::vector<block_id> blocks = w.publish(counting(6));
  w.pool.release(blocks);
  const std::uint64_t before = w.pool.digest();
  CHECK(w.find(counting(6)) == blocks);
  CHECK(w.pool.digest() == before);
  CHECK(w.cache.stats().num_lookups == 0);
  const std::vector<token_id> tokens = to_ids(counting(7));
  std::vector<block_id> hits(3);
  const prefix_match match = w.cache.match_and_pin({.tokens = tokens}, hits);
  CHECK(match.num_blocks == 3);
  CHECK(match.end == w.cache.chain_at(blocks[2]));
  CHECK(hits == blocks);
  for (const block_id block : blocks) CHECK(w.pool.num_refs(block) == 1);
  CHECK(w.cache.match_and_pin({.tokens = tokens}, hits).num_blocks == 3);  // in use already: shared
  for (const block_id block : blocks) CHECK(w.pool.num_refs(block) == 2);
  CHECK(w.cache.stats().num_lookups == 2);
  CHECK(w.cache.stats().num_looked_up_blocks == 6);
  CHECK(w.cache.stats().num_hit_blocks == 6);
  w.cache.count_lookup(5, 1);
  CHECK(w.cache.stats().num_lookups == 3);
  CHECK(w.cache.stats().num_looked_up_blocks == 11);
  CHECK(w.cache.stats().num_hit_blocks == 7);
}

TEST_CASE("idle contents are evicted least recently used first, the tail of a sequence before its head") {
  world w(8);
  const std::vector<block_id> first = w.publish(counting(6));       // 0 1 2
  const std::vector<block_id> second = w.publish(counting(4, 50));  // 3 4
  w.pool.release(first);
  w.pool.release(second);
  CHECK(w.free_order() == std::vector{5, 6, 7, 2, 1, 0, 4, 3});
  const std::vector<token_id> tokens = to_ids(counting(6));
  std::vector<block_id> hits(2);
  REQUIRE(w.cache.match_and_pin({.tokens = tokens}, hits).num_blocks == 2);
  w.pool.release(hits);
  CHECK(w.free_order() == std::vector{5, 6, 7, 2, 4, 3, 1, 0});  // used again: later
  std::vector<block_id> taken(5);
  w.cache.reserve_events(5);
  REQUIRE(w.cache.allocate(taken) == alloc_status::ok);
  CHECK(ids_of(taken) == std::vector{5, 6, 7, 2, 4});
  CHECK(w.find(counting(6)) == std::vector(first.begin(), first.begin() + 2));
  CHECK(w.find(counting(4, 50)) == std::vector(second.begin(), second.begin() + 1));
  CHECK(w.cache.stats().num_evicted_blocks == 2);
  CHECK(w.cache.stats().num_cached_blocks == 3);
  CHECK(w.cache.check() == "");
}

TEST_CASE("a block that was just taken is not evicted while another one is idle") {
  world w(6);
  const std::vector<block_id> old = w.publish(counting(6));
  const std::vector<block_id> recent = w.publish(counting(6, 100));
  w.pool.release(old);
  w.pool.release(recent);
  // Several prompts in one step: all take what they find before anything is allocated for any of them.
  const std::vector<token_id> one = to_ids(counting(6)), two = to_ids(counting(2, 100));
  std::vector<block_id> hits_one(3), hits_two(1);
  REQUIRE(w.cache.match_and_pin({.tokens = one}, hits_one).num_blocks == 3);
  REQUIRE(w.cache.match_and_pin({.tokens = two}, hits_two).num_blocks == 1);
  std::vector<block_id> fresh(2);
  w.cache.reserve_events(2);
  REQUIRE(w.cache.allocate(fresh) == alloc_status::ok);
  CHECK(ids_of(fresh) == std::vector{5, 4});
  CHECK(w.cache.allocate_one() == invalid_block);
  CHECK(w.find(counting(6)) == old);
  CHECK(w.find(counting(6, 100)) == hits_two);
}

TEST_CASE(
    "with nine blocks of ten in use, those that are idle are evicted in their order and nothing else is touched") {
  constexpr int num_blocks = 2000;
  world w(num_blocks);
  std::vector<std::vector<block_id>> chains;
  for (int i = 0; i < num_blocks; ++i) chains.push_back(w.publish({i, i}));
  std::vector<int> idle;
  for (int i = 0; i < num_blocks; i += 10) {
    const int chain = i * 7 % num_blocks;  // scattered
    w.pool.release(chains[static_cast<std::size_t>(chain)]);
    idle.push_back(to_index(chains[static_cast<std::size_t>(chain)][0]));
  }
  REQUIRE(idle.size() == num_blocks / 10);
  std::vector<block_id> too_many(idle.size() + 1);
  CHECK(w.cache.allocate(too_many) == alloc_status::later);  // and nothing was evicted for it
  CHECK(w.cache.stats().num_evicted_blocks == 0);
  w.cache.reserve_events(num_blocks);
  for (const int expected : idle) {
    CHECK(to_index(w.cache.allocate_one()) == expected);
    CHECK_FALSE(w.cache.holds(block_id{expected}));
  }
  CHECK(w.cache.allocate_one() == invalid_block);
  CHECK(w.cache.stats().num_cached_blocks == num_blocks - num_blocks / 10);
  CHECK(w.cache.check() == "");
}

TEST_CASE("an allocation that cannot be served evicts nothing") {
  world w(4);
  const std::vector<block_id> blocks = w.publish(counting(6));
  w.pool.release(std::span(blocks).subspan(1));
  const std::uint64_t before = w.cache.digest(), pool_before = w.pool.digest();
  std::vector<block_id> out(4, invalid_block);
  CHECK(w.cache.allocate(out) == alloc_status::later);
  out.resize(5, invalid_block);
  CHECK(w.cache.allocate(out) == alloc_status::never);
  CHECK(w.cache.allocate({}) == alloc_status::ok);
  CHECK(out == std::vector<block_id>(5, invalid_block));
  CHECK(w.cache.digest() == before);
  CHECK(w.pool.digest() == pool_before);
}

TEST_CASE("the second block with the same contents is a duplicate: the first one goes on to be found") {
  world w(8, {.block_size = 2, .record_events = true});
  const std::vector<block_id> first = w.publish(counting(4));
  w.cache.reserve_events(8);
  std::vector<block_id> second(2);
  REQUIRE(w.cache.allocate(second) == alloc_status::ok);
  const std::vector<token_id> tokens = to_ids(counting(4));
  publish_result result = w.cache.publish(second[0], w.cache.root(default_scope), std::span(tokens).first(2), 0);
  CHECK(result.duplicate_of == first[0]);
  CHECK(result.end == w.cache.chain_at(first[0]));
  CHECK(w.cache.chain_at(second[0]) == result.end);
  result = w.cache.publish(second[1], result.end, std::span(tokens).subspan(2), 1);
  CHECK(result.duplicate_of == first[1]);
  CHECK_FALSE(w.cache.holds(second[0]));
  CHECK(w.find(counting(4)) == first);
  CHECK(w.cache.stats().num_duplicate_blocks == 2);
  CHECK(w.cache.stats().num_published_blocks == 2);
  w.pool.release(first);
  w.pool.release(second);
  CHECK(w.free_order() == std::vector{4, 5, 6, 7, 3, 2, 1, 0});  // duplicates are worth nothing
  std::vector<cache_event> events;
  w.cache.drain_events(events);
  CHECK(events.size() == 2);
  CHECK(w.cache.check() == "");
}

TEST_CASE("publishing a block again under its own name changes nothing") {
  world w(8, {.block_size = 2, .record_events = true});
  const std::vector<block_id> blocks = w.publish(counting(6));
  const std::uint64_t before = w.cache.digest();
  const std::vector<token_id> tokens = to_ids(counting(6));
  prefix_chain end = w.cache.root(default_scope);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const publish_result again =
        w.cache.publish(blocks[i], end, std::span(tokens).subspan(2 * i, 2), static_cast<std::int64_t>(i));
    CHECK(again.duplicate_of == invalid_block);
    CHECK(again.end == w.cache.chain_at(blocks[i]));
    end = again.end;
  }
  CHECK(w.cache.digest() == before);
  CHECK(w.find(counting(6)) == blocks);
  CHECK(w.cache.stats().num_published_blocks == 3);
}

TEST_CASE("a block that is reused or forgotten is not found under its old key, nor is what followed it") {
  world w(3);
  const std::vector<block_id> blocks = w.publish(counting(6));
  w.cache.unregister(blocks[1]);
  w.cache.unregister(blocks[1]);  // nothing more to unregister
  CHECK(w.find(counting(6)) == std::vector{blocks[0]});
  CHECK(w.pool.level(blocks[1]) == 0);
  CHECK(w.cache.stats().num_cached_blocks == 2);
  // The same tokens in the gap are new contents: what was computed after the old ones stays out of reach.
  const std::vector<token_id> tokens = to_ids(counting(6));
  (void)w.cache.publish(blocks[1], w.cache.chain_at(blocks[0]), std::span(tokens).subspan(2, 2), 1);
  CHECK(w.find(counting(6)) == std::vector(blocks.begin(), blocks.begin() + 2));
  CHECK(w.cache.check() == "");
  w.pool.release(blocks);
  std::vector<block_id> all(3);
  w.cache.reserve_events(3);
  REQUIRE(w.cache.allocate(all) == alloc_status::ok);
  CHECK(w.find(counting(6)).empty());
  CHECK(w.cache.stats().num_cached_blocks == 0);
  CHECK(w.cache.check() == "");
}

TEST_CASE("equal tokens in another scope, or with other extra keys, are other contents") {
  world w(40);
  const std::string image_a = "digest of an image", image_b = "digest of another", zero(1, '\0');
  const auto value = [](const std::string& text) {
    return std::span(reinterpret_cast<const std::byte*>(text.data()), text.size());
  };
  struct variant {
    prefix_scope scope;
    std::vector<extra_key> extras;
  };
  const std::vector<variant> variants = {
      {{}, {}},
      {{"tenant", 0}, {}},
      {{"tenant2", 0}, {}},
      {{"", 1}, {}},
      {{"tenant", 1}, {}},
      {{zero, 0}, {}},
      {{}, {{1, 1, value(image_a)}}},
      {{}, {{1, 1, value(image_b)}}},
      {{}, {{1, 2, value(image_a)}}},
      {{}, {{0, 1, value(image_a)}}},
      {{}, {{0, 1, value(image_a)}, {1, 1, value(image_a)}}},
      {{}, {{2, 1, value(image_a)}}},  // only the second block depends on it
  };
  const std::vector<token_id> tokens = to_ids(counting(4));
  std::vector<std::vector<block_id>> published;
  std::vector<scope_id> scopes;
  for (const variant& one : variants) {
    const scope_id scope = w.cache.acquire_scope(one.scope);
    scopes.push_back(scope);
    std::vector<block_id> blocks(2);
    REQUIRE(w.cache.allocate(blocks) == alloc_status::ok);
    prefix_chain end = w.cache.root(scope);
    for (std::size_t i = 0; i < 2; ++i) {
      std::vector<extra_key> own;
      for (const extra_key& extra : one.extras) {
        if (extra.position / 2 == static_cast<std::int64_t>(i)) own.push_back(extra);
      }
      const extras_id extras = w.cache.acquire_extras(own, 2 * static_cast<std::int64_t>(i));
      CHECK((extras == no_extras) == own.empty());
      end =
          w.cache.publish(blocks[i], end, std::span(tokens).subspan(2 * i, 2), static_cast<std::int64_t>(i), {}, extras)
              .end;
      w.cache.release_extras(extras);  // the cache keeps its own reference
    }
    published.push_back(blocks);
  }
  // The last variant's first block is the plain one's: nothing is different up to there.
  CHECK(w.cache.stats().num_duplicate_blocks == 1);
  published.back()[0] = published.front()[0];
  for (std::size_t i = 0; i < variants.size(); ++i) {
    CAPTURE(i);
    CHECK(w.find(counting(4), variants[i].scope, variants[i].extras) == published[i]);
  }
  CHECK(w.find(counting(4), {"tenant3", 0}).empty());
  CHECK(w.find(counting(4), {"tenant", 2}).empty());
  // An image in the second block does not keep the first from being found; one nobody has seen hides its own block.
  const std::vector<extra_key> unseen{{3, 1, value(image_b)}};
  CHECK(w.find(counting(4), {}, unseen) == std::vector{published[0][0]});
  CHECK(w.cache.check() == "");
  for (const scope_id scope : scopes) w.cache.release_scope(scope);
  CHECK(w.find(counting(4), {"tenant", 1}) == published[4]);  // cached contents keep their scope
}

TEST_CASE("scopes and extra keys are gone with the last one who refers to them") {
  world w(4);
  const std::vector<token_id> tokens = to_ids(counting(2));
  const std::string image = "image";
  const std::vector<extra_key> extras{{0, 1, std::as_bytes(std::span(image.data(), image.size()))}};
  const std::vector<extra_key> others{{0, 2, {}}};
  const auto is_known = [&](const prefix_scope& scope) {
    std::vector<block_id> out(1);
    return w.cache.match({.tokens = tokens, .scope = scope}, out).end.serial != 0;
  };
  const scope_id scope = w.cache.acquire_scope({"salt", 3});
  CHECK(w.cache.acquire_scope({"salt", 3}) == scope);
  w.cache.retain_scope(scope);
  const extras_id image_extras = w.cache.acquire_extras(extras, 0);
  CHECK(w.cache.acquire_extras(extras, 0) == image_extras);
  w.cache.retain_extras(image_extras);
  const block_id block = w.cache.allocate_one();
  (void)w.cache.publish(block, w.cache.root(scope), tokens, 0, {}, image_extras);
  const prefix_chain old_root = w.cache.root(scope);
  for (int i = 0; i < 3; ++i) {
    CHECK(is_known({"salt", 3}));
    w.cache.release_scope(scope);
    w.cache.release_extras(image_extras);
  }
  CHECK(is_known({"salt", 3}));  // a cached block is in it
  CHECK(w.cache.num_interned() == 2);
  CHECK(w.find(counting(2), {"salt", 3}, extras) == std::vector{block});
  SUBCASE("forgotten") { w.cache.unregister(block); }
  SUBCASE("evicted") {
    w.pool.release(block);
    std::vector<block_id> all(4);
    REQUIRE(w.cache.allocate(all) == alloc_status::ok);
  }
  SUBCASE("reset") {
    w.pool.release(block);
    REQUIRE(w.cache.reset());
  }
  CHECK_FALSE(is_known({"salt", 3}));
  CHECK(w.cache.num_interned() == 0);
  CHECK(is_known({}));
  // The handles are free for others, and whoever comes back is not taken for who was there before.
  CHECK(w.cache.acquire_extras(others, 0) == image_extras);
  CHECK(w.cache.acquire_scope({"salt", 3}) == scope);
  CHECK(w.cache.root(scope).key == old_root.key);
  CHECK(w.cache.root(scope).serial != old_root.serial);
  CHECK(w.cache.check() == "");
}

TEST_CASE("interned strings count their users and give indices again") {
  detail::interned_bytes names;
  CHECK(names.find("") == 0);
  CHECK(names.acquire("") == 0);
  names.release(0);
  CHECK(names.find("a") == -1);
  const std::uint32_t a = names.acquire("a"), b = names.acquire(std::string("a\0", 2));
  CHECK(a != b);
  CHECK(names.acquire("a") == a);
  CHECK(names.num_refs(a) == 2);
  CHECK(names.num_in_use() == 3);
  CHECK(names.bytes(b) == std::string_view("a\0", 2));
  const std::uint64_t serial = names.serial(a);
  names.release(a);
  CHECK(names.find("a") == a);
  names.release(a);
  CHECK(names.find("a") == -1);
  CHECK(names.num_in_use() == 2);
  CHECK(names.acquire("c") == a);
  CHECK(names.serial(a) != serial);
  CHECK(names.num_in_use() == 3);
}

TEST_CASE("a higher priority outlives what was used later, until its time is over") {
  world w(8);
  const auto publish_idle = [&](int token, const retention_hint& hint) {
    const std::vector<block_id> blocks = w.publish({token, token}, hint);
    w.pool.release(blocks);
    return to_index(blocks[0]);
  };
  const int high = publish_idle(1, {.priority = 6, .expires_at = 100});
  const int higher = publish_idle(2, {.priority = 250});  // as high as there is
  const int low = publish_idle(3, {.priority = 2, .expires_at = 50});
  const int none = publish_idle(4, {.priority = 0});  // as low as there is
  const int plain = publish_idle(5, {});
  CHECK(w.pool.level(block_id{higher}) == retention_hint::highest);
  CHECK(w.pool.level(block_id{none}) == retention_hint::lowest);
  CHECK(w.free_order() == std::vector{5, 6, 7, none, low, plain, high, higher});
  w.cache.advance_clock(49);
  CHECK(w.free_order() == std::vector{5, 6, 7, none, low, plain, high, higher});
  w.cache.advance_clock(50);
  CHECK(w.free_order() == std::vector{5, 6, 7, none, plain, low, high, higher});
  w.cache.advance_clock(10);  // time does not go back
  w.cache.advance_clock(99);
  CHECK(w.free_order() == std::vector{5, 6, 7, none, plain, low, high, higher});
  w.cache.advance_clock(100);
  CHECK(w.free_order() == std::vector{5, 6, 7, none, plain, low, high, higher});
  CHECK(w.pool.level(block_id{high}) == retention_hint::normal);
  const int late = publish_idle(6, {.priority = 7, .expires_at = 100});  // over before it began
  CHECK(w.pool.level(block_id{late}) == retention_hint::normal);
  CHECK(w.cache.check() == "");
}

TEST_CASE("hints that end together keep the tail of a sequence before its head") {
  world w(16);
  const std::vector<block_id> blocks = w.publish(counting(20), {.priority = 7, .expires_at = 5});
  w.pool.release(blocks);
  w.cache.advance_clock(5);
  CHECK(w.free_order() == std::vector{10, 11, 12, 13, 14, 15, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0});
}

TEST_CASE("a hint ends with the contents it was given for") {
  world w(2);
  std::vector<block_id> blocks = w.publish({1, 1}, {.priority = 7, .expires_at = 10});
  w.pool.release(blocks);
  w.cache.unregister(blocks[0]);
  blocks.resize(2);
  REQUIRE(w.cache.allocate(blocks) == alloc_status::ok);
  w.pool.release(blocks);
  const std::vector<block_id> again = w.publish({2, 2}, {.priority = 7});
  w.cache.advance_clock(10);
  CHECK(w.pool.level(again[0]) == 7);
}

TEST_CASE("caches that differ only in when a hint ends have different digests") {
  const auto digest = [](std::int64_t expires_at) {
    world w(2, {.block_size = 2, .seed = hash_seed{1, 2}});
    w.pool.release(w.publish({1, 1}, {.priority = 7, .expires_at = expires_at}));
    return w.cache.digest();
  };
  CHECK(digest(10) == digest(10));
  CHECK(digest(10) != digest(20));
  // Making room throws away hints of contents that are gone, and is nothing that an answer depends on.
  world w(4);
  for (int i = 0; i < 20; ++i) w.pool.release(w.publish({i, i}, {.priority = 7, .expires_at = 10 + i % 7}));
  const std::uint64_t before = w.cache.digest();
  w.cache.reserve_events(1000);
  CHECK(w.cache.digest() == before);
}

class by_index final : public eviction_policy {
 public:
  [[nodiscard]] block_level level(const retention_hint&, std::int64_t index) const noexcept override {
    return static_cast<block_level>(index == 0 ? 7 : index == 1 ? 0 : 3);
  }
};

TEST_CASE("a policy decides levels; the LRU policy knows no hints") {
  const by_index policy;
  world w(4, {.block_size = 2, .policy = &policy});
  const std::vector<block_id> blocks = w.publish(counting(6), {.priority = 2});
  CHECK(w.pool.level(blocks[0]) == 7);
  CHECK(w.pool.level(blocks[1]) == 1);
  CHECK(w.pool.level(blocks[2]) == 3);
  world plain(4, {.block_size = 2, .policy = &lru_policy()});
  for (const int value : {0, 1, 7, 255}) {
    const auto priority = static_cast<block_level>(value);
    const std::vector<block_id> one = plain.publish({int{priority}, 1}, {.priority = priority, .expires_at = 9});
    CHECK(plain.pool.level(one[0]) == retention_hint::normal);
  }
}

/// Blocks of one token on their own: each request is one of them.
struct object_cache {
  block_pool pool;
  prefix_cache cache;
  explicit object_cache(std::int64_t num_blocks, const eviction_policy& policy)
      : pool(num_blocks), cache(pool, {.block_size = 1, .policy = &policy}) {}

  /// Whether it was a hit; the object is then cached and idle.
  bool request(int object) {
    const token_id token[1] = {token_id{object}};
    block_id block[1];
    const bool found = cache.match_and_pin({.tokens = token}, block).num_blocks == 1;
    if (!found) {
      cache.reserve_events(2);
      REQUIRE(cache.allocate(block) == alloc_status::ok);
      (void)cache.publish(block[0], cache.root(default_scope), token, 0);
    }
    pool.release(block[0]);
    REQUIRE(cache.check() == "");
    return found;
  }
};

TEST_CASE("S3-FIFO keeps what is asked for again through a scan that is larger than the pool") {
  for (const bool scans : {false, true}) {
    object_cache s3(20, s3_fifo_policy());
    object_cache lru(20, lru_policy());
    for (int round = 0; round < 3; ++round) {
      for (int object = 0; object < 5; ++object) (void)(s3.request(object), lru.request(object));
    }
    for (int object = 1000; object < (scans ? 1100 : 1000); ++object) (void)(s3.request(object), lru.request(object));
    for (int object = 0; object < 5; ++object) {
      CHECK(s3.request(object));
      CHECK(lru.request(object) == !scans);
    }
  }
}

TEST_CASE("S3-FIFO: contents that return soon after they left the small queue enter the main queue") {
  object_cache s3(20, s3_fifo_policy());  // small queue of 2, ghost queue of 18
  for (int object = 0; object < 21; ++object) CHECK_FALSE(s3.request(object));
  CHECK_FALSE(s3.request(0));  // the first to leave, a ghost now
  for (int object = 100; object < 140; ++object) CHECK_FALSE(s3.request(object));
  CHECK(s3.request(0));
  CHECK_FALSE(s3.request(1));  // gone with 39 others, for longer than the ghost queue remembers
  for (int object = 200; object < 240; ++object) CHECK_FALSE(s3.request(object));
  CHECK_FALSE(s3.request(1));
}

TEST_CASE("S3-FIFO evicts no block in use, and no block before those after it in its chain") {
  world w(12, {.block_size = 2, .policy = &s3_fifo_policy()});
  // A chain whose first half is hit so often that the second half, which is not, is older news.
  const std::vector<block_id> chain = w.publish(counting(12));
  w.pool.release(chain);
  std::vector<block_id> hits(6);
  const std::vector<token_id> tokens = to_ids(counting(12));
  SUBCASE("idle") {
    std::size_t cached = 6;
    for (int i = 0; i < 30; ++i) {
      w.pool.release(w.publish({100 + i, 0, 100 + i, 1}));
      CHECK(w.cache.check() == "");
      const std::size_t now = w.find(counting(12)).size();
      CHECK(now <= cached);
      cached = now;
      for (std::size_t k = 0; k < 6; ++k) CHECK(w.cache.holds(chain[k]) >= (k < now));
    }
    CHECK(cached < 6);
  }
  SUBCASE("in use") {
    REQUIRE(w.cache.match_and_pin({.tokens = tokens}, hits).num_blocks == 6);
    for (int i = 0; i < 30; ++i) w.pool.release(w.publish({100 + i, 0, 100 + i, 1}));
    CHECK(w.find(counting(12)) == chain);
    w.pool.release(hits);
    CHECK(w.cache.check() == "");
  }
}

TEST_CASE("S3-FIFO's small queue is a part of the pool") {
  for (const double wrong : {0.0, 1.0, -0.1, 2.0, std::nan("")}) {
    CHECK(code_of([&] { (void)make_s3_fifo_policy(wrong); }) == errc::invalid_argument);
  }
  const auto policy = make_s3_fifo_policy(0.5);
  object_cache half(20, *policy);
  object_cache tenth(20, s3_fifo_policy());
  // Two rounds over eight objects among others: within reach of a small queue of ten, not of one of two.
  const auto num_hits = [](object_cache& cache) {
    int hits = 0;
    for (int i = 0; i < 200; ++i) hits += cache.request(i % 2 == 0 ? i / 2 % 4 : 1000 + i) && i % 2 == 0;
    return hits;
  };
  CHECK(num_hits(half) > 0);
  CHECK(num_hits(tenth) > 0);
}

TEST_CASE("reset refuses while a cached block is in use and keeps everything; idle, it forgets everything") {
  world w(8, {.block_size = 2, .record_events = true});
  const std::vector<block_id> blocks = w.publish(counting(6));
  w.pool.release(std::span(blocks).subspan(1));
  const std::uint64_t before = w.cache.digest();
  CHECK_FALSE(w.cache.reset());
  CHECK(w.cache.digest() == before);
  CHECK(w.find(counting(6)) == blocks);
  const block_id other = w.cache.allocate_one();  // in use without a name: no reason to refuse
  w.pool.release(blocks[0]);
  CHECK(w.cache.reset());
  CHECK(w.find(counting(6)).empty());
  CHECK(w.cache.stats().num_cached_blocks == 0);
  CHECK(w.cache.stats().num_evicted_blocks == 0);
  for (int b = 0; b < 8; ++b) CHECK(w.pool.level(block_id{b}) == 0);
  CHECK(w.pool.num_refs(other) == 1);
  std::vector<cache_event> events;
  w.cache.drain_events(events);
  REQUIRE(events.size() == 4);
  CHECK(events.back() == cache_event{cache_event::kind::cleared, invalid_block, {}, {}});
  CHECK(w.cache.reset());  // of nothing
  CHECK(w.cache.check() == "");
}

TEST_CASE("a hint that ended in a reset does not touch later contents") {
  world w(4);
  w.pool.release(w.publish({1, 1}, {.priority = 7, .expires_at = 10}));
  REQUIRE(w.cache.reset());
  const std::vector<block_id> blocks = w.publish({1, 1}, {.priority = 7, .expires_at = 20});
  w.cache.advance_clock(10);
  CHECK(w.pool.level(blocks[0]) == 7);
  w.cache.advance_clock(20);
  CHECK(w.pool.level(blocks[0]) == retention_hint::normal);
}

TEST_CASE("keys made ahead find the same, keys of something else find nothing") {
  world w(60);
  const std::vector<block_id> blocks = w.publish(counting(80));  // 40: more than one group of prefetches
  const std::vector<token_id> tokens = to_ids(counting(81));
  const scope_id scope = w.cache.acquire_scope({"other", 0});
  std::vector<content_key> keys;
  for (const std::size_t count : {std::size_t{10}, std::size_t{40}, std::size_t{41}}) {
    w.cache.append_keys({.tokens = std::span(tokens).first(std::min<std::size_t>(2 * count, tokens.size()))}, keys);
    CHECK(keys.size() == std::min<std::size_t>(count, 40));
    std::vector<block_id> hits(40);
    CHECK(w.cache.match({.tokens = tokens, .keys = keys}, hits).num_blocks == 40);  // the others are made
    CHECK(hits == blocks);
  }
  for (std::size_t i = 0; i < 40; ++i) CHECK(keys[i] == w.cache.chain_at(blocks[i]).key);
  std::vector<block_id> hits(40);
  CHECK(w.cache.match({.tokens = tokens, .scope = {"other", 0}, .keys = keys}, hits).num_blocks == 0);
  std::vector<token_id> others = tokens;
  others[21] = token_id{-5};
  CHECK(w.cache.match({.tokens = others, .keys = keys}, hits).num_blocks == 10);  // forged: verified by tokens
  w.cache.release_scope(scope);
}

TEST_CASE("a cache of impossible shape is refused") {
  block_pool pool(4);
  for (const std::int32_t size : {0, -1, INT32_MIN}) {
    CHECK(code_of([&] { prefix_cache cache(pool, {.block_size = size}); }) == errc::invalid_argument);
  }
  for (const std::int32_t bits : {0, -1, 129}) {
    CHECK(code_of([&] { prefix_cache cache(pool, {.key_bits = bits}); }) == errc::invalid_argument);
  }
  limiting_memory_resource little(default_host_memory(), 100);
  CHECK(code_of([&] { prefix_cache cache(pool, {.memory = &little}); }) == errc::out_of_memory);
  CHECK(little.used_bytes() == 0);
  CHECK(pool.check() == "");
}

TEST_CASE("metadata of a cached block stays within 64 bytes, 128 with its tokens") {
  block_pool pool(100000);
  const prefix_cache cache(pool, {.block_size = 16});
  CHECK(cache.num_bytes() <= 100000 * (64 + 48));
}

TEST_CASE("a look-up ends also where all of a small index has been passed over") {
  // Ten blocks have an index of three buckets of seven. Contents are chosen by the bucket their key belongs to, such
  // that in the end each bucket is one from which an entry went on to the next.
  world w(10, {.block_size = 1, .seed = hash_seed{1, 2}});
  const prefix_chain root = w.cache.root(default_scope);
  std::int32_t next_token = 0;
  const auto token_for = [&](std::uint64_t bucket) {
    for (;;) {
      const token_id token[1] = {token_id{next_token++}};
      const content_key key = w.cache.hasher().next(root.key, token);
      if (((key.low ^ key.high) * 0x9e3779b97f4a7c15 >> 32) * 3 >> 32 == bucket) return token[0];
    }
  };
  std::vector<std::vector<block_id>> by_bucket(3);
  const auto publish = [&](std::uint64_t bucket, int count) {
    for (int i = 0; i < count; ++i) {
      const token_id token[1] = {token_for(bucket)};
      const block_id block = w.cache.allocate_one();
      REQUIRE(block != invalid_block);
      w.cache.reserve_events(2);
      CHECK(w.cache.publish(block, root, token, 0).duplicate_of == invalid_block);
      by_bucket[bucket].push_back(block);
    }
  };
  const auto drop_first = [&](std::size_t bucket, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      w.cache.unregister(by_bucket[bucket].front());
      w.pool.release(by_bucket[bucket].front());
      by_bucket[bucket].erase(by_bucket[bucket].begin());
    }
  };
  publish(0, 10);  // seven in bucket 0, three in bucket 1
  drop_first(0, 7);
  publish(1, 7);  // four in bucket 1, three in bucket 2
  drop_first(1, 4);
  publish(2, 4);  // bucket 2 is full
  drop_first(0, 1);
  publish(2, 1);  // and one has gone on to bucket 0
  CHECK(w.cache.check() == "");
  for (std::uint64_t bucket = 0; bucket < 3; ++bucket) {
    const token_id absent[1] = {token_for(bucket)};
    block_id out[1];
    CHECK(w.cache.match({.tokens = absent}, out).num_blocks == 0);
  }
  for (std::size_t bucket = 0; bucket < 3; ++bucket) {
    for (const block_id block : by_bucket[bucket]) {
      block_id out[1];
      CHECK(w.cache.match({.tokens = w.cache.tokens_of(block)}, out).num_blocks == 1);
      CHECK(out[0] == block);
    }
  }
}

}  // namespace
}  // namespace bifolio::test
