// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Tile sizes and shared memory of one decode kernel, for launcher and kernel alike.

#include <bifolio/detail/host_device.hpp>
#include <cstdint>
#include <type_traits>

#include "cuda/attention/decode/metadata.hpp"
#include "cuda/host/kernel_args.hpp"

namespace bifolio::inline v0_2::cuda::decode {

/// In the place of an element type: K and V of any codes, queries and output of either 16-bit type. Codes meet the
/// tensor cores as float16, into which every one of them goes exactly. An output tile has at most `RowGroups` groups of
/// decode_few_rows rows.
template <int RowGroups>
struct coded {};
/// The same of V alone: K is of the 16-bit type of the queries, and multiplied in it.
template <int RowGroups>
struct coded_values_alone {};
/// The same of K alone: V is of either 16-bit type, and multiplied in it.
template <int RowGroups>
struct coded_keys_alone {};
/// Float32 where no output tile has more than decode_few_rows rows, and the same in deterministic plans.
struct f32_few_rows {};
struct f32_few_tree_rows {};
inline constexpr int coded_query_rows_bytes = 128;
inline constexpr int coded_static_scales_bytes = 32;

template <class T>
inline constexpr int row_groups_of = 0;  // no codes
template <int RowGroups>
inline constexpr int row_groups_of<coded<RowGroups>> = RowGroups;
template <int RowGroups>
inline constexpr int row_groups_of<coded_values_alone<RowGroups>> = RowGroups;
template <int RowGroups>
inline constexpr int row_groups_of<coded_keys_alone<RowGroups>> = RowGroups;
template <class T>
inline constexpr bool has_wide_keys_of = false;
template <int RowGroups>
inline constexpr bool has_wide_keys_of<coded_values_alone<RowGroups>> = true;
template <class T>
inline constexpr bool has_wide_values_of = false;
template <int RowGroups>
inline constexpr bool has_wide_values_of<coded_keys_alone<RowGroups>> = true;

/// The same element where no output tile has more than decode_few_rows rows.
template <class T>
struct few_rows_of;
template <template <int> class Codes>
struct few_rows_of<Codes<2>> {
  using type = Codes<1>;
};

/// Bytes from the start of the CTA's dynamic shared memory.
struct shared_layout {
  int stages;         // K and V tiles, with codes also their scales; the epilogue reduces over warps in a free one
  int queries;        // one buffer per stage
  int query_rows;     // of codes: coded_query_rows
  int static_scales;  // of codes: K's for the KV head of the queries in each buffer
  int row_sums;       // maximum and sum per warp and row
  int flag;           // of the combine
  int zeros;          // 16 bytes of them
  int plan;           // what the CTA needs of it
  int exchange;       // of shapes that split dims: tree_exchange or f32_tree_exchange; by_fma: probabilities
  int bytes;          // of everything
};

/// Rows of one element size in shared memory.
template <int ElementBytes, int HeadDim>
struct row_format {
  static constexpr int vector_dims = 16 / ElementBytes;
  static constexpr int vectors = HeadDim / vector_dims;  // of 16 bytes
  /// Rows of a multiple of 128 bytes are swizzled, others are an odd number of vectors apart: the same vector of eight
  /// rows is in eight places of the 128 bytes that shared memory reads at once.
  static constexpr bool swizzled = vectors % 8 == 0;
  static constexpr int bytes = (swizzled ? vectors : vectors + 1) * 16;

