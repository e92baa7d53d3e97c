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
/// A deterministic plan fixes the order of every sum instead: keys are cut into chunks of `decode_chunk_tiles` tiles
/// counted from position 0, the results of 16 chunks, counted likewise, are folded one after another into a run's, and
/// those of the runs into the row's. A chunk, or a run, in which a row sees nothing changes no bit. Who computes what
/// is then free: an item of work is a chunk, a run or a whole unit, whichever gives the device the evener load. Items
/// are units of the line, which is cut between them alone.

#include <cstdint>
#include <vector>

#include "cuda/host/plan_input.hpp"

namespace bifolio::cuda {

inline constexpr std::int32_t decode_tile_tokens = 64;
inline constexpr std::int32_t decode_tile_rows = 16;
inline constexpr std::int32_t decode_unit_charge = 1;  // tiles
inline constexpr std::int32_t decode_min_run = 2;      // tiles and charge; shorter runs cost more in merging
inline constexpr std::int32_t decode_merge_fan = 16;   // partial results that are joined at once
inline constexpr std::int32_t decode_most_parts = 24;  // more are joined in two levels
// Of deterministic plans.
inline constexpr std::int32_t decode_chunk_tiles = 4;  // 256 positions
inline constexpr std::int32_t decode_run_tiles = decode_chunk_tiles * decode_merge_fan;
inline constexpr std::int32_t decode_whole_tiles = 1 << 30;  // an item is a whole unit
inline constexpr std::int32_t decode_items_per_cta = 8;      // at most, where items leave partial results

struct decode_seq {
  std::int32_t row;          // of the block tables
  std::int32_t start;        // where the sequence begins on the line
  std::int32_t unit_length;  // tiles + charge of one unit or item
  std::int32_t first_tile;   // tiles before it are outside every row's window
  std::int32_t num_tiles;
  std::int32_t row_tiles;
  std::int32_t seq_len;
  std::int32_t query_start;
  std::int32_t query_len;
  std::int32_t first_unit;  // ordinal of its first item; deterministic plans only
  std::int32_t num_items;   // of a unit; 1 in other plans
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
  std::int32_t item_tiles;  // of deterministic plans, counted from position 0; 0: not deterministic
  std::int32_t num_slots;   // of partial results in one of their ranges: thread blocks, or items
  std::int32_t charge;      // tiles that a unit counts for beside its own
  std::int32_t unused[3];
};

/// Words of a plan for `grid` thread blocks: a header, `grid` records of blocks (empty behind num_ctas), the sequences.
[[nodiscard]] constexpr std::int32_t decode_seqs_offset(std::int32_t grid) noexcept {
  return static_cast<std::int32_t>((sizeof(decode_header) + sizeof(decode_cta) * static_cast<std::size_t>(grid)) /
                                   sizeof(std::int32_t));
}

/// Slots of partial results: three ranges of num_slots, or two and the running results of each thread block.
[[nodiscard]] constexpr std::int64_t decode_slots(bool deterministic, std::int64_t num_slots,
                                                  std::int64_t grid) noexcept {
  return deterministic ? 2 * num_slots + 2 * grid : 3 * num_slots;
}

/// Collects the sequences of a step that decode, then cuts. Works inside the plan's own words, whose capacity is kept.
class decode_planner {
 public:
  /// `grid`: thread blocks that run at once. What `words` held is lost.
  decode_planner(const plan_input& input, std::int32_t grid, std::vector<std::int32_t>& words);

  void add(std::int32_t seq);
  [[nodiscard]] bool empty() const noexcept { return num_seqs_ == 0; }
  /// Lays out the line and writes the words, or empties them where nothing was added. False: the line does not fit into
  /// 32 bits.
  [[nodiscard]] bool finish();

  [[nodiscard]] std::size_t workspace_floats() const noexcept;
  [[nodiscard]] std::size_t num_counters() const noexcept { return 2 * static_cast<std::size_t>(num_slots()); }

 private:
  /// Constant for a device, so that a captured graph survives other lengths.
  [[nodiscard]] std::int32_t num_slots() const noexcept {
    return input_.spec.deterministic ? decode_items_per_cta * grid_ : grid_;
  }
  [[nodiscard]] decode_seq& seq_at(std::int32_t index) const noexcept;
  [[nodiscard]] std::int32_t choose_item_tiles() const noexcept;
  [[nodiscard]] std::int32_t choose_num_ctas(std::int64_t total, std::int64_t units, bool uniform) const noexcept;
  [[nodiscard]] std::int32_t choose_parts(std::int64_t tiles, std::int64_t most) const noexcept;

  const plan_input& input_;
  std::int32_t grid_;
  std::vector<std::int32_t>& words_;
  std::int32_t num_seqs_ = 0;
};

}  // namespace bifolio::cuda
