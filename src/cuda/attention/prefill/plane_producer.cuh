// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The producer of one plane of prefill over codes, K or V, of 65 to 128 dims without zero points: what
/// coded_producer.cuh does, in an order of its own. What is loaded after a request has come when the copies have.
/// Before a tile is stored, everything that was spilled would wait for it as well, since loads share scoreboards.
///
/// A wide plane of float16 comes into the stages themselves. One of bfloat16 comes as codes do, but a pass of the next
/// tile is requested as soon as that of this one is in registers, each a group of copies, and one pass over K finds
/// powers and divides by them. Powers of V are late scales: they have barriers of their own, which consumers wait for
/// when they have a tile's products.

#include <cstdint>

#include "cuda/attention/prefill/coded_producer.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

template <class Shape, bool FoldsScales>
class plane_producer : coded_producer<Shape, FoldsScales> {
  using S = Shape;
  using base = coded_producer<Shape, FoldsScales>;
  static constexpr int passes = S::tile_keys / 32;
  static constexpr int piece_bytes = 128 * 16;           // of the warpgroup
  static constexpr int pass_bytes = 4 * S::group_bytes;  // of a stage
  static constexpr int wide_pieces = 2 * S::chunks;      // of a thread in a pass over a wide plane
  static_assert(S::has_plane_producers);

 public:
  using base::base;

