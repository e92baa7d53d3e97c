// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The state and the operations of a `kv_cache_manager`; kv_cache_manager.hpp has the contract of each public function.
///
/// Each open sequence has a record (16 bytes: all that an append in place touches), a block table (two cache lines)
/// and, with prefix caching, a publication (what is registered of it) and the tokens of its tail. These are in four
/// arrays with the same index, so that the common operations touch as few cache lines as they can.
///
/// The functions are in files by subject: manager.cpp (sequences), manager_prefix.cpp, manager_swap.cpp,
/// manager_build.cpp, manager_check.cpp. With several layer groups there is one core per group with block tables, and
/// group_manager.hpp calls the steps of each operation in all of them. Functions inline here are those whose call would
/// cost more than their work
/// (`bifolio_bench manager`).

#include <algorithm>
#include <bifolio/block_pool.hpp>
#include <bifolio/block_table.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/detail/block_chunk.hpp>
#include <bifolio/detail/prefetch.hpp>
#include <bifolio/detail/sequence.hpp>
#include <bifolio/error.hpp>
#include <bifolio/eviction_policy.hpp>
#include <bifolio/export.hpp>
#include <bifolio/kv_cache_config.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/prefix_cache.hpp>
#include <bifolio/stats.hpp>
#include <bifolio/step.hpp>
#include <bifolio/types.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace bifolio::inline v0_2::detail {

class group_manager;

/// How a core's contents are registered, with prefix caching.
enum class core_role : std::uint8_t {
  first,     ///< by the tokens of the sequence
  follower,  ///< by the contents of the first group (`group_manager`): the core itself publishes nothing
};

class BIFOLIO_API manager_core {
 public:
  explicit manager_core(const kv_cache_config& config, core_role role = core_role::first, std::uint32_t group = 0);
  manager_core(const manager_core&) = delete;
  manager_core& operator=(const manager_core&) = delete;
  ~manager_core();

  [[nodiscard]] const kv_cache_config& config() const noexcept { return config_; }
  [[nodiscard]] std::int64_t num_free_blocks() const noexcept { return pool_.num_free(); }
  [[nodiscard]] std::int64_t watermark_blocks() const noexcept { return watermark_blocks_; }
  [[nodiscard]] std::int64_t blocks_at_peak(std::int64_t num_tokens, std::int64_t step_tokens = 0) const noexcept;
  [[nodiscard]] alloc_status can_allocate(std::int64_t num_tokens, std::int64_t step_tokens = 0,
                                          std::int64_t num_promised = 0) const;

  // Sequences: manager.cpp.
  [[nodiscard]] allocate_result allocate(std::int64_t num_tokens);

  // manager_prefix.cpp
  [[nodiscard]] admission can_open(const prompt_view& prompt, std::int64_t step_tokens = 0,
                                   std::int64_t num_promised = 0) const;
  [[nodiscard]] open_result open(const prompt_view& prompt, std::int64_t num_new_tokens);

  [[nodiscard]] bool append_in_place(seq_id seq, std::int64_t num_tokens) noexcept {
    sequence* record = find_alone(seq);
    if (record == nullptr || num_tokens < 0 || num_tokens > std::int64_t{record->writable_end} - record->num_tokens)
      return false;
    record->num_tokens += static_cast<std::int32_t>(num_tokens);
    num_tokens_ += num_tokens;
    return true;
  }
  [[nodiscard]] alloc_status can_append(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead = 0) const;
  [[nodiscard]] bool has_room(seq_id seq, std::int64_t num_tokens) const noexcept {
    const sequence* record = find_alone(seq);
    return record != nullptr && num_tokens <= std::int64_t{record->writable_end} - record->num_tokens;
  }
  [[nodiscard]] bool is_at(seq_id seq, std::int64_t num_tokens, std::int64_t num_committed) const noexcept {
    const sequence* record = find(seq);
    return record != nullptr && record->num_tokens == num_tokens && record->num_committed == num_committed &&
           record->writable_end != swapped_out;
  }
  [[nodiscard]] std::int64_t blocks_to_append(seq_id seq, std::int64_t num_tokens,
                                              std::int64_t num_lookahead = 0) const;

