// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels/cache_ops/rotate.hpp"

#include "cpu/kernels/simd/inline.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {

extern const rotate_kernels rotate_table;

namespace {

constexpr std::int32_t num_sums = 64;

BIFOLIO_INLINE float one_nan(float value) noexcept {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  return __builtin_bit_cast(float, (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits);
}

/// ((0+4)+(2+6)) + ((1+5)+(3+7)) of each eight neighbours.
template <std::int32_t Count>
BIFOLIO_INLINE void sum_eights(float* to, const float* sums) noexcept {
  for (std::int32_t i = 0; i < Count; ++i) {
    const float* s = sums + 8 * i;
    to[i] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
  }
}

float sum_of_squares(const float* values, std::int32_t count) noexcept {
  alignas(64) float sums[num_sums] = {};
  std::int32_t first = 0;
  for (; first + num_sums <= count; first += num_sums) {
    for (std::int32_t i = 0; i < num_sums; ++i) sums[i] += values[first + i] * values[first + i];
  }
  for (std::int32_t i = 0; first + i < count; ++i) sums[i] += values[first + i] * values[first + i];
  float eights[8];
  float sum;
  sum_eights<8>(eights, sums);
  sum_eights<1>(&sum, eights);
  return sum;
}

void normalise(float* values, const head_rotation& how) noexcept {
  const float mean = sum_of_squares(values, how.head_dim) / static_cast<float>(how.head_dim);
  const float factor = 1.0f / __builtin_sqrtf(mean + how.epsilon);
  const float* const __restrict weights = how.weights;
  float* const __restrict scaled = values;
  for (std::int32_t i = 0; i < how.head_dim; ++i) scaled[i] = (scaled[i] * factor) * weights[i];
}

void turn_halves(float* __restrict a, float* __restrict b, const float* __restrict cosines,
                 const float* __restrict sines, std::int32_t count) noexcept {
  for (std::int32_t i = 0; i < count; ++i) {
    const float x = a[i];
    const float y = b[i];
    a[i] = one_nan(x * cosines[i] - y * sines[i]);
    b[i] = one_nan(y * cosines[i] + x * sines[i]);
  }
}

void turn_neighbours(float* __restrict values, const float* __restrict cosines, const float* __restrict sines,
                     std::int32_t count) noexcept {
  for (std::int32_t i = 0; i < count; ++i) {
    const float x = values[2 * i];
    const float y = values[2 * i + 1];
    values[2 * i] = one_nan(x * cosines[i] - y * sines[i]);
    values[2 * i + 1] = one_nan(y * cosines[i] + x * sines[i]);
  }
}

void clean(float* values, std::int32_t begin, std::int32_t end) noexcept {
  for (std::int32_t i = begin; i < end; ++i) values[i] = one_nan(values[i]);
}

void rotate_head(float* values, const head_rotation& how) noexcept {
  if (how.weights != nullptr) normalise(values, how);
  const std::int32_t pairs = how.rotary_dim / 2;
  float* const first = values + how.rotary_offset;
  if (how.neighbours) {
    turn_neighbours(first, how.cosines, how.sines, pairs);
  } else {
    turn_halves(first, first + pairs, how.cosines, how.sines, pairs);
  }
  clean(values, 0, how.rotary_offset);
  clean(values, how.rotary_offset + how.rotary_dim, how.head_dim);
}

void gather_pairs(float* to, const float* table, const std::int64_t* rows, const std::uint8_t* axes,
                  std::int32_t count) noexcept {
  for (std::int32_t i = 0; i < count; ++i) to[i] = table[rows[axes[i]] + i];
}

}  // namespace

constexpr rotate_kernels rotate_table = {&rotate_head, &gather_pairs};

}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA
