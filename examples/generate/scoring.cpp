// SPDX-License-Identifier: Apache-2.0
#include "scoring.hpp"

#include <algorithm>
#include <bifolio/buffer.hpp>
#include <bifolio/calibration.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <numeric>

#include "input_error.hpp"
#include "paged_attention.hpp"
#include "sampler.hpp"

namespace generate {

namespace {

/// Feeds the first `num_fed` ids, `chunk` a step, as one sequence, and calls `take(first, logits)` after each step with
/// the logits after all of its tokens, and `finish(batch)` at the end with a batch of them all.
template <class Take, class Finish>
void feed_tokens(model_runner& model, bifolio::cache_engine& engine, std::span<const bifolio::token_id> ids,
                 std::int32_t num_fed, std::int32_t chunk, bool deterministic, const Take& take, const Finish& finish) {
  bifolio::kv_cache_config config;
  config.block_size = engine.config().layout.block_size;
  config.num_blocks = engine.config().num_blocks;
  bifolio::kv_cache_manager manager(config);
  paged_attention attention(engine, model, deterministic);

  const auto [seq, status] = manager.allocate(num_fed);
  if (status != bifolio::alloc_status::ok) {
    throw bifolio::error(bifolio::errc::invalid_argument, "the pool is too small for the text to be scored");
  }
  bifolio::step_plan plan;
  bifolio::step_batch batch;
  std::vector<std::int32_t> positions, rows;
  for (std::int32_t begin = 0; begin < num_fed; begin += chunk) {
    const std::int32_t count = std::min(chunk, num_fed - begin);
    plan.seqs.assign(1, {seq, count, begin + count});
    plan.num_tokens = count;
    manager.build(batch, plan);
    attention.begin_step(batch);

    positions.resize(static_cast<std::size_t>(count));
    rows.resize(static_cast<std::size_t>(count));
    std::iota(positions.begin(), positions.end(), begin);
    std::iota(rows.begin(), rows.end(), 0);
    const auto first = static_cast<std::size_t>(begin);
    const auto logits = model.forward(ids.subspan(first, rows.size()), positions, rows, attention);
    manager.commit(seq, count);
    take(first, logits);
  }
  plan.seqs.assign(1, {seq, num_fed, num_fed});
  plan.num_tokens = num_fed;
  manager.build(batch, plan);
  finish(batch);
  manager.free(seq);
}

/// Shows what a cache holds of a sequence, layer by layer, to samplers; there may be none for a plane.
void sample_cache(bifolio::cache_engine& engine, const bifolio::step_batch& batch, bifolio::stream_ref stream,
                  std::vector<bifolio::scale_sampler>& k_layers, std::vector<bifolio::scale_sampler>& v_layers) {
  const bifolio::kv_layout& layout = engine.config().layout;
  const auto require = [](bifolio::errc code) {
    if (code != bifolio::errc::ok) throw bifolio::error(code, "keys and values could not be read for calibration");
  };
  bifolio::backend& where = engine.where();
  const auto num_tokens = static_cast<std::int64_t>(batch.slot_mapping.size());
  const std::size_t half =
      static_cast<std::size_t>(num_tokens * layout.num_kv_heads * layout.k.head_dim) * sizeof(float);
  bifolio::buffer rows(where.memory(), 2 * half);
  std::vector<std::byte> held(2 * half);
  const auto view = [&](std::byte* data) {
    return bifolio::dense_view<void>(data, bifolio::dtype::f32, num_tokens, layout.num_kv_heads, layout.k.head_dim);
  };
  const std::int64_t* const slots = engine.upload(batch, stream).slot_mapping;
  for (std::size_t l = 0; l < engine.layers().size(); ++l) {
    auto* const device = rows.as<std::byte>();
    require(where.gather({engine.layers()[l], view(device), view(device + half), slots}, stream));
    require(where.download(held.data(), device, held.size(), stream));
    require(where.synchronize(stream));
    if (!k_layers.empty()) k_layers[l].add(as_const(view(held.data())));
    if (!v_layers.empty()) v_layers[l].add(as_const(view(held.data() + half)));
  }
}

std::vector<float> scales_of(const std::vector<bifolio::scale_sampler>& layers) {
  std::vector<float> all;
  for (const bifolio::scale_sampler& layer : layers) {
    const std::vector<float> scales = layer.scales();
    all.insert(all.end(), scales.begin(), scales.end());
  }
  return all;
}

}  // namespace

score score_tokens(model_runner& model, bifolio::cache_engine& engine, std::span<const bifolio::token_id> ids,
                   std::int32_t chunk, bool deterministic) {
  if (ids.size() < 2) throw input_error("a text of at least one token is needed to score it");
  const auto num_fed = static_cast<std::int32_t>(ids.size() - 1);
  const auto vocab = static_cast<std::size_t>(model.config().vocab_size);
  score result;
  feed_tokens(
      model, engine, ids, num_fed, chunk, deterministic,
      [&](std::size_t first, std::span<const float> logits) {
        for (std::size_t i = 0; i < logits.size() / vocab; ++i) {
          const auto row = logits.subspan(i * vocab, vocab);
          const bifolio::token_id next = ids[first + i + 1];
          result.nll.push_back(negative_log_likelihood(row, next));
          result.num_best += largest_logit(row) == next ? 1 : 0;
        }
      },
      [](const bifolio::step_batch&) {});
  result.mean_nll = std::accumulate(result.nll.begin(), result.nll.end(), 0.0) / static_cast<double>(num_fed);
  return result;
}

static_scales calibrate(model_runner& model, bifolio::backend& where, const bifolio::kv_code& k,
                        const bifolio::kv_code& v, std::span<const bifolio::token_id> ids, std::int32_t chunk) {
  const model_config& config = model.config();
  const auto samplers = [&](const bifolio::kv_code& code) {
    const std::size_t num_layers = code.has_static_scales() ? static_cast<std::size_t>(config.num_layers) : 0;
    return num_layers == 0 ? std::vector<bifolio::scale_sampler>()
                           : std::vector<bifolio::scale_sampler>(num_layers, {code, config.num_kv_heads});
  };
  std::vector<bifolio::scale_sampler> k_layers = samplers(k);
  std::vector<bifolio::scale_sampler> v_layers = samplers(v);
  if ((k_layers.empty() && v_layers.empty()) || ids.empty()) return {scales_of(k_layers), scales_of(v_layers)};

  constexpr std::int32_t block_size = 16;
  const auto num_ids = static_cast<std::int32_t>(ids.size());
  bifolio::cache_engine engine(where, cache_config(config, bifolio::layout_kind::hnd, model.query_type(), block_size,
                                                   bifolio::blocks_for(num_ids, block_size)));
  feed_tokens(
      model, engine, ids, num_ids, chunk, false, [](std::size_t, std::span<const float>) {},
      [&](const bifolio::step_batch& batch) { sample_cache(engine, batch, model.stream(), k_layers, v_layers); });
  return {scales_of(k_layers), scales_of(v_layers)};
}

}  // namespace generate
