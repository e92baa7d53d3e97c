// SPDX-License-Identifier: Apache-2.0
// A scheduler with everything that it can be asked for, beside a simulated engine; each sequence must end with the
// tokens that it has alone. The input is the list of choices that the random tests draw from a generator.
#include <algorithm>
#include <string>

#include "choices.hpp"
#include "common/scheduler_run.hpp"
#include "fuzz_target.hpp"

BIFOLIO_FUZZ_TARGET(scheduler) {
  using namespace bifolio;
  fuzz::choices from(input);
  const std::uint8_t options = from.byte();
  test::scheduler_shape shape{.name = "fuzz",
                              .block_size = 1 + from.below(8),
                              .num_blocks = 8 + from.below(60),
                              .max_running = 2 + from.below(14),
                              .max_tokens_per_step = 4 + from.below(60),
                              .max_chunk_tokens = (options & 1) != 0 ? 1 + from.below(12) : 0,
                              .longest_prompt = 1 + from.below(40),
                              .longest_answer = 1 + from.below(30),
                              .most_samples = 1,
                              .abort_one_in = (options & 2) != 0 ? 3 + from.below(20) : 0,
                              .prefix_caching = (options & 4) != 0,
                              .deduplicate = (options & 8) != 0,
                              .num_host_blocks = (options & 16) != 0 ? 4 + from.below(60) : 0,
                              .steps_in_flight = 1 + from.below(4)};
  const std::uint8_t more = from.byte();
  // As many sequences as may run.
  shape.most_samples = 1 + from.byte() % std::min(shape.max_running, 4);
  if ((more & 1) != 0) shape.most_beams = 1 + from.byte() % std::min(shape.max_running, 4);
  if ((more & 2) != 0) {
    const std::int32_t chunk = shape.max_chunk_tokens > 0 ? shape.max_chunk_tokens : shape.max_tokens_per_step;
    shape.most_drafts = std::min({1 + from.below(5), chunk - 1, shape.max_tokens_per_step - 1});
  }
  if ((more & 4) != 0) shape.sliding_window = 2 + from.below(24);  // what is stored depends on the position before
  if ((more & 8) != 0) shape.most_priority = 1 + from.below(4);
  if ((more & 16) != 0) shape.preemption = preemption_mode::swap;
  if ((more & 32) != 0) shape.fail_one_in = 2 + from.below(6);
  const test::random_source random(from.rest());
  const test::scheduler_outcome got = test::scheduler_run(shape, options & 1, random).run(1 + more / 8);
  if (!got.problem.empty()) fuzz::flaw(got.problem);
}
