// SPDX-License-Identifier: Apache-2.0
#include "model.hpp"

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "input_error.hpp"
#include "tools/common/escape.hpp"
#include "tools/common/json.hpp"

namespace trace_replay {
namespace {

using bifolio::group_config;
using bifolio::group_kind;
using json = nlohmann::json;

constexpr std::array kinds{group_kind::full, group_kind::window, group_kind::state};

group_kind kind_of(const json& value) {
  for (const group_kind kind : kinds) {
    if (value == to_string(kind)) return kind;
  }
  throw input_error(fmt::format("\"kind\" is {}; allowed are full, window and state", tools::json_excerpt(value)));
}

template <class Integer>
Integer integer_of(const std::string& name, const json& value) {
  const std::optional<std::int64_t> number = tools::whole_number(value);
  if (!number || *number < 0 || *number > std::numeric_limits<Integer>::max()) {
    throw input_error(
        fmt::format("\"{}\" is {}, which is no number that a group can have", name, tools::json_excerpt(value)));
  }
  return static_cast<Integer>(*number);
}

group_config group_of(const json& object) {
  group_config group;
  if (!object.is_object() || !object.contains("kind")) throw input_error("it is no object with a \"kind\"");
  group.kind = kind_of(object.at("kind"));
  if (group.kind == group_kind::state) group.block_size = 1;
  for (const auto& [name, value] : object.items()) {
    if (name == "kind") continue;
    if (name == "block_size") {
      group.block_size = integer_of<std::int32_t>(name, value);
    } else if (name == "num_blocks") {
      group.num_blocks = integer_of<std::int64_t>(name, value);
    } else if (name == "num_host_blocks") {
      group.num_host_blocks = integer_of<std::int64_t>(name, value);
    } else if (name == "window") {
      group.window = integer_of<std::int32_t>(name, value);
    } else if (name == "snapshot_interval") {
      group.snapshot_interval = integer_of<std::int32_t>(name, value);
    } else {
      throw input_error(fmt::format("\"{}\" is no field of a group", tools::excerpt(name)));
    }
  }
  return group;
}

}  // namespace

std::vector<group_config> read_model_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw input_error(fmt::format("{}: the file cannot be read", path));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  json whole;
  try {
    whole = tools::parse_json(text);
  } catch (const tools::json_error& problem) {
    throw input_error(fmt::format("{}: it is {}", path, problem.what()));
  }
  if (!whole.is_object() || !whole.contains("groups") || !whole.at("groups").is_array() || whole.at("groups").empty() ||
      whole.size() != 1) {
    throw input_error(fmt::format("{}: a model is an object with a list of \"groups\" and nothing else", path));
  }
  std::vector<group_config> groups;
  for (const json& object : whole.at("groups")) {
    try {
      groups.push_back(group_of(object));
    } catch (const input_error& problem) {
      throw input_error(fmt::format("{}: group {}: {}", path, groups.size(), problem.what()));
    }
  }
  return groups;
}

}  // namespace trace_replay
