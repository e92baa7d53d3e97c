// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Byte strings that are compared often and stored once: each has an index while it has references. Index 0 is the
/// empty string, always there.

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/base/make_room.hpp"

namespace bifolio::inline v0_2::detail {

class interned_bytes {
 public:
  interned_bytes() { items_.push_back({nullptr, 0, 1}); }

  /// Index of `bytes`, or −1 when they have no references.
  [[nodiscard]] std::int64_t find(const std::string& bytes) const noexcept {
    if (bytes.empty()) return 0;
    const auto found = index_.find(bytes);
    return found == index_.end() ? -1 : std::int64_t{found->second};
  }
  /// One reference to `bytes`. Throws std::bad_alloc, having changed nothing.
  [[nodiscard]] std::uint32_t acquire(const std::string& bytes) {
    if (bytes.empty()) return 0;
    if (free_.empty()) {
      make_room(items_, 1);
      make_room(free_, items_.size() + 1);
    }
    const auto [at, is_new] = index_.try_emplace(bytes, 0);
    if (is_new) {
      if (free_.empty()) {
        at->second = static_cast<std::uint32_t>(items_.size());
        items_.push_back({});
      } else {
        at->second = free_.back();
        free_.pop_back();
      }
      items_[at->second] = {&at->first, ++num_made_, 0};
    }
    ++items_[at->second].num_refs;
    return at->second;
  }
  void retain(std::uint32_t index) noexcept {
    if (index != 0) ++items_[index].num_refs;
  }
  void release(std::uint32_t index) noexcept {
    if (index == 0 || --items_[index].num_refs > 0) return;
    index_.erase(*items_[index].bytes);
    free_.push_back(index);  // room was made when the item was
  }
  [[nodiscard]] std::string_view bytes(std::uint32_t index) const noexcept {
    return index == 0 ? std::string_view() : std::string_view(*items_[index].bytes);
  }
  /// Which string this is, among all that ever had an index: 0 for the empty one.
  [[nodiscard]] std::uint64_t serial(std::uint32_t index) const noexcept { return items_[index].serial; }
  [[nodiscard]] std::uint32_t num_refs(std::uint32_t index) const noexcept { return items_[index].num_refs; }
  [[nodiscard]] std::size_t num_in_use() const noexcept { return items_.size() - free_.size(); }

 private:
  struct item {
    const std::string* bytes;
    std::uint64_t serial;
    std::uint32_t num_refs;
  };
  std::vector<item> items_;
  std::vector<std::uint32_t> free_;
  std::unordered_map<std::string, std::uint32_t> index_;
  std::uint64_t num_made_ = 0;
};

}  // namespace bifolio::inline v0_2::detail
