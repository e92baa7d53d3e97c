// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Element types of caches, queries and outputs, and their storage types. Storage types hold bits and convert; they do
/// no arithmetic. Narrowing rounds once, from the float32, to nearest even, and saturates: finite in gives finite out,
/// on every backend alike. What is not finite:
///
///   f16, bf16    ±inf stays ±inf; NaN stays NaN (quiet, sign kept, payload 0)
///   e4m3, e5m2   ±inf becomes ±448 or ±57344, the largest; every NaN becomes 0x7f, without a sign
///   i8, u8       ±inf becomes the largest or smallest (±127; 0 and 255); NaN, which they cannot hold, becomes 0
///
/// Widening is exact; a float16 NaN becomes quiet and keeps its payload, as F16C and Arm's FCVT do it, and so does an
/// e5m2 NaN; e4m3's two NaNs become 0x7fc00000, their sign kept. Bytes that keep their type are copied as they are.

#include <bifolio/detail/host_device.hpp>
#include <bifolio/export.hpp>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace bifolio::inline v0_2 {

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

/// Four bits of exponent, bias 7, and three of mantissa: no infinity, largest 448, least 2^-9 ("fn" elsewhere).
struct float8_e4m3 {
  std::uint8_t bits = 0;
  friend constexpr bool operator==(float8_e4m3, float8_e4m3) = default;  // compares bits
};

/// The upper byte of an IEEE 754 binary16: largest 57344, least 2^-16.
struct float8_e5m2 {
  std::uint8_t bits = 0;
  friend constexpr bool operator==(float8_e5m2, float8_e5m2) = default;  // compares bits
};

/// What the bits of an element mean.
enum class dtype_kind : std::uint8_t { floating, integer };

// The table of element types: name, storage struct, kind, other names that parse_dtype takes. Enumerators, traits,
// sizes, names, the visitors and the tables of kernels follow from it. Whatever does not handle a new row does not
// compile. Tensors (rows of k and v, queries, outputs, biases) have the types of the first part; the planes of a cache
// have all of them.
// clang-format off
#define BIFOLIO_TENSOR_DTYPES(row)               \
  row(f32, float, floating, "float32")           \
  row(f16, float16, floating, "float16", "half") \
  row(bf16, bfloat16, floating, "bfloat16")
#define BIFOLIO_CACHE_DTYPES(row)                       \
  row(e4m3, float8_e4m3, floating, "float8_e4m3fn")     \
  row(e5m2, float8_e5m2, floating, "float8_e5m2")       \
  row(i8, std::int8_t, integer, "int8")                 \
  row(u8, std::uint8_t, integer, "uint8")
#define BIFOLIO_DTYPES(row) BIFOLIO_TENSOR_DTYPES(row) BIFOLIO_CACHE_DTYPES(row)
// clang-format on

#define BIFOLIO_ROW(name, ...) name,
enum class dtype : std::uint8_t { BIFOLIO_DTYPES(BIFOLIO_ROW) };
#undef BIFOLIO_ROW

/// One row of the table, for code that knows the type when it is compiled.
template <dtype Type>
struct dtype_traits;

namespace detail {
template <class Storage>
struct dtype_of_storage;  // defined for the storage structs of the table
}  // namespace detail

#define BIFOLIO_ROW(enumerator, storage_type, kind_name, ...)        \
  template <>                                                        \
  struct dtype_traits<dtype::enumerator> {                           \
    using storage = storage_type;                                    \
    static constexpr dtype type = dtype::enumerator;                 \
    static constexpr std::size_t bytes = sizeof(storage_type);       \
    static constexpr dtype_kind kind = dtype_kind::kind_name;        \
    static constexpr std::string_view name = #enumerator;            \
    static constexpr std::string_view other_names[] = {__VA_ARGS__}; \
  };                                                                 \
  template <>                                                        \
  struct detail::dtype_of_storage<storage_type> {                    \
    static constexpr dtype type = dtype::enumerator;                 \
  };
