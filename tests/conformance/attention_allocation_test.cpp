// SPDX-License-Identifier: Apache-2.0
// Per-layer calls allocate nothing, and planning that runs out of memory says so and keeps the old plan.
#include <doctest/doctest.h>

#include <bifolio/cpu.hpp>
#include <memory>
#include <optional>

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
