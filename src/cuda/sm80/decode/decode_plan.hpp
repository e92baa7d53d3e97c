// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The cut of decode work over persistent thread blocks, shared by host and kernel.
///
/// Work is a line. Each sequence lays down num_kv_heads · row_tiles units of equal length, a unit being one KV head and
/// 16 packed rows (query token × head of the group) over the sequence's visible tiles of 64 keys, plus a fixed charge
/// for its prologue and epilogue. The line is cut into equal runs, one a thread block; a cut that falls into a charge
/// moves to the unit's start. A unit touched by several blocks is merged, in the order of its blocks, by whichever of
/// them comes last. So the plan is one record per sequence and one per block, and a step of 256 sequences is planned in
/// microseconds.
///
/// A deterministic plan cuts the units of short queries beforehand into chunks of `chunk_tiles` tiles counted from
/// position 0, and no further: results then do not depend on what else is in the batch.

#include <cstdint>
#include <vector>

#include "cuda/dispatch.hpp"

namespace bifolio::cuda {

inline constexpr std::int32_t decode_tile_tokens = 64;
inline constexpr std::int32_t decode_tile_rows = 16;
inline constexpr std::int32_t decode_unit_charge = 1;   // tiles
inline constexpr std::int32_t decode_min_run = 2;       // tiles and charge; shorter runs cost more in merging
inline constexpr std::int32_t decode_chunk_tiles = 32;  // of deterministic plans: 2048 positions

struct decode_seq {
  std::int32_t row;          // of the block tables
  std::int32_t start;        // where the sequence begins on the line
  std::int32_t unit_length;  // tiles + charge of one unit
  std::int32_t first_tile;   // tiles before it are outside every row's window
  std::int32_t num_tiles;
  std::int32_t row_tiles;
  std::int32_t seq_len;
  std::int32_t query_start;
  std::int32_t query_len;
  std::int32_t first_unit;  // ordinal of its first unit; deterministic plans only
  std::int32_t num_chunks;  // 1 unless cut into chunks
};

/// Where one thread block begins, with its first sequence at hand: what the kernel needs before its first key is one
/// load away.
struct alignas(16) decode_cta {
  std::int32_t position;  // on the line
  std::int32_t end;
  std::int32_t index;  // of `first` in the list of sequences
  decode_seq first;
  std::int32_t unused[2];
};
static_assert(sizeof(decode_cta) == 64);

struct alignas(16) decode_header {
  std::int32_t total;  // length of the line
  std::int32_t num_ctas;
  std::int32_t chunked;
  std::int32_t num_slots;  // of partial results in one of their ranges: thread blocks, or units if chunked
};

/// Words of a plan for `grid` thread blocks: a header, `grid` records of blocks (empty behind num_ctas), the sequences.
[[nodiscard]] constexpr std::int32_t decode_seqs_offset(std::int32_t grid) noexcept {
  return static_cast<std::int32_t>((sizeof(decode_header) + sizeof(decode_cta) * static_cast<std::size_t>(grid)) /
                                   sizeof(std::int32_t));
}

/// Collects the sequences of a step that decode, then cuts.
class decode_planner {
 public:
  /// `grid`: thread blocks that run at once.
  decode_planner(const plan_input& input, std::int32_t grid) noexcept : input_(input), grid_(grid) {}

  void add(std::int32_t seq);
  [[nodiscard]] bool empty() const noexcept { return seqs_.empty(); }
  /// Whether the line fits into 32 bits.
  [[nodiscard]] bool fits() const noexcept {
    return total_ < (std::int64_t{1} << 31) && units_ < (std::int64_t{1} << 27);
  }
  /// Appends the words. Call only if it fits.
  void write(std::vector<std::int32_t>& words) const;

  [[nodiscard]] std::size_t workspace_floats() const noexcept;
  [[nodiscard]] std::size_t num_counters() const noexcept;

 private:
  [[nodiscard]] std::int32_t num_slots() const noexcept {
    return input_.spec.deterministic ? static_cast<std::int32_t>(units_) : grid_;
  }

  const plan_input& input_;
  std::int32_t grid_;
  std::vector<decode_seq> seqs_;
  std::int64_t total_ = 0;
  std::int64_t units_ = 0;
};

}  // namespace bifolio::cuda
