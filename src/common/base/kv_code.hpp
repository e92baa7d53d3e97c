// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Which codes of a plane the library stores, the sentence that refuses the others, and the arithmetic of scales: the
/// one definition, for kernels on every device. What it means: kv_layout.hpp.

#include <bifolio/detail/host_device.hpp>
#include <bifolio/kv_layout.hpp>
#include <cstdint>
#include <string>

namespace bifolio::inline v0_2::detail {

[[nodiscard]] constexpr bool is_supported(const kv_code& code) noexcept {
  const auto has = [&](scale_granularity granularity) { return code.granularity == granularity; };
  if (!has(scale_granularity::none) && code.scale_type != dtype::f32) return false;
  const bool is_static = code.has_static_scales();
  switch (code.type) {
    case dtype::f32:
    case dtype::f16:
    case dtype::bf16:
      return has(scale_granularity::none);
    case dtype::e4m3:
      return has(scale_granularity::none) || is_static || has(scale_granularity::token_head) ||
             has(scale_granularity::record);
    case dtype::e5m2:
      return has(scale_granularity::none) || is_static;
    case dtype::i8:
      return is_static || has(scale_granularity::token_head);
    case dtype::u8:
      return has(scale_granularity::token_head);
  }
  return false;
}

/// The part of a sentence (refuse.hpp) that names what is not supported; `plane` is "K" or "V".
[[nodiscard]] inline auto unsupported_code(const char* plane, const kv_code& code) noexcept {
  return [plane, code](std::string& sentence) {
    sentence.append("code '").append(to_string(code)).append("' of the ").append(plane);
    sentence.append(
        " plane is not supported; there are f32, f16, bf16, e4m3 and e5m2 without scales, e4m3, e5m2 and i8 with "
        "scales per layer or head, e4m3, i8 and u8 with scales per token_head, and e4m3 with scales per record, all "
        "scales f32");
  };
}

/// Whether planes of records have the one shape of them; true of all other codes.
[[nodiscard]] constexpr bool suits_records(const kv_code& k, const kv_code& v, std::int32_t qk_head_dim,
                                           std::int32_t v_head_dim, bool v_in_k) noexcept {
  if (!k.is_record() && !v.is_record()) return true;
  return k == v && v_in_k && qk_head_dim == kv_record::head_dim && v_head_dim == kv_record::v_head_dim;
}

/// The part of a sentence that says so of a shape that has not.
[[nodiscard]] inline auto unsuitable_records(std::int32_t qk_head_dim, std::int32_t v_head_dim, bool v_in_k) noexcept {
  return [=](std::string& sentence) {
    sentence.append("a code has scales per record with head dims ").append(std::to_string(qk_head_dim));
    sentence.append(" and ")
        .append(std::to_string(v_head_dim))
        .append(v_in_k ? " and V part of K" : " and a V of its own");
    sentence.append("; records have 576 and 512, and V is part of K");
  };
}

/// Whether the elements of a plane are its values.
[[nodiscard]] constexpr bool is_plain(const kv_code& code) noexcept { return is_tensor_dtype(code.type); }

/// Whether both planes hold values of one type: what kernels that know no codes take.
[[nodiscard]] constexpr bool is_plain_and_alike(const kv_code& k, const kv_code& v) noexcept {
  return is_plain(k) && k == v;
}

/// A scale and, for u8, a zero point: value = code · scale + zero, code = (x − zero) · inverse.
struct scale_pair {
  float scale = 1.0f;
  float zero = 0.0f;
};

/// What scales of a token and head are computed from: of its dims the least, the largest and the largest magnitude, and
/// whether all are finite. Begins with that of no dims.
struct dim_range {
  float least = __builtin_inff();
  float most = -__builtin_inff();
  float magnitude = 0.0f;
  bool finite = true;
};

/// What codes are computed with.
struct encoding {
  scale_pair stored;
  float inverse = 1.0f;  ///< 0: the codes are 0
};

/// The largest code of a type with symmetric scales per token and head.
[[nodiscard]] BIFOLIO_HOST_DEVICE constexpr float largest_code(dtype type) noexcept {
  return type == dtype::e4m3 ? 448.0f : 127.0f;
}

/// Scale and zero of a token and head. `Math::add`, `Math::sub` and `Math::div` round once.
BIFOLIO_ANY_CALLABLE
template <class Math>
[[nodiscard]] BIFOLIO_HOST_DEVICE encoding encode_token_head(dtype type, const dim_range& range) noexcept {
  constexpr float least = 0x1p-100f;     // below, Q / a would overflow
  const float nan = __builtin_nanf("");  // 0x7fc00000
  if (type == dtype::u8) {
    const float width = Math::sub(range.most, range.least);
    if (!range.finite || !(width < __builtin_inff())) return {{nan, nan}, 0.0f};
    const float zero = Math::add(range.least, 0.0f);  // −0, which no order of the dims makes for sure, becomes +0
    if (width < least) return {{0.0f, zero}, 0.0f};
    return {{Math::div(width, 255.0f), zero}, Math::div(255.0f, width)};
  }
  if (!range.finite) return {{nan, 0.0f}, 0.0f};
  if (range.magnitude < least) return {{0.0f, 0.0f}, 0.0f};
  const float largest = largest_code(type);
  return {{Math::div(range.magnitude, largest), 0.0f}, Math::div(largest, range.magnitude)};
}

/// The scale of `dims_per_scale` latent dims of a record. `Math::div` rounds once.
BIFOLIO_ANY_CALLABLE
template <class Math>
[[nodiscard]] BIFOLIO_HOST_DEVICE encoding encode_record_dims(const dim_range& range) noexcept {
  if (!range.finite) return {{__builtin_nanf(""), 0.0f}, 0.0f};
  constexpr float least = 1e-4f;
  const float quotient = Math::div(range.magnitude, largest_code(dtype::e4m3));
  const float wanted = quotient < least ? least : quotient;
  std::uint32_t bits = 0;
  __builtin_memcpy(&bits, &wanted, sizeof(bits));
  const std::uint32_t power = (bits + 0x7fffffu) & 0x7f800000u;  // between 2^-13 and 2^120: so is the inverse
  const std::uint32_t inverse = (254u << 23) - power;
  encoding how;
  __builtin_memcpy(&how.stored.scale, &power, sizeof(power));
  __builtin_memcpy(&how.inverse, &inverse, sizeof(inverse));
  return how;
}

/// The bytes of a plane of records as a plane of its own, for calls that move them without reading them; other planes
/// as they are.
[[nodiscard]] constexpr kv_plane stored_plane(const kv_plane& plane) noexcept {
  if (!plane.code.is_record()) return plane;
  kv_plane bytes = plane;
  bytes.code = {dtype::e4m3};
  bytes.head_dim = static_cast<std::int32_t>(kv_record::bytes);
  bytes.strides.chunk = bytes.head_dim;
  bytes.strides.chunk_stride = kv_record::bytes;
  return bytes;
}

/// The floats of a plane's tail as a plane of its own, which starts tail.offset bytes after the plane: moving a block
/// moves this plane as well. The plane has one.
[[nodiscard]] constexpr kv_plane tail_plane(const kv_plane& plane) noexcept {
  constexpr std::int64_t bytes = sizeof(float);
  const std::int32_t floats = plane.code.tail_floats();
  kv_plane tail;
  tail.head_dim = floats;
  tail.strides = {.block = plane.strides.block * static_cast<std::int64_t>(size_of(plane.code.type)) / bytes,
                  .head = plane.tail.head / bytes,
                  .token = plane.tail.token / bytes,
                  .dim = 1,
                  .chunk_stride = floats,
                  .chunk = floats};
  return tail;
}

}  // namespace bifolio::inline v0_2::detail