  /// Fills the stages of the plane for all work tiles of the CTA.
  template <bool IsK, class Source>
  __device__ __forceinline__ void run_plane(Source source) {
    base::clear_padding();
    if constexpr (S::takes_wide) {
      if (base::template is_wide<IsK>()) {
        return base::template has_powers<IsK>() ? run_wide_plane<IsK, true>(source)
                                                : run_wide_plane<IsK, false>(source);
      }
    }
    constexpr bool has_scales = S::by_token && IsK;
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const kv_range e = kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      tokens_of_work tokens = base::tokens_of(work, e);
      const int num_tiles = e.num_tiles();
      table_entry entry = base::look_up(tokens);
      token_place place = base::find_token(tokens, entry);
      [[maybe_unused]] token_scales scales;
      if constexpr (has_scales) scales = base::load_scales(tokens, entry, place);
      base::template request<IsK>(IsK ? place.in_k : place.in_v());
      device::cp_async_commit_group();
      entry = base::look_up(tokens);
      if constexpr (IsK) {
        if (threadIdx.x == 0) load_queries(a_, stages_, base::q_map_, q_state_, work);
        __syncwarp();
        q_state_.advance();
      }
      for (int n = 0; n < num_tiles; ++n) {
        device::cp_async_wait_group<0>();
        base::template acquire<IsK>(tiles_ + n);
        if constexpr (has_scales) base::store_scales(scales, tiles_ + n);
        base::template fill<IsK>(tiles_ + n);
        if (n + 1 == num_tiles) break;
        place = base::find_token(tokens, entry);
        base::template request<IsK>(IsK ? place.in_k : place.in_v());
        device::cp_async_commit_group();
        if constexpr (has_scales) scales = base::load_scales(tokens, entry, place);
        entry = base::look_up(tokens);
      }
      tiles_ += num_tiles;
    }
  }

 private:
  using base::a_, base::stages_, base::lane_, base::warp_, base::q_state_, base::tiles_;
  using typename base::table_entry;
  using typename base::token_place;
  using typename base::token_scales;
  using typename base::tokens_of_work;

  // What it looks up comes by copies as well, of the groups of the tile before: a register that is spilled waits for
  // its load.
  template <bool IsK, bool HasPowers, class Source>
  __device__ __forceinline__ void run_wide_plane(Source source) {
    const std::uint32_t dims = wide_dims();
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const kv_range e = kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      tokens_of_work tokens = base::tokens_of(work, e);
      const std::uint32_t end = tiles_ + e.num_tiles();
      token_place place;
      const auto take_entry = [&](const table_entry& entry) {
        place = base::find_token(tokens, entry);
        if constexpr (IsK) copy_value_scale(tokens, entry);
        copy_entry(tokens);
      };
      const auto look_up_next = [&] { take_entry(copied_entry(tokens)); };
      take_entry(base::look_up(tokens));
      if constexpr (HasPowers) {
#pragma unroll 1
        for (int pass = 0; pass < passes; ++pass) {
          request_pass<IsK>(IsK ? place.in_k : place.in_v(), pass, dims);
          device::cp_async_commit_group();
        }
      }
      if constexpr (IsK) {
        if (threadIdx.x == 0) load_queries(a_, stages_, base::q_map_, q_state_, work);
        __syncwarp();
        q_state_.advance();
      }
      for (; tiles_ != end; ++tiles_) {
        [[maybe_unused]] token_scales scales;
        if constexpr (HasPowers) {
          float power = 1;
          if constexpr (IsK) {
            device::cp_async_wait_group<passes - 1>();
          } else {
            device::cp_async_wait_group<0>();
            power = base::template find_power<IsK>();
            base::template acquire<true>(tiles_);
            store_late_scales(power, tiles_);
          }
          if constexpr (IsK) scales.v.scale = copied_value_scale(place);
          if (tiles_ + 1 != end) look_up_next();
          base::template acquire<IsK>(tiles_);
          scales.k.scale = convert<IsK>(tiles_, power, IsK ? place.in_k : place.in_v(), tiles_ + 1 != end ? dims : 0);
        } else {
          base::template acquire<IsK>(tiles_);
          copy_wide<IsK>(IsK ? place.in_k : place.in_v(), tiles_, dims);
          device::cp_async_commit_group();
          device::cp_async_wait_group<0>();
          if constexpr (IsK) {
            scales.v.scale = copied_value_scale(place);
            scales.k.scale = place.in_k != base::outside ? 1.0f : 0.0f;
          }
          device::fence_async_proxy();
        }
        if constexpr (IsK) base::store_scales(scales, tiles_);
        base::template arrive<IsK>(static_cast<int>(tiles_ & 1));
        if (!HasPowers && tiles_ + 1 != end) look_up_next();
      }
    }
  }

  // The table's entry of the lane's token of the next tile, and V's scale of a token, as they come into shared memory.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t place_of_copies() const {
    return stages_.kept() + static_cast<std::uint32_t>(threadIdx.x) * S::copied_bytes;
  }
  __device__ __forceinline__ void copy_entry(const tokens_of_work& tokens) const {
    if (tokens.key >= tokens.seq_len || tokens.key < tokens.begin) return;
    device::cp_async_4(place_of_copies(), tokens.table + a_.codes.by_block_size.quotient(tokens.key));
  }
  [[nodiscard]] __device__ __forceinline__ table_entry copied_entry(tokens_of_work& tokens) const {
    const int key = tokens.key;
    tokens.key -= S::tile_keys;
    if (key >= tokens.seq_len || key < tokens.begin) return {base::outside, 0};
    const int block = a_.codes.by_block_size.quotient(key);
    return {device::load_shared_4(place_of_copies()), static_cast<std::uint32_t>(key - block * a_.block_size)};
  }
  __device__ __forceinline__ void copy_value_scale(const tokens_of_work& tokens, const table_entry& entry) const {
    if (a_.v_scales.tail_floats == 0 || entry.block >= a_.codes.num_blocks) return;
    device::cp_async_4(place_of_copies() + 4, base::scale_in_tail(a_.v, a_.v_scales, a_.codes.v_block, tokens, entry));
  }
  [[nodiscard]] __device__ __forceinline__ float copied_value_scale(const token_place& place) const {
    if (place.in_k == base::outside) return 0;
    if (a_.v_scales.tail_floats == 0) return FoldsScales ? 1.0f : 0.0f;
    return __uint_as_float(device::load_shared_4(place_of_copies() + 4));
  }

  // Of V of bfloat16, once the tile's K has its stage. All threads arrive: with one lane's arrival after a __syncwarp,
  // of which ptxas leaves nothing here, racecheck takes the others' stores for unordered.
  __device__ __forceinline__ void store_late_scales(float power, std::uint32_t tile) const {
    base::store_value_scales({power, 0.0f}, tile);
    device::mbarrier_arrive(stages_.scales_full(static_cast<int>(tile & 1)));
  }

  // The thread's first two vectors of the token that it takes in a pass; those of the next chunk are 128 bytes on.
  struct wide_row {
    const char* vectors[2];
    bool is_there;
  };
  template <bool IsK>
  [[nodiscard]] __device__ __forceinline__ wide_row wide_row_of(std::uint32_t tokens, int pass) const {
    const std::uint32_t token = __shfl_sync(0xffffffffu, tokens, pass * 8 + lane_ / 4);
    const bool is_there = token != base::outside;
    const char* const plane = static_cast<const char*>(IsK ? a_.k : a_.v);
    const char* const first =
        base::in_registers(plane + base::wide_vector(0) * 16) + std::uint64_t{is_there ? token : 0} * 16;
    return {{first, first + ((lane_ & 4) != 0 ? -64 : 64)}, is_there};
  }
  // Which of the thread's vectors of a token have dims.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t wide_dims() const {
    std::uint32_t dims = 0;
