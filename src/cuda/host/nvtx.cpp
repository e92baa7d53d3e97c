// SPDX-License-Identifier: Apache-2.0
/// Ranges for NVIDIA's profilers. NVTX is headers alone: without a profiler a range is a call through a null pointer's
/// check.

#include <nvtx3/nvToolsExt.h>

#include <bifolio/cuda.hpp>
#include <memory>

#include "common/base/translate.hpp"
#include "common/engine/observed_backend.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

/// A range of the calling thread around each call, in a domain of our own, with the size as payload.
class range_observer {
 public:
  range_observer() : domain_(nvtxDomainCreateA("bifolio")) {}

  [[nodiscard]] int begin(const char* name, std::int64_t size) const noexcept {
    nvtxEventAttributes_t attributes = {};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = name;
    attributes.payloadType = NVTX_PAYLOAD_TYPE_INT64;
    attributes.payload.llValue = size;
    return nvtxDomainRangePushEx(domain_, &attributes);
  }
  void end(int, const char*, std::int64_t, const void*) const noexcept { (void)nvtxDomainRangePop(domain_); }

 private:
  nvtxDomainHandle_t domain_;  // kept by the process: profilers read its name at the end
};

}  // namespace

std::unique_ptr<backend> nvtx_backend(backend& inner) {
  return detail::translate_bad_alloc("nvtx_backend", [&] {
    return std::make_unique<detail::observed_backend<range_observer>>(inner, ", NVTX ranges");
  });
}

}  // namespace bifolio::inline v0_2::cuda
