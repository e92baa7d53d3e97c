// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mixing function of the state digests: order matters, equal states of two processes give equal numbers. Not for
/// keys that an adversary may choose.

#include <cstdint>

namespace bifolio::inline v0_2::detail {

class digest_builder {
 public:
  void add(std::uint64_t value) noexcept {
    // One round of splitmix64's finaliser (Steele, Lea & Flood 2014) over the running state.
    state_ = (state_ ^ value) + 0x9e3779b97f4a7c15ULL;
    state_ = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9ULL;
    state_ = (state_ ^ (state_ >> 27)) * 0x94d049bb133111ebULL;
    state_ ^= state_ >> 31;
  }
  [[nodiscard]] std::uint64_t value() const noexcept { return state_; }

 private:
  std::uint64_t state_ = 0;
};

}  // namespace bifolio::inline v0_2::detail
