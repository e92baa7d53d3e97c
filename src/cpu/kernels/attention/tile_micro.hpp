// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention on the tile registers of Intel AMX: tiles of 16 rows of 64 bytes, and C[16][16] += A[16][32] · B[32][16]
/// of bfloat16 or float16 into float32 (Intel SDM, TDPBF16PS and TDPFP16PS). B is in pairs of rows; products are exact;
/// an element's sum depends on its row of A and its column of B alone: C += even + odd, where `even` and `odd` are
/// chains over the first and the second elements of the pairs, which start at +0. Subnormal numbers count as 0 (but not
/// those of float16), results that would be subnormal are 0.
///
/// For one KV tile (64 keys of one KV head) and each row group, 16 rows of queries (MR):
///   scores, transposed: C[key][row] = Σ_dim K[key][dim] · Q[row][dim];
///   softmax with lanes over rows (tile_softmax.hpp);
///   outputs: C[row][dim] += Σ_key P[row][key] · V[key][dim].
/// K goes into the products as it is in the cache. V is wanted in pairs of keys and lies there in pairs of dims. There
/// are two forms, which give the same bits, so that a row may be computed by either:
///   paired:   V is paired in scratch, once per KV tile for all rows, keys i and 16 + i of a step of 32 keys. Two row
///             groups share the loads of K and V, and accumulators are loaded and stored once for four KV tiles.
///   in place: for few rows, which do not pay for that. V goes into the products as it is. A product sums over 16 keys,
///             each element of P paired with a zero, once for the even dims and once for the odd ones: a row block of 8
///             rows fills a tile. Two such products into a tile of zeros make the even + odd of the other form.
///
/// When it pays: docs/kernels/attention_cpu.md.

#include "cpu/kernels/attention/kernels.hpp"
#include "cpu/kernels/attention/prefetch_queue.hpp"
#include "cpu/kernels/simd/simd.hpp"

#if BIFOLIO_TILES

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

inline constexpr int tile_rows = 16;
inline constexpr int tile_bytes = 64;  // of a row
inline constexpr int tile_floats = tile_rows * tile_bytes / 4;
/// Dims that one product sums over in the scores, and dims that one product makes of V in place.
inline constexpr int tile_dims = 32;
/// Steps of 16 keys in a KV tile.
inline constexpr int key_tiles = tile_keys / tile_rows;
/// Dims that one product makes of paired V.
inline constexpr int output_dims = 16;
/// Steps of 32 keys in a KV tile.
inline constexpr int key_steps = tile_keys / 32;
/// Rows whose products with V in place are one.
inline constexpr int row_block_rows = tile_rows / 2;

/// 16 keys: the address of the first, and bytes from one to the next.
struct key_rows {
  const char* first;
  std::int64_t stride;
};

