// SPDX-License-Identifier: Apache-2.0
#include "scales_file.hpp"

#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "input_error.hpp"
#include "json_settings.hpp"
#include "tools/common/escape.hpp"

namespace generate {
namespace {

using nlohmann::json;

std::size_t scales_per_layer(const bifolio::kv_layout& layout, const bifolio::kv_code& code) {
  return code.granularity == bifolio::scale_granularity::head ? static_cast<std::size_t>(layout.num_kv_heads) : 1;
}

float scale_of(const json_settings& plane, const json& value) {
  if (value.is_number()) {
    const double scale = value.get<double>();
    if (scale >= static_cast<double>(bifolio::least_scale) && scale <= static_cast<double>(bifolio::largest_scale)) {
      return static_cast<float>(scale);
    }
  }
  plane.refuse("scales", "a list for each layer of numbers from 2^-100 to 2^100");
}

std::vector<float> read_plane(const json_settings& file, const char* key, const bifolio::kv_layout& layout,
                              const bifolio::kv_code& code, std::int32_t num_layers) {
  if (!code.has_static_scales()) return {};
  const json_settings plane = file.nested(key);
  const std::string name(short_name(code));
  if (plane.text("code") != name) plane.refuse("code", "'" + name + "', which the cache has");
  const std::size_t each = scales_per_layer(layout, code);
  const json& layers = plane.list("scales");
  std::vector<float> scales;
  for (const json& layer : layers) {
    if (!layer.is_array() || layer.size() != each) break;
    for (const json& value : layer) scales.push_back(scale_of(plane, value));
  }
  if (layers.size() != static_cast<std::size_t>(num_layers) || scales.size() != each * layers.size()) {
    plane.refuse("scales",
                 fmt::format("a list of {} layers of {} {}", num_layers, each, each == 1 ? "scale" : "scales"));
  }
  return scales;
}

json plane_of(const bifolio::kv_layout& layout, const bifolio::kv_code& code, const std::vector<float>& scales) {
  if (!code.has_static_scales()) return nullptr;
  const std::size_t each = scales_per_layer(layout, code);
  json layers = json::array();
  for (std::size_t first = 0; first < scales.size(); first += each) {
    json layer = json::array();
    // A double holds every float, and comes back from its shortest decimal form.
    for (std::size_t i = first; i < first + each; ++i) layer.push_back(static_cast<double>(scales[i]));
    layers.push_back(layer);
  }
  return {{"code", std::string(short_name(code))}, {"scales", layers}};
}

}  // namespace

static_scales read_scales(const std::filesystem::path& path, const bifolio::kv_layout& layout,
                          std::int32_t num_layers) {
  const json_settings file(path);
  return {read_plane(file, "k", layout, layout.k.code, num_layers),
          read_plane(file, "v", layout, layout.v.code, num_layers)};
}

void write_scales(const std::filesystem::path& path, const bifolio::kv_layout& layout, const static_scales& scales) {
  const json object = {{"k", plane_of(layout, layout.k.code, scales.k)},
                       {"v", plane_of(layout, layout.v.code, scales.v)}};
  std::ofstream file(path);
  file << object.dump(1) << '\n';
  file.close();
  if (!file) throw input_error(fmt::format("{}: cannot be written", tools::printable_line(path.string())));
}

}  // namespace generate
