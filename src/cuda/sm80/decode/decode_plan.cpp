// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/decode/decode_plan.hpp"

#include <algorithm>
#include <cstring>

namespace bifolio::cuda {

void decode_planner::add(std::int32_t seq) {
  const attention_spec& spec = input_.spec;
  decode_seq s = {};
  s.row = seq;
  s.seq_len = input_.seq_lens[seq];
  s.query_start = input_.query_start_loc[seq];
  s.query_len = input_.query_start_loc[seq + 1] - s.query_start;
  const std::int32_t group = spec.num_q_heads / spec.num_kv_heads;
  s.row_tiles = (s.query_len * group + decode_tile_rows - 1) / decode_tile_rows;

  // Positions that some row sees.
  const std::int64_t offset = std::int64_t{s.seq_len} - s.query_len;
  std::int64_t begin = 0;
  std::int64_t end = s.seq_len;
  if (spec.window_left >= 0) begin = std::max<std::int64_t>(0, offset - spec.window_left);
  if (!spec.causal && spec.window_right >= 0)
    end = std::min<std::int64_t>(end, s.seq_len + std::int64_t{spec.window_right});
  s.first_tile = static_cast<std::int32_t>(begin / decode_tile_tokens);
  s.num_tiles =
      begin < end ? static_cast<std::int32_t>((end + decode_tile_tokens - 1) / decode_tile_tokens) - s.first_tile : 0;

  s.num_chunks = 1;
  std::int32_t longest = s.num_tiles;
  const std::int64_t units = std::int64_t{spec.num_kv_heads} * s.row_tiles;
  // Where the rows of one sequence occupy every thread block its keys stay whole; a rule of the sequence alone.
  if (spec.deterministic && s.num_tiles > 0 && units < grid_) {
    const std::int32_t first_chunk = s.first_tile / decode_chunk_tiles;
    s.num_chunks = (s.first_tile + s.num_tiles + decode_chunk_tiles - 1) / decode_chunk_tiles - first_chunk;
    longest = std::min(longest, decode_chunk_tiles);
  }
  s.unit_length = longest + decode_unit_charge;
  s.start = static_cast<std::int32_t>(total_);
  s.first_unit = static_cast<std::int32_t>(units_);
  total_ += units * s.num_chunks * s.unit_length;
  units_ += units * s.num_chunks;
  seqs_.push_back(s);
}

void decode_planner::write(std::vector<std::int32_t>& words) const {
  const auto base = words.size();
  words.resize(base + static_cast<std::size_t>(decode_seqs_offset(grid_)) +
               seqs_.size() * (sizeof(decode_seq) / sizeof(std::int32_t)));
  auto* const bytes = reinterpret_cast<std::byte*>(words.data() + base);

  decode_header header = {};
  header.total = static_cast<std::int32_t>(total_);
  header.num_ctas =
      static_cast<std::int32_t>(std::clamp<std::int64_t>((total_ + decode_min_run - 1) / decode_min_run, 1, grid_));
  header.chunked = input_.spec.deterministic ? 1 : 0;
  header.num_slots = num_slots();
  std::memcpy(bytes, &header, sizeof(header));

  std::size_t s = 0;
  decode_cta previous = {};
  for (std::int32_t cta = 0; cta <= grid_; ++cta) {
    decode_cta here = {};
    here.position = header.total;
    if (cta < header.num_ctas) {
      const auto cut = static_cast<std::int32_t>(total_ * cta / header.num_ctas);
      while (s + 1 < seqs_.size() && seqs_[s + 1].start <= cut) ++s;
      const std::int32_t inside = (cut - seqs_[s].start) % seqs_[s].unit_length;
      here.position = inside <= decode_unit_charge || header.chunked != 0 ? cut - inside : cut;
      here.index = static_cast<std::int32_t>(s);
      here.first = seqs_[s];
    }
    if (cta > 0) {
      previous.end = here.position;
      std::memcpy(bytes + sizeof(header) + sizeof(decode_cta) * static_cast<std::size_t>(cta - 1), &previous,
                  sizeof(previous));
    }
    previous = here;
  }
  std::memcpy(words.data() + base + decode_seqs_offset(grid_), seqs_.data(), seqs_.size() * sizeof(decode_seq));
}

std::size_t decode_planner::workspace_floats() const noexcept {
  const std::size_t ranges = input_.spec.deterministic ? 2 : 3;
  return ranges * static_cast<std::size_t>(num_slots()) * decode_tile_rows *
         (static_cast<std::size_t>(input_.spec.head_dim) + 2);
}

std::size_t decode_planner::num_counters() const noexcept { return 2 * static_cast<std::size_t>(num_slots()); }

}  // namespace bifolio::cuda
