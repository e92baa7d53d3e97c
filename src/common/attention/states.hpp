// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The algebra of partial softmaxes (Milakov & Gimelshein 2018; FlashInfer's attention states): the one definition, for
/// kernels on every device.
///
/// A partial state of a row is its maximum m, the sum l of exp(s − m) and an accumulator of exp(s − m)·v. Without keys
/// m = −inf and l = 0. A state is combined into a total, a row is finished with its sink, and two finished rows are
/// joined by their LSEs (merge_states).
///
/// `Math` spells the arithmetic of one kind of kernel: add, sub, mul, div in single roundings, mul_add (a · b + c,
/// fused or not, as its kernels do it), max, exp, and log_plus(base, x) = base + ln x. Kernels that combine the same
/// states in the same order with the same `Math` get the same bits. The CUDA decode and prefill kernels keep a faster
/// form, in base 2, which the conformance suite holds to the float64 oracle.

#include <bifolio/detail/host_device.hpp>

namespace bifolio::inline v0_2::attn {

template <class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE constexpr Value minus_infinity() noexcept {
  return static_cast<Value>(-__builtin_inff());
}

/// A maximum that can be subtracted: 0 in the place of −inf.
template <class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE constexpr Value finite_max(Value m) noexcept {
  return m == minus_infinity<Value>() ? Value(0) : m;
}

/// Factors with which a total and a partial state are combined.
template <class Value>
struct combine_weights {
  Value total;
  Value partial;
  bool skip;  ///< the partial state is empty: its accumulator, which may hold NaN, is not looked at
};

/// Combines a state (m, l) that has keys into the total, whose m and l are replaced. Where all its keys are at −inf it
/// weighs nothing.
BIFOLIO_ANY_CALLABLE
template <class Math, class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE combine_weights<Value> combine_state(Value& total_m, Value& total_l, Value m,
                                                                       Value l) noexcept {
  const Value joint = Math::max(total_m, m);
  const Value base = finite_max(joint);
  const combine_weights<Value> w{Math::exp(Math::sub(total_m, base)), Math::exp(Math::sub(m, base)), false};
  total_l = Math::mul_add(l, w.partial, Math::mul(total_l, w.total));
  total_m = joint;
  return w;
}

/// The same for a state that may have no keys.
BIFOLIO_ANY_CALLABLE
template <class Math, class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE combine_weights<Value> combine_any_state(Value& total_m, Value& total_l, Value m,
                                                                           Value l) noexcept {
  if (m == minus_infinity<Value>() && l == Value(0)) return {Value(1), Value(0), true};
  return combine_state<Math>(total_m, total_l, m, l);
}

/// One value of the accumulators, or a vector of them, of a state that is not skipped.
BIFOLIO_ANY_CALLABLE
template <class Math, class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE Value combine_value(Value total_weight, Value partial_weight, Value total,
                                                      Value partial) noexcept {
  return Math::mul_add(partial, partial_weight, Math::mul(total, total_weight));
}

/// One value, of any state.
BIFOLIO_ANY_CALLABLE
template <class Math, class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE Value combine_value(const combine_weights<Value>& w, Value total,
                                                      Value partial) noexcept {
  return w.skip ? total : combine_value<Math>(w.total, w.partial, total, partial);
}

/// What finishes a row: output = accumulator · numerator / denominator, in this order or through the reciprocal.
template <class Value>
struct row_epilogue {
  Value numerator;
  Value denominator;  ///< 0 where nothing weighs: the output is 0
  Value lse;          ///< natural logarithm
};

/// A sink is one more key without a value.
BIFOLIO_ANY_CALLABLE
template <class Math, class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE row_epilogue<Value> finish_row(Value m, Value l, bool has_sink, Value sink) noexcept {
  if (!has_sink) return {Value(1), l, l == Value(0) ? minus_infinity<Value>() : Math::log_plus(m, l)};
  const Value joint = Math::max(m, sink);
  if (joint == minus_infinity<Value>() && l == Value(0)) return {Value(1), Value(0), minus_infinity<Value>()};
  const Value base = finite_max(joint);
  const Value factor = Math::exp(Math::sub(m, base));
  const Value sum = Math::mul_add(l, factor, Math::exp(Math::sub(sink, base)));
  return {l == Value(0) ? Value(0) : factor, sum, Math::log_plus(base, sum)};
}

/// One value of a finished row.
BIFOLIO_ANY_CALLABLE
template <class Math, class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE Value output_of(const row_epilogue<Value>& row, Value accumulated) noexcept {
  if (row.denominator == Value(0)) return Value(0);
  return Math::div(Math::mul(accumulated, row.numerator), row.denominator);
}

/// The LSE of a row that attends to nothing; its output is 0.
template <class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE constexpr Value empty_row_lse(bool has_sink, Value sink) noexcept {
  return has_sink ? sink : minus_infinity<Value>();
}

/// How two finished rows are joined: output = a · weight_a + b · weight_b. A row of LSE −inf weighs nothing.
template <class Value>
struct merge_weights {
  Value a;
  Value b;
  Value lse;
};

BIFOLIO_ANY_CALLABLE
template <class Math, class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE merge_weights<Value> weights_of(Value a_lse, Value b_lse) noexcept {
  constexpr Value none = minus_infinity<Value>();
  const Value joint = Math::max(a_lse, b_lse);
  if (a_lse == none && b_lse == none) return {Value(0), Value(0), none};
  const Value a = a_lse == none ? Value(0) : Math::exp(Math::sub(a_lse, joint));
  const Value b = b_lse == none ? Value(0) : Math::exp(Math::sub(b_lse, joint));
  const Value sum = Math::add(a, b);
  return {Math::div(a, sum), Math::div(b, sum), Math::log_plus(joint, sum)};
}

/// The joint value of one element of two rows that weigh something. Commutes, which a fused sum would not.
BIFOLIO_ANY_CALLABLE
template <class Math, class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE Value merge_both(const merge_weights<Value>& w, Value a, Value b) noexcept {
  return Math::add(Math::mul(w.a, a), Math::mul(w.b, b));
}

/// The same where a row without weight, which may hold NaN, is not looked at.
BIFOLIO_ANY_CALLABLE
template <class Math, class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE Value merge_value(const merge_weights<Value>& w, Value a, Value b) noexcept {
  if (w.a == Value(0)) return w.b == Value(0) ? Value(0) : Math::mul(w.b, b);
  if (w.b == Value(0)) return Math::mul(w.a, a);
  return merge_both<Math>(w, a, b);
}

}  // namespace bifolio::inline v0_2::attn
