// SPDX-License-Identifier: Apache-2.0
// Per-layer calls allocate nothing, and planning that runs out of memory says so and keeps the old plan.
#include <doctest/doctest.h>

#include <bifolio/cpu.hpp>
#include <bifolio/model_cache.hpp>
#include <memory>
#include <optional>
#include <utility>

#include "conformance/attention_tables.hpp"
#include "support/allocation_count.hpp"
#include "support/device_bytes.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

attention_case busy_case() {
  return {.what = "busy step",
          .head_dim = 32,
          .kv_type = dtype::bf16,
          .seqs = {{1, 1500}, {60, 90}, {1, 20}, {1, 700}, {300, 300}},
          .soft_cap = 10,
          .alibi = true,
          .sinks = true};
}

// CPU backends over a resource of the test's own.
struct cpu_over {
  cpu_over(cpu_isa isa, executor_kind kind, memory_resource& memory) {
    backend_options options;
    options.isa = isa;
    options.executor_choice = kind;
    options.num_threads = kind == executor_kind::serial ? 0 : 2;
    options.host_memory = &memory;
    tested.name = std::string(to_string(isa)) + ", " + std::string(to_string(kind));
    tested.owned = make_backend({}, options);
  }
  tested_backend tested;
};

}  // namespace

TEST_CASE("attention, merge, append, gather and copies allocate nothing") {
  const attention_case c = busy_case();
  const attention_contents contents(c);
  for (const cpu_isa isa : supported_isas()) {
    for (const executor_kind kind :
         {executor_kind::threads, executor_kind::openmp, executor_kind::tbb, executor_kind::serial}) {
      counting_memory_resource counting(default_host_memory());
      std::unique_ptr<cpu_over> cpu;
      try {
        cpu = std::make_unique<cpu_over>(isa, kind, counting);
      } catch (const error& refusal) {
        REQUIRE(refusal.code() == errc::unsupported);  // this executor was left out of the build
        continue;
      }
      backend& where = cpu->tested.get();
      attention_call call(cpu->tested, c, contents);
      call.plan();

      // K and V rows to append to and gather from the same cache, at the slots of its first blocks.
      constexpr std::int64_t num_rows = 40;
      const kv_cache_view& kv = call.params.kv;
      const std::size_t row_bytes = static_cast<std::size_t>(num_rows * 2 * c.head_dim) * sizeof(float);
      device_bytes k(where, std::vector<std::byte>(row_bytes), 4);
      device_bytes v(where, std::vector<std::byte>(row_bytes), 4);
      std::vector<std::int64_t> slots;
      for (std::int64_t n = 0; n < num_rows; ++n) slots.push_back(n);
      device_bytes slots_on_device(where, bytes_of(slots), 8);
      const auto* mapping = reinterpret_cast<const std::int64_t*>(slots_on_device.data());
      const gather_params gather{kv, dense_view<void>(k.data(), dtype::f32, num_rows, 2, c.head_dim),
                                 dense_view<void>(v.data(), dtype::f32, num_rows, 2, c.head_dim), mapping};
      const append_params append{kv, as_const(gather.k), as_const(gather.v), mapping};
      const block_copy copy{block_id{0}, block_id{1}};
      const block_copy swap_out{block_id{0}, block_id{0}};
      device_bytes other_cache(where, std::vector<std::byte>(static_cast<std::size_t>(kv.layout.block_bytes())), 64);
      const kv_cache_view other{other_cache.data(), other_cache.data() + kv.layout.block_bytes() / 2, 1, kv.layout};
      merge_params merge;
      merge.a = merge.b = {as_const(call.params.out), call.params.lse};
      merge.out = call.params.out;
      merge.lse = call.params.lse;

      const auto one_layer = [&]() noexcept {
        errc codes[] = {where.append(append),
                        where.gather(gather),
                        where.attention(call.planned, call.params),
                        where.merge_states(merge),
                        where.copy_blocks({&kv, 1}, {&copy, 1}),
                        where.convert_blocks(kv, other, {&swap_out, 1}),
                        where.swap_blocks({&kv, 1}, {&other, 1}, {&swap_out, 1})};
        int failed = 0;
        for (const errc code : codes) failed += code == errc::ok ? 0 : 1;
        return failed;
      };
      CHECK(one_layer() == 0);  // threads and arenas start here
      const std::int64_t news = num_allocations();
      const std::int64_t allocations = counting.num_allocations();
      int failed = 0;
      for (int layer = 0; layer < 20; ++layer) failed += one_layer();
      const std::int64_t more_news = num_allocations() - news;
      CHECK(failed == 0);
      CHECK_MESSAGE(more_news == 0, cpu->tested.name);
      CHECK_MESSAGE(counting.num_allocations() == allocations, cpu->tested.name);
    }
  }
}

