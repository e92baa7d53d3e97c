// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Names a device and a stream; opens nothing.

#include <bifolio/export.hpp>
#include <cstdint>
#include <string>
#include <string_view>

namespace bifolio::inline v0_2 {

enum class device_type : std::uint8_t { cpu, cuda };

struct device {
  device_type type = device_type::cpu;
  std::int32_t index = 0;  ///< CUDA ordinal; 0 for the CPU
  friend constexpr bool operator==(device, device) = default;
};

/// "cpu", "cuda:N", or the name under which a backend of another type was registered. A type that is not known is
/// written as its number.
[[nodiscard]] BIFOLIO_API std::string to_string(device where);

/// Reads the same names; "cuda" is "cuda:0". Whether the backend is linked does not matter. Throws `error`
/// (invalid_argument) with the names that are known.
[[nodiscard]] BIFOLIO_API device parse_device(std::string_view text);

/// A borrowed execution queue: `cudaStream_t` on CUDA, ignored on the CPU, where calls return when they are done.
struct stream_ref {
  void* handle = nullptr;
};

}  // namespace bifolio::inline v0_2
