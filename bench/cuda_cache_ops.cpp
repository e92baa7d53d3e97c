// SPDX-License-Identifier: Apache-2.0
// bifolio_bench cache_ops --device cuda: the calls of the CPU's table by graph replays, next to a large copy on the
// device (append, gather, copy, convert) or one large transfer to pinned host memory (swap_out, swap_in).
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bifolio/backend.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/error.hpp>
#include <functional>
#include <random>

#include "attention_setting.hpp"
#include "cache_ops_setting.hpp"
#include "checks.hpp"
#include "cuda_timing.hpp"
#include "rotate_rows.hpp"

namespace bifolio::bench {
namespace {

class cuda_cache_ops_bench {
 public:
  cuda_cache_ops_bench(const cache_ops_options& options, backend& where, graph_timer& timer, report& out)
      : options_(options), where_(where), timer_(timer), out_(out), random_(options.seed) {}

  void run() {
    copy_gb_s_ = measure_memory(timer_, std::size_t{1} << 30, 0.1).copy;
    for_each_row(
        options_, [&](const auto& op, const auto& layout, dtype rows_type) { transfer(op, layout, rows_type); },
        [&](const auto& op, const auto& from, const auto& to) {
          if (op == "copy") return copy(from);
          if (op == "swap") return swap(from);
          convert(from, to);
        });
  }

 private:
  static constexpr std::int32_t calls = 8;

  [[nodiscard]] pool device_pool(const kv_layout& layout) const {
    pool made(where_.memory(), layout, pool_blocks(options_, layout, calls));
    const std::vector<float> scales(static_cast<std::size_t>(layout.num_kv_heads), bench_scale);
    require_ok(where_.upload(made.scales.data(), scales.data(), made.scales.num_bytes(), {}), "an upload");
    require_ok(where_.synchronize({}), "an upload");
    return made;
  }
  [[nodiscard]] double bytes_of_call(const kv_layout& layout) const {
    return static_cast<double>(blocks_per_call(options_) * layout.block_bytes());
  }

  void transfer(const std::string& op, const kv_layout& layout, dtype rows_type) {
    const pool cache = device_pool(layout);
    const std::vector<std::int32_t> order = shuffled_blocks(cache.view.num_blocks, random_);
    std::vector<std::int64_t> slots;
    for (std::int64_t call = 0; call < calls; ++call) {
      for (std::int64_t t = 0; t < options_.tokens; ++t) {
        const auto block = static_cast<std::size_t>(call * blocks_per_call(options_) + t / layout.block_size);
        slots.push_back(std::int64_t{order[block]} * layout.block_size + t % layout.block_size);
      }
    }
    buffer device_slots(where_.memory(), slots.size() * sizeof(std::int64_t));
    require_ok(where_.upload(device_slots.data(), slots.data(), device_slots.num_bytes(), {}), "upload");
    require_ok(where_.synchronize({}), "upload");
    const auto slots_of = [&](std::int32_t call) { return device_slots.as<std::int64_t>() + call * options_.tokens; };
    if (op == "rotate_append") {
      rotate_rows rows(where_, options_, layout, rows_type, calls);
      fill_on_device(rows.memory().data(), rows.memory().num_bytes(), static_cast<int>(rows_type), options_.seed);
      measure(transfer_op(options_, op, layout, rows_type), copy_gb_s_, [&](std::int32_t call) {
        return where_.rotate_append(rows.call(static_cast<std::size_t>(call), cache.view, slots_of(call)),
                                    timer_.stream());
      });
      return;
    }
    const std::int64_t row_elements = std::int64_t{layout.num_kv_heads} * layout.k.head_dim;
    const auto half = static_cast<std::size_t>(options_.tokens * row_elements) * size_of(rows_type);
    buffer rows(where_.memory(), 2 * half * calls);
    fill_on_device(rows.data(), rows.num_bytes(), static_cast<int>(rows_type), options_.seed);
    const bool stores = op == "append";
    measure(transfer_op(options_, op, layout, rows_type), copy_gb_s_, [&](std::int32_t call) {
      auto* const base = rows.as<std::byte>() + static_cast<std::size_t>(call) * 2 * half;
      const tensor_view k = dense_view<void>(base, rows_type, options_.tokens, layout.num_kv_heads, layout.k.head_dim);
      tensor_view v = k;
      v.data = base + half;
      return stores ? where_.append({cache.view, as_const(k), as_const(v), slots_of(call)}, timer_.stream())
                    : where_.gather({cache.view, k, v, slots_of(call)}, timer_.stream());
    });
  }

