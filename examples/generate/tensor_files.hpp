// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The tensors of a Hugging Face checkpoint by name, wherever they are: in one safetensors file, or in several with an
/// index that says which tensor is in which.

#include <bifolio/dtype.hpp>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "linear.hpp"
#include "safetensors.hpp"

namespace generate {

/// Throws `input_error` when a file cannot be used, a tensor is missing, or one has another shape than it must have.
class tensor_files {
 public:
  /// A tensor and its number of rows (of elements, for a vector).
  using part = std::pair<std::string, std::int32_t>;

  /// `path` is a directory with model.safetensors or model.safetensors.index.json, or one .safetensors file.
  explicit tensor_files(const std::filesystem::path& path);

  /// The elements of several vectors, one after another.
  [[nodiscard]] std::vector<float> vector(std::initializer_list<part> parts);

  /// All elements of a tensor of any shape.
  [[nodiscard]] std::vector<float> tensor(const std::string& name, std::initializer_list<std::int64_t> shape);

  /// Part `index` of a tensor [count, num_inputs, num_outputs]: a matrix of which the file has the transpose.
  [[nodiscard]] linear transposed(const std::string& name, std::int64_t index, std::int64_t count,
                                  std::int32_t num_outputs, std::int32_t num_inputs);

  /// A matrix whose outputs are those of several tensors, one after another. It is kept as bf16 when all of them are
  /// bf16 in the file, as float32 otherwise.
  [[nodiscard]] linear matrix(std::initializer_list<part> parts, std::int32_t num_inputs);

 private:
  void open(const std::filesystem::path& path) { files_.push_back(std::make_unique<safetensors>(path)); }
  void open_shards(const std::filesystem::path& directory, const std::filesystem::path& index);
  safetensors& file_of(const std::string& tensor);
  void read_rows(linear& matrix, std::int32_t first_output, const part& rows);

  std::vector<std::unique_ptr<safetensors>> files_;
};

}  // namespace generate