TEST_CASE("planning the same shape of step again allocates nothing") {
  const attention_case c = busy_case();
  const attention_contents contents(c);
  for (const cpu_isa isa : supported_isas()) {
    counting_memory_resource counting(default_host_memory());
    cpu_over cpu(isa, executor_kind::serial, counting);
    attention_call call(cpu.tested, c, contents);
    call.plan();
    const std::int64_t allocations = counting.num_allocations();
    const std::int64_t news = num_allocations();
    call.plan();
    const std::int64_t more_news = num_allocations() - news;
    CHECK_MESSAGE(more_news == 0, cpu.tested.name);
    CHECK(counting.num_allocations() == allocations);
  }
}

TEST_CASE("planning with any one allocation failing reports out_of_memory and keeps the old plan") {
  const attention_case big = busy_case();
  attention_case small = big;
  small.seqs = {{1, 30}, {4, 9}};
  const attention_contents big_contents(big);
  const attention_contents small_contents(small);
  failing_memory_resource failing(default_host_memory());
  cpu_over cpu(default_isa(), executor_kind::serial, failing);
  for (const bool old_plan : {false, true}) {
    for (const bool of_resource : {false, true}) {
      attention_call call(cpu.tested, small, small_contents);
      attention_call larger(cpu.tested, big, big_contents);
      attention_output expected;
      std::string problem;
      if (old_plan) {
        call.plan();
        REQUIRE(call.run() == errc::ok);
        expected = call.read(problem);
      }
      int failures = 0;
      for (std::int64_t nth = 1; nth < 200; ++nth) {
        errc code = errc::ok;
        failing.fail_at(of_resource ? nth : 0);
        try {
          const failing_new failure(of_resource ? 0 : nth);
          cpu.tested.get().plan_attention(call.planned, larger.spec, larger.host_batch, larger.num_blocks);
        } catch (const error& refusal) {
          code = refusal.code();
        }
        failing.fail_at(0);
        if (code == errc::ok) break;
        ++failures;
        CHECK(to_string(code) == to_string(errc::out_of_memory));
        if (!old_plan) {
          CHECK(call.planned.state == nullptr);
          continue;
        }
        call.reset_outputs();
        REQUIRE(call.run() == errc::ok);
        CHECK(bit_difference(expected, call.read(problem)).empty());
      }
      CAPTURE(old_plan);
      CAPTURE(of_resource);
      CHECK(failures < 199);
      CHECK(
          (failures > 0 || (old_plan && !of_resource)));  // an old plan's own bookkeeping is kept, not allocated again
      // The larger plan is there now and serves the larger call.
      larger.planned = std::move(call.planned);
      CHECK(larger.run() == errc::ok);
      MESSAGE("failed in turn: ", failures);
    }
  }
}

namespace {

constexpr std::int32_t step_heads = 2, step_dims = 8, step_seqs = 256;

/// A cache of many short sequences, each computed up to its 17th token of blocks of 32.
struct decoding {
  std::unique_ptr<backend> where = make_backend({}, {.executor_choice = executor_kind::serial});
  model_cache cache{*where, config()};
  std::vector<seq_id> seqs;
  std::vector<float> rows = std::vector<float>(std::size_t{step_seqs} * 17 * step_heads * step_dims, 0.5f);
  std::vector<float> out = rows;

  static model_cache_config config() {
    model_cache_config config;
    config.num_layers = 3;
    config.attention.num_q_heads = config.attention.num_kv_heads = step_heads;
    config.attention.qk_head_dim = step_dims;
    config.cache = {.block_size = 32, .num_blocks = 2 * step_seqs, .max_sequences = 2 * step_seqs};
    return config;
  }

