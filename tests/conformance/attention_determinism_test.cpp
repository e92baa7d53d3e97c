// SPDX-License-Identifier: Apache-2.0
// What must not change a bit: running again, threads, executors, batch mates, physical blocks, chunking, layout, block
// size.
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/cpu.hpp>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "conformance/attention_tables.hpp"
#include "support/codes.hpp"
#include "support/random.hpp"
#include "support/sanitized.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

void set_codes(attention_case& c, const kv_code& k, const kv_code& v) {
  c.kv_type = dtype::f32;
  c.k_code = k;
  c.v_code = c.v_in_k ? k : v;
}

// Calls that take every path: several splits, tiles that end in the middle, all options.
std::vector<attention_case> mixed_cases() {
  std::vector<attention_case> cases;
  for (const dtype type : dtypes) {
    attention_case plain{.what = "mixed batch",
                         .head_dim = 64,
                         .q_type = type,
                         .kv_type = type,
                         .out_type = type,
                         .seqs = {{1, 1500}, {70, 130}, {1, 17}, {0, 40}, {33, 33}, {1, 513}, {2, 1100}, {3, 0}},
                         .deterministic = true,
                         .seed = 11};
    attention_case all_options = plain;
    all_options.what = "mixed batch, all options";
    all_options.head_dim = 40;
    all_options.group_size = 3;
    all_options.window_left = 900;
    all_options.soft_cap = 5;
    all_options.alibi = all_options.sinks = true;
    cases.push_back(plain);
    cases.push_back(all_options);
  }
  // Codes: with kernels of bfloat16 throughout, and with queries that those do not take.
  for (const dtype type : {dtype::bf16, dtype::f32}) {
    attention_case coded = cases[type == dtype::bf16 ? 0 : 1];
    coded.what += ", codes";
    coded.q_type = coded.out_type = type;
    set_codes(coded, {dtype::u8, scale_granularity::token_head}, {dtype::e4m3, scale_granularity::token_head});
    if (type == dtype::f32) set_codes(coded, {dtype::i8, scale_granularity::head}, coded.k_code.value());
    cases.push_back(coded);
  }
  return cases;
}

void require_same(const attention_output& a, const attention_output& b, const std::string& where) {
  const std::string difference = bit_difference(a, b);
  CHECK_MESSAGE(difference.empty(), where, ": ", difference);
}

}  // namespace

TEST_CASE("the same call gives the same bits, planned again or not") {
  for (const attention_case& c : fewer_if_sanitized(mixed_cases(), 3)) {
    const attention_contents contents(c);
    for (const tested_backend& tested : all_backends()) {
      attention_call call(tested, c, contents);
      std::string problem;
      call.plan();
      REQUIRE(call.run() == errc::ok);
      const attention_output first = call.read(problem);
      for (int again = 0; again < 3; ++again) {
        call.reset_outputs();
        if (again == 2) call.plan();
        REQUIRE(call.run() == errc::ok);
        require_same(first, call.read(problem), tested.name + ", " + describe(c));
      }
    }
  }
}

TEST_CASE("executors do not change a bit") {
  for (const attention_case& c : fewer_if_sanitized(mixed_cases(), 3)) {
    const attention_contents contents(c);
    const tested_backend* first_of_family = nullptr;
    attention_output expected;
    for (const tested_backend& tested : all_backends()) {
      const attention_output got = run_attention(tested, c, contents);
      if (first_of_family == nullptr || first_of_family->family != tested.family) {
        first_of_family = &tested;
        expected = got;
      } else {
        require_same(expected, got, tested.name + " against " + first_of_family->name + ", " + describe(c));
      }
    }
  }
}

TEST_CASE("the number of threads does not change a bit") {
  const std::vector<attention_case> cases = mixed_cases();
  const std::vector<executor_kind> kinds = threaded_executors();
  for (const cpu_isa isa : supported_isas()) {
    for (const attention_case& c : {cases[1], cases[4], cases[6]}) {
      const attention_contents contents(c);
      attention_output expected;
      const auto check = [&](const backend_options& options, const std::string& workers) {
        tested_backend tested;
        tested.name = std::string(to_string(isa)) + " with " + workers;
        tested.owned = make_backend({}, options);
        const attention_output got = run_attention(tested, c, contents);
        if (expected.out.empty()) expected = got;
        require_same(expected, got, tested.name + ", " + describe(c));
      };
      backend_options options;
      options.isa = isa;
      for (const std::int32_t workers : {1, 2, 3, 5, 8, 64}) {
        const std::unique_ptr<executor> own = make_reversed_executor(workers);
        options.own_executor = own.get();
        check(options, std::to_string(workers) + " workers in reversed order");
      }
      options.own_executor = nullptr;
      for (const executor_kind kind : kinds) {
        options.executor_choice = kind;
        for (const std::int32_t threads : {1, 3, 8}) {
          options.num_threads = threads;
          check(options, std::to_string(threads) + " threads of " + std::string(to_string(kind)));
        }
      }
    }
  }
}

