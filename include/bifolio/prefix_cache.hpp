// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Which block holds the K and V of which tokens after which others. The cache registers the contents of full blocks,
/// finds them again, keeps them while they are idle, and unregisters them when the pool hands out their block for other
/// contents. It never touches memory of blocks and knows nothing of sequences.
///
/// Contents form chains. A block is published after its predecessor in a scope. It gets a serial number of its own and
/// remembers its predecessor's serial, which no other contents ever had or will have. A hit requires, besides the whole
/// key, equal tokens and a predecessor with the serial of the hit before it. By induction a hit stands for the very
/// same tokens from the first one on, whatever collides or is forged.
///
/// A published block without users stays in the pool's free queues, at a level above blocks without contents, and
/// leaves them when it is hit. Nothing is ever scanned. eviction_policy.hpp decides on the order.
///
/// Metadata per cached block of 16 tokens: 109 bytes here, 8 + 11 in the pool.

#include <bifolio/block_pool.hpp>
#include <bifolio/content_key.hpp>
#include <bifolio/detail/prefetch.hpp>
#include <bifolio/detail/prefix_index.hpp>
#include <bifolio/error.hpp>
#include <bifolio/eviction_policy.hpp>
#include <bifolio/export.hpp>
#include <bifolio/layer_groups.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/stats.hpp>
#include <bifolio/types.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bifolio::inline v0_2 {

/// What happened to the set of cached blocks; replaying all events in order rebuilds it.
struct cache_event {
  enum class kind : std::uint8_t { stored, removed, cleared };
  kind what = kind::stored;
  block_id block = invalid_block;  ///< invalid for `cleared`
  content_key key{};
  content_key parent{};  ///< of `stored` only
  friend constexpr bool operator==(const cache_event&, const cache_event&) = default;
};

/// Told of each event in the call that causes it, where `prefix_cache::drain_events` tells of all at once. `tokens` are
/// a stored block's, valid during the call, and `is_first` says that its parent is no block; of other events empty and
/// false. It must not throw, and must not call the cache or its manager.
struct cache_event_hook {
  void (*function)(void* user, const cache_event& event, std::span<const token_id> tokens, bool is_first) = nullptr;
  void* user = nullptr;
};

struct prefix_cache_config {
  std::int32_t block_size = 16;     ///< tokens, ≥ 1
  std::optional<hash_seed> seed{};  ///< default: random_hash_seed(); set it to replay recorded runs
  std::int32_t key_bits = 128;      ///< fewer only to test collisions
  bool record_events = false;       ///< see `drain_events`
  bool record_tokens = false;       ///< with record_events: also `stored_contents`, 4 bytes a token
  cache_event_hook hook{};
  const eviction_policy* policy = nullptr;  ///< borrowed; default: priority_policy()
  memory_resource* memory = nullptr;        ///< borrowed; default: default_host_memory()
  std::uint64_t first_serial = 1;           ///< of the first contents; below 2^63
};

/// The known tokens of a sequence, and everything else that their K and V depend on. Borrowed.
struct prompt_view {
  std::span<const token_id> tokens{};
  prefix_scope scope{};
  std::span<const extra_key> extras{};  ///< by rising position
  /// Keys of the first blocks, from `prefix_cache::append_keys`, for callers that look up more than once; else empty.
  std::span<const content_key> keys{};
  retention_hint retention{};
  cross_input cross{};  ///< for managers with cross groups
};

/// The end of a chain: the predecessor of the block that is published next.
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
  /// The block that already holds the same contents and remains the one that look-ups find; `invalid_block` when
  /// look-ups now find the published block itself.
  block_id duplicate_of = invalid_block;
};

/// What `stored` events leave out: an entry for each of them, in their order.
struct stored_contents {
  std::vector<token_id> tokens{};        ///< block_size of each
  std::vector<std::uint8_t> is_first{};  ///< 1 for a block that is the first of its scope: its parent is no block
  void clear() noexcept { tokens.clear(), is_first.clear(); }
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

  /// Appends the keys of the full blocks of `prompt.tokens` that `keys` does not have yet; `keys` holds the keys of the
  /// first blocks. Throws std::bad_alloc. Throws `error` (invalid_argument) for a salt past max_salt_bytes or extra
  /// keys past max_extras_bytes, as every function with a prompt does.
  void append_keys(const prompt_view& prompt, std::vector<content_key>& keys) const;

