// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Room for more elements at the end of a vector, so that adding them cannot fail. `reserve` alone would grow by just
/// what is asked for, and a vector filled one by one would be copied each time.

#include <algorithm>
#include <cstddef>
#include <vector>

namespace bifolio::inline v0_2::detail {

/// Throws std::bad_alloc, having changed nothing.
template <class T>
void make_room(std::vector<T>& list, std::size_t more) {
  if (list.capacity() - list.size() < more) list.reserve(std::max(list.size() + more, 2 * list.capacity()));
}

}  // namespace bifolio::inline v0_2::detail
