// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Puts a model on the device that the user named.

#include <bifolio/backend.hpp>
#include <bifolio/cpu.hpp>
#include <bifolio/dtype.hpp>
#include <bifolio/executor.hpp>
#include <bifolio/kv_layout.hpp>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint.hpp"
#include "model_runner.hpp"

namespace generate {

/// What the user named of the types that attention works in. What is not named: float32 on the CPU; on a GPU bfloat16
/// for the cache, and for queries what the cache has, because the fast kernels take queries and cache of one 16-bit
/// type.
struct attention_types {
  std::optional<bifolio::dtype> query;
  std::optional<bifolio::kv_code> kv;  ///< how keys and values are stored
  std::optional<bifolio::kv_code> k;   ///< keys, if not as `kv` says
  std::optional<bifolio::kv_code> v;
};

/// One device: where the cache and attention live, and all other layers of the model.
struct placed_model {
  std::unique_ptr<bifolio::backend> where;
  std::unique_ptr<model_runner> runner;
  bifolio::kv_code k_code;  ///< of the cache that is to be made
  bifolio::kv_code v_code;
};

/// `device` is "cpu", "cuda", "cuda:N", or "auto": cuda:0 where that can be used, else the CPU. `model` and `workers`
/// (the CPU's threads) are borrowed. Throws `input_error` when the CUDA part is not in this program or cannot run here,
/// and `bifolio::error`.
[[nodiscard]] placed_model place_model(const std::string& device, const checkpoint& model, bifolio::executor& workers,
                                       const attention_types& types = {}, std::optional<bifolio::cpu_isa> isa = {});

}  // namespace generate
