// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Owns one allocation of a memory resource. Moves, never copies; knows its size, not its element type.

#include <bifolio/memory_resource.hpp>
#include <cstddef>
#include <utility>

namespace bifolio::inline v0_2 {

class buffer {
 public:
  buffer() = default;

  /// Throws what `resource.allocate` throws. `resource` must outlive the buffer.
  buffer(memory_resource& resource, std::size_t num_bytes, std::size_t alignment = 64)
      : resource_(&resource),
        data_(resource.allocate(num_bytes, alignment)),
        num_bytes_(num_bytes),
        alignment_(alignment) {}

  buffer(buffer&& other) noexcept { swap(other); }
  buffer& operator=(buffer&& other) noexcept {
    buffer(std::move(other)).swap(*this);
    return *this;
  }
  ~buffer() {
    if (data_ != nullptr) resource_->deallocate(data_, num_bytes_, alignment_);
  }

  [[nodiscard]] void* data() noexcept { return data_; }
  [[nodiscard]] const void* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t num_bytes() const noexcept { return num_bytes_; }

  template <class T>
  [[nodiscard]] T* as() noexcept {
    return static_cast<T*>(data_);
  }
  template <class T>
  [[nodiscard]] const T* as() const noexcept {
    return static_cast<const T*>(data_);
  }

  void swap(buffer& other) noexcept {
    std::swap(resource_, other.resource_);
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
    std::swap(alignment_, other.alignment_);
  }

 private:
  memory_resource* resource_ = nullptr;
  void* data_ = nullptr;
  std::size_t num_bytes_ = 0;
  std::size_t alignment_ = 64;
};

}  // namespace bifolio::inline v0_2
