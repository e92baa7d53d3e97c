// SPDX-License-Identifier: Apache-2.0
#pragma once

// clang-format off
/// The ordered list of CPU attention implementations, in the order in which they are asked:
///
///   tiles    tile registers (AMX)                           queries, KV cache and output of one 16-bit dtype, or a
///                                                           cache of codes beside bf16, but for u8, by itself where
///                                                           a KV head has eight query heads or more; no bias
///   dots     dot products of bf16 pairs, vector registers   queries, KV cache and output bf16; beside tiles by itself only
///                                                           for codes, where a KV head has one or two query heads
///   integers products of 8-bit integers, vector registers   queries and output bf16, K of i8 codes, V of codes or bf16;
///                                                           only where it is forced by name: it rounds queries
///   vectors  float32 multiply-adds, vector registers        everything
// clang-format on
///
/// Every 8-bit code is exactly a bfloat16: a cache of codes (or of codes and bf16) is a KV cache of bf16 here, widened
/// tile by tile. Other pairs of types are decoded into float32 row by row.
///
/// A kernel table has those of its ISA. All of them work on the same items, so that a plan is the same for each, and a
/// call launches the item kernels of one of them. They sum in different orders: which one computes a call follows from
/// dtypes, bias and ISA alone, never from lengths, so that a row's bits do not depend on its batch.

#include <bifolio/attention.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/kv_code.hpp"
#include "cpu/kernels/kernel_table.hpp"

namespace bifolio::inline v0_2::cpu {

/// What an implementation accepts or declines: a plan's dtypes on one ISA, and what a call adds to them.
struct attention_problem {
  const kernel_table& table;
  dtype q_type;
  kv_code k_code;
  kv_code v_code;
  dtype out_type;
  std::int32_t group_size = 1;  ///< query heads of a KV head
  bool has_bias = false;        ///< known per call

  /// K or V has a code, or they have different types.
  [[nodiscard]] bool is_coded() const noexcept { return !detail::is_plain_and_alike(k_code, v_code); }
  /// They are 8-bit codes, or one of them and bf16.
  [[nodiscard]] bool is_widened() const noexcept;
  /// The element of the kernels that compute it.
  [[nodiscard]] dtype kernel_type() const noexcept {
    if (!is_coded()) return k_code.type;
    return is_widened() ? dtype::bf16 : dtype::f32;
  }
  /// As names of kernels spell it.
  [[nodiscard]] std::string_view kernel_type_name() const noexcept;
};
inline constexpr std::string_view widened_kernel_type = "bf16-codes";
inline constexpr std::string_view decoded_kernel_type = "coded";

[[nodiscard]] attention_problem problem_of(const kernel_table& table, const attention_spec& spec) noexcept;
[[nodiscard]] attention_problem problem_of(const kernel_table& table, const attention_spec& spec,
                                           const attention_params& params) noexcept;

struct attention_implementation {
  std::string_view name;
  attention_loops loops;
  bool takes_mixed_dtypes;
  bool takes_bias;
  bool takes_codes;  ///< that are widened
  bool takes_zeros;  ///< codes with zero points, u8, as well
  /// Query heads of a KV head from which it is the fastest for codes: with fewer it is taken only where it is forced.
  std::int32_t least_group_of_codes;
  /// Where the ISA has tiles it is taken unless forced for codes alone, up to so many query heads; 0: for all.
  std::int32_t most_group_beside_tiles;
  bool decodes_rows;  ///< and other pairs of types
  /// Rows of a query tile of prefill, for which a KV tile is packed once: more of them cost room in L2.
  std::int32_t prefill_rows;
  /// Queries become 8-bit integers: only i8 codes of K, and only where it is forced.
  bool rounds_queries;

  /// Without being forced, if it accepts.
  [[nodiscard]] bool is_asked(const attention_problem& problem) const noexcept {
    return !rounds_queries && !(problem.is_coded() && problem.group_size < least_group_of_codes) &&
           !yields_beside_tiles(problem);
  }
  [[nodiscard]] bool yields_beside_tiles(const attention_problem& problem) const noexcept;
  /// `why` is null, or receives why not.
  [[nodiscard]] bool accepts(const attention_problem& problem, std::string* why) const noexcept;
};

[[nodiscard]] std::span<const attention_implementation> attention_implementations() noexcept;

/// The first that accepts a call and need not be forced; where a plan was forced (`forced`, the name) that one or, when
/// it declines, null.
[[nodiscard]] const attention_implementation* implementation_of(const attention_problem& call,
                                                                std::string_view forced) noexcept;

/// A sentence per implementation for `backend::explain`.
[[nodiscard]] std::vector<std::string> explain_implementations(const attention_problem& planned,
                                                               std::string_view forced, std::int32_t num_seqs);

}  // namespace bifolio::inline v0_2::cpu
