// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bifolio/types.hpp>
#include <cstdint>
#include <vector>

namespace bifolio::test {

/// Plain numbers as token ids.
inline std::vector<token_id> to_ids(const std::vector<std::int32_t>& numbers) {
  std::vector<token_id> ids;
  ids.reserve(numbers.size());
  for (const std::int32_t number : numbers) ids.push_back(token_id{number});
  return ids;
}

}  // namespace bifolio::test
