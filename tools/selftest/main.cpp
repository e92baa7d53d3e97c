// SPDX-License-Identifier: Apache-2.0
// The equality report of this machine. Exit codes: 0 when everything held, 1 when something did not, 2 for options that
// cannot be used, with one sentence on stderr.
#include <fmt/format.h>

#include <bifolio/error.hpp>
#include <chrono>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>

#include "attention_checks.hpp"
#include "machine.hpp"
#include "options.hpp"
#include "report.hpp"
#include "run.hpp"
#include "targets.hpp"

namespace selftest {
namespace {

std::string command_line(int argc, char** argv) {
  std::string line = "bifolio_selftest";
  for (int i = 1; i < argc; ++i) line.append(" ").append(argv[i]);
  return line;
}

void list_targets(const std::vector<target>& targets, std::uint64_t seed) {
  for (const target& where : targets) {
    std::cout << fmt::format("{}: {}\n", where.isa == no_isa ? where.device : where.device + " " + where.isa,
                             where.main.get().description());
    for (const std::string& kernel : known_kernels(where.main.get())) std::cout << "    " << kernel << '\n';
  }
  for (const operation what : all_operations) std::cout << to_string(what) << ": cases without end\n";
  std::cout << "merge: cases without end\n";
  std::cout << fmt::format("attention: {} cases\n", attention_cases(seed).size());
}

/// One line on stderr, written over itself ten times a second at most.
class progress_line {
 public:
  explicit progress_line(bool enabled) : enabled_(enabled) {}
  progress_line(const progress_line&) = delete;
  progress_line& operator=(const progress_line&) = delete;
  ~progress_line() {
    if (written_) std::cerr << "\r\x1b[K" << std::flush;
  }
  void show(double share, std::string_view note) {
    const auto now = std::chrono::steady_clock::now();
    if (!enabled_ || now < next_) return;
    next_ = now + std::chrono::milliseconds(100);
    written_ = true;
    std::cerr << fmt::format("\r{:3.0f} %  {}\x1b[K", 100 * std::min(share, 1.0), note) << std::flush;
  }

 private:
  bool enabled_;
  bool written_ = false;
  std::chrono::steady_clock::time_point next_{};
};

/// Returns whether everything held.
bool check(options chosen, const std::string& command) {
  const std::vector<target> targets = open_targets(chosen.where);
  if (chosen.list) {
    list_targets(targets, chosen.run.seed);
    return true;
  }
  report said;
  said.strict = chosen.strict;
  said.machine = machine_of(targets);
  said.machine.emplace_back("command", command);
  {
    progress_line progress(chosen.progress);
    chosen.run.progress = [&](double share, std::string_view note) { progress.show(share, note); };
    run_checks(chosen.run, targets, said);
  }
  print(std::cout, said, chosen.format);
  std::cout.flush();
  if (!std::cout) throw std::runtime_error("the report could not be written");
  return said.passed();
}

}  // namespace
}  // namespace selftest

int main(int argc, char** argv) {
  try {
    int exit_code = 0;
    const auto chosen = selftest::parse_options(argc, argv, exit_code);
    if (!chosen) return exit_code;
    return selftest::check(*chosen, selftest::command_line(argc, argv)) ? 0 : 1;
  } catch (const bifolio::error& problem) {
    std::cerr << "bifolio_selftest: " << problem.what() << '\n';
    return problem.code() == bifolio::errc::invalid_argument ? 2 : 1;
  } catch (const std::bad_alloc&) {
    std::cerr << "bifolio_selftest: out of memory\n";
    return 1;
  } catch (const std::exception& problem) {
    std::cerr << "bifolio_selftest: " << problem.what() << '\n';
    return 1;
  }
}
