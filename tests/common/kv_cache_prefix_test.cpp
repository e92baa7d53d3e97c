// SPDX-License-Identifier: Apache-2.0
/// What sequences share through the prefix cache, what they leave behind, and what swapping and fences do with it: the
/// manager's promises one by one. The random mix of all of them is manager_random_test.cpp.

#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/kv_cache_manager.hpp>
#include <string>
#include <vector>

#include "common/cache_logic_helpers.hpp"

namespace bifolio::test {
namespace {

std::vector<token_id> counting(std::int64_t count, int from = 0) {
  std::vector<token_id> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(token_id{from + i});
  return tokens;
}

struct world {
  kv_cache_manager manager;
  explicit world(kv_cache_config config)
      : manager([&] {
          config.prefix.enabled = true;
          return config;
        }()) {}

  open_result open(const std::vector<token_id>& tokens, const prefix_scope& scope = {},
                   std::span<const extra_key> extras = {}, const retention_hint& hint = {}) {
    return manager.open({.tokens = tokens, .scope = scope, .extras = extras, .keys = {}, .retention = hint},
                        static_cast<std::int64_t>(tokens.size()));
  }
  std::int64_t cached(const std::vector<token_id>& tokens, const prefix_scope& scope = {},
                      std::span<const extra_key> extras = {}) {
    return manager.can_open({.tokens = tokens, .scope = scope, .extras = extras}).num_cached_tokens;
  }
  /// Opens, and commits what was not there.
  seq_id compute(const std::vector<token_id>& tokens, const prefix_scope& scope = {},
                 std::span<const extra_key> extras = {}, const retention_hint& hint = {}) {
    const open_result got = open(tokens, scope, extras, hint);
    REQUIRE(got.status == alloc_status::ok);
    manager.commit(got.seq, std::span(tokens).subspan(static_cast<std::size_t>(got.num_cached_tokens)));
    return got.seq;
  }
  void compute_and_leave(const std::vector<token_id>& tokens) { manager.free(compute(tokens)); }

