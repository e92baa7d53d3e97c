// SPDX-License-Identifier: Apache-2.0
#include "cuda/fake_runtime.hpp"

#include <cuda.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace bifolio::test {

fake_runtime* fake_runtime::active = nullptr;

namespace {

fake_runtime& now() { return *fake_runtime::active; }

cudaError_t allocate(const char* name, void** pointer, std::size_t num_bytes, std::int64_t& live) {
  if (const cudaError_t status = now().enter(name); status != cudaSuccess) return status;
  *pointer = std::aligned_alloc(256, (num_bytes + 255) / 256 * 256);
  if (*pointer == nullptr) return cudaErrorMemoryAllocation;
  // What was never written must not look like zeros.
  std::memset(*pointer, 0xa5, num_bytes);
  ++live;
  return cudaSuccess;
}

cudaError_t release(const char* name, void* pointer, std::int64_t& live) {
  (void)now().enter(name, false);
  if (pointer != nullptr) --live;
  std::free(pointer);
  return cudaSuccess;
}

/// A cuTensorMapEncodeTiled.
CUresult encode_nothing(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                        const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                        CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}

/// A cuMemGetInfo.
CUresult memory_info(std::size_t* free_bytes, std::size_t* total_bytes) {
  *free_bytes = now().free_bytes;
  *total_bytes = now().total_bytes;
  return CUDA_SUCCESS;
}

const cuda::runtime_api table = {
    .get_device_count =
        [](int* count) {
          const cudaError_t status = now().enter("get_device_count", false);
          *count = status == cudaSuccess ? now().device_count : 0;
          return status;
        },
    .get_device =
        [](int* index) {
          const cudaError_t status = now().enter("get_device", false);
          *index = now().current_device;
          return status;
        },
    .set_device =
        [](int index) {
          const cudaError_t status = now().enter("set_device", false);
          if (status == cudaSuccess) now().current_device = index;
          return status;
        },
    .get_device_properties =
        [](cudaDeviceProp* properties, int) {
          const cudaError_t status = now().enter("get_device_properties");
          std::snprintf(properties->name, sizeof(properties->name), "pretended device");
          properties->major = now().major;
          properties->minor = now().minor;
          properties->multiProcessorCount = now().num_sms;
          properties->sharedMemPerBlockOptin = 227 * 1024;
          properties->l2CacheSize = 50 << 20;
          return status;
        },
    .get_last_error =
        [] {
          (void)now().enter("get_last_error", false);
          const cudaError_t status = now().last_error;
          now().last_error = cudaSuccess;
          return status;
        },
    .malloc_device =
        [](void** pointer, std::size_t num_bytes) {
          return allocate("malloc_device", pointer, num_bytes, now().live_device_blocks);
        },
    .free_device = [](void* pointer) { return release("free_device", pointer, now().live_device_blocks); },
    .malloc_async = [](void** pointer, std::size_t num_bytes,
                       cudaStream_t) { return allocate("malloc_async", pointer, num_bytes, now().live_device_blocks); },
    .free_async = [](void* pointer, cudaStream_t) { return release("free_async", pointer, now().live_device_blocks); },
    .malloc_host =
        [](void** pointer, std::size_t num_bytes) {
          return allocate("malloc_host", pointer, num_bytes, now().live_host_blocks);
        },
    .free_host = [](void* pointer) { return release("free_host", pointer, now().live_host_blocks); },
    .pointer_attributes =
        [](cudaPointerAttributes* attributes, const void* pointer) {
          attributes->type = cudaMemoryTypeDevice;
          attributes->device = 0;
          attributes->devicePointer = const_cast<void*>(pointer);
          return now().enter("pointer_attributes");
        },
    .memcpy_async =
        [](void* dst, const void* src, std::size_t num_bytes, cudaMemcpyKind, cudaStream_t) {
          const cudaError_t status = now().enter("memcpy_async");
          if (status == cudaSuccess) std::memcpy(dst, src, num_bytes);
          return status;
        },
    .memcpy_2d_async =
        [](void* dst, std::size_t dst_pitch, const void* src, std::size_t src_pitch, std::size_t width,
           std::size_t height, cudaMemcpyKind, cudaStream_t) {
          const cudaError_t status = now().enter("memcpy_2d_async");
          for (std::size_t row = 0; row < height && status == cudaSuccess; ++row) {
            std::memcpy(static_cast<char*>(dst) + row * dst_pitch, static_cast<const char*>(src) + row * src_pitch,
                        width);
          }
          return status;
        },
    .memcpy_batch_async =
        [](void** dsts, void** srcs, std::size_t* sizes, std::size_t count, cudaStream_t) {
          const cudaError_t status = now().enter("memcpy_batch_async");
          for (std::size_t i = 0; i < count && status == cudaSuccess; ++i) std::memcpy(dsts[i], srcs[i], sizes[i]);
          return status;
        },
    .memset_async =
        [](void* dst, int value, std::size_t num_bytes, cudaStream_t) {
          const cudaError_t status = now().enter("memset_async");
          if (status == cudaSuccess) std::memset(dst, value, num_bytes);
          return status;
        },
    .stream_synchronize =
        [](cudaStream_t) {
          const cudaError_t status = now().enter("stream_synchronize");
          if (status == cudaSuccess && now().capture != cudaStreamCaptureStatusNone) {
            return now().refuse(cudaErrorStreamCaptureUnsupported);
          }
          if (status == cudaSuccess) now().events_not_ready.clear();
          return status;
        },
    .stream_is_capturing =
        [](cudaStream_t, cudaStreamCaptureStatus* status) {
          *status = now().capture;
          return now().enter("stream_is_capturing");
        },
    .event_create =
        [](cudaEvent_t* event, unsigned int flags) {
          const cudaError_t status = now().enter("event_create");
          if (status != cudaSuccess) return status;
          ++now().live_events;
          now().event_flags = flags;
          *event = reinterpret_cast<cudaEvent_t>(++now().last_event);
          return status;
        },
    .event_destroy =
        [](cudaEvent_t event) {
          (void)now().enter("event_destroy", false);
          now().events_not_ready.erase(event);
          now().events_captured.erase(event);
          --now().live_events;
          return cudaSuccess;
        },
    .event_record =
        [](cudaEvent_t event, cudaStream_t) {
          const cudaError_t status = now().enter("event_record");
          if (status != cudaSuccess) return status;
          now().events_not_ready.erase(event);
          now().events_captured.erase(event);
          if (now().streams_stopped) now().events_not_ready.insert(event);
          if (now().capture != cudaStreamCaptureStatusNone) now().events_captured.insert(event);
          return status;
        },
    .event_query =
        [](cudaEvent_t event) {
          const cudaError_t status = now().enter("event_query");
          if (status != cudaSuccess) return status;
          if (now().events_captured.contains(event)) return now().refuse(cudaErrorCapturedEvent);
          return now().events_not_ready.contains(event) ? now().refuse(cudaErrorNotReady) : cudaSuccess;
        },
    .event_synchronize =
        [](cudaEvent_t event) {
          const cudaError_t status = now().enter("event_synchronize");
          if (status == cudaSuccess) now().events_not_ready.erase(event);
          return status;
        },
    .stream_wait_event = [](cudaStream_t, cudaEvent_t) { return now().enter("stream_wait_event"); },
    .func_set_attribute = [](const void*, cudaFuncAttribute, int) { return now().enter("func_set_attribute"); },
    .get_driver_entry_point =
        [](const char* name, void** function, unsigned int) {
          const bool is_encoder = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
          *function = nullptr;
          if (is_encoder && now().encodes_tensor_maps) *function = reinterpret_cast<void*>(&encode_nothing);
          if (std::strcmp(name, "cuMemGetInfo") == 0) *function = reinterpret_cast<void*>(&memory_info);
          return now().enter("get_driver_entry_point");
        },
    .launch_kernel =
        [](const cudaLaunchConfig_t* config, const void* function, void** args) {
          const cudaError_t status = now().enter("launch_kernel");
          if (status == cudaSuccess) {
            if (now().on_launch) now().on_launch(args);
            now().launches.push_back(
                {function, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream});
          }
          return status;
        },
};

}  // namespace

namespace {
std::vector<fake_runtime*> alive;
}

fake_runtime::fake_runtime() {
  alive.push_back(this);
  active = this;
}
fake_runtime::~fake_runtime() {
  alive.erase(std::find(alive.begin(), alive.end(), this));
  active = alive.empty() ? nullptr : alive.back();
}

const cuda::runtime_api& fake_runtime::api() const noexcept { return table; }

std::int64_t fake_runtime::count(const std::string& name) const {
  const auto found = counts_.find(name);
  return found == counts_.end() ? 0 : found->second;
}

cudaError_t fake_runtime::enter(const char* name, bool work) {
  ++counts_[name];
  const bool nth = work && countdown_ > 0 && --countdown_ == 0;
  if (!nth && always_name_ != name) return cudaSuccess;
  if (nth && for_good_) countdown_ = 1;
  ++num_failed;
  return refuse(failure_);
}

cudaError_t fake_runtime::refuse(cudaError_t status) {
  last_error = status;
  return status;
}

}  // namespace bifolio::test
