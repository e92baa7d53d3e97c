// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Tables of the Unicode Character Database, each sorted by its first member. `unicode.hpp` has what they are for.

#include <array>
#include <cstdint>

namespace generate {

struct character_range {
  char32_t first;
  char32_t last;
};
struct combining_range {
  char32_t first;
  char32_t last;
  std::uint8_t combining_class;  ///< above 0
};
/// Canonical. Those of Hangul syllables are arithmetic and not here.
struct decomposition {
  char32_t from;
  char32_t first;
  char32_t second;  ///< 0: `first` alone
  bool composes;    ///< NFC makes `from` of `first` and `second`
};

extern const std::array<character_range, 677> letters;
extern const std::array<character_range, 144> numbers;
extern const std::array<combining_range, 333> combining_classes;
extern const std::array<decomposition, 2060> decompositions;

}  // namespace generate