TEST_CASE("physical blocks, spare blocks, table strides and tensor strides do not change a bit") {
  for (const attention_case& c : fewer_if_sanitized(mixed_cases(), 3)) {
    const attention_contents contents(c);
    for (const tested_backend* tested : one_per_family(0)) {
      const attention_output expected = run_attention(*tested, c, contents);
      for (std::uint64_t order = 1; order <= 3; ++order) {
        const auto spare = static_cast<std::int64_t>(order * 7);
        const attention_placement placement{{order, spare, spare}, spare, 2 * spare, 1, 0};
        require_same(expected, run_attention(*tested, c, contents, placement), tested->name + ", " + describe(c));
      }
    }
  }
}

TEST_CASE("layout and block size do not change a bit") {
  for (attention_case c : fewer_if_sanitized(mixed_cases(), 3)) {
    const attention_contents contents(c);
    for (const tested_backend* tested : one_per_family(1)) {
      c.layout = arrangement::hnd;
      c.block_size = 16;
      const attention_output expected = run_attention(*tested, c, contents);
      for (const arrangement layout : all_arrangements) {
        // A device may have another kernel for x_split, within the bound and not with the same bits.
        if (layout == arrangement::x_split && !tested->is_host) continue;
        c.layout = layout;
        for (const std::int32_t block_size : {1, 5, 16, 64, 600}) {
          if (block_size != 16 && layout != arrangement::hnd && layout != arrangement::x_split) continue;
          c.block_size = block_size;
          require_same(expected, run_attention(*tested, c, contents), tested->name + ", " + describe(c));
        }
      }
    }
  }
}

TEST_CASE("a sequence's rows do not depend on who else is in the batch, nor on the order") {
  random_source random(test_seed());
  for (attention_case c : fewer_if_sanitized(mixed_cases(), 3)) {
    for (std::size_t s = 0; s < c.seqs.size(); ++s) c.seqs[s].content = static_cast<std::int32_t>(s);
    for (const tested_backend* tested : one_per_family(2)) {
      const attention_output whole = run_attention(*tested, c, attention_contents(c));
      std::vector<std::size_t> order(c.seqs.size());
      for (std::size_t s = 0; s < order.size(); ++s) order[s] = s;
      for (int round = 0; round < 3; ++round) {
        random.shuffle(order);
        attention_case other = c;
        other.seqs.clear();
        const auto kept = static_cast<std::size_t>(random.between(1, static_cast<std::int64_t>(order.size())));
        for (std::size_t i = 0; i < kept; ++i) other.seqs.push_back(c.seqs[order[i]]);
        const attention_output got = run_attention(*tested, other, attention_contents(other));
        for (std::size_t i = 0; i < kept; ++i) {
          require_same(rows_of(c, whole, order[i]), rows_of(other, got, i),
                       tested->name + ", sequence " + std::to_string(order[i]) + " of " + describe(other));
        }
      }
      for (std::size_t s = 0; s < c.seqs.size(); ++s) {
        attention_case alone = c;
        alone.seqs = {c.seqs[s]};
        require_same(rows_of(c, whole, s), run_attention(*tested, alone, attention_contents(alone)),
                     tested->name + " alone: " + describe(alone));
      }
    }
  }
}

TEST_CASE("prefill in chunks of any size gives the bits of the whole") {
  using g = scale_granularity;
  struct stored {
    dtype type;
    std::optional<kv_code> k{}, v{};
  };
  const std::vector<stored> formats = {{dtype::f32},
                                       {dtype::f16},
                                       {dtype::bf16},
                                       {dtype::bf16, kv_code{dtype::e4m3, g::head}, kv_code{dtype::u8, g::token_head}},
                                       {dtype::f16, kv_code{dtype::u8, g::token_head}, kv_code{dtype::i8, g::layer}}};
  for (const stored& format : fewer_if_sanitized(formats, 3)) {
    const dtype type = format.type;
    for (const bool options : {false, true}) {
      attention_case whole{.what = "prefill",
                           .head_dim = 32,
                           .q_type = type,
                           .kv_type = type,
                           .out_type = type,
                           .seqs = {{620, 620, 0}},
                           .deterministic = true,
                           .seed = 21};
      if (format.k) set_codes(whole, *format.k, *format.v);
      if (options) {
        whole.window_left = 300;
        whole.soft_cap = 5;
        whole.alibi = whole.sinks = true;
      }
      for (const tested_backend* tested : one_per_family(3)) {
        const attention_output expected = run_attention(*tested, whole, attention_contents(whole));
        for (const std::int32_t chunk : {1, 7, 16, 64, 65, 512}) {
          attention_output joined;
          for (std::int32_t at = 0; at < 620; at += chunk) {
            // Single tokens cost a plan each: a stretch across the split and one at the start represent all.
            if (chunk == 1 && !(at < 40 || (at > 500 && at < 530))) {
              attention_output skipped = rows_of(whole, expected, 0);
              const std::size_t row = static_cast<std::size_t>(whole.num_q_heads());
              const std::size_t t = static_cast<std::size_t>(at);
              const std::size_t d = static_cast<std::size_t>(whole.head_dim);
              joined.out.insert(joined.out.end(), skipped.out.begin() + static_cast<std::ptrdiff_t>(t * row * d),
                                skipped.out.begin() + static_cast<std::ptrdiff_t>((t + 1) * row * d));
              joined.lse.insert(joined.lse.end(), skipped.lse.begin() + static_cast<std::ptrdiff_t>(t * row),
                                skipped.lse.begin() + static_cast<std::ptrdiff_t>((t + 1) * row));
              continue;
            }
            attention_case part = whole;
            const std::int32_t end = std::min(at + chunk, 620);
            part.seqs = {{end - at, end, 0}};
            append(joined, run_attention(*tested, part, attention_contents(part)));
          }
          require_same(expected, joined,
                       tested->name + " in chunks of " + std::to_string(chunk) + ", " + describe(whole));
        }
      }
    }
  }
}

