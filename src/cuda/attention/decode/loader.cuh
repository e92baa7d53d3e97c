// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The loads of the decode mainloop: KV tiles and queries to shared memory by cp.async, through the block table. The
/// loader has a work cursor of its own, stages − 1 tiles ahead of the mainloop's, and goes on from one work tile to the
/// next, so that the memory system never idles where a sequence ends. Every warp loads the keys that it multiplies.

#include <cstdint>
#include <type_traits>

#include "cuda/attention/decode/scheduler.cuh"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm80.cuh"

namespace bifolio::inline v0_2::cuda::decode {

template <class T, class Shape, class Scheduler>
class loader {
  using S = Shape;
  // Elements of K and V, of a wide one and of queries, as far as their sizes go.
  using element = std::conditional_t<S::is_coded, std::uint8_t, T>;
  using k_element = std::conditional_t<S::has_wide_keys, std::uint16_t, element>;
  using v_element = std::conditional_t<S::has_wide_values, std::uint16_t, element>;
  using q_element = std::conditional_t<S::is_coded, std::uint16_t, T>;

 public:
  __device__ __forceinline__ loader(const decode_args& args, const Scheduler& scheduler, std::uint32_t shared)
      : a_(args),
        scheduler_(scheduler),
        stages_(shared + S::shared.stages),
        queries_(shared + S::shared.queries),
        static_scales_(shared + S::shared.static_scales),
        lane_(static_cast<int>(threadIdx.x) & 31),
        warp_(static_cast<int>(threadIdx.x) >> 5),
        cursor_(scheduler.first()),
        warp_rows_share_block_(args.block_size % S::warp_keys == 0) {
    if constexpr (S::padded) {
      lane_row_ = args.by_row_vectors.quotient(lane_);
      lane_vector_ = lane_ - lane_row_ * S::vectors_of_row(args);
    }
    if constexpr (S::has_steady_tiles) {
      if constexpr (S::has_run_offsets) {
        find_run<typename S::v_rows>(args.by_row_vectors, run_places_, run_offsets_);
        if constexpr (S::is_mixed) find_run<typename S::k_rows>(args.by_key_vectors, key_places_, key_offsets_);
      }
#pragma unroll
      for (int pass = 0; !S::has_run_offsets && pass < S::different_places; ++pass) {
        run_places_[pass] = device::kept(
            (has_shared_places ? stages_ : 0) +
            S::place(row_of_lane(pass * S::rows_per_pass + lane_ / S::row_vectors), lane_ % S::row_vectors));
      }
      if constexpr (S::element_bytes == 4) {
        if (lane_ % S::row_vectors >= S::vectors_of_row(args)) run_places_[0] = no_place;
      }
      if constexpr (S::is_coded) {
        scale_place_ = device::kept(S::scale_place(lane_ / S::warp_keys, row_of_lane(lane_ % S::warp_keys)));
      }
      own_row_ = device::kept(row_of_lane(lane_ % S::warp_keys));
      last_block_ = device::kept(static_cast<unsigned>(args.num_blocks - 1));
    }
    find_work();
  }

  /// Prefetches the first tile into L2 while the previous kernel still runs. The table may be that kernel's work, so
  /// what it says now is a guess: the id is bounded, and read past L1, which would keep it.
  __device__ __forceinline__ void prefetch_first_tile() const {
    if (!has_work_) return;
    const int position = own_position();
    const int id = position < 0 ? -1 : __ldcg(table_entry(position));
    if (id < 0 || id >= a_.num_blocks) return;
    const std::int64_t offset = row_offset(id, slot_in_block(position));
    const std::int64_t v_offset = offset + (S::is_coded ? id * (a_.v_strides.block - a_.k_strides.block) : 0);
    if constexpr (S::is_mixed) {
      prefetch_row(static_cast<const k_element*>(a_.k) + offset);
      prefetch_row(static_cast<const v_element*>(a_.v) + v_offset);
      return;
    }
    constexpr int line_dims = 128 / S::element_bytes;
    constexpr int lines = (S::head_dim + line_dims - 1) / line_dims;
    for (int line = lane_ / S::warp_keys; line < 2 * lines; line += 32 / S::warp_keys) {
      if (line % lines * line_dims >= S::row_dims(a_)) continue;
      const auto* plane = static_cast<const element*>(line < lines ? a_.k : a_.v);
      device::prefetch_l2(plane + (line < lines ? offset : v_offset) + line % lines * line_dims);
    }
  }

