// SPDX-License-Identifier: Apache-2.0
#include <bifolio/cuda.hpp>

#include "common/engine/backend_registry.hpp"
#include "cuda/host/backend.hpp"

namespace bifolio::cuda {

void register_backend() noexcept {
  detail::register_backend_factory(device_type::cuda,
                                   [](device where, const backend_options&) -> std::unique_ptr<backend> {
                                     return std::make_unique<cuda_backend>(real_runtime(), where.index);
                                   });
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
  at_start() noexcept { register_backend(); }
};
}  // namespace

}  // namespace bifolio::cuda

// The link options of bifolio::cuda ask for this symbol, so that the linker takes this file out of a static library and
// its constructor runs.
extern "C" __attribute__((visibility("default"))) int bifolio_cuda_registration;
int bifolio_cuda_registration = 1;
static const bifolio::cuda::at_start bifolio_cuda_at_start;
