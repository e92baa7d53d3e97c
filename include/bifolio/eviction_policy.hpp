// SPDX-License-Identifier: Apache-2.0
#pragma once

/// In which order a prefix cache gives up idle contents.
///
/// A policy is a description that any number of caches share. There are two kinds:
/// - without memory (LRU, priorities): the policy decides once per published block at which level of the pool the block
///   waits while it is idle. The pool hands out blocks of the lowest level first, within a level the least recently
///   released.
/// - with memory (LFU, 2Q, S3-FIFO, …): the policy makes a tracker for each cache. The cache tells the tracker of every
///   insertion, hit and removal, and asks it for the block to evict. Per-block state belongs to the tracker.
///
/// Releases need no call: a block that loses its last user goes to the back of the queue of its level, the tail of a
/// sequence before its head. A tracker reads them in the order of those queues (`idle_queues`).

#include <bifolio/block_pool.hpp>
#include <bifolio/content_key.hpp>
#include <bifolio/export.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <memory>
#include <string>

namespace bifolio::inline v0_2 {

/// Retention priority of contents: which idle contents to keep longer than others.
struct retention_hint {
  static constexpr block_level lowest = 1;
  static constexpr block_level normal = 4;
  static constexpr block_level highest = num_block_levels - 1;
  block_level priority = normal;  ///< contents of a lower priority are evicted first
  /// Time (of `prefix_cache::advance_clock`) from which on the priority is normal again; 0: never.
  std::int64_t expires_at = 0;
  friend constexpr bool operator==(const retention_hint&, const retention_hint&) = default;
};

/// What a tracker may do with the blocks of a pool: a view, passed by value. Levels are those of `retention_hint`,
/// lowest … highest; level 0 is for blocks without contents.
class idle_queues {
 public:
  explicit idle_queues(block_pool& pool) noexcept : pool_(&pool) {}
  [[nodiscard]] std::int64_t num_blocks() const noexcept { return pool_->num_blocks(); }
  /// The idle block of a level that was released first; `invalid_block` when the level has none.
  [[nodiscard]] block_id front(block_level level) const noexcept { return pool_->front(level); }
  [[nodiscard]] block_level level(block_id block) const noexcept { return pool_->level(block); }
  /// Moves an idle block to an end of the queue of `level`. A block in use will wait at this level.
  void move(block_id block, block_level level, reuse_order order) noexcept {
    if (pool_->is_free(block)) {
      pool_->requeue(block, level, order);
    } else {
      pool_->set_level(block, level);
    }
  }

 private:
  block_pool* pool_;
};

enum class removal_reason : std::uint8_t {
  evicted,       ///< the block is handed out for other contents
  unregistered,  ///< the contents are given up for another reason, e.g. because the block is written
};

/// The memory of a policy for one prefix cache. Calls take O(1), amortised, and allocate nothing. They depend only on
/// the calls before, so that a recorded run can be replayed. Thread-safety: as the cache.
class BIFOLIO_API eviction_tracker {
 public:
  virtual ~eviction_tracker();
  /// `block`, which is in use, now holds the contents of `key`, `index` blocks after the sequence's first. `parent`
  /// holds the contents before them; `invalid_block` for the first block of a chain, and when those are not cached any
  /// more. Returns the level at which the block waits while it is idle.
  [[nodiscard]] virtual block_level inserted(block_id block, const content_key& key, block_id parent,
                                             const retention_hint& hint, std::int64_t index) noexcept = 0;
  /// A look-up found the block, and it has one more user. Of one look-up, the first block of the chain first.
  virtual void hit(block_id block) noexcept = 0;
  /// The contents of `key` in `block` are not cached any more.
  virtual void removed(block_id block, const content_key& key, removal_reason reason) noexcept = 0;
  /// The block to evict, one of those that are idle. Called when at least one is; `removed` follows.
  [[nodiscard]] virtual block_id victim() noexcept = 0;
  /// The first broken invariant as a sentence, for a cache of `num_cached` blocks; empty when all hold.
  [[nodiscard]] virtual std::string check(std::int64_t num_cached) const = 0;
  /// Hash of everything that later answers depend on, the pool not included.
  [[nodiscard]] virtual std::uint64_t digest() const noexcept = 0;
};

class BIFOLIO_API eviction_policy {
 public:
  virtual ~eviction_policy();
  /// The level at which contents wait while they are idle, lowest … highest of `retention_hint`; a level outside is
  /// taken for the nearest. `index` counts blocks from the first of the sequence. Not called when there is a tracker.
  [[nodiscard]] virtual block_level level(const retention_hint& hint, std::int64_t index) const noexcept = 0;
  /// Null, the default, for a policy without memory. Throws std::bad_alloc.
  [[nodiscard]] virtual std::unique_ptr<eviction_tracker> make_tracker(idle_queues queues) const;
};

/// Least recently used first; of a sequence the last block first. Hints are ignored.
[[nodiscard]] BIFOLIO_API const eviction_policy& lru_policy() noexcept;
/// By the hint's priority, least recently used among equals. With equal hints the same as lru_policy; the default.
[[nodiscard]] BIFOLIO_API const eviction_policy& priority_policy() noexcept;

/// S3-FIFO (Yang, Zhang, Qiu, Yue & Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023, section 4.1
/// and algorithm 1). New contents enter a small queue; contents that are hit at least twice before they reach its end
/// move to the main queue, others are evicted, and their key goes to a ghost queue as long as the main queue is large.
/// Contents whose key is in the ghost queue enter the main queue at once. At the end of the main queue contents that
/// were hit since are reinserted, up to three times. Hints are ignored.
///
/// Two things differ from the paper, because blocks have users and form chains:
/// - The queues hold idle blocks, in the order of their last release. A block that was hit re-enters its queue when it
///   is released, together with its sequence, the tail first.
/// - A block is not evicted while a block after it in a chain is cached. When its turn comes it waits outside the
///   queues, and it is next when the last block after it is gone. So a prefix is never evicted before its suffix,
///   unless all idle blocks are followed by blocks in use (which takes a sliding window or duplicates).
/// `small_fraction`: of the pool's blocks, for the small queue. Throws `error` (invalid_argument) unless above 0 and
/// below 1.
[[nodiscard]] BIFOLIO_API std::unique_ptr<eviction_policy> make_s3_fifo_policy(double small_fraction = 0.1);
/// The one with the paper's tenth.
[[nodiscard]] BIFOLIO_API const eviction_policy& s3_fifo_policy() noexcept;

}  // namespace bifolio::inline v0_2
