// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention on the tile registers of Intel AMX: tiles of 16 rows of 64 bytes, and C[16][16] += A[16][32] · B[32][16]
/// of bfloat16 or float16 into float32 (Intel SDM, TDPBF16PS and TDPFP16PS: B in pairs of rows; exact products; an
/// element's chain of sums depends on its row of A and its column of B alone; subnormal bfloat16 numbers count as 0).
///
/// For one KV tile (64 keys of one KV head) and up to 16 rows of queries:
///   scores, transposed: C[key][row] = Σ_dim K[key][dim] · Q[row][dim];
///   softmax with lanes over rows, for a row block of 8 (MR) at a time;
///   outputs: C[row][dim] += Σ_key P[row][key] · V[key][dim].
/// K and V go into the products as they are in the cache. V is therefore in pairs of dims where the product wants pairs
/// of keys: each element of P is paired with a zero, once for the even dims and once for the odd ones. A row block
/// fills only half of a tile's rows, so both are one product.
///
/// When it pays: docs/kernels/attention_cpu.md.

#include "common/attention/logits.hpp"
#include "cpu/kernels/attention/kernels.hpp"
#include "cpu/kernels/attention/math.hpp"
#include "cpu/kernels/attention/prefetch_queue.hpp"
#include "cpu/kernels/simd/simd.hpp"

#if BIFOLIO_TILES

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

inline constexpr int tile_rows = 16;
inline constexpr int tile_bytes = 64;  // of a row
inline constexpr int tile_floats = tile_rows * tile_bytes / 4;
/// Dims that one product sums over in the scores, and dims that one product makes of V.
inline constexpr int tile_dims = 32;
/// Steps of 16 keys in a KV tile.
inline constexpr int key_tiles = tile_keys / tile_rows;

/// How often the softmax of a row block polls the prefetcher: once per two vectors of logits, once per two of
/// probabilities and once per transposed tile. Products poll once each.
inline constexpr int softmax_polls = tile_keys / 4 + key_tiles * (row_block_rows / 2 + 1);

/// 16 keys: the address of the first, and bytes from one to the next.
struct key_rows {
  const char* first;
  std::int64_t stride;
};

/// The lanes of a row block: lane 8·i + r belongs to row r; two keys share a vector.
struct row_block_lanes {
  int rows = 0;             // that exist; the lanes of the others are unused
  bool all_visible = true;  // all keys of the tile to all rows; otherwise:
  float begin[lanes];       // first visible key of the tile,
  float end[lanes];         // and one past the last
  bool has_alibi = false;   // then:
  float slopes[lanes];
  float distance[lanes];  // position of the tile's first key less the query's
};

/// The call's logits transform.
struct softmax_terms {
  float scale = 0;
  float soft_cap = 0;  // 0 = none
};

/// Probabilities are multiplied by this before they are rounded, so that of e^8 down to 2^-18 all keep 11 bits in
/// float16; accumulators hold as much more.
template <class Key>
inline constexpr float probability_factor = 1.0f;
template <>
inline constexpr float probability_factor<float16> = 16.0f;

