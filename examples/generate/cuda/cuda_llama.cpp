// SPDX-License-Identifier: Apache-2.0
#include "cuda/cuda_llama.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <bifolio/buffer.hpp>
#include <bifolio/cuda.hpp>
#include <cstddef>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda/cublas.hpp"
#include "cuda/llama_kernels.hpp"

namespace generate {
namespace {

using bifolio::buffer;
using bifolio::token_id;

/// Every product is computed for this many tokens, the last ones padded. cuBLAS chooses the order of its sums by the
/// shape; with one shape for each matrix, a token's result does not depend on how many others are in the batch. At 32
/// columns a product still takes about as long as reading its weights, so that a step of one token loses little.
constexpr std::int64_t tile_tokens = 32;

constexpr std::int64_t padded(std::int64_t num_tokens) noexcept {
  return (num_tokens + tile_tokens - 1) / tile_tokens * tile_tokens;
}

void require(bifolio::errc code, const char* what) {
  if (code != bifolio::errc::ok) throw bifolio::error(code, fmt::format("{} failed: {}", what, to_string(code)));
}

void require(cudaError_t code, const char* what) {
  if (code != cudaSuccess) throw std::runtime_error(fmt::format("{} failed: {}", what, cudaGetErrorString(code)));
}

void require(cublasStatus_t code, const char* what) {
  if (code != CUBLAS_STATUS_SUCCESS) {
    throw std::runtime_error(
        fmt::format("{} failed: cuBLAS says {}", what, load_cublas().functions.status_string(code)));
  }
}

class cuda_stream {
 public:
  cuda_stream() { require(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), "making a stream"); }
  ~cuda_stream() { cudaStreamDestroy(handle_); }
  cuda_stream(const cuda_stream&) = delete;
  cuda_stream& operator=(const cuda_stream&) = delete;
  [[nodiscard]] cudaStream_t get() const noexcept { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
};

class cuda_event {
 public:
  cuda_event() { require(cudaEventCreate(&handle_), "making an event"); }
  ~cuda_event() {
    if (handle_ != nullptr) cudaEventDestroy(handle_);
  }
  cuda_event(cuda_event&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  cuda_event& operator=(cuda_event&&) = delete;
  [[nodiscard]] cudaEvent_t get() const noexcept { return handle_; }

 private:
  cudaEvent_t handle_ = nullptr;
};

/// cuBLAS on one stream, in plain float32: the pedantic mode forbids TF32 and every emulation.
class matrix_multiplier {
 public:
  explicit matrix_multiplier(cudaStream_t stream) {
    require(cublas_.create(&handle_), "opening cuBLAS");
    try {
      require(cublas_.set_stream(handle_, stream), "giving cuBLAS a stream");
      require(cublas_.set_math_mode(handle_, CUBLAS_PEDANTIC_MATH), "setting cuBLAS to float32");
    } catch (...) {
      cublas_.destroy(handle_);
      throw;
    }
  }
  ~matrix_multiplier() { cublas_.destroy(handle_); }
  matrix_multiplier(const matrix_multiplier&) = delete;
  matrix_multiplier& operator=(const matrix_multiplier&) = delete;

  /// y[t][o] = Σ_i weights[o][i] · x[t][i], added to what y holds when `accumulates`. Rows of x and y go on to the next
  /// multiple of `tile_tokens`.
  void run(const float* weights, std::int32_t num_outputs, std::int32_t num_inputs, const float* x,
           std::int64_t num_tokens, float* y, bool accumulates) {
    const float one = 1;
    const float before = accumulates ? 1.0f : 0.0f;
    // Read by columns, as cuBLAS does, the weights are [num_inputs, num_outputs], x and y are transposed.
    for (std::int64_t t = 0; t < num_tokens; t += tile_tokens) {
      require(
          cublas_.sgemm(handle_, CUBLAS_OP_T, CUBLAS_OP_N, num_outputs, static_cast<int>(tile_tokens), num_inputs, &one,
                        weights, num_inputs, x + t * num_inputs, num_inputs, &before, y + t * num_outputs, num_outputs),
          "a matrix product");
    }
  }

