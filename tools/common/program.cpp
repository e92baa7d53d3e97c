// SPDX-License-Identifier: Apache-2.0
#include "tools/common/program.hpp"

#include <bifolio/error.hpp>
#include <cerrno>
#include <cstdio>
#include <new>
#include <string>
#include <system_error>

#include "tools/common/escape.hpp"

namespace tools {
namespace {

[[noreturn]] void fail_stdout(int reason) {
  throw std::runtime_error(std::string("stdout cannot be written: ") + std::generic_category().message(reason));
}

int fail(const char* program, const char* what, int code) noexcept {
  try {
    write_stderr(std::string(program) + ": " + printable_line(what) + '\n');
  } catch (const std::bad_alloc&) {
    write_stderr(program);
    write_stderr(": out of memory\n");
  }
  return code;
}

bool is_callers_fault(bifolio::errc code) noexcept {
  return code == bifolio::errc::invalid_argument || code == bifolio::errc::unsupported ||
         code == bifolio::errc::out_of_range;
}

}  // namespace

void write_stdout(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) fail_stdout(errno);
}

void write_stderr(std::string_view text) noexcept {
  (void)std::fwrite(text.data(), 1, text.size(), stderr);
  (void)std::fflush(stderr);
}

void complain(std::string_view text) noexcept {
  try {
    write_stderr(printable_text(text));
  } catch (const std::bad_alloc&) {
    write_stderr("out of memory\n");
  }
}

int run_main(const char* program, const char* out_of_memory, const std::function<int()>& body) noexcept {
  try {
    return body();
  } catch (const input_error& problem) {
    return fail(program, problem.what(), 2);
  } catch (const bifolio::error& problem) {
    return fail(program, problem.what(), is_callers_fault(problem.code()) ? 2 : 1);
  } catch (const std::bad_alloc&) {
    return fail(program, out_of_memory, 1);
  } catch (const std::exception& problem) {
    return fail(program, problem.what(), 1);
  }
}

}  // namespace tools
