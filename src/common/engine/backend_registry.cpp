// SPDX-License-Identifier: Apache-2.0
#include "common/engine/backend_registry.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bifolio/error.hpp>
#include <cstddef>
#include <mutex>
#include <string>

#include "common/base/log.hpp"
#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"

namespace bifolio::inline v0_2 {
namespace {

using detail::backend_registration;
using detail::device_row;

// Entry i belongs to row i of the device table; null: known by name, not linked. Written by register_backend (release),
// read by make_backend (acquire). Constant-initialised, as static constructors register.
constinit std::array<std::atomic<const backend_registration*>, detail::max_device_types> registered{
    &detail::cpu_registration};
constinit std::mutex registering;  // held while a registration is checked and entered

struct option_field {
  std::string_view name;
  bool is_set = false;
};

/// Every field of backend_options. A new field does not compile here until it has a line.
std::array<option_field, 5> fields_of(const backend_options& options) noexcept {
  const auto& [num_threads, executor_choice, own_executor, isa, host_memory] = options;
  return {{{"num_threads", num_threads != 0},
           {"executor_choice", executor_choice.has_value()},
           {"own_executor", own_executor != nullptr},
           {"isa", isa.has_value()},
           {"host_memory", host_memory != nullptr}}};
}

bool contains(std::span<const std::string_view> names, std::string_view name) noexcept {
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::atomic<const backend_registration*>& entry_of(const device_row& row) noexcept {
  return registered[static_cast<std::size_t>(&row - detail::device_rows().data())];
}

/// As in "cpu (0), cuda (1)".
void append_types(std::string& sentence) {
  const char* separator = "";
  for (const device_row& row : detail::device_rows()) {
    sentence.append(separator).append(row.name);
    sentence.append(" (").append(std::to_string(static_cast<int>(row.type))).append(")");
    separator = ", ";
  }
}

void append_options(std::string& sentence, std::span<const std::string_view> names) {
  if (names.empty()) sentence.append("none");
  const char* separator = "";
  for (const std::string_view name : names) {
    sentence.append(separator).append(name);
    separator = ", ";
  }
}

void require_sound(const backend_registration& registration) {
  const auto [type, name, numbered, library] = registration.device;
  if (name.empty() || name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") != std::string_view::npos) {
    detail::refuse(errc::invalid_argument, "the device name '", name,
                   "' is empty or has other characters than lower-case letters, digits and _");
  }
  if (registration.factory == nullptr) {
    detail::refuse(errc::invalid_argument, "the factory of the device type ", name, " (", static_cast<int>(type),
                   ") is null; known device types are ", append_types);
  }
  const auto fields = fields_of({});
  for (const std::string_view option : registration.options) {
    if (std::any_of(fields.begin(), fields.end(), [&](const option_field& field) { return field.name == option; })) {
      continue;
    }
    detail::refuse(errc::invalid_argument, "the backend of ", name, " understands the option '", option,
                   "', which is no field of backend_options");
  }
}

void require_understood(const backend_registration& registration, device where, const backend_options& options) {
  for (const option_field& field : fields_of(options)) {
    if (!field.is_set || contains(registration.options, field.name)) continue;
    detail::refuse(
        errc::invalid_argument, "the device '", [&](std::string& sentence) { sentence += to_string(where); },
        "' does not understand the option ", field.name, "; it understands ",
        [&](std::string& sentence) { append_options(sentence, registration.options); });
  }
}

}  // namespace

void detail::register_backend(const backend_registration& registration) {
  require_sound(registration);
  const std::scoped_lock lock(registering);
  const device_row* row = find_device_row(registration.device.type);
  if (row == nullptr) row = find_device_row(registration.device.name);
  if (row != nullptr && *row != registration.device) {
    refuse(errc::already_exists, "the device type ", registration.device.name, " (",
           static_cast<int>(registration.device.type), ") has the number or the name of another; known are ",
           append_types);
  }
  if (row == nullptr) row = &add_device_row(registration.device);
  std::atomic<const backend_registration*>& entry = entry_of(*row);
  const backend_registration* const holder = entry.load(std::memory_order_relaxed);
  if (holder != nullptr && holder != &registration) {
    refuse(errc::already_exists, "a backend of the device type ", row->name, " (", static_cast<int>(row->type),
           ") is registered already; known are ", append_types);
  }
  entry.store(&registration, std::memory_order_release);
}

std::unique_ptr<backend> make_backend(device where, const backend_options& options) {
  const device_row* const row = detail::find_device_row(where.type);
  if (row == nullptr) {
    detail::refuse(errc::invalid_argument, "the device type ", static_cast<int>(where.type), " is not one of ",
                   append_types);
  }
  if (!row->numbered && where.index != 0) {
    detail::refuse(errc::invalid_argument, "the index of the device '", row->name, "' is ", where.index,
                   "; it must be 0");
  }
  const backend_registration* const registration = entry_of(*row).load(std::memory_order_acquire);
  if (registration == nullptr) {
    detail::refuse(
        errc::unsupported, "the device '", [&](std::string& sentence) { sentence += to_string(where); },
        "' needs the library ", row->library, ", which this program was not linked with");
  }
  require_understood(*registration, where, options);
  std::unique_ptr<backend> opened = registration->factory(where, options);
  if (detail::is_logging()) {
    detail::translate_bad_alloc("make_backend",
                                [&] { detail::log(log_level::info, "opened " + opened->description()); });
  }
  return opened;
}

}  // namespace bifolio::inline v0_2
