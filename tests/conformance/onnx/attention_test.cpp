// SPDX-License-Identifier: Apache-2.0
// ONNX's own test cases for Attention and FlexAttention on every backend: expected outputs that come neither from this
// library nor from its oracle. docs/onnx_attention.md says how a case is expressed and lists them all.
//
// Tolerance. ONNX computes in the type of its inputs and rounds to it at every step. With u_T the unit roundoff of that
// type, M = Σ p_j |v_j|, and `onnx_rounding` below:
//   ONNX against the float64 oracle:  bound of a float32 kernel + units · u_T · M
//   a backend against ONNX:           bound of that backend     + units · u_T · M
// The ceiling of the normalised mean square error is raised by `nmse`.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>

#include "conformance/onnx/fixture.hpp"
#include "conformance/onnx/mapping.hpp"
#include "support/elements.hpp"

using namespace bifolio;
using namespace bifolio::test;
using namespace bifolio::test::onnx;

namespace {

// What the fixture holds and how much of it is compared. A case that is no longer compared changes these numbers.
constexpr std::size_t num_cases = 104;
constexpr std::size_t num_expressible = 102;
constexpr std::size_t num_with_lse = 12;

// Largest error of ONNX's results in units of u_T · M, and their normalised mean square error. Measured over all cases
// against float64: 5.3, 2.1 and 2.4; 1e-14, 1.1e-7 and 1.1e-5.
struct onnx_rounding {
  double units;
  double nmse;
};
constexpr per_dtype<onnx_rounding> rounding_of_onnx = {onnx_rounding{8, 1e-13}, onnx_rounding{4, 3e-7},
                                                       onnx_rounding{4, 1.5e-5}};

const fixture& cases() {
  static const fixture all = [] {
    fixture read = read_fixture(in_tree("tests/conformance/onnx"));
    std::erase_if(read.cases, [](const node_case& each) { return each.op == "RotaryEmbedding"; });
    return read;
  }();
  return all;
}

// How a case is stored. Heads padded with zeros to 64 and 128 are for the kernels that take only these sizes.
struct place {
  arrangement layout;
  std::int32_t block_size;
  std::int32_t head_dim;
};
constexpr place places[] = {
    {arrangement::hnd, 16, 0},        {arrangement::nhd, 1, 0},    {arrangement::x_split, 4, 0},
    {arrangement::block_major, 3, 0}, {arrangement::padded, 5, 0}, {arrangement::scattered, 2, 0},
    {arrangement::hnd, 16, 64},       {arrangement::nhd, 64, 128}, {arrangement::x_split, 32, 64},
};

// A bound's numbers, loosened by ONNX's own rounding. No partial sum is longer than the sequence.
arithmetic loosened(arithmetic numbers, const attention_case& call) {
  const auto kv = static_cast<std::size_t>(call.kv_type);
  std::int64_t longest = 1;
  for (const batch_seq& seq : call.seqs) longest = std::max<std::int64_t>(longest, seq.seq_len);
  numbers.split_size = std::min(numbers.split_size, longest);
  numbers.unit_probability[kv] += rounding_of_onnx[kv].units * reference::unit_roundoff(call.out_type);
  return numbers;
}

double nmse_of_onnx(const attention_case& call) {
  return rounding_of_onnx[static_cast<std::size_t>(call.kv_type)].nmse;
}

// One wrong thing in a mapping; `plant` returns whether it applies to the case.
struct planted_flaw {
  std::string_view name;
  bool (*plant)(mapped_case&);
};
constexpr planted_flaw planted_flaws[] = {
    {"scale 1 % too large",
     [](mapped_case& mapped) {
       mapped.call.scale *= 1.01f;
       return true;
     }},
    {"no causal mask", [](mapped_case& mapped) { return std::exchange(mapped.call.causal, false); }},
    {"one more key in the window", [](mapped_case& mapped) { return mapped.call.window_left++ >= 0; }},
    {"no soft cap", [](mapped_case& mapped) { return std::exchange(mapped.call.soft_cap, 0.0f) > 0; }},
    {"ALiBi the other way round",
     [](mapped_case& mapped) {
       for (float& slope : mapped.contents.alibi_slopes) slope = -slope;
       return mapped.call.alibi;
     }},
    {"no bias",
     [](mapped_case& mapped) {
       for (attention_contents::sequence& seq : mapped.contents.seqs) seq.bias.clear();
       return std::exchange(mapped.call.bias, bias_kind::none) != bias_kind::none;
     }},
    {"every bias one key late",
     [](mapped_case& mapped) {
       if (mapped.call.bias == bias_kind::none) return false;
       for (std::size_t s = 0; s < mapped.call.seqs.size(); ++s) {
         std::vector<float>& bias = mapped.contents.seqs[s].bias;
         const std::ptrdiff_t keys = mapped.call.seqs[s].seq_len;
         for (auto row = bias.begin(); row != bias.end(); row += keys) std::rotate(row, row + keys - 1, row + keys);
       }
       return true;
     }},
    {"bias of another query",
     [](mapped_case& mapped) {
       bool applies = false;
       for (std::size_t s = 0; s < mapped.call.seqs.size(); ++s) {
         std::vector<float>& bias = mapped.contents.seqs[s].bias;
         if (mapped.call.seqs[s].query_len < 2 || bias.empty()) continue;
         const std::ptrdiff_t query = mapped.call.num_q_heads() * mapped.call.seqs[s].seq_len;
         const std::vector<float> before = bias;
         std::rotate(bias.begin(), bias.begin() + query, bias.end());
         applies = applies || bias != before;
       }
       return applies;
     }},
    {"the last key is lost",
     [](mapped_case& mapped) {
       bool applies = false;
       for (std::size_t s = 0; s < mapped.call.seqs.size(); ++s) {
         std::int32_t& length = mapped.call.seqs[s].seq_len;
         if (length < 2) continue;
         --length;
         std::vector<float>& bias = mapped.contents.seqs[s].bias;
         std::size_t kept = 0;
         for (std::size_t i = 0; i < bias.size(); ++i) {
           if (static_cast<std::int32_t>(i % static_cast<std::size_t>(length + 1)) < length) bias[kept++] = bias[i];
         }
         bias.resize(kept);
         const auto left = static_cast<std::size_t>(length * mapped.call.num_kv_heads * mapped.call.head_dim);
         mapped.contents.seqs[s].k.resize(left);
         mapped.contents.seqs[s].v.resize(left);
         applies = true;
       }
       return applies;
     }},
    {"KV heads in the wrong order",
     [](mapped_case& mapped) {
       const auto dims = static_cast<std::ptrdiff_t>(mapped.call.head_dim);
       const std::ptrdiff_t token = mapped.call.num_kv_heads * dims;
       for (attention_contents::sequence& seq : mapped.contents.seqs) {
         for (std::vector<float>* half : {&seq.k, &seq.v}) {
           for (auto at = half->begin(); at != half->end(); at += token) std::rotate(at, at + dims, at + token);
         }
       }
       return mapped.call.num_kv_heads > 1;
     }},
    {"two keys exchanged, their values not",
     [](mapped_case& mapped) {
       bool applies = false;
       for (std::size_t s = 0; s < mapped.call.seqs.size(); ++s) {
         if (mapped.call.seqs[s].seq_len < 2) continue;
         const auto first = mapped.contents.seqs[s].k.begin();
         const std::ptrdiff_t token = mapped.call.num_kv_heads * mapped.call.head_dim;
         std::swap_ranges(first, first + token, first + token);
         applies = true;
       }
       return applies;
     }},
    {"queries of another sequence",
     [](mapped_case& mapped) {
       std::vector<attention_contents::sequence>& seqs = mapped.contents.seqs;
       for (std::size_t s = 1; s < seqs.size(); ++s) std::swap(seqs[s - 1].q, seqs[s].q);
       return seqs.size() > 1;
     }},
};

// What a backend gets wrong about a case; empty when nothing.
std::string complaint_about(const tested_backend& tested, const mapped_case& mapped, std::size_t turn) {
  try {
    attention_expectation expectation(mapped.call, mapped.contents);
    expectation.expect(mapped.expected);
    attention_placement placement;
    placement.cache.order = turn;
    if (turn % 2 == 0) placement = {{turn, 0, 0}, 0, 0, 0, 0, 0, 0, 0};
    const attention_output got = run_attention(tested, mapped.call, mapped.contents, placement);
    const attention_case& call = mapped.call;
    const arithmetic numbers = tested.numbers_for(call.q_type, call.kv_type, call.out_type, call.head_dim);
    const std::string problem = expectation.problem_of(got, loosened(numbers, call), nmse_of_onnx(call));
    return problem.empty() ? problem : tested.name + ": " + problem + " [" + describe(call) + "]";
  } catch (const std::exception& failure) {
    return failure.what();
  }
}

// The table of the documentation page: every case, and how it is expressed.
std::string table_of_cases() {
  std::string table = "| case | since opset | expressed with | compared |\n|---|---|---|---|\n";
  for (const node_case& each : cases().cases) {
    const mapped_case mapped = map_case(each);
    const bool expressible = mapped.why_not.empty();
    table += "| `" + each.name + "` | " + (each.op == "Attention" ? "" : "preview ") + std::to_string(each.opset) +
             " | " + (expressible ? mapped.how : "**not expressible:** " + mapped.why_not) + " | " +
             (expressible ? mapped.compared : "") + " |\n";
  }
  return table;
}

}  // namespace

