// SPDX-License-Identifier: Apache-2.0
// NaN and infinity stay where they are visible: in their own sequence and head, and in the rows that see them.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "conformance/attention_tables.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

// Rows without gaps, as tensor cores need them.
const attention_placement dense{{1, 3, 2}, 0, 0, 0, 0, 0, 0, 0};

attention_case batch(dtype type) {
  return {.what = "batch with a bad value",
          .num_kv_heads = 3,
          .head_dim = 48,
          .q_type = type,
          .kv_type = type,
          .out_type = type,
          .seqs = {{1, 600}, {50, 80}, {1, 30}, {40, 40}, {2, 700}}};
}

// Holds a result with a bad value against one without: rows for which `may_differ(seq, position, head)` is false must
// be equal bit for bit. Counts in `changed` the rows that differ.
template <class MayDiffer>
std::string compare_rows(const attention_case& c, const attention_output& good, const attention_output& bad,
                         MayDiffer may_differ, std::int64_t& changed) {
  std::size_t row = 0;
  const auto d = static_cast<std::size_t>(c.out_dim());
  changed = 0;
  for (std::size_t s = 0; s < c.seqs.size(); ++s) {
    for (std::int32_t t = 0; t < c.seqs[s].query_len; ++t) {
      for (std::int32_t h = 0; h < c.num_q_heads(); ++h, ++row) {
        const bool same = std::memcmp(&good.out[row * d], &bad.out[row * d], d * sizeof(float)) == 0 &&
                          std::memcmp(&good.lse[row], &bad.lse[row], sizeof(float)) == 0;
        changed += same ? 0 : 1;
        const std::int32_t position = c.seqs[s].seq_len - c.seqs[s].query_len + t;
        if (same || may_differ(s, position, h)) continue;
        return "sequence " + std::to_string(s) + ", position " + std::to_string(position) + ", head " +
               std::to_string(h) + " changed";
      }
    }
  }
  return {};
}

// Element (position, head, dim) of K or V; `dims` is that plane's head_dim.
float& plane_element(const attention_case& c, std::vector<float>& values, std::int32_t dims, std::int32_t position,
                     std::int32_t head, std::int32_t dim) {
  return values[static_cast<std::size_t>((position * c.num_kv_heads + head) * dims + dim)];
}

// The same where both planes are of one head_dim.
float& kv_element(const attention_case& c, std::vector<float>& values, std::int32_t position, std::int32_t head,
                  std::int32_t dim) {
  return plane_element(c, values, c.head_dim, position, head, dim);
}

}  // namespace

