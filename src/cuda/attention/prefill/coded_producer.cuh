// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The producer warpgroup of prefill for caches of codes. Each thread requests pieces of 16 bytes by cp.async into
/// places of its own, and stores what has come as 16 elements of the type that the tensor cores multiply, in which
/// every code is exact. A place is filled again as soon as its piece is stored, with that of two planes later. Scales
/// are the consumers'. What is outside the sequence, the window or head_dim becomes zero. Queries come by TMA as
/// everywhere.
///
/// The producer has few registers. So what it keeps is counters, from which stages and phases follow, and offsets in
/// units of 16 bytes.

#include <cstdint>

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/launch.hpp"
#include "cuda/attention/prefill/pipeline.cuh"
#include "cuda/attention/prefill/producer.cuh"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/attention/prefill/shape.hpp"
#include "cuda/device/code_vectors.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm80.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// Lanes 4j … 4j + 3 take the 64 bytes of one token and chunk of 64 dims; in each pass the warpgroup takes 32 tokens.
template <class T, class Shape>
class coded_producer {
  using S = Shape;
  static_assert(S::tile_keys % 32 == 0);
  static constexpr int passes = S::tile_keys / 32;
  static constexpr int pieces = passes * S::chunks;  // of 16 bytes, that a thread takes of a plane of a tile
  static constexpr int piece_bytes = 128 * 16;       // of the warpgroup
  static_assert(2 * pieces * piece_bytes == S::raw_bytes);
  static_assert(passes * 8 <= 32, "a lane for each token of a warp");

 public:
  __device__ __forceinline__ coded_producer(const prefill_args& args, const shared_stages<Shape>& stages,
                                            const tensor_map* q_map)
      : a_(args), stages_(stages), q_map_(q_map) {}

