// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Decides which block holds which token of which sequence: allocation, growth, copy-on-write, fork, rollback, release,
/// and, if configured, what is kept for later prompts and what moves to a pool of host blocks and back.
/// The manager works on ids alone and never touches memory of the cache; `cache_engine` carries out the copies that it
/// reports.
///
/// A sequence has num_tokens positions with slots, of which the first num_committed are computed for good. Full blocks
/// are immutable; the block of the next position (the tail) is written. When the tail has other users, the next append
/// puts a fresh block in its place and reports the pair (src, dst) to copy before anything is written.
///
/// Prefix caching (prefix_cache.hpp): `open` shares the cached blocks that a prompt begins with; `commit` with tokens
/// publishes the blocks that became full. A published block is treated like a block with other users: it is never
/// written. There is one exception: when no block is left to copy it to, and one sequence alone uses it, it is
/// unregistered from the prefix cache instead.
///
/// Swapping: `swap_out` moves whole sequences to host blocks, `swap_in` back. Sequences that shared a block share its
/// copy, in both directions. A block whose copy on the other side is still there, untouched, is not copied again.
///
/// Layer groups (layer_groups.hpp): with `kv_cache_config::groups` a sequence has blocks in each of several pools, and
/// every call changes all groups or none. A state group has one block per state instead of a table: each step reads the
/// state before it and writes fresh blocks, so that a step can be undone. Snapshots for later prompts are states that
/// stay registered: where a look-up found a longer prefix in the first group than in all of them, at the last multiple
/// of snapshot_interval in a prompt and at those before it, at the last common block border of a prompt, and at the
/// last one that decoding passed. docs/layer_groups.md says which are evicted first. Blocks of windows before the same
/// places are kept as long.
///
/// Scarcity is a value: `alloc_status` says whether freeing other sequences could help (`later`) or not (`never`).
/// Wrong use throws `error`. A call that does not succeed, be it for lack of host memory, leaves `digest()` as it was.

#include <bifolio/block_pool.hpp>
#include <bifolio/content_key.hpp>
#include <bifolio/copy_audit.hpp>
#include <bifolio/detail/group_manager.hpp>
#include <bifolio/detail/manager_core.hpp>
#include <bifolio/error.hpp>
#include <bifolio/export.hpp>
#include <bifolio/kv_cache_config.hpp>
#include <bifolio/layer_groups.hpp>
#include <bifolio/prefix_cache.hpp>
#include <bifolio/stats.hpp>
#include <bifolio/step.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace bifolio::inline v0_2 {

/// Thread-safety: one thread at a time.
class BIFOLIO_API kv_cache_manager {
 public:
  /// Throws `error`: invalid_argument (a field outside its range), out_of_memory; nothing is allocated then.
  explicit kv_cache_manager(const kv_cache_config& config);
  ~kv_cache_manager();
  kv_cache_manager(const kv_cache_manager&) = delete;
  kv_cache_manager& operator=(const kv_cache_manager&) = delete;

  [[nodiscard]] const kv_cache_config& config() const noexcept { return core_.config(); }
  [[nodiscard]] std::int32_t num_groups() const noexcept { return groups_ ? groups_->num_groups() : 1; }
  [[nodiscard]] std::int64_t num_free_blocks() const noexcept { return core_.num_free_blocks(); }
  [[nodiscard]] std::int64_t watermark_blocks() const noexcept { return core_.watermark_blocks(); }
  /// The same of a layer group. These, and all functions with a `group`, throw `error`: out_of_range (no such group),
  /// invalid_argument (a group without what is asked for). Without the argument they are about the first group.
  [[nodiscard]] std::int64_t num_free_blocks(std::int32_t group) const { return pool(group).num_free(); }
  [[nodiscard]] std::int64_t watermark_blocks(std::int32_t group) const;

