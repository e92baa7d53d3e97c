// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A `kv_cache_manager` with several layer groups. Groups with block tables (full, window, cross) each have a
/// `manager_core`, groups with states a `state_slots` (src/common/cache/state_slots.hpp). Sequences are opened and
/// closed in all of them alike, so that a handle of one is a handle of all.
///
/// Every operation has three passes over the groups: each says whether it could be done (no state changes; a group that
/// cannot ends it), each makes room in its own records (which may throw, and changes no state that a digest sees), each
/// does it (which cannot fail).
///
/// Prefix caching: the first group registers full blocks by their tokens, as it does alone. What another group holds at
/// the end of such a block is registered under the serial number of the first group's contents: that number stands for
/// the whole text up to there, and no other contents ever had it. So a look-up compares tokens once, and finds a block
/// of another group by one probe. When the first group loses contents, the others lose what was registered under them.
///
/// The functions are in files by subject: group_manager.cpp (sequences), group_prefix.cpp, group_swap.cpp,
/// group_build.cpp, group_check.cpp.

#include <array>
#include <bifolio/block_pool.hpp>
#include <bifolio/content_key.hpp>
#include <bifolio/detail/manager_core.hpp>
#include <bifolio/detail/sequence.hpp>
#include <bifolio/error.hpp>
#include <bifolio/eviction_policy.hpp>
#include <bifolio/export.hpp>
#include <bifolio/kv_cache_config.hpp>
#include <bifolio/layer_groups.hpp>
#include <bifolio/prefix_cache.hpp>
#include <bifolio/stats.hpp>
#include <bifolio/step.hpp>
#include <bifolio/types.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace bifolio::inline v0_2::detail {

class state_slots;

class BIFOLIO_API group_manager final : private prefix_cache::removal_observer {
 public:
  /// `first` is the core of the first group, and its configuration that of all. Throws as `kv_cache_manager`.
  explicit group_manager(manager_core& first);
  ~group_manager();
  group_manager(const group_manager&) = delete;
  group_manager& operator=(const group_manager&) = delete;

  [[nodiscard]] std::int32_t num_groups() const noexcept { return static_cast<std::int32_t>(groups_.size()); }
  [[nodiscard]] std::int64_t blocks_at_peak(std::int64_t num_tokens, std::int64_t step_tokens,
                                            std::int32_t group) const;
  [[nodiscard]] std::int64_t watermark_blocks(std::int32_t group) const;
  [[nodiscard]] alloc_status can_allocate(std::int64_t num_tokens, std::int64_t step_tokens,
                                          const group_blocks& promised, std::int64_t num_cross_tokens) const;

  [[nodiscard]] allocate_result allocate(std::int64_t num_tokens, std::int64_t num_cross_tokens);
  [[nodiscard]] append_result append(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead);
  [[nodiscard]] bool append_in_place(seq_id seq, std::int64_t num_tokens) noexcept;
  [[nodiscard]] alloc_status can_append(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead) const;
  [[nodiscard]] bool has_room(seq_id seq, std::int64_t num_tokens) const noexcept;
  [[nodiscard]] std::int64_t blocks_to_append(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead,
                                              std::int32_t group) const;
  [[nodiscard]] std::int64_t step_limit(seq_id seq) const;
  void commit(seq_id seq, std::int64_t num_tokens);
  void commit(seq_id seq, std::span<const token_id> tokens);
  [[nodiscard]] allocate_result fork(seq_id seq);
  void truncate(seq_id seq, std::int64_t num_tokens);
  void free(seq_id seq);
  void drain_copies(std::int32_t group, std::vector<block_copy>& copies);
  void reserve_host_memory(std::span<const host_demand> demands);

  // group_prefix.cpp
  [[nodiscard]] admission can_open(const prompt_view& prompt, std::int64_t step_tokens, const group_blocks& promised);
  [[nodiscard]] open_result open(const prompt_view& prompt, std::int64_t num_new_tokens);
  void append_keys(const prompt_view& prompt, std::vector<content_key>& keys) const;
  /// The first group has registered the block at `index` of a sequence, or found it registered.
  void first_published(const sequence& record, std::int32_t index, const prefix_chain& contents) noexcept;
  [[nodiscard]] bool reset_prefix_cache();
  void advance_clock(std::int64_t now) noexcept;

