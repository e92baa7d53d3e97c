// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The seam between a model and the device that it runs on. `llama` computes on the CPU, `cuda_llama` on a GPU; both
/// feed tokens through the same network, hand each layer's queries, keys and values to an `attention_layer` in memory
/// of their device, and give logits on the host. Neither knows anything of caches.

#include <bifolio/device.hpp>
#include <bifolio/dtype.hpp>
#include <bifolio/rotate_append.hpp>
#include <bifolio/tensor_view.hpp>
#include <bifolio/types.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>

#include "model_config.hpp"

namespace generate {

/// What a layer hands over: rows in the order of the batch, in memory of the runner's device.
struct layer_rows {
  /// As the projections left them, float32: [num_tokens, num_q_heads, head_dim] and twice [num_tokens, num_kv_heads,
  /// head_dim].
  bifolio::const_tensor_view q;
  bifolio::const_tensor_view k;
  bifolio::const_tensor_view v;
  bifolio::rotary_params rotary;   ///< how q and k are rotated; a row of its table for each token
  bifolio::head_norm_params norm;  ///< how they are normalised before that
  bifolio::tensor_view q_out;    ///< room for the queries that attention reads, in the runner's `query_type`; may be q
  bifolio::tensor_view out;      ///< attention's result, of the shape of q, in the runner's `query_type`
  const float* sinks = nullptr;  ///< [num_q_heads], logits that take weight and have no value; null: none
};

/// Where the states of a recurrent layer are, in memory of the runner's device. Sequence s has the tokens from
/// query_start_loc[s] to query_start_loc[s + 1] − 1. Its row names the state that it goes on from, or
/// `bifolio::invalid_block` for the first one, and the one that it leaves, which is another.
struct recurrent_states {
  std::byte* data = nullptr;  ///< state i begins i · state_bytes after it
  std::int64_t state_bytes = 0;
  const std::int32_t* rows = nullptr;  ///< [num_sequences, rows_stride]
  std::int64_t rows_stride = 0;
  const std::int32_t* query_start_loc = nullptr;
  std::int32_t num_sequences = 0;
};

/// Takes a layer's new queries, keys and values and gives attention's result; the one thing the model asks of a KV
/// cache.
class attention_layer {
 public:
  virtual ~attention_layer() = default;
  /// On a GPU the work goes to the runner's stream. Called once for each layer, in order. Throws when it cannot.
  virtual void run(std::int32_t layer, const layer_rows& rows) = 0;
  /// For recurrent layers, instead of `run`.
  [[nodiscard]] virtual recurrent_states states(std::int32_t layer) {
    static_cast<void>(layer);
    throw std::logic_error("this attention has no states");
  }
};

/// The forward pass over a batch of tokens of any sequences, in float32 but for what attention gets and gives. A
/// token's result does not depend on the other tokens of the batch, bit for bit, provided that attention's does not.
/// One thread calls it at a time.
class model_runner {
 public:
  virtual ~model_runner() = default;

  [[nodiscard]] virtual const model_config& config() const noexcept = 0;
  /// What queries are rounded to before attention takes them, and the type of its results.
  [[nodiscard]] virtual bifolio::dtype query_type() const noexcept = 0;

  /// Feeds tokens[i] at positions[i] and returns the logits after the tokens of `logits_rows` (indices into tokens),
  /// [logits_rows.size(), vocab_size], on the host, valid until the next call. All work is done when it returns.
  virtual std::span<const float> forward(std::span<const bifolio::token_id> tokens,
                                         std::span<const std::int32_t> positions,
                                         std::span<const std::int32_t> logits_rows, attention_layer& attention) = 0;

  /// Where attention's work has to be queued, so that it is ordered with the model's own.
  [[nodiscard]] virtual bifolio::stream_ref stream() const noexcept { return {}; }

  /// Seconds that the device spent in `attention_layer::run` since construction.
  [[nodiscard]] virtual double attention_seconds() const noexcept = 0;
};

}  // namespace generate
