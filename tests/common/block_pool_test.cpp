// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/block_pool.hpp>
#include <bifolio/memory_resource.hpp>
#include <deque>
#include <set>
#include <string>
#include <vector>

#include "support/random.hpp"

namespace bifolio::test {
namespace {

std::vector<block_id> ids(std::initializer_list<int> values) {
  std::vector<block_id> result;
  for (const int value : values) result.push_back(block_id{value});
  return result;
}

std::vector<int> free_order(const block_pool& pool) {
  std::vector<block_id> order(static_cast<std::size_t>(pool.num_blocks()));
  order.resize(static_cast<std::size_t>(pool.peek_free(order)));
  std::vector<int> result;
  for (const block_id id : order) result.push_back(to_index(id));
  return result;
}

template <class Call>
errc code_of(Call call) {
  try {
    call();
  } catch (const error& refused) {
    CHECK(std::string(refused.what()).size() > 20);
    return refused.code();
  }
  return errc::ok;
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

TEST_CASE("an id may stand twice in one release when it has two references") {
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

TEST_CASE("random operations give the order and counts of a queue and an array") {
  INFO(seed_note());
  random_source random(hash_of(test_seed(), 7));
  block_pool pool(23);
  std::deque<int> queue;
  std::vector<int> refs(23, 0);
  std::vector<int> held;  // one entry a reference
  for (int b = 0; b < 23; ++b) queue.push_back(b);
  for (int i = 0; i < 100000; ++i) {
    const auto some = [&] {
      return static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(held.size()) - 1));
    };
    switch (random.between(0, 3)) {
      case 0: {
        std::vector<block_id> out(static_cast<std::size_t>(random.between(0, 6)));
        const bool fits = out.size() <= queue.size();
        REQUIRE((pool.allocate(out) == alloc_status::ok) == fits);
        if (!fits) break;
        for (const block_id id : out) {
          REQUIRE(to_index(id) == queue.front());
          refs[static_cast<std::size_t>(queue.front())] = 1;
          held.push_back(queue.front());
          queue.pop_front();
        }
        break;
      }
      case 1:
        if (held.empty()) break;
        held.push_back(held[some()]);
        ++refs[static_cast<std::size_t>(held.back())];
        pool.retain(block_id{held.back()});
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
        for (const block_id id : list) --refs[static_cast<std::size_t>(to_index(id))];
        for (std::size_t k = list.size(); k-- > 0;) {
          const int b = to_index(list[k]);
          if (refs[static_cast<std::size_t>(b)] != 0 || std::find(queue.begin(), queue.end(), b) != queue.end())
            continue;
          if (order == reuse_order::last) {
            queue.push_back(b);
          } else {
            queue.push_front(b);
          }
        }
      }
    }
    REQUIRE(pool.num_free() == static_cast<std::int64_t>(queue.size()));
    if (i % 64 == 0) {
      REQUIRE(pool.check() == "");
      REQUIRE(free_order(pool) == std::vector<int>(queue.begin(), queue.end()));
      for (int b = 0; b < 23; ++b) {
        REQUIRE(static_cast<int>(pool.num_refs(block_id{b})) == refs[static_cast<std::size_t>(b)]);
      }
    }
  }
}

}  // namespace
}  // namespace bifolio::test
