// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A model on its device, and the cache that it is to have, as the options say. What generate and serve do before the
/// first token.

#include <bifolio/executor.hpp>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "cache_shape.hpp"
#include "engine.hpp"
#include "engine_options.hpp"
#include "loaded_model.hpp"
#include "placement.hpp"

namespace generate {

struct model_setup {
  /// Loads and places the model, and says on stderr which it is. Throws `input_error`, `bifolio::error`.
  explicit model_setup(const engine_options& o);
  model_setup(const model_setup&) = delete;
  model_setup& operator=(const model_setup&) = delete;

  [[nodiscard]] const model_config& config() const noexcept { return model.weights.config; }

  std::filesystem::path path;
  loaded_model model;
  std::unique_ptr<bifolio::executor> workers;
  placed_model placed;
  std::int32_t max_positions = 0;  ///< of a sequence
};

/// What the options say of an engine, which is watched when there is a log of its pool.
[[nodiscard]] engine_config engine_config_of(const engine_options& o, std::int32_t max_positions);

/// What they say of a cache, without blocks and scales.
[[nodiscard]] cache_shape shape_of(const engine_options& o, const model_setup& on);

/// Scales for codes that have static ones: those of --scales-file, or from the first tokens of `sample`; 1 without any.
/// Writes them where --save-scales says. Throws `input_error`, `bifolio::error`.
void add_static_scales(cache_shape& shape, const engine_options& o, model_setup& on,
                       std::span<const bifolio::token_id> sample);

struct cache_setup {
  /// A pool of what was asked for, or of what `num_sequences` can need at most, within the budget of memory. Says on
  /// stderr what it is. Static scales are those of `sample` (add_static_scales). Throws `bifolio::error`.
  cache_setup(const engine_options& o, model_setup& on, std::int64_t num_sequences,
              std::span<const bifolio::token_id> sample = {});

  cache_shape shape;
};

}  // namespace generate
