// SPDX-License-Identifier: Apache-2.0
// A safetensors file: the bytes as they are, or a header text behind the length that belongs to it.
#include "safetensors.hpp"

#include <string>
#include <vector>

#include "choices.hpp"
#include "fuzz_target.hpp"
#include "scratch_files.hpp"
#include "tools/common/program.hpp"

namespace {

using namespace bifolio::fuzz;

std::vector<std::uint8_t> with_length(std::string_view header, std::size_t data_bytes) {
  std::vector<std::uint8_t> file;
  for (unsigned shift = 0; shift < 64; shift += 8) {
    file.push_back(static_cast<std::uint8_t>(std::uint64_t{header.size()} >> shift));
  }
  file.insert(file.end(), header.begin(), header.end());
  for (std::size_t i = 0; i < data_bytes; ++i) file.push_back(static_cast<std::uint8_t>(i * 37));
  return file;
}

void read_all(generate::safetensors& file, const std::string& name, std::initializer_list<std::int64_t> shape) {
  if (!file.contains(name)) return;
  const auto& tensor = file.find(name, shape);
  std::int64_t count = 1;
  for (const std::int64_t extent : tensor.shape) count *= extent;
  std::vector<float> values(static_cast<std::size_t>(count));
  file.read(tensor, 0, count, values.data());
}

}  // namespace

BIFOLIO_FUZZ_TARGET(safetensors) {
  choices from(input);
  const std::uint8_t form = from.byte();
  const std::size_t data_bytes = std::size_t{from.byte()} * 2;
  const auto path = (form & 1) != 0 ? write_scratch("file.safetensors", with_length(text_of(from.rest()), data_bytes))
                                    : write_scratch("file.safetensors", from.rest());
  try {
    generate::safetensors file(path);
    read_all(file, "a", {2, 3});
    read_all(file, "a", {6});
    read_all(file, "model.norm.weight", {4});
  } catch (const tools::input_error&) {
  }
}
