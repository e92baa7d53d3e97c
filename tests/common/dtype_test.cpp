// SPDX-License-Identifier: Apache-2.0
// Conversions against an oracle in double that knows nothing of bits until it writes the result down.
#include <doctest/doctest.h>

#include <bifolio/dtype.hpp>
#include <bifolio/error.hpp>
#include <bit>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>

#include "support/random.hpp"

namespace {

using namespace bifolio;
using bifolio::test::random_source;
using bifolio::test::seed_note;
using bifolio::test::test_seed;

struct format {
  int mantissa_bits;
  int min_exponent;  // of normal numbers
  int bias;
  double largest;
};
constexpr format f16_format{10, -14, 15, 65504.0};
constexpr format bf16_format{7, -126, 127, 0x1.fep127};

// To the nearest multiple of the unit in the last place (std::nearbyint rounds ties to even), then down to the largest.
std::uint32_t narrowed(const format& to, float value) {
  const std::uint32_t sign = std::signbit(value) ? 0x8000u : 0u;
  const auto all_ones = static_cast<std::uint32_t>((2 * to.bias + 1) << to.mantissa_bits);
  if (std::isnan(value)) return sign | all_ones | (1u << (to.mantissa_bits - 1));
  if (std::isinf(value)) return sign | all_ones;
  double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), to.min_exponent);
  const double unit = std::ldexp(1.0, exponent - to.mantissa_bits);
  magnitude = std::min(std::nearbyint(magnitude / unit) * unit, to.largest);
  if (magnitude < std::ldexp(1.0, to.min_exponent)) {
    return sign | static_cast<std::uint32_t>(std::ldexp(magnitude, to.mantissa_bits - to.min_exponent));
  }
  const int e = std::ilogb(magnitude);
  const auto significand = static_cast<std::uint32_t>(std::ldexp(magnitude, to.mantissa_bits - e));
  return sign | (static_cast<std::uint32_t>(e + to.bias) << to.mantissa_bits) |
         (significand - (1u << to.mantissa_bits));
}

double widened(const format& from, std::uint32_t bits) {
  const int exponent = static_cast<int>((bits & 0x7fffu) >> from.mantissa_bits);
  const auto mantissa = static_cast<double>(bits & ((1u << from.mantissa_bits) - 1));
  const double scale = std::ldexp(1.0, std::max(exponent, 1) - from.bias - from.mantissa_bits);
  const double magnitude = (exponent == 0 ? mantissa : mantissa + std::ldexp(1.0, from.mantissa_bits)) * scale;
  return (bits & 0x8000u) != 0 ? -magnitude : magnitude;
}

bool is_special(const format& of, std::uint32_t bits) {
  return static_cast<int>((bits & 0x7fffu) >> of.mantissa_bits) == 2 * of.bias + 1;
}

// Every pattern of 16 bits: widening is exact, and narrowing brings the bits back.
template <class Storage>
std::int64_t wrong_round_trips(const format& of) {
  std::int64_t wrong = 0;
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const Storage stored{static_cast<std::uint16_t>(bits)};
    const float wide = to_float(stored);
    const std::uint32_t mantissa = bits & ((1u << of.mantissa_bits) - 1);
    if (is_special(of, bits)) {
      if (mantissa == 0) {
        wrong += !std::isinf(wide) || from_float<Storage>(wide) != stored;
      } else {
        const std::uint32_t canonical = (bits & 0x8000u) | (0x7fffu & ~((1u << (of.mantissa_bits - 1)) - 1));
        wrong += !std::isnan(wide) || from_float<Storage>(wide).bits != canonical;
      }
      wrong += std::signbit(wide) != ((bits & 0x8000u) != 0);
    } else {
      wrong += static_cast<double>(wide) != widened(of, bits) || std::signbit(wide) != ((bits & 0x8000u) != 0);
      wrong += from_float<Storage>(wide) != stored;
    }
  }
  return wrong;
}

TEST_CASE("every float16 widens exactly and comes back as the same bits; NaNs come back quiet, signed and bare") {
  CHECK(wrong_round_trips<float16>(f16_format) == 0);
}

TEST_CASE("every bfloat16 widens exactly and comes back as the same bits; NaNs come back quiet, signed and bare") {
  CHECK(wrong_round_trips<bfloat16>(bf16_format) == 0);
}

