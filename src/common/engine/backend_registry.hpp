// SPDX-License-Identifier: Apache-2.0
#pragma once

/// How a library beside the core (bifolio::cuda) makes its backend known to `make_backend` without the core depending
/// on it.

#include <bifolio/backend.hpp>
#include <bifolio/export.hpp>
#include <memory>

namespace bifolio::detail {

using backend_factory = std::unique_ptr<backend> (*)(device where, const backend_options& options);

/// `make_backend` calls `factory` for devices of `type` from now on; null takes it back. Thread-safe.
BIFOLIO_API void register_backend_factory(device_type type, backend_factory factory) noexcept;

}  // namespace bifolio::detail
