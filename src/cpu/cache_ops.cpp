// SPDX-License-Identifier: Apache-2.0
// How the work of a cache call is shared out to workers. Two rules give every call the same result on one worker and on
// many, without locks and without inspecting the list first:
//   append, convert, swap   a worker owns destination blocks (chosen by a hash of the block), and does their rows or
//                           pairs in the order of the list: of two with one destination the later one wins.
//   copy_blocks             a worker owns a part of every block, and does all pairs in order: a copy never moves an
//                           element to another place in its block, so chains never cross from one worker to another.
#include "cpu/cache_ops.hpp"

#include <algorithm>
#include <bifolio/dtype.hpp>
#include <cstddef>
#include <cstring>
#include <numeric>

#include "common/base/kv_code.hpp"
#include "common/engine/validate_cache.hpp"
#include "cpu/code_moves.hpp"
#include "cpu/move_plan.hpp"
#include "cpu/token_runs.hpp"

namespace bifolio::inline v0_2::cpu {
namespace {

/// The same over `num_pairs` blocks and `num_layers` layers; an estimate, so that it may stop growing.
std::int64_t block_traffic(const kv_layout& layout, std::size_t num_pairs, std::size_t num_layers,
                           dtype other) noexcept {
  const double bytes = static_cast<double>(token_elements(layout)) * static_cast<double>(layout.block_size) *
                       static_cast<double>(size_of(layout.k.code.type) + size_of(other)) *
                       static_cast<double>(num_pairs) * static_cast<double>(num_layers);
  constexpr double enough = 1e15;
  return static_cast<std::int64_t>(bytes < enough ? bytes : enough);
}

/// One plane of whole blocks between two places.
struct plane_blocks {
  void* dst = nullptr;
  const void* src = nullptr;
  kv_strides dst_strides;
  kv_strides src_strides;
  dtype dst_type = dtype::f32;
  dtype src_type = dtype::f32;

  void move(move_kernel kernel, const move_plan& plan, const block_copy& copy, std::int64_t src_dims,
            std::int64_t dst_dims) const noexcept {
    kernel(at(dst, static_cast<std::int64_t>(to_index(copy.dst)) * dst_strides.block + dst_dims, dst_type),
           at(src, static_cast<std::int64_t>(to_index(copy.src)) * src_strides.block + src_dims, src_type), plan);
  }
};

plane_blocks k_plane(const kv_cache_view& src, const kv_cache_view& dst) noexcept {
  return {dst.k,
          src.k,
          detail::stored_plane(dst.layout.k).strides,
          detail::stored_plane(src.layout.k).strides,
          dst.layout.k.code.type,
          src.layout.k.code.type};
}
plane_blocks v_plane(const kv_cache_view& src, const kv_cache_view& dst) noexcept {
  return {dst.v, src.v, dst.layout.v.strides, src.layout.v.strides, dst.layout.v.code.type, src.layout.v.code.type};
}

/// The scales in the tails of a plane's blocks, as a plane of float32.
plane_blocks tail_of(const plane_blocks& plane, const kv_plane& dst, const kv_plane& src) noexcept {
  return {static_cast<std::byte*>(plane.dst) + dst.tail.offset,
          static_cast<const std::byte*>(plane.src) + src.tail.offset,
          detail::tail_plane(dst).strides,
          detail::tail_plane(src).strides,
          dtype::f32,
          dtype::f32};
}

tile_shape block_tile(const kv_layout& layout, const kv_plane& plane) noexcept {
  return {layout.num_kv_heads, layout.block_size, plane.row_elements()};
}

/// A block of a named layout with its tail, and what is between, as rows of 128 bytes: copied without being understood.
constexpr std::int32_t bytes_per_row = 128;
bool is_one_run(const kv_layout& layout, const kv_plane& plane) noexcept {
  return plane.code.tail_floats() > 0 && layout.kind != layout_kind::strided;
}
tile_shape run_tile(const kv_layout& layout, const kv_plane& plane) noexcept {
  return {layout.block_bytes(plane) / bytes_per_row, 1, bytes_per_row};
}
plane_blocks as_run(plane_blocks blocks) noexcept {
  for (kv_strides* strides : {&blocks.dst_strides, &blocks.src_strides}) {
    *strides = {.block = strides->block,
                .head = bytes_per_row,
                .token = bytes_per_row,
                .dim = 1,
                .chunk_stride = bytes_per_row,
                .chunk = bytes_per_row};
  }
  return blocks;
}

/// Whole blocks across layouts and dtypes. Where the two sides split heads into chunks that do not nest (only strides
/// made by hand can), dims go in groups that are within one chunk on both sides.
class block_mover {
 public:
  /// Plans anew only when the strides are not those of the last layer: layers are alike as a rule.
  void aim(const plane_blocks& plane, const tile_shape& tile, move_kernel kernel) noexcept {
    const bool planned = kernel_ == kernel && plane.src_strides == plane_.src_strides &&
                         plane.dst_strides == plane_.dst_strides && tile == tile_;
    plane_ = plane;
    if (planned) return;
    kernel_ = kernel;
    tile_ = tile;
    kv_strides src = plane.src_strides;
    kv_strides dst = plane.dst_strides;
    group_ = tile.head_dim;
    if (!chunks_nest(src, dst)) {
      src.chunk = dst.chunk = std::gcd(src.chunk, dst.chunk);
      group_ = src.chunk;
    }
    plan_ = make_plan(make_nest({tile.num_heads, tile.num_tokens, group_}, src, dst));
  }

