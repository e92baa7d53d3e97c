// SPDX-License-Identifier: Apache-2.0
#include "command_line.hpp"

#include <algorithm>
#include <bifolio/version.hpp>
#include <cmath>

#include "tools/common/program.hpp"

namespace generate {

float parse_number(const std::string& name, const std::string& text, float above, float most, bool above_itself) {
  float value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end != text.data() + text.size() || !std::isfinite(value) || value > most ||
      value < above || (value == above && !above_itself)) {
    throw input_error(fmt::format("{} is '{}', allowed are numbers {} {} up to {}", name, text,
                                  above_itself ? "from" : "above", above, most));
  }
  return value;
}

std::string wrapped(const std::string& about, const std::string& otherwise) {
  const std::string text = otherwise.empty() ? about : fmt::format("{} (default: {})", about, otherwise);
  std::string lines;
  std::size_t width = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    if (width > 0) {
      const bool fits = width + 1 + word.size() <= 76;
      lines += fits ? ' ' : '\n';
      width = fits ? width + 1 : 0;
    }
    lines += word;
    width += word.size();
    begin = end + 1;
  }
  return lines;
}

command_line::command_line(const char* program, const char* what_it_does, const std::string& examples)
    : app_(what_it_does, program) {
  app_.set_help_flag("-h,--help", "Show this and leave");
  app_.set_version_flag("--version", fmt::format("{} of bifolio {}", program, BIFOLIO_VERSION));
  app_.footer(examples + tools::exit_codes);
  app_.get_formatter()->column_width(34);
}

bool command_line::parse(int argc, const char* const* argv) {
  try {
    app_.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    tools::write_stdout(app_.help());
    return false;
  } catch (const CLI::CallForVersion&) {
    tools::write_stdout(app_.version() + "\n");
    return false;
  } catch (const CLI::ParseError& problem) {
    throw input_error(fmt::format("{} (--help lists the options)", problem.what()));
  }
  return true;
}

}  // namespace generate
