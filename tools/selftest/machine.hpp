// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "targets.hpp"

namespace selftest {

/// What a reader must know of the machine: CPU, instruction sets, GPUs and their driver, compiler, library, date.
[[nodiscard]] std::vector<std::pair<std::string, std::string>> machine_of(const std::vector<target>& targets);

}  // namespace selftest
