// SPDX-License-Identifier: Apache-2.0
// The oracle against values worked out by hand, and the gates against results that must not pass them.
#include "reference/attention_oracle.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "reference/attention_accuracy.hpp"

using namespace bifolio;
using namespace bifolio::reference;

namespace {

// One head of dim 1: logits are q·k·scale, so every result can be written down.
struct tiny {
  std::vector<float> q{1, 2};
  std::vector<float> k{0.5f, -1, 2};
  std::vector<float> v{3, 5, 7};
  attention_options options{.num_q_heads = 1, .num_kv_heads = 1, .qk_head_dim = 1, .v_head_dim = 1, .scale = 1};
  [[nodiscard]] dense_sequence seq() const { return {2, 3, q.data(), k.data(), v.data()}; }
};

double softmax_of(std::vector<std::pair<double, double>> logit_and_value, double extra = 0) {
  double sum = extra;
  double weighted = 0;
  for (const auto& [logit, value] : logit_and_value) {
    sum += std::exp(logit);
    weighted += std::exp(logit) * value;
  }
  return weighted / sum;
}

}  // namespace

TEST_CASE("causal rows are aligned bottom-right") {
  const tiny t;
  const attention_reference got = attend(t.options, t.seq());
  CHECK(got.num_keys == std::vector<std::int64_t>{2, 3});
  CHECK(got.out[0] == doctest::Approx(softmax_of({{0.5, 3}, {-1, 5}})).epsilon(1e-14));
  CHECK(got.out[1] == doctest::Approx(softmax_of({{1, 3}, {-2, 5}, {4, 7}})).epsilon(1e-14));
  CHECK(got.lse[0] == doctest::Approx(std::log(std::exp(0.5) + std::exp(-1.0))).epsilon(1e-14));
}

TEST_CASE("windows count from the token's own position") {
  tiny t;
  t.options.window_left = 0;
  attention_reference got = attend(t.options, t.seq());
  CHECK(got.out[0] == 5);
  CHECK(got.out[1] == 7);
  t.options.causal = false;
  t.options.window_right = 1;
  got = attend(t.options, t.seq());
  CHECK(got.num_keys == std::vector<std::int64_t>{2, 1});
  CHECK(got.out[0] == doctest::Approx(softmax_of({{-1, 5}, {2, 7}})).epsilon(1e-14));
}

TEST_CASE("scale, soft cap and ALiBi come in this order") {
  tiny t;
  const float slope = 0.25f;
  t.options.scale = 0.5f;
  t.options.soft_cap = 1.5f;
  t.options.alibi_slopes = &slope;
  const auto logit = [&](double q, double k, double distance) {
    return 1.5 * std::tanh(0.5 * q * k / 1.5) + 0.25 * distance;
  };
  const attention_reference got = attend(t.options, t.seq());
  CHECK(got.out[0] == doctest::Approx(softmax_of({{logit(1, 0.5, -1), 3}, {logit(1, -1, 0), 5}})).epsilon(1e-14));
}

TEST_CASE("the bias comes after soft cap and ALiBi, and minus infinity hides a key") {
  tiny t;
  const float slope = 0.25f;
  constexpr float none = -std::numeric_limits<float>::infinity();
  const float nan = std::nanf("");
  t.options.soft_cap = 1.5f;
  t.options.alibi_slopes = &slope;
  const auto logit = [&](double q, double k, double distance, double bias) {
    return 1.5 * std::tanh(q * k / 1.5) + 0.25 * distance + bias;
  };
  // Key 2 is not visible to row 0: its contents are not read.
  const std::vector<float> bias{0.5f, -2, nan, none, 1, 0.125f};
  dense_sequence seq = t.seq();
  seq.bias = bias.data();
  const attention_reference got = attend(t.options, seq);
  CHECK(got.num_keys == std::vector<std::int64_t>{2, 2});
  CHECK(got.out[0] ==
        doctest::Approx(softmax_of({{logit(1, 0.5, -1, 0.5), 3}, {logit(1, -1, 0, -2), 5}})).epsilon(1e-14));
  CHECK(got.out[1] ==
        doctest::Approx(softmax_of({{logit(2, -1, -1, 1), 5}, {logit(2, 2, 0, 0.125), 7}})).epsilon(1e-14));
  const std::vector<float> hidden(6, none);
  seq.bias = hidden.data();
  const attention_reference empty = attend(t.options, seq);
  CHECK(empty.out == std::vector<double>{0, 0});
  CHECK(empty.lse[0] == -std::numeric_limits<double>::infinity());
  CHECK(attend_in_float32(t.options, seq).lse[1] == none);
}

