// SPDX-License-Identifier: Apache-2.0
#include "scoring.hpp"

#include <algorithm>
#include <bifolio/calibration.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <numeric>

#include "input_error.hpp"
#include "paged_attention.hpp"
#include "sampler.hpp"

namespace generate {

namespace {

/// Feeds the first `num_fed` ids, `chunk` a step, as one sequence, and calls `take(first, logits)` after each step with
/// the logits after all of its tokens. `wrap` may put something between the model and the cache.
template <class Wrap, class Take>
void feed_tokens(model_runner& model, bifolio::cache_engine& engine, std::span<const bifolio::token_id> ids,
                 std::int32_t num_fed, std::int32_t chunk, bool deterministic, const Wrap& wrap, const Take& take) {
  bifolio::kv_cache_config config;
  config.block_size = engine.config().layout.block_size;
  config.num_blocks = engine.config().num_blocks;
  bifolio::kv_cache_manager manager(config);
  paged_attention attention(engine, model, deterministic);
  auto&& layers = wrap(attention);

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
    const auto logits = model.forward(ids.subspan(first, rows.size()), positions, rows, layers);
    manager.commit(seq, count);
    take(first, logits);
  }
  manager.free(seq);
}

/// Shows the rows of each layer to samplers on their way to the cache.
class recording_layers final : public attention_layer {
 public:
  recording_layers(attention_layer& inner, bifolio::backend& where, bifolio::stream_ref stream,
                   std::vector<bifolio::scale_sampler>& k, std::vector<bifolio::scale_sampler>& v)
      : inner_(inner), where_(where), stream_(stream), k_(k), v_(v) {}

  void run(std::int32_t layer, const bifolio::const_tensor_view& q, const bifolio::const_tensor_view& k,
           const bifolio::const_tensor_view& v, const bifolio::tensor_view& out) override {
    if (!k_.empty()) add(k_[static_cast<std::size_t>(layer)], k);
    if (!v_.empty()) add(v_[static_cast<std::size_t>(layer)], v);
    inner_.run(layer, q, k, v, out);
  }

 private:
  void add(bifolio::scale_sampler& sampler, bifolio::const_tensor_view rows) {
    const std::int64_t elements =
        (rows.num_tokens - 1) * rows.token_stride + (rows.num_heads - 1) * rows.head_stride + rows.head_dim;
    held_.resize(static_cast<std::size_t>(elements) * bifolio::size_of(rows.type));
    bifolio::errc code = where_.download(held_.data(), rows.data, held_.size(), stream_);
    if (code == bifolio::errc::ok) code = where_.synchronize(stream_);
    if (code != bifolio::errc::ok) throw bifolio::error(code, "keys and values could not be read for calibration");
    rows.data = held_.data();
    sampler.add(rows);
  }

  attention_layer& inner_;
  bifolio::backend& where_;
  bifolio::stream_ref stream_;
  std::vector<bifolio::scale_sampler>& k_;
  std::vector<bifolio::scale_sampler>& v_;
  std::vector<std::byte> held_;
};

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
      [](attention_layer& layers) -> attention_layer& { return layers; },
      [&](std::size_t first, std::span<const float> logits) {
        for (std::size_t i = 0; i < logits.size() / vocab; ++i) {
          const auto row = logits.subspan(i * vocab, vocab);
          const bifolio::token_id next = ids[first + i + 1];
          result.nll.push_back(negative_log_likelihood(row, next));
          result.num_best += largest_logit(row) == next ? 1 : 0;
        }
      });
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
      model, engine, ids, num_ids, chunk, false,
      [&](attention_layer& layers) { return recording_layers(layers, where, model.stream(), k_layers, v_layers); },
      [](std::size_t, std::span<const float>) {});
  return {scales_of(k_layers), scales_of(v_layers)};
}

}  // namespace generate
