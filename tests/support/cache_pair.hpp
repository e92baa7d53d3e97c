// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A cache on a backend's device and its twin on the host with the same bytes, and rows of k and v that are hard to
/// convert: what the calls under test do to the one, the oracle does to the other, and then all bytes are compared,
/// guard zones, gaps and untouched slots included. Of two caches one starts at a multiple of 16 bytes, where kernels
/// may take packs, and the other is aligned to its elements alone.

#include <algorithm>
#include <bifolio/backend.hpp>
#include <bifolio/kv_layout.hpp>
#include <bifolio/step.hpp>
#include <bifolio/tensor_view.hpp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "support/device_bytes.hpp"
#include "support/elements.hpp"
#include "support/paged_cache.hpp"
#include "support/random.hpp"

namespace bifolio::test {

/// A float32 whose conversion is worth a test: any exponent, mantissas at and next to ties, specials, subnormals, and
/// often an ordinary number.
[[nodiscard]] inline std::uint32_t hard_float_bits(random_source& random) noexcept {
  const std::uint64_t drawn = random.next();
  const auto bits = static_cast<std::uint32_t>(drawn);
  switch (((drawn >> 32) * 10) >> 32) {
    case 0:
      return bits;  // any pattern at all
    case 1: {       // one of the patterns next to a tie of float16 or bfloat16
      static constexpr std::uint32_t mantissas[] = {
          0,        1,        0x0fff,   0x1000,   0x1001,   0x3000,   0x7fff,   0x8000,   0x8001,  0x18000,
          0x7fe000, 0x7fefff, 0x7ff000, 0x7f7fff, 0x7f8000, 0x7fffff, 0x400000, 0x3fffff, 0x400001};
      return (bits & 0xff800000u) | random.pick(mantissas);
    }
    case 2:  // around the subnormals and the largest of float16
      return (bits & 0x807fffffu) |
             (static_cast<std::uint32_t>(random.one_in(2) ? random.between(100, 114) : random.between(141, 144)) << 23);
    case 3: {
      static constexpr std::uint32_t specials[] = {0,           0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc00000u,
                                                   0xffc00001u, 0x7f800001u, 0xffbfffffu, 0x7f7fffffu, 0xff7fffffu,
                                                   0x00000001u, 0x807fffffu, 0x477fefffu, 0x477ff000u, 0x33000000u};
      return random.pick(specials);
    }
    default: {
      const float value = normal_from(random.next());
      std::uint32_t normal;
      std::memcpy(&normal, &value, sizeof normal);
      return normal;
    }
  }
}

/// An element of `type`, in the low bytes.
[[nodiscard]] inline std::uint32_t hard_bits(random_source& random, dtype type) {
  switch (type) {
    case dtype::f32:
      return hard_float_bits(random);
    case dtype::f16:
      return static_cast<std::uint32_t>(random.next());  // any pattern will do
    case dtype::bf16:
      return hard_float_bits(random) >> 16;
    case dtype::e4m3:
    case dtype::e5m2:
    case dtype::i8:
    case dtype::u8:
      return static_cast<std::uint32_t>(random.next()) & 0xffu;
  }
  return 0;
}

/// Hard elements of `type` to cut pieces from; drawing each element anew would take most of a test's time.
[[nodiscard]] inline const std::vector<std::byte>& hard_pool(dtype type) {
  const auto make = [](dtype of) {
    random_source random(hash_of(test_seed(), 0x4a5d, static_cast<int>(of)));
    std::vector<std::byte> bytes((std::size_t{1} << 20) * size_of(of));
    for (std::size_t at = 0; at < bytes.size(); at += size_of(of)) {
      const std::uint32_t bits = hard_bits(random, of);
      std::memcpy(bytes.data() + at, &bits, size_of(of));
    }
    return bytes;
  };
  return visit_dtype(type, [&](auto traits) -> const std::vector<std::byte>& {
    static const std::vector<std::byte> pool = make(traits.type);
    return pool;
  });
}

/// `count` elements of `type`, hard to convert: pieces of the pool from random places on.
[[nodiscard]] inline std::vector<std::byte> hard_elements(random_source& random, dtype type, std::int64_t count) {
  const std::vector<std::byte>& pool = hard_pool(type);
  std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size_of(type));
  for (std::size_t done = 0; done < bytes.size();) {
    const std::size_t first = random.next() % (pool.size() / size_of(type)) * size_of(type);
    const std::size_t size = std::min(pool.size() - first, bytes.size() - done);
    std::memcpy(bytes.data() + done, pool.data() + first, size);
    done += size;
  }
  return bytes;
}

