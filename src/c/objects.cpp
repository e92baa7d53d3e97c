// SPDX-License-Identifier: Apache-2.0
#include "c/objects.hpp"

#include "common/base/require.hpp"

namespace bifolio::inline v0_2::c {

static_assert(static_cast<int>(dtype::f32) == BIFOLIO_F32 && static_cast<int>(dtype::f16) == BIFOLIO_F16 &&
              static_cast<int>(dtype::bf16) == BIFOLIO_BF16);
static_assert(static_cast<int>(layout_kind::hnd) == BIFOLIO_HND && static_cast<int>(layout_kind::nhd) == BIFOLIO_NHD &&
              static_cast<int>(layout_kind::x_split) == BIFOLIO_X_SPLIT);

layout_kind to_layout(std::int32_t kind) {
  detail::require_between("layout", kind, BIFOLIO_HND, BIFOLIO_X_SPLIT);
  return static_cast<layout_kind>(kind);
}

namespace {

template <class To, class From>
To fields_of(const From& batch) noexcept {
  To to{};
  to.num_seqs = batch.num_seqs;
  to.num_tokens = batch.num_tokens;
  to.query_start_loc = batch.query_start_loc;
  to.seq_lens = batch.seq_lens;
  to.block_tables = batch.block_tables;
  to.block_table_stride = batch.block_table_stride;
  to.slot_mapping = batch.slot_mapping;
  to.query_positions = batch.query_positions;
  return to;
}

}  // namespace

device_step_view to_view(const bifolio_batch_view& batch) noexcept { return fields_of<device_step_view>(batch); }
host_step_view to_view(const bifolio_host_batch_view& batch) noexcept { return fields_of<host_step_view>(batch); }
bifolio_batch_view from_view(const device_step_view& batch) noexcept { return fields_of<bifolio_batch_view>(batch); }
bifolio_host_batch_view from_view(const host_step_view& batch) noexcept {
  return fields_of<bifolio_host_batch_view>(batch);
}

kv_code to_k_code(const char* name) { return name == nullptr ? kv_code{} : parse_kv_code(name); }
kv_code to_v_code(const char* name, const kv_code& of_k) { return name == nullptr ? of_k : parse_kv_code(name); }

attention_spec to_spec(const bifolio_attention_spec* given, const char* name) {
  const bifolio_attention_spec from = read_struct(given, name);
  attention_spec spec;
  spec.num_q_heads = from.num_q_heads;
  spec.num_kv_heads = from.num_kv_heads;
  spec.qk_head_dim = from.qk_head_dim;
  spec.v_head_dim = from.v_head_dim == 0 ? from.qk_head_dim : from.v_head_dim;
  spec.block_size = from.block_size;
  spec.q_type = to_dtype(from.q_type);
  spec.k_code = to_k_code(from.k_code);
  spec.v_code = to_v_code(from.v_code, spec.k_code);
  spec.v_in_k = from.v_in_k != 0;
  spec.out_type = to_dtype(from.out_type);
  spec.causal = from.causal != 0;
  spec.window_left = from.window_left;
  spec.window_right = from.window_right;
  spec.deterministic = from.deterministic != 0;
  if (from.implementation != nullptr) spec.implementation = from.implementation;
  return spec;
}

attention_params to_params(const bifolio_attention_params* given) {
  const bifolio_attention_params from = read_struct(given, "params");
  attention_params params;
  params.q = to_view(from.q);
  params.out = to_view(from.out);
  params.lse = from.lse;
  if (from.has_scale != 0) params.scale = from.scale;
  params.soft_cap = from.soft_cap;
  params.alibi_slopes = from.alibi_slopes;
  params.sinks = from.sinks;
  params.bias.data = from.bias;
  params.bias.type = to_dtype(from.bias_type);
  params.bias.num_tokens = from.bias_num_tokens;
  params.bias.num_heads = from.bias_num_heads;
  params.bias.num_keys = from.bias_num_keys;
  params.bias.token_stride = from.bias_token_stride;
  params.bias.head_stride = from.bias_head_stride;
  return params;
}

rotate_append_params to_params(const bifolio_rotate_params* given, const bifolio_tensor& k, const bifolio_tensor* v) {
  const bifolio_rotate_params from = read_struct(given, "params");
  rotate_append_params params;
  params.append.k = to_view(k);
  params.append.v = to_view(v);
  params.q = to_view(from.q);
  params.q_out = to_view(from.q_out);
  // Another number is refused as an unknown pairing, whatever its lower byte is.
  params.rotary.pairing = static_cast<rope_pairing>(from.neighbours == 0 || from.neighbours == 1 ? from.neighbours : 2);
  params.rotary.rotary_dim = from.rotary_dim;
  params.rotary.rotary_offset = from.rotary_offset;
  params.rotary.num_axes = from.num_axes;
  params.rotary.cos_sin = from.cos_sin;
  params.rotary.num_positions = from.num_positions;
  params.rotary.positions = from.positions;
  params.rotary.axis_of_pair = from.axis_of_pair;
  params.norm = {from.q_norm, from.k_norm, from.norm_epsilon};
  return params;
}

bifolio_cache_event from_event(const cache_event& event) noexcept {
  return {static_cast<std::int32_t>(event.what),
          to_index(event.block),
          event.key.low,
          event.key.high,
          event.parent.low,
          event.parent.high};
}

kv_cache_config to_config(const bifolio_manager_config* given, event_receiver& receiver) {
  const bifolio_manager_config from = read_struct(given, "config");
  kv_cache_config config;
  config.block_size = from.block_size;
  config.num_blocks = from.num_blocks;
  config.watermark = from.watermark;
  config.sliding_window = from.sliding_window;
  config.max_sequences = from.max_sequences;
  config.max_seq_len = from.max_seq_len;
  config.first_generation = from.first_generation;
  config.num_host_blocks = from.num_host_blocks;
  config.prefix.enabled = from.prefix_caching != 0;
  config.prefix.record_events = from.record_events != 0;
  config.prefix.deduplicate = from.deduplicate != 0;
  if (from.has_seed != 0) config.prefix.seed = hash_seed{from.seed_low, from.seed_high};
  receiver = {from.on_event, from.on_event_user};
  if (receiver.function == nullptr) return config;
  config.prefix.hook.user = &receiver;
  config.prefix.hook.function = [](void* to, const cache_event& event, std::span<const token_id> tokens,
                                   bool is_first) {
    const auto& told = *static_cast<const event_receiver*>(to);
    const bifolio_cache_event as_c = from_event(event);
    told.function(told.user, &as_c, from_ids<bifolio_token>(tokens.data()), tokens.size(), is_first ? 1 : 0);
  };
  return config;
}

prompt_of::prompt_of(const bifolio_prompt* given) {
  const bifolio_prompt from = read_struct(given, "prompt");
  detail::require_between("retention", from.retention, retention_hint::lowest, retention_hint::highest);
  const bifolio_extra_key* const extras = array(from.extras, from.num_extras, "extras");
  for (std::size_t i = 0; i < from.num_extras; ++i) {
    const auto* const value =
        static_cast<const std::byte*>(array(extras[i].value, extras[i].num_bytes, "value of an extra key"));
    extras_.push_back({extras[i].position, extras[i].kind, {value, extras[i].num_bytes}});
  }
  view_.tokens = to_ids<token_id>(from.tokens, from.num_tokens, "tokens");
  view_.scope = {{static_cast<const char*>(array(from.salt, from.salt_bytes, "salt")), from.salt_bytes},
                 from.adapter_id};
  view_.extras = extras_;
  view_.retention = {static_cast<block_level>(from.retention), from.expires_at};
}

}  // namespace bifolio::inline v0_2::c