BIFOLIO_DTYPES(BIFOLIO_ROW)
#undef BIFOLIO_ROW

/// The `dtype` of a storage type.
template <class Storage>
inline constexpr dtype dtype_of = detail::dtype_of_storage<Storage>::type;

#define BIFOLIO_ROW(name, ...) dtype::name,
/// All types, in the order of their numbers 0, 1, ….
inline constexpr dtype all_dtypes[] = {BIFOLIO_DTYPES(BIFOLIO_ROW)};
#undef BIFOLIO_ROW
inline constexpr std::size_t num_dtypes = sizeof(all_dtypes) / sizeof(all_dtypes[0]);

#define BIFOLIO_ROW(name, ...) dtype::name,
/// Those of tensors; their numbers come first.
inline constexpr dtype tensor_dtypes[] = {BIFOLIO_TENSOR_DTYPES(BIFOLIO_ROW)};
#undef BIFOLIO_ROW
inline constexpr std::size_t num_tensor_dtypes = sizeof(tensor_dtypes) / sizeof(tensor_dtypes[0]);

#define BIFOLIO_ROW(name, ...) #name ", "
/// "f32, f16, …": all names, for texts.
inline constexpr std::string_view dtype_names{BIFOLIO_DTYPES(BIFOLIO_ROW),
                                              sizeof(BIFOLIO_DTYPES(BIFOLIO_ROW)) - sizeof(", ")};
/// "f32, f16, bf16": those of tensors.
inline constexpr std::string_view tensor_dtype_names{BIFOLIO_TENSOR_DTYPES(BIFOLIO_ROW),
                                                     sizeof(BIFOLIO_TENSOR_DTYPES(BIFOLIO_ROW)) - sizeof(", ")};
#undef BIFOLIO_ROW

/// Whether `type` is one of the table; a caller may have cast any number.
[[nodiscard]] constexpr bool is_dtype(dtype type) noexcept { return static_cast<std::size_t>(type) < num_dtypes; }
/// Whether it is one that tensors may have.
[[nodiscard]] constexpr bool is_tensor_dtype(dtype type) noexcept {
  return static_cast<std::size_t>(type) < num_tensor_dtypes;
}

/// Calls `body` with the traits of `type`, which must be one of the table, and returns what it returns:
/// `visit_dtype(type, [&](auto traits) { return launch<typename decltype(traits)::storage>(args); })`.
BIFOLIO_ANY_CALLABLE
template <class Body>
BIFOLIO_HOST_DEVICE constexpr decltype(auto) visit_dtype(dtype type, Body&& body) {
#define BIFOLIO_ROW(name, ...) \
  case dtype::name:            \
    return body(dtype_traits<dtype::name>{});
  switch (type) { BIFOLIO_DTYPES(BIFOLIO_ROW) }
#undef BIFOLIO_ROW
  __builtin_unreachable();
}

/// The same for a type of tensors, without code for the others.
BIFOLIO_ANY_CALLABLE
template <class Body>
BIFOLIO_HOST_DEVICE constexpr decltype(auto) visit_tensor_dtype(dtype type, Body&& body) {
#define BIFOLIO_ROW(name, ...) \
  case dtype::name:            \
    return body(dtype_traits<dtype::name>{});
#define BIFOLIO_OTHER_ROW(name, ...) \
  case dtype::name:                  \
    break;
  switch (type) { BIFOLIO_TENSOR_DTYPES(BIFOLIO_ROW) BIFOLIO_CACHE_DTYPES(BIFOLIO_OTHER_ROW) }
#undef BIFOLIO_OTHER_ROW
#undef BIFOLIO_ROW
  __builtin_unreachable();
}

