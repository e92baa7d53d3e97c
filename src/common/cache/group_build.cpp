// SPDX-License-Identifier: Apache-2.0
/// group_manager::build: one batch per layer group.

#include <algorithm>
#include <array>
#include <bifolio/detail/group_manager.hpp>

#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"
#include "common/cache/layer_group.hpp"
#include "common/cache/manager_steps.hpp"

namespace bifolio::detail {
namespace {

/// Arrays of a batch whose rows are not blocks of the sequence's positions: `stride` entries per row, no slots.
void reserve_rows(step_batch& batch, const step_plan& plan, std::int64_t num_tokens, std::int64_t stride) {
  const std::size_t num_seqs = plan.seqs.size();
  batch.query_start_loc.reserve(num_seqs + 1);
  batch.seq_lens.reserve(num_seqs);
  batch.block_tables.reserve(num_seqs * static_cast<std::size_t>(stride));
  batch.slot_mapping.reserve(static_cast<std::size_t>(num_tokens));
}

void start_rows(step_batch& batch, const step_batch& first, std::int64_t stride, std::int32_t padding) noexcept {
  batch.query_start_loc = first.query_start_loc;  // within the room that reserve_rows made
  batch.seq_lens = first.seq_lens;
  batch.block_tables.assign(first.seq_lens.size() * static_cast<std::size_t>(stride), padding);
  batch.block_table_stride = stride;
  batch.slot_mapping.assign(first.slot_mapping.size(), to_index(no_slot));
  batch.query_positions.clear();
  batch.written_rows.clear();
}

}  // namespace

block_id group_manager::state_at(seq_id seq, std::int64_t position, std::int32_t index) const {
  const layer_group& group = at(index);
  if (!group.states) {
    refuse(errc::invalid_argument, "group ", index, " is of kind ", to_string(group.config.kind), " and has no states");
  }
  (void)first_.get(seq);
  return group.states->at(index_of(seq), position);
}

void group_manager::build(step_batch& first, std::span<step_batch> others, const step_plan& plan) const {
  if (others.size() + 1 != groups_.size()) {
    refuse(errc::invalid_argument, others.size() + 1,
           " batches were given, one per layer group is needed: ", groups_.size());
  }
  std::array<std::int64_t, max_layer_groups> strides{};
  std::array<manager_core::batch_shape, max_layer_groups> shapes{};
  const auto batch_of = [&](std::size_t i) -> step_batch& { return i == 0 ? first : others[i - 1]; };
  std::int64_t num_tokens = 0;
  for (const scheduled_seq& row : plan.seqs) num_tokens += row.query_len;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const layer_group& group = *groups_[i];
    if (group.has_positions()) {
      shapes[i] = group.core->prepare_build(batch_of(i), plan);
      continue;
    }
    strides[i] = 2 + group.config.num_draft_slots;
    for (const scheduled_seq& row : plan.seqs) {
      if (group.is_cross()) {
        strides[i] = std::max<std::int64_t>(strides[i], group.core->table_of(group.core->get(row.seq)).size());
        continue;
      }
      const std::int64_t begin = row.seq_len - row.query_len;
      const std::uint32_t index = index_of(row.seq);
      if (group.states->can_resume(index, begin) && group.states->at(index, row.seq_len) != invalid_block) continue;
      refuse(errc::out_of_range, "tokens ", begin, " to ", row.seq_len, " of sequence ", index,
             " are no step of their own: group ", i, " does not have the states before and after them");
    }
    translate_bad_alloc("build", [&] { reserve_rows(batch_of(i), plan, num_tokens, strides[i]); });
  }
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const layer_group& group = *groups_[i];
    step_batch& batch = batch_of(i);
    if (group.has_positions()) {
      group.core->fill_batch(batch, plan, shapes[i]);
      continue;
    }
    start_rows(batch, first, strides[i], config_.table_padding);
    std::int32_t* entries = batch.block_tables.data();
    for (std::size_t k = 0; k < plan.seqs.size(); ++k, entries += strides[i]) {
      const scheduled_seq& row = plan.seqs[k];
      const std::uint32_t index = index_of(row.seq);
      if (group.is_cross()) {
        const sequence& own = group.core->records_[index];
        const block_table& table = group.core->table_of(own);
        table.copy_to(entries, table.size(), config_.table_padding);
        batch.seq_lens[k] = own.num_tokens;
        continue;
      }
      const std::int32_t begin = row.seq_len - row.query_len;
      *entries = to_index(invalid_block);
      std::int32_t* written = entries + 1;
      for (const state_slots::held_state& state : group.states->of(index)) {
        if (state.position == begin) *entries = to_index(state.slot);
        if (state.position > begin && state.position <= row.seq_len) *written++ = to_index(state.slot);
      }
    }
  }
}

}  // namespace bifolio::detail
