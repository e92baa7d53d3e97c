// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/block_pool.hpp>
#include <bifolio/memory_resource.hpp>
#include <deque>
#include <set>
#include <string>
#include <vector>

#include "common/cache_logic_helpers.hpp"
#include "reference/pool_oracle.hpp"
#include "support/random.hpp"

namespace bifolio::test {
namespace {

std::vector<block_id> ids(std::initializer_list<int> values) {
  std::vector<block_id> result;
  for (const int value : values) result.push_back(block_id{value});
  return result;
}

TEST_CASE("a pool gives each block once, then says later, and takes them back in any order") {
  block_pool pool(37);
  std::vector<block_id> all(37);
  REQUIRE(pool.allocate(all) == alloc_status::ok);
  std::set<int> unique;
  for (const block_id id : all) unique.insert(to_index(id));
  CHECK(unique.size() == 37);
  CHECK(*unique.begin() == 0);
  CHECK(*unique.rbegin() == 36);
  CHECK(pool.num_free() == 0);
  const std::uint64_t before = pool.digest();
  std::vector<block_id> one(1, invalid_block);
  CHECK(pool.allocate(one) == alloc_status::later);
  CHECK(one[0] == invalid_block);
  CHECK(pool.allocate_one() == invalid_block);
  CHECK(pool.digest() == before);
  random_source random(test_seed());
  for (std::size_t i = all.size(); i > 1; --i) {
    std::swap(all[i - 1], all[static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(i) - 1))]);
  }
  for (const block_id id : all) pool.release(id);
  CHECK(pool.num_free() == 37);
  CHECK(pool.num_used() == 0);
  CHECK(pool.check() == "");
}

TEST_CASE("allocation is all or nothing, and never is not later") {
  block_pool pool(8);
  std::vector<block_id> five(5), four(4, invalid_block), nine(9, invalid_block);
  REQUIRE(pool.allocate(five) == alloc_status::ok);
  const std::uint64_t before = pool.digest();
  CHECK(pool.allocate(four) == alloc_status::later);
  CHECK(pool.allocate(nine) == alloc_status::never);
  CHECK(four[0] == invalid_block);
  CHECK(nine[0] == invalid_block);
  CHECK(pool.digest() == before);
}

TEST_CASE("a pool that is partly used gives exactly the blocks that are left") {
  block_pool pool(8);
  std::vector<block_id> three(3), five(5), none;
  REQUIRE(pool.allocate(three) == alloc_status::ok);
  CHECK(pool.allocate(five) == alloc_status::ok);
  CHECK(pool.num_free() == 0);
  CHECK(pool.check() == "");
  kv_cache_manager manager({.block_size = 4, .num_blocks = 8});
  REQUIRE(manager.allocate(12).status == alloc_status::ok);
  CHECK(manager.allocate(21).status == alloc_status::later);
  const seq_id rest = manager.allocate(20).seq;
  CHECK(manager.num_free_blocks() == 0);
  manager.free(rest);
  CHECK(manager.num_free_blocks() == 5);
}

TEST_CASE("requests for no blocks do nothing") {
  block_pool pool(2);
  const std::uint64_t before = pool.digest();
  CHECK(pool.allocate({}) == alloc_status::ok);
  pool.retain(std::span<const block_id>{});
  pool.release(std::span<const block_id>{});
  CHECK(pool.digest() == before);
}

TEST_CASE("a released sequence is evicted tail first, worthless blocks before never-used ones") {
  block_pool pool(6);
  std::vector<block_id> sequence(3);
  REQUIRE(pool.allocate(sequence) == alloc_status::ok);
  const block_id scratch = pool.allocate_one();
  pool.release(sequence);
  pool.release(scratch, reuse_order::first);
  CHECK(free_order(pool) == std::vector<int>{3, 4, 5, 2, 1, 0});
}

TEST_CASE("a retained block becomes free with its last release only") {
  block_pool pool(3);
  const block_id id = pool.allocate_one();
  pool.retain(id);
  pool.retain(std::vector{id, id});
  CHECK(pool.num_refs(id) == 4);
  CHECK(pool.is_shared(id));
  pool.release(std::vector{id, id, id});
  CHECK(pool.num_refs(id) == 1);
  CHECK(pool.num_free() == 2);
  pool.release(id);
  CHECK(pool.num_refs(id) == 0);
  CHECK(pool.num_free() == 3);
  CHECK(pool.check() == "");
}

TEST_CASE("an id may be twice in one release when it has two references") {
  block_pool pool(3);
  const block_id id = pool.allocate_one();
  pool.retain(id);
  pool.release(std::vector{id, id});
  CHECK(pool.num_free() == 3);
  CHECK(pool.check() == "");
}

