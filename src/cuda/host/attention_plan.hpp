// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The CUDA part of an attention plan: what planning made of the step, and the device buffers that its scheduler
/// metadata is uploaded to, once per step. Buffers keep their addresses while they are large enough.

#include <array>
#include <atomic>
#include <bifolio/attention.hpp>
#include <bifolio/buffer.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "cuda/host/implementations.hpp"
#include "cuda/host/memory.hpp"

namespace bifolio::inline v0_2::cuda {

/// What the plan of one step holds on the device. Its owner is the device's `device_state`.
class cuda_plan_state final : public attention_plan_state {
 public:
  explicit cuda_plan_state(std::shared_ptr<const device_state> state) noexcept;
  ~cuda_plan_state() override;

  [[nodiscard]] std::uint64_t graph_epoch() const noexcept override { return epoch_; }
  [[nodiscard]] const step_plans& plans() const noexcept { return plans_; }
  [[nodiscard]] const step_metadata& metadata() const noexcept { return metadata_; }

  /// Plans `input` next to what is current; nothing else changes but capacity. Throws as `plan_step` does.
  void compute(const plan_input& input);
  /// Makes room for what was computed and uploads it in `stream`, then makes it current. Throws `error`; what was
  /// current then stays so.
  void adopt(cudaStream_t stream);
  /// Makes room for all steps within these limits, all of it or none; what was current is lost. Throws `error`; nothing
  /// has changed then. In no stream: waits for what that takes.
  void reserve(const attention_spec& spec, const step_limits& limits);

  /// The plan's part of a call's arguments.
  void fill(attention_kernel_args& args) const noexcept;
  /// A call was served by the general implementation without its list of items: later steps have one.
  void note_general_needed() const noexcept { general_was_needed_.store(true, std::memory_order_relaxed); }

 private:
  /// Pinned metadata on its way to the device, and the event after which it may be overwritten.
  struct staging_slot {
    buffer metadata;
    cudaEvent_t copied = nullptr;
    bool pending = false;
  };

  /// Bytes that plans take. The metadata is laid out in this order, general's header first; its items are last, because
  /// most steps upload none.
  struct room {
    std::size_t decode_bytes = 0;
    std::size_t prefill_bytes = 0;
    std::size_t latent_bytes = 0;
    std::size_t item_bytes = 0;
    std::size_t workspace_bytes = 0;
    std::size_t counter_bytes = 0;
  };
  /// Where each part of the metadata begins in its buffer.
  struct offsets {
    std::size_t decode = 0;
    std::size_t prefill = 0;
    std::size_t latent = 0;
    std::size_t items = 0;
    std::size_t end = 0;
  };
  /// Buffers that are larger than the ones held, made before any of those is touched; empty where there is room.
  struct larger_buffers {
    buffer metadata;
    buffer workspace;
    buffer counters;
    std::array<buffer, 4> pinned;
    offsets places;
  };
  /// What the launches of a step's calls hold by value of its plans, but for addresses of buffers. Not x_split's number
  /// of splits, and not whether there is a list of general's items: what a launch was captured with stays right for
  /// both.
  struct captured_values {
    implementation_set assigned;
    bool has_query_positions = false;
    std::int32_t rows_per_tile = 0;  // general's, and the next one
    std::int32_t num_dim_tiles = 0;
    bool has_decodes = false;  // x_split's, and the next two
    bool has_others = false;
    std::int32_t max_partitions = 0;
    std::int32_t decode_grid = 0;
    bool decode_few_rows = false;
    // Of prefill and of latent, where they have sequences.
    std::int64_t prefill_tokens = 0;
    std::int32_t packed_heads = 0;
    bool prefill_combines = false;
    std::int64_t latent_tokens = 0;
    bool few_rows = false;
    bool latent_combines = false;
    friend bool operator==(const captured_values&, const captured_values&) = default;
  };
  struct known_epoch {
    captured_values values;
    std::uint64_t epoch = 0;
  };
  [[nodiscard]] static captured_values captured_by(const step_plans& plans) noexcept;
  /// The number that steps with these values have since buffers moved last; a new one where there is none.
  [[nodiscard]] std::uint64_t epoch_of(const captured_values& values) noexcept;

  [[nodiscard]] room room_for_next() const noexcept;
  [[nodiscard]] larger_buffers make_room(const room& needed, cudaStream_t stream);
  void commit(larger_buffers& larger) noexcept;
  [[nodiscard]] std::size_t write_next(std::byte* begin, const offsets& places) const noexcept;

  std::shared_ptr<const device_state> state_;
  device_memory_resource device_memory_;
  pinned_memory_resource pinned_memory_;
  step_plans plans_, next_;
  step_metadata metadata_;
  buffer metadata_memory_;
  buffer workspace_;  // partial results
  buffer counters_;   // zero between calls
  offsets places_;
  std::array<staging_slot, 4> staging_;
  std::size_t next_slot_ = 0;
  std::int32_t least_partitions_ = 1;
  // Written by calls, read by planning; one plan serves one call at a time, and planning is no call.
  mutable std::atomic<bool> general_was_needed_{false};
  std::uint64_t epoch_ = 0;
  std::uint64_t last_epoch_ = 0;         // the highest one given
  std::array<known_epoch, 64> known_{};  // in the present buffers, the one met last first
  std::size_t num_known_ = 0;
};

}  // namespace bifolio::inline v0_2::cuda
