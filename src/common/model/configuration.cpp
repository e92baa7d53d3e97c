// SPDX-License-Identifier: Apache-2.0
/// A model's configuration: what is derived, and what does not fit together.

#include <algorithm>
#include <atomic>
#include <bifolio/copy_audit.hpp>
#include <bifolio/error.hpp>
#include <bifolio/executor.hpp>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/refuse.hpp"
#include "common/base/require.hpp"
#include "common/base/translate.hpp"
#include "common/model/state.hpp"

namespace bifolio::inline v0_2::detail {
namespace {

kv_layout layout_of(layout_kind kind, const attention_spec& spec) {
  return make_layout(kind, spec.k_code, spec.v_code, spec.num_kv_heads, spec.qk_head_dim, spec.v_head_dim,
                     spec.block_size, spec.v_in_k);
}

/// A state is one row of floats, whatever its caller puts there: blocks of one token, K alone.
kv_layout layout_of_states(std::int64_t state_bytes) {
  const auto num_floats = static_cast<std::int32_t>(state_bytes / static_cast<std::int64_t>(sizeof(float)));
  return make_layout(layout_kind::hnd, kv_code{}, kv_code{}, 1, num_floats, num_floats, 1, true);
}

cache_engine_config storage_of(const model_group& group, std::int64_t num_blocks, bool zero_fill) {
  return {
      .num_layers = static_cast<std::int32_t>(group.layers.size()),
      .num_blocks = num_blocks,
      .layout = group.state_bytes > 0 ? layout_of_states(group.state_bytes) : layout_of(group.layout, group.attention),
      .k_scales = group.k_scales,
      .v_scales = group.v_scales,
      .zero_fill = zero_fill};
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

/// What the manager keeps for layers, and the names of its fields and of theirs: "cache" and "", or "cache.groups[1]"
/// and "groups[1].".
struct kept_tokens {
  std::int32_t block_size;
  std::int32_t window;  // 0: all
  std::string where;
  std::string window_field;
  std::string prefix{};
};

void require_window(std::int32_t window_left, const kept_tokens& kept) {
  // A negative window is the manager's to refuse.
  if (kept.window <= 0 || (window_left >= 0 && window_left < kept.window)) return;
  refuse(errc::invalid_argument, "window_left of a layer is ", window_left, "; the cache keeps ", kept.window,
         " tokens (", kept.where, ".", kept.window_field, "), so it must be between 0 and ", kept.window - 1);
}

void complete_attention(attention_spec& spec, std::span<const std::int32_t> layer_windows, std::size_t num_layers,
                        const kept_tokens& kept) {
  if (spec.v_head_dim == 0) spec.v_head_dim = spec.qk_head_dim;
  if (spec.block_size == 0) spec.block_size = kept.block_size;
  if (spec.block_size != kept.block_size) {
    refuse(errc::invalid_argument, kept.prefix, "attention.block_size is ", spec.block_size, " and ", kept.where,
           ".block_size ", kept.block_size, "; they must be equal");
  }
  if (kept.window > 0 && spec.window_left < 0) spec.window_left = kept.window - 1;
  require_window(spec.window_left, kept);
  if (!layer_windows.empty() && layer_windows.size() != num_layers) {
    refuse(errc::invalid_argument, kept.prefix, "layer_windows has ", layer_windows.size(),
           " entries; it must have one for each of the ", num_layers, " layers, or none");
  }
  for (const std::int32_t each : layer_windows) require_window(each, kept);
}

void complete_group(model_group& group, const group_config& kept, std::size_t index) {
  if (kept.kind == group_kind::state) {
    constexpr std::int64_t most = std::int64_t{INT32_MAX} * 4;
    if (group.state_bytes < 4 || group.state_bytes % 4 != 0 || group.state_bytes > most) {
      refuse(errc::invalid_argument, "groups[", index, "].state_bytes is ", group.state_bytes,
             "; a state of a layer has a multiple of 4 bytes, from 4 to ", most);
    }
    if (group.attention != attention_spec{} || !group.layer_windows.empty() || !group.k_scales.empty() ||
        !group.v_scales.empty()) {
      refuse(errc::invalid_argument, "groups[", index,
             "] is of kind state and is given attention, layer_windows or scales; it has none of them");
    }
    return;
  }
  if (group.state_bytes != 0) {
    refuse(errc::invalid_argument, "groups[", index, "].state_bytes is ", group.state_bytes, "; a group of kind ",
           to_string(kept.kind), " has none");
  }
  if (group.layers.empty() && index == 0) return;  // an index of texts
  const std::string prefix = "groups[" + std::to_string(index) + "]";
  complete_attention(
      group.attention, group.layer_windows, group.layers.size(),
      {kept.block_size, kept.kind == group_kind::window ? kept.window : 0, "cache." + prefix, "window", prefix + "."});
  if (kept.kind == group_kind::cross) group.attention.causal = false;
}

/// Each layer is in one group.
void require_layers(const model_cache_config& config) {
  std::vector<std::size_t> group_of(static_cast<std::size_t>(config.num_layers), SIZE_MAX);
  for (std::size_t g = 0; g < config.groups.size(); ++g) {
    if (config.groups[g].layers.empty() && g > 0) {
      refuse(errc::invalid_argument, "groups[", g, "] has no layers; only the first group may have none");
    }
    for (const std::int32_t layer : config.groups[g].layers) {
      require_between("a layer of a group,", layer, 0, config.num_layers - 1);
      std::size_t& of = group_of[static_cast<std::size_t>(layer)];
      if (of != SIZE_MAX) {
        refuse(errc::invalid_argument, "layer ", layer, " is in groups ", of, " and ", g, "; it must be in one");
      }
      of = g;
    }
  }
  const auto missing = std::find(group_of.begin(), group_of.end(), SIZE_MAX);
  if (missing == group_of.end()) return;
  refuse(errc::invalid_argument, "layer ", missing - group_of.begin(), " of ", config.num_layers, " is in no group");
}

void complete_groups(model_cache_config& config) {
  const std::size_t count = config.cache.groups.size();
  if (config.groups.size() != count) {
    refuse(errc::invalid_argument, "cache.groups has ", count, " layer groups and groups ", config.groups.size(),
           "; there must be one entry for each");
  }
  if (config.attention != attention_spec{} || !config.layer_windows.empty() || !config.k_scales.empty() ||
      !config.v_scales.empty()) {
    refuse(errc::invalid_argument, "attention, layer_windows or scales are given for all layers, and there are ", count,
           " layer groups, each of which has its own; leave them as they are by default");
  }
  if (config.memory_bytes != 0 || config.host_memory_bytes != 0) {
    refuse(errc::invalid_argument, "memory is ", config.memory_bytes, " bytes and ", config.host_memory_bytes,
           " on the host; with groups both must be 0, because plan_group_memory divides a budget among them");
  }
  require_layers(config);
  for (std::size_t g = 0; g < count; ++g) complete_group(config.groups[g], config.cache.groups[g], g);
}

model_cache_config complete(model_cache_config config) {
  require_between("num_layers", config.num_layers, 1, INT32_MAX);
  require_between("max_steps_in_flight", config.max_steps_in_flight, 1, block_pool::max_open_fences);
  if (!config.cache.groups.empty() || !config.groups.empty()) {
    complete_groups(config);
    return config;
  }
  complete_attention(config.attention, config.layer_windows, static_cast<std::size_t>(config.num_layers),
                     {config.cache.block_size, config.cache.sliding_window, "cache", "sliding_window"});
  const kv_layout layout = layout_of(config.layout, config.attention);
  derive_blocks("the cache", config.cache.num_blocks, config.memory_bytes, layout, config.num_layers);
  derive_blocks("the host's cache", config.cache.num_host_blocks, config.host_memory_bytes, layout, config.num_layers);
  return config;
}

/// The groups of a configuration that is complete; without groups all layers are in one.
std::vector<model_group> groups_of(const model_cache_config& config) {
  if (!config.groups.empty()) return config.groups;
  model_group all{.layout = config.layout,
                  .attention = config.attention,
                  .layer_windows = config.layer_windows,
                  .k_scales = config.k_scales,
                  .v_scales = config.v_scales};
  all.layers.resize(static_cast<std::size_t>(config.num_layers));
  std::iota(all.layers.begin(), all.layers.end(), 0);
  return {std::move(all)};
}

/// Of a group of the manager's: as config.cache.groups has it, or of the one that there is.
group_config kept_by(const model_cache_config& config, std::size_t index) {
  if (!config.cache.groups.empty()) return config.cache.groups[index];
  return {.num_blocks = config.cache.num_blocks, .num_host_blocks = config.cache.num_host_blocks};
}

std::uint32_t plan_of(std::vector<layer_plan>& plans, const attention_spec& spec) {
  auto found = std::find_if(plans.begin(), plans.end(), [&](const layer_plan& each) { return each.spec == spec; });
  if (found == plans.end()) found = plans.insert(plans.end(), layer_plan{spec, {}});
  return static_cast<std::uint32_t>(found - plans.begin());
}

std::uint64_t next_number() noexcept {
  static std::atomic<std::uint64_t> last{0};  // caches may be made in several threads
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

model_state::model_state(backend& device, const model_cache_config& given)
    : where(&device), number(next_number()), config(complete(given)), manager(config.cache) {
  places.resize(static_cast<std::size_t>(config.num_layers));
  const std::vector<model_group> described = groups_of(config);
  moves.resize(described.size());
  for (std::size_t g = 0; g < described.size(); ++g) {
    const model_group& group = described[g];
    const group_config kept = kept_by(config, g);
    group_storage& made = groups.emplace_back();
    made.kind = kept.kind;
    made.implementation = group.attention.implementation;
    has_states = has_states || kept.kind == group_kind::state;
    (config.groups.empty() ? config.attention : config.groups[g].attention).implementation = made.implementation;
    if (group.layers.empty()) {
      if (config.cache.audit != nullptr) config.cache.audit->ignore_group(static_cast<std::int32_t>(g));
      continue;
    }
    cache_engine_config storage = storage_of(group, kept.num_blocks, config.zero_fill);
    storage.audit = config.cache.audit;
    storage.audit_group = static_cast<std::int32_t>(g);
    made.engine.emplace(device, std::move(storage));
    if (kept.num_host_blocks > 0) {
      // The host's engine stores alone: the device's backend moves its blocks.
      if (device.where().type != device_type::cpu && !host_backend) {
        host_backend = make_backend({}, {.executor_choice = executor_kind::serial});
      }
      backend& keeper = host_backend ? *host_backend : device;
      made.host.emplace(keeper, storage_of(group, kept.num_host_blocks, config.zero_fill), &device.staging_memory());
    }
    for (std::size_t i = 0; i < group.layers.size(); ++i) {
      const auto layer = static_cast<std::size_t>(group.layers[i]);
      places[layer] = {static_cast<std::uint32_t>(g), static_cast<std::int32_t>(i), 0};
      if (kept.kind == group_kind::state) continue;
      attention_spec spec = group.attention;
      spec.implementation = made.implementation;
      if (!group.layer_windows.empty()) spec.window_left = group.layer_windows[i];
      places[layer].plan = plan_of(made.plans, spec);
    }
  }
  for (std::int32_t i = 0; i < config.max_steps_in_flight; ++i) slots.push_back(std::make_unique<model_step_state>());
  row_marks.resize(static_cast<std::size_t>(config.cache.max_sequences), 0);
}

}  // namespace bifolio::inline v0_2::detail
