// SPDX-License-Identifier: Apache-2.0
// The equality report of this machine. Exit codes: 0 when everything held, 1 when something did not, 2 for options that
// cannot be used, with one sentence on stderr.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <string>
#include <string_view>

#include "attention_checks.hpp"
#include "machine.hpp"
#include "options.hpp"
#include "report.hpp"
#include "run.hpp"
#include "targets.hpp"
#include "tools/common/escape.hpp"
#include "tools/common/program.hpp"

namespace selftest {
namespace {

std::string command_line(int argc, char** argv) {
  std::string line = "bifolio_selftest";
  for (int i = 1; i < argc; ++i) line.append(" ").append(tools::printable_line(argv[i]));
  return line;
}

void list_targets(const std::vector<target>& targets, std::uint64_t seed) {
  std::string text;
  for (const target& where : targets) {
    text += fmt::format("{}: {}\n", where.isa == no_isa ? where.device : where.device + " " + where.isa,
                        where.main.get().description());
    for (const std::string& kernel : known_kernels(where.main.get())) text += fmt::format("    {}\n", kernel);
  }
  for (const operation what : all_operations) text += fmt::format("{}: cases without end\n", to_string(what));
  text += fmt::format("merge: cases without end\nattention: {} cases\n", attention_cases(seed).size());
  tools::write_stdout(text);
}

/// One line on stderr, written over itself ten times a second at most.
class progress_line {
 public:
  explicit progress_line(bool enabled) : enabled_(enabled) {}
  progress_line(const progress_line&) = delete;
  progress_line& operator=(const progress_line&) = delete;
  ~progress_line() {
    if (written_) tools::write_stderr("\r\x1b[K");
  }
  void show(double share, std::string_view note) {
    const auto now = std::chrono::steady_clock::now();
    if (!enabled_ || now < next_) return;
    next_ = now + std::chrono::milliseconds(100);
    written_ = true;
    tools::write_stderr(fmt::format("\r{:3.0f} %  {}\x1b[K", 100 * std::min(share, 1.0), note));
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
  std::ostringstream text;
  print(text, said, chosen.format);
  tools::write_stdout(text.str());
  return said.passed();
}

}  // namespace
}  // namespace selftest

int main(int argc, char** argv) {
  return tools::run_main("bifolio_selftest", "out of memory", [&] {
    int exit_code = 0;
    const auto chosen = selftest::parse_options(argc, argv, exit_code);
    if (!chosen) return exit_code;
    return selftest::check(*chosen, selftest::command_line(argc, argv)) ? 0 : 1;
  });
}
