// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bifolio/types.hpp>
#include <cstdint>
#include <vector>

#include "trace.hpp"

namespace trace_replay {

/// A prompt that is to the prefix cache what the traced one was: the tokens of a block follow from its id alone, so
/// that prompts have as many tokens in common as they have ids in common. Tokens after the last id belong to this
/// request only; those of a trace without ids all do.
[[nodiscard]] std::vector<bifolio::token_id> make_prompt(const trace& what, std::int64_t request,
                                                         std::int64_t trace_block_size);

/// What the n-th step of sampling gives a request: tokens that no other request has.
[[nodiscard]] bifolio::token_id make_sampled_token(std::int64_t request, std::int64_t n) noexcept;

}  // namespace trace_replay