TEST_CASE("the fixture is what the script wrote, and the script is the one next to it") {
  const fixture& all = cases();
  MESSAGE(all.source, ", ", all.cases.size(), " cases");
  CHECK(all.source == "onnx 1.23.2 Apache-2.0");
  CHECK(all.script_hash == fnv1a(read_bytes(in_tree("tests/conformance/onnx/make_fixture.py"))));
  CHECK(all.cases.size() == num_cases);
  std::set<std::string> names;
  for (const node_case& each : all.cases) names.insert(each.name);
  CHECK(names.size() == num_cases);
}

TEST_CASE("ONNX agrees with the float64 oracle") {
  std::size_t compared = 0;
  std::size_t with_lse = 0;
  for (const node_case& each : cases().cases) {
    mapped_case mapped = map_case(each);
    if (!mapped.why_not.empty()) continue;
    ++compared;
    mapped.call.lse = !mapped.expected.lse.empty();
    if (mapped.call.lse) ++with_lse;
    const attention_expectation oracle(mapped.call, mapped.contents);
    const std::string problem = oracle.problem_of(mapped.expected, loosened({}, mapped.call));
    CHECK_MESSAGE(problem.empty(), problem, " [", describe(mapped.call), "]");
  }
  CHECK(compared == num_expressible);
  CHECK(with_lse == num_with_lse);
}

