// SPDX-License-Identifier: Apache-2.0
// Calls of a manager with prefix caching, host blocks and fences, side by side with the naive model of the tests. The
// input is the list of choices that the random tests draw from a generator.
#include <string>

#include "choices.hpp"
#include "common/manager_run.hpp"
#include "fuzz_target.hpp"

BIFOLIO_FUZZ_TARGET(manager) {
  using namespace bifolio;
  fuzz::choices from(input);
  const std::uint8_t options = from.byte();
  const test::manager_shape shape{.block_size = 1 + from.below(8),
                                  .num_blocks = 4 + from.below(40),
                                  .sliding_window = (options & 1) != 0 ? 1 + from.below(24) : 0,
                                  .max_sequences = 1 + from.below(12),
                                  .longest = 1 + from.below(60),
                                  .percent_full = (options & 2) != 0 ? 100 : 80,
                                  .key_bits = (options & 4) != 0 ? (options & 8) != 0 ? 64 : 2 : 0,
                                  .deduplicate = (options & 16) != 0,
                                  .num_host_blocks = (options & 32) != 0 ? from.below(20) : 0,
                                  .fences = (options & 64) != 0};
  const auto rest = from.rest();
  test::manager_run run(shape, 1, test::random_source(rest));
  const std::string problem = run.run(static_cast<std::int64_t>(rest.size() / 4));
  if (!problem.empty()) fuzz::flaw(problem);
}