TEST_CASE("a bad value in K or V touches only rows of its own sequence and head that see it") {
  struct planes {
    std::int32_t head_dim, v_head_dim;
    bool v_in_k;
  };
  for (const planes& shape :
       {planes{48, 48, false}, planes{48, 20, false}, planes{20, 48, false}, planes{48, 20, true}}) {
    for (const dtype type : dtypes) {
      attention_case c = batch(type);
      c.head_dim = shape.head_dim;
      c.v_head_dim = shape.v_head_dim;
      c.v_in_k = shape.v_in_k;
      attention_contents contents(c);
      for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(type))) {
        const attention_output good = run_attention(*tested, c, contents);
        for (const std::size_t bad_seq : {std::size_t{0}, std::size_t{1}, std::size_t{3}, std::size_t{4}}) {
          const std::int32_t bad_position = c.seqs[bad_seq].seq_len - (c.seqs[bad_seq].query_len + 1) / 2;
          for (const float bad_value : {not_a_number, infinity, -infinity}) {
            for (const bool in_k : {true, false}) {
              if (!in_k && c.v_in_k) continue;
              constexpr std::int32_t bad_head = 1;
              attention_contents poisoned = contents;
              auto& seq = poisoned.seqs[bad_seq];
              plane_element(c, in_k ? seq.k : seq.v, in_k ? c.head_dim : c.out_dim(), bad_position, bad_head, 5) =
                  bad_value;
              const attention_output bad = run_attention(*tested, c, poisoned);
              std::int64_t changed = 0;
              const std::string problem = compare_rows(
                  c, good, bad,
                  [&](std::size_t s, std::int32_t position, std::int32_t head) {
                    return s == bad_seq && head / c.group_size == bad_head && position >= bad_position;
                  },
                  changed);
              CHECK_MESSAGE(problem.empty(), tested->name, ", ", bad_value, in_k ? " in K" : " in V", " of sequence ",
                            bad_seq, " at position ", bad_position, ": ", problem, " [", describe(c), "]");
              CHECK_MESSAGE(changed > 0, tested->name, ": ", bad_value, in_k ? " in K" : " in V", " went unseen");
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a bad value in K or V touches its own sequence and head alone in 16-bit types of the usual head sizes") {
  // Tensor cores multiply whole tiles: a bad value in V reaches rows before it that share its tile, as 0 · NaN.
  for (const dtype type : {dtype::f16, dtype::bf16}) {
    for (const std::int32_t head_dim : {64, 128}) {
      attention_case c = batch(type);
      c.num_kv_heads = 4;
      c.group_size = 4;
      c.head_dim = head_dim;
      c.seqs = {{1, 600}, {128, 200}, {1, 30}, {130, 130}, {3, 300}};  // decodes, a chunk, a prompt, drafts
      const attention_contents contents(c);
      for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(head_dim) / 64)) {
        const attention_output good = run_attention(*tested, c, contents, dense);
        for (const std::size_t bad_seq : {std::size_t{0}, std::size_t{1}, std::size_t{3}, std::size_t{4}}) {
          const std::int32_t bad_position = c.seqs[bad_seq].seq_len - (c.seqs[bad_seq].query_len + 1) / 2;
          for (const bool in_k : {true, false}) {
            constexpr std::int32_t bad_head = 1;
            attention_contents poisoned = contents;
            auto& seq = poisoned.seqs[bad_seq];
            kv_element(c, in_k ? seq.k : seq.v, bad_position, bad_head, 5) = not_a_number;
            const attention_output bad = run_attention(*tested, c, poisoned, dense);
            std::int64_t changed = 0;
            const std::string problem = compare_rows(
                c, good, bad,
                [&](std::size_t s, std::int32_t position, std::int32_t head) {
                  const bool may_see = position >= bad_position || (!tested->is_host && !in_k);
                  return s == bad_seq && head / c.group_size == bad_head && may_see;
                },
                changed);
            CHECK_MESSAGE(problem.empty(), tested->name, ", NaN", in_k ? " in K" : " in V", " of sequence ", bad_seq,
                          " at position ", bad_position, ": ", problem, " [", describe(c), "]");
            CHECK_MESSAGE(changed > 0, tested->name, ": NaN", in_k ? " in K" : " in V", " went unseen");
          }
        }
      }
    }
  }
}

TEST_CASE("a NaN in q spoils its own row and no other") {
  for (const dtype type : dtypes) {
    const attention_case c = batch(type);
    const attention_contents contents(c);
    for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(type) + 1)) {
      const attention_output good = run_attention(*tested, c, contents);
      attention_contents poisoned = contents;
      constexpr std::int32_t token = 20;
      constexpr std::int32_t bad_head = 3;
      poisoned.seqs[3].q[static_cast<std::size_t>((token * c.num_q_heads() + bad_head) * c.head_dim + 7)] =
          not_a_number;
      const attention_output bad = run_attention(*tested, c, poisoned);
      std::int64_t changed = 0;
      const std::string problem = compare_rows(
          c, good, bad,
          [&](std::size_t s, std::int32_t position, std::int32_t head) {
            return s == 3 && position == token && head == bad_head;
          },
          changed);
      CHECK_MESSAGE(problem.empty(), tested->name, ": ", problem);
      CHECK(changed == 1);
    }
  }
}

TEST_CASE("a row whose query is NaN is NaN with every implementation, however its keys are split") {
  constexpr std::int32_t bad_head = 3;
  std::size_t num_rows = 0;
  for (const dtype type : tensor_dtypes) {
    for (const bool deterministic : {false, true}) {
      for (const std::int32_t seq_len : {1, 40, 600, 9000}) {  // one CTA, several, two levels of a combine
        const attention_case c{.what = "a query of NaN",
                               .num_kv_heads = 3,
                               .head_dim = 64,  // tensor cores have it
                               .q_type = type,
                               .kv_type = type,
                               .out_type = type,
                               .seqs = {{1, seq_len}, {1, 30}},
                               .deterministic = deterministic};
        attention_contents contents(c);
        contents.seqs[0].q[static_cast<std::size_t>(bad_head * c.head_dim + 7)] = not_a_number;
        const auto dims = static_cast<std::size_t>(c.head_dim);
        for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(type))) {
          if (tested->is_host && (deterministic || seq_len > 600)) continue;  // nothing else is computed there
          for (const std::string& name : tested->get().explain({})) {
            attention_call call(*tested, c, contents, dense);
            call.spec.implementation = name;
            try {
              call.plan();
            } catch (const error& refused) {
              REQUIRE_MESSAGE(refused.code() == errc::unsupported, refused.what());
              continue;
            }
            const errc code = call.run();
            if (code == errc::unsupported) continue;
            REQUIRE(code == errc::ok);
            std::string problem;
            const attention_output got = call.read(problem);
            CHECK(problem.empty());
            CAPTURE(describe(c));
            for (std::size_t row = 0; row < 2 * static_cast<std::size_t>(c.num_q_heads()); ++row) {
              const bool is_bad = row == bad_head;
              CHECK_MESSAGE(std::isnan(got.lse[row]) == is_bad, tested->name, ", ", name, ", row ", row);
              for (std::size_t i = 0; i < dims; ++i) {
                CHECK_MESSAGE(std::isnan(got.out[row * dims + i]) == is_bad, tested->name, ", ", name, ", row ", row,
                              ", dim ", i);
              }
              ++num_rows;
            }
          }
        }
      }
    }
  }
  CHECK(num_rows > 0);
}

