// SPDX-License-Identifier: Apache-2.0
/// Content keys against SipHash as the paper describes it, byte by byte, over records put together by hand; and records
/// that a careless encoding would confuse.

#include <doctest/doctest.h>

#include <array>
#include <bifolio/content_key.hpp>
#include <bifolio/error.hpp>
#include <bit>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"
#include "support/token_ids.hpp"

namespace bifolio::test {
namespace {

using bytes = std::vector<unsigned char>;

std::uint64_t little_endian(const unsigned char* at, std::size_t count) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < count; ++i) value |= std::uint64_t{at[i]} << (8 * i);
  return value;
}

/// SipHash-c-d (Aumasson & Bernstein 2012, section 2), 64 or 128 bits of output.
struct siphash {
  std::uint64_t v0, v1, v2, v3;

  void rounds(int count) {
    for (int i = 0; i < count; ++i) {
      v0 += v1, v2 += v3;
      v1 = std::rotl(v1, 13), v3 = std::rotl(v3, 16);
      v1 ^= v0, v3 ^= v2;
      v0 = std::rotl(v0, 32);
      v2 += v1, v0 += v3;
      v1 = std::rotl(v1, 17), v3 = std::rotl(v3, 21);
      v1 ^= v2, v3 ^= v0;
      v2 = std::rotl(v2, 32);
    }
  }
  static content_key of(const bytes& message, const hash_seed& key, int c, int d, bool wide) {
    siphash s{key.low ^ 0x736f6d6570736575, key.high ^ 0x646f72616e646f6d, key.low ^ 0x6c7967656e657261,
              key.high ^ 0x7465646279746573};
    if (wide) s.v1 ^= 0xee;
    std::size_t at = 0;
    const auto compress = [&](std::uint64_t word) {
      s.v3 ^= word;
      s.rounds(c);
      s.v0 ^= word;
    };
    for (; at + 8 <= message.size(); at += 8) compress(little_endian(&message[at], 8));
    compress(little_endian(message.data() + at, message.size() - at) | std::uint64_t{message.size()} << 56);
    s.v2 ^= wide ? 0xee : 0xff;
    s.rounds(d);
    content_key result{s.v0 ^ s.v1 ^ s.v2 ^ s.v3, 0};
    if (wide) {
      s.v1 ^= 0xdd;
      s.rounds(d);
      result.high = s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
    }
    return result;
  }
};

constexpr hash_seed counting_seed{0x0706050403020100, 0x0f0e0d0c0b0a0908};

bytes counting(std::size_t size) {
  bytes message(size);
  for (std::size_t i = 0; i < size; ++i) message[i] = static_cast<unsigned char>(i);
  return message;
}

void add_word(bytes& to, std::uint64_t word) {
  for (int i = 0; i < 8; ++i) to.push_back(static_cast<unsigned char>(word >> (8 * i)));
}
void pad(bytes& to) {
  while (to.size() % 8 != 0) to.push_back(0);
}
// The tag's first letter is its highest byte.
void add_tag(bytes& to, const char* tag) {
  for (int i = 8; i-- > 0;) to.push_back(static_cast<unsigned char>(tag[i]));
}

bytes root_record(const prefix_scope& scope) {
  bytes record;
  add_tag(record, "bf-root1");
  add_word(record, scope.adapter_id);
  add_word(record, scope.salt.size());
  record.insert(record.end(), scope.salt.begin(), scope.salt.end());
  pad(record);
  return record;
}

bytes block_record(const content_key& parent, const std::vector<token_id>& tokens, const std::string& extras) {
  bytes record;
  add_tag(record, "bf-blok1");
  add_word(record, parent.low);
  add_word(record, parent.high);
  add_word(record, tokens.size() + (extras.size() << 32));
  for (const token_id token : tokens) {
    for (int i = 0; i < 4; ++i) {
      record.push_back(static_cast<unsigned char>(static_cast<std::uint32_t>(to_index(token)) >> (8 * i)));
    }
  }
  pad(record);
  record.insert(record.end(), extras.begin(), extras.end());
  return record;
}

