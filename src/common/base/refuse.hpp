// SPDX-License-Identifier: Apache-2.0
#pragma once

/// How `error` is thrown: a code, and a sentence made of parts. The parts are put together here, so that a refusal that
/// finds no memory for its sentence keeps its code.

#include <bifolio/error.hpp>
#include <new>
#include <string>
#include <type_traits>

namespace bifolio::inline v0_2::detail {

/// Text, or a number as std::to_string writes it.
template <class Part>
void append_part(std::string& sentence, const Part& part) {
  if constexpr (std::is_arithmetic_v<Part>) {
    sentence.append(std::to_string(part));
  } else {
    sentence.append(part);
  }
}

/// Parts that are made of other parts come as a function of the sentence, which appends them.
template <class Part>
requires std::is_invocable_v<const Part&, std::string&>
void append_part(std::string& sentence, const Part& part) { part(sentence); }

/// The error that `refuse` throws. Throws nothing itself.
template <class... Parts>
[[nodiscard]] error make_error(errc code, const Parts&... parts) {
  try {
    std::string sentence;
    (append_part(sentence, parts), ...);
    return error(code, sentence);
  } catch (const std::bad_alloc&) {
    return error(code);
  }
}

/// A part that needs memory before it can be appended, as std::string does, belongs into a function.
template <class... Parts>
[[noreturn]] void refuse(errc code, const Parts&... parts) {
  throw make_error(code, parts...);
}

}  // namespace bifolio::inline v0_2::detail
