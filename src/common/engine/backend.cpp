// SPDX-License-Identifier: Apache-2.0
#include "cpu/backend.hpp"

#include <atomic>
#include <bifolio/backend.hpp>
#include <bifolio/error.hpp>

#include "common/base/refuse.hpp"
#include "common/engine/backend_registry.hpp"

namespace bifolio {
namespace {

// Written by register_backend_factory (release), read by make_backend (acquire). Constant-initialised, so that a
// library may register from a static constructor.
std::atomic<detail::backend_factory> cuda_factory{nullptr};

}  // namespace

backend::~backend() = default;

std::vector<std::string> backend::attention_kernels() const { return {}; }

std::vector<std::string> backend::describe(const attention_plan&, const attention_params&) const { return {}; }

std::vector<std::string> backend::explain(const attention_plan&) const { return {}; }

void detail::register_backend_factory(device_type type, backend_factory factory) noexcept {
  if (type == device_type::cuda) cuda_factory.store(factory, std::memory_order_release);
}

std::unique_ptr<backend> make_backend(device where, const backend_options& options) {
  switch (where.type) {
    case device_type::cpu:
      if (where.index != 0) {
        detail::refuse(errc::invalid_argument, "the device index of the CPU is ", where.index, "; it must be 0");
      }
      return std::make_unique<cpu::cpu_backend>(options);
    case device_type::cuda:
      if (const detail::backend_factory factory = cuda_factory.load(std::memory_order_acquire)) {
        return factory(where, options);
      }
      detail::refuse(errc::unsupported, "the device '", to_string(where),
                     "' needs the library bifolio::cuda, which this program was not linked with");
  }
  detail::refuse(errc::invalid_argument, "the device type ", static_cast<int>(where.type),
                 " is not one of cpu (0), cuda (1)");
}

}  // namespace bifolio
