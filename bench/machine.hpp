// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What a reader must know of the machine to judge a number.

#include "report.hpp"

namespace bifolio::bench {

/// Adds: cpu, logical cpus, load at the start, best ISA, compiler, library version, date.
void describe_machine(report& out);

}  // namespace bifolio::bench