  /// The longest chain of cached full blocks that `prompt` begins with, at most out.size() of them. Changes nothing.
  /// Throws std::bad_alloc (only when there are extra keys or a scope).
  [[nodiscard]] prefix_match match(const prompt_view& prompt, std::span<block_id> out) const;
  /// The same, and adds a reference to each block: the caller is a user of them from here on. Counts in `stats`.
  [[nodiscard]] prefix_match match_and_pin(const prompt_view& prompt, std::span<block_id> out);
  /// Adds a reference to each of the blocks that `match` has just found.
  void pin(std::span<const block_id> hits) noexcept;
  /// Counts a look-up of which `num_hits` of `num_blocks` full blocks were found.
  void count_lookup(std::int64_t num_blocks, std::int64_t num_hits) noexcept;

  /// The key of a block of `tokens` after `after`.
  [[nodiscard]] content_key next_key(const prefix_chain& after, std::span<const token_id> tokens,
                                     extras_id extras = no_extras) const noexcept;
  /// A prefetch hint: `publish` will be called with these. Any block of the pool.
  void prefetch(block_id block, const content_key& key) const noexcept {
    detail::prefetch_to_write(&index_.of(block));
    detail::prefetch_to_write(index_.tokens(block));
    index_.prefetch_bucket_to_write(key);
    pool_->prefetch({&block, 1});
  }
  /// Registers `block`, whose slots are all computed, as the block of `tokens` after `after`; `key` is what `next_key`
  /// returns for them. `index` counts blocks from the sequence's first. A block that is registered for these contents
  /// stays so. Requires a block with a user, tokens.size() = block_size, room for an event (`reserve_events`), and an
  /// `after` that a match or publish of this cache returned.
  [[nodiscard]] publish_result publish(block_id block, const content_key& key, const prefix_chain& after,
                                       std::span<const token_id> tokens, std::int64_t index,
                                       const retention_hint& hint = {}, extras_id extras = no_extras) noexcept;

  /// The same, computing the key.
  [[nodiscard]] publish_result publish(block_id block, const prefix_chain& after, std::span<const token_id> tokens,
                                       std::int64_t index, const retention_hint& hint = {},
                                       extras_id extras = no_extras) noexcept {
    return publish(block, next_key(after, tokens, extras), after, tokens, index, hint, extras);
  }

  /// The block that is registered under `key` for `tokens` after `after`; `invalid_block` when there is none. Requires
  /// tokens.size() = block_size.
  [[nodiscard]] block_id find_block(const content_key& key, const prefix_chain& after,
                                    std::span<const token_id> tokens) const noexcept {
    return find(key, after.serial, tokens.data(), no_extras);
  }
  /// Whether look-ups find `block` for its contents. Such a block must not be written.
  [[nodiscard]] bool holds(block_id block) const noexcept { return index_.holds(block); }
  /// The end of the chain at a block that was published (also as a duplicate) and not written or released since.
  [[nodiscard]] prefix_chain chain_at(block_id block) const noexcept;
  [[nodiscard]] std::span<const token_id> tokens_of(block_id block) const noexcept;

  /// As `block_pool::allocate`; the blocks handed out are unregistered. Requires room for out.size() events.
  [[nodiscard]] alloc_status allocate(std::span<block_id> out) noexcept;
  [[nodiscard]] block_id allocate_one() noexcept;
  /// Look-ups find the block no more, and it goes to level 0. Does nothing for a block that is not registered.
  void unregister(block_id block) noexcept;

  /// Told of contents that the cache loses, whatever the reason.
  class BIFOLIO_API removal_observer {
   public:
    /// Must not call the cache. Called for each block, in the call that unregisters it.
    virtual void removed(const prefix_chain& contents) noexcept = 0;

   protected:
    ~removal_observer() = default;
  };
  /// Borrowed; null for none.
  void observe_removals(removal_observer* observer) noexcept { observer_ = observer; }
  /// Whether no cached block is in use.
  [[nodiscard]] bool is_idle() const noexcept;

  /// Unregisters every block; false, and nothing changed, while a cached block is in use.
  [[nodiscard]] bool reset();

  /// Retention hints expire by this clock, whatever its unit. Blocks whose hint is due return to normal priority; of
  /// blocks that are due at the same time the last published first, so that the tail of a sequence is still evicted
  /// before its head. Time that goes back is ignored. O(log n) per hint that expires.
  void advance_clock(std::int64_t now) noexcept;

