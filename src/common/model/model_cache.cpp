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

void model_state::carry_out_copies(std::span<const block_copy> copies, stream_ref stream) {
  if (copies.empty()) return;
  const errc code = engine.copy_blocks(copies, stream);
  if (code == errc::ok) return;
  if (const auto problem = find_copy_problem(engine.layers(), copies)) throw *problem;
  refuse(code, "copying ", copies.size(), " blocks failed: ", to_string(code));
}

model_step_state* model_state::free_slot() noexcept {
  for (const auto& slot : slots) {
    if (slot->at == model_step_state::stage::free) return slot.get();
  }
  return nullptr;
}

void model_state::upload_and_plan(model_step_state& slot) {
  const step_batch& batch = slot.inputs.batch;
  slot.on_device = {};
  if (!slot.plan->seqs.empty()) {
    slot.on_device = engine.upload(batch, slot.stream);
    for (layer_plan& each : plans) {
      where->plan_attention(each.plan, each.spec, batch.view(), config.cache.num_blocks, slot.stream);
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
cache_engine& model_cache::engine() noexcept { return state_->engine; }
const cache_engine& model_cache::engine() const noexcept { return state_->engine; }
cache_engine* model_cache::host_engine() noexcept { return state_->host ? &*state_->host : nullptr; }
backend& model_cache::where() const noexcept { return *state_->where; }
const attention_spec& model_cache::spec_of(std::int32_t layer) const noexcept { return state_->plan_for(layer).spec; }

open_result model_cache::open(const prompt_view& prompt, stream_ref stream) {
  const auto num_tokens = static_cast<std::int64_t>(prompt.tokens.size());
  const open_result opened = state_->manager.open(prompt, num_tokens > 0 ? num_tokens : 1);
  if (!opened.has_copy()) return opened;
  try {
    state_->carry_out_copies({&opened.copy, 1}, stream);
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
  model.moves.clear();
  const alloc_status status = model.manager.swap_out(seqs, model.moves);
  if (status != alloc_status::ok || model.moves.empty()) return status;
  const errc code = model.engine.swap_blocks_to(*model.host, model.moves, stream);
  if (code == errc::ok) return status;
  model.manager.forget_copies(model.moves, {});
  detail::refuse(code, "swap_out: copying blocks to the host failed; free the sequences");
}

alloc_status model_cache::swap_in(std::span<const seq_id> seqs, stream_ref stream) {
  detail::model_state& model = *state_;
  model.moves.clear();
  const alloc_status status = model.manager.swap_in(seqs, model.moves);
  if (status != alloc_status::ok || model.moves.empty()) return status;
  const errc code = model.host->swap_blocks_to(model.engine, model.moves, stream);
  if (code == errc::ok) return status;
  model.manager.forget_copies({}, model.moves);
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
    model.manager.build(slot.inputs.batch, slot.own_plan);
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
    if (!plan.swap_outs.empty()) {
      slot->swaps_failed = !detail::moved(model.engine.swap_blocks_to(*model.host, plan.swap_outs, slot->stream));
    }
    slot->at = stage::swapped_out;
  }
  if (slot->at == stage::swapped_out) {
    model.carry_out_copies(plan.copies, slot->stream);
    if (!plan.swap_ins.empty() && !slot->swaps_failed) {
      slot->swaps_failed = !detail::moved(model.host->swap_blocks_to(model.engine, plan.swap_ins, slot->stream));
    }
    if (slot->swaps_failed) (void)requests.fail_swaps(plan);
    slot->at = stage::copied;
  }
  requests.build(slot->inputs);
  model.upload_and_plan(*slot);
  return {&model, slot, alloc_status::ok};
}

}  // namespace bifolio::inline v0_2
