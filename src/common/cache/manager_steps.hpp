// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The steps of manager_core's operations that a group_manager calls as well: first those that answer or make room, and
/// may throw, then those that change the state. They are inline because the functions of one group are made of them,
/// where a call costs up to a fifth (`bifolio_bench manager`).

#include <algorithm>
#include <bifolio/detail/manager_core.hpp>

#include "common/base/make_room.hpp"
#include "common/base/refuse.hpp"
#include "common/base/require.hpp"
#include "common/base/translate.hpp"

namespace bifolio::inline v0_2::detail {

[[gnu::always_inline]] inline std::int32_t manager_core::first_visible_block(
    std::int64_t num_committed) const noexcept {
  if (config_.sliding_window == 0) return 0;
  const std::int64_t position = std::max<std::int64_t>(0, num_committed - config_.sliding_window + 1);
  return whole_blocks(position);
}

[[gnu::always_inline]] inline void manager_core::reserve_allocate(std::int32_t size) {
  translate_bad_alloc("allocate", [&] {
    tables_[free_record_].reserve(size);
    slab_.reserve(block_table::chunks_to_grow(0, size));
    reserve_events(size);
  });
}

[[gnu::always_inline]] inline seq_id manager_core::open_with_slots(std::int64_t num_tokens,
                                                                   std::int32_t size) noexcept {
  sequence& record = open_record();
  block_table& table = table_of(record);
  for (std::int32_t i = 0; i < size; ++i) table.push_back(take_block(), slab_);
  record.num_tokens = static_cast<std::int32_t>(num_tokens);
  record.writable_end = end_of(table);
  if (publications_ != nullptr) publication_of(record) = {prefix_->root(default_scope), 0, 0, default_scope, {}};
  num_tokens_ += num_tokens;
  num_entries_ += size;
  peak_used_ = std::max(peak_used_, pool_.num_used());
  return id_of(record);
}

[[gnu::always_inline]] inline void manager_core::reserve_append(const sequence& record, const growth& grown) {
  block_table& table = table_of(record);
  translate_bad_alloc("append", [&] {
    table.reserve(grown.table_size);
    slab_.reserve(block_table::chunks_to_grow(table.size(), grown.table_size) +
                  (grown.copies_tail && table.cuts_shared_chunk(whole_blocks(record.num_tokens)) ? 1 : 0));
    reserve_events(grown.num_blocks + 1);
  });
}

[[gnu::always_inline]] inline block_copy manager_core::grow(sequence& record, const growth& grown,
                                                            std::int64_t num_tokens) noexcept {
  block_table& table = table_of(record);
  const std::int32_t tail = whole_blocks(record.num_tokens);
  block_copy copy;
  if (grown.unregisters_tail) prefix_->unregister(table[tail]);
  if (grown.copies_tail) {
    copy = {table[tail], take_block()};
    table.replace(tail, copy.dst, pool_, slab_);
    note_table_change(record);
    ++num_copied_;
  } else if (host_ && ends_in_block(record.num_tokens)) {
    // A sequence that shared the tail, and for which it was full, may have been swapped out since.
    detach(table[tail]);
  }
  num_entries_ += grown.table_size - table.size();
  while (table.size() < grown.table_size) table.push_back(take_block(), slab_);
  record.writable_end = end_of(table);
  record.num_tokens += static_cast<std::int32_t>(num_tokens);
  num_tokens_ += num_tokens;
  peak_used_ = std::max(peak_used_, pool_.num_used());
  return copy;
}

[[gnu::always_inline]] inline void manager_core::reserve_fork(const sequence& parent) {
  translate_bad_alloc("fork", [&] {
    tables_[free_record_].reserve(blocks_of(parent.num_tokens));
    slab_.reserve(1);
    if (publications_ != nullptr) reserve_fork_publication(parent, records_[free_record_]);
  });
}

[[gnu::always_inline]] inline seq_id manager_core::fork_record(sequence& parent) noexcept {
  const std::int32_t size = blocks_of(parent.num_tokens);
  sequence& child = open_record();
  block_table& table = table_of(child);
  table.share(table_of(parent), size, pool_, slab_);
  child.num_tokens = parent.num_tokens;
  child.num_committed = parent.num_committed;
  if (ends_in_block(parent.num_tokens)) {
    parent.writable_end = 0;
  } else {
    child.writable_end = end_of(table);
  }
  if (publications_ != nullptr) fork_publication(parent, child);
  num_tokens_ += child.num_tokens;
  num_entries_ += size - table.first();
  ++num_forks_;
  return id_of(child);
}

[[gnu::always_inline]] inline void manager_core::prepare_truncate(const sequence& record, std::int64_t num_tokens) {
  require_between("num_tokens", num_tokens, 0, record.num_tokens);
  const block_table& table = table_of(record);
  if (table.first() > first_visible_block(num_tokens)) {
    refuse(errc::invalid_argument, "truncate to ", num_tokens, " tokens needs logical block ",
           first_visible_block(num_tokens), ", but the sliding window gave back those below ", table.first());
  }
  if (table.cuts_shared_chunk(blocks_of(num_tokens))) translate_bad_alloc("truncate", [&] { slab_.reserve(1); });
}

[[gnu::always_inline]] inline void manager_core::truncate_record(sequence& record, std::int64_t num_tokens) noexcept {
  const std::int32_t size = blocks_of(num_tokens);
  block_table& table = table_of(record);
  num_entries_ -= table.size() - size;
  table.truncate(size, whole_blocks(record.num_committed), pool_, slab_);
  note_table_change(record);
  num_tokens_ -= record.num_tokens - num_tokens;
  record.num_tokens = static_cast<std::int32_t>(num_tokens);
  record.num_committed = std::min(record.num_committed, record.num_tokens);
  // The new tail may be a block that was full, and thereby shared, a moment ago.
  record.writable_end = ends_in_block(num_tokens) ? 0 : end_of(table);
  if (host_ && ends_in_block(num_tokens)) detach(table[whole_blocks(num_tokens)]);
  if (publications_ != nullptr) rewind_publication(record);
}

[[gnu::always_inline]] inline void manager_core::free_record(sequence& record) noexcept {
  block_table& table = table_of(record);
  num_tokens_ -= record.num_tokens;
  if (publications_ != nullptr) end_publication(record);
  if (record.writable_end == swapped_out) {
    --host_->num_swapped_sequences;
    table.clear(whole_blocks(record.num_committed), host_->pool, slab_);
  } else {
    num_entries_ -= table.size() - table.first();
    table.clear(whole_blocks(record.num_committed), pool_, slab_);
  }
  ++record.generation;
  record.num_tokens = free_record_;
  free_record_ = static_cast<std::int32_t>(&record - records_);
  --num_sequences_;
}

// --- building

inline void check_row(const scheduled_seq& row, const sequence& record, std::int64_t first_position) {
  if (row.query_len < 1 || row.query_len > row.seq_len) {
    refuse(errc::invalid_argument, "query_len ", row.query_len, " is not between 1 and seq_len ", row.seq_len);
  }
  if (row.seq_len > record.num_tokens) {
    refuse(errc::out_of_range, "seq_len ", row.seq_len, " is past the sequence's ", record.num_tokens, " tokens");
  }
  if (row.seq_len - row.query_len < first_position) {
    refuse(errc::out_of_range, "position ", row.seq_len - row.query_len,
           " has no slot any more: the sliding window gave its block back");
  }
}

// The stride of a batch that is filled again. A row is written anew when it moves, so rows get wider by more than they
// need to, and narrower only when most of their width is wasted: a table whose longest row grows by an entry moves once
// for every eighth that it grows, or for every `few` entries. What a table was just widened by is not waste.
inline std::int64_t stride_for(std::int64_t longest, std::int64_t stride) noexcept {
  constexpr std::int64_t few = 16;
  if (stride == 0 || longest + few < stride / 2) return longest;
  return longest <= stride ? stride : longest + std::max(few, longest / 8);
}

[[gnu::always_inline]] inline manager_core::batch_shape manager_core::prepare_build(step_batch& batch,
                                                                                    const step_plan& plan) const {
  const std::int32_t block_size = config_.block_size;
  std::int64_t num_tokens = 0;
  std::int32_t longest_row = 0;  // in tokens
  for (const scheduled_seq& row : plan.seqs) {
    const sequence& record = get_resident(row.seq);
    check_row(row, record, std::int64_t{table_of(record).first()} * block_size);
    num_tokens += row.query_len;
    longest_row = std::max(longest_row, row.seq_len);
  }
  if (num_tokens > INT32_MAX) {
    refuse(errc::invalid_argument, "a step of ", num_tokens, " tokens exceeds ", INT32_MAX);
  }
  if (plan.num_tokens != 0 && plan.num_tokens != num_tokens) {
    refuse(errc::invalid_argument, "num_tokens of the plan is ", plan.num_tokens, "; its sequences compute ",
           num_tokens, " tokens, so it must be that, or 0");
  }
  const std::size_t num_seqs = plan.seqs.size();
  const std::int64_t stride = stride_for(blocks_of(longest_row), batch.block_table_stride);
  const std::size_t num_entries = num_seqs * static_cast<std::size_t>(stride);
  translate_bad_alloc("build", [&] {
    batch.query_start_loc.reserve(num_seqs + 1);
    batch.seq_lens.reserve(num_seqs);
    if (num_entries > batch.block_tables.size()) {
      make_room(batch.block_tables, num_entries - batch.block_tables.size());
    }
    batch.slot_mapping.reserve(static_cast<std::size_t>(num_tokens));
    batch.written_rows.reserve(num_seqs);
  });
  return {stride, num_tokens};
}

// Requires the room that prepare_build made.
[[gnu::always_inline]] inline void manager_core::fill_batch(step_batch& batch, const step_plan& plan,
                                                            const batch_shape& shape) const noexcept {
  const std::int64_t stride = shape.stride;
  const std::int64_t num_tokens = shape.num_tokens;
  const std::int32_t block_size = config_.block_size;
  const std::size_t num_seqs = plan.seqs.size();
  const std::size_t num_entries = num_seqs * static_cast<std::size_t>(stride);
  // Rows keep their place as long as the stride stays.
  if (batch.block_table_stride != stride) batch.written_rows.clear();
  batch.written_rows.resize(num_seqs);
  batch.query_start_loc.resize(num_seqs + 1);
  batch.seq_lens.resize(num_seqs);
  batch.block_tables.resize(num_entries);
  batch.slot_mapping.resize(static_cast<std::size_t>(num_tokens));
  batch.block_table_stride = stride;
  batch.block_size = block_size;
  batch.num_blocks = pool_.num_blocks();

  std::int32_t start = 0;
  std::int64_t* slot = batch.slot_mapping.data();
  std::int32_t* table_row = batch.block_tables.data();
  batch.query_start_loc[0] = 0;
  batch.query_positions.clear();
  for (std::size_t i = 0; i < num_seqs; ++i) {
    const scheduled_seq& row = plan.seqs[i];
    const auto index = static_cast<std::uint32_t>(to_index(row.seq));
    const block_table& table = tables_[index];
    const std::int32_t last_block = whole_blocks(row.seq_len - 1);
    const std::int32_t used = last_block + 1;
    const step_batch::written_row now{table_changes_[index], used};
    step_batch::written_row& before = batch.written_rows[i];
    if (before.change == now.change && before.num_entries <= used) [[likely]] {
      if (before.num_entries < used) table.copy_to(table_row, before.num_entries, used, config_.table_padding);
      before.num_entries = used;
    } else {
      table.copy_to(table_row, used, config_.table_padding);
      std::fill(table_row + used, table_row + stride, config_.table_padding);
      before = now;
    }
    std::int32_t position = row.seq_len - row.query_len;
    if (row.query_len == 1) [[likely]] {
      *slot++ = std::int64_t{table_row[last_block]} * block_size + (position - last_block * block_size);
      ++position;
    }
    while (position < row.seq_len) {
      const std::int32_t block = whole_blocks(position);
      const std::int32_t offset = position - block * block_size;
      const std::int32_t count = std::min(block_size - offset, row.seq_len - position);
      const std::int64_t first_slot = std::int64_t{table_row[block]} * block_size + offset;
      for (std::int32_t k = 0; k < count; ++k) *slot++ = first_slot + k;
      position += count;
    }
    start += row.query_len;
    batch.query_start_loc[i + 1] = start;
    batch.seq_lens[i] = row.seq_len;
    table_row += stride;
  }
}

}  // namespace bifolio::inline v0_2::detail
