// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The switch of all mutants of one build. `tools/mutants` rewrites sources so that each chosen place asks here, by its
/// number, whether it is the mutant of this process; one is at most:
///
///   BIFOLIO_MUTANT=17         mutant 17 is on
///   BIFOLIO_MUTANTS_REACHED=F none is on; each that is asked for writes a byte at its number of the file F
///
/// A place costs a load and a branch. Everything is inlined: a function that is not would be shared between the objects
/// of different instruction sets.

extern "C" {
extern unsigned char bifolio_mutant_states[];  // 0: off, 1: on, 2: to be recorded
bool bifolio_record_mutant(int number) noexcept;
}

namespace bifolio_mutants {

[[gnu::always_inline]] constexpr inline bool is_on(int number) noexcept {
  if (__builtin_is_constant_evaluated()) return false;
  const unsigned char state = bifolio_mutant_states[number];
  if (state == 0) [[likely]]
    return false;
  return state == 1 || bifolio_record_mutant(number);
}

// An operator and the one that stands in for it.
#define BIFOLIO_MUTANT_OPERATOR(name, original, other)                                                         \
  template <int Number, class A, class B>                                                                      \
  [[gnu::always_inline]] constexpr inline auto name(const A& a, const B& b) noexcept(noexcept(a original b)) { \
    return is_on(Number) ? (a other b) : (a original b);                                                       \
  }
BIFOLIO_MUTANT_OPERATOR(less, <, <=)
BIFOLIO_MUTANT_OPERATOR(less_equal, <=, <)
BIFOLIO_MUTANT_OPERATOR(greater, >, >=)
BIFOLIO_MUTANT_OPERATOR(greater_equal, >=, >)
BIFOLIO_MUTANT_OPERATOR(equal, ==, !=)
BIFOLIO_MUTANT_OPERATOR(unequal, !=, ==)
BIFOLIO_MUTANT_OPERATOR(plus, +, -)
BIFOLIO_MUTANT_OPERATOR(minus, -, +)
BIFOLIO_MUTANT_OPERATOR(times, *, +)
BIFOLIO_MUTANT_OPERATOR(divide, /, *)
#undef BIFOLIO_MUTANT_OPERATOR

template <int Number, class T>
[[gnu::always_inline]] constexpr inline T one_more(T value) noexcept {
  return is_on(Number) ? static_cast<T>(value + 1) : value;
}

}  // namespace bifolio_mutants
