// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The host side of prefill's tile scheduler. A work tile is 128 packed query rows (token × packed head) of one
/// sequence over all keys that they attend to. The heads of a KV head are packed into the rows while their number is a
/// power of two up to 64, so that a box of the query's tensor map is half a row tile; otherwise every query head has
/// row tiles of its own. The list of work tiles consists of groups of heads whose keys fit into five eighths of the L2,
/// in each the longest first. CTA c of the persistent grid of C takes work tiles c, 2C − 1 − c, 2C + c, … (serpentine
/// order).

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/host/plan_input.hpp"

namespace bifolio::cuda {

inline constexpr std::int32_t prefill_tile_rows = 128;
inline constexpr std::int32_t prefill_all_tile_dims[] = {64, 96, 128, 192, 256};

/// Dims of the compiled kernel that computes a head_dim; what is past head_dim is padding. 0: none does.
[[nodiscard]] constexpr std::int32_t prefill_tile_dims(std::int32_t head_dim) noexcept {
  for (const std::int32_t dims : prefill_all_tile_dims) {
    if (head_dim <= dims) return dims;
  }
  return 0;
}
/// Keys of a tile: as many as shared memory and registers hold.
[[nodiscard]] constexpr std::int32_t prefill_tile_keys(std::int32_t tile_dims) noexcept {
  return tile_dims <= 128 ? 128 : tile_dims <= 192 ? 96 : 80;
}

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

/// The scheduler metadata on the device.
struct prefill_metadata {
  const prefill_header* header = nullptr;
  const prefill_work_tile* work_tiles = nullptr;
};

/// Prefill's part of a step. The vectors keep their capacity.
struct prefill_plan {
  std::vector<std::int32_t> seqs;
  std::vector<prefill_work_tile> work_tiles;
  /// Tokens of the whole step. The tensor map of q, which a captured launch holds, ends at the last one: another number
  /// needs another capture.
  std::int64_t num_tokens = 0;

  /// Used while planning.
  struct row_tile {
    std::int64_t num_keys;
    std::int32_t seq;
    std::int32_t tile;
  };
  std::vector<row_tile> row_tiles;

  [[nodiscard]] bool empty() const noexcept { return seqs.empty(); }
};

/// Makes the work tiles of `plan.seqs`. May throw std::bad_alloc.
void plan_prefill(const plan_input& input, prefill_plan& plan);

/// Most work tiles of steps within these limits.
[[nodiscard]] std::int64_t max_prefill_work_tiles(const attention_spec& spec, const step_limits& limits) noexcept;

/// Bytes of the scheduler metadata: the header, then the work tiles.
[[nodiscard]] constexpr std::size_t prefill_metadata_bytes(std::int64_t num_work_tiles) noexcept {
  return sizeof(prefill_header) + static_cast<std::size_t>(num_work_tiles) * sizeof(prefill_work_tile);
}
/// Writes them to `begin`, which is aligned to 16 bytes.
void write_metadata(const prefill_plan& plan, std::byte* begin) noexcept;
/// Where they are on the device when they begin at `begin`.
[[nodiscard]] prefill_metadata prefill_metadata_at(const std::byte* begin) noexcept;

}  // namespace bifolio::cuda
