// SPDX-License-Identifier: Apache-2.0
#include "cache_shape.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace generate {
namespace {

using bifolio::group_kind;

/// The layers of one group of a model, and what they have in common.
struct group_layers {
  group_kind kind = group_kind::full;
  std::int32_t window = 0;
  std::vector<std::int32_t> layers;
};

/// Those that attend to all tokens first. A model without such layers and with several groups begins with a group
/// without layers, which is the prefix cache's index of texts.
std::vector<group_layers> group_layers_of(const model_config& model, bool keeps_all) {
  std::vector<group_layers> groups(1);
  for (std::int32_t l = 0; l < model.num_layers; ++l) {
    const layer_kind& kind = model.kinds[model.kind_of(l)];
    group_layers wanted;
    if (kind.is_recurrent) wanted.kind = group_kind::state;
    if (kind.window > 0 && !kind.is_recurrent && !keeps_all) wanted = {group_kind::window, kind.window, {}};
    auto found = std::ranges::find_if(
        groups, [&](const group_layers& group) { return group.kind == wanted.kind && group.window == wanted.window; });
    if (found == groups.end()) found = groups.insert(groups.end(), wanted);
    found->layers.push_back(l);
  }
  // One window in all layers: the pool of the only group slides.
  if (groups.size() == 2 && groups[0].layers.empty() && groups[1].kind == group_kind::window) {
    groups.erase(groups.begin());
  }
  return groups;
}

std::int64_t bytes_of_state(const recurrence_config& r) {
  return (r.conv_state_size() + r.memory_size()) * static_cast<std::int64_t>(sizeof(float));
}

/// Blocks that one sequence of the load holds at once in a group.
std::int64_t peak_of(const group_layers& group, std::int32_t block_size, const cache_load& load) {
  const std::int64_t all = bifolio::blocks_for(load.max_positions, block_size);
  switch (group.kind) {
    case group_kind::window:
      return std::min(all, bifolio::blocks_for(std::int64_t{group.window} - 1 + load.step_tokens - 1, block_size) + 1);
    case group_kind::state:
      return 2;  // the one that a step reads, and the one that it writes
    case group_kind::full:
    case group_kind::cross:
      break;
  }
  return all;
}

/// What another group needs for the sequences that `num_first` blocks of the first one hold. States are kept for later
/// prompts as well: as many again.
std::int64_t blocks_next_to(std::int64_t num_first, std::int64_t peak_of_first, const group_layers& group,
                            std::int32_t block_size, const cache_load& load) {
  const std::int64_t peak = peak_of(group, block_size, load);
  const double sequences = static_cast<double>(num_first) / static_cast<double>(peak_of_first);
  const auto wanted = static_cast<std::int64_t>(std::ceil(sequences * static_cast<double>(peak) * 1.02));
  const std::int64_t used = std::max(peak, wanted) + 2;  // what the manager's watermark keeps free
  return group.kind == group_kind::state && load.prefix_caching ? 2 * used : used;
}

/// Static scales of some layers out of those of all; none where there are none.
std::vector<float> scales_of(const std::vector<float>& all, const std::vector<std::int32_t>& layers,
                             std::int32_t num_layers) {
  const std::size_t each = all.size() / static_cast<std::size_t>(num_layers);
  std::vector<float> some;
  for (const std::int32_t layer : layers) {
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(layer) * each);
    some.insert(some.end(), first, first + static_cast<std::ptrdiff_t>(each));
  }
  return some;
}

bifolio::attention_spec spec_of(const model_config& model, bifolio::dtype query_type, const cache_shape& shape,
                                const cache_load& load) {
  bifolio::attention_spec spec;
  spec.num_q_heads = model.num_q_heads;
  spec.num_kv_heads = model.num_kv_heads;
  spec.qk_head_dim = spec.v_head_dim = model.head_dim;
  spec.q_type = spec.out_type = query_type;
  spec.k_code = shape.k_code;
  spec.v_code = shape.v_code;
  spec.deterministic = load.deterministic;
  return spec;
}

/// window_left of each layer; a window counts the token itself. Empty where none has one.
std::vector<std::int32_t> windows_of(const model_config& model, const std::vector<std::int32_t>& layers) {
  std::vector<std::int32_t> windows;
  for (const std::int32_t layer : layers) windows.push_back(model.kinds[model.kind_of(layer)].window - 1);
  if (std::ranges::all_of(windows, [](std::int32_t window) { return window < 0; })) windows.clear();
  return windows;
}

}  // namespace

