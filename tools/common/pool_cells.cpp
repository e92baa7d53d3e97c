// SPDX-License-Identifier: Apache-2.0
#include "tools/common/pool_cells.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tools {
namespace {

using namespace bifolio;

/// The blocks of the sequences that are swapped out, or of those that are not.
void mark_users(std::vector<cell>& cells, const kv_cache_manager& manager, std::span<const lettered_sequence> sequences,
                bool swapped) {
  std::vector<std::int32_t> users(cells.size());
  std::vector<char> letters(cells.size(), '#');
  for (const auto& [seq, letter] : sequences) {
    if (manager.is_swapped_out(seq) != swapped) continue;
    for (std::int64_t i = manager.num_released_blocks(seq); i < manager.num_table_blocks(seq); ++i) {
      const auto block = static_cast<std::size_t>(to_index(manager.block_at(seq, i)));
      ++users[block];
      letters[block] = letter;
    }
  }
  for (std::size_t i = 0; i < cells.size(); ++i) {
    if (users[i] == 1) cells[i] = {cell_state::used, letters[i]};
    if (users[i] > 1) cells[i] = {cell_state::shared, users[i] > 9 ? '+' : static_cast<char>('0' + users[i])};
  }
}

}  // namespace

void mark_cells(pool_frame& frame, const kv_cache_manager& manager, std::span<const lettered_sequence> sequences) {
  const cache_stats blocks = manager.stats();
  const prefix_cache* prefix = manager.prefix();
  // A block without references that is not in the free queue waits for a fence.
  frame.device.assign(static_cast<std::size_t>(blocks.num_blocks), {cell_state::fenced, '~'});
  std::vector<block_id> free(static_cast<std::size_t>(blocks.num_free_blocks));
  (void)manager.pool().peek_free(free);
  for (const block_id block : free) {
    frame.device[static_cast<std::size_t>(to_index(block))] =
        prefix != nullptr && prefix->holds(block) ? cell{cell_state::cached, ':'} : cell{};
  }
  for (std::size_t i = 0; i < frame.device.size(); ++i) {
    const block_id block{static_cast<std::int32_t>(i)};
    // In use by a sequence that is not listed, such as a fresh fork.
    if (manager.pool().num_refs(block) > 0) frame.device[i] = {cell_state::used, '#'};
  }
  mark_users(frame.device, manager, sequences, false);
  frame.host.assign(static_cast<std::size_t>(blocks.num_host_blocks), {});
  mark_users(frame.host, manager, sequences, true);
}

void count_blocks(pool_frame& frame, const kv_cache_manager& manager) {
  const cache_stats blocks = manager.stats();
  const prefix_cache* prefix = manager.prefix();
  const prefix_stats cached = prefix != nullptr ? prefix->stats() : prefix_stats{};
  frame.block_size = manager.config().block_size;
  frame.lookups = cached.num_looked_up_blocks;
  frame.hits = cached.num_hit_blocks;
  frame.evictions = cached.num_evicted_blocks;
  frame.swapped_out_blocks = blocks.num_swapped_out_blocks;
  frame.swapped_in_blocks = blocks.num_swapped_in_blocks;
  frame.copies = blocks.num_copied_blocks;
}

}  // namespace tools
