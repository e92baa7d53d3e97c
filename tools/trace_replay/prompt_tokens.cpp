// SPDX-License-Identifier: Apache-2.0
#include "prompt_tokens.hpp"

#include <algorithm>

namespace trace_replay {
namespace {

enum class origin : std::uint64_t { block = 1, request_alone = 2, sampled = 3 };

/// 31 bits of a hash (the finaliser of SplitMix64). That two different places get the same token does no harm: a cache
/// hit needs all tokens of a block to be the same, and all before them.
bifolio::token_id token_of(origin from, std::int64_t owner, std::int64_t position) noexcept {
  std::uint64_t x = (static_cast<std::uint64_t>(from) << 62) + (static_cast<std::uint64_t>(owner) << 30) +
                    static_cast<std::uint64_t>(position);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return bifolio::token_id{static_cast<std::int32_t>((x ^ (x >> 31)) >> 33)};
}

}  // namespace

std::vector<bifolio::token_id> make_prompt(const trace& what, std::int64_t request, std::int64_t trace_block_size) {
  const trace_request& one = what.requests[static_cast<std::size_t>(request)];
  std::vector<bifolio::token_id> tokens;
  tokens.reserve(static_cast<std::size_t>(one.num_input_tokens));
  const std::int64_t num_tokens = one.num_input_tokens;
  std::int64_t at = 0;
  for (const bifolio::token_id id : what.ids_of(one)) {
    const std::int64_t begin = at;
    for (const std::int64_t end = std::min(at + trace_block_size, num_tokens); at < end; ++at) {
      tokens.push_back(token_of(origin::block, to_index(id), at - begin));
    }
  }
  for (; at < num_tokens; ++at) tokens.push_back(token_of(origin::request_alone, request, at));
  return tokens;
}

bifolio::token_id make_sampled_token(std::int64_t request, std::int64_t n) noexcept {
  return token_of(origin::sampled, request, n);
}

}  // namespace trace_replay
