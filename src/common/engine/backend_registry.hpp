// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What `make_backend` opens: one registration per device type. A backend of the core's own library, the CPU's, is
/// registered from the start; a library next to the core (bifolio::cuda) registers itself, and the core does not depend
/// on it. A new backend is a registration and no change here.

#include <bifolio/backend.hpp>
#include <bifolio/export.hpp>
#include <memory>
#include <span>
#include <string_view>

#include "common/base/device_table.hpp"

namespace bifolio::inline v0_2::detail {

using backend_factory = std::unique_ptr<backend> (*)(device where, const backend_options& options);

struct backend_registration {
  device_row device;
  backend_factory factory = nullptr;
  std::span<const std::string_view> options;  ///< the fields of `backend_options` that the backend understands, by name
};

/// `make_backend` calls the factory for devices of that type from now on, and never with options that the backend does
/// not understand. The registration is borrowed for the rest of the process; to register it again does nothing.
/// Thread-safe, and may be called from a static constructor.
/// Throws `error`, and nothing is registered: invalid_argument (a null factory, a name that is empty or has other
/// characters than lower-case letters, digits and _, an option that is no field of `backend_options`), already_exists
/// (another backend has this type or this name), failed_precondition (max_device_types are registered).
BIFOLIO_API void register_backend(const backend_registration& registration);

/// The CPU's, defined in src/cpu/registration.cpp. The registry holds its address from the start: no initialisation
/// order matters, and because the registry needs the symbol, the linker takes that file out of a static library too.
extern const backend_registration cpu_registration;

}  // namespace bifolio::inline v0_2::detail
