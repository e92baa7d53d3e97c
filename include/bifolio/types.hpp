// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Integer ids that the compiler keeps apart. None converts to another or to an integer without a cast.

#include <cstdint>
#include <type_traits>

namespace bifolio::inline v0_2 {

/// A physical block of the pool, 0 … num_blocks − 1. 32 bits, because kernels read rows of them.
enum class block_id : std::int32_t {};

/// A sequence known to one `kv_cache_manager`: slot index in the low 32 bits, generation in the high 32,
/// so that a handle kept after `free` is recognised as stale. 0 is never a valid sequence.
enum class seq_id : std::uint64_t {};

/// A vocabulary entry. bifolio never interprets it; only the prefix cache compares it.
enum class token_id : std::int32_t {};

/// Where one token's K and V live in a layer: block · block_size + offset. Negative means "do not store".
enum class slot_id : std::int64_t {};

/// A request known to one `scheduler`, in the order of submission from 1. 0 is never a valid request.
enum class request_id : std::uint64_t {};

inline constexpr block_id invalid_block{-1};
inline constexpr seq_id invalid_seq{0};
inline constexpr request_id invalid_request{0};
inline constexpr slot_id no_slot{-1};

/// The underlying integer of an id.
template <class Id>
requires std::is_enum_v<Id>
[[nodiscard]] constexpr std::underlying_type_t<Id> to_index(Id id) noexcept {
  return static_cast<std::underlying_type_t<Id>>(id);
}

}  // namespace bifolio::inline v0_2
