// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <bifolio/error.hpp>
#include <cstddef>

namespace bifolio::inline v0_2 {

namespace {

// All codes by number.
constexpr std::array<std::string_view, 10> code_names{"ok",
                                                      "invalid_argument",
                                                      "out_of_range",
                                                      "not_found",
                                                      "already_exists",
                                                      "failed_precondition",
                                                      "out_of_memory",
                                                      "unsupported",
                                                      "device_lost",
                                                      "internal"};
static_assert(code_names.size() == static_cast<std::size_t>(errc::internal) + 1);

constexpr std::string_view no_sentence = ": the host had no memory for the sentence";
using short_text = std::array<char, 64>;

// Stands in for the sentence: name and `no_sentence`, terminated by a zero.
constexpr std::array<short_text, code_names.size()> short_texts = [] {
  std::array<short_text, code_names.size()> texts{};
  for (std::size_t i = 0; i < texts.size(); ++i) {
    std::size_t at = 0;
    for (const char c : code_names[i]) texts[i][at++] = c;
    for (const char c : no_sentence) texts[i][at++] = c;
  }
  return texts;
}();

}  // namespace

error::error(errc code, const std::string& message) : std::runtime_error(message), code_(code) {}
error::error(errc code) : std::runtime_error(std::string()), code_(code) {}
error::~error() = default;

const char* error::what() const noexcept {
  const char* sentence = std::runtime_error::what();
  const auto number = static_cast<std::size_t>(code_);
  return *sentence == '\0' && number < short_texts.size() ? short_texts[number].data() : sentence;
}

std::string_view to_string(errc code) noexcept {
  const auto number = static_cast<std::size_t>(code);
  return number < code_names.size() ? code_names[number] : "unknown";
}

std::string_view to_string(alloc_status status) noexcept {
  switch (status) {
    case alloc_status::ok:
      return "ok";
    case alloc_status::later:
      return "later";
    case alloc_status::never:
      return "never";
  }
  return "unknown";
}

}  // namespace bifolio::inline v0_2
