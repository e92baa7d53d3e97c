// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A CUDA runtime without CUDA: device memory is host memory, copies are done at once, kernels are counted and not run.
/// It keeps a current device and a last-error slot as the real one does, counts calls, and makes the N-th fail. Events
/// that are recorded while `streams_stopped` are not ready until somebody waits for them.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cuda/host/runtime.hpp"

namespace bifolio::test {

struct fake_launch {
  const void* function = nullptr;
  dim3 grid{1, 1, 1};
  dim3 block{1, 1, 1};
  std::size_t shared_bytes = 0;
  cudaStream_t stream = nullptr;
};

/// The latest that is alive takes all calls: the table's functions are plain pointers and find it in `active`.
class fake_runtime {
 public:
  fake_runtime();
  ~fake_runtime();
  fake_runtime(const fake_runtime&) = delete;
  fake_runtime& operator=(const fake_runtime&) = delete;

  [[nodiscard]] const cuda::runtime_api& api() const noexcept;

  /// The n-th call from now on (1 = the next) that counts as work fails with `status`, and with `for_good` all such
  /// calls after it; the queries and releases of devices, errors and memory do not count.
  /// Returns how many calls were still missing to the failure that this replaces; 0 when it has happened.
  std::int64_t fail_at(std::int64_t nth, cudaError_t status, bool for_good = false) noexcept {
    failure_ = status;
    for_good_ = for_good;
    return std::exchange(countdown_, nth);
  }
  /// Every call of this name fails.
  void fail_always(const std::string& name, cudaError_t status) {
    always_name_ = name;
    failure_ = status;
  }
  [[nodiscard]] std::int64_t count(const std::string& name) const;
  void forget_counts() {
    counts_.clear();
    launches.clear();
  }

  int device_count = 2;
  int current_device = 0;
  int major = 9;
  int minor = 0;
  int num_sms = 132;
  std::size_t free_bytes = std::size_t{60} << 30;
  std::size_t total_bytes = std::size_t{80} << 30;
  /// The driver has an entry point that encodes tensor maps; it accepts every map and writes none.
  bool encodes_tensor_maps = false;
  cudaError_t last_error = cudaSuccess;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  std::vector<fake_launch> launches;
  /// Is shown the arguments of each kernel, as cudaLaunchKernelExC gets them; their types are the kernel's.
  std::function<void(void** args)> on_launch;
  std::int64_t live_device_blocks = 0;
  std::int64_t live_host_blocks = 0;
  std::int64_t live_events = 0;
  std::int64_t num_failed = 0;   ///< calls that were made to fail
  unsigned int event_flags = 0;  ///< of the last event that was created
  bool streams_stopped = false;
  std::set<cudaEvent_t> events_not_ready;
  std::set<cudaEvent_t> events_captured;  ///< last recorded while `capture` was active
  std::uintptr_t last_event = 0;          ///< events are numbered

  /// Counts a call and says whether it fails; `work`: it may be the n-th.
  cudaError_t enter(const char* name, bool work = true);
  /// Takes the last-error slot, as every status but success does.
  cudaError_t refuse(cudaError_t status);
  static fake_runtime* active;

 private:
  std::map<std::string, std::int64_t> counts_;
  std::int64_t countdown_ = 0;
  bool for_good_ = false;
  cudaError_t failure_ = cudaSuccess;
  std::string always_name_;
};

}  // namespace bifolio::test
