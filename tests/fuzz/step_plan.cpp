// SPDX-License-Identifier: Apache-2.0
// The text of a step plan: what is accepted comes back from its own text.
#include <bifolio/error.hpp>
#include <bifolio/step.hpp>

#include "fuzz_target.hpp"
#include "scratch_files.hpp"

BIFOLIO_FUZZ_TARGET(step_plan) {
  using namespace bifolio::fuzz;
  try {
    const bifolio::step_plan plan = bifolio::parse_step_plan(text_of(input));
    if (bifolio::parse_step_plan(bifolio::to_string(plan)) != plan) flaw("a plan does not come back from its text");
  } catch (const bifolio::error& refused) {
    if (refused.code() != bifolio::errc::invalid_argument) flaw("refused with another code");
  }
}
