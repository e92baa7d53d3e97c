// SPDX-License-Identifier: Apache-2.0
#include "machine.hpp"

#include <fstream>

#include "bench/machine.hpp"

namespace selftest {
namespace {

/// The kernel module's own line, such as "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15 ..."; empty
/// without.
std::string nvidia_driver() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> machine_of(const std::vector<target>& targets) {
  std::vector<std::pair<std::string, std::string>> facts = bifolio::bench::machine_facts();
  facts.emplace_back("instruction sets", supported_isa_names());
  for (const target& where : targets) {
    if (!where.main.is_host) facts.emplace_back("gpu", where.main.get().description());
  }
  if (const std::string driver = nvidia_driver(); !driver.empty()) facts.emplace_back("driver", driver);
  return facts;
}

}  // namespace selftest