  std::vector<int> table(seq_id seq) const { return table_of(manager, seq); }
  std::vector<int> free_order() const { return test::free_order(manager.pool()); }
};

TEST_CASE("a second request gets the same blocks and one of its own, and all go back in the order of their worth") {
  world w({.block_size = 4, .num_blocks = 10});
  const seq_id first = w.compute(counting(14));
  CHECK(w.table(first) == std::vector{0, 1, 2, 3});
  std::vector<token_id> other = counting(12);
  other.push_back(token_id{99});
  const open_result second = w.open(other);
  REQUIRE(second.status == alloc_status::ok);
  CHECK(second.num_cached_tokens == 12);
  CHECK_FALSE(second.has_copy());
  CHECK(w.table(second.seq) == std::vector{0, 1, 2, 4});
  for (int b = 0; b < 3; ++b) CHECK(w.manager.pool().num_refs(block_id{b}) == 2);
  CHECK(w.manager.num_free_blocks() == 5);
  CHECK(w.manager.num_committed(second.seq) == 12);
  w.manager.free(first);
  w.manager.free(second.seq);
  // Private tails, never-used blocks, then what was shared, its tail first.
  CHECK(w.free_order() == std::vector{4, 3, 5, 6, 7, 8, 9, 2, 1, 0});
  CHECK(w.cached(counting(13)) == 12);
  CHECK(w.manager.check() == "");
}

TEST_CASE("a prompt that is cached to its end leaves its last token to compute, in a copy of the last block") {
  world w({.block_size = 4, .num_blocks = 10});
  const seq_id first = w.compute(counting(8));
  CHECK(w.cached(counting(8)) == 7);
  const open_result second = w.open(counting(8));
  CHECK(second.num_cached_tokens == 7);
  CHECK(second.copy == block_copy{block_id{1}, block_id{2}});
  CHECK(w.table(second.seq) == std::vector{0, 2});
  CHECK(w.manager.pool().num_refs(block_id{1}) == 1);  // the first one's
  w.manager.commit(second.seq, counting(1, 7));
  CHECK(w.manager.prefix()->stats().num_duplicate_blocks == 1);
  w.manager.free(first);
  w.manager.free(second.seq);
  CHECK(w.manager.check() == "");

  world one({.block_size = 1, .num_blocks = 10});
  one.compute_and_leave(counting(3));
  CHECK(one.cached(counting(3)) == 2);
  CHECK(one.cached(counting(1)) == 0);
  const open_result again = one.open(counting(3));
  CHECK(again.num_cached_tokens == 2);
  CHECK_FALSE(again.has_copy());  // a block of one token is computed as a whole

  world wide({.block_size = 4, .num_blocks = 10});
  wide.compute_and_leave(counting(4));
  CHECK(wide.cached(counting(1)) == 0);  // a prompt of one token reuses nothing
  CHECK(wide.cached(counting(4)) == 3);
}

TEST_CASE("a prompt cached to its end is let in also where its own blocks are the only ones") {
  // Three blocks, all idle and all of this prompt: there is none to copy the last one to, now or ever.
  world w({.block_size = 4, .num_blocks = 3, .watermark = 0});
  w.compute_and_leave(counting(12));
  const admission foretold = w.manager.can_open({.tokens = counting(12)});
  CHECK(foretold.status == alloc_status::ok);
  CHECK(foretold.num_cached_tokens == 8);
  const open_result got = w.open(counting(12));
  REQUIRE(got.status == alloc_status::ok);
  CHECK(got.num_cached_tokens == 8);
  CHECK_FALSE(got.has_copy());
  w.manager.commit(got.seq, counting(4, 8));
  w.manager.free(got.seq);
  CHECK(w.cached(counting(13)) == 12);
  CHECK(w.manager.check() == "");
}

TEST_CASE("a sequence alone in the pool goes on after a rollback into a published block") {
  world w({.block_size = 4, .num_blocks = 2});
  const seq_id seq = w.compute(counting(8));
  w.manager.truncate(seq, 6);
  CHECK(w.manager.can_append(seq, 1) == alloc_status::ok);
  const append_result got = w.manager.append(seq, 1);
  CHECK(got.status == alloc_status::ok);
  CHECK_FALSE(got.has_copy());
  CHECK_FALSE(w.manager.prefix()->holds(block_id{1}));
  CHECK(w.manager.append(seq, 1).status == alloc_status::ok);
  w.manager.commit(seq, std::vector{token_id{50}, token_id{51}});
  std::vector<token_id> now = counting(6);
  now.insert(now.end(), {token_id{50}, token_id{51}, token_id{52}});
  w.manager.free(seq);
  CHECK(w.cached(counting(9)) == 4);
  CHECK(w.cached(now) == 8);
  CHECK(w.manager.check() == "");
}

TEST_CASE("with a block to spare the rolled-back one is copied and stays to be found") {
  world w({.block_size = 4, .num_blocks = 3});
  const seq_id seq = w.compute(counting(8));
  w.manager.truncate(seq, 6);
  CHECK(w.manager.append(seq, 1).copy == block_copy{block_id{1}, block_id{2}});
  CHECK(w.cached(counting(9)) == 8);
}

TEST_CASE("an admission that fails after a long hit changes nothing, statistics included") {
  world w({.block_size = 4, .num_blocks = 8});
  w.compute_and_leave(counting(20));
  const seq_id holder = w.manager.allocate(8).seq;
  const std::uint64_t before = w.manager.digest();
  const prefix_stats stats = w.manager.prefix()->stats();
  CHECK(w.open(counting(32)).status == alloc_status::later);
  CHECK(w.open(counting(36)).status == alloc_status::never);
  CHECK(w.manager.can_open({.tokens = counting(32)}).num_cached_tokens == 20);
  CHECK(w.manager.digest() == before);
  CHECK(w.manager.prefix()->stats() == stats);
  w.manager.free(holder);
  CHECK(w.open(counting(32)).num_cached_tokens == 20);
}

TEST_CASE("hits of many prompts admitted in one step survive what the others allocate") {
  world w({.block_size = 4, .num_blocks = 12});
  w.compute_and_leave(counting(16));
  w.compute_and_leave(counting(16, 100));
  const open_result a = w.open(counting(16, 100));
  const open_result b = w.open(counting(20));
  REQUIRE(a.status == alloc_status::ok);
  REQUIRE(b.status == alloc_status::ok);
  CHECK(a.num_cached_tokens == 15);
  CHECK(b.num_cached_tokens == 16);
  const open_result c = w.open(counting(8, 500));
  CHECK(c.status == alloc_status::ok);
  CHECK(w.manager.prefix()->stats().num_evicted_blocks == 0);
  CHECK(w.cached(counting(17)) == 16);
  CHECK(w.cached(counting(17, 100)) == 16);
}

TEST_CASE("a reused block is not found under its old name, and a partly filled one never") {
  world w({.block_size = 4, .num_blocks = 4});
  w.compute_and_leave(counting(11));  // two full blocks and three tokens
  CHECK(w.cached(counting(12)) == 8);
  const seq_id other = w.compute(counting(12, 100));  // takes the tail, a fresh block, and the cached tail
  CHECK(w.cached(counting(12)) == 4);
  w.manager.free(other);
  CHECK(w.cached(counting(13, 100)) == 12);
}

TEST_CASE("tokens that were taken back are not found, those accepted later are") {
  world w({.block_size = 4, .num_blocks = 10});
  const seq_id seq = w.compute(counting(6));
  REQUIRE(w.manager.append(seq, 4).status == alloc_status::ok);  // drafts, of which one is accepted
  w.manager.commit(seq, std::vector{token_id{70}});
  w.manager.truncate(seq, 7);
  REQUIRE(w.manager.append(seq, 1).status == alloc_status::ok);
  w.manager.commit(seq, std::vector{token_id{71}});
  CHECK(w.cached(counting(9)) == 4);
  std::vector<token_id> accepted = counting(6);
  accepted.insert(accepted.end(), {token_id{70}, token_id{71}, token_id{0}});
  CHECK(w.cached(accepted) == 8);
  // Back across a block border, and on with other tokens: the chain goes on from there.
  w.manager.truncate(seq, 3);
  REQUIRE(w.manager.append(seq, 5).status == alloc_status::ok);
  w.manager.commit(seq, counting(5, 200));
  std::vector<token_id> anew = counting(3);
  for (int i = 0; i < 6; ++i) anew.push_back(token_id{200 + i});
  CHECK(w.cached(anew) == 8);
  CHECK(w.cached(accepted) == 8);  // the old ones are still there
  CHECK(w.manager.check() == "");
}

TEST_CASE("scope and extra keys keep equal prompts apart, and only from where they differ") {
  world w({.block_size = 4, .num_blocks = 40});
  const std::string image = "an image", other_image = "another";
  const auto key = [](const std::string& text, std::int64_t position) {
    return std::vector<extra_key>{{position, 1, std::as_bytes(std::span(text.data(), text.size()))}};
  };
  w.manager.free(w.compute(counting(12)));
  w.manager.free(w.compute(counting(12), {"tenant", 0}));
  w.manager.free(w.compute(counting(12), {"", 9}));
  w.manager.free(w.compute(counting(12), {}, key(image, 5)));
  CHECK(w.manager.prefix()->stats().num_hit_blocks == 1);  // the block before the image
  CHECK(w.cached(counting(13)) == 12);
  CHECK(w.cached(counting(13), {"tenant", 0}) == 12);
  CHECK(w.cached(counting(13), {"tenant", 9}) == 0);
  CHECK(w.cached(counting(13), {"", 9}) == 12);
  CHECK(w.cached(counting(13), {}, key(image, 5)) == 12);
  CHECK(w.cached(counting(13), {}, key(other_image, 5)) == 4);
  CHECK(w.cached(counting(13), {}, key(image, 6)) == 4);
  CHECK(w.cached(counting(13), {}, key(image, 12)) == 12);  // in the block that is not full yet
  CHECK(w.manager.check() == "");
}

TEST_CASE("two that compute the same keep their own blocks, or one of them gives way") {
  for (const bool deduplicate : {false, true}) {
    CAPTURE(deduplicate);
    kv_cache_config config{.block_size = 4, .num_blocks = 10};
    config.prefix.deduplicate = deduplicate;
    world w(config);
    const seq_id a = w.open(counting(10)).seq, b = w.open(counting(10)).seq;  // neither is there yet
    w.manager.commit(a, counting(10));
    w.manager.commit(b, counting(10));
    CHECK(w.table(a) == std::vector{0, 1, 2});
    CHECK(w.table(b) == (deduplicate ? std::vector{0, 1, 5} : std::vector{3, 4, 5}));
    CHECK(w.manager.num_free_blocks() == (deduplicate ? 6 : 4));
    CHECK(w.manager.prefix()->stats().num_duplicate_blocks == 2);
    w.manager.free(a);
    w.manager.free(b);
    CHECK(w.cached(counting(9)) == 8);
    CHECK(w.manager.num_free_blocks() == 10);
    CHECK(w.manager.check() == "");
  }
}

TEST_CASE("forks that share a filled block publish it once, whoever commits first") {
  world w({.block_size = 4, .num_blocks = 10});
  const seq_id a = w.open(counting(8)).seq;
  const seq_id b = w.manager.fork(a).seq;
  w.manager.commit(a, counting(8));
  w.manager.commit(b, counting(8));
  CHECK(w.manager.prefix()->stats().num_published_blocks == 2);
  CHECK(w.manager.prefix()->stats().num_duplicate_blocks == 0);
  for (const seq_id seq : {a, b}) {
    REQUIRE(w.manager.append(seq, 4).status == alloc_status::ok);
    w.manager.commit(seq, counting(4, 8));
  }
  CHECK(w.cached(counting(13)) == 12);
  CHECK(w.manager.check() == "");
}

TEST_CASE("what a sequence will publish by is part of the digest") {
  const std::string image = "an image";
  const std::vector<extra_key> extras{{5, 1, std::as_bytes(std::span(image.data(), image.size()))}};
  const auto digest = [](const prefix_scope& scope, std::span<const extra_key> keys, const retention_hint& hint) {
    kv_cache_config config{.block_size = 4, .num_blocks = 10};
    config.prefix.seed = hash_seed{1, 2};
    world w(config);
    REQUIRE(w.open(counting(3), scope, keys, hint).status == alloc_status::ok);
    return w.manager.digest();
  };
  const std::uint64_t plain = digest({}, {}, {});
  CHECK(digest({}, {}, {}) == plain);
  CHECK(digest({"tenant", 0}, {}, {}) != plain);
  CHECK(digest({}, extras, {}) != plain);
  CHECK(digest({}, {}, {.priority = 6}) != plain);
  CHECK(digest({}, {}, {.priority = 4, .expires_at = 9}) != plain);
}

TEST_CASE("reset waits until no cached block is in use") {
  world w({.block_size = 4, .num_blocks = 10});
  const seq_id seq = w.compute(counting(9));
  CHECK_FALSE(w.manager.reset_prefix_cache());
  CHECK(w.cached(counting(9)) == 8);
  w.manager.free(seq);
  CHECK(w.manager.reset_prefix_cache());
  CHECK(w.cached(counting(9)) == 0);
  kv_cache_manager plain({.num_blocks = 4});
  CHECK(plain.reset_prefix_cache());
  CHECK(plain.prefix() == nullptr);
}

TEST_CASE("with a sliding window, a hit takes only the blocks that later tokens see") {
  world w({.block_size = 4, .num_blocks = 20, .sliding_window = 6});
  w.compute_and_leave(counting(16));
  const open_result got = w.open(counting(17));
  REQUIRE(got.status == alloc_status::ok);
  CHECK(got.num_cached_tokens == 16);
  CHECK(w.manager.num_released_blocks(got.seq) == 2);  // position 11 is the first that token 16 attends to
  CHECK(w.table(got.seq).size() == 5);
  CHECK(w.manager.stats().num_table_entries == 3);
  // Blocks that slid out of the window are evicted before those in it.
  w.manager.free(got.seq);
  const std::vector<int> last = w.free_order();
  CHECK(std::vector(last.end() - 4, last.end()) == std::vector{1, 0, 3, 2});
  CHECK(w.manager.check() == "");
  world slides({.block_size = 4, .num_blocks = 20, .sliding_window = 6});
  const seq_id seq = slides.open(counting(16)).seq;
  slides.manager.commit(seq, counting(8));
  CHECK(slides.table(seq)[0] == 0);  // position 3 is visible to token 8
  slides.manager.commit(seq, counting(8, 8));
  const std::vector<int> order = slides.free_order();
  CHECK(order.size() == 18);
  CHECK(std::vector(order.end() - 2, order.end()) == std::vector{1, 0});
  CHECK(slides.cached(counting(17)) == 16);  // and found as long as they are there
}

TEST_CASE("a commit without tokens ends publishing, and what was published stays") {
  world w({.block_size = 4, .num_blocks = 10});
  const seq_id seq = w.compute(counting(6));
  REQUIRE(w.manager.append(seq, 10).status == alloc_status::ok);
  w.manager.commit(seq, 1);
  w.manager.commit(seq, counting(9, 7));
  CHECK(w.manager.prefix()->stats().num_published_blocks == 1);
  w.manager.free(seq);
  CHECK(w.cached(counting(16)) == 4);
}

// --- swapping

TEST_CASE("sequences that share go to the host together and come back together") {
  world w({.block_size = 4, .num_blocks = 10, .num_host_blocks = 10});
  const seq_id a = w.compute(counting(10));
  const seq_id b = w.manager.fork(a).seq;
  const seq_id both[] = {a, b};
  std::vector<block_copy> copies;
  REQUIRE(w.manager.swap_out(both, copies) == alloc_status::ok);
  CHECK(copies ==
        std::vector<block_copy>{{block_id{0}, block_id{0}}, {block_id{1}, block_id{1}}, {block_id{2}, block_id{2}}});
  CHECK(w.manager.num_free_blocks() == 10);
  CHECK(w.manager.num_free_host_blocks() == 7);
  CHECK(w.manager.is_swapped_out(a));
  // Full blocks are still there: only the shared tail is brought back, once.
  CHECK(w.manager.blocks_to_swap_in(both) == 3);
  copies.clear();
  REQUIRE(w.manager.swap_in(both, copies) == alloc_status::ok);
  CHECK(copies.size() == 1);
  CHECK(copies[0].src == block_id{2});
  CHECK(w.table(a) == w.table(b));
  CHECK(w.manager.num_free_blocks() == 7);
  CHECK(w.manager.num_free_host_blocks() == 10);
  const append_result got = w.manager.append(b, 1);
  CHECK(got.has_copy());  // still shared, so still copied on write
  // And out again: the full blocks' copies are there, too.
  copies.clear();
  REQUIRE(w.manager.swap_out(both, copies) == alloc_status::ok);
  CHECK(copies.size() == 2);
  CHECK(w.manager.check() == "");
  w.manager.free(a);
  w.manager.free(b);
  CHECK(w.manager.num_free_host_blocks() == 10);
}

TEST_CASE("a block that others use stays with them when one of its sequences goes") {
  world w({.block_size = 4, .num_blocks = 6, .num_host_blocks = 4});
  const seq_id a = w.compute(counting(8));
  const seq_id b = w.manager.fork(a).seq;
  std::vector<block_copy> copies;
  REQUIRE(w.manager.swap_out(std::vector{b}, copies) == alloc_status::ok);
  CHECK(copies.size() == 2);
  CHECK(w.manager.num_free_blocks() == 4);
  CHECK(w.manager.blocks_to_swap_in(std::vector{b}) == 0);
  copies.clear();
  REQUIRE(w.manager.swap_in(std::vector{b}, copies) == alloc_status::ok);
  CHECK(copies.empty());
  CHECK(w.table(b) == w.table(a));
  CHECK(w.manager.check() == "");
}

TEST_CASE("what the fork writes after its parent went to the host does not come back with the parent") {
  world w({.block_size = 4, .num_blocks = 6, .num_host_blocks = 4});
  kv_cache_manager& manager = w.manager;
  const seq_id a = manager.allocate(4).seq;
  manager.commit(a, 4);
  const seq_id b = manager.fork(a).seq;
  manager.truncate(b, 2);  // the block is shared still
  std::vector<block_copy> copies;
  REQUIRE(manager.swap_out(std::vector{a}, copies) == alloc_status::ok);
  REQUIRE_FALSE(manager.append(b, 1).has_copy());  // now it is b's alone
  copies.clear();
  REQUIRE(manager.swap_in(std::vector{a}, copies) == alloc_status::ok);
  CHECK(copies.size() == 1);
  CHECK(w.table(a) != w.table(b));
}

TEST_CASE("what is computed after a swap is copied by the next one") {
  world w({.block_size = 4, .num_blocks = 6, .num_host_blocks = 4});
  const seq_id seq = w.manager.allocate(8).seq;
  w.manager.commit(seq, counting(4));
  std::vector<block_copy> copies;
  REQUIRE(w.manager.swap_out(std::vector{seq}, copies) == alloc_status::ok);
  REQUIRE(w.manager.swap_in(std::vector{seq}, copies) == alloc_status::ok);
  w.manager.commit(seq, counting(4, 4));  // written just now
  copies.clear();
  REQUIRE(w.manager.swap_out(std::vector{seq}, copies) == alloc_status::ok);
  REQUIRE(copies.size() == 1);
}

TEST_CASE("a full host says later, one that is too small never, and nothing has changed") {
  world w({.block_size = 4, .num_blocks = 10, .num_host_blocks = 3});
  const seq_id a = w.compute(counting(8)), b = w.compute(counting(8, 50)), c = w.compute(counting(16, 100));
  std::vector<block_copy> copies;
  REQUIRE(w.manager.swap_out(std::vector{a}, copies) == alloc_status::ok);
  copies.clear();
  const std::uint64_t before = w.manager.digest();
  CHECK(w.manager.swap_out(std::vector{b}, copies) == alloc_status::later);
  CHECK(w.manager.swap_out(std::vector{c}, copies) == alloc_status::never);
  CHECK(copies.empty());
  CHECK(w.manager.digest() == before);
  const seq_id filler = w.manager.allocate(16).seq;  // all that is left of the device
  const std::uint64_t full = w.manager.digest();
  CHECK(w.manager.swap_in(std::vector{a}, copies) == alloc_status::later);
  CHECK(copies.empty());
  CHECK(w.manager.digest() == full);
  w.manager.free(filler);
  CHECK(w.manager.swap_in(std::vector{a}, copies) == alloc_status::ok);
  CHECK(copies.size() == 2);  // their blocks were handed out meanwhile
  CHECK(w.manager.check() == "");
}

TEST_CASE("cached contents of a swapped-out sequence serve others until they are evicted") {
  world w({.block_size = 4, .num_blocks = 6, .num_host_blocks = 6});
  const seq_id a = w.compute(counting(9));
  std::vector<block_copy> copies;
  REQUIRE(w.manager.swap_out(std::vector{a}, copies) == alloc_status::ok);
  CHECK(w.cached(counting(9)) == 8);
  const seq_id b = w.compute(counting(9));
  copies.clear();
  REQUIRE(w.manager.swap_in(std::vector{a}, copies) == alloc_status::ok);
  CHECK(copies.size() == 1);
  CHECK(w.table(a)[0] == w.table(b)[0]);
  CHECK(w.table(a)[1] == w.table(b)[1]);
  CHECK(w.manager.check() == "");
}

// --- fences

TEST_CASE("what ends while a step is in flight is not handed out before that step has retired") {
  world w({.block_size = 4, .num_blocks = 6, .num_host_blocks = 4});
  const seq_id a = w.compute(counting(8)), b = w.manager.allocate(8).seq;
  const fence_id first = w.manager.open_fence();
  w.manager.free(a);
  const fence_id second = w.manager.open_fence();
  w.manager.free(b);
  CHECK(w.manager.num_free_blocks() == 2);
  CHECK(w.manager.pool().num_fenced() == 4);
  CHECK(w.manager.allocate(12).status == alloc_status::later);
  CHECK(w.cached(counting(9)) == 8);  // to be found all the same
  const seq_id c = w.compute(counting(9));
  CHECK(w.table(c)[0] == 0);
  w.manager.free(c);
  w.manager.retire(first);
  CHECK(w.manager.pool().num_fenced() > 0);  // released again under the second
  w.manager.retire(second);
  CHECK(w.manager.num_free_blocks() == 6);
  CHECK(w.manager.check() == "");
}

TEST_CASE("host blocks wait for fences as well") {
  world w({.block_size = 4, .num_blocks = 6, .num_host_blocks = 2});
  const seq_id a = w.compute(counting(8)), b = w.compute(counting(8, 50));
  std::vector<block_copy> copies;
  REQUIRE(w.manager.swap_out(std::vector{a}, copies) == alloc_status::ok);
  const fence_id fence = w.manager.open_fence();
  REQUIRE(w.manager.swap_in(std::vector{a}, copies) == alloc_status::ok);
  CHECK(w.manager.num_free_host_blocks() == 0);
  CHECK(w.manager.swap_out(std::vector{b}, copies) == alloc_status::later);
  w.manager.retire(fence);
  CHECK(w.manager.swap_out(std::vector{b}, copies) == alloc_status::ok);
}

TEST_CASE("two managers with one seed give equal keys, events and digests") {
  const auto run = [](const std::optional<hash_seed>& seed) {
    kv_cache_config config{.block_size = 4, .num_blocks = 10, .first_generation = 6};
    config.prefix.seed = seed;
    config.prefix.record_events = true;
    world w(config);
    w.compute_and_leave(counting(12));
    w.compute_and_leave(counting(20, 5));
    std::vector<cache_event> events;
    w.manager.drain_events(events);
    return std::pair(w.manager.digest(), events);
  };
  const auto one = run(hash_seed{1, 2}), same = run(hash_seed{1, 2}), other = run(hash_seed{1, 3});
  CHECK(one.first == same.first);
  CHECK(one.second == same.second);
  CHECK(one.second != other.second);
  CHECK(run(std::nullopt).second != run(std::nullopt).second);  // secret and fresh unless it is set
}

}  // namespace
}  // namespace bifolio::test
