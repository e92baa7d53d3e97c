// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The model's attention on bifolio: per layer one rotate_append and one attention call over the blocks of a
/// `cache_engine`. This file and `engine.cpp` are what an inference engine of your own needs to write to use the
/// library.

#include <bifolio/attention.hpp>
#include <bifolio/cache_engine.hpp>
#include <bifolio/step.hpp>
#include <memory>
#include <string>
#include <vector>

#include "model_runner.hpp"

namespace generate {

class paged_attention final : public attention_layer {
 public:
  /// `engine` is borrowed; its layout has the model's numbers of layers, heads and head dimension. Everything of a step
  /// is ordered on the runner's stream. `deterministic`: what a sequence says must not depend on who else is in the
  /// batch (`attention_spec`); on the CPU it never does.
  paged_attention(bifolio::cache_engine& engine, const model_runner& model, bool deterministic);

  /// Carries out what the cache logic decided about blocks: swaps out to `host`, copies, swaps in, in this order.
  /// `host` may be null for plans without swaps. Throws `bifolio::error`.
  void move_blocks(const bifolio::step_plan& plan, bifolio::cache_engine* host);
  /// What is done once a step, before the first layer: the upload of the step's arrays, an attention plan for each kind
  /// of layers (windows differ). `batch`
  /// must live until the last layer has run. Throws `bifolio::error`.
  void begin_step(const bifolio::step_batch& batch);

  void run(std::int32_t layer, const layer_rows& rows) override;

  /// The kernels that computed the last layer, a name for each sequence of the step (`bifolio::backend::describe`).
  [[nodiscard]] std::vector<std::string> kernels() const {
    return engine_->where().describe(plans_[last_plan_], last_);
  }

 private:
  bifolio::cache_engine* engine_;
  bifolio::stream_ref stream_;
  model_config config_;
  bifolio::attention_spec spec_;
  std::vector<bifolio::attention_plan> plans_;  // per kind of layers; kept from step to step, so that their memory is
  std::size_t last_plan_ = 0;
  bifolio::device_step_view batch_;
  bifolio::attention_params last_;
};

/// A cache for `config`: the layout and how many layers. Static scales are left to the caller. Throws `bifolio::error`.
[[nodiscard]] bifolio::cache_engine_config cache_config(const model_config& config, bifolio::layout_kind kind,
                                                        const bifolio::kv_code& k, const bifolio::kv_code& v,
                                                        std::int32_t block_size, std::int64_t num_blocks);
/// The same for keys and values of one unscaled type.
[[nodiscard]] bifolio::cache_engine_config cache_config(const model_config& config, bifolio::layout_kind kind,
                                                        bifolio::dtype kv_type, std::int32_t block_size,
                                                        std::int64_t num_blocks);

/// Room for swapped sequences next to an engine of `where`: the same layout in host memory that `where` moves fast.
struct host_cache {
  host_cache(bifolio::backend& where, const bifolio::cache_engine_config& device, std::int64_t num_blocks);
  std::unique_ptr<bifolio::backend> cpu;
  bifolio::cache_engine engine;
};

}  // namespace generate
