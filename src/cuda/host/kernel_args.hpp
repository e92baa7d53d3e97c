// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The plain structs that CUDA launchers and kernels receive. They are passed to kernels by value; pointers are device
/// pointers, strides are in elements and multiplied in 64 bits, and the shape is next to each pointer. What a kernel
/// needs besides is in a struct of its own, which embeds this one, next to the kernel.

#include <bifolio/dtype.hpp>
#include <bifolio/kv_layout.hpp>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/host/code_scales.hpp"

namespace bifolio::inline v0_2::cuda {

/// One planned attention call. Everything but the numbers that `attention_params` brings per layer is as planned, and
/// the plan's device arrays keep their addresses from step to step, so that a captured graph replays with new lengths.
///
/// Rows: for sequence i with query_len = query_start_loc[i+1] − query_start_loc[i], row r in [0, query_len ·
/// group_size) is token r / group_size and query head kv_head · group_size + r % group_size.
struct attention_kernel_args {
  const void* q = nullptr;  ///< [num_tokens, num_q_heads, head_dim], dims contiguous, of q_type
  std::int64_t q_token_stride = 0;
  std::int64_t q_head_stride = 0;
  void* out = nullptr;  ///< [num_tokens, num_q_heads, v_head_dim], dims contiguous, of out_type
  std::int64_t out_token_stride = 0;
  std::int64_t out_head_stride = 0;
  float* lse = nullptr;  ///< optional, [num_tokens, num_q_heads], natural log

  const void* k = nullptr;  ///< [num_blocks, …] in the order of k_strides, of kv_type
  const void* v = nullptr;  ///< [num_blocks, …] in the order of v_strides, of kv_type
  kv_strides k_strides;
  kv_strides v_strides;
  std::int64_t num_blocks = 0;

  const std::int32_t* query_start_loc = nullptr;  ///< [num_seqs + 1]
  const std::int32_t* seq_lens = nullptr;         ///< [num_seqs]
  const std::int32_t* query_positions = nullptr;  ///< optional, [num_seqs]; the general kernel alone looks at them
  const std::int32_t* block_tables = nullptr;     ///< [num_seqs, block_table_stride]; never read past the length
  std::int64_t block_table_stride = 0;
  const float* alibi_slopes = nullptr;  ///< optional, [num_q_heads]
  const float* sinks = nullptr;         ///< optional, [num_q_heads]

  const void* bias = nullptr;          ///< optional, [num_tokens, num_q_heads, keys], keys contiguous, of bias_type
  std::int64_t bias_token_stride = 0;  ///< 0 = all tokens share a row
  std::int64_t bias_head_stride = 0;   ///< 0 = all heads do
  dtype bias_type = dtype::f32;

  std::int32_t num_seqs = 0;
  std::int64_t num_tokens = 0;
  std::int32_t num_q_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t group_size = 0;
  std::int32_t head_dim = 0;    ///< of q and K; in the tensor-core and x_split kernels of V and out as well
  std::int32_t v_head_dim = 0;  ///< of V and out
  std::int32_t block_size = 0;

  float scale = 0;
  float soft_cap = 0;              ///< 0 = none
  std::int32_t window_left = -1;   ///< negative = all
  std::int32_t window_right = -1;  ///< negative = all; causal is already folded into it as 0
  bool causal = true;
  bool deterministic = false;
  std::int32_t min_query_len = 0;  ///< the general kernel leaves sequences with fewer new tokens to another kernel

  dtype q_type = dtype::f32;
  dtype kv_type = dtype::f32;  ///< of K, and of V where they have one type and no code
  dtype out_type = dtype::f32;

  /// K or V has a code, or they have different types: kernels then look at the types and scales of both.
  bool is_coded = false;
  bool is_record = false;  ///< a token's row is a kv_record: k_type e4m3, no scales here
  dtype k_type = dtype::f32;
  dtype v_type = dtype::f32;
  code_scales k_scales{};
  code_scales v_scales{};

  // From the plan; used by one implementation after another.
  float* workspace = nullptr;         ///< partial results, overwritten by each call
  std::uint32_t* counters = nullptr;  ///< zero between calls: the CTA that counts up to the end resets
};

/// Whether tensor cores multiply these types: one 16-bit type for q, K, V and the output.
[[nodiscard]] constexpr bool suit_tensor_cores(dtype q_type, dtype kv_type, dtype out_type) noexcept {
  const bool one_type = q_type == kv_type && out_type == kv_type;
  switch (kv_type) {
    case dtype::f32:
    case dtype::e4m3:
    case dtype::e5m2:
    case dtype::i8:
    case dtype::u8:
      return false;
    case dtype::f16:
    case dtype::bf16:
      return one_type;
  }
  return false;
}

/// Tensor-core kernels add windows to positions in 32 bits. Sequences shorter than this cannot tell a longer window
/// from one of this length; longer sequences go to the general kernel.
inline constexpr std::int32_t longest_window = 1 << 30;
[[nodiscard]] constexpr std::int32_t clamped_window(std::int32_t window) noexcept {
  return window < longest_window ? window : longest_window;
}

/// The arguments as tensor-core kernels take them: windows clamped, and causality not folded into window_right.
[[nodiscard]] inline attention_kernel_args with_clamped_windows(const attention_kernel_args& args) noexcept {
  attention_kernel_args clamped = args;
  clamped.window_left = clamped_window(args.window_left);
  clamped.window_right = args.causal ? -1 : clamped_window(args.window_right);
  return clamped;
}

/// Whether a call needs more of a tensor-core kernel than a positive scale and the causal mask. Without options the
/// prefill kernel takes the maximum of a row before it scales it.
[[nodiscard]] inline bool has_options(const attention_kernel_args& args) noexcept {
  return !(args.scale > 0) || args.window_left >= 0 || (!args.causal && args.window_right >= 0) || args.soft_cap > 0 ||
         args.alibi_slopes != nullptr || args.sinks != nullptr;
}

/// What every tensor-core kernel requires of a call of one type: no bias, K and V with equal strides, dims of q, K,
/// V and out contiguous, and each of their rows aligned to 16 bytes. `why`: null, or receives what is not so.
/// `blocks_may_differ`: K and V may have other strides from block to block.
[[nodiscard]] bool suits_tensor_cores(const attention_kernel_args& args, std::string* why,
                                      bool blocks_may_differ = false) noexcept;

}  // namespace bifolio::inline v0_2::cuda
