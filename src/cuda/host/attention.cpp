// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/attention.hpp"

#include <algorithm>
#include <bifolio/cuda.hpp>
#include <bifolio/error.hpp>
#include <string>

#include "common/base/kv_code.hpp"
#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"
#include "common/engine/validate_attention.hpp"
#include "cuda/attention/merge_states.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

/// The plan's state on this device, made where there is none or one of another backend.
cuda_plan_state& state_for(const std::shared_ptr<const device_state>& state, attention_plan& plan,
                           std::unique_ptr<cuda_plan_state>& fresh) {
  if (auto* const held = detail::state_of<cuda_plan_state>(plan, state.get())) return *held;
  fresh = std::make_unique<cuda_plan_state>(state);
  return *fresh;
}

plan_input input_of(const device_state& state, const attention_spec& spec, const host_step_view& batch) {
  plan_input input;
  input.spec = spec;
  input.num_seqs = batch.num_seqs;
  input.query_start_loc = batch.query_start_loc;
  input.seq_lens = batch.seq_lens;
  input.query_positions = batch.query_positions;
  input.has_query_positions = batch.query_positions != nullptr;
  input.num_tokens = batch.num_tokens;
  for (std::int32_t seq = 0; seq < batch.num_seqs; ++seq) {
    const std::int32_t query_len = batch.query_start_loc[seq + 1] - batch.query_start_loc[seq];
    input.max_query_len = std::max(input.max_query_len, query_len);
    input.max_seq_len = std::max(input.max_seq_len, batch.seq_lens[seq]);
  }
  input.device = state.numbers();
  return input;
}

void require_not_capturing(const device_state& state, cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  state.require(state.api().stream_is_capturing(stream, &status), "the stream cannot be asked for its state");
  if (status != cudaStreamCaptureStatusNone) {
    detail::refuse(
        errc::failed_precondition,
        "plan_attention was called while its stream captures a graph; plan before the capture and again before "
        "each replay");
  }
}

void check_spec(const attention_spec& spec) {
  std::string sentence;
  if (const errc code = validate::attention_spec_alone(spec, &sentence); code != errc::ok)
    detail::refuse(code, sentence);
}

attention_kernel_args args_of(const attention_plan& plan, const attention_params& params) noexcept {
  const attention_spec& spec = plan.spec;
  attention_kernel_args args;
  args.q = params.q.data;
  args.q_token_stride = params.q.token_stride;
  args.q_head_stride = params.q.head_stride;
  args.out = params.out.data;
  args.out_token_stride = params.out.token_stride;
  args.out_head_stride = params.out.head_stride;
  args.lse = params.lse;
  args.k = params.kv.k;
  args.v = params.kv.v_data();
  args.k_strides = params.kv.layout.k.strides;
  args.v_strides = params.kv.layout.v.strides;
  args.num_blocks = params.kv.num_blocks;
  args.query_start_loc = params.batch.query_start_loc;
  args.seq_lens = params.batch.seq_lens;
  args.query_positions = params.batch.query_positions;
  args.block_tables = params.batch.block_tables;
  args.block_table_stride = params.batch.block_table_stride;
  args.alibi_slopes = params.alibi_slopes;
  args.sinks = params.sinks;
  args.bias = params.bias.data;
  args.bias_type = params.bias.type;
  args.bias_token_stride = params.bias.num_tokens == 1 ? 0 : params.bias.token_stride;
  args.bias_head_stride = params.bias.num_heads == 1 ? 0 : params.bias.head_stride;
  args.num_seqs = plan.num_seqs;
  args.num_tokens = plan.num_tokens;
  args.num_q_heads = spec.num_q_heads;
  args.num_kv_heads = spec.num_kv_heads;
  args.group_size = spec.num_q_heads / spec.num_kv_heads;
  args.head_dim = spec.qk_head_dim;
  args.v_head_dim = spec.v_head_dim;
  args.block_size = spec.block_size;
  args.scale = scale_of(spec, params);
  args.soft_cap = params.soft_cap;
  args.window_left = spec.window_left < 0 ? -1 : spec.window_left;
  args.window_right = spec.causal ? 0 : spec.window_right < 0 ? -1 : spec.window_right;
  args.causal = spec.causal;
  args.deterministic = spec.deterministic;
  args.q_type = spec.q_type;
  args.kv_type = spec.k_code.type;
  args.is_coded = !detail::is_plain_and_alike(spec.k_code, spec.v_code);
  args.is_record = spec.k_code.is_record();
  const kv_layout& layout = params.kv.layout;
  args.k_type = spec.k_code.type;
  args.v_type = spec.v_code.type;
  args.k_scales = code_scales::of(layout.k, params.kv.k_scales);
  args.v_scales = layout.v_in_k ? args.k_scales : code_scales::of(layout.v, params.kv.v_scales);
  args.out_type = spec.out_type;
  return args;
}

}  // namespace

