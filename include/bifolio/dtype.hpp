// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Element types of caches, queries and outputs, and the two 16-bit storage types. Storage types hold bits and convert;
/// they do no arithmetic. Narrowing rounds to nearest even and saturates: finite in gives finite out, ±inf stays ±inf,
/// NaN stays NaN (quiet, sign kept, payload 0), on every backend alike. Widening is exact; a float16 NaN becomes quiet
/// and keeps its payload, as F16C and Arm's FCVT do it. Bytes that keep their type are copied as they are.

#include <bifolio/export.hpp>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace bifolio {

enum class dtype : std::uint8_t { f32, f16, bf16 };

[[nodiscard]] constexpr std::size_t size_of(dtype type) noexcept { return type == dtype::f32 ? 4 : 2; }

/// "f32", "f16" or "bf16".
[[nodiscard]] BIFOLIO_API std::string_view to_string(dtype type) noexcept;

/// Inverse of `to_string`; also takes float32, float16, half and bfloat16. Throws `error` (invalid_argument).
[[nodiscard]] BIFOLIO_API dtype parse_dtype(std::string_view text);

/// IEEE 754 binary16 storage.
struct float16 {
  std::uint16_t bits = 0;
  friend constexpr bool operator==(float16, float16) = default;  // compares bits
};

/// The upper half of an IEEE 754 binary32.
struct bfloat16 {
  std::uint16_t bits = 0;
  friend constexpr bool operator==(bfloat16, bfloat16) = default;  // compares bits
};

[[nodiscard]] constexpr float to_float(float value) noexcept { return value; }

[[nodiscard]] constexpr float to_float(bfloat16 value) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

[[nodiscard]] constexpr float to_float(float16 value) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 0x1fu) {
    const std::uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | (mantissa << 13));
  }
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  // Zero or subnormal: mantissa · 2^-24, exact in binary32.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
}

/// `Storage` is float, float16 or bfloat16.
template <class Storage>
[[nodiscard]] constexpr Storage from_float(float value) noexcept = delete;

template <>
[[nodiscard]] constexpr float from_float<float>(float value) noexcept {
  return value;
}

template <>
[[nodiscard]] constexpr bfloat16 from_float<bfloat16>(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7fc0u)};
  if (magnitude == 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7f80u)};
  std::uint32_t rounded = (magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) >> 16;
  if (rounded >= 0x7f80u) rounded = 0x7f7fu;  // saturate
  return {static_cast<std::uint16_t>(sign | rounded)};
}

template <>
[[nodiscard]] constexpr float16 from_float<float16>(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude == 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {                 // below 2^-14: subnormal or zero, unit 2^-24
    if (magnitude < 0x33000000u) return {sign};  // below 2^-25 rounds to zero (2^-25 itself ties to even zero below)
    const std::uint32_t shift = 126u - (magnitude >> 23);  // 14 … 24
    const std::uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t half = 1u << (shift - 1);
    const std::uint32_t odd = (significand >> shift) & 1u;
    return {static_cast<std::uint16_t>(sign | ((significand + half - 1u + odd) >> shift))};
  }
  std::uint32_t rounded = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  if (rounded >= 0x7c00u) rounded = 0x7bffu;  // saturate at 65504
  return {static_cast<std::uint16_t>(sign | rounded)};
}

/// The `dtype` of a storage type.
template <class Storage>
inline constexpr dtype dtype_of = dtype::f32;
template <>
inline constexpr dtype dtype_of<float16> = dtype::f16;
template <>
inline constexpr dtype dtype_of<bfloat16> = dtype::bf16;

}  // namespace bifolio
