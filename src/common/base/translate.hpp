// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The public face of a failed host allocation: containers throw std::bad_alloc, callers get `error`.

#include <bifolio/error.hpp>
#include <new>
#include <string>
#include <utility>

#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2::detail {

/// Calls `function`; std::bad_alloc becomes error(out_of_memory) that names the call.
template <class Function>
decltype(auto) translate_bad_alloc(const char* call, Function&& function) {
  try {
    return std::forward<Function>(function)();
  } catch (const std::bad_alloc&) {
    refuse(errc::out_of_memory, call, ": the host has no memory for it; nothing was changed");
  }
}

}  // namespace bifolio::inline v0_2::detail
