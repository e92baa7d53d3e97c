// SPDX-License-Identifier: Apache-2.0
/// A step of a model's cache: the rows that a caller names, the calls of a layer, and its end.

#include <algorithm>
#include <bifolio/error.hpp>
#include <bifolio/model_cache.hpp>
#include <bifolio/rotate_append.hpp>
#include <utility>

#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"
#include "common/model/state.hpp"

namespace bifolio::inline v0_2 {
namespace detail {
namespace {

std::int32_t num_tokens_of(const step_row& row, std::size_t index) {
  const auto num_given = static_cast<std::int64_t>(row.tokens.size());
  if (num_given > INT32_MAX || (num_given > 0 && row.num_tokens != 0 && row.num_tokens != num_given)) {
    refuse(errc::invalid_argument, "row ", index, " of a step has ", num_given, " tokens and num_tokens ",
           row.num_tokens, "; num_tokens must be 0 or their number");
  }
  const std::int32_t count = num_given > 0 ? static_cast<std::int32_t>(num_given) : row.num_tokens;
  if (count < 1) refuse(errc::invalid_argument, "row ", index, " of a step has ", count, " tokens; it must have some");
  return count;
}

}  // namespace

void model_state::prepare_rows(model_step_state& slot, std::span<const step_row> given) {
  if (given.empty()) refuse(errc::invalid_argument, "a step has no rows; it must have at least one");
  slot.own_plan.step = static_cast<std::int64_t>(slot.number);
  slot.own_plan.seqs.clear();
  slot.own_plan.copies.clear();
  slot.rows.clear();
  slot.own_plan.copies.reserve(given.size());
  slot.own_plan.groups.resize(groups.size() - 1);
  slot.inputs.groups.resize(groups.size() - 1);
  for (group_moves& moved : slot.own_plan.groups) {
    moved.copies.clear();
    moved.copies.reserve(given.size());
  }
  std::int64_t num_tokens = 0;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const seq_id seq = given[i].seq;
    const std::int32_t count = num_tokens_of(given[i], i);
    const std::int64_t end = manager.num_committed(seq) + count;
    if (manager.is_swapped_out(seq)) {
      refuse(errc::failed_precondition, "row ", i, " of a step: sequence ", to_index(seq),
             " is swapped out; swap it in first");
    }
    std::uint64_t& mark = row_marks[static_cast<std::uint32_t>(to_index(seq))];
    if (mark == slot.number) refuse(errc::invalid_argument, "sequence ", to_index(seq), " has two rows in a step");
    mark = slot.number;
    if (end > config.cache.max_seq_len) {
      refuse(errc::invalid_argument, "row ", i, " of a step: sequence ", to_index(seq), " would have ", end,
             " tokens; max_seq_len is ", config.cache.max_seq_len);
    }
    slot.own_plan.seqs.push_back(
        {.seq = seq, .query_len = count, .seq_len = static_cast<std::int32_t>(end), .num_samples = 1});
    slot.rows.push_back({manager.num_tokens(seq), !given[i].tokens.empty()});
    num_tokens += count;
  }
  if (num_tokens > INT32_MAX) refuse(errc::invalid_argument, "a step of ", num_tokens, " tokens exceeds ", INT32_MAX);
  slot.own_plan.num_tokens = num_tokens;
  slot.inputs.tokens.resize(static_cast<std::size_t>(num_tokens));
  slot.inputs.positions.resize(static_cast<std::size_t>(num_tokens));
  slot.inputs.sample_rows.resize(given.size());
  slot.inputs.placeholders.clear();
}

alloc_status model_state::grow_rows(model_step_state& slot) {
  std::vector<block_copy>& copies = slot.own_plan.copies;
  std::size_t i = 0;
  alloc_status status = alloc_status::ok;
  try {
    for (; i < slot.rows.size(); ++i) {
      const scheduled_seq& row = slot.own_plan.seqs[i];
      std::int64_t& held = slot.rows[i].num_tokens_before;
      if (const std::int64_t begin = row.seq_len - row.query_len; has_states && held != begin && held != row.seq_len) {
        manager.truncate(row.seq, begin);  // a state is written by a step of its own length
        held = begin;
      }
      const std::int64_t missing = row.seq_len - held;
      if (missing <= 0 || manager.append_in_place(row.seq, missing)) continue;
      const append_result grown = manager.append(row.seq, missing);
      status = grown.status;
      if (status != alloc_status::ok) break;
      if (grown.has_copy()) copies.push_back(grown.copy);
    }
    // Also when slots are lacking: what was put in the place of a shared block must hold its contents.
    collect_copies(slot.own_plan);
    carry_out_copies(0, copies, slot.stream);
    for (std::size_t g = 1; g < groups.size(); ++g) {
      carry_out_copies(g, slot.own_plan.groups[g - 1].copies, slot.stream);
    }
  } catch (...) {
    copy_after_failure(slot);
    take_back(slot, i);
    throw;
  }
  if (status != alloc_status::ok) take_back(slot, i);
  return status;
}

void model_state::copy_after_failure(model_step_state& slot) noexcept {
  try {
    collect_copies(slot.own_plan);
  } catch (const error&) {  // no host memory for the list of a group: the manager keeps it for the next step
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& copies = g == 0 ? slot.own_plan.copies : slot.own_plan.groups[g - 1].copies;
    if (groups[g].engine) (void)groups[g].engine->copy_blocks(copies, slot.stream);
  }
}

void model_state::take_back(model_step_state& slot, std::size_t num_rows) noexcept {
  for (std::size_t i = 0; i < num_rows; ++i) {
    const seq_id seq = slot.own_plan.seqs[i].seq;
    try {
      if (manager.num_tokens(seq) > slot.rows[i].num_tokens_before) {
        manager.truncate(seq, slot.rows[i].num_tokens_before);
      }
    } catch (const error&) {  // freed on the manager, or no host memory: the slots stay for the next step
    }
  }
}

void model_state::fill_inputs(model_step_state& slot, std::span<const step_row> given) noexcept {
  std::size_t at = 0;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const scheduled_seq& row = slot.own_plan.seqs[i];
    const bool has_tokens = slot.rows[i].has_tokens;
    for (std::int32_t t = 0; t < row.query_len; ++t, ++at) {
      slot.inputs.tokens[at] = has_tokens ? given[i].tokens[static_cast<std::size_t>(t)] : token_id{-1};
      slot.inputs.positions[at] = row.seq_len - row.query_len + t;
    }
    slot.inputs.sample_rows[i] = static_cast<std::int32_t>(at) - 1;
  }
}