TEST_CASE("double free and foreign ids are reported at the call and change nothing") {
  block_pool pool(5);
  std::vector<block_id> held(3);
  REQUIRE(pool.allocate(held) == alloc_status::ok);  // 0 1 2
  const std::uint64_t before = pool.digest();
  CHECK(code_of([&] { pool.release(block_id{4}); }) == errc::not_found);
  CHECK(code_of([&] { pool.release(ids({0, 1, 4})); }) == errc::not_found);
  CHECK(code_of([&] { pool.release(ids({0, 1, 1})); }) == errc::not_found);
  CHECK(code_of([&] { pool.retain(block_id{3}); }) == errc::not_found);
  CHECK(code_of([&] { pool.retain(ids({2, 0, 3})); }) == errc::not_found);
  for (const int foreign : {-1, 5, 6, 2147480000, INT32_MAX, INT32_MIN}) {
    CAPTURE(foreign);
    pool.prefetch(ids({foreign, 0}));  // a hint takes anything
    CHECK(code_of([&] { pool.release(block_id{foreign}); }) == errc::invalid_argument);
    CHECK(code_of([&] { pool.release(ids({0, foreign})); }) == errc::invalid_argument);
    CHECK(code_of([&] { pool.retain(ids({0, foreign})); }) == errc::invalid_argument);
    CHECK(code_of([&] { pool.retain(block_id{foreign}); }) == errc::invalid_argument);
    CHECK(code_of([&] { (void)pool.num_refs(block_id{foreign}); }) == errc::invalid_argument);
  }
  CHECK(pool.digest() == before);
  CHECK(pool.check() == "");
}

TEST_CASE("impossible sizes are refused before anything is allocated") {
  counting_memory_resource memory(default_host_memory());
  for (const std::int64_t size : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 31, max_num_blocks + 1,
                                  std::int64_t{1} << 62, INT64_MAX, INT64_MIN}) {
    CAPTURE(size);
    CHECK(code_of([&] { block_pool pool(size, memory); }) == errc::invalid_argument);
  }
  CHECK(memory.num_allocations() == 0);
  limiting_memory_resource little(default_host_memory(), 1 << 20);
  CHECK(code_of([&] { block_pool pool(max_num_blocks, little); }) == errc::out_of_memory);
  CHECK(little.used_bytes() == 0);
}

TEST_CASE("a pool allocates once, when it is made") {
  counting_memory_resource memory(default_host_memory());
  block_pool pool(1000, memory);
  const std::int64_t after_construction = memory.num_allocations();
  CHECK(after_construction == 1);
  std::vector<block_id> all(1000);
  for (int round = 0; round < 3; ++round) {
    REQUIRE(pool.allocate(all) == alloc_status::ok);
    pool.release(all);
  }
  CHECK(memory.num_allocations() == after_construction);
}

TEST_CASE("a free block that is taken up again leaves the queue from anywhere") {
  block_pool pool(40);
  for (const int b : {0, 39, 17, 18, 19, 20}) pool.touch(block_id{b});
  CHECK(pool.check() == "");
  CHECK(pool.num_free() == 34);
  CHECK(pool.num_refs(block_id{17}) == 1);
  pool.touch(block_id{17});
  CHECK(pool.num_refs(block_id{17}) == 2);
  std::vector<block_id> rest(34);
  REQUIRE(pool.allocate(rest) == alloc_status::ok);
  CHECK(to_index(rest.front()) == 1);
  CHECK(to_index(rest.back()) == 38);
  CHECK(code_of([&] { pool.touch(block_id{40}); }) == errc::invalid_argument);
}

TEST_CASE("lower levels are handed out first, whenever they were released") {
  block_pool pool(4);
  std::vector<block_id> all(4);
  REQUIRE(pool.allocate(all) == alloc_status::ok);
  pool.set_level(block_id{0}, 5);
  pool.set_level(block_id{1}, 7);
  pool.set_level(block_id{2}, 5);
  for (const block_id id : all) pool.release(id);
  CHECK(free_order(pool) == std::vector<int>{3, 0, 2, 1});
  pool.set_level(block_id{1}, 0);
  CHECK(free_order(pool) == std::vector<int>{3, 1, 0, 2});
  CHECK(code_of([&] { pool.set_level(block_id{1}, num_block_levels); }) == errc::invalid_argument);
  CHECK(pool.check() == "");
}