class cache_pair {
 public:
  cache_pair(backend& where, arrangement how, const cache_shape& shape, std::int64_t num_blocks, random_source& random)
      : arranged_(arrange(how, shape, num_blocks)), num_blocks_(num_blocks), guard_(random.one_in(2) ? 32 : 33) {
    host_ = hard_elements(random, shape.type, (arranged_.elements + 2 * guard_ + 15) / 16 * 16);
    device_ = device_bytes(where, host_, 16);
  }
  cache_pair(backend& where, arrangement how, dtype type, std::int32_t heads, std::int32_t dims,
             std::int32_t block_size, std::int64_t num_blocks, random_source& random)
      : cache_pair(where, how, {type, heads, dims, dims, block_size}, num_blocks, random) {}

  [[nodiscard]] kv_cache_view device() noexcept { return view_at(device_.data()); }
  [[nodiscard]] kv_cache_view host() noexcept { return view_at(host_.data()); }
  [[nodiscard]] const kv_layout& layout() const noexcept { return arranged_.layout; }
  /// Every byte of the cache, of its gaps and of its surroundings.
  [[nodiscard]] bool equal() const { return device_.holds(host_); }

 private:
  [[nodiscard]] kv_cache_view view_at(std::byte* base) const noexcept {
    const auto element = static_cast<std::int64_t>(size_of(arranged_.layout.k.code.type));
    // Where V is part of K its pointer is not looked at.
    std::byte* const v = arranged_.layout.v_in_k ? nullptr : base + (guard_ + arranged_.v_start) * element;
    return {base + (guard_ + arranged_.k_start) * element, v, num_blocks_, arranged_.layout};
  }

  arranged_layout arranged_;
  std::int64_t num_blocks_;
  std::int64_t guard_;  // elements on either side
  std::vector<std::byte> host_;
  device_bytes device_;
};

/// How rows of k and v are arranged in memory.
enum class row_order : std::uint8_t {
  dense,
  fused,   ///< k and v are slices of one row of q, k and v per token
  spread,  ///< gaps after heads and tokens
  heads,   ///< [num_heads, num_tokens, head_dim]
};
inline constexpr row_order all_row_orders[] = {row_order::dense, row_order::fused, row_order::spread, row_order::heads};

/// Rows of k and v in one region, on the device and on the host.
class rows_pair {
 public:
  /// Without `v_dims` there are rows of k alone, as where V is part of K.
  rows_pair(backend& where, row_order how, dtype type, std::int64_t tokens, std::int32_t heads, std::int32_t k_dims,
            std::int32_t v_dims, random_source& random)
      : where_(&where),
        k_(dense_view<void>(nullptr, type, tokens, heads, k_dims)),
        v_(dense_view<void>(nullptr, type, tokens, heads, v_dims)) {
    const std::int64_t k_row = std::int64_t{heads} * k_dims;
    const std::int64_t v_row = std::int64_t{heads} * v_dims;
    v_start_ = tokens * k_row;
    std::int64_t elements = tokens * (k_row + v_row);
    switch (how) {
      case row_order::dense:
        break;
      case row_order::fused:
        k_.token_stride = v_.token_stride = 2 * k_row + v_row;
        v_start_ = k_row;
        elements = tokens * k_.token_stride;
        break;
      case row_order::spread:
        for (tensor_view* rows : {&k_, &v_}) {
          rows->head_stride = rows->head_dim + 5;
          rows->token_stride = heads * rows->head_stride + 3;
        }
        v_start_ = tokens * k_.token_stride + 1;
        elements = v_start_ + tokens * v_.token_stride + 1;
        break;
      case row_order::heads:
        for (tensor_view* rows : {&k_, &v_}) {
          rows->head_stride = tokens * rows->head_dim;
          rows->token_stride = rows->head_dim;
        }
        break;
    }
    host_ = hard_elements(random, type, elements);
    device_ = device_bytes(where, host_, size_of(type));
  }
  rows_pair(backend& where, row_order how, dtype type, std::int64_t tokens, std::int32_t heads, std::int32_t dims,
            random_source& random)
      : rows_pair(where, how, type, tokens, heads, dims, dims, random) {}

  [[nodiscard]] tensor_view device_k() noexcept { return view_at(k_, device_.data(), 0); }
  [[nodiscard]] tensor_view device_v() noexcept { return view_at(v_, device_.data(), v_start_); }
  [[nodiscard]] tensor_view host_k() noexcept { return view_at(k_, host_.data(), 0); }
  [[nodiscard]] tensor_view host_v() noexcept { return view_at(v_, host_.data(), v_start_); }
  /// Copies the host's rows to the device, after a test has written them.
  void upload() { device_ = device_bytes(*where_, host_, size_of(k_.type)); }
  /// The device's rows of k, which are dense.
  [[nodiscard]] std::vector<float> read_k() const {
    const std::vector<std::byte> bytes = device_.read();
    std::vector<float> values;
    for (std::int64_t i = 0; i < k_.num_tokens * k_.token_stride; ++i) {
      values.push_back(load_element(bytes.data(), k_.type, i));
    }
    return values;
  }
  [[nodiscard]] bool equal() const { return device_.holds(host_); }

