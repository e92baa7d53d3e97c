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
#include "cuda/device/code_vectors.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm80.cuh"
#include "cuda/device/sm90.cuh"
#include "cuda/device/zero_codes.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// That fill a stage: one from each warp.
inline constexpr int coded_producer_arrivals = 4;

/// Lanes 4j … 4j + 3 take the 64 bytes of one token and chunk of 64 dims; in each pass the warpgroup takes 32 tokens, 8
/// a warp. `FoldsScales`: consumers have token_softmax.cuh.
template <class Shape, bool FoldsScales>
class coded_producer {
  using S = Shape;
  static constexpr int passes = S::tile_keys / 32;
  static_assert(passes * 8 == 32, "a lane for each token of a warp");
  static constexpr int batch_passes = 2;
  static constexpr int batch_pieces = batch_passes * S::chunks;  // of 16 bytes, that a thread has in registers
  static constexpr int piece_bytes = 128 * 16;                   // of the warpgroup
  static constexpr int pass_bytes = 4 * S::group_bytes;          // of a stage
  static_assert(passes * S::chunks * piece_bytes == S::raw_bytes);
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
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const kv_range e = kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      tokens_of_work tokens{a_.block_tables + work.seq * a_.block_table_stride, work.head / a_.group_size, work.seq_len,
                            e.begin, (e.tile_end - 1) * S::tile_keys + token_in_tile()};
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
    constexpr bool has_scales = S::by_token && (IsK || S::has_zeros);
    clear_padding();
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const kv_range e = kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      tokens_of_work tokens{a_.block_tables + work.seq * a_.block_table_stride, work.head / a_.group_size, work.seq_len,
                            e.begin, (e.tile_end - 1) * S::tile_keys + token_in_tile()};
      const int num_tiles = e.num_tiles();
      table_entry entry = look_up(tokens);
      token_place place = find_token(tokens, entry);
      [[maybe_unused]] token_scales scales;
      if constexpr (has_scales) scales = load_scales(tokens, entry, place);
      request<IsK>(IsK ? place.in_k : place.in_v());
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
        acquire<IsK>(tiles_ + n);
        if constexpr (has_scales) {
          if constexpr (IsK) store_scales(scales, tiles_ + n);
          store_origin<IsK>(scales, tiles_ + n);
          scales = next;
        }
        fill<IsK>(tiles_ + n);
        if (n + 1 < num_tiles) {
          request<IsK>(IsK ? place.in_k : place.in_v());
          device::cp_async_commit_group();
        }
      }
      tiles_ += num_tiles;
    }
  }

 private:
  static constexpr std::uint32_t outside = 0xffffffffu;

  struct tokens_of_work {
    const std::int32_t* table;
    int head;
    int seq_len;
    int begin;
    int key;  // that the lane looks up next
  };
  // Of the token that a lane looks up.
  struct table_entry {
    std::uint32_t block;  // outside: the token is
    std::uint32_t slot;   // of the block
  };
  // From the beginning of a plane to the lane's token, in units of 16 bytes. Blocks of both planes are equally long
  // where neither has scales in their tails.
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
  [[nodiscard]] __device__ __forceinline__ int token_in_tile() const { return lane_ / 8 * 32 + warp_ * 8 + lane_ % 8; }

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
    return place;
  }

  // Of the lane's token, as they are stored; 0: it is outside, or the plane has none.
  struct token_scales {
    bifolio::detail::scale_pair k{0.0f, 0.0f};
    bifolio::detail::scale_pair v{0.0f, 0.0f};
  };
  template <bool IsK>
  static __device__ __forceinline__ void load_scale(const void* plane, const code_scales& scales, std::uint32_t block,
                                                    const tokens_of_work& tokens, const table_entry& entry,
                                                    bifolio::detail::scale_pair& to) {
    if (scales.tail_floats == 0) {
      // V's static scale is the epilogue's.
      const bool is_static = IsK && scales.static_scales != nullptr;
      if (FoldsScales) to.scale = is_static ? __ldg(scales.static_scales + tokens.head * scales.static_step) : 1.0f;
      return;
    }
    const float* const from = reinterpret_cast<const float*>(
        static_cast<const char*>(plane) + std::uint64_t{entry.block * block} * 16 + scales.tail.offset +
        tokens.head * scales.tail.head + entry.slot * scales.tail.token);
    to.scale = __ldg(from);
    if (S::has_zeros && scales.tail_floats > 1) to.zero = __ldg(from + 1);
  }
  // Nothing here waits for the scales.
  [[nodiscard]] __device__ __forceinline__ token_scales load_scales(const tokens_of_work& tokens,
                                                                    const table_entry& entry,
                                                                    const token_place& place) const {
    token_scales scales;
    if (place.in_k == outside) return scales;
    load_scale<true>(a_.k, a_.k_scales, a_.codes.k_block, tokens, entry, scales.k);
    load_scale<false>(a_.v, a_.v_scales, a_.codes.v_block, tokens, entry, scales.v);
    return scales;
  }
  // Before the warp's arrival at the tile of K.
  __device__ __forceinline__ void store_scales(const token_scales& scales, std::uint32_t tile) const {
    const std::uint32_t place = stages_.scales(tile);
    const std::uint32_t magnitude = __float_as_uint(scales.v.scale) & 0x7fffffffu;
    const std::uint32_t largest = __reduce_max_sync(0xffffffffu, magnitude < 0x7f800000u ? magnitude : 0);
    store_scale<true>(scales.k, a_.k_scales, place);
    store_scale<false>(scales.v, a_.v_scales, place);
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

  // Where the first of the thread's pieces of a plane arrives.
  template <bool IsK>
  [[nodiscard]] __device__ __forceinline__ std::uint32_t raw_place() const {
    return stages_.raw() + (IsK ? 0 : S::raw_bytes) + (warp_ * 32 + lane_) * 16;
  }
  // Whether the thread's pieces of a chunk have dims.
  [[nodiscard]] __device__ __forceinline__ bool has_dims(int chunk) const {
    return chunk * 64 + (lane_ & 3) * 16 < a_.head_dim;
  }
  // What is past head_dim is never requested.
  __device__ __forceinline__ void clear_padding() const {
#pragma unroll
    for (int c = 0; c < S::chunks; ++c) {
      if (has_dims(c)) continue;
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) {
        device::store_shared_zeros_16(raw_place<true>() + (pass * S::chunks + c) * piece_bytes);
        device::store_shared_zeros_16(raw_place<false>() + (pass * S::chunks + c) * piece_bytes);
      }
    }
  }

  // Requests a plane of the tile whose tokens the lanes have.
  template <bool IsK>
  __device__ __forceinline__ void request(std::uint32_t tokens) const {
    const char* const plane = static_cast<const char*>(IsK ? a_.k : a_.v) + (lane_ & 3) * 16;
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

  // Stores K or V, which has come.
  template <bool IsK>
  __device__ __forceinline__ void fill(std::uint32_t tile) const {
    const int stage = static_cast<int>(tile & 1);
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
