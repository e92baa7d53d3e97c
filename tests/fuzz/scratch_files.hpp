// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Files of a fuzz target, which the code under test opens by name: one folder per process, in memory where the system
/// has such a file system.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

namespace bifolio::fuzz {

/// The folder of this process; removed when it ends.
[[nodiscard]] const std::filesystem::path& scratch_folder();
/// Removes everything in it.
void clear_scratch_folder();

/// Writes a file in the folder and returns its path.
std::filesystem::path write_scratch(std::string_view name, std::span<const std::uint8_t> bytes);
std::filesystem::path write_scratch(std::string_view name, std::string_view text);

[[nodiscard]] inline std::string_view text_of(std::span<const std::uint8_t> bytes) noexcept {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace bifolio::fuzz