  /// Fills all stages but one. Must come after the wait for the previous kernel. In a loop: this runs once, and where
  /// ptxas 13.0 unrolls it, it may write copies of a form that is none (shape.hpp, has_steady_tiles).
  __device__ __forceinline__ void fill_pipeline() {
    if (has_work_) load_table_entries();
#pragma unroll 1
    for (int stage = 0; stage < S::stages - 1; ++stage) load_tile(stage);
  }

  /// Issues the loads of the next tile and looks up the block-table entries of the tile after it. Commits a group in
  /// any case, an empty one at the end.
  __device__ __forceinline__ void load_tile(int stage) {
    if constexpr (S::has_steady_tiles) {
      if (static_cast<unsigned>(work_.tile - steady_begin_) < steady_count_) {
        load_steady_tile((has_shared_places ? 0 : stages_) + stage * S::stage_bytes);
        device::cp_async_commit_group();
        return;
      }
    }
    if (has_work_) {
      const bool is_first = at_first_tile_;
      if (is_first) load_queries();
      at_first_tile_ = false;
      const std::uint32_t base = stages_ + stage * S::stage_bytes;
      bool is_run = S::is_coded && (!S::padded || S::is_mixed) && rows_are_run();
      if constexpr (S::is_mixed) is_run = is_run && run_offsets_fit();
      const std::int64_t own_offset = is_run || slot_ < 0 ? -1 : row_offset(bounded(block_), slot_);
      if constexpr (S::is_mixed) {
        if (is_first) find_runs();
        if (is_run) {
          load_run_of_block(base);
        } else {
          load_mixed_rows(base, own_offset);
          load_scales(base);
        }
      } else if constexpr (S::padded) {
        load_padded_rows(base, own_offset);
      } else if (is_run) {
        load_run(base);
      } else {
        const int vector = lane_ % S::row_vectors;
#pragma unroll
        for (int pass = 0; pass < S::passes; ++pass) {
          const int source = pass * S::rows_per_pass + lane_ / S::row_vectors;
          const std::int64_t offset = __shfl_sync(0xffffffffu, own_offset, source);
          load_vector(base + S::place(row_of_lane(source), vector), offset, more_in_v(source), vector);
        }
      }
      if constexpr (S::is_coded && !S::is_mixed) load_scales(base);
      if (++work_.tile < work_.tile_end) {
        load_table_entries();
        if constexpr (S::has_steady_tiles) {
          if (is_first) find_steady_tiles();
        }
      } else {
        find_work();
        if (has_work_) load_table_entries();
      }
    }
    device::cp_async_commit_group();
  }

 private:
  // The lane's lines of a row.
  template <class Element>
  __device__ __forceinline__ void prefetch_row(const Element* row) const {
    constexpr int line_dims = 128 / static_cast<int>(sizeof(Element));
    for (int dim = lane_ / S::warp_keys * line_dims; dim < S::row_dims(a_); dim += 32 / S::warp_keys * line_dims) {
      device::prefetch_l2(row + dim);
    }
  }

  // Where the vectors of the warp's rows, one after another and 32 at a time, go in a tile and come from.
  template <class Rows, int Passes>
  __device__ __forceinline__ void find_run(const divisor& by_vectors, std::uint32_t (&places)[Passes],
                                           std::uint32_t (&offsets)[Passes]) const {
    constexpr auto element_bytes = static_cast<std::uint32_t>(16 / Rows::vector_dims);
#pragma unroll
    for (int pass = 0; pass < Passes; ++pass) {
      const int index = pass * 32 + lane_;
      const int row = by_vectors.quotient(index);
      const int vector = index - row * (S::row_dims(a_) / Rows::vector_dims);
      places[pass] = device::kept(row < S::warp_keys ? Rows::place(row_of_lane(row), vector) : no_place);
      offsets[pass] = device::kept(static_cast<std::uint32_t>(row) *
                                       (static_cast<std::uint32_t>(a_.k_strides.token) * element_bytes) +
                                   static_cast<std::uint32_t>(vector) * 16u);
    }
  }

  // 16 bytes of a row of K and of the same row of V; zeros for a row that must not be read. `more`: see more_in_v.
  __device__ __forceinline__ void load_vector(std::uint32_t dst, std::int64_t row_offset, std::int64_t more,
                                              int vector) const {
    const bool valid = row_offset >= 0;
    const std::int64_t at = valid ? row_offset + vector * S::kv_rows::vector_dims : 0;
    device::cp_async_16_evict_first(dst, static_cast<const element*>(a_.k) + at, valid);
    const std::int64_t v_at = S::is_coded && valid ? at + more : at;
    device::cp_async_16_evict_first(dst + S::k_tile_bytes, static_cast<const element*>(a_.v) + v_at, valid);
  }
  // How much farther the block of lane `source` is in V than in K: blocks of codes have tails of different lengths.
  [[nodiscard]] __device__ __forceinline__ std::int64_t more_in_v(int source) const {
    if constexpr (!S::is_coded) return 0;
    return bounded(__shfl_sync(0xffffffffu, block_, source)) * (a_.v_strides.block - a_.k_strides.block);
  }

  // Whether the warp's rows of the tile at work_.tile are all to be read and in one block.
  [[nodiscard]] __device__ __forceinline__ bool rows_are_run() const {
    const int first = work_.tile * decode_tile_tokens + warp_ * S::warp_keys;
    return warp_rows_share_block_ && first >= first_key_ && first + S::warp_keys <= seq_len_;
  }
  // Those rows: nothing is asked for each.
  __device__ __forceinline__ void load_run(std::uint32_t base) const {
    const int vector = lane_ % S::row_vectors;
    const int first = lane_ / S::row_vectors;
    const std::int64_t at =
        row_offset(bounded(block_), slot_ - lane_ % S::warp_keys + first) + vector * S::kv_rows::vector_dims;
    const auto* k = static_cast<const element*>(a_.k) + at;
    const auto* v = static_cast<const element*>(a_.v) + at;
    if constexpr (S::is_coded) v += bounded(block_) * (a_.v_strides.block - a_.k_strides.block);
    const std::int64_t step = S::rows_per_pass * a_.k_strides.token;
#pragma unroll
    for (int pass = 0; pass < S::passes; ++pass) {
      const std::uint32_t to = base + S::place(row_of_lane(pass * S::rows_per_pass + first), vector);
      device::cp_async_16_evict_first(to, k);
      device::cp_async_16_evict_first(to + S::k_tile_bytes, v);
      k += step;
      v += step;
    }
  }

  // A tile whose rows of this warp are all to be read and in one block, like those of the tile after it, which is of
  // the same work tile.
  __device__ __forceinline__ void load_steady_tile(std::uint32_t base) {
    load_run_of_block(base);
    ++work_.tile;
    const int position = work_.tile * decode_tile_tokens + own_row_;
    const int entry = a_.by_block_size.quotient(position);
    slot_ = position - entry * a_.block_size;
    block_ = __ldg(table_ + entry);
  }
  // Its rows and their scales.
  __device__ __forceinline__ void load_run_of_block(std::uint32_t base) const {
    const unsigned id = min(static_cast<unsigned>(block_), last_block_);
    const std::int64_t block = id * a_.k_strides.block;
    const std::int64_t at = block + static_cast<unsigned>(slot_) * a_.k_strides.token;
    std::int64_t more = 0;  // as more_in_v
    if constexpr (S::is_coded) {
      if (a_.v_strides.block != a_.k_strides.block) more = id * (a_.v_strides.block - a_.k_strides.block);
    }
    const std::uint8_t* k = run_k_ + at * S::k_element_bytes;
    const std::uint8_t* v = run_v_ + (at + more) * S::v_element_bytes;
    if constexpr (S::element_bytes == 4) {
      static_assert(S::kv_rows::swizzled);
      const std::int64_t step = S::rows_per_pass * a_.k_strides.token * S::element_bytes;
      if (run_places_[0] != no_place) {
#pragma unroll
        for (int pass = 0; pass < S::passes; ++pass) {
          const int rows_later = pass * S::rows_per_pass;
          const std::uint32_t to = ((base + run_places_[0]) ^ static_cast<std::uint32_t>((rows_later & 7) << 4)) +
                                   static_cast<std::uint32_t>(rows_later * S::kv_rows::bytes);
          device::cp_async_16_read_once(to, k);
          device::cp_async_16_read_once(to + S::k_tile_bytes, v);
          k += step;
          v += step;
        }
      }
    } else if constexpr (S::is_mixed) {
      load_run_of_plane(base, k, key_places_, key_offsets_);
      load_run_of_plane(base + S::k_tile_bytes, v, run_places_, run_offsets_);
    } else if constexpr (S::has_run_offsets) {
#pragma unroll
      for (int pass = 0; pass < S::passes; ++pass) {
        if (run_places_[pass] == no_place) continue;
        device::cp_async_16_read_once(base + run_places_[pass], k + run_offsets_[pass]);
        device::cp_async_16_read_once(base + run_places_[pass] + S::k_tile_bytes, v + run_offsets_[pass]);
      }
    } else {
      const std::int64_t step = S::rows_per_pass * a_.k_strides.token * S::element_bytes;
#pragma unroll
      for (int pass = 0; pass < S::passes; ++pass) {
        // Of swizzled rows the places repeat after eight.
        constexpr int different = S::different_places;
        const std::uint32_t to =
            base + run_places_[pass % different] + pass / different * different * S::rows_per_pass * S::kv_rows::bytes;
        device::cp_async_16_read_once(to, k);
        device::cp_async_16_read_once(to + S::k_tile_bytes, v);
        k += step;
        v += step;
      }
    }
    if constexpr (S::is_coded) {
      if (scale_run_ != nullptr) {
        const bool is_k = lane_ < S::warp_keys;
        const std::uint8_t* const from =
            scale_run_ + block + (is_k ? 0 : more) + static_cast<unsigned>(slot_) * scale_step_;
        device::cp_async_4(base + scale_place_, from);
        if ((is_k ? a_.k_scales : a_.v_scales).tail_floats > 1) {
          device::cp_async_4(base + scale_place_ + (S::zero_place(0, 0) - S::scale_place(0, 0)), from + sizeof(float));
        }
      }
    }
  }
  template <int Passes>
  __device__ __forceinline__ static void load_run_of_plane(std::uint32_t tile, const std::uint8_t* from,
                                                           const std::uint32_t (&places)[Passes],
                                                           const std::uint32_t (&offsets)[Passes]) {
#pragma unroll
    for (int pass = 0; pass < Passes; ++pass) {
      if (places[pass] != no_place) device::cp_async_16_read_once(tile + places[pass], from + offsets[pass]);
    }
  }
  // Finds those tiles of the work tile, whose first tile, which is none of them, has been asked for.
  __device__ __forceinline__ void find_steady_tiles() {
    const bool strides_fit = run_offsets_fit();
    const int own_first = warp_ * S::warp_keys;
    const int begin = max(work_.tile, (first_key_ - own_first + decode_tile_tokens - 1) / decode_tile_tokens);
    const int end = min(work_.tile_end, (seq_len_ - S::warp_keys - own_first) / decode_tile_tokens + 1) - 1;
    const bool any = warp_rows_share_block_ && strides_fit && seq_len_ >= own_first + S::warp_keys && begin < end;
    steady_begin_ = begin;
    steady_count_ = any ? static_cast<unsigned>(end - begin) : 0u;
    if constexpr (!S::is_mixed) find_runs();
  }
  [[nodiscard]] __device__ __forceinline__ bool run_offsets_fit() const {
    return !S::has_run_offsets || a_.k_strides.token < std::int64_t{1} << 26;
  }
  // What the lane loads of block 0, slot 0.
  __device__ __forceinline__ void find_runs() {
    // slot_ is that of the lane's row; what it loads are others.
    const int first_row = S::has_run_offsets ? 0 : lane_ / S::row_vectors;
    const int first_vector = S::has_run_offsets ? 0 : lane_ % S::row_vectors;
    const std::int64_t at = work_.head * a_.k_strides.head + (first_row - lane_ % S::warp_keys) * a_.k_strides.token +
                            first_vector * S::kv_rows::vector_dims;
    run_k_ = static_cast<const std::uint8_t*>(a_.k) + at * S::k_element_bytes;
    run_v_ = static_cast<const std::uint8_t*>(a_.v) + at * S::v_element_bytes;
    if constexpr (S::is_coded) find_steady_scales();
  }
  __device__ __forceinline__ void find_steady_scales() {
    const bool is_k = lane_ / S::warp_keys == 0;
    const code_scales& scales = is_k ? a_.k_scales : a_.v_scales;
    scale_run_ = nullptr;
    if (lane_ < 2 * S::warp_keys && scales.tail_floats > 0) {
      scale_run_ =
          static_cast<const std::uint8_t*>(is_k ? a_.k : a_.v) + scales.tail.offset + work_.head * scales.tail.head;
      scale_step_ = scales.tail.token;
    }
  }

  // The vectors of the warp's rows one after another, 32 at a time.
  __device__ __forceinline__ void load_padded_rows(std::uint32_t base, std::int64_t own_offset) const {
    const int vectors = S::vectors_of_row(a_);
    const int rows_per_pass = a_.by_row_vectors.quotient(32);
    int row = lane_row_;
    int vector = lane_vector_;
#pragma unroll
    for (int pass = 0; pass < S::passes; ++pass) {
      if (pass * 32 >= S::warp_keys * vectors) break;
      const std::int64_t offset = __shfl_sync(0xffffffffu, own_offset, row);
      const std::int64_t more = more_in_v(row);
      if (row < S::warp_keys) load_vector(base + S::place(row_of_lane(row), vector), offset, more, vector);
      row += rows_per_pass;
      vector += 32 - rows_per_pass * vectors;
      if (vector >= vectors) {
        vector -= vectors;
        ++row;
      }
    }
  }

  // The same where rows of K and V differ in length. A pass beyond the rows loads nothing.
  __device__ __forceinline__ void load_mixed_rows(std::uint32_t base, std::int64_t own_offset) const {
    std::int64_t v_offset = own_offset;
    if (v_offset >= 0) v_offset += bounded(block_) * (a_.v_strides.block - a_.k_strides.block);
    load_plane_rows<typename S::k_rows, S::k_passes>(base, static_cast<const k_element*>(a_.k), a_.by_key_vectors,
                                                     own_offset);
    load_plane_rows<typename S::v_rows, S::passes>(base + S::k_tile_bytes, static_cast<const v_element*>(a_.v),
                                                   a_.by_row_vectors, v_offset);
  }
  template <class Rows, int Passes, class Element>
  __device__ __forceinline__ void load_plane_rows(std::uint32_t tile, const Element* plane, const divisor& by_vectors,
                                                  std::int64_t own_offset) const {
#pragma unroll
    for (int pass = 0; pass < Passes; ++pass) {
      const int index = pass * 32 + lane_;
      const int row = by_vectors.quotient(index);
      const int vector = index - row * (S::row_dims(a_) / Rows::vector_dims);
      const std::int64_t offset = __shfl_sync(0xffffffffu, own_offset, row);
      const bool valid = offset >= 0;
      const Element* const from = plane + (valid ? offset + vector * Rows::vector_dims : 0);
      const std::uint32_t to = tile + Rows::place(row_of_lane(row), vector);
      if (row < S::warp_keys) device::cp_async_16_read_once(to, from, valid);
    }
  }

  // The scales and zero points of the warp's rows from the tails of their blocks: those of K by the first lanes, of V
  // by the next.
  __device__ __forceinline__ void load_scales(std::uint32_t base) const {
    if (a_.k_scales.tail_floats == 0 && a_.v_scales.tail_floats == 0) return;
    const int plane = lane_ / S::warp_keys;
    const bool is_k = plane == 0;
    const int tail_floats = is_k ? a_.k_scales.tail_floats : a_.v_scales.tail_floats;
    if (plane > 1 || tail_floats == 0) return;
    const kv_tail_strides& k = a_.k_scales.tail;
    const kv_tail_strides& v = a_.v_scales.tail;
    const std::int64_t at = bounded(block_) * (is_k ? a_.k_strides : a_.v_strides).block +
                            (is_k ? k.offset : v.offset) + work_.head * (is_k ? k.head : v.head) +
                            slot_ * (is_k ? k.token : v.token);
    const auto* const data = static_cast<const std::uint8_t*>(is_k ? a_.k : a_.v);
    const int row = row_of_lane(lane_ % S::warp_keys);
    const std::uint8_t* const from = slot_ >= 0 ? data + at : data;
    device::cp_async_4(base + S::scale_place(plane, row), from, slot_ >= 0);
    if (tail_floats > 1) device::cp_async_4(base + S::zero_place(plane, row), from + sizeof(float), slot_ >= 0);
  }

  // Moves on to the next work tile that is not empty; afterwards has_work_ says whether there is one.
  __device__ void find_work() {
    has_work_ = false;
    steady_count_ = 0;
    while (scheduler_.has_work(cursor_)) {
      work_ = scheduler_.template next<S::takes_parts>(cursor_);
      if (work_.tile < work_.tile_end) {
        const decode_seq& s = *cursor_.seq;
        seq_len_ = s.seq_len;
        // Blocks left of every row's window may have been freed: their table entries are not read either.
        first_key_ = a_.window_left >= 0 ? s.seq_len - s.query_len - a_.window_left : 0;
        table_ = a_.block_tables + s.row * a_.block_table_stride;
        has_work_ = true;
        at_first_tile_ = true;
        q_buffer_ = q_buffer_ + 1 == S::stages ? 0 : q_buffer_ + 1;
        return;
      }
    }
  }

  // Row r of the packed tile is token r / group_size, head r % group_size. Queries are loaded with the first KV tile of
  // their work tile; consecutive work tiles use consecutive buffers, of which as many are ahead as stages.
  __device__ __forceinline__ void load_queries() {
    const decode_seq& s = *cursor_.seq;
    const int rows = s.query_len * a_.group_size;
    using format = typename S::q_rows;
    for (int i = static_cast<int>(threadIdx.x); i < decode_tile_rows * format::vectors; i += S::threads) {
      const int r = i / format::vectors;
      const int vector = i % format::vectors;
      const int row = work_.row_tile * decode_tile_rows + r;
      const bool valid = row < rows && vector < S::row_dims(a_) / format::vector_dims;
      const int token = valid ? a_.by_group_size.quotient(row) : 0;
      const int head = work_.head * a_.group_size + (valid ? row - token * a_.group_size : 0);
      const auto* src = static_cast<const q_element*>(a_.q) + (s.query_start + token) * a_.q_token_stride +
                        head * a_.q_head_stride + (valid ? vector * format::vector_dims : 0);
      device::cp_async_16(queries_ + q_buffer_ * S::q_bytes + format::place(r, vector), src, valid);
    }
    if constexpr (S::is_coded) {
      const code_scales& k = a_.k_scales;
      if (threadIdx.x == 0 && k.static_scales != nullptr) {
        device::cp_async_4(static_scales_ + static_cast<std::uint32_t>(q_buffer_ * sizeof(float)),
                           k.static_scales + work_.head * k.static_step);
      }
    }
  }

