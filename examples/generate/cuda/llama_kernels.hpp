// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What a model of the Llama family does between its matrices, on a GPU. Activations are float32, rows of tokens. Every
/// row is computed by itself, in the same order of sums whatever the number of rows. Launches wait for nothing; they
/// return what the launch returned.

#include <cuda_runtime_api.h>

#include <bifolio/dtype.hpp>
#include <cstdint>

#include "model_config.hpp"

namespace generate {

/// x[t] = scale · table[tokens[t]]; rows num_tokens … num_rows − 1 become 0. table [vocab_size, dim], x [num_rows,
/// dim].
cudaError_t launch_embed(const float* table, const std::int32_t* tokens, std::int64_t num_tokens, std::int64_t num_rows,
                         std::int32_t dim, float scale, float* x, cudaStream_t stream);

/// RMSNorm: out[r] = weight · x / √(mean(x²) + epsilon) of row x[rows[r]], or of x[r] when `rows` is null.
cudaError_t launch_normalise(const float* x, const std::int32_t* rows, const float* weight, float epsilon,
                             std::int64_t num_rows, std::int32_t dim, float* out, cudaStream_t stream);

/// out[r] += RMSNorm of row x[r], which a model with norms after its layers adds to the residual stream.
cudaError_t launch_normalise_and_add(const float* x, const float* weight, float epsilon, std::int64_t num_rows,
                                     std::int32_t dim, float* out, cudaStream_t stream);

/// rows[t] += bias; dense rows of `width` elements.
cudaError_t launch_add_bias(float* rows, const float* bias, std::int64_t num_rows, std::int64_t width,
                            cudaStream_t stream);

/// x = cap · tanh(x / cap), in place.
cudaError_t launch_soft_cap(float* x, std::int64_t count, float cap, cudaStream_t stream);

/// RoPE's table of these tokens: table[t] = the cosines of positions[t] · frequencies[i], i counting pairs, then the
/// sines; head_dim floats.
cudaError_t launch_angles(const std::int32_t* positions, const float* frequencies, std::int64_t num_tokens,
                          std::int32_t head_dim, float* table, cudaStream_t stream);

/// hidden = activation(gate) · up; gate_up [num_tokens, 2 · hidden_dim] holds gate, then up.
cudaError_t launch_gate(const float* gate_up, activation kind, std::int64_t num_tokens, std::int32_t hidden_dim,
                        float* hidden, cudaStream_t stream);

/// out = in, `count` elements of a 16-bit `type`, as float32.
cudaError_t launch_widen(const void* in, std::int64_t count, bifolio::dtype type, float* out, cudaStream_t stream);

}  // namespace generate
