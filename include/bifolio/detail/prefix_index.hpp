// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The contents of registered blocks and the hash index over them; private to prefix_cache.hpp.
///
/// The index maps content keys to blocks: 32 bits of the key and 32 of the block id, in buckets of one cache line with
/// seven slots. Each bucket counts the entries that found it full and went on to the next bucket, so that an entry is
/// erased without moving another (as in Bronson & Shi's F14, 2019). Whether a block with the right tag is a hit is
/// decided by its contents.
///
/// Metadata per block of 16 tokens: 32 bytes of contents, 64 of tokens, 13 of index.

#include <algorithm>
#include <array>
#include <bifolio/buffer.hpp>
#include <bifolio/content_key.hpp>
#include <bifolio/detail/prefetch.hpp>
#include <bifolio/export.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/types.hpp>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace bifolio::inline v0_2::detail {

class BIFOLIO_API prefix_index {
 public:
  /// Contents of a block that was published; serial 0: never, or unregistered since.
  struct contents {
    content_key key;
    std::uint64_t serial;
    std::uint64_t parent;  ///< serial of the predecessor, or of the scope
  };

  /// Throws `error` (out_of_memory).
  prefix_index(std::int64_t num_blocks, std::int32_t block_size, memory_resource& memory);

  /// Whether the block is in the index.
  [[nodiscard]] bool holds(block_id block) const noexcept {
    const auto i = static_cast<std::uint32_t>(block);
    return (held_[i / 64] >> (i % 64) & 1) != 0;
  }
  [[nodiscard]] contents& of(block_id block) const noexcept { return contents_[static_cast<std::uint32_t>(block)]; }
  /// [block_size]
  [[nodiscard]] token_id* tokens(block_id block) const noexcept {
    return tokens_ + static_cast<std::size_t>(static_cast<std::uint32_t>(block)) * block_size_;
  }

  /// The first block with the tag of `key`; `invalid_block` when there is none.
  [[nodiscard]] block_id candidate(const content_key& key) const noexcept {
    return find_if(key, [](block_id) { return true; });
  }
  /// The first block with the tag of `key` for which is_hit(block); `invalid_block` when there is none.
  template <class IsHit>
  [[nodiscard]] block_id find_if(const content_key& key, IsHit is_hit) const noexcept {
    const std::uint32_t tag = tag_of(key);
    const std::uint64_t home = home_of(tag);
    std::uint64_t at = home;
    do {
      const bucket& slots = buckets_[at];
      for (std::uint32_t found = slots.with_tag(tag); found != 0; found &= found - 1) {
        const block_id block{slots.blocks[static_cast<std::uint32_t>(std::countr_zero(found))]};
        if (is_hit(block)) return block;
      }
      if (slots.num_passed() == 0) return invalid_block;
      at = next_bucket(at);
    } while (at != home);  // a small index may have entries that went on in all of its buckets
    return invalid_block;
  }
  /// False when one look at one cache line says that no block has the tag of `key`.
  [[nodiscard]] bool may_hold(const content_key& key) const noexcept {
    const std::uint32_t tag = tag_of(key);
    const bucket& home = buckets_[home_of(tag)];
    return home.with_tag(tag) != 0 || home.num_passed() != 0;
  }

  /// Requires a block that is not in the index, and whose contents have this key.
  void insert(block_id block, const content_key& key) noexcept {
    const std::uint32_t tag = tag_of(key);
    std::uint64_t at = home_of(tag);
    std::uint32_t free = buckets_[at].with_tag(0);
    while (free == 0) {
      ++buckets_[at].num_passed();
      at = next_bucket(at);
      free = buckets_[at].with_tag(0);
    }
    const auto slot = static_cast<std::uint32_t>(std::countr_zero(free));
    buckets_[at].tags[slot] = tag;
    buckets_[at].blocks[slot] = to_index(block);
    held_[static_cast<std::uint32_t>(block) / 64] |= std::uint64_t{1} << (static_cast<std::uint32_t>(block) % 64);
  }
  /// Requires a block of the index.
  void erase(block_id block) noexcept;

  void prefetch_bucket(const content_key& key) const noexcept { __builtin_prefetch(&buckets_[home_of(tag_of(key))]); }
  void prefetch_bucket_to_write(const content_key& key) const noexcept {
    prefetch_to_write(&buckets_[home_of(tag_of(key))]);
  }

  [[nodiscard]] std::size_t num_bytes() const noexcept { return storage_.num_bytes(); }
  /// The first broken invariant as a sentence, for an index that is to hold `num_held` blocks.
  [[nodiscard]] std::string check(std::int64_t num_held) const;

 private:
  struct alignas(64) bucket {
    static constexpr std::uint32_t num_slots = 7;
    std::array<std::uint32_t, 8> tags;   ///< of the slots, 0 for a free one; the eighth is `num_passed`
    std::array<std::int32_t, 8> blocks;  ///< of the slots; the eighth is unused

    /// Entries of this or earlier buckets that are in a later bucket.
    [[nodiscard]] std::uint32_t& num_passed() noexcept { return tags[num_slots]; }
    [[nodiscard]] std::uint32_t num_passed() const noexcept { return tags[num_slots]; }
    /// Bit i: slot i has this tag.
    [[nodiscard]] std::uint32_t with_tag(std::uint32_t tag) const noexcept { return equal_to(tags, tag); }
    [[nodiscard]] std::uint32_t with_block(block_id block) const noexcept { return equal_to(blocks, to_index(block)); }
    /// All words at once and without branches: which slot matches cannot be predicted.
    template <class T>
    [[nodiscard]] static std::uint32_t equal_to(const std::array<T, 8>& words, T value) noexcept {
      using four = std::uint32_t __attribute__((vector_size(16)));
      std::array<four, 2> part;
      std::memcpy(part.data(), words.data(), sizeof part);
      const auto wanted = static_cast<std::uint32_t>(value);
      const four low = reinterpret_cast<four>(part[0] == wanted) & four{1, 2, 4, 8};
      const four high = reinterpret_cast<four>(part[1] == wanted) & four{16, 32, 64, 0};
      std::array<std::uint64_t, 2> found;
      const four both = low | high;
      std::memcpy(found.data(), &both, sizeof found);
      const std::uint64_t pair = found[0] | found[1];
      return static_cast<std::uint32_t>(pair | pair >> 32);
    }
  };

  /// Never 0, which marks a free slot.
  [[nodiscard]] static std::uint32_t tag_of(const content_key& key) noexcept {
    return std::max(static_cast<std::uint32_t>((key.low ^ key.high) * 0x9e3779b97f4a7c15ULL >> 32), 1U);
  }
  [[nodiscard]] std::uint64_t home_of(std::uint32_t tag) const noexcept {
    return static_cast<std::uint64_t>(tag) * num_buckets_ >> 32;
  }
  [[nodiscard]] std::uint64_t next_bucket(std::uint64_t at) const noexcept {
    return at + 1 == num_buckets_ ? 0 : at + 1;
  }

  std::size_t block_size_;
  std::uint64_t num_buckets_;
  buffer storage_;
  bucket* buckets_ = nullptr;      // [num_buckets_]
  token_id* tokens_ = nullptr;     // [num_blocks, block_size]
  contents* contents_ = nullptr;   // [num_blocks]
  std::uint64_t* held_ = nullptr;  // [num_blocks] bits
};

}  // namespace bifolio::inline v0_2::detail
