// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Softmax between the products of tile_micro.hpp: scores, transposed, of one row group → probabilities in the form of
/// the products that follow, and the running split of the group.

#include "common/attention/logits.hpp"
#include "cpu/kernels/attention/math.hpp"
#include "cpu/kernels/attention/tile_micro.hpp"

#if BIFOLIO_TILES

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

/// The softmax of a row group has (row, key) in the lanes of a vector: lane rows·i + r belongs to row r and the i-th of
/// `vector_keys` keys. `Rows`, the rows that a vector has room for, is the least of 4, 8 and 16 that holds those of the
/// group; what a row gets does not depend on it.
template <int Rows>
inline constexpr int vector_keys = lanes / Rows;
/// Vectors of one KV tile.
template <int Rows>
inline constexpr int group_vectors = tile_keys / vector_keys<Rows>;
[[nodiscard]] constexpr int vector_rows(int rows) noexcept { return rows <= 4 ? 4 : rows <= 8 ? 8 : 16; }

/// How often the softmax of a row group polls the prefetcher: once per four vectors of logits, once per four of
/// probabilities. Products poll once each.
[[nodiscard]] constexpr int softmax_polls(int rows) noexcept { return 2 * (tile_keys * vector_rows(rows) / lanes / 4); }

/// What the lanes of a row group, one per row, attend to. Without initializers: clearing it for each group and KV tile
/// costs more than setting what is used.
struct row_group_lanes {
  int rows;            // that exist; the lanes of the others are unused
  int width;           // rows that a vector has room for
  bool all_visible;    // all keys of the tile to all rows; otherwise:
  float begin[lanes];  // first visible key of the tile,
  float end[lanes];    // and one past the last
  bool has_alibi;      // then:
  float slopes[lanes];
  float distance[lanes];  // position of the tile's first key less the query's
};

/// The logits transform of a KV head, and the scales of a KV tile's tokens where codes have them: those of K multiply
/// scores, those of V probabilities before they are rounded.
struct softmax_terms {
  float scale = 0;
  float soft_cap = 0;                   // 0 = none
  const float* key_scales = nullptr;    // [tile_keys]
  const float* value_scales = nullptr;  // [tile_keys]
};

/// Which of a vector's keys a lane belongs to.
template <int Rows>
BIFOLIO_INLINE __m512i key_numbers() noexcept {
  return _mm512_srli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), Rows == 4   ? 2
                                                                                                    : Rows == 8 ? 3
                                                                                                                : 4);
}
template <int Rows>
BIFOLIO_INLINE vf key_of_lanes() noexcept {
  return vf(_mm512_cvtepi32_ps(key_numbers<Rows>()));
}

/// The scales of `vector_keys` keys from `from` on, each in all lanes of its key.
template <int Rows>
BIFOLIO_INLINE vf spread_scales(const float* from) noexcept {
  if constexpr (Rows == 16) {
    return vf(*from);
  } else {
    const vf scales(_mm512_maskz_loadu_ps((1u << vector_keys<Rows>)-1u, from));
    return vf(_mm512_permutexvar_ps(key_numbers<Rows>(), raw(scales)));
  }
}

/// Probabilities are multiplied by this before they are rounded, so that of e^8 down to 2^-18 all keep 11 bits in
/// float16; accumulators hold as much more.
template <class Key>
inline constexpr float probability_factor = 1.0f;
template <>
inline constexpr float probability_factor<float16> = 16.0f;

/// 32 elements; those from `count` on are 0.
BIFOLIO_INLINE vf load_elements(const void* from, int count) noexcept {
  if (count >= tile_dims) return load_bits(from);
  return vf(_mm512_castsi512_ps(_mm512_maskz_loadu_epi16((1u << count) - 1u, from)));
}

/// The elements of a key and of the sixteenth after it in pairs, rounded to nearest even: lane i holds lane i of both
/// vectors.
template <class Key>
BIFOLIO_INLINE vf pair_keys(vf first, vf second) noexcept {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512i both;
  if constexpr (__is_same(Key, float16)) {
    constexpr int rounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(raw(first), rounding)),
                              _mm512_cvtps_ph(raw(second), rounding), 1);
  } else {
    both = __builtin_bit_cast(__m512i, raw(narrow_pairs(first, second)));
  }
  return vf(_mm512_castsi512_ps(_mm512_permutexvar_epi16(order, both)));
}