TEST_CASE("a float16 NaN widens to a quiet NaN with the same payload") {
  CHECK(std::bit_cast<std::uint32_t>(to_float(float16{0x7c01})) == 0x7fc02000u);
  CHECK(std::bit_cast<std::uint32_t>(to_float(float16{0xfdff})) == 0xffffe000u);
}

bool narrows_like_the_oracle(std::uint32_t bits) {
  const auto value = std::bit_cast<float>(bits);
  return from_float<float16>(value).bits == narrowed(f16_format, value) &&
         from_float<bfloat16>(value).bits == narrowed(bf16_format, value);
}

TEST_CASE("narrowing rounds to nearest even and saturates at every exponent, next to every tie") {
  std::int64_t wrong = 0;
  std::uint32_t first_wrong = 0;
  const auto check = [&](std::uint32_t bits) {
    if (narrows_like_the_oracle(bits)) return;
    if (wrong++ == 0) first_wrong = bits;
  };
  for (std::uint32_t sign_exponent = 0; sign_exponent < 512; ++sign_exponent) {
    // Every pattern of the upper mantissa bits with the lower ones at, just below and just above a tie or a step.
    for (int low_bits = 12; low_bits <= 23; ++low_bits) {
      const std::uint32_t tie = 1u << (low_bits - 1);
      for (std::uint32_t high = 0; high < (1u << 23); high += 1u << low_bits) {
        for (const std::uint32_t low : {0u, 1u, tie - 1, tie, tie + 1, (1u << low_bits) - 1}) {
          check((sign_exponent << 23) | high | low);
        }
        if (low_bits == 12) high += 3u << low_bits;  // a quarter of the finest ones is enough
      }
    }
  }
  CAPTURE(first_wrong);
  CHECK(wrong == 0);
}

TEST_CASE("narrowing agrees with the oracle on random bit patterns") {
  random_source random(test_seed());
  MESSAGE(seed_note());
  std::int64_t wrong = 0;
  for (int i = 0; i < 2'000'000; ++i) wrong += !narrows_like_the_oracle(static_cast<std::uint32_t>(random.next()));
  CHECK(wrong == 0);
}

TEST_CASE("finite values never become infinite, infinities stay") {
  constexpr float largest = std::numeric_limits<float>::max();
  constexpr float infinity = std::numeric_limits<float>::infinity();
  CHECK(from_float<float16>(largest).bits == 0x7bff);
  CHECK(from_float<float16>(-65520.0f).bits == 0xfbff);
  CHECK(from_float<float16>(65519.99f).bits == 0x7bff);
  CHECK(from_float<float16>(infinity).bits == 0x7c00);
  CHECK(from_float<float16>(-infinity).bits == 0xfc00);
  CHECK(from_float<bfloat16>(largest).bits == 0x7f7f);
  CHECK(from_float<bfloat16>(-largest).bits == 0xff7f);
  CHECK(from_float<bfloat16>(infinity).bits == 0x7f80);
}

// An 8-bit float by its values alone: the magnitude nearest to `value`, the even code of two, the largest of what is
// beyond.
struct small_format {
  int mantissa_bits;
  int bias;
  std::uint32_t largest;

