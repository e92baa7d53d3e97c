// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The checks of the attention calls, one place for every backend. A check returns the first reason why a call is
/// refused: the code, and, when the caller gives a string, a sentence with the value received and the values allowed.
/// Without a string nothing is allocated, so that per-layer calls use the same checks. What is refused and with which
/// code is given in bifolio/attention.hpp and at `backend::plan_attention`.

#include <bifolio/attention.hpp>
#include <bifolio/error.hpp>
#include <bifolio/step.hpp>
#include <cstdint>
#include <string>
#include <string_view>

namespace bifolio::inline v0_2::validate {

/// `backend::attention` against its plan; what the pointers point to is not read.
[[nodiscard]] errc attention(const attention_plan& plan, const attention_params& params, std::string* sentence);

[[nodiscard]] errc merge(const merge_params& params, std::string* sentence);

/// The numbers of a spec by themselves.
[[nodiscard]] errc attention_spec_alone(const attention_spec& spec, std::string* sentence);

/// A step's host arrays for `spec`: lengths, table rows, block ids. Entries of the tables that no token attends to
/// (past the length, before the window) are not read.
[[nodiscard]] errc attention_batch(const attention_spec& spec, const host_step_view& batch, std::int64_t num_blocks,
                                   std::string* sentence);

}  // namespace bifolio::inline v0_2::validate