  void operator()(const block_copy& copy) const noexcept {
    for (std::int64_t dim = 0; dim < tile_.head_dim; dim += group_) {
      plane_.move(kernel_, plan_, copy, dim_element(plane_.src_strides, dim), dim_element(plane_.dst_strides, dim));
    }
  }

 private:
  static std::int64_t dim_element(const kv_strides& strides, std::int64_t dim) noexcept {
    return dim / strides.chunk * strides.chunk_stride + dim % strides.chunk * strides.dim;
  }

  plane_blocks plane_;
  tile_shape tile_;
  move_kernel kernel_ = nullptr;
  std::int64_t group_ = 0;
  move_plan plan_;
};

/// Moves the pairs whose destinations one worker owns, layer by layer.
class owned_mover {
 public:
  /// `bytes`: both sides are of one layout and one code, and blocks stay as they are whatever their scales.
  owned_mover(const kernel_table& table, std::int32_t worker, std::int32_t num_workers, bool bytes) noexcept
      : table_(&table), worker_(worker), num_workers_(num_workers), k_(bytes), v_(bytes) {}

  void operator()(const kv_cache_view& src, const kv_cache_view& dst, std::span<const block_copy> copies,
                  std::int64_t layer) noexcept {
    const kv_layout& layout = src.layout;
    const bool has_v = !layout.v_in_k;
    k_.aim(*table_, layout, k_plane(src, dst), dst.layout.k, layout.k, dst.k_scales, src.k_scales);
    if (has_v) v_.aim(*table_, layout, v_plane(src, dst), dst.layout.v, layout.v, dst.v_scales, src.v_scales);
    for (const block_copy& copy : copies) {
      if (owner_of((layer << 31) + to_index(copy.dst), num_workers_) != worker_) continue;
      k_(copy);
      if (has_v) v_(copy);
    }
  }

 private:
  /// One plane: blocks as they are with their tails, elements of other types, or values of other codes.
  class plane_blocks_mover {
   public:
    explicit plane_blocks_mover(bool bytes) noexcept : bytes_(bytes) {}

    void aim(const kernel_table& table, const kv_layout& layout, const plane_blocks& plane, const kv_plane& dst,
             const kv_plane& src, const float* dst_scales, const float* src_scales) noexcept {
      how_ = detail::is_plain(dst.code) && detail::is_plain(src.code)            ? how::elements
             : bytes_ || (dst.code == src.code && !dst.code.has_static_scales()) ? how::bytes
                                                                                 : how::values;
      if (how_ == how::values) {
        kernels_ = &table.cache.codes;
        dst_ = {static_cast<std::byte*>(plane.dst), dst, dst_scales};
        src_ = {static_cast<std::byte*>(const_cast<void*>(plane.src)), src, src_scales};
        heads_ = layout.num_kv_heads;
        block_size_ = layout.block_size;
        return;
      }
      has_tail_ = false;
      if (bytes_ && is_one_run(layout, src)) {
        elements_.aim(as_run(plane), run_tile(layout, src), table.cache.mover(dtype::u8, dtype::u8));
        return;
      }
      // Bytes that change their place in a block go one by one.
      elements_.aim(plane, block_tile(layout, src), table.cache.mover(dst.code.type, src.code.type));
      has_tail_ = src.code.tail_floats() > 0;
      if (has_tail_) {
        tails_.aim(tail_of(plane, dst, src), block_tile(layout, detail::tail_plane(src)),
                   table.cache.mover(dtype::f32, dtype::f32));
      }
    }

