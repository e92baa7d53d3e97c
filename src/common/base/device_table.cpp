// SPDX-License-Identifier: Apache-2.0
#include "common/base/device_table.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bifolio/error.hpp>
#include <charconv>

#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2 {
namespace {

// Constant-initialised, so that a library may register from a static constructor. Rows below `num_rows` are complete:
// add_device_row writes the row first (release), readers take the number first (acquire).
constinit std::array<detail::device_row, detail::max_device_types> rows{detail::cpu_row, detail::cuda_row};
constinit std::atomic<std::size_t> num_rows{2};

template <class Matches>
const detail::device_row* find_if(Matches matches) noexcept {
  const auto all = detail::device_rows();
  const auto found = std::find_if(all.begin(), all.end(), matches);
  return found == all.end() ? nullptr : &*found;
}

}  // namespace

std::span<const detail::device_row> detail::device_rows() noexcept {
  return {rows.data(), num_rows.load(std::memory_order_acquire)};
}

const detail::device_row* detail::find_device_row(device_type type) noexcept {
  return find_if([&](const device_row& row) { return row.type == type; });
}

const detail::device_row* detail::find_device_row(std::string_view name) noexcept {
  return find_if([&](const device_row& row) { return row.name == name; });
}

const detail::device_row& detail::add_device_row(const device_row& row) {
  const std::size_t at = num_rows.load(std::memory_order_relaxed);
  if (at == rows.size()) {
    refuse(errc::failed_precondition, "the device type '", row.name, "' is one too many; there is room for ",
           max_device_types);
  }
  rows[at] = row;
  num_rows.store(at + 1, std::memory_order_release);
  return rows[at];
}

void detail::append_device_names(std::string& sentence) {
  bool any_numbered = false;
  const char* separator = "";
  for (const device_row& row : device_rows()) {
    sentence.append(separator).append(row.name);
    if (row.numbered) sentence.append(", ").append(row.name).append(":N");
    any_numbered = any_numbered || row.numbered;
    separator = ", ";
  }
  if (any_numbered) sentence.append(" with N >= 0");
}

std::string to_string(device where) {
  const detail::device_row* const row = detail::find_device_row(where.type);
  std::string text(row == nullptr ? "device type " : row->name);
  if (row == nullptr) text.append(std::to_string(static_cast<int>(where.type)));
  if (row == nullptr || row->numbered) text.append(1, ':').append(std::to_string(where.index));
  return text;
}

device parse_device(std::string_view text) {
  const std::size_t colon = text.find(':');
  const detail::device_row* const row = detail::find_device_row(text.substr(0, colon));
  if (row != nullptr && colon == std::string_view::npos) return {row->type, 0};
  if (row != nullptr && row->numbered) {
    const std::string_view digits = text.substr(colon + 1);
    std::int32_t index = -1;
    const auto [end, status] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    if (status == std::errc{} && end == digits.data() + digits.size() && index >= 0) return {row->type, index};
  }
  detail::refuse(errc::invalid_argument, "device '", text, "' is not one of ", detail::append_device_names);
}

}  // namespace bifolio::inline v0_2