void model_state::require_state_after(const scheduled_seq& row, std::int32_t num_accepted) const {
  if (!has_states || num_accepted == 0 || num_accepted == row.query_len) return;
  const std::int64_t position = row.seq_len - row.query_len + num_accepted;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].kind != group_kind::state) continue;
    if (manager.state_at(row.seq, position, static_cast<std::int32_t>(g)) != invalid_block) continue;
    refuse(errc::failed_precondition, "commit: ", num_accepted, " of the ", row.query_len, " tokens of sequence ",
           to_index(row.seq), " are accepted, and group ", g,
           " does not keep the state after them: steps with drafts have at most 1 + num_draft_slots tokens");
  }
}

void model_state::commit_rows(model_step_state& slot, std::span<const std::int32_t> num_accepted) {
  const std::vector<scheduled_seq>& rows = slot.own_plan.seqs;
  if (!num_accepted.empty() && num_accepted.size() != rows.size()) {
    refuse(errc::invalid_argument, "commit got ", num_accepted.size(), " numbers for the ", rows.size(),
           " rows of the step");
  }
  const auto accepted = [&](std::size_t i) { return num_accepted.empty() ? rows[i].query_len : num_accepted[i]; };
  const bool publishes = manager.prefix() != nullptr;
  const bool slides = manager.config().sliding_window > 0 || groups.size() > 1;
  const std::int32_t block_size = manager.config().block_size;
  translate_bad_alloc("commit", [&] {
    demands.clear();
    demands.reserve(rows.size());
  });
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const scheduled_seq& row = rows[i];
    if (accepted(i) < 0 || accepted(i) > row.query_len) {
      refuse(errc::invalid_argument, "commit: ", accepted(i), " tokens of row ", i, " are accepted; it has ",
             row.query_len);
    }
    const std::int64_t num_tokens = std::max<std::int64_t>(slot.rows[i].num_tokens_before, row.seq_len);
    if (!manager.is_at(row.seq, num_tokens, row.seq_len - row.query_len)) {
      refuse(manager.contains(row.seq) ? errc::failed_precondition : errc::not_found, "commit: sequence ",
             to_index(row.seq), " was changed on the manager while its step was not committed");
    }
    require_state_after(row, accepted(i));
    const bool fills = row.query_len > 1 || row.seq_len % block_size == 0;
    if (slides || (publishes && fills) || accepted(i) < row.query_len) demands.push_back({row.seq, row.seq_len});
  }
  if (!demands.empty()) manager.reserve_host_memory(demands);
  const token_id* tokens = slot.inputs.tokens.data();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const scheduled_seq& row = rows[i];
    const std::int32_t count = accepted(i);
    if (publishes && slot.rows[i].has_tokens) {
      manager.commit(row.seq, std::span(tokens, static_cast<std::size_t>(count)));
    } else {
      manager.commit(row.seq, count);
    }
    if (count < row.query_len) manager.truncate(row.seq, row.seq_len - row.query_len + count);
    tokens += row.query_len;
  }
}

}  // namespace detail