  [[nodiscard]] double value_of(std::uint32_t magnitude) const {
    const auto mantissa = static_cast<int>(magnitude & ((1u << mantissa_bits) - 1));
    const auto exponent = static_cast<int>(magnitude >> mantissa_bits);
    return exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                         : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  [[nodiscard]] std::uint32_t narrowed(float value) const {
    if (std::isnan(value)) return 0x7f;
    const std::uint32_t sign = std::signbit(value) ? 0x80u : 0u;
    const double magnitude = std::fabs(static_cast<double>(value));
    std::uint32_t low = 0;  // the largest code that is not above
    std::uint32_t high = largest;
    while (low < high) {
      const std::uint32_t middle = (low + high + 1) / 2;
      if (value_of(middle) <= magnitude) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    if (low == largest) return sign | largest;
    const double below = magnitude - value_of(low);
    const double above = value_of(low + 1) - magnitude;
    const bool up = above < below || (above == below && low % 2 != 0);
    return sign | (low + (up ? 1u : 0u));
  }
};
constexpr small_format e4m3_format{3, 7, 0x7e};
constexpr small_format e5m2_format{2, 15, 0x7b};

bool narrows_to_eight_bits_like_the_oracle(std::uint32_t bits) {
  const auto value = std::bit_cast<float>(bits);
  const auto integer = [&](float least, float most) {
    if (std::isnan(value)) return 0;
    return static_cast<int>(std::nearbyint(std::fmin(std::fmax(value, least), most)));
  };
  return from_float<float8_e4m3>(value).bits == e4m3_format.narrowed(value) &&
         from_float<float8_e5m2>(value).bits == e5m2_format.narrowed(value) &&
         from_float<std::int8_t>(value) == integer(-127, 127) && from_float<std::uint8_t>(value) == integer(0, 255);
}

TEST_CASE("narrowing to eight bits rounds to nearest even and saturates at every exponent, next to every tie") {
  std::int64_t wrong = 0;
  std::uint32_t first_wrong = 0;
  const auto check = [&](std::uint32_t bits) {
    if (narrows_to_eight_bits_like_the_oracle(bits)) return;
    if (wrong++ == 0) first_wrong = bits;
  };
  for (std::uint32_t sign_exponent = 0; sign_exponent < 512; ++sign_exponent) {
    for (int low_bits = 14; low_bits <= 23; ++low_bits) {
      const std::uint32_t tie = 1u << (low_bits - 1);
      for (std::uint32_t high = 0; high < (1u << 23); high += 1u << low_bits) {
        for (const std::uint32_t low : {0u, 1u, tie - 1, tie, tie + 1, (1u << low_bits) - 1}) {
          check((sign_exponent << 23) | high | low);
        }
      }
    }
  }
  random_source random(test_seed());
  for (int i = 0; i < 1'000'000; ++i) check(static_cast<std::uint32_t>(random.next()));
  CAPTURE(first_wrong);
  CHECK(wrong == 0);
}

TEST_CASE("every element of eight bits widens exactly and comes back as the same bits") {
  std::int64_t wrong = 0;
  for (std::uint32_t bits = 0; bits < 256; ++bits) {
    const auto byte = static_cast<std::uint8_t>(bits);
    const double sign = bits < 128 ? 1 : -1;
    const std::uint32_t magnitude = bits & 0x7fu;
    const float e4m3 = to_float(float8_e4m3{byte});
    if (magnitude == 0x7f) {
      wrong += !std::isnan(e4m3) || std::signbit(e4m3) != (bits >= 128) || from_float<float8_e4m3>(e4m3).bits != 0x7f;
    } else {
      wrong += static_cast<double>(e4m3) != sign * e4m3_format.value_of(magnitude) ||
               std::signbit(e4m3) != (bits >= 128) || from_float<float8_e4m3>(e4m3).bits != byte;
    }
    const float e5m2 = to_float(float8_e5m2{byte});
    if (magnitude > 0x7c) {
      wrong += !std::isnan(e5m2) || from_float<float8_e5m2>(e5m2).bits != 0x7f;
    } else if (magnitude == 0x7c) {
      wrong += !std::isinf(e5m2) || from_float<float8_e5m2>(e5m2).bits != (byte & 0x80u) + 0x7bu;
    } else {
      wrong += static_cast<double>(e5m2) != sign * e5m2_format.value_of(magnitude) ||
               from_float<float8_e5m2>(e5m2).bits != byte;
    }
    wrong += to_float(byte) != static_cast<float>(bits) || from_float<std::uint8_t>(to_float(byte)) != byte;
    const auto integer = static_cast<std::int8_t>(byte);
    wrong += from_float<std::int8_t>(to_float(integer)) != (integer == -128 ? -127 : integer);
  }
  CHECK(wrong == 0);
}

// float8_vectors.txt was made by make_float8_vectors.py from the packages onnx and ml_dtypes.
TEST_CASE("8-bit floats are those of ONNX and ml_dtypes") {
  std::ifstream file(BIFOLIO_FLOAT8_VECTORS);
  REQUIRE(file.good());
  std::int64_t wrong = 0;
  std::int64_t lines = 0;
  std::string kind;
  std::uint32_t wide = 0;
  std::uint32_t e4m3 = 0;
  std::uint32_t e5m2 = 0;
  while (file >> kind >> std::hex >> wide >> e4m3 >> e5m2) {
    ++lines;
    if (kind == "narrow") {
      const auto value = std::bit_cast<float>(wide);
      wrong += from_float<float8_e4m3>(value).bits != e4m3 || from_float<float8_e5m2>(value).bits != e5m2;
    } else {  // widen: the byte, then its value in either format
      const auto byte = static_cast<std::uint8_t>(wide);
      const auto same = [](float value, std::uint32_t bits) {
        return std::isnan(value) ? std::isnan(std::bit_cast<float>(bits)) : std::bit_cast<std::uint32_t>(value) == bits;
      };
      wrong += !same(to_float(float8_e4m3{byte}), e4m3) || !same(to_float(float8_e5m2{byte}), e5m2);
    }
  }
  CHECK(lines > 1500);
  CHECK(wrong == 0);
}

TEST_CASE("conversions are usable in constant expressions") {
  static_assert(from_float<float16>(1.0f).bits == 0x3c00);
  static_assert(from_float<bfloat16>(-2.0f).bits == 0xc000);
  static_assert(to_float(float16{0x0001}) == 0x1p-24f);
  static_assert(size_of(dtype::f32) == 4 && size_of(dtype::f16) == 2 && size_of(dtype::bf16) == 2);
  static_assert(dtype_of<float> == dtype::f32 && dtype_of<float16> == dtype::f16 && dtype_of<bfloat16> == dtype::bf16);
}

TEST_CASE("the table of dtypes gives storage, bytes, kind and names, by number and by type") {
  CHECK(dtype_names == "f32, f16, bf16, e4m3, e5m2, i8, u8");
  CHECK(tensor_dtype_names == "f32, f16, bf16");
  CHECK(num_tensor_dtypes == 3);
  for (std::size_t i = 0; i < num_dtypes; ++i) {
    const dtype type = all_dtypes[i];
    CHECK(static_cast<std::size_t>(type) == i);
    CHECK(is_dtype(type));
    visit_dtype(type, [&](auto traits) {
      using storage = typename decltype(traits)::storage;
      CHECK(traits.type == type);
      CHECK(dtype_of<storage> == type);
      CHECK(traits.bytes == sizeof(storage));
      CHECK(size_of(type) == sizeof(storage));
      CHECK((traits.kind == dtype_kind::integer) == (type == dtype::i8 || type == dtype::u8));
      CHECK(is_tensor_dtype(type) == (sizeof(storage) > 1));
      CHECK(to_string(type) == traits.name);
      for (const std::string_view other : traits.other_names) CHECK(parse_dtype(other) == type);
    });
  }
}

TEST_CASE("a number that is no dtype is known as such") {
  for (const std::size_t number : {num_dtypes, std::size_t{77}, std::size_t{255}}) {
    const auto type = static_cast<dtype>(number);
    CHECK(!is_dtype(type));
    CHECK(!is_tensor_dtype(type));
    CHECK(size_of(type) == 0);
    CHECK(to_string(type) == "unknown");
  }
}

TEST_CASE("dtype names read back, and other names are refused with the allowed ones") {
  for (const dtype type : all_dtypes) CHECK(parse_dtype(to_string(type)) == type);
  CHECK(parse_dtype("float32") == dtype::f32);
  CHECK(parse_dtype("float16") == dtype::f16);
  CHECK(parse_dtype("half") == dtype::f16);
  CHECK(parse_dtype("bfloat16") == dtype::bf16);
  CHECK(parse_dtype("float8_e4m3fn") == dtype::e4m3);
  CHECK(parse_dtype("int8") == dtype::i8);
  for (const char* text : {"", "F16", "f16 ", "fp8", "f"}) {
    try {
      (void)parse_dtype(text);
      FAIL("accepted " << text);
    } catch (const error& problem) {
      CHECK(problem.code() == errc::invalid_argument);
      CHECK(std::string(problem.what()) ==
            "dtype '" + std::string(text) + "' is not one of " + std::string(dtype_names));
    }
  }
}

}  // namespace
