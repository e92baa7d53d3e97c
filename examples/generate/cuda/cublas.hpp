// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The few functions of cuBLAS that the model needs, found when a GPU is used for the first time: linked the usual way,
/// the 600 MB of its libraries would be mapped by every run on a CPU, and the program would not start where they are
/// absent.

#include <cublas_v2.h>

#include <string>

namespace generate {

struct cublas_functions {
  decltype(&cublasCreate_v2) create = nullptr;
  decltype(&cublasDestroy_v2) destroy = nullptr;
  decltype(&cublasSetStream_v2) set_stream = nullptr;
  decltype(&cublasSetMathMode) set_math_mode = nullptr;
  decltype(&cublasSgemm_v2) sgemm = nullptr;
  decltype(&cublasGetStatusString) status_string = nullptr;
};

/// cuBLAS as this process loaded it, on the first call; `problem` says why it could not, and is empty otherwise.
struct cublas_library {
  cublas_functions functions;
  std::string problem;
};

[[nodiscard]] const cublas_library& load_cublas();

}  // namespace generate
