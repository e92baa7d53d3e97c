// SPDX-License-Identifier: Apache-2.0
#include "cache_only.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bifolio/block_pool.hpp>
#include <bifolio/prefix_cache.hpp>
#include <chrono>

#include "input_error.hpp"

namespace trace_replay {
namespace {

using namespace bifolio;

class replayer {
 public:
  replayer(std::int64_t num_blocks, const eviction_policy& policy, bool chained)
      : pool_(num_blocks),
        cache_(pool_, {.block_size = 1, .seed = hash_seed{}, .policy = &policy}),
        chained_(chained) {}

  /// Whether it fits into the pool.
  bool replay(std::span<const token_id> ids) {
    blocks_.resize(ids.size());
    const std::size_t num_hits = chained_ ? look_up_chain(ids) : look_up_each(ids);
    const std::span<block_id> missing = std::span(blocks_).subspan(num_hits);
    if (cache_.allocate(missing) != alloc_status::ok) {
      pool_.release(std::span(blocks_).first(num_hits));
      return false;
    }
    prefix_chain end = chained_ ? found_ : cache_.root(default_scope);
    for (std::size_t i = num_hits; i < ids.size(); ++i) {
      const publish_result named =
          cache_.publish(blocks_[i], end, ids.subspan(i, 1), static_cast<std::int64_t>(i), retention_hint{});
      if (chained_) end = named.end;
    }
    pool_.release(blocks_);
    return true;
  }

  [[nodiscard]] const prefix_stats& stats() const noexcept { return cache_.stats(); }

 private:
  std::size_t look_up_chain(std::span<const token_id> ids) {
    const prefix_match match = cache_.match_and_pin({.tokens = ids}, blocks_);
    found_ = match.end;
    return static_cast<std::size_t>(match.num_blocks);
  }

  std::size_t look_up_each(std::span<const token_id> ids) {
    const auto find = [&](std::size_t i) {
      return cache_.match({.tokens = ids.subspan(i, 1)}, std::span(blocks_).subspan(i, 1)).num_blocks == 1;
    };
    std::size_t num_hits = 0;
    for (; num_hits < ids.size() && find(num_hits); ++num_hits) cache_.pin(std::span(blocks_).subspan(num_hits, 1));
    for (std::size_t i = num_hits; i < ids.size(); ++i) {
      if (find(i) && pool_.num_refs(blocks_[i]) == 0) cache_.unregister(blocks_[i]);
    }
    cache_.count_lookup(static_cast<std::int64_t>(ids.size()), static_cast<std::int64_t>(num_hits));
    return num_hits;
  }

  block_pool pool_;
  prefix_cache cache_;
  bool chained_;
  std::vector<block_id> blocks_;
  prefix_chain found_;
};

}  // namespace

cache_only_result replay_cache(const trace& what, const cache_only_options& options, progress_bar& progress) {
  if (what.num_distinct_ids == 0) {
    throw input_error("the trace has no hash_ids, so there is nothing that a prefix cache could find");
  }
  std::int64_t longest = 0;
  for (const trace_request& one : what.requests) longest = std::max<std::int64_t>(longest, one.num_ids);
  cache_only_result result;
  // When ids do not name prefixes a request may hold one twice, and then takes two blocks for it.
  const std::int64_t enough = what.num_distinct_ids + (what.ids_name_prefixes ? 0 : longest);
  result.num_blocks = options.num_blocks > 0 ? options.num_blocks : enough;
  result.num_requests = static_cast<std::int64_t>(what.requests.size());

  const auto start = std::chrono::steady_clock::now();
  const auto policy = make_policy(options.policy, options.num_kept);
  // A pool that never fills up behaves the same whatever its size, and need not take memory for that.
  replayer cache(std::min(result.num_blocks, enough), *policy, what.ids_name_prefixes);
  const auto sample = [&](std::int64_t done) {
    const prefix_stats& stats = cache.stats();
    return pool_sample{.at = static_cast<double>(done),
                       .cached_blocks = stats.num_cached_blocks,
                       .hits = stats.num_hit_blocks,
                       .lookups = stats.num_looked_up_blocks};
  };
  std::int64_t done = 0;
  for (const trace_request& one : what.requests) {
    std::span<const token_id> ids = what.ids_of(one);
    if (options.full_blocks_only) {
      ids = ids.first(std::min(ids.size(), static_cast<std::size_t>(one.num_input_tokens / options.trace_block_size)));
    }
    if (!cache.replay(ids)) ++result.num_refused;
    ++done;
    if (result.over_time.due(static_cast<double>(done))) result.over_time.add(sample(done));
    if (done % 64 == 0) progress.show(done, result.num_requests);
  }
  result.over_time.finish(sample(done));
  progress.wipe();
  const prefix_stats& stats = cache.stats();
  result.lookups = stats.num_looked_up_blocks;
  result.hits = stats.num_hit_blocks;
  result.evictions = stats.num_evicted_blocks;
  result.cached_blocks = stats.num_cached_blocks;
  result.wall_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace trace_replay
