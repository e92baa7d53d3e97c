// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The producers of prefill for caches of codes: a warpgroup for K and one for V, or one for both. Each thread requests
/// pieces of 16 bytes by cp.async into places of its own, and stores what has come as 16 elements of float16, in which
/// every code is exact, whatever the type of the queries. It takes several pieces at a time, so that one piece's
/// instructions run while others wait. When a plane of a tile is stored, that of the next tile is requested into the
/// same places. No warp waits for another of its warpgroup. Scales are the consumers'; those of tokens are put next to
/// the tile of K, and codes with a zero point are stored less their token's origin (zero_codes.cuh). What is outside
/// the sequence, the window or head_dim becomes zero. Queries come by TMA as everywhere.
///
/// In the kernels of scales per token K or V may have 16 bits beside codes: a wide plane. float16 is stored as it is,
/// rows of bfloat16 over a power of two, which is the token's scale (token_powers.cuh). Consumers use V's scales before
/// V itself. So where V has such powers, V's producer finds them as soon as a tile has come, and one of K is full when
/// they are stored too.
///
/// What the producer keeps from tile to tile is counters, from which stages and phases follow, and offsets in units of
/// 16 bytes.

#include <cstdint>

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/coarse_power.cuh"
#include "cuda/attention/prefill/launch.hpp"
#include "cuda/attention/prefill/pipeline.cuh"
#include "cuda/attention/prefill/producer.cuh"
#include "cuda/attention/prefill/results.cuh"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/attention/prefill/shape.hpp"
#include "cuda/attention/prefill/token_powers.cuh"
#include "cuda/device/code_vectors.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm80.cuh"
#include "cuda/device/sm90.cuh"
#include "cuda/device/zero_codes.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// That fill a stage: one from each warp.
inline constexpr int coded_producer_arrivals = 4;
/// And a stage of K besides: V's producer, if it is another, may have scales to store.
template <class Shape>
[[nodiscard]] __device__ __forceinline__ int more_arrivals_for_keys(const prefill_args& args) {
  constexpr bool finds_scales = Shape::takes_wide && Shape::num_producers == 2 && !Shape::has_late_scales;
  return finds_scales && args.v_type == dtype::bf16 ? coded_producer_arrivals : 0;
}

/// Lanes 4j … 4j + 3 take the 64 bytes of one token and chunk of 64 dims; in each pass the warpgroup takes 32 tokens, 8
/// a warp. `FoldsScales`: consumers have token_softmax.cuh.
template <class Shape, bool FoldsScales>
class coded_producer {
  using S = Shape;
  static constexpr int passes = S::tile_keys / 32;
  static_assert(passes * 8 == 32 || !S::has_raw_codes, "a lane for each token of a warp");
  static constexpr int batch_passes = 2;
  static constexpr int batch_pieces = batch_passes * S::chunks;  // of 16 bytes, that a thread has in registers
  static constexpr int piece_bytes = 128 * 16;                   // of the warpgroup
  static constexpr int pass_bytes = 4 * S::group_bytes;          // of a stage
  static constexpr int wide_pieces = 2 * S::chunks;              // of a thread in a pass over a wide plane
  static_assert(passes * S::chunks * piece_bytes == S::raw_bytes || !S::has_raw_codes);
  static constexpr int padding_barrier = 1 + 2 * S::num_warpgroups;  // the consumers' are before
  static_assert(S::stages == 2);

 public:
  __device__ __forceinline__ coded_producer(const prefill_args& args, const shared_stages<Shape>& stages,
                                            const tensor_map* q_map)
      : a_(args),
        stages_(stages),
        q_map_(q_map),
        warp_(uniform(static_cast<int>(threadIdx.x) / 32) & 3),
        lane_(static_cast<int>(threadIdx.x) & 31) {}

