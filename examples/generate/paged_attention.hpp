// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The model's attention on bifolio: per layer one rotate_append and one attention call over the blocks of a
/// `model_cache`, which finds the group that the layer is in. This file and `engine.cpp` are what an inference engine
/// of your own needs to write to use the library.

#include <bifolio/attention.hpp>
#include <bifolio/model_cache.hpp>
#include <string>
#include <vector>

#include "model_runner.hpp"

namespace generate {

class paged_attention final : public attention_layer {
 public:
  /// `cache` is borrowed; it is made for `config` (`cache_config`).
  paged_attention(bifolio::model_cache& cache, const model_config& config) : cache_(&cache), config_(config) {}

  /// The step that the next layers are of. Borrowed; it is not committed before the last layer has run.
  void use(bifolio::model_step& step) { step_ = &step; }

  void run(std::int32_t layer, const layer_rows& rows) override;
  [[nodiscard]] recurrent_states states(std::int32_t layer) override;

  /// The kernels that computed the last layer with attention, a name for each sequence of the step
  /// (`bifolio::backend::describe`).
  [[nodiscard]] std::vector<std::string> kernels() const;

 private:
  bifolio::model_cache* cache_;
  model_config config_;
  bifolio::model_step* step_ = nullptr;
  std::int32_t last_layer_ = 0;
  bifolio::attention_params last_;
};

}  // namespace generate
