// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The only place where the cache logic and the devices meet. `step_plan` is what was decided, in ids, loggable and
/// replayable; `step_batch_view` is what kernels read, flat arrays in the field's usual form.

#include <bifolio/types.hpp>
#include <cstdint>
#include <vector>

namespace bifolio {

/// Copy the contents of one block to another, in every layer. A list of pairs takes effect as if done in order.
struct block_copy {
  block_id src = invalid_block;
  block_id dst = invalid_block;
  friend constexpr bool operator==(const block_copy&, const block_copy&) = default;
};

/// One sequence's part of a step.
struct scheduled_seq {
  seq_id seq = invalid_seq;
  std::int32_t query_len = 0;  ///< tokens computed in this step, ≥ 1
  std::int32_t seq_len = 0;    ///< tokens visible after this step's tokens are stored
};

/// Everything one step will do, in the order of the batch.
struct step_plan {
  std::int64_t step = 0;  ///< running number
  std::vector<scheduled_seq> seqs;
  std::vector<block_copy> copies;  ///< copy-on-write, to be carried out before anything of the step is appended
  std::vector<seq_id> preempted;   ///< put back to the waiting queue; their blocks are free again
  std::int64_t num_tokens = 0;     ///< Σ query_len
};

/// Flat arrays for one step, borrowed. Row i belongs to the i-th sequence; rows of the q, k, v and out tensors are the
/// tokens of all sequences one after another.
struct step_batch_view {
  std::int32_t num_seqs = 0;
  std::int64_t num_tokens = 0;                    ///< = query_start_loc[num_seqs]
  const std::int32_t* query_start_loc = nullptr;  ///< [num_seqs + 1], starts at 0, never decreasing
  const std::int32_t* seq_lens = nullptr;         ///< [num_seqs], tokens visible, the new ones included
  const std::int32_t* block_tables =
      nullptr;                          ///< [num_seqs, block_table_stride]; entries past the length are never read
  std::int64_t block_table_stride = 0;  ///< entries from a row to the next
  const std::int64_t* slot_mapping = nullptr;  ///< [num_tokens]; a negative slot is not stored
};

/// Owns the host arrays behind a `step_batch_view`. Capacity is kept between steps.
struct step_batch {
  std::vector<std::int32_t> query_start_loc;
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t> block_tables;
  std::int64_t block_table_stride = 0;
  std::vector<std::int64_t> slot_mapping;

  [[nodiscard]] step_batch_view view() const noexcept {
    return {static_cast<std::int32_t>(seq_lens.size()),
            static_cast<std::int64_t>(slot_mapping.size()),
            query_start_loc.data(),
            seq_lens.data(),
            block_tables.data(),
            block_table_stride,
            slot_mapping.data()};
  }
};

}  // namespace bifolio