  /// The common case of a commit: nothing is given back, nothing published. False, and nothing changed, otherwise.
  [[nodiscard]] bool commit_in_place(seq_id seq, std::int64_t num_tokens) noexcept {
    sequence* record = find_alone(seq);
    if (record == nullptr || config_.sliding_window != 0 || prefix_ || record->writable_end == swapped_out)
      return false;
    if (num_tokens < 0 || num_tokens > std::int64_t{record->num_tokens} - record->num_committed) return false;
    record->num_committed += static_cast<std::int32_t>(num_tokens);
    return true;
  }
  /// The same with tokens: one more of a block that is not full yet.
  [[nodiscard]] bool commit_in_place(seq_id seq, std::span<const token_id> tokens) noexcept {
    sequence* record = find_alone(seq);
    if (record == nullptr || config_.sliding_window != 0 || !prefix_ || tokens.size() != 1) return false;
    const std::int32_t offset = record->num_committed - publication_of(*record).num_published * config_.block_size;
    const bool is_open = publication_of(*record).num_published >= 0 && record->writable_end != swapped_out;
    if (!is_open || offset + 1 >= config_.block_size || record->num_committed >= record->num_tokens) return false;
    tail_tokens_of(*record)[offset] = tokens[0];
    ++record->num_committed;
    return true;
  }
  void commit_slowly(seq_id seq, std::int64_t num_tokens);
  void commit_slowly(seq_id seq, std::span<const token_id> tokens);
  [[nodiscard]] append_result append_slowly(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead);

  [[nodiscard]] allocate_result fork(seq_id seq);
  void truncate(seq_id seq, std::int64_t num_tokens);
  void free(seq_id seq);

  // manager_swap.cpp
  [[nodiscard]] alloc_status swap_out(std::span<const seq_id> seqs, std::vector<block_copy>& copies);
  [[nodiscard]] alloc_status swap_in(std::span<const seq_id> seqs, std::vector<block_copy>& copies);
  [[nodiscard]] std::int64_t blocks_to_swap_in(std::span<const seq_id> seqs) const;
  void forget_copies(std::span<const block_copy> swap_outs, std::span<const block_copy> swap_ins) noexcept;
  [[nodiscard]] bool is_swapped_out(seq_id seq) const { return get(seq).writable_end == swapped_out; }
  [[nodiscard]] std::int64_t num_free_host_blocks() const noexcept { return host_ ? host_->pool.num_free() : 0; }
  [[nodiscard]] fence_id open_fence();
  void retire(fence_id fence);

  [[nodiscard]] const prefix_cache* prefix() const noexcept { return prefix_.get(); }
  [[nodiscard]] bool reset_prefix_cache();
  void advance_clock(std::int64_t now) noexcept;
  void drain_events(std::vector<cache_event>& events);
  void drain_events(std::vector<cache_event>& events, stored_contents& stored);

  [[nodiscard]] bool contains(seq_id seq) const noexcept { return find(seq) != nullptr; }
  [[nodiscard]] std::int64_t num_tokens(seq_id seq) const { return get(seq).num_tokens; }
  [[nodiscard]] std::int64_t num_committed(seq_id seq) const { return get(seq).num_committed; }
  [[nodiscard]] std::int64_t num_table_blocks(seq_id seq) const { return table_of(get(seq)).size(); }
  [[nodiscard]] std::int64_t num_released_blocks(seq_id seq) const { return table_of(get(seq)).first(); }
  [[nodiscard]] block_id block_at(seq_id seq, std::int64_t index) const;
  [[nodiscard]] slot_id slot_at(seq_id seq, std::int64_t position) const;

  void build(step_batch& batch, const step_plan& plan) const;
  void reserve_host_memory(std::span<const host_demand> demands, std::int64_t num_more_chunks = 0);

  void prefetch(seq_id seq) const noexcept {
    const auto index = static_cast<std::uint32_t>(to_index(seq));
    if (index >= num_records_) return;
    prefetch_to_write(&records_[index]);
    prefetch_to_write(&tables_[index]);
    prefetch_to_write(reinterpret_cast<const char*>(&tables_[index]) + 64);
  }
  [[nodiscard]] cache_stats stats() const noexcept;
  [[nodiscard]] const block_pool& pool() const noexcept { return pool_; }
  [[nodiscard]] std::string check() const;
  [[nodiscard]] std::uint64_t digest() const noexcept;

 private:
  friend class group_manager;

  /// As `find`, for functions that change this core alone: null when there are other groups, which takes no branch of
  /// its own.
  [[nodiscard]] sequence* find_alone(seq_id seq) const noexcept {
    const auto index = static_cast<std::uint32_t>(to_index(seq));
    if (index >= num_lone_records_) return nullptr;
    sequence& record = records_[index];
    return record.generation == to_index(seq) >> 32 && (record.generation & 1) != 0 ? &record : nullptr;
  }
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
  /// Call this when an entry of the record's table was changed or dropped; appending changes none.
  void note_table_change(const sequence& record) noexcept {
    table_changes_[static_cast<std::size_t>(&record - records_)] = ++last_change_;
  }
  /// A sequence that is not swapped out.
  [[nodiscard]] sequence& get_resident(seq_id seq) const {
    sequence& record = get(seq);
    if (record.writable_end == swapped_out) [[unlikely]]
      throw_swapped_out(seq);
    return record;
  }
  [[noreturn]] void throw_not_found(seq_id seq) const;
  [[noreturn]] static void throw_swapped_out(seq_id seq);

