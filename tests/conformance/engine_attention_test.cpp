// SPDX-License-Identifier: Apache-2.0
// The whole path of a step through a cache engine: upload, append, copy on write, plan once, attention in every layer;
// several engines at once; and random
// steps on two instruction sets, which CUDA runs as well (tests/cuda/device_test.cpp).
#include <doctest/doctest.h>

#include <bifolio/cache_engine.hpp>
#include <cstring>
#include <numeric>
#include <thread>

#include "conformance/attention_tables.hpp"
#include "conformance/flawed_backend.hpp"
#include "conformance/whole_steps.hpp"
#include "support/elements.hpp"
#include "support/random.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

constexpr std::int32_t num_layers = 2;
constexpr std::int32_t block_size = 8;
constexpr std::int64_t num_blocks = 30;

attention_case layer_case(std::int32_t seq_len, dtype kv_type, std::int32_t layer, std::uint64_t seed) {
  return {.what = "layer " + std::to_string(layer),
          .head_dim = 32,
          .block_size = block_size,
          .kv_type = kv_type,
          .seqs = {{seq_len, seq_len, 0}},
          .seed = hash_of(seed, layer)};
}

// Feeds one sequence, chunk by chunk, through an engine of its own and returns every layer's outputs, row after row.
std::vector<attention_output> feed(const tested_backend& tested, layout_kind layout, dtype kv_type,
                                   const std::vector<std::int32_t>& chunks, std::uint64_t seed) {
  backend& where = tested.get();
  const std::int32_t length = std::accumulate(chunks.begin(), chunks.end(), 0);
  cache_engine engine(where, {num_layers, num_blocks, make_layout(layout, kv_type, 2, 32, block_size)});
  for (const kv_cache_view& view : engine.layers()) {
    std::vector<std::byte> nothing(static_cast<std::size_t>(num_blocks * view.layout.block_bytes()));
    poison(nothing, kv_type);
    require_ok(where.upload(view.k, nothing.data(), nothing.size(), {}),
               "upload");  // K plane and V plane are one allocation
  }
  std::vector<std::int32_t> order(num_blocks);
  std::iota(order.begin(), order.end(), 0);
  random_source(seed).shuffle(order);

  std::vector<attention_contents> contents;
  for (std::int32_t layer = 0; layer < num_layers; ++layer) {
    contents.emplace_back(layer_case(length, kv_type, layer, seed));
  }
  std::vector<attention_output> outputs(num_layers);
  attention_plan plan;
  std::int32_t done = 0;
  std::size_t next_block = 0;
  std::vector<std::int32_t> table;
  for (const std::int32_t chunk : chunks) {
    // Copy on write at every chunk: the tail block moves to a new one, and the old one is left to others.
    if (done % block_size != 0) {
      const block_copy copy{block_id{table.back()}, block_id{order[next_block++]}};
      require_ok(engine.copy_blocks({&copy, 1}), "copy_blocks");
      table.back() = to_index(copy.dst);
    }
    while (static_cast<std::int64_t>(table.size()) < blocks_for(done + chunk, block_size)) {
      table.push_back(order[next_block++]);
    }
    step_batch batch;
    batch.query_start_loc = {0, chunk};
    batch.seq_lens = {done + chunk};
    batch.block_tables = table;
    batch.block_tables.push_back(padding_entry);
    batch.block_table_stride = static_cast<std::int64_t>(batch.block_tables.size());
    for (std::int32_t t = 0; t < chunk; ++t) {
      const std::int32_t position = done + t;
      batch.slot_mapping.push_back(static_cast<std::int64_t>(table[static_cast<std::size_t>(position / block_size)]) *
                                       block_size +
                                   position % block_size);
    }
    const device_step_view on_device = engine.upload(batch);
    const attention_spec spec{.num_q_heads = 4,
                              .num_kv_heads = 2,
                              .qk_head_dim = 32,
                              .v_head_dim = 32,
                              .block_size = block_size,
                              .k_code = {kv_type},
                              .v_code = {kv_type}};
    where.plan_attention(plan, spec, batch.view(), num_blocks);

    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
      const attention_contents::sequence& seq = contents[static_cast<std::size_t>(layer)].seqs[0];
      // One fused projection: [chunk, 4 q heads + 2 k heads + 2 v heads, 32].
      std::vector<float> fused;
      for (std::int32_t t = done; t < done + chunk; ++t) {
        const auto take = [&](const std::vector<float>& from, std::ptrdiff_t width) {
          fused.insert(fused.end(), from.begin() + t * width, from.begin() + (t + 1) * width);
        };
        take(seq.q, 128);
        take(seq.k, 64);
        take(seq.v, 64);
      }
      device_bytes qkv(where, bytes_of(fused), sizeof(float));
      device_bytes out(where, bytes_of(std::vector<float>(static_cast<std::size_t>(chunk * 128))), sizeof(float));
      device_bytes lse(where, bytes_of(std::vector<float>(static_cast<std::size_t>(chunk * 4))), sizeof(float));
      const auto* base = reinterpret_cast<const float*>(qkv.data());
      const const_tensor_view q{base, dtype::f32, chunk, 4, 32, 256, 32};
      const const_tensor_view k{base + 128, dtype::f32, chunk, 2, 32, 256, 32};
      const const_tensor_view v{base + 192, dtype::f32, chunk, 2, 32, 256, 32};
      require_ok(engine.append(layer, k, v, on_device.slot_mapping), "append");
      attention_params params;
      params.q = q;
      params.out = dense_view<void>(out.data(), dtype::f32, chunk, 4, 32);
      params.lse = reinterpret_cast<float*>(lse.data());
      params.kv = engine.layers()[static_cast<std::size_t>(layer)];
      params.batch = on_device;
      params.scale = layer_case(length, kv_type, layer, seed).used_scale();
      require_ok(where.attention(plan, params), "attention");
      const auto append_floats = [](std::vector<float>& to, const device_bytes& from) {
        const std::vector<std::byte> bytes = from.read();
        const std::size_t old = to.size();
        to.resize(old + bytes.size() / sizeof(float));
        std::memcpy(to.data() + old, bytes.data(), bytes.size());
      };
      attention_output& output = outputs[static_cast<std::size_t>(layer)];
      append_floats(output.out, out);
      append_floats(output.lse, lse);
    }
    done += chunk;
  }
  return outputs;
}

}  // namespace

