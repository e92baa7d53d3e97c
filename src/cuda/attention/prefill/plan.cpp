// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/prefill/plan.hpp"

#include <algorithm>
#include <cstring>

#include "common/attention/visibility.hpp"

namespace bifolio::cuda {

void plan_prefill(const plan_input& input, prefill_plan& plan) {
  const attention_spec& spec = input.spec;
  const std::int32_t packed = prefill_packed_heads(spec.num_q_heads / spec.num_kv_heads);
  const std::int32_t tokens_per_tile = prefill_tile_rows / packed;
  const std::int32_t num_heads = spec.num_q_heads / packed;
  plan.num_tokens = input.num_tokens;

  const attn::attention_window window = attn::window_of(spec);

  // Row tiles of all heads, and the keys they attend to.
  std::vector<prefill_plan::row_tile>& tiles = plan.row_tiles;
  tiles.clear();
  std::int64_t kv_bytes_per_head = 0;
  for (const std::int32_t seq : plan.seqs) {
    const std::int32_t query_len = input.query_start_loc[seq + 1] - input.query_start_loc[seq];
    const std::int64_t offset = std::int64_t{input.seq_lens[seq]} - query_len;
    kv_bytes_per_head += std::int64_t{input.seq_lens[seq]} * spec.qk_head_dim * 4;
    for (std::int32_t tile = 0; tile * tokens_per_tile < query_len; ++tile) {
      const std::int64_t first = std::int64_t{tile} * tokens_per_tile;
      const std::int64_t last = std::min<std::int64_t>(query_len, first + tokens_per_tile) - 1;
      const auto [begin, end] = window.of_run(offset + first, offset + last, input.seq_lens[seq]);
      tiles.push_back({std::max<std::int64_t>(end - begin, 0), seq, tile});
    }
  }
  std::sort(tiles.begin(), tiles.end(), [](const prefill_plan::row_tile& x, const prefill_plan::row_tile& y) {
    return x.num_keys != y.num_keys ? x.num_keys > y.num_keys : x.seq != y.seq ? x.seq < y.seq : x.tile < y.tile;
  });

  // Heads go in equal groups, as few as keep a group's keys in the cache.
  const std::int64_t cache_bytes = static_cast<std::int64_t>(input.device.l2_bytes) * 5 / 8;
  std::int32_t heads_in_group = num_heads;
  while (heads_in_group > 1 && heads_in_group % 2 == 0 && heads_in_group * kv_bytes_per_head > cache_bytes) {
    heads_in_group /= 2;
  }

  plan.work_tiles.clear();
  plan.work_tiles.reserve(tiles.size() * static_cast<std::size_t>(num_heads));
  for (std::int32_t group = 0; group < num_heads; group += heads_in_group) {
    for (const prefill_plan::row_tile& t : tiles) {
      prefill_work_tile work = {};
      work.seq = t.seq;
      work.seq_len = input.seq_lens[t.seq];
      work.query_start = input.query_start_loc[t.seq];
      work.query_len = input.query_start_loc[t.seq + 1] - work.query_start;
      work.row_tile = t.tile;
      for (std::int32_t head = group; head < group + heads_in_group; ++head) {
        work.head = head * packed;
        plan.work_tiles.push_back(work);
      }
    }
  }
}

std::int64_t max_prefill_work_tiles(const attention_spec& spec, const step_limits& limits) noexcept {
  // ⌈tokens / per tile⌉, summed over the sequences that can have new tokens.
  const std::int32_t packed = prefill_packed_heads(spec.num_q_heads / spec.num_kv_heads);
  const std::int64_t per_tile = prefill_tile_rows / packed;
  const std::int64_t tiles = (limits.num_tokens + limits.num_seqs_with_tokens() * (per_tile - 1)) / per_tile;
  return tiles * (spec.num_q_heads / packed);
}

void write_metadata(const prefill_plan& plan, std::byte* begin) noexcept {
  const prefill_header header = {static_cast<std::int32_t>(plan.work_tiles.size()), 0};
  std::memcpy(begin, &header, sizeof(header));
  if (!plan.work_tiles.empty()) {
    std::memcpy(begin + sizeof(header), plan.work_tiles.data(), plan.work_tiles.size() * sizeof(prefill_work_tile));
  }
}

prefill_metadata prefill_metadata_at(const std::byte* begin) noexcept {
  const auto* const header = reinterpret_cast<const prefill_header*>(begin);
  return {header, reinterpret_cast<const prefill_work_tile*>(header + 1)};
}

}  // namespace bifolio::cuda
