// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <array>
#include <bit>

#include "binary_file.hpp"
#include "checkpoint.hpp"
#include "input_error.hpp"

namespace generate {
namespace {

static_assert(std::endian::native == std::endian::little, "model files are little-endian and are read as they are");

constexpr std::uint64_t header_bytes = 7 * sizeof(std::int32_t);

/// The arrays follow one another; the reader walks over them in file order, each for all layers at once.
class array_reader {
 public:
  explicit array_reader(binary_file& file) : file_(&file) {}

  void vector(std::vector<float>& values, std::int32_t count) {
    values.resize(static_cast<std::size_t>(count));
    read(0, count, values.data());
    skip(count);
  }

  void matrix(linear& matrix, std::int32_t first_output, std::int32_t num_rows) {
    const std::int64_t num_inputs = matrix.num_inputs();
    load_rows(matrix, first_output, num_rows, [&](std::int32_t row, std::int32_t count, float* rows) {
      read(row * num_inputs, count * num_inputs, rows);
    });
    skip(num_rows * num_inputs);
  }

  void skip(std::int64_t count) noexcept { offset_ += static_cast<std::uint64_t>(count) * sizeof(float); }

 private:
  void read(std::int64_t first, std::int64_t count, float* values) {
    file_->read(offset_ + static_cast<std::uint64_t>(first) * sizeof(float), values,
                static_cast<std::uint64_t>(count) * sizeof(float));
  }

  binary_file* file_;
  std::uint64_t offset_ = header_bytes;
};

model_config read_header(binary_file& file) {
  std::array<std::int32_t, 7> header{};
  if (file.size() < header_bytes) {
    throw input_error(fmt::format("{}: {} bytes are too few for a llama2.c checkpoint, whose header alone takes {}",
                                  file.name(), file.size(), header_bytes));
  }
  file.read(0, header.data(), header_bytes);
  const auto [dim, hidden_dim, num_layers, num_q_heads, num_kv_heads, signed_vocab, max_positions] = header;

  model_config config;
  config.dim = dim;
  config.hidden_dim = hidden_dim;
  config.num_layers = num_layers;
  config.num_q_heads = num_q_heads;
  config.num_kv_heads = num_kv_heads;
  config.max_positions = max_positions;
  // A negative size says that the classifier has weights of its own. The smallest int32 has no positive counterpart and
  // is left negative, for `validate` to refuse.
  config.tied_classifier = signed_vocab > 0;
  config.vocab_size = signed_vocab > 0 || signed_vocab == INT32_MIN ? signed_vocab : -signed_vocab;
  if (num_q_heads > 0 && dim % num_q_heads != 0) {
    throw input_error(fmt::format("{}: the model dimension {} is not a multiple of its {} query heads", file.name(),
                                  dim, num_q_heads));
  }
  config.head_dim = num_q_heads > 0 ? dim / num_q_heads : 1;
  validate(config, file.name());
  return config;
}

/// Bytes that a file with this header has. −1 when they exceed 2^62.
std::int64_t expected_bytes(const model_config& c) noexcept {
  const std::int64_t layers = c.num_layers;
  const std::array<std::int64_t, 7> parts{
      checked_product({c.tied_classifier ? 1 : 2, c.vocab_size, c.dim}),
      checked_product({layers, 2, c.dim}),         // the two norms
      checked_product({layers, 2, c.dim, c.dim}),  // wq, wo
      checked_product({layers, 2, c.kv_dim(), c.dim}),
      checked_product({layers, 3, c.hidden_dim, c.dim}),
      checked_product({c.dim}),
      checked_product({c.max_positions, c.head_dim}),  // the two rotary tables
  };
  std::int64_t sum = 0;
  for (const std::int64_t part : parts) {
    if (part < 0 || __builtin_add_overflow(sum, part, &sum) || sum > (std::int64_t{1} << 59)) return -1;
  }
  return static_cast<std::int64_t>(header_bytes) + 4 * sum;
}

}  // namespace

bool is_llama2c(const std::filesystem::path& path) { return path.extension() == ".bin"; }

checkpoint load_llama2c(const std::filesystem::path& path) {
  binary_file file(path);
  checkpoint model;
  model_config& c = model.config;
  c = read_header(file);

  const std::int64_t expected = expected_bytes(c);
  if (expected < 0 || file.size() != static_cast<std::uint64_t>(expected)) {
    const std::string needed = expected < 0 ? "more than 2^61" : fmt::format("{}", expected);
    throw input_error(
        fmt::format("{}: its header (dim {}, hidden {}, layers {}, heads {}/{}, vocabulary {}, positions {}) needs {} "
                    "bytes, but the file has {}",
                    file.name(), c.dim, c.hidden_dim, c.num_layers, c.num_q_heads, c.num_kv_heads, c.vocab_size,
                    c.max_positions, needed, file.size()));
  }

  model.layers.resize(static_cast<std::size_t>(c.num_layers));
  for (layer_weights& layer : model.layers) {
    layer.qkv = linear(c.q_dim() + 2 * c.kv_dim(), c.dim, bifolio::dtype::f32);
    layer.attention_out = linear(c.dim, c.q_dim(), bifolio::dtype::f32);
    layer.gate_up = linear(2 * c.hidden_dim, c.dim, bifolio::dtype::f32);
    layer.down = linear(c.dim, c.hidden_dim, bifolio::dtype::f32);
  }
  array_reader reader(file);
  model.embedding = linear(c.vocab_size, c.dim, bifolio::dtype::f32);
  reader.matrix(model.embedding, 0, c.vocab_size);
  for (layer_weights& layer : model.layers) reader.vector(layer.attention_norm, c.dim);
  for (layer_weights& layer : model.layers) reader.matrix(layer.qkv, 0, c.q_dim());
  for (layer_weights& layer : model.layers) reader.matrix(layer.qkv, c.q_dim(), c.kv_dim());
  for (layer_weights& layer : model.layers) reader.matrix(layer.qkv, c.q_dim() + c.kv_dim(), c.kv_dim());
  for (layer_weights& layer : model.layers) reader.matrix(layer.attention_out, 0, c.dim);
  for (layer_weights& layer : model.layers) reader.vector(layer.mlp_norm, c.dim);
  for (layer_weights& layer : model.layers) reader.matrix(layer.gate_up, 0, c.hidden_dim);
  for (layer_weights& layer : model.layers) reader.matrix(layer.down, 0, c.dim);
  for (layer_weights& layer : model.layers) reader.matrix(layer.gate_up, c.hidden_dim, c.hidden_dim);
  reader.vector(model.final_norm, c.dim);
  reader.skip(std::int64_t{c.max_positions} * c.head_dim);  // the rotary tables, which nobody uses any more
  if (!c.tied_classifier) {
    model.classifier = linear(c.vocab_size, c.dim, bifolio::dtype::f32);
    reader.matrix(model.classifier, 0, c.vocab_size);
  }
  return model;
}

}  // namespace generate
