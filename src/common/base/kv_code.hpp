// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Which codes of a plane the library stores, and the sentence that refuses the others, for every place that refuses.

#include <bifolio/kv_layout.hpp>
#include <string>

namespace bifolio::detail {

[[nodiscard]] constexpr bool is_supported(const kv_code& code) noexcept {
  return code.granularity == scale_granularity::none;
}

/// The part of a sentence (refuse.hpp) that names what is not supported; `plane` is "K" or "V".
[[nodiscard]] inline auto unsupported_code(const char* plane, const kv_code& code) noexcept {
  return [plane, granularity = code.granularity](std::string& sentence) {
    sentence.append("scale granularity '").append(to_string(granularity)).append("' of the ").append(plane);
    sentence.append(" plane is not supported yet; the granularity must be 'none'");
  };
}

}  // namespace bifolio::detail
