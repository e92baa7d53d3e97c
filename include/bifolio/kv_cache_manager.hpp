// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Decides which block holds which token of which sequence: allocation, growth, copy-on-write, fork, rollback, release,
/// and, if configured, what is kept for prompts to come and what moves to a pool of host blocks and back.
/// It works on ids alone and never touches memory of the cache; `cache_engine` carries out the copies it reports.
///
/// A sequence has num_tokens positions with slots, of which the first num_committed are computed for good. Full blocks
/// are immutable; the block of the next position (the tail) is written. When the tail has other users, the next append
/// puts a fresh block in its place and reports the pair (src, dst) to copy before anything is written.
///
/// Prefix caching (prefix_cache.hpp): `open` shares the cached blocks that a prompt begins with, `commit` with tokens
/// publishes the blocks that became full. A published block counts as one with other users: it is never written. (Only
/// where there is no block left to copy it to does a sequence that holds it alone take its name away instead.)
///
/// Swapping: `swap_out` moves whole sequences to host blocks, `swap_in` back. Sequences that shared a block share its
/// copy, in both directions; and a block whose other copy is still there, untouched, is not copied again.
///
/// Scarcity is a value: `alloc_status` says whether freeing others could help (`later`) or not (`never`). Wrong use
/// throws `error`. Any call that did not succeed, also for want of host memory, leaves `digest()` as it was.

#include <algorithm>
#include <bifolio/block_pool.hpp>
#include <bifolio/block_table.hpp>
#include <bifolio/error.hpp>
#include <bifolio/export.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/prefix_cache.hpp>
#include <bifolio/sequence.hpp>
#include <bifolio/stats.hpp>
#include <bifolio/step.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace bifolio {

struct prefix_caching_options {
  bool enabled = false;
  std::optional<hash_seed> seed{};          ///< default: a random one; set it to replay recorded plans
  std::int32_t key_bits = 128;              ///< fewer only to test collisions
  bool record_events = false;               ///< for `drain_events`
  const eviction_policy* policy = nullptr;  ///< borrowed; default: priority_policy()
  /// A block that turns out to hold what another one holds already gives way to it in its sequence's table. Off, tables
  /// only ever grow at their end.
  bool deduplicate = false;
};

struct kv_cache_config {
  std::int32_t block_size = 16;     ///< tokens, ≥ 1
  std::int64_t num_blocks = 0;      ///< 1 … max_num_blocks; see num_blocks_for_memory (cache_engine.hpp)
  double watermark = 0.01;          ///< fraction of the blocks that admission leaves free for growth, in [0, 1)
  std::int32_t sliding_window = 0;  ///< tokens that a token sees, itself included; 0 = all
  /// Open at once, 1 … 2^24; 152 bytes each, with prefix caching 56 + 4 · block_size more.
  std::int32_t max_sequences = 1024;
  std::int32_t max_seq_len = 1 << 20;  ///< tokens of one sequence, 1 … 2^30
  /// Written to table entries that no kernel reads: right of the length, and left of the sliding window.
  std::int32_t table_padding = padding_entry;
  /// Generation of the first handle; two managers with different numbers do not take each other's handles for their
  /// own. 0: a number that no other manager of the process has. Set it to replay recorded plans.
  std::uint32_t first_generation = 0;
  prefix_caching_options prefix{};
  std::int64_t num_host_blocks = 0;   ///< for sequences swapped out, 0 … max_num_blocks
  memory_resource* memory = nullptr;  ///< for records and tables, borrowed; default: default_host_memory()
};

struct allocate_result {
  seq_id seq = invalid_seq;  ///< valid if ok
  alloc_status status = alloc_status::later;
};

struct append_result {
  alloc_status status = alloc_status::later;
  block_copy copy{};  ///< to be carried out before the new slots are written; src is invalid_block when there is none
  [[nodiscard]] bool has_copy() const noexcept { return copy.src != invalid_block; }
};

struct open_result {
  seq_id seq = invalid_seq;  ///< valid if ok
  alloc_status status = alloc_status::later;
  std::int64_t num_cached_tokens = 0;  ///< leading tokens that are there already, committed; < the prompt's length
  block_copy copy{};  ///< as in `append_result`: a prompt cached to its very end shares all blocks but the last
  [[nodiscard]] bool has_copy() const noexcept { return copy.src != invalid_block; }
};

struct admission {
  alloc_status status = alloc_status::later;
  std::int64_t num_cached_tokens = 0;
};

