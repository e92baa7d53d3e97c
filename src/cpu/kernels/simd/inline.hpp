// SPDX-License-Identifier: Apache-2.0
#pragma once

/// For what kernels are made of: small functions in loops, which must not become calls.
#define BIFOLIO_INLINE inline __attribute__((always_inline))
