// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What comes between the projections of a layer and attention, in one call: heads of q and k are normalised (RMSNorm)
/// and rotated (rotary position embeddings), q is written to where attention reads it, and k and v are stored as by
/// `append`. A model that needs no RMSNorm, no rotation or no queries leaves that part out.
///
/// The arithmetic, for each head of q and of k, is float32, one rounding per operation, nothing fused, in this order:
///
///   norm     r = 1 / √(Σ x² / head_dim + epsilon),  x ← (x · r) · weight. The sum goes over 64 sums, dim d into number
///            d mod 64 by rising d; then, of s[8i + j], those of one i by ((0+4)+(2+6)) + ((1+5)+(3+7)), and the
///            eight results in the same way.
///   rotate   of each pair (a, b):  a ← a·cos − b·sin,  b ← b·cos + a·sin
///   round    NaN becomes 0x7fc00000 in every dim, rotated or not; then one rounding to the dtype of q_out, or to the
///            code of the K plane. K is stored bit for bit as `append` stores float32 rows of these values.
///
/// So what is written is the same bits on every backend and ISA. Rounding the rotated rows to a narrow type before they
/// are appended is another rounding, and may give other bits.

#include <bifolio/backend.hpp>
#include <bifolio/device.hpp>
#include <bifolio/error.hpp>
#include <bifolio/export.hpp>
#include <bifolio/tensor_view.hpp>
#include <cstdint>
#include <optional>

namespace bifolio::inline v0_2 {

/// Which dims of the rotated ones are pair number i.
enum class rope_pairing : std::uint8_t {
  neox,  ///< (i, i + rotary_dim / 2): halves, as Hugging Face's Llama has them
  gptj,  ///< (2i, 2i + 1): neighbours, as GPT-J, llama2.c and DeepSeek have them
};

/// Rotary position embeddings of dims [rotary_offset, rotary_offset + rotary_dim) of a head. All of linear, NTK, YaRN,
/// Llama 3 and longrope scaling is in the table; frequencies of 0 are cosines of 1 and sines of 0.
struct rotary_params {
  rope_pairing pairing = rope_pairing::neox;
  std::int32_t rotary_dim = 0;  ///< even; 0: nothing is rotated, and of this struct nothing else is looked at
  std::int32_t rotary_offset = 0;
  const float* cos_sin = nullptr;  ///< [num_positions, rotary_dim]: the cosine of each pair, then the sine of each
  std::int64_t num_positions = 0;  ///< rows of the table
  /// [num_axes, num_tokens]. A position outside the table: out_of_range on the CPU; on a GPU, where the host cannot see
  /// it, neither q nor k nor v of that token is written.
  const std::int32_t* positions = nullptr;
  std::int32_t num_axes = 1;  ///< positions of a token: above 1 as M-RoPE has them, time, height and width
  /// [rotary_dim / 2]: whose position each pair takes, below num_axes; null: number 0. M-RoPE in sections is 0…0 1…1
  /// 2…2, interleaved 0 1 2 0 1 2 … An entry past the axes: out_of_range on the CPU; on a GPU it counts as 0.
  const std::uint8_t* axis_of_pair = nullptr;
};

/// RMSNorm of heads before they are rotated. A weight of null leaves them as they are.
struct head_norm_params {
  const float* q_weight = nullptr;  ///< [head_dim of K]
  const float* k_weight = nullptr;  ///< [head_dim of K]
  float epsilon = 1e-6f;
};

/// All pointers are of the backend's device. q_out shares no memory with the cache or with the rows of k and v; the
/// table, positions, axes and weights share none with anything that is written, which is not checked.
struct rotate_append_params {
  append_params append{};  ///< the rows of k are not changed
  const_tensor_view q{};   ///< [num_tokens, num_q_heads, head_dim of K], of the dtype of k; no heads: no queries
  tensor_view q_out{};     ///< the shape of q, of any dtype of tensors; may be q itself with equal dtype and strides
  rotary_params rotary{};
  head_norm_params norm{};
};

/// Heads of more dims are unsupported.
inline constexpr std::int32_t largest_rotated_head_dim = 4096;

/// Why `backend::rotate_append` would refuse these arguments, as a sentence; empty when it would not. Reads the structs
/// and, where the backend is on the host (`where`), slots, positions and axes.
///
/// invalid_argument: what `append` refuses; another number of tokens of q and k, other shapes of q and q_out, a dtype
/// of q that is not that of k, a head_dim of q that is not that of K; rotary_dim that is odd, negative, or with
/// rotary_offset past the head; num_axes outside [1, 255]; a pointer that is needed and null, or not aligned to its
/// element; epsilon that is negative or not finite; q_out that may share memory with q other than in place, with the
/// cache or with k and v. unsupported: head_dim above `largest_rotated_head_dim`.
[[nodiscard]] BIFOLIO_API std::optional<error> find_problem(const rotate_append_params& params, device where = {});

}  // namespace bifolio::inline v0_2
