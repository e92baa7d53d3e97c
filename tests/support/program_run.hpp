// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Runs a program as its users do, and looks at what it wrote.

#include <doctest/doctest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace bifolio::test {

struct run_result {
  int code = -1;
  std::string out;
  std::string err;
};

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline std::filesystem::path write_file(const std::filesystem::path& path, std::string_view text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file << text << std::flush;
  REQUIRE(file.good());
  return path;
}

inline std::string shell_quoted(std::string_view text) {
  std::string result = "'";
  for (const char c : text) {
    if (c == '\'') {
      result += "'\\''";
    } else {
      result += c;
    }
  }
  result += '\'';
  return result;
}

/// Runs it with these files as stdout and stderr and returns its exit code. A shell says 128 and more of a program that
/// a signal ended.
inline int exit_code_of(const std::string& program, const std::vector<std::string>& arguments,
                        const std::filesystem::path& out, const std::filesystem::path& err) {
  std::string command = shell_quoted(program);
  for (const std::string& argument : arguments) command.append(" ").append(shell_quoted(argument));
  command.append(" </dev/null >").append(shell_quoted(out.string())).append(" 2>").append(shell_quoted(err.string()));
  const int status = std::system(command.c_str());
  INFO(command);
  REQUIRE(WIFEXITED(status));
  REQUIRE(WEXITSTATUS(status) < 128);
  return WEXITSTATUS(status);
}

/// Its output goes through files of `folder`, so tests that run at the same time need folders of their own.
inline run_result run_program(const std::string& program, const std::vector<std::string>& arguments,
                              const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  const std::filesystem::path out = folder / "out", err = folder / "err";
  const int code = exit_code_of(program, arguments, out, err);
  return {code, read_file(out), read_file(err)};
}

/// The same with a stdout that takes nothing, as on a full disk: Linux's /dev/full.
inline run_result run_program_on_full_disk(const std::string& program, const std::vector<std::string>& arguments,
                                           const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  const std::filesystem::path err = folder / "err";
  const int code = exit_code_of(program, arguments, "/dev/full", err);
  return {code, {}, read_file(err)};
}

}  // namespace bifolio::test
