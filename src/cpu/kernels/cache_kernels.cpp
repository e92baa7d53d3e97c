// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels/cache_kernels.hpp"

namespace bifolio::cpu::BIFOLIO_ISA {

extern const cache_kernels cache_table;
const cache_kernels cache_table{};

}  // namespace bifolio::cpu::BIFOLIO_ISA
