// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Layer groups: layers that keep the same of a sequence share a pool and a block table. A model that mixes full
/// attention with sliding windows, recurrent states or cross attention has one group for each kind (or more, when
/// layers of a kind differ in block size or format), all in one `kv_cache_manager`.
///
/// Each group has blocks of its own: block 5 of one has nothing to do with block 5 of another. Positions are common to
/// all groups: a sequence has the same tokens in each of them, and every call changes all of them or none.

#include <array>
#include <bifolio/export.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bifolio::inline v0_2 {

inline constexpr std::int32_t max_layer_groups = 8;

/// What the layers of a group keep of a sequence.
enum class group_kind : std::uint8_t {
  full,    ///< K and V of all tokens
  window,  ///< K and V of the tokens that later ones still attend to
  /// A recurrent state of constant size. A block is one state: the one after the first p tokens, for one p.
  state,
  cross,  ///< K and V of an encoder's output, whose length is its own and does not change
};

/// "full", "window", "state" or "cross".
[[nodiscard]] BIFOLIO_API std::string_view to_string(group_kind kind) noexcept;

struct group_config {
  group_kind kind = group_kind::full;
  /// Tokens, ≥ 1. Of a state group always 1. With prefix caching a multiple or a divisor of the first group's.
  std::int32_t block_size = 16;
  std::int64_t num_blocks = 0;       ///< 1 … max_num_blocks; of a state group: states
  std::int64_t num_host_blocks = 0;  ///< for sequences that are swapped out; in all groups or in none
  std::int32_t window = 0;           ///< of a window group, ≥ 1: tokens that a token attends to, itself included
  /// Of state and window groups other than the first, with prefix caching: a multiple of the first group's block_size,
  /// the same in all groups that have one. Prefixes of such lengths are kept for later prompts, the longest of each
  /// prompt longer than the others (kv_cache_manager.hpp). Where states are kept steps end. Where it is no multiple
  /// of every group's block_size, the least common multiple of these counts. 0: only what hits need.
  std::int32_t snapshot_interval = 0;
  /// Of a state group: a step of up to 1 + num_draft_slots tokens keeps the state after each of them, so that
  /// `truncate` can give up any number of its drafts. 0 … 64.
  std::int32_t num_draft_slots = 0;
  std::int32_t max_tokens = 0;  ///< of a cross group, ≥ 1: the longest encoder output
  friend constexpr bool operator==(const group_config&, const group_config&) = default;
};

/// A number of blocks per group; entries past the last group are 0.
using group_blocks = std::array<std::int64_t, max_layer_groups>;

/// What a sequence attends to in cross groups. All its samples share the blocks.
struct cross_input {
  std::int32_t num_tokens = 0;  ///< of the encoder's output; 0: the sequence has none
  /// Identifies the encoder's input. Sequences with equal digests share the blocks, and prompts are equal only if
  /// their digests are. Empty: unknown, so that nothing of the sequence is kept or found.
  std::span<const std::byte> digest{};
};

/// The layers of a group, for `plan_group_memory`.
struct group_shape {
  group_kind kind = group_kind::full;
  std::int32_t block_size = 16;
  std::int32_t window = 0;
  std::int32_t num_draft_slots = 0;
  std::int64_t block_bytes = 0;  ///< of one block in all layers of the group, K and V; of one state in all layers
};

/// The load that a memory budget is divided for.
struct group_load {
  std::int64_t num_sequences = 1;      ///< open at once
  std::int64_t tokens_each = 1;        ///< at their longest
  std::int64_t step_tokens = 1;        ///< computed of one sequence in one step
  std::int64_t steps_in_flight = 1;    ///< see scheduler_config::max_steps_in_flight
  std::int64_t cross_tokens_each = 0;  ///< of the encoder's output
  std::int64_t snapshots_each = 1;     ///< of each state group, kept for later prompts
  double watermark = 0.01;             ///< as kv_cache_config::watermark
};

struct group_memory_plan {
  std::vector<std::int64_t> num_blocks;  ///< per group, ≥ 1
  std::int64_t num_bytes = 0;            ///< of all blocks, ≤ the budget
  std::int64_t num_sequences = 0;        ///< of the load's sequences that fit at once
  std::string assumptions;               ///< what the division rests on, as a few sentences
};

/// Divides `memory_bytes` among the pools of groups: each gets what one sequence of the load needs in it, times the
/// number of sequences that the budget allows, so that no pool is full before the others. Memory beyond num_sequences
/// is divided in the same proportion, for contents that are cached. Throws `error` (invalid_argument): a field outside
/// its range, or a budget too small for one sequence.
[[nodiscard]] BIFOLIO_API group_memory_plan plan_group_memory(std::int64_t memory_bytes,
                                                              std::span<const group_shape> groups,
                                                              const group_load& load);

}  // namespace bifolio::inline v0_2