std::span<const std::byte> value_of(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

TEST_CASE("the hash of this test gives the published vectors") {
  CHECK(siphash::of(counting(15), counting_seed, 2, 4, false).low == 0xa129ca6149be45e5);
  const content_key empty = siphash::of({}, counting_seed, 2, 4, true);
  CHECK(empty.low == 0xe6a825ba047f81a3);
  CHECK(empty.high == 0x930255c71472f66d);
  CHECK(siphash::of({}, counting_seed, 1, 3, false).low == 0xabac0158050fc4dc);
}

TEST_CASE("keys are SipHash-1-3-128 over the documented records") {
  MESSAGE(seed_note());
  random_source random(test_seed());
  for (int round = 0; round < 300; ++round) {
    const hash_seed seed{random.next(), random.next()};
    const content_hasher hasher(seed);
    std::string salt;
    for (std::int64_t i = random.between(0, 40); i > 0; --i) salt += static_cast<char>(random.between(0, 255));
    const prefix_scope scope{salt, random.one_in(2) ? 0 : random.next()};
    CHECK(hasher.root(scope) == siphash::of(root_record(scope), seed, 1, 3, true));

    const content_key parent{random.next(), random.next()};
    std::vector<token_id> tokens;
    for (std::int64_t i = random.between(0, 40); i > 0; --i) {
      tokens.push_back(token_id{static_cast<std::int32_t>(random.next())});
    }
    std::vector<std::string> values;
    std::vector<extra_key> extras;
    for (std::int64_t i = random.between(0, 3); i > 0; --i) {
      values.emplace_back(static_cast<std::size_t>(random.between(0, 40)), static_cast<char>(random.between(0, 255)));
    }
    bytes expected;
    for (const std::string& value : values) {
      const auto kind = static_cast<std::uint32_t>(random.next());
      const std::int64_t offset = random.between(0, 1 << 20);
      extras.push_back({1000 + offset, kind, value_of(value)});
      add_word(expected, kind | static_cast<std::uint64_t>(offset) << 32);
      add_word(expected, value.size());
      expected.insert(expected.end(), value.begin(), value.end());
      pad(expected);
    }
    const std::string packed = pack_extras(extras, 1000);
    CHECK(packed == std::string(expected.begin(), expected.end()));
    CHECK(hasher.next(parent, tokens, packed) == siphash::of(block_record(parent, tokens, packed), seed, 1, 3, true));
  }
}

TEST_CASE("records that differ in anything get different keys") {
  const content_hasher hasher(counting_seed);
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::string> seen;
  const auto is_new = [&](const content_key& key, const std::string& name) {
    const auto result = seen.try_emplace({key.low, key.high}, name);
    CHECK_MESSAGE(result.second, name << " has the key of " << result.first->second);
  };
  // Scopes: where the salt ends, zeros, and an adapter written as salt.
  const std::vector<std::string> salts = {"",
                                          std::string(1, '\0'),
                                          std::string(7, '\0'),
                                          std::string(8, '\0'),
                                          std::string(9, '\0'),
                                          "a",
                                          std::string("a\0", 2),
                                          "tenant",
                                          "tenant ",
                                          std::string("\1\0\0\0\0\0\0\0", 8),
                                          "12345678",
                                          "123456781"};
  for (const std::string& salt : salts) {
    for (const std::uint64_t adapter : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{8}, UINT64_MAX}) {
      is_new(hasher.root({salt, adapter}), "scope '" + salt + "', " + std::to_string(adapter));
    }
  }
  // Blocks: where the tokens end, zeros, and extra keys written as tokens.
  const content_key root = hasher.root({});
  for (const auto& tokens : {to_ids({}), to_ids({0}), to_ids({0, 0}), to_ids({0, 0, 0}), to_ids({1}), to_ids({1, 0}),
                             to_ids({0, 1}), to_ids({-1}), to_ids({-1, -1})}) {
    is_new(hasher.next(root, tokens), "tokens of length " + std::to_string(tokens.size()));
  }
  is_new(hasher.next({root.high, root.low}, to_ids({1})), "a parent with its halves exchanged");
  is_new(hasher.next(hasher.next(root, to_ids({1})), to_ids({1})), "the same block twice in a row");

  const std::string a = "a", a0("a\0", 2), none, digest(32, 'd');
  const auto with = [&](const std::vector<extra_key>& extras) {
    return hasher.next(root, to_ids({1, 2, 3, 4}), pack_extras(extras, 0));
  };
  is_new(with({}), "no extra key");
  is_new(with({{0, 0, value_of(none)}}), "an empty extra key");
  is_new(with({{0, 0, value_of(none)}, {0, 0, value_of(none)}}), "two empty ones");
  is_new(with({{1, 0, value_of(none)}}), "one at another position");
  is_new(with({{0, 1, value_of(none)}}), "one of another kind");
  is_new(with({{0, 1, value_of(a)}}), "a");
  is_new(with({{0, 1, value_of(a0)}}), "a with a zero");
  is_new(with({{0, 1, value_of(a)}, {1, 1, value_of(a)}}), "a twice");
  is_new(with({{1, 1, value_of(a)}, {1, 1, value_of(a0)}}), "a, a with a zero");
  is_new(with({{1, 1, value_of(a0)}, {1, 1, value_of(a)}}), "the other way round");
  is_new(with({{0, 1, value_of(digest)}}), "a digest");
  // One extra key whose value looks like the end of another and a third one after it.
  const std::string forged = pack_extras(std::vector<extra_key>{{0, 1, value_of(a)}, {2, 7, value_of(digest)}}, 0);
  const std::string inner = forged.substr(16);
  is_new(with({{0, 1, value_of(a)}, {2, 7, value_of(digest)}}), "two extra keys");
  is_new(with({{0, 1, value_of(inner)}}), "one that contains the second");
  const std::string packed = pack_extras(std::vector<extra_key>{{0, 1, value_of(a)}}, 0);
  std::vector<token_id> imitation(packed.size() / sizeof(token_id));
  std::memcpy(imitation.data(), packed.data(), packed.size());
  is_new(hasher.next(root, {}, packed), "an extra key without tokens");
  is_new(hasher.next(root, imitation), "tokens that look like it");
}

