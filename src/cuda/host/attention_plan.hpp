// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The CUDA part of an attention plan: a host computation from lengths (no device needed), and the device buffers that
/// its result is uploaded to, once per step. Buffers keep their addresses while they are large enough.
///
/// The general kernel's cut: every sequence is cut into splits of 512 positions counted from 0, whatever the batch;
/// rows (token, head of the group) into tiles. A tile's splits are folded in order, starting from nothing, either by
/// one thread block (one item) or, for long sequences in small batches, each split by a thread block of its own, whose
/// partial results the last to arrive folds in the same order. Both give the same bits, so that how a tile is cut may
/// depend on the batch and its results do not.

#include <array>
#include <bifolio/attention.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/step.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cuda/attention/general/items.hpp"
#include "cuda/host/dispatch.hpp"
#include "cuda/host/memory.hpp"

namespace bifolio::cuda {

/// The general kernel's work for one step; pure host data.
struct general_plan {
  std::int32_t rows_per_tile = 0;
  std::int32_t num_dim_tiles = 0;
  bool has_query_positions = false;
  std::vector<general_item> items;
  std::int64_t num_tiles = 0;     ///< tiles that were cut into one item per split
  std::int64_t num_partials = 0;  ///< their splits

  /// Floats of workspace and number of counters, over all KV heads.
  [[nodiscard]] std::size_t workspace_floats(const attention_spec& spec) const noexcept;
  [[nodiscard]] std::size_t num_counters(const attention_spec& spec) const noexcept;
};

/// Decode on the x_split layout by the kernel of smxx/decode: how many partitions of 512 positions the longest sequence
/// has, and whether one thread block walks them all (v1) or several take them in turns (v2), whichever is estimated to
/// be faster for the step's lengths. Each is right for all lengths of `max_partitions`, with the same bits, and has its
/// workspace: the choice may change from step to step, without hysteresis, and is no part of the graph epoch. A
/// captured graph keeps the choice of the step that it was captured at.
struct x_split_plan {
  bool has_decodes = false;              ///< sequences with one new token, which that kernel takes
  bool has_others = false;               ///< sequences with more, which the general kernel takes
  std::int32_t num_splits = 1;           ///< thread blocks for the partitions of a row; 1: v1
  std::int32_t max_partitions = 0;       ///< a power of two, so that a growing sequence seldom changes it
  std::size_t workspace_floats = 0;      ///< v2's, also where v1 was chosen
  std::size_t max_workspace_floats = 0;  ///< of steps of this many sequences or fewer
};
/// `least_partitions`: what `reserve_plan` asked for, so that sequences grow up to there on the same kernels. v1 is
/// then chosen only where a sequence of that length would not make it the slower one.
[[nodiscard]] x_split_plan plan_x_split(const plan_input& input, std::int32_t least_partitions = 1) noexcept;

/// Partial results are given up (the tile becomes one item) above this.
inline constexpr std::size_t max_partial_bytes = std::size_t{128} << 20;

/// Fills `plan`, whose vector keeps its capacity. Throws std::bad_alloc, and `error` (unsupported) where numbers leave
/// 32 bits. The input has been checked.
void plan_general(const plan_input& input, general_plan& plan);

/// What the plan of one step holds on the device.
class cuda_plan_state final : public attention_plan_state {
 public:
  explicit cuda_plan_state(std::shared_ptr<const device_state> state) noexcept;
  ~cuda_plan_state() override;

  [[nodiscard]] const device_state& device() const noexcept { return *state_; }
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
  [[nodiscard]] const general_plan& general() const noexcept { return general_; }
  [[nodiscard]] const x_split_plan& x_split() const noexcept { return x_split_; }
  [[nodiscard]] const fast_plan& fast() const noexcept { return fast_; }
  /// Numbers of new tokens, as planned.
  [[nodiscard]] const std::vector<std::int32_t>& query_lens() const noexcept { return query_lens_; }

  /// Computes the plans of all kernels for `input`, beside those that are current; nothing else changes but capacity.
  void compute(const plan_input& input);
  /// Makes room for what was computed and uploads it in `stream`, then makes it current. Throws `error`; what was
  /// current then stays so.
  void adopt(const attention_spec& spec, cudaStream_t stream);
  /// Makes room for each of `inputs`, all of it or none; what was current is lost. Throws `error`; nothing has changed
  /// then. In no stream: waits for what that takes.
  void reserve(const attention_spec& spec, std::span<const plan_input> inputs);

  /// The plan's part of a call's arguments.
  void fill(attention_kernel_args& args) const noexcept;

 private:
  /// Pinned words under way to the device, and the event after which they may be overwritten.
  struct staging_slot {
    buffer words;
    cudaEvent_t copied = nullptr;
    bool pending = false;
  };

  /// Buffers that are larger than the ones held, made before any of those is touched; empty where there is room.
  struct larger_buffers {
    buffer words;
    buffer workspace;
    buffer counters;
    std::array<buffer, 4> pinned;
    std::size_t fast_words_offset = 0;
  };
  /// Bytes that a plan takes.
  struct room {
    std::size_t general_bytes = 0;
    std::size_t fast_bytes = 0;
    std::size_t workspace_bytes = 0;
    std::size_t counter_bytes = 0;
  };
  [[nodiscard]] room room_for_next(const attention_spec& spec) const noexcept;
  [[nodiscard]] larger_buffers make_room(const room& needed, cudaStream_t stream);
  void commit(larger_buffers& larger) noexcept;

  std::shared_ptr<const device_state> state_;
  device_memory_resource device_memory_;
  pinned_memory_resource pinned_memory_;
  general_plan general_, next_general_;
  x_split_plan x_split_, next_x_split_;
  fast_plan fast_, next_fast_;
  std::vector<std::int32_t> query_lens_, next_query_lens_;
  buffer words_;      // header and items of the general kernel, then the fast family's words
  buffer workspace_;  // partial results
  buffer counters_;   // zero between calls
  std::size_t fast_words_offset_ = 0;
  std::array<staging_slot, 4> staging_;
  std::size_t next_slot_ = 0;
  std::int32_t least_partitions_ = 1;
  std::uint64_t epoch_ = 0;
};

}  // namespace bifolio::cuda
