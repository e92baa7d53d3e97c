// SPDX-License-Identifier: Apache-2.0
// The library's one definition of attention (src/common/attention), carried out in float64, against the oracle.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "common/attention/logits.hpp"
#include "common/attention/states.hpp"
#include "common/attention/visibility.hpp"
#include "reference/attention_oracle.hpp"
#include "support/random.hpp"

using namespace bifolio;
using namespace bifolio::reference;
using test::random_source;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

struct double_math {
  static double add(double a, double b) { return a + b; }
  static double sub(double a, double b) { return a - b; }
  static double mul(double a, double b) { return a * b; }
  static double div(double a, double b) { return a / b; }
  static double fma(double a, double b, double c) { return a * b + c; }
  static double mul_add(double a, double b, double c) { return a * b + c; }
  static double max(double a, double b) { return std::max(a, b); }
  static double exp(double x) { return std::exp(x); }
  static double tanh(double x) { return std::tanh(x); }
  static double log_plus(double base, double x) { return base + std::log(x); }
};

struct partial_state {
  double m = attn::minus_infinity<double>();
  double l = 0;
  std::vector<double> accumulator;
};

/// One head's keys [begin, end) of a row, with the definitions. `positions` of the query: see `sequence`.
struct sequence {
  attention_options options;
  std::int64_t seq_len = 0;
  std::int64_t position = 0;
  std::vector<float> q, k, v, bias;  ///< [dims], [seq_len, dims], [seq_len, dims], [seq_len] or empty

  [[nodiscard]] std::int64_t dims() const { return options.qk_head_dim; }
  [[nodiscard]] std::optional<double> logit(std::int64_t key) const {
    const attn::attention_window window = attn::window_of(options);
    const attn::visible_range range = window.of(position, seq_len);
    if (key < range.begin || key >= range.end) return std::nullopt;
    double product = 0;
    for (std::int64_t i = 0; i < dims(); ++i) {
      product += static_cast<double>(q[static_cast<std::size_t>(i)]) *
                 static_cast<double>(k[static_cast<std::size_t>(key * dims() + i)]);
    }
    const bool has_alibi = options.alibi_slopes != nullptr;
    const attn::logit_terms<double> terms{static_cast<double>(options.scale), static_cast<double>(options.soft_cap),
                                          has_alibi, has_alibi ? static_cast<double>(options.alibi_slopes[0]) : 0.0};
    double logit = attn::logit_of<double_math>(product, terms, static_cast<double>(key - position));
    if (!bias.empty()) {
      logit = attn::with_bias<double_math>(logit, static_cast<double>(bias[static_cast<std::size_t>(key)]));
    }
    return logit;
  }
  [[nodiscard]] partial_state state_of(std::int64_t begin, std::int64_t end) const {
    partial_state state;
    state.accumulator.assign(static_cast<std::size_t>(dims()), 0.0);
    for (std::int64_t key = begin; key < end; ++key) {
      if (const auto s = logit(key)) state.m = std::max(state.m, *s);
    }
    const double base = attn::finite_max(state.m);
    for (std::int64_t key = begin; key < end; ++key) {
      const auto s = logit(key);
      if (!s) continue;
      const double weight = std::exp(*s - base);
      state.l += weight;
      for (std::int64_t i = 0; i < dims(); ++i) {
        state.accumulator[static_cast<std::size_t>(i)] +=
            weight * static_cast<double>(v[static_cast<std::size_t>(key * dims() + i)]);
      }
    }
    return state;
  }
};

void combine(partial_state& total, const partial_state& part) {
  const auto w = attn::combine_any_state<double_math>(total.m, total.l, part.m, part.l);
  for (std::size_t i = 0; i < total.accumulator.size(); ++i) {
    total.accumulator[i] = attn::combine_value<double_math>(w, total.accumulator[i], part.accumulator[i]);
  }
}

