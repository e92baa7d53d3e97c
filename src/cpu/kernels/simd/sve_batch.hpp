// SPDX-License-Identifier: Apache-2.0
#pragma once

// `vf` where a vector is 256 bits of SVE: what the kernels use of an xsimd batch. xsimd has SVE from version 9 on only.

#include <arm_sve.h>

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/simd/inline.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

class vf {
 public:
  static constexpr std::size_t size = 8;
  typedef svfloat32_t vector __attribute__((arm_sve_vector_bits(256)));
  typedef std::int32_t mask __attribute__((vector_size(size * sizeof(float))));

  vf() = default;
  BIFOLIO_INLINE explicit vf(float x) noexcept : lanes_(svdup_n_f32(x)) {}
  BIFOLIO_INLINE explicit vf(svfloat32_t lanes) noexcept : lanes_(lanes) {}

  static BIFOLIO_INLINE vf load_unaligned(const float* p) noexcept { return vf(svld1_f32(svptrue_b32(), p)); }
  BIFOLIO_INLINE void store_unaligned(float* p) const noexcept { svst1_f32(svptrue_b32(), p, lanes_); }
  [[nodiscard]] BIFOLIO_INLINE svfloat32_t raw() const noexcept { return lanes_; }

  friend BIFOLIO_INLINE vf operator+(vf a, vf b) noexcept { return of(a.lanes_ + b.lanes_); }
  friend BIFOLIO_INLINE vf operator-(vf a, vf b) noexcept { return of(a.lanes_ - b.lanes_); }
  friend BIFOLIO_INLINE vf operator*(vf a, vf b) noexcept { return of(a.lanes_ * b.lanes_); }
  friend BIFOLIO_INLINE vf operator/(vf a, vf b) noexcept { return of(a.lanes_ / b.lanes_); }
  friend BIFOLIO_INLINE mask operator==(vf a, vf b) noexcept { return a.lanes_ == b.lanes_; }
  friend BIFOLIO_INLINE mask operator<(vf a, vf b) noexcept { return a.lanes_ < b.lanes_; }
  friend BIFOLIO_INLINE mask operator>(vf a, vf b) noexcept { return a.lanes_ > b.lanes_; }
  friend BIFOLIO_INLINE mask operator>=(vf a, vf b) noexcept { return a.lanes_ >= b.lanes_; }

  friend BIFOLIO_INLINE vf select(mask chosen, vf yes, vf no) noexcept { return of(chosen ? yes.lanes_ : no.lanes_); }
  friend BIFOLIO_INLINE vf max(vf a, vf b) noexcept { return vf(svmax_f32_x(svptrue_b32(), a.lanes_, b.lanes_)); }
  friend BIFOLIO_INLINE vf abs(vf a) noexcept { return vf(svabs_f32_x(svptrue_b32(), a.lanes_)); }

 private:
  static BIFOLIO_INLINE vf of(vector lanes) noexcept {
    vf made;
    made.lanes_ = lanes;
    return made;
  }
  vector lanes_;
};

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA
