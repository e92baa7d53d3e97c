// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/prefill/plan.hpp"

#include <algorithm>
#include <cstring>

#include "common/attention/visibility.hpp"

namespace bifolio::cuda {

void prefill_planner::write() {
  const attention_spec& spec = input_.spec;
  const std::int32_t packed = prefill_packed_heads(spec.num_q_heads / spec.num_kv_heads);
  const std::int32_t tokens_per_tile = prefill_tile_rows / packed;
  const std::int32_t num_heads = spec.num_q_heads / packed;

  const attn::attention_window window = attn::window_of(spec);

  // Row tiles of all heads, and the keys they see.
  std::vector<std::int32_t>& words = plan_.words;
  std::vector<fast_plan::row_tile>& tiles = plan_.row_tiles;
  tiles.clear();
  std::int64_t kv_bytes_per_head = 0;
  for (const std::int32_t seq : plan_.prefill_seqs) {
    const std::int32_t query_len = input_.query_start_loc[seq + 1] - input_.query_start_loc[seq];
    const std::int64_t offset = std::int64_t{input_.seq_lens[seq]} - query_len;
    kv_bytes_per_head += std::int64_t{input_.seq_lens[seq]} * spec.qk_head_dim * 4;
    for (std::int32_t tile = 0; tile * tokens_per_tile < query_len; ++tile) {
      const std::int64_t first = std::int64_t{tile} * tokens_per_tile;
      const std::int64_t last = std::min<std::int64_t>(query_len, first + tokens_per_tile) - 1;
      const auto [begin, end] = window.of_run(offset + first, offset + last, input_.seq_lens[seq]);
      tiles.push_back({std::max<std::int64_t>(end - begin, 0), seq, tile});
    }
  }
  std::sort(tiles.begin(), tiles.end(), [](const fast_plan::row_tile& x, const fast_plan::row_tile& y) {
    return x.num_keys != y.num_keys ? x.num_keys > y.num_keys : x.seq != y.seq ? x.seq < y.seq : x.tile < y.tile;
  });

  // Heads go in equal groups, as few as keep a group's keys in the cache.
  const std::int64_t cache_bytes = static_cast<std::int64_t>(input_.device.l2_bytes) * 5 / 8;
  std::int32_t heads_in_group = num_heads;
  while (heads_in_group > 1 && heads_in_group % 2 == 0 && heads_in_group * kv_bytes_per_head > cache_bytes) {
    heads_in_group /= 2;
  }

  const auto base = words.size();
  const std::size_t num_items = tiles.size() * static_cast<std::size_t>(num_heads);
  words.resize(base + (sizeof(prefill_header) + num_items * sizeof(prefill_item)) / sizeof(std::int32_t));
  auto* bytes = reinterpret_cast<std::byte*>(words.data() + base);
  const prefill_header header = {static_cast<std::int32_t>(num_items), 0};
  std::memcpy(bytes, &header, sizeof(header));
  bytes += sizeof(header);
  for (std::int32_t group = 0; group < num_heads; group += heads_in_group) {
    for (const fast_plan::row_tile& t : tiles) {
      prefill_item item = {};
      item.seq = t.seq;
      item.seq_len = input_.seq_lens[t.seq];
      item.query_start = input_.query_start_loc[t.seq];
      item.query_len = input_.query_start_loc[t.seq + 1] - item.query_start;
      item.row_tile = t.tile;
      for (std::int32_t head = group; head < group + heads_in_group; ++head) {
        item.head = head * packed;
        std::memcpy(bytes, &item, sizeof(item));
        bytes += sizeof(item);
      }
    }
  }
}

}  // namespace bifolio::cuda