/// A row's pairs of a step of 32 keys → four rows of its row block: the even and the odd dims' of keys 0–15, then of
/// the others.
BIFOLIO_INLINE void store_in_place(float* to, vf pairs) noexcept {
  constexpr int odd = row_block_rows * lanes;
  const __m512i bits = _mm512_castps_si512(raw(pairs));
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  store(to, vf(_mm512_castsi512_ps(_mm512_andnot_si512(high, bits))));
  store(to + odd, vf(_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))));
  store(to + tile_floats, vf(_mm512_castsi512_ps(_mm512_srli_epi32(bits, 16))));
  store(to + tile_floats + odd, vf(_mm512_castsi512_ps(_mm512_and_si512(high, bits))));
}

/// Four vectors of four pairs × four rows → four rows of 16 pairs, which `store_row(row, pairs)` takes.
template <class StoreRow>
BIFOLIO_INLINE void transpose_four_rows(__m512 v0, __m512 v1, __m512 v2, __m512 v3,
                                        const StoreRow& store_row) noexcept {
  const __m512i rows01 = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i rows23 = _mm512_setr_epi32(2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
  const __m512 first01 = _mm512_permutex2var_ps(v0, rows01, v1);
  const __m512 second01 = _mm512_permutex2var_ps(v2, rows01, v3);
  const __m512 first23 = _mm512_permutex2var_ps(v0, rows23, v1);
  const __m512 second23 = _mm512_permutex2var_ps(v2, rows23, v3);
  store_row(0, vf(_mm512_shuffle_f32x4(first01, second01, 0x44)));
  store_row(1, vf(_mm512_shuffle_f32x4(first01, second01, 0xee)));
  store_row(2, vf(_mm512_shuffle_f32x4(first23, second23, 0x44)));
  store_row(3, vf(_mm512_shuffle_f32x4(first23, second23, 0xee)));
}

/// `Rows` vectors of `pair_keys`, in order of keys → rows of 16 pairs.
template <int Rows, class StoreRow>
BIFOLIO_INLINE void transpose_pairs(const vf (&pairs)[std::size_t{Rows}], const StoreRow& store_row) noexcept {
  if constexpr (Rows == 4) {
    transpose_four_rows(raw(pairs[0]), raw(pairs[1]), raw(pairs[2]), raw(pairs[3]), store_row);
  } else if constexpr (Rows == 8) {
    const auto rows = [&]<int Pieces>(int i) __attribute__((always_inline)) {
      return _mm512_shuffle_f32x4(raw(pairs[i]), raw(pairs[i + 1]), Pieces);
    };
    const auto four_rows = [&]<int Pieces>(int first) __attribute__((always_inline)) {
      transpose_four_rows(
          rows.template operator()<Pieces>(0), rows.template operator()<Pieces>(2), rows.template operator()<Pieces>(4),
          rows.template operator()<Pieces>(6), [&](int row, vf keys) __attribute__((always_inline)) {
            store_row(first + row, keys);
          });
    };
    four_rows.template operator()<0x88>(0);  // 128-bit pieces 0 and 2, which hold rows 0 to 3
    four_rows.template operator()<0xdd>(4);
  } else {
    transpose(
        [&](int i) __attribute__((always_inline)) { return pairs[i]; }, store_row);
  }
}

/// A pair of neighbouring dims of which one is not finite → NaN in both. With V in place such an element spoils its
/// neighbour, with paired V it does not: this makes them one.
BIFOLIO_INLINE vf spoil_neighbours(vf dims) noexcept {
  constexpr int not_finite = 0x01 | 0x08 | 0x10 | 0x80;  // VFPCLASSPS: NaN, infinity
  const unsigned bad = _mm512_fpclass_ps_mask(raw(dims), not_finite);
  const unsigned pairs = bad | (bad & 0x5555u) << 1 | (bad & 0xaaaau) >> 1;
  return vf(_mm512_mask_mov_ps(raw(dims), static_cast<__mmask16>(pairs), _mm512_set1_ps(__builtin_nanf(""))));
}

/// The running split of a row group, in scratch. Accumulators: paired [tiles of 16 dims][16 rows][16], in place [row
/// blocks][tiles of 32 dims][even, odd][8 rows][16].
class row_group_state {
 public:
  BIFOLIO_INLINE row_group_state(float* at, int padded, bool in_place) noexcept
      : accumulators_(at),
        maxima_(at + row_group_rows * padded),
        sums_(maxima_ + lanes),
        padded_(padded),
        in_place_(in_place) {}

  [[nodiscard]] float* accumulators() const noexcept { return accumulators_; }
  [[nodiscard]] float* maxima() const noexcept { return maxima_; }
  [[nodiscard]] float* sums() const noexcept { return sums_; }
  [[nodiscard]] int dims() const noexcept { return padded_; }

  /// The state of no key, for `rows` rows.
  void clear(int rows) const noexcept {
    const int used = in_place_ ? (rows + row_block_rows - 1) / row_block_rows * row_block_rows : row_group_rows;
    for (int i = 0; i < used * padded_; i += lanes) store(accumulators_ + i, vf(0.0f));
    store(maxima_, vf(-__builtin_inff()));
    store(sums_, vf(0.0f));
  }

  void scale_row(int row, float factor) const noexcept {
    const vf alpha(factor);
    for_each_vector(
        row, [&](int at)
                 __attribute__((always_inline)) { store(accumulators_ + at, load(accumulators_ + at) * alpha); });
  }

  /// The accumulator of a row divided by `factor`, dims in order: `visit(dim, vector)` for each. The form decides no
  /// bit.
  template <class Visit>
  BIFOLIO_INLINE void read_row(int row, float factor, const Visit& visit) const noexcept {
    const vf part(1.0f / factor);
    const vf zero(0.0f);  // the forms may differ in the sign of 0
    const float* tile = accumulators_ + start_of(row);
    for (int d = 0; d < padded_; d += tile_dims, tile += 2 * apart()) {
      const vf a = load(tile) * part + zero;
      const vf b = load(tile + apart()) * part + zero;
      vf first;
      vf second;
      if (in_place_) {
        interleave(a, b, first, second);
      } else {
        order_dims(a, b, first, second);
      }
      visit(d, spoil_neighbours(first));
      visit(d + lanes, spoil_neighbours(second));
    }
  }

  /// Replaces a row's accumulator by that of `accumulators`, which has this form.
  void take_row(int row, const float* accumulators) const noexcept {
    for_each_vector(
        row, [&](int at) __attribute__((always_inline)) { store(accumulators_ + at, load(accumulators + at)); });
  }

 private:
  [[nodiscard]] BIFOLIO_INLINE int start_of(int row) const noexcept {
    if (!in_place_) return row * lanes;
    return row / row_block_rows * row_block_rows * padded_ + row % row_block_rows * lanes;
  }
  // From one vector of a row to the next.
  [[nodiscard]] BIFOLIO_INLINE int apart() const noexcept { return in_place_ ? row_block_rows * lanes : tile_floats; }
  template <class Visit>
  BIFOLIO_INLINE void for_each_vector(int row, const Visit& visit) const noexcept {
    int at = start_of(row);
    for (int d = 0; d < padded_; d += lanes, at += apart()) visit(at);
  }

  float* accumulators_;
  float* maxima_;
  float* sums_;
  int padded_;
  bool in_place_;
};

/// 2^x for x ≤ 127, within 1.5e-7 of it; 1 for 0, 0 for −inf, NaN for NaN: the fraction of x by a polynomial of degree
/// 5 that is 1 at 0 (minimax of the relative error on [0, 1)), times two to the power of the integer below x.
BIFOLIO_INLINE vf exp2(vf x) noexcept {
  constexpr int below = 1;  // rounding of VREDUCEPS: towards −inf, to an integer
  const vf r(_mm512_reduce_ps(raw(x), below));
  vf p = fma(vf(0x1.e974fap-10f), r, vf(0x1.277856p-7f));
  p = fma(p, r, vf(0x1.c91ce6p-5f));
  p = fma(p, r, vf(0x1.ebdb56p-3f));
  p = fma(p, r, vf(0x1.62e4bap-1f));
  p = fma(p, r, vf(1.0f));
  return vf(_mm512_scalef_ps(raw(p), raw(x)));
}

/// The scores of `vector_keys` keys, [key][16] from `from` on, in one vector.
template <int Rows>
BIFOLIO_INLINE vf join_scores(const float* from) noexcept {
  if constexpr (Rows == 16) {
    return load(from);
  } else if constexpr (Rows == 8) {
    const __m512 first = _mm512_castps256_ps512(_mm256_loadu_ps(from));
    return vf(_mm512_insertf32x8(first, _mm256_loadu_ps(from + lanes), 1));
  } else {
    __m512 keys = _mm512_castps128_ps512(_mm_loadu_ps(from));
    keys = _mm512_insertf32x4(keys, _mm_loadu_ps(from + lanes), 1);
    keys = _mm512_insertf32x4(keys, _mm_loadu_ps(from + 2 * lanes), 2);
    return vf(_mm512_insertf32x4(keys, _mm_loadu_ps(from + 3 * lanes), 3));
  }
}

/// `op` over four numbers of each row, those of keys 4·i + j for j = 0 … 3, as (0 op 1) op (2 op 3), in all lanes of
/// the row.
template <int Rows, class Op>
BIFOLIO_INLINE vf combine_keys(const vf (&of)[std::size_t{Rows / 4}], const Op& op) noexcept {
  if constexpr (Rows == 16) {
    return op(op(of[0], of[1]), op(of[2], of[3]));
  } else if constexpr (Rows == 8) {
    const auto swapped = [](vf v) __attribute__((always_inline)) {
      return vf(_mm512_shuffle_f32x4(raw(v), raw(v), 0x4e));
    };
    return op(op(of[0], swapped(of[0])), op(of[1], swapped(of[1])));
  } else {
    const vf pairs = op(of[0], vf(_mm512_shuffle_f32x4(raw(of[0]), raw(of[0]), 0xb1)));
    return op(pairs, vf(_mm512_shuffle_f32x4(raw(pairs), raw(pairs), 0x4e)));
  }
}

/// Turns the scores of one row group, [key][16], into logits less their factor, which is returned, in vectors of
/// `vector_keys` keys; `highest` receives the highest logit of each row.
template <int Rows>
BIFOLIO_INLINE float group_logits(float* scores, const softmax_terms& terms, const row_group_lanes& of, vf& highest,
                                  prefetcher& prefetch) noexcept {
  constexpr int keys = vector_keys<Rows>;
  constexpr int chains = Rows / 4;
  vf high[std::size_t{chains}];
  for (vf& h : high) h = vf(-__builtin_inff());
  const bool scaled_later = terms.soft_cap <= 0 && !of.has_alibi && terms.scale > 0;
  const float factor = scaled_later ? terms.scale : 1.0f;
  if (scaled_later && of.all_visible && terms.key_scales == nullptr) {
    // Unrolled as a whole: GCC keeps the chains in memory where it unrolls a loop inside another.
#pragma GCC unroll 64
    for (int i = 0; i < group_vectors<Rows>; ++i) {
      if (i % 8 == 0) prefetch.poll();
      const vf s = join_scores<Rows>(scores + i * keys * lanes);
      if constexpr (keys > 1) store(scores + i * lanes, s);
      high[i % chains] = xsimd::max(high[i % chains], s);
    }
  } else {
    const vf scale(scaled_later ? 1.0f : terms.scale);
    const vf cap(terms.soft_cap);
    const vf lowest(-__builtin_inff());
    const vf key_of_lane = key_of_lanes<Rows>();
    for (int i = 0; i < group_vectors<Rows>; ++i) {
      if (i % 4 == 0) prefetch.poll();
      vf s = join_scores<Rows>(scores + i * keys * lanes) * scale;
      if (terms.key_scales != nullptr) s = s * spread_scales<Rows>(terms.key_scales + i * keys);
      const vf key = key_of_lane + vf(static_cast<float>(i * keys));
      if (terms.soft_cap > 0) s = attn::soft_capped<vector_math>(s, cap);
      if (of.has_alibi) s = attn::with_alibi<vector_math>(s, load(of.slopes), load(of.distance) + key);
      if (!of.all_visible) s = xsimd::select((key >= load(of.begin)) & (key < load(of.end)), s, lowest);
      store(scores + i * lanes, s);
      high[i % chains] = xsimd::max(high[i % chains], s);
    }
  }
  const auto max = [](vf a, vf b) __attribute__((always_inline)) { return xsimd::max(a, b); };
  highest = combine_keys<Rows>(high, max) * vf(factor);
  return factor;
}

/// Scores, transposed, of one row group [64][16] → its probabilities, for `add_outputs` [steps][16][16 pairs] or, in
/// place, for `add_outputs_in_place` [row blocks][keys / 16][16][16 pairs]; updates maxima, sums and, where a maximum
/// rises, the accumulators, to which it adds pending outputs first. A row's sum over a KV tile is that of eight chains:
/// keys 4·i + j, 16 in turn to the first four and to the others. Returns whether a maximum rose.
template <class Key, int Rows, bool HasValueScales>
BIFOLIO_INLINE bool softmax_rows(float* scores, const softmax_terms& terms, const row_group_lanes& of,
                                 const row_group_state& state, bool in_place, const products_between<Key>& between,
                                 float* p, prefetcher& prefetch) noexcept {
  constexpr float log2_e = 0x1.715476p0f;
  vf highest;
  const vf factor(group_logits<Rows>(scores, terms, of, highest, prefetch) * log2_e);

  vf maxima = load(state.maxima());
  vf sums = load(state.sums());
  const __mmask16 rises = _mm512_cmp_ps_mask(raw(highest), raw(maxima + vf(rescale_threshold)), _CMP_GT_OQ);
  if (__builtin_expect(rises != 0, 0)) {
    if (between.pending != nullptr) {
      add_outputs<Key>(*between.pending, between.p, state.dims(), state.accumulators(), prefetch);
    }
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
  const vf shift = xsimd::select(maxima == vf(-__builtin_inff()), vf(0.0f), maxima) * vf(-log2_e);
  constexpr int num_chains = Rows / 4;
  vf chains[2][std::size_t{num_chains}];
  for (auto& half : chains) {
    for (vf& c : half) c = vf(0.0f);
  }
  if constexpr (Rows != row_group_rows) issue_all(between.scores, prefetch);
  // A key that a row does not attend to has probability 0, whatever its scale is.
  [[maybe_unused]] const auto scaled = [&](vf e, int vector) __attribute__((always_inline)) {
    const int first = vector * vector_keys<Rows>;
    const vf product = e * spread_scales<Rows>(terms.value_scales + first);
    if (of.all_visible) return product;
    const vf key = key_of_lanes<Rows>() + vf(static_cast<float>(first));
    return xsimd::select((key >= load(of.begin)) & (key < load(of.end)), product, vf(0.0f));
  };
  for (int step = 0; step < key_steps; ++step) {
    const float* logits = scores + step * 2 * Rows * lanes;
    vf pairs[std::size_t{Rows}];
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      vf e[2];
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        e[half] = exp2(fma(load(logits + (half * Rows + i) * lanes), factor, shift));
        chains[half][i % num_chains] = chains[half][i % num_chains] + e[half];
        if constexpr (HasValueScales) e[half] = scaled(e[half], step * 2 * Rows + half * Rows + i);
        if constexpr (probability_factor<Key> != 1.0f) e[half] = e[half] * vf(probability_factor<Key>);
      }
      pairs[i] = pair_keys<Key>(e[0], e[1]);
      if (i % 2 == 1) prefetch.poll();
      if constexpr (Rows == row_group_rows) {
        constexpr int parts = 4;  // per step
        if (i % 4 == 3) issue_part(between.scores, step * parts + i / 4, key_steps * parts, prefetch);
      }
    }
    transpose_pairs<Rows>(
        pairs, [&](int row, vf keys) __attribute__((always_inline)) {
          if (!in_place) return store(p + step * tile_floats + row * lanes, keys);
          const int block = row / row_block_rows * key_tiles + 2 * step;
          store_in_place(p + block * tile_floats + row % row_block_rows * lanes, keys);
        });
  }
  const auto add = [](vf a, vf b) __attribute__((always_inline)) { return a + b; };
  store(state.sums(), sums + (combine_keys<Rows>(chains[0], add) + combine_keys<Rows>(chains[1], add)));
  return rises != 0;
}

