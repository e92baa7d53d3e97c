// SPDX-License-Identifier: Apache-2.0
/// Long runs of the scheduler in which every call lacks memory first: its first allocation fails, then its second,
/// until it needs no more. A call that throws leaves the state as it was; one that does with less goes on; and in the
/// end every sequence has the tokens that it has alone. A call that allocates past its reservations, where nothing may
/// throw, ends the process.

#include <doctest/doctest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "common/failing_memory.hpp"
#include "common/scheduler_run.hpp"

namespace bifolio::test {
namespace {

class failing_caller final : public scheduler_caller {
 public:
  explicit failing_caller(std::uint64_t seed) : random_(seed) {}

  void call(const scheduler& plans, const std::function<void()>& make) override {
    ++num_calls;
    for (int nth = 1;; ++nth) {
      const std::uint64_t before = plans.digest();
      num_failures = 0;
      fails_for_good = random_.one_in(2);
      calls_until_failure = nth;
      bool threw = false;
      bool right_code = true;
      try {
        make();
      } catch (const error& refused) {
        threw = true;
        // Drafts for a sequence that cannot take any now, also without memory for the sentence: the run's to answer.
        if (refused.code() == errc::failed_precondition) {
          calls_until_failure = 0;
          throw;
        }
        right_code = refused.code() == errc::out_of_memory;
      } catch (const std::bad_alloc&) {
        threw = true;
        right_code = false;
        problem = "std::bad_alloc out of a call";
      }
      calls_until_failure = 0;
      num_failed += num_failures;
      num_thrown += threw ? 1 : 0;
      if (!right_code && problem.empty()) problem = "a call that lacks memory throws something else";
      if (threw && num_failures == 0) problem = "a call throws without a failed allocation";
      // Only schedule may have taken requests from its intake, and nothing else runs then.
      if (threw && plans.digest() != before && plans.stats().num_running > 0) problem = "a failed call left a trace";
      if (!threw) return;
      if (nth > 500) std::abort();
    }
  }

  std::int64_t num_calls = 0;
  std::int64_t num_failed = 0;
  std::int64_t num_thrown = 0;
  std::string problem;

 private:
  random_source random_;
};

TEST_CASE("steps whose every call lacks memory at each of its allocations in turn change no token") {
  MESSAGE(seed_note());
  const scheduler_shape shapes[] = {
      {.name = "plain", .most_samples = 3, .abort_one_in = 20},
      {.name = "prefixes and events", .num_blocks = 30, .most_samples = 2, .most_drafts = 3, .prefix_caching = true},
      {.name = "everything",
       .num_blocks = 36,
       .max_running = 12,
       .max_chunk_tokens = 9,
       .longest_prompt = 20,
       .longest_answer = 24,
       .most_samples = 3,
       .most_beams = 4,
       .most_drafts = 4,
       .abort_one_in = 15,
       .prefix_caching = true,
       .num_host_blocks = 40,
       .preemption = preemption_mode::swap,
       .fail_one_in = 5,
       .steps_in_flight = 2,
       .most_priority = 3},
      {.name = "groups",
       .most_samples = 2,
       .prefix_caching = true,
       .num_host_blocks = 40,
       .preemption = preemption_mode::swap,
       .groups = {{.kind = group_kind::full, .block_size = 4, .num_blocks = 30, .num_host_blocks = 40},
                  {.kind = group_kind::window, .block_size = 4, .num_blocks = 16, .num_host_blocks = 30, .window = 10},
                  {.kind = group_kind::state, .block_size = 1, .num_blocks = 14, .num_host_blocks = 20}}},
      {.name = "a window",
       .num_blocks = 16,
       .max_chunk_tokens = 7,
       .longest_prompt = 90,
       .most_samples = 3,
       .sliding_window = 9,
       .abort_one_in = 9,
       .num_host_blocks = 30},
  };
  std::int64_t num_steps = 0;
  std::int64_t num_failed = 0;
  for (std::size_t i = 0; i < std::size(shapes); ++i) {
    for (std::uint64_t run = 0; run < static_cast<std::uint64_t>(2 * num_test_runs()); ++run) {
      CAPTURE(shapes[i].name);
      CAPTURE(run);
      const std::uint64_t seed = hash_of(test_seed(), i, run);  // events are recorded for even ones
      failing_caller caller(seed);
      const scheduler_outcome got = scheduler_run(shapes[i], seed / 2 * 2 + run % 2, &caller).run(60);
      CHECK(got.problem == "");
      CHECK(caller.problem == "");
      CHECK(caller.num_thrown > 0);
      num_steps += got.stats.num_steps;
      num_failed += caller.num_failed;
    }
  }
  MESSAGE(num_steps, " steps, ", num_failed, " failed allocations");
  CHECK(num_steps >= 2000);
  CHECK(num_failed > 5000);
}

}  // namespace
}  // namespace bifolio::test
