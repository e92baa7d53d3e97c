// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A cache of any codes on a backend's device and its twin on the host, like `cache_pair`: elements and tails are
/// random bytes before anything is stored, so that scales of slots that nobody wrote are NaN, huge or negative. Of two
/// caches one has both planes start at multiples of 16 bytes, where kernels may take packs, and the other neither.

#include <bifolio/backend.hpp>
#include <bifolio/kv_layout.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "support/cache_pair.hpp"
#include "support/codes.hpp"
#include "support/device_bytes.hpp"
#include "support/random.hpp"

namespace bifolio::test {

[[nodiscard]] inline std::string text_of_codes(const kv_layout& layout) {
  return std::string(to_string(layout.kind)) + " K " + to_string(layout.k.code) + " V " + to_string(layout.v.code) +
         " heads " + std::to_string(layout.num_kv_heads) + " dims " + std::to_string(layout.k.head_dim) + " and " +
         std::to_string(layout.v.head_dim) + (layout.v_in_k ? " in k" : "") + " block " +
         std::to_string(layout.block_size);
}

class coded_pair {
 public:
  /// `at_packs`: which of the two it is; without it that is drawn.
  coded_pair(backend& where, const kv_layout& layout, std::int64_t num_blocks, random_source& random,
             std::optional<bool> at_packs = {})
      : layout_(layout), num_blocks_(num_blocks), k_start_(at_packs.value_or(random.one_in(2)) ? 48 : 36) {
    const auto plane_bytes = [&](const kv_plane& plane) {
      return (num_blocks * plane.strides.block * static_cast<std::int64_t>(size_of(plane.code.type)) + 16) / 16 * 16;
    };
    v_start_ = k_start_ + plane_bytes(layout.k) + guard;
    const std::int64_t bytes = v_start_ + (layout.v_in_k ? 0 : plane_bytes(layout.v)) + guard;
    host_ = hard_elements(random, dtype::f32, bytes / 4);  // four bytes of any kind
    device_ = device_bytes(where, host_, 16);
    for (const bool is_k : {true, false}) {
      const kv_code& code = is_k ? layout.k.code : layout.v.code;
      std::vector<float>& scales = is_k ? k_scales_ : v_scales_;
      if (!code.has_static_scales()) continue;
      const std::int32_t count = code.granularity == scale_granularity::head ? layout.num_kv_heads : 1;
      for (std::int32_t i = 0; i < count; ++i) {
        scales.push_back(random.one_in(4) ? 1.0f : 0.001f + 0.1f * unit_from(random.next()));
      }
    }
    device_k_scales_ = device_bytes(where, bytes_of(k_scales_), 4);
    device_v_scales_ = device_bytes(where, bytes_of(v_scales_), 4);
  }

  [[nodiscard]] kv_cache_view device() noexcept {
    kv_cache_view view = view_at(device_.data());
    view.k_scales = reinterpret_cast<const float*>(device_k_scales_.data());
    view.v_scales = reinterpret_cast<const float*>(device_v_scales_.data());
    return view;
  }
  [[nodiscard]] kv_cache_view host() noexcept {
    kv_cache_view view = view_at(host_.data());
    view.k_scales = k_scales_.data();
    view.v_scales = v_scales_.data();
    return view;
  }
  [[nodiscard]] const kv_layout& layout() const noexcept { return layout_; }
  /// Every byte of the cache, of its gaps and of its surroundings.
  [[nodiscard]] bool equal() const { return device_.holds(host_); }
  /// The first byte that differs, for texts.
  [[nodiscard]] std::string difference() const {
    const std::vector<std::byte> now = device_.read();
    for (std::size_t i = 0; i < now.size(); ++i) {
      if (now[i] == host_[i]) continue;
      const auto at = static_cast<std::int64_t>(i);
      const bool is_k = at < v_start_;
      return std::string(is_k ? "K" : "V") + " byte " + std::to_string(at - (is_k ? k_start_ : v_start_)) + ": " +
             std::to_string(static_cast<int>(now[i])) + ", expected " + std::to_string(static_cast<int>(host_[i]));
    }
    return {};
  }

 private:
  static constexpr std::int64_t guard = 48;  // bytes; keeps V at the alignment of K

  [[nodiscard]] kv_cache_view view_at(std::byte* base) const noexcept {
    return {base + k_start_, layout_.v_in_k ? nullptr : base + v_start_, num_blocks_, layout_};
  }

  kv_layout layout_;
  std::int64_t num_blocks_;
  std::int64_t k_start_;  // a multiple of 16 or of 4 and no more
  std::int64_t v_start_ = 0;
  std::vector<float> k_scales_;
  std::vector<float> v_scales_;
  std::vector<std::byte> host_;
  device_bytes device_;
  device_bytes device_k_scales_;
  device_bytes device_v_scales_;
};

}  // namespace bifolio::test
