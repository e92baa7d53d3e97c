// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The CPU's cut of one step's attention: work items, the workspace of partial results, and one scratch per lane.
///
/// A *unit* is (sequence, run of its tokens, run of KV heads); one unit's rows share a pass over K and V. Units with
/// few rows (decode) hold all KV heads, so that a block is read in the order of memory; units with many (prefill) hold
/// one. Long units are cut into *items* over splits of the keys, and over heads where that is not enough for the lanes;
/// the last item of a unit to finish folds the partial results. The cut may follow the number of lanes, because no bit
/// of a result depends on it.

#include <atomic>
#include <bifolio/attention.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/memory_resource.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "cpu/kernels/attention/kernels.hpp"

namespace bifolio::cpu {

/// An uninitialised array of plain values in a memory resource that only grows.
template <class T>
class grown_array {
 public:
  static_assert(std::is_trivially_destructible_v<T>);

  /// Room for `count` values; what was there is lost. Throws `error` (out_of_memory) with the array as it was.
  void require(memory_resource& memory, std::size_t count) {
    if (count <= capacity_) return;
    buffer fresh(memory, count * sizeof(T), 64);
    storage_.swap(fresh);
    capacity_ = count;
  }
  [[nodiscard]] T* data() noexcept { return storage_.as<T>(); }
  [[nodiscard]] const T* data() const noexcept { return storage_.as<T>(); }
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  void swap(grown_array& other) noexcept {
    storage_.swap(other.storage_);
    std::swap(capacity_, other.capacity_);
  }

 private:
  buffer storage_;
  std::size_t capacity_ = 0;
};

/// An `attention_item` before the addresses of a call are known.
struct planned_item {
  std::int64_t cost = 0;  ///< estimated nanoseconds
  std::int64_t first_token = 0;
  std::int64_t first_position = 0;
  std::int64_t seq_len = 0;
  std::int64_t partials = -1;  ///< offset in the workspace, −1 = none
  std::int32_t seq = 0;
  std::int32_t unit = -1;  ///< index of its countdown, −1 = none
  std::int32_t num_tokens = 0;
  std::int32_t kv_head_begin = 0;
  std::int32_t kv_head_end = 0;
  std::int32_t split_begin = 0;
  std::int32_t split_end = 0;
};

/// Items of a unit that have not finished. Every item subtracts 1 (acquire-release: the last one sees the others'
/// partial results) and the last sets it back for the next call.
struct unit_countdown {
  std::atomic<std::int32_t> pending;
  std::int32_t num_items;
};

class cpu_attention_plan final : public attention_plan_state {
 public:
  cpu_attention_plan() noexcept : attention_plan_state(&owner_address) {}
  /// Every CPU backend takes the plans of another.
  static constexpr char owner_address = 0;

  attention_window window;
  std::int32_t num_items = 0;
  std::int32_t num_lanes = 1;  ///< lanes that the scratch is made for; 1 also where more are not worth their start
  grown_array<planned_item> items;
  grown_array<unit_countdown> countdowns;
  grown_array<float> partials;
  grown_array<float> scratch;  ///< num_lanes arrays of `lane_floats`
  std::int64_t lane_floats = 0;
  std::atomic<std::int32_t> next_item{0};  ///< pulled from by all lanes; relaxed, the executor orders the rest

  /// The pointers of one lane.
  [[nodiscard]] attention_scratch scratch_of(std::int32_t lane) noexcept;

  // Floats of each part of a lane's scratch, in the order of attention_scratch.
  struct scratch_sizes {
    std::int64_t keys = 0, values = 0, queries = 0, scores = 0, states = 0, sums = 0, totals = 0, staging = 0,
                 zero_row = 0;
  } sizes;
};

}  // namespace bifolio::cpu
