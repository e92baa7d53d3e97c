// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Rows of codes as bfloat16, exactly: e4m3, e5m2 and i8 as their values, u8 as code − 127.5. Each of these has at most
/// eight significant bits; whole u8 codes do as well, but −127.5 … 127.5 keeps what is added to a sum of them small.
/// Scales and zero points are the caller's.
///
/// Four ways, by what an instruction set has, with the same results:
///   VBMI            a table of the 128 magnitudes' low bytes and one of their high bytes, looked up in registers
///   AVX-512, AVX2   8-bit floats byte by byte: the exponent moves and gets the other bias, a table of 16 bytes mends
///                   the subnormal ones; integers through float32
///   others          through float32

#include <array>

#include "cpu/kernels/simd/simd.hpp"
#include "cpu/kernels/simd/storage_convert.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

/// What is subtracted from u8 codes.
inline constexpr float unsigned_center = 127.5f;

/// The bits of a magnitude of seven bits as bfloat16.
template <class Code>
[[nodiscard]] constexpr std::uint32_t magnitude_bits(unsigned magnitude) noexcept {
  float value = 0;
  if constexpr (__is_same(Code, std::int8_t)) {
    value = static_cast<float>(magnitude);
  } else if constexpr (__is_same(Code, std::uint8_t)) {
    value = static_cast<float>(magnitude) + 0.5f;
  } else {
    value = to_float(Code{static_cast<std::uint8_t>(magnitude)});
  }
  return __builtin_bit_cast(std::uint32_t, value) >> 16;
}

/// Byte `Byte` of the 128 magnitudes.
using byte_table = std::array<std::uint8_t, 128>;
template <class Code, int Byte>
[[nodiscard]] constexpr byte_table make_magnitude_table() noexcept {
  byte_table table = {};
  for (unsigned i = 0; i < 128; ++i) table[i] = static_cast<std::uint8_t>(magnitude_bits<Code>(i) >> (8 * Byte));
  return table;
}
template <class Code, int Byte>
alignas(64) inline constexpr byte_table magnitude_table = make_magnitude_table<Code, Byte>();

template <class Code>
inline constexpr bool is_float8 = __is_same(Code, float8_e4m3) || __is_same(Code, float8_e5m2);

#if defined(__AVX2__)

/// Of an 8-bit float: by how many bits its magnitude moves up to be that of a bfloat16, what the exponent gains there,
/// and the largest magnitude that is a number.
template <class Code>
inline constexpr int moved_bits = __is_same(Code, float8_e4m3) ? 4 : 5;
template <class Code>
inline constexpr std::uint32_t rebias = __is_same(Code, float8_e4m3) ? 120u << 7 : 112u << 7;
template <class Code>
inline constexpr int largest_number = __is_same(Code, float8_e4m3) ? 0x7e : 0x7b;

/// What the first 16 magnitudes differ by, in byte `Byte`, from moved and rebiased ones; 0 for normal numbers.
template <class Code, int Byte>
[[nodiscard]] constexpr std::array<std::uint8_t, 16> make_subnormal_table() noexcept {
  std::array<std::uint8_t, 16> table = {};
  for (unsigned i = 0; i < 16; ++i) {
    const std::uint32_t normal = (i << moved_bits<Code>)+rebias<Code>;
    table[i] = static_cast<std::uint8_t>((magnitude_bits<Code>(i) ^ normal) >> (8 * Byte));
  }
  return table;
}
template <class Code, int Byte>
alignas(16) inline constexpr std::array<std::uint8_t, 16> subnormal_table = make_subnormal_table<Code, Byte>();

#endif

#if defined(__AVX512BW__)

/// Codes of one step.
inline constexpr int code_step = 64;

/// 64 low and 64 high bytes, interleaved to 64 elements; the bytes are in the order of `spread_quads`.
BIFOLIO_INLINE void store_interleaved(__m512i low, __m512i high, bfloat16* to) noexcept {
  _mm512_storeu_si512(to, _mm512_unpacklo_epi8(low, high));
  _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi8(low, high));
}
/// Interleaving takes the lower eight bytes of each 16, then the upper ones.
BIFOLIO_INLINE __m512i spread_quads(__m512i bytes) noexcept {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes);
}
#if defined(__AVX512VBMI__)

