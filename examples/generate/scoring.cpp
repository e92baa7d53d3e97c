// SPDX-License-Identifier: Apache-2.0
#include "scoring.hpp"

#include <algorithm>
#include <bifolio/kv_cache_manager.hpp>
#include <numeric>

#include "input_error.hpp"
#include "paged_attention.hpp"
#include "sampler.hpp"

namespace generate {

score score_tokens(model_runner& model, bifolio::cache_engine& engine, std::span<const bifolio::token_id> ids,
                   std::int32_t chunk, bool deterministic) {
  if (ids.size() < 2) throw input_error("a text of at least one token is needed to score it");
  bifolio::kv_cache_config config;
  config.block_size = engine.config().layout.block_size;
  config.num_blocks = engine.config().num_blocks;
  bifolio::kv_cache_manager manager(config);
  paged_attention attention(engine, model, deterministic);

  const auto num_fed = static_cast<std::int32_t>(ids.size() - 1);
  const auto [seq, status] = manager.allocate(num_fed);
  if (status != bifolio::alloc_status::ok) {
    throw bifolio::error(bifolio::errc::invalid_argument, "the pool is too small for the text to be scored");
  }

  score result;
  bifolio::step_plan plan;
  bifolio::step_batch batch;
  std::vector<std::int32_t> positions, rows;
  const auto vocab = static_cast<std::size_t>(model.config().vocab_size);
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

    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto row = logits.subspan(i * vocab, vocab);
      const bifolio::token_id next = ids[first + i + 1];
      result.nll.push_back(negative_log_likelihood(row, next));
      result.num_best += largest_logit(row) == next ? 1 : 0;
    }
  }
  manager.free(seq);
  result.mean_nll = std::accumulate(result.nll.begin(), result.nll.end(), 0.0) / static_cast<double>(num_fed);
  return result;
}

}  // namespace generate