  /// Fills the stages for all work tiles of the CTA.
  template <class Source>
  __device__ __forceinline__ void run(Source source) {
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const kv_range e = kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      if (threadIdx.x == 0) load_queries(a_, stages_, q_map_, q_state_, work);
      __syncwarp();
      q_state_.advance();

      // Planes of tiles as they are used: K of the last tile, K of the one before, V of the last, and so on.
      const tokens_of_work tokens{a_.block_tables + work.seq * a_.block_table_stride,
                                  work.head / a_.group_size * a_.k_strides.head, work.seq_len, e.begin, e.tile_end - 1};
      const int num_planes = 2 * (e.tile_end - e.tile_begin);
      token_cursor cursor;
      cursor.next = find_token(tokens, 0);
      for (int n = -2; n < num_planes; ++n) {
        move_on(tokens, cursor, n + 2, num_planes);
        const plane_stage to = n < 0 ? plane_stage{} : acquire(n, num_planes);
        const bool is_k = is_plane_of_k(n, num_planes);
        if (n < 0) {
#pragma unroll 1
          for (int pass = 0; pass < passes; ++pass) {
            const request_place from = place_of(cursor, n + 2, num_planes, pass);
#pragma unroll
            for (int c = 0; c < S::chunks; ++c) request(from, n + 2, pass, c);
          }
        } else {
          device::visit_code_vectors<T>(is_k ? a_.k_type : a_.v_type, [&](const auto& widen) {
#pragma unroll 1
            for (int pass = 0; pass < passes; ++pass) {
              const request_place from = place_of(cursor, n + 2, num_planes, pass);
#pragma unroll
              for (int c = 0; c < S::chunks; ++c) {
                device::cp_async_wait_group<2 * pieces - 1>();
                store(widen, to.address, n, pass, c);
                request(from, n + 2, pass, c);
              }
            }
          });
          device::fence_async_proxy();
          device::mbarrier_arrive(to.full);
        }
      }
      tiles_ += num_planes / 2;
    }
  }

 private:
  static constexpr std::uint32_t outside = 0xffffffffu;

  struct tokens_of_work {
    const std::int32_t* table;
    std::int64_t head_offset;
    int seq_len;
    int begin;
    int last_tile;
  };
  // Where the tokens are whose rows are requested: from the beginning of either plane, in units of 16 bytes, of one
  // token per lane.
  struct token_cursor {
    std::uint32_t current;  // of the plane that is requested
    std::uint32_t last;     // of the tile whose V comes next
    std::uint32_t here;
    std::uint32_t next;  // of the tile before, looked up ahead
  };
  struct plane_stage {
    std::uint32_t address;
    std::uint32_t full;
  };

  // K is plane 0 and every odd one but the last.
  [[nodiscard]] __device__ __forceinline__ static bool is_plane_of_k(int n, int num_planes) {
    return n == 0 || (n % 2 == 1 && n != num_planes - 1);
  }

  // The token that the lane looks up for its warp, of the tile so many before the last: of pass lane / 8 that of lanes
  // 4 · (lane % 8) and the next three.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t find_token(const tokens_of_work& tokens, int tile) const {
    const int thread = static_cast<int>(threadIdx.x);
    const int in_tile = (thread & 31) / 8 * 32 + thread / 32 * 8 + thread % 8;
    const int key = (tokens.last_tile - tile) * S::tile_keys + in_tile;
    if (in_tile >= S::tile_keys || key >= tokens.seq_len || key < tokens.begin) return outside;
    const int block = key / a_.block_size;
    const std::int64_t id = __ldg(tokens.table + block);
    if (id < 0 || id >= a_.num_blocks) return outside;  // tables of a call are not checked
    return static_cast<std::uint32_t>(
        (id * a_.k_strides.block + tokens.head_offset + (key - block * a_.block_size) * a_.k_strides.token) / 16);
  }

  // To plane n.
  __device__ __forceinline__ void move_on(const tokens_of_work& tokens, token_cursor& c, int n, int num_planes) const {
    if (n >= num_planes) return;
    if (is_plane_of_k(n, num_planes)) {
      c.last = c.here;
      c.current = c.here = c.next;
      c.next = find_token(tokens, (n + 1) / 2 + 1);
    } else {
      c.current = n == num_planes - 1 ? c.here : c.last;
    }
  }

  // Waits until the stage of plane n is empty.
  [[nodiscard]] __device__ __forceinline__ plane_stage acquire(int n, int num_planes) const {
    const bool is_k = is_plane_of_k(n, num_planes);
    const int tile = tiles_ + (is_k ? (n + 1) / 2 : n == num_planes - 1 ? n / 2 : n / 2 - 1);
    const int stage = tile % S::stages;
    const int phase = tile / S::stages & 1;
    device::mbarrier_wait_parity(is_k ? stages_.k_empty(stage) : stages_.v_empty(stage), phase ^ 1);
    return {is_k ? stages_.k(stage) : stages_.v(stage), is_k ? stages_.k_full(stage) : stages_.v_full(stage)};
  }

  [[nodiscard]] __device__ __forceinline__ std::uint32_t raw_place(int n, int pass, int chunk) const {
    return stages_.raw() + static_cast<std::uint32_t>((n & 1) * pieces + pass * S::chunks + chunk) * piece_bytes +
           threadIdx.x * 16;
  }

  // The row of plane n that a thread requests in a pass: the first of its dims there. Null: none is asked for.
  struct request_place {
    const char* row;
    bool is_there;
  };
  [[nodiscard]] __device__ __forceinline__ request_place place_of(const token_cursor& c, int n, int num_planes,
                                                                  int pass) const {
    const int thread = static_cast<int>(threadIdx.x);
    const std::uint32_t token = __shfl_sync(0xffffffffu, c.current, pass * 8 + (thread & 31) / 4);
    if (n >= num_planes) return {nullptr, false};
    const auto* const plane = static_cast<const char*>(is_plane_of_k(n, num_planes) ? a_.k : a_.v);
    const bool is_there = token != outside;
    return {plane + std::uint64_t{is_there ? token : 0} * 16 + (thread & 3) * 16, is_there};
  }

  // Commits a group in any case.
  __device__ __forceinline__ void request(const request_place& from, int n, int pass, int chunk) const {
    if (from.row != nullptr) {
      const bool is_there = from.is_there && chunk * 64 + static_cast<int>(threadIdx.x & 3) * 16 < a_.head_dim;
      device::cp_async_16(raw_place(n, pass, chunk), is_there ? from.row + chunk * 64 : from.row, is_there);
    }
    device::cp_async_commit_group();
  }

  // What has come of a piece of plane n to its place in the stage.
  template <class Widen>
  __device__ __forceinline__ void store(const Widen& widen, std::uint32_t stage, int n, int pass, int chunk) const {
    const int thread = static_cast<int>(threadIdx.x);
    const int row = thread / 4 & 7;       // of its group of 8 tokens
    const int vector = (thread & 3) * 2;  // of 16 bytes in the 128 of a token and chunk
    const int group = pass * 4 + thread / 32;
    const std::uint32_t place =
        stage + static_cast<std::uint32_t>(group * S::group_bytes + chunk * 1024 + row * 128 + ((vector ^ row) << 4));
    uint4 elements[2];
    widen(device::load_shared_16(raw_place(n, pass, chunk)), elements);
    device::store_shared_16(place, elements[0]);
    device::store_shared_16(place ^ 16, elements[1]);
  }

  const prefill_args& a_;
  const shared_stages<Shape>& stages_;
  const tensor_map* q_map_;
  pipeline_state<S::q_stages> q_state_;
  int tiles_ = 0;  // of the work tiles before
};

}  // namespace bifolio::inline v0_2::cuda::prefill