template <class Code>
class code_widener {
 public:
  BIFOLIO_INLINE code_widener() noexcept {
    for (int half = 0; half < 2; ++half) {
      low_[half] = _mm512_load_si512(magnitude_table<Code, 0>.data() + 64 * half);
      high_[half] = _mm512_load_si512(magnitude_table<Code, 1>.data() + 64 * half);
    }
  }
  /// The two bytes of each element.
  BIFOLIO_INLINE void widen(__m512i codes, __m512i& low, __m512i& high) const noexcept {
    const __m512i sign_bits = _mm512_set1_epi8(static_cast<char>(0x80));
    __m512i magnitudes = codes;                    // of which the lookups take seven bits
    if constexpr (__is_same(Code, std::int8_t)) {  // −128, which is no code, counts as −127
      magnitudes = _mm512_max_epi8(codes, _mm512_subs_epi8(_mm512_setzero_si512(), codes));
    }
    if constexpr (__is_same(Code, std::uint8_t)) {
      // c ≥ 128 is c − 128 + 0.5, else −(127 − c + 0.5).
      const __m512i below = _mm512_xor_si512(codes, _mm512_set1_epi8(0x7f));
      magnitudes = _mm512_min_epu8(_mm512_xor_si512(codes, sign_bits), below);
    }
    low = _mm512_permutex2var_epi8(low_[0], magnitudes, low_[1]);
    high = _mm512_permutex2var_epi8(high_[0], magnitudes, high_[1]);
    // high | (codes & sign_bits), of u8 high | (~codes & sign_bits)
    constexpr int merge = __is_same(Code, std::uint8_t) ? 0xf2 : 0xf8;
    high = _mm512_ternarylogic_epi64(high, codes, sign_bits, merge);
  }
  BIFOLIO_INLINE void widen(__m512i codes, bfloat16* to) const noexcept {
    __m512i low;
    __m512i high;
    widen(spread_quads(codes), low, high);
    store_interleaved(low, high, to);
  }

 private:
  __m512i low_[2];
  __m512i high_[2];
};

/// Whether `widen_quads` takes these codes.
template <class Code>
inline constexpr bool widens_quads = true;

#else

template <class Code>
class code_widener {
 public:
  BIFOLIO_INLINE void widen(__m512i codes, bfloat16* to) const noexcept {
    if constexpr (is_float8<Code>) {
      __m512i low;
      __m512i high;
      widen(spread_quads(codes), low, high);
      store_interleaved(low, high, to);
    } else {
      for (int i = 0; i < 2; ++i) {
        const __m256i half = i == 0 ? _mm512_castsi512_si256(codes) : _mm512_extracti64x4_epi64(codes, 1);
        const __m512i first = integers(_mm256_castsi256_si128(half));
        const __m512i second = integers(_mm256_extracti128_si256(half, 1));
        const __m512i order = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,  //
                                               31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
        _mm512_storeu_si512(to + 32 * i, _mm512_permutex2var_epi16(first, order, second));
      }
    }
  }
  /// The two bytes of each element.
  BIFOLIO_INLINE void widen(__m512i codes, __m512i& low, __m512i& high) const noexcept {
    if constexpr (is_float8<Code>) {
      constexpr int moved = moved_bits<Code>;
      const __m512i magnitudes = _mm512_and_si512(codes, _mm512_set1_epi8(0x7f));
      const __m512i subnormal = _mm512_min_epu8(magnitudes, _mm512_set1_epi8(15));
      const auto table = [](const std::array<std::uint8_t, 16>& bytes) __attribute__((always_inline)) {
        return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes.data())));
      };
      low = _mm512_and_si512(_mm512_slli_epi16(magnitudes, moved),
                             _mm512_set1_epi8(static_cast<char>(0xff << moved & 0xff)));
      high = _mm512_and_si512(_mm512_srli_epi16(magnitudes, 8 - moved), _mm512_set1_epi8(0xff >> (8 - moved)));
      high = _mm512_add_epi8(high, _mm512_set1_epi8(static_cast<char>(rebias<Code> >> 8)));
      low = _mm512_xor_si512(low, _mm512_shuffle_epi8(table(subnormal_table<Code, 0>), subnormal));
      high = _mm512_xor_si512(high, _mm512_shuffle_epi8(table(subnormal_table<Code, 1>), subnormal));
      const __mmask64 special = _mm512_cmpgt_epi8_mask(magnitudes, _mm512_set1_epi8(largest_number<Code>));
      high = _mm512_mask_mov_epi8(high, special, _mm512_set1_epi8(0x7f));
      constexpr int merge = 0xf8;  // a | (b & c)
      high = _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8(static_cast<char>(0x80)), merge);
    }
  }

 private:
  // Sixteen as float32, of which the upper halves are all there is.
  static BIFOLIO_INLINE __m512i integers(__m128i codes) noexcept {
    if constexpr (__is_same(Code, std::int8_t)) {
      return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)));
    } else {
      const __m512 values = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes));
      return _mm512_castps_si512(_mm512_sub_ps(values, _mm512_set1_ps(unsigned_center)));
    }
  }
};

