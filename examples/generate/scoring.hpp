// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Teacher forcing: how probable the model finds a given text, through the paged cache. Measures what a narrower cache
/// costs. One sequence, no scheduler: `kv_cache_manager` and `cache_engine` driven by hand.

#include <bifolio/backend.hpp>
#include <bifolio/cache_engine.hpp>
#include <cstdint>
#include <span>
#include <vector>

#include "cache_shape.hpp"
#include "model_runner.hpp"

namespace generate {

struct score {
  std::vector<double> nll;  ///< [ids.size() − 1]: −ln of the probability of ids[i + 1] after ids[0 … i]
  double mean_nll = 0;
  std::int64_t num_best = 0;  ///< positions where the next id had the largest logit
};

/// Feeds all ids but the last, `chunk` tokens a step, into a cache of `shape` on `where`, whose blocks must do for
/// them. `deterministic`: as in `generation_config`. Throws `bifolio::error`, and `input_error` when there are fewer
/// than two ids.
[[nodiscard]] score score_tokens(model_runner& model, bifolio::backend& where, const cache_shape& shape,
                                 std::span<const bifolio::token_id> ids, std::int32_t chunk,
                                 bool deterministic = false);

/// Scales for the planes of a cache whose codes have static ones, else empty: as `cache_engine_config` takes them.
struct static_scales {
  std::vector<float> k;
  std::vector<float> v;
};

/// What makes the largest key and value of these ids, in each layer (and head), the largest code. Feeds all of them
/// through a cache of unscaled numbers on `where`. Throws as `score_tokens`.
[[nodiscard]] static_scales calibrate(model_runner& model, bifolio::backend& where, const bifolio::kv_code& k,
                                      const bifolio::kv_code& v, std::span<const bifolio::token_id> ids,
                                      std::int32_t chunk);

}  // namespace generate