 private:
  const cublas_functions& cublas_ = load_cublas().functions;
  cublasHandle_t handle_ = nullptr;
};

struct device_matrix {
  buffer weights;  // [num_outputs, num_inputs]
  std::int32_t num_outputs = 0;
  std::int32_t num_inputs = 0;
};

/// As in `layer_weights`; vectors that the model does not have are empty.
struct device_layer {
  buffer attention_norm;
  device_matrix qkv;
  buffer qkv_bias;
  buffer q_norm, k_norm;
  device_matrix attention_out;
  buffer attention_out_bias;
  buffer attention_post_norm;
  buffer mlp_norm;
  device_matrix gate_up;
  device_matrix down;
  buffer mlp_post_norm;
};

class cuda_llama final : public model_runner {
 public:
  cuda_llama(const checkpoint& model, bifolio::backend& where, bifolio::dtype query_type);

  [[nodiscard]] const model_config& config() const noexcept override { return config_; }
  [[nodiscard]] bifolio::dtype query_type() const noexcept override { return query_type_; }
  std::span<const float> forward(std::span<const token_id> tokens, std::span<const std::int32_t> positions,
                                 std::span<const std::int32_t> logits_rows, attention_layer& attention) override;
  [[nodiscard]] bifolio::stream_ref stream() const noexcept override { return {stream_.get()}; }
  [[nodiscard]] double attention_seconds() const noexcept override { return attention_seconds_; }

 private:
  [[nodiscard]] buffer upload(std::span<const float> values);
  [[nodiscard]] device_matrix upload(const linear& matrix);
  void warm_up();
  void grow(buffer& held, std::int64_t num_elements, std::size_t element_bytes = sizeof(float));
  void upload_inputs(std::span<const token_id> tokens, std::span<const std::int32_t> positions,
                     std::span<const std::int32_t> logits_rows);
  void multiply(const device_matrix& matrix, const buffer& x, std::int64_t num_tokens, buffer& y, bool accumulates) {
    multiplier_.run(matrix.weights.as<float>(), matrix.num_outputs, matrix.num_inputs, x.as<float>(), num_tokens,
                    y.as<float>(), accumulates);
  }
  void normalise(const buffer& weight, std::int64_t num_tokens) {
    require(launch_normalise(x_.as<float>(), nullptr, weight.as<float>(), config_.norm_epsilon, num_tokens, config_.dim,
                             normed_.as<float>(), stream_.get()),
            "RMSNorm");
  }
  /// The tables of RoPE for every kind of layers, a row for each token.
  void prepare_rotations(const std::int32_t* positions, std::int64_t num_tokens);
  void attend(std::int32_t layer, std::int64_t num_tokens, attention_layer& attention);
  /// x_ += what a matrix makes of `from`, with a bias and normalised where the layer has these.
  void add_to_stream(const device_matrix& matrix, const buffer& from, const buffer& bias, const buffer& post_norm,
                     std::int64_t num_tokens);

  model_config config_;
  bifolio::dtype query_type_;
  bifolio::backend* where_;
  cuda_stream stream_;
  matrix_multiplier multiplier_;
  std::vector<cuda_event> layer_events_;  // [num_layers, 2]: before and after attention
  double attention_seconds_ = 0;

  device_matrix embedding_;
  std::vector<device_layer> layers_;
  buffer final_norm_;
  device_matrix classifier_;  // empty when tied
  buffer frequencies_;        // [num_kinds, head_dim / 2]

