// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What a `model_cache` owns, and the states of its steps.

#include <bifolio/model_cache.hpp>
#include <cstddef>
#include <cstdint>
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
  device_step_view on_device;
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

struct model_state {
  model_state(backend& device, const model_cache_config& given);

  [[nodiscard]] bool has_layer(std::int32_t layer) const noexcept {
    return static_cast<std::size_t>(layer) < plan_of_layer.size() && layer >= 0;
  }
  [[nodiscard]] const layer_plan& plan_for(std::int32_t layer) const noexcept {
    return plans[plan_of_layer[static_cast<std::size_t>(layer)]];
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
  /// Takes back the slots that the first `num_rows` rows took.
  void take_back(model_step_state& slot, std::size_t num_rows) noexcept;
  /// Arrays on the device, and plans.
  void upload_and_plan(model_step_state& slot);
  void carry_out_copies(std::span<const block_copy> copies, stream_ref stream);
  void commit_rows(model_step_state& slot, std::span<const std::int32_t> num_accepted);

  backend* where;
  model_cache_config config;
  std::string implementation;  // what config.attention.implementation names
  kv_cache_manager manager;
  cache_engine engine;
  std::unique_ptr<backend> host_backend;  // where the device is not the host itself
  std::optional<cache_engine> host;
  std::vector<layer_plan> plans;
  std::vector<std::size_t> plan_of_layer;  // [num_layers]

  std::vector<std::unique_ptr<model_step_state>> slots;  // [max_steps_in_flight]
  model_step_state* of_rows = nullptr;                   // a step of rows that is begun
  model_step_state* newest = nullptr;                    // the step whose arrays are on the device
  std::uint64_t num_steps = 0;
  std::vector<std::uint64_t> row_marks;  // by index of a sequence: the last step of rows that it was part of
  std::vector<host_demand> demands;      // scratch of commit
  std::vector<block_copy> moves;         // scratch of swaps
};

}  // namespace bifolio::inline v0_2::detail
