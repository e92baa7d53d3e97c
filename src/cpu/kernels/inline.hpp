// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What kernels are made of is inlined, always: a kernel object shares no symbol with that of another ISA.
#define BIFOLIO_INLINE inline __attribute__((always_inline))