  /// Most blocks that a sequence of `num_tokens` holds at once when it is computed `step_tokens` at a time
  /// (0: in one go). A sliding window makes that less than all blocks of the sequence.
  [[nodiscard]] std::int64_t blocks_at_peak(std::int64_t num_tokens, std::int64_t step_tokens = 0) const noexcept {
    return core_.blocks_at_peak(num_tokens, step_tokens);
  }
  /// The same of a layer group. Of a state group, whatever the length: the state before a step, and those that a step
  /// with drafts computes. Of a cross group 0.
  [[nodiscard]] std::int64_t blocks_at_peak(std::int64_t num_tokens, std::int64_t step_tokens,
                                            std::int32_t group) const;

  /// Whether a new sequence of `num_tokens` should be admitted: `ok` when its blocks and `num_promised` other blocks
  /// (which running sequences will still need) fit besides the watermark, `never` when they cannot even in an empty
  /// pool. Throws `error` (invalid_argument): num_tokens not in 1 … max_seq_len, a negative number.
  [[nodiscard]] alloc_status can_allocate(std::int64_t num_tokens, std::int64_t step_tokens = 0,
                                          std::int64_t num_promised = 0) const {
    if (groups_) [[unlikely]]
      return groups_->can_allocate(num_tokens, step_tokens, {num_promised}, 0);
    return core_.can_allocate(num_tokens, step_tokens, num_promised);
  }
  /// The same with blocks promised in each group, and an encoder's output of so many tokens.
  [[nodiscard]] alloc_status can_allocate(std::int64_t num_tokens, std::int64_t step_tokens,
                                          const group_blocks& promised, std::int64_t num_cross_tokens = 0) const;

  /// Opens a sequence with slots for `num_tokens` positions (which are not committed yet). `later` also when
  /// max_sequences are open. Ignores the watermark: `can_allocate` decides on admission.
  /// Throws `error`: invalid_argument (num_tokens not in 1 … max_seq_len), out_of_memory.
  [[nodiscard]] allocate_result allocate(std::int64_t num_tokens) {
    if (groups_) [[unlikely]]
      return groups_->allocate(num_tokens, 0);
    return core_.allocate(num_tokens);
  }
  /// The same with an encoder's output of `num_cross_tokens` tokens (0: none), whose blocks nobody else finds.
  [[nodiscard]] allocate_result allocate(std::int64_t num_tokens, std::int64_t num_cross_tokens);

  /// As can_allocate for a sequence that `open` would open with this prompt; cached blocks that are in use cost
  /// nothing.
  [[nodiscard]] admission can_open(const prompt_view& prompt, std::int64_t step_tokens = 0,
                                   std::int64_t num_promised = 0) const {
    if (groups_) [[unlikely]]
      return groups_->can_open(prompt, step_tokens, {num_promised});
    return core_.can_open(prompt, step_tokens, num_promised);
  }
  /// The same with blocks promised in each group.
  [[nodiscard]] admission can_open(const prompt_view& prompt, std::int64_t step_tokens,
                                   const group_blocks& promised) const;

  /// Looks up how much of the prompt is cached, adds a user to those blocks, and opens a sequence with them and with
  /// slots for up to `num_new_tokens` positions after them (not past the prompt's end). At least the prompt's last
  /// token remains to be computed. Without prefix caching nothing is ever cached. Ignores the watermark. A prompt that
  /// is cached to its very end needs a block to copy the last one to; when all free blocks are hits, the whole last
  /// block is computed again. Throws `error`: invalid_argument (an empty prompt, a prompt past max_seq_len,
  /// num_new_tokens < 1, extra keys that are not in the order of their positions or past max_seq_len, a salt past
  /// max_salt_bytes, extra keys past max_extras_bytes, an encoder's output past its group's max_tokens), out_of_memory.
  ///
  /// With several groups, what is found is the longest prefix that every group has, a multiple of each one's
  /// block_size: full groups all blocks before it, window groups those that later tokens attend to, state groups a
  /// snapshot exactly there. The last block is never copied. With state groups fewer than num_new_tokens positions may
  /// get slots: the first step ends where a snapshot is to be left (`step_limit`).
  [[nodiscard]] open_result open(const prompt_view& prompt, std::int64_t num_new_tokens) {
    const open_result opened = groups_ ? groups_->open(prompt, num_new_tokens) : core_.open(prompt, num_new_tokens);
    if (opened.has_copy() && config().audit != nullptr) [[unlikely]]
      announce_copy(opened.seq, opened.num_cached_tokens, opened.copy);
    return opened;
  }
  /// As `prefix_cache::append_keys` of the first group, and with what identifies the prompt's encoder input: for
  /// callers that look up more than once. Requires prefix caching.
  void append_keys(const prompt_view& prompt, std::vector<content_key>& keys) const;