/// Configures the tile registers of this thread, all of them full size, and releases them, because switching between
/// threads costs more while tiles are in use.
class tile_scope {
 public:
  BIFOLIO_INLINE tile_scope() noexcept {
    struct alignas(64) configuration {  // Intel SDM, LDTILECFG
      std::uint8_t palette = 1;
      std::uint8_t start_row = 0;
      std::uint8_t reserved[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    const configuration whole;
    __asm__ volatile("" : : "r"(&whole) : "memory");
    _tile_loadconfig(&whole);
  }
  BIFOLIO_INLINE ~tile_scope() { _tile_release(); }
  tile_scope(const tile_scope&) = delete;
  tile_scope& operator=(const tile_scope&) = delete;
};

/// GCC's tile intrinsics do not declare that they read and write memory.
BIFOLIO_INLINE void compiler_barrier() noexcept { __asm__ volatile("" : : : "memory"); }

/// Tile C += A · B. In bytes because GCC knows TDPFP16PS from 13 on, and because a template cannot name a register.
/// VEX.128.F3 (bfloat16) or F2 (float16).0F38.W0 5C, C and A in ModRM, B in vvvv.
template <class Key, int C, int A, int B>
BIFOLIO_INLINE void multiply_tiles() noexcept {
  constexpr int prefix = __is_same(Key, float16) ? 3 : 2;
  __asm__ volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1" : : "i"(prefix | (~B & 15) << 3), "i"(0xc0 | C << 3 | A));
}

/// scores[key][row] of one row group. queries [steps][16 pairs of dims][16 rows].
template <class Key>
BIFOLIO_INLINE void score_group(const float* queries, const key_rows (&keys)[key_tiles], int steps, float* scores,
                                prefetcher& prefetch) noexcept {
  static_assert(key_tiles == 4);
  compiler_barrier();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < steps; ++step) {
    const std::int64_t at = std::int64_t{step} * tile_bytes;
    _tile_loadd(4, queries + step * tile_floats, tile_bytes);
    _tile_stream_loadd(5, keys[0].first + at, keys[0].stride);
    multiply_tiles<Key, 0, 5, 4>();
    prefetch.poll();
    _tile_stream_loadd(6, keys[1].first + at, keys[1].stride);
    multiply_tiles<Key, 1, 6, 4>();
    prefetch.poll();
    _tile_stream_loadd(5, keys[2].first + at, keys[2].stride);
    multiply_tiles<Key, 2, 5, 4>();
    prefetch.poll();
    _tile_stream_loadd(6, keys[3].first + at, keys[3].stride);
    multiply_tiles<Key, 3, 6, 4>();
    prefetch.poll();
  }
  _tile_stored(0, scores, tile_bytes);
  _tile_stored(1, scores + tile_floats, tile_bytes);
  _tile_stored(2, scores + 2 * tile_floats, tile_bytes);
  _tile_stored(3, scores + 3 * tile_floats, tile_bytes);
  compiler_barrier();
}

/// The same of one row group, or of two and half of the keys, in pieces of four products, which a caller may issue
/// between instructions for vectors: those are done while tiles are multiplied. Two groups share the loads of K.
template <class Key>
struct score_pieces {
  int count = 0;                    // steps of 32 dims; 0: nothing to do
  const key_rows* keys = nullptr;   // four times 16; of two groups two times
  const float* queries = nullptr;   // of a group
  float* scores = nullptr;          // where those of the first of `keys` go
  const float* queries2 = nullptr;  // of the second group; null: there is none
  float* scores2 = nullptr;

