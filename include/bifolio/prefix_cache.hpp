// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Which block holds the K and V of which tokens behind which others. It names the contents of full blocks, finds them
/// again, keeps them while they are idle, and forgets them when the pool hands their block out for something else. It
/// never touches memory of the cache and knows nothing of sequences.
///
/// Contents form chains. A block is published behind its predecessor in a scope; it gets a serial number of its own and
/// remembers its predecessor's, which no other contents ever had or will have. The index maps content keys to blocks:
/// 32 bits of the key and 32 of the block id, in buckets of one cache line with seven slots and a count of the entries
/// that found them full and went on to the next, so that an entry goes without moving another (as in Bronson & Shi's
/// F14, 2019). A hit counts only if, besides the whole key, the tokens are the same and the predecessor's serial is the
/// one of the hit before it; so by induction a hit names the very same tokens from the first one on, whatever collides
/// or is forged.
///
/// A published block that nobody uses stays in the pool's free queues, at a level above blocks without contents, and
/// leaves them when it is hit. Nothing is ever scanned.
///
/// Metadata of one cached block of 16 tokens: 32 bytes here, 64 of tokens, 13 of index, 8 + 11 in the pool.

#include <algorithm>
#include <array>
#include <bifolio/block_pool.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/content_key.hpp>
#include <bifolio/export.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/stats.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bifolio {

/// How dear idle contents are to the caller.
struct retention_hint {
  static constexpr block_level lowest = 1;
  static constexpr block_level normal = 4;
  static constexpr block_level highest = num_block_levels - 1;
  block_level priority = normal;  ///< contents of a lower priority are evicted first
  /// Time (of `prefix_cache::advance_clock`) from which on the priority is normal again; 0: never.
  std::int64_t expires_at = 0;
  friend constexpr bool operator==(const retention_hint&, const retention_hint&) = default;
};

/// Decides at which level published contents wait while they are idle; within a level the least recently used go first,
/// and of one sequence the last block. Called once for each published block.
class BIFOLIO_API eviction_policy {
 public:
  virtual ~eviction_policy();
  /// lowest … highest of `retention_hint`; what lies outside is taken for the nearest. `index` counts blocks from the
  /// first of the sequence.
  [[nodiscard]] virtual block_level level(const retention_hint& hint, std::int64_t index) const noexcept = 0;
};
/// Least recently used, hints ignored.
[[nodiscard]] BIFOLIO_API const eviction_policy& lru_policy() noexcept;
/// By the hint's priority, least recently used among equals. With equal hints the same as lru_policy; the default.
[[nodiscard]] BIFOLIO_API const eviction_policy& priority_policy() noexcept;

struct prefix_cache_config {
  std::int32_t block_size = 16;             ///< tokens, ≥ 1
  std::optional<hash_seed> seed{};          ///< default: random_hash_seed(); set it to replay recorded runs
  std::int32_t key_bits = 128;              ///< fewer only to test collisions
  bool record_events = false;               ///< see `drain_events`
  const eviction_policy* policy = nullptr;  ///< borrowed; default: priority_policy()
  memory_resource* memory = nullptr;        ///< borrowed; default: default_host_memory()
};

/// The tokens of a sequence as far as they are known, and what their contents depend on besides. Borrowed.
struct prompt_view {
  std::span<const token_id> tokens;
  prefix_scope scope{};
  std::span<const extra_key> extras{};  ///< by rising position
  /// Keys of the first blocks, from `prefix_cache::append_keys`, for a caller who looks up more than once; else empty.
  std::span<const content_key> keys{};
  retention_hint retention{};
};

/// The end of a chain: what the next block is published behind.
struct prefix_chain {
  content_key key;
  std::uint64_t serial = 0;
  friend constexpr bool operator==(const prefix_chain&, const prefix_chain&) = default;
};

/// A scope's handle while it is in use; the scope without salt and adapter is `default_scope`.
enum class scope_id : std::uint32_t {};
inline constexpr scope_id default_scope{0};
/// Handle of one block's extra keys; 0 = none.
enum class extras_id : std::uint32_t {};
inline constexpr extras_id no_extras{0};