TEST_CASE("blocks released under a fence are free when it and those before it have retired") {
  block_pool pool(4);
  std::vector<block_id> all(4);
  REQUIRE(pool.allocate(all) == alloc_status::ok);
  const fence_id first = pool.open_fence();
  pool.release(all[0]);
  pool.release(all[1]);
  const fence_id second = pool.open_fence();
  pool.release(all[2]);
  CHECK(pool.num_free() == 0);
  CHECK(pool.num_fenced() == 3);
  CHECK(pool.allocate_one() == invalid_block);
  pool.touch(all[1]);  // wanted again before the fence retired
  CHECK(code_of([&] { pool.retire(second); }) == errc::invalid_argument);
  pool.retire(first);
  CHECK(free_order(pool) == std::vector<int>{0});
  pool.release(all[1]);
  CHECK(pool.num_fenced() == 2);
  pool.retire(second);
  CHECK(free_order(pool) == std::vector<int>{0, 2, 1});
  CHECK(pool.num_fenced() == 0);
  CHECK(pool.check() == "");
  CHECK(code_of([&] { pool.retire(second); }) == errc::invalid_argument);
  for (std::uint32_t i = 0; i < block_pool::max_open_fences; ++i) (void)pool.open_fence();
  CHECK(code_of([&] { (void)pool.open_fence(); }) == errc::failed_precondition);
}

TEST_CASE("random operations give the order and counts of plain lists") {
  INFO(seed_note());
  random_source random(hash_of(test_seed(), 7));
  for (const int num_blocks : {23, 200}) {
    block_pool pool(num_blocks);
    pool_oracle model(num_blocks);
    std::vector<int> held;  // one entry a reference
    std::deque<fence_id> fences;
    for (int i = 0; i < 60000; ++i) {
      const auto some = [&] {
        return static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(held.size()) - 1));
      };
      const int any = static_cast<int>(random.between(0, num_blocks - 1));
      switch (random.between(0, 7)) {
        case 0: {
          std::vector<block_id> out(static_cast<std::size_t>(random.between(0, 6)));
          const bool fits = static_cast<std::int64_t>(out.size()) <= model.num_free();
          REQUIRE((pool.allocate(out) == alloc_status::ok) == fits);
          if (!fits) break;
          for (const block_id id : out) {
            REQUIRE(to_index(id) == model.take());
            held.push_back(to_index(id));
          }
          break;
        }
        case 1:
          if (held.empty()) break;
          held.push_back(held[some()]);
          model.add_user(held.back());
          pool.retain(block_id{held.back()});
          break;
        case 2:
          pool.touch(block_id{any});
          model.add_user(any);
          held.push_back(any);
          break;
        case 3: {
          const int level = static_cast<int>(random.between(0, num_block_levels - 1));
          pool.set_level(block_id{any}, static_cast<block_level>(level));
          model.set_level(any, level);
          break;
        }
        case 4:
          if (random.one_in(2) && fences.size() < 4) {
            fences.push_back(pool.open_fence());
            (void)model.open_fence();
          } else if (!fences.empty()) {
            pool.retire(fences.front());
            fences.pop_front();
            model.retire();
          }
          break;
        default: {
          const auto order = random.one_in(2) ? reuse_order::last : reuse_order::first;
          std::vector<block_id> list;
          for (auto n = random.between(0, 4); n > 0 && !held.empty(); --n) {
            const std::size_t at = some();
            list.push_back(block_id{held[at]});
            held.erase(held.begin() + static_cast<std::ptrdiff_t>(at));
          }
          pool.release(list, order);
          // The last first, and an id that is there more than once by its last appearance.
          for (std::size_t k = list.size(); k-- > 0;) {
            const auto from = list.begin() + static_cast<std::ptrdiff_t>(k);
            if (std::find(from + 1, list.end(), *from) != list.end()) continue;
            for (auto n = std::count(list.begin(), from + 1, *from); n > 0; --n) {
              model.drop(to_index(*from), order == reuse_order::last);
            }
          }
        }
      }
      if (i % 64 == 0) {
        REQUIRE(pool.check() == "");
        REQUIRE(free_order(pool) == model.order());
        REQUIRE(pool.num_fenced() == model.num_waiting());
        for (int b = 0; b < num_blocks; ++b) {
          REQUIRE(static_cast<int>(pool.num_refs(block_id{b})) == model.users(b));
          REQUIRE(pool.level(block_id{b}) == model.level(b));
          REQUIRE(pool.is_free(block_id{b}) == model.is_free(b));
        }
        const std::vector<int> order = model.order();
        for (std::uint32_t k = 0; k < order.size() && k < 14; ++k) {
          const block_id next = pool.upcoming(k);
          REQUIRE((next == invalid_block || to_index(next) == order[k]));
        }
      }
    }
  }
}

}  // namespace
}  // namespace bifolio::test
