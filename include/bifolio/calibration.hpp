// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Static scales from a sample of rows: what `cache_engine_config::k_scales` and `v_scales` take, one layer and plane
/// at a time.

#include <bifolio/export.hpp>
#include <bifolio/kv_layout.hpp>
#include <bifolio/tensor_view.hpp>
#include <cstdint>
#include <vector>

namespace bifolio::inline v0_2 {

/// Counts the magnitudes that it is shown, per KV head, in 2048 classes of an eighth of an octave. One thread at a
/// time.
class BIFOLIO_API scale_sampler {
 public:
  /// Throws `error` (invalid_argument) for a code without static scales, or num_kv_heads < 1; std::bad_alloc.
  scale_sampler(const kv_code& code, std::int32_t num_kv_heads);

  /// Rows of k or v, [num_tokens, num_kv_heads, any head_dim], in host memory. What is not finite is left out. Throws
  /// `error` (invalid_argument) for other heads, or a dtype that no tensor has.
  void add(const const_tensor_view& rows);

  /// One scale, or one per KV head, as the code says: the magnitude below which `percentile` percent of the sample lie
  /// becomes the largest code; 100 is the largest magnitude itself, others are exact to an eighth of an octave,
  /// upwards. What lies above saturates. 1 where there was nothing but zeros. Throws `error` (invalid_argument) for a
  /// percentile outside (0, 100].
  [[nodiscard]] std::vector<float> scales(double percentile = 100) const;

 private:
  kv_code code_;
  std::int32_t num_heads_;
  std::vector<std::uint64_t> counts_;  // [num_heads, classes]
  std::vector<float> largest_;         // [num_heads]
};

}  // namespace bifolio::inline v0_2
