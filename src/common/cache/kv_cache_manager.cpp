// SPDX-License-Identifier: Apache-2.0
/// Those functions of kv_cache_manager that are about a layer group, or too rare to be inline.

#include <bifolio/kv_cache_manager.hpp>

#include "common/base/refuse.hpp"
#include "common/base/require.hpp"
#include "common/base/translate.hpp"

namespace bifolio::inline v0_2 {
namespace {

void require_only_group(std::int32_t group) {
  if (group == 0) return;
  detail::refuse(errc::out_of_range, "layer group ", group, " is not there: the manager has one, number 0");
}

}  // namespace

kv_cache_manager::kv_cache_manager(const kv_cache_config& config) : core_(config) {
  if (config.groups.size() <= 1) return;
  groups_ =
      detail::translate_bad_alloc("kv_cache_manager", [&] { return std::make_unique<detail::group_manager>(core_); });
}

kv_cache_manager::~kv_cache_manager() = default;

std::int64_t kv_cache_manager::watermark_blocks(std::int32_t group) const {
  if (groups_) return groups_->watermark_blocks(group);
  require_only_group(group);
  return core_.watermark_blocks();
}

std::int64_t kv_cache_manager::blocks_at_peak(std::int64_t num_tokens, std::int64_t step_tokens,
                                              std::int32_t group) const {
  if (groups_) return groups_->blocks_at_peak(num_tokens, step_tokens, group);
  require_only_group(group);
  return core_.blocks_at_peak(num_tokens, step_tokens);
}

alloc_status kv_cache_manager::can_allocate(std::int64_t num_tokens, std::int64_t step_tokens,
                                            const group_blocks& promised, std::int64_t num_cross_tokens) const {
  if (groups_) return groups_->can_allocate(num_tokens, step_tokens, promised, num_cross_tokens);
  detail::require_between("num_cross_tokens without a cross group", num_cross_tokens, 0, 0);
  return core_.can_allocate(num_tokens, step_tokens, promised[0]);
}

allocate_result kv_cache_manager::allocate(std::int64_t num_tokens, std::int64_t num_cross_tokens) {
  if (groups_) return groups_->allocate(num_tokens, num_cross_tokens);
  detail::require_between("num_cross_tokens without a cross group", num_cross_tokens, 0, 0);
  return core_.allocate(num_tokens);
}

admission kv_cache_manager::can_open(const prompt_view& prompt, std::int64_t step_tokens,
                                     const group_blocks& promised) const {
  return groups_ ? groups_->can_open(prompt, step_tokens, promised) : core_.can_open(prompt, step_tokens, promised[0]);
}

void kv_cache_manager::append_keys(const prompt_view& prompt, std::vector<content_key>& keys) const {
  groups_ ? groups_->append_keys(prompt, keys) : core_.prefix()->append_keys(prompt, keys);
}

std::int64_t kv_cache_manager::blocks_to_append(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead,
                                                std::int32_t group) const {
  if (groups_) return groups_->blocks_to_append(seq, num_tokens, num_lookahead, group);
  require_only_group(group);
  return core_.blocks_to_append(seq, num_tokens, num_lookahead);
}

std::int64_t kv_cache_manager::step_limit(seq_id seq) const {
  if (groups_) return groups_->step_limit(seq);
  (void)core_.num_tokens(seq);
  return INT64_MAX;
}

void kv_cache_manager::drain_copies(std::int32_t group, std::vector<block_copy>& copies) {
  if (groups_) return groups_->drain_copies(group, copies);
  require_only_group(group);
}

alloc_status kv_cache_manager::swap(copy_kind kind, std::span<const seq_id> seqs,
                                    std::span<std::vector<block_copy>> copies) {
  const bool out = kind == copy_kind::swap_out;
  if (groups_) return groups_->swap(seqs, out, copies);
  detail::require_between("number of lists of copies", static_cast<std::int64_t>(copies.size()), 1, 1);
  return out ? core_.swap_out(seqs, copies.front()) : core_.swap_in(seqs, copies.front());
}

alloc_status kv_cache_manager::swap_out(std::span<const seq_id> seqs, std::span<std::vector<block_copy>> copies) {
  return config().audit == nullptr ? swap(copy_kind::swap_out, seqs, copies)
                                   : audited_swap(copy_kind::swap_out, seqs, copies);
}

alloc_status kv_cache_manager::swap_in(std::span<const seq_id> seqs, std::span<std::vector<block_copy>> copies) {
  return config().audit == nullptr ? swap(copy_kind::swap_in, seqs, copies)
                                   : audited_swap(copy_kind::swap_in, seqs, copies);
}

std::int64_t kv_cache_manager::blocks_to_swap_in(std::span<const seq_id> seqs, std::int32_t group) const {
  if (groups_) return groups_->blocks_to_swap_in(seqs, group);
  require_only_group(group);
  return core_.blocks_to_swap_in(seqs);
}

void kv_cache_manager::forget_copies(std::span<const block_copy> swap_outs, std::span<const block_copy> swap_ins,
                                     std::int32_t group) noexcept {
  if (config().audit != nullptr) {
    config().audit->forget(copy_kind::swap_out, group, swap_outs);
    config().audit->forget(copy_kind::swap_in, group, swap_ins);
  }
  if (groups_) return groups_->forget_copies(swap_outs, swap_ins, group);
  if (group == 0) core_.forget_copies(swap_outs, swap_ins);
}

std::int64_t kv_cache_manager::num_free_host_blocks(std::int32_t group) const {
  if (groups_) return groups_->num_free_host_blocks(group);
  require_only_group(group);
  return core_.num_free_host_blocks();
}

const prefix_cache* kv_cache_manager::prefix(std::int32_t group) const {
  if (groups_) return groups_->prefix(group);
  require_only_group(group);
  return core_.prefix();
}

void kv_cache_manager::drain_events(std::vector<cache_event>& events, std::int32_t group) {
  if (groups_) return groups_->drain_events(group, events);
  require_only_group(group);
  core_.drain_events(events);
}

const detail::manager_core& kv_cache_manager::core_of(std::int32_t group) const {
  if (groups_) return groups_->core(group);
  require_only_group(group);
  return core_;
}

std::int64_t kv_cache_manager::num_table_blocks(seq_id seq, std::int32_t group) const {
  return core_of(group).num_table_blocks(seq);
}

std::int64_t kv_cache_manager::num_released_blocks(seq_id seq, std::int32_t group) const {
  return core_of(group).num_released_blocks(seq);
}

std::int64_t kv_cache_manager::num_held_blocks(seq_id seq, std::int32_t group) const {
  if (groups_) return groups_->num_held_blocks(seq, group);
  require_only_group(group);
  return core_.num_table_blocks(seq) - core_.num_released_blocks(seq);
}

block_id kv_cache_manager::block_at(seq_id seq, std::int64_t index, std::int32_t group) const {
  return core_of(group).block_at(seq, index);
}

slot_id kv_cache_manager::slot_at(seq_id seq, std::int64_t position, std::int32_t group) const {
  return core_of(group).slot_at(seq, position);
}

block_id kv_cache_manager::state_at(seq_id seq, std::int64_t position, std::int32_t group) const {
  if (groups_) return groups_->state_at(seq, position, group);
  require_only_group(group);
  detail::refuse(errc::invalid_argument, "group 0 has block tables and no states");
}

std::int64_t kv_cache_manager::num_cross_tokens(seq_id seq) const {
  if (groups_) return groups_->num_cross_tokens(seq);
  (void)core_.num_tokens(seq);
  return 0;
}

void kv_cache_manager::build(step_batch& first, std::span<step_batch> others, const step_plan& plan) const {
  if (groups_) {
    groups_->build(first, others, plan);
  } else {
    detail::require_between("number of batches of further groups", static_cast<std::int64_t>(others.size()), 0, 0);
    core_.build(first, plan);
  }
  if (config().audit != nullptr) audit_rows(plan);
}

cache_stats kv_cache_manager::stats(std::int32_t group) const {
  if (groups_) return groups_->stats(group);
  require_only_group(group);
  return core_.stats();
}

const block_pool& kv_cache_manager::pool(std::int32_t group) const {
  if (groups_) return groups_->pool(group);
  require_only_group(group);
  return core_.pool();
}

}  // namespace bifolio::inline v0_2
