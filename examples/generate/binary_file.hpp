// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Reads a file whose contents are not trusted: its real size is known before anything is allocated for it, and a read
/// past the end is an `input_error`, never a short read.

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>

namespace generate {

class binary_file {
 public:
  /// Throws `input_error` when `path` is not a readable regular file.
  explicit binary_file(const std::filesystem::path& path);

  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  /// The path as the user gave it, for error sentences.
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

  /// Copies `num_bytes` bytes from `offset` to `destination`. Throws `input_error` when the file ends before.
  void read(std::uint64_t offset, void* destination, std::uint64_t num_bytes);

  /// The whole file as text. Throws `input_error` when it is larger than `max_bytes`.
  [[nodiscard]] std::string read_text(std::uint64_t max_bytes);

 private:
  std::string name_;
  std::ifstream stream_;
  std::uint64_t size_ = 0;
};

/// The product of sizes read from a file, or −1 when one is negative or the product exceeds 2^62.
[[nodiscard]] std::int64_t checked_product(std::initializer_list<std::int64_t> factors) noexcept;

}  // namespace generate