    void operator()(const block_copy& copy) const noexcept {
      if (how_ != how::values) {
        elements_(copy);
        if (has_tail_) tails_(copy);
        return;
      }
      for (std::int32_t token = 0; token < block_size_; ++token) {
        move_token(*kernels_, dst_, {to_index(copy.dst), token}, src_, {to_index(copy.src), token}, heads_);
      }
    }

   private:
    enum class how : std::uint8_t { elements, bytes, values };
    bool bytes_;
    how how_ = how::elements;
    bool has_tail_ = false;
    block_mover elements_;
    block_mover tails_;
    const code_kernels* kernels_ = nullptr;
    code_side dst_;
    code_side src_;
    std::int32_t heads_ = 0;
    std::int32_t block_size_ = 0;
  };

  const kernel_table* table_;
  std::int32_t worker_;
  std::int32_t num_workers_;
  plane_blocks_mover k_;
  plane_blocks_mover v_;
};

/// Copies one part of the blocks of one plane after another; a part is planned anew only when it is not the last one's.
class part_mover {
 public:
  explicit part_mover(const kernel_table& table) noexcept : table_(&table) {}

  void operator()(const tile_shape& tile, const plane_blocks& plane, std::int64_t part, std::int64_t num_parts,
                  std::span<const block_copy> copies) noexcept {
    if (part != part_ || tile != tile_ || plane.src_strides != strides_) {
      part_ = part;
      tile_ = tile;
      strides_ = plane.src_strides;
      cut_ = part_of(make_nest(tile, strides_, strides_), part, num_parts);
      plan_ = make_plan(cut_.nest);
    }
    const move_kernel kernel = table_->cache.mover(plane.dst_type, plane.src_type);
    for (const block_copy& copy : copies) {
      if (copy.src != copy.dst) plane.move(kernel, plan_, copy, cut_.src, cut_.dst);
    }
  }