  // Kept between calls; rows go on to a multiple of tile_tokens.
  buffer host_inputs_, inputs_;  // int32: tokens, positions, rows of the tables below, rows of logits
  buffer rotations_;             // [num_kinds, num_tokens, head_dim]: cosines, then sines
  buffer x_;                     // [num_tokens, dim], the residual stream
  buffer normed_;                // [num_tokens, dim]
  buffer qkv_;                   // [num_tokens, q_dim + 2 · kv_dim]
  buffer attended_;              // [num_tokens, q_dim]
  buffer narrow_q_;              // [num_tokens, q_dim], as attention takes them, unless that is float32
  buffer narrow_attended_;       // [num_tokens, q_dim]
  buffer gate_up_;               // [num_tokens, 2 · hidden_dim]
  buffer hidden_;                // [num_tokens, hidden_dim]
  buffer added_;                 // [num_tokens, dim], before a norm of it is added to x_
  buffer logits_, host_logits_;  // [num_rows, vocab_size]
};

void select_device(bifolio::backend& where) { require(cudaSetDevice(where.where().index), "selecting the device"); }

cuda_llama::cuda_llama(const checkpoint& model, bifolio::backend& where, bifolio::dtype query_type)
    : config_(model.config), query_type_(query_type), where_(&where), multiplier_(stream_.get()) {
  layer_events_.reserve(2 * model.layers.size());
  for (std::size_t i = 0; i < 2 * model.layers.size(); ++i) layer_events_.emplace_back();
  embedding_ = upload(model.embedding);
  for (const layer_weights& layer : model.layers) {
    layers_.push_back({upload(layer.attention_norm), upload(layer.qkv), upload(layer.qkv_bias), upload(layer.q_norm),
                       upload(layer.k_norm), upload(layer.attention_out), upload(layer.attention_out_bias),
                       upload(layer.attention_post_norm), upload(layer.mlp_norm), upload(layer.gate_up),
                       upload(layer.down), upload(layer.mlp_post_norm)});
  }
  final_norm_ = upload(model.final_norm);
  if (!config_.tied_classifier) classifier_ = upload(model.classifier);
  std::vector<float> frequencies;
  for (const layer_kind& kind : config_.kinds) {
    const std::vector<float> more = rotary_frequencies(kind.rope, config_.head_dim);
    frequencies.insert(frequencies.end(), more.begin(), more.end());
  }
  frequencies_ = upload(frequencies);
  warm_up();
}

/// Kernels are loaded when they are first launched, cuBLAS's in a tenth of a second: here, not in somebody's first
/// step.
void cuda_llama::warm_up() {
  class no_attention final : public attention_layer {
    void run(std::int32_t, const layer_rows&) override {}
  } attention;
  const token_id token{0};
  const std::int32_t zero = 0;
  forward({&token, 1}, {&zero, 1}, {&zero, 1}, attention);
  attention_seconds_ = 0;
}

buffer cuda_llama::upload(std::span<const float> values) {
  if (values.empty()) return {};
  buffer copy(where_->memory(), values.size_bytes());
  require(where_->upload(copy.data(), values.data(), values.size_bytes(), stream()), "uploading weights");
  require(where_->synchronize(stream()), "uploading weights");  // `values` may go now
  return copy;
}

device_matrix cuda_llama::upload(const linear& matrix) {
  const auto width = static_cast<std::size_t>(matrix.num_inputs());
  device_matrix result{{}, matrix.num_outputs(), matrix.num_inputs()};
  result.weights = buffer(where_->memory(), static_cast<std::size_t>(matrix.num_outputs()) * width * sizeof(float));
  const std::int32_t at_once = std::max(1, (1 << 22) / matrix.num_inputs());
  std::vector<float> rows(static_cast<std::size_t>(std::min(at_once, matrix.num_outputs())) * width);
  for (std::int32_t first = 0; first < matrix.num_outputs(); first += at_once) {
    const auto count = static_cast<std::size_t>(std::min(at_once, matrix.num_outputs() - first));
    for (std::size_t r = 0; r < count; ++r) {
      matrix.copy_row(first + static_cast<std::int32_t>(r), rows.data() + r * width);
    }
    require(where_->upload(result.weights.as<float>() + static_cast<std::size_t>(first) * width, rows.data(),
                           count * width * sizeof(float), stream()),
            "uploading weights");
    require(where_->synchronize(stream()), "uploading weights");
  }
  return result;
}

/// Zeros, so that the padding that cuBLAS multiplies holds numbers.
void cuda_llama::grow(buffer& held, std::int64_t num_elements, std::size_t element_bytes) {
  const std::size_t num_bytes = static_cast<std::size_t>(num_elements) * element_bytes;
  if (held.num_bytes() >= num_bytes) return;
  held = {};  // two of them need not fit at the same time
  held = buffer(where_->memory(), num_bytes);
  require(cudaMemsetAsync(held.data(), 0, num_bytes, stream_.get()), "clearing memory");
}

void cuda_llama::upload_inputs(std::span<const token_id> tokens, std::span<const std::int32_t> positions,
                               std::span<const std::int32_t> logits_rows) {
  const std::size_t count = 3 * tokens.size() + logits_rows.size();
  if (host_inputs_.num_bytes() < count * sizeof(std::int32_t)) {
    host_inputs_ = buffer(where_->staging_memory(), count * sizeof(std::int32_t));
    inputs_ = buffer(where_->memory(), count * sizeof(std::int32_t));
  }
  auto* to = host_inputs_.as<std::int32_t>();
  for (const token_id token : tokens) *to++ = to_index(token);
  to = std::copy(positions.begin(), positions.end(), to);
  std::iota(to, to + tokens.size(), 0);
  std::copy(logits_rows.begin(), logits_rows.end(), to + tokens.size());
  require(where_->upload(inputs_.data(), host_inputs_.data(), count * sizeof(std::int32_t), stream()),
          "uploading tokens");
}

void cuda_llama::attend(std::int32_t layer, std::int64_t num_tokens, attention_layer& attention) {
  const model_config& c = config_;
  const std::int64_t q_dim = c.q_dim();
  const std::int64_t kv_dim = c.kv_dim();
  // Views into the fused projection: bifolio takes rows at any stride, so q, k and v are never copied apart.
  const auto part = [&](std::int64_t offset, std::int32_t num_heads) {
    return bifolio::tensor_view{qkv_.as<float>() + offset, bifolio::dtype::f32, num_tokens, num_heads, c.head_dim,
                                q_dim + 2 * kv_dim,        c.head_dim};
  };
  const bool narrow = query_type_ != bifolio::dtype::f32;
  const auto index = static_cast<std::size_t>(layer);
  const device_layer& weights = layers_[index];
  layer_rows rows;
  rows.q_out = part(0, c.num_q_heads);
  rows.q = as_const(rows.q_out);
  rows.k = as_const(part(q_dim, c.num_kv_heads));
  rows.v = as_const(part(q_dim + kv_dim, c.num_kv_heads));
  if (narrow) {
    rows.q_out = bifolio::dense_view<void>(narrow_q_.data(), query_type_, num_tokens, c.num_q_heads, c.head_dim);
  }
  void* const out = narrow ? narrow_attended_.data() : attended_.data();
  rows.out = bifolio::dense_view<void>(out, query_type_, num_tokens, c.num_q_heads, c.head_dim);
  rows.rotary.pairing = c.rope;
  rows.rotary.rotary_dim = c.head_dim;
  rows.rotary.cos_sin = rotations_.as<float>() + static_cast<std::int64_t>(c.kind_of(layer)) * num_tokens * c.head_dim;
  rows.rotary.num_positions = num_tokens;
  rows.rotary.positions = inputs_.as<std::int32_t>() + 2 * num_tokens;
  rows.norm = {weights.q_norm.as<float>(), weights.k_norm.as<float>(), c.norm_epsilon};
  require(cudaEventRecord(layer_events_[2 * index].get(), stream_.get()), "an event");
  attention.run(layer, rows);
  require(cudaEventRecord(layer_events_[2 * index + 1].get(), stream_.get()), "an event");
  if (narrow) {
    require(launch_widen(out, num_tokens * q_dim, query_type_, attended_.as<float>(), stream_.get()),
            "widening attention's results");
  }
}

void cuda_llama::prepare_rotations(const std::int32_t* positions, std::int64_t num_tokens) {
  const std::int32_t head_dim = config_.head_dim;
  for (std::int64_t kind = 0; kind < std::ssize(config_.kinds); ++kind) {
    require(launch_angles(positions, frequencies_.as<float>() + kind * (head_dim / 2), num_tokens, head_dim,
                          rotations_.as<float>() + kind * num_tokens * head_dim, stream_.get()),
            "RoPE");
  }
}

void cuda_llama::add_to_stream(const device_matrix& matrix, const buffer& from, const buffer& bias,
                               const buffer& post_norm, std::int64_t num_tokens) {
  const bool has_norm = post_norm.num_bytes() > 0;
  buffer& to = has_norm ? added_ : x_;
  multiply(matrix, from, num_tokens, to, !has_norm);
  if (bias.num_bytes() > 0) {
    require(launch_add_bias(to.as<float>(), bias.as<float>(), num_tokens, config_.dim, stream_.get()), "a bias");
  }
  if (has_norm) {
    require(launch_normalise_and_add(added_.as<float>(), post_norm.as<float>(), config_.norm_epsilon, num_tokens,
                                     config_.dim, x_.as<float>(), stream_.get()),
            "RMSNorm");
  }
}

std::span<const float> cuda_llama::forward(std::span<const token_id> tokens, std::span<const std::int32_t> positions,
                                           std::span<const std::int32_t> logits_rows, attention_layer& attention) {
  const model_config& c = config_;
  const auto n = static_cast<std::int64_t>(tokens.size());
  const auto num_rows = static_cast<std::int64_t>(logits_rows.size());
  const std::int64_t room = padded(std::max(n, num_rows));
  const std::int64_t qkv_dim = c.q_dim() + 2 * std::int64_t{c.kv_dim()};
  const std::size_t num_logits = logits_rows.size() * static_cast<std::size_t>(c.vocab_size);
  select_device(*where_);
  grow(x_, room * c.dim);
  grow(normed_, room * c.dim);
  grow(qkv_, room * qkv_dim);
  grow(attended_, room * c.q_dim());
  if (query_type_ != bifolio::dtype::f32) {
    grow(narrow_q_, n * c.q_dim(), size_of(query_type_));
    grow(narrow_attended_, n * c.q_dim(), size_of(query_type_));
  }
  grow(gate_up_, room * 2 * c.hidden_dim);
  grow(hidden_, room * c.hidden_dim);
  grow(added_, room * c.dim);
  grow(logits_, padded(num_rows) * c.vocab_size);
  grow(rotations_, std::ssize(c.kinds) * n * c.head_dim);
  upload_inputs(tokens, positions, logits_rows);
  const auto* token_ids = inputs_.as<std::int32_t>();
  const cudaStream_t queue = stream_.get();

  require(launch_embed(embedding_.weights.as<float>(), token_ids, n, padded(n), c.dim, c.embedding_scale,
                       x_.as<float>(), queue),
          "the embedding");
  prepare_rotations(token_ids + n, n);
  for (std::int32_t l = 0; l < c.num_layers; ++l) {
    const device_layer& layer = layers_[static_cast<std::size_t>(l)];
    normalise(layer.attention_norm, n);
    multiply(layer.qkv, normed_, n, qkv_, false);
    if (layer.qkv_bias.num_bytes() > 0) {
      require(launch_add_bias(qkv_.as<float>(), layer.qkv_bias.as<float>(), n, qkv_dim, queue),
              "the biases of q, k and v");
    }
    attend(l, n, attention);
    add_to_stream(layer.attention_out, attended_, layer.attention_out_bias, layer.attention_post_norm, n);

    normalise(layer.mlp_norm, n);
    multiply(layer.gate_up, normed_, n, gate_up_, false);
    require(launch_gate(gate_up_.as<float>(), c.gate, n, c.hidden_dim, hidden_.as<float>(), queue), "the MLP's gate");
    add_to_stream(layer.down, hidden_, {}, layer.mlp_post_norm, n);
  }

  // Only the rows that somebody samples from pay for the vocabulary.
  require(launch_normalise(x_.as<float>(), token_ids + 3 * n, final_norm_.as<float>(), c.norm_epsilon, num_rows, c.dim,
                           normed_.as<float>(), queue),
          "RMSNorm");
  multiply(c.tied_classifier ? embedding_ : classifier_, normed_, num_rows, logits_, false);
  if (c.logits_soft_cap > 0) {
    require(launch_soft_cap(logits_.as<float>(), num_rows * c.vocab_size, c.logits_soft_cap, queue),
            "the logits' soft cap");
  }
  if (host_logits_.num_bytes() < num_logits * sizeof(float)) {
    host_logits_ = buffer(where_->staging_memory(), num_logits * sizeof(float));
  }
  require(where_->download(host_logits_.data(), logits_.data(), num_logits * sizeof(float), stream()),
          "downloading logits");
  require(where_->synchronize(stream()), "a step of the model");
  for (std::size_t i = 0; i < layer_events_.size(); i += 2) {
    float milliseconds = 0;
    require(cudaEventElapsedTime(&milliseconds, layer_events_[i].get(), layer_events_[i + 1].get()), "an event");
    attention_seconds_ += static_cast<double>(milliseconds) * 1e-3;
  }
  return {host_logits_.as<float>(), num_logits};
}

}  // namespace

std::string find_cuda_problem() {
  if (bifolio::cuda::num_devices() == 0) return "no CUDA device is there";
  return load_cublas().problem;
}

std::unique_ptr<model_runner> make_cuda_llama(const checkpoint& model, bifolio::backend& where,
                                              bifolio::dtype query_type) {
  select_device(where);
  return std::make_unique<cuda_llama>(model, where, query_type);
}

}  // namespace generate
