// SPDX-License-Identifier: Apache-2.0
#pragma once

/// How many processors this process may use at once: those of its affinity mask, and no more than its control groups
/// pay for. A process with more threads than that is stopped for the rest of each period.

#include <cstdint>
#include <string>

namespace bifolio::inline v0_2::cpu {

/// The processors that the calling thread may run on, ≥ 1.
[[nodiscard]] std::int32_t num_allowed_cpus() noexcept;

/// The lowest quota of the process's control groups and those above them, in processors; infinity without one or where
/// it cannot be read. `root` stands before the paths of /proc and /sys (tests; in use it is empty). Reads cgroup v2
/// (cpu.max) and v1 (cpu.cfs_quota_us, cpu.cfs_period_us), wherever they are mounted.
[[nodiscard]] double cgroup_cpus(const std::string& root = {});

/// The lower of both in whole processors, ≥ 1.
[[nodiscard]] std::int32_t num_usable_cpus();

}  // namespace bifolio::inline v0_2::cpu
