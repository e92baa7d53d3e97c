// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention on the tile registers of Intel AMX: tiles of 16 rows of 64 bytes, and C[16][16] += A[16][32] · B[32][16]
/// of bfloat16 or float16 into float32 (Intel SDM, TDPBF16PS and TDPFP16PS: B in pairs of rows; exact products; an
/// element's chain of sums depends on its row of A and its column of B alone; subnormal bfloat16 numbers count as 0).
///
/// For one KV tile (64 keys of one KV head) and each row group, 16 rows of queries (MR):
///   scores, transposed: C[key][row] = Σ_dim K[key][dim] · Q[row][dim];
///   softmax with lanes over rows;
///   outputs: C[row][dim] += Σ_key P[row][key] · V[key][dim].
/// K goes into the products as it is in the cache. V is wanted in pairs of keys and lies there in pairs of dims, so it
/// is paired in scratch, once per KV tile for all rows. Two row groups share the loads of K and V.
///
/// When it pays: docs/kernels/attention_cpu.md.

#include "common/attention/logits.hpp"
#include "cpu/kernels/attention/kernels.hpp"
#include "cpu/kernels/attention/math.hpp"
#include "cpu/kernels/attention/prefetch_queue.hpp"
#include "cpu/kernels/simd/simd.hpp"

#if BIFOLIO_TILES

namespace bifolio::cpu::BIFOLIO_ISA {
namespace {

inline constexpr int tile_rows = 16;
inline constexpr int tile_bytes = 64;  // of a row
inline constexpr int tile_floats = tile_rows * tile_bytes / 4;
/// Dims that one product sums over in the scores, and dims that one product makes of V.
inline constexpr int tile_dims = 32;
/// Steps of 16 keys in a KV tile.
inline constexpr int key_tiles = tile_keys / tile_rows;

/// Dims of one accumulator tile.
inline constexpr int output_dims = 16;
/// Steps of 32 keys in a KV tile: what one product of the outputs sums over.
inline constexpr int key_steps = tile_keys / 32;

/// How often the softmax of a row group polls the prefetcher: once per four logits' vectors, once per four of
/// probabilities. Products poll once each.
inline constexpr int softmax_polls = 2 * (tile_keys / 4);

/// 16 keys: the address of the first, and bytes from one to the next.
struct key_rows {
  const char* first;
  std::int64_t stride;
};

/// What the lanes of a row group, one per row, attend to.
struct row_group_lanes {
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
    _tile_loadd(5, keys[0].first + at, keys[0].stride);
    multiply_tiles<Key, 0, 5, 4>();
    prefetch.poll();
    _tile_loadd(6, keys[1].first + at, keys[1].stride);
    multiply_tiles<Key, 1, 6, 4>();
    prefetch.poll();
    _tile_loadd(5, keys[2].first + at, keys[2].stride);
    multiply_tiles<Key, 2, 5, 4>();
    prefetch.poll();
    _tile_loadd(6, keys[3].first + at, keys[3].stride);
    multiply_tiles<Key, 3, 6, 4>();
    prefetch.poll();
  }
  _tile_stored(0, scores, tile_bytes);
  _tile_stored(1, scores + tile_floats, tile_bytes);
  _tile_stored(2, scores + 2 * tile_floats, tile_bytes);
  _tile_stored(3, scores + 3 * tile_floats, tile_bytes);
  compiler_barrier();
}

/// The same of two row groups, `group_floats` apart in queries; their scores follow one another.
template <class Key>
BIFOLIO_INLINE void score_two_groups(const float* queries, std::int64_t group_floats, const key_rows (&keys)[key_tiles],
                                     int steps, float* scores, prefetcher& prefetch) noexcept {
  compiler_barrier();
  for (int half = 0; half < key_tiles; half += 2) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < steps; ++step) {
      const std::int64_t at = std::int64_t{step} * tile_bytes;
      _tile_loadd(4, queries + step * tile_floats, tile_bytes);
      _tile_loadd(6, keys[half].first + at, keys[half].stride);
      multiply_tiles<Key, 0, 6, 4>();
      prefetch.poll();
      _tile_loadd(5, queries + group_floats + step * tile_floats, tile_bytes);
      multiply_tiles<Key, 1, 6, 5>();
      prefetch.poll();
      _tile_loadd(7, keys[half + 1].first + at, keys[half + 1].stride);
      multiply_tiles<Key, 2, 7, 4>();
      prefetch.poll();
      multiply_tiles<Key, 3, 7, 5>();
      prefetch.poll();
    }
    float* const to = scores + half * tile_floats;
    _tile_stored(0, to, tile_bytes);
    _tile_stored(1, to + key_tiles * tile_floats, tile_bytes);
    _tile_stored(2, to + tile_floats, tile_bytes);
    _tile_stored(3, to + (key_tiles + 1) * tile_floats, tile_bytes);
  }
  compiler_barrier();
}