void plan_attention(const std::shared_ptr<const device_state>& state, attention_plan& plan, const attention_spec& spec,
                    const host_step_view& host_batch, std::int64_t num_blocks, stream_ref stream) {
  detail::translate_bad_alloc("plan_attention", [&] {
    state->require_health();
    check_spec(spec);
    std::string sentence;
    if (const errc code = validate::attention_batch(spec, host_batch, num_blocks, &sentence); code != errc::ok) {
      detail::refuse(code, sentence);
    }
    const device_guard guard(state->api(), state->index());
    state->require(guard.status(), "the device cannot be made current");
    require_not_capturing(*state, handle_of(stream));

    std::unique_ptr<cuda_plan_state> fresh;
    cuda_plan_state& planned = state_for(state, plan, fresh);
    const plan_input input = input_of(*state, spec, host_batch);
    planned.compute(input);
    planned.adopt(handle_of(stream));
    if (fresh != nullptr) plan.state = std::move(fresh);
    plan.spec = planned.plans().input.spec;
    plan.num_seqs = host_batch.num_seqs;
    plan.num_tokens = host_batch.num_tokens;
    plan.num_blocks = num_blocks;
    plan.has_query_positions = host_batch.query_positions != nullptr;
    plan.num_table_entries = blocks_for(input.max_seq_len, spec.block_size);
    plan.max_seq_len = input.max_seq_len;
  });
}

void reserve_attention(const std::shared_ptr<const device_state>& state, attention_plan& plan,
                       const attention_spec& spec, std::int32_t max_num_seqs, std::int64_t max_num_tokens,
                       std::int32_t max_seq_len) {
  detail::translate_bad_alloc("reserve_plan", [&] {
    state->require_health();
    check_spec(spec);
    constexpr std::int64_t most_tokens = std::int64_t{1} << 31;
    if (max_num_seqs < 0 || max_num_tokens < 0 || max_num_tokens >= most_tokens || max_seq_len < 0) {
      detail::refuse(errc::invalid_argument, "max_num_seqs, max_num_tokens and max_seq_len are ", max_num_seqs, ", ",
                     max_num_tokens, " and ", max_seq_len, "; none may be negative, and tokens stay below 2^31");
    }
    const device_guard guard(state->api(), state->index());
    state->require(guard.status(), "the device cannot be made current");

    std::unique_ptr<cuda_plan_state> fresh;
    cuda_plan_state& planned = state_for(state, plan, fresh);
    planned.reserve(spec, {max_num_seqs, max_num_tokens, max_seq_len});
    if (fresh != nullptr) plan.state = std::move(fresh);
    plan.spec = spec;
    plan.spec.implementation = {};
    plan.num_seqs = 0;
    plan.num_tokens = 0;
    plan.num_blocks = 0;
    plan.has_query_positions = false;
    plan.num_table_entries = 0;
    plan.max_seq_len = 0;
  });
}

errc attention(const device_state& state, const attention_plan& plan, const attention_params& params,
               stream_ref stream) noexcept {
  const auto* const planned = detail::state_of<const cuda_plan_state>(plan, &state);
  if (planned == nullptr) return errc::failed_precondition;
  if (const errc code = validate::attention(plan, params, nullptr); code != errc::ok) return code;
  if (plan.num_tokens == 0) return errc::ok;
  if (params.batch.query_start_loc == nullptr || params.batch.seq_lens == nullptr) return errc::invalid_argument;

  attention_kernel_args args = args_of(plan, params);
  planned->fill(args);
  const step_plans& plans = planned->plans();
  const implementation_set chosen = choose_implementations(plans, args);
  if (chosen.empty()) return errc::unsupported;
  if (chosen.has(implementation_id::general)) {
    if (chosen.has(implementation_id::x_split)) args.min_query_len = 2;
    if (!plans.general.has_items) planned->note_general_needed();
  }
  const launch_context context{state.api(), state.numbers(), plans, planned->metadata(), handle_of(stream)};
  for (const implementation& entry : implementations()) {
    if (!chosen.has(entry.id)) continue;
    if (const cudaError_t status = entry.launch(context, args); status != cudaSuccess) return state.report(status);
  }
  return errc::ok;
}

std::vector<std::string> attention_kernel_names(const device_state& state) {
  std::vector<std::string> names;
  for (const implementation& entry : implementations()) entry.append_kernel_names(state.numbers(), names);
  return names;
}

std::vector<std::string> describe(const device_state& state, const attention_plan& plan,
                                  const attention_params& params) {
  std::vector<std::string> names;
  const auto* const planned = detail::state_of<const cuda_plan_state>(plan, &state);
  if (planned == nullptr || validate::attention(plan, params, nullptr) != errc::ok) return names;
  const step_plans& plans = planned->plans();
  const attention_kernel_args args = args_of(plan, params);
  const implementation_set chosen = choose_implementations(plans, args);
  if (chosen.empty()) return names;
  names.resize(plans.query_lens.size());
  for (std::size_t seq = 0; seq < names.size(); ++seq) {
    if (plans.query_lens[seq] == 0) continue;
    names[seq] = implementation_of(plans, chosen, static_cast<std::int32_t>(seq)).kernel_name(plans, args);
  }
  return names;
}

std::vector<std::string> explain(const device_state& state, const attention_plan& plan) {
  const auto* const planned = detail::state_of<const cuda_plan_state>(plan, &state);
  if (planned != nullptr) return explain(planned->plans());
  std::vector<std::string> names;
  for (const implementation& entry : implementations()) names.emplace_back(entry.name);
  return names;
}

errc merge_states(const device_state& state, const merge_params& params, stream_ref stream) noexcept {
  if (const errc code = validate::merge(params, nullptr); code != errc::ok) return code;
  return state.report(launch_merge_states(state.api(), params, handle_of(stream)));
}

std::uint64_t graph_epoch(const attention_plan& plan) noexcept {
  return plan.state == nullptr ? 0 : plan.state->graph_epoch();
}

}  // namespace bifolio::inline v0_2::cuda
