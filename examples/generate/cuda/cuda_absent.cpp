// SPDX-License-Identifier: Apache-2.0
// In the place of cuda_llama.cpp in a build without a GPU part.
#include <bifolio/error.hpp>

#include "cuda/cuda_llama.hpp"

namespace generate {

std::string find_cuda_problem() {
  return "this program was built without its CUDA part, which needs bifolio's CUDA backend and cuBLAS";
}

std::unique_ptr<model_runner> make_cuda_llama(const checkpoint&, bifolio::backend&, bifolio::dtype) {
  throw bifolio::error(bifolio::errc::unsupported, find_cuda_problem());
}

}  // namespace generate
