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