  /// Fills the stages for all work tiles of the CTA.
  template <class Source>
  __device__ __forceinline__ void run_both(Source source) {
    clear_padding();
    if constexpr (S::takes_wide) {
      if (is_wide<true>()) return run_both_in_turn<true>(source);
      if (is_wide<false>()) return run_both_in_turn<false>(source);
    }
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const kv_range e = kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      tokens_of_work tokens = tokens_of(work, e);
      const int num_tiles = e.num_tiles();
      table_entry entry = look_up(tokens);
      token_place place = find_token(tokens, entry);
      [[maybe_unused]] token_scales scales;
      if constexpr (S::by_token) scales = load_scales(tokens, entry, place);
      entry = look_up(tokens);
      request<true>(place.in_k);
      device::cp_async_commit_group();
      request<false>(place.in_v());
      device::cp_async_commit_group();
      if (threadIdx.x == 0) load_queries(a_, stages_, q_map_, q_state_, work);
      __syncwarp();
      q_state_.advance();

      // Planes of tiles as they are used: K of the last tile, K of the one before, V of the last, and so on. When a
      // plane is stored, that of the next tile is requested. Each is a group of copies, and so is none where there is
      // no plane, so that one group is in flight while another is waited for.
      for (int n = 0; n <= num_tiles; ++n) {
        const token_place last = place;
        device::cp_async_wait_group<1>();
        if (n < num_tiles) {
          place = find_token(tokens, entry);
          if constexpr (S::by_token) {
            const token_scales next = load_scales(tokens, entry, place);
            entry = look_up(tokens);
            acquire<true>(tiles_ + n);
            store_scales(scales, tiles_ + n);
            store_origin<true>(scales, tiles_ + n);
            store_origin<false>(scales, tiles_ + n);
            scales = next;
          } else {
            entry = look_up(tokens);
            acquire<true>(tiles_ + n);
          }
          fill<true>(tiles_ + n);
          if (n + 1 < num_tiles) request<true>(place.in_k);
        }
        device::cp_async_commit_group();
        if (n > 0) {
          device::cp_async_wait_group<1>();
          acquire<false>(tiles_ + n - 1);
          fill<false>(tiles_ + n - 1);
          if (n < num_tiles) request<false>(last.in_v());
        }
        device::cp_async_commit_group();
      }
      tiles_ += num_tiles;
    }
  }

  /// Fills those of one plane; another warpgroup fills the other's.
  template <bool IsK, class Source>
  __device__ __forceinline__ void run_plane(Source source) {
    clear_padding();
    if constexpr (S::takes_wide) {
      if (is_wide<IsK>()) return run_plane_of<IsK, true>(source);
    }
    run_plane_of<IsK, false>(source);
  }

 protected:
  template <bool IsK, bool IsWide, class Source>
  __device__ __forceinline__ void run_plane_of(Source source) {
    constexpr bool has_scales = S::by_token && (IsK || S::has_zeros);
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const kv_range e = kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      tokens_of_work tokens = tokens_of(work, e);
      const int num_tiles = e.num_tiles();
      table_entry entry = look_up(tokens);
      token_place place = find_token(tokens, entry);
      [[maybe_unused]] token_scales scales;
      if constexpr (has_scales) scales = load_scales(tokens, entry, place);
      request<IsK, IsWide>(IsK ? place.in_k : place.in_v());
      device::cp_async_commit_group();
      entry = look_up(tokens);
      if constexpr (IsK) {
        if (threadIdx.x == 0) load_queries(a_, stages_, q_map_, q_state_, work);
        __syncwarp();
        q_state_.advance();
      }
      for (int n = 0; n < num_tiles; ++n) {
        place = find_token(tokens, entry);
        [[maybe_unused]] token_scales next;
        if constexpr (has_scales) next = load_scales(tokens, entry, place);
        entry = look_up(tokens);
        device::cp_async_wait_group<0>();
        [[maybe_unused]] float power = 1;
        if constexpr (IsWide) {
          if (has_powers<IsK>()) {
            power = find_power<IsK>();
            if constexpr (IsK) {
              scales.k.scale = power;
            } else {
              acquire<true>(tiles_ + n);
              store_value_scales({power, 0.0f}, tiles_ + n);
              arrive<true>(static_cast<int>((tiles_ + n) & 1));
            }
          }
        }
        acquire<IsK>(tiles_ + n);
        if constexpr (has_scales) {
          if constexpr (IsK) store_scales(scales, tiles_ + n);
          store_origin<IsK>(scales, tiles_ + n);
          scales = next;
        }
        fill<IsK, IsWide>(tiles_ + n, power);
        if (n + 1 < num_tiles) {
          request<IsK, IsWide>(IsK ? place.in_k : place.in_v());
          device::cp_async_commit_group();
        }
      }
      tiles_ += num_tiles;
    }
  }

  // run_both where a plane is wide: K and V of a tile, then those of the next, so that V's scales are there in time.
  template <bool WideKeys, class Source>
  __device__ __forceinline__ void run_both_in_turn(Source source) {
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const kv_range e = kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      tokens_of_work tokens = tokens_of(work, e);
      const int num_tiles = e.num_tiles();
      table_entry entry = look_up(tokens);
      token_place place = find_token(tokens, entry);
      token_scales scales = load_scales(tokens, entry, place);
      request<true, WideKeys>(place.in_k);
      request<false, !WideKeys>(place.in_v());
      device::cp_async_commit_group();
      entry = look_up(tokens);
      if (threadIdx.x == 0) load_queries(a_, stages_, q_map_, q_state_, work);
      __syncwarp();
      q_state_.advance();
      for (int n = 0; n < num_tiles; ++n) {
        place = find_token(tokens, entry);
        const token_scales next = load_scales(tokens, entry, place);
        entry = look_up(tokens);
        device::cp_async_wait_group<0>();
        float& power = WideKeys ? scales.k.scale : scales.v.scale;
        if (has_powers<WideKeys>()) power = find_power<WideKeys>();
        acquire<true>(tiles_ + n);
        store_scales(scales, tiles_ + n);
        store_origin<true>(scales, tiles_ + n);
        store_origin<false>(scales, tiles_ + n);
        fill<true, WideKeys>(tiles_ + n, power);
        if (n + 1 < num_tiles) request<true, WideKeys>(place.in_k);
        acquire<false>(tiles_ + n);
        fill<false, !WideKeys>(tiles_ + n, power);
        if (n + 1 < num_tiles) request<false, !WideKeys>(place.in_v());
        device::cp_async_commit_group();
        scales = next;
      }
      tiles_ += num_tiles;
    }
  }

  // Whether K or V is a wide plane, and whether its rows are stored over powers.
  template <bool IsK>
  [[nodiscard]] __device__ __forceinline__ bool is_wide() const {
    if constexpr (S::takes_wide) {
      const dtype type = IsK ? a_.k_type : a_.v_type;
      return type == dtype::f16 || type == dtype::bf16;
    } else {
      return false;
    }
  }
  template <bool IsK>
  [[nodiscard]] __device__ __forceinline__ bool has_powers() const {
    return S::takes_wide && (IsK ? a_.k_type : a_.v_type) == dtype::bf16;
  }

  static constexpr std::uint32_t outside = 0xffffffffu;

  struct tokens_of_work {
    const std::int32_t* table;
    int head;
    int seq_len;
    int begin;
    int key;  // that the lane looks up next
  };
  // From the last tile on.
  [[nodiscard]] __device__ __forceinline__ tokens_of_work tokens_of(const prefill_work_tile& work,
                                                                    const kv_range& e) const {
    return {a_.block_tables + work.seq * a_.block_table_stride, work.head / a_.group_size, work.seq_len, e.begin,
            (e.tile_end - 1) * S::tile_keys + token_in_tile()};
  }
  // Of the token that a lane looks up.
  struct table_entry {
    std::uint32_t block;  // outside: the token is
    std::uint32_t slot;   // of the block
  };
  // From the beginning of a plane to the lane's token, in units of 16 bytes. Blocks of both planes are equally long
  // where both are codes without scales in their tails.
  template <bool Equal, class = void>
  struct places {
    std::uint32_t in_k, of_v;
    [[nodiscard]] __device__ __forceinline__ std::uint32_t in_v() const { return of_v; }
  };
  template <class Unused>
  struct places<true, Unused> {
    std::uint32_t in_k;
    [[nodiscard]] __device__ __forceinline__ std::uint32_t in_v() const { return in_k; }
  };
  using token_place = places<!S::by_token>;

  // The token that the lane looks up for its warp: of pass lane / 8 that of lanes 4 · (lane % 8) and the next three.
  // Where a warp has less than 32 tokens, of the first ones again.
  [[nodiscard]] __device__ __forceinline__ int token_in_tile() const {
    return (passes == 4 ? lane_ / 8 : lane_ / 8 % passes) * 32 + warp_ * 8 + lane_ % 8;
  }

  // Of the next tile, from the last to the first. Nothing here waits for the entry.
  [[nodiscard]] __device__ __forceinline__ table_entry look_up(tokens_of_work& tokens) const {
    const int key = tokens.key;
    tokens.key -= S::tile_keys;
    table_entry entry = {outside, 0};
    if (key >= tokens.seq_len || key < tokens.begin) return entry;
    const int block = a_.codes.by_block_size.quotient(key);
    entry.block = static_cast<std::uint32_t>(__ldg(tokens.table + block));
    entry.slot = static_cast<std::uint32_t>(key - block * a_.block_size);
    return entry;
  }
  [[nodiscard]] __device__ __forceinline__ token_place find_token(const tokens_of_work& tokens,
                                                                  const table_entry& entry) const {
    const bool is_there = entry.block < a_.codes.num_blocks;  // tables of a call are not checked
    const std::uint32_t in_block =
        static_cast<std::uint32_t>(tokens.head) * a_.codes.head + entry.slot * a_.codes.token;
    token_place place;
    place.in_k = is_there ? entry.block * a_.codes.k_block + in_block : outside;
    if constexpr (S::by_token) place.of_v = is_there ? entry.block * a_.codes.v_block + in_block : outside;
    if constexpr (S::takes_wide) {  // elements of two bytes
      if (is_there && is_wide<true>()) place.in_k += in_block;
      if (is_there && is_wide<false>()) place.of_v += in_block;
    }
    return place;
  }

  // Of the lane's token, as they are stored; 0: it is outside, or the plane has none.
  struct token_scales {
    bifolio::detail::scale_pair k{0.0f, 0.0f};
    bifolio::detail::scale_pair v{0.0f, 0.0f};
  };
  [[nodiscard]] static __device__ __forceinline__ const float* scale_in_tail(const void* plane,
                                                                             const code_scales& scales,
                                                                             std::uint32_t block,
                                                                             const tokens_of_work& tokens,
                                                                             const table_entry& entry) {
    return reinterpret_cast<const float*>(static_cast<const char*>(plane) + std::uint64_t{entry.block * block} * 16 +
                                          scales.tail.offset + tokens.head * scales.tail.head +
                                          entry.slot * scales.tail.token);
  }
  template <bool IsK>
  static __device__ __forceinline__ void load_scale(const void* plane, const code_scales& scales, std::uint32_t block,
                                                    const tokens_of_work& tokens, const table_entry& entry,
                                                    bifolio::detail::scale_pair& to) {
    if (scales.tail_floats == 0) {
      if constexpr (S::has_plane_producers && FoldsScales) {
        asm volatile("mov.f32 %0, 0f3F800000;\n" : "=f"(to.scale));  // a constant would be spilled
        if (IsK && scales.static_scales != nullptr) {
          to.scale = __ldg(scales.static_scales + tokens.head * scales.static_step);
        }
        return;
      }
      // V's static scale is the epilogue's.
      const bool is_static = IsK && scales.static_scales != nullptr;
      if (FoldsScales) to.scale = is_static ? __ldg(scales.static_scales + tokens.head * scales.static_step) : 1.0f;
      return;
    }
    const float* const from = scale_in_tail(plane, scales, block, tokens, entry);
    to.scale = __ldg(from);
    if (S::has_zeros && scales.tail_floats > 1) to.zero = __ldg(from + 1);
  }
  // Nothing here waits for the scales.
  [[nodiscard]] __device__ __forceinline__ token_scales load_scales(const tokens_of_work& tokens,
                                                                    const table_entry& entry,
                                                                    const token_place& place) const {
    token_scales scales;
    if (place.in_k == outside) return scales;
    // Those of bfloat16 are found in its rows.
    if (!has_powers<true>()) load_scale<true>(a_.k, a_.k_scales, a_.codes.k_block, tokens, entry, scales.k);
    if (!has_powers<false>()) load_scale<false>(a_.v, a_.v_scales, a_.codes.v_block, tokens, entry, scales.v);
    return scales;
  }
  // Before the warp's arrival at the tile of K. Powers of V are its own producer's, if it has one.
  __device__ __forceinline__ void store_scales(const token_scales& scales, std::uint32_t tile) const {
    if (S::num_producers == 1 || !has_powers<false>()) store_value_scales(scales.v, tile);
    store_scale<true>(scales.k, a_.k_scales, stages_.scales(tile));
  }
  __device__ __forceinline__ void store_value_scales(const bifolio::detail::scale_pair& stored,
                                                     std::uint32_t tile) const {
    const std::uint32_t place = stages_.scales(tile);
    const std::uint32_t magnitude = __float_as_uint(stored.scale) & 0x7fffffffu;
    const std::uint32_t largest = __reduce_max_sync(0xffffffffu, magnitude < 0x7f800000u ? magnitude : 0);
    store_scale<false>(stored, a_.v_scales, place);
    if (lane_ == 0) device::store_shared_4(place + S::largest_scales + warp_ * 4, largest);
  }
  template <bool IsK>
  __device__ __forceinline__ void store_scale(const bifolio::detail::scale_pair& stored,
                                              [[maybe_unused]] const code_scales& scales, std::uint32_t place) const {
    const int token = token_in_tile();
    const std::uint32_t of_plane = place + (IsK ? 0 : S::tile_keys) * S::scale_bytes;
    if constexpr (!S::has_zeros) {
      // Keys of a consumer thread are next to each other, four of 16.
      const int at = token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
      device::store_shared_4(of_plane + at * 4, __float_as_uint(folded<IsK>(stored.scale)));
    } else {
      device::store_shared_f32x2(of_plane + token * 8,
                                 make_float2(folded<IsK>(stored.scale), folded<IsK>(origin_of(stored, scales).shift)));
    }
  }
  // Of K with the unit of base-2 logits and the usual power of queries of bfloat16. What is finite stays so: queries
  // may be zeros.
  template <bool IsK>
  [[nodiscard]] __device__ __forceinline__ float folded(float scale) const {
    if (!IsK || !FoldsScales) return scale;
    const float unit = a_.scale * log2e * (a_.q_type == dtype::bf16 ? coarse_power::usual_value() : 1.0f);
    const float product = scale * unit;
    constexpr float largest = 0x1.fffffep127f;
    return fabsf(scale) <= largest ? fminf(fmaxf(product, -largest), largest) : product;
  }
  [[nodiscard]] static __device__ __forceinline__ device::code_origin origin_of(
      const bifolio::detail::scale_pair& stored, const code_scales& scales) {
    return scales.tail_floats > 1 ? device::code_origin(stored) : device::code_origin();
  }
  // For this warp's own `fill`.
  template <bool IsK>
  __device__ __forceinline__ void store_origin(const token_scales& scales, std::uint32_t tile) const {
    if constexpr (S::has_zeros) {
      const device::code_origin origin = IsK ? origin_of(scales.k, a_.k_scales) : origin_of(scales.v, a_.v_scales);
      device::store_shared_4(stages_.scales(tile) + S::origins + ((IsK ? 0 : S::tile_keys) + token_in_tile()) * 4,
                             origin.pair);
      __syncwarp();
    }
  }

  // Where the first of the thread's pieces of a plane arrives. A wide one has the places from the second plane's on.
  template <bool IsK>
  [[nodiscard]] __device__ __forceinline__ std::uint32_t raw_place() const {
    if constexpr (S::takes_wide) {
      return stages_.raw() + (IsK != is_wide<true>() ? 0 : S::raw_bytes) + (warp_ * 32 + lane_) * 16;
    }
    return stages_.raw() + (IsK ? 0 : S::raw_bytes) + (warp_ * 32 + lane_) * 16;
  }
  // Whether the thread's pieces of a chunk have dims.
  [[nodiscard]] __device__ __forceinline__ bool has_dims(int chunk) const {
    return chunk * 64 + (lane_ & 3) * 16 < a_.head_dim;
  }
  // What is past head_dim is never requested. Two producers clear it for both planes, with the same zeros, and meet
  // before they read. ptxas 13.0 spills less beside that barrier, so one producer has it too: u8 of 128 dims at 480
  // places, at 758 and 752 if each cleared its own plane or one warpgroup both before the CTA's barrier; of 64 dims at
  // 1082 instead of 1173.
  __device__ __forceinline__ void clear_padding() const {
#pragma unroll
    for (int c = 0; c < S::chunks; ++c) {
      if (has_dims(c)) continue;
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) {
        if (!is_wide<true>()) device::store_shared_zeros_16(raw_place<true>() + (pass * S::chunks + c) * piece_bytes);
        if (!is_wide<false>()) device::store_shared_zeros_16(raw_place<false>() + (pass * S::chunks + c) * piece_bytes);
      }
    }
    if constexpr (S::takes_wide) {
      if (is_wide<true>()) clear_wide_padding<true>();
      if (is_wide<false>()) clear_wide_padding<false>();
    }
    device::named_barrier_sync(padding_barrier, 128 * S::num_producers);
  }

  // Of a wide plane a thread has two vectors of a token and chunk. They are of other halves of the 128 bytes in every
  // second token, so that eight lanes, which have two tokens, meet all banks wherever the vectors are stored.
  [[nodiscard]] __device__ __forceinline__ int wide_vector(int half) const { return (lane_ & 7) ^ (half * 4); }
  [[nodiscard]] __device__ __forceinline__ bool has_wide_dims(int chunk, int half) const {
    return chunk * 64 + wide_vector(half) * 8 < a_.head_dim;
  }
  template <bool IsK>
  __device__ __forceinline__ void clear_wide_padding() const {
#pragma unroll 1
    for (int i = 0; i < passes * wide_pieces; ++i) {
      if (has_wide_dims(i % wide_pieces / 2, i & 1)) continue;
      device::store_shared_zeros_16(raw_place<IsK>() + i * piece_bytes);
    }
  }
  template <bool IsK>
  __device__ __forceinline__ void request_wide(std::uint32_t tokens) const {
    const char* const plane = static_cast<const char*>(IsK ? a_.k : a_.v);
    std::uint32_t place = raw_place<IsK>();
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      const std::uint32_t token = __shfl_sync(0xffffffffu, tokens, pass * 8 + lane_ / 4);
      const bool is_there = token != outside;
      const char* const row = plane + std::uint64_t{is_there ? token : 0} * 16;
#pragma unroll
      for (int i = 0; i < wide_pieces; ++i) {
        if (!has_wide_dims(i / 2, i & 1)) continue;
        device::cp_async_16(place + i * piece_bytes, row + i / 2 * 128 + wide_vector(i & 1) * 16, is_there);
      }
      place += wide_pieces * piece_bytes;
    }
  }

  // The power of the lane's token in a wide plane of bfloat16, whose rows have come.
  template <bool IsK>
  [[nodiscard]] __device__ __forceinline__ float find_power() const {
    const auto largest = largest_magnitude<IsK>([](std::uint32_t pair) { return pair; });
    // Infinities, and rows of NaN alone, are found here; a row's other elements are stored as if it had none.
    constexpr std::uint32_t infinity = 0x7f80;
    if (!__any_sync(0xffffffffu, largest >= infinity)) return power_of_token(largest).value();
    const auto finite = largest_magnitude<IsK>([](std::uint32_t pair) {
      const std::uint32_t low = pair & 0x7fffu;
      const std::uint32_t high = pair >> 16 & 0x7fffu;
      return (low < infinity ? low : 0u) | (high < infinity ? high << 16 : 0u);
    });
    return power_of_token(finite).value();
  }
  // Bits of the largest magnitude of the lane's token, of elements as `take` gives them, two at a time.
  template <bool IsK, class Take>
  [[nodiscard]] __device__ __forceinline__ std::uint32_t largest_magnitude(const Take& take) const {
    static_assert(passes == 4);
    std::uint32_t of_passes[2] = {0, 0};  // of the thread's dims, two passes in a word
    std::uint32_t from = raw_place<IsK>();
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      std::uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < wide_pieces; ++i) {
        const uint4 piece = device::load_shared_16(from + i * piece_bytes);
        for (const std::uint32_t pair : {piece.x, piece.y, piece.z, piece.w}) {
          largest = larger_magnitudes(largest, take(pair));
        }
      }
      from += wide_pieces * piece_bytes;
      of_passes[0] = __funnelshift_r(of_passes[0], of_passes[1], 16);
      of_passes[1] = of_passes[1] >> 16 | larger_magnitude(0, largest) << 16;
    }
    // Four lanes have a token in each pass; in the end lane 8 · pass + row has it.
