// SPDX-License-Identifier: Apache-2.0
#include "machine.hpp"

#include <algorithm>
#include <bifolio/backend.hpp>
#include <bifolio/cpu.hpp>
#include <bifolio/version.hpp>
#include <ctime>
#include <fstream>
#include <string>
#include <thread>

#if defined(__linux__)
#include <unistd.h>
#endif

namespace bifolio::bench {
namespace {

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const std::size_t colon = line.find(": ");
    if (colon != std::string::npos && line.rfind("model name", 0) == 0) return line.substr(colon + 2);
  }
  return "unknown";
}

std::string load_average() {
  std::ifstream info("/proc/loadavg");
  std::string load;
  return info >> load ? load : "unknown";
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[16];
  return std::strftime(text, sizeof text, "%Y-%m-%d", &parts) > 0 ? text : "unknown";
}

}  // namespace

std::vector<std::pair<std::string, std::string>> machine_facts() {
#if defined(__clang__)
  const char* compiler = "clang " __clang_version__;
#else
  const char* compiler = "gcc " __VERSION__;
#endif
  return {{"cpu", cpu_name()},
          {"logical cpus", std::to_string(std::thread::hardware_concurrency())},
          {"load at start", load_average()},
          {"best isa", std::string(to_string(default_isa()))},
          {"compiler", compiler},
          {"bifolio", BIFOLIO_VERSION},
          {"date", today()}};
}

std::string isa_choice() {
  std::string names;
  for (const cpu_isa isa : known_isas()) names.append(names.empty() ? "" : ", ").append(to_string(isa));
  return names + " (default: the best)";
}

std::int64_t bytes_beyond_cache(std::int64_t least) noexcept {
  std::int64_t cache = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  cache = std::max<std::int64_t>(0, sysconf(_SC_LEVEL3_CACHE_SIZE));
#endif
  return std::max(least, cache + cache / 4);
}

}  // namespace bifolio::bench
