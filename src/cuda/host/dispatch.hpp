// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Which kernel serves an attention call. The general kernel serves everything; the tensor-core kernels of sm80/ and
/// sm90/ take the shapes they are made for, first at planning (`plan_fast`: host lengths in, words to upload out), then
/// at each layer's call (`try_launch_fast`), where the layout and alignment of the pointers are known too.

#include <bifolio/attention.hpp>
#include <bifolio/error.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/host/kernel_args.hpp"
#include "cuda/host/runtime.hpp"

namespace bifolio::cuda {

/// What a family needs to know of the machine.
struct device_numbers {
  std::int32_t compute_capability = 0;  ///< 10 · major + minor
  std::int32_t num_sms = 0;
  std::size_t max_shared_bytes_per_block = 0;  ///< opt-in
  std::size_t l2_bytes = 0;
  /// Kernels may start before the one ahead of them has ended (see `launch`): the device can, and the code that runs on
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
  const std::int32_t* query_positions = nullptr;  ///< [num_seqs] or null; the general kernel alone takes them
  std::int64_t num_tokens = 0;
  std::int32_t max_query_len = 0;
  std::int32_t max_seq_len = 0;
  device_numbers device;
};

/// What a fast family wants kept for its launches. `words` travel to the device in the plan's one upload.
struct fast_plan {
  bool usable = false;
  std::int32_t family = 0;       ///< for the family's own use; a captured graph depends on it
  std::int32_t numbers[8] = {};  ///< likewise, e.g. grid sizes
  std::vector<std::int32_t> words;
  std::size_t workspace_bytes = 0;
  std::size_t num_counters = 0;

  /// Used while planning; kept for its capacity.
  struct row_tile {
    std::int64_t num_keys;
    std::int32_t seq;
    std::int32_t tile;
  };
  std::vector<std::int32_t> prefill_seqs;
  std::vector<row_tile> row_tiles;
};

/// Fills `plan` (its vectors' capacity is kept) or leaves usable = false. May throw std::bad_alloc.
void plan_fast(const plan_input& input, fast_plan& plan);

/// Whether the planned fast kernels take this call; otherwise it goes to the general kernel. Decides by the arguments
/// alone.
[[nodiscard]] bool fast_serves(const attention_kernel_args& args, const fast_plan& plan) noexcept;

/// Launches the planned fast kernels; for calls that they serve. Allocates nothing.
[[nodiscard]] cudaError_t launch_fast(const runtime_api& api, const attention_kernel_args& args, const fast_plan& plan,
                                      const device_numbers& device, cudaStream_t stream) noexcept;

/// K and V of one head_dim in planes of their own: what all kernels but the general one are made for.
[[nodiscard]] inline bool has_plain_planes(const attention_spec& spec) noexcept {
  return spec.qk_head_dim == spec.v_head_dim && spec.k_code == spec.v_code && !spec.v_in_k;
}

/// "cuda <kernel> <type> d<head_dim>": how names of kernels made for one head_dim begin.
[[nodiscard]] std::string shape_name(const char* kernel, dtype type, std::int32_t head_dim);
/// The tensor-core kernels that this device can run; and, of a call that they serve, the one that computes each
/// sequence with new tokens.
void append_fast_kernel_names(const device_numbers& device, std::vector<std::string>& names);
void name_fast_kernels(const attention_kernel_args& args, const attention_spec& spec, const fast_plan& plan,
                       const std::vector<std::int32_t>& query_lens, std::vector<std::string>& names);

}  // namespace bifolio::cuda
