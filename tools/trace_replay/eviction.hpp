// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bifolio/prefix_cache.hpp>
#include <cstdint>
#include <memory>

namespace trace_replay {

enum class policy_kind : std::uint8_t { lru, priority };

/// lru: the library's. priority: the library's too, with the first `num_kept` blocks of every prompt given the highest
/// priority, which is what a server would do with system prompts.
[[nodiscard]] std::unique_ptr<bifolio::eviction_policy> make_policy(policy_kind kind, std::int64_t num_kept);

}  // namespace trace_replay
