// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The model on a GPU, next to bifolio's CUDA backend: linear layers by cuBLAS, the rest by the kernels of
/// llama_kernels.hpp, everything on one stream. In a build without nvcc or cuBLAS, cuda_absent.cpp is in its place.

#include <bifolio/backend.hpp>
#include <memory>
#include <string>

#include "checkpoint.hpp"
#include "model_runner.hpp"

namespace generate {

/// Why no model can be put on a GPU by this program on this machine, as the end of a sentence; empty when one can.
[[nodiscard]] std::string find_cuda_problem();

/// Copies the weights to the device, as float32. `where` is a CUDA backend, borrowed. `query_type`: see `model_runner`.
/// Needs: no `find_cuda_problem`. Throws `bifolio::error` (out_of_memory, device_lost) and std::runtime_error when
/// cuBLAS fails.
[[nodiscard]] std::unique_ptr<model_runner> make_cuda_llama(const checkpoint& model, bifolio::backend& where,
                                                            bifolio::dtype query_type);

}  // namespace generate
