// SPDX-License-Identifier: Apache-2.0
#include <bifolio/device.hpp>
#include <bifolio/error.hpp>
#include <charconv>

#include "common/base/refuse.hpp"

namespace bifolio {

std::string to_string(device where) {
  if (where.type == device_type::cpu) return "cpu";
  return "cuda:" + std::to_string(where.index);
}

device parse_device(std::string_view text) {
  if (text == "cpu") return {};
  if (text == "cuda") return {device_type::cuda, 0};
  constexpr std::string_view prefix = "cuda:";
  if (text.starts_with(prefix)) {
    const std::string_view digits = text.substr(prefix.size());
    std::int32_t index = -1;
    const auto [end, status] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    if (status == std::errc{} && end == digits.data() + digits.size() && index >= 0) return {device_type::cuda, index};
  }
  detail::refuse(errc::invalid_argument, "device '", text, "' is not one of cpu, cuda, cuda:N with N >= 0");
}

}  // namespace bifolio
