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

/// "e4m3", or "K e4m3, V bf16".
std::string names_of(const cache_shape& shape) {
  if (shape.k_code == shape.v_code) return std::string(short_name(shape.k_code));
  return fmt::format("K {}, V {}", short_name(shape.k_code), short_name(shape.v_code));
}

/// "44 blocks of 16 tokens", with the pools of other groups after it.
std::string names_of(const std::vector<pool_facts>& pools) {
  std::string names;
  for (const pool_facts& pool : pools) {
    if (!names.empty()) names += ", ";
    names += pool.kind == bifolio::group_kind::state
                 ? fmt::format("{} states", pool.num_blocks)
                 : fmt::format("{} blocks of {} tokens", pool.num_blocks, pool.block_size);
    if (pool.window > 0) names += fmt::format(" for windows of {}", pool.window);
  }
  return names;
}

cache_load load_of(const engine_options& o, const model_setup& on) {
  return {.max_positions = on.max_positions,
          .step_tokens = o.max_batch_tokens,
          .max_sequences = o.max_batch_seqs,
          .prefix_caching = o.prefix_caching};
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

cache_shape shape_of(const engine_options& o, const model_setup& on) {
  return {.layout = o.layout,
          .k_code = on.placed.k_code,
          .v_code = on.placed.v_code,
          .block_size = o.block_size,
          .num_host_blocks = o.num_host_blocks};
}

void add_static_scales(cache_shape& shape, const engine_options& o, model_setup& on,
                       std::span<const bifolio::token_id> sample) {
  constexpr std::size_t most_ids = 256;
  const std::size_t count = std::min({sample.size(), most_ids, static_cast<std::size_t>(on.max_positions)});
  const model_config& c = on.config();
  const bifolio::kv_layout layout = bifolio::make_layout(shape.layout, shape.k_code, shape.v_code, c.num_kv_heads,
                                                         c.head_dim, c.head_dim, shape.block_size);
  static_scales scales = o.scales_file.empty() ? calibrate(*on.placed.runner, *on.placed.where, shape.k_code,
                                                           shape.v_code, sample.first(count), o.max_batch_tokens)
                                               : read_scales(o.scales_file, layout, c.num_layers);
  if (!o.save_scales_file.empty()) write_scales(o.save_scales_file, layout, scales);
  shape.k_scales = std::move(scales.k);
  shape.v_scales = std::move(scales.v);
}

model_setup::model_setup(const engine_options& o)
    : path(o.model.empty() ? find_bundled_model() : o.model), model(load_model(path, o.tokenizer)) {
  max_positions = choose_max_positions(o, config());
  workers = make_workers(o.num_threads, o.executor);
  placed = place_model(o.device, model.weights, *workers, o.types, o.isa);
  const model_config& c = config();
  tools::write_stderr(fmt::format(
      "model: {}: {:.2f} million parameters, {} layers, {} query heads on {} KV heads of {}, vocabulary {}\n",
      tools::printable_line(path.string()), static_cast<double>(num_parameters(c)) * 1e-6, c.num_layers, c.num_q_heads,
      c.num_kv_heads, c.head_dim, c.vocab_size));
}

cache_setup::cache_setup(const engine_options& o, model_setup& on, std::int64_t num_sequences,
                         std::span<const bifolio::token_id> sample)
    : shape(shape_of(o, on)) {
  const cache_load load = load_of(o, on);
  shape.num_blocks = o.num_blocks > 0
                         ? o.num_blocks
                         : blocks_for_load(on.config(), shape, load, num_sequences, o.cache_mebibytes << 20);
  add_static_scales(shape, o, on, sample);
  const auto pools = pools_of(cache_config(on.config(), on.placed.runner->query_type(), shape, load));
  std::int64_t num_bytes = 0;
  for (const pool_facts& pool : pools) num_bytes += pool.num_blocks * pool.block_bytes;
  tools::write_stderr(fmt::format("cache: {} in {}, {} {}, on {}\n", names_of(pools), format_bytes(num_bytes),
                                  names_of(shape), to_string(o.layout), on.placed.where->description()));
}

}  // namespace generate