  /// Where 16-byte vector `vector` of row `row` of a tile is, from the tile's beginning.
  [[nodiscard]] BIFOLIO_HOST_DEVICE static constexpr std::uint32_t place(int row, int vector) noexcept {
    return static_cast<std::uint32_t>(row * bytes + ((swizzled ? vector ^ (row & 7) : vector) << 4));
  }
  /// Where vector v + `more` of a row is, in shared memory, from the address of its vector v, which is less than 8. No
  /// bit is in both of them. Tiles begin at multiples of 256.
  [[nodiscard]] BIFOLIO_HOST_DEVICE static constexpr std::uint32_t vectors_later(std::uint32_t address,
                                                                                 int more) noexcept {
    const auto step = static_cast<std::uint32_t>(more) << 4;
    if (!swizzled) return address + step;
    if (bytes == 128 || bytes == 256) return address ^ step;  // no row begins within the bits that are turned over
    return (address ^ (step & 0x7f)) + (step & ~0x7fu);
  }
};

/// The dims of the padded shape before that of `head_dim`.
[[nodiscard]] constexpr int dims_of_smaller_shape(int element_bytes, int head_dim) noexcept {
  const dtype type = element_bytes == 4 ? dtype::f32 : element_bytes == 2 ? dtype::bf16 : dtype::e4m3;
  int smaller = 0;
  for (int dims = 4; decode_padded_dim(type, dims) < head_dim; dims += 4) smaller = decode_padded_dim(type, dims);
  return smaller;
}

/// What the warps of a CTA tell one another about a KV tile, where they split dims.
template <int Warps>
struct tree_exchange {
  std::uint16_t probabilities[decode_tile_rows * decode_tile_tokens];  // rows of 128 bytes, swizzled
  float maxima[Warps][decode_tile_rows];                               // of each warp's keys
  float sums[4][decode_tile_rows][4];                                  // of a leaf, by group of 16 keys and lane
  float pairs[Warps == 4 ? 1 : Warps][decode_tile_rows][4];            // of warps that have half a group
};

/// The same of float32, of groups of decode_few_rows query rows: probabilities as they are.
template <int Groups>
struct f32_tree_exchange {
  static constexpr int row_floats = decode_tile_tokens + 8;  // so far apart four rows are in different banks
  static constexpr int key_warps = 4;
  float probabilities[Groups * decode_few_rows * row_floats];
  float maxima[Groups * decode_few_rows / 2][key_warps][2];  // by pair of rows
};

/// `Padded`: for every head_dim whose rows are whole vectors of 16 bytes, which fits and is too large for the next
/// smaller padded shape. Rows are then in shared memory with unused vectors at their ends: those of queries are zero,
/// those of K are not looked at, and those of V make columns of the output that are not stored.
template <class T, int HeadDim, int Warps, bool Padded>
struct shape {
  static constexpr int row_groups = row_groups_of<T>;
  static constexpr bool is_coded = row_groups > 0;
  static constexpr bool has_wide_keys = has_wide_keys_of<T>;
  static constexpr bool has_wide_values = has_wide_values_of<T>;
  static constexpr bool is_mixed = has_wide_keys || has_wide_values;
  static constexpr bool by_fma = std::is_same_v<T, f32_few_rows>;
  static constexpr bool is_few_tree = std::is_same_v<T, f32_few_tree_rows>;
  static constexpr bool is_few_f32 = by_fma || is_few_tree;
  static constexpr int element_bytes = is_coded ? 1 : is_few_f32 ? 4 : sizeof(T);  // of K and V but for a wide one
  static constexpr int k_element_bytes = has_wide_keys ? 2 : element_bytes;
  static constexpr int v_element_bytes = has_wide_values ? 2 : element_bytes;
  static constexpr int q_element_bytes = is_coded ? 2 : is_few_f32 ? 4 : sizeof(T);
  static_assert(Warps == 4 || Warps == 8);
  static_assert(HeadDim % (is_coded ? 32 : 16) == 0 && (Padded || HeadDim % 64 == 0) && element_bytes <= 4);
  static constexpr int head_dim = HeadDim;
  static constexpr bool padded = Padded;
  static constexpr int warps = Warps;
  static constexpr int threads = 32 * Warps;
  static constexpr int ctas_per_sm = Warps == 8 ? 1 : 2;
  /// Two CTAs of 128 threads leave room for a small CTA of another stream's kernel, such as a swap.
  static constexpr int max_registers = Warps == 8 ? 255 : is_coded ? 240 : 224;

