// SPDX-License-Identifier: Apache-2.0
#include "conformance/onnx/fixture.hpp"

#include <bifolio/dtype.hpp>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>

namespace bifolio::test::onnx {
namespace {

template <class T>
T load(const char* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

struct element_type {
  const char* name;
  std::size_t size;
  double (*value)(const char*);
};
constexpr element_type element_types[] = {
    {"f32", 4, [](const char* at) { return static_cast<double>(load<float>(at)); }},
    {"f16", 2, [](const char* at) { return static_cast<double>(to_float(float16{load<std::uint16_t>(at)})); }},
    {"bf16", 2, [](const char* at) { return static_cast<double>(to_float(bfloat16{load<std::uint16_t>(at)})); }},
    {"f64", 8, [](const char* at) { return load<double>(at); }},
    {"bool", 1, [](const char* at) { return *at != 0 ? 1.0 : 0.0; }},
    {"i64", 8, [](const char* at) { return static_cast<double>(load<std::int64_t>(at)); }},
};

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error("the ONNX fixture: " + what); }

template <class T>
T word(std::istream& line, const char* what) {
  T value;
  if (!(line >> value)) refuse(std::string("a line lacks its ") + what);
  return value;
}

tensor read_tensor(std::istream& line, const std::string& data) {
  tensor result;
  result.type = word<std::string>(line, "type");
  const auto offset = word<std::size_t>(line, "offset");
  std::size_t count = 1;
  for (std::int64_t dim = 0; line >> dim;) {
    result.shape.push_back(dim);
    count *= static_cast<std::size_t>(dim);
  }
  for (const element_type& type : element_types) {
    if (result.type != type.name) continue;
    if (offset + count * type.size > data.size()) refuse("a tensor ends past tensors.bin");
    result.values.reserve(count);
    for (std::size_t i = 0; i < count; ++i) result.values.push_back(type.value(data.data() + offset + i * type.size));
    return result;
  }
  refuse("element type '" + result.type + "' is unknown");
}

}  // namespace

double node_case::number(const std::string& attribute, double otherwise) const {
  const auto found = attributes.find(attribute);
  return found == attributes.end() ? otherwise : std::stod(found->second.at(0));
}

const tensor* node_case::input(const std::string& which) const {
  const auto found = inputs.find(which);
  return found == inputs.end() ? nullptr : &found->second;
}

const tensor* node_case::output(const std::string& which) const {
  const auto found = outputs.find(which);
  return found == outputs.end() ? nullptr : &found->second;
}

std::string read_bytes(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw std::runtime_error(file.string() + " cannot be read");
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::string fnv1a(std::string_view bytes) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  std::string text(16, '0');
  for (std::size_t digit = text.size(); digit-- > 0; hash >>= 4) text[digit] = "0123456789abcdef"[hash & 15u];
  return text;
}

fixture read_fixture(const std::filesystem::path& folder) {
  const std::string data = read_bytes(folder / "tensors.bin");
  std::istringstream text(read_bytes(folder / "cases.txt"));
  fixture result;
  std::size_t num_cases = 0;
  bool data_is_right = false;
  for (std::string written; std::getline(text, written);) {
    std::istringstream line(written);
    const auto kind = word<std::string>(line, "first word");
    if (kind == "source") {
      std::getline(line >> std::ws, result.source);
    } else if (kind == "numpy") {
      continue;
    } else if (kind == "script") {
      result.script_hash = word<std::string>(line, "hash");
    } else if (kind == "tensors") {
      const auto size = word<std::size_t>(line, "size");
      data_is_right = size == data.size() && word<std::string>(line, "hash") == fnv1a(data);
    } else if (kind == "cases") {
      num_cases = word<std::size_t>(line, "number");
    } else if (kind == "case") {
      node_case& added = result.cases.emplace_back();
      added.name = word<std::string>(line, "name");
      added.op = word<std::string>(line, "operator");
      added.opset = word<std::int32_t>(line, "opset");
    } else if (result.cases.empty()) {
      refuse("'" + kind + "' comes before the first case");
    } else if (kind == "attribute") {
      std::vector<std::string>& words = result.cases.back().attributes[word<std::string>(line, "name")];
      words.assign(std::istream_iterator<std::string>(line), {});
      if (words.empty()) refuse("an attribute has no value");
    } else if (kind == "input" || kind == "output") {
      node_case& owner = result.cases.back();
      auto& tensors = kind == "input" ? owner.inputs : owner.outputs;
      const auto name = word<std::string>(line, "name");
      tensors[name] = read_tensor(line, data);
    } else {
      refuse("'" + kind + "' is unknown");
    }
  }
  if (!data_is_right) refuse("tensors.bin is not the file that cases.txt was written with");
  if (result.cases.empty() || result.cases.size() != num_cases) {
    refuse(std::to_string(num_cases) + " cases are announced, " + std::to_string(result.cases.size()) + " found");
  }
  return result;
}

std::filesystem::path in_tree(const char* path) {
  const std::filesystem::path built_from = std::filesystem::path(BIFOLIO_SOURCE_DIR) / path;
  return std::filesystem::exists(built_from) ? built_from : std::filesystem::path(path);
}

}  // namespace bifolio::test::onnx
