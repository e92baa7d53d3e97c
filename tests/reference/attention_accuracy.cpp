// SPDX-License-Identifier: Apache-2.0
#include "reference/attention_accuracy.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "support/elements.hpp"

namespace bifolio::reference {
namespace {

double nmse_ceiling(dtype type) {
  switch (type) {
    case dtype::f32:
      return 1e-9;
    case dtype::f16:
      return 3e-7;
    case dtype::bf16:
      return 1.5e-5;
    case dtype::e4m3:
    case dtype::e5m2:
    case dtype::i8:
    case dtype::u8:
      break;  // no output has them
  }
  return 0;
}

// Written so that a NaN on either side is a refusal.
bool within(double error, double allowed) { return error <= allowed; }

}  // namespace

double unit_roundoff(dtype type) noexcept { return static_cast<double>(test::facts_of(type).unit_roundoff); }

void accuracy_judge::note(const char* what, std::int64_t token, std::int64_t head, std::int64_t dim, double got,
                          double expected, double allowed) {
  if (num_problems_++ > 0) return;
  char text[320];
  std::snprintf(text, sizeof text, "%s at token %lld, head %lld, dim %lld: got %.9g, expected %.9g, allowed error %.3g",
                what, static_cast<long long>(token), static_cast<long long>(head), static_cast<long long>(dim), got,
                expected, allowed);
  first_problem_ = text;
}

void accuracy_judge::add(const attention_options& options, const dense_sequence& seq,
                         const attention_reference& expected, const scalar_attention& scalar, const float* out,
                         const float* lse) {
  const auto kv = static_cast<std::size_t>(gates_.kv_type);
  const double u = gates_.numbers.unit_accumulate[kv];
  const double u_out = unit_roundoff(gates_.out_type);
  const double u_p = gates_.numbers.unit_probability[kv];
  const auto split = static_cast<double>(gates_.numbers.split_size);
  const auto length = static_cast<double>(seq.seq_len);
  const double sums = split + length / split + 8;
  const auto most = static_cast<double>(test::max_finite(gates_.out_type));
  // Below the normal range products and the stored result are exact only to their smallest subnormals, or are 0.
  const double underflow = static_cast<double>(test::smallest_subnormal(gates_.out_type)) +
                           (length + 2) * (0x1p-149 + gates_.numbers.flushed[kv]);

  num_rows_ += seq.query_len * options.num_q_heads;
  for (std::int64_t t = 0; t < seq.query_len; ++t) {
    for (std::int64_t h = 0; h < options.num_q_heads; ++h) {
      const auto row = static_cast<std::size_t>(t * options.num_q_heads + h);
      const double logit_error = u * expected.logit_slack[row] +
                                 gates_.numbers.query_roundoff * expected.query_slack[row] +
                                 gates_.numbers.range_roundoff * expected.range_slack[row];
      const double relative = std::expm1(2 * logit_error) + 8 * u + 2 * u * sums + u_p;
      double of_rows = 0;
      if (gates_.numbers.row_roundoff > 0) {
        const auto dims = static_cast<std::size_t>(options.v_head_dim);
        for (std::size_t at = row * dims; at < (row + 1) * dims; ++at) {
          of_rows = std::max({of_rows, std::abs(expected.lowest[at]), std::abs(expected.highest[at])});
        }
        of_rows *= gates_.numbers.row_roundoff * length;
      }
      for (std::int64_t i = 0; i < options.v_head_dim; ++i) {
        const std::size_t at = row * static_cast<std::size_t>(options.v_head_dim) + static_cast<std::size_t>(i);
        const double want = std::clamp(expected.out[at], -most, most);
        const auto got = static_cast<double>(out[at]);
        const double error = std::abs(got - want);
        const double magnitude = expected.magnitude[at];
        const double largest = std::max(std::abs(expected.lowest[at]), std::abs(expected.highest[at]));
        const double flushed = (0x1p-114 + gates_.numbers.tiny_probability[kv]) * length * largest;
        double allowed = relative * magnitude * (1 + u_out) + u_out * std::abs(want) + flushed + of_rows + underflow;
        if (expected.num_keys[row] == 0) allowed = 0;
        if (!within(error, allowed)) note("output", t, h, i, got, want, allowed);
        const double rounding = (u_out + u_p + 2 * u * sums) * largest + of_rows + underflow;
        if (!(got >= std::clamp(expected.lowest[at], -most, most) - rounding &&
              got <= std::clamp(expected.highest[at], -most, most) + rounding)) {
          note("not an average of the visible values", t, h, i, got, want, rounding);
        }
        if (allowed > 0 && std::isfinite(allowed)) worst_share_ = std::max(worst_share_, error / allowed);
        squared_error_ += error * error;
        squared_value_ += want * want;
        const auto plain = static_cast<double>(test::stored_as(gates_.out_type, scalar.out[at]));
        // The plain kernel may have luck: what one rounding of the row's largest logit does is always allowed for.
        const double one_rounding = logit_error / (options.qk_head_dim + 2);
        outputs_.add(error, std::abs(plain - want),
                     u_out * std::abs(want) + (2 * u + u_p + one_rounding) * magnitude + underflow);
      }
      if (lse == nullptr) continue;
      const double want = expected.lse[row];
      const auto got = static_cast<double>(lse[row]);
      if (std::isinf(want)) {
        if (!(got == want)) note("LSE", t, h, -1, got, want, 0);
        continue;
      }
      const double allowed = logit_error + u * sums + 4 * u * std::abs(want);
      if (!within(std::abs(got - want), allowed)) note("LSE", t, h, -1, got, want, allowed);
      if (std::isfinite(allowed)) worst_share_ = std::max(worst_share_, std::abs(got - want) / allowed);
      lse_.add(std::abs(got - want), std::abs(static_cast<double>(scalar.lse[row]) - want),
               4 * u * std::max(1.0, std::abs(want)));
    }
  }
}

double accuracy_judge::nmse() const noexcept { return squared_value_ > 0 ? squared_error_ / squared_value_ : 0; }

void accuracy_judge::against_scalar::add(double error, double scalar_error, double rounding) noexcept {
  // A NaN counts as larger than everything, and stays.
  if (!std::isnan(largest_error) && !(error <= largest_error)) largest_error = error;
  largest_scalar_error = std::max(largest_scalar_error, scalar_error);
  floor = std::max(floor, rounding);
}

double accuracy_judge::against_scalar::share() const noexcept {
  const double allowed = std::max(largest_scalar_error, floor);
  return allowed > 0 ? largest_error / allowed : 0;
}

double accuracy_judge::scalar_share() const noexcept {
  const double outputs = outputs_.share();
  const double lse = lse_.share();
  return std::isnan(lse) || outputs <= lse ? lse : outputs;
}

std::string accuracy_judge::problem() const {
  std::string text;
  if (num_problems_ > 0) {
    text = std::to_string(num_problems_) + " values outside the bound, first: " + first_problem_;
  }
  if (!gates_.statistical) return text;
  const auto append = [&](const char* what, double got, double allowed) {
    char line[160];
    std::snprintf(line, sizeof line, "%s%s %.3g, allowed %.3g", text.empty() ? "" : "; ", what, got, allowed);
    text += line;
  };
  // A mean over one row is that of a few large probabilities, whose rounding a cancelling sum magnifies: with a bias
  // one row in 400 of bf16 exceeds the ceiling by a tenth, on any shape; none of 1200 by half.
  const double few_rows = 1 + 1 / static_cast<double>(std::max<std::int64_t>(num_rows_, 1));
  const double ceiling = nmse_ceiling(gates_.out_type) * few_rows + gates_.other_nmse;
  if (!within(nmse(), ceiling)) append("normalised mean square error", nmse(), ceiling);
  if (!within(scalar_share(), 4)) append("largest error over that of the plain scalar kernel", scalar_share(), 4);
  return text;
}

}  // namespace bifolio::reference
