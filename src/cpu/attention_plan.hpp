// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The CPU's plan of one step's attention: work items, the workspace of partial results, and one scratch per worker.
///
/// A *query tile* is some consecutive tokens of a sequence × some consecutive KV heads; its rows share a pass over K
/// and V. Tiles with few rows (decode) hold all KV heads, so that a block is read in the order of its addresses; tiles
/// with many rows (prefill) hold one. Long tiles are split into *items* over the splits of the keys, and over the heads
/// where that is not enough for the workers; the last item of a tile to complete combines the partial results. The
/// split may depend on the number of workers, because no bit of a result depends on the split.

#include <atomic>
#include <bifolio/attention.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/memory_resource.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "cpu/kernels/attention/kernels.hpp"

namespace bifolio::inline v0_2::cpu {

/// An uninitialised array of plain values in memory from a memory resource. It never shrinks.
template <class T>
class grown_array {
 public:
  static_assert(std::is_trivially_destructible_v<T>);

  /// Makes room for `count` values; the contents are lost. Throws `error` (out_of_memory) with the array as it was.
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
  std::int32_t counter = -1;  ///< index of its completion counter, −1 = none
  std::int32_t num_tokens = 0;
  std::int32_t kv_head_begin = 0;
  std::int32_t kv_head_end = 0;
  std::int32_t split_begin = 0;
  std::int32_t split_end = 0;
};

/// Counts the items of a query tile and head part that have not completed. Every item subtracts 1 (acquire-release: the
/// last one reads the others' partial results); the last one resets the counter for the next call.
struct completion_counter {
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
  std::int32_t num_workers = 1;  ///< workers with scratch; 1 also where more do not pay
  grown_array<planned_item> items;
  grown_array<completion_counter> counters;
  grown_array<float> partials;
  grown_array<float> scratch;  ///< num_workers arrays of `worker_floats`
  std::int64_t worker_floats = 0;
  std::atomic<std::int32_t> next_item{0};  ///< taken from by all workers; relaxed: the executor orders the rest

  /// The arrays of one worker.
  [[nodiscard]] attention_scratch scratch_of(std::int32_t worker) noexcept;

  // Floats of each array of a worker's scratch, in the order of attention_scratch.
  struct scratch_sizes {
    std::int64_t keys = 0, values = 0, queries = 0, scores = 0, states = 0, sums = 0, totals = 0, query_sums = 0,
                 staging = 0, probabilities = 0, value_pairs = 0, pending = 0, zero_row = 0;
  } sizes;
};

}  // namespace bifolio::inline v0_2::cpu