template <class Code>
inline constexpr bool widens_quads = is_float8<Code>;

#endif

template <class Code>
BIFOLIO_INLINE void widen_step(const code_widener<Code>& widener, const void* from, bfloat16* to) noexcept {
  widener.widen(_mm512_loadu_si512(from), to);
}

/// Lanes of four codes whose halves are apart (`transpose<true>`), as two pairs of elements each.
template <class Code>
BIFOLIO_INLINE void widen_quads(const code_widener<Code>& widener, vf codes, vf& first, vf& second) noexcept {
  __m512i low;
  __m512i high;
  widener.widen(_mm512_castps_si512(raw(codes)), low, high);
  first = vf(_mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high)));
  second = vf(_mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high)));
}

#if defined(__AVX512VBMI__)

/// Whether codes are widened in registers where they are multiplied (code_micro.hpp).
inline constexpr bool multiplies_codes = true;

/// Pairs (even[d], odd[d]) of 2·lanes codes of two rows, as `pair_rows` orders them. Only the first `count` are read;
/// the others are code 0.
template <class Code, bool IsWhole>
BIFOLIO_INLINE void widen_pairs(const code_widener<Code>& widener, const Code* even, const Code* odd, int count, vf& a,
                                vf& b) noexcept {
  __m512i rows;
  if constexpr (IsWhole) {
    rows = join_halves(even, odd);
  } else {
    const __mmask32 present = (std::uint32_t{1} << count) - 1;
    rows = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi8(present, even)),
                              _mm256_maskz_loadu_epi8(present, odd), 1);
  }
  const __m512i order = _mm512_set_epi8(
      63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22, 53, 21, 52, 20,  //
      51, 19, 50, 18, 49, 17, 48, 16, 47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,    //
      39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  widen_quads(widener, vf(_mm512_castsi512_ps(_mm512_permutexvar_epi8(order, rows))), a, b);
}

#endif

#elif defined(__AVX2__)

inline constexpr int code_step = 32;

template <class Code>
class code_widener {
 public:
  BIFOLIO_INLINE void widen(__m256i codes, bfloat16* to) const noexcept {
    auto* const out = reinterpret_cast<__m256i*>(to);
    if constexpr (is_float8<Code>) {
      // Interleaving takes the lower eight bytes of each 16, then the upper ones.
      __m256i low;
      __m256i high;
      widen(_mm256_permute4x64_epi64(codes, 0xd8), low, high);
      _mm256_storeu_si256(out, _mm256_unpacklo_epi8(low, high));
      _mm256_storeu_si256(out + 1, _mm256_unpackhi_epi8(low, high));
    } else {
      const __m128i halves[2] = {_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)};
      for (int i = 0; i < 2; ++i) {
        const __m256i first = _mm256_srli_epi32(integers(halves[i]), 16);
        const __m256i second = _mm256_srli_epi32(integers(_mm_srli_si128(halves[i], 8)), 16);
        _mm256_storeu_si256(out + i, _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8));
      }
    }
  }
  /// The two bytes of each element.
  BIFOLIO_INLINE void widen(__m256i codes, __m256i& low, __m256i& high) const noexcept {
    if constexpr (is_float8<Code>) {
      constexpr int moved = moved_bits<Code>;
      const __m256i magnitudes = _mm256_and_si256(codes, _mm256_set1_epi8(0x7f));
      const __m256i subnormal = _mm256_min_epu8(magnitudes, _mm256_set1_epi8(15));
      const auto table = [](const std::array<std::uint8_t, 16>& bytes) __attribute__((always_inline)) {
        return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes.data())));
      };
      low = _mm256_and_si256(_mm256_slli_epi16(magnitudes, moved),
                             _mm256_set1_epi8(static_cast<char>(0xff << moved & 0xff)));
      high = _mm256_and_si256(_mm256_srli_epi16(magnitudes, 8 - moved), _mm256_set1_epi8(0xff >> (8 - moved)));
      high = _mm256_add_epi8(high, _mm256_set1_epi8(static_cast<char>(rebias<Code> >> 8)));
      low = _mm256_xor_si256(low, _mm256_shuffle_epi8(table(subnormal_table<Code, 0>), subnormal));
      high = _mm256_xor_si256(high, _mm256_shuffle_epi8(table(subnormal_table<Code, 1>), subnormal));
      const __m256i special = _mm256_cmpgt_epi8(magnitudes, _mm256_set1_epi8(largest_number<Code>));
      high = _mm256_or_si256(high, _mm256_and_si256(special, _mm256_set1_epi8(0x7f)));
      high = _mm256_or_si256(high, _mm256_and_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80))));
    }
  }

 private:
  // Eight as float32, of which the upper halves are all there is.
  static BIFOLIO_INLINE __m256i integers(__m128i codes) noexcept {
    if constexpr (__is_same(Code, std::int8_t)) {
      return _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)));
    } else {
      const __m256 values = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes));
      return _mm256_castps_si256(_mm256_sub_ps(values, _mm256_set1_ps(unsigned_center)));
    }
  }
};