struct prefix_match {
  std::int64_t num_blocks = 0;  ///< found, from the first on
  prefix_chain end{};           ///< of the last one found, or the scope's root; serial 0 for an unknown scope
};

struct publish_result {
  prefix_chain end{};
  /// Holds the same contents already, and goes on to be the one that is found; `invalid_block` when `block` is.
  block_id duplicate_of = invalid_block;
};

/// What happened to the set of cached blocks; replaying all events in order rebuilds it.
struct cache_event {
  enum class kind : std::uint8_t { stored, removed, cleared };
  kind what = kind::stored;
  block_id block = invalid_block;  ///< invalid for `cleared`
  content_key key{};
  content_key parent{};  ///< of `stored` only
  friend constexpr bool operator==(const cache_event&, const cache_event&) = default;
};

/// Thread-safety: one thread at a time.
class BIFOLIO_API prefix_cache {
 public:
  /// `pool` is borrowed and must outlive the cache; from now on blocks are taken with the cache's `allocate`.
  /// Throws `error`: invalid_argument (block_size < 1, key_bits), out_of_memory.
  prefix_cache(block_pool& pool, const prefix_cache_config& config);
  prefix_cache(const prefix_cache&) = delete;
  prefix_cache& operator=(const prefix_cache&) = delete;
  ~prefix_cache();

  [[nodiscard]] const content_hasher& hasher() const noexcept { return hasher_; }
  [[nodiscard]] std::int32_t block_size() const noexcept { return config_.block_size; }

  /// Appends the keys of the full blocks of `prompt.tokens` that `keys` does not have yet; `keys` holds those of the
  /// first ones. Throws std::bad_alloc, and `error` (invalid_argument) for a salt past max_salt_bytes or extra keys
  /// past max_extras_bytes, as all that take these do.
  void append_keys(const prompt_view& prompt, std::vector<content_key>& keys) const;

  /// The longest chain of cached full blocks that `prompt` begins with, at most out.size() of them. Changes nothing.
  /// Throws std::bad_alloc (only when there are extra keys or a scope).
  [[nodiscard]] prefix_match match(const prompt_view& prompt, std::span<block_id> out) const;
  /// The same, and a reference to each: from here on they are the caller's. Counts in `stats`.
  [[nodiscard]] prefix_match match_and_pin(const prompt_view& prompt, std::span<block_id> out);
  /// Takes what `match` has just found.
  void pin(std::span<const block_id> hits) noexcept;
  /// Counts a look-up of which `num_hits` of `num_blocks` full blocks were found.
  void count_lookup(std::int64_t num_blocks, std::int64_t num_hits) noexcept;

  /// The key of a block of `tokens` behind `after`.
  [[nodiscard]] content_key next_key(const prefix_chain& after, std::span<const token_id> tokens,
                                     extras_id extras = no_extras) const noexcept;
  /// A hint that `publish` will be called with these. Any block of the pool.
  void prefetch(block_id block, const content_key& key) const noexcept {
    detail::prefetch_to_write(&entry_of(block));
    detail::prefetch_to_write(token_row(block));
    detail::prefetch_to_write(&buckets_[home_of(tag_of(key))]);
    pool_->prefetch({&block, 1});
  }
  /// Gives `block`, which the caller holds and whose slots are all computed, the name of `tokens` behind `after`; `key`
  /// is what `next_key` gives for them. Requires tokens.size() = block_size, room for an event (`reserve_events`), and
  /// an `after` that a match or publish of this cache gave. `index` counts blocks from the sequence's first. A block
  /// that has this name already keeps it.
  [[nodiscard]] publish_result publish(block_id block, const content_key& key, const prefix_chain& after,
                                       std::span<const token_id> tokens, std::int64_t index,
                                       const retention_hint& hint = {}, extras_id extras = no_extras) noexcept;

  /// The same without a key made ahead.
  [[nodiscard]] publish_result publish(block_id block, const prefix_chain& after, std::span<const token_id> tokens,
                                       std::int64_t index, const retention_hint& hint = {},
                                       extras_id extras = no_extras) noexcept {
    return publish(block, next_key(after, tokens, extras), after, tokens, index, hint, extras);
  }