bifolio::model_cache_config cache_config(const model_config& model, bifolio::dtype query_type, const cache_shape& shape,
                                         const cache_load& load) {
  bifolio::model_cache_config config;
  config.num_layers = model.num_layers;
  config.cache.prefix.enabled = load.prefix_caching;
  config.cache.max_sequences = load.max_sequences;
  if (shape.num_host_blocks > 0) config.cache.max_sequences *= 2;  // half of them may be swapped out
  config.cache.max_seq_len = load.max_positions + 1;               // the last token is sampled and never fed

  std::vector<group_layers> groups = group_layers_of(model, shape.keeps_all);
  const bifolio::attention_spec spec = spec_of(model, query_type, shape, load);
  if (groups.size() == 1) {
    config.layout = shape.layout;
    config.attention = spec;
    config.layer_windows = windows_of(model, groups[0].layers);
    config.k_scales = shape.k_scales;
    config.v_scales = shape.v_scales;
    config.cache.block_size = shape.block_size;
    config.cache.num_blocks = shape.num_blocks;
    config.cache.num_host_blocks = shape.num_host_blocks;
    config.cache.sliding_window = groups[0].window;
    return config;
  }
  const std::int64_t peak_of_first = peak_of(groups[0], shape.block_size, load);
  const auto count = [&](const group_layers& group, std::int64_t num_first) {
    if (&group == &groups[0] || num_first == 0) return num_first;
    return blocks_next_to(num_first, peak_of_first, group, shape.block_size, load);
  };
  for (group_layers& group : groups) {
    const bool has_states = group.kind == group_kind::state;
    config.cache.groups.push_back({.kind = group.kind,
                                   .block_size = has_states ? 1 : shape.block_size,
                                   .num_blocks = count(group, shape.num_blocks),
                                   .num_host_blocks = count(group, shape.num_host_blocks),
                                   .window = group.window});
    bifolio::model_group& stored = config.groups.emplace_back();
    if (has_states) {
      stored.state_bytes = bytes_of_state(model.recurrence);
    } else if (!group.layers.empty()) {
      stored.layout = shape.layout;
      stored.attention = spec;
      stored.layer_windows = windows_of(model, group.layers);
      stored.k_scales = scales_of(shape.k_scales, group.layers, model.num_layers);
      stored.v_scales = scales_of(shape.v_scales, group.layers, model.num_layers);
    }
    stored.layers = std::move(group.layers);
  }
  return config;
}

std::vector<pool_facts> pools_of(const bifolio::model_cache_config& cache) {
  const auto block_bytes = [](bifolio::layout_kind layout, const bifolio::attention_spec& spec,
                              std::int32_t block_size) {
    return bifolio::make_layout(layout, spec.k_code, spec.v_code, spec.num_kv_heads, spec.qk_head_dim, spec.v_head_dim,
                                block_size)
        .block_bytes();
  };
  if (cache.groups.empty()) {
    const std::int64_t bytes = cache.num_layers * block_bytes(cache.layout, cache.attention, cache.cache.block_size);
    return {{group_kind::full, cache.cache.block_size, cache.cache.sliding_window, cache.cache.num_blocks, bytes,
             cache.num_layers}};
  }
  std::vector<pool_facts> pools;
  for (std::size_t g = 0; g < cache.groups.size(); ++g) {
    const bifolio::model_group& stored = cache.groups[g];
    const bifolio::group_config& kept = cache.cache.groups[g];
    std::int64_t bytes = stored.state_bytes;
    if (bytes == 0 && !stored.layers.empty()) bytes = block_bytes(stored.layout, stored.attention, kept.block_size);
    const auto num_layers = static_cast<std::int32_t>(stored.layers.size());
    pools.push_back({kept.kind, kept.block_size, kept.window, kept.num_blocks, bytes * num_layers, num_layers});
  }
  return pools;
}

std::int64_t blocks_for_load(const model_config& model, const cache_shape& shape, const cache_load& load,
                             std::int64_t num_sequences, std::int64_t memory_bytes) {
  const auto bytes_with = [&](std::int64_t num_blocks) {
    cache_shape tried = shape;
    tried.num_blocks = num_blocks;
    std::int64_t bytes = 0;
    for (const pool_facts& pool : pools_of(cache_config(model, bifolio::dtype::f32, tried, load))) {
      bytes += pool.num_blocks * pool.block_bytes;
    }
    return bytes;
  };
  const std::vector<group_layers> groups = group_layers_of(model, shape.keeps_all);
  const std::int64_t need = num_sequences * peak_of(groups[0], shape.block_size, load);
  std::int64_t most = need + need / 50 + 2;  // what the manager's watermark keeps free
  if (bytes_with(most) <= memory_bytes) return most;
  std::int64_t least = 1;
  while (least < most) {  // the largest number that fits
    const std::int64_t middle = least + (most - least + 1) / 2;
    if (bytes_with(middle) <= memory_bytes) {
      least = middle;
    } else {
      most = middle - 1;
    }
  }
  return least;
}

}  // namespace generate
