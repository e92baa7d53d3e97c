// SPDX-License-Identifier: Apache-2.0
#include "model_setup.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bifolio/kv_cache_manager.hpp>

#include "input_error.hpp"
#include "parallel.hpp"
#include "report.hpp"
#include "scales_file.hpp"
#include "scoring.hpp"
#include "tools/common/escape.hpp"

namespace generate {
namespace {

std::int32_t choose_max_positions(const engine_options& o, const model_config& model) {
  if (o.max_positions > model.max_positions) {
    throw input_error(fmt::format("--max-positions is {}, allowed are 1 to {}, the model's limit", o.max_positions,
                                  model.max_positions));
  }
  return o.max_positions > 0 ? o.max_positions : model.max_positions;
}

std::int64_t choose_num_blocks(const engine_options& o, const bifolio::kv_layout& layout, const model_setup& on,
                               std::int64_t num_sequences) {
  if (o.num_blocks > 0) return o.num_blocks;
  const std::int64_t need = num_sequences * bifolio::blocks_for(on.max_positions, o.block_size);
  const std::int64_t spare = need / 50 + 2;  // what the manager's watermark keeps free
  const std::int64_t fitting = bifolio::num_blocks_for_memory(o.cache_mebibytes << 20, layout, on.config().num_layers);
  return std::min(need + spare, std::max<std::int64_t>(1, fitting));
}

bifolio::cache_engine_config config_of(const engine_options& o, model_setup& on, std::int64_t num_sequences,
                                       std::span<const bifolio::token_id> sample) {
  const placed_model& placed = on.placed;
  bifolio::cache_engine_config cache =
      cache_config(on.config(), o.layout, placed.k_code, placed.v_code, o.block_size, 1);
  cache.num_blocks = choose_num_blocks(o, cache.layout, on, num_sequences);
  add_static_scales(cache, o, on, sample);
  return cache;
}

/// "e4m3", or "K e4m3, V bf16".
std::string names_of(const bifolio::kv_layout& layout) {
  if (layout.k.code == layout.v.code) return std::string(short_name(layout.k.code));
  return fmt::format("K {}, V {}", short_name(layout.k.code), short_name(layout.v.code));
}

}  // namespace

engine_config engine_config_of(const engine_options& o, std::int32_t max_positions) {
  return {.max_positions = max_positions,
          .max_batch_tokens = o.max_batch_tokens,
          .max_running = o.max_batch_seqs,
          .prefix_caching = o.prefix_caching,
          .preemption = o.preemption,
          .deterministic = o.deterministic,
          .watched = !o.events.empty()};
}

void add_static_scales(bifolio::cache_engine_config& cache, const engine_options& o, model_setup& on,
                       std::span<const bifolio::token_id> sample) {
  constexpr std::size_t most_ids = 256;
  const std::size_t count = std::min({sample.size(), most_ids, static_cast<std::size_t>(on.max_positions)});
  static_scales scales = o.scales_file.empty() ? calibrate(*on.placed.runner, *on.placed.where, cache.layout.k.code,
                                                           cache.layout.v.code, sample.first(count), o.max_batch_tokens)
                                               : read_scales(o.scales_file, cache.layout, cache.num_layers);
  if (!o.save_scales_file.empty()) write_scales(o.save_scales_file, cache.layout, scales);
  cache.k_scales = std::move(scales.k);
  cache.v_scales = std::move(scales.v);
}

model_setup::model_setup(const engine_options& o)
    : path(o.model.empty() ? find_bundled_model() : o.model), model(load_model(path, o.tokenizer)) {
  max_positions = choose_max_positions(o, config());
  workers = make_workers(o.num_threads);
  placed = place_model(o.device, model.weights, *workers, o.types, o.isa);
  const model_config& c = config();
  tools::write_stderr(fmt::format(
      "model: {}: {:.2f} million parameters, {} layers, {} query heads on {} KV heads of {}, vocabulary {}\n",
      tools::printable_line(path.string()), static_cast<double>(num_parameters(c)) * 1e-6, c.num_layers, c.num_q_heads,
      c.num_kv_heads, c.head_dim, c.vocab_size));
}

cache_setup::cache_setup(const engine_options& o, model_setup& on, std::int64_t num_sequences,
                         std::span<const bifolio::token_id> sample)
    : blocks(*on.placed.where, config_of(o, on, num_sequences, sample)) {
  if (o.num_host_blocks > 0) host_blocks.emplace(*on.placed.where, blocks.config(), o.num_host_blocks);
  tools::write_stderr(fmt::format("cache: {} blocks of {} tokens in {}, {} {}, on {}\n", blocks.config().num_blocks,
                                  o.block_size, format_bytes(static_cast<std::int64_t>(blocks.num_bytes())),
                                  names_of(blocks.config().layout), to_string(o.layout),
                                  on.placed.where->description()));
}

}  // namespace generate