  // group_swap.cpp
  [[nodiscard]] alloc_status swap(std::span<const seq_id> seqs, bool out, std::span<std::vector<block_copy>> copies);
  [[nodiscard]] std::int64_t blocks_to_swap_in(std::span<const seq_id> seqs, std::int32_t group) const;
  void forget_copies(std::span<const block_copy> swap_outs, std::span<const block_copy> swap_ins,
                     std::int32_t group) noexcept;
  [[nodiscard]] fence_id open_fence();
  void retire(fence_id fence);
  [[nodiscard]] bool has_fenced_blocks() const noexcept;

  // group_build.cpp
  void build(step_batch& first, std::span<step_batch> others, const step_plan& plan) const;
  [[nodiscard]] block_id state_at(seq_id seq, std::int64_t position, std::int32_t group) const;

  // group_check.cpp
  /// Of a group with tables. Throws `error`: out_of_range (no such group), invalid_argument (a state group).
  [[nodiscard]] const manager_core& core(std::int32_t group) const;
  [[nodiscard]] const block_pool& pool(std::int32_t group) const;
  [[nodiscard]] const prefix_cache* prefix(std::int32_t group) const;
  [[nodiscard]] std::int64_t num_free_host_blocks(std::int32_t group) const;
  void drain_events(std::int32_t group, std::vector<cache_event>& events);
  [[nodiscard]] cache_stats stats(std::int32_t group) const;
  [[nodiscard]] std::int64_t num_cross_tokens(seq_id seq) const;
  [[nodiscard]] std::int64_t num_held_blocks(seq_id seq, std::int32_t group) const;
  [[nodiscard]] std::string check() const;
  [[nodiscard]] std::uint64_t digest() const noexcept;

 private:
  struct layer_group;
  struct joint_hits;
  /// Of a sequence, by its record's index.
  struct sequence_marks {
    // Lengths at which a later prompt is likely to go on; 0: none. Steps end there when there are states.
    std::int32_t longer_hit = 0;   ///< where the first group's hits ended, which not every group had
    std::int32_t last_spaced = 0;  ///< the last multiple of the snapshot interval in the prompt
    std::int32_t last_border = 0;  ///< the last common block border in the prompt
    prefix_chain rolling{};        ///< contents at the last block border that decoding passed, kept until the next one
    extras_id cross_key = no_extras;
    bool is_cached = true;  ///< false for one with an encoder's output that nothing identifies
  };

  /// Whether prompts go on from the states that decoding left. Where few do, most of these are the first to be evicted,
  /// and a sample is kept as others are, so that a change is seen. Counts are halved from time to time for the same
  /// reason.
  class rolling_worth {
   public:
    /// A prompt went on from a cached text; from such a state.
    void count(bool from_rolling) noexcept {
      num_taken_ += from_rolling ? 1 : 0;
      if (++num_asked_ < 1024) return;
      num_asked_ /= 2;
      num_taken_ /= 2;
    }
    /// Whether the state that is left now is worth as much as others.
    [[nodiscard]] bool is_likely() noexcept {
      return num_asked_ < 64 || 32 * num_taken_ >= num_asked_ || ++num_left_ % 16 == 0;
    }
    [[nodiscard]] std::array<std::uint32_t, 3> counts() const noexcept { return {num_asked_, num_taken_, num_left_}; }

   private:
    std::uint32_t num_asked_ = 0, num_taken_ = 0, num_left_ = 0;
  };