using detail::model_step_state;

model_step::model_step(model_step&& other) noexcept
    : model_(other.model_), slot_(std::exchange(other.slot_, nullptr)), status_(other.status_) {}

model_step& model_step::operator=(model_step&& other) noexcept {
  if (this == &other) return *this;
  drop();
  model_ = other.model_;
  slot_ = std::exchange(other.slot_, nullptr);
  status_ = other.status_;
  return *this;
}

model_step::~model_step() { drop(); }

void model_step::drop() noexcept {
  if (slot_ == nullptr) return;
  if (model_->of_rows == slot_) {
    model_->take_back(*slot_, slot_->rows.size());
    model_->of_rows = nullptr;
  }
  slot_->at = model_step_state::stage::free;
  slot_ = nullptr;
}

const step_plan& model_step::plan() const noexcept { return *slot_->plan; }
const step_inputs& model_step::inputs() const noexcept { return slot_->inputs; }
std::int64_t model_step::num_tokens() const noexcept { return slot_->plan->num_tokens; }
const device_step_view& model_step::batch(std::int32_t group) const noexcept {
  return slot_->on_device[static_cast<std::size_t>(group)];
}

layer_states model_step::states(std::int32_t layer) const noexcept {
  const detail::layer_place& place = model_->place_of(layer);
  const kv_cache_view& storage = model_->view_of(place);
  const device_step_view& rows = slot_->on_device[place.group];
  return {static_cast<std::byte*>(storage.k), storage.layout.block_bytes(), rows.block_tables, rows.block_table_stride};
}

const attention_plan& model_step::attention_plan_of(std::int32_t layer) const noexcept {
  return model_->plan_for(layer).plan;
}

std::vector<std::uint64_t> model_step::graph_key() const {
  if (model_->where->where().type == device_type::cpu) return {};
  std::vector<std::uint64_t> key{model_->number};
  const auto add_address = [&](const void* array) { key.push_back(reinterpret_cast<std::uintptr_t>(array)); };
  for (std::size_t g = 0; g < model_->groups.size(); ++g) {
    if (!model_->groups[g].engine) continue;
    const device_step_view& arrays = slot_->on_device[g];
    key.push_back(static_cast<std::uint64_t>(arrays.num_seqs));
    key.push_back(static_cast<std::uint64_t>(arrays.num_tokens));
    key.push_back(static_cast<std::uint64_t>(arrays.block_table_stride));
    add_address(arrays.query_start_loc);
    add_address(arrays.seq_lens);
    add_address(arrays.block_tables);
    add_address(arrays.slot_mapping);
    add_address(arrays.query_positions);
    for (const detail::layer_plan& each : model_->groups[g].plans) {
      key.push_back(each.plan.state == nullptr ? 0 : each.plan.state->graph_epoch());
    }
  }
  return key;
}

attention_params model_step::complete(std::int32_t layer, const attention_params& params) const noexcept {
  const detail::layer_place& place = model_->place_of(layer);
  attention_params whole = params;
  whole.kv = model_->view_of(place);
  whole.batch = slot_->on_device[place.group];
  return whole;
}

std::optional<error> model_step::find_step_problem(std::int32_t layer, std::int64_t num_rows) const {
  if (slot_ == nullptr) {
    return detail::make_error(errc::failed_precondition, "the step is empty: it was not begun, or has ended");
  }
  if (model_->newest != slot_) {
    return detail::make_error(errc::failed_precondition,
                              "another step was begun after this one; layers are computed "
                              "in the step begun last");
  }
  if (!model_->has_layer(layer)) {
    return detail::make_error(errc::out_of_range, "layer ", layer, " is not there; the model has ",
                              model_->places.size());
  }
  const detail::layer_place& place = model_->place_of(layer);
  if (!model_->stores(place)) {
    return detail::make_error(errc::unsupported, "layer ", layer, " is of group ", place.group, ", of kind ",
                              to_string(model_->group_of(place).kind), ", which stores nothing of a step's tokens");
  }
  if (num_rows != num_tokens()) {
    return detail::make_error(errc::invalid_argument, "k has ", num_rows, " rows; the step has ", num_tokens(),
                              " tokens");
  }
  return std::nullopt;
}

std::optional<error> model_step::find_health_problem() const {
  if (const errc code = model_->where->health(); code != errc::ok) {
    return detail::make_error(code, "the device ", to_string(model_->where->where()),
                              " does not compute: ", to_string(code));
  }
  return std::nullopt;
}

