// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What a configuration with layer groups must fulfil.

#include <bifolio/kv_cache_config.hpp>

namespace bifolio::inline v0_2::detail {

/// Throws `error` (invalid_argument) that names the group.
void require_groups(const kv_cache_config& config);

/// States of a sequence that a step of `num_tokens` tokens computes: one after each of a few tokens, one after many.
[[nodiscard]] constexpr std::int64_t states_of_step(std::int64_t num_tokens, std::int32_t num_draft_slots) noexcept {
  return num_tokens <= 1 + std::int64_t{num_draft_slots} ? num_tokens : 1;
}

}  // namespace bifolio::inline v0_2::detail
