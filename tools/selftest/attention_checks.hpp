// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention calls against the float64 oracle, and against themselves: again, on other threads, in other blocks, among
/// other sequences, in other chunks. Which of these must keep every bit is written in docs/reproducibility.md.

#include <bifolio/attention.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "conformance/attention_case.hpp"
#include "report.hpp"
#include "targets.hpp"

namespace selftest {

/// The cases of this seed, in the order in which they are run: tables of shapes, options and extreme values, then
/// random ones, in turn, so that the first few meet all kinds. A case's place is its number.
[[nodiscard]] std::vector<bifolio::test::attention_case> attention_cases(std::uint64_t seed);

/// A case, its numbers and what must come out. Costs more than the calls that are held against it, and serves all of
/// them.
struct prepared_case {
  prepared_case(std::size_t number, bifolio::test::attention_case the_case);
  prepared_case(const prepared_case&) = delete;
  prepared_case& operator=(const prepared_case&) = delete;

  std::size_t number;
  bifolio::test::attention_case settings;
  bifolio::test::attention_contents contents;
  bifolio::test::attention_expectation expectation;  // refers to the two above
};

/// Runs the case on `where` and adds what came of it to `said`. Never throws for what a backend does wrong.
void check_attention_case(const target& where, const prepared_case& what, report& said);

/// Every attention kernel that the backend can choose; empty where it does not say.
[[nodiscard]] std::vector<std::string> known_kernels(const bifolio::backend& where);

}  // namespace selftest
