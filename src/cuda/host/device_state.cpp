// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/device_state.hpp"

#include <algorithm>
#include <new>

#include "common/attention/implementations.hpp"
#include "common/base/fork_generation.hpp"
#include "common/base/log.hpp"
#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2::cuda {
std::string describe(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + " (" + cudaGetErrorString(status) + ")";
}

device_state::device_state(const runtime_api& api, std::int32_t index)
    : api_(api),
      index_(index),
      forced_implementation_(detail::implementation_of_environment("cuda")),
      fork_generation_(detail::fork_generation()) {
  int count = 0;
  require(api_.get_device_count(&count), "the device 'cuda' cannot be opened");
  if (index < 0 || index >= count) {
    detail::refuse(errc::unsupported, "the device '", to_string(where()), "' is not there; the driver shows ", count,
                   count == 1 ? " device" : " devices");
  }
  cudaDeviceProp properties = {};
  require(api_.get_device_properties(&properties, index), "the device's properties cannot be read");
  name_ = properties.name;
  numbers_.compute_capability = 10 * properties.major + properties.minor;
  numbers_.num_sms = std::max(properties.multiProcessorCount, 1);
  numbers_.max_shared_bytes_per_block = properties.sharedMemPerBlockOptin;
  numbers_.l2_bytes = static_cast<std::size_t>(std::max(properties.l2CacheSize, 0));
#if BIFOLIO_CUDA_SM90
  numbers_.dependent_launch = properties.major >= 9;
  if (properties.major == 9 && properties.minor == 0) {
    // A driver that is too old for it serves prefill by the other kernels.
    const cudaError_t found = api_.get_driver_entry_point("cuTensorMapEncodeTiled", &numbers_.encode_tensor_map, 12000);
    if (found != cudaSuccess) {
      numbers_.encode_tensor_map = nullptr;
      (void)report(found);
    }
  }
#endif
  if (properties.major < 8) {
    detail::refuse(errc::unsupported, "the device '", to_string(where()), "' (", name_, ") has compute capability ",
                   properties.major, ".", properties.minor, "; 8.0 or newer is needed");
  }
}

errc device_state::health() const noexcept {
  if (first_cause() != cudaSuccess) return errc::device_lost;
  if (detail::fork_generation() != fork_generation_) return errc::failed_precondition;
  return errc::ok;
}

errc device_state::report(cudaError_t status) const noexcept {
  if (status == cudaSuccess) return errc::ok;
  (void)api_.get_last_error();
  if (status == cudaErrorNotReady) return errc::ok;  // no failure, but it takes the last-error slot like one
  if (is_sticky(status)) {
    cudaError_t none = cudaSuccess;
    if (first_cause_.compare_exchange_strong(none, status, std::memory_order_relaxed) && detail::is_logging()) {
      try {
        detail::log(log_level::error, "the device '" + to_string(where()) + "' was lost: " + describe(status));
      } catch (const std::bad_alloc&) {  // then nobody is told but by health()
      }
    }
  }
  return to_errc(status);
}

void device_state::require(cudaError_t status, const char* what) const {
  const errc code = report(status);
  if (code == errc::ok) return;
  detail::refuse(code, what, ": ", [&](std::string& sentence) { sentence += describe(status); });
}

void device_state::require_health() const {
  switch (health()) {
    case errc::device_lost:
      detail::refuse(errc::device_lost, "the device '", to_string(where()),
                     "' was lost: ", [&](std::string& sentence) { sentence += describe(first_cause()); });
    case errc::failed_precondition:
      detail::refuse(errc::failed_precondition, "this process was forked after the device '", to_string(where()),
                     "' was opened; CUDA cannot be used in the child");
    default:
      return;
  }
}

}  // namespace bifolio::inline v0_2::cuda
