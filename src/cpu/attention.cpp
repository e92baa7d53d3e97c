// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention.hpp"

#include <algorithm>
#include <cstddef>

#include "common/attention/implementations.hpp"
#include "common/engine/validate_attention.hpp"
#include "cpu/attention_plan.hpp"
#include "cpu/implementations.hpp"

namespace bifolio::inline v0_2::cpu {
namespace {

coded_plane code_of(const kv_plane& plane, const float* static_scales) noexcept {
  coded_plane code;
  code.type = plane.code.type;
  code.is_scaled = plane.code.granularity != scale_granularity::none;
  code.is_record = plane.code.is_record();
  code.scale_per_head = plane.code.granularity == scale_granularity::head;
  code.tail_floats = plane.code.tail_floats();
  code.tail = plane.tail;
  code.static_scales = plane.code.has_static_scales() ? static_scales : nullptr;
  return code;
}

attention_args args_of(const attention_plan& plan, const cpu_attention_plan& state,
                       const attention_params& params) noexcept {
  attention_args args;
  args.q = params.q.data;
  args.out = params.out.data;
  args.lse = params.lse;
  args.k = params.kv.k;
  args.v = params.kv.v_data();
  args.k_strides = params.kv.layout.k.strides;
  args.v_strides = params.kv.layout.v.strides;
  const kv_layout& layout = params.kv.layout;
  args.is_coded = !detail::is_plain_and_alike(layout.k.code, layout.v.code);
  if (args.is_coded) {
    args.k_code = code_of(layout.k, params.kv.k_scales);
    args.v_code = layout.v_in_k ? args.k_code : code_of(layout.v, params.kv.v_scales);
  }
  args.alibi_slopes = params.alibi_slopes;
  args.sinks = params.sinks;
  args.bias = params.bias.data;
  args.bias_type = params.bias.type;
  args.bias_token_stride = params.bias.num_tokens == 1 ? 0 : params.bias.token_stride;
  args.bias_head_stride = params.bias.num_heads == 1 ? 0 : params.bias.head_stride;
  args.num_blocks = params.kv.num_blocks;
  args.q_token_stride = params.q.token_stride;
  args.q_head_stride = params.q.head_stride;
  args.out_token_stride = params.out.token_stride;
  args.out_head_stride = params.out.head_stride;
  args.window = state.window;
  args.num_q_heads = plan.spec.num_q_heads;
  args.group_size = plan.spec.num_q_heads / plan.spec.num_kv_heads;
  args.qk_head_dim = plan.spec.qk_head_dim;
  args.v_head_dim = plan.spec.v_head_dim;
  args.block_size = plan.spec.block_size;
  args.scale = scale_of(plan.spec, params);
  args.soft_cap = params.soft_cap;
  args.q_type = plan.spec.q_type;
  args.out_type = plan.spec.out_type;
  return args;
}

struct attention_call {
  attention_args args;
  const device_step_view* batch = nullptr;
  cpu_attention_plan* state = nullptr;
  item_kernels kernels;
};

attention_item item_of(const attention_call& call, const planned_item& planned) noexcept {
  attention_item item;
  item.first_token = planned.first_token;
  item.first_position = planned.first_position;
  item.seq_len = planned.seq_len;
  if (call.batch->block_tables != nullptr) {
    item.block_table = call.batch->block_tables + planned.seq * call.batch->block_table_stride;
  }
  item.num_tokens = planned.num_tokens;
  item.kv_head_begin = planned.kv_head_begin;
  item.kv_head_end = planned.kv_head_end;
  item.split_begin = planned.split_begin;
  item.split_end = planned.split_end;
  if (planned.partials >= 0) item.partials = call.state->partials.data() + planned.partials;
  return item;
}

// A worker in a call.
struct item_taker {
  const attention_call& call;
  std::int32_t peeked = -1;  // the item that it peeked at last
};

// Peeks at the item that this worker takes next unless another worker takes it first.
bool peek_next(void* context, attention_item& next) noexcept {
  auto& taker = *static_cast<item_taker*>(context);
  const attention_call& call = taker.call;
  const std::int32_t index = call.state->next_item.load(std::memory_order_relaxed);
  if (index >= call.state->num_items) return false;
  taker.peeked = index;
  next = item_of(call, call.state->items.data()[index]);
  return true;
}

void run_item(item_taker& taker, std::int32_t index, const attention_scratch& scratch) noexcept {
  const attention_call& call = taker.call;
  const planned_item& planned = call.state->items.data()[index];
  attention_item item = item_of(call, planned);
  item.is_prefetched = index == taker.peeked;
  item.peek_next = &peek_next;
  item.peek_context = &taker;
  call.kernels.run(call.args, item, scratch);
  if (planned.partials < 0) return;

  completion_counter& counter = call.state->counters.data()[planned.counter];
  if (counter.pending.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  counter.pending.store(counter.num_items, std::memory_order_relaxed);
  call.kernels.combine(call.args, item, scratch);
}

void run_worker(void* context, std::int32_t worker) noexcept {
  const auto& call = *static_cast<const attention_call*>(context);
  const attention_scratch scratch = call.state->scratch_of(worker);
  item_taker taker{call};
  for (;;) {
    const std::int32_t index = call.state->next_item.fetch_add(1, std::memory_order_relaxed);
    if (index >= call.state->num_items) return;
    run_item(taker, index, scratch);
  }
}

struct merge_call {
  const merge_params* params = nullptr;
  const attention_kernels* kernels = nullptr;
  std::int64_t num_rows = 0;
  std::int32_t num_workers = 1;
};

// `split`: the keys of a row are split over several items, whose partial results are combined.
std::string kernel_name(const kernel_table& table, const attention_implementation& of, std::string_view kv_type,
                        bool split) {
  std::string name = "cpu ";
  name.append(bifolio::to_string(table.isa)).append(" ").append(kv_type);
  name.append(" ").append(of.name);
  if (split) name.append(" split-KV");
  return name;
}

void merge_worker(void* context, std::int32_t worker) noexcept {
  const auto& call = *static_cast<const merge_call*>(context);
  call.kernels->merge(*call.params, call.num_rows * worker / call.num_workers,
                      call.num_rows * (worker + 1) / call.num_workers);
}

}  // namespace

errc attention(const kernel_table& table, executor& workers, const attention_plan& plan,
               const attention_params& params) noexcept {
  if (const errc code = validate::attention(plan, params, nullptr); code != errc::ok) return code;
  auto* const state = detail::state_of<cpu_attention_plan>(plan, &cpu_attention_plan::owner_address);
  if (state == nullptr) return errc::failed_precondition;
  const attention_problem problem = problem_of(table, plan.spec, params);
  const attention_implementation* const implementation = implementation_of(problem, plan.spec.implementation);
  if (implementation == nullptr) return errc::unsupported;
  if (state->num_items == 0) return errc::ok;

  attention_call call;
  call.args = args_of(plan, *state, params);
  call.batch = &params.batch;
  call.state = state;
  call.kernels = table.attention.items_of(implementation->loops, problem.kernel_type());
  state->next_item.store(0, std::memory_order_relaxed);
  workers.run(std::min(state->num_workers, workers.concurrency()), &run_worker, &call);
  return errc::ok;
}

std::vector<std::string> attention_kernel_names(const kernel_table& table) {
  std::vector<std::string> names;
  for (const attention_implementation& entry : attention_implementations()) {
    for (const bool split : {false, true}) {
      for (const dtype kv_type : tensor_dtypes) {
        if (entry.rounds_queries || table.attention.items_of(entry.loops, kv_type).run == nullptr) continue;
        names.push_back(kernel_name(table, entry, bifolio::to_string(kv_type), split));
      }
      if (entry.takes_codes && table.attention.items_of(entry.loops, dtype::bf16).run != nullptr) {
        names.push_back(kernel_name(table, entry, widened_kernel_type, split));
      }
      if (entry.decodes_rows) names.push_back(kernel_name(table, entry, decoded_kernel_type, split));
    }
  }
  return names;
}

std::vector<std::string> describe(const kernel_table& table, const attention_plan& plan,
                                  const attention_params& params) {
  std::vector<std::string> names;
  const auto* const state = detail::state_of<const cpu_attention_plan>(plan, &cpu_attention_plan::owner_address);
  if (state == nullptr || validate::attention(plan, params, nullptr) != errc::ok) return names;
  const attention_problem problem = problem_of(table, plan.spec, params);
  const attention_implementation* const implementation = implementation_of(problem, plan.spec.implementation);
  if (implementation == nullptr) return names;
  names.resize(static_cast<std::size_t>(plan.num_seqs));
  for (std::int32_t i = 0; i < state->num_items; ++i) {
    const planned_item& item = state->items.data()[i];
    names[static_cast<std::size_t>(item.seq)] =
        kernel_name(table, *implementation, problem.kernel_type_name(), item.partials >= 0);
  }
  return names;
}

std::vector<std::string> explain(const kernel_table& table, const attention_plan& plan) {
  if (detail::state_of<const cpu_attention_plan>(plan, &cpu_attention_plan::owner_address) != nullptr) {
    return explain_implementations(problem_of(table, plan.spec), plan.spec.implementation, plan.num_seqs);
  }
  std::vector<std::string> names;
  for (const attention_implementation& entry : attention_implementations()) names.emplace_back(entry.name);
  return names;
}

errc merge_states(const kernel_table& table, executor& workers, const merge_params& params) noexcept {
  if (const errc code = validate::merge(params, nullptr); code != errc::ok) return code;
  merge_call call;
  call.params = &params;
  call.kernels = &table.attention;
  call.num_rows = params.out.num_tokens * params.out.num_heads;
  if (call.num_rows == 0) return errc::ok;
  // At least about 20 µs per worker.
  constexpr std::int64_t elements_per_worker = 1 << 16;
  const std::int64_t wanted = call.num_rows * std::max(1, params.out.head_dim) / elements_per_worker;
  call.num_workers = static_cast<std::int32_t>(std::clamp<std::int64_t>(wanted, 1, workers.concurrency()));
  workers.run(call.num_workers, &merge_worker, &call);
  return errc::ok;
}

}  // namespace bifolio::inline v0_2::cpu
