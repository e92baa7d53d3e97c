// SPDX-License-Identifier: Apache-2.0
#include "common/cache/group_config.hpp"

#include <algorithm>
#include <bifolio/kv_layout.hpp>
#include <cmath>
#include <string>

#include "common/base/refuse.hpp"
#include "common/base/require.hpp"
#include "common/base/translate.hpp"

namespace bifolio::inline v0_2 {

std::string_view to_string(group_kind kind) noexcept {
  switch (kind) {
    case group_kind::full:
      return "full";
    case group_kind::window:
      return "window";
    case group_kind::state:
      return "state";
    case group_kind::cross:
      return "cross";
  }
  return "unknown";
}

namespace detail {
namespace {

constexpr std::int64_t most_tokens = std::int64_t{1} << 30;

void require_of_group(std::size_t group, const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  require_between(("group " + std::to_string(group) + ": " + name).c_str(), value, low, high);
}

void require_kind(std::size_t group, group_kind kind) {
  if (kind <= group_kind::cross) return;
  refuse(errc::invalid_argument, "group ", group, ": kind ", static_cast<int>(kind),
         " is none of full, window, state and cross");
}

void require_group(std::size_t i, const group_config& group) {
  const bool is_state = group.kind == group_kind::state;
  require_kind(i, group.kind);
  require_of_group(i, "block_size", group.block_size, 1, is_state ? 1 : most_tokens);
  require_of_group(i, "num_blocks", group.num_blocks, 1, max_num_blocks);
  require_of_group(i, "num_host_blocks", group.num_host_blocks, 0, max_num_blocks);
  const bool slides = group.kind == group_kind::window;
  require_of_group(i, slides ? "window" : "window of a group that is no window group", group.window, slides ? 1 : 0,
                   slides ? most_tokens : 0);
  const bool is_spaced = i > 0 && (is_state || slides);
  require_of_group(i,
                   is_spaced ? "snapshot_interval"
                             : "snapshot_interval of a group that has no states and no window, or is the first",
                   group.snapshot_interval, 0, is_spaced ? most_tokens : 0);
  require_of_group(i, is_state ? "num_draft_slots" : "num_draft_slots of a group without states", group.num_draft_slots,
                   0, is_state ? 64 : 0);
  const bool is_cross = group.kind == group_kind::cross;
  require_of_group(i, is_cross ? "max_tokens" : "max_tokens of a group that is no cross group", group.max_tokens,
                   is_cross ? 1 : 0, is_cross ? most_tokens : 0);
}

}  // namespace

void require_groups(const kv_cache_config& config) {
  const std::vector<group_config>& groups = config.groups;
  require_between("number of groups", static_cast<std::int64_t>(groups.size()), 1, max_layer_groups);
  for (std::size_t i = 0; i < groups.size(); ++i) require_group(i, groups[i]);
  const group_config& first = groups.front();
  if (first.kind != group_kind::full && first.kind != group_kind::window) {
    refuse(errc::invalid_argument, "group 0: kind ", to_string(first.kind),
           " cannot be the first; full and window can");
  }
  if (groups.size() == 1) return;
  for (std::size_t i = 1; i < groups.size(); ++i) {
    if ((groups[i].num_host_blocks > 0) != (first.num_host_blocks > 0)) {
      refuse(errc::invalid_argument, "group ", i, ": num_host_blocks ", groups[i].num_host_blocks,
             " does not go with the first group's ", first.num_host_blocks,
             "; all groups have host blocks or none has");
    }
  }
  const group_config* spaced = nullptr;
  const group_config* states = nullptr;
  const group_config* cross = nullptr;
  for (std::size_t i = 1; i < groups.size(); ++i) {
    const group_config& group = groups[i];
    if (group.kind == group_kind::cross) {
      if (cross != nullptr) {
        refuse(errc::invalid_argument, "group ", i,
               ": a second group of kind cross; a sequence has one encoder's output");
      }
      cross = &group;
    }
    if (group.snapshot_interval > 0) {
      if (spaced != nullptr && spaced->snapshot_interval != group.snapshot_interval) {
        refuse(errc::invalid_argument, "group ", i, ": snapshot_interval ", group.snapshot_interval,
               " differs from the ", spaced->snapshot_interval, " of an earlier group");
      }
      spaced = &group;
    }
    if (group.kind != group_kind::state) continue;
    if (states != nullptr && states->num_draft_slots != group.num_draft_slots) {
      refuse(errc::invalid_argument, "group ", i, ": num_draft_slots ", group.num_draft_slots, " differ from the ",
             states->num_draft_slots, " of an earlier group with states");
    }
    states = &group;
  }
  if (!config.prefix.enabled) return;
  if (first.kind != group_kind::full) {
    refuse(errc::invalid_argument, "group 0: kind ", to_string(first.kind),
           " cannot be the first of several with prefix caching; full can, whose blocks may have 0 bytes");
  }
  for (std::size_t i = 1; i < groups.size(); ++i) {
    if (groups[i].snapshot_interval % first.block_size != 0) {
      refuse(errc::invalid_argument, "group ", i, ": snapshot_interval ", groups[i].snapshot_interval,
             " is no multiple of the first group's block_size ", first.block_size);
    }
    if (groups[i].kind == group_kind::state || groups[i].kind == group_kind::cross) continue;
    if (groups[i].block_size % first.block_size == 0 || first.block_size % groups[i].block_size == 0) continue;
    refuse(errc::invalid_argument, "group ", i, ": block_size ", groups[i].block_size,
           " is neither a multiple nor a divisor of the first group's ", first.block_size);
  }
}

}  // namespace detail

namespace {

using detail::refuse;
using detail::require_between;

/// Blocks of a group that one sequence of the load needs, at its longest.
std::int64_t blocks_each(const group_shape& group, const group_load& load) {
  switch (group.kind) {
    case group_kind::full:
      return blocks_for(load.tokens_each, group.block_size);
    case group_kind::window: {
      const std::int64_t in_flight = std::min(load.tokens_each, load.step_tokens * load.steps_in_flight);
      return std::min(blocks_for(load.tokens_each, group.block_size),
                      blocks_for(group.window - 1 + in_flight - 1, group.block_size) + 1);
    }
    case group_kind::state:
      return 1 + group.num_draft_slots + load.steps_in_flight + load.snapshots_each;
    case group_kind::cross:
      return blocks_for(load.cross_tokens_each, group.block_size);
  }
  return 0;
}

void require_shape(std::size_t i, const group_shape& group) {
  const auto require = [&](const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    require_between(("group " + std::to_string(i) + ": " + name).c_str(), value, low, high);
  };
  detail::require_kind(i, group.kind);
  require("block_size", group.block_size, 1, detail::most_tokens);
  require("window", group.window, group.kind == group_kind::window ? 1 : 0, detail::most_tokens);
  require("num_draft_slots", group.num_draft_slots, 0, 64);
  require("block_bytes", group.block_bytes, i == 0 ? 0 : 1, std::int64_t{1} << 50);
}

}  // namespace

group_memory_plan plan_group_memory(std::int64_t memory_bytes, std::span<const group_shape> groups,
                                    const group_load& load) {
  require_between("memory_bytes", memory_bytes, 1, std::int64_t{1} << 62);
  require_between("number of groups", static_cast<std::int64_t>(groups.size()), 1, max_layer_groups);
  require_between("num_sequences", load.num_sequences, 1, std::int64_t{1} << 24);
  require_between("tokens_each", load.tokens_each, 1, detail::most_tokens);
  require_between("step_tokens", load.step_tokens, 1, detail::most_tokens);
  require_between("steps_in_flight", load.steps_in_flight, 1, block_pool::max_open_fences);
  require_between("cross_tokens_each", load.cross_tokens_each, 0, detail::most_tokens);
  require_between("snapshots_each", load.snapshots_each, 0, std::int64_t{1} << 20);
  if (!(load.watermark >= 0 && load.watermark < 1)) {
    refuse(errc::invalid_argument, "watermark ", load.watermark, " is not a fraction of at least 0 and below 1");
  }
  return detail::translate_bad_alloc("plan_group_memory", [&] {
    for (std::size_t i = 0; i < groups.size(); ++i) require_shape(i, groups[i]);
    std::vector<double> needed;  // blocks for one sequence, the watermark's share included
    double bytes_each = 0;
    for (const group_shape& group : groups) {
      needed.push_back(static_cast<double>(std::max<std::int64_t>(1, blocks_each(group, load))) / (1 - load.watermark));
      bytes_each += std::ceil(needed.back()) * static_cast<double>(group.block_bytes);
    }
    if (bytes_each > static_cast<double>(memory_bytes)) {
      refuse(errc::invalid_argument, "memory_bytes ", memory_bytes, " is less than the ",
             static_cast<std::int64_t>(bytes_each), " that one sequence of ", load.tokens_each, " tokens needs");
    }
    // The exact proportion first; whole blocks never take more than it allows, as they are rounded down.
    double exact = 0;
    for (std::size_t i = 0; i < groups.size(); ++i) exact += needed[i] * static_cast<double>(groups[i].block_bytes);
    const double scale =
        exact > 0 ? static_cast<double>(memory_bytes) / exact : static_cast<double>(load.num_sequences);
    bool fits = true;
    for (const double blocks : needed) fits = fits && std::floor(blocks * scale) >= blocks;
    group_memory_plan plan;
    plan.num_sequences = load.num_sequences;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const double share = fits ? std::floor(needed[i] * scale) : std::ceil(needed[i]);
      const auto count = static_cast<std::int64_t>(std::min(share, static_cast<double>(max_num_blocks)));
      plan.num_blocks.push_back(std::max<std::int64_t>(1, count));
      plan.num_bytes += plan.num_blocks.back() * groups[i].block_bytes;
      plan.num_sequences = std::min(plan.num_sequences,
                                    static_cast<std::int64_t>(static_cast<double>(plan.num_blocks.back()) / needed[i]));
    }
    std::string& text = plan.assumptions;
    text = "Per sequence: " + std::to_string(load.tokens_each) + " tokens, computed at most " +
           std::to_string(load.step_tokens) + " at a time, " + std::to_string(load.steps_in_flight) +
           " steps in flight, nothing shared.";
    for (std::size_t i = 0; i < groups.size(); ++i) {
      text += " Group " + std::to_string(i) + " (" + std::string(to_string(groups[i].kind)) +
              "): " + std::to_string(blocks_each(groups[i], load)) + " blocks of " +
              std::to_string(groups[i].block_bytes) + " bytes.";
    }
    text += " A watermark of " + std::to_string(load.watermark) + " of each pool stays free.";
    return plan;
  });
}

}  // namespace bifolio::inline v0_2
