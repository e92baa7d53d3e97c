// SPDX-License-Identifier: Apache-2.0
#include <bifolio/dtype.hpp>
#include <bifolio/error.hpp>
#include <string>

#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2 {

std::string_view to_string(dtype type) noexcept {
  if (!is_dtype(type)) return "unknown";
  return visit_dtype(type, [](auto traits) { return traits.name; });
}

dtype parse_dtype(std::string_view text) {
  for (const dtype type : all_dtypes) {
    const bool named = visit_dtype(type, [&](auto traits) {
      if (text == traits.name) return true;
      for (const std::string_view other : traits.other_names) {
        if (text == other) return true;
      }
      return false;
    });
    if (named) return type;
  }
  detail::refuse(errc::invalid_argument, "dtype '", text, "' is not one of ", dtype_names);
}

}  // namespace bifolio::inline v0_2
