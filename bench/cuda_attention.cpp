// SPDX-License-Identifier: Apache-2.0
// bifolio_bench attention --device cuda: replays of a graph whose calls take turns among sets of shuffled blocks, in a
// pool several times the L2 cache.
#include <algorithm>
#include <bifolio/backend.hpp>
#include <bifolio/buffer.hpp>
#include <chrono>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>

#include "attention_setting.hpp"
#include "checks.hpp"
#include "cuda_timing.hpp"
#include "probe.hpp"

namespace bifolio::bench {
namespace {

template <class T>
buffer uploaded(backend& where, const std::vector<T>& values) {
  buffer memory(where.memory(), std::max<std::size_t>(1, values.size()) * sizeof(T));
  require_ok(where.upload(memory.data(), values.data(), values.size() * sizeof(T), {}), "an upload");
  require_ok(where.synchronize({}), "an upload");
  return memory;
}

/// Median seconds that the host spends in `body`, with an idle device before each call.
double host_seconds(backend& where, stream_ref stream, const std::function<void(std::int32_t)>& body) {
  std::vector<double> samples;
  for (std::int32_t i = 0; i < 60; ++i) {
    require_ok(where.synchronize(stream), "synchronize");
    const auto start = std::chrono::steady_clock::now();
    body(i);
    if (i >= 10) samples.push_back(seconds_since(start));
  }
  require_ok(where.synchronize(stream), "synchronize");
  return summarize(samples).median;
}

attention_result measure(backend& where, graph_timer& timer, const attention_options& options, const setting& s) {
  const attention_spec spec = spec_of(s, options);
  const kv_layout layout = make_layout(s.layout, s.kv_type, s.kv_heads, options.head_dim, s.block_size);
  const std::int64_t blocks_per_seq = blocks_for(s.context, s.block_size);
  const std::int64_t blocks_per_set = blocks_per_seq * s.batch;
  constexpr std::int64_t least_pool_bytes = std::int64_t{512} << 20;
  const std::int64_t set_bytes = blocks_per_set * layout.block_bytes();
  const std::int64_t num_sets = std::clamp<std::int64_t>((least_pool_bytes + set_bytes - 1) / set_bytes, 1, 64);
  const std::int64_t num_blocks = std::max(blocks_per_set * num_sets, least_pool_bytes / layout.block_bytes());
  require_range("the cache's number of blocks", num_blocks, 1, std::int64_t{1} << 31);

  buffer pool(where.memory(), static_cast<std::size_t>(num_blocks * layout.block_bytes()));
  fill_on_device(pool.data(), pool.num_bytes(), static_cast<int>(s.kv_type), options.seed);
  std::vector<std::int32_t> tables(static_cast<std::size_t>(num_blocks));
  std::iota(tables.begin(), tables.end(), 0);
  std::mt19937_64 random(options.seed);
  std::shuffle(tables.begin(), tables.end(), random);
  std::vector<std::int32_t> starts;
  for (std::int32_t i = 0; i <= s.batch; ++i) starts.push_back(i * s.query_len);
  const std::vector<std::int32_t> lens(static_cast<std::size_t>(s.batch), s.context);
  const buffer device_tables = uploaded(where, tables);
  const buffer device_starts = uploaded(where, starts);
  const buffer device_lens = uploaded(where, lens);

  const std::int64_t num_tokens = std::int64_t{s.batch} * s.query_len;
  const auto row_bytes = static_cast<std::size_t>(num_tokens * options.q_heads * options.head_dim) * size_of(s.q_type);
  buffer q(where.memory(), row_bytes);
  buffer out(where.memory(), row_bytes);
  fill_on_device(q.data(), row_bytes, static_cast<int>(s.q_type), options.seed + 1);

  const step_batch_view host{s.batch, num_tokens, starts.data(), lens.data(), tables.data(), blocks_per_seq, nullptr};
  attention_plan plan;
  where.plan_attention(plan, spec, host, num_blocks, timer.stream());
  attention_params params;
  params.q = dense_view<const void>(q.data(), s.q_type, num_tokens, options.q_heads, options.head_dim);
  params.out = dense_view<void>(out.data(), s.q_type, num_tokens, options.q_heads, options.head_dim);
  params.kv = {pool.data(), pool.as<std::byte>() + pool.num_bytes() / 2, num_blocks, layout};
  params.scale = 1.0f / std::sqrt(static_cast<float>(options.head_dim));
  params.soft_cap = options.soft_cap;
  params.batch = host;
  params.batch.query_start_loc = device_starts.as<std::int32_t>();
  params.batch.seq_lens = device_lens.as<std::int32_t>();

  attention_result result;
  // Many calls to a graph, whose own launch takes some microseconds; fewer where a call takes milliseconds.
  const bool is_long = num_tokens * s.context > std::int64_t{1} << 28;
  const auto calls = static_cast<std::int32_t>(std::clamp<std::int64_t>(num_sets, is_long ? 4 : 32, 64));
  result.time = timer.time(
      calls,
      [&](std::int32_t call) {
        params.batch.block_tables = device_tables.as<std::int32_t>() + call % num_sets * blocks_per_set;
        require_ok(where.attention(plan, params, timer.stream()), "attention");
      },
      options.repeats, std::min(options.seconds, 0.3));
  result.plan_seconds = host_seconds(
      where, timer.stream(), [&](std::int32_t) { where.plan_attention(plan, spec, host, num_blocks, timer.stream()); });
  constexpr std::int32_t calls_in_a_row = 8;
  result.call_seconds = host_seconds(where, timer.stream(),
                                     [&](std::int32_t) {
                                       for (std::int32_t call = 0; call < calls_in_a_row; ++call) {
                                         require_ok(where.attention(plan, params, timer.stream()), "attention");
                                       }
                                     }) /
                        calls_in_a_row;
  if (layout.block_bytes() / 2 % 16 == 0) {
    gather_work work;
    work.k = params.kv.k;
    work.v = params.kv.v;
    work.half_block_bytes = layout.block_bytes() / 2;
    work.ids = device_tables.as<std::int32_t>();
    work.blocks_per_set = blocks_per_set;
    work.num_sets = static_cast<std::int32_t>(num_sets);
    result.gather_gb_s = measure_gather(timer, work, 0.05);
  }
  return result;
}

}  // namespace

void run_cuda_attention(const attention_options& options, const std::vector<setting>& settings, report& out) {
  const device where = parse_device(options.device);
  const auto opened = make_backend(where);
  out.fact("backend", opened->description());
  graph_timer timer(where.index);
  const double probe = measure_memory(timer, std::size_t{1} << 30, 0.1).read;
  for (const setting& s : settings) {
    attention_result result = measure(*opened, timer, options, s);
    result.device = options.device;
    result.isa = "cuda";
    result.probe_gb_s = probe;
    out.add(attention_row(s, options, result));
  }
}

}  // namespace bifolio::bench
