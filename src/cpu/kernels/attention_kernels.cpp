// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels/attention_kernels.hpp"

namespace bifolio::cpu::BIFOLIO_ISA {

extern const attention_kernels attention_table;
const attention_kernels attention_table{};

}  // namespace bifolio::cpu::BIFOLIO_ISA
