// SPDX-License-Identifier: Apache-2.0
// bifolio_bench cache_ops: append, rotate_append, gather, copy, swap and convert of shuffled blocks in a pool that no
// cache holds, next to memcpy by the same workers. GB/s count bytes read and bytes written, in the calls and in memcpy
// alike.
#include <algorithm>
#include <bifolio/backend.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/cpu.hpp>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "attention_setting.hpp"
#include "cache_ops_setting.hpp"
#include "checks.hpp"
#include "commands.hpp"
#include "machine.hpp"
#include "probe.hpp"
#include "rotate_rows.hpp"

namespace bifolio::bench {
namespace {

/// memcpy of a large buffer to another, one contiguous part per worker.
class copy_probe {
 public:
  explicit copy_probe(executor& workers, std::size_t num_bytes = std::size_t{128} << 20)
      : workers_(&workers), src_(default_host_memory(), num_bytes), dst_(default_host_memory(), num_bytes) {
    std::memset(src_.data(), 1, num_bytes);
    std::memset(dst_.data(), 2, num_bytes);
  }

  /// Median GB/s, bytes read and written.
  [[nodiscard]] double gb_per_second(double seconds) {
    std::vector<double> samples;
    const auto begin = std::chrono::steady_clock::now();
    while (samples.size() < 3 || seconds_since(begin) < seconds) {
      const auto start = std::chrono::steady_clock::now();
      workers_->run(workers_->concurrency(), &copy_worker, this);
      samples.push_back(2 * static_cast<double>(src_.num_bytes()) / seconds_since(start) * 1e-9);
    }
    return summarize(samples).median;
  }

 private:
  static void copy_worker(void* context, std::int32_t worker) noexcept {
    auto& self = *static_cast<copy_probe*>(context);
    const std::size_t part = self.src_.num_bytes() / static_cast<std::size_t>(self.workers_->concurrency()) / 64 * 64;
    const std::size_t at = static_cast<std::size_t>(worker) * part;
    std::memcpy(self.dst_.as<std::byte>() + at, self.src_.as<const std::byte>() + at, part);
  }

  executor* workers_;
  buffer src_;
  buffer dst_;
};

/// Every block written to once.
pool written_pool(const kv_layout& layout, std::int64_t num_blocks) {
  pool result(default_host_memory(), layout, num_blocks);
  std::memset(result.memory.data(), 0, result.memory.num_bytes());
  std::fill_n(result.scales.as<float>(), layout.num_kv_heads, bench_scale);
  return result;
}

class cache_ops_bench {
 public:
  cache_ops_bench(const cache_ops_options& options, backend& where, executor& workers, report& out)
      : options_(options), where_(where), probe_(workers), out_(out), random_(options.seed) {}

  void run() {
    for_each_row(
        options_, [&](const auto& op, const auto& layout, dtype rows_type) { transfer(op, layout, rows_type); },
        [&](const auto& op, const auto& from, const auto& to) { move_blocks(op, from, to); });
  }

 private:
  void rotate(const kv_layout& layout, dtype rows_type) {
    const pool cache = written_pool(layout, pool_blocks(options_, layout, 1));
    // Calls take turns among sets of rows here as well.
    const std::int64_t row_elements = (std::int64_t{options_.q_heads} + 2 * layout.num_kv_heads) * layout.k.head_dim;
    const auto set_bytes = static_cast<std::size_t>(options_.tokens * row_elements) * size_of(rows_type);
    const std::size_t num_sets =
        std::max<std::size_t>(2, (static_cast<std::size_t>(options_.pool_mib) << 20) / set_bytes);
    rotate_rows rows(where_, options_, layout, rows_type, num_sets);
    std::memset(rows.memory().data(), 0, rows.memory().num_bytes());
    const std::vector<std::int32_t> order = shuffled_blocks(cache.view.num_blocks, random_);
    std::vector<std::int64_t> slots(static_cast<std::size_t>(options_.tokens));
    std::size_t next = 0;
    std::size_t set = 0;
    const auto prepare = [&] {
      fill_slots(slots, order, layout.block_size, next);
      set = (set + 1) % num_sets;
    };
    measure(transfer_op(options_, "rotate_append", layout, rows_type), prepare,
            [&] { return where_.rotate_append(rows.call(set, cache.view, slots.data())); });
  }

