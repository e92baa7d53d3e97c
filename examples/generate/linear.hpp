// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A weight matrix and its product with a batch of tokens, in plain loops. It exists instead of a call to a BLAS for
/// one property: the result of a token does not depend on how many other tokens are in the batch, nor on the number of
/// threads. (A BLAS picks another summation order for another batch size.) So a sequence that was preempted, or shares
/// its steps with others, gives the same logits bit for bit, as bifolio's own attention does.
///
/// Storage: panels of 16 outputs, [num_panels, num_inputs, 16], so that one vector holds 16 outputs of one input and
/// every output is summed over its inputs in order.

#include <bifolio/dtype.hpp>
#include <bifolio/executor.hpp>
#include <cstdint>
#include <vector>

namespace generate {

class linear {
 public:
  static constexpr std::int32_t panel_width = 16;

  linear() = default;
  /// All weights 0. `type` is how they are kept: bf16 (widened to f32 when used), else f32, which
  /// holds every f16 too.
  linear(std::int32_t num_outputs, std::int32_t num_inputs, bifolio::dtype type);

  [[nodiscard]] std::int32_t num_outputs() const noexcept { return num_outputs_; }
  [[nodiscard]] std::int32_t num_inputs() const noexcept { return num_inputs_; }

  /// Sets the weights of outputs first_output … first_output + num_rows − 1 from rows of num_inputs numbers. Narrowing
  /// to bf16 rounds; it is exact for numbers that were bf16 in the file.
  void set_rows(std::int32_t first_output, const float* rows, std::int32_t num_rows) noexcept;
  /// The weights of one output: for an embedding table, the vector of a token.
  void copy_row(std::int32_t output, float* destination) const noexcept;

  /// y[t][o] = Σ_i weight[o][i] · x[t][i]; x [num_tokens, num_inputs], y [num_tokens, num_outputs].
  void apply(bifolio::executor& workers, const float* x, std::int64_t num_tokens, float* y) const noexcept;

 private:
  [[nodiscard]] std::int64_t index(std::int32_t output, std::int32_t input) const noexcept {
    return (std::int64_t{output / panel_width} * num_inputs_ + input) * panel_width + output % panel_width;
  }

  std::int32_t num_outputs_ = 0;
  std::int32_t num_inputs_ = 0;
  std::vector<float> f32_;  // one of the two is in use
  std::vector<bifolio::bfloat16> bf16_;
};

/// "avx512", "avx2" or "baseline": what the products run on here.
[[nodiscard]] const char* linear_isa() noexcept;

}  // namespace generate
