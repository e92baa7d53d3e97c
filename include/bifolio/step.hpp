// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The only place where the cache logic and the devices meet. `step_plan` is what was decided, in ids, loggable and
/// replayable; a step view is what planning and kernels read, flat arrays in the field's usual form, on the host
/// (`host_step_view`) or on the device (`device_step_view`).

#include <bifolio/export.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bifolio::inline v0_2 {

/// Padding entry of block-table rows, where no kernel reads: right of a sequence's length and left of its sliding
/// window. It is larger than any block id; planning refuses it where a kernel would read it.
inline constexpr std::int32_t padding_entry = 2147480000;

/// Copy the contents of one block to another, in every layer. A list of pairs takes effect as if done in order.
struct block_copy {
  block_id src = invalid_block;
  block_id dst = invalid_block;
  friend constexpr bool operator==(const block_copy&, const block_copy&) = default;
};

/// The block moves of one layer group in a step, as the fields of the same names of `step_plan`.
struct group_moves {
  std::vector<block_copy> copies;
  std::vector<block_copy> swap_outs;
  std::vector<block_copy> swap_ins;
  friend bool operator==(const group_moves&, const group_moves&) = default;
};

/// One sequence's part of a step.
struct scheduled_seq {
  seq_id seq = invalid_seq;
  std::int32_t query_len = 0;            ///< tokens computed in this step, ≥ 1
  std::int32_t seq_len = 0;              ///< tokens visible after this step's tokens are stored
  request_id request = invalid_request;  ///< whose sequence it is, when a `scheduler` made the plan
  std::int32_t sample = 0;               ///< which of the request's parallel samples
  /// Tokens to be sampled from the row of its last token: 0 while more of its known tokens are to be computed, else 1,
  /// and the request's num_samples or beam_width in the step that completes its prompt (after which it forks).
  /// With drafts 1 + num_drafts: one from each of its last 1 + num_drafts rows.
  std::int32_t num_samples = 0;
  std::int32_t num_drafts = 0;         ///< the last of its tokens are drafts (`scheduler::propose`)
  std::int32_t num_cached_tokens = 0;  ///< in the step that admits it: found in the prefix cache, not computed
  friend constexpr bool operator==(const scheduled_seq&, const scheduled_seq&) = default;
};

/// Everything one step will do, in the order of the batch. Steps are executed in their order, and each of them so:
/// swap_outs, then copies, then append and attention; swap_ins at any time after the copies, but before the next step.
struct step_plan {
  std::int64_t step = 0;  ///< running number
  std::vector<scheduled_seq> seqs{};
  std::vector<block_copy> copies{};     ///< copy-on-write, to be carried out before anything of the step is appended
  std::vector<block_copy> swap_outs{};  ///< (device block, host block)
  std::vector<block_copy> swap_ins{};   ///< (host block, device block)
  std::vector<seq_id> swapped_out{};    ///< preempted, keeping their tokens' K and V in host blocks
  std::vector<seq_id> swapped_in{};     ///< back on the device; computed from the next step on
  std::vector<seq_id> preempted{};      ///< back in the waiting queue; their blocks are free again
  std::vector<request_id> aborted{};    ///< requests dropped by `scheduler::post_abort`
  /// Σ query_len. `kv_cache_manager::build` takes it from `seqs`, and refuses another number here that is not 0.
  std::int64_t num_tokens = 0;
  /// Moves of layer groups 1, 2, …; those of group 0 are above. Empty with one group.
  std::vector<group_moves> groups{};
  std::vector<seq_id> encoded{};  ///< with cross groups: sequences whose encoder output this step computes and stores
  /// Whether there is nothing to execute and nothing to commit.
  [[nodiscard]] bool empty() const noexcept { return seqs.empty() && swapped_out.empty() && swapped_in.empty(); }
  friend bool operator==(const step_plan&, const step_plan&) = default;
};