TEST_CASE("a sequence fed through an engine in chunks, with copies on the way, agrees with the oracle") {
  std::size_t turn = 0;
  for (const layout_kind layout : {layout_kind::hnd, layout_kind::nhd, layout_kind::x_split}) {
    for (const dtype kv_type : dtypes) {
      const std::vector<std::int32_t> chunks{17, 1, 1, 30, 8, 1};
      std::vector<attention_case> cases;
      std::vector<attention_contents> contents;
      for (std::int32_t layer = 0; layer < num_layers; ++layer) {
        cases.push_back(layer_case(58, kv_type, layer, turn));
        contents.emplace_back(cases.back());
      }
      for (const tested_backend* tested : one_per_family(turn)) {
        const std::vector<attention_output> got = feed(*tested, layout, kv_type, chunks, turn);
        for (std::size_t layer = 0; layer < num_layers; ++layer) {
          const std::string problem =
              attention_expectation(cases[layer], contents[layer]).problem_of(got[layer], tested->numbers);
          CHECK_MESSAGE(problem.empty(), tested->name, ": ", problem, " [", describe(cases[layer]), "]");
        }
      }
      ++turn;
    }
  }
}

TEST_CASE("engines in several threads on one backend give the bits of one thread") {
  const std::vector<std::int32_t> chunks{40, 1, 1, 1, 20};
  for (const tested_backend& tested : all_backends()) {
    constexpr std::size_t num_threads = 3;
    std::vector<std::vector<attention_output>> expected;
    for (std::size_t n = 0; n < num_threads; ++n) {
      expected.push_back(feed(tested, layout_kind::hnd, dtype::bf16, chunks, n));
    }
    for (int round = 0; round < 3; ++round) {
      std::vector<std::vector<attention_output>> got(num_threads);
      std::vector<std::thread> threads;
      for (std::size_t n = 0; n < num_threads; ++n) {
        threads.emplace_back([&, n] { got[n] = feed(tested, layout_kind::hnd, dtype::bf16, chunks, n); });
      }
      for (std::thread& thread : threads) thread.join();
      for (std::size_t n = 0; n < num_threads; ++n) {
        for (std::size_t layer = 0; layer < num_layers; ++layer) {
          const std::string difference = bit_difference(expected[n][layer], got[n][layer]);
          CHECK_MESSAGE(difference.empty(), tested.name, ", thread ", n, ": ", difference);
        }
      }
    }
  }
}

TEST_CASE("random whole steps leave equal caches and results within the bound on two instruction sets") {
  const std::vector<const tested_backend*> families = one_per_family(0);
  if (families.size() < 2) return;  // nothing to compare
  steps_tally tally;
  const std::string problems =
      run_whole_steps(*families.front(), *families.back(), hash_of(test_seed(), 16), 60, tally);
  CHECK_MESSAGE(problems.empty(), problems, seed_note());
  MESSAGE(families.front()->name, " and ", families.back()->name, ", ", seed_note(), ", ", tally.text());
  // The mix is worth its name.
  CHECK(tally.num_prompts > 0);
  CHECK(tally.num_chunks > 0);
  CHECK(tally.num_decodes > 0);
  CHECK(tally.num_rejected > 0);
  CHECK(tally.num_rollbacks > 0);
  CHECK(tally.num_copies > 0);
  CHECK(tally.num_blocks_out > 0);
  CHECK(tally.num_blocks_in > 0);
}

TEST_CASE("random whole steps notice flaws of the cache calls and of attention") {
  const tested_backend& real = all_backends().front();
  if (!real.is_host) return;  // the flawed backend reads device pointers on the host
  std::vector<flaw> planted(std::begin(cache_flaws), std::end(cache_flaws));
  for (const flaw value :
       {flaw::none, flaw::mask_one_too_far, flaw::truncates_output, flaw::reads_next_block_in_pool}) {
    planted.push_back(value);
  }
  for (const flaw value : planted) {
    const tested_backend flawed = make_flawed_backend(real.get(), value);
    steps_tally tally;
    std::string problem;
    for (const step_shape& shape : step_shapes(test_seed(), 5)) {
      if (problem.empty())
        problem = run_whole_steps(real, flawed, shape, test_seed(), value == flaw::none ? 2 : 10, tally);
    }
    CHECK_MESSAGE(problem.empty() == (value == flaw::none), flawed.name, ": ", problem, tally.text());
  }
}
