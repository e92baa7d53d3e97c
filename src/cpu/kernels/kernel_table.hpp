// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What one instruction set offers: tables of function pointers. Every kernel source is compiled once per ISA into the
/// namespace of that ISA; `isa.cpp` picks one accessor at run time. Nothing else of a kernel object is visible outside.

#include <bifolio/backend.hpp>

#include "cpu/kernels/attention/kernels.hpp"
#include "cpu/kernels/cache_ops/kernels.hpp"

namespace bifolio::cpu {

struct kernel_table {
  cpu_isa isa;
  const cache_kernels& cache;
  const attention_kernels& attention;
};

namespace baseline {
[[nodiscard]] const kernel_table& kernels() noexcept;
}
namespace avx2 {
[[nodiscard]] const kernel_table& kernels() noexcept;
}
namespace avx512 {
[[nodiscard]] const kernel_table& kernels() noexcept;
}
namespace avx512_bf16 {
[[nodiscard]] const kernel_table& kernels() noexcept;
}
namespace amx {
[[nodiscard]] const kernel_table& kernels() noexcept;
}
namespace amx_fp16 {
[[nodiscard]] const kernel_table& kernels() noexcept;
}
namespace neon {
[[nodiscard]] const kernel_table& kernels() noexcept;
}

}  // namespace bifolio::cpu
