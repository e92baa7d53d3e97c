// SPDX-License-Identifier: Apache-2.0
/// A model's configuration: what is derived, and what does not fit together.

#include <algorithm>
#include <bifolio/error.hpp>
#include <bifolio/executor.hpp>

#include "common/base/refuse.hpp"
#include "common/base/require.hpp"
#include "common/base/translate.hpp"
#include "common/model/state.hpp"

namespace bifolio::inline v0_2::detail {
namespace {

kv_layout layout_of(const model_cache_config& config) {
  const attention_spec& spec = config.attention;
  return make_layout(config.layout, spec.k_code, spec.v_code, spec.num_kv_heads, spec.qk_head_dim, spec.v_head_dim,
                     spec.block_size, spec.v_in_k);
}

cache_engine_config storage_of(const model_cache_config& config, std::int64_t num_blocks, copy_audit* audit = nullptr) {
  return {.num_layers = config.num_layers,
          .num_blocks = num_blocks,
          .layout = layout_of(config),
          .k_scales = config.k_scales,
          .v_scales = config.v_scales,
          .audit = audit,
          .zero_fill = config.zero_fill};
}

/// Sets a number of blocks from bytes.
void derive_blocks(const char* what, std::int64_t& num_blocks, std::int64_t memory_bytes, const kv_layout& layout,
                   std::int32_t num_layers) {
  if (memory_bytes == 0) return;
  if (num_blocks != 0) {
    refuse(errc::invalid_argument, what, " is given twice: ", num_blocks, " blocks and ", memory_bytes,
           " bytes; one of the two must be 0");
  }
  num_blocks = num_blocks_for_memory(memory_bytes, layout, num_layers);
  if (num_blocks == 0) {
    refuse(errc::invalid_argument, what, " of ", memory_bytes, " bytes is less than one block over all layers, ",
           layout.block_bytes() * num_layers, " bytes");
  }
}

void require_window(std::int32_t window_left, std::int32_t sliding_window) {
  if (sliding_window == 0 || (window_left >= 0 && window_left < sliding_window)) return;
  refuse(errc::invalid_argument, "window_left of a layer is ", window_left, "; the cache keeps ", sliding_window,
         " tokens (sliding_window), so it must be between 0 and ", sliding_window - 1);
}

model_cache_config complete(model_cache_config config) {
  if (!config.cache.groups.empty()) {
    refuse(errc::unsupported, "the cache of a model has one layer group, not ", config.cache.groups.size(),
           "; use kv_cache_manager and a cache_engine for each group");
  }
  attention_spec& spec = config.attention;
  if (!config.cache.groups.empty()) {
    refuse(errc::invalid_argument, "cache.groups has ", config.cache.groups.size(),
           " layer groups; a model_cache has one cache engine, so it takes none: use a kv_cache_manager and an engine "
           "per group");
  }
  if (spec.v_head_dim == 0) spec.v_head_dim = spec.qk_head_dim;
  if (spec.block_size == 0) spec.block_size = config.cache.block_size;
  if (spec.block_size != config.cache.block_size) {
    refuse(errc::invalid_argument, "attention.block_size is ", spec.block_size, " and cache.block_size ",
           config.cache.block_size, "; they must be equal");
  }
  const std::int32_t sliding_window = config.cache.sliding_window;
  if (sliding_window > 0 && spec.window_left < 0) spec.window_left = sliding_window - 1;
  require_window(spec.window_left, sliding_window);
  if (!config.layer_windows.empty() && config.layer_windows.size() != static_cast<std::size_t>(config.num_layers)) {
    refuse(errc::invalid_argument, "layer_windows has ", config.layer_windows.size(),
           " entries; it must have one for each of the ", config.num_layers, " layers, or none");
  }
  for (const std::int32_t window : config.layer_windows) require_window(window, sliding_window);
  require_between("num_layers", config.num_layers, 1, INT32_MAX);
  require_between("max_steps_in_flight", config.max_steps_in_flight, 1, block_pool::max_open_fences);
  const kv_layout layout = layout_of(config);
  derive_blocks("the cache", config.cache.num_blocks, config.memory_bytes, layout, config.num_layers);
  derive_blocks("the host's cache", config.cache.num_host_blocks, config.host_memory_bytes, layout, config.num_layers);
  return config;
}

}  // namespace

model_state::model_state(backend& device, const model_cache_config& given)
    : where(&device),
      config(complete(given)),
      implementation(given.attention.implementation),
      manager(config.cache),
      engine(device, storage_of(config, config.cache.num_blocks, config.cache.audit)) {
  config.attention.implementation = implementation;
  if (config.cache.num_host_blocks > 0) {
    // The host's engine stores alone: the device's backend moves its blocks.
    if (device.where().type != device_type::cpu) {
      host_backend = make_backend({}, {.executor_choice = executor_kind::serial});
    }
    backend& keeper = host_backend ? *host_backend : device;
    host.emplace(keeper, storage_of(config, config.cache.num_host_blocks), &device.staging_memory());
  }
  for (std::int32_t layer = 0; layer < config.num_layers; ++layer) {
    attention_spec spec = config.attention;
    if (!config.layer_windows.empty()) spec.window_left = config.layer_windows[static_cast<std::size_t>(layer)];
    auto found = std::find_if(plans.begin(), plans.end(), [&](const layer_plan& each) { return each.spec == spec; });
    if (found == plans.end()) found = plans.insert(plans.end(), layer_plan{spec, {}});
    plan_of_layer.push_back(static_cast<std::size_t>(found - plans.begin()));
  }
  for (std::int32_t i = 0; i < config.max_steps_in_flight; ++i) slots.push_back(std::make_unique<model_step_state>());
  row_marks.resize(static_cast<std::size_t>(config.cache.max_sequences), 0);
}

}  // namespace bifolio::inline v0_2::detail
