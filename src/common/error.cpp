// SPDX-License-Identifier: Apache-2.0
#include <bifolio/error.hpp>

namespace bifolio {

error::error(errc code, const std::string& message) : std::runtime_error(message), code_(code) {}
error::~error() = default;

std::string_view to_string(errc code) noexcept {
  switch (code) {
    case errc::ok:
      return "ok";
    case errc::invalid_argument:
      return "invalid_argument";
    case errc::out_of_range:
      return "out_of_range";
    case errc::not_found:
      return "not_found";
    case errc::already_exists:
      return "already_exists";
    case errc::failed_precondition:
      return "failed_precondition";
    case errc::out_of_blocks:
      return "out_of_blocks";
    case errc::out_of_memory:
      return "out_of_memory";
    case errc::unsupported:
      return "unsupported";
    case errc::io_error:
      return "io_error";
    case errc::device_lost:
      return "device_lost";
    case errc::cancelled:
      return "cancelled";
    case errc::internal:
      return "internal";
  }
  return "unknown";
}

std::string_view to_string(alloc_status status) noexcept {
  switch (status) {
    case alloc_status::ok:
      return "ok";
    case alloc_status::later:
      return "later";
    case alloc_status::never:
      return "never";
  }
  return "unknown";
}

}  // namespace bifolio