#pragma unroll
    for (std::uint32_t& largest : of_passes) {
      largest = larger_magnitudes(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = larger_magnitudes(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      largest = __shfl_sync(0xffffffffu, largest, lane_ % 8 * 4);
    }
    return of_passes[lane_ < 16 ? 0 : 1] >> (lane_ & 8 ? 16 : 0) & 0x7fffu;
  }

  // Stores a wide plane at the thread's place of a stage. `power`: of the lane's token.
  template <bool IsK, bool HasPowers>
  __device__ __forceinline__ void store_wide(std::uint32_t stage, [[maybe_unused]] float power) const {
    const int row = lane_ / 4;
    std::uint32_t to =
        stage + static_cast<std::uint32_t>(warp_ * S::group_bytes + row * 128 + ((wide_vector(0) ^ row) << 4));
    std::uint32_t from = raw_place<IsK>();
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      uint4 pieces[wide_pieces];
#pragma unroll
      for (int i = 0; i < wide_pieces; ++i) {
        pieces[i] = device::load_shared_16(from + i * piece_bytes);
      }
      [[maybe_unused]] query_power of_token;
      if constexpr (HasPowers) {
        of_token.exponent = __shfl_sync(0xffffffffu, __float_as_uint(power), pass * 8 + row) >> 23;
      }
#pragma unroll
      for (int i = 0; i < wide_pieces; ++i) {
        uint4& piece = pieces[i];
        if constexpr (HasPowers) {
          piece = make_uint4(of_token.divide(piece.x), of_token.divide(piece.y), of_token.divide(piece.z),
                             of_token.divide(piece.w));
        }
        device::store_shared_16((to ^ ((i & 1) * 64)) + i / 2 * 1024, piece);
      }
      from += wide_pieces * piece_bytes;
      to += pass_bytes;
    }
  }

  // The compiler would add the plane's address, from the constant bank, to that of every piece.
  [[nodiscard]] static __device__ __forceinline__ const char* in_registers(const char* plane) {
    if constexpr (S::has_plane_producers) asm("" : "+l"(plane));
    return plane;
  }

  // Requests a plane of the tile whose tokens the lanes have.
  template <bool IsK, bool IsWide = false>
  __device__ __forceinline__ void request(std::uint32_t tokens) const {
    if constexpr (IsWide) return request_wide<IsK>(tokens);
    const char* const plane = in_registers(static_cast<const char*>(IsK ? a_.k : a_.v) + (lane_ & 3) * 16);
    const std::uint32_t place = raw_place<IsK>();
    const auto token_of = [&](int pass) { return __shfl_sync(0xffffffffu, tokens, pass * 8 + lane_ / 4); };
    if (__all_sync(0xffffffffu, tokens != outside)) {
#pragma unroll
      for (int pass = 0; pass < passes; ++pass) {
        const char* const row = plane + std::uint64_t{token_of(pass)} * 16;
#pragma unroll
        for (int c = 0; c < S::chunks; ++c) {
          if (has_dims(c)) device::cp_async_16(place + (pass * S::chunks + c) * piece_bytes, row + c * 64);
        }
      }
    } else {
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) {
        const std::uint32_t token = token_of(pass);
        const bool is_there = token != outside;
        const char* const row = plane + std::uint64_t{is_there ? token : 0} * 16;
#pragma unroll
        for (int c = 0; c < S::chunks; ++c) {
          if (has_dims(c)) device::cp_async_16(place + (pass * S::chunks + c) * piece_bytes, row + c * 64, is_there);
        }
      }
    }
  }

  // Waits until the stage of K or V of a tile of the CTA is empty.
  template <bool IsK>
  __device__ __forceinline__ void acquire(std::uint32_t tile) const {
    const int stage = static_cast<int>(tile & 1);
    device::mbarrier_wait_parity(IsK ? stages_.k_empty(stage) : stages_.v_empty(stage),
                                 static_cast<int>(tile >> 1 & 1) ^ 1);
  }

  // Stores K or V, which has come. `power`: of a wide plane that has powers, that of the lane's token.
  template <bool IsK, bool IsWide = false>
  __device__ __forceinline__ void fill(std::uint32_t tile, [[maybe_unused]] float power = 1) const {
    const int stage = static_cast<int>(tile & 1);
    if constexpr (IsWide) {
      const std::uint32_t to = IsK ? stages_.k(stage) : stages_.v(stage);
      if (has_powers<IsK>()) {
        store_wide<IsK, true>(to, power);
      } else {
        store_wide<IsK, false>(to, power);
      }
      device::fence_async_proxy();
      return arrive<IsK>(stage);
    }
    const int row = lane_ / 4;           // of its group of 8 tokens
    const int vector = (lane_ & 3) * 2;  // of 16 bytes in the 128 of a token and chunk
    const std::uint32_t to = (IsK ? stages_.k(stage) : stages_.v(stage)) +
                             static_cast<std::uint32_t>(warp_ * S::group_bytes + row * 128 + ((vector ^ row) << 4));
    const std::uint32_t from = raw_place<IsK>();
    // `widen`: with the number of the pass, which is the first of its batch in `first`.
    const auto store_all = [&](const auto& widen, const auto& prepare) {
#pragma unroll 1
      for (int first = 0; first < passes; first += batch_passes) {
        uint4 codes[batch_pieces];
#pragma unroll
        for (int i = 0; i < batch_pieces; ++i) {
          codes[i] = device::load_shared_16(from + (first * S::chunks + i) * piece_bytes);
        }
        const auto of_batch = prepare(first);
        const std::uint32_t place = to + first * pass_bytes;
#pragma unroll
        for (int i = 0; i < batch_pieces; ++i) {
          const int offset = i / S::chunks * pass_bytes + i % S::chunks * 1024;
          uint4 elements[2];
          widen(codes[i], elements, of_batch, i / S::chunks);
          device::store_shared_16(place + offset, elements[0]);
          device::store_shared_16((place ^ 16) + offset, elements[1]);
        }
      }
    };
    const dtype type = IsK ? a_.k_type : a_.v_type;
    if (S::has_zeros && type == dtype::u8) {
      struct origins {
        std::uint32_t of_pass[batch_passes];
      };
      const std::uint32_t of_row = stages_.scales(tile) + S::origins + ((IsK ? 0 : S::tile_keys) + warp_ * 8 + row) * 4;
      store_all([](const uint4& codes, uint4(&elements)[2], const origins& of_batch,
                   int pass) { device::widen_from_origin(codes, of_batch.of_pass[pass], elements); },
                [&](int first) {
                  origins of_batch;
#pragma unroll
                  for (int i = 0; i < batch_passes; ++i) {
                    of_batch.of_pass[i] = device::load_shared_4(of_row + (first + i) * 32 * 4);
                  }
                  return of_batch;
                });
    } else {
      device::visit_code_vectors(type, [&](const auto& widen) {
        store_all([&](const uint4& codes, uint4(&elements)[2], int, int) { widen(codes, elements); },
                  [](int) { return 0; });
      });
    }
    // Before the next request: a fence is a memory barrier as well, and may wait for copies that are on their way.
    device::fence_async_proxy();
    arrive<IsK>(stage);
  }
  // The warp has its part of a tile of K or V.
  template <bool IsK>
  __device__ __forceinline__ void arrive(int stage) const {
    __syncwarp();
    if (lane_ == 0) device::mbarrier_arrive(IsK ? stages_.k_full(stage) : stages_.v_full(stage));
  }

  const prefill_args& a_;
  const shared_stages<Shape>& stages_;
  const tensor_map* q_map_;
  int warp_, lane_;
  pipeline_state<S::q_stages> q_state_;
  std::uint32_t tiles_ = 0;  // of the work tiles before
};

}  // namespace bifolio::inline v0_2::cuda::prefill
