// SPDX-License-Identifier: Apache-2.0
#include "merge_checks.hpp"

#include <fmt/format.h>

#include <exception>

#include "conformance/attention_tables.hpp"
#include "conformance/merge_case.hpp"
#include "support/random.hpp"

namespace selftest {

using namespace bifolio;
using namespace bifolio::test;

void check_merge_case(const target& where, std::uint64_t seed, std::size_t n, report& said) {
  random_source random(hash_of(seed, 0x3e26e, n));
  const merge_shape shape{random.between(1, 40),
                          static_cast<std::int32_t>(random.between(1, 16)),
                          random.one_in(2) ? random.pick(head_dims) : static_cast<std::int32_t>(random.between(1, 160)),
                          random.pick(dtypes),
                          random.pick(dtypes),
                          random.pick(dtypes)};
  const std::int64_t rows = shape.num_tokens * shape.num_heads;
  const host_state a = random_state(shape.type_a, rows, shape.head_dim, random.next());
  const host_state b = random_state(shape.type_b, rows, shape.head_dim, random.next());
  const std::string name = fmt::format("merge:{}", n);
  attention_row& row = said.row(where.device, where.isa, "merge_states");
  const auto count = [&](promise about, const std::string& problem) {
    ++row.of(about).num_compared;
    if (problem.empty()) return;
    ++row.of(about).num_failed;
    said.add({where.device, where.isa, row.kernel, std::string(to_string(about)), name,
              fmt::format("{} [{} tokens, {} heads, head_dim {}, {} and {} to {}]", problem, shape.num_tokens,
                          shape.num_heads, shape.head_dim, to_string(shape.type_a), to_string(shape.type_b),
                          to_string(shape.out_type))});
  };
  try {
    const attention_output first = merge_states_of(where.main, shape, a, b);
    const merge_verdict verdict = judge_merge(shape, a, b, first);
    worst_error& worst = size_of(shape.out_type) == sizeof(float) ? row.of_f32 : row.of_narrow;
    if (!worst.share || verdict.worst_share > *worst.share) worst = {verdict.worst_share, name};
    count(promise::bounds, verdict.problem);
    count(promise::repeats, bit_difference(first, merge_states_of(where.main, shape, a, b)));
    if (where.others.empty()) return;
    const tested_backend& other = where.others[n % where.others.size()];
    count(promise::threads, bit_difference(first, merge_states_of(other, shape, a, b)));
  } catch (const std::exception& problem) {
    count(promise::bounds, problem.what());
  }
}

}  // namespace selftest