sequence random_sequence(random_source& random, float& slope, float& sink) {
  const auto chance = [&](std::uint64_t of) { return random.next() % of == 0; };
  const auto below = [&](std::uint64_t end) { return static_cast<std::int64_t>(random.next() % end); };
  const auto normal = [&] { return test::normal_from(random.next()); };
  sequence s;
  const auto head_dim = static_cast<std::int32_t>(1 + below(5));
  s.options = {.num_q_heads = 1, .num_kv_heads = 1, .qk_head_dim = head_dim, .v_head_dim = head_dim, .scale = 0.7f};
  s.options.causal = !chance(3);
  if (chance(2)) s.options.window_left = static_cast<std::int32_t>(below(9));
  if (chance(2)) s.options.window_right = static_cast<std::int32_t>(below(9));
  if (chance(2)) s.options.soft_cap = 0.9f;
  slope = normal();
  sink = chance(4) ? -std::numeric_limits<float>::infinity() : normal();
  if (chance(2)) s.options.alibi_slopes = &slope;
  if (chance(2)) s.options.sinks = &sink;
  s.seq_len = below(24);
  s.position = s.seq_len - 1;
  const auto fill = [&](std::vector<float>& values, std::int64_t count) {
    values.resize(static_cast<std::size_t>(count));
    for (float& value : values) value = normal();
  };
  fill(s.q, s.dims());
  fill(s.k, s.seq_len * s.dims());
  fill(s.v, s.seq_len * s.dims());
  if (chance(2)) {
    fill(s.bias, s.seq_len);
    const bool all = chance(4);
    for (float& value : s.bias) {
      if (all || chance(3)) value = -std::numeric_limits<float>::infinity();
    }
  }
  return s;
}

void check_near(double got, double want) {
  if (std::isinf(want)) {
    CHECK(got == want);
  } else {
    CHECK(std::abs(got - want) <= 1e-12 * std::max(1.0, std::abs(want)));
  }
}

}  // namespace

