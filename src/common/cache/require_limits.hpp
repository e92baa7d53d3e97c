// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Limits of the salt and the extra keys of a prompt, so that a look-up takes bounded time and memory.

#include <bifolio/content_key.hpp>
#include <cstddef>
#include <string_view>

#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2::detail {

/// Throws `error` (invalid_argument) for a salt past max_salt_bytes.
inline void require_salt(std::string_view salt) {
  if (salt.size() <= max_salt_bytes) return;
  refuse(errc::invalid_argument, "a prefix salt of ", salt.size(), " bytes is longer than the largest allowed, ",
         max_salt_bytes, "; use a digest of it");
}

/// Throws `error` (invalid_argument) for extra keys, owned or not, past max_extras_bytes.
template <class Extras>
void require_extras(const Extras& extras) {
  std::size_t num_bytes = 0;
  for (const auto& extra : extras) {
    num_bytes += 16 + extra.value.size();  // cannot wrap: the first sum past the limit ends it
    if (num_bytes <= max_extras_bytes) continue;
    refuse(errc::invalid_argument, extras.size(), " extra keys, of 16 bytes and a value each, take more than the ",
           max_extras_bytes, " bytes allowed for a prompt; use digests as values");
  }
}

}  // namespace bifolio::inline v0_2::detail
