// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the kernels that move rows of codes share: their arguments, and where a row is on both sides.

#include <cstdint>

#include "cuda/cache_ops/code_rows.cuh"
#include "cuda/host/divisor.hpp"
#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {

inline constexpr int max_pairs = 400;

struct id_pair {
  std::int32_t src;
  std::int32_t dst;
};

struct code_plane {
  code_side src;
  code_side dst;
  std::int32_t head_dim = 0;
};

/// Where the tokens of a call are.
struct code_moves_args {
  code_plane planes[2];
  std::int64_t num_rows = 0;            ///< tokens · heads
  const std::int64_t* slots = nullptr;  ///< null: blocks to blocks
  std::int64_t num_slots = 0;
  divisor num_heads;
  divisor block_size;
  bool to_cache = false;   ///< of slots: the destination
  bool keep_bits = false;  ///< whatever the static scales
  id_pair pairs[max_pairs];
};
static_assert(sizeof(code_moves_args) <= 4096);

struct code_place {
  std::int64_t block;
  std::int32_t token;
};

/// Where row `token` of a call comes from and goes to: slots, or the blocks of a pair. False: it has no slot, and the
/// places are those of some row that can be read.
__device__ __forceinline__ bool find_places(const code_moves_args& args, std::int32_t token, code_place& from,
                                            code_place& to) {
  const auto block_size = static_cast<std::int32_t>(args.block_size.value);
  if (args.slots == nullptr) {
    const std::int32_t index = args.block_size.quotient(token);
    const std::int32_t in_block = token - index * block_size;
    from = {args.pairs[index].src, in_block};
    to = {args.pairs[index].dst, in_block};
    return true;
  }
  std::int64_t slot = args.slots[token];
  const bool exists = slot >= 0 && slot < args.num_slots;
  slot = exists ? slot : 0;
  const std::int64_t block = args.num_slots <= 0x7fffffff
                                 ? std::int64_t{args.block_size.quotient(static_cast<std::int32_t>(slot))}
                                 : slot / block_size;
  const code_place stored{block, static_cast<std::int32_t>(slot - block * block_size)};
  from = args.to_cache ? code_place{0, token} : stored;
  to = args.to_cache ? stored : code_place{0, token};
  return exists;
}

/// Moves of planes of which one side or both are records; `keep_bits` is not looked at.
[[nodiscard]] cudaError_t launch_record_moves(const runtime_api& api, const code_moves_args& args, bool dependent,
                                              cudaStream_t stream) noexcept;

}  // namespace bifolio::inline v0_2::cuda
