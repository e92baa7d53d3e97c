// SPDX-License-Identifier: Apache-2.0
#include <bifolio/cuda.hpp>
#include <bifolio/error.hpp>

#include "common/engine/backend_registry.hpp"
#include "cuda/host/backend.hpp"

namespace bifolio::inline v0_2::cuda {

void register_backend() {
  // Kernels, memory and threads of the host are the CPU backend's: no field of backend_options means anything here.
  static constexpr detail::backend_registration registration{
      detail::cuda_row,
      [](device where, const backend_options&) -> std::unique_ptr<backend> {
        return std::make_unique<cuda_backend>(real_runtime(), where.index);
      },
      {}};
  detail::register_backend(registration);
}

std::int32_t num_devices() noexcept {
  int count = 0;
  if (real_runtime().get_device_count(&count) != cudaSuccess) {
    (void)real_runtime().get_last_error();
    return 0;
  }
  return count;
}

namespace {
struct at_start {
  at_start() noexcept {
    try {
      register_backend();
    } catch (const error&) {
      // Another backend was registered for cuda before: it stays, and a call of register_backend says so.
    }
  }
};
}  // namespace

}  // namespace bifolio::inline v0_2::cuda

// The link options of bifolio::cuda name this symbol, so that the linker takes this file out of a static library and
// its constructor runs.
extern "C" __attribute__((visibility("default"))) int bifolio_cuda_registration;
int bifolio_cuda_registration = 1;
static const bifolio::cuda::at_start bifolio_cuda_at_start;
