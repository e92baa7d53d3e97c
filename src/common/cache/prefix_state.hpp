// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Parts of a prefix cache's state that no inline function needs.

#include <bifolio/prefix_cache.hpp>
#include <cstdint>
#include <vector>

#include "common/cache/interned_bytes.hpp"

namespace bifolio::inline v0_2 {

/// A retention hint that ends.
struct prefix_cache::expiry {
  std::int64_t at;
  std::uint64_t serial;  ///< of the contents that it was given for
  block_id block;
};

struct prefix_cache::interned {
  detail::interned_bytes scopes;
  std::vector<content_key> roots;  // [index of a scope]
  detail::interned_bytes extras;
};

/// Whether the block still holds the contents that the hint was given for.
inline bool prefix_cache::is_live(const expiry& timer) const noexcept {
  return holds(timer.block) && index_.of(timer.block).serial == timer.serial;
}

}  // namespace bifolio::inline v0_2
