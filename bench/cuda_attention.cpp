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
  constexpr int num_first = 10;  // not counted
  constexpr int num_samples = 50;
  constexpr int least_samples = 3;  // where the device takes long
  constexpr double longest = 0.2;
  std::vector<double> samples;
  const auto begin = std::chrono::steady_clock::now();
  for (std::int32_t i = 0; i < num_first + num_samples; ++i) {
    require_ok(where.synchronize(stream), "synchronize");
    const bool is_late = seconds_since(begin) > longest;
    if (is_late && std::ssize(samples) >= least_samples) break;
    const auto start = std::chrono::steady_clock::now();
    body(i);
    if (i >= num_first || is_late) samples.push_back(seconds_since(start));
  }
  require_ok(where.synchronize(stream), "synchronize");
  return summarize(samples).median;
}

/// Chunks of the K and V blocks of each set, in the order of its ids; of K alone where V is part of it.
std::vector<gather_chunk> chunks_of(const kv_cache_view& kv, const std::vector<std::int32_t>& ids) {
  std::vector<gather_chunk> chunks;
  for (const std::int32_t id : ids) {
    for (const void* const plane : {kv.k, kv.v}) {
      if (plane == kv.v && kv.layout.v_in_k) continue;
      const std::int64_t plane_block_bytes = kv.layout.block_bytes(plane == kv.k ? kv.layout.k : kv.layout.v);
      const auto* const block = static_cast<const std::byte*>(plane) + id * plane_block_bytes;
      for (std::int64_t at = 0; at < plane_block_bytes; at += gather_chunk_bytes) {
        const std::int64_t bytes = std::min<std::int64_t>(gather_chunk_bytes, plane_block_bytes - at);
        chunks.push_back({block + at, static_cast<std::int32_t>(bytes / 16), 0});
      }
    }
  }
  return chunks;
}

