// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Host memory that fails on request: the N-th allocation through operator new, alone or with all that follow. The
/// executable needs failing_memory.cpp, which replaces operator new.

#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/error.hpp>
#include <bifolio/memory_resource.hpp>
#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>

namespace bifolio::test {

extern std::int64_t calls_until_failure;  ///< 0: none fails
extern bool fails_for_good;
extern std::int64_t num_failures;

/// A resource over operator new, so that one counter counts every allocation.
class counted_resource final : public memory_resource {
 public:
  void* allocate(std::size_t num_bytes, std::size_t alignment) override {
    try {
      return ::operator new (num_bytes, std::align_val_t{alignment});
    } catch (const std::bad_alloc&) {
      throw error(errc::out_of_memory);
    }
  }
  void deallocate(void* pointer, std::size_t, std::size_t alignment) noexcept override {
    ::operator delete (pointer, std::align_val_t{alignment});
  }
  [[nodiscard]] device where() const noexcept override { return {}; }
};

inline counted_resource memory;

/// For N = 1, 2, …: a fresh world, in which the call's N-th allocation fails; until the call needs fewer than N.
/// Returns how many allocations the call makes at most.
template <class MakeWorld, class Call>
int fail_each_allocation(MakeWorld make_world, Call call) {
  int most = 0;
  for (const bool for_good : {false, true}) {
    for (int nth = 1;; ++nth) {
      REQUIRE(nth < 200);
      auto world = make_world();
      const std::uint64_t before = world->digest();
      num_failures = 0;
      fails_for_good = for_good;
      calls_until_failure = nth;
      bool threw = true;
      bool right_code = true;
      try {
        call(*world);
        threw = false;
      } catch (const error& refused) {
        right_code = refused.code() == errc::out_of_memory;
      } catch (const std::bad_alloc&) {
        right_code = false;
      }
      calls_until_failure = 0;
      CAPTURE(nth);
      CAPTURE(for_good);
      CHECK(threw == (num_failures > 0));
      CHECK(right_code);
      if (!threw) {
        most = std::max(most, nth - 1);
        break;
      }
      CHECK(world->digest() == before);
      CHECK(world->check() == "");
      call(*world);  // the world is as it was, so now it works
      CHECK(world->check() == "");
    }
  }
  return most;
}

// Calls below use no doctest macros: those allocate.
inline void require(bool holds) {
  if (!holds) throw std::logic_error("the call under test did something else");
}

}  // namespace bifolio::test
