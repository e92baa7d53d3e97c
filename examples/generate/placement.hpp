// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Puts a model on the device that the user named.

#include <bifolio/backend.hpp>
#include <bifolio/executor.hpp>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint.hpp"
#include "model_runner.hpp"

namespace generate {

/// One device: where the cache and attention live, and all other layers of the model.
struct placed_model {
  std::unique_ptr<bifolio::backend> where;
  std::unique_ptr<model_runner> runner;
};

/// `device` is "cpu", "cuda", "cuda:N", or "auto": cuda:0 where that can be used, else the CPU. `model` and `lanes`
/// (the CPU's threads) are borrowed. Throws `input_error` when the CUDA part is not in this program or cannot run here,
/// and `bifolio::error`.
[[nodiscard]] placed_model place_model(const std::string& device, const checkpoint& model, bifolio::executor& lanes,
                                       std::optional<bifolio::cpu_isa> isa = {});

}  // namespace generate
