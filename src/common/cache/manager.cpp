// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <bifolio/detail/group_manager.hpp>
#include <bifolio/detail/manager_core.hpp>
#include <bifolio/kv_layout.hpp>
#include <bit>
#include <cmath>
#include <memory>

#include "common/base/refuse.hpp"
#include "common/base/require.hpp"
#include "common/base/translate.hpp"
#include "common/cache/group_config.hpp"
#include "common/cache/manager_steps.hpp"

namespace bifolio::inline v0_2::detail {
namespace {

// The first group's fields are those of the configuration, so that one group is what it is without groups.
kv_cache_config validated(kv_cache_config config) {
  if (!config.groups.empty()) {
    require_groups(config);
    const group_config& first = config.groups.front();
    config.block_size = first.block_size;
    config.num_blocks = first.num_blocks;
    config.sliding_window = first.kind == group_kind::window ? first.window : 0;
    config.num_host_blocks = first.num_host_blocks;
  }
  require_between("block_size", config.block_size, 1, std::int64_t{1} << 30);
  require_between("num_blocks", config.num_blocks, 1, max_num_blocks);
  if (!(config.watermark >= 0 && config.watermark < 1)) {
    refuse(errc::invalid_argument, "watermark ", config.watermark, " is not a fraction of at least 0 and below 1");
  }
  require_between("sliding_window", config.sliding_window, 0, std::int64_t{1} << 30);
  require_between("max_sequences", config.max_sequences, 1, std::int64_t{1} << 24);
  require_between("max_seq_len", config.max_seq_len, 1, std::int64_t{1} << 30);
  require_between("num_host_blocks", config.num_host_blocks, 0, max_num_blocks);
  if (config.prefix.enabled) require_between("prefix.key_bits", config.prefix.key_bits, 1, 128);
  if (config.memory == nullptr) config.memory = &default_host_memory();
  return config;
}

// Managers' first generations are far apart (multiples of the golden ratio), so that a handle of one is unknown to the
// others until a record was reused millions of times.
std::uint32_t next_first_generation() noexcept {
  static std::atomic<std::uint32_t> counter{0};
  return (counter.fetch_add(1, std::memory_order_relaxed) + 1) * 2654435769U;
}

}  // namespace

manager_core::manager_core(const kv_cache_config& config, core_role role, std::uint32_t group)
    : config_(translate_bad_alloc("kv_cache_manager", [&] { return validated(config); })),
      block_shift_(31 + static_cast<std::uint32_t>(std::bit_width(static_cast<std::uint32_t>(config_.block_size) - 1))),
      watermark_blocks_(
          static_cast<std::int64_t>(std::floor(config_.watermark * static_cast<double>(config_.num_blocks)))),
      pool_(config_.num_blocks, *config_.memory),
      slab_(*config_.memory),
      record_storage_(*config_.memory,
                      static_cast<std::size_t>(config_.max_sequences) * (sizeof(block_table) + sizeof(sequence)),
                      alignof(block_table)),
      num_records_(static_cast<std::uint32_t>(config_.max_sequences)),
      num_lone_records_(num_records_),
      role_(role),
      group_(group) {
  static_assert(sizeof(block_table) + sizeof(sequence) + sizeof(std::uint64_t) == 152, "kv_cache_config says so");
  // Granlund & Montgomery 1994, theorem 4.2: exact for dividends below 2^31.
  const auto divisor = static_cast<std::uint64_t>(config_.block_size);
  block_magic_ = ((std::uint64_t{1} << block_shift_) + divisor - 1) / divisor;
  first_generation_ = (config_.first_generation != 0 ? config_.first_generation : next_first_generation()) & ~1U;
  tables_ = record_storage_.as<block_table>();
  records_ = reinterpret_cast<sequence*>(tables_ + num_records_);
  for (std::uint32_t i = 0; i < num_records_; ++i) {
    std::construct_at(&tables_[i]);
    std::construct_at(&records_[i], sequence{.generation = first_generation_,
                                             .num_tokens = i + 1 < num_records_ ? static_cast<std::int32_t>(i + 1) : -1,
                                             .num_committed = 0,
                                             .writable_end = 0});
  }
  free_record_ = 0;
  static std::atomic<std::uint64_t> num_managers{0};
  last_change_ = num_managers.fetch_add(1, std::memory_order_relaxed) << 40;
  translate_bad_alloc("kv_cache_manager", [&] {
    table_changes_.resize(num_records_, 0);
    if (config_.prefix.enabled) make_prefix_cache();
    if (config_.num_host_blocks > 0) {
      host_ = std::make_unique<host_side>(config_.num_host_blocks, *config_.memory);
      host_->on_host.assign(static_cast<std::size_t>(config_.num_blocks), invalid_block);
      host_->on_device.assign(static_cast<std::size_t>(config_.num_host_blocks), invalid_block);
    }
  });
}

manager_core::~manager_core() {
  if (host_) host_->spare.drop_directory();
  for (std::uint32_t i = 0; i < num_records_; ++i) tables_[i].drop_directory();
}

std::int64_t manager_core::blocks_at_peak(std::int64_t num_tokens, std::int64_t step_tokens) const noexcept {
  const std::int64_t whole = blocks_for(num_tokens, config_.block_size);
  if (config_.sliding_window == 0) return whole;
  // Before a step is committed its tokens are cached next to the window − 1 earlier ones that the first of them attends
  // to; their first may be anywhere in a block.
  const std::int64_t step = step_tokens == 0 ? num_tokens : std::min(step_tokens, num_tokens);
  return std::min(whole, blocks_for(config_.sliding_window - 1 + step - 1, config_.block_size) + 1);
}

alloc_status manager_core::can_allocate(std::int64_t num_tokens, std::int64_t step_tokens,
                                        std::int64_t num_promised) const {
  require_between("num_tokens", num_tokens, 1, config_.max_seq_len);
  require_between("step_tokens", step_tokens, 0, INT64_MAX);
  require_between("num_promised", num_promised, 0, max_num_blocks);
  const std::int64_t needed = blocks_at_peak(num_tokens, step_tokens) + watermark_blocks_;
  if (needed > config_.num_blocks) return alloc_status::never;
  if (num_sequences_ == config_.max_sequences) return alloc_status::later;
  return needed + num_promised <= pool_.num_free() ? alloc_status::ok : alloc_status::later;
}

block_id manager_core::take_block() noexcept {
  ++num_allocated_;
  const block_id block = prefix_ ? prefix_->allocate_one() : pool_.allocate_one();
  if (host_) detach(block);
  return block;
}

seq_id manager_core::id_of(const sequence& record) const noexcept {
  return seq_id{std::uint64_t{record.generation} << 32 | static_cast<std::uint32_t>(&record - records_)};
}

sequence& manager_core::open_record() noexcept {
  sequence& record = records_[free_record_];
  free_record_ = record.num_tokens;
  ++record.generation;
  record.num_tokens = 0;
  record.num_committed = 0;
  record.writable_end = 0;
  note_table_change(record);
  ++num_sequences_;
  return record;
}

allocate_result manager_core::allocate(std::int64_t num_tokens) {
  require_between("num_tokens", num_tokens, 1, config_.max_seq_len);
  const std::int32_t size = blocks_of(num_tokens);
  if (size > config_.num_blocks) return {invalid_seq, alloc_status::never};
  if (size > pool_.num_free() || free_record_ < 0) return {invalid_seq, alloc_status::later};
  reserve_allocate(size);
  return {open_with_slots(num_tokens, size), alloc_status::ok};
}

manager_core::growth manager_core::plan_growth(const sequence& record, std::int64_t num_tokens,
                                               std::int64_t num_lookahead) const {
  const std::int64_t left = config_.max_seq_len - record.num_tokens;
  require_between("num_tokens", num_tokens, 0, left);
  require_between("num_lookahead", num_lookahead, 0, left - num_tokens);
  const block_table& table = table_of(record);
  growth result{table.size(), 0, false, false, alloc_status::ok};
  if (num_tokens + num_lookahead == 0) return result;
  result.table_size = std::max(table.size(), blocks_of(record.num_tokens + num_tokens + num_lookahead));
  result.num_blocks = result.table_size - table.size();
  if (record.writable_end == 0 && ends_in_block(record.num_tokens)) {
    const std::int32_t tail = whole_blocks(record.num_tokens);
    if (table.is_shared(tail, pool_)) {
      result.copies_tail = true;
    } else if (prefix_ && prefix_->holds(table[tail])) {
      result.unregisters_tail = result.num_blocks + 1 > pool_.num_free();
      result.copies_tail = !result.unregisters_tail;
    }
    if (result.copies_tail) ++result.num_blocks;
  }
  if (result.table_size - table.first() > config_.num_blocks) {
    result.status = alloc_status::never;
  } else if (result.num_blocks > pool_.num_free()) {
    result.status = alloc_status::later;
  }
  return result;
}

alloc_status manager_core::can_append(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead) const {
  return plan_growth(get_resident(seq), num_tokens, num_lookahead).status;
}

std::int64_t manager_core::blocks_to_append(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead) const {
  return plan_growth(get_resident(seq), num_tokens, num_lookahead).num_blocks;
}

append_result manager_core::append_slowly(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead) {
  sequence& record = get_resident(seq);
  // The second line of the table takes the id in most cases; asking for both at once waits once.
  prefetch_to_write(reinterpret_cast<const char*>(&table_of(record)) + 64);
  const growth grown = plan_growth(record, num_tokens, num_lookahead);
  if (grown.status != alloc_status::ok || num_tokens + num_lookahead == 0) return {grown.status, {}};
  reserve_append(record, grown);
  return {alloc_status::ok, grow(record, grown, num_tokens)};
}

void manager_core::commit_slowly(seq_id seq, std::int64_t num_tokens) {
  sequence& record = get_resident(seq);
  reserve_commit(record, num_tokens);
  commit_positions(record, num_tokens);
  if (prefix_ && num_tokens > 0) publication_of(record).num_published = -1;
}

void manager_core::commit_slowly(seq_id seq, std::span<const token_id> tokens) {
  sequence& record = get_resident(seq);
  const auto num_tokens = static_cast<std::int64_t>(tokens.size());
  reserve_commit(record, num_tokens);
  if (prefix_) publish_tokens(record, tokens);
  commit_positions(record, num_tokens);
}

// Refuses what is wrong, and makes room for the events and for the chunk that the window's edge may cut.
void manager_core::reserve_commit(const sequence& record, std::int64_t num_tokens) {
  require_between("num_tokens", num_tokens, 0, record.num_tokens - record.num_committed);
  const std::int64_t num_committed = record.num_committed + num_tokens;
  const std::int32_t first = first_visible_block(num_committed);
  translate_bad_alloc("commit", [&] {
    reserve_events(whole_blocks(num_committed) - whole_blocks(record.num_committed));
    if (first > table_of(record).first() && table_of(record).cuts_shared_chunk(first)) slab_.reserve(1);
  });
}

void manager_core::slide(sequence& record, std::int64_t num_committed, std::int64_t kept_to) noexcept {
  block_table& table = table_of(record);
  const std::int32_t end = first_visible_block(num_committed);
  if (end <= table.first()) return;
  num_entries_ -= end - table.first();
  const std::int32_t kept = std::min(blocks_of(kept_to), end);
  if (kept > table.first()) table.drop_front(kept, pool_, slab_, reuse_order::last);
  if (end > table.first()) table.drop_front(end, pool_, slab_, reuse_order::first);
  note_table_change(record);
}

void manager_core::commit_positions(sequence& record, std::int64_t num_tokens) noexcept {
  slide(record, record.num_committed + num_tokens, 0);
  record.num_committed += static_cast<std::int32_t>(num_tokens);
}

allocate_result manager_core::fork(seq_id seq) {
  sequence& parent = get_resident(seq);
  if (free_record_ < 0) return {invalid_seq, alloc_status::later};
  reserve_fork(parent);
  return {fork_record(parent), alloc_status::ok};
}

void manager_core::truncate(seq_id seq, std::int64_t num_tokens) {
  sequence& record = get_resident(seq);
  prefetch_to_write(reinterpret_cast<const char*>(&table_of(record)) + 64);
  prepare_truncate(record, num_tokens);
  truncate_record(record, num_tokens);
}

void manager_core::free(seq_id seq) { free_record(get(seq)); }

block_id manager_core::block_at(seq_id seq, std::int64_t index) const {
  const block_table& table = table_of(get(seq));
  if (index < 0 || index >= table.size()) {
    refuse(errc::out_of_range, "logical block ", index, " is not in a table of ", table.size(), " blocks");
  }
  return table[static_cast<std::int32_t>(index)];
}

slot_id manager_core::slot_at(seq_id seq, std::int64_t position) const {
  const sequence& record = get_resident(seq);
  if (position < 0 || position >= record.num_tokens) {
    refuse(errc::out_of_range, "position ", position, " is not in a sequence of ", record.num_tokens, " tokens");
  }
  const block_id block = table_of(record)[static_cast<std::int32_t>(position / config_.block_size)];
  if (block == invalid_block) return no_slot;
  return make_slot(block, static_cast<std::int32_t>(position % config_.block_size), config_.block_size);
}

void manager_core::reserve_host_memory(std::span<const host_demand> demands, std::int64_t num_more_chunks) {
  translate_bad_alloc("reserve_host_memory", [&] {
    std::int64_t chunks = 0;
    std::int64_t blocks = 0;  // that may be taken and published
    std::int32_t next_record = free_record_;
    for (const host_demand& demand : demands) {
      require_between("num_tokens", demand.num_tokens, 0, config_.max_seq_len);
      const std::int32_t size = blocks_of(demand.num_tokens);
      if (demand.seq != invalid_seq) {
        block_table& table = table_of(get(demand.seq));
        table.reserve(size);
        blocks += std::max<std::int64_t>(0, size - whole_blocks(get(demand.seq).num_committed)) + 2;
        // Two more: an append may copy the tail's chunk, a commit the one at the window's edge.
        chunks += std::max<std::int64_t>(0, block_table::chunks_to_grow(table.size(), size)) + 2;
      } else if (next_record >= 0) {
        tables_[next_record].reserve(size);
        next_record = records_[next_record].num_tokens;
        chunks += block_table::chunks_to_grow(0, size) + 1;
        blocks += size + 1;
      }
    }
    // Chunks are filled with blocks: beyond the partly filled ones and the copies there are never more than the pool's.
    slab_.reserve(
        std::min(chunks, config_.num_blocks / block_chunk::capacity + 3 * static_cast<std::int64_t>(demands.size())) +
        num_more_chunks);
    reserve_events(2 * blocks);
  });
}

cache_stats manager_core::stats() const noexcept {
  return {.num_blocks = pool_.num_blocks(),
          .num_free_blocks = pool_.num_free(),
          .num_used_blocks = pool_.num_used(),
          .peak_used_blocks = peak_used_,
          .num_sequences = num_sequences_,
          .num_tokens = num_tokens_,
          .num_table_entries = num_entries_,
          .num_allocated_blocks = num_allocated_,
          .num_copied_blocks = num_copied_,
          .num_forks = num_forks_,
          .num_host_blocks = config_.num_host_blocks,
          .num_free_host_blocks = num_free_host_blocks(),
          .num_swapped_sequences = host_ ? host_->num_swapped_sequences : 0,
          .num_swapped_out_blocks = host_ ? host_->num_blocks_out : 0,
          .num_swapped_in_blocks = host_ ? host_->num_blocks_in : 0};
}

void manager_core::throw_swapped_out(seq_id seq) {
  refuse(errc::failed_precondition, "sequence ", static_cast<std::uint32_t>(to_index(seq)),
         " is swapped out; swap it in before it is used");
}

void manager_core::throw_not_found(seq_id seq) const {
  const auto index = static_cast<std::uint32_t>(to_index(seq));
  const auto generation = static_cast<std::uint32_t>(to_index(seq) >> 32);
  refuse(errc::not_found, "sequence ", index, " of generation ", generation,
         " is not open in this manager: it was freed, or belongs to another one");
}

}  // namespace bifolio::inline v0_2::detail