  BIFOLIO_INLINE void issue(int step, prefetcher& prefetch) const noexcept {
    compiler_barrier();
    if (step == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    if (queries2 != nullptr) {
      multiply_two(step, prefetch);
    } else {
      multiply_one(step, prefetch);
    }
    compiler_barrier();
  }

 private:
  // The loads come first: they overlap with one another, and with products only where a core is not shared.
  BIFOLIO_INLINE void multiply_two(int step, prefetcher& prefetch) const noexcept {
    const std::int64_t at = std::int64_t{step} * tile_bytes;
    _tile_loadd(4, queries + step * tile_floats, tile_bytes);
    _tile_loadd(5, queries2 + step * tile_floats, tile_bytes);
    _tile_loadd(6, keys[0].first + at, keys[0].stride);
    _tile_loadd(7, keys[1].first + at, keys[1].stride);
    multiply_tiles<Key, 0, 6, 4>();
    prefetch.poll();
    multiply_tiles<Key, 1, 6, 5>();
    prefetch.poll();
    multiply_tiles<Key, 2, 7, 4>();
    prefetch.poll();
    multiply_tiles<Key, 3, 7, 5>();
    prefetch.poll();
    if (step + 1 == count) {
      _tile_stored(0, scores, tile_bytes);
      _tile_stored(1, scores2, tile_bytes);
      _tile_stored(2, scores + tile_floats, tile_bytes);
      _tile_stored(3, scores2 + tile_floats, tile_bytes);
    }
  }
  BIFOLIO_INLINE void multiply_one(int step, prefetcher& prefetch) const noexcept {
    const std::int64_t at = std::int64_t{step} * tile_bytes;
    _tile_loadd(4, queries + step * tile_floats, tile_bytes);
    _tile_loadd(5, keys[0].first + at, keys[0].stride);
    multiply_tiles<Key, 0, 5, 4>();
    prefetch.poll();
    _tile_loadd(6, keys[1].first + at, keys[1].stride);
    multiply_tiles<Key, 1, 6, 4>();
    prefetch.poll();
    _tile_loadd(7, keys[2].first + at, keys[2].stride);
    multiply_tiles<Key, 2, 7, 4>();
    prefetch.poll();
    _tile_loadd(5, keys[3].first + at, keys[3].stride);
    multiply_tiles<Key, 3, 5, 4>();
    prefetch.poll();
    if (step + 1 == count) {
      _tile_stored(0, scores, tile_bytes);
      _tile_stored(1, scores + tile_floats, tile_bytes);
      _tile_stored(2, scores + 2 * tile_floats, tile_bytes);
      _tile_stored(3, scores + 3 * tile_floats, tile_bytes);
    }
  }
};

/// Where the paired V of one KV tile starts for an output tile: [output tiles][steps][16 pairs of keys][16 dims].
BIFOLIO_INLINE const float* paired_values(const float* values, int output_tile) noexcept {
  return values + output_tile * (key_steps * tile_floats);
}

/// Steps of 32 keys, those of one KV tile or of several, in the order of their products.
struct output_steps {
  struct step {
    std::int64_t p;       // where [16 rows][16 pairs of keys] are, floats from a row group's address
    const float* values;  // the step's paired V of output tile 0
  };
  int count = 0;
  step steps[std::size_t{output_tiles_together * key_steps}];
};

/// accumulators[output tiles][16 rows][16 dims] += p · paired values of one row group over all steps, four output tiles
/// at a time; dims: a multiple of 32. Not inlined, because prefill calls it where two groups do not go together.
template <class Key>
[[gnu::noinline]] void add_outputs(const output_steps& over, const float* p, int dims, float* accumulators,
                                   prefetcher& prefetch) noexcept {
  constexpr int apart = key_steps * tile_floats;
  const auto some = [&]<int Tiles>(int tile) __attribute__((always_inline)) {
    float* const to = accumulators + tile * tile_floats;
    _tile_loadd(0, to, tile_bytes);
    _tile_loadd(1, to + tile_floats, tile_bytes);
    if constexpr (Tiles == 4) {
      _tile_loadd(2, to + 2 * tile_floats, tile_bytes);
      _tile_loadd(3, to + 3 * tile_floats, tile_bytes);
    }
    for (int step = 0; step < over.count; ++step) {
      const float* const v = paired_values(over.steps[step].values, tile);
      _tile_loadd(4, p + over.steps[step].p, tile_bytes);
      _tile_loadd(5, v, tile_bytes);
      multiply_tiles<Key, 0, 4, 5>();
      prefetch.poll();
      _tile_loadd(6, v + apart, tile_bytes);
      multiply_tiles<Key, 1, 4, 6>();
      prefetch.poll();
      if constexpr (Tiles == 4) {
        _tile_loadd(7, v + 2 * apart, tile_bytes);
        multiply_tiles<Key, 2, 4, 7>();
        prefetch.poll();
        _tile_loadd(5, v + 3 * apart, tile_bytes);
        multiply_tiles<Key, 3, 4, 5>();
        prefetch.poll();
      }
    }
    _tile_stored(0, to, tile_bytes);
    _tile_stored(1, to + tile_floats, tile_bytes);
    if constexpr (Tiles == 4) {
      _tile_stored(2, to + 2 * tile_floats, tile_bytes);
      _tile_stored(3, to + 3 * tile_floats, tile_bytes);
    }
  };
  compiler_barrier();
  const int tiles = dims / output_dims;
  int tile = 0;
  for (; tile + 4 <= tiles; tile += 4) some.template operator()<4>(tile);
  if (tile < tiles) some.template operator()<2>(tile);
  compiler_barrier();
}

/// The same of two row groups, which share the loads of V, two output tiles at a time. An accumulator is loaded and
/// stored once for all steps, and a step's loads come before its products (docs/kernels/attention_cpu.md).
template <class Key>
BIFOLIO_INLINE void add_outputs_of_two(const output_steps& over, const float* p, const float* p2, int dims,
                                       float* accumulators, float* accumulators2, prefetcher& prefetch) noexcept {
  compiler_barrier();
  for (int tile = 0; tile < dims / output_dims; tile += 2) {
    float* const to = accumulators + tile * tile_floats;
    float* const to2 = accumulators2 + tile * tile_floats;
    _tile_loadd(0, to, tile_bytes);
    _tile_loadd(1, to + tile_floats, tile_bytes);
    _tile_loadd(2, to2, tile_bytes);
    _tile_loadd(3, to2 + tile_floats, tile_bytes);
    for (int step = 0; step < over.count; ++step) {
      const float* const v = paired_values(over.steps[step].values, tile);
      _tile_loadd(4, p + over.steps[step].p, tile_bytes);
      _tile_loadd(5, p2 + over.steps[step].p, tile_bytes);
      _tile_loadd(6, v, tile_bytes);
      _tile_loadd(7, v + key_steps * tile_floats, tile_bytes);
      multiply_tiles<Key, 0, 4, 6>();
      prefetch.poll();
      multiply_tiles<Key, 1, 4, 7>();
      prefetch.poll();
      multiply_tiles<Key, 2, 5, 6>();
      prefetch.poll();
      multiply_tiles<Key, 3, 5, 7>();
      prefetch.poll();
    }
    _tile_stored(0, to, tile_bytes);
    _tile_stored(1, to + tile_floats, tile_bytes);
    _tile_stored(2, to2, tile_bytes);
    _tile_stored(3, to2 + tile_floats, tile_bytes);
  }
  compiler_barrier();
}

/// Part `part` of `parts` of the pieces, or all of them.
template <class Pieces>
BIFOLIO_INLINE void issue_part(const Pieces& pieces, int part, int parts, prefetcher& prefetch) noexcept {
  const int end = (pieces.count * (part + 1) + parts - 1) / parts;
  for (int i = (pieces.count * part + parts - 1) / parts; i < end; ++i) pieces.issue(i, prefetch);
}
template <class Pieces>
BIFOLIO_INLINE void issue_all(const Pieces& pieces, prefetcher& prefetch) noexcept {
  issue_part(pieces, 0, 1, prefetch);
}

/// Products that the softmax of a row group issues.
template <class Key>
struct products_between {
  score_pieces<Key> scores;               // of other groups, as it goes along
  const output_steps* pending = nullptr;  // of the group, that its accumulators lack: before they are scaled
  const float* p = nullptr;               // of these
};

/// For one row block: products[2][Tiles][16][16] = p · values of each step of 32 keys; the first eight rows of a tile
/// hold the even dims of the rows, the others the odd ones. p [keys / 16][16][16 pairs]; values: from the first of the
/// tiles' dims; keys [first, last) · 16.
template <class Key, int Tiles>
BIFOLIO_INLINE void products_in_place(const float* p, const key_rows (&values)[key_tiles], std::int64_t at, int first,
                                      int last, float* products, prefetcher& prefetch) noexcept {
  static_assert(Tiles == 1 || Tiles == 2 || Tiles == 4);
  for (int step = first / 2; 2 * step < last; ++step) {
    _tile_zero(0);
    if constexpr (Tiles >= 2) _tile_zero(1);
    if constexpr (Tiles == 4) {
      _tile_zero(2);
      _tile_zero(3);
    }
    const int end = last < 2 * step + 2 ? last : 2 * step + 2;
    for (int keys = first > 2 * step ? first : 2 * step; keys < end; ++keys) {
      const char* v = values[keys].first + at;
      const std::int64_t stride = values[keys].stride;
      _tile_loadd(4, p + keys * tile_floats, tile_bytes);
      _tile_stream_loadd(5, v, stride);
      multiply_tiles<Key, 0, 4, 5>();
      prefetch.poll();
      if constexpr (Tiles >= 2) {
        _tile_stream_loadd(6, v + tile_bytes, stride);
        multiply_tiles<Key, 1, 4, 6>();
        prefetch.poll();
      }
      if constexpr (Tiles == 4) {
        _tile_stream_loadd(5, v + 2 * tile_bytes, stride);
        multiply_tiles<Key, 2, 4, 5>();
        prefetch.poll();
        _tile_stream_loadd(6, v + 3 * tile_bytes, stride);
        multiply_tiles<Key, 3, 4, 6>();
        prefetch.poll();
      }
    }
    float* const to = products + step * (Tiles * tile_floats);
    _tile_stored(0, to, tile_bytes);
    if constexpr (Tiles >= 2) _tile_stored(1, to + tile_floats, tile_bytes);
    if constexpr (Tiles == 4) {
      _tile_stored(2, to + 2 * tile_floats, tile_bytes);
      _tile_stored(3, to + 3 * tile_floats, tile_bytes);
    }
  }
}

/// While it lives, arithmetic on vectors treats subnormal numbers as products of tiles do.
class flush_scope {
 public:
  BIFOLIO_INLINE flush_scope() noexcept {
    __asm__ volatile("stmxcsr %0" : "=m"(before_) : : "memory");
    set(before_ | 0x8040);  // FTZ and DAZ
  }
  BIFOLIO_INLINE ~flush_scope() { set(before_); }
  flush_scope(const flush_scope&) = delete;
  flush_scope& operator=(const flush_scope&) = delete;

