// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The keys of the last `capacity` contents that were pushed: a ring, and a hash table of its places. A key that is
/// taken leaves a gap in the ring, which goes when its turn comes. 20 bytes per place.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace bifolio::inline v0_2::detail {

class ghost_queue {
 public:
  /// Throws std::bad_alloc. Requires 1 ≤ capacity < 2^31.
  explicit ghost_queue(std::int64_t capacity)
      : places_(static_cast<std::size_t>(capacity), place{0, unused}),
        chains_(std::bit_ceil(static_cast<std::size_t>(capacity)), end_of_chain) {}

  /// Requires fingerprints that are evenly distributed in their low bits.
  void push(std::uint64_t fingerprint) noexcept {
    if (places_[next_].next != unused) unlink(next_);
    std::uint32_t& chain = chain_of(fingerprint);
    places_[next_] = {fingerprint, chain};
    chain = next_;
    next_ = next_ + 1 == places_.size() ? 0 : next_ + 1;
  }
  /// Removes the entry with this fingerprint that was pushed last; false when there is none.
  [[nodiscard]] bool take(std::uint64_t fingerprint) noexcept {
    std::uint32_t at = chain_of(fingerprint);
    while (at != end_of_chain && places_[at].fingerprint != fingerprint) at = places_[at].next;
    if (at == end_of_chain) return false;
    unlink(at);
    return true;
  }
  [[nodiscard]] std::size_t capacity() const noexcept { return places_.size(); }
  /// Calls visit(fingerprint) for every entry, the oldest first.
  template <class Visit>
  void for_each(Visit visit) const {
    for (std::size_t i = 0; i < places_.size(); ++i) {
      const place& at = places_[(next_ + i) % places_.size()];
      if (at.next != unused) visit(at.fingerprint);
    }
  }

 private:
  static constexpr std::uint32_t end_of_chain = UINT32_MAX;
  static constexpr std::uint32_t unused = UINT32_MAX - 1;
  struct place {
    std::uint64_t fingerprint;
    std::uint32_t next;  ///< in its chain
  };

  [[nodiscard]] std::uint32_t& chain_of(std::uint64_t fingerprint) noexcept {
    return chains_[fingerprint & (chains_.size() - 1)];
  }
  void unlink(std::uint32_t at) noexcept {
    std::uint32_t* link = &chain_of(places_[at].fingerprint);
    while (*link != at) link = &places_[*link].next;
    *link = places_[at].next;
    places_[at].next = unused;
  }

  std::vector<place> places_;
  std::vector<std::uint32_t> chains_;  // first place of each
  std::uint32_t next_ = 0;             // the oldest place
};

}  // namespace bifolio::inline v0_2::detail
