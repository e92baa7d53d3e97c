// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Is a result good enough? Four gates, each of which a NaN fails:
///
/// 1. per element, with u the roundoff of accumulation, u_out that of the output dtype, u_P that of probabilities,
///    d = qk_head_dim, L keys, B keys per partial sum, M = Σ p_j |v_j|, V = max |v_j|, and E = u · (largest slack of a
///    logit, reference::attend): that of its dot product, of tanh, of ALiBi and of the bias; where queries are rounded,
///    by u_q of their largest element, also u_q · |scale| · max |q_d| · (largest Σ |k_d|):
///      |err| ≤ [expm1(2E) + 8u + 2u·(B + L/B + 8) + u_P]·M·(1 + u_out) + u_out·|o| + (2^-114 + t_P)·L·V + underflow
///      |err of LSE| ≤ E + u·(B + L/B + 8) + 4u·|LSE|
///    (backward error of a dot product, Higham 2002, ch. 3, carried through the softmax; grows with B + L/B, not with
///    L. Weights below e^-87.3 of a running maximum, which may be 8 below the true one, may be flushed to 0:
///    e^8 · 2^-126 < 2^-114 a key. t_P: rounding of probabilities that are subnormal in their own dtype). Where V's
///    rows have scales that probabilities are multiplied with, a key's share may be that of any dim: + t_V · L · max V;
/// 2. an output is between the smallest and largest visible value, up to rounding: it is an average;
/// 3. the normalised mean square error stays below a ceiling per output dtype;
/// 4. the largest error, of outputs and of LSE, is at most 4 × that of the plain scalar float32 kernel, because a
///    worst-case bound is loose.
/// Values beyond the output dtype's range saturate.

#include <bifolio/dtype.hpp>
#include <string>
#include <vector>

#include "reference/attention_oracle.hpp"
#include "support/backends.hpp"

namespace bifolio::reference {

struct accuracy_gates {
  test::arithmetic numbers;
  dtype kv_type = dtype::f32;
  dtype out_type = dtype::f32;
  bool statistical = true;  ///< gates 3 and 4; off for contents that are extreme on purpose
  double other_nmse = 0;    ///< added to the ceiling of gate 3: that of expected results which are not the oracle's
};

/// Errors of many sequences' results, gathered row by row.
class accuracy_judge {
 public:
  explicit accuracy_judge(const accuracy_gates& gates) : gates_(gates) {}

  /// `out` [rows, head_dim] as stored and widened; `lse` [rows] or null; `scalar` the float32 kernel's results, not yet
  /// rounded to the output dtype.
  void add(const attention_options& options, const dense_sequence& seq, const attention_reference& expected,
           const scalar_attention& scalar, const float* out, const float* lse);

  /// What is wrong, as text; empty when every gate holds.
  [[nodiscard]] std::string problem() const;
  /// Largest error over bound; > 1 fails.
  [[nodiscard]] double worst_share() const noexcept { return worst_share_; }
  [[nodiscard]] double nmse() const noexcept;
  /// Largest error over the scalar kernel's largest error (with its floor), of outputs or of LSE.
  [[nodiscard]] double scalar_share() const noexcept;

 private:
  void note(const char* what, std::int64_t token, std::int64_t head, std::int64_t dim, double got, double expected,
            double allowed);

  accuracy_gates gates_;
  std::string first_problem_;
  std::int64_t num_problems_ = 0;
  std::int64_t num_rows_ = 0;
  double worst_share_ = 0;
  double squared_error_ = 0;
  double squared_value_ = 0;

  // Gate 4, once for outputs and once for LSE.
  struct against_scalar {
    double largest_error = 0;
    double largest_scalar_error = 0;
    double floor = 0;  // one rounding is always allowed: with few elements the scalar kernel may be exact by luck
    void add(double error, double scalar_error, double rounding) noexcept;
    [[nodiscard]] double share() const noexcept;
  };
  against_scalar outputs_;
  against_scalar lse_;
};

/// Half a unit in the last place of 1: 2^-24, 2^-11 or 2^-8.
[[nodiscard]] double unit_roundoff(dtype type) noexcept;

}  // namespace bifolio::reference
