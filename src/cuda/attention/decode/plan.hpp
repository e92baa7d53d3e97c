// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The host side of the decode kernel's stream-K tile scheduler (Osama et al., Stream-K, 2023): a linearised work range
/// split evenly over persistent CTAs. scheduler.cuh is the device side.
///
/// An output tile is one KV head and 16 packed rows (query token × head of the group) of a sequence; its work is the
/// sequence's visible KV tiles of 64 keys and a fixed overhead for prologue and epilogue. The work range holds the
/// output tiles of the first sequence, then those of the second, and so on, and each CTA gets an equal share of it. A
/// share that would begin within an overhead begins at the output tile. Output tiles that several CTAs share are
/// combined, in the order of the CTAs, by the one that arrives last; or, where every CTA has one split and nothing
/// else, by all of them, each a part of the output. The plan is one record per sequence and one per CTA, so that a step
/// of 256 sequences is planned in microseconds.
///
/// A deterministic plan fixes the combine tree instead, and with it the order of every sum: leaves of
/// `decode_leaf_tiles` tiles counted from position 0, nodes of `decode_combine_fan_in` leaves, the root. A leaf or node
/// that a row does not attend to changes no bit of it. Which CTA computes what is then free. A step of few tiles is
/// split into leaves, each with a partial result of its own. Otherwise the range is cut between leaves, between nodes
/// or between output tiles, whichever balances the load best, and a CTA's part of an output tile is a row of pieces,
/// each with a partial result: nodes, or as much of them as the part has from their beginning on, and single leaves of
/// a node that the part enters in the middle.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/attention/decode/metadata.hpp"
#include "cuda/host/plan_input.hpp"

namespace bifolio::inline v0_2::cuda {

/// Decode's part of a step: the scheduler metadata, and what else a launch needs. The vectors keep their capacity.
struct decode_plan {
  std::int32_t grid = 0;  ///< CTAs that run at once; the same for all steps of a spec
  std::int32_t num_seqs = 0;
  bool few_rows = false;  ///< every output tile has few, and there is a kernel for them
  decode_header header{};
  std::vector<decode_cta> ctas;     ///< [grid]
  std::vector<decode_parts> parts;  ///< [grid], of deterministic plans; else empty
  std::vector<decode_seq> seqs;     ///< the first num_seqs are this step's
  std::size_t workspace_bytes = 0;
  std::size_t num_counters = 0;

  [[nodiscard]] bool empty() const noexcept { return num_seqs == 0; }
};

/// Bytes of the scheduler metadata: header, CTAs, parts, sequences, in this order.
[[nodiscard]] constexpr std::size_t decode_metadata_bytes(std::int32_t grid, std::int64_t num_seqs,
                                                          bool deterministic) noexcept {
  const std::size_t of_cta = sizeof(decode_cta) + (deterministic ? sizeof(decode_parts) : 0);
  return sizeof(decode_header) + of_cta * static_cast<std::size_t>(grid) +
         sizeof(decode_seq) * static_cast<std::size_t>(num_seqs);
}
/// Writes them to `begin`, which is aligned to 16 bytes.
void write_metadata(const decode_plan& plan, std::byte* begin) noexcept;
/// Where they are on the device when they begin at `begin`.
[[nodiscard]] decode_metadata decode_metadata_at(const std::byte* begin, std::int32_t grid,
                                                 bool deterministic) noexcept;

/// The same for all steps of a spec, so that a captured graph survives other lengths.
[[nodiscard]] std::size_t decode_workspace_bytes(const attention_spec& spec, std::int32_t grid) noexcept;
[[nodiscard]] std::size_t decode_num_counters(const attention_spec& spec, std::int32_t grid) noexcept;

/// Collects the sequences of a step that decode, then splits their work.
class decode_planner {
 public:
  /// `grid`: CTAs that run at once. What `plan` held is lost.
  decode_planner(const plan_input& input, std::int32_t grid, decode_plan& plan);

  void add(std::int32_t seq);
  /// Completes the plan, also where nothing was added. False: the work range does not fit into 32 bits.
  [[nodiscard]] bool finish();

 private:
  struct split_choice {
    std::int32_t split_tiles;
    std::int32_t cut_tiles;
  };
  [[nodiscard]] split_choice choose_splits() const noexcept;
  /// Of loads, for the threads of a CTA that combines an output tile.
  [[nodiscard]] std::int64_t combine_rounds() const noexcept;
  /// Whether the CTAs of every output tile combine it together.
  [[nodiscard]] bool combines_together(std::int64_t outputs) const noexcept;
  [[nodiscard]] double combine_us(std::int64_t splits) const noexcept;
  [[nodiscard]] std::int32_t choose_num_ctas(std::int64_t total, std::int64_t outputs, bool alike) const noexcept;
  [[nodiscard]] std::int32_t choose_num_splits(std::int64_t tiles, std::int64_t most) const noexcept;
  /// Of a deterministic plan that cuts output tiles at leaves, all of them alike: the leaves of each CTA, all of one
  /// output tile, where that takes a few CTAs less at most. Even shares that are rounded to leaves differ by one or
  /// two. 0: it takes more.
  [[nodiscard]] std::int64_t equal_leaves(std::int64_t outputs, std::int64_t tiles) const noexcept;
  [[nodiscard]] std::int32_t choose_leaf_ctas(std::int64_t outputs, std::int64_t tiles) const noexcept;
  [[nodiscard]] std::int32_t cut_alike(std::int64_t outputs, std::int64_t tiles) const noexcept;
  void share_work();
  /// Where a share begins that should begin at place `inside` of an output tile.
  [[nodiscard]] std::int32_t cut_at(const decode_seq& s, std::int32_t inside) const noexcept;
  /// The parts of output tiles that several CTAs share. Returns how many partial results they have.
  [[nodiscard]] std::int64_t share_parts();

  const plan_input& input_;
  decode_plan& plan_;
};

}  // namespace bifolio::inline v0_2::cuda