TEST_CASE("ranges and tests of visibility agree with the oracle, key by key") {
  for (const bool causal : {false, true}) {
    for (const std::int32_t left : {-1, 0, 1, 3, 100}) {
      for (const std::int32_t right : {-1, 0, 1, 3, 100}) {
        const attention_options options{.causal = causal, .window_left = left, .window_right = right};
        const attn::attention_window window = attn::window_of(options);
        for (std::int32_t seq_len = 0; seq_len <= 6; ++seq_len) {
          for (std::int32_t p = -12; p <= 12; ++p) {
            const attn::visible_range range = window.of(p, seq_len);
            for (std::int32_t key = 0; key <= seq_len; ++key) {
              const bool visible = is_visible(options, p, key, seq_len);
              CHECK((key >= range.begin && key < range.end) == visible);
              CHECK((attn::attends(key, p, seq_len, causal) && attn::is_in_window(key, p, left, right)) == visible);
            }
            for (std::int32_t last = p; last <= p + 3; ++last) {
              const attn::visible_range run = window.of_run(p, last, seq_len);
              for (std::int32_t key = 0; key < seq_len; ++key) {
                bool any = false;
                for (std::int32_t t = p; t <= last; ++t) any = any || is_visible(options, t, key, seq_len);
                CHECK((key >= run.begin && key < run.end) == any);
              }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("visibility does not overflow at the largest positions and windows") {
  constexpr std::int64_t largest = std::numeric_limits<std::int32_t>::max();
  for (const bool causal : {false, true}) {
    for (const std::int64_t left : {std::int64_t{-1}, std::int64_t{0}, largest}) {
      for (const std::int64_t right : {std::int64_t{-1}, std::int64_t{0}, largest}) {
        const attention_options options{.causal = causal,
                                        .window_left = static_cast<std::int32_t>(left),
                                        .window_right = static_cast<std::int32_t>(right)};
        const attn::attention_window window = attn::window_of(options);
        for (const std::int64_t seq_len : {std::int64_t{1}, largest}) {
          for (const std::int64_t p : {-largest - 1, -largest, std::int64_t{0}, largest - 1, largest}) {
            const attn::visible_range range = window.of(p, seq_len);
            for (const std::int64_t key : {std::int64_t{0}, seq_len / 2, seq_len - 1}) {
              CHECK((key >= range.begin && key < range.end) == is_visible(options, p, key, seq_len));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("states combined in any parts, and finished, are the oracle's attention") {
  INFO(test::seed_note());
  random_source random(test::hash_of(test::test_seed(), 0xa77e));
  for (int round = 0; round < 3000; ++round) {
    float slope = 0;
    float sink = 0;
    const sequence s = random_sequence(random, slope, sink);
    partial_state total;
    total.accumulator.assign(static_cast<std::size_t>(s.dims()), 0.0);
    for (std::int64_t begin = 0; begin < s.seq_len;) {
      const std::int64_t end =
          std::min<std::int64_t>(s.seq_len, begin + 1 + static_cast<std::int64_t>(random.next() % 9));
      combine(total, s.state_of(begin, end));
      begin = end;
    }
    const bool has_sink = s.options.sinks != nullptr;
    const auto row = attn::finish_row<double_math>(total.m, total.l, has_sink, static_cast<double>(sink));
    const attention_reference expected =
        attend(s.options, {1, s.seq_len, s.q.data(), s.k.data(), s.v.data(), s.bias.empty() ? nullptr : s.bias.data()});
    check_near(row.lse, expected.lse[0]);
    for (std::size_t i = 0; i < total.accumulator.size(); ++i) {
      check_near(attn::output_of<double_math>(row, total.accumulator[i]), expected.out[i]);
    }
    if (expected.num_keys[0] == 0) {
      CHECK(attn::empty_row_lse(has_sink, static_cast<double>(sink)) == expected.lse[0]);
    }
  }
}

TEST_CASE("states whose every key is at minus infinity weigh nothing, joined with each other and with others") {
  double m = -infinity, l = 0;
  const auto nothing = attn::combine_state<double_math>(m, l, -infinity, 0.0);
  CHECK(m == -infinity);
  CHECK(l == 0);
  CHECK(nothing.total == 0);
  CHECK(nothing.partial == 0);
  const auto first = attn::combine_state<double_math>(m, l, 3.0, 2.0);
  CHECK(m == 3);
  CHECK(l == 2);
  CHECK(first.total == 0);
  CHECK(first.partial == 1);
  const auto last = attn::combine_state<double_math>(m, l, -infinity, 0.0);
  CHECK(m == 3);
  CHECK(l == 2);
  CHECK(last.total == 1);
  CHECK(last.partial == 0);
}

TEST_CASE("an empty state is not looked at, whatever its accumulator holds") {
  partial_state total{2.0, 3.0, {5.0}};
  combine(total, {-infinity, 0.0, {std::numeric_limits<double>::quiet_NaN()}});
  CHECK(total.m == 2.0);
  CHECK(total.l == 3.0);
  CHECK(total.accumulator[0] == 5.0);
}

TEST_CASE("rows joined by their LSEs are the oracle's merge") {
  INFO(test::seed_note());
  random_source random(test::hash_of(test::test_seed(), 0x3e96e));
  const auto lse = [&] {
    return random.next() % 4 == 0 ? -infinity : 20.0 * static_cast<double>(test::normal_from(random.next()));
  };
  for (int round = 0; round < 3000; ++round) {
    const double a_lse = lse();
    const double b_lse = lse();
    const double a = a_lse == -infinity ? std::numeric_limits<double>::quiet_NaN()
                                        : static_cast<double>(test::normal_from(random.next()));
    const double b = b_lse == -infinity ? std::numeric_limits<double>::quiet_NaN()
                                        : static_cast<double>(test::normal_from(random.next()));
    const auto w = attn::weights_of<double_math>(a_lse, b_lse);
    const merged_row expected = merge(&a, a_lse, &b, b_lse, 1);
    check_near(w.lse, expected.lse);
    check_near(attn::merge_value<double_math>(w, a, b), expected.out[0]);
    if (a_lse != -infinity && b_lse != -infinity) check_near(attn::merge_both<double_math>(w, a, b), expected.out[0]);
  }
}
