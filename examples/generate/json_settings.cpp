// SPDX-License-Identifier: Apache-2.0
#include "json_settings.hpp"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "binary_file.hpp"
#include "input_error.hpp"
#include "tools/common/json.hpp"

namespace generate {
namespace {

using nlohmann::json;

bool is_int32(const json& value) {
  const std::optional<std::int64_t> number = tools::whole_number(value);
  return number && *number >= INT32_MIN && *number <= INT32_MAX;
}

}  // namespace

json read_json_object(const std::filesystem::path& path) {
  binary_file file(path);
  const std::string text = file.read_text(64 << 20);
  json object;
  try {
    object = tools::parse_json(text);
  } catch (const tools::json_error& problem) {
    throw input_error(fmt::format("{}: {}", file.name(), problem.what()));
  }
  if (!object.is_object()) throw input_error(fmt::format("{}: not a JSON object", file.name()));
  return object;
}

json_settings::json_settings(std::string file, std::string where, json object)
    : file_(std::move(file)), where_(std::move(where)), object_(std::move(object)) {
  if (!object_.is_object()) {
    throw input_error(fmt::format("{}: {}is {}, allowed is an object", file_, where_.empty() ? "it " : where_ + " ",
                                  tools::json_excerpt(object_)));
  }
}

std::int32_t json_settings::integer(const char* key, std::optional<std::int32_t> otherwise) const {
  if (!has(key) && otherwise) return *otherwise;
  require(key);
  if (!is_int32(object_[key])) refuse(key, "a whole number of 32 bits");
  return object_[key].get<std::int32_t>();
}

float json_settings::number(const char* key, std::optional<float> otherwise) const {
  if (!has(key) && otherwise) return *otherwise;
  require(key);
  if (!object_[key].is_number()) refuse(key, "a number");
  const double value = object_[key].get<double>();
  if (std::abs(value) > std::numeric_limits<float>::max()) refuse(key, "a number that a float can hold");
  return static_cast<float>(value);
}

std::int64_t json_settings::integer(const char* key, std::int64_t least, std::int64_t most,
                                    std::int64_t otherwise) const {
  if (!has(key)) return otherwise;
  const std::optional<std::int64_t> number = tools::whole_number(object_[key]);
  if (!number || *number < least || *number > most) {
    refuse(key, fmt::format("a whole number from {} to {}", least, most));
  }
  return *number;
}

float json_settings::number(const char* key, float least, float most, float otherwise) const {
  const float value = number(key, otherwise);
  if (!(value >= least && value <= most)) refuse(key, fmt::format("a number from {} to {}", least, most));
  return value;
}

bool json_settings::flag(const char* key, bool otherwise) const {
  if (!has(key)) return otherwise;
  if (!object_[key].is_boolean()) refuse(key, "true or false");
  return object_[key].get<bool>();
}

std::string json_settings::text(const char* key, std::optional<std::string> otherwise) const {
  if (!has(key) && otherwise) return *otherwise;
  require(key);
  if (!object_[key].is_string()) refuse(key, "a string");
  return object_[key].get<std::string>();
}

std::vector<std::int32_t> json_settings::tokens(const char* key, const std::vector<std::int32_t>& otherwise) const {
  if (!object_.contains(key)) return otherwise;
  std::vector<std::int32_t> ids;
  const auto add = [&](const json& value) {
    if (value.is_null()) return;
    if (!is_int32(value)) refuse(key, "a whole number of 32 bits or a list of them");
    ids.push_back(value.get<std::int32_t>());
  };
  if (!object_[key].is_array()) {
    add(object_[key]);
  } else {
    for (const json& value : object_[key]) add(value);
  }
  return ids;
}

const json& json_settings::list(const char* key) const {
  static const json none = json::array();
  if (!has(key)) return none;
  if (!object_[key].is_array()) refuse(key, "a list");
  return object_[key];
}

json_settings json_settings::nested(const char* key) const {
  require(key);
  if (!object_[key].is_object()) refuse(key, "an object");
  return {file_, where_ + key + ".", object_[key]};
}

void json_settings::require_plain(const char* key, const json& plain) const {
  if (has(key) && object_[key] != plain) refuse(key, plain.dump() + " (others are not supported)");
}

void json_settings::refuse(const char* key, const std::string& allowed) const {
  // What is missing may be refused for its default, or for what another setting makes of it.
  const auto found = object_.find(key);
  const std::string value = found == object_.end() ? "missing" : tools::json_excerpt(*found);
  throw input_error(fmt::format("{}: \"{}{}\" is {}, allowed is {}", file_, where_, key, value, allowed));
}

void json_settings::require(const char* key) const {
  if (!has(key)) throw input_error(fmt::format("{}: \"{}{}\" is missing", file_, where_, key));
}

}  // namespace generate
