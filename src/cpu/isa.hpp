// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Which instruction sets this build has kernels for and this machine can run. The public names are in bifolio/cpu.hpp.

#include <bifolio/cpu.hpp>

#include "cpu/kernels/kernel_table.hpp"

namespace bifolio::inline v0_2::cpu {

/// The kernels of `isa`. Throws `error` (unsupported, with the usable ones) when it is not compiled in or cannot run
/// here.
[[nodiscard]] const kernel_table& kernels_for(cpu_isa isa);

}  // namespace bifolio::inline v0_2::cpu
