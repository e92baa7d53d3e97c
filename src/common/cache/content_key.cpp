// SPDX-License-Identifier: Apache-2.0
#include <bifolio/content_key.hpp>
#include <bifolio/error.hpp>
#include <bit>
#include <cstring>
#include <exception>
#include <random>
#include <string>

#include "common/base/refuse.hpp"
#include "common/base/require.hpp"

namespace bifolio::inline v0_2 {
namespace {

// Tags of the records; a new form of a record gets a new tag.
constexpr std::uint64_t root_tag = 0x62662d726f6f7431;   // "bf-root1"
constexpr std::uint64_t block_tag = 0x62662d626c6f6b31;  // "bf-blok1"

// Takes whole words; a record says its own length, so the last word's bytes need no padding rule but zero.
class siphash_13_128 {
 public:
  explicit siphash_13_128(const hash_seed& seed) noexcept
      : v0_(seed.low ^ 0x736f6d6570736575),
        v1_(seed.high ^ 0x646f72616e646f6d ^ 0xee),
        v2_(seed.low ^ 0x6c7967656e657261),
        v3_(seed.high ^ 0x7465646279746573) {}

  void add(std::uint64_t word) noexcept {
    v3_ ^= word;
    round();
    v0_ ^= word;
    num_bytes_ += 8;
  }
  void add_bytes(const void* bytes, std::size_t size) noexcept {
    const auto* at = static_cast<const unsigned char*>(bytes);
    for (; size >= 8; at += 8, size -= 8) {
      std::uint64_t word;
      std::memcpy(&word, at, 8);
      add(word);
    }
    if (size == 0) return;
    std::uint64_t word = 0;
    std::memcpy(&word, at, size);
    add(word);
  }
  [[nodiscard]] content_key finish() noexcept {
    const std::uint64_t last = num_bytes_ << 56;
    v3_ ^= last;
    round();
    v0_ ^= last;
    v2_ ^= 0xee;
    round();
    round();
    round();
    const std::uint64_t low = v0_ ^ v1_ ^ v2_ ^ v3_;
    v1_ ^= 0xdd;
    round();
    round();
    round();
    return {low, v0_ ^ v1_ ^ v2_ ^ v3_};
  }

 private:
  void round() noexcept {
    v0_ += v1_;
    v1_ = std::rotl(v1_, 13) ^ v0_;
    v0_ = std::rotl(v0_, 32);
    v2_ += v3_;
    v3_ = std::rotl(v3_, 16) ^ v2_;
    v0_ += v3_;
    v3_ = std::rotl(v3_, 21) ^ v0_;
    v2_ += v1_;
    v1_ = std::rotl(v1_, 17) ^ v2_;
    v2_ = std::rotl(v2_, 32);
  }

  std::uint64_t v0_, v1_, v2_, v3_;
  std::uint64_t num_bytes_ = 0;
};

constexpr std::uint64_t low_bits(std::int32_t count) noexcept {
  if (count <= 0) return 0;
  return count >= 64 ? UINT64_MAX : (std::uint64_t{1} << count) - 1;
}

}  // namespace

hash_seed random_hash_seed() {
  try {
    std::random_device source;
    const auto word = [&] { return std::uint64_t{source()} << 32 | source(); };
    return {word(), word()};
  } catch (const std::exception& problem) {
    detail::refuse(errc::internal, "the operating system gave no random numbers: ", problem.what());
  }
}

content_hasher::content_hasher(const hash_seed& seed, std::int32_t key_bits) : seed_(seed) {
  detail::require_between("key_bits", key_bits, 1, 128);
  mask_ = {low_bits(key_bits), low_bits(key_bits - 64)};
}

content_key content_hasher::root(const prefix_scope& scope) const noexcept {
  siphash_13_128 hash(seed_);
  hash.add(root_tag);
  hash.add(scope.adapter_id);
  hash.add(scope.salt.size());
  hash.add_bytes(scope.salt.data(), scope.salt.size());
  const content_key key = hash.finish();
  return {key.low & mask_.low, key.high & mask_.high};
}

std::string pack_extras(std::span<const extra_key> extras, std::int64_t first_position) {
  std::string packed;
  const auto append_word = [&](std::uint64_t word) {
    packed.append(reinterpret_cast<const char*>(&word), sizeof word);
  };
  for (const extra_key& extra : extras) {
    append_word(extra.kind | static_cast<std::uint64_t>(extra.position - first_position) << 32);
    append_word(extra.value.size());
    packed.append(reinterpret_cast<const char*>(extra.value.data()), extra.value.size());
    packed.append((8 - extra.value.size() % 8) % 8, '\0');
  }
  return packed;
}

content_key content_hasher::next(const content_key& parent, std::span<const token_id> tokens,
                                 std::string_view packed_extras) const noexcept {
  siphash_13_128 hash(seed_);
  hash.add(block_tag);
  hash.add(parent.low);
  hash.add(parent.high);
  hash.add(std::uint64_t{tokens.size()} | std::uint64_t{packed_extras.size()} << 32);
  hash.add_bytes(tokens.data(), tokens.size_bytes());
  if (!packed_extras.empty()) [[unlikely]]
    hash.add_bytes(packed_extras.data(), packed_extras.size());
  const content_key key = hash.finish();
  return {key.low & mask_.low, key.high & mask_.high};
}

}  // namespace bifolio::inline v0_2
