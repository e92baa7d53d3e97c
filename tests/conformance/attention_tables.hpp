// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The cases that every backend must compute right, as tables. One axis at a time first, so that a failure names its
/// cause; then a pairwise covering design over all axes and seeded random combinations, so that no two of them meet for
/// the first time in production.

#include <cstdint>
#include <vector>

#include "conformance/attention_case.hpp"

namespace bifolio::test {

inline constexpr std::int32_t head_dims[] = {8, 32, 48, 64, 71, 80, 96, 112, 128, 192, 256};
inline constexpr std::int32_t block_sizes[] = {1, 5, 8, 16, 32, 64, 128};
inline constexpr std::int32_t group_sizes[] = {1, 2, 3, 4, 7, 8, 16};
inline constexpr std::int32_t lengths[] = {0, 1, 15, 16, 17, 63, 64, 65, 1000, 4097};
inline constexpr auto& dtypes = tensor_dtypes;

[[nodiscard]] std::vector<attention_case> decode_cases();
[[nodiscard]] std::vector<attention_case> prefill_cases();
[[nodiscard]] std::vector<attention_case> empty_cases();
[[nodiscard]] std::vector<attention_case> head_dim_cases();
/// V of another head_dim than K, and V as part of K (multi-head latent attention with 576 and 512 among it): shapes ×
/// layouts × dtypes, then each option.
[[nodiscard]] std::vector<attention_case> plane_cases();
[[nodiscard]] std::vector<attention_case> block_size_cases();
[[nodiscard]] std::vector<attention_case> group_cases();
[[nodiscard]] std::vector<attention_case> length_cases();
[[nodiscard]] std::vector<attention_case> dtype_cases();
[[nodiscard]] std::vector<attention_case> layout_cases();
[[nodiscard]] std::vector<attention_case> option_cases();
[[nodiscard]] std::vector<attention_case> value_cases();
[[nodiscard]] std::vector<attention_case> covering_cases(std::uint64_t seed);
[[nodiscard]] std::vector<attention_case> random_cases(std::uint64_t seed, int count);
/// The same with V of any head_dim, or part of K.
[[nodiscard]] std::vector<attention_case> random_plane_cases(std::uint64_t seed, int count);
/// Random cases of the shapes that GPUs have tensor-core kernels for: one 16-bit type, head_dim 64, 128 or 256.
[[nodiscard]] std::vector<attention_case> half_precision_cases(std::uint64_t seed, int count);

/// Small random cases with ALiBi slopes of up to 128, and of both signs: scores of thousands, whose rounding exceeds
/// that of everything else, and weights too small for float32.
[[nodiscard]] std::vector<attention_case> steep_cases(std::uint64_t seed, int count);

/// The one-axis tables once more for the shapes that GPUs have tensor-core kernels for: f16 and bf16, aligned, head_dim
/// 64, 128 and 256, each case with decodes, a prefill and a chunk.
[[nodiscard]] std::vector<attention_case> half_precision_option_cases();
[[nodiscard]] std::vector<attention_case> half_precision_value_cases();
[[nodiscard]] std::vector<attention_case> half_precision_length_cases();
/// Block sizes, group sizes, layouts and mixed dtypes.
[[nodiscard]] std::vector<attention_case> half_precision_shape_cases();
/// Other head_dims and float32 on a GPU's tensor-core kernels, and head_dims that they do not take.
[[nodiscard]] std::vector<attention_case> padded_head_dim_cases();
/// Deterministic plans with prompts that a prefill kernel takes, of every width that one is compiled for up to 256.
[[nodiscard]] std::vector<attention_case> deterministic_prompt_cases();
[[nodiscard]] std::vector<attention_case> half_precision_batch_cases();
[[nodiscard]] std::vector<attention_case> half_precision_transform_cases();

/// Codes as the CUDA decode kernel takes them: q and out of one 16-bit type, aligned, K and V with equal strides. Every
/// pair of such codes with every width of head_dim and both sides of each, then with every option.
[[nodiscard]] std::vector<attention_case> coded_decode_cases();

/// Shapes and options on both sides of what the CUDA prefill kernel tells apart: widths of head_dim, ways of loading,
/// tiles with and without a border, arguments of the soft cap.
[[nodiscard]] std::vector<attention_case> prefill_border_cases();

/// The x_split layout: dtype × head_dim × block size × how the decode kernel is launched, with groups and options in
/// turn.
[[nodiscard]] std::vector<attention_case> x_split_cases();

/// Longer contexts than a quick run can afford.
[[nodiscard]] std::vector<attention_case> long_cases(std::uint64_t seed);

}  // namespace bifolio::test