/// What is about to be asked of a manager; see `reserve_host_memory`.
struct host_demand {
  seq_id seq = invalid_seq;     ///< an open sequence, or invalid_seq for one that allocate or fork will open
  std::int64_t num_tokens = 0;  ///< its tokens after that, lookahead included
};

/// Thread-safety: one thread at a time.
class BIFOLIO_API kv_cache_manager {
 public:
  /// Throws `error`: invalid_argument (a field outside its range), out_of_memory; nothing is allocated then.
  explicit kv_cache_manager(const kv_cache_config& config);
  kv_cache_manager(const kv_cache_manager&) = delete;
  kv_cache_manager& operator=(const kv_cache_manager&) = delete;
  ~kv_cache_manager();

  [[nodiscard]] const kv_cache_config& config() const noexcept { return config_; }
  [[nodiscard]] std::int64_t num_free_blocks() const noexcept { return pool_.num_free(); }
  [[nodiscard]] std::int64_t watermark_blocks() const noexcept { return watermark_blocks_; }

  /// Most blocks that a sequence of `num_tokens` holds at once when it is computed `step_tokens` at a time
  /// (0: in one go); a sliding window makes that less than the whole.
  [[nodiscard]] std::int64_t blocks_at_peak(std::int64_t num_tokens, std::int64_t step_tokens = 0) const noexcept;

  /// Whether a new sequence of `num_tokens` should be admitted: `ok` when its blocks and `num_promised` others (which
  /// running sequences will still ask for) fit beside the watermark, `never` when they cannot even in an empty pool.
  /// Throws `error` (invalid_argument): num_tokens not in 1 … max_seq_len, a negative number.
  [[nodiscard]] alloc_status can_allocate(std::int64_t num_tokens, std::int64_t step_tokens = 0,
                                          std::int64_t num_promised = 0) const;

  /// Opens a sequence with slots for `num_tokens` positions (which are not committed yet). `later` also when
  /// max_sequences are open. Ignores the watermark: admission is asked of `can_allocate`.
  /// Throws `error`: invalid_argument (num_tokens not in 1 … max_seq_len), out_of_memory.
  [[nodiscard]] allocate_result allocate(std::int64_t num_tokens);

  /// As can_allocate for a sequence that `open` would open with this prompt; cached blocks that are in use cost
  /// nothing.
  [[nodiscard]] admission can_open(const prompt_view& prompt, std::int64_t step_tokens = 0,
                                   std::int64_t num_promised = 0) const;

  /// Looks up how much of the prompt is cached, takes it, and opens a sequence with it and with slots for up to
  /// `num_new_tokens` positions behind it (not past the prompt's end). At least the prompt's last token remains to be
  /// computed. Without prefix caching nothing is ever cached. Ignores the watermark. A prompt that is cached to its
  /// very end needs a block to copy the last one to; when all free blocks are hits, the last one is computed as a
  /// whole. Throws `error`: invalid_argument (an empty prompt, one past max_seq_len, num_new_tokens < 1, extra keys
  /// that are not in the order of their positions or past max_seq_len, a salt past max_salt_bytes, extra keys past
  /// max_extras_bytes), out_of_memory.
  [[nodiscard]] open_result open(const prompt_view& prompt, std::int64_t num_new_tokens);

  /// Slots for `num_tokens` more positions, and capacity for `num_lookahead` more behind them that later appends use
  /// up. 0 tokens with lookahead only reserve. `never`: the sequence would not fit into an empty pool. Throws `error`:
  /// not_found (unknown, stale or foreign handle), invalid_argument (a negative number, a sum past max_seq_len),
  /// out_of_memory.
  [[nodiscard]] append_result append(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead = 0) {
    if (num_lookahead == 0 && append_in_place(seq, num_tokens)) [[likely]]
      return {alloc_status::ok, {}};
    return append_slowly(seq, num_tokens, num_lookahead);
  }
  /// `append`, if that takes no block and copies none, the common case: capacity is there and nobody else reads the
  /// tail. False, and nothing changed, otherwise; also for a handle that is not open.
  [[nodiscard]] bool append_in_place(seq_id seq, std::int64_t num_tokens) noexcept {
    sequence* record = find(seq);
    if (record == nullptr || num_tokens < 0 || num_tokens > std::int64_t{record->writable_end} - record->num_tokens)
      return false;
    record->num_tokens += static_cast<std::int32_t>(num_tokens);
    num_tokens_ += num_tokens;
    return true;
  }

  /// What `append` would answer. Throws as it does.
  [[nodiscard]] alloc_status can_append(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead = 0) const;

