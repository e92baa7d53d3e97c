// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The producers of prefill for caches of codes of more than 128 dims, a warpgroup for K and one for V. Beside the
/// stages of elements shared memory has room for most of the codes of one tile. A thread requests those by cp.async, as
/// in coded_producer.cuh, and the rest of its pieces into registers, which hold them until the stage is empty. All are
/// requested when the tile before is stored. While they are on their way the thread finds the tokens of the next tile,
/// so that no request waits for a table. Tokens, scales and origins are those of coded_producer.cuh.

#include <cstdint>

#include "cuda/attention/prefill/coded_producer.cuh"
#include "cuda/device/load.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// Lanes 4j … 4j + 3 take the 64 bytes of one token and chunk of 64 dims; in each pass the warpgroup takes 32 tokens, 8
/// a warp. A piece is 16 bytes of a thread.
template <class Shape, bool FoldsScales>
class held_coded_producer : coded_producer<Shape, FoldsScales> {
  using S = Shape;
  using base = coded_producer<Shape, FoldsScales>;
  static constexpr int staged = S::staged_pieces;
  static constexpr int held = S::plane_pieces - staged;
  static constexpr int piece_bytes = 128 * 16;           // of the warpgroup
  static constexpr int pass_bytes = 4 * S::group_bytes;  // of a stage
  static constexpr int passes = S::tile_keys / 32;
  static constexpr int depth = 3;  // staged pieces in registers at a time: beside four the compiler spills what is kept
  static_assert(S::num_producers == 2 && S::tile_keys % 32 == 0 && staged >= depth && held >= 0);

 public:
  using base::base;