  /// Slots for `num_tokens` more positions, and capacity for `num_lookahead` more after them that later appends use up.
  /// 0 tokens with lookahead only reserve. `never`: the sequence would not fit into an empty pool. Throws `error`:
  /// not_found (unknown, stale or foreign handle), invalid_argument (a negative number, a sum past max_seq_len),
  /// out_of_memory.
  [[nodiscard]] append_result append(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead = 0) {
    if (num_lookahead == 0 && core_.append_in_place(seq, num_tokens)) [[likely]]
      return {alloc_status::ok, {}};
    const append_result grown =
        groups_ ? groups_->append(seq, num_tokens, num_lookahead) : core_.append_slowly(seq, num_tokens, num_lookahead);
    if (grown.has_copy() && config().audit != nullptr) [[unlikely]]
      announce_copy(seq, core_.num_tokens(seq) - num_tokens, grown.copy);
    return grown;
  }
  /// `append`, if that takes no block and copies none, which is the common case: capacity is there and no other
  /// sequence reads the tail. False, and nothing changed, otherwise; also for a handle that is not open.
  [[nodiscard]] bool append_in_place(seq_id seq, std::int64_t num_tokens) noexcept {
    if (core_.append_in_place(seq, num_tokens)) [[likely]]
      return true;
    return groups_ && groups_->append_in_place(seq, num_tokens);
  }

  /// What `append` would answer. Throws as it does.
  [[nodiscard]] alloc_status can_append(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead = 0) const {
    return groups_ ? groups_->can_append(seq, num_tokens, num_lookahead)
                   : core_.can_append(seq, num_tokens, num_lookahead);
  }
  /// Whether such an `append` takes no block. Any handle; false for one that is not open or swapped out.
  [[nodiscard]] bool has_room(seq_id seq, std::int64_t num_tokens) const noexcept {
    if (core_.has_room(seq, num_tokens)) [[likely]]
      return true;
    return groups_ && groups_->has_room(seq, num_tokens);
  }
  /// Whether a sequence is open, not swapped out, and has this many tokens, this many of them committed. Any handle.
  [[nodiscard]] bool is_at(seq_id seq, std::int64_t num_tokens, std::int64_t num_committed) const noexcept {
    return core_.is_at(seq, num_tokens, num_committed);
  }
  /// Blocks that such an `append` would take, a copied tail included. Throws as it does.
  [[nodiscard]] std::int64_t blocks_to_append(seq_id seq, std::int64_t num_tokens,
                                              std::int64_t num_lookahead = 0) const {
    return core_.blocks_to_append(seq, num_tokens, num_lookahead);
  }
  /// The same of a layer group; of a state group the states that the step computes.
  [[nodiscard]] std::int64_t blocks_to_append(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead,
                                              std::int32_t group) const;
  /// With state groups and prefix caching: the next step of the sequence should compute at most so many tokens, for
  /// then a snapshot is left at its end. INT64_MAX when none is wanted. Steps that go past it are right as well.
  [[nodiscard]] std::int64_t step_limit(seq_id seq) const;
  /// Appends the copy-on-write pairs of `append` calls since the last call, of a group other than the first.
  void drain_copies(std::int32_t group, std::vector<block_copy>& copies);

  /// The next `num_tokens` positions are computed and accepted. With a sliding window, blocks that no later token
  /// attends to are given back. Throws `error`: not_found, invalid_argument (negative, or past num_tokens),
  /// out_of_memory. With prefix caching, use the other form: once a sequence was committed without its tokens, no
  /// further block of it is published.
  void commit(seq_id seq, std::int64_t num_tokens) {
    if (core_.commit_in_place(seq, num_tokens)) [[likely]]
      return;
    groups_ ? groups_->commit(seq, num_tokens) : core_.commit_slowly(seq, num_tokens);
  }
  /// The same for tokens.size() positions, which hold these tokens; blocks that are full now are published.
  void commit(seq_id seq, std::span<const token_id> tokens) {
    if (core_.commit_in_place(seq, tokens)) [[likely]]
      return;
    groups_ ? groups_->commit(seq, tokens) : core_.commit_slowly(seq, tokens);
  }

