// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The kernels of one instruction set: tables of function pointers. Every kernel source is compiled once per ISA into
/// the namespace of that ISA; `isa.cpp` chooses one accessor at run time. Nothing else of a kernel object is visible
/// outside.

#include <bifolio/cpu.hpp>

#include "cpu/kernels/attention/kernels.hpp"
#include "cpu/kernels/cache_ops/kernels.hpp"
#include "cpu/kernels/cache_ops/rotate.hpp"

namespace bifolio::inline v0_2::cpu {

struct kernel_table {
  cpu_isa isa;
  const cache_kernels& cache;
  const rotate_kernels& rotate;
  const attention_kernels& attention;
};

// One accessor per row, defined where that instruction set is built.
#define BIFOLIO_KERNELS_OF_ISA(name, ...)               \
  namespace name {                                      \
  [[nodiscard]] const kernel_table& kernels() noexcept; \
  }
BIFOLIO_CPU_ISAS(BIFOLIO_KERNELS_OF_ISA)
#undef BIFOLIO_KERNELS_OF_ISA

}  // namespace bifolio::inline v0_2::cpu