  /// What an append takes.
  struct growth {
    std::int32_t table_size;  ///< afterwards
    std::int64_t num_blocks;  ///< new ones, the copy included
    bool copies_tail;
    bool unregisters_tail;  ///< there is no block to copy a published tail to
    alloc_status status;
  };
  [[nodiscard]] growth plan_growth(const sequence& record, std::int64_t num_tokens, std::int64_t num_lookahead) const;

  // The steps of the calls above: those that answer or make room, and may throw, and then those that change the state.
  void reserve_allocate(std::int32_t size);
  seq_id open_with_slots(std::int64_t num_tokens, std::int32_t size) noexcept;
  void reserve_append(const sequence& record, const growth& grown);
  block_copy grow(sequence& record, const growth& grown, std::int64_t num_tokens) noexcept;
  void reserve_fork(const sequence& parent);
  seq_id fork_record(sequence& parent) noexcept;
  void prepare_truncate(const sequence& record, std::int64_t num_tokens);
  void truncate_record(sequence& record, std::int64_t num_tokens) noexcept;
  void free_record(sequence& record) noexcept;
  /// A new sequence of `num_tokens` tokens, those of `taken` computed: of its blocks the first `num_null` are null,
  /// then come those of `taken`, with a user more, and then fresh ones.
  struct shared_opening {
    std::int64_t num_tokens;
    std::int64_t num_cached_tokens;
    std::int32_t num_null;
    std::span<const block_id> taken;
    bool copies_last;  ///< the last of `taken` is copied to a fresh block
  };
  /// Room for the opening, and the scope that it takes.
  [[nodiscard]] scope_id reserve_open(const prompt_view& prompt, std::int32_t size, std::int64_t num_fresh);
  seq_id open_sharing(const shared_opening& what, block_copy& copy) noexcept;
  /// Whether the plan's rows can be built, with room for them in the batch.
  struct batch_shape {
    std::int64_t stride;
    std::int64_t num_tokens;
  };
  [[nodiscard]] batch_shape prepare_build(step_batch& batch, const step_plan& plan) const;
  void fill_batch(step_batch& batch, const step_plan& plan, const batch_shape& shape) const noexcept;
  void move_all(std::span<const seq_id> seqs, bool out, std::vector<block_copy>& copies) noexcept;
  [[nodiscard]] alloc_status move_status(std::span<const seq_id> seqs, bool out) const;
  [[nodiscard]] block_id take_block() noexcept;
  [[nodiscard]] sequence& open_record() noexcept;
  [[nodiscard]] seq_id id_of(const sequence& record) const noexcept;
  [[nodiscard]] block_table& table_of(const sequence& record) const noexcept { return tables_[&record - records_]; }
  /// writable_end of a sequence whose tail no other sequence reads.
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
  /// First logical block that tokens after the first `num_committed` attend to.
  [[nodiscard]] std::int32_t first_visible_block(std::int64_t num_committed) const noexcept;

  /// writable_end of a sequence whose table names host blocks.
  static constexpr std::int32_t swapped_out = -1;

  /// The state of publishing a sequence.
  struct publication {
    prefix_chain end;                            ///< of the last published block
    std::int32_t num_published = -1;             ///< leading blocks; -1: publishes no more
    std::int32_t num_evicted_prefix_blocks = 0;  ///< leading ones that are no longer registered
    scope_id scope = default_scope;
    retention_hint retention;
  };
  struct block_extras {
    std::int32_t index;
    extras_id extras;
  };
  /// The host's blocks, and which block of the other pool holds the same contents.
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
    std::int64_t num_idle_blocks = 0;  ///< of those that a later token attends to, free now
    prefix_chain end;                  ///< of the last hit whose tokens are all taken
    bool copies_last = false;          ///< the last hit holds the prompt's last token, which is computed again
  };
  [[nodiscard]] prefix_hits look_up(const prompt_view& prompt) const;
  void make_prefix_cache();
  void reserve_commit(const sequence& record, std::int64_t num_tokens);
  void commit_positions(sequence& record, std::int64_t num_tokens) noexcept;
  /// Gives back what no token after the first `num_committed` attends to. Blocks that hold tokens before `kept_to` go
  /// to the back of the eviction order.
  void slide(sequence& record, std::int64_t num_committed, std::int64_t kept_to) noexcept;
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
  /// Unlinks the copies of blocks that will be written again: those with positions that are not committed, or none.
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
  std::uint32_t num_lone_records_ = 0;  // num_records_, 0 when there are other groups
  core_role role_ = core_role::first;
  std::uint32_t group_ = 0;
  group_manager* groups_ = nullptr;  // that this one is the first of
  std::int32_t free_record_ = -1;    // list through num_tokens, last freed first
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

}  // namespace bifolio::inline v0_2::detail