  /// Whether such an `append` takes no block. Any handle; false for one that is not open or swapped out.
  [[nodiscard]] bool has_room(seq_id seq, std::int64_t num_tokens) const noexcept {
    const sequence* record = find(seq);
    return record != nullptr && num_tokens <= std::int64_t{record->writable_end} - record->num_tokens;
  }
  /// Whether a sequence is open, not swapped out, and has this many tokens, this many of them committed. Any handle.
  [[nodiscard]] bool is_at(seq_id seq, std::int64_t num_tokens, std::int64_t num_committed) const noexcept {
    const sequence* record = find(seq);
    return record != nullptr && record->num_tokens == num_tokens && record->num_committed == num_committed &&
           record->writable_end != swapped_out;
  }
  /// Blocks that such an `append` would take, a copied tail included. Throws as it does.
  [[nodiscard]] std::int64_t blocks_to_append(seq_id seq, std::int64_t num_tokens,
                                              std::int64_t num_lookahead = 0) const;

  /// The next `num_tokens` positions are computed and accepted. With a sliding window, blocks that no later token can
  /// see are given back. Throws `error`: not_found, invalid_argument (negative, or past num_tokens), out_of_memory.
  /// With prefix caching, use the other form: a sequence that was once committed without its tokens is published no
  /// further.
  void commit(seq_id seq, std::int64_t num_tokens) {
    // The common case: nothing is given back, nothing published.
    if (sequence* record = find(seq); record != nullptr && config_.sliding_window == 0 && !prefix_ &&
                                      record->writable_end != swapped_out) [[likely]] {
      if (num_tokens >= 0 && num_tokens <= std::int64_t{record->num_tokens} - record->num_committed) [[likely]] {
        record->num_committed += static_cast<std::int32_t>(num_tokens);
        return;
      }
    }
    commit_slowly(seq, num_tokens);
  }
  /// The same for tokens.size() positions, which hold these tokens; blocks that are full now are published.
  void commit(seq_id seq, std::span<const token_id> tokens) {
    // The common case: one more token of a block that is not full yet.
    if (sequence* record = find(seq); record != nullptr && config_.sliding_window == 0 && prefix_ && tokens.size() == 1)
        [[likely]] {
      const std::int32_t offset = record->num_committed - publication_of(*record).num_published * config_.block_size;
      const bool is_open = publication_of(*record).num_published >= 0 && record->writable_end != swapped_out;
      if (is_open && offset + 1 < config_.block_size && record->num_committed < record->num_tokens) [[likely]] {
        tail_tokens_of(*record)[offset] = tokens[0];
        ++record->num_committed;
        return;
      }
    }
    commit_slowly(seq, tokens);
  }

  /// A second sequence with the same tokens, sharing all blocks that hold any; reserved lookahead stays with the first.
  /// Takes no block; `later` when max_sequences are open. Throws `error`: not_found, out_of_memory.
  [[nodiscard]] allocate_result fork(seq_id seq);

  /// Rolls back to the first `num_tokens` positions; exactly the blocks that hold none of them are released, reserved
  /// lookahead included. A sequence that goes back behind the place where it was swapped in is published no further.
  /// Throws `error`: not_found; invalid_argument (negative, past num_tokens, or further back than the sliding window
  /// kept); out_of_memory.
  void truncate(seq_id seq, std::int64_t num_tokens);

  /// Ends a sequence and releases its blocks, the last first. Throws `error` (not_found), also for a second `free`.
  void free(seq_id seq);

  /// Moves sequences to host blocks, all or none, and appends (device block, host block) pairs to `copies`, to be
  /// carried out before anything of the device's blocks is written. Reserved lookahead is dropped. Blocks that others
  /// use too stay with those. `later`: too few host blocks are free; `never`: there are too few.
  /// A sequence that is swapped out can only be asked, freed or swapped in.
  /// Throws `error`: not_found; failed_precondition (swapped out already, given twice); out_of_memory.
  [[nodiscard]] alloc_status swap_out(std::span<const seq_id> seqs, std::vector<block_copy>& copies);
  /// The way back: appends (host block, device block) pairs, to be carried out before the sequences are computed and
  /// before the next swap_out is. `later`: too few device blocks are free.
  [[nodiscard]] alloc_status swap_in(std::span<const seq_id> seqs, std::vector<block_copy>& copies);
  /// Device blocks that `swap_in` would take.
  [[nodiscard]] std::int64_t blocks_to_swap_in(std::span<const seq_id> seqs) const;
  /// Copies of earlier `swap_out` and `swap_in` calls failed: nothing is going to rely on their destinations any more.
  /// The sequences that were moved are the caller's to free. Pairs that are not known (any more) are passed over.
  void forget_copies(std::span<const block_copy> swap_outs, std::span<const block_copy> swap_ins) noexcept;
  [[nodiscard]] bool is_swapped_out(seq_id seq) const { return get(seq).writable_end == swapped_out; }
  [[nodiscard]] std::int64_t num_free_host_blocks() const noexcept { return host_ ? host_->pool.num_free() : 0; }

