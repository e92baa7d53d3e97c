// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The host side of prefill's tile scheduler. A work tile is 128 packed query rows (token × packed head) of one
/// sequence over all keys that they attend to. The heads of a KV head are packed into the rows while their number is a
/// power of two up to 64, so that a box of the query's tensor map is half a row tile; otherwise every query head has
/// row tiles of its own. The list of work tiles consists of groups of heads whose keys fit into five eighths of the L2,
/// in each the longest first. CTA c of the persistent grid of C takes work tiles c, 2C − 1 − c, 2C + c, … (serpentine
/// order).

#include <cstdint>

#include "cuda/host/dispatch.hpp"

namespace bifolio::cuda {

inline constexpr std::int32_t prefill_tile_rows = 128;
inline constexpr std::int32_t prefill_tile_keys = 128;

struct prefill_work_tile {
  std::int32_t seq;  // row of the block tables
  std::int32_t seq_len;
  std::int32_t query_start;
  std::int32_t query_len;
  std::int32_t row_tile;
  std::int32_t head;  // first query head of the packed ones
};

struct prefill_header {
  std::int32_t num_work_tiles;
  std::int32_t unused;
};

/// Query heads that share a row tile.
[[nodiscard]] constexpr std::int32_t prefill_packed_heads(std::int32_t group_size) noexcept {
  return group_size <= 64 && (group_size & (group_size - 1)) == 0 ? group_size : 1;
}

/// Works inside the plan, whose vectors keep their capacity.
class prefill_planner {
 public:
  prefill_planner(const plan_input& input, fast_plan& plan) : input_(input), plan_(plan) { plan_.prefill_seqs.clear(); }

  void add(std::int32_t seq) { plan_.prefill_seqs.push_back(seq); }
  [[nodiscard]] bool empty() const noexcept { return plan_.prefill_seqs.empty(); }
  /// Appends a prefill_header and the work tiles to the plan's words.
  void write();

 private:
  const plan_input& input_;
  fast_plan& plan_;
};

}  // namespace bifolio::cuda
