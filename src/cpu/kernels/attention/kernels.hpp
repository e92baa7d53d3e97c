// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the attention kernels of one ISA receive, and their table. How they work: docs/kernels/attention_cpu.md.
///
/// A *row* is one query token × one query head. All rows of a work item and KV head share its pass over K and V; a
/// row's own sequence of float operations depends on nothing but that row, so its bits do not depend on how the step is
/// split into items.

#include <bifolio/attention.hpp>
#include <cstddef>
#include <cstdint>

#include "common/attention/visibility.hpp"
#include "common/base/kv_code.hpp"

namespace bifolio::inline v0_2::cpu {

/// Keys are processed in KV tiles of this many positions, counted from position 0.
inline constexpr std::int32_t tile_keys = 64;
/// Keys are summed in splits of this many positions, counted from position 0; a row's result is that of its splits'
/// partial results, combined one by one in order of position.
inline constexpr std::int32_t split_keys = 512;
/// Alignment of every array of the workspace, in floats (64 bytes).
inline constexpr std::int32_t workspace_align = 16;
/// Head dims are padded to a multiple of this many in the workspace: two vectors of the widest ISA.
inline constexpr std::int32_t dim_align = 32;

/// A row's running maximum rises only when a tile exceeds it by more than this; e^8 · 512 is far from overflow.
inline constexpr float rescale_threshold = 8.0f;

/// Queries and scores of a KV head are padded to a multiple of this many rows.
inline constexpr std::int32_t row_align = 16;
/// Rows of one row group of the micro-kernels on tile registers, which keep the running split of a group together.
inline constexpr std::int32_t row_group_rows = 16;
/// KV tiles whose outputs they multiply together, in items of more than one row group per KV head.
inline constexpr std::int32_t output_tiles_together = 4;

[[nodiscard]] constexpr std::int32_t padded_dims(std::int32_t head_dim) noexcept {
  return (head_dim + dim_align - 1) / dim_align * dim_align;
}

/// Floats from one partial result to the next: the accumulator, then the running maximum, then the sum.
[[nodiscard]] constexpr std::int64_t partial_stride(std::int32_t head_dim) noexcept {
  return padded_dims(head_dim) + workspace_align;
}

/// Floats of the running split of a row group: accumulators, maxima and sums.
[[nodiscard]] constexpr std::int64_t row_group_floats(std::int32_t head_dim) noexcept {
  return std::int64_t{row_group_rows} * (padded_dims(head_dim) + 2);
}

/// Floats of the probabilities of a row group and KV tile: pairs of 16-bit elements.
inline constexpr std::int64_t row_group_probabilities = std::int64_t{row_group_rows} * tile_keys / 2;

using attn::attention_window;
using attn::visible_range;

/// How a plane stores its elements, for kernels that decode them.
struct coded_plane {
  dtype type = dtype::f32;
  bool is_scaled = false;
  bool is_record = false;
  bool scale_per_head = false;           ///< of static scales
  std::int32_t tail_floats = 0;          ///< scales per token and head in the blocks' tails
  kv_tail_strides tail;                  ///< where they are
  const float* static_scales = nullptr;  ///< or those of the configuration
};

/// One layer's call.
struct attention_args {
  const void* q = nullptr;  ///< [num_tokens, num_q_heads, qk_head_dim]
  void* out = nullptr;      ///< [num_tokens, num_q_heads, v_head_dim]
  float* lse = nullptr;     ///< [num_tokens, num_q_heads] or null
  const void* k = nullptr;
  const void* v = nullptr;
  kv_strides k_strides;
  kv_strides v_strides;
  /// K or V has a code, or they have different types. The kernels for bfloat16 widen codes to their element and apply
  /// scales to logits, probabilities and outputs; those for float32 decode the rows of both.
  bool is_coded = false;
  coded_plane k_code;
  coded_plane v_code;
  const float* alibi_slopes = nullptr;  ///< [num_q_heads] or null
  const float* sinks = nullptr;         ///< [num_q_heads] or null
  const void* bias = nullptr;           ///< [num_tokens, num_q_heads, keys], of bias_type, or null
  std::int64_t bias_token_stride = 0;   ///< 0 = all tokens share a row
  std::int64_t bias_head_stride = 0;    ///< 0 = all heads do
  std::int64_t num_blocks = 0;          ///< of the cache
  std::int64_t q_token_stride = 0;
  std::int64_t q_head_stride = 0;
  std::int64_t out_token_stride = 0;
  std::int64_t out_head_stride = 0;
  attention_window window;
  std::int32_t num_q_heads = 0;
  std::int32_t group_size = 0;
  std::int32_t qk_head_dim = 0;  ///< of q and K
  std::int32_t v_head_dim = 0;   ///< of V and out
  std::int32_t block_size = 0;
  float scale = 0;
  float soft_cap = 0;  ///< 0 = none
  dtype q_type = dtype::f32;
  dtype out_type = dtype::f32;
  dtype bias_type = dtype::f32;
};

/// Some tokens of one sequence × some KV heads × some splits of the keys.
struct attention_item {
  std::int64_t first_token = 0;     ///< row of q and out
  std::int64_t first_position = 0;  ///< of that token in its sequence
  std::int64_t seq_len = 0;
  const std::int32_t* block_table = nullptr;  ///< the sequence's row
  std::int32_t num_tokens = 0;
  std::int32_t kv_head_begin = 0;
  std::int32_t kv_head_end = 0;
  std::int32_t split_begin = 0;
  std::int32_t split_end = 0;
  /// Where partial results go, [split − first split of the tokens][row] of `partial_stride` floats; null when the item
  /// holds all splits of its rows and writes out and lse itself. Rows are numbered
  /// (kv_head − kv_head_begin) · num_tokens · group_size + token · group_size + head of the group.
  float* partials = nullptr;
  /// Peeks at the work item that this worker will probably run next, so that its first keys and values can be
  /// prefetched; false: there is none. May be null.
  bool (*peek_next)(void* context, attention_item& next) noexcept = nullptr;
  void* peek_context = nullptr;
  bool is_prefetched = false;  ///< this item's first keys and values were
};

/// One worker's arrays, sized by the plan for the largest item.
struct attention_scratch {
  float* keys = nullptr;     ///< [padded qk_head_dim][tile_keys], the tile transposed
  float* values = nullptr;   ///< [tile_keys][padded v_head_dim], or a row of padded qk_head_dim
  float* queries = nullptr;  ///< [KV heads][row groups][qk_head_dim, padded][rows of the group]
  float* scores = nullptr;   ///< [rows of one KV head][tile_keys]
  float* states = nullptr;   ///< the running split: [rows][partial_stride] or [KV heads][row groups][row_group_floats]
  float* sums = nullptr;     ///< [rows][16], the running split's sums, one per vector lane
  float* totals = nullptr;   ///< [rows][partial_stride], the splits combined so far
  /// Sums over the dims of the queries, for codes of K with a zero point: [rows]
  float* query_sums = nullptr;
  /// [tile_keys][larger padded head_dim] elements of KV, for layouts that are not contiguous in dims
  void* staging = nullptr;
  // Of 16-bit types, where a KV head has more than one row group; what the outputs on tile registers are made of:
  float* probabilities = nullptr;   ///< [output_tiles_together][row groups][row_group_probabilities]
  float* value_pairs = nullptr;     ///< [output_tiles_together][tile_keys / 2][padded v_head_dim], V in pairs of keys
  std::int32_t* pending = nullptr;  ///< [row groups], a bit per KV tile that the accumulators lack
  void* zero_row = nullptr;         ///< [larger padded head_dim] elements of KV, all zero
};

/// How an implementation multiplies (src/cpu/implementations.hpp).
enum class attention_loops : std::uint8_t {
  tiles,     ///< tile registers
  dots,      ///< products of pairs of 16-bit elements on vector registers
  vectors,   ///< elements widened to float32
  integers,  ///< scores as integer products of i8 codes with rounded queries
};
inline constexpr std::size_t num_attention_loops = 4;

/// The kernels of one implementation and dtype of the KV cache; null where an ISA does not have them. All work of a
/// call is done by kernels of the same loops, because different loops sum in different orders.
struct item_kernels {
  using kernel = void (*)(const attention_args& args, const attention_item& item,
                          const attention_scratch& scratch) noexcept;
  kernel run = nullptr;      ///< computes one item
  kernel combine = nullptr;  ///< combines the partial results of all splits of the item's rows, writes out and lse
};

struct attention_kernels {
  item_kernels items[num_attention_loops][num_dtypes];
  /// Rows [begin, end) of token · num_heads + head of merge_states.
  void (*merge)(const merge_params& params, std::int64_t begin, std::int64_t end) noexcept;

  [[nodiscard]] constexpr const item_kernels& items_of(attention_loops loops, dtype kv_type) const noexcept {
    return items[static_cast<std::size_t>(loops)][static_cast<std::size_t>(kv_type)];
  }
};

}  // namespace bifolio::inline v0_2::cpu
