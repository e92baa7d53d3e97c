// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Reads safetensors files: eight bytes with the length of a JSON header, the header (name → dtype, shape, range of
/// bytes), then the data. Format: the safetensors repository's README, "Format".

#include <bifolio/dtype.hpp>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <unordered_map>
#include <vector>

#include "binary_file.hpp"

namespace generate {

class safetensors {
 public:
  struct tensor {
    bifolio::dtype type = bifolio::dtype::f32;
    std::vector<std::int64_t> shape;
    std::uint64_t offset = 0;  ///< of the first element, from the start of the file
  };

  /// Reads and checks the header: every tensor is inside the file and shares no byte with another, and one of a known
  /// dtype (F32, F16, BF16) has exactly the bytes its shape needs. Throws `input_error`.
  explicit safetensors(const std::filesystem::path& path);

  [[nodiscard]] bool contains(const std::string& name) const { return tensors_.contains(name); }
  /// Throws `input_error` when there is no such tensor, or its shape is another one, or its dtype is not readable.
  [[nodiscard]] const tensor& find(const std::string& name, std::initializer_list<std::int64_t> shape) const;
  /// Elements first … first + count − 1 of a tensor, widened.
  void read(const tensor& from, std::int64_t first, std::int64_t count, float* values);

 private:
  binary_file file_;
  std::unordered_map<std::string, tensor> tensors_;
  std::unordered_map<std::string, std::string> other_dtypes_;  // tensors that this program cannot read, by name
  std::vector<std::uint16_t> narrow_;                          // scratch of `read`
};

}  // namespace generate
