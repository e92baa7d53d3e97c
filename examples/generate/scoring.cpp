// SPDX-License-Identifier: Apache-2.0
#include "scoring.hpp"

#include <algorithm>
#include <bifolio/buffer.hpp>
#include <bifolio/calibration.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/model_cache.hpp>
#include <numeric>

#include "input_error.hpp"
#include "paged_attention.hpp"
#include "sampler.hpp"

namespace generate {

namespace {

/// Feeds the first `num_fed` ids, `chunk` a step, as one sequence, and calls `take(first, logits)` after each step with
/// the logits after all of its tokens, and `finish(cache, seq)` at the end.
template <class Take, class Finish>
void feed_tokens(model_runner& model, bifolio::backend& where, const cache_shape& shape,
                 std::span<const bifolio::token_id> ids, std::int32_t num_fed, std::int32_t chunk, bool deterministic,
                 const Take& take, const Finish& finish) {
  const cache_load load{
      .max_positions = num_fed, .step_tokens = chunk, .max_sequences = 1, .deterministic = deterministic};
  bifolio::model_cache cache(where, cache_config(model.config(), model.query_type(), shape, load));
  paged_attention attention(cache, model.config());

  const auto opened = cache.open(ids.first(static_cast<std::size_t>(std::min(chunk, num_fed))), model.stream());
  std::vector<std::int32_t> rows;
  for (std::int32_t begin = 0; begin < num_fed; begin += chunk) {
    const auto count = static_cast<std::size_t>(std::min(chunk, num_fed - begin));
    const auto first = static_cast<std::size_t>(begin);
    const auto now = ids.subspan(first, count);
    bifolio::model_step step;
    if (opened.status == bifolio::alloc_status::ok) step = cache.begin_step({{opened.seq, now}}, model.stream());
    if (!step) {
      throw bifolio::error(bifolio::errc::invalid_argument, "the pool is too small for the text to be scored");
    }
    attention.use(step);
    rows.resize(count);
    std::iota(rows.begin(), rows.end(), 0);
    const auto logits = model.forward(now, step.inputs().positions, rows, attention);
    step.commit();
    take(first, logits);
  }
  finish(cache, opened.seq);
}

/// Shows what a cache that keeps all tokens holds of a sequence, layer by layer, to samplers; there may be none for a
/// plane.
void sample_cache(bifolio::model_cache& cache, bifolio::seq_id seq, bifolio::stream_ref stream,
                  std::vector<bifolio::scale_sampler>& k_layers, std::vector<bifolio::scale_sampler>& v_layers) {
  bifolio::cache_engine& engine = cache.engine();
  const bifolio::kv_layout& layout = engine.config().layout;
  const auto require = [](bifolio::errc code) {
    if (code != bifolio::errc::ok) throw bifolio::error(code, "keys and values could not be read for calibration");
  };
  bifolio::backend& where = engine.where();
  const std::int64_t num_tokens = cache.manager().num_tokens(seq);
  std::vector<std::int64_t> slots;
  for (std::int64_t p = 0; p < num_tokens; ++p) slots.push_back(to_index(cache.manager().slot_at(seq, p)));
  bifolio::buffer slots_there(where.memory(), slots.size() * sizeof(std::int64_t));
  require(where.upload(slots_there.as<std::byte>(), slots.data(), slots_there.num_bytes(), stream));
  const std::size_t half =
      static_cast<std::size_t>(num_tokens * layout.num_kv_heads * layout.k.head_dim) * sizeof(float);
  bifolio::buffer rows(where.memory(), 2 * half);
  std::vector<std::byte> held(2 * half);
  const auto view = [&](std::byte* data) {
    return bifolio::dense_view<void>(data, bifolio::dtype::f32, num_tokens, layout.num_kv_heads, layout.k.head_dim);
  };
  const std::vector<bifolio::model_group>& groups = cache.config().groups;
  for (std::size_t i = 0; i < engine.layers().size(); ++i) {
    auto* const device = rows.as<std::byte>();
    require(
        where.gather({engine.layers()[i], view(device), view(device + half), slots_there.as<std::int64_t>()}, stream));
    require(where.download(held.data(), device, held.size(), stream));
    require(where.synchronize(stream));
    const std::size_t layer = groups.empty() ? i : static_cast<std::size_t>(groups[0].layers[i]);
    if (!k_layers.empty()) k_layers[layer].add(as_const(view(held.data())));
    if (!v_layers.empty()) v_layers[layer].add(as_const(view(held.data() + half)));
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

score score_tokens(model_runner& model, bifolio::backend& where, const cache_shape& shape,
                   std::span<const bifolio::token_id> ids, std::int32_t chunk, bool deterministic) {
  if (ids.size() < 2) throw input_error("a text of at least one token is needed to score it");
  const auto num_fed = static_cast<std::int32_t>(ids.size() - 1);
  const auto vocab = static_cast<std::size_t>(model.config().vocab_size);
  score result;
  feed_tokens(
      model, where, shape, ids, num_fed, chunk, deterministic,
      [&](std::size_t first, std::span<const float> logits) {
        for (std::size_t i = 0; i < logits.size() / vocab; ++i) {
          const auto row = logits.subspan(i * vocab, vocab);
          const bifolio::token_id next = ids[first + i + 1];
          result.nll.push_back(negative_log_likelihood(row, next));
          result.num_best += largest_logit(row) == next ? 1 : 0;
        }
      },
      [](bifolio::model_cache&, bifolio::seq_id) {});
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
  const bifolio::kv_code plain{model.query_type()};
  const cache_shape shape{.k_code = plain,
                          .v_code = plain,
                          .block_size = block_size,
                          .num_blocks = bifolio::blocks_for(num_ids, block_size),
                          .keeps_all = true};
  feed_tokens(
      model, where, shape, ids, num_ids, chunk, false, [](std::size_t, std::span<const float>) {},
      [&](bifolio::model_cache& cache, bifolio::seq_id seq) {
        sample_cache(cache, seq, model.stream(), k_layers, v_layers);
      });
  return {scales_of(k_layers), scales_of(v_layers)};
}

}  // namespace generate