TEST_CASE("a sink takes weight and gives no value") {
  tiny t;
  const float sink = 0.75f;
  t.options.sinks = &sink;
  const attention_reference got = attend(t.options, t.seq());
  CHECK(got.out[0] == doctest::Approx(softmax_of({{0.5, 3}, {-1, 5}}, std::exp(0.75))).epsilon(1e-14));
  CHECK(got.lse[0] == doctest::Approx(std::log(std::exp(0.5) + std::exp(-1.0) + std::exp(0.75))).epsilon(1e-14));
}

TEST_CASE("a row with nothing visible is 0 and minus infinity, or the sink alone") {
  tiny t;
  const dense_sequence seq{2, 0, t.q.data(), t.k.data(), t.v.data()};
  attention_reference got = attend(t.options, seq);
  CHECK(got.out == std::vector<double>{0, 0});
  CHECK(got.lse[0] == -std::numeric_limits<double>::infinity());
  const float sink = 0.75f;
  t.options.sinks = &sink;
  got = attend(t.options, seq);
  CHECK(got.out == std::vector<double>{0, 0});
  CHECK(got.lse[0] == 0.75);
}

TEST_CASE("query head h reads KV head h / group_size") {
  const std::vector<float> q(4, 1.0f);
  const std::vector<float> k{0, 0};
  const std::vector<float> v{10, 20};
  const attention_reference got =
      attend({.num_q_heads = 4, .num_kv_heads = 2, .qk_head_dim = 1, .v_head_dim = 1, .scale = 1},
             {1, 1, q.data(), k.data(), v.data()});
  CHECK(got.out == std::vector<double>{10, 10, 20, 20});
}

TEST_CASE("merging the halves of a row gives the row") {
  const tiny t;
  const attention_options options{
      .num_q_heads = 1, .num_kv_heads = 1, .qk_head_dim = 1, .v_head_dim = 1, .causal = false, .scale = 1};
  const attention_reference whole = attend(options, {1, 3, t.q.data(), t.k.data(), t.v.data()});
  const attention_reference a = attend(options, {1, 1, t.q.data(), t.k.data(), t.v.data()});
  const attention_reference b = attend(options, {1, 2, t.q.data(), t.k.data() + 1, t.v.data() + 1});
  const merged_row joined = merge(a.out.data(), a.lse[0], b.out.data(), b.lse[0], 1);
  CHECK(joined.out[0] == doctest::Approx(whole.out[0]).epsilon(1e-14));
  CHECK(joined.lse == doctest::Approx(whole.lse[0]).epsilon(1e-14));
  constexpr double none = -std::numeric_limits<double>::infinity();
  const double nan = std::nan("");
  CHECK(merge(a.out.data(), a.lse[0], &nan, none, 1).out[0] == a.out[0]);
  CHECK(merge(&nan, none, &nan, none, 1).out[0] == 0);
  CHECK(merge(&nan, none, &nan, none, 1).lse == none);
}

TEST_CASE("the plain float32 kernel passes the gates, and a result that is slightly wrong does not") {
  const tiny t;
  const attention_reference expected = attend(t.options, t.seq());
  const scalar_attention scalar = attend_in_float32(t.options, t.seq());
  const auto complaint = [&](std::vector<float> out, std::vector<float> lse) {
    accuracy_judge judge({});
    judge.add(t.options, t.seq(), expected, scalar, out.data(), lse.data());
    return judge.problem();
  };
  CHECK(complaint(scalar.out, scalar.lse).empty());
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK_FALSE(complaint({scalar.out[0], scalar.out[1] * (1 + 1e-3f)}, scalar.lse).empty());
  CHECK_FALSE(complaint({nan, scalar.out[1]}, scalar.lse).empty());
  CHECK_FALSE(complaint({scalar.out[0], std::numeric_limits<float>::infinity()}, scalar.lse).empty());
  CHECK_FALSE(complaint(scalar.out, {scalar.lse[0], nan}).empty());
  CHECK_FALSE(complaint(scalar.out, {scalar.lse[0] + 1e-3f, scalar.lse[1]}).empty());
}

TEST_CASE("a weight too small for float32 may be flushed, and no other") {
  const attention_options options{
      .num_q_heads = 1, .num_kv_heads = 1, .qk_head_dim = 1, .v_head_dim = 1, .causal = false, .scale = 1};
  const std::vector<float> q{1};
  const std::vector<float> v{0, 3};  // the key that weighs has no value
  for (const float logit : {-88.0f, -70.0f}) {
    const std::vector<float> k{0, logit};
    const dense_sequence seq{1, 2, q.data(), k.data(), v.data()};
    const scalar_attention scalar = attend_in_float32(options, seq);
    accuracy_gates gates;
    gates.statistical = false;
    accuracy_judge judge(gates);
    const float flushed = 0;
    judge.add(options, seq, attend(options, seq), scalar, &flushed, scalar.lse.data());
    CHECK_MESSAGE(judge.problem().empty() == (logit == -88.0f), judge.problem());
  }
}
