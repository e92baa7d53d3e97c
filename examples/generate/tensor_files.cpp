// SPDX-License-Identifier: Apache-2.0
#include "tensor_files.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint.hpp"
#include "input_error.hpp"
#include "json_settings.hpp"
#include "tools/common/json.hpp"

namespace generate {
namespace {

using nlohmann::json;

constexpr std::size_t max_name_bytes = 255;

bool is_file_name(const json& value) {
  if (!value.is_string()) return false;
  const auto& name = value.get_ref<const std::string&>();
  return name.size() <= max_name_bytes && !std::filesystem::path(name).has_parent_path();
}

}  // namespace

tensor_files::tensor_files(const std::filesystem::path& path) {
  const std::filesystem::path directory = std::filesystem::is_directory(path) ? path : path.parent_path();
  const std::filesystem::path index = directory / "model.safetensors.index.json";
  if (!std::filesystem::is_directory(path)) {
    open(path);
  } else if (std::filesystem::exists(directory / "model.safetensors") || !std::filesystem::exists(index)) {
    open(directory / "model.safetensors");
  } else {
    open_shards(directory, index);
  }
}

std::vector<float> tensor_files::vector(std::initializer_list<part> parts) {
  std::vector<float> values;
  for (const auto& [name, count] : parts) {
    safetensors& file = file_of(name);
    const auto& tensor = file.find(name, {count});
    const std::size_t before = values.size();
    values.resize(before + static_cast<std::size_t>(count));
    file.read(tensor, 0, count, values.data() + before);
  }
  return values;
}

linear tensor_files::matrix(std::initializer_list<part> parts, std::int32_t num_inputs) {
  std::int32_t num_outputs = 0;
  bool all_bf16 = true;
  for (const auto& [name, num_rows] : parts) {
    num_outputs += num_rows;
    all_bf16 = all_bf16 && file_of(name).find(name, {num_rows, num_inputs}).type == bifolio::dtype::bf16;
  }
  linear result(num_outputs, num_inputs, all_bf16 ? bifolio::dtype::bf16 : bifolio::dtype::f32);
  std::int32_t first_output = 0;
  for (const part& rows : parts) {
    read_rows(result, first_output, rows);
    first_output += rows.second;
  }
  return result;
}

std::vector<float> tensor_files::tensor(const std::string& name, std::initializer_list<std::int64_t> shape) {
  safetensors& file = file_of(name);
  const auto& found = file.find(name, shape);
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  std::vector<float> values(static_cast<std::size_t>(count));
  file.read(found, 0, count, values.data());
  return values;
}

linear tensor_files::transposed(const std::string& name, std::int64_t index, std::int64_t count,
                                std::int32_t num_outputs, std::int32_t num_inputs) {
  safetensors& file = file_of(name);
  const auto& found = file.find(name, {count, num_inputs, num_outputs});
  const std::int64_t size = std::int64_t{num_inputs} * num_outputs;
  std::vector<float> values(static_cast<std::size_t>(size)), row(static_cast<std::size_t>(num_inputs));
  file.read(found, index * size, size, values.data());
  linear result(num_outputs, num_inputs,
                found.type == bifolio::dtype::bf16 ? bifolio::dtype::bf16 : bifolio::dtype::f32);
  for (std::int32_t o = 0; o < num_outputs; ++o) {
    for (std::int32_t i = 0; i < num_inputs; ++i) {
      row[static_cast<std::size_t>(i)] = values[static_cast<std::size_t>(std::int64_t{i} * num_outputs + o)];
    }
    result.set_rows(o, row.data(), 1);
  }
  return result;
}

void tensor_files::read_rows(linear& matrix, std::int32_t first_output, const part& rows) {
  const auto& [name, num_rows] = rows;
  safetensors& file = file_of(name);
  const std::int64_t num_inputs = matrix.num_inputs();
  const auto& tensor = file.find(name, {num_rows, num_inputs});
  load_rows(matrix, first_output, num_rows, [&](std::int32_t row, std::int32_t count, float* values) {
    file.read(tensor, row * num_inputs, count * num_inputs, values);
  });
}

void tensor_files::open_shards(const std::filesystem::path& directory, const std::filesystem::path& index) {
  const json object = read_json_object(index);
  const auto map = object.find("weight_map");
  if (map == object.end() || !map->is_object()) {
    throw input_error(fmt::format("{}: \"weight_map\" is missing", index.string()));
  }
  std::set<std::string> names;
  for (const auto& [tensor, file] : map->items()) {
    if (!is_file_name(file)) {
      throw input_error(fmt::format("{}: a shard is named by {}, allowed are plain file names of at most {} bytes",
                                    index.string(), tools::json_excerpt(file), max_name_bytes));
    }
    names.insert(file.get<std::string>());
  }
  for (const std::string& name : names) open(directory / name);
  if (files_.empty()) throw input_error(fmt::format("{}: no shard is named", index.string()));
}

safetensors& tensor_files::file_of(const std::string& tensor) {
  for (const auto& file : files_) {
    if (file->contains(tensor)) return *file;
  }
  return *files_.front();  // whose `find` says what is wrong
}

}  // namespace generate