#pragma unroll
    for (int i = 0; i < wide_pieces; ++i) dims |= base::has_wide_dims(i / 2, i & 1) ? 1u << i : 0u;
    return dims;
  }
  // Requests a pass of a wide plane into the thread's own places.
  template <bool IsK>
  __device__ __forceinline__ void request_pass(std::uint32_t tokens, int pass, std::uint32_t dims) const {
    const wide_row row = wide_row_of<IsK>(tokens, pass);
    const std::uint32_t place = base::template raw_place<IsK>() + pass * wide_pieces * piece_bytes;
#pragma unroll
    for (int i = 0; i < wide_pieces; ++i) {
      if ((dims >> i & 1) == 0) continue;
      device::cp_async_16(place + i * piece_bytes, row.vectors[i & 1] + i / 2 * 128, row.is_there);
    }
  }

  // Where the thread's vectors of the first pass lie in a stage: those of a chunk 64 bytes apart or together in the
  // swizzle, those of chunks 1024.
  template <bool IsK>
  [[nodiscard]] __device__ __forceinline__ std::uint32_t place_in_stage(std::uint32_t tile) const {
    const int stage = static_cast<int>(tile & 1);
    const int row = lane_ / 4;
    return (IsK ? stages_.k(stage) : stages_.v(stage)) +
           static_cast<std::uint32_t>(warp_ * S::group_bytes + row * 128 + ((base::wide_vector(0) ^ row) << 4));
  }
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t vector_after(std::uint32_t place, int i) {
    return (place ^ ((i & 1) * 64)) + i / 2 * 1024;
  }
  // Requests a wide plane into the stage of a tile, dims past head_dim as zeros.
  template <bool IsK>
  __device__ __forceinline__ void copy_wide(std::uint32_t tokens, std::uint32_t tile, std::uint32_t dims) const {
    std::uint32_t to = place_in_stage<IsK>(tile);
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      const wide_row row = wide_row_of<IsK>(tokens, pass);
#pragma unroll
      for (int i = 0; i < wide_pieces; ++i) {
        device::cp_async_16(vector_after(to, i), row.vectors[i & 1] + i / 2 * 128,
                            row.is_there && (dims >> i & 1) != 0);
      }
      to += pass_bytes;
    }
  }

  static constexpr std::uint32_t bf16_infinity = 0x7f80;
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t finite_magnitudes(std::uint32_t pair) {
    const std::uint32_t low = pair & 0x7fffu;
    const std::uint32_t high = pair >> 16 & 0x7fffu;
    return (low < bf16_infinity ? low : 0u) | (high < bf16_infinity ? high << 16 : 0u);
  }
  // Bits of the largest magnitude of the thread's vectors, of elements as `take` gives them, two at a time.
  template <class Take>
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t largest_of_pieces(const uint4 (&pieces)[wide_pieces],
                                                                                  const Take& take) {
    std::uint32_t largest[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < wide_pieces; ++i) {
      const uint4& piece = pieces[i];
      largest[0] = larger_magnitudes(larger_magnitudes(largest[0], take(piece.x)), take(piece.y));
      largest[1] = larger_magnitudes(larger_magnitudes(largest[1], take(piece.z)), take(piece.w));
    }
    return larger_magnitude(0, larger_magnitudes(largest[0], largest[1]));
  }
  // The power of the row that four lanes have in registers.
  [[nodiscard]] static __device__ __forceinline__ query_power power_of_pieces(const uint4 (&pieces)[wide_pieces]) {
    const auto of_row = [](std::uint32_t largest) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      return max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    };
    const std::uint32_t largest = of_row(largest_of_pieces(pieces, [](std::uint32_t pair) { return pair; }));
    if (!__any_sync(0xffffffffu, largest >= bf16_infinity)) return power_of_token(largest);
    return power_of_token(of_row(largest_of_pieces(pieces, finite_magnitudes)));
  }

  // Stores a plane of bfloat16, pass by pass, and requests each pass of the tokens `after` when it has left its places:
  // of those of the thread's vectors that are in `dims`. Passes of K are on their way, each the oldest group, and it
  // finds their powers; `power`: that of the lane's token. Returns those of the lanes' tokens.
  template <bool IsK>
  [[nodiscard]] __device__ __forceinline__ float convert(std::uint32_t tile, float power, std::uint32_t after,
                                                         std::uint32_t dims) const {
    std::uint32_t to = place_in_stage<IsK>(tile);
    std::uint32_t from = base::template raw_place<IsK>();
    float found = power;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      if constexpr (IsK) device::cp_async_wait_group<passes - 1>();
      uint4 pieces[wide_pieces];
#pragma unroll
      for (int i = 0; i < wide_pieces; ++i) {
        pieces[i] = device::load_shared_16(from + i * piece_bytes);
      }
      query_power of_row;
      if constexpr (IsK) {
        of_row = power_of_pieces(pieces);
        const float of_token = __shfl_sync(0xffffffffu, of_row.value(), lane_ % 8 * 4);
        if (lane_ / 8 == pass) found = of_token;
      } else {
        of_row.exponent = __shfl_sync(0xffffffffu, __float_as_uint(power), pass * 8 + lane_ / 4) >> 23;
      }
      // The vector that came last first: when it is stored, all are in registers.
#pragma unroll
      for (int i = wide_pieces - 1; i >= 0; --i) {
        const uint4& piece = pieces[i];
        device::store_shared_16(vector_after(to, i), make_uint4(of_row.divide(piece.x), of_row.divide(piece.y),
                                                                of_row.divide(piece.z), of_row.divide(piece.w)));
        if (i < wide_pieces - 1) continue;
        if (__any_sync(0xffffffffu, dims != 0)) request_pass<IsK>(after, pass, dims);
        device::cp_async_commit_group();
      }
      from += wide_pieces * piece_bytes;
      to += pass_bytes;
    }
    device::fence_async_proxy();
    return found;
  }
};

}  // namespace bifolio::inline v0_2::cuda::prefill