/// Where the paired V of one KV tile starts for an output tile: [output tiles][steps][16 pairs of keys][16 dims].
BIFOLIO_INLINE const float* paired_values(const float* values, int output_tile) noexcept {
  return values + output_tile * (key_steps * tile_floats);
}

/// accumulators[output tiles][16 rows][16 dims] += p · values for `Tiles` output tiles from `tile` on, steps [first,
/// last) of 32 keys. p [steps][16 rows][16 pairs of keys].
template <class Key, int Tiles>
BIFOLIO_INLINE void output_tiles(const float* p, const float* values, int tile, int first, int last,
                                 float* accumulators, prefetcher& prefetch) noexcept {
  static_assert(Tiles == 2 || Tiles == 4);
  float* const to = accumulators + tile * tile_floats;
  const float* const from = paired_values(values, tile);
  constexpr int apart = key_steps * tile_floats;
  _tile_loadd(0, to, tile_bytes);
  _tile_loadd(1, to + tile_floats, tile_bytes);
  if constexpr (Tiles == 4) {
    _tile_loadd(2, to + 2 * tile_floats, tile_bytes);
    _tile_loadd(3, to + 3 * tile_floats, tile_bytes);
  }
  for (int step = first; step < last; ++step) {
    const float* v = from + step * tile_floats;
    _tile_loadd(4, p + step * tile_floats, tile_bytes);
    _tile_loadd(5, v, tile_bytes);
    multiply_tiles<Key, 0, 4, 5>();
    prefetch.poll();
    _tile_loadd(6, v + apart, tile_bytes);
    multiply_tiles<Key, 1, 4, 6>();
    prefetch.poll();
    if constexpr (Tiles == 4) {
      _tile_loadd(5, v + 2 * apart, tile_bytes);
      multiply_tiles<Key, 2, 4, 5>();
      prefetch.poll();
      _tile_loadd(6, v + 3 * apart, tile_bytes);
      multiply_tiles<Key, 3, 4, 6>();
      prefetch.poll();
    }
  }
  _tile_stored(0, to, tile_bytes);
  _tile_stored(1, to + tile_floats, tile_bytes);
  if constexpr (Tiles == 4) {
    _tile_stored(2, to + 2 * tile_floats, tile_bytes);
    _tile_stored(3, to + 3 * tile_floats, tile_bytes);
  }
}

/// The same for all dims of one row group; dims: a multiple of 32.
template <class Key>
BIFOLIO_INLINE void add_outputs(const float* p, const float* values, int first, int last, int dims, float* accumulators,
                                prefetcher& prefetch) noexcept {
  compiler_barrier();
  const int tiles = dims / output_dims;
  int tile = 0;
  for (; tile + 4 <= tiles; tile += 4) output_tiles<Key, 4>(p, values, tile, first, last, accumulators, prefetch);
  if (tile < tiles) output_tiles<Key, 2>(p, values, tile, first, last, accumulators, prefetch);
  compiler_barrier();
}

