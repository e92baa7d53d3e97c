// SPDX-License-Identifier: Apache-2.0
#include "paged_attention.hpp"

#include <fmt/format.h>

#include <bifolio/rotate_append.hpp>

namespace generate {
namespace {

void require(bifolio::errc code, const char* what) {
  if (code != bifolio::errc::ok) throw bifolio::error(code, fmt::format("{} failed: {}", what, to_string(code)));
}

}  // namespace

void paged_attention::run(std::int32_t layer, const layer_rows& rows) {
  bifolio::rotate_append_params stored;
  stored.append.k = rows.k;
  stored.append.v = rows.v;
  stored.q = rows.q;
  stored.q_out = rows.q_out;
  stored.rotary = rows.rotary;
  stored.norm = rows.norm;
  require(step_->rotate_append(layer, stored), "storing keys and values");
  bifolio::attention_params params;
  params.q = as_const(rows.q_out);
  params.out = rows.out;
  params.scale = config_.attention_scale();
  params.soft_cap = config_.attention_soft_cap;
  params.sinks = rows.sinks;
  require(step_->attention(layer, params), "attention");
  last_ = params;
  last_layer_ = layer;
}

recurrent_states paged_attention::states(std::int32_t layer) {
  const bifolio::layer_states of = step_->states(layer);
  const auto& batch = step_->batch(cache_->group_of(layer));
  return {of.data, of.state_bytes, of.rows, of.rows_stride, batch.query_start_loc, batch.num_seqs};
}

std::vector<std::string> paged_attention::kernels() const {
  return cache_->where().describe(step_->attention_plan_of(last_layer_), step_->complete(last_layer_, last_));
}

}  // namespace generate
