// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Chooses a token from logits. Every sequence has its own random numbers, so that its text does not depend on what
/// else is in the batch.

#include <bifolio/types.hpp>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace generate {

struct sampling {
  float temperature = 0;  ///< 0: the largest logit
  float top_p = 1;        ///< keep the most probable tokens up to this probability together; 1 keeps all
};

class sampler {
 public:
  /// `stream` tells sequences of one seed apart.
  sampler(const sampling& how, std::uint64_t seed, std::uint64_t stream) noexcept;

  /// Throws `input_error` when no logit is a finite number: the model's weights are damaged.
  [[nodiscard]] bifolio::token_id choose(std::span<const float> logits);

 private:
  [[nodiscard]] double random() noexcept;  ///< uniform in [0, 1)

  sampling how_;
  std::uint64_t state_;
  std::vector<std::pair<float, std::int32_t>> candidates_;  // probability, id; scratch
};

/// The largest logit, the lower id on a tie; NaN never wins.
[[nodiscard]] bifolio::token_id largest_logit(std::span<const float> logits) noexcept;

/// −ln of the probability that softmax gives to `target`, summed in float64.
[[nodiscard]] double negative_log_likelihood(std::span<const float> logits, bifolio::token_id target) noexcept;

}  // namespace generate