  static constexpr int warp_keys = decode_tile_tokens / Warps;
  static constexpr int key_tiles = warp_keys / 8;  // of a warp's score products
  static constexpr int n_tiles = HeadDim / 8;      // of the output
  /// In deterministic plans the warps split the dims of the output instead of the keys, so that a leaf's output is one
  /// chain of products, which prefill computes too (combine_tree.cuh). Codes are not prefill's.
  static constexpr bool splits_dims = decode_splits_dims(element_bytes) && !by_fma;
  /// Of float32: the groups of decode_few_rows rows that are the columns of products there.
  static constexpr int tree_columns = !splits_dims || element_bytes != 4 ? 0 : is_few_tree ? 1 : 2;
  /// Whether a CTA's part of an output tile is one work tile there, whose pieces are stored as they are complete.
  static constexpr bool takes_parts = tree_columns > 0;
  /// Where registers are short the queries stay in shared memory.
  static constexpr bool q_in_registers = Warps == 4 || (row_groups == 1 && HeadDim <= 192);

  using kv_rows = row_format<element_bytes, HeadDim>;
  using q_rows = row_format<q_element_bytes, HeadDim>;
  using k_rows = row_format<k_element_bytes, HeadDim>;
  using v_rows = row_format<v_element_bytes, HeadDim>;
  static constexpr int row_vectors = kv_rows::vectors;
  static constexpr int k_steps = q_rows::vectors / 2;  // of a score product
  /// What every head_dim of the shape has: more than the next smaller padded shape takes.
  static constexpr int least_row_vectors =
      Padded ? dims_of_smaller_shape(element_bytes, HeadDim) / kv_rows::vector_dims + 1 : row_vectors;
  static constexpr int rows_per_pass = 32 / row_vectors;  // that a warp loads at once; not of padded shapes
  static constexpr int passes = (warp_keys * v_rows::vectors + 31) / 32;
  static constexpr int k_passes = (warp_keys * k_rows::vectors + 31) / 32;
  static_assert(Padded || warp_keys * row_vectors % 32 == 0);

  /// Whether the loader knows tiles about whose rows nothing need be asked. It costs registers, which others lack.
  /// With them ptxas 13.0 may write the copies of the pipeline's first stages in a form that devices refuse as illegal
  /// instructions. A loop over those stages keeps it from that; so does `has_shared_places` of the loader, of float32.
  static constexpr bool has_steady_tiles = is_coded || element_bytes == 4;
  /// Whether queries are taken between two tiles, so that no tile asks whether it is the first.
  static constexpr bool takes_queries_before = is_coded || by_fma;
  /// Of padded shapes the loads of such a tile are the rows' vectors one after another, each with a place and an offset
  /// of its own. Elements of four bytes have so many vectors that lanes beyond the end of a row may be idle instead.
  static constexpr bool has_run_offsets = padded && element_bytes != 4;
  /// Of the passes that load a warp's rows: where they go repeats after so many, or follows from the first.
  static constexpr int different_places = has_run_offsets                           ? passes
                                          : kv_rows::swizzled && element_bytes != 4 ? 8 / rows_per_pass
                                                                                    : 1;

  static constexpr int tile_bytes = decode_tile_tokens * v_rows::bytes;
  static constexpr int k_tile_bytes = decode_tile_tokens * k_rows::bytes;
  /// Of codes: a scale for each token, of K and of V, and behind them as many zero points.
  static constexpr int scale_bytes = 4;
  static constexpr int scales_bytes = is_coded ? decode_tile_tokens * scale_bytes : 0;
  static constexpr int stage_bytes = k_tile_bytes + tile_bytes + 4 * scales_bytes;
  static constexpr int q_bytes = decode_tile_rows * q_rows::bytes;
  /// Of codes as many as fit, up to 8: half of the bytes a stage, and as many in flight.
  static constexpr int fitting_stages = (Warps == 8 ? 224 : 112) * 1024 / (stage_bytes + q_bytes);
  static constexpr int stages = is_coded                         ? (fitting_stages < 8 ? fitting_stages : 8)
                                : HeadDim * element_bytes == 128 ? 6
                                : HeadDim == 80 || HeadDim == 160 || HeadDim == 192 ? 4
                                                                                    : 3;
  /// The epilogue reduces over four warps at a time, in a stage: so many rows at once.
  static constexpr int reduced_rows = is_coded ? decode_tile_rows / 2 : decode_tile_rows;
  static constexpr bool reduced_swizzled = HeadDim % 64 == 0;
  static constexpr int reduced_row =
      reduced_swizzled ? HeadDim : HeadDim + 8;  // floats between rows of a warp's output
  static_assert(stage_bytes >= 4 * reduced_rows * reduced_row * 4, "a stage holds the outputs of four warps");

