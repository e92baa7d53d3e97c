// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Builds one layer's paged cache with dense contents in it and poison everywhere else: blocks in random physical
/// order, a pool larger than needed, free slots, slots past a sequence's length, gaps of strided arrangements and the
/// bytes around the pool all NaN, free table entries 2147480000. Writes through `kv_strides` alone, so that it does not
/// depend on the kernels under test.

#include <bifolio/backend.hpp>
#include <bifolio/kv_layout.hpp>
#include <bifolio/step.hpp>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "support/device_bytes.hpp"

namespace bifolio::test {

/// How a layer is arranged in memory: the three named layouts, and three that only strides can express.
enum class arrangement : std::uint8_t {
  hnd,
  nhd,
  x_split,
  block_major,  ///< three layers of a block side by side, hnd inside, a gap after each block
  padded,       ///< K nhd, V hnd, gaps after tokens, heads and blocks: no row is aligned to more than its element
  scattered,    ///< K in chunks with every second element used, V transposed with a gap
};
inline constexpr arrangement all_arrangements[] = {arrangement::hnd,     arrangement::nhd,
                                                   arrangement::x_split, arrangement::block_major,
                                                   arrangement::padded,  arrangement::scattered};
[[nodiscard]] std::string_view to_string(arrangement value) noexcept;

/// What a cache holds, but for its order in memory. Where V is part of K, v_head_dim dims of it.
struct cache_shape {
  dtype type = dtype::f32;
  std::int32_t num_kv_heads = 0;
  std::int32_t qk_head_dim = 0;
  std::int32_t v_head_dim = 0;
  std::int32_t block_size = 0;
  bool v_in_k = false;
  /// Codes instead of `type`: K and V are given as they are before they are stored. Named layouts keep their order, the
  /// others become that of code_order::padded; static scales are `ordinary_scales`, or 1.
  std::optional<kv_code> k_code{};
  std::optional<kv_code> v_code{};
  bool unit_scales = false;
};

/// A layout and where its two planes start, in elements, in a region of `elements` elements.
struct arranged_layout {
  kv_layout layout;
  std::int64_t k_start = 0;
  std::int64_t v_start = 0;
  std::int64_t elements = 0;
};
[[nodiscard]] arranged_layout arrange(arrangement how, const cache_shape& shape, std::int64_t num_blocks);

/// One sequence's keys and values, already rounded to the cache's dtype.
struct dense_kv {
  std::int64_t seq_len = 0;
  const float* k = nullptr;  ///< [seq_len, num_kv_heads, qk_head_dim]
  const float* v = nullptr;  ///< [seq_len, num_kv_heads, v_head_dim]; not looked at where V is part of K
  /// Positions before this one are not needed by anybody, as left of a sliding window: they are not stored, and blocks
  /// that hold nothing else are given back, with free table entries in their place.
  std::int64_t first_needed = 0;
};

struct cache_placement {
  std::uint64_t order = 0;         ///< seed of the physical block order
  std::int64_t spare_blocks = 3;   ///< free blocks in the pool
  std::int64_t table_padding = 2;  ///< entries of a table row past the longest sequence
};

class paged_cache {
 public:
  paged_cache(backend& where, arrangement how, const cache_shape& shape, const std::vector<dense_kv>& seqs,
              const cache_placement& placement = {});

  [[nodiscard]] const kv_cache_view& view() const noexcept { return view_; }
  [[nodiscard]] const std::vector<std::int32_t>& tables() const noexcept { return tables_; }
  [[nodiscard]] std::int64_t table_stride() const noexcept { return table_stride_; }
  /// Neither the pool nor anything around it was written since it was made.
  [[nodiscard]] bool unchanged() const { return bytes_.unchanged(); }

 private:
  /// A pool of `num_blocks` blocks with codes, all poison, and where its planes start in the image.
  void place_codes(arrangement how, const cache_shape& shape, std::int64_t num_blocks, std::vector<std::byte>& image,
                   std::int64_t& k_start, std::int64_t& v_start);

  device_bytes bytes_;
  std::vector<float> k_scales_;
  std::vector<float> v_scales_;
  device_bytes device_k_scales_;
  device_bytes device_v_scales_;
  kv_cache_view view_;
  std::vector<std::int32_t> tables_;  // [num_seqs, table_stride]
  std::int64_t table_stride_ = 0;
};

}  // namespace bifolio::test
