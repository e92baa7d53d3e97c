// SPDX-License-Identifier: Apache-2.0
// Proof that the tables can fail: a backend with one flaw at a time, and the first case that notices it.
#include <doctest/doctest.h>

#include "conformance/attention_tables.hpp"
#include "conformance/flawed_backend.hpp"
#include "support/random.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

// The first complaint of the tables about this backend; empty when they find nothing wrong.
std::string first_complaint(const tested_backend& tested) {
  for (const auto& table :
       {decode_cases(), prefill_cases(), empty_cases(), option_cases(), value_cases(), group_cases(), layout_cases(),
        random_cases(test_seed(), 20), random_plane_cases(test_seed(), 20)}) {
    for (std::size_t n = 0; n < table.size(); ++n) {
      const std::string complaint = check_attention(table[n], {&tested}, n);
      if (!complaint.empty()) return complaint;
    }
  }
  return {};
}

}  // namespace

TEST_CASE("the tables pass a plain correct backend and find every flaw") {
  const tested_backend& real = all_backends().front();
  if (!real.is_host) return;  // the flawed backend reads device pointers on the host
  for (int value = 0; value < num_flaws; ++value) {
    const tested_backend flawed = make_flawed_backend(real.get(), static_cast<flaw>(value));
    const std::string complaint = first_complaint(flawed);
    if (value == 0) {
      CHECK_MESSAGE(complaint.empty(), complaint);
    } else {
      CHECK_MESSAGE(!complaint.empty(), flawed.name, " was not noticed");
    }
    MESSAGE(flawed.name, ": ", complaint.empty() ? "passes" : complaint);
  }
}