 private:
  [[nodiscard]] static tensor_view view_at(tensor_view rows, std::byte* base, std::int64_t start) noexcept {
    rows.data = rows.head_dim == 0 ? nullptr : base + start * static_cast<std::int64_t>(size_of(rows.type));
    return rows;
  }

  backend* where_;
  tensor_view k_;
  tensor_view v_;
  std::int64_t v_start_ = 0;
  std::vector<std::byte> host_;
  device_bytes device_;
};

/// Makes most rows of a tensor ordinary numbers of any magnitude, so that most scales and norms are finite.
inline void soften(const tensor_view& view, random_source& random) {
  if (view.data == nullptr) return;
  for (std::int64_t t = 0; t < view.num_tokens; ++t) {
    for (std::int32_t h = 0; h < view.num_heads; ++h) {
      if (random.one_in(5)) continue;  // stays hard: nearly always with NaN or infinity
      const float size = std::exp2(static_cast<float>(random.between(-30, 12)));
      const bool zero = random.one_in(12);
      for (std::int32_t d = 0; d < view.head_dim; ++d) {
        store_element(view.data, view.type, t * view.token_stride + h * view.head_stride + d,
                      zero ? 0.0f : size * normal_from(random.next()));
      }
    }
  }
}

/// Slots as a step gives them: runs of a sequence that start and end anywhere in blocks of any order, tokens that are
/// not stored, and now and then a slot that comes again.
[[nodiscard]] inline std::vector<std::int64_t> random_slots(random_source& random, std::int64_t count,
                                                            std::int64_t num_blocks, std::int64_t block_size,
                                                            bool repeats) {
  std::vector<std::int64_t> slots;
  std::vector<bool> taken(static_cast<std::size_t>(num_blocks * block_size), false);
  while (static_cast<std::int64_t>(slots.size()) < count) {
    const std::int64_t block = random.between(0, num_blocks - 1);
    const std::int64_t first = random.between(0, block_size - 1);
    const std::int64_t length = random.one_in(2) ? block_size : random.between(1, 3);
    if (random.one_in(4)) slots.push_back(-random.between(1, 1000));
    for (std::int64_t i = first; i < first + length && i < block_size; ++i) {
      const std::int64_t slot = block * block_size + i;
      const auto index = static_cast<std::size_t>(slot);
      slots.push_back(taken[index] && !repeats ? -1 : slot);
      taken[index] = true;
    }
  }
  slots.resize(static_cast<std::size_t>(count));
  return slots;
}

[[nodiscard]] inline std::vector<block_copy> random_pairs(random_source& random, std::int64_t count,
                                                          std::int64_t num_src, std::int64_t num_dst) {
  std::vector<block_copy> pairs;
  for (std::int64_t i = 0; i < count; ++i) {
    pairs.push_back({block_id{static_cast<std::int32_t>(random.between(0, num_src - 1))},
                     block_id{static_cast<std::int32_t>(random.between(0, num_dst - 1))}});
  }
  return pairs;
}

/// Layers of one cache: each its own region.
[[nodiscard]] inline std::vector<cache_pair> make_layers(backend& where, arrangement how, const cache_shape& shape,
                                                         std::int64_t num_blocks, std::size_t num_layers,
                                                         random_source& random) {
  std::vector<cache_pair> layers;
  layers.reserve(num_layers);
  for (std::size_t i = 0; i < num_layers; ++i) {
    layers.emplace_back(where, how, shape, num_blocks, random);
  }
  return layers;
}

[[nodiscard]] inline std::vector<cache_pair> make_layers(backend& where, arrangement how, dtype type,
                                                         std::int32_t heads, std::int32_t dims, std::int32_t block_size,
                                                         std::int64_t num_blocks, std::size_t num_layers,
                                                         random_source& random) {
  return make_layers(where, how, cache_shape{type, heads, dims, dims, block_size}, num_blocks, num_layers, random);
}

[[nodiscard]] inline std::vector<kv_cache_view> device_views(std::vector<cache_pair>& layers) {
  std::vector<kv_cache_view> views;
  for (cache_pair& layer : layers) views.push_back(layer.device());
  return views;
}

/// An array on the device.
template <class T>
[[nodiscard]] device_bytes upload_array(backend& where, const std::vector<T>& values) {
  return device_bytes(where, bytes_of(values), alignof(T));
}

}  // namespace bifolio::test
