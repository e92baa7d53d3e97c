// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What a `model_cache` owns, and the states of its steps.

#include <array>
#include <bifolio/model_cache.hpp>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace bifolio::inline v0_2::detail {

/// One step between begin and commit. Capacity is kept for the steps after it.
struct model_step_state {
  enum class stage : std::uint8_t {
    free,
    scheduled,    ///< by a scheduler; swaps are next
    swapped_out,  ///< copies are next
    copied,       ///< arrays and plans are next
    begun,
  };
  stage at = stage::free;
  std::uint64_t number = 0;         ///< counts the steps of a cache
  scheduler* requests = nullptr;    ///< null: a step of rows
  const step_plan* plan = nullptr;  ///< own_plan, or the scheduler's
  step_plan own_plan;
  step_inputs inputs;
  std::array<device_step_view, max_layer_groups> on_device{};  // by group
  stream_ref stream;
  bool swaps_failed = false;
  /// Per row of own_plan: tokens with slots before the step, and whether its tokens are known.
  struct row_state {
    std::int64_t num_tokens_before = 0;
    bool has_tokens = false;
  };
  std::vector<row_state> rows;
};

/// Layers whose attention is planned alike.
struct layer_plan {
  attention_spec spec;
  attention_plan plan;
};

/// The layers of one group.
struct group_storage {
  group_kind kind = group_kind::full;
  std::string implementation;          // what its attention_spec::implementation names
  std::optional<cache_engine> engine;  // none without layers
  std::optional<cache_engine> host;
  std::vector<layer_plan> plans;  // none of a state group
};

/// Where a layer of the model is.
struct layer_place {
  std::uint32_t group = 0;
  std::int32_t layer = 0;  // of the group's engine
  std::uint32_t plan = 0;  // of the group's plans
};

struct model_state {
  model_state(backend& device, const model_cache_config& given);

  [[nodiscard]] bool has_layer(std::int32_t layer) const noexcept {
    return static_cast<std::size_t>(layer) < places.size() && layer >= 0;
  }
  [[nodiscard]] const layer_place& place_of(std::int32_t layer) const noexcept {
    return places[static_cast<std::size_t>(layer)];
  }
  [[nodiscard]] group_storage& group_of(const layer_place& place) noexcept { return groups[place.group]; }
  [[nodiscard]] const layer_plan& plan_for(std::int32_t layer) const noexcept {
    const layer_place& place = place_of(layer);
    return groups[place.group].plans[place.plan];
  }
  [[nodiscard]] const kv_cache_view& view_of(const layer_place& place) const noexcept {
    return groups[place.group].engine->layers()[static_cast<std::size_t>(place.layer)];
  }
  /// Whether the layers of a group have keys and values, and whether each step has some to store.
  [[nodiscard]] bool attends(const layer_place& place) const noexcept {
    return groups[place.group].kind != group_kind::state;
  }
  [[nodiscard]] bool stores(const layer_place& place) const noexcept {
    return attends(place) && groups[place.group].kind != group_kind::cross;
  }

  /// Whether a sequence has a row in a step of rows that is not committed.
  [[nodiscard]] bool is_in_step(seq_id seq) const noexcept {
    const auto index = static_cast<std::uint32_t>(to_index(seq));
    return of_rows != nullptr && index < row_marks.size() && row_marks[index] == of_rows->number;
  }
  void require_not_in_step(const char* call, seq_id seq) const;

  [[nodiscard]] model_step_state* free_slot() noexcept;
  /// Fills `slot.inputs` but for the batch, whose arrays the manager builds.
  void fill_inputs(model_step_state& slot, std::span<const step_row> given) noexcept;
  /// Checks rows and makes room for them. Changes no sequence.
  void prepare_rows(model_step_state& slot, std::span<const step_row> given);
  /// Slots for the rows: copies are carried out. On another status than ok nothing is longer than before.
  [[nodiscard]] alloc_status grow_rows(model_step_state& slot);
  /// The copies of a step that could not be begun: what was put in the place of a shared block must hold its contents.
  void copy_after_failure(model_step_state& slot) noexcept;
  /// Throws `error` (failed_precondition): no state is kept after the accepted tokens of a row.
  void require_state_after(const scheduled_seq& row, std::int32_t num_accepted) const;
  /// Takes back the slots that the first `num_rows` rows took.
  void take_back(model_step_state& slot, std::size_t num_rows) noexcept;
  /// Arrays on the device, and plans.
  void upload_and_plan(model_step_state& slot);
  void carry_out_copies(std::size_t group, std::span<const block_copy> copies, stream_ref stream);
  /// What appending left to be copied in groups other than the first, after `plan.groups` was given room for it.
  void collect_copies(step_plan& plan);
  /// The same kind of moves in all groups, between an engine and its host's; `which` picks them from a `step_plan` or
  /// `group_moves`.
  template <class Which>
  [[nodiscard]] errc swap(const step_plan& plan, const Which& which, bool out, stream_ref stream);
  [[nodiscard]] errc swap_group(std::size_t group, std::span<const block_copy> moves, bool out, stream_ref stream);
  void commit_rows(model_step_state& slot, std::span<const std::int32_t> num_accepted);

  backend* where;
  std::uint64_t number;  // of the cache, another one for each of the process
  model_cache_config config;
  kv_cache_manager manager;
  std::unique_ptr<backend> host_backend;  // where the device is not the host itself
  std::deque<group_storage> groups;
  std::vector<layer_place> places;  // [num_layers]
  bool has_states = false;

  std::vector<std::unique_ptr<model_step_state>> slots;  // [max_steps_in_flight]
  model_step_state* of_rows = nullptr;                   // a step of rows that is begun
  model_step_state* newest = nullptr;                    // the step whose arrays are on the device
  std::uint64_t num_steps = 0;
  std::vector<std::uint64_t> row_marks;        // by index of a sequence: the last step of rows that it was part of
  std::vector<host_demand> demands;            // scratch of commit
  std::vector<std::vector<block_copy>> moves;  // scratch of swaps, by group
};

}  // namespace bifolio::inline v0_2::detail