 private:
  // What is computed inside must be loaded and stored inside: that is what keeps the compiler from moving it.
  static BIFOLIO_INLINE void set(std::uint32_t control) noexcept {
    __asm__ volatile("ldmxcsr %0" : : "m"(control) : "memory");
  }
  std::uint32_t before_;
};

/// accumulators[Tiles][16][16] += `Steps` products, one after the other, for `rows` rows.
template <int Tiles, int Steps>
BIFOLIO_INLINE void add_steps(const float* products, int rows, float* accumulators) noexcept {
  const flush_scope flush;
  for (int half = 0; half < 2 * Tiles; ++half) {
    float* to = accumulators + half * (row_block_rows * lanes);
    const float* from = products + half * (row_block_rows * lanes);
    for (int row = 0; row < rows; ++row, to += lanes, from += lanes) {
      vf sum = load(to) + load(from);
      if constexpr (Steps == 2) sum = sum + load(from + Tiles * tile_floats);
      store(to, sum);
    }
  }
}

/// accumulators += p · values for all dims of one row block of `rows` rows. `products` has room for two steps of four
/// tiles.
template <class Key>
BIFOLIO_INLINE void add_outputs_in_place(const float* p, const key_rows (&values)[key_tiles], int first, int last,
                                         int dims, int rows, float* accumulators, float* products,
                                         prefetcher& prefetch) noexcept {
  const int tiles = dims / tile_dims;
  int tile = 0;
  const auto some = [&]<int Tiles>() __attribute__((always_inline)) {
    compiler_barrier();
    products_in_place<Key, Tiles>(p, values, std::int64_t{tile} * tile_bytes, first, last, products, prefetch);
    compiler_barrier();
    float* const to = accumulators + tile * tile_floats;
    if (first < 2 && last > 2) {
      add_steps<Tiles, 2>(products, rows, to);
    } else {
      add_steps<Tiles, 1>(products + first / 2 * (Tiles * tile_floats), rows, to);
    }
    tile += Tiles;
  };
  while (tile + 4 <= tiles) some.template operator()<4>();
  if (tile + 2 <= tiles) some.template operator()<2>();
  if (tile < tiles) some.template operator()<1>();
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

#endif
