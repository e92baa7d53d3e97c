// SPDX-License-Identifier: Apache-2.0
/// kv_cache_manager's swapping: whole sequences between the device's blocks and the host's.
///
/// While a full block and its copy in the other pool hold the same, each knows the other (on_host, on_device). The link
/// ends when either is handed out for something else, or is about to be written. So sequences that share a block find
/// its one copy, whether they move together or one after another, and a block that comes back before its place was
/// reused is not copied at all. Blocks that are not full of committed tokens are linked only within one call.

#include <algorithm>
#include <bifolio/detail/manager_core.hpp>
#include <utility>

#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"

namespace bifolio::inline v0_2::detail {

void manager_core::detach(block_id block) noexcept {
  if (block == invalid_block) return;
  block_id& copy = host_->on_host[static_cast<std::size_t>(to_index(block))];
  if (copy == invalid_block) return;
  host_->on_device[static_cast<std::size_t>(to_index(copy))] = invalid_block;
  copy = invalid_block;
}

block_id manager_core::take_host_block() noexcept {
  const block_id block = host_->pool.allocate_one();
  const block_id original = host_->on_device[static_cast<std::size_t>(to_index(block))];
  if (original != invalid_block) detach(original);
  return block;
}

void manager_core::require_swappable(std::span<const seq_id> seqs, bool out) const {
  if (!host_) {
    refuse(errc::failed_precondition, "num_host_blocks is 0: there is no host memory to swap with");
  }
  for (std::size_t i = 0; i < seqs.size(); ++i) {
    const auto index = static_cast<std::uint32_t>(to_index(seqs[i]));
    if ((get(seqs[i]).writable_end == swapped_out) == out) {
      refuse(errc::failed_precondition, "sequence ", index, out ? " is swapped out already" : " is not swapped out");
    }
    if (std::find(seqs.begin(), seqs.begin() + static_cast<std::ptrdiff_t>(i), seqs[i]) !=
        seqs.begin() + static_cast<std::ptrdiff_t>(i)) {
      refuse(errc::failed_precondition, "sequence ", index, " is given twice");
    }
  }
}

std::int64_t manager_core::blocks_to_move(std::span<const seq_id> seqs, bool out) const {
  const std::vector<block_id>& copy_of = out ? host_->on_host : host_->on_device;
  const block_pool& to = out ? host_->pool : pool_;
  std::vector<block_id>& touched = host_->touched;
  touched.clear();
  for (const seq_id seq : seqs) {
    const sequence& record = get(seq);
    const block_table& table = table_of(record);
    for (std::int32_t i = table.first(); i < blocks_of(record.num_tokens); ++i) {
      const block_id copy = copy_of[static_cast<std::size_t>(to_index(table[i]))];
      if (copy == invalid_block || to.is_free(copy)) touched.push_back(table[i]);
    }
  }
  std::sort(touched.begin(), touched.end());
  return std::unique(touched.begin(), touched.end()) - touched.begin();
}

void manager_core::reserve_move(std::span<const seq_id> seqs, std::vector<block_copy>& copies) {
  std::int64_t num_blocks = 0;
  std::int64_t num_chunks = 0;
  std::int32_t longest = 0;
  for (const seq_id seq : seqs) {
    const std::int32_t size = blocks_of(get(seq).num_tokens);
    num_blocks += size;
    num_chunks += block_table::chunks_to_grow(0, size);
    longest = std::max(longest, size);
  }
  host_->touched.reserve(static_cast<std::size_t>(num_blocks));
  copies.reserve(copies.size() + static_cast<std::size_t>(num_blocks));
  slab_.reserve(num_chunks);
  reserve_events(num_blocks);
  // Tables change places with the spare one, so each must do for any of them.
  host_->spare.reserve(longest);
  for (const seq_id seq : seqs) table_of(get(seq)).reserve(longest);
}

void manager_core::move_table(sequence& record, bool out, std::vector<block_copy>& copies) noexcept {
  std::vector<block_id>& copy_of = out ? host_->on_host : host_->on_device;
  std::vector<block_id>& original_of = out ? host_->on_device : host_->on_host;
  block_pool& from = out ? pool_ : host_->pool;
  block_pool& to = out ? host_->pool : pool_;
  block_table& table = table_of(record);
  block_table& moved = host_->spare;
  for (std::int32_t i = 0; i < table.first(); ++i) moved.push_null();
  for (std::int32_t i = table.first(); i < blocks_of(record.num_tokens); ++i) {
    const block_id block = table[i];
    block_id copy = copy_of[static_cast<std::size_t>(to_index(block))];
    if (copy != invalid_block) {
      to.touch(copy);
    } else {
      copy = out ? take_host_block() : take_block();
      copy_of[static_cast<std::size_t>(to_index(block))] = copy;
      original_of[static_cast<std::size_t>(to_index(copy))] = block;
      copies.push_back({block, copy});
      ++(out ? host_->num_blocks_out : host_->num_blocks_in);
    }
    moved.push_back(copy, slab_);
  }
  table.clear(whole_blocks(record.num_committed), from, slab_);
  std::swap(table, moved);
  note_table_change(record);
}

void manager_core::detach_unfinished(std::span<const seq_id> seqs, bool out) noexcept {
  for (const seq_id seq : seqs) {
    const sequence& record = *find(seq);
    const block_table& table = table_of(record);
    for (std::int32_t i = std::max(table.first(), whole_blocks(record.num_committed)); i < table.size(); ++i) {
      detach(out ? host_->on_device[static_cast<std::size_t>(to_index(table[i]))] : table[i]);
    }
  }
}

alloc_status manager_core::swap_out(std::span<const seq_id> seqs, std::vector<block_copy>& copies) {
  require_swappable(seqs, true);
  translate_bad_alloc("swap_out", [&] { reserve_move(seqs, copies); });
  const alloc_status status = move_status(seqs, true);
  if (status == alloc_status::ok) move_all(seqs, true, copies);
  return status;
}

alloc_status manager_core::move_status(std::span<const seq_id> seqs, bool out) const {
  const std::int64_t needed = blocks_to_move(seqs, out);
  const block_pool& to = out ? host_->pool : pool_;
  if (needed > to.num_blocks()) return alloc_status::never;
  return needed > to.num_free() ? alloc_status::later : alloc_status::ok;
}

// Requires the room that reserve_move makes, and a move_status of ok.
void manager_core::move_all(std::span<const seq_id> seqs, bool out, std::vector<block_copy>& copies) noexcept {
  for (const seq_id seq : seqs) {
    sequence& record = *find(seq);
    const block_table& table = table_of(record);
    if (out) num_entries_ -= table.size() - table.first();
    move_table(record, out, copies);
    if (out) {
      record.writable_end = swapped_out;
      ++host_->num_swapped_sequences;
      continue;
    }
    num_entries_ += table.size() - table.first();
    record.writable_end = ends_in_block(record.num_tokens) ? 0 : end_of(table);
    // The new blocks are not registered; look-ups may still find their contents in the old blocks.
    if (publications_ != nullptr) {
      publication_of(record).num_evicted_prefix_blocks = publication_of(record).num_published;
    }
    --host_->num_swapped_sequences;
  }
  detach_unfinished(seqs, out);
  if (!out) peak_used_ = std::max(peak_used_, pool_.num_used());
}

std::int64_t manager_core::blocks_to_swap_in(std::span<const seq_id> seqs) const {
  require_swappable(seqs, false);
  return translate_bad_alloc("blocks_to_swap_in", [&] { return blocks_to_move(seqs, false); });
}

alloc_status manager_core::swap_in(std::span<const seq_id> seqs, std::vector<block_copy>& copies) {
  require_swappable(seqs, false);
  translate_bad_alloc("swap_in", [&] { reserve_move(seqs, copies); });
  const alloc_status status = move_status(seqs, false);
  if (status == alloc_status::ok) move_all(seqs, false, copies);
  return status;
}

void manager_core::forget_copies(std::span<const block_copy> swap_outs, std::span<const block_copy> swap_ins) noexcept {
  if (!host_) return;
  const auto forget = [&](block_id on_device, block_id on_host) {
    const auto block = static_cast<std::uint32_t>(to_index(on_device));
    if (block < host_->on_host.size() && host_->on_host[block] == on_host) detach(on_device);
  };
  for (const block_copy& pair : swap_outs) forget(pair.src, pair.dst);
  for (const block_copy& pair : swap_ins) forget(pair.dst, pair.src);
}

fence_id manager_core::open_fence() {
  const fence_id fence = pool_.open_fence();
  if (host_) (void)host_->pool.open_fence();  // both count alike
  return fence;
}

void manager_core::retire(fence_id fence) {
  pool_.retire(fence);
  if (host_) host_->pool.retire(fence);
}

}  // namespace bifolio::inline v0_2::detail
