// SPDX-License-Identifier: Apache-2.0
// No cache call allocates, nor does the engine around it; and its making survives every failing operator new. An
// executable of its own: it replaces operator new, which a thread sanitizer wants for itself.
#include <doctest/doctest.h>

#include <array>
#include <bifolio/backend.hpp>
#include <bifolio/cache_engine.hpp>
#include <bifolio/error.hpp>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "support/allocation_count.hpp"
#include "support/cache_pair.hpp"
#include "support/random.hpp"

namespace {

using namespace bifolio;
using namespace bifolio::test;

std::unique_ptr<backend> open(executor_kind kind, std::int32_t threads) {
  backend_options options;
  options.executor_choice = kind;
  options.num_threads = threads;
  return make_backend({}, options);
}

TEST_CASE("no cache call allocates, small or large") {
  for (const executor_kind kind : {executor_kind::serial, executor_kind::threads, executor_kind::openmp}) {
    std::unique_ptr<backend> where;
    try {
      where = open(kind, 2);
    } catch (const error&) {
      continue;  // an executor that was left out of the build
    }
    random_source random(5);
    cache_pair cache(*where, arrangement::hnd, dtype::f16, 8, 64, 16, 40, random);
    cache_pair other(*where, arrangement::hnd, dtype::f16, 8, 64, 16, 40, random);
    cache_pair turned(*where, arrangement::x_split, dtype::f32, 8, 64, 16, 40, random);
    rows_pair rows(*where, row_order::fused, dtype::f32, 600, 8, 64, random);
    rows_pair back(*where, row_order::dense, dtype::bf16, 600, 8, 64, random);
    std::vector<std::int64_t> slots;
    for (std::int64_t i = 0; i < 600; ++i) slots.push_back(639 - i);
    std::vector<block_copy> pairs;
    for (std::int32_t i = 0; i < 39; ++i) pairs.push_back({block_id{i}, block_id{i + 1}});
    const std::array<kv_cache_view, 1> from{cache.device()};
    const std::array<kv_cache_view, 1> to{other.device()};
    const auto all_calls = [&](std::int64_t num_tokens, std::size_t num_pairs) {
      append_params append{cache.device(), as_const(rows.device_k()), as_const(rows.device_v()), slots.data()};
      append.k.num_tokens = append.v.num_tokens = num_tokens;
      gather_params gather{cache.device(), back.device_k(), back.device_v(), slots.data()};
      gather.k.num_tokens = gather.v.num_tokens = num_tokens;
      const std::span<const block_copy> some(pairs.data(), num_pairs);
      bool ok = where->append(append) == errc::ok && where->gather(gather) == errc::ok;
      ok = ok && where->copy_blocks(from, some) == errc::ok && where->swap_blocks(from, to, some) == errc::ok;
      ok = ok && where->convert_blocks(from[0], turned.device(), some) == errc::ok;
      append.k.num_heads = 3;
      return ok && where->append(append) == errc::invalid_argument;
    };
    REQUIRE(all_calls(600, 39));  // the executor's threads are made by the first call
    const std::int64_t before = num_allocations();
    const bool small = all_calls(1, 1);
    const bool large = all_calls(600, 39);
    const std::int64_t after = num_allocations();
    CHECK(small);
    CHECK(large);
    CHECK(after == before);
  }
}

TEST_CASE("no call of an engine allocates, on the CPU not even an upload") {
  const auto where = open(executor_kind::serial, 0);
  const kv_layout layout = make_layout(layout_kind::nhd, dtype::bf16, 2, 16, 4);
  cache_engine engine(*where, {4, 10, layout});
  cache_engine other(*where, {4, 10, layout});
  for (cache_engine* one : {&engine, &other}) {
    for (const kv_cache_view& layer : one->layers())
      std::memset(layer.k, 0, static_cast<std::size_t>(10 * layout.block_bytes()));
  }
  const std::vector<float> rows(2 * 2 * 16, 1.0f);
  const auto view = dense_view<const void>(rows.data(), dtype::f32, 2, 2, 16);
  step_batch batch;
  batch.query_start_loc = {0, 2};
  batch.seq_lens = {2};
  batch.block_tables = {3};
  batch.block_table_stride = 1;
  batch.slot_mapping = {12, 13};
  const std::vector<block_copy> pairs{{block_id{3}, block_id{4}}, {block_id{4}, block_id{5}}};
  const std::vector<block_copy> wrong{{block_id{3}, block_id{10}}};

  const std::int64_t before = num_allocations();
  const device_step_view step = engine.upload(batch);
  const bool ok = engine.append(2, view, view, step.slot_mapping) == errc::ok &&
                  engine.copy_blocks(pairs) == errc::ok && engine.swap_blocks_to(other, pairs) == errc::ok &&
                  engine.convert_blocks_to(other, pairs) == errc::ok;
  const bool refused = engine.append(9, view, view, step.slot_mapping) == errc::out_of_range &&
                       engine.copy_blocks(wrong) == errc::out_of_range &&
                       engine.swap_blocks_to(other, wrong) == errc::out_of_range;
  const std::int64_t after = num_allocations();
  CHECK(ok);
  CHECK(refused);
  CHECK(after == before);
}

TEST_CASE("whichever operator new fails while an engine is made, the error is out_of_memory and nothing is kept") {
  const auto where = open(executor_kind::serial, 0);
  counting_memory_resource counting(default_host_memory());
  const cache_engine_config config{5, 7, make_layout(layout_kind::hnd, dtype::f16, 2, 16, 4)};
  bool happened = true;
  std::int64_t nth = 0;
  while (happened) {
    std::optional<errc> code;
    {
      const failing_new fault(++nth);
      try {
        const cache_engine engine(*where, config, &counting);
      } catch (const error& problem) {
        code = problem.code();
      }
      happened = fault.happened();
    }
    CHECK(code.has_value() == happened);
    if (code.has_value()) CHECK(*code == errc::out_of_memory);
    CHECK(counting.num_live() == 0);
    REQUIRE(nth < 100);
  }
  CHECK(nth > 2);
}

}  // namespace