  void run_layers(model_step& step) {
    const std::int64_t num_tokens = step.num_tokens();
    const auto in = dense_view(std::as_const(rows).data(), num_tokens, step_heads, step_dims);
    for (std::int32_t layer = 0; layer < 3; ++layer) {
      require_ok(step.attend(layer, in, in, in, dense_view(out.data(), num_tokens, step_heads, step_dims)), "attend");
    }
  }
};

}  // namespace

TEST_CASE("a step of a model's cache allocates nothing, from rows and from a scheduler") {
  decoding each;
  const std::vector<token_id> prompt(16, token_id{3});
  const token_id next{4};
  std::vector<step_row> rows;
  for (std::int32_t i = 0; i < step_seqs; ++i) rows.push_back({each.cache.open(prompt).seq, prompt});
  std::int64_t before = 0;
  for (std::int32_t turn = 0; turn < 12; ++turn) {
    if (turn == 2) before = num_allocations();  // the prompts and the first decode made room
    model_step step = each.cache.begin_step(rows);
    each.run_layers(step);
    step.commit();
    for (step_row& row : rows) row.tokens = {&next, 1};
  }
  CHECK(num_allocations() == before);
  CHECK(each.cache.manager().num_committed(rows[0].seq) == 16 + 11);
  for (const step_row& row : rows) each.cache.free(row.seq);

  scheduler requests(each.cache.manager(), {.max_tokens_per_step = 16 * step_seqs, .max_running = step_seqs});
  for (std::int32_t i = 0; i < step_seqs; ++i) {
    REQUIRE(requests.submit({.prompt = prompt, .max_new_tokens = 14}).status == alloc_status::ok);
  }
  const std::vector<sampled_token> sampled(step_seqs, sampled_token{token_id{5}});
  for (std::int32_t turn = 0; turn < 12; ++turn) {
    if (turn == 2) before = num_allocations();
    model_step step = each.cache.begin_step(requests);
    REQUIRE(step.num_tokens() == (turn == 0 ? 16 * step_seqs : step_seqs));
    each.run_layers(step);
    CHECK(step.commit(sampled).empty());
  }
  CHECK(num_allocations() == before);
}

TEST_CASE("a step that finds no host memory leaves its sequences as they were, and is begun again") {
  const token_id next{4};
  std::int64_t num_failures = 0;
  for (const bool scheduled : {false, true}) {
    for (std::int64_t nth = 1;; ++nth) {
      decoding each;
      const std::vector<token_id> prompt(31, token_id{3});
      scheduler requests(each.cache.manager(), {.max_running = step_seqs});
      const open_result a = each.cache.open(prompt);
      const allocate_result b = each.cache.fork(a.seq);
      REQUIRE(requests.submit({.prompt = prompt, .max_new_tokens = 4}).status == alloc_status::ok);
      const std::vector<step_row> rows{{a.seq, prompt}, {b.seq, {&next, 1}}};
      model_step step;
      bool happened = false;
      try {
        const failing_new failing(nth);
        step = scheduled ? each.cache.begin_step(requests) : each.cache.begin_step(rows);
        happened = failing.happened();
      } catch (const error& problem) {
        CHECK(problem.code() == errc::out_of_memory);
        happened = true;
        ++num_failures;
        CHECK(each.cache.manager().num_tokens(a.seq) == 31);
        CHECK(each.cache.manager().num_tokens(b.seq) == 0);
        CHECK(each.cache.manager().check() == "");
        step = scheduled ? each.cache.begin_step(requests) : each.cache.begin_step(rows);
      }
      REQUIRE(step);
      CHECK(step.num_tokens() == (scheduled ? 31 : 32));
      each.run_layers(step);
      if (scheduled) {
        const sampled_token one{token_id{5}};
        CHECK(step.commit({&one, 1}).empty());
        CHECK(requests.check() == "");
      } else {
        step.commit();
      }
      CHECK(each.cache.manager().check() == "");
      if (!happened) break;
    }
  }
  CHECK(num_failures > 10);
}
