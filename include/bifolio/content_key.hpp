// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Content keys of blocks: 128 bits that identify a block's tokens and for everything before them. Without the seed
/// nobody can predict a key or construct two contents with the same key. A cache hit is verified as well
/// (prefix_cache.hpp), so that a collision costs a miss and nothing else.
///
/// A key is SipHash-1-3 with 128 bits of output (Aumasson & Bernstein 2012; the reduced rounds that language runtimes
/// use for their tables) over a record that can be parsed in one way only: a tag of its kind, the parent's key, the
/// number of tokens and of bytes of extra keys, the tokens, then each extra key with its kind, offset and length.

#include <bifolio/export.hpp>
#include <bifolio/types.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace bifolio::inline v0_2 {

struct content_key {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  friend constexpr bool operator==(const content_key&, const content_key&) = default;
};

/// The secret from which the keys of one process are made.
struct hash_seed {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  friend constexpr bool operator==(const hash_seed&, const hash_seed&) = default;
};

/// 128 bits from the operating system. Throws `error` (internal) when it provides none.
[[nodiscard]] BIFOLIO_API hash_seed random_hash_seed();

/// Largest salt. It is stored once per scope in use, and hashed and compared whenever a prompt is looked up.
inline constexpr std::size_t max_salt_bytes = 4096;
/// Largest sum, over all extra keys of a prompt, of 16 + its value's bytes: they are hashed and compared with its
/// blocks.
inline constexpr std::size_t max_extras_bytes = std::size_t{1} << 20;

/// Contents are shared within a scope only; equal tokens in different scopes are different contents. The server sets
/// the scope; it must not copy it from a request unchecked.
struct prefix_scope {
  std::string_view salt{};       ///< e.g. a tenant; any bytes, at most max_salt_bytes
  std::uint64_t adapter_id = 0;  ///< e.g. of a LoRA; 0 = none
};

/// Something besides tokens that a block's K and V depend on, e.g. the digest of an image whose embeddings are at
/// `position`. max_extras_bytes limits the extra keys of a prompt.
struct extra_key {
  std::int64_t position = 0;  ///< of the token it belongs to, counted from the sequence's first
  std::uint32_t kind = 0;     ///< the caller's numbering
  std::span<const std::byte> value{};
};

/// One block's extra keys as the record that is hashed into keys and compared by hits: for each extra key its kind, its
/// offset from the block's first position, its length, and its value padded with zeros to a multiple of 8 bytes.
/// Throws std::bad_alloc.
[[nodiscard]] BIFOLIO_API std::string pack_extras(std::span<const extra_key> extras, std::int64_t first_position);

/// Thread-safety: const calls from any thread.
class BIFOLIO_API content_hasher {
 public:
  /// `key_bits` below 128 truncates the keys, so that tests meet collisions. Throws `error` (invalid_argument) unless
  /// 1 ≤ key_bits ≤ 128.
  explicit content_hasher(const hash_seed& seed, std::int32_t key_bits = 128);

  /// The key before the first block.
  [[nodiscard]] content_key root(const prefix_scope& scope) const noexcept;
  /// The key of a block of `tokens` after `parent`; `packed_extras` from `pack_extras`, empty when there are none.
  [[nodiscard]] content_key next(const content_key& parent, std::span<const token_id> tokens,
                                 std::string_view packed_extras = {}) const noexcept;

 private:
  hash_seed seed_;
  content_key mask_;
};

}  // namespace bifolio::inline v0_2
