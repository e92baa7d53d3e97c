// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The device types that this process knows, one row each: `parse_device`, `to_string` and the refusals of
/// `make_backend` read their names here. The rows of cpu and cuda are there from the start, so that "cuda" is a device
/// that is not linked rather than an unknown name. Registering a backend of another type adds a row
/// (engine/backend_registry.hpp).

#include <bifolio/device.hpp>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace bifolio::inline v0_2::detail {

struct device_row {
  device_type type{};
  std::string_view name;     ///< in static storage; lower-case letters, digits and _
  bool numbered = false;     ///< several devices, as in "cuda:1"; otherwise the index is 0 and not part of the name
  std::string_view library;  ///< what a program links to have it; empty when it is registered by the program itself
  friend bool operator==(const device_row&, const device_row&) = default;
};

inline constexpr device_row cpu_row{device_type::cpu, "cpu", false, "bifolio::core"};
inline constexpr device_row cuda_row{device_type::cuda, "cuda", true, "bifolio::cuda"};

inline constexpr std::size_t max_device_types = 16;

/// All rows, in the order of their registration. A row never moves nor changes. Thread-safe.
[[nodiscard]] std::span<const device_row> device_rows() noexcept;

/// Null when there is none.
[[nodiscard]] const device_row* find_device_row(device_type type) noexcept;
[[nodiscard]] const device_row* find_device_row(std::string_view name) noexcept;

/// Throws `error`: failed_precondition when there are `max_device_types` rows. The caller has checked that neither the
/// type nor the name is taken, and adds one row at a time; readers may run at once.
const device_row& add_device_row(const device_row& row);

/// Appends what `parse_device` reads, as in "cpu, cuda, cuda:N with N >= 0".
void append_device_names(std::string& sentence);

}  // namespace bifolio::inline v0_2::detail
