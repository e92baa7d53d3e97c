// SPDX-License-Identifier: Apache-2.0
#pragma once

/// One call that continues prompts in process and gives everything that came out.

#include <algorithm>
#include <bifolio/backend.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "generation.hpp"
#include "paged_attention.hpp"
#include "parallel.hpp"
#include "placement.hpp"
#include "scoring.hpp"

namespace bifolio::test {

struct generation_setup {
  std::string device = "cpu";
  std::int32_t max_positions = 200;
  std::int32_t num_samples = 1;
  generate::sampling how{0, 1};
  std::uint64_t seed = 1;
  std::int32_t max_batch_tokens = 256;
  std::int32_t max_batch_seqs = 64;
  dtype kv_type = dtype::f32;
  layout_kind layout = layout_kind::hnd;
  std::int32_t block_size = 16;
  std::int64_t num_blocks = 1024;
  std::int32_t num_threads = 1;
  bool prefix_caching = false;
  std::int64_t num_host_blocks = 0;  ///< swaps whenever it preempts, if there are any
};

struct generation_result {
  std::vector<std::vector<token_id>> outputs;  // by sequence
  std::vector<std::string> ended_by;
  generate::generation_stats stats;
};

class collecting_observer final : public generate::generation_observer {
 public:
  explicit collecting_observer(generation_result& result) : result_(result) {}
  void on_token(std::size_t sequence, token_id token) override { result_.outputs[sequence].push_back(token); }
  void on_end(std::size_t sequence, generate::ending how) override {
    result_.ended_by[sequence] += generate::to_string(how);  // twice would show
  }
  void on_step(const generate::generation_progress&) override {}

 private:
  generation_result& result_;
};

inline generation_result continue_prompts(const generate::checkpoint& weights,
                                          const std::vector<std::vector<token_id>>& prompts,
                                          const generation_setup& setup) {
  const auto lanes = generate::make_lanes(setup.num_threads);
  const generate::placed_model placed = generate::place_model(setup.device, weights, *lanes);
  cache_engine engine(*placed.where, generate::cache_config(weights.config, setup.layout, setup.kv_type,
                                                            setup.block_size, setup.num_blocks));
  generate::generation_config config;
  config.max_positions = setup.max_positions;
  config.num_samples = setup.num_samples;
  config.how = setup.how;
  config.seed = setup.seed;
  config.max_batch_tokens = setup.max_batch_tokens;
  config.max_batch_seqs = setup.max_batch_seqs;
  config.prefix_caching = setup.prefix_caching;
  config.preemption = setup.num_host_blocks > 0 ? preemption_mode::swap : preemption_mode::recompute;
  std::optional<generate::host_cache> host;
  if (setup.num_host_blocks > 0) host.emplace(*placed.where, engine.config(), setup.num_host_blocks);
  generation_result result;
  const std::size_t num_sequences = prompts.size() * static_cast<std::size_t>(setup.num_samples);
  result.outputs.resize(num_sequences);
  result.ended_by.resize(num_sequences);
  collecting_observer observer(result);
  result.stats = generate_all(*placed.runner, engine, config, prompts, observer, host ? &host->engine : nullptr);
  return result;
}

/// Logits after every token of one sequence, in the fewest lines that use a paged cache: no scheduler.
inline std::vector<std::vector<float>> paged_logits(const generate::checkpoint& weights,
                                                    const std::vector<token_id>& ids, std::int32_t chunk,
                                                    const std::string& device = "cpu") {
  const auto lanes = generate::make_lanes(1);
  const generate::placed_model placed = generate::place_model(device, weights, *lanes);
  kv_cache_config config;
  config.block_size = 16;
  config.num_blocks = 64;
  kv_cache_manager manager(config);
  cache_engine engine(*placed.where, generate::cache_config(weights.config, layout_kind::hnd, dtype::f32,
                                                            config.block_size, config.num_blocks));
  generate::paged_attention attention(engine, weights.config, placed.runner->stream());
  const auto num_ids = static_cast<std::int32_t>(ids.size());
  const auto seq = manager.allocate(num_ids).seq;
  const auto vocab = static_cast<std::size_t>(weights.config.vocab_size);
  std::vector<std::vector<float>> result;
  step_batch batch;
  for (std::int32_t begin = 0; begin < num_ids; begin += chunk) {
    const std::int32_t count = std::min(chunk, num_ids - begin);
    step_plan plan;
    plan.seqs = {{seq, count, begin + count}};
    plan.num_tokens = count;
    manager.build(batch, plan);
    attention.begin_step(batch);
    std::vector<std::int32_t> positions(static_cast<std::size_t>(count)), rows(positions.size());
    std::iota(positions.begin(), positions.end(), begin);
    std::iota(rows.begin(), rows.end(), 0);
    const auto logits = placed.runner->forward(std::span(ids).subspan(static_cast<std::size_t>(begin), rows.size()),
                                               positions, rows, attention);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto row = logits.subspan(i * vocab, vocab);
      result.emplace_back(row.begin(), row.end());
    }
  }
  return result;
}

/// How probable the model finds a text, with the cache that `setup` describes in as many blocks as the text needs and
/// `chunk` tokens a step.
inline generate::score score_text(const generate::checkpoint& weights, const std::vector<token_id>& ids,
                                  const generation_setup& setup, std::int32_t chunk) {
  const auto lanes = generate::make_lanes(setup.num_threads);
  const generate::placed_model placed = generate::place_model(setup.device, weights, *lanes);
  cache_engine engine(*placed.where,
                      generate::cache_config(weights.config, setup.layout, setup.kv_type, setup.block_size,
                                             blocks_for(std::ssize(ids), setup.block_size)));
  return generate::score_tokens(*placed.runner, engine, ids, chunk);
}

}  // namespace bifolio::test
