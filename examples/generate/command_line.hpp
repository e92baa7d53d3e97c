// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The command line of generate and serve. Every refusal is a sentence with the option, the value and what is allowed.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <bifolio/error.hpp>
#include <charconv>
#include <filesystem>
#include <string>

#include "input_error.hpp"

namespace generate {

/// A description with its default, in lines that fit next to the names of the options.
[[nodiscard]] std::string wrapped(const std::string& about, const std::string& otherwise = {});

template <class Integer>
Integer parse_integer(const std::string& name, const std::string& text, Integer least, Integer most) {
  Integer value{};
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end != text.data() + text.size() || value < least || value > most) {
    throw input_error(fmt::format("{} is '{}', allowed are whole numbers from {} to {}", name, text, least, most));
  }
  return value;
}

[[nodiscard]] float parse_number(const std::string& name, const std::string& text, float above, float most,
                                 bool above_itself);

/// Hangs plain functions of a string on CLI11's options, so that every refusal is a sentence of ours.
class command_line {
 public:
  /// `examples` are lines for the end of --help.
  command_line(const char* program, const char* what_it_does, const std::string& examples);

  /// Throws `input_error` on anything that is not allowed. False after --help or --version, which it has printed.
  [[nodiscard]] bool parse(int argc, const char* const* argv);

  template <class Take>
  CLI::Option* value(const std::string& name, const char* type, const std::string& otherwise, const std::string& about,
                     Take take) {
    return app_
        .add_option_function<std::string>(
            name, [name, take](const std::string& text) { take(name, text); }, wrapped(about, otherwise))
        ->type_name(type);
  }
  template <class Integer>
  void integer(const std::string& name, Integer& target, Integer least, Integer most, const std::string& otherwise,
               const std::string& about) {
    value(name, "N", otherwise, about, [&target, least, most](const std::string& option, const std::string& text) {
      target = parse_integer(option, text, least, most);
    });
  }
  void number(const std::string& name, float& target, float above, float most, bool above_itself,
              const std::string& about) {
    value(name, "X", fmt::format("{}", target), about,
          [&target, above, most, above_itself](const std::string& option, const std::string& text) {
            target = parse_number(option, text, above, most, above_itself);
          });
  }
  void path(const std::string& name, std::filesystem::path& target, const std::string& otherwise,
            const std::string& about) {
    value(name, "PATH", otherwise, about, [&target](const std::string& option, const std::string& text) {
      if (text.empty()) throw input_error(fmt::format("{} is empty, a path is expected", option));
      target = text;
    });
  }
  /// Words that bifolio itself reads; `allowed` is what the sentence about another word lists.
  template <class Target, class Parse>
  void word(const std::string& name, Target& target, const std::string& otherwise, const std::string& allowed,
            const std::string& about, Parse read) {
    value(name, allowed.c_str(), otherwise, about,
          [&target, allowed, read](const std::string& option, const std::string& text) {
            try {
              target = read(text);
            } catch (const bifolio::error&) {
              throw input_error(fmt::format("{} is '{}', allowed are {}", option, text, allowed));
            }
          });
  }

  /// Without a value.
  void flag(const std::string& name, bool& target, const std::string& about) {
    app_.add_flag(name, target, wrapped(about));
  }
  /// That may be given several times; for `results` after the parsing.
  CLI::Option* texts(const std::string& name, const char* type, const std::string& about) {
    const std::string description = wrapped(about);  // CLI11 takes a name and a variable, or two lvalue strings
    return app_.add_option(name, description)
        ->type_name(type)
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->allow_extra_args(false);
  }

 private:
  CLI::App app_;
};

}  // namespace generate