TEST_CASE("chunks of few rows and of many give the same bits, also where V is not finite") {
  constexpr std::int32_t length = 110;
  for (const dtype type : {dtype::bf16, dtype::f16}) {
    for (const std::int32_t group : fewer_if_sanitized(std::vector<std::int32_t>{1, 4, 8}, 3)) {
      for (const value_kind values : {value_kind::normal, value_kind::denormal}) {
        attention_case whole{.what = "few rows or many",
                             .group_size = group,
                             .head_dim = group == 4 ? 40 : 96,
                             .q_type = type,
                             .kv_type = type,
                             .out_type = type,
                             .seqs = {{length, length, 0}},
                             .deterministic = true,
                             .values = values,
                             .seed = 31};
        const auto contents_of = [&](const attention_case& c) {
          attention_contents contents(c);
          const auto row = static_cast<std::size_t>(c.head_dim);
          std::vector<float>& v = contents.seqs[0].v;
          const auto spoil = [&](std::size_t position, std::size_t head, std::size_t dim, float value) {
            const std::size_t at = (position * 2 + head) * row + dim;
            if (at < v.size()) v[at] = value;
          };
          spoil(70, 0, 5, std::numeric_limits<float>::infinity());
          spoil(71, 0, 5, -std::numeric_limits<float>::infinity());
          spoil(90, 1, 38, std::numeric_limits<float>::quiet_NaN());
          return contents;
        };
        for (const tested_backend* tested : one_per_family(4)) {
          const attention_output expected = run_attention(*tested, whole, contents_of(whole));
          for (const std::int32_t chunk : {1, 3, 9}) {
            attention_output joined;
            for (std::int32_t at = 0; at < length; at += chunk) {
              attention_case part = whole;
              const std::int32_t end = std::min(at + chunk, length);
              part.seqs = {{end - at, end, 0}};
              append(joined, run_attention(*tested, part, contents_of(part)));
            }
            require_same(expected, joined,
                         tested->name + " in chunks of " + std::to_string(chunk) + ", " + describe(whole));
          }
        }
      }
    }
  }
}

TEST_CASE("random shapes in random chunks, among random batch mates, give the bits of the whole") {
  random_source random(hash_of(test_seed(), 0xc47));
  int round = 0;
  for (attention_case whole : fewer_if_sanitized(random_cases(hash_of(test_seed(), 0xc48), 40), 3)) {
    const auto length = static_cast<std::int32_t>(random.between(1, 700 / whole.group_size));
    whole.what = "random chunks, round " + std::to_string(round++);
    whole.deterministic = true;
    whole.causal = true;  // without it a chunk attends to less than the whole
    if (round % 3 == 0) {
      const std::vector<kv_code>& codes = all_codes();
      set_codes(whole, random.pick(codes), random.pick(codes));
      if (whole.values == value_kind::denormal || whole.values == value_kind::max_finite) {
        whole.values = value_kind::normal;
      }
      if (random.one_in(2)) whole.q_type = whole.out_type = dtype::bf16;
    }
    whole.seqs = {{length, length, 0}};
    std::vector<std::int32_t> ends;
    for (std::int32_t at = 0; at < length;) {
      at = std::min(length, at + static_cast<std::int32_t>(random.between(1, 1 + length / 3)));
      ends.push_back(at);
    }
    for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(round))) {
      const attention_output expected = run_attention(*tested, whole, attention_contents(whole));
      attention_output joined;
      std::int32_t begin = 0;
      for (const std::int32_t end : ends) {
        attention_case part = whole;
        part.seqs = {{1, 1 + end % 50, 1}, {end - begin, end, 0}, {end % 5, 40, 2}};
        const attention_output got = run_attention(*tested, part, attention_contents(part));
        append(joined, rows_of(part, got, 1));
        begin = end;
      }
      require_same(expected, joined, tested->name + ", " + describe(whole));
    }
  }
}