TEST_CASE("every backend gives what ONNX expects, in every layout and with padded heads") {
  std::size_t compared = 0;
  std::string families;
  for (const tested_backend* tested : one_per_family(0)) families += " " + tested->family;
  const std::size_t num_families = one_per_family(0).size();
  for (std::size_t n = 0; n < cases().cases.size(); ++n) {
    for (std::size_t p = 0; p < std::size(places); ++p) {
      mapped_case mapped = map_case(cases().cases[n], places[p].head_dim);
      if (!mapped.why_not.empty()) break;
      mapped.call.layout = places[p].layout;
      mapped.call.block_size = places[p].block_size;
      const std::size_t turn = n * std::size(places) + p;
      for (const tested_backend* tested : one_per_family(turn)) {
        const std::string complaint = complaint_about(*tested, mapped, turn);
        CHECK_MESSAGE(complaint.empty(), complaint);
        ++compared;
      }
    }
  }
  MESSAGE(num_expressible, " cases in ", std::size(places), " layouts on", families);
  CHECK(num_families > 0);
  CHECK(compared == num_expressible * std::size(places) * num_families);
}

TEST_CASE("a mapping with one thing wrong is noticed") {
  const tested_backend& tested = all_backends().front();
  for (const planted_flaw& flaw : planted_flaws) {
    std::size_t applied = 0;
    std::size_t noticed = 0;
    for (const node_case& each : cases().cases) {
      mapped_case mapped = map_case(each);
      if (!mapped.why_not.empty() || !flaw.plant(mapped)) continue;
      ++applied;
      if (!complaint_about(tested, mapped, 0).empty()) ++noticed;
    }
    MESSAGE(flaw.name, ": noticed in ", noticed, " of ", applied, " cases");
    CHECK(applied > 0);
    // Not in all: a causal mask hides nothing from a last token, 1 % of a scale is below the rounding of bfloat16, and
    // a mask that hides nothing, or only what the causal mask hides, is not missed.
    CHECK_MESSAGE(4 * noticed >= 3 * applied, flaw.name);
  }
}

TEST_CASE("the documentation's table of cases is this one") {
  const std::string page = read_bytes(in_tree("docs/onnx_attention.md"));
  const std::string table = table_of_cases();
  CHECK_MESSAGE(page.find("\n\n" + table) != std::string::npos, "docs/onnx_attention.md should have this table:\n\n",
                table);
  CHECK(page.find(std::to_string(num_expressible) + " of the " + std::to_string(num_cases) + " cases") !=
        std::string::npos);
  CHECK(page.find("in " + std::to_string(num_with_lse) + " of\n  them, the test computes the LSE") !=
        std::string::npos);
}
