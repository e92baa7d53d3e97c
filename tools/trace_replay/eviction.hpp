// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bifolio/eviction_policy.hpp>
#include <cstdint>
#include <memory>

namespace trace_replay {

enum class policy_kind : std::uint8_t { lru, priority, s3_fifo };

/// lru and s3_fifo: the library's. priority: the library's too, with the first `num_kept` blocks of every prompt at the
/// highest priority, as a server might do with system prompts.
[[nodiscard]] std::unique_ptr<bifolio::eviction_policy> make_policy(policy_kind kind, std::int64_t num_kept);

}  // namespace trace_replay