  /// For engines with steps in flight: from here on, blocks that lose their last user, on either side, are not handed
  /// out until the fence has retired; see `block_pool::open_fence`. Throw as that does.
  [[nodiscard]] fence_id open_fence();
  void retire(fence_id fence);

  /// Null without prefix caching.
  [[nodiscard]] const prefix_cache* prefix() const noexcept { return prefix_.get(); }
  /// Forgets all cached contents; false while any of it is in use. Without prefix caching there is nothing to forget.
  [[nodiscard]] bool reset_prefix_cache();
  void advance_clock(std::int64_t now) noexcept;
  /// See `prefix_cache::drain_events`.
  void drain_events(std::vector<cache_event>& events);

  [[nodiscard]] bool contains(seq_id seq) const noexcept { return find(seq) != nullptr; }
  /// The following throw `error` (not_found).
  [[nodiscard]] std::int64_t num_tokens(seq_id seq) const { return get(seq).num_tokens; }
  [[nodiscard]] std::int64_t num_committed(seq_id seq) const { return get(seq).num_committed; }
  [[nodiscard]] std::int64_t num_table_blocks(seq_id seq) const { return table_of(get(seq)).size(); }
  /// Leading logical blocks that the sliding window gave back.
  [[nodiscard]] std::int64_t num_released_blocks(seq_id seq) const { return table_of(get(seq)).first(); }
  /// Logical block `index`; `invalid_block` when the window gave it back. out_of_range past the table. Of a sequence
  /// that is swapped out: the host block.
  [[nodiscard]] block_id block_at(seq_id seq, std::int64_t index) const;
  /// Where a position's K and V lie; `no_slot` when the window gave it back. out_of_range past num_tokens,
  /// failed_precondition for a sequence that is swapped out.
  [[nodiscard]] slot_id slot_at(seq_id seq, std::int64_t position) const;

  /// Flattens a plan into the arrays that kernels read: row i is plan.seqs[i], slots for its last query_len tokens of
  /// seq_len, table rows padded with config().table_padding to the stride. That is the longest row's length in a new
  /// batch; in one that is filled again it grows by an eighth more than is needed, so that the rows can mostly stay
  /// where they are, and shrinks when less than half of it is needed. Entries of blocks that the sliding window gave
  /// back are config().table_padding as well: plan the attention with window_left = sliding_window − 1. Throws `error`:
  /// not_found; invalid_argument (query_len < 1 or > seq_len); out_of_range (seq_len past num_tokens, a slot that the
  /// window gave back); out_of_memory. `batch` is then as before.
  void build(step_batch& batch, const step_plan& plan) const;

  /// Makes room in the manager's own records, so that calls up to these demands cannot fail for host memory.
  /// Changes no state. Throws `error`: not_found, invalid_argument, out_of_memory.
  void reserve_host_memory(std::span<const host_demand> demands);

  /// A hint that `seq` is about to be used: its record is on its way to the cache when it is. Any handle.
  void prefetch(seq_id seq) const noexcept {
    const auto index = static_cast<std::uint32_t>(to_index(seq));
    if (index >= num_records_) return;
    detail::prefetch_to_write(&records_[index]);
    detail::prefetch_to_write(&tables_[index]);
    detail::prefetch_to_write(reinterpret_cast<const char*>(&tables_[index]) + 64);
  }

  [[nodiscard]] cache_stats stats() const noexcept;
  [[nodiscard]] const block_pool& pool() const noexcept { return pool_; }

  /// The first broken invariant as a sentence; empty when all hold. O(pool + tables).
  [[nodiscard]] std::string check() const;
  /// Hash of everything that later answers depend on. O(pool + tables).
  [[nodiscard]] std::uint64_t digest() const noexcept;