template <class Code>
BIFOLIO_INLINE void widen_step(const code_widener<Code>& widener, const void* from, bfloat16* to) noexcept {
  widener.widen(_mm256_loadu_si256(static_cast<const __m256i*>(from)), to);
}

template <class Code>
inline constexpr bool widens_quads = is_float8<Code>;

/// Lanes of four codes whose halves are apart (`transpose<true>`), as two pairs of elements each.
template <class Code>
BIFOLIO_INLINE void widen_quads(const code_widener<Code>& widener, vf codes, vf& first, vf& second) noexcept {
  __m256i low;
  __m256i high;
  widener.widen(_mm256_castps_si256(raw(codes)), low, high);
  first = vf(_mm256_castsi256_ps(_mm256_unpacklo_epi8(low, high)));
  second = vf(_mm256_castsi256_ps(_mm256_unpackhi_epi8(low, high)));
}

#else

inline constexpr int code_step = 16;

template <class Code>
class code_widener {};

template <class Code>
inline constexpr bool widens_quads = false;

template <class Code>
BIFOLIO_INLINE void widen_step(const code_widener<Code>&, const void* from, bfloat16* to) noexcept {
  constexpr int step = max_lanes;
  for (int i = 0; i < code_step; i += step) {
    f32_vector<step> values = cpu::widen<step>(static_cast<const Code*>(from) + i);
    if constexpr (__is_same(Code, std::uint8_t)) values = values - unsigned_center;
    const u16_vector<step> halves =
        __builtin_convertvector(same_bits<u32_vector<step> >(values) >> 16, u16_vector<step>);
    __builtin_memcpy(static_cast<void*>(to + i), &halves, sizeof(halves));
  }
}

#endif

#if !defined(__AVX512VBMI__)
inline constexpr bool multiplies_codes = false;
// Never called:
template <class Code, bool IsWhole>
void widen_pairs(const code_widener<Code>&, const Code*, const Code*, int, vf&, vf&) noexcept {}
#endif

/// `count` adjacent codes; reads no further and writes no further.
template <class Code>
BIFOLIO_INLINE void widen_codes(const code_widener<Code>& widener, const void* from, int count, bfloat16* to) noexcept {
  const char* codes = static_cast<const char*>(from);
  int i = 0;
  for (; i + code_step <= count; i += code_step) widen_step(widener, codes + i, to + i);
  if (i == count) return;
  char last[std::size_t{code_step}] = {};
  bfloat16 widened[std::size_t{code_step}];
  __builtin_memcpy(last, codes + i, static_cast<std::size_t>(count - i));
  widen_step(widener, last, widened);
  __builtin_memcpy(static_cast<void*>(to + i), widened, static_cast<std::size_t>(count - i) * sizeof(bfloat16));
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA
