// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Which keys a query token attends to: the one definition, for planners and kernels on every device. Formula:
/// bifolio/attention.hpp. Positions are counted from the first key that the sequence's table row covers.
///
/// Ranges are computed in 64 bits from positions and windows of 32, so that nothing overflows and nothing has to be
/// clamped. Kernels that test key by key in 32 bits use `attends` and `is_in_window`; the CUDA decode and prefill
/// kernels also keep a 32-bit form of the ranges, for tiles of keys, which the conformance suite holds to the float64
/// oracle.

#include <bifolio/detail/host_device.hpp>
#include <cstdint>

namespace bifolio::inline v0_2::attn {

/// Keys [begin, end); empty where begin ≥ end. `end` may be negative, and `begin` past the last key.
struct visible_range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// How far before and after its own position a token attends.
struct attention_window {
  std::int64_t left = 0;
  std::int64_t right = 0;

  /// More than any two positions are apart.
  static constexpr std::int64_t all = std::int64_t{1} << 40;

  /// From the numbers of an `attention_spec`, where negative means all.
  [[nodiscard]] BIFOLIO_HOST_DEVICE static constexpr attention_window make(bool causal, std::int64_t window_left,
                                                                           std::int64_t window_right) noexcept {
    return {window_left < 0 ? all : window_left, causal ? 0 : window_right < 0 ? all : window_right};
  }

  /// The keys of a row of `seq_len` keys that a token at `position` attends to. Both ends rise with the position, so
  /// that the tokens from `first` to `last` together attend to [of(first).begin, of(last).end).
  [[nodiscard]] BIFOLIO_HOST_DEVICE constexpr visible_range of(std::int64_t position,
                                                               std::int64_t seq_len) const noexcept {
    const std::int64_t begin = position > left ? position - left : 0;
    const std::int64_t end = position + right + 1 < seq_len ? position + right + 1 : seq_len;
    return {begin, end};
  }
  /// The keys that some token from position `first` to `last` attends to.
  [[nodiscard]] BIFOLIO_HOST_DEVICE constexpr visible_range of_run(std::int64_t first, std::int64_t last,
                                                                   std::int64_t seq_len) const noexcept {
    return {of(first, seq_len).begin, of(last, seq_len).end};
  }
};

/// Position of a sequence's first new token, counted from the first key of its table row. `query_positions`: those of
/// the batch, or null.
[[nodiscard]] BIFOLIO_HOST_DEVICE constexpr std::int64_t first_query_position(const std::int32_t* query_positions,
                                                                              std::int32_t seq, std::int64_t query_len,
                                                                              std::int64_t seq_len) noexcept {
  return query_positions == nullptr ? seq_len - query_len : query_positions[seq];
}

/// The window of a spec, or of anything with its three numbers.
template <class Spec>
[[nodiscard]] BIFOLIO_HOST_DEVICE constexpr attention_window window_of(const Spec& spec) noexcept {
  return attention_window::make(spec.causal, spec.window_left, spec.window_right);
}

/// Whether a token at `position` attends to key `key` ≥ 0, as far as the row's length and causality go.
[[nodiscard]] BIFOLIO_HOST_DEVICE constexpr bool attends(std::int32_t key, std::int32_t position, std::int32_t seq_len,
                                                         bool causal) noexcept {
  return key < seq_len && (!causal || key <= position);
}
/// And as far as a window does, negative: all. Positions and windows stay below 2^30 (`clamped_window`).
[[nodiscard]] BIFOLIO_HOST_DEVICE constexpr bool is_in_window(std::int32_t key, std::int32_t position,
                                                              std::int32_t window_left,
                                                              std::int32_t window_right) noexcept {
  return (window_left < 0 || key >= position - window_left) && (window_right < 0 || key <= position + window_right);
}

}  // namespace bifolio::inline v0_2::attn
