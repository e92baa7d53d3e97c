// SPDX-License-Identifier: Apache-2.0
#include "cpu/usable_cpus.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

namespace bifolio::inline v0_2::cpu {
namespace {

constexpr double unlimited = std::numeric_limits<double>::infinity();

std::optional<std::string> first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

// `quota` microseconds of processor time in each `period`.
double cpus_of(double quota, double period) noexcept { return quota > 0 && period > 0 ? quota / period : unlimited; }

// "100000 100000" or "max 100000".
double cpus_of_v2(const std::string& folder) {
  const auto line = first_line(folder + "/cpu.max");
  if (!line) return unlimited;
  std::istringstream words(*line);
  double quota = 0;
  double period = 0;
  return words >> quota >> period ? cpus_of(quota, period) : unlimited;
}

// A quota of −1: none.
double cpus_of_v1(const std::string& folder) {
  const auto quota = first_line(folder + "/cpu.cfs_quota_us");
  const auto period = first_line(folder + "/cpu.cfs_period_us");
  if (!quota || !period) return unlimited;
  double quota_us = 0;
  double period_us = 0;
  std::istringstream(*quota) >> quota_us;
  std::istringstream(*period) >> period_us;
  return cpus_of(quota_us, period_us);
}

bool lists(std::string_view names, std::string_view name) noexcept {
  while (!names.empty()) {
    const auto comma = names.find(',');
    if (names.substr(0, comma) == name) return true;
    names = comma == std::string_view::npos ? std::string_view{} : names.substr(comma + 1);
  }
  return false;
}

// Where one hierarchy is mounted, and which of its groups is seen there.
struct mount {
  bool is_v2 = false;
  std::string group;
  std::string folder;
};

// proc(5), mountinfo: number, parent, device, root, mount point, options, optional fields, "-", type, source, options.
std::vector<mount> cgroup_mounts(const std::string& root) {
  std::vector<mount> mounts;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const auto dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream before(line.substr(0, dash));
    std::istringstream after(line.substr(dash + 3));
    std::string skipped;
    std::string type;
    std::string source;
    std::string options;
    mount found;
    before >> skipped >> skipped >> skipped >> found.group >> found.folder;
    after >> type >> source >> options;
    found.is_v2 = type == "cgroup2";
    if (found.is_v2 || (type == "cgroup" && lists(options, "cpu"))) mounts.push_back(std::move(found));
  }
  return mounts;
}

// The process's group in the hierarchy of `where`. cgroups(7): number, controllers, path; v2 is "0::path".
std::optional<std::string> group_in(const mount& where, const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string_view controllers = std::string_view(line).substr(first + 1, second - first - 1);
    if (where.is_v2 ? controllers.empty() : lists(controllers, "cpu")) return line.substr(second + 1);
  }
  return std::nullopt;
}

// The lowest quota from the group up to the mount point. A container often sees a group's own files at the mount point
// under a path that does not exist there.
double cpus_in(const mount& where, std::string group, const std::string& root) {
  if (where.group != "/" && group.starts_with(where.group)) group.erase(0, where.group.size());
  double lowest = unlimited;
  for (;;) {
    const std::string folder = root + where.folder + (group == "/" ? "" : group);
    lowest = std::min(lowest, where.is_v2 ? cpus_of_v2(folder) : cpus_of_v1(folder));
    if (group.empty() || group == "/") return lowest;
    group.erase(group.rfind('/'));
  }
}

}  // namespace

std::int32_t num_allowed_cpus() noexcept {
  // The kernel's own mask may be larger than cpu_set_t.
  for (std::size_t num_cpus = 1024; num_cpus <= std::size_t{1} << 20; num_cpus *= 4) {
    cpu_set_t* const set = CPU_ALLOC(num_cpus);
    if (set == nullptr) break;
    const std::size_t num_bytes = CPU_ALLOC_SIZE(num_cpus);
    const bool known = ::sched_getaffinity(0, num_bytes, set) == 0;
    const int allowed = known ? CPU_COUNT_S(num_bytes, set) : 0;
    CPU_FREE(set);
    if (allowed > 0) return allowed;
  }
  return static_cast<std::int32_t>(std::max<long>(1, ::sysconf(_SC_NPROCESSORS_ONLN)));
}

double cgroup_cpus(const std::string& root) {
  double lowest = unlimited;
  for (const mount& where : cgroup_mounts(root)) {
    if (auto group = group_in(where, root)) lowest = std::min(lowest, cpus_in(where, std::move(*group), root));
  }
  return lowest;
}

std::int32_t num_usable_cpus() {
  const std::int32_t allowed = num_allowed_cpus();
  const double paid = cgroup_cpus();
  return paid < allowed ? std::max(1, static_cast<std::int32_t>(paid)) : allowed;
}

}  // namespace bifolio::inline v0_2::cpu
