// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Reads the fixture of ONNX's own test cases that make_fixture.py writes; the format is described there. A file that
/// is not exactly what that script wrote is refused.

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace bifolio::test::onnx {

/// Row-major; float64 holds every value of the other types exactly, and int64 lengths up to 2^53.
struct tensor {
  std::string type;  ///< "f32", "f16", "bf16", "f64", "bool" or "i64"
  std::vector<std::int64_t> shape;
  std::vector<double> values;
};

/// One call of an operator, and what it must give.
struct node_case {
  std::string name;
  std::string op;  ///< "Attention", "FlexAttention" or "RotaryEmbedding"
  std::int32_t opset = 0;
  std::map<std::string, std::vector<std::string>> attributes;  ///< words as in the file; only those that are set
  std::map<std::string, tensor> inputs;                        ///< by their names in the operator's schema
  std::map<std::string, tensor> outputs;

  [[nodiscard]] double number(const std::string& attribute, double otherwise) const;
  [[nodiscard]] const tensor* input(const std::string& which) const;
  [[nodiscard]] const tensor* output(const std::string& which) const;
};

struct fixture {
  std::string source;       ///< "onnx 1.23.2 Apache-2.0"
  std::string script_hash;  ///< of the script that wrote it
  std::vector<node_case> cases;
};

/// A file of the source tree. A program built elsewhere, as for `tools/gpu-check --prebuilt`, runs in the tree's root.
[[nodiscard]] std::filesystem::path in_tree(const char* path);

/// Throws std::runtime_error that says what is wrong with the folder's files.
[[nodiscard]] fixture read_fixture(const std::filesystem::path& folder);

/// All bytes of a file; throws std::runtime_error.
[[nodiscard]] std::string read_bytes(const std::filesystem::path& file);

/// FNV-1a, 64 bits, as 16 hexadecimal digits (Fowler, Noll, Vo).
[[nodiscard]] std::string fnv1a(std::string_view bytes);

}  // namespace bifolio::test::onnx
