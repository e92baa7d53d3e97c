// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Events of a prefix cache in the form that routers read: batches of vLLM's KV events, in msgpack. What a router
/// needs, tokens and parents, is there with `prefix_caching_options::record_tokens`. Sending them is the caller's, or
/// `kv_event_publisher`'s (the target bifolio::events).
///
///   [timestamp, [event, …], data_parallel_rank]
///   ["BlockStored", [hash, …], parent hash or nil, [token, …], block_size, adapter or nil, medium]
///   ["BlockRemoved", [hash, …], medium]      ["AllBlocksCleared"]
///
/// A block's hash is the low half of its key, an unsigned 64-bit integer: longer ones make routers drop the batch. One
/// BlockStored has blocks that follow one another.

#include <bifolio/export.hpp>
#include <bifolio/prefix_cache.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace bifolio::inline v0_2 {

struct kv_event_form {
  std::int32_t block_size = 16;     ///< of the cache
  std::string_view medium = "GPU";  ///< where the blocks are, as routers call it: "GPU" or "CPU"
  std::int32_t data_parallel_rank = 0;
};

/// Replaces `batch` by the encoded events, which `drain_events` gave with `stored`. `timestamp` in seconds. Throws
/// `error`: invalid_argument (a negative data_parallel_rank; `stored` does not have the contents of the stored events:
/// record_tokens was off), out_of_memory; `batch` is then as it was.
BIFOLIO_API void encode_kv_events(double timestamp, std::span<const cache_event> events, const stored_contents& stored,
                                  const kv_event_form& form, std::string& batch);

}  // namespace bifolio::inline v0_2