  /// A second sequence with the same tokens, sharing all blocks that hold any; reserved lookahead stays with the first.
  /// Takes no block; `later` when max_sequences are open. Throws `error`: not_found, out_of_memory.
  [[nodiscard]] allocate_result fork(seq_id seq) {
    const allocate_result forked = groups_ ? groups_->fork(seq) : core_.fork(seq);
    if (config().audit != nullptr) [[unlikely]]
      audit_fork(seq, forked);
    return forked;
  }

  /// Rolls back to the first `num_tokens` positions; exactly the blocks that hold none of them are released, reserved
  /// lookahead included. After a rollback past the position where the sequence was swapped in, no further block of it
  /// is published. Throws `error`: not_found; invalid_argument (negative, past num_tokens, or further back than the
  /// sliding window kept); out_of_memory.
  ///
  /// A state cannot be rolled back. State groups keep the states after the last committed step and after each step
  /// since, and with num_draft_slots after each token of a short step; num_tokens must be one of these positions, or 0.
  void truncate(seq_id seq, std::int64_t num_tokens) {
    if (groups_) [[unlikely]] {
      groups_->truncate(seq, num_tokens);
    } else {
      core_.truncate(seq, num_tokens);
    }
    if (config().audit != nullptr) [[unlikely]]
      audit_truncate(seq);
  }

  /// Ends a sequence and releases its blocks, the last first. Throws `error` (not_found), also for a second `free`.
  void free(seq_id seq) {
    if (config().audit != nullptr) [[unlikely]]
      audit_free(seq);
    groups_ ? groups_->free(seq) : core_.free(seq);
  }

  /// Moves sequences to host blocks, all or none, and appends (device block, host block) pairs to `copies`, to be
  /// carried out before any of these device blocks is written. Reserved lookahead is dropped. Blocks with other users
  /// stay with those as well. `later`: too few host blocks are free; `never`: there are too few.
  /// A sequence that is swapped out can only be queried, freed or swapped in.
  /// Throws `error`: not_found; failed_precondition (swapped out already, given twice); out_of_memory.
  /// With several groups use the second form, which has a list for each.
  [[nodiscard]] alloc_status swap_out(std::span<const seq_id> seqs, std::vector<block_copy>& copies) {
    return swap_out(seqs, std::span(&copies, 1));
  }
  [[nodiscard]] alloc_status swap_out(std::span<const seq_id> seqs, std::span<std::vector<block_copy>> copies);
  /// The way back: appends (host block, device block) pairs, to be carried out before the sequences are computed and
  /// before the copies of the next swap_out. `later`: too few device blocks are free.
  [[nodiscard]] alloc_status swap_in(std::span<const seq_id> seqs, std::vector<block_copy>& copies) {
    return swap_in(seqs, std::span(&copies, 1));
  }
  [[nodiscard]] alloc_status swap_in(std::span<const seq_id> seqs, std::span<std::vector<block_copy>> copies);
  /// Device blocks that `swap_in` would take.
  [[nodiscard]] std::int64_t blocks_to_swap_in(std::span<const seq_id> seqs) const {
    return core_.blocks_to_swap_in(seqs);
  }
  [[nodiscard]] std::int64_t blocks_to_swap_in(std::span<const seq_id> seqs, std::int32_t group) const;
  /// Copies of earlier `swap_out` and `swap_in` calls failed: the manager no longer relies on their destinations.
  /// The caller frees the sequences that were moved. Unknown pairs are ignored.
  void forget_copies(std::span<const block_copy> swap_outs, std::span<const block_copy> swap_ins,
                     std::int32_t group = 0) noexcept;
  /// Throws `error` (not_found).
  [[nodiscard]] bool is_swapped_out(seq_id seq) const { return core_.is_swapped_out(seq); }
  [[nodiscard]] std::int64_t num_free_host_blocks() const noexcept { return core_.num_free_host_blocks(); }
  [[nodiscard]] std::int64_t num_free_host_blocks(std::int32_t group) const;

