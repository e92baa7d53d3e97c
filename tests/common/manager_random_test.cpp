// SPDX-License-Identifier: Apache-2.0
/// Pool, tables, prefix cache and manager against the oracle of maps and vectors, under long random mixes of all
/// operations; manager_run.hpp says what is compared.

#include <doctest/doctest.h>

#include <iterator>

#include "common/manager_run.hpp"

namespace bifolio::test {
namespace {

// block_size, num_blocks, sliding_window, max_sequences, longest, percent_full, key_bits, deduplicate, host, fences
constexpr manager_shape shapes[] = {
    // without prefix caching
    {1, 1, 0, 3, 2, 90},
    {1, 7, 0, 8, 8, 90, 0, false, 4},
    {4, 24, 0, 8, 40, 90, 0, false, 10, true},
    {5, 40, 0, 300, 30, 100},
    {1, 600, 0, 12, 300, 80, 0, false, 300},
    {2, 900, 0, 20, 500, 100},
    {4, 30, 9, 8, 60, 90, 0, false, 8},
    {1, 300, 5, 16, 200, 100},
    {2, 700, 150, 12, 900, 90},
    {1, 1500, 400, 16, 1000, 80, 0, false, 600, true},
    {1, 1, 1, 2, 3, 100, 0, false, 1},
    {7, 50, 1, 16, 80, 100},
    // with it
    {1, 3, 0, 3, 4, 100, 128, false, 2},
    {1, 40, 0, 8, 30, 90, 128, true, 30, true},
    {3, 12, 0, 4, 30, 100, 8, false, 6},
    {3, 60, 0, 12, 60, 90, 128, false},
    {3, 50, 0, 12, 40, 100, 8, true, 200, true},
    {4, 4, 0, 3, 16, 100, 128, false, 3},
    {4, 40, 5, 8, 60, 90, 128, false, 12},
    {4, 60, 64, 12, 200, 90, 8, true, 30, true},
    {16, 64, 0, 16, 300, 80, 128, true, 64},
    {16, 30, 64, 12, 300, 100, 128, false, 5, true},
    {1, 300, 5, 16, 200, 90, 8, false, 20},
    {1, 400, 64, 16, 250, 90, 128, true},
    {2, 250, 0, 16, 350, 90, 128, false, 250, true},
    {3, 80, 5, 300, 20, 100, 1, true, 10},
};

TEST_CASE("millions of random operations give the oracle's answers, blocks, copies, contents and eviction order") {
  MESSAGE(seed_note());
  const std::int64_t num_operations = BIFOLIO_RANDOM_OPERATIONS * num_test_runs();
  const std::int64_t operations_each = num_operations / static_cast<std::int64_t>(std::size(shapes)) + 1;
  cache_stats cache;
  prefix_stats prefix;
  manager_tally all;
  for (std::size_t i = 0; i < std::size(shapes); ++i) {
    CAPTURE(i);
    manager_run run(shapes[i], hash_of(test_seed(), i));
    CHECK(run.run(operations_each) == "");
    const manager_tally one = run.tally();
    cache.num_forks += one.cache.num_forks;
    cache.num_copied_blocks += one.cache.num_copied_blocks;
    cache.num_allocated_blocks += one.cache.num_allocated_blocks;
    cache.num_swapped_out_blocks += one.cache.num_swapped_out_blocks;
    cache.num_swapped_in_blocks += one.cache.num_swapped_in_blocks;
    prefix.num_hit_blocks += one.prefix.num_hit_blocks;
    prefix.num_evicted_blocks += one.prefix.num_evicted_blocks;
    prefix.num_duplicate_blocks += one.prefix.num_duplicate_blocks;
    all.num_refusals += one.num_refusals;
    all.num_copied_prompts += one.num_copied_prompts;
    all.num_fenced += one.num_fenced;
    all.num_resets += one.num_resets;
    all.num_failed_swaps += one.num_failed_swaps;
  }
  // The mix is worth its name. The numbers are for two million operations.
  const auto enough = [&](std::int64_t count, std::int64_t least) {
    return count >= least * (num_operations / 100000) / 20;
  };
  CHECK(enough(cache.num_forks, 50000));
  CHECK(enough(cache.num_copied_blocks, 20000));
  CHECK(enough(cache.num_allocated_blocks, 1000000));
  CHECK(enough(cache.num_swapped_out_blocks, 50000));
  CHECK(enough(cache.num_swapped_in_blocks, 20000));
  CHECK(enough(prefix.num_hit_blocks, 50000));
  CHECK(enough(prefix.num_evicted_blocks, 50000));
  CHECK(enough(prefix.num_duplicate_blocks, 5000));
  CHECK(enough(all.num_refusals, 50000));
  CHECK(enough(all.num_copied_prompts, 1000));
  CHECK(enough(all.num_fenced, 20000));
  CHECK(enough(all.num_resets, 20));
  CHECK(enough(all.num_failed_swaps, 200));
}

}  // namespace
}  // namespace bifolio::test
