// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Rows of planes with codes: the dims of one token and head are decoded into float32, and encoded with the scales of
/// where they go. Rows of tensors and planes without scales are sides like any other.

#include <bifolio/dtype.hpp>
#include <bifolio/kv_layout.hpp>
#include <cstddef>
#include <cstdint>

#include "cpu/kernels/cache_ops/kernels.hpp"

namespace bifolio::inline v0_2::cpu {

/// Rows [first, token, head] of a tensor, or the slots of a plane.
struct code_side {
  std::byte* base = nullptr;
  kv_plane plane;
  const float* static_scales = nullptr;  ///< those of the plane, where its code has them

  /// Rows of a tensor, which are "block" 0 of any number of tokens.
  template <class Rows>
  [[nodiscard]] static code_side of_rows(const Rows& rows, const kv_strides& strides) noexcept {
    code_side side;
    side.base = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(rows.data)));
    side.plane.code.type = rows.type;
    side.plane.head_dim = rows.head_dim;
    side.plane.strides = strides;
    return side;
  }
};

/// A token of one side.
struct code_place {
  std::int64_t block = 0;
  std::int64_t token = 0;
};

/// Moves all heads of a token. Bits stay as they are where both sides have one code and, of static ones, one scale.
void move_token(const code_kernels& kernels, const code_side& dst, const code_place& to, const code_side& src,
                const code_place& from, std::int32_t num_heads) noexcept;

/// Stores the values of one head of a token: `plane.head_dim` floats, which are spoiled.
void store_values(const code_kernels& kernels, const code_side& dst, const code_place& to, std::int32_t head,
                  float* values) noexcept;

}  // namespace bifolio::inline v0_2::cpu