  /// Slots of the blocks of `order` from number `next` on, which moves on.
  void fill_slots(std::vector<std::int64_t>& slots, const std::vector<std::int32_t>& order, std::int32_t block_size,
                  std::size_t& next) const {
    const auto size = static_cast<std::size_t>(block_size);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const block_id block{order[(next + i / size) % order.size()]};
      slots[i] = to_index(make_slot(block, static_cast<std::int32_t>(i % size), block_size));
    }
    next += static_cast<std::size_t>(blocks_per_call(options_));
  }

  void transfer(const std::string& op, const kv_layout& layout, dtype rows_type) {
    if (op == "rotate_append") return rotate(layout, rows_type);
    const pool cache = written_pool(layout, pool_blocks(options_, layout, 1));
    const std::int64_t tokens = options_.tokens;
    const std::int64_t row_elements = std::int64_t{layout.num_kv_heads} * layout.k.head_dim;
    const auto row_bytes = static_cast<std::size_t>(tokens * row_elements) * size_of(rows_type);
    // Calls take turns among sets of rows, so that these come from memory as well.
    const std::size_t num_sets =
        std::max<std::size_t>(2, (static_cast<std::size_t>(options_.pool_mib) << 20) / (2 * row_bytes));
    buffer rows(default_host_memory(), num_sets * 2 * row_bytes);
    std::memset(rows.data(), 0, rows.num_bytes());
    tensor_view k = dense_view<void>(rows.data(), rows_type, tokens, layout.num_kv_heads, layout.k.head_dim);
    tensor_view v = k;

    const std::vector<std::int32_t> order = shuffled_blocks(cache.view.num_blocks, random_);
    std::vector<std::int64_t> slots(static_cast<std::size_t>(tokens));
    std::size_t next = 0;
    std::size_t set = 0;
    const auto prepare = [&] {
      k.data = rows.as<std::byte>() + 2 * set * row_bytes;
      v.data = rows.as<std::byte>() + (2 * set + 1) * row_bytes;
      set = (set + 1) % num_sets;
      fill_slots(slots, order, layout.block_size, next);
    };
    const bool stores = op == "append";
    const auto call = [&] {
      return stores ? where_.append({cache.view, as_const(k), as_const(v), slots.data()})
                    : where_.gather({cache.view, k, v, slots.data()});
    };
    measure(transfer_op(options_, op, layout, rows_type), prepare, call);
  }

  void move_blocks(const std::string& op, const kv_layout& from, const kv_layout& to) {
    const pool src = written_pool(from, pool_blocks(options_, from, 1));
    std::optional<pool> other;
    if (op != "copy") other = written_pool(to, pool_blocks(options_, to, 1));
    const kv_cache_view dst = other ? other->view : src.view;
    const std::vector<std::int32_t> sources = shuffled_blocks(src.view.num_blocks, random_);
    const std::vector<std::int32_t> targets = other ? shuffled_blocks(dst.num_blocks, random_) : sources;
    std::vector<block_copy> pairs(static_cast<std::size_t>(blocks_per_call(options_)));
    std::size_t next = 0;
    const auto prepare = [&] {
      // Within one cache: from one half of the order to the other.
      const std::size_t ahead = other ? 0 : sources.size() / 2;
      for (block_copy& pair : pairs) {
        pair = {block_id{sources[next % sources.size()]}, block_id{targets[(next + ahead) % targets.size()]}};
        ++next;
      }
    };
    const auto call = [&] {
      if (op == "copy") return where_.copy_blocks({&src.view, 1}, pairs);
      if (op == "swap") return where_.swap_blocks({&src.view, 1}, {&dst, 1}, pairs);
      return where_.convert_blocks(src.view, dst, pairs);
    };
    const std::int64_t bytes = blocks_per_call(options_) * (from.block_bytes() + to.block_bytes());
    measure({op, name_of(from), name_of(to), static_cast<double>(bytes)}, prepare, call);
  }

