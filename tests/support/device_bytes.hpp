// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Bytes on a backend's device and the image that was uploaded to them. The allocation has exactly the size of the
/// image, so that fenced memory (fenced_memory.hpp) faults on the first byte past it.

#include <bifolio/backend.hpp>
#include <bifolio/buffer.hpp>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace bifolio::test {

/// Throws when a call that the test itself depends on was refused.
inline void require_ok(errc code, const char* what) {
  if (code != errc::ok) throw std::runtime_error(std::string(what) + " gave " + std::string(to_string(code)));
}

class device_bytes {
 public:
  device_bytes() = default;
  device_bytes(backend& where, std::vector<std::byte> image, std::size_t alignment)
      : where_(&where), image_(std::move(image)), memory_(where.memory(), image_.size(), alignment) {
    refill();
  }

  [[nodiscard]] std::byte* data() noexcept { return memory_.as<std::byte>(); }
  [[nodiscard]] const std::vector<std::byte>& image() const noexcept { return image_; }

  /// Uploads the image again.
  void refill() {
    if (image_.empty()) return;
    require_ok(where_->upload(memory_.data(), image_.data(), image_.size(), {}), "upload");
    require_ok(where_->synchronize({}), "synchronize");
  }

  [[nodiscard]] std::vector<std::byte> read() const {
    std::vector<std::byte> bytes(image_.size());
    if (bytes.empty()) return bytes;
    require_ok(where_->download(bytes.data(), memory_.data(), bytes.size(), {}), "download");
    require_ok(where_->synchronize({}), "synchronize");
    return bytes;
  }

  /// Whether the device holds exactly `bytes`. (A vector's == compares std::byte one by one.)
  [[nodiscard]] bool holds(const std::vector<std::byte>& bytes) const {
    const std::vector<std::byte> now = read();
    return now.size() == bytes.size() && (now.empty() || std::memcmp(now.data(), bytes.data(), now.size()) == 0);
  }

  [[nodiscard]] bool unchanged() const { return holds(image_); }

 private:
  backend* where_ = nullptr;
  std::vector<std::byte> image_;
  buffer memory_;
};

/// The bytes of an array of plain values.
template <class T>
[[nodiscard]] std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  const auto* first = reinterpret_cast<const std::byte*>(values.data());
  return {first, first + values.size() * sizeof(T)};
}

}  // namespace bifolio::test
