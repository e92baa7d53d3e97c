// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/attention.hpp"

#include <algorithm>
#include <array>
#include <bifolio/cuda.hpp>
#include <bifolio/error.hpp>
#include <string>

#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"
#include "common/engine/validate_attention.hpp"
#include "cuda/attention/general/launch.hpp"
#include "cuda/attention/merge_states.hpp"
#include "cuda/attention/x_split/launch.hpp"

namespace bifolio::cuda {
namespace {

/// The plan's state on this device, made where there is none or one of another backend.
cuda_plan_state& state_for(const std::shared_ptr<const device_state>& state, attention_plan& plan,
                           std::unique_ptr<cuda_plan_state>& fresh) {
  auto* const held = dynamic_cast<cuda_plan_state*>(plan.state.get());
  if (held != nullptr && &held->device() == state.get()) return *held;
  fresh = std::make_unique<cuda_plan_state>(state);
  return *fresh;
}

plan_input input_of(const device_state& state, const attention_spec& spec, const step_batch_view& batch) {
  plan_input input;
  input.spec = spec;
  input.num_seqs = batch.num_seqs;
  input.query_start_loc = batch.query_start_loc;
  input.seq_lens = batch.seq_lens;
  input.query_positions = batch.query_positions;
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
  args.scale = params.scale;
  args.soft_cap = params.soft_cap;
  args.window_left = spec.window_left < 0 ? -1 : spec.window_left;
  args.window_right = spec.causal ? 0 : spec.window_right < 0 ? -1 : spec.window_right;
  args.causal = spec.causal;
  args.q_type = spec.q_type;
  args.kv_type = spec.k_code.type;
  args.out_type = spec.out_type;
  return args;
}

/// The kernels that compute a call. As a rule that depends on the sequence alone; one sequence past `longest_window`,
/// or a prefill over strides that its kernel does not take, sends the whole batch to the general kernel. Deterministic
/// plans give all sequences of a call to one kernel, so that bits do not depend on the number of new tokens.
struct kernel_choice {
  bool fast = false;     ///< all sequences, by the kernels of `fast_plan`
  bool x_split = false;  ///< sequences of one new token
  bool general = false;  ///< the others, or all
};

kernel_choice choose_kernels(const cuda_plan_state& planned, const attention_kernel_args& args) noexcept {
  if (fast_serves(args, planned.fast())) return {.fast = true};
  const x_split_plan& x_split = planned.x_split();
  if (x_split.has_decodes && x_split_serves(args)) return {.x_split = true, .general = x_split.has_others};
  return {.general = true};
}

std::string x_split_name(dtype type, std::int32_t head_dim, bool partitioned) {
  return shape_name("x_split", type, head_dim) + (partitioned ? " v2" : " v1");
}

std::string general_name(dtype type, std::int32_t rows) {
  return "cuda general " + std::string(to_string(type)) + " rows " + std::to_string(rows);
}

}  // namespace

void plan_attention(const std::shared_ptr<const device_state>& state, attention_plan& plan, const attention_spec& spec,
                    const step_batch_view& host_batch, std::int64_t num_blocks, stream_ref stream) {
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
    planned.adopt(spec, handle_of(stream));
    if (fresh != nullptr) plan.state = std::move(fresh);
    plan.spec = spec;
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

    // Three extremes stand for all steps: all tokens in one sequence, dealt out evenly over all sequences, and one
    // token for each sequence.
    std::unique_ptr<cuda_plan_state> fresh;
    cuda_plan_state& planned = state_for(state, plan, fresh);
    std::array<std::vector<std::int32_t>, 3> all_starts;
    const std::vector<std::int32_t> lens(static_cast<std::size_t>(max_num_seqs), max_seq_len);
    const auto input_for = [&](std::int32_t num_seqs, std::int64_t num_tokens, std::vector<std::int32_t>& starts) {
      starts.resize(static_cast<std::size_t>(num_seqs) + 1);
      for (std::int32_t seq = 0; seq <= num_seqs; ++seq) {
        starts[static_cast<std::size_t>(seq)] =
            num_seqs == 0 ? 0 : static_cast<std::int32_t>(num_tokens * seq / num_seqs);
      }
      step_batch_view batch;
      batch.num_seqs = num_seqs;
      batch.num_tokens = starts.back();
      batch.query_start_loc = starts.data();
      batch.seq_lens = lens.data();
      return input_of(*state, spec, batch);
    };
    const std::array<plan_input, 3> inputs{
        input_for(std::min(max_num_seqs, 1), max_num_tokens, all_starts[0]),
        input_for(max_num_seqs, max_num_tokens, all_starts[1]),
        input_for(max_num_seqs, std::min<std::int64_t>(max_num_tokens, max_num_seqs), all_starts[2])};
    planned.reserve(spec, inputs);
    if (fresh != nullptr) plan.state = std::move(fresh);
    plan.spec = spec;
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
  const auto* const planned = dynamic_cast<const cuda_plan_state*>(plan.state.get());
  if (planned == nullptr || &planned->device() != &state) return errc::failed_precondition;
  if (const errc code = validate::attention(plan, params, nullptr); code != errc::ok) return code;
  if (plan.num_tokens == 0) return errc::ok;
  if (params.batch.query_start_loc == nullptr || params.batch.seq_lens == nullptr) return errc::invalid_argument;

  attention_kernel_args args = args_of(plan, params);
  planned->fill(args);
  const kernel_choice choice = choose_kernels(*planned, args);
  if (choice.fast) {
    return state.report(launch_fast(state.api(), args, planned->fast(), state.numbers(), handle_of(stream)));
  }
  if (choice.x_split) {
    const cudaError_t status =
        launch_x_split(state.api(), args, planned->x_split(), state.numbers(), handle_of(stream));
    if (status != cudaSuccess || !choice.general) return state.report(status);
    args.min_query_len = 2;
  }
  return state.report(launch_general(state.api(), args, planned->general(), state.numbers(), handle_of(stream)));
}

std::vector<std::string> attention_kernel_names(const device_state& state) {
  std::vector<std::string> names;
  append_fast_kernel_names(state.numbers(), names);
  for (const dtype type : all_dtypes) {
    for (const std::int32_t head_dim : {64, 128, 256}) {
      for (const bool partitioned : {false, true}) names.push_back(x_split_name(type, head_dim, partitioned));
    }
    for (const std::int32_t rows : {few_rows, many_rows}) names.push_back(general_name(type, rows));
  }
  return names;
}

std::vector<std::string> describe(const device_state& state, const attention_plan& plan,
                                  const attention_params& params) {
  std::vector<std::string> names;
  const auto* const planned = dynamic_cast<const cuda_plan_state*>(plan.state.get());
  if (planned == nullptr || &planned->device() != &state) return names;
  if (validate::attention(plan, params, nullptr) != errc::ok) return names;
  const attention_kernel_args args = args_of(plan, params);
  const kernel_choice choice = choose_kernels(*planned, args);
  const std::vector<std::int32_t>& query_lens = planned->query_lens();
  names.resize(query_lens.size());
  if (choice.fast) {
    name_fast_kernels(args, plan.spec, planned->fast(), query_lens, names);
    return names;
  }
  const std::string decode = x_split_name(args.kv_type, args.head_dim, planned->x_split().num_splits > 1);
  const std::string general = general_name(args.kv_type, planned->general().rows_per_tile);
  for (std::size_t seq = 0; seq < names.size(); ++seq) {
    if (query_lens[seq] > 0) names[seq] = choice.x_split && query_lens[seq] == 1 ? decode : general;
  }
  return names;
}

errc merge_states(const device_state& state, const merge_params& params, stream_ref stream) noexcept {
  if (const errc code = validate::merge(params, nullptr); code != errc::ok) return code;
  return state.report(launch_merge_states(state.api(), params, handle_of(stream)));
}

std::uint64_t graph_epoch(const attention_plan& plan) noexcept {
  const auto* const planned = dynamic_cast<const cuda_plan_state*>(plan.state.get());
  return planned == nullptr ? 0 : planned->epoch();
}

}  // namespace bifolio::cuda
