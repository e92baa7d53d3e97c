// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The cache of a model: which layers are kept together (layer groups), and how many blocks each group has.

#include <bifolio/dtype.hpp>
#include <bifolio/kv_layout.hpp>
#include <bifolio/model_cache.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "model_config.hpp"

namespace generate {

/// What the user says of a cache.
struct cache_shape {
  bifolio::layout_kind layout = bifolio::layout_kind::hnd;
  bifolio::kv_code k_code{};
  bifolio::kv_code v_code{};
  std::int32_t block_size = 16;
  /// Of the first group, which has the layers that attend to all tokens, where there are any. The others have what the
  /// same sequences need there.
  std::int64_t num_blocks = 0;
  std::int64_t num_host_blocks = 0;  ///< likewise; 0: nothing is swapped
  std::vector<float> k_scales{};     ///< static ones of all layers, as `bifolio::cache_engine_config` has them
  std::vector<float> v_scales{};
  bool keeps_all = false;  ///< layers with a window keep all tokens too, in one group with the others
};

/// The load that a cache is made for.
struct cache_load {
  std::int32_t max_positions = 0;  ///< of a sequence: tokens that are fed
  std::int32_t step_tokens = 256;
  std::int32_t max_sequences = 64;  ///< open at once
  bool prefix_caching = false;
  bool deterministic = false;  ///< of a GPU's attention
};

/// Layers that keep the same of a sequence are a group: those that attend to all tokens, those of each window, and
/// recurrent ones. A model with one kind of layers has one group. `query_type`: of queries and attention's results.
[[nodiscard]] bifolio::model_cache_config cache_config(const model_config& model, bifolio::dtype query_type,
                                                       const cache_shape& shape, const cache_load& load);

/// One pool of a cache, for people.
struct pool_facts {
  bifolio::group_kind kind = bifolio::group_kind::full;
  std::int32_t block_size = 0;
  std::int32_t window = 0;
  std::int64_t num_blocks = 0;
  std::int64_t block_bytes = 0;  ///< in all layers of the group; of a state
  std::int32_t num_layers = 0;
};
[[nodiscard]] std::vector<pool_facts> pools_of(const bifolio::model_cache_config& cache);

/// Blocks of the first pool that `num_sequences` of the load can need at most, or as many as fit into a budget.
[[nodiscard]] std::int64_t blocks_for_load(const model_config& model, const cache_shape& shape, const cache_load& load,
                                           std::int64_t num_sequences, std::int64_t memory_bytes);

}  // namespace generate
