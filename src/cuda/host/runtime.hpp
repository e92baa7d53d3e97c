// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Every call into the CUDA runtime goes through one table of function pointers, so that tests can count calls, make
/// the N-th one fail, and drive planning and dispatch on a machine without a GPU.

#include <cuda_runtime_api.h>

#include <bifolio/device.hpp>
#include <bifolio/error.hpp>
#include <cstddef>
#include <cstdint>

namespace bifolio::inline v0_2::cuda {

[[nodiscard]] inline cudaStream_t handle_of(stream_ref stream) noexcept {
  return static_cast<cudaStream_t>(stream.handle);
}

struct runtime_api {
  cudaError_t (*get_device_count)(int* count);
  cudaError_t (*get_device)(int* index);
  cudaError_t (*set_device)(int index);
  cudaError_t (*get_device_properties)(cudaDeviceProp* properties, int index);
  cudaError_t (*get_last_error)();

  cudaError_t (*malloc_device)(void** pointer, std::size_t num_bytes);
  cudaError_t (*free_device)(void* pointer);
  cudaError_t (*malloc_async)(void** pointer, std::size_t num_bytes, cudaStream_t stream);
  cudaError_t (*free_async)(void* pointer, cudaStream_t stream);
  cudaError_t (*malloc_host)(void** pointer, std::size_t num_bytes);
  cudaError_t (*free_host)(void* pointer);
  cudaError_t (*pointer_attributes)(cudaPointerAttributes* attributes, const void* pointer);

  cudaError_t (*memcpy_async)(void* dst, const void* src, std::size_t num_bytes, cudaMemcpyKind kind,
                              cudaStream_t stream);
  cudaError_t (*memcpy_2d_async)(void* dst, std::size_t dst_pitch, const void* src, std::size_t src_pitch,
                                 std::size_t width, std::size_t height, cudaMemcpyKind kind, cudaStream_t stream);
  /// Independent copies, pinned or of the device, in one call: one after another where the toolkit or the driver has no
  /// such call, the stream captures, or is the default one.
  cudaError_t (*memcpy_batch_async)(void** dsts, void** srcs, std::size_t* sizes, std::size_t count,
                                    cudaStream_t stream);
  cudaError_t (*memset_async)(void* dst, int value, std::size_t num_bytes, cudaStream_t stream);

  cudaError_t (*stream_synchronize)(cudaStream_t stream);
  cudaError_t (*stream_is_capturing)(cudaStream_t stream, cudaStreamCaptureStatus* status);
  cudaError_t (*event_create)(cudaEvent_t* event, unsigned int flags);
  cudaError_t (*event_destroy)(cudaEvent_t event);
  cudaError_t (*event_record)(cudaEvent_t event, cudaStream_t stream);
  cudaError_t (*event_query)(cudaEvent_t event);
  cudaError_t (*event_synchronize)(cudaEvent_t event);
  cudaError_t (*stream_wait_event)(cudaStream_t stream, cudaEvent_t event);

  cudaError_t (*func_set_attribute)(const void* function, cudaFuncAttribute attribute, int value);
  /// The driver's own function of that name, at least of `version` (12000 = 12.0).
  cudaError_t (*get_driver_entry_point)(const char* name, void** function, unsigned int version);
  cudaError_t (*launch_kernel)(const cudaLaunchConfig_t* config, const void* function, void** args);
};

/// The CUDA runtime itself.
[[nodiscard]] const runtime_api& real_runtime() noexcept;

/// What a caller of bifolio is told about a CUDA error.
[[nodiscard]] errc to_errc(cudaError_t status) noexcept;

/// Whether the error leaves the context unusable until the process ends.
[[nodiscard]] bool is_sticky(cudaError_t status) noexcept;

/// Makes `index` the calling thread's current device and restores the one before it. Costs one query where they agree.
class device_guard {
 public:
  device_guard(const runtime_api& api, int index) noexcept;
  ~device_guard();
  device_guard(const device_guard&) = delete;
  device_guard& operator=(const device_guard&) = delete;
  [[nodiscard]] cudaError_t status() const noexcept { return status_; }

 private:
  const runtime_api& api_;
  int previous_ = -1;
  bool changed_ = false;
  cudaError_t status_ = cudaSuccess;
};

/// One kernel launch. `args` are copied by the call. `dependent`: the kernel may start before the one ahead of it in
/// the stream has ended (programmatic dependent launch) and waits for it itself (griddepcontrol.wait).
template <class... Params, class... Args>
[[nodiscard]] cudaError_t launch(const runtime_api& api, void (*kernel)(Params...), dim3 grid, dim3 block,
                                 std::size_t shared_bytes, cudaStream_t stream, bool dependent,
                                 const Args&... args) noexcept {
  static_assert(sizeof...(Params) == sizeof...(Args));
  return [&](Params... copies) noexcept {
    void* pointers[sizeof...(Params) + 1] = {const_cast<void*>(static_cast<const void*>(&copies))..., nullptr};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = dependent ? 1 : 0;
    return api.launch_kernel(&config, reinterpret_cast<const void*>(kernel), pointers);
  }(static_cast<Params>(args)...);
}

}  // namespace bifolio::inline v0_2::cuda