/// The same for two row groups whose probabilities follow one another.
template <class Key>
BIFOLIO_INLINE void add_outputs_of_two(const float* p, const float* values, int first, int last, int dims,
                                       float* first_group, float* second_group, prefetcher& prefetch) noexcept {
  compiler_barrier();
  constexpr int apart = key_steps * tile_floats;
  for (int tile = 0; tile < dims / output_dims; tile += 2) {
    float* const one = first_group + tile * tile_floats;
    float* const two = second_group + tile * tile_floats;
    const float* const from = paired_values(values, tile);
    _tile_loadd(0, one, tile_bytes);
    _tile_loadd(1, one + tile_floats, tile_bytes);
    _tile_loadd(2, two, tile_bytes);
    _tile_loadd(3, two + tile_floats, tile_bytes);
    for (int step = first; step < last; ++step) {
      _tile_loadd(4, p + step * tile_floats, tile_bytes);
      _tile_loadd(6, from + step * tile_floats, tile_bytes);
      multiply_tiles<Key, 0, 4, 6>();
      prefetch.poll();
      _tile_loadd(7, from + apart + step * tile_floats, tile_bytes);
      multiply_tiles<Key, 1, 4, 7>();
      prefetch.poll();
      _tile_loadd(5, p + apart + step * tile_floats, tile_bytes);
      multiply_tiles<Key, 2, 5, 6>();
      prefetch.poll();
      multiply_tiles<Key, 3, 5, 7>();
      prefetch.poll();
    }
    _tile_stored(0, one, tile_bytes);
    _tile_stored(1, one + tile_floats, tile_bytes);
    _tile_stored(2, two, tile_bytes);
    _tile_stored(3, two + tile_floats, tile_bytes);
  }
  compiler_barrier();
}

/// 32 elements; those from `count` on are 0.
BIFOLIO_INLINE vf load_elements(const void* from, int count) noexcept {
  if (count >= tile_dims) return load_bits(from);
  return vf(_mm512_castsi512_ps(_mm512_maskz_loadu_epi16((1u << count) - 1u, from)));
}

/// Two rows of probabilities' keys → their elements in pairs, rounded to nearest even: lane r holds (first[r],
/// second[r]).
template <class Key>
BIFOLIO_INLINE vf pair_keys(vf first, vf second) noexcept {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  if constexpr (__is_same(Key, float16)) {
    constexpr int rounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(raw(first), rounding)),
                                            _mm512_cvtps_ph(raw(second), rounding), 1);
    return vf(_mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both)));
  } else {
    const auto both = __builtin_bit_cast(__m512i, raw(narrow_pairs(first, second)));
    return vf(_mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both)));
  }
}

/// The running split of a row group, in scratch.
class row_group_state {
 public:
  BIFOLIO_INLINE row_group_state(float* at, int padded) noexcept
      : accumulators_(at), maxima_(at + row_group_rows * padded), sums_(maxima_ + lanes), padded_(padded) {}

  [[nodiscard]] float* accumulators() const noexcept { return accumulators_; }
  [[nodiscard]] float* maxima() const noexcept { return maxima_; }
  [[nodiscard]] float* sums() const noexcept { return sums_; }

  /// The state of no key.
  void clear() const noexcept {
    for (int i = 0; i < row_group_rows * padded_; i += lanes) store(accumulators_ + i, vf(0.0f));
    store(maxima_, vf(-__builtin_inff()));
    store(sums_, vf(0.0f));
  }

  void scale_row(int row, float factor) const noexcept {
    const vf alpha(factor);
    for (int i = row * lanes; i < row_group_rows * padded_; i += tile_floats) {
      store(accumulators_ + i, load(accumulators_ + i) * alpha);
    }
  }

  /// The accumulator of a row divided by `factor`, dims in order.
  void read_row(int row, float factor, float* to) const noexcept {
    const vf part(1.0f / factor);
    const float* tile = accumulators_ + row * lanes;
    for (int d = 0; d < padded_; d += tile_dims, tile += 2 * tile_floats) {
      vf first;
      vf second;
      order_dims(load(tile) * part, load(tile + tile_floats) * part, first, second);
      store(to + d, first);
      store(to + d + lanes, second);
    }
  }