TEST_CASE("a NaN that is seen is not hidden: the rows that see it are NaN") {
  for (const std::int32_t head_dim : {48, 64}) {  // tensor cores have 64
    for (const dtype type : dtypes) {
      attention_case c = batch(type);
      c.head_dim = head_dim;
      const auto dims = static_cast<std::size_t>(head_dim);
      for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(type) + 2)) {
        const arithmetic numbers = tested->numbers_for(c.q_type, c.kv_type, c.out_type, c.head_dim);
        const std::size_t together = numbers.dims_together[static_cast<std::size_t>(type)];
        attention_contents in_k(c);
        kv_element(c, in_k.seqs[0].k, 300, 1, 5) = not_a_number;
        const attention_output from_k = run_attention(*tested, c, in_k, dense);
        attention_contents in_v(c);
        kv_element(c, in_v.seqs[0].v, 300, 1, 5) = not_a_number;
        const attention_output from_v = run_attention(*tested, c, in_v, dense);
        for (std::size_t h = 2; h < 4; ++h) {  // the two query heads of KV head 1
          for (std::size_t i = 0; i < dims; ++i) {
            CHECK_MESSAGE(std::isnan(from_k.out[h * dims + i]), tested->name, ", K, dim ", i);
            CHECK_MESSAGE(std::isnan(from_v.out[h * dims + i]) == (i / together == 5 / together), tested->name,
                          ", V, dim ", i);
          }
          CHECK_MESSAGE(std::isnan(from_k.lse[h]), tested->name);
          CHECK_MESSAGE(!std::isnan(from_v.lse[h]), tested->name);
        }
      }
    }
  }
}

TEST_CASE("a key whose logit is minus infinity weighs nothing") {
  const attention_case c{.what = "one key at minus infinity", .group_size = 1, .head_dim = 8, .seqs = {{1, 20}}};
  attention_contents contents(c);
  for (attention_contents::sequence& seq : contents.seqs) {
    for (float& q : seq.q) q = std::abs(q) + 0.25f;
    kv_element(c, seq.k, static_cast<std::int32_t>(seq.k.size()) / 16 - 1, 0, 3) = -infinity;
  }
  for (const tested_backend* tested : one_per_family(0)) {
    const attention_output got = run_attention(*tested, c, contents);
    // An average of the other 19 values, so finite and not NaN.
    for (std::size_t i = 0; i < 8; ++i) CHECK_MESSAGE(std::isfinite(got.out[i]), tested->name);
    CHECK_MESSAGE(std::isfinite(got.lse[0]), tested->name);
  }
}

TEST_CASE("a slope or sink that is not finite touches rows of its own head alone") {
  for (const dtype type : dtypes) {
    attention_case c = batch(type);
    c.head_dim = 64;  // tensor cores have it
    c.alibi = c.sinks = true;
    const attention_contents contents(c);
    for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(type))) {
      const attention_output good = run_attention(*tested, c, contents, dense);
      for (const bool in_slopes : {true, false}) {
        for (const float bad_value : {not_a_number, infinity, -infinity}) {
          constexpr std::int32_t bad_head = 3;
          attention_contents poisoned = contents;
          (in_slopes ? poisoned.alibi_slopes : poisoned.sinks)[bad_head] = bad_value;
          const attention_output bad = run_attention(*tested, c, poisoned, dense);
          std::int64_t changed = 0;
          const std::string problem = compare_rows(
              c, good, bad, [&](std::size_t, std::int32_t, std::int32_t head) { return head == bad_head; }, changed);
          CHECK_MESSAGE(problem.empty(), tested->name, ", ", bad_value, in_slopes ? " slope" : " sink", ": ", problem);
          CHECK_MESSAGE(changed > 0, tested->name, ", ", bad_value, in_slopes ? " slope" : " sink", " went unseen");
        }
      }
    }
  }
}

