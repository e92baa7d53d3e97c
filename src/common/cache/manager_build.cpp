// SPDX-License-Identifier: Apache-2.0
/// kv_cache_manager::build: from the decisions of a step to the arrays that kernels read.

#include <algorithm>
#include <bifolio/detail/manager_core.hpp>

#include "common/base/make_room.hpp"
#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"

namespace bifolio::detail {
namespace {

void check_row(const scheduled_seq& row, const sequence& record, std::int64_t first_position) {
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
// for every eighth that it grows.
std::int64_t stride_for(std::int64_t longest, std::int64_t stride) noexcept {
  if (stride == 0 || longest < stride / 2) return longest;
  return longest <= stride ? stride : longest + std::max<std::int64_t>(16, longest / 8);
}

}  // namespace

void manager_core::build(step_batch& batch, const step_plan& plan) const {
  fill_batch(batch, plan, prepare_build(batch, plan));
}

std::int64_t manager_core::prepare_build(step_batch& batch, const step_plan& plan) const {
  const std::int32_t block_size = config_.block_size;
  std::int64_t num_tokens = 0;
  std::int64_t longest = 0;
  for (const scheduled_seq& row : plan.seqs) {
    const sequence& record = get_resident(row.seq);
    check_row(row, record, std::int64_t{table_of(record).first()} * block_size);
    num_tokens += row.query_len;
    longest = std::max<std::int64_t>(longest, blocks_of(row.seq_len));
  }
  if (num_tokens > INT32_MAX) {
    refuse(errc::invalid_argument, "a step of ", num_tokens, " tokens exceeds ", INT32_MAX);
  }
  const std::size_t num_seqs = plan.seqs.size();
  const std::int64_t stride = stride_for(longest, batch.block_table_stride);
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
  return stride;
}

// Requires the room that prepare_build made.
void manager_core::fill_batch(step_batch& batch, const step_plan& plan, std::int64_t stride) const noexcept {
  const std::int32_t block_size = config_.block_size;
  const std::size_t num_seqs = plan.seqs.size();
  const std::size_t num_entries = num_seqs * static_cast<std::size_t>(stride);
  std::int64_t num_tokens = 0;
  for (const scheduled_seq& row : plan.seqs) num_tokens += row.query_len;
  // Rows keep their place as long as the stride stays.
  if (batch.block_table_stride != stride) batch.written_rows.clear();
  batch.written_rows.resize(num_seqs);
  batch.query_start_loc.resize(num_seqs + 1);
  batch.seq_lens.resize(num_seqs);
  batch.block_tables.resize(num_entries);
  batch.slot_mapping.resize(static_cast<std::size_t>(num_tokens));
  batch.block_table_stride = stride;

  std::int32_t start = 0;
  std::int64_t* slot = batch.slot_mapping.data();
  std::int32_t* table_row = batch.block_tables.data();
  batch.query_start_loc[0] = 0;
  batch.query_positions.clear();
  for (std::size_t i = 0; i < num_seqs; ++i) {
    const scheduled_seq& row = plan.seqs[i];
    const block_table& table = table_of(*find(row.seq));
    const std::int32_t used = blocks_of(row.seq_len);
    const step_batch::written_row now{table_changes_[static_cast<std::uint32_t>(to_index(row.seq))], used};
    step_batch::written_row& before = batch.written_rows[i];
    if (before.change == now.change && before.num_entries <= used) [[likely]] {
      if (before.num_entries < used) table.copy_to(table_row, before.num_entries, used, config_.table_padding);
      before.num_entries = used;
    } else {
      table.copy_to(table_row, used, config_.table_padding);
      std::fill(table_row + used, table_row + stride, config_.table_padding);
      before = now;
    }
    for (std::int32_t position = row.seq_len - row.query_len; position < row.seq_len;) {
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

}  // namespace bifolio::detail