 private:
  [[nodiscard]] sequence* find(seq_id seq) const noexcept {
    const auto index = static_cast<std::uint32_t>(to_index(seq));
    if (index >= num_records_) return nullptr;
    sequence& record = records_[index];
    return record.generation == to_index(seq) >> 32 && (record.generation & 1) != 0 ? &record : nullptr;
  }
  [[nodiscard]] sequence& get(seq_id seq) const {
    if (sequence* record = find(seq)) [[likely]]
      return *record;
    throw_not_found(seq);
  }
  /// To be called when an entry of its table was changed, or entries were dropped; appending changes none.
  void note_table_change(const sequence& record) noexcept {
    table_changes_[static_cast<std::size_t>(&record - records_)] = ++last_change_;
  }
  /// One that is not swapped out.
  [[nodiscard]] sequence& get_resident(seq_id seq) const {
    sequence& record = get(seq);
    if (record.writable_end == swapped_out) [[unlikely]]
      throw_swapped_out(seq);
    return record;
  }
  [[noreturn]] void throw_not_found(seq_id seq) const;
  [[noreturn]] static void throw_swapped_out(seq_id seq);
  void commit_slowly(seq_id seq, std::int64_t num_tokens);
  void commit_slowly(seq_id seq, std::span<const token_id> tokens);
  [[nodiscard]] append_result append_slowly(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead);

  /// What an append takes.
  struct growth {
    std::int32_t table_size;  ///< afterwards
    std::int64_t num_blocks;  ///< new ones, the copy included
    bool copies_tail;
    bool unregisters_tail;  ///< there is no block to copy a published tail to
    alloc_status status;
  };
  [[nodiscard]] growth plan_growth(const sequence& record, std::int64_t num_tokens, std::int64_t num_lookahead) const;
  [[nodiscard]] block_id take_block() noexcept;
  [[nodiscard]] sequence& open_record() noexcept;
  [[nodiscard]] seq_id id_of(const sequence& record) const noexcept;
  [[nodiscard]] block_table& table_of(const sequence& record) const noexcept { return tables_[&record - records_]; }
  /// writable_end of a sequence whose tail nobody else reads.
  [[nodiscard]] std::int32_t end_of(const block_table& table) const noexcept {
    return static_cast<std::int32_t>(
        std::min<std::int64_t>(std::int64_t{table.size()} * config_.block_size, config_.max_seq_len));
  }
  /// num_tokens / block_size and its round-up, for 0 ≤ num_tokens ≤ 2^30. A division by a number that is not known at
  /// compile time costs more than the rest of an append.
  [[nodiscard]] std::int32_t whole_blocks(std::int64_t num_tokens) const noexcept {
    return static_cast<std::int32_t>(static_cast<std::uint64_t>(num_tokens) * block_magic_ >> block_shift_);
  }
  [[nodiscard]] std::int32_t blocks_of(std::int64_t num_tokens) const noexcept {
    return whole_blocks(num_tokens + config_.block_size - 1);
  }
  [[nodiscard]] bool ends_in_block(std::int64_t num_tokens) const noexcept {
    return std::int64_t{whole_blocks(num_tokens)} * config_.block_size != num_tokens;
  }
  /// First logical block that tokens after `num_committed` can see.
  [[nodiscard]] std::int32_t first_visible_block(std::int64_t num_committed) const noexcept;

  /// writable_end of a sequence whose table names host blocks.
  static constexpr std::int32_t swapped_out = -1;

  /// What publishing needs to know of a sequence; in an array of its own, for sequences in the order of their records.
  struct publication {
    prefix_chain end;                            ///< of the last published block
    std::int32_t num_published = -1;             ///< leading blocks; -1: publishes no more
    std::int32_t num_evicted_prefix_blocks = 0;  ///< leading ones whose contents no longer stand in the prefix cache
    scope_id scope = default_scope;
    retention_hint retention;
  };
  struct block_extras {
    std::int32_t index;
    extras_id extras;
  };
  /// The host's blocks, and which block of the other pool holds the same.
  struct host_side {
    host_side(std::int64_t num_host_blocks, memory_resource& memory) : pool(num_host_blocks, memory) {}
    block_pool pool;
    std::vector<block_id> on_host;          // [num_blocks], host block with the same contents, or invalid
    std::vector<block_id> on_device;        // [num_host_blocks], and back
    mutable std::vector<block_id> touched;  // scratch
    block_table spare;                      // swapped with the table that moves
    std::int64_t num_swapped_sequences = 0;
    std::int64_t num_blocks_out = 0;
    std::int64_t num_blocks_in = 0;
  };

