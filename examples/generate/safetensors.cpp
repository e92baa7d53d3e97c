// SPDX-License-Identifier: Apache-2.0
#include "safetensors.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>

#include "input_error.hpp"
#include "tools/common/escape.hpp"
#include "tools/common/json.hpp"

namespace generate {
namespace {

using nlohmann::json;

constexpr std::uint64_t max_header_bytes = 100'000'000;  // the format's own limit

json read_header(binary_file& file, std::uint64_t& data_start) {
  std::uint64_t header_bytes = 0;
  if (file.size() < sizeof(header_bytes)) {
    throw input_error(
        fmt::format("{}: {} bytes are too few for a safetensors file, whose first {} hold the length of "
                    "its header",
                    file.name(), file.size(), sizeof(header_bytes)));
  }
  file.read(0, &header_bytes, sizeof(header_bytes));
  if (header_bytes > max_header_bytes || header_bytes > file.size() - sizeof(header_bytes)) {
    throw input_error(
        fmt::format("{}: not a safetensors file: a header of {} bytes is announced in a file of {} (at "
                    "most {} are allowed)",
                    file.name(), header_bytes, file.size(), max_header_bytes));
  }
  std::string text(header_bytes, '\0');
  file.read(sizeof(header_bytes), text.data(), header_bytes);
  data_start = sizeof(header_bytes) + header_bytes;
  json header;
  try {
    header = tools::parse_json(text);
  } catch (const tools::json_error& problem) {
    throw input_error(fmt::format("{}: its header is {}", file.name(), problem.what()));
  }
  if (!header.is_object()) throw input_error(fmt::format("{}: its header is not a JSON object", file.name()));
  return header;
}

std::vector<std::int64_t> read_sizes(const json& list, const char* key, const std::string& where) {
  const auto found = list.find(key);
  if (found == list.end() || !found->is_array() || found->size() > 8) {
    throw input_error(fmt::format("{} has no usable list \"{}\"", where, key));
  }
  std::vector<std::int64_t> sizes;
  for (const json& value : *found) {
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > (std::uint64_t{1} << 62)) {
      throw input_error(fmt::format("{} has {} in \"{}\", allowed are whole numbers from 0 to 2^62", where,
                                    tools::json_excerpt(value), key));
    }
    sizes.push_back(value.get<std::int64_t>());
  }
  return sizes;
}

std::optional<bifolio::dtype> readable_dtype(std::string_view name) {
  if (name == "F32") return bifolio::dtype::f32;
  if (name == "F16") return bifolio::dtype::f16;
  if (name == "BF16") return bifolio::dtype::bf16;
  return std::nullopt;
}

/// Where a tensor is in the data.
struct byte_range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::string name;
};

/// No byte belongs to two tensors. As each is inside the data, all of them together are then no larger than the file:
/// a header of some kilobytes cannot request more memory than the file's size justifies.
void require_disjoint(std::vector<byte_range> ranges, const std::string& file) {
  std::erase_if(ranges, [](const byte_range& one) { return one.begin == one.end; });
  std::ranges::sort(ranges, {}, &byte_range::begin);
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    const byte_range &a = ranges[i - 1], &b = ranges[i];
    if (b.begin >= a.end) continue;
    throw input_error(fmt::format("{}: tensors \"{}\" at bytes [{}, {}] and \"{}\" at bytes [{}, {}] share bytes", file,
                                  tools::excerpt(a.name), a.begin, a.end, tools::excerpt(b.name), b.begin, b.end));
  }
}

}  // namespace

safetensors::safetensors(const std::filesystem::path& path) : file_(path) {
  std::uint64_t data_start = 0;
  const json header = read_header(file_, data_start);
  const std::uint64_t data_bytes = file_.size() - data_start;

  std::vector<byte_range> ranges;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const std::string where = fmt::format("{}: tensor \"{}\"", file_.name(), tools::excerpt(name));
    if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string()) {
      throw input_error(fmt::format("{} has no dtype", where));
    }
    const std::vector<std::int64_t> shape = read_sizes(entry, "shape", where);
    const std::vector<std::int64_t> range = read_sizes(entry, "data_offsets", where);
    if (range.size() != 2 || range[0] > range[1] || static_cast<std::uint64_t>(range[1]) > data_bytes) {
      throw input_error(
          fmt::format("{} is at bytes [{}] of {} bytes of data", where, fmt::join(range, ", "), data_bytes));
    }
    ranges.push_back({range[0], range[1], name});
    const std::string type_name = entry["dtype"].get<std::string>();
    const auto type = readable_dtype(type_name);
    if (!type) {
      other_dtypes_.emplace(name, type_name);  // an error only if it is asked for
      continue;
    }
    std::int64_t needed = static_cast<std::int64_t>(bifolio::size_of(*type));
    for (const std::int64_t size : shape) needed = needed < 0 ? -1 : checked_product({needed, size});
    if (needed != range[1] - range[0]) {
      throw input_error(fmt::format("{} of dtype {} and shape [{}] has {} bytes, which is not its size", where,
                                    type_name, fmt::join(shape, ", "), range[1] - range[0]));
    }
    tensors_.emplace(name, tensor{*type, shape, data_start + static_cast<std::uint64_t>(range[0])});
  }
  require_disjoint(std::move(ranges), file_.name());
}

const safetensors::tensor& safetensors::find(const std::string& name, std::initializer_list<std::int64_t> shape) const {
  if (const auto other = other_dtypes_.find(name); other != other_dtypes_.end()) {
    throw input_error(fmt::format("{}: tensor \"{}\" has dtype {}, allowed are F32, F16 and BF16", file_.name(), name,
                                  tools::excerpt(other->second)));
  }
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) throw input_error(fmt::format("{}: tensor \"{}\" is missing", file_.name(), name));
  if (!std::equal(shape.begin(), shape.end(), found->second.shape.begin(), found->second.shape.end())) {
    throw input_error(fmt::format("{}: tensor \"{}\" has shape [{}], but the configuration makes it [{}]", file_.name(),
                                  name, fmt::join(found->second.shape, ", "), fmt::join(shape, ", ")));
  }
  return found->second;
}

void safetensors::read(const tensor& from, std::int64_t first, std::int64_t count, float* values) {
  const std::uint64_t element = bifolio::size_of(from.type);
  const std::uint64_t offset = from.offset + static_cast<std::uint64_t>(first) * element;
  const auto num = static_cast<std::size_t>(count);
  visit_tensor_dtype(from.type, [&](auto traits) {
    using storage = typename decltype(traits)::storage;
    if constexpr (std::is_same_v<storage, float>) {
      file_.read(offset, values, num * element);
    } else {
      static_assert(sizeof(storage) == sizeof(narrow_[0]));
      narrow_.resize(num);
      file_.read(offset, narrow_.data(), num * element);
      for (std::size_t i = 0; i < num; ++i) values[i] = to_float(storage{narrow_[i]});
    }
  });
}

}  // namespace generate