  template <class Prepare, class Call>
  void measure(const cache_op& op, const Prepare& prepare, const Call& call) {
    const double probe_before = probe_.gb_per_second(options_.seconds / 4);
    std::vector<double> times;
    double total = 0;
    for (std::int32_t i = 0; static_cast<std::int32_t>(times.size()) < options_.repeats || total < options_.seconds;
         ++i) {
      prepare();
      const auto start = std::chrono::steady_clock::now();
      const errc code = call();
      const double seconds = seconds_since(start);
      require_ok(code, op.name);
      if (i < 2) continue;  // warm up
      times.push_back(seconds);
      total += seconds;
    }
    const double probe_gb_s = (probe_before + probe_.gb_per_second(options_.seconds / 4)) / 2;
    out_.add(cache_ops_row(options_, op, summarize(times), probe_gb_s));
  }

  cache_ops_options options_;
  backend& where_;
  copy_probe probe_;
  report& out_;
  std::mt19937_64 random_;
};

void run_cache_ops(const cache_ops_options& options, report& out) {
  require_range("--tokens", options.tokens, 1, 1 << 24);
  require_range("--q-heads", options.q_heads, 0, 1 << 16);
  require_range("--pool-mib", options.pool_mib, 1, 1 << 20);
  require_range("--repeats", options.repeats, 1, 1'000'000);
  require_min_time(options.seconds);
  const device where = parse_device(options.device);
  if (where.type == device_type::cuda) {
    run_cuda_cache_ops(options, out);
    return;
  }
  const auto workers = make_executor(parse_executor(options.executor), options.threads);
  backend_options opening;
  opening.own_executor = workers.get();
  if (!options.isa.empty()) opening.isa = parse_isa(options.isa);
  const auto opened = make_backend(where, opening);
  out.fact("backend", opened->description());
  cache_ops_bench(options, *opened, *workers, out).run();
}

}  // namespace

void add_cache_ops_command(CLI::App& program, command& run) {
  auto o = std::make_shared<cache_ops_options>();
  CLI::App* sub =
      program.add_subcommand("cache_ops", "append, rotate_append, gather, copy, swap and convert next to memcpy");
  sub->add_option("--device", o->device, "cpu, cuda or cuda:N")->capture_default_str();
  sub->add_option("--ops", o->ops, "append, rotate_append, gather, copy, swap, convert")
      ->delimiter(',')
      ->capture_default_str();
  sub->add_option("--dtype", o->dtypes, "Dtypes of rows: " + std::string(tensor_dtype_names))
      ->delimiter(',')
      ->capture_default_str();
  sub->add_option("--kv-dtype", o->kv_dtypes,
                  "Codes of the cache: f32, f16, bf16, e4m3, e5m2, i8, e4m3-token, i8-token, u8-token …")
      ->delimiter(',')
      ->capture_default_str();
  sub->add_option("--layout", o->layouts, "hnd, nhd, x_split")->delimiter(',')->capture_default_str();
  sub->add_option("--tokens", o->tokens, "Tokens of a call; blocks = tokens / block size")->capture_default_str();
  sub->add_option("--kv-heads", o->kv_heads, "KV heads")->capture_default_str();
  sub->add_option("--q-heads", o->q_heads, "Query heads of rotate_append; 0: none")->capture_default_str();
  sub->add_option("--head-dim", o->head_dim, "Elements of a head")->capture_default_str();
  sub->add_option("--block-size", o->block_size, "Tokens in a block")->capture_default_str();
  sub->add_option("--pool-mib", o->pool_mib, "Size of a pool; larger than the last-level cache")->capture_default_str();
  sub->add_option("--threads", o->threads, "Workers; 0 = what the executor takes")->capture_default_str();
  sub->add_option("--executor", o->executor, "threads, openmp, tbb or serial")->capture_default_str();
  sub->add_option("--isa", o->isa, isa_choice());
  sub->add_option("--repeats", o->repeats, "Calls at the least")->capture_default_str();
  sub->add_option("--min-time", o->seconds, "Seconds of calls at the least")->capture_default_str();
  sub->add_option("--seed", o->seed, "Of the block order")->capture_default_str();
  sub->callback([o, &run] { run = [o](report& out) { run_cache_ops(*o, out); }; });
}

}  // namespace bifolio::bench
