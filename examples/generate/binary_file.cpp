// SPDX-License-Identifier: Apache-2.0
#include "binary_file.hpp"

#include <fmt/format.h>

#include <system_error>

#include "input_error.hpp"

namespace generate {

binary_file::binary_file(const std::filesystem::path& path) : name_(path.string()) {
  std::error_code problem;
  const auto status = std::filesystem::status(path, problem);
  if (!std::filesystem::exists(status)) throw input_error(fmt::format("{}: there is no such file", name_));
  if (!std::filesystem::is_regular_file(status)) throw input_error(fmt::format("{}: not a regular file", name_));
  size_ = std::filesystem::file_size(path, problem);
  if (!problem) stream_.open(path, std::ios::binary);
  if (problem || !stream_) throw input_error(fmt::format("{}: the file cannot be read", name_));
}

void binary_file::read(std::uint64_t offset, void* destination, std::uint64_t num_bytes) {
  if (offset > size_ || num_bytes > size_ - offset) {
    throw input_error(fmt::format("{}: {} bytes are needed from byte {} on, but the file ends at byte {}", name_,
                                  num_bytes, offset, size_));
  }
  stream_.clear();
  stream_.seekg(static_cast<std::streamoff>(offset));
  stream_.read(static_cast<char*>(destination), static_cast<std::streamsize>(num_bytes));
  if (static_cast<std::uint64_t>(stream_.gcount()) != num_bytes) {
    throw input_error(fmt::format("{}: reading {} bytes at byte {} failed", name_, num_bytes, offset));
  }
}

std::string binary_file::read_text(std::uint64_t max_bytes) {
  if (size_ > max_bytes) {
    throw input_error(fmt::format("{}: {} bytes, while at most {} are read", name_, size_, max_bytes));
  }
  std::string text(size_, '\0');
  read(0, text.data(), size_);
  return text;
}

std::int64_t checked_product(std::initializer_list<std::int64_t> factors) noexcept {
  std::int64_t product = 1;
  for (const std::int64_t factor : factors) {
    if (factor < 0 || __builtin_mul_overflow(product, factor, &product) || product > (std::int64_t{1} << 62)) return -1;
  }
  return product;
}

}  // namespace generate