template <class Key>
BIFOLIO_INLINE bool softmax_group(float* scores, const softmax_terms& terms, const row_group_lanes& of,
                                  const row_group_state& state, bool in_place, const products_between<Key>& between,
                                  float* p, prefetcher& prefetch) noexcept {
  const auto softmax = [&]<bool HasValueScales>() __attribute__((always_inline)) {
    switch (of.width) {
      case 4:
        return softmax_rows<Key, 4, HasValueScales>(scores, terms, of, state, in_place, between, p, prefetch);
      case 8:
        return softmax_rows<Key, 8, HasValueScales>(scores, terms, of, state, in_place, between, p, prefetch);
      default:
        return softmax_rows<Key, 16, HasValueScales>(scores, terms, of, state, in_place, between, p, prefetch);
    }
  };
  if constexpr (__is_same(Key, bfloat16)) {
    if (terms.value_scales != nullptr) return softmax.template operator()<true>();
  }
  return softmax.template operator()<false>();
}

/// Whether `count` elements hold neither infinity nor NaN.
template <class Key>
BIFOLIO_INLINE bool all_finite(const Key* row, int count) noexcept {
  const __m512i exponent = _mm512_set1_epi16(__is_same(Key, float16) ? 0x7c00 : 0x7f80);
  __mmask32 not_finite = 0;
  for (int i = 0; i < count; i += tile_dims) {
    const __m512i bits = _mm512_castps_si512(raw(load_elements(row + i, count - i)));
    not_finite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(bits, exponent), exponent);
  }
  return not_finite == 0;
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

#endif
