// SPDX-License-Identifier: Apache-2.0
/// Every refusal with the memory for its sentence failing: its code stays.

#include <doctest/doctest.h>

#include <bifolio/backend.hpp>
#include <bifolio/cache_engine.hpp>
#include <bifolio/cpu.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/scheduler.hpp>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/failing_memory.hpp"

namespace bifolio::test {
namespace {

/// The code of what `call` throws with its N-th allocation failing, once alone and once with all that follow; `ok` if
/// these differ, if there is no sentence, or if anything but `error` is thrown.
template <class Call>
errc code_without_memory(Call call) {
  errc first = errc::ok;
  for (const bool for_good : {false, true}) {
    for (int nth = 1;; ++nth) {
      errc code = errc::ok;
      num_failures = 0;
      fails_for_good = for_good;
      calls_until_failure = nth;
      try {
        call();
      } catch (const error& refused) {
        calls_until_failure = 0;
        code = refused.code();
        if (std::string(refused.what()).find(to_string(code)) == std::string::npos && num_failures > 0) return errc::ok;
      } catch (...) {
      }
      calls_until_failure = 0;
      if (first == errc::ok) first = code;
      if (code == errc::ok || code != first) return errc::ok;
      if (num_failures == 0) break;
    }
  }
  return first;
}

TEST_CASE("a refusal keeps its code when there is no memory for its sentence") {
  kv_cache_manager manager({.block_size = 2, .num_blocks = 20000, .memory = &memory});
  const seq_id open = manager.allocate(7).seq;
  const seq_id gone = manager.allocate(7).seq;
  manager.free(gone);
  step_batch batch;
  step_plan plan;
  plan.seqs = {{.seq = open, .query_len = 1, .seq_len = 9}};
  kv_cache_config bad_config{.num_blocks = 9, .watermark = 3, .memory = &memory};
  CHECK(code_without_memory([&] { kv_cache_manager made(bad_config); }) == errc::invalid_argument);
  CHECK(code_without_memory([&] { manager.free(gone); }) == errc::not_found);
  CHECK(code_without_memory([&] { (void)manager.append(open, -1); }) == errc::invalid_argument);
  CHECK(code_without_memory([&] { (void)manager.block_at(open, 100); }) == errc::out_of_range);
  CHECK(code_without_memory([&] { manager.build(batch, plan); }) == errc::out_of_range);
  CHECK(code_without_memory([&] { manager.retire(fence_id{7}); }) == errc::invalid_argument);
  block_pool pool(8, memory);
  CHECK(code_without_memory([&] { pool.release(block_id{3}, reuse_order::last); }) == errc::not_found);
  CHECK(code_without_memory([&] { pool.release(block_id{9}, reuse_order::last); }) == errc::invalid_argument);

  scheduler plans(manager, {.max_running = 4});
  request wrong;
  wrong.prompt = {token_id{1}};
  wrong.beam_width = wrong.num_samples = 2;
  CHECK(code_without_memory([&] { (void)plans.submit(std::move(wrong)); }) == errc::invalid_argument);
  CHECK(code_without_memory([&] { plans.propose(request_id{99}, 0, {}); }) == errc::not_found);
  CHECK(code_without_memory([&] { (void)plans.commit(plan, {}); }) == errc::failed_precondition);

  CHECK(code_without_memory([] { (void)parse_dtype("a name of many letters"); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)parse_device("a name of many letters"); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)parse_layout("a name of many letters"); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)parse_executor("a name of many letters"); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)parse_isa("a name of many letters"); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)parse_step_plan("no JSON, and longer than any small buffer"); }) ==
        errc::invalid_argument);
  CHECK(code_without_memory([] { (void)make_executor(executor_kind::serial, -7); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)make_backend({device_type::cpu, 3}); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)make_backend({static_cast<device_type>(9), 3}); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)make_layout(layout_kind::hnd, dtype::f32, 1 << 30, 1 << 30, 1 << 30); }) ==
        errc::invalid_argument);
  CHECK(code_without_memory([] { (void)default_host_memory().allocate(std::size_t{1} << 62, 64); }) ==
        errc::out_of_memory);

  const std::unique_ptr<backend> cpu = make_backend();
  attention_plan attention;
  attention_spec spec{.num_q_heads = 3, .num_kv_heads = 2, .qk_head_dim = 8, .v_head_dim = 8, .block_size = 16};
  CHECK(code_without_memory([&] { cpu->plan_attention(attention, spec, host_step_view{}, 9); }) ==
        errc::invalid_argument);
  CHECK(code_without_memory([&] {
          const std::optional<error> problem = find_problem(attention, {});
          if (problem.has_value()) throw error(*problem);
        }) != errc::ok);
  const cache_engine_config engine;
  CHECK(code_without_memory([&] { cache_engine made(*cpu, engine); }) == errc::invalid_argument);
}

}  // namespace
}  // namespace bifolio::test
