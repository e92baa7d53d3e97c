// SPDX-License-Identifier: Apache-2.0
#pragma once

/// JSON from files that are not trusted. The one way in which the programs here read it: what nlohmann-json does with a
/// value (copy, compare, print) is recursive, so nesting is limited while the text is read.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tools {

inline constexpr std::size_t max_json_depth = 64;  ///< lists and objects inside one another

/// What a text is instead of JSON that can be used, to be read after "… is": "not valid JSON at byte 7", "JSON nested
/// deeper than 64 levels", "JSON with a number out of range at byte 9: 1e999".
class json_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One JSON value and nothing after it. Throws `json_error`. Of equal names in an object the last counts.
[[nodiscard]] nlohmann::json parse_json(std::string_view text);

/// A whole number that fits; none for anything else. (What nlohmann-json makes of a fraction, or of a number beyond
/// int64_t, is another number.)
[[nodiscard]] std::optional<std::int64_t> whole_number(const nlohmann::json& value);

/// A value for a sentence: one line of some 60 bytes, whatever its size; "..." replaces what is left out, and deep
/// inside for lists and objects.
[[nodiscard]] std::string json_excerpt(const nlohmann::json& value);

}  // namespace tools
