// SPDX-License-Identifier: Apache-2.0
#pragma once

/// How a product q·k becomes a logit: the one definition, for kernels on every device. In this order, each step where
/// the call has it (bifolio/attention.hpp):
///
///   scale     logit = scale · product                 a kernel may scale the query instead
///   soft cap  logit = soft_cap · tanh(logit / soft_cap)
///   ALiBi     logit = slope · (key − position) + logit
///   bias      logit = logit + bias
///   mask      what a token does not attend to (visibility.hpp) weighs nothing
///
/// `Math` spells the arithmetic of one kind of kernel for values of one kind, scalars or vectors: add, sub, mul, div
/// and fma in single roundings, and tanh. The CUDA decode and prefill kernels keep a faster form, in base 2, which the
/// conformance suite holds to the float64 oracle.

#include <bifolio/detail/host_device.hpp>

namespace bifolio::inline v0_2::attn {

BIFOLIO_ANY_CALLABLE
template <class Math, class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE Value soft_capped(Value logit, Value soft_cap) noexcept {
  return Math::mul(soft_cap, Math::tanh(Math::div(logit, soft_cap)));
}

/// `distance` is key − position.
BIFOLIO_ANY_CALLABLE
template <class Math, class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE Value with_alibi(Value logit, Value slope, Value distance) noexcept {
  return Math::fma(slope, distance, logit);
}

BIFOLIO_ANY_CALLABLE
template <class Math, class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE Value with_bias(Value logit, Value bias) noexcept {
  return Math::add(logit, bias);
}

/// What the keys of one row have in common.
template <class Value>
struct logit_terms {
  Value scale;
  Value soft_cap;  ///< 0 = none
  bool has_alibi;
  Value slope;  ///< of the row's head
};

/// All steps but the bias, which is read only where the token attends to the key.
BIFOLIO_ANY_CALLABLE
template <class Math, class Value>
[[nodiscard]] BIFOLIO_HOST_DEVICE Value logit_of(Value product, const logit_terms<Value>& terms,
                                                 Value distance) noexcept {
  Value logit = Math::mul(product, terms.scale);
  if (terms.soft_cap > Value(0)) logit = soft_capped<Math>(logit, terms.soft_cap);
  if (terms.has_alibi) logit = with_alibi<Math>(logit, terms.slope, distance);
  return logit;
}

}  // namespace bifolio::inline v0_2::attn
