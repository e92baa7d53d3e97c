// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What every program here does around its work. Exit codes: 0; 2 for options and files that cannot be used; 1 for
/// everything else that fails, a stdout that cannot be written among it. With 2 and 1 there is one
/// sentence on stderr.

#include <functional>
#include <sstream>
#include <stdexcept>
#include <string_view>

namespace tools {

/// An option or a file that cannot be used: one sentence with what was found and what is allowed. Ends the program with
/// exit code 2.
class input_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// For --help.
inline constexpr const char* exit_codes =
    "Exit codes: 0; 2 for options and files that cannot be used; 1 for everything else that fails.";

/// Writes to stdout and flushes it. Throws std::runtime_error when not all of it could be written.
void write_stdout(std::string_view text);

/// Writes to stderr. What cannot be written there is lost: there is nobody left to tell.
void write_stderr(std::string_view text) noexcept;

/// Returns what `body` returns, or the exit code that belongs to what it throws, having said that on stderr after the
/// program's name. `out_of_memory` is the sentence for a std::bad_alloc.
[[nodiscard]] int run_main(const char* program, const char* out_of_memory, const std::function<int()>& body) noexcept;

/// What CLI11 says when reading the command line ends the program, help or complaint, on the right stream; the exit
/// code. `App` and `Problem` are CLI::App and CLI::ParseError, which this header need not know.
template <class App, class Problem>
[[nodiscard]] int end_of_parsing(const App& app, const Problem& problem);

/// The text with its control characters escaped, to stderr.
void complain(std::string_view text) noexcept;

template <class App, class Problem>
int end_of_parsing(const App& app, const Problem& problem) {
  std::ostringstream out, err;
  const int code = app.exit(problem, out, err);
  if (code == 0) {  // --help is an "error" with code 0
    write_stdout(out.str());
    return 0;
  }
  complain(err.str());
  return 2;
}

}  // namespace tools
