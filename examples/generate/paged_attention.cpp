// SPDX-License-Identifier: Apache-2.0
#include "paged_attention.hpp"

#include <fmt/format.h>

namespace generate {
namespace {

void require(bifolio::errc code, const char* what) {
  if (code != bifolio::errc::ok) throw bifolio::error(code, fmt::format("{} failed: {}", what, to_string(code)));
}

bifolio::cache_engine_config with_blocks(bifolio::cache_engine_config config, std::int64_t num_blocks) {
  config.num_blocks = num_blocks;
  return config;
}

}  // namespace

paged_attention::paged_attention(bifolio::cache_engine& engine, const model_runner& model, bool deterministic)
    : engine_(&engine), stream_(model.stream()), config_(model.config()), plans_(config_.kinds.size()) {
  const model_config& config = config_;
  spec_.num_q_heads = config.num_q_heads;
  spec_.num_kv_heads = config.num_kv_heads;
  spec_.qk_head_dim = spec_.v_head_dim = config.head_dim;
  spec_.block_size = engine.config().layout.block_size;
  spec_.q_type = spec_.out_type = model.query_type();
  spec_.k_code = engine.config().layout.k.code;
  spec_.v_code = engine.config().layout.v.code;
  spec_.deterministic = deterministic;
}

void paged_attention::move_blocks(const bifolio::step_plan& plan, bifolio::cache_engine* host) {
  if (!plan.swap_outs.empty()) require(engine_->swap_blocks_to(*host, plan.swap_outs, stream_), "swapping blocks out");
  require(engine_->copy_blocks(plan.copies, stream_), "copying blocks");
  if (!plan.swap_ins.empty()) require(host->swap_blocks_to(*engine_, plan.swap_ins, stream_), "swapping blocks in");
}

void paged_attention::begin_step(const bifolio::step_batch& batch) {
  batch_ = engine_->upload(batch, stream_);
  for (std::size_t i = 0; i < plans_.size(); ++i) {
    bifolio::attention_spec spec = spec_;
    spec.window_left = config_.kinds[i].window - 1;  // a window counts the token itself; −1: no window
    engine_->where().plan_attention(plans_[i], spec, batch.view(), engine_->config().num_blocks, stream_);
  }
}

void paged_attention::run(std::int32_t layer, const layer_rows& rows) {
  bifolio::rotate_append_params stored;
  stored.append.k = rows.k;
  stored.append.v = rows.v;
  stored.append.slot_mapping = batch_.slot_mapping;
  stored.q = rows.q;
  stored.q_out = rows.q_out;
  stored.rotary = rows.rotary;
  stored.norm = rows.norm;
  require(engine_->rotate_append(layer, stored, stream_), "storing keys and values");
  bifolio::attention_params params;
  params.q = as_const(rows.q_out);
  params.out = rows.out;
  params.kv = engine_->layers()[static_cast<std::size_t>(layer)];
  params.batch = batch_;
  params.scale = config_.attention_scale();
  params.soft_cap = config_.attention_soft_cap;
  last_plan_ = config_.kind_of(layer);
  require(engine_->where().attention(plans_[last_plan_], params, stream_), "attention");
  last_ = params;
}

host_cache::host_cache(bifolio::backend& where, const bifolio::cache_engine_config& device, std::int64_t num_blocks)
    : cpu(bifolio::make_backend()), engine(*cpu, with_blocks(device, num_blocks), &where.staging_memory()) {}

bifolio::cache_engine_config cache_config(const model_config& config, bifolio::layout_kind kind,
                                          const bifolio::kv_code& k, const bifolio::kv_code& v, std::int32_t block_size,
                                          std::int64_t num_blocks) {
  bifolio::cache_engine_config cache;
  cache.num_layers = config.num_layers;
  cache.num_blocks = num_blocks;
  cache.layout = bifolio::make_layout(kind, k, v, config.num_kv_heads, config.head_dim, config.head_dim, block_size);
  return cache;
}

bifolio::cache_engine_config cache_config(const model_config& config, bifolio::layout_kind kind, bifolio::dtype kv_type,
                                          std::int32_t block_size, std::int64_t num_blocks) {
  return cache_config(config, kind, bifolio::kv_code{kv_type}, bifolio::kv_code{kv_type}, block_size, num_blocks);
}

}  // namespace generate
