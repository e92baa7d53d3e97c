// SPDX-License-Identifier: Apache-2.0
/// kv_cache_manager's side of a copy_audit.

#include <bifolio/kv_cache_manager.hpp>
#include <limits>

#include "common/base/translate.hpp"

namespace bifolio::inline v0_2 {

void kv_cache_manager::announce_copy(seq_id seq, std::int64_t num_tokens, const block_copy& copy) noexcept {
  config().audit->announce(copy_kind::on_write, 0, {&copy, 1}, seq, num_tokens);
}

alloc_status kv_cache_manager::audited_swap(copy_kind kind, std::span<const seq_id> seqs,
                                            std::span<std::vector<block_copy>> copies) {
  std::vector<std::size_t> num_before;
  detail::translate_bad_alloc("swap", [&] {
    for (const std::vector<block_copy>& list : copies) num_before.push_back(list.size());
  });
  for (const seq_id seq : seqs) {
    if (core_.contains(seq)) audit_sequence(seq);
  }
  const alloc_status status = swap(kind, seqs, copies);
  if (status != alloc_status::ok) return status;
  for (std::size_t g = 0; g < copies.size(); ++g) {
    const std::span<const block_copy> moved = std::span(copies[g]).subspan(num_before[g]);
    // Every one of the sequences waits for all of it: which blocks are whose is not asked.
    for (const seq_id seq : seqs) {
      config().audit->announce(kind, static_cast<std::int32_t>(g), moved, seq, core_.num_tokens(seq));
    }
  }
  return status;
}

bool kv_cache_manager::reads_copy(seq_id seq, const announced_copy& what) const {
  // What a swap left on the host is read by the way back, whatever became of the sequence's blocks since.
  if (what.kind == copy_kind::swap_out) return true;
  if (groups_ && config().groups[static_cast<std::size_t>(what.group)].kind == group_kind::state) return true;
  const detail::manager_core& core = core_of(what.group);
  for (std::int64_t i = core.num_released_blocks(seq); i < core.num_table_blocks(seq); ++i) {
    if (core.block_at(seq, i) == what.copy.dst) return true;
  }
  return false;
}

void kv_cache_manager::audit_sequence(seq_id seq) const {
  for (const announced_copy& what : config().audit->take_due(seq, core_.num_committed(seq))) {
    if (reads_copy(seq, what)) config().audit->report(what);
  }
}

void kv_cache_manager::audit_truncate(seq_id seq) const {
  // A block that was given back may come again, for other tokens: its copy is not waited for any more.
  for (const announced_copy& what : config().audit->take_due(seq, std::numeric_limits<std::int64_t>::max())) {
    if (reads_copy(seq, what)) config().audit->announce(what.kind, what.group, {&what.copy, 1}, seq, what.num_tokens);
  }
}

void kv_cache_manager::audit_rows(const step_plan& plan) const {
  for (const scheduled_seq& row : plan.seqs) audit_sequence(row.seq);
}

void kv_cache_manager::audit_fork(seq_id seq, const allocate_result& forked) const {
  audit_sequence(seq);
  if (forked.status == alloc_status::ok) config().audit->fork(seq, forked.seq);
}

void kv_cache_manager::audit_free(seq_id seq) const {
  if (!core_.contains(seq)) return;  // `free` says so
  if (!core_.is_swapped_out(seq)) audit_sequence(seq);
  config().audit->free(seq);
}

}  // namespace bifolio::inline v0_2
