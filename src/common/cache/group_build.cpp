// SPDX-License-Identifier: Apache-2.0
/// group_manager::build: one batch per layer group.

#include <algorithm>
#include <array>
#include <bifolio/detail/group_manager.hpp>

#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"
#include "common/cache/layer_group.hpp"
#include "common/cache/manager_steps.hpp"

namespace bifolio::inline v0_2::detail {
namespace {

/// Room for the arrays of a batch that is like the first group's but for its rows.
void reserve_arrays(step_batch& batch, const step_plan& plan, std::int64_t num_tokens) {
  batch.query_start_loc.reserve(plan.seqs.size() + 1);
  batch.seq_lens.reserve(plan.seqs.size());
  batch.slot_mapping.reserve(static_cast<std::size_t>(num_tokens));
}

void copy_arrays(step_batch& batch, const step_batch& first) noexcept {
  batch.query_start_loc = first.query_start_loc;  // within the room that reserve_arrays made
  batch.seq_lens = first.seq_lens;
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

// Rows of a state group: the state that the step reads, then those that it writes. Throws before anything is changed.
std::int64_t group_manager::make_state_rows(layer_group& group, const step_plan& plan) const {
  const std::size_t stride = 2 + static_cast<std::size_t>(group.config.num_draft_slots);
  translate_bad_alloc("build", [&] { group.rows.resize(plan.seqs.size() * stride); });
  std::int32_t* entries = group.rows.data();
  for (const scheduled_seq& row : plan.seqs) {
    const std::int32_t begin = row.seq_len - row.query_len;
    const std::span<const state_slots::held_state> written =
        group.states->written_by(index_of(row.seq), begin, row.seq_len);
    if (written.empty()) {
      refuse(errc::out_of_range, "tokens ", begin, " to ", row.seq_len, " of sequence ", index_of(row.seq),
             " are no step of their own: group ", group.index, " does not have the states before and after them");
    }
    std::int32_t* const end = entries + stride;
    *entries++ = to_index(begin > 0 ? (written.data() - 1)->slot : invalid_block);
    for (const state_slots::held_state& state : written) *entries++ = to_index(state.slot);
    while (entries < end) *entries++ = config_.table_padding;
  }
  return static_cast<std::int64_t>(stride);
}

// Rows of a cross group: all blocks of the encoder's output.
std::int64_t group_manager::make_cross_rows(layer_group& group, const step_plan& plan) const {
  std::size_t stride = 2;
  for (const scheduled_seq& row : plan.seqs) {
    stride = std::max(stride, static_cast<std::size_t>(group.core->table_of(group.core->get(row.seq)).size()));
  }
  translate_bad_alloc("build", [&] { group.rows.assign(plan.seqs.size() * stride, config_.table_padding); });
  std::int32_t* entries = group.rows.data();
  for (const scheduled_seq& row : plan.seqs) {
    const block_table& table = group.core->tables_[index_of(row.seq)];
    table.copy_to(entries, table.size(), config_.table_padding);
    entries += stride;
  }
  return static_cast<std::int64_t>(stride);
}

void group_manager::build(step_batch& first, std::span<step_batch> others, const step_plan& plan) const {
  if (others.size() + 1 != groups_.size()) {
    refuse(errc::invalid_argument, others.size() + 1,
           " batches were given, one per layer group is needed: ", groups_.size());
  }
  std::array<manager_core::batch_shape, max_layer_groups> shapes{};
  const auto batch_of = [&](std::size_t i) -> step_batch& { return i == 0 ? first : others[i - 1]; };
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    layer_group& group = *groups_[i];
    if (group.has_positions()) {
      shapes[i] = group.core->prepare_build(batch_of(i), plan);
      continue;
    }
    shapes[i] = {group.is_cross() ? make_cross_rows(group, plan) : make_state_rows(group, plan), shapes[0].num_tokens};
    translate_bad_alloc("build", [&] { reserve_arrays(batch_of(i), plan, shapes[0].num_tokens); });
  }
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    layer_group& group = *groups_[i];
    step_batch& batch = batch_of(i);
    if (group.has_positions()) {
      group.core->fill_batch(batch, plan, shapes[i]);
      continue;
    }
    copy_arrays(batch, first);
    batch.block_tables.swap(group.rows);
    batch.block_table_stride = shapes[i].stride;
    batch.block_size = group.is_cross() ? group.config.block_size : 0;  // what a state takes is its caller's
    batch.num_blocks = group.config.num_blocks;
    if (!group.is_cross()) continue;
    for (std::size_t k = 0; k < plan.seqs.size(); ++k) {
      batch.seq_lens[k] = group.core->records_[index_of(plan.seqs[k].seq)].num_tokens;
    }
  }
}

}  // namespace bifolio::inline v0_2::detail