  [[nodiscard]] publication& publication_of(const sequence& record) const noexcept {
    return publications_[static_cast<std::size_t>(&record - records_)];
  }
  /// Committed tokens of the block that is not full yet. [block_size]
  [[nodiscard]] token_id* tail_tokens_of(const sequence& record) const noexcept {
    return tail_tokens_ + (&record - records_) * std::ptrdiff_t{config_.block_size};
  }
  struct prefix_hits {
    std::int64_t num_blocks = 0;       ///< of hits_
    std::int64_t num_tokens = 0;       ///< that need not be computed
    std::int64_t num_idle_blocks = 0;  ///< of those that a later token sees, free now
    prefix_chain end;                  ///< of the last hit whose tokens are all taken
    bool copies_last = false;          ///< the last hit holds the prompt's last token, which is computed again
  };
  [[nodiscard]] prefix_hits look_up(const prompt_view& prompt) const;
  void make_prefix_cache();
  void reserve_commit(const sequence& record, std::int64_t num_tokens);
  void commit_positions(sequence& record, std::int64_t num_tokens) noexcept;
  void start_publication(const sequence& record, const prompt_view& prompt, const prefix_hits& hits,
                         scope_id scope) noexcept;
  void publish_tokens(sequence& record, std::span<const token_id> tokens) noexcept;
  void publish_blocks(sequence& record, std::span<const token_id> tokens) noexcept;
  void rewind_publication(sequence& record) noexcept;
  void reserve_fork_publication(const sequence& parent, const sequence& child);
  void fork_publication(const sequence& parent, const sequence& child) noexcept;
  [[nodiscard]] std::vector<block_extras> acquire_block_extras(const prompt_view& prompt);
  void release_block_extras(std::span<const block_extras> extras) noexcept;
  void end_publication(const sequence& record) noexcept;
  void reserve_events(std::int64_t num_events);
  [[nodiscard]] std::string check_publications() const;
  [[nodiscard]] std::string check_host(std::span<const std::uint32_t> refs, std::int64_t num_swapped) const;
  [[nodiscard]] std::span<const block_extras> extras_of(const sequence& record) const noexcept;
  [[nodiscard]] extras_id extras_at(const sequence& record, std::int32_t index) const noexcept;
  void require_swappable(std::span<const seq_id> seqs, bool out) const;
  /// Blocks of the other pool that moving `seqs` takes off its free ones.
  [[nodiscard]] std::int64_t blocks_to_move(std::span<const seq_id> seqs, bool out) const;
  void reserve_move(std::span<const seq_id> seqs, std::vector<block_copy>& copies);
  void move_table(sequence& record, bool out, std::vector<block_copy>& copies) noexcept;
  [[nodiscard]] block_id take_host_block() noexcept;
  void detach(block_id block) noexcept;
  /// Ends what links copies of blocks that will be written again: those with positions that are not committed, or none.
  void detach_unfinished(std::span<const seq_id> seqs, bool out) noexcept;

  kv_cache_config config_;
  std::uint64_t block_magic_ = 0;
  std::uint32_t block_shift_ = 0;
  std::int64_t watermark_blocks_ = 0;
  block_pool pool_;
  block_chunk_slab slab_;
  buffer record_storage_;
  sequence* records_ = nullptr;               // [num_records_]
  block_table* tables_ = nullptr;             // [num_records_], of the record with the same index
  std::vector<std::uint64_t> table_changes_;  // [num_records_], number of the last one that was not an append
  std::uint64_t last_change_ = 0;             // managers count from numbers that lie far apart
  std::uint32_t num_records_ = 0;
  std::int32_t free_record_ = -1;  // list through num_tokens, last freed first
  std::uint32_t first_generation_ = 0;
  std::int64_t num_sequences_ = 0;
  std::int64_t num_tokens_ = 0;
  std::int64_t num_entries_ = 0;
  std::int64_t peak_used_ = 0;
  std::int64_t num_allocated_ = 0;
  std::int64_t num_copied_ = 0;
  std::int64_t num_forks_ = 0;

  std::unique_ptr<prefix_cache> prefix_;
  buffer publication_storage_;
  publication* publications_ = nullptr;                                  // [num_records_]
  token_id* tail_tokens_ = nullptr;                                      // [num_records_, block_size]
  std::unordered_map<std::uint32_t, std::vector<block_extras>> extras_;  // of the records that have any, by block
  mutable std::vector<block_id> hits_;                                   // scratch of look_up
  std::unique_ptr<host_side> host_;
};

}  // namespace bifolio