  [[nodiscard]] layer_group& at(std::int32_t group) const;
  [[nodiscard]] static std::uint32_t index_of(seq_id seq) noexcept { return static_cast<std::uint32_t>(to_index(seq)); }
  [[nodiscard]] std::int32_t room_end(std::uint32_t index) const noexcept;
  void note_room(std::uint32_t index) noexcept { room_ends_[index] = room_end(index); }
  [[nodiscard]] bool has_room_at(std::uint32_t index, std::int64_t num_tokens) const noexcept;
  [[nodiscard]] sequence_marks& marks_of(const sequence& record) const noexcept;
  void reserve_all_events(std::int64_t num_first, std::int64_t num_own);
  void commit_all(sequence& record, std::int64_t num_tokens) noexcept;
  [[nodiscard]] bool commit_in_place(sequence& record, std::int64_t num_tokens) noexcept;
  void publish_cross(const sequence& record, layer_group& group) noexcept;
  void publish_states(const sequence& record, std::int64_t position, const prefix_chain& contents) noexcept;
  void release_marks(const sequence& record) noexcept;
  void removed(const prefix_chain& contents) noexcept override;
  [[nodiscard]] block_level level_of_state(const sequence_marks& marks, std::int64_t position,
                                           block_level likely) const noexcept;
  [[nodiscard]] block_level level_in_window(const sequence_marks& marks, std::int64_t begin, std::int64_t end,
                                            std::int64_t window, block_level likely) const noexcept;
  [[nodiscard]] retention_hint likely_hint(const sequence& record, std::int64_t index) const noexcept;
  bool publish_as(layer_group& group, block_id block, const prefix_chain& contents, std::int64_t offset,
                  std::int64_t index, const retention_hint& hint) noexcept;
  void raise_level(const layer_group& group, block_id block, block_level level) const noexcept;
  [[nodiscard]] std::int64_t next_cut(const sequence_marks& marks, std::int64_t position) const noexcept;

  [[nodiscard]] std::int64_t make_state_rows(layer_group& group, const step_plan& plan) const;
  [[nodiscard]] std::int64_t make_cross_rows(layer_group& group, const step_plan& plan) const;
  [[nodiscard]] prompt_view with_cross(const prompt_view& prompt) const;
  void find_cross(const prompt_view& prompt, joint_hits& found) const;
  [[nodiscard]] extra_key cross_extra(const prompt_view& prompt) const;
  void look_up(const prompt_view& prompt, joint_hits& found) const;
  [[nodiscard]] std::int64_t longest_hit(const layer_group& group, std::int64_t length) const noexcept;
  [[nodiscard]] block_id find_in(const layer_group& group, std::int64_t index) const noexcept;
  void collect_hits(const joint_hits& found) const;
  [[nodiscard]] block_id find_contents(const layer_group& group, const prefix_chain& first,
                                       std::int64_t offset) const noexcept;
  [[nodiscard]] alloc_status open_status(const joint_hits& found, std::int64_t num_tokens) const;

  manager_core& first_;
  kv_cache_config config_;
  std::vector<std::unique_ptr<layer_group>> groups_;
  std::vector<manager_core*> tables_;   // of the full and window groups, the first one's first
  std::vector<layer_group*> states_;    // groups with states
  std::vector<layer_group*> crosses_;   // cross groups
  std::int64_t alignment_ = 1;          // of hits: the least common multiple of the block sizes
  std::int64_t snapshot_interval_ = 0;  // of all groups that have one, at borders of all groups' blocks; 0: none
  bool records_events_ = false;
  // The level of likely contents of other groups than the first, which wait at levels by how likely they are asked for.
  // A policy that has a memory of its own decides for the first group alone.
  const eviction_policy* likely_policy_ = nullptr;
  mutable std::vector<sequence_marks> marks_;  // [max_sequences]
  rolling_worth rolling_worth_;
  std::vector<bool> is_rolling_;  // by state of the first state group: of those that are registered, decoding left it
  /// [max_sequences]: the least `writable_end` of a sequence in any group with a table, for appends in place.
  std::vector<std::int32_t> room_ends_;
  std::vector<host_demand> cross_demands_;      // scratch
  mutable std::vector<extra_key> extras_;       // scratch of with_cross
  mutable std::vector<std::byte> cross_value_;  // scratch: what identifies an encoder's input, scope included
  mutable std::vector<token_id> cross_tokens_;  // scratch: the blocks of an encoder's output, counted
};

}  // namespace bifolio::inline v0_2::detail