  /// For engines with steps in flight: from here on, blocks that lose their last user, on the device or the host, are
  /// not handed out until the fence has retired; see `block_pool::open_fence`. Throw as that does.
  [[nodiscard]] fence_id open_fence() { return groups_ ? groups_->open_fence() : core_.open_fence(); }
  void retire(fence_id fence) { groups_ ? groups_->retire(fence) : core_.retire(fence); }
  /// Whether blocks of any group wait for a fence.
  [[nodiscard]] bool has_fenced_blocks() const noexcept {
    return groups_ ? groups_->has_fenced_blocks() : core_.pool().num_fenced() > 0;
  }

  /// Null without prefix caching. Groups other than the first register blocks under contents of the first; their events
  /// name these as parent.
  [[nodiscard]] const prefix_cache* prefix() const noexcept { return core_.prefix(); }
  [[nodiscard]] const prefix_cache* prefix(std::int32_t group) const;
  /// Unregisters all cached blocks; false while any of them is in use. Does nothing without prefix caching.
  [[nodiscard]] bool reset_prefix_cache() {
    return groups_ ? groups_->reset_prefix_cache() : core_.reset_prefix_cache();
  }
  /// See `prefix_cache::advance_clock` and `prefix_cache::drain_events`.
  void advance_clock(std::int64_t now) noexcept { groups_ ? groups_->advance_clock(now) : core_.advance_clock(now); }
  void drain_events(std::vector<cache_event>& events) { core_.drain_events(events); }
  void drain_events(std::vector<cache_event>& events, stored_contents& stored) { core_.drain_events(events, stored); }
  void drain_events(std::vector<cache_event>& events, std::int32_t group);

  [[nodiscard]] bool contains(seq_id seq) const noexcept { return core_.contains(seq); }
  /// The following throw `error` (not_found).
  [[nodiscard]] std::int64_t num_tokens(seq_id seq) const { return core_.num_tokens(seq); }
  [[nodiscard]] std::int64_t num_committed(seq_id seq) const { return core_.num_committed(seq); }
  [[nodiscard]] std::int64_t num_table_blocks(seq_id seq) const { return core_.num_table_blocks(seq); }
  [[nodiscard]] std::int64_t num_table_blocks(seq_id seq, std::int32_t group) const;
  /// Leading logical blocks that the sliding window gave back.
  [[nodiscard]] std::int64_t num_released_blocks(seq_id seq) const { return core_.num_released_blocks(seq); }
  [[nodiscard]] std::int64_t num_released_blocks(seq_id seq, std::int32_t group) const;
  /// Blocks that a sequence holds in a group: entries of its table that are not null, or states.
  [[nodiscard]] std::int64_t num_held_blocks(seq_id seq, std::int32_t group) const;
  /// Logical block `index`; `invalid_block` when the window gave it back. out_of_range past the table. Of a sequence
  /// that is swapped out: the host block.
  [[nodiscard]] block_id block_at(seq_id seq, std::int64_t index) const { return core_.block_at(seq, index); }
  [[nodiscard]] block_id block_at(seq_id seq, std::int64_t index, std::int32_t group) const;
  /// The slot of a position's K and V; `no_slot` when the window gave it back. out_of_range past num_tokens,
  /// failed_precondition for a sequence that is swapped out.
  [[nodiscard]] slot_id slot_at(seq_id seq, std::int64_t position) const { return core_.slot_at(seq, position); }
  /// The same of a group; of a cross group `position` is one of the encoder's output.
  [[nodiscard]] slot_id slot_at(seq_id seq, std::int64_t position, std::int32_t group) const;
  /// The block of a state group with the state after the first `position` tokens; `invalid_block` when it is not kept,
  /// and for 0 tokens.
  [[nodiscard]] block_id state_at(seq_id seq, std::int64_t position, std::int32_t group) const;
  /// Tokens of the encoder's output that a sequence attends to in the cross group.
  [[nodiscard]] std::int64_t num_cross_tokens(seq_id seq) const;

