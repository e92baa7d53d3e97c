// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The instruction sets that CPU kernels are compiled for: the only list of them. The enum and its names
/// (bifolio/cpu.hpp), the choice at run time (src/cpu/isa.cpp) and the build (cmake/BifolioIsa.cmake reads this file)
/// follow it. What a new one takes besides its row: its line of compiler flags in cmake/BifolioIsa.cmake, and its part
/// of src/cpu/kernels/simd/ where its vectors differ.
///
/// A row: the name; the processor, as CMake calls it (for a processor without rows the first one is built); the row
/// that it extends, whose compiler flags it has and without which it does not run; and the test of src/cpu/isa.cpp for
/// what this machine needs in addition. In rising order of preference.

// clang-format off
#define BIFOLIO_CPU_ISAS(ISA)                           \
  ISA(baseline,    x86_64,  none,        always)          \
  ISA(avx2,        x86_64,  none,        has_avx2)        \
  ISA(avx2_vnni,   x86_64,  avx2,        has_avx_vnni)    \
  ISA(avx512,      x86_64,  avx2,        has_avx512)      \
  ISA(avx512_bf16, x86_64,  avx512,      has_avx512_bf16) \
  ISA(amx,         x86_64,  avx512_bf16, has_amx)         \
  ISA(amx_fp16,    x86_64,  amx,         has_amx_fp16)    \
  ISA(neon,        aarch64, none,        has_asimd)       \
  ISA(neon_bf16,   aarch64, neon,        has_bf16)        \
  ISA(sve256,      aarch64, neon_bf16,   has_sve256)
// clang-format on