/// The plan as one line of JSON without line breaks, for logs: {"step":…,"seqs":[{"seq":…,"query_len":…,…},…],
/// "copies":[[src,dst],…],"swap_outs":[[src,dst],…],"swap_ins":[[src,dst],…],"swapped_out":[…],"swapped_in":[…],
/// "preempted":[…],"aborted":[…],"num_tokens":…}. Ids are their integers. Where they are not
/// empty, "groups":[{"copies":…,"swap_outs":…,"swap_ins":…},…] and "encoded":[…] follow.
[[nodiscard]] BIFOLIO_API std::string to_string(const step_plan& plan);

/// The inverse: parse_step_plan(to_string(plan)) == plan. Names may come in any order, with white space between them;
/// an absent field is 0 or empty. Throws `error` (invalid_argument) with the place for anything else.
[[nodiscard]] BIFOLIO_API step_plan parse_step_plan(std::string_view json);

enum class array_place : std::uint8_t { host, device };

/// Flat arrays for one step, borrowed. Row i belongs to the i-th sequence; rows of the q, k, v and out tensors are the
/// tokens of all sequences one after another.
///
/// Views of host arrays and of device arrays are types of their own, so that one does not compile in the place of the
/// other: `backend::plan_attention` reads the host's, `backend::attention` the device's. `cache_engine::upload` makes
/// the second of a batch, on the CPU without a copy.
template <array_place Place>
struct step_view {
  std::int32_t num_seqs = 0;
  std::int64_t num_tokens = 0;                    ///< = query_start_loc[num_seqs]
  const std::int32_t* query_start_loc = nullptr;  ///< [num_seqs + 1], starts at 0, never decreasing
  const std::int32_t* seq_lens = nullptr;         ///< [num_seqs], tokens visible, the new ones included
  const std::int32_t* block_tables =
      nullptr;                          ///< [num_seqs, block_table_stride]; entries past the length are never read
  std::int64_t block_table_stride = 0;  ///< entries from a row to the next
  const std::int64_t* slot_mapping = nullptr;  ///< [num_tokens]; a negative slot is not stored
  /// Optional, [num_seqs]: position of each sequence's first new token, counted from the first key of its table row.
  /// Null: the last new token is at the last key. For rows that cover a part of a sequence: a row whose first key is at
  /// position f has, for new tokens from position p on, p − f. It may be negative, or past the row's last key.
  const std::int32_t* query_positions = nullptr;
};

using host_step_view = step_view<array_place::host>;
using device_step_view = step_view<array_place::device>;

/// The same numbers and pointers as a view of device arrays. Requires a backend that reads host memory (the CPU), or
/// that the caller then puts the pointers of the device in their place.
[[nodiscard]] constexpr device_step_view as_device_view(const host_step_view& host) noexcept {
  return {host.num_seqs,     host.num_tokens,         host.query_start_loc, host.seq_lens,
          host.block_tables, host.block_table_stride, host.slot_mapping,    host.query_positions};
}

/// Owns the host arrays behind a `host_step_view`. Capacity is kept between steps.
struct step_batch {
  std::vector<std::int32_t> query_start_loc;
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t> block_tables;
  std::int64_t block_table_stride = 0;
  std::vector<std::int64_t> slot_mapping;
  std::vector<std::int32_t> query_positions;  ///< empty for none; `kv_cache_manager::build` empties it
  /// Of the pool whose blocks the tables name, as `kv_cache_manager::build` notes them; 0: not known.
  /// `cache_engine::upload` refuses those of another pool.
  std::int32_t block_size = 0;
  std::int64_t num_blocks = 0;
  /// Notes of `kv_cache_manager::build`: the change of a table (its number is unique over all tables) as of which a row
  /// of block_tables was written. Rows that only grew since are not written again, so code that changes block_tables
  /// must clear these.
  struct written_row {
    std::uint64_t change = 0;
    std::int32_t num_entries = 0;
  };
  std::vector<written_row> written_rows;

  [[nodiscard]] host_step_view view() const noexcept {
    return {static_cast<std::int32_t>(seq_lens.size()),
            static_cast<std::int64_t>(slot_mapping.size()),
            query_start_loc.data(),
            seq_lens.data(),
            block_tables.data(),
            block_table_stride,
            slot_mapping.data(),
            query_positions.empty() ? nullptr : query_positions.data()};
  }
};

}  // namespace bifolio::inline v0_2
