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
  const auto* bytes = static_cast<const std::byte*>(base) + index * static_cast<std::int64_t>(size_of(type));
  if (type == dtype::f32) {
    float value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  return type == dtype::f16 ? to_float(float16{bits}) : to_float(bfloat16{bits});
}

inline void store_element(void* base, dtype type, std::int64_t index, float value) noexcept {
  auto* bytes = static_cast<std::byte*>(base) + index * static_cast<std::int64_t>(size_of(type));
  if (type == dtype::f32) {
    std::memcpy(bytes, &value, sizeof value);
    return;
  }
  const std::uint16_t bits = type == dtype::f16 ? from_float<float16>(value).bits : from_float<bfloat16>(value).bits;
  std::memcpy(bytes, &bits, sizeof bits);
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
  switch (type) {
    case dtype::f32:
      return store_elements_as<float>(to, stride, from, count);
    case dtype::f16:
      return store_elements_as<float16>(to, stride, from, count);
    case dtype::bf16:
      return store_elements_as<bfloat16>(to, stride, from, count);
  }
}

/// What `value` becomes when it is stored as `type`.
[[nodiscard]] inline float stored_as(dtype type, float value) noexcept {
  if (type == dtype::f16) return to_float(from_float<float16>(value));
  if (type == dtype::bf16) return to_float(from_float<bfloat16>(value));
  return value;
}

[[nodiscard]] constexpr float max_finite(dtype type) noexcept {
  return type == dtype::f16 ? 65504.0f : type == dtype::bf16 ? 0x1.fep127f : 0x1.fffffep127f;
}

[[nodiscard]] constexpr float smallest_subnormal(dtype type) noexcept {
  return type == dtype::f16 ? 0x1p-24f : type == dtype::bf16 ? 0x1p-133f : 0x1p-149f;
}

[[nodiscard]] constexpr std::uint32_t poison_bits(dtype type) noexcept {
  return type == dtype::f16 ? 0x7e5bu : type == dtype::bf16 ? 0x7fdbu : 0x7fdbadadu;
}

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
