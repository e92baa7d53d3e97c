// SPDX-License-Identifier: Apache-2.0
#include "common/attention/implementations.hpp"

#include <cstdlib>

namespace bifolio::inline v0_2::detail {
namespace {

/// A part of a sentence: "prefill, decode, x_split, general".
auto list_of(std::span<const std::string_view> names) {
  return [names](std::string& sentence) {
    for (std::size_t i = 0; i < names.size(); ++i) sentence.append(i == 0 ? "" : ", ").append(names[i]);
  };
}

}  // namespace

std::string implementation_of_environment(std::string_view device) {
  const char* const value = std::getenv("BIFOLIO_ATTENTION");
  if (value == nullptr) return {};
  const std::string_view text(value);
  const std::size_t colon = text.find(':');
  if (colon == std::string_view::npos) return std::string(text);
  return text.substr(0, colon) == device ? std::string(text.substr(colon + 1)) : std::string();
}

forced_implementation forced_by(const attention_spec& spec, std::string_view environment) noexcept {
  if (!spec.implementation.empty()) return {spec.implementation, "attention_spec::implementation"};
  if (!environment.empty()) return {environment, "BIFOLIO_ATTENTION"};
  return {};
}

void refuse_unknown_implementation(const forced_implementation& forced, std::span<const std::string_view> names) {
  refuse(errc::invalid_argument, forced.source, " is '", forced.name, "'; this backend's implementations are ",
         list_of(names));
}

void refuse_declining_implementation(const forced_implementation& forced, std::span<const std::string_view> names,
                                     std::string_view why) {
  refuse(errc::unsupported, forced.source, " is '", forced.name, "', which declines: ", why,
         "; this backend's implementations are ", list_of(names));
}

}  // namespace bifolio::inline v0_2::detail