TEST_CASE("one seed gives one chain, another seed another one") {
  const std::vector<token_id> tokens{token_id{5}, token_id{6}};
  const content_hasher one({1, 2}), same({1, 2}), other({1, 3}), third({2, 2});
  CHECK(one.root({}) == same.root({}));
  CHECK(one.next(one.root({}), tokens) == same.next(same.root({}), tokens));
  CHECK(one.root({}) != other.root({}));
  CHECK(one.root({}) != third.root({}));
  CHECK(one.next({}, tokens) != other.next({}, tokens));
  CHECK(random_hash_seed() != random_hash_seed());
}

TEST_CASE("fewer key bits are the low bits of the whole key") {
  const std::vector<token_id> tokens{token_id{5}, token_id{6}};
  const content_hasher whole(counting_seed);
  const content_key key = whole.next({3, 4}, tokens, {});
  for (const std::int32_t bits : {1, 7, 8, 63, 64, 65, 100, 127, 128}) {
    CAPTURE(bits);
    const content_hasher cut(counting_seed, bits);
    const content_key low = cut.next({3, 4}, tokens, {});
    for (int i = 0; i < 128; ++i) {
      const std::uint64_t expected = i < bits ? (i < 64 ? key.low >> i : key.high >> (i - 64)) & 1 : 0;
      CHECK(((i < 64 ? low.low >> i : low.high >> (i - 64)) & 1) == expected);
    }
  }
  for (const std::int32_t bits : {0, -1, 129, INT32_MIN, INT32_MAX}) {
    try {
      const content_hasher cut(counting_seed, bits);
      FAIL("key_bits ", bits, " was accepted");
    } catch (const error& refused) {
      CHECK(refused.code() == errc::invalid_argument);
    }
  }
}

}  // namespace
}  // namespace bifolio::test
