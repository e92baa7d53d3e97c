// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The pairs of element types, without codes, for which kernels that move elements are compiled.

#include <bifolio/dtype.hpp>
#include <cstddef>

namespace bifolio::inline v0_2::cuda {

template <class From, class To>
struct move_types {};

/// The type that represents all types of its size where bits stay as they are, so that these share a kernel.
template <std::size_t Bytes>
struct bits_of_size;
template <>
struct bits_of_size<2> {
  using type = float16;
};
template <>
struct bits_of_size<4> {
  using type = float;
};

/// The second half of `visit_move`, where the source is known. A struct, as nvcc loses the types of a lambda's captures
/// in a lambda of its own.
template <class From, class Body>
struct move_from {
  const Body& body;

  template <class To>
  auto operator()(To) const {
    if constexpr (From::type == To::type) {
      using bits = typename bits_of_size<From::bytes>::type;
      return body(move_types<bits, bits>{});
    } else {
      return body(move_types<typename From::storage, typename To::storage>{});
    }
  }
};

/// Calls `body` with the `move_types` of the kernel that moves elements of type `from` to type `to`.
template <class Body>
auto visit_move(dtype from, dtype to, const Body& body) {
  return visit_tensor_dtype(from,
                            [&]<class From>(From) { return visit_tensor_dtype(to, move_from<From, Body>{body}); });
}

}  // namespace bifolio::inline v0_2::cuda
