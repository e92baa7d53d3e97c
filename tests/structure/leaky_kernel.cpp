// SPDX-License-Identifier: Apache-2.0
// Everything a kernel object must not do: a weak inline function, a symbol of its own, no prefetch.
inline __attribute__((noinline)) int weak_helper(int x) { return x + 1; }

int strong_helper(int x) { return weak_helper(x); }
