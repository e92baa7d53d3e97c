// SPDX-License-Identifier: Apache-2.0
/// How much memory the host has: /proc/meminfo, the control groups of the process (version 2, and the memory controller
/// of version 1), and the limit of its address space.

#include "common/base/host_memory.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <string_view>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace bifolio::inline v0_2 {
namespace {

std::optional<std::int64_t> number_in(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return std::nullopt;
  std::int64_t number = 0;
  const auto [end, problem] = std::from_chars(text.data() + begin, text.data() + text.size(), number);
  if (problem != std::errc()) return std::nullopt;  // "max", or a number past any memory
  return number;
}

/// What follows `key` at the beginning of a line of the file.
std::optional<std::int64_t> value_in(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key)) return number_in(std::string_view(line).substr(key.size()));
  }
  return std::nullopt;
}

std::optional<std::int64_t> number_of_file(const std::string& path) { return value_in(path, ""); }

/// Files of one version of control groups.
struct control_files {
  const char* folder;
  const char* limit;
  const char* used;
  const char* reclaimable;  ///< in memory.stat: page cache that counts as used and is given back when it is needed
};
constexpr control_files version_2{"/sys/fs/cgroup", "/memory.max", "/memory.current", "inactive_file "};
constexpr control_files version_1{"/sys/fs/cgroup/memory", "/memory.limit_in_bytes", "/memory.usage_in_bytes",
                                  "total_inactive_file "};

/// Lowers `amount` to what the group at `path` and the groups around it allow. In a container the path may be the
/// host's, which is not there; then the container's own root counts.
void apply_groups(memory_amount& amount, const std::string& root, const control_files& files, std::string path) {
  for (;;) {
    if (path == "/") path.clear();
    const std::string folder = root + files.folder + path;
    const auto limit = number_of_file(folder + files.limit);
    const auto used = number_of_file(folder + files.used);
    if (limit && used) {
      const std::int64_t kept = *used - value_in(folder + "/memory.stat", files.reclaimable).value_or(0);
      amount.total_bytes = std::min(amount.total_bytes, *limit);
      amount.free_bytes = std::min(amount.free_bytes, std::max<std::int64_t>(0, *limit - kept));
    }
    if (path.empty()) return;
    path.erase(path.rfind('/'));
  }
}

}  // namespace

memory_amount detail::linux_memory_amount(const std::string& root) {
  constexpr std::int64_t kib = 1024;
  const auto total = value_in(root + "/proc/meminfo", "MemTotal:");
  const auto available = value_in(root + "/proc/meminfo", "MemAvailable:");
  if (!total || !available) return {};
  memory_amount amount{*total * kib, *available * kib};
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/path" or "4:memory:/path"
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) continue;
    std::string controllers(1, ',');
    controllers.append(line, first + 1, second - first - 1).push_back(',');
    if (controllers == ",,") apply_groups(amount, root, version_2, line.substr(second + 1));
    if (controllers.find(",memory,") != std::string::npos) {
      apply_groups(amount, root, version_1, line.substr(second + 1));
    }
  }
  return amount;
}

memory_amount host_memory_amount() {
#if defined(__linux__)
  memory_amount amount = detail::linux_memory_amount("");
#elif defined(__unix__) || defined(__APPLE__)
  const auto page = static_cast<std::int64_t>(::sysconf(_SC_PAGESIZE));
  memory_amount amount{::sysconf(_SC_PHYS_PAGES) * page, ::sysconf(_SC_PHYS_PAGES) * page};
#else
  memory_amount amount;
#endif
#if defined(__unix__) || defined(__APPLE__)
  rlimit space{};
  if (::getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY) {
    const auto limit = static_cast<std::int64_t>(std::min<rlim_t>(space.rlim_cur, INT64_MAX));
    const std::int64_t used = number_of_file("/proc/self/statm").value_or(0) * ::sysconf(_SC_PAGESIZE);
    amount.total_bytes = std::min(amount.total_bytes, limit);
    amount.free_bytes = std::min(amount.free_bytes, std::max<std::int64_t>(0, limit - used));
  }
#endif
  return amount;
}

}  // namespace bifolio::inline v0_2