  /// Flattens a plan into the arrays that kernels read: row i is plan.seqs[i], slots for its last query_len tokens of
  /// seq_len, table rows padded with config().table_padding to the stride. In a new batch the stride is the length of
  /// the longest row. In a batch that is filled again it grows by an eighth more than needed, so that most rows can
  /// stay where they are, and shrinks when less than half of it is needed. Entries of blocks that the sliding window
  /// gave back are config().table_padding as well: plan the attention with window_left = sliding_window − 1. Throws
  /// `error`: not_found; invalid_argument (query_len < 1 or > seq_len); out_of_range (seq_len past num_tokens, a slot
  /// that the window gave back); out_of_memory. `batch` is then as before.
  /// With several groups this is the first group's batch.
  void build(step_batch& batch, const step_plan& plan) const {
    core_.build(batch, plan);
    if (config().audit != nullptr) [[unlikely]]
      audit_rows(plan);
  }
  /// The batches of all groups, `others` those of groups 1, 2, …; query_start_loc is the same in all of them, and
  /// seq_lens in all but cross groups, where they are the lengths of the encoder's outputs. Only full and window groups
  /// have slots: `slot_at` has those of an encoder's output.
  /// A row of a state group has the block that the step reads (`invalid_block`: begin with the initial state), then
  /// those that it writes, padded to 2 + num_draft_slots: after the last token, or after each token of a step of up to
  /// 1 + num_draft_slots. Throws also out_of_range for tokens that are not one step of a state group.
  void build(step_batch& first, std::span<step_batch> others, const step_plan& plan) const;

  /// Makes room in the manager's own records, so that calls up to these demands cannot fail for lack of host memory.
  /// Changes no state. Throws `error`: not_found, invalid_argument, out_of_memory.
  void reserve_host_memory(std::span<const host_demand> demands) {
    groups_ ? groups_->reserve_host_memory(demands) : core_.reserve_host_memory(demands);
  }

  /// A prefetch hint: `seq` is about to be used. Any handle.
  void prefetch(seq_id seq) const noexcept { core_.prefetch(seq); }

  [[nodiscard]] cache_stats stats() const noexcept { return core_.stats(); }
  [[nodiscard]] cache_stats stats(std::int32_t group) const;
  [[nodiscard]] const block_pool& pool() const noexcept { return core_.pool(); }
  [[nodiscard]] const block_pool& pool(std::int32_t group) const;

  /// The first broken invariant as a sentence; empty when all hold. O(pool + tables).
  [[nodiscard]] std::string check() const { return groups_ ? groups_->check() : core_.check(); }
  /// Hash of everything that later answers depend on. O(pool + tables).
  [[nodiscard]] std::uint64_t digest() const noexcept { return groups_ ? groups_->digest() : core_.digest(); }

 private:
  [[nodiscard]] const detail::manager_core& core_of(std::int32_t group) const;

  // With an audit (copy_audit.hpp): what is announced, and what was due when sequences are used.
  void announce_copy(seq_id seq, std::int64_t num_tokens, const block_copy& copy) noexcept;
  [[nodiscard]] bool reads_copy(seq_id seq, const announced_copy& what) const;
  void audit_sequence(seq_id seq) const;
  void audit_rows(const step_plan& plan) const;
  void audit_fork(seq_id seq, const allocate_result& forked) const;
  void audit_truncate(seq_id seq) const;
  void audit_free(seq_id seq) const;
  [[nodiscard]] alloc_status audited_swap(copy_kind kind, std::span<const seq_id> seqs,
                                          std::span<std::vector<block_copy>> copies);
  [[nodiscard]] alloc_status swap(copy_kind kind, std::span<const seq_id> seqs,
                                  std::span<std::vector<block_copy>> copies);

  detail::manager_core core_;                      // of the first group
  std::unique_ptr<detail::group_manager> groups_;  // null with one group
};

}  // namespace bifolio::inline v0_2