  [[nodiscard]] static constexpr shared_layout make_shared_layout() noexcept {
    shared_layout l = {};
    l.queries = l.stages + stages * stage_bytes;
    l.query_rows = l.queries + stages * q_bytes;
    l.static_scales = l.query_rows + (is_coded ? coded_query_rows_bytes : 0);
    constexpr int row_sums_bytes = warps * decode_tile_rows * 8;
    const int other = l.static_scales + (is_coded ? coded_static_scales_bytes : 0);
    if constexpr (tree_columns > 0) {
      // Row sums are not looked at while a KV tile is.
      constexpr auto exchange_bytes = static_cast<int>(sizeof(f32_tree_exchange<tree_columns>));
      l.flag = other;
      l.zeros = l.flag + 16;
      l.plan = l.zeros + 16;
      l.row_sums = l.exchange = l.plan + 144;
      l.bytes = l.exchange + (row_sums_bytes > exchange_bytes ? row_sums_bytes : exchange_bytes);
      return l;
    }
    l.row_sums = other;
    l.flag = l.row_sums + row_sums_bytes;
    l.zeros = l.flag + 16;
    l.plan = l.zeros + 16;
    l.exchange = l.plan + 144;
    l.bytes = l.exchange + (splits_dims ? static_cast<int>(sizeof(tree_exchange<Warps>)) : 0) +
              (by_fma ? decode_tile_tokens * decode_few_rows * 4 : 0);
    return l;
  }
  static constexpr shared_layout shared = make_shared_layout();
  static_assert(ctas_per_sm * (shared.bytes + 1024) <= 228 * 1024);
  static_assert(stages * 4 <= coded_static_scales_bytes);
  static_assert(tile_bytes % 256 == 0 && k_tile_bytes % 256 == 0 && stage_bytes % 256 == 0);
  static_assert(!is_mixed || padded);

  /// Where vector `vector` of row `row` of K or V is, from the tile's beginning.
  [[nodiscard]] BIFOLIO_HOST_DEVICE static constexpr std::uint32_t place(int row, int vector) noexcept {
    return kv_rows::place(row, vector);
  }
  /// Where the scale of token `row` of K (plane 0) or V (1) is, from the stage's beginning.
  [[nodiscard]] BIFOLIO_HOST_DEVICE static constexpr std::uint32_t scale_place(int plane, int row) noexcept {
    return static_cast<std::uint32_t>(k_tile_bytes + tile_bytes + plane * scales_bytes + row * scale_bytes);
  }
  /// Where its zero point is.
  [[nodiscard]] BIFOLIO_HOST_DEVICE static constexpr std::uint32_t zero_place(int plane, int row) noexcept {
    return scale_place(plane, row) + static_cast<std::uint32_t>(2 * scales_bytes);
  }
  /// Dims of a row, and its vectors: constants where nothing is padded.
  [[nodiscard]] BIFOLIO_HOST_DEVICE static constexpr int row_dims(const attention_kernel_args& args) noexcept {
    return Padded ? args.head_dim : HeadDim;
  }
  [[nodiscard]] BIFOLIO_HOST_DEVICE static constexpr int vectors_of_row(const attention_kernel_args& args) noexcept {
    return row_dims(args) / kv_rows::vector_dims;
  }
};

}  // namespace bifolio::inline v0_2::cuda::decode