  /// Whether `block` is the one that is found for its contents. Such a block must not be written.
  [[nodiscard]] bool holds(block_id block) const noexcept {
    const auto i = static_cast<std::uint32_t>(block);
    return (held_[i / 64] >> (i % 64) & 1) != 0;
  }
  /// The end of the chain at a block that was published (also as a duplicate) and not written or released since.
  [[nodiscard]] prefix_chain chain_at(block_id block) const noexcept;
  [[nodiscard]] std::span<const token_id> tokens_of(block_id block) const noexcept;

  /// As `block_pool::allocate`; contents of the blocks handed out are forgotten. Requires room for out.size() events.
  [[nodiscard]] alloc_status allocate(std::span<block_id> out) noexcept;
  [[nodiscard]] block_id allocate_one() noexcept;
  /// The block is found no more, and goes to level 0. For one that is held nowhere does nothing.
  void unregister(block_id block) noexcept;

  /// Forgets everything; false, and nothing changed, while a cached block is in use.
  [[nodiscard]] bool reset();

  /// Hints expire by this clock, whatever its unit: those due lose their priority, at one time the last published
  /// first, so that the tail of a sequence goes on to be evicted before its head. Time that goes back is ignored.
  /// O(log n) for each hint that expires.
  void advance_clock(std::int64_t now) noexcept;

  /// Handles of scopes and extra keys, each counted: acquire gives one reference. Throw std::bad_alloc; a scope that
  /// would be the 2^24th in use at once throws `error` (failed_precondition).
  [[nodiscard]] scope_id acquire_scope(const prefix_scope& scope);
  void retain_scope(scope_id scope) noexcept;
  void release_scope(scope_id scope) noexcept;
  [[nodiscard]] prefix_chain root(scope_id scope) const noexcept;
  /// `extras` of one block; an empty list gives no_extras. All extra keys of a cached block are kept and compared.
  [[nodiscard]] extras_id acquire_extras(std::span<const extra_key> extras, std::int64_t first_position);
  void retain_extras(extras_id extras) noexcept;
  void release_extras(extras_id extras) noexcept;

  /// Room for this many more events, and for as many hints that expire. Throws std::bad_alloc.
  void reserve_events(std::int64_t num_events);
  /// Moves the events since the last call into `events` (which is cleared first): a block's `removed` comes before the
  /// `stored` that reuses it.
  void drain_events(std::vector<cache_event>& events);

  [[nodiscard]] const prefix_stats& stats() const noexcept { return stats_; }
  /// Scopes and blocks' extra keys that somebody refers to, `default_scope` and `no_extras` not counted.
  [[nodiscard]] std::size_t num_interned() const noexcept;
  /// Bytes of metadata, the pool's not included.
  [[nodiscard]] std::size_t num_bytes() const noexcept { return storage_.num_bytes(); }
  /// The first broken invariant as a sentence; empty when all hold. O(num_blocks).
  [[nodiscard]] std::string check() const;
  /// Hash of everything that later answers depend on, the pool not included.
  [[nodiscard]] std::uint64_t digest() const noexcept;

 private:
  /// Contents of a block that was published; serial 0: never, or forgotten.
  struct entry {
    content_key key;
    std::uint64_t serial;
    std::uint64_t parent;  ///< serial of the predecessor, or of the scope
  };
  struct alignas(64) bucket {
    static constexpr std::uint32_t num_slots = 7;
    std::array<std::uint32_t, 8> tags;   ///< of the slots, 0 for a free one; the eighth is `num_passed`
    std::array<std::int32_t, 8> blocks;  ///< of the slots; the eighth is unused

