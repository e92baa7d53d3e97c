// SPDX-License-Identifier: Apache-2.0
#include "cuda/cublas.hpp"

#include <dlfcn.h>

namespace generate {
namespace {

cublas_library load() {
  cublas_library library;
  const std::string name = "libcublas.so." + std::to_string(CUBLAS_VER_MAJOR);  // the ABI that the header declares
  void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);  // never closed: it lives with the process
  if (handle == nullptr) {
    library.problem = "cuBLAS cannot be loaded: " + std::string(dlerror());
    return library;
  }
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, symbol));
    if (function == nullptr) library.problem = name + " has no " + symbol;
  };
  find(library.functions.create, "cublasCreate_v2");
  find(library.functions.destroy, "cublasDestroy_v2");
  find(library.functions.set_stream, "cublasSetStream_v2");
  find(library.functions.set_math_mode, "cublasSetMathMode");
  find(library.functions.sgemm, "cublasSgemm_v2");
  find(library.functions.status_string, "cublasGetStatusString");
  return library;
}

}  // namespace

const cublas_library& load_cublas() {
  static const cublas_library library = load();
  return library;
}

}  // namespace generate
