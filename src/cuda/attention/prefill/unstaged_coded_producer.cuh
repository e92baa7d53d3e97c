// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The producers of prefill for caches of codes of more than 128 dims, a warpgroup for K and one for V. Shared memory
/// has room for stages of elements alone, so codes come into registers: a thread requests its pieces of a few tokens,
/// stores them as 16 elements of float16 each, and requests those of the next tokens; the first ones of a tile before
/// its stage is empty. Tokens, scales and origins are those of the other producers of codes (coded_producer.cuh).

#include <cstdint>

#include "cuda/attention/prefill/coded_producer.cuh"
#include "cuda/device/load.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// Lanes 4j … 4j + 3 take the 64 bytes of one token and chunk of 64 dims; in each pass the warpgroup takes 32 tokens, 8
/// a warp. What a thread holds at a time, a turn, may end within a pass.
template <class Shape, bool FoldsScales>
class unstaged_coded_producer : coded_producer<Shape, FoldsScales> {
  using S = Shape;
  using base = coded_producer<Shape, FoldsScales>;
  static constexpr int pass_bytes = 4 * S::group_bytes;         // of a stage
  static constexpr int pieces = S::tile_keys / 32 * S::chunks;  // of 16 bytes, of a thread
  static constexpr int turn_pieces = S::chunks == 4 ? 4 : S::by_token ? 3 : 5;
  static constexpr int turns = (pieces + turn_pieces - 1) / turn_pieces;
  static_assert(S::num_producers == 2 && S::tile_keys % 32 == 0);

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
      device::cp_async_wait_group<0>();  // of a tile that was not the work tile's any more
      look_up(kept(), key);
      std::uint32_t token;
      [[maybe_unused]] token_scales scales;
      uint4 codes[turn_pieces];
      // Where few registers are in use: between the last pass of a tile and the first of the next.
      const auto begin_tile = [&] {
        const tokens_of_work tokens = kept();
        device::cp_async_wait_group<0>();
        const table_entry entry = found(tokens, key);
        const token_place place = base::find_token(tokens, entry);
        if constexpr (has_scales) scales = base::load_scales(tokens, entry, place);
        key -= S::tile_keys;
        look_up(tokens, key);
        token = IsK ? place.in_k : place.in_v();
        request<IsK>(token, 0, codes);
      };
      begin_tile();
      if constexpr (IsK) {
        if (threadIdx.x == 0) load_queries(a_, stages_, base::q_map_, base::q_state_, work);
        __syncwarp();
        base::q_state_.advance();
      }
      const std::uint32_t end = base::tiles_ + num_tiles;
      for (;;) {
        const std::uint32_t tile = base::tiles_;
        base::template acquire<IsK>(tile);
        if constexpr (has_scales) {
          if constexpr (IsK) base::store_scales(scales, tile);
          base::template store_origin<IsK>(scales, tile);
        }
        fill<IsK>(tile, token, codes);
        if (++base::tiles_ == end) break;
        begin_tile();
      }
    }
  }

 private:
  using base::a_, base::stages_;
  using typename base::table_entry;
  using typename base::token_place;
  using typename base::token_scales;
  using typename base::tokens_of_work;

  // Read again where it is used, so that nothing that follows from it takes a register from tile to tile.
  [[nodiscard]] __device__ __forceinline__ static int thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
  }
  [[nodiscard]] __device__ __forceinline__ static int lane() { return thread() & 31; }
  [[nodiscard]] __device__ __forceinline__ static int warp() { return thread() / 32 & 3; }
  [[nodiscard]] __device__ __forceinline__ bool has_dims(int chunk) const {
    return chunk * 64 + (lane() & 3) * 16 < a_.head_dim;
  }

  // What is the same for all tiles of a work tile waits in shared memory: registers are few, and what the compiler puts
  // into local memory instead leaves L1 before it is read again.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t place_of_kept() const {
    return stages_.kept() + (static_cast<std::uint32_t>(thread()) / 32) * S::kept_bytes;
  }
  __device__ __forceinline__ void keep(const tokens_of_work& tokens) const {
    if (lane() == 0) {
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
  // The table's entry of the lane's token of the next tile comes into shared memory too, by a copy that no register
  // waits for.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t place_of_entry() const {
    return stages_.kept() + S::num_producers * 4 * S::kept_bytes + static_cast<std::uint32_t>(thread()) * 4;
  }
  __device__ __forceinline__ void look_up(const tokens_of_work& tokens, int key) const {
    if (key < tokens.seq_len && key >= tokens.begin) {
      device::cp_async_4(place_of_entry(), tokens.table + a_.codes.by_block_size.quotient(key));
    }
    device::cp_async_commit_group();
  }
  // Once it has come.
  [[nodiscard]] __device__ __forceinline__ table_entry found(const tokens_of_work& tokens, int key) const {
    if (key >= tokens.seq_len || key < tokens.begin) return {base::outside, 0};
    const int block = a_.codes.by_block_size.quotient(key);
    return {device::load_shared_4(place_of_entry()), static_cast<std::uint32_t>(key - block * a_.block_size)};
  }

  // The thread's bytes of a token.
  struct token_row {
    const char* begin;
    bool is_there;
  };
  template <bool IsK>
  [[nodiscard]] __device__ __forceinline__ token_row row_of(std::uint32_t tokens, int pass) const {
    const std::uint32_t token = __shfl_sync(0xffffffffu, tokens, pass * 8 + lane() / 4);
    const bool is_there = token != base::outside;
    return {static_cast<const char*>(IsK ? a_.k : a_.v) + std::uint64_t{is_there ? token : 0} * 16 + (lane() & 3) * 16,
            is_there};
  }
  // What is outside the sequence, the window or head_dim is zero. No chunk but the last has dims past head_dim: fewer
  // dims have narrower tiles.
  template <bool IsK>
  __device__ __forceinline__ void request(std::uint32_t tokens, int turn, uint4 (&codes)[turn_pieces]) const {
    token_row row;
#pragma unroll
    for (int i = 0; i < turn_pieces; ++i) {
      const int piece = turn * turn_pieces + i;
      if (piece >= pieces) break;
      const int chunk = piece % S::chunks;
      if (i == 0 || chunk == 0) row = row_of<IsK>(tokens, piece / S::chunks);
      const bool is_inside = chunk + 1 < S::chunks || has_dims(chunk);
      codes[i] = load_16_past_l1_if(row.begin + chunk * 64, row.is_there && is_inside);
    }
  }

  // Stores K or V of a tile, whose first turn has been requested.
  template <bool IsK>
  __device__ __forceinline__ void fill(std::uint32_t tile, std::uint32_t tokens, uint4 (&codes)[turn_pieces]) const {
    const int stage = static_cast<int>(tile & 1);
    const int row = lane() / 4;           // of its group of 8 tokens
    const int vector = (lane() & 3) * 2;  // of 16 bytes in the 128 of a token and chunk
    const std::uint32_t in_group =
        (IsK ? stages_.k(stage) : stages_.v(stage)) + static_cast<std::uint32_t>(row * 128 + ((vector ^ row) << 4));
    const std::uint32_t of_warp = in_group + warp() * S::group_bytes;
    const auto store_all = [&](const auto& widen, const auto& prepare) {
      std::uint32_t of_pass = 0;
#pragma unroll
      for (int turn = 0; turn < turns; ++turn) {
#pragma unroll
        for (int i = 0; i < turn_pieces; ++i) {
          const int piece = turn * turn_pieces + i;
          if (piece >= pieces) break;
          const int pass = piece / S::chunks;
          const int chunk = piece % S::chunks;
          if (chunk == 0) of_pass = prepare(pass);
          uint4 elements[2];
          widen(codes[i], elements, of_pass);
          const int offset = pass * pass_bytes + chunk * 1024;
          device::store_shared_16(of_warp + offset, elements[0]);
          device::store_shared_16((of_warp ^ 16) + offset, elements[1]);
        }
        if (turn + 1 == turns) break;
        __syncwarp();  // keeps the compiler from requesting the next ones in other registers, which there are not
        request<IsK>(tokens, turn + 1, codes);
      }
    };
    const dtype type = IsK ? a_.k_type : a_.v_type;
    if (S::has_zeros && type == dtype::u8) {
      const std::uint32_t origins =
          stages_.scales(tile) + S::origins + ((IsK ? 0 : S::tile_keys) + warp() * 8 + row) * 4;
      store_all([](const uint4& from, uint4(&elements)[2],
                   std::uint32_t origin) { device::widen_from_origin(from, origin, elements); },
                [&](int pass) { return device::load_shared_4(origins + pass * 32 * 4); });
    } else {
      device::visit_code_vectors(type, [&](const auto& widen) {
        store_all([&](const uint4& from, uint4(&elements)[2], std::uint32_t) { widen(from, elements); },
                  [](int) { return 0u; });
      });
    }
    device::fence_async_proxy();
    __syncwarp();
    if (lane() == 0) device::mbarrier_arrive(IsK ? stages_.k_full(stage) : stages_.v_full(stage));
  }
};

}  // namespace bifolio::inline v0_2::cuda::prefill