    /// Entries of this or earlier buckets that stand in a later one.
    [[nodiscard]] std::uint32_t& num_passed() noexcept { return tags[num_slots]; }
    [[nodiscard]] std::uint32_t num_passed() const noexcept { return tags[num_slots]; }
    /// Bit i: slot i has this tag.
    [[nodiscard]] std::uint32_t with_tag(std::uint32_t tag) const noexcept { return equal_to(tags, tag); }
    [[nodiscard]] std::uint32_t with_block(block_id block) const noexcept { return equal_to(blocks, to_index(block)); }
    /// All words at once and without branches: which slot it is cannot be foreseen.
    template <class T>
    [[nodiscard]] static std::uint32_t equal_to(const std::array<T, 8>& words, T value) noexcept {
      using four = std::uint32_t __attribute__((vector_size(16)));
      std::array<four, 2> half;
      std::memcpy(half.data(), words.data(), sizeof half);
      const auto wanted = static_cast<std::uint32_t>(value);
      const four low = reinterpret_cast<four>(half[0] == wanted) & four{1, 2, 4, 8};
      const four high = reinterpret_cast<four>(half[1] == wanted) & four{16, 32, 64, 0};
      std::array<std::uint64_t, 2> found;
      const four both = low | high;
      std::memcpy(found.data(), &both, sizeof found);
      const std::uint64_t pair = found[0] | found[1];
      return static_cast<std::uint32_t>(pair | pair >> 32);
    }
  };
  struct expiry {
    std::int64_t at;
    std::uint64_t serial;
    block_id block;
  };
  struct names;

  /// Never 0, which marks a free slot.
  [[nodiscard]] static std::uint32_t tag_of(const content_key& key) noexcept {
    return std::max(static_cast<std::uint32_t>((key.low ^ key.high) * 0x9e3779b97f4a7c15ULL >> 32), 1U);
  }
  [[nodiscard]] std::uint64_t home_of(std::uint32_t tag) const noexcept {
    return static_cast<std::uint64_t>(tag) * num_buckets_ >> 32;
  }
  [[nodiscard]] std::uint64_t next_bucket(std::uint64_t at) const noexcept {
    return at + 1 == num_buckets_ ? 0 : at + 1;
  }
  [[nodiscard]] entry& entry_of(block_id block) const noexcept { return entries_[static_cast<std::uint32_t>(block)]; }
  [[nodiscard]] token_id* token_row(block_id block) const noexcept {
    return tokens_ +
           static_cast<std::size_t>(static_cast<std::uint32_t>(block)) * static_cast<std::size_t>(config_.block_size);
  }
  [[nodiscard]] content_key key_of_block(const prompt_view& prompt, std::size_t index, const content_key& before) const;
  [[nodiscard]] block_id candidate(std::uint32_t tag) const noexcept;
  [[nodiscard]] std::optional<prefix_chain> find_root(const prefix_scope& scope) const;
  [[nodiscard]] std::optional<extras_id> find_extras(std::span<const extra_key> extras,
                                                     std::int64_t first_position) const;
  [[nodiscard]] block_id find(const content_key& key, std::uint64_t parent, const token_id* tokens,
                              extras_id extras) const noexcept;
  [[nodiscard]] bool matches(block_id block, const content_key& key, std::uint64_t parent, const token_id* tokens,
                             extras_id extras) const noexcept;
  void insert(block_id block, std::uint32_t tag) noexcept;
  [[nodiscard]] bool is_live(const expiry& timer) const noexcept {
    return holds(timer.block) && entry_of(timer.block).serial == timer.serial;
  }
  void erase(block_id block) noexcept;
  void record(const cache_event& event) noexcept;
  void prefetch_evictions() const noexcept;

  block_pool* pool_;
  prefix_cache_config config_;
  content_hasher hasher_;
  buffer storage_;
  entry* entries_ = nullptr;       // [num_blocks]
  token_id* tokens_ = nullptr;     // [num_blocks, block_size]
  bucket* buckets_ = nullptr;      // [num_buckets_]
  std::uint64_t* held_ = nullptr;  // [num_blocks] bits
  std::uint64_t num_buckets_ = 0;
  std::uint64_t next_serial_ = 1;
  std::int64_t now_ = 0;
  std::unique_ptr<names> names_;      // of scopes and extra keys
  std::vector<extras_id> extras_of_;  // [num_blocks] once any block has extra keys
  std::vector<expiry> expiries_;      // heap, earliest first
  std::vector<cache_event> events_;
  prefix_stats stats_;
};

}  // namespace bifolio
