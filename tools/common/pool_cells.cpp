// SPDX-License-Identifier: Apache-2.0
#include "tools/common/pool_cells.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tools {
namespace {

using namespace bifolio;

/// Calls visit(block) for the blocks that a sequence holds in a group.
template <class Visit>
void for_each_block(const kv_cache_manager& manager, seq_id seq, std::int32_t group, const Visit& visit) {
  const std::vector<group_config>& groups = manager.config().groups;
  if (!groups.empty() && groups[static_cast<std::size_t>(group)].kind == group_kind::state) {
    for (std::int64_t p = std::max<std::int64_t>(1, manager.num_committed(seq)); p <= manager.num_tokens(seq); ++p) {
      if (const block_id block = manager.state_at(seq, p, group); block != invalid_block) visit(block);
    }
    return;
  }
  for (std::int64_t i = manager.num_released_blocks(seq, group); i < manager.num_table_blocks(seq, group); ++i) {
    visit(manager.block_at(seq, i, group));
  }
}

/// A manager with the sequences whose letters are known.
struct cells_of {
  const kv_cache_manager* manager;
  std::span<const lettered_sequence> sequences;

  /// The blocks of the sequences that are swapped out, or of those that are not.
  void mark_users(std::int32_t group, std::vector<cell>& cells, bool swapped) const {
    std::vector<std::int32_t> users(cells.size());
    std::vector<char> letters(cells.size(), '#');
    for (const auto& [seq, its_letter] : sequences) {
      if (manager->is_swapped_out(seq) != swapped) continue;
      for_each_block(*manager, seq, group, [&, letter = its_letter](block_id block) {
        ++users[static_cast<std::size_t>(to_index(block))];
        letters[static_cast<std::size_t>(to_index(block))] = letter;
      });
    }
    for (std::size_t i = 0; i < cells.size(); ++i) {
      if (users[i] == 1) cells[i] = {cell_state::used, letters[i]};
      if (users[i] > 1) cells[i] = {cell_state::shared, users[i] > 9 ? '+' : static_cast<char>('0' + users[i])};
    }
  }

  [[nodiscard]] std::vector<cell> device(std::int32_t group) const {
    const block_pool& pool = manager->pool(group);
    const prefix_cache* prefix = manager->prefix(group);
    // A block without references that is not in the free queue waits for a fence.
    std::vector<cell> cells(static_cast<std::size_t>(pool.num_blocks()), {cell_state::fenced, '~'});
    std::vector<block_id> free(static_cast<std::size_t>(pool.num_free()));
    (void)pool.peek_free(free);
    for (const block_id block : free) {
      cells[static_cast<std::size_t>(to_index(block))] =
          prefix != nullptr && prefix->holds(block) ? cell{cell_state::cached, ':'} : cell{};
    }
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const block_id block{static_cast<std::int32_t>(i)};
      // In use by a sequence that is not listed, such as a fresh fork.
      if (pool.num_refs(block) > 0) cells[i] = {cell_state::used, '#'};
    }
    mark_users(group, cells, false);
    return cells;
  }

  [[nodiscard]] std::vector<cell> host(std::int32_t group) const {
    std::vector<cell> cells(static_cast<std::size_t>(manager->stats(group).num_host_blocks));
    mark_users(group, cells, true);
    return cells;
  }
};

}  // namespace

void mark_cells(pool_frame& frame, const kv_cache_manager& manager, std::span<const lettered_sequence> sequences) {
  const cells_of cells{&manager, sequences};
  frame.device = cells.device(0);
  frame.host = cells.host(0);
  frame.others.clear();
  for (std::int32_t group = 1; group < manager.num_groups(); ++group) {
    const group_config& what = manager.config().groups[static_cast<std::size_t>(group)];
    const prefix_stats found = manager.prefix(group) != nullptr ? manager.prefix(group)->stats() : prefix_stats{};
    frame.others.push_back({std::string(to_string(what.kind)), what.block_size, cells.device(group), cells.host(group),
                            found.num_hit_blocks, found.num_evicted_blocks});
  }
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