 private:
  const kernel_table* table_;
  std::int64_t part_ = -1;
  tile_shape tile_;
  kv_strides strides_;
  nest_part cut_;
  move_plan plan_;
};

}  // namespace

errc append(const kernel_table& table, executor& workers, const append_params& params) noexcept {
  if (const errc code = validate::append(params); code != errc::ok) return code;
  const std::int64_t num_tokens = params.k.num_tokens;
  if (num_tokens == 0) return errc::ok;
  const kv_layout& layout = params.kv.layout;
  const bool has_v = !layout.v_in_k;
  run_workers(workers, workers_for(workers, traffic(layout, num_tokens, params.k.type)),
              [&](std::int32_t worker, std::int32_t num_workers) noexcept {
                plane_mover k(table, params.kv, true, params.k, true);
                plane_mover v(table, params.kv, !has_v, has_v ? params.v : params.k, true);
                for_each_run(params.slot_mapping, 0, num_tokens, slot_splitter(layout.block_size),
                             [&](const token_run& run) noexcept {
                               if (owner_of(run.block, num_workers) != worker) return;
                               k(run);
                               if (has_v) v(run);
                             });
              });
  return errc::ok;
}

errc gather(const kernel_table& table, executor& workers, const gather_params& params) noexcept {
  if (const errc code = validate::gather(params); code != errc::ok) return code;
  const std::int64_t num_tokens = params.k.num_tokens;
  if (num_tokens == 0) return errc::ok;
  const kv_layout& layout = params.kv.layout;
  const bool has_v = !layout.v_in_k;
  run_workers(workers, workers_for(workers, traffic(layout, num_tokens, params.k.type)),
              [&](std::int32_t worker, std::int32_t num_workers) noexcept {
                plane_mover k(table, params.kv, true, params.k, false);
                plane_mover v(table, params.kv, !has_v, has_v ? params.v : params.k, false);
                const std::int64_t share = (num_tokens + num_workers - 1) / num_workers;
                const std::int64_t begin = share * worker < num_tokens ? share * worker : num_tokens;
                const std::int64_t end = num_tokens - begin < share ? num_tokens : begin + share;
                for_each_run(params.slot_mapping, begin, end, slot_splitter(layout.block_size),
                             [&](const token_run& run) noexcept {
                               k(run);
                               if (has_v) v(run);
                             });
              });
  return errc::ok;
}

errc copy_blocks(const kernel_table& table, executor& workers, std::span<const kv_cache_view> layers,
                 std::span<const block_copy> copies) noexcept {
  if (const errc code = validate::copy_blocks(layers, copies); code != errc::ok) return code;
  if (layers.empty() || copies.empty()) return errc::ok;
  // Layers with and without a V plane or tails may be next to each other: without one its turn is empty.
  const auto any_layer = [&](auto has) { return std::any_of(layers.begin(), layers.end(), has); };
  const bool have_tails = any_layer([](const kv_cache_view& l) {
    return l.layout.k.code.tail_floats() > 0 || (!l.layout.v_in_k && l.layout.v.code.tail_floats() > 0);
  });
  const bool have_v = any_layer([](const kv_cache_view& l) { return !l.layout.v_in_k; });
  const std::int64_t planes_per_layer = (have_v ? 2 : 1) * (have_tails ? 2 : 1);
  const std::int64_t num_planes = planes_per_layer * static_cast<std::int64_t>(layers.size());
  const std::int32_t wanted =
      workers_for(workers, block_traffic(layers[0].layout, copies.size(), layers.size(), layers[0].layout.k.code.type));
  // Enough parts that the workers have equal shares.
  const std::int64_t num_parts = wanted == 1 ? 1 : (4 * std::int64_t{wanted} + num_planes - 1) / num_planes;
  const std::int64_t num_items = num_planes * num_parts;
  run_workers(workers, wanted, [&](std::int32_t worker, std::int32_t num_workers) noexcept {
    part_mover move(table);
    for (std::int64_t item = num_items * worker / num_workers; item < num_items * (worker + 1) / num_workers; ++item) {
      const std::int64_t plane_index = item / num_parts;
      const kv_cache_view& layer = layers[static_cast<std::size_t>(plane_index / planes_per_layer)];
      const kv_layout& layout = layer.layout;
      const bool is_k = !have_v || plane_index % 2 == 0;
      const bool is_tail = plane_index % planes_per_layer >= (have_v ? 2 : 1);
      const kv_plane& plane = is_k ? layout.k : layout.v;
      const bool whole = is_one_run(layout, plane);
      if ((!is_k && layout.v_in_k) || (is_tail && (whole || plane.code.tail_floats() == 0))) continue;
      const plane_blocks blocks = is_k ? k_plane(layer, layer) : v_plane(layer, layer);
      if (whole) {
        move(run_tile(layout, plane), as_run(blocks), item % num_parts, num_parts, copies);
        continue;
      }
      move(block_tile(layout, is_tail ? detail::tail_plane(plane) : plane),
           is_tail ? tail_of(blocks, plane, plane) : blocks, item % num_parts, num_parts, copies);
    }
  });
  return errc::ok;
}

errc convert_blocks(const kernel_table& table, executor& workers, const kv_cache_view& src, const kv_cache_view& dst,
                    std::span<const block_copy> copies) noexcept {
  if (const errc code = validate::convert_blocks(src, dst, copies); code != errc::ok) return code;
  if (copies.empty()) return errc::ok;
  run_workers(workers, workers_for(workers, block_traffic(src.layout, copies.size(), 1, dst.layout.k.code.type)),
              [&](std::int32_t worker, std::int32_t num_workers) noexcept {
                owned_mover(table, worker, num_workers, false)(src, dst, copies, 0);
              });
  return errc::ok;
}

errc swap_blocks(const kernel_table& table, executor& workers, std::span<const kv_cache_view> src,
                 std::span<const kv_cache_view> dst, std::span<const block_copy> copies) noexcept {
  if (const errc code = validate::swap_blocks(src, dst, copies); code != errc::ok) return code;
  if (src.empty() || copies.empty()) return errc::ok;
  run_workers(workers,
              workers_for(workers, block_traffic(src[0].layout, copies.size(), src.size(), src[0].layout.k.code.type)),
              [&](std::int32_t worker, std::int32_t num_workers) noexcept {
                owned_mover move(table, worker, num_workers, true);
                for (std::size_t layer = 0; layer < src.size(); ++layer) {
                  move(src[layer], dst[layer], copies, static_cast<std::int64_t>(layer));
                }
              });
  return errc::ok;
}

void clear(executor& workers, void* dst, std::size_t num_bytes) noexcept {
  const std::int32_t num_workers = workers_for(workers, static_cast<std::int64_t>(num_bytes));
  run_workers(workers, num_workers, [&](std::int32_t worker, std::int32_t num_parts) noexcept {
    // Of memory that begins on a huge page every part does.
    constexpr std::size_t page = std::size_t{2} << 20;
    const std::size_t num_pages = (num_bytes + page - 1) / page;
    const auto edge = [&](std::int32_t i) {
      return std::min(num_bytes, num_pages * static_cast<std::size_t>(i) / static_cast<std::size_t>(num_parts) * page);
    };
    std::memset(static_cast<std::byte*>(dst) + edge(worker), 0, edge(worker + 1) - edge(worker));
  });
}

}  // namespace bifolio::inline v0_2::cpu