TEST_CASE("a sink of minus infinity is none") {
  for (const dtype type : dtypes) {
    attention_case c = batch(type);
    c.head_dim = 64;
    c.seqs.push_back({3, 0});
    c.sinks = true;
    attention_contents contents(c);
    for (std::size_t h = 0; h < contents.sinks.size(); h += 2) contents.sinks[h] = -infinity;
    const attention_expectation expectation(c, contents);
    for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(type))) {
      const std::string problem = expectation.problem_of(run_attention(*tested, c, contents, dense),
                                                         tested->numbers_for(type, type, type, c.head_dim));
      CHECK_MESSAGE(problem.empty(), tested->name, ": ", problem);
    }
  }
}

TEST_CASE("NaN or infinity in a bias touches only the rows that see it") {
  for (const dtype type : dtypes) {
    attention_case c = batch(type);
    c.bias = bias_kind::full;
    const attention_contents contents(c);
    for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(type))) {
      const attention_output good = run_attention(*tested, c, contents);
      for (const float bad_value : {not_a_number, infinity}) {
        constexpr std::int32_t token = 7;
        constexpr std::int32_t bad_head = 4;
        attention_contents poisoned = contents;
        poisoned.seqs[1].bias[static_cast<std::size_t>((token * c.num_q_heads() + bad_head) * 80 + 11)] = bad_value;
        const attention_output bad = run_attention(*tested, c, poisoned);
        std::int64_t changed = 0;
        const std::string problem = compare_rows(
            c, good, bad,
            [&](std::size_t s, std::int32_t position, std::int32_t head) {
              return s == 1 && position == 30 + token && head == bad_head;
            },
            changed);
        CHECK_MESSAGE(problem.empty(), tested->name, ", ", bad_value, ": ", problem);
        CHECK(changed == 1);
        const std::size_t row = static_cast<std::size_t>((1 + token) * c.num_q_heads() + bad_head);
        CHECK_MESSAGE(std::isnan(bad.lse[row]), tested->name);
        CHECK_MESSAGE(std::isnan(bad.out[row * static_cast<std::size_t>(c.head_dim)]), tested->name);
      }
    }
  }
}

TEST_CASE("block ids outside the pool, in a table changed after planning, leave memory and other sequences alone") {
  std::vector<attention_case> cases;
  for (const dtype type : dtypes) {
    for (const arrangement layout : {arrangement::hnd, arrangement::x_split, arrangement::scattered}) {
      attention_case c = batch(type);
      c.what = "a table that changed";
      c.head_dim = 128;
      c.layout = layout;
      c.seqs = {{1, 600}, {1, 300}, {300, 300}, {300, 310}, {40, 40}};  // decode and prefill
      cases.push_back(c);
    }
  }
  for (const attention_case& c : cases) {
    const attention_contents contents(c);
    for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(c.kv_type))) {
      // No spare blocks: they hold poison, which `read` looks for.
      attention_call call(*tested, c, contents, {{1, 0, 2}, 0, 0, 0, 0, 0, 0, 0});
      call.plan();
      REQUIRE(call.run() == errc::ok);
      std::string problem;
      const attention_output good = call.read(problem);
      const auto stride = static_cast<std::size_t>(call.host_batch.block_table_stride);
      std::vector<std::int32_t> tables(call.host_batch.block_tables, call.host_batch.block_tables + 5 * stride);
      const std::int32_t bad_ids[] = {-1, static_cast<std::int32_t>(call.num_blocks),
                                      std::numeric_limits<std::int32_t>::max(),
                                      std::numeric_limits<std::int32_t>::min(), padding_entry};
      for (const std::size_t seq : {std::size_t{1}, std::size_t{3}}) {
        for (std::size_t entry = 0; entry < stride; ++entry) tables[seq * stride + entry] = bad_ids[entry % 5];
      }
      device_bytes on_device(tested->get(), bytes_of(tables), alignof(std::int32_t));
      call.params.batch.block_tables = reinterpret_cast<const std::int32_t*>(on_device.data());
      call.reset_outputs();
      REQUIRE(call.run() == errc::ok);
      const attention_output bad = call.read(problem);
      std::int64_t changed = 0;
      problem = compare_rows(
          c, good, bad, [](std::size_t s, std::int32_t, std::int32_t) { return s == 1 || s == 3; }, changed);
      CHECK_MESSAGE(problem.empty(), tested->name, ": ", problem, " [", describe(c), "]");
      CHECK(changed > 0);
      CHECK(tested->get().health() == errc::ok);
    }
  }
}
