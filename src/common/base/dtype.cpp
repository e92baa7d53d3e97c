// SPDX-License-Identifier: Apache-2.0
#include <bifolio/dtype.hpp>
#include <bifolio/error.hpp>
#include <string>

#include "common/base/refuse.hpp"

namespace bifolio {

std::string_view to_string(dtype type) noexcept {
  switch (type) {
    case dtype::f32:
      return "f32";
    case dtype::f16:
      return "f16";
    case dtype::bf16:
      return "bf16";
  }
  return "unknown";
}

dtype parse_dtype(std::string_view text) {
  if (text == "f32" || text == "float32") return dtype::f32;
  if (text == "f16" || text == "float16" || text == "half") return dtype::f16;
  if (text == "bf16" || text == "bfloat16") return dtype::bf16;
  detail::refuse(errc::invalid_argument, "dtype '", text, "' is not one of f32, f16, bf16");
}

}  // namespace bifolio
