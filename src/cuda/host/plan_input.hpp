// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What planning starts from: the machine, the host arrays of a step, and the limits of later steps.

#include <bifolio/attention.hpp>
#include <cstddef>
#include <cstdint>

namespace bifolio::inline v0_2::cuda {

/// What implementations need to know of the machine.
struct device_numbers {
  std::int32_t compute_capability = 0;  ///< 10 · major + minor
  std::int32_t num_sms = 0;
  std::size_t max_shared_bytes_per_block = 0;  ///< opt-in
  std::size_t l2_bytes = 0;
  /// Kernels may start before the previous one has ended (see `launch`): the device can, and the code that runs on
  /// it, compiled for 9.0 or later, waits by itself.
  bool dependent_launch = false;
  void* encode_tensor_map = nullptr;  ///< the driver's cuTensorMapEncodeTiled; null where it has none
};

/// Host arrays of the step; checked.
struct plan_input {
  attention_spec spec;
  std::int32_t num_seqs = 0;
  const std::int32_t* query_start_loc = nullptr;  ///< [num_seqs + 1]
  const std::int32_t* seq_lens = nullptr;         ///< [num_seqs]
  const std::int32_t* query_positions = nullptr;  ///< [num_seqs] or null; the general implementation alone takes them
  std::int64_t num_tokens = 0;
  std::int32_t max_query_len = 0;
  std::int32_t max_seq_len = 0;
  bool has_query_positions = false;
  device_numbers device;
};

/// Bounds of the steps that `reserve_plan` makes room for.
struct step_limits {
  std::int64_t num_seqs = 0;
  std::int64_t num_tokens = 0;
  std::int32_t seq_len = 0;
  /// Most sequences with new tokens.
  [[nodiscard]] constexpr std::int64_t num_seqs_with_tokens() const noexcept {
    return num_seqs < num_tokens ? num_seqs : num_tokens;
  }
};

/// Partial results are given up (the tile becomes one item) above this.
inline constexpr std::size_t max_partial_bytes = std::size_t{128} << 20;

}  // namespace bifolio::inline v0_2::cuda