std::optional<error> model_step::find_problem(std::int32_t layer, const attention_params& params,
                                              const const_tensor_view& k, const const_tensor_view& v) const {
  if (auto problem = find_step_problem(layer, k.num_tokens)) return problem;
  const attention_params whole = complete(layer, params);
  const append_params rows{whole.kv, k, v, whole.batch.slot_mapping};
  if (auto problem = bifolio::find_problem(rows, model_->where->where())) return problem;
  if (num_tokens() > 0) {
    if (auto problem = bifolio::find_problem(attention_plan_of(layer), whole)) return problem;
  } else if (params.q.num_tokens != 0) {
    return detail::make_error(errc::invalid_argument, "q has ", params.q.num_tokens, " rows; the step has no tokens");
  }
  return find_health_problem();
}

std::optional<error> model_step::find_problem(std::int32_t layer, const rotate_append_params& params) const {
  if (auto problem = find_step_problem(layer, params.append.k.num_tokens)) return problem;
  if (auto problem = bifolio::find_problem(complete(layer, params), model_->where->where())) return problem;
  return find_health_problem();
}

errc model_step::find_code(std::int32_t layer, bool stores) const noexcept {
  if (slot_ == nullptr || model_->newest != slot_) return errc::failed_precondition;
  if (!model_->has_layer(layer)) return errc::out_of_range;
  const detail::layer_place& place = model_->place_of(layer);
  return (stores ? model_->stores(place) : model_->attends(place)) ? errc::ok : errc::unsupported;
}

errc model_step::append(std::int32_t layer, const const_tensor_view& k, const const_tensor_view& v) noexcept {
  if (const errc code = find_code(layer, true); code != errc::ok) return code;
  if (k.num_tokens != num_tokens()) return errc::invalid_argument;
  const detail::layer_place& place = model_->place_of(layer);
  return model_->group_of(place).engine->append(place.layer, k, v, slot_->on_device[place.group].slot_mapping,
                                                slot_->stream);
}

rotate_append_params model_step::complete(std::int32_t layer, const rotate_append_params& params) const noexcept {
  const detail::layer_place& place = model_->place_of(layer);
  rotate_append_params whole = params;
  whole.append.kv = model_->view_of(place);
  whole.append.slot_mapping = slot_->on_device[place.group].slot_mapping;
  return whole;
}

errc model_step::rotate_append(std::int32_t layer, const rotate_append_params& params) noexcept {
  if (const errc code = find_code(layer, true); code != errc::ok) return code;
  if (params.append.k.num_tokens != num_tokens()) return errc::invalid_argument;
  return model_->where->rotate_append(complete(layer, params), slot_->stream);
}

errc model_step::attention(std::int32_t layer, const attention_params& params) noexcept {
  if (const errc code = find_code(layer, false); code != errc::ok) return code;
  // A step without rows, in which a scheduler only moves blocks, was not planned.
  if (num_tokens() == 0) return params.q.num_tokens == 0 ? errc::ok : errc::invalid_argument;
  return model_->where->attention(attention_plan_of(layer), complete(layer, params), slot_->stream);
}

errc model_step::attend(std::int32_t layer, const attention_params& params, const const_tensor_view& k,
                        const const_tensor_view& v) noexcept {
  const errc code = append(layer, k, v);
  return code == errc::ok ? attention(layer, params) : code;
}

errc model_step::attend(std::int32_t layer, const const_tensor_view& q, const const_tensor_view& k,
                        const const_tensor_view& v, const tensor_view& out) noexcept {
  attention_params params;
  params.q = q;
  params.out = out;
  return attend(layer, params, k, v);
}

namespace {

/// A step that can be committed as one of rows, or as one of a scheduler.
void require_begun(const model_step_state* slot, bool of_rows) {
  if (slot == nullptr) {
    detail::refuse(errc::failed_precondition, "commit: the step is empty: it was not begun, or is committed already");
  }
  if (of_rows == (slot->requests == nullptr)) return;
  detail::refuse(errc::failed_precondition, "commit: the step is of ",
                 of_rows ? "a scheduler, which takes sampled tokens" : "rows, which take no sampled tokens");
}

}  // namespace

void model_step::commit() { commit(std::span<const std::int32_t>()); }

void model_step::commit(std::span<const std::int32_t> num_accepted) {
  require_begun(slot_, true);
  model_->commit_rows(*slot_, num_accepted);
  model_->of_rows = nullptr;
  drop();
}

std::vector<finished_sequence> model_step::commit(std::span<const sampled_token> sampled) {
  require_begun(slot_, false);
  std::vector<finished_sequence> finished = slot_->requests->commit(*slot_->plan, sampled);
  drop();
  return finished;
}

}  // namespace bifolio::inline v0_2