attention_result measure(backend& where, graph_timer& timer, const measuring_options& options, const setting& s) {
  const attention_spec spec = spec_of(s);
  const std::vector<float> host_scales(static_cast<std::size_t>(s.kv_heads), bench_scale);
  buffer scales(where.memory(), host_scales.size() * sizeof(float));
  require_ok(where.upload(scales.data(), host_scales.data(), scales.num_bytes(), {}), "an upload");
  require_ok(where.synchronize({}), "an upload");
  const kv_layout layout =
      make_layout(s.layout, s.kv, s.v, s.kv_heads, s.head_dim, spec.v_head_dim, s.block_size, spec.v_in_k);
  const step_lengths lengths(s);
  // Calls take turns among sets of blocks, so that none finds its K and V in the L2 cache: 512 MiB in up to 64 sets,
  // and at least 128 MiB.
  constexpr std::int64_t pool_bytes = std::int64_t{512} << 20;
  const std::int64_t set_bytes = lengths.num_blocks * layout.block_bytes();
  const auto sets_for = [&](std::int64_t bytes) { return (bytes + set_bytes - 1) / set_bytes; };
  const std::int64_t num_sets = std::clamp<std::int64_t>(
      std::max(std::min<std::int64_t>(sets_for(pool_bytes), 64), sets_for(pool_bytes / 4)), 1, 512);
  const std::int64_t num_blocks = std::max(lengths.num_blocks * num_sets, pool_bytes / layout.block_bytes());
  require_range("the cache's number of blocks", num_blocks, 1, std::int64_t{1} << 31);

  buffer pool(where.memory(), static_cast<std::size_t>(num_blocks * layout.block_bytes()));
  // Where only one plane has codes, those of e4m3 are ordinary numbers of every other type, and scales as well.
  const bool has_codes = !is_tensor_dtype(s.kv.type) || !is_tensor_dtype(s.v.type);
  const dtype contents = s.kv.type == s.v.type ? s.kv.type : has_codes ? dtype::e4m3 : dtype::f16;
  fill_on_device(pool.data(), pool.num_bytes(), static_cast<int>(contents), options.seed);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(num_blocks));
  std::iota(ids.begin(), ids.end(), 0);
  std::mt19937_64 random(options.seed);
  std::shuffle(ids.begin(), ids.end(), random);
  ids.resize(static_cast<std::size_t>(lengths.num_blocks * num_sets));
  std::vector<std::int32_t> tables;
  for (std::int64_t set = 0; set < num_sets; ++set) {
    const std::vector<std::int32_t> table = tables_of(s, lengths, ids.data() + set * lengths.num_blocks);
    tables.insert(tables.end(), table.begin(), table.end());
  }
  const std::int64_t entries_per_set = static_cast<std::int64_t>(s.seqs.size()) * lengths.table_stride;
  const buffer device_tables = uploaded(where, tables);
  const buffer device_starts = uploaded(where, lengths.starts);
  const buffer device_lens = uploaded(where, lengths.contexts);
  const std::vector<float> slopes = slopes_of(s);
  const buffer device_slopes = uploaded(where, slopes);

  const std::int64_t num_tokens = s.num_tokens();
  const auto row_bytes = static_cast<std::size_t>(num_tokens * s.q_heads * s.head_dim) * size_of(s.q_type);
  buffer q(where.memory(), row_bytes);
  buffer out(where.memory(), row_bytes);
  fill_on_device(q.data(), row_bytes, static_cast<int>(s.q_type), options.seed + 1);

  const host_step_view host{static_cast<std::int32_t>(s.seqs.size()),
                            num_tokens,
                            lengths.starts.data(),
                            lengths.contexts.data(),
                            tables.data(),
                            lengths.table_stride,
                            nullptr};
  attention_plan plan;
  where.plan_attention(plan, spec, host, num_blocks, timer.stream());
  attention_params params;
  params.q = dense_view<const void>(q.data(), s.q_type, num_tokens, s.q_heads, s.head_dim);
  params.out = dense_view<void>(out.data(), s.q_type, num_tokens, s.q_heads, spec.v_head_dim);
  params.kv = {pool.data(),        pool.as<std::byte>() + num_blocks * layout.block_bytes(layout.k),
               num_blocks,         layout,
               scales.as<float>(), scales.as<float>()};
  params.scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  params.soft_cap = s.soft_cap;
  if (s.alibi) params.alibi_slopes = device_slopes.as<float>();
  params.batch = as_device_view(host);
  params.batch.query_start_loc = device_starts.as<std::int32_t>();
  params.batch.seq_lens = device_lens.as<std::int32_t>();

  attention_result result;
  const double seconds = std::min(options.seconds, 0.3);
  const auto call_attention = [&](std::int32_t call) {
    params.batch.block_tables = device_tables.as<std::int32_t>() + call % num_sets * entries_per_set;
    require_ok(where.attention(plan, params, timer.stream()), "attention");
  };
  // Many calls per graph, whose own launch takes some microseconds; fewer where a call takes milliseconds.
  constexpr double longest_graph = 0.05;
  const double one_call = timer.time_calls(1, 3, [&] { call_attention(0); });
  const auto affordable = static_cast<std::int64_t>(longest_graph / one_call);
  const auto calls =
      static_cast<std::int32_t>(std::clamp<std::int64_t>(affordable, 2, std::clamp<std::int64_t>(num_sets, 32, 512)));
  result.time = timer.time(calls, call_attention, options.repeats, seconds);
  if (options.spaced) {
    const auto fill = [&](std::int32_t) { require_launched(launch_filler(timer.stream().handle)); };
    const auto fill_and_call = [&](std::int32_t call) {
      fill(call);
      call_attention(call);
    };
    result.spaced_seconds = timer.time(calls, fill_and_call, options.repeats, seconds).median -
                            timer.time(calls, fill, options.repeats, seconds / 4).median;
  }
  result.plan_seconds = host_seconds(
      where, timer.stream(), [&](std::int32_t) { where.plan_attention(plan, spec, host, num_blocks, timer.stream()); });
  const std::int32_t calls_in_a_row = one_call < 1e-3 ? 8 : 1;
  result.call_seconds = host_seconds(where, timer.stream(),
                                     [&](std::int32_t) {
                                       for (std::int32_t call = 0; call < calls_in_a_row; ++call) {
                                         require_ok(where.attention(plan, params, timer.stream()), "attention");
                                       }
                                     }) /
                        calls_in_a_row;
  if (layout.block_bytes(layout.k) % 16 == 0) {
    const std::vector<gather_chunk> chunks = chunks_of(params.kv, ids);
    const buffer device_chunks = uploaded(where, chunks);
    gather_work work;
    work.chunks = device_chunks.as<gather_chunk>();
    work.num_sets = static_cast<std::int32_t>(num_sets);
    work.chunks_per_set = static_cast<std::int64_t>(chunks.size()) / num_sets;
    work.bytes_per_set = set_bytes;
    result.gather_gb_s = measure_gather(timer, work, 0.05);
  }
  return result;
}

/// Seconds of two calls in place of that of a mixed batch: those of one new token, and the others. 0: it is not mixed.
double seconds_apart(backend& where, graph_timer& timer, measuring_options options, const setting& s) {
  setting parts[2] = {s, s};
  for (setting& part : parts) part.seqs.clear();
  for (const sequence_shape& seq : s.seqs) parts[seq.query_len == 1 ? 0 : 1].seqs.push_back(seq);
  if (parts[0].seqs.empty() || parts[1].seqs.empty()) return 0;
  options.spaced = false;
  double seconds = 0;
  for (const setting& part : parts) seconds += measure(where, timer, options, part).time.median;
  return seconds;
}

}  // namespace

void run_cuda_attention(const measuring_options& options, const std::vector<setting>& settings, report& out) {
  const device where = parse_device(options.device);
  const auto opened = make_backend(where);
  out.fact("backend", opened->description());
  graph_timer timer(where.index);
  const double probe = measure_memory(timer, std::size_t{1} << 30, 0.1).read;
  for (const setting& s : settings) {
    attention_result result = measure(*opened, timer, options, s);
    if (options.apart) result.apart_seconds = seconds_apart(*opened, timer, options, s);
    result.device = options.device;
    result.isa = "cuda";
    result.probe_gb_s = probe;
    out.add(attention_row(s, result));
  }
}

}  // namespace bifolio::bench
