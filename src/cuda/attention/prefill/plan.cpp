// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/prefill/plan.hpp"

#include <algorithm>
#include <cstring>

namespace bifolio::cuda {

void prefill_planner::write() {
  const attention_spec& spec = input_.spec;
  const std::int32_t packed = prefill_packed_heads(spec.num_q_heads / spec.num_kv_heads);
  const std::int32_t tokens_per_tile = prefill_tile_rows / packed;
  const std::int32_t num_heads = spec.num_q_heads / packed;

  // Row tiles of all heads, and the keys that they attend to.
  std::vector<std::int32_t>& words = plan_.words;
  std::vector<fast_plan::row_tile>& tiles = plan_.row_tiles;
  tiles.clear();
  std::int64_t kv_bytes_per_head = 0;
  for (const std::int32_t seq : plan_.prefill_seqs) {
    const std::int32_t query_len = input_.query_start_loc[seq + 1] - input_.query_start_loc[seq];
    const std::int64_t offset = std::int64_t{input_.seq_lens[seq]} - query_len;
    kv_bytes_per_head += std::int64_t{input_.seq_lens[seq]} * spec.head_dim * 4;
    for (std::int32_t tile = 0; tile * tokens_per_tile < query_len; ++tile) {
      const std::int64_t last = std::min(query_len, (tile + 1) * tokens_per_tile);
      std::int64_t end = spec.causal ? offset + last : input_.seq_lens[seq];
      if (spec.window_left >= 0) end = std::min(end, std::int64_t{spec.window_left} + tokens_per_tile);
      tiles.push_back({end, seq, tile});
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
  const std::size_t num_work_tiles = tiles.size() * static_cast<std::size_t>(num_heads);
  words.resize(base + (sizeof(prefill_header) + num_work_tiles * sizeof(prefill_work_tile)) / sizeof(std::int32_t));
  auto* bytes = reinterpret_cast<std::byte*>(words.data() + base);
  const prefill_header header = {static_cast<std::int32_t>(num_work_tiles), 0};
  std::memcpy(bytes, &header, sizeof(header));
  bytes += sizeof(header);
  for (std::int32_t group = 0; group < num_heads; group += heads_in_group) {
    for (const fast_plan::row_tile& t : tiles) {
      prefill_work_tile work = {};
      work.seq = t.seq;
      work.seq_len = input_.seq_lens[t.seq];
      work.query_start = input_.query_start_loc[t.seq];
      work.query_len = input_.query_start_loc[t.seq + 1] - work.query_start;
      work.row_tile = t.tile;
      for (std::int32_t head = group; head < group + heads_in_group; ++head) {
        work.head = head * packed;
        std::memcpy(bytes, &work, sizeof(work));
        bytes += sizeof(work);
      }
    }
  }
}

}  // namespace bifolio::cuda
