// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The checks of rotate_append, one place for every backend. What is refused, and with which code: rotate_append.hpp.

#include <bifolio/error.hpp>
#include <bifolio/rotate_append.hpp>
#include <string>

namespace bifolio::inline v0_2::validate {

/// What the structs alone tell. Reads none of the arrays; `sentence`, which may be null, becomes the reason.
[[nodiscard]] errc rotate_append(const rotate_append_params& params, std::string* sentence = nullptr);

/// What the host can read of the arrays, for parameters that passed: slots past the end of the cache, positions outside
/// the table, pairs of an axis that is not there.
[[nodiscard]] errc rotate_append_arrays(const rotate_append_params& params, std::string* sentence = nullptr);

}  // namespace bifolio::inline v0_2::validate
