// SPDX-License-Identifier: Apache-2.0
/// Sequences of a model's cache, and the beginning of a step.

#include <bifolio/error.hpp>
#include <bifolio/model_cache.hpp>
#include <utility>

#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"
#include "common/model/state.hpp"

namespace bifolio::inline v0_2 {
namespace detail {

void model_state::require_not_in_step(const char* call, seq_id seq) const {
  if (!is_in_step(seq)) return;
  refuse(errc::failed_precondition, call, ": sequence ", to_index(seq),
         " is part of a step that is not committed; commit or drop the step first");
}

void model_state::carry_out_copies(std::size_t group, std::span<const block_copy> copies, stream_ref stream) {
  if (copies.empty() || !groups[group].engine) return;
  const errc code = groups[group].engine->copy_blocks(copies, stream);
  if (code == errc::ok) return;
  if (const auto problem = find_copy_problem(groups[group].engine->layers(), copies)) throw *problem;
  refuse(code, "copying ", copies.size(), " blocks failed: ", to_string(code));
}

void model_state::collect_copies(step_plan& plan) {
  for (std::size_t g = 1; g < groups.size(); ++g) {
    manager.drain_copies(static_cast<std::int32_t>(g), plan.groups[g - 1].copies);
  }
}

errc model_state::swap_group(std::size_t group, std::span<const block_copy> pairs, bool out, stream_ref stream) {
  group_storage& storage = groups[group];
  if (pairs.empty() || !storage.engine) return errc::ok;
  return out ? storage.engine->swap_blocks_to(*storage.host, pairs, stream)
             : storage.host->swap_blocks_to(*storage.engine, pairs, stream);
}

template <class Which>
errc model_state::swap(const step_plan& plan, const Which& which, bool out, stream_ref stream) {
  errc code = swap_group(0, which(plan), out, stream);
  for (std::size_t g = 0; g < plan.groups.size() && code == errc::ok; ++g) {
    code = swap_group(g + 1, which(plan.groups[g]), out, stream);
  }
  return code;
}

model_step_state* model_state::free_slot() noexcept {
  for (const auto& slot : slots) {
    if (slot->at == model_step_state::stage::free) return slot.get();
  }
  return nullptr;
}

void model_state::upload_and_plan(model_step_state& slot) {
  slot.on_device = {};
  for (std::size_t g = 0; g < groups.size() && !slot.plan->seqs.empty(); ++g) {
    if (!groups[g].engine) continue;
    cache_engine& engine = *groups[g].engine;
    const step_batch& batch = g == 0 ? slot.inputs.batch : slot.inputs.groups[g - 1];
    slot.on_device[g] = engine.upload(batch, slot.stream);
    for (layer_plan& each : groups[g].plans) {
      where->plan_attention(each.plan, each.spec, batch.view(), engine.config().num_blocks, slot.stream);
    }
  }
  slot.at = model_step_state::stage::begun;
  newest = &slot;
}

namespace {

void require_idle(const model_state& model) {
  for (const auto& slot : model.slots) {
    if (slot->at == model_step_state::stage::free) continue;
    refuse(errc::failed_precondition, "begin_step: the step begun before is not committed");
  }
}

/// The step of `requests` that was scheduled and not begun, or the next one; null when there is nothing to do.
model_step_state* scheduled_step(model_state& model, scheduler& requests, stream_ref stream) {
  using stage = model_step_state::stage;
  for (const auto& slot : model.slots) {
    if (slot->at == stage::free || slot->at == stage::begun) continue;
    if (slot->requests == &requests) return slot.get();
    refuse(errc::failed_precondition,
           "begin_step: a step of another scheduler is scheduled and not begun; begin it first");
  }
  model_step_state* const slot = model.free_slot();
  if (slot == nullptr || model.of_rows != nullptr) {
    refuse(errc::failed_precondition, "begin_step: ", model.of_rows != nullptr ? 1 : model.config.max_steps_in_flight,
           " steps are begun and not committed; commit the oldest first, or raise max_steps_in_flight");
  }
  const step_plan& plan = requests.schedule();
  if (plan.empty()) return nullptr;
  slot->requests = &requests;
  slot->plan = &plan;
  slot->number = ++model.num_steps;
  slot->stream = stream;
  slot->swaps_failed = false;
  slot->at = stage::scheduled;
  return slot;
}

/// Whether the copies of a swap are under way; a device that is lost is an error.
bool moved(errc code) {
  if (code == errc::device_lost) refuse(code, "swapping blocks failed: ", to_string(code));
  return code == errc::ok;
}

}  // namespace
}  // namespace detail

using detail::model_step_state;

model_cache::model_cache(backend& where, const model_cache_config& config)
    : state_(detail::translate_bad_alloc("model_cache",
                                         [&] { return std::make_unique<detail::model_state>(where, config); })) {}
model_cache::model_cache(model_cache&&) noexcept = default;
model_cache& model_cache::operator=(model_cache&&) noexcept = default;
model_cache::~model_cache() = default;

const model_cache_config& model_cache::config() const noexcept { return state_->config; }
kv_cache_manager& model_cache::manager() noexcept { return state_->manager; }
const kv_cache_manager& model_cache::manager() const noexcept { return state_->manager; }
cache_engine& model_cache::engine(std::int32_t group) noexcept {
  return *state_->groups[static_cast<std::size_t>(group)].engine;
}
const cache_engine& model_cache::engine(std::int32_t group) const noexcept {
  return *state_->groups[static_cast<std::size_t>(group)].engine;
}
cache_engine* model_cache::host_engine(std::int32_t group) noexcept {
  auto& host = state_->groups[static_cast<std::size_t>(group)].host;
  return host ? &*host : nullptr;
}
std::int32_t model_cache::group_of(std::int32_t layer) const noexcept {
  return static_cast<std::int32_t>(state_->place_of(layer).group);
}
backend& model_cache::where() const noexcept { return *state_->where; }
const attention_spec& model_cache::spec_of(std::int32_t layer) const noexcept { return state_->plan_for(layer).spec; }

open_result model_cache::open(const prompt_view& prompt, stream_ref stream) {
  const auto num_tokens = static_cast<std::int64_t>(prompt.tokens.size());
  const open_result opened = state_->manager.open(prompt, num_tokens > 0 ? num_tokens : 1);
  if (!opened.has_copy()) return opened;  // with groups the last block is never copied
  try {
    state_->carry_out_copies(0, {&opened.copy, 1}, stream);
  } catch (...) {
    state_->manager.free(opened.seq);
    throw;
  }
  return opened;
}

allocate_result model_cache::fork(seq_id seq) {
  kv_cache_manager& manager = state_->manager;
  const allocate_result forked = manager.fork(seq);
  if (forked.status != alloc_status::ok) return forked;
  try {
    // Slots that are not computed yet are the first sequence's to write.
    manager.truncate(forked.seq, manager.num_committed(forked.seq));
  } catch (...) {
    manager.free(forked.seq);
    throw;
  }
  return forked;
}

void model_cache::truncate(seq_id seq, std::int64_t num_tokens) {
  state_->require_not_in_step("truncate", seq);
  state_->manager.truncate(seq, num_tokens);
}

void model_cache::free(seq_id seq) {
  state_->require_not_in_step("free", seq);
  state_->manager.free(seq);
}

alloc_status model_cache::swap_out(std::span<const seq_id> seqs, stream_ref stream) {
  detail::model_state& model = *state_;
  for (const seq_id seq : seqs) model.require_not_in_step("swap_out", seq);
  for (auto& moves : model.moves) moves.clear();
  const alloc_status status = model.manager.swap_out(seqs, std::span(model.moves));
  if (status != alloc_status::ok) return status;
  errc code = errc::ok;
  for (std::size_t g = 0; g < model.moves.size() && code == errc::ok; ++g) {
    code = model.swap_group(g, model.moves[g], true, stream);
  }
  if (code == errc::ok) return status;
  for (std::size_t g = 0; g < model.moves.size(); ++g) {
    model.manager.forget_copies(model.moves[g], {}, static_cast<std::int32_t>(g));
  }
  detail::refuse(code, "swap_out: copying blocks to the host failed; free the sequences");
}

alloc_status model_cache::swap_in(std::span<const seq_id> seqs, stream_ref stream) {
  detail::model_state& model = *state_;
  for (auto& moves : model.moves) moves.clear();
  const alloc_status status = model.manager.swap_in(seqs, std::span(model.moves));
  if (status != alloc_status::ok) return status;
  errc code = errc::ok;
  for (std::size_t g = 0; g < model.moves.size() && code == errc::ok; ++g) {
    code = model.swap_group(g, model.moves[g], false, stream);
  }
  if (code == errc::ok) return status;
  for (std::size_t g = 0; g < model.moves.size(); ++g) {
    model.manager.forget_copies({}, model.moves[g], static_cast<std::int32_t>(g));
  }
  detail::refuse(code, "swap_in: copying blocks from the host failed; free the sequences");
}

model_step model_cache::begin_step(std::span<const step_row> rows, stream_ref stream) {
  detail::model_state& model = *state_;
  detail::require_idle(model);
  model_step_state& slot = *model.slots.front();
  slot.requests = nullptr;
  slot.plan = &slot.own_plan;
  slot.number = ++model.num_steps;
  slot.stream = stream;
  detail::translate_bad_alloc("begin_step", [&] { model.prepare_rows(slot, rows); });
  const alloc_status status = model.grow_rows(slot);
  if (status != alloc_status::ok) return {nullptr, nullptr, status};
  try {
    model.fill_inputs(slot, rows);
    if (model.groups.size() == 1) {
      model.manager.build(slot.inputs.batch, slot.own_plan);
    } else {
      model.manager.build(slot.inputs.batch, slot.inputs.groups, slot.own_plan);
    }
    model.upload_and_plan(slot);
  } catch (...) {
    model.take_back(slot, slot.rows.size());
    throw;
  }
  model.of_rows = &slot;
  return {&model, &slot, alloc_status::ok};
}

model_step model_cache::begin_step(scheduler& requests, stream_ref stream) {
  using stage = model_step_state::stage;
  detail::model_state& model = *state_;
  if (&requests.manager() != &model.manager) {
    detail::refuse(errc::invalid_argument,
                   "begin_step: the scheduler is of another manager; make it with manager() of this cache");
  }
  model_step_state* const slot = detail::scheduled_step(model, requests, stream);
  if (slot == nullptr) return {};
  const step_plan& plan = *slot->plan;
  if (slot->at == stage::scheduled) {
    const auto outs = [](const auto& moves) -> const auto& { return moves.swap_outs; };
    slot->swaps_failed = !detail::moved(model.swap(plan, outs, true, slot->stream));
    slot->at = stage::swapped_out;
  }
  if (slot->at == stage::swapped_out) {
    model.carry_out_copies(0, plan.copies, slot->stream);
    for (std::size_t g = 0; g < plan.groups.size(); ++g) {
      model.carry_out_copies(g + 1, plan.groups[g].copies, slot->stream);
    }
    const auto ins = [](const auto& moves) -> const auto& { return moves.swap_ins; };
    if (!slot->swaps_failed) slot->swaps_failed = !detail::moved(model.swap(plan, ins, false, slot->stream));
    if (slot->swaps_failed) (void)requests.fail_swaps(plan);
    slot->at = stage::copied;
  }
  requests.build(slot->inputs);
  model.upload_and_plan(*slot);
  return {&model, slot, alloc_status::ok};
}

}  // namespace bifolio::inline v0_2