/// Configures the tile registers of this thread, all of them full size, and releases them, because switching between
/// threads costs more while tiles are in use.
class tile_scope {
 public:
  BIFOLIO_INLINE tile_scope() noexcept {
    struct alignas(64) configuration {  // Intel SDM, LDTILECFG
      std::uint8_t palette = 1;
      std::uint8_t start_row = 0;
      std::uint8_t reserved[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16};
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

/// scores[key][row]. queries [steps][16 pairs of dims][16 rows].
template <class Key>
BIFOLIO_INLINE void score_tiles(const float* queries, const key_rows (&keys)[key_tiles], int steps, float* scores,
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

/// accumulators[Tiles][16][16] += p · values; the first eight rows of a tile hold the even dims of a row block's rows,
/// the others the odd ones. p [keys / 16][16][16 pairs]; values: from the first of the tiles' dims; keys [first, last)
/// · 16.
template <class Key, int Tiles>
BIFOLIO_INLINE void output_tiles(const float* p, const key_rows (&values)[key_tiles], std::int64_t at, int first,
                                 int last, float* accumulators, prefetcher& prefetch) noexcept {
  static_assert(Tiles == 1 || Tiles == 2 || Tiles == 4);
  _tile_loadd(0, accumulators, tile_bytes);
  if constexpr (Tiles >= 2) _tile_loadd(1, accumulators + tile_floats, tile_bytes);
  if constexpr (Tiles == 4) {
    _tile_loadd(2, accumulators + 2 * tile_floats, tile_bytes);
    _tile_loadd(3, accumulators + 3 * tile_floats, tile_bytes);
  }
  for (int step = first; step < last; ++step) {
    const char* v = values[step].first + at;
    const std::int64_t stride = values[step].stride;
    _tile_loadd(4, p + step * tile_floats, tile_bytes);
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
  _tile_stored(0, accumulators, tile_bytes);
  if constexpr (Tiles >= 2) _tile_stored(1, accumulators + tile_floats, tile_bytes);
  if constexpr (Tiles == 4) {
    _tile_stored(2, accumulators + 2 * tile_floats, tile_bytes);
    _tile_stored(3, accumulators + 3 * tile_floats, tile_bytes);
  }
}

/// The same for all dims.
template <class Key>
BIFOLIO_INLINE void add_outputs(const float* p, const key_rows (&values)[key_tiles], int first, int last, int dims,
                                float* accumulators, prefetcher& prefetch) noexcept {
  compiler_barrier();
  const int tiles = dims / tile_dims;
  int tile = 0;
  const auto some = [&]<int Tiles>() __attribute__((always_inline)) {
    output_tiles<Key, Tiles>(p, values, std::int64_t{tile} * tile_bytes, first, last, accumulators + tile * tile_floats,
                             prefetch);
    tile += Tiles;
  };
  while (tile + 4 <= tiles) some.template operator()<4>();
  if (tile + 2 <= tiles) some.template operator()<2>();
  if (tile < tiles) some.template operator()<1>();
  compiler_barrier();
}

/// 32 elements; those from `count` on are 0.
BIFOLIO_INLINE vf load_elements(const void* from, int count) noexcept {
  if (count >= tile_dims) return load_bits(from);
  return vf(_mm512_castsi512_ps(_mm512_maskz_loadu_epi16((1u << count) - 1u, from)));
}

/// The lower halves of two vectors in one.
BIFOLIO_INLINE vf join_halves(const float* first, const float* second) noexcept {
  return vf(_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(first)), _mm256_loadu_ps(second), 1));
}
BIFOLIO_INLINE vf swap_halves(vf v) noexcept { return vf(_mm512_shuffle_f32x4(raw(v), raw(v), 0x4e)); }

/// Eight vectors of two keys × eight rows → eight rows of sixteen keys, which `store_row(row, keys)` takes.
template <class StoreRow>
BIFOLIO_INLINE void transpose_row_block(const vf (&keys)[row_block_rows], const StoreRow& store_row) noexcept {
  // Which bits of a key's number k3 k2 k1 k0 (two vectors differ in k1, vectors two apart in k2, …) and of a row's r2
  // r1 r0 make up the number of a lane: at first k0 r2 r1 r0, then k0 r2 r0 k1, then k0 r2 k2 k1, at last k3 k2 k1 k0.
  __m512d pairs[row_block_rows];
#pragma GCC unroll 4
  for (int i = 0; i < row_block_rows; i += 2) {
    pairs[i] = _mm512_castps_pd(_mm512_unpacklo_ps(raw(keys[i]), raw(keys[i + 1])));
    pairs[i + 1] = _mm512_castps_pd(_mm512_unpackhi_ps(raw(keys[i]), raw(keys[i + 1])));
  }
  const __m512i low = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 16, 24, 17, 25, 18, 26, 19, 27);
  const __m512i high = _mm512_setr_epi32(4, 12, 5, 13, 6, 14, 7, 15, 20, 28, 21, 29, 22, 30, 23, 31);
#pragma GCC unroll 2
  for (int r1 = 0; r1 < 2; ++r1) {
#pragma GCC unroll 2
    for (int r0 = 0; r0 < 2; ++r0) {
      const auto quad = [&](int i) __attribute__((always_inline)) {
        return _mm512_castpd_ps(r0 == 0 ? _mm512_unpacklo_pd(pairs[i + r1], pairs[i + 2 + r1])
                                        : _mm512_unpackhi_pd(pairs[i + r1], pairs[i + 2 + r1]));
      };
      const __m512 first = quad(0);
      const __m512 second = quad(4);
      store_row(2 * r1 + r0, vf(_mm512_permutex2var_ps(first, low, second)));
      store_row(4 + 2 * r1 + r0, vf(_mm512_permutex2var_ps(first, high, second)));
    }
  }
}

/// Sixteen elements, rounded to nearest even, in the lower halves of 32 bits.
template <class Key>
BIFOLIO_INLINE __m512i narrow_to_low_halves(vf v) noexcept {
  if constexpr (__is_same(Key, float16)) {
    return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(raw(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  } else {
    return _mm512_cvtepu16_epi32(__builtin_bit_cast(__m256i, _mm512_cvtneps_pbh(raw(v))));
  }
}

/// The running split of up to eight rows, in scratch.
class row_block_state {
 public:
  BIFOLIO_INLINE row_block_state(float* at, int padded) noexcept
      : accumulators_(at), maxima_(at + row_block_rows * padded), sums_(maxima_ + lanes), padded_(padded) {}

  [[nodiscard]] float* accumulators() const noexcept { return accumulators_; }
  /// Each row's twice, in lanes r and 8 + r.
  [[nodiscard]] float* maxima() const noexcept { return maxima_; }
  [[nodiscard]] float* sums() const noexcept { return sums_; }

  /// The state of no key.
  void clear() const noexcept {
    for (int i = 0; i < row_block_rows * padded_; i += lanes) store(accumulators_ + i, vf(0.0f));
    store(maxima_, vf(-__builtin_inff()));
    store(sums_, vf(0.0f));
  }

  void scale_row(int row, float factor) const noexcept {
    const vf alpha(factor);
    for (int i = row * lanes; i < row_block_rows * padded_; i += row_block_rows * lanes) {
      store(accumulators_ + i, load(accumulators_ + i) * alpha);
    }
  }

  /// The accumulator of a row divided by `factor`, dims in order.
  void read_row(int row, float factor, float* to) const noexcept {
    const vf part(1.0f / factor);
    const float* tile = accumulators_ + row * lanes;
    for (int d = 0; d < padded_; d += tile_dims, tile += tile_floats) {
      vf first;
      vf second;
      interleave(load(tile) * part, load(tile + row_block_rows * lanes) * part, first, second);
      store(to + d, first);
      store(to + d + lanes, second);
    }
  }

  /// Replaces a row's accumulator by that of `accumulators`, which has this form.
  void take_row(int row, const float* accumulators) const noexcept {
    for (int i = row * lanes; i < row_block_rows * padded_; i += row_block_rows * lanes) {
      store(accumulators_ + i, load(accumulators + i));
    }
  }

 private:
  float* accumulators_;
  float* maxima_;
  float* sums_;
  int padded_;
};

/// Scores, transposed, of one row block → logits [key pairs][lanes]; returns the highest of each lane.
BIFOLIO_INLINE vf row_block_logits(const float* scores, const softmax_terms& terms, const row_block_lanes& of,
                                   float* logits, prefetcher& prefetch) noexcept {
  const vf scale(terms.scale);
  vf highest[2] = {vf(-__builtin_inff()), vf(-__builtin_inff())};
  const bool plain = of.all_visible && terms.soft_cap <= 0 && !of.has_alibi;
  if (plain) {
#pragma GCC unroll 4
    for (int i = 0; i < tile_keys / 2; ++i) {
      if (i % 2 == 0) prefetch.poll();
      const vf s = join_halves(scores + 2 * i * lanes, scores + (2 * i + 1) * lanes) * scale;
      store(logits + i * lanes, s);
      highest[i % 2] = xsimd::max(highest[i % 2], s);
    }
    return xsimd::max(highest[0], highest[1]);
  }
  const vf cap(terms.soft_cap);
  const vf lowest(-__builtin_inff());
  vf key(_mm512_setr_ps(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1));
  for (int i = 0; i < tile_keys / 2; ++i) {
    if (i % 2 == 0) prefetch.poll();
    vf s = join_halves(scores + 2 * i * lanes, scores + (2 * i + 1) * lanes) * scale;
    if (terms.soft_cap > 0) s = attn::soft_capped<vector_math>(s, cap);
    if (of.has_alibi) s = attn::with_alibi<vector_math>(s, load(of.slopes), load(of.distance) + key);
    if (!of.all_visible) s = xsimd::select((key >= load(of.begin)) & (key < load(of.end)), s, lowest);
    store(logits + i * lanes, s);
    highest[0] = xsimd::max(highest[0], s);
    key = key + vf(2.0f);
  }
  return highest[0];
}

/// Scores, transposed, of one row block [64][16, of which 8 are used] → its probabilities for `add_outputs`; updates
/// maxima, sums and, where a maximum rises, the accumulators. A row's sum over a KV tile is that of four chains, of
/// keys 4·i + j.
template <class Key>
BIFOLIO_INLINE void softmax_row_block(const float* scores, const softmax_terms& terms, const row_block_lanes& of,
                                      const row_block_state& state, float* p, prefetcher& prefetch) noexcept {
  alignas(64) float logits[tile_keys * row_block_rows];
  vf highest = row_block_logits(scores, terms, of, logits, prefetch);
  highest = xsimd::max(highest, swap_halves(highest));

  vf maxima = load(state.maxima());
  vf sums = load(state.sums());
  const __mmask16 rises = _mm512_cmp_ps_mask(raw(highest), raw(maxima + vf(rescale_threshold)), _CMP_GT_OQ);
  if (rises != 0) {
    const vf risen(_mm512_mask_mov_ps(raw(maxima), rises, raw(highest)));
    const vf alpha(_mm512_mask_mov_ps(raw(vf(1.0f)), rises, raw(exp(maxima - risen))));
    alignas(64) float factors[lanes];
    store(factors, alpha);
    for (int row = 0; row < of.rows; ++row) {
      if ((rises >> row & 1) != 0) state.scale_row(row, factors[row]);
    }
    sums = sums * alpha;
    maxima = risen;
    store(state.maxima(), maxima);
  }
  const vf shift = xsimd::select(maxima == vf(-__builtin_inff()), vf(0.0f), maxima);
  vf chains[2] = {vf(0.0f), vf(0.0f)};
  const vf factor(probability_factor<Key>);
  for (int tile = 0; tile < key_tiles; ++tile) {
    vf e[row_block_rows];
#pragma GCC unroll 8
    for (int i = 0; i < row_block_rows; ++i) {
      e[i] = exp(load(logits + (tile * row_block_rows + i) * lanes) - shift);
      chains[i % 2] = chains[i % 2] + e[i];
      if constexpr (probability_factor<Key> != 1.0f) e[i] = e[i] * factor;
      if (i % 2 == 1) prefetch.poll();
    }
    transpose_row_block(
        e, [&](int row, vf keys) __attribute__((always_inline)) {
          const __m512i even = narrow_to_low_halves<Key>(keys);
          float* to = p + tile * tile_floats + row * lanes;
          store(to, vf(_mm512_castsi512_ps(even)));
          store(to + row_block_rows * lanes, vf(_mm512_castsi512_ps(_mm512_slli_epi32(even, 16))));
        });
    prefetch.poll();
  }
  const vf sum = chains[0] + chains[1];
  store(state.sums(), sums + (sum + swap_halves(sum)));
}

/// Whether `count` elements hold neither infinity nor NaN.
template <class Key>
BIFOLIO_INLINE bool all_finite(const Key* row, int count) noexcept {
  constexpr std::uint32_t exponent = __is_same(Key, float16) ? 0x7c00u : 0x7f80u;
  bool finite = true;
  for (int i = 0; i < count; ++i) finite = finite && (row[i].bits & exponent) != exponent;
  return finite;
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

#endif