  // The row of the tile whose place in the cache the lane finds: each warp loads some of the rows, of codes those that
  // it multiplies.
  [[nodiscard]] __device__ __forceinline__ int row_of_lane(int lane) const {
    if constexpr (S::padded || S::is_coded) return warp_ * S::warp_keys + lane;
    return (lane / S::rows_per_pass * S::warps + warp_) * S::rows_per_pass + lane % S::rows_per_pass;
  }

  // The position of one of the warp's rows of the tile at work_.tile, one per lane; −1 if it must not be read.
  [[nodiscard]] __device__ __forceinline__ int own_position() const {
    const int position = work_.tile * decode_tile_tokens + row_of_lane(lane_ % S::warp_keys);
    return position >= first_key_ && position < seq_len_ ? position : -1;
  }

  [[nodiscard]] __device__ __forceinline__ const std::int32_t* table_entry(int position) const {
    return table_ + a_.by_block_size.quotient(position);
  }
  [[nodiscard]] __device__ __forceinline__ int slot_in_block(int position) const {
    return position - a_.by_block_size.quotient(position) * a_.block_size;
  }

  // The plan checked the host's table; a different one on the device must not lead out of the cache.
  [[nodiscard]] __device__ __forceinline__ int bounded(int id) const {
    return static_cast<int>(min(static_cast<unsigned>(id), static_cast<unsigned>(a_.num_blocks - 1)));
  }

  // Of the row of work_.head in this slot of block `id` of K.
  [[nodiscard]] __device__ __forceinline__ std::int64_t row_offset(int id, int slot) const {
    return id * a_.k_strides.block + slot * a_.k_strides.token + work_.head * a_.k_strides.head;
  }

  // A lane finds block and slot of one of the warp's rows of the tile at work_.tile; slot −1 for a row that must not be
  // read. Nothing is computed from the block here: that would wait for the load, while there is a tile to process.
  __device__ __forceinline__ void load_table_entries() {
    const int position = own_position();
    slot_ = position < 0 ? -1 : slot_in_block(position);
    block_ = position < 0 ? 0 : __ldg(table_entry(position));
  }

  const decode_args& a_;
  const Scheduler& scheduler_;
  std::uint32_t stages_, queries_, static_scales_;
  int lane_, warp_;
  work_cursor cursor_;
  bool warp_rows_share_block_;
  work_tile work_;
  // Of the work tile's sequence.
  const std::int32_t* table_ = nullptr;
  int seq_len_ = 0;
  int first_key_ = 0;  // left of it every row's window ends
  int lane_row_ = 0;   // and lane_vector_: what the lane loads first; padded shapes only
  int lane_vector_ = 0;
  int q_buffer_ = S::stages - 1;
  bool has_work_, at_first_tile_;
  int block_, slot_;  // of this lane's row of the tile at work_.tile
  // Of shapes that have them: steady tiles, and what the lane loads of block 0, slot 0.
  static constexpr std::uint32_t no_place = 0xffffffff;
  // Places from the beginning of shared memory, not of a stage: a stage's in a uniform register beside the lane's place
  // is what ptxas 13.0 takes, where it unrolls the first stages, for copies that no device knows
  // (tests/cuda/machine_code.sh).
  static constexpr bool has_shared_places = S::element_bytes == 4 && !S::by_fma;
  std::uint32_t run_places_[S::different_places],
      scale_place_;  // in a stage: where the lane's vectors and its scale go
  std::uint32_t run_offsets_[S::has_run_offsets ? S::passes : 1];  // the same in K and V but for a wide one
  std::uint32_t key_places_[S::is_mixed ? S::k_passes : 1], key_offsets_[S::is_mixed ? S::k_passes : 1];
  int own_row_;  // of the tile
  unsigned last_block_;
  int steady_begin_ = 0;
  unsigned steady_count_ = 0;
  const std::uint8_t* run_k_ = nullptr;
  const std::uint8_t* run_v_ = nullptr;
  const std::uint8_t* scale_run_ = nullptr;  // null without a scale for the lane to load
  std::int64_t scale_step_ = 0;              // between tokens
};

}  // namespace bifolio::inline v0_2::cuda::decode