/// Bytes of an element; 0 for what is not in the table.
[[nodiscard]] constexpr std::size_t size_of(dtype type) noexcept {
#define BIFOLIO_ROW(name, storage, ...) \
  case dtype::name:                     \
    return sizeof(storage);
  switch (type) { BIFOLIO_DTYPES(BIFOLIO_ROW) }
#undef BIFOLIO_ROW
  return 0;
}
#undef BIFOLIO_DTYPES
#undef BIFOLIO_CACHE_DTYPES
#undef BIFOLIO_TENSOR_DTYPES

/// The type's name in the table, such as "f32".
[[nodiscard]] BIFOLIO_API std::string_view to_string(dtype type) noexcept;

/// Inverse of `to_string`; also takes the other names of the table: float32, float16, half, bfloat16, float8_e4m3fn,
/// float8_e5m2, int8 and uint8. Throws `error` (invalid_argument).
[[nodiscard]] BIFOLIO_API dtype parse_dtype(std::string_view text);

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

[[nodiscard]] constexpr float to_float(float8_e5m2 value) noexcept {
  return to_float(float16{static_cast<std::uint16_t>(value.bits << 8)});
}

[[nodiscard]] constexpr float to_float(float8_e4m3 value) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x80u) << 24;
  const std::uint32_t magnitude = value.bits & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude >= 8u) return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-9f) | sign);
}

[[nodiscard]] constexpr float to_float(std::int8_t value) noexcept { return static_cast<float>(value); }
[[nodiscard]] constexpr float to_float(std::uint8_t value) noexcept { return static_cast<float>(value); }

/// `Storage` is one of the table's.
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

namespace detail {

/// The bits of an 8-bit float with `MantissaBits` and `Bias`, of which `Largest` is the largest.
template <std::uint32_t MantissaBits, std::uint32_t Bias, std::uint32_t Largest>
[[nodiscard]] constexpr std::uint8_t narrow_to_8(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  constexpr std::uint32_t dropped = 23 - MantissaBits;
  std::uint32_t rounded = 0;
  if (magnitude >= (128u - Bias) << 23) {
    constexpr std::uint32_t half = (1u << (dropped - 1)) - 1;
    rounded = (magnitude - ((127u - Bias) << 23) + half + ((magnitude >> dropped) & 1u)) >> dropped;
    if (rounded > Largest) rounded = Largest;
  } else if (magnitude >= (126u - Bias - MantissaBits) << 23) {  // half the smallest subnormal, or more
    const std::uint32_t shift = 151u - Bias - MantissaBits - (magnitude >> 23);
    const std::uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t half = (1u << (shift - 1)) - 1;
    rounded = (significand + half + ((significand >> shift) & 1u)) >> shift;
  }
  return static_cast<std::uint8_t>(((bits >> 24) & 0x80u) | rounded);
}

/// To the nearest integer, ties to even, in [least, most]; NaN gives 0.
[[nodiscard]] constexpr std::int32_t narrow_to_integer(float value, float least, float most) noexcept {
  if (value != value) return 0;
  const float clamped = value < least ? least : value > most ? most : value;
  return static_cast<std::int32_t>((clamped + 0x1.8p23f) - 0x1.8p23f);
}

}  // namespace detail

template <>
[[nodiscard]] constexpr float8_e4m3 from_float<float8_e4m3>(float value) noexcept {
  return {detail::narrow_to_8<3, 7, 0x7e>(value)};
}

template <>
[[nodiscard]] constexpr float8_e5m2 from_float<float8_e5m2>(float value) noexcept {
  return {detail::narrow_to_8<2, 15, 0x7b>(value)};
}

template <>
[[nodiscard]] constexpr std::int8_t from_float<std::int8_t>(float value) noexcept {
  return static_cast<std::int8_t>(detail::narrow_to_integer(value, -127.0f, 127.0f));
}

template <>
[[nodiscard]] constexpr std::uint8_t from_float<std::uint8_t>(float value) noexcept {
  return static_cast<std::uint8_t>(detail::narrow_to_integer(value, 0.0f, 255.0f));
}

}  // namespace bifolio::inline v0_2
