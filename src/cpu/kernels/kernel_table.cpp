// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels/kernel_table.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {

extern const cache_kernels cache_table;          // cache_kernels.cpp
extern const rotate_kernels rotate_table;        // cache_ops/rotate.cpp
extern const attention_kernels attention_table;  // attention_kernels.cpp

const kernel_table& kernels() noexcept {
  static constexpr kernel_table table{cpu_isa::BIFOLIO_ISA, cache_table, rotate_table, attention_table};
  return table;
}

}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA
