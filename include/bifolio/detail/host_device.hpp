// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Functions that host code, CPU kernels and CUDA kernels share. They are always inlined: a CPU kernel is compiled once
/// per instruction set, and a copy that the linker keeps for everyone could hold instructions that a machine lacks.

#if defined(__CUDACC__)
#define BIFOLIO_HOST_DEVICE inline __host__ __device__ __attribute__((always_inline))
/// In front of a template that calls what its caller passes: nvcc does not ask whether host and device may both call
/// it.
#define BIFOLIO_ANY_CALLABLE _Pragma("nv_exec_check_disable")
#else
#define BIFOLIO_HOST_DEVICE inline __attribute__((always_inline))
#define BIFOLIO_ANY_CALLABLE
#endif
