// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Merging two partial attention results, as data: the states, the call on a backend, and the judgement against the
/// float64 oracle.

#include <bifolio/backend.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "conformance/attention_case.hpp"
#include "support/backends.hpp"
#include "support/device_bytes.hpp"

namespace bifolio::test {

struct merge_shape {
  std::int64_t num_tokens = 0;
  std::int32_t num_heads = 0;
  std::int32_t head_dim = 0;
  dtype type_a = dtype::f32;
  dtype type_b = dtype::f32;
  dtype out_type = dtype::f32;
  std::int64_t gap_unit = 1;  ///< gaps between heads and tokens are multiples of it
};

struct host_state {
  std::vector<float> out;  ///< [num_tokens, num_heads, head_dim]
  std::vector<float> lse;  ///< [num_tokens, num_heads]
};

/// LSE values mostly near each other, some far apart, some −inf, with nothing seen.
[[nodiscard]] host_state random_state(dtype type, std::int64_t rows, std::int32_t head_dim, std::uint64_t seed);

/// A state on the device with gaps between heads and tokens and poison around it.
class device_state {
 public:
  device_state(const tested_backend& tested, dtype type, std::int64_t tokens, std::int32_t heads, std::int32_t head_dim,
               const std::vector<float>& out, const std::vector<float>& lse, std::int64_t gap);

  [[nodiscard]] tensor_view view();
  [[nodiscard]] float* lse();
  [[nodiscard]] attention_state_view state() { return {as_const(view()), lse()}; }
  /// Values as stored, and whether everything else is still poison.
  [[nodiscard]] attention_output read(bool& clean);

  device_bytes out_bytes;
  device_bytes lse_bytes;

 private:
  [[nodiscard]] std::int64_t at(std::size_t n) const;

  dtype type_;
  std::int64_t tokens_;
  std::int32_t heads_;
  std::int32_t head_dim_;
  std::int64_t head_stride_;
  std::int64_t token_stride_;
};

/// Merges on the backend. Throws std::runtime_error when it refuses, or writes anything but the result.
[[nodiscard]] attention_output merge_states_of(const tested_backend& tested, const merge_shape& shape,
                                               const host_state& a, const host_state& b);

struct merge_verdict {
  std::string problem;     ///< empty when every value is within its bound
  double worst_share = 0;  ///< largest error over bound
};
[[nodiscard]] merge_verdict judge_merge(const merge_shape& shape, const host_state& a, const host_state& b,
                                        const attention_output& got);

}  // namespace bifolio::test
