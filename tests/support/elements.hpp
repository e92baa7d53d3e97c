// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Elements of any dtype in raw bytes, and the poison that marks what must be neither read nor written: a NaN with a
/// payload that no conversion and no arithmetic produces.

#include <algorithm>
#include <bifolio/dtype.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace bifolio::test {

[[nodiscard]] inline float load_element(const void* base, dtype type, std::int64_t index) noexcept {
  return visit_dtype(type, [&](auto traits) {
    typename decltype(traits)::storage value;
    std::memcpy(&value, static_cast<const std::byte*>(base) + index * static_cast<std::int64_t>(sizeof value),
                sizeof value);
    return to_float(value);
  });
}

inline void store_element(void* base, dtype type, std::int64_t index, float value) noexcept {
  visit_dtype(type, [&](auto traits) {
    const auto stored = from_float<typename decltype(traits)::storage>(value);
    std::memcpy(static_cast<std::byte*>(base) + index * static_cast<std::int64_t>(sizeof stored), &stored,
                sizeof stored);
  });
}

template <class Storage>
void store_elements_as(std::byte* to, std::int64_t stride, const float* from, std::int64_t count) noexcept {
  for (std::int64_t i = 0; i < count; ++i, to += stride * static_cast<std::int64_t>(sizeof(Storage))) {
    const Storage value = from_float<Storage>(from[i]);
    std::memcpy(to, &value, sizeof value);
  }
}

/// Stores `count` values from element `index` on, `stride` elements apart.
inline void store_elements(void* base, dtype type, std::int64_t index, std::int64_t stride, const float* from,
                           std::int64_t count) noexcept {
  auto* to = static_cast<std::byte*>(base) + index * static_cast<std::int64_t>(size_of(type));
  visit_dtype(type,
              [&](auto traits) { store_elements_as<typename decltype(traits)::storage>(to, stride, from, count); });
}

/// What `value` becomes when it is stored as `type`.
[[nodiscard]] inline float stored_as(dtype type, float value) noexcept {
  return visit_dtype(type,
                     [&](auto traits) { return to_float(from_float<typename decltype(traits)::storage>(value)); });
}

/// What tests know of an element type.
struct element_facts {
  float max_finite;
  float smallest_subnormal;
  float unit_roundoff;
  std::uint32_t poison_bits;  ///< a NaN that nothing else makes; of integers −128, which is no code, and any number
};

[[nodiscard]] constexpr element_facts facts_of(dtype type) noexcept {
  switch (type) {
    case dtype::f32:
      return {0x1.fffffep127f, 0x1p-149f, 0x1p-24f, 0x7fdbadadu};
    case dtype::f16:
      return {65504.0f, 0x1p-24f, 0x1p-11f, 0x7e5bu};
    case dtype::bf16:
      return {0x1.fep127f, 0x1p-133f, 0x1p-8f, 0x7fdbu};
    case dtype::e4m3:
      return {448.0f, 0x1p-9f, 0x1p-4f, 0xffu};
    case dtype::e5m2:
      return {57344.0f, 0x1p-16f, 0x1p-3f, 0xfeu};
    case dtype::i8:
      return {127.0f, 1.0f, 0.5f, 0x80u};
    case dtype::u8:
      return {255.0f, 1.0f, 0.5f, 0xabu};
  }
  return {};
}

[[nodiscard]] constexpr float max_finite(dtype type) noexcept { return facts_of(type).max_finite; }
[[nodiscard]] constexpr float smallest_subnormal(dtype type) noexcept { return facts_of(type).smallest_subnormal; }
[[nodiscard]] constexpr std::uint32_t poison_bits(dtype type) noexcept { return facts_of(type).poison_bits; }

inline void poison(std::span<std::byte> bytes, dtype type) noexcept {
  const std::uint32_t bits = poison_bits(type);
  const std::size_t size = bytes.size() / size_of(type) * size_of(type);
  if (size == 0) return;
  std::memcpy(bytes.data(), &bits, size_of(type));  // the low bytes: little-endian hosts
  for (std::size_t done = size_of(type); done < size; done *= 2) {
    std::memcpy(bytes.data() + done, bytes.data(), std::min(done, size - done));
  }
}

[[nodiscard]] inline bool is_poison(const void* base, dtype type, std::int64_t index) noexcept {
  const std::uint32_t expected = poison_bits(type);
  return std::memcmp(static_cast<const std::byte*>(base) + index * static_cast<std::int64_t>(size_of(type)), &expected,
                     size_of(type)) == 0;
}

}  // namespace bifolio::test