  /// Replaces a row's accumulator by that of `accumulators`, which has this form.
  void take_row(int row, const float* accumulators) const noexcept {
    for (int i = row * lanes; i < row_group_rows * padded_; i += tile_floats) {
      store(accumulators_ + i, load(accumulators + i));
    }
  }

 private:
  float* accumulators_;
  float* maxima_;
  float* sums_;
  int padded_;
};

/// Turns the scores of one row group into logits less their factor, which is returned; `highest` receives the highest
/// logit of each row. Where nothing but the scale is to be done, the scores stay and the scale is the factor.
BIFOLIO_INLINE float group_logits(float* scores, const softmax_terms& terms, const row_group_lanes& of, vf& highest,
                                  prefetcher& prefetch) noexcept {
  vf high[4] = {vf(-__builtin_inff()), vf(-__builtin_inff()), vf(-__builtin_inff()), vf(-__builtin_inff())};
  const bool scaled_later = terms.soft_cap <= 0 && !of.has_alibi && terms.scale > 0;
  const float factor = scaled_later ? terms.scale : 1.0f;
  if (scaled_later && of.all_visible) {
    for (int key = 0; key < tile_keys; key += 4) {
      prefetch.poll();
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) high[i] = xsimd::max(high[i], load(scores + (key + i) * lanes));
    }
  } else {
    const vf scale(scaled_later ? 1.0f : terms.scale);
    const vf cap(terms.soft_cap);
    const vf lowest(-__builtin_inff());
    for (int key = 0; key < tile_keys; ++key) {
      if (key % 4 == 0) prefetch.poll();
      vf s = load(scores + key * lanes) * scale;
      const vf number(static_cast<float>(key));
      if (terms.soft_cap > 0) s = attn::soft_capped<vector_math>(s, cap);
      if (of.has_alibi) s = attn::with_alibi<vector_math>(s, load(of.slopes), load(of.distance) + number);
      if (!of.all_visible) s = xsimd::select((number >= load(of.begin)) & (number < load(of.end)), s, lowest);
      store(scores + key * lanes, s);
      high[key % 4] = xsimd::max(high[key % 4], s);
    }
  }
  highest = xsimd::max(xsimd::max(high[0], high[1]), xsimd::max(high[2], high[3])) * vf(factor);
  return factor;
}

/// Scores, transposed, of one row group [64][16] → its probabilities for `add_outputs`; updates maxima, sums and, where
/// a maximum rises, the accumulators. A row's sum over a KV tile is that of four chains, of keys 4·i + j.
template <class Key>
BIFOLIO_INLINE void softmax_group(float* scores, const softmax_terms& terms, const row_group_lanes& of,
                                  const row_group_state& state, float* p, prefetcher& prefetch) noexcept {
  vf highest;
  const vf factor(group_logits(scores, terms, of, highest, prefetch));

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
  const vf shift = vf(0.0f) - xsimd::select(maxima == vf(-__builtin_inff()), vf(0.0f), maxima);
  vf chains[4] = {vf(0.0f), vf(0.0f), vf(0.0f), vf(0.0f)};
  const vf enlarged(probability_factor<Key>);
  for (int step = 0; step < key_steps; ++step) {
    alignas(64) float pairs[tile_floats];
    for (int i = 0; i < tile_rows; i += 2) {
      vf e[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        e[j] = exp(fma(load(scores + (step * 32 + 2 * i + j) * lanes), factor, shift));
        chains[j] = chains[j] + e[j];
        if constexpr (probability_factor<Key> != 1.0f) e[j] = e[j] * enlarged;
      }
      store(pairs + i * lanes, pair_keys<Key>(e[0], e[1]));
      store(pairs + (i + 1) * lanes, pair_keys<Key>(e[2], e[3]));
      prefetch.poll();
    }
    transpose(
        [&](int i) __attribute__((always_inline)) { return load(pairs + i * lanes); },
        [&](int row, vf keys) __attribute__((always_inline)) { store(p + step * tile_floats + row * lanes, keys); });
  }
  store(state.sums(), sums + ((chains[0] + chains[1]) + (chains[2] + chains[3])));
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
}  // namespace bifolio::cpu::BIFOLIO_ISA

#endif
