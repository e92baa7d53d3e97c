// SPDX-License-Identifier: Apache-2.0
/// The manager with several layer groups against the oracle of maps and vectors; group_run.hpp says what is compared.

#include <doctest/doctest.h>

#include <iterator>

#include "common/group_run.hpp"

namespace bifolio::test {
namespace {

constexpr auto full = group_kind::full;
constexpr auto window = group_kind::window;
constexpr auto state = group_kind::state;
constexpr auto cross = group_kind::cross;

group_config table(group_kind kind, std::int32_t block_size, std::int64_t num_blocks, std::int64_t num_host_blocks = 0,
                   std::int32_t width = 0) {
  group_config group{
      .kind = kind, .block_size = block_size, .num_blocks = num_blocks, .num_host_blocks = num_host_blocks};
  (kind == cross ? group.max_tokens : group.window) = width;
  return group;
}
group_config states(std::int64_t num_blocks, std::int64_t num_host_blocks = 0, std::int32_t interval = 0,
                    std::int32_t num_drafts = 0) {
  return {.kind = state,
          .block_size = 1,
          .num_blocks = num_blocks,
          .num_host_blocks = num_host_blocks,
          .snapshot_interval = interval,
          .num_draft_slots = num_drafts};
}

group_config spaced(group_config group, std::int32_t interval) {
  group.snapshot_interval = interval;
  return group;
}

const std::vector<group_run_shape>& shapes() {
  static const std::vector<group_run_shape> all{
      // groups, max_sequences, longest, prefix, fences
      {{table(full, 4, 40), table(window, 4, 20, 0, 6)}, 8, 60},
      {{table(full, 4, 60, 20), table(window, 2, 40, 20, 9), states(24, 12)}, 8, 60},
      {{table(window, 4, 30, 0, 12), table(full, 2, 80), table(window, 1, 60, 0, 3)}, 8, 60, false, true},
      {{table(full, 4, 60, 30), table(cross, 2, 12, 6, 8), states(30, 10, 0, 3)}, 8, 50, false, true},
      {{table(full, 4, 60), table(window, 4, 40, 0, 6)}, 10, 60, true},
      {{table(full, 4, 80), table(full, 8, 30)}, 10, 60, true},
      {{table(full, 8, 40), table(window, 2, 60, 0, 5), table(window, 4, 50, 0, 17)}, 10, 90, true, true},
      {{table(full, 4, 80), states(16)}, 6, 60, true},
      {{table(full, 4, 80), states(40, 0, 8, 2)}, 8, 60, true, true},
      {{table(full, 2, 120, 60), table(window, 4, 40, 20, 7), states(40, 20, 8)}, 8, 70, true, true},
      {{table(full, 4, 90), table(cross, 2, 14, 0, 8)}, 8, 50, true},
      {{table(full, 4, 90, 40), table(cross, 3, 20, 8, 8), table(window, 8, 30, 16, 12), states(40, 16, 4, 1)},
       8,
       70,
       true,
       true},
      {{table(full, 16, 60), table(window, 1, 200, 0, 4), states(60), states(50)}, 12, 200, true},
      {{table(full, 1, 400), table(window, 4, 90, 0, 30), states(40, 0, 16)}, 12, 150, true, true},
      {{table(full, 4, 120), spaced(table(window, 4, 50, 0, 9), 12), table(window, 8, 30, 0, 20)}, 10, 120, true},
  };
  return all;
}

TEST_CASE("millions of random operations on layer groups give the oracle's answers, blocks, copies and contents") {
  MESSAGE(seed_note());
  const std::int64_t num_operations = BIFOLIO_RANDOM_OPERATIONS * (num_test_runs() > 1 ? 2 * num_test_runs() : 1);
  const std::int64_t operations_each = num_operations / static_cast<std::int64_t>(shapes().size()) + 1;
  group_run_tally all;
  for (std::size_t i = 0; i < shapes().size(); ++i) {
    CAPTURE(i);
    group_run run(shapes()[i], hash_of(test_seed(), i));
    CHECK(run.run(operations_each) == "");
    const group_run_tally& one = run.tally();
    all.num_hits += one.num_hits;
    all.num_shorter_hits += one.num_shorter_hits;
    all.num_cross_hits += one.num_cross_hits;
    all.num_copies += one.num_copies;
    all.num_refusals += one.num_refusals;
    all.num_swaps += one.num_swaps;
    all.num_kept_states += one.num_kept_states;
    all.num_lost_states += one.num_lost_states;
    all.num_null_hits += one.num_null_hits;
  }
  // The mix is worth its name. The numbers are for two million operations.
  const auto enough = [&](std::int64_t count, std::int64_t least) {
    return count >= least * (num_operations / 100000) / 20;
  };
  CHECK(enough(all.num_hits, 15000));
  CHECK(enough(all.num_shorter_hits, 20000));
  CHECK(enough(all.num_cross_hits, 3000));
  CHECK(enough(all.num_copies, 25000));
  CHECK(enough(all.num_refusals, 150000));
  CHECK(enough(all.num_swaps, 15000));
  CHECK(enough(all.num_kept_states, 30000));
  CHECK(enough(all.num_lost_states, 25000));
  CHECK(enough(all.num_null_hits, 5000));
}

}  // namespace
}  // namespace bifolio::test
