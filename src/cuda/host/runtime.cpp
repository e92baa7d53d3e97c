// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

cudaError_t copy_batch(void** dsts, void** srcs, std::size_t* sizes, std::size_t count, cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (stream != nullptr && cudaStreamIsCapturing(stream, &capture) == cudaSuccess &&
      capture == cudaStreamCaptureStatusNone) {
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;
#if CUDART_VERSION >= 13000
    const cudaError_t status = cudaMemcpyBatchAsync(dsts, srcs, sizes, count, &attributes, &first, 1, stream);
#else
    std::size_t failed = 0;
    const cudaError_t status = cudaMemcpyBatchAsync(dsts, srcs, sizes, count, &attributes, &first, 1, &failed, stream);
#endif
    if (status != cudaErrorCallRequiresNewerDriver && status != cudaErrorNotSupported) return status;
    (void)cudaGetLastError();
  }
#endif
  for (std::size_t i = 0; i < count; ++i) {
    const cudaError_t status = cudaMemcpyAsync(dsts[i], srcs[i], sizes[i], cudaMemcpyDefault, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

constexpr runtime_api cuda_runtime = {
    .get_device_count = cudaGetDeviceCount,
    .get_device = cudaGetDevice,
    .set_device = cudaSetDevice,
    .get_device_properties = [](cudaDeviceProp* properties,
                                int index) { return cudaGetDeviceProperties(properties, index); },
    .get_last_error = cudaGetLastError,
    .malloc_device = [](void** pointer, std::size_t num_bytes) { return cudaMalloc(pointer, num_bytes); },
    .free_device = cudaFree,
    .malloc_async = [](void** pointer, std::size_t num_bytes,
                       cudaStream_t stream) { return cudaMallocAsync(pointer, num_bytes, stream); },
    .free_async = cudaFreeAsync,
    .malloc_host = [](void** pointer,
                      std::size_t num_bytes) { return cudaHostAlloc(pointer, num_bytes, cudaHostAllocPortable); },
    .free_host = cudaFreeHost,
    .pointer_attributes = cudaPointerGetAttributes,
    .memcpy_async = cudaMemcpyAsync,
    .memcpy_2d_async = cudaMemcpy2DAsync,
    .memcpy_batch_async = copy_batch,
    .memset_async = cudaMemsetAsync,
    .stream_synchronize = cudaStreamSynchronize,
    .stream_is_capturing = cudaStreamIsCapturing,
    .event_create = [](cudaEvent_t* event, unsigned int flags) { return cudaEventCreateWithFlags(event, flags); },
    .event_destroy = cudaEventDestroy,
    .event_record = cudaEventRecord,
    .event_query = cudaEventQuery,
    .event_synchronize = cudaEventSynchronize,
    .stream_wait_event = [](cudaStream_t stream, cudaEvent_t event) { return cudaStreamWaitEvent(stream, event, 0); },
    .func_set_attribute = cudaFuncSetAttribute,
    .get_driver_entry_point =
        [](const char* name, void** function, unsigned int version) {
          cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
          const cudaError_t status =
              cudaGetDriverEntryPointByVersion(name, function, version, cudaEnableDefault, &result);
          if (status != cudaSuccess) return status;
          return result == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorNotSupported;
        },
    .launch_kernel = cudaLaunchKernelExC,
};

}  // namespace

const runtime_api& real_runtime() noexcept { return cuda_runtime; }

errc to_errc(cudaError_t status) noexcept {
  if (is_sticky(status)) return errc::device_lost;
  switch (status) {
    case cudaSuccess:
      return errc::ok;
    case cudaErrorMemoryAllocation:
      return errc::out_of_memory;
    case cudaErrorInvalidValue:
    case cudaErrorInvalidPitchValue:
    case cudaErrorInvalidDevicePointer:
    case cudaErrorInvalidHostPointer:
    case cudaErrorInvalidMemcpyDirection:
    case cudaErrorInvalidDevice:
    case cudaErrorInvalidResourceHandle:
      return errc::invalid_argument;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorNotSupported:
      return errc::unsupported;
    case cudaErrorInitializationError:
    case cudaErrorCudartUnloading:
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureMerge:
    case cudaErrorStreamCaptureUnmatched:
    case cudaErrorStreamCaptureUnjoined:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorStreamCaptureWrongThread:
    case cudaErrorCapturedEvent:
      return errc::failed_precondition;
    default:
      return errc::internal;
  }
}

bool is_sticky(cudaError_t status) noexcept {
  switch (status) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorExternalDevice:
    case cudaErrorMpsClientTerminated:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

device_guard::device_guard(const runtime_api& api, int index) noexcept : api_(api) {
  status_ = api_.get_device(&previous_);
  if (status_ != cudaSuccess || previous_ == index) return;
  status_ = api_.set_device(index);
  changed_ = status_ == cudaSuccess;
}

device_guard::~device_guard() {
  if (changed_ && api_.set_device(previous_) != cudaSuccess) (void)api_.get_last_error();
}

}  // namespace bifolio::inline v0_2::cuda