  /// Fills the stages of one plane for all work tiles of the CTA; another warpgroup fills the other's.
  template <bool IsK, class Source>
  __device__ __forceinline__ void run_plane(Source source) {
    constexpr bool has_scales = S::by_token && (IsK || S::has_zeros);
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const kv_range e = kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      const int num_tiles = e.num_tiles();
      keep({a_.block_tables + work.seq * a_.block_table_stride, work.head / a_.group_size, work.seq_len, e.begin, 0});
      int key = (e.tile_end - 1) * S::tile_keys + base::token_in_tile();
      std::uint32_t block = look_up(kept(), key);
      std::uint32_t rows[passes];  // of the tile that is requested next
      [[maybe_unused]] token_scales scales, next_scales;
      const auto find_next = [&] {
        const tokens_of_work tokens = kept();
        const table_entry entry = {
            block, static_cast<std::uint32_t>(key - a_.codes.by_block_size.quotient(key) * a_.block_size)};
        const token_place place = base::find_token(tokens, entry);
        if constexpr (has_scales) next_scales = base::load_scales(tokens, entry, place);
        const std::uint32_t token = IsK ? place.in_k : place.in_v();
#pragma unroll
        for (int pass = 0; pass < passes; ++pass) {
          const std::uint32_t of_row = __shfl_sync(0xffffffffu, token, pass * 8 + lane_ / 4);
          rows[pass] = of_row == base::outside ? base::outside : of_row + (lane_ & 3);
        }
        key -= S::tile_keys;
        block = look_up(tokens, key);
      };
      find_next();
      if constexpr (IsK) {
        if (threadIdx.x == 0) load_queries(a_, stages_, base::q_map_, base::q_state_, work);
        __syncwarp();
        base::q_state_.advance();
      }
      held_codes codes;
      for (const std::uint32_t end = base::tiles_ + num_tiles; base::tiles_ != end; ++base::tiles_) {
        const std::uint32_t tile = base::tiles_;
        request_staged<IsK>(rows);
        device::cp_async_commit_group();
        request_held<IsK>(rows, codes);
        scales = next_scales;
        find_next();
        device::cp_async_wait_group<0>();
        base::template acquire<IsK>(tile);
        if constexpr (has_scales) {
          if constexpr (IsK) base::store_scales(scales, tile);
          base::template store_origin<IsK>(scales, tile);
        }
        fill<IsK>(tile, codes);
      }
    }
  }

 private:
  using base::a_, base::stages_, base::warp_, base::lane_;
  using typename base::table_entry;
  using typename base::token_place;
  using typename base::token_scales;
  using typename base::tokens_of_work;

  struct held_codes {
    uint4 of[held == 0 ? 1 : held];
  };

  // What is the same for all tiles of a work tile waits in shared memory: registers are few.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t place_of_kept() const {
    return stages_.kept() + (threadIdx.x / 32) * S::kept_bytes;
  }
  __device__ __forceinline__ void keep(const tokens_of_work& tokens) const {
    if (lane_ == 0) {
      const auto table = reinterpret_cast<std::uintptr_t>(tokens.table);
      device::store_shared_16(
          place_of_kept(),
          make_uint4(static_cast<std::uint32_t>(table), static_cast<std::uint32_t>(table >> 32),
                     static_cast<std::uint32_t>(tokens.head), static_cast<std::uint32_t>(tokens.seq_len)));
      device::store_shared_4(place_of_kept() + 16, static_cast<std::uint32_t>(tokens.begin));
    }
    __syncwarp();
  }
  [[nodiscard]] __device__ __forceinline__ tokens_of_work kept() const {
    const uint4 kept = device::load_shared_16(place_of_kept());
    return {reinterpret_cast<const std::int32_t*>(std::uint64_t{kept.y} << 32 | kept.x), static_cast<int>(kept.z),
            static_cast<int>(kept.w), static_cast<int>(device::load_shared_4(place_of_kept() + 16)), 0};
  }
  // The block of the lane's token. Nothing here waits for it.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t look_up(const tokens_of_work& tokens, int key) const {
    if (key >= tokens.seq_len || key < tokens.begin) return base::outside;
    return static_cast<std::uint32_t>(__ldg(tokens.table + a_.codes.by_block_size.quotient(key)));
  }

  // The thread's bytes of a token, which `rows` has in units of 16. What is outside the sequence, the window or
  // head_dim is zero. No chunk but the last has dims past head_dim: fewer dims have narrower tiles.
  template <bool IsK>
  [[nodiscard]] __device__ __forceinline__ const char* row_of(std::uint32_t token) const {
    return static_cast<const char*>(IsK ? a_.k : a_.v) + std::uint64_t{token == base::outside ? 0 : token} * 16;
  }
  [[nodiscard]] __device__ __forceinline__ bool is_there(std::uint32_t token, int chunk) const {
    return token != base::outside && (chunk + 1 < S::chunks || base::has_dims(chunk));
  }
  template <bool IsK>
  __device__ __forceinline__ void request_staged(const std::uint32_t (&rows)[passes]) const {
    const char* row = nullptr;
#pragma unroll
    for (int i = 0; i < staged; ++i) {
      const int chunk = i % S::chunks;
      const std::uint32_t token = rows[i / S::chunks];
      if (chunk == 0) row = row_of<IsK>(token);
      device::cp_async_16(base::template raw_place<IsK>() + i * piece_bytes, row + chunk * 64, is_there(token, chunk));
    }
  }
  template <bool IsK>
  __device__ __forceinline__ void request_held(const std::uint32_t (&rows)[passes], held_codes& codes) const {
    const char* row = nullptr;
#pragma unroll
    for (int piece = staged; piece < S::plane_pieces; ++piece) {
      const int chunk = piece % S::chunks;
      const std::uint32_t token = rows[piece / S::chunks];
      if (piece == staged || chunk == 0) row = row_of<IsK>(token);
      codes.of[piece - staged] = load_16_past_l1_if(row + chunk * 64, is_there(token, chunk));
    }
  }

  // Stores K or V of a tile, which has come.
  template <bool IsK>
  __device__ __forceinline__ void fill(std::uint32_t tile, const held_codes& codes) const {
    const int stage = static_cast<int>(tile & 1);
    const int row = lane_ / 4;           // of its group of 8 tokens
    const int vector = (lane_ & 3) * 2;  // of 16 bytes in the 128 of a token and chunk
    const std::uint32_t to = (IsK ? stages_.k(stage) : stages_.v(stage)) +
                             static_cast<std::uint32_t>(warp_ * S::group_bytes + row * 128 + ((vector ^ row) << 4));
    const std::uint32_t from = base::template raw_place<IsK>();
    const auto store_all = [&](const auto& widen, const auto& prepare) {
      const auto store = [&](int piece, const uint4& of_piece, std::uint32_t of_pass) {
        const int offset = piece / S::chunks * pass_bytes + piece % S::chunks * 1024;
        uint4 elements[2];
        widen(of_piece, elements, of_pass);
        device::store_shared_16(to + offset, elements[0]);
        device::store_shared_16((to ^ 16) + offset, elements[1]);
      };
      std::uint32_t of_pass = 0;
#pragma unroll
      for (int piece = staged; piece < S::plane_pieces; ++piece) {
        if (piece == staged || piece % S::chunks == 0) of_pass = prepare(piece / S::chunks);
        store(piece, codes.of[piece - staged], of_pass);
      }
      uint4 next[depth];
#pragma unroll
      for (int i = 0; i < depth; ++i) next[i] = device::load_shared_16(from + i * piece_bytes);
#pragma unroll
      for (int piece = 0; piece < staged; ++piece) {
        if (piece % S::chunks == 0) of_pass = prepare(piece / S::chunks);
        uint4& staged_codes = next[piece % depth];
        store(piece, staged_codes, of_pass);
        if (piece + depth < staged) staged_codes = device::load_shared_16(from + (piece + depth) * piece_bytes);
      }
    };
    const dtype type = IsK ? a_.k_type : a_.v_type;
    if (S::has_zeros && type == dtype::u8) {
      const std::uint32_t origins =
          stages_.scales(tile) + S::origins + ((IsK ? 0 : S::tile_keys) + warp_ * 8 + row) * 4;
      store_all([](const uint4& from, uint4(&elements)[2],
                   std::uint32_t origin) { device::widen_from_origin(from, origin, elements); },
                [&](int pass) { return device::load_shared_4(origins + pass * 32 * 4); });
    } else {
      device::visit_code_vectors(type, [&](const auto& widen) {
        store_all([&](const uint4& from, uint4(&elements)[2], std::uint32_t) { widen(from, elements); },
                  [](int) { return 0u; });
      });
    }
    // Before the next request: a fence is a memory barrier as well, and may wait for copies that are on their way.
    device::fence_async_proxy();
    base::template arrive<IsK>(stage);
  }
};

}  // namespace bifolio::inline v0_2::cuda::prefill