  std::vector<block_copy> pairs_of(const std::vector<std::int32_t>& sources, const std::vector<std::int32_t>& targets,
                                   std::int32_t call, std::size_t ahead) const {
    std::vector<block_copy> pairs;
    const auto first = static_cast<std::size_t>(call * blocks_per_call(options_));
    for (std::size_t i = 0; i < static_cast<std::size_t>(blocks_per_call(options_)); ++i) {
      pairs.push_back(
          {block_id{sources[(first + i) % sources.size()]}, block_id{targets[(first + i + ahead) % targets.size()]}});
    }
    return pairs;
  }

  void copy(const kv_layout& layout) {
    const pool cache = device_pool(layout);
    const std::vector<std::int32_t> order = shuffled_blocks(cache.view.num_blocks, random_);
    measure({"copy", name_of(layout), name_of(layout), 2 * bytes_of_call(layout)}, copy_gb_s_, [&](std::int32_t call) {
      return where_.copy_blocks({&cache.view, 1}, pairs_of(order, order, call, order.size() / 2), timer_.stream());
    });
  }

  void convert(const kv_layout& from, const kv_layout& to) {
    const pool src = device_pool(from);
    const pool dst = device_pool(to);
    const std::vector<std::int32_t> sources = shuffled_blocks(src.view.num_blocks, random_);
    const std::vector<std::int32_t> targets = shuffled_blocks(dst.view.num_blocks, random_);
    measure({"convert", name_of(from), name_of(to), bytes_of_call(from) + bytes_of_call(to)}, copy_gb_s_,
            [&](std::int32_t call) {
              return where_.convert_blocks(src.view, dst.view, pairs_of(sources, targets, call, 0), timer_.stream());
            });
  }

  /// One transfer of as many bytes, in the same direction.
  double transfer_gb_s(void* dst, const void* src, std::size_t num_bytes) {
    const summary time = timer_.time(
        2,
        [&](std::int32_t) {
          if (cudaMemcpyAsync(dst, src, num_bytes, cudaMemcpyDefault,
                              static_cast<cudaStream_t>(timer_.stream().handle)) != cudaSuccess) {
            throw error(errc::internal, "a transfer failed");
          }
        },
        5, 0.05);
    return static_cast<double>(num_bytes) / time.median * 1e-9;
  }

  void swap(const kv_layout& layout) {
    const std::int64_t blocks = 2 * blocks_per_call(options_);
    const pool on_device(where_.memory(), layout, blocks);
    const pool on_host(where_.staging_memory(), layout, blocks);
    const std::vector<std::int32_t> sources = shuffled_blocks(blocks, random_);
    const std::vector<std::int32_t> targets = shuffled_blocks(blocks, random_);
    const auto half = on_device.memory.num_bytes() / 2;
    for (const bool out : {true, false}) {
      const pool& src = out ? on_device : on_host;
      const pool& dst = out ? on_host : on_device;
      const double limit = transfer_gb_s(dst.view.k, src.view.k, half);
      const cache_op op{out ? "swap_out" : "swap_in", name_of(layout), name_of(layout), bytes_of_call(layout)};
      measure(op, limit, [&](std::int32_t call) {
        return where_.swap_blocks({&src.view, 1}, {&dst.view, 1}, pairs_of(sources, targets, call % 2, 0),
                                  timer_.stream());
      });
    }
  }

  void measure(const cache_op& op, double limit, const std::function<errc(std::int32_t)>& call) {
    // Many calls to a graph, whose own launch takes some microseconds.
    const bool on_device = op.name.rfind("swap", 0) != 0;
    const summary time = timer_.time(
        on_device ? 8 * calls : calls, [&](std::int32_t i) { require_ok(call(i % calls), op.name); }, options_.repeats,
        std::min(options_.seconds, 0.1));
    out_.add(cache_ops_row(options_, op, time, limit));
  }

  const cache_ops_options& options_;
  backend& where_;
  graph_timer& timer_;
  report& out_;
  std::mt19937_64 random_;
  double copy_gb_s_ = 0;
};

}  // namespace

void run_cuda_cache_ops(const cache_ops_options& options, report& out) {
  const device where = parse_device(options.device);
  const auto opened = make_backend(where);
  out.fact("backend", opened->description());
  graph_timer timer(where.index);
  cuda_cache_ops_bench(options, *opened, timer, out).run();
}

}  // namespace bifolio::bench