  /// Reference-counted handles of scopes and extra keys; acquire returns one reference. Throw std::bad_alloc; a scope
  /// that would be the 2^24th in use at once throws `error` (failed_precondition).
  [[nodiscard]] scope_id acquire_scope(const prefix_scope& scope);
  void retain_scope(scope_id scope) noexcept;
  void release_scope(scope_id scope) noexcept;
  [[nodiscard]] prefix_chain root(scope_id scope) const noexcept;
  /// `extras` of one block; an empty list returns no_extras. All extra keys of a cached block are kept and compared.
  [[nodiscard]] extras_id acquire_extras(std::span<const extra_key> extras, std::int64_t first_position);
  void retain_extras(extras_id extras) noexcept;
  void release_extras(extras_id extras) noexcept;

  /// Makes room for this many more events, and for as many hints that expire. Throws std::bad_alloc.
  void reserve_events(std::int64_t num_events);
  /// Moves the events since the last call into `events` (which is cleared first): a block's `removed` comes before the
  /// `stored` that reuses it.
  void drain_events(std::vector<cache_event>& events);
  /// The same with what `record_tokens` recorded.
  void drain_events(std::vector<cache_event>& events, stored_contents& stored);
  /// All cached blocks whose predecessors are cached too, as `stored` events in the order of their publication: what a
  /// listener that missed events begins with. O(num_blocks log num_blocks). Throws std::bad_alloc.
  void list_contents(std::vector<cache_event>& events, stored_contents& stored) const;

  [[nodiscard]] const prefix_stats& stats() const noexcept { return stats_; }
  /// Scopes and extra keys with references, `default_scope` and `no_extras` not counted.
  [[nodiscard]] std::size_t num_interned() const noexcept;
  /// Bytes of metadata, the pool's not included.
  [[nodiscard]] std::size_t num_bytes() const noexcept { return index_.num_bytes(); }
  /// The first broken invariant as a sentence; empty when all hold. O(num_blocks).
  [[nodiscard]] std::string check() const;
  /// Hash of everything that later answers depend on, the pool not included.
  [[nodiscard]] std::uint64_t digest() const noexcept;

 private:
  struct expiry;
  struct interned;

  [[nodiscard]] content_key key_of_block(const prompt_view& prompt, std::size_t index, const content_key& before) const;
  [[nodiscard]] std::optional<prefix_chain> find_root(const prefix_scope& scope) const;
  [[nodiscard]] std::optional<extras_id> find_extras(std::span<const extra_key> extras,
                                                     std::int64_t first_position) const;
  [[nodiscard]] bool matches(block_id block, const content_key& key, std::uint64_t parent, const token_id* tokens,
                             extras_id extras) const noexcept;
  [[nodiscard]] block_id find(const content_key& key, std::uint64_t parent, const token_id* tokens,
                              extras_id extras) const noexcept;
  [[nodiscard]] bool is_live(const expiry& timer) const noexcept;
  /// The cached predecessor of a block that is published after `after`; `invalid_block` when there is none.
  [[nodiscard]] block_id block_at(const prefix_chain& after) const noexcept;
  void set_level(block_id block, const retention_hint& hint, std::int64_t index) noexcept;
  void remove(block_id block, removal_reason reason) noexcept;
  void record(const cache_event& event, std::span<const token_id> tokens = {}, bool is_first = false) noexcept;
  void prefetch_evictions() const noexcept;

  block_pool* pool_;
  prefix_cache_config config_;
  content_hasher hasher_;
  detail::prefix_index index_;
  bool tells_events_ = false;  // to a list, a hook or both
  std::uint64_t next_serial_ = 1;
  std::int64_t now_ = 0;
  std::unique_ptr<interned> interned_;  // scopes and extra keys
  std::vector<extras_id> extras_of_;    // [num_blocks] once any block has extra keys
  std::vector<expiry> expiries_;        // heap, earliest first
  std::vector<cache_event> events_;
  stored_contents stored_;                     // of events_, with record_tokens
  std::unique_ptr<eviction_tracker> tracker_;  // null for a policy without memory
  removal_observer* observer_ = nullptr;
  prefix_stats stats_;
};

}  // namespace bifolio::inline v0_2
