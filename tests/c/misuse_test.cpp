// SPDX-License-Identifier: Apache-2.0
// The C interface under misuse: every function with null, with handles that are stale, foreign or made up, and with
// structs of a wrong size. A refusal is a negative status with a sentence, and nothing crashes.
#include <bifolio/c/bifolio.h>
#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "c/structs.hpp"
#include "support/random.hpp"

using namespace bifolio::test;

namespace {

/// One open handle of each kind.
struct everything {
  bifolio_backend backend = nullptr;
  bifolio_event event = nullptr;
  bifolio_pool pool = nullptr;
  bifolio_manager manager = nullptr;
  bifolio_batch batch = nullptr;
  bifolio_engine engine = nullptr;
  bifolio_plan plan = nullptr;
  bifolio_scheduler scheduler = nullptr;
  bifolio_cache cache = nullptr;
  bifolio_step step = nullptr;
  bifolio_seq seq = 0;

  everything() {
    auto options = made(bifolio_backend_options_init);
    options.executor = "serial";
    REQUIRE(bifolio_backend_create("cpu", &options, &backend) == BIFOLIO_OK);
    REQUIRE(bifolio_event_create(backend, &event) == BIFOLIO_OK);
    REQUIRE(bifolio_pool_create(8, &pool) == BIFOLIO_OK);
    REQUIRE(bifolio_batch_create(&batch) == BIFOLIO_OK);
    REQUIRE(bifolio_plan_create(&plan) == BIFOLIO_OK);
    auto spec = made(bifolio_attention_spec_init);
    spec.num_q_heads = spec.num_kv_heads = 1;
    spec.qk_head_dim = 4;
    auto logic = made(bifolio_manager_config_init);
    logic.num_blocks = 32;
    logic.num_host_blocks = 8;
    logic.prefix_caching = 1;
    auto config = made(bifolio_cache_config_init);
    config.num_layers = 2;
    config.attention = &spec;
    config.manager = &logic;
    REQUIRE(bifolio_cache_create(backend, &config, &cache) == BIFOLIO_OK);
    REQUIRE(bifolio_cache_manager(cache, &manager) == BIFOLIO_OK);
    REQUIRE(bifolio_cache_engine(cache, &engine) == BIFOLIO_OK);
    auto requests = made(bifolio_scheduler_config_init);
    REQUIRE(bifolio_scheduler_create(manager, &requests, &scheduler) == BIFOLIO_OK);
    const bifolio_token tokens[] = {1, 2, 3};
    auto prompt = made(bifolio_prompt_init);
    prompt.tokens = tokens;
    prompt.num_tokens = 3;
    bifolio_open_result opened{};
    REQUIRE(bifolio_cache_open(cache, &prompt, &opened, nullptr) == BIFOLIO_OK);
    seq = opened.seq;
    const bifolio_step_row row{seq, tokens, 3};
    REQUIRE(bifolio_step_begin(cache, &row, 1, nullptr, &step) == BIFOLIO_OK);
  }
  everything(const everything&) = delete;
  everything& operator=(const everything&) = delete;

  /// Destroys all of it, in an order of its own for each seed.
  void destroy(std::uint64_t seed) {
    std::vector<std::function<bifolio_status()>> calls{
        [&] { return bifolio_backend_destroy(backend); }, [&] { return bifolio_event_destroy(event); },
        [&] { return bifolio_pool_destroy(pool); },       [&] { return bifolio_manager_destroy(manager); },
        [&] { return bifolio_batch_destroy(batch); },     [&] { return bifolio_engine_destroy(engine); },
        [&] { return bifolio_plan_destroy(plan); },       [&] { return bifolio_scheduler_destroy(scheduler); },
        [&] { return bifolio_cache_destroy(cache); },     [&] { return bifolio_step_destroy(step); }};
    random_source(seed).shuffle(calls);
    for (const auto& call : calls) CHECK(call() == BIFOLIO_OK);
  }
};

/// A call of each function. Handles come from `h`; pointers are null where `null` says so, else good.
struct probe {
  std::string name;
  std::function<bifolio_status(const everything& h, bool null)> call;
  bool null_is_fine = false;  ///< null pointers are documented, or there are none
};

template <class T>
T* unless(bool null, T& value) {
  return null ? nullptr : &value;
}

/// Room for what calls write, and arguments that are right.
struct arguments {
  bifolio_backend_options options = made(bifolio_backend_options_init);
  bifolio_attention_spec spec = made(bifolio_attention_spec_init);
  bifolio_attention_params params = made(bifolio_attention_params_init);
  bifolio_rotate_params rotate_params = made(bifolio_rotate_params_init);
  bifolio_engine_config engine_config = made(bifolio_engine_config_init);
  bifolio_manager_config manager_config = made(bifolio_manager_config_init);
  bifolio_prompt prompt = made(bifolio_prompt_init);
  bifolio_scheduler_config scheduler_config = made(bifolio_scheduler_config_init);
  bifolio_request request = made(bifolio_request_init);
  bifolio_cache_config cache_config = made(bifolio_cache_config_init);
  bifolio_cache_stats cache_stats{};
  bifolio_prefix_stats prefix_stats{};
  bifolio_scheduler_stats scheduler_stats{};
  bifolio_step_view view{};
  bifolio_batch_view batch{};
  bifolio_host_batch_view host_batch{};
  bifolio_open_result opened{};
  bifolio_block_copy copy{};
  const bifolio_block_copy* copies = nullptr;
  const bifolio_cache_event* events = nullptr;
  const bifolio_token* tokens = nullptr;
  const char* text = nullptr;
  void* pointer = nullptr;
  std::size_t count = 0;
  std::int64_t number = 0;
  std::int32_t flag = 0;
  std::uint32_t refs = 0;
  std::uint64_t digest = 0;
  bifolio_seq seq = 0;
  bifolio_block block = 0;
  float data[16] = {};
  char bytes[4] = {};
  bifolio_tensor tensor = bifolio_dense_tensor(data, BIFOLIO_F32, 3, 1, 4);
  bifolio_token prompt_tokens[3] = {1, 2, 3};

  arguments() {
    cache_stats.size = sizeof cache_stats;
    prefix_stats.size = sizeof prefix_stats;
    scheduler_stats.size = sizeof scheduler_stats;
    view.size = sizeof view;
    prompt.tokens = prompt_tokens;
    prompt.num_tokens = 3;
    request.prompt = &prompt;
  }
};

std::vector<probe> probes(arguments& a) {
  return {
      {"backend_description",
       [&](auto& h, bool n) { return bifolio_backend_description(h.backend, unless(n, a.text)); }},
      {"backend_health", [](auto& h, bool) { return bifolio_backend_health(h.backend); }, true},
      {"backend_memory_budget",
       [&](auto& h, bool n) { return bifolio_backend_memory_budget(h.backend, 0.1, 0, unless(n, a.number)); }},
      {"backend_allocate",
       [&](auto& h, bool n) {
         const bifolio_status status = bifolio_backend_allocate(h.backend, 4, unless(n, a.pointer));
         if (status == BIFOLIO_OK) CHECK(bifolio_backend_free(h.backend, a.pointer, 4) == BIFOLIO_OK);
         return status;
       }},
      {"backend_free", [](auto& h, bool) { return bifolio_backend_free(h.backend, nullptr, 0); }, true},
      {"backend_upload",
       [&](auto& h, bool n) { return bifolio_backend_upload(h.backend, unless(n, a.bytes), "abc", 4, nullptr); }},
      {"backend_download",
       [&](auto& h, bool n) { return bifolio_backend_download(h.backend, a.bytes, n ? nullptr : "abc", 4, nullptr); }},
      {"backend_synchronize", [](auto& h, bool) { return bifolio_backend_synchronize(h.backend, nullptr); }, true},
      {"event_record", [](auto& h, bool) { return bifolio_event_record(h.event, h.backend, nullptr); }, true},
      {"event_wait", [](auto& h, bool) { return bifolio_event_wait(h.event, h.backend, nullptr); }, true},
      {"event_query", [&](auto& h, bool n) { return bifolio_event_query(h.event, unless(n, a.flag)); }},
      {"event_synchronize", [](auto& h, bool) { return bifolio_event_synchronize(h.event); }, true},
      {"event_create",
       [&](auto& h, bool n) {
         bifolio_event event = nullptr;
         const bifolio_status status = bifolio_event_create(h.backend, unless(n, event));
         CHECK(bifolio_event_destroy(event) == BIFOLIO_OK);
         return status;
       }},
      {"plan_attention",
       [&](auto& h, bool n) {
         auto spec = a.spec;
         spec.num_q_heads = spec.num_kv_heads = spec.qk_head_dim = spec.block_size = 1;
         const std::int32_t start = 0;
         bifolio_host_batch_view batch{};
         batch.query_start_loc = &start;
         return bifolio_plan_attention(h.backend, h.plan, &spec, unless(n, batch), 1, nullptr);
       }},
      {"attention",
       [&](auto& h, bool n) {
         const bifolio_status status = bifolio_attention(h.engine, 0, h.plan, unless(n, a.params), &a.batch, nullptr);
         return status == BIFOLIO_FAILED_PRECONDITION ? BIFOLIO_OK : status;  // the plan was never planned
       }},
      {"merge_states",
       [&](auto& h, bool n) {
         float lse[3] = {};
         float out[12] = {};
         const bifolio_tensor to = bifolio_dense_tensor(out, BIFOLIO_F32, 3, 1, 4);
         return bifolio_merge_states(h.backend, &a.tensor, lse, unless(n, a.tensor), lse, &to, nullptr, nullptr);
       }},
      {"engine_create",
       [&](auto& h, bool n) {
         auto config = a.engine_config;
         config.num_layers = 1, config.num_blocks = 1, config.num_kv_heads = 1, config.qk_head_dim = 1;
         bifolio_engine engine = nullptr;
         const bifolio_status status = bifolio_engine_create(h.backend, unless(n, config), &engine);
         CHECK(bifolio_engine_destroy(engine) == BIFOLIO_OK);
         return status;
       }},
      {"engine_layer",
       [&](auto& h, bool) { return bifolio_engine_layer(h.engine, 1, nullptr, nullptr, &a.number, nullptr); }, true},
      {"engine_upload",
       [&](auto& h, bool n) { return bifolio_engine_upload(h.engine, h.batch, unless(n, a.batch), nullptr); }},
      {"engine_append",
       [&](auto& h, bool n) {
         const std::int64_t slots[3] = {-1, -1, -1};
         return bifolio_engine_append(h.engine, 0, unless(n, a.tensor), &a.tensor, slots, nullptr);
       }},
      {"engine_rotate_append",
       [&](auto& h, bool n) {
         const std::int64_t slots[3] = {-1, -1, -1};
         return bifolio_engine_rotate_append(h.engine, 0, unless(n, a.rotate_params), &a.tensor, &a.tensor, slots,
                                             nullptr);
       }},
      {"engine_gather",
       [&](auto& h, bool n) {
         const std::int64_t slots[3] = {-1, -1, -1};
         float other[12] = {};
         const bifolio_tensor to = bifolio_dense_tensor(other, BIFOLIO_F32, 3, 1, 4);
         return bifolio_engine_gather(h.engine, 0, unless(n, a.tensor), &to, slots, nullptr);
       }},
      {"engine_copy_blocks",
       [&](auto& h, bool n) {
         const bifolio_block_copy copy{30, 31};
         return bifolio_engine_copy_blocks(h.engine, unless(n, copy), 1, nullptr);
       }},
      {"engine_swap_blocks",
       [&](auto& h, bool n) {
         const bifolio_block_copy copy{30, 31};  // of an engine with itself: they share memory
         const bifolio_status status = bifolio_engine_swap_blocks(h.engine, h.engine, unless(n, copy), 1, nullptr);
         if (!n && last_error().find("src and dst share memory") != std::string::npos)
           return bifolio_status{BIFOLIO_OK};
         return status;
       }},
      {"engine_convert_blocks",
       [&](auto& h, bool n) {
         const bifolio_block_copy copy{30, 31};
         const bifolio_status status = bifolio_engine_convert_blocks(h.engine, h.engine, unless(n, copy), 1, nullptr);
         if (!n && last_error().find("src and dst share memory") != std::string::npos)
           return bifolio_status{BIFOLIO_OK};
         return status;
       }},
      {"pool_allocate",
       [&](auto& h, bool n) {
         const bifolio_status status = bifolio_pool_allocate(h.pool, unless(n, a.block), 1);
         if (status != BIFOLIO_OK) return status;
         CHECK(bifolio_pool_retain(h.pool, &a.block, 1) == BIFOLIO_OK);
         CHECK(bifolio_pool_release(h.pool, &a.block, 1) == BIFOLIO_OK);
         return bifolio_pool_release(h.pool, &a.block, 1);
       }},
      {"pool_retain", [&](auto& h, bool n) { return bifolio_pool_retain(h.pool, unless(n, a.block), n ? 1 : 0); }},
      {"pool_release", [&](auto& h, bool n) { return bifolio_pool_release(h.pool, unless(n, a.block), n ? 1 : 0); }},
      {"pool_num_free", [&](auto& h, bool n) { return bifolio_pool_num_free(h.pool, unless(n, a.number)); }},
      {"pool_num_refs", [&](auto& h, bool n) { return bifolio_pool_num_refs(h.pool, 0, unless(n, a.refs)); }},
      {"pool_digest", [&](auto& h, bool n) { return bifolio_pool_digest(h.pool, unless(n, a.digest)); }},
      {"manager_can_allocate", [](auto& h, bool) { return bifolio_manager_can_allocate(h.manager, 4); }, true},
      {"manager_allocate",
       [&](auto& h, bool n) {
         const bifolio_status status = bifolio_manager_allocate(h.manager, 4, unless(n, a.seq));
         return status == BIFOLIO_OK ? bifolio_manager_free(h.manager, a.seq) : status;
       }},
      {"manager_open",
       [&](auto& h, bool n) {
         const bifolio_status status = bifolio_manager_open(h.manager, unless(n, a.prompt), 3, &a.opened);
         return status == BIFOLIO_OK ? bifolio_manager_free(h.manager, a.opened.seq) : status;
       }},
      {"manager_append",
       [&](auto& h, bool n) { return bifolio_manager_append(h.manager, h.seq, 0, 0, unless(n, a.copy)); }},
      {"manager_commit", [](auto& h, bool) { return bifolio_manager_commit(h.manager, h.seq, nullptr, 0); }, true},
      {"manager_fork",
       [&](auto& h, bool n) {
         const bifolio_status status = bifolio_manager_fork(h.manager, h.seq, unless(n, a.seq));
         return status == BIFOLIO_OK ? bifolio_manager_free(h.manager, a.seq) : status;
       }},
      {"manager_truncate", [](auto& h, bool) { return bifolio_manager_truncate(h.manager, h.seq, 3); }, true},
      {"manager_swap_out",
       [&](auto& h, bool n) { return bifolio_manager_swap_out(h.manager, nullptr, 0, unless(n, a.copies), &a.count); }},
      {"manager_swap_in",
       [&](auto& h, bool n) { return bifolio_manager_swap_in(h.manager, nullptr, 0, &a.copies, unless(n, a.count)); }},
      {"manager_num_tokens",
       [&](auto& h, bool) { return bifolio_manager_num_tokens(h.manager, h.seq, nullptr, nullptr); }, true},
      {"manager_slot_at",
       [&](auto& h, bool n) { return bifolio_manager_slot_at(h.manager, h.seq, 0, unless(n, a.number)); }},
      {"manager_stats", [&](auto& h, bool n) { return bifolio_manager_stats(h.manager, unless(n, a.cache_stats)); }},
      {"manager_prefix_stats",
       [&](auto& h, bool n) { return bifolio_manager_prefix_stats(h.manager, unless(n, a.prefix_stats)); }},
      {"manager_match",
       [&](auto& h, bool n) { return bifolio_manager_match(h.manager, unless(n, a.prompt), &a.number); }},
      {"manager_drain_events",
       [&](auto& h, bool n) { return bifolio_manager_drain_events(h.manager, unless(n, a.events), &a.count); }},
      {"manager_reset_prefix_cache", [](auto& h, bool) { return bifolio_manager_reset_prefix_cache(h.manager); }, true},
      {"manager_advance_clock", [](auto& h, bool) { return bifolio_manager_advance_clock(h.manager, 1); }, true},
      {"manager_digest", [&](auto& h, bool n) { return bifolio_manager_digest(h.manager, unless(n, a.digest)); }},
      {"manager_check", [](auto& h, bool) { return bifolio_manager_check(h.manager); }, true},
      {"metrics_text",
       [&](auto& h, bool n) {
         const char* const name = "model";
         const char* const value = "a\"b";
         const bifolio_status status =
             bifolio_metrics_text(h.manager, h.scheduler, n ? nullptr : &name, &value, 1, &a.text);
         if (status == BIFOLIO_OK) CHECK(std::string(a.text).find("{model=\"a\\\"b\"}") != std::string::npos);
         return status;
       }},
      {"metrics_json",
       [&](auto& h, bool n) { return bifolio_metrics_json(h.manager, h.scheduler, unless(n, a.text)); }},
      {"batch_build",
       [&](auto& h, bool n) {
         const bifolio_plan_row row{h.seq, 3, 3};
         return bifolio_batch_build(h.batch, h.manager, unless(n, row), 1);
       }},
      {"batch_get", [&](auto& h, bool n) { return bifolio_batch_get(h.batch, unless(n, a.host_batch)); }},
      {"scheduler_create",
       [&](auto& h, bool n) {
         bifolio_scheduler scheduler = nullptr;
         const bifolio_status status = bifolio_scheduler_create(h.manager, unless(n, a.scheduler_config), &scheduler);
         CHECK(bifolio_scheduler_destroy(scheduler) == BIFOLIO_OK);
         return status;
       }},
      {"scheduler_submit",
       [&](auto& h, bool n) { return bifolio_scheduler_submit(h.scheduler, &a.request, unless(n, a.digest)); }},
      {"scheduler_post_abort", [](auto& h, bool) { return bifolio_scheduler_post_abort(h.scheduler, 99); }, true},
      {"scheduler_abort",
       [](auto& h, bool) {
         const bifolio_status status = bifolio_scheduler_abort(h.scheduler, 99);
         const bool known = last_error().find("abort returned not_found") != std::string::npos;
         return status == BIFOLIO_NOT_FOUND && known ? bifolio_status{BIFOLIO_OK} : status;
       },
       true},
      {"scheduler_propose",
       [](auto& h, bool) {
         const bifolio_status status = bifolio_scheduler_propose(h.scheduler, 99, 0, nullptr, 0);
         const bool known = last_error().find("handle") == std::string::npos;
         return status == BIFOLIO_NOT_FOUND && known ? bifolio_status{BIFOLIO_OK} : status;
       },
       true},
      {"scheduler_has_work",
       [&](auto& h, bool n) { return bifolio_scheduler_has_work(h.scheduler, unless(n, a.flag)); }},
      {"scheduler_output",
       [&](auto& h, bool n) { return bifolio_scheduler_output(h.scheduler, 1, 0, unless(n, a.tokens), &a.count); }},
      {"scheduler_stats_get",
       [&](auto& h, bool n) { return bifolio_scheduler_stats_get(h.scheduler, unless(n, a.scheduler_stats)); }},
      {"scheduler_digest", [&](auto& h, bool n) { return bifolio_scheduler_digest(h.scheduler, unless(n, a.digest)); }},
      {"scheduler_check", [](auto& h, bool) { return bifolio_scheduler_check(h.scheduler); }, true},
      {"cache_manager",
       [&](auto& h, bool n) {
         bifolio_manager manager = nullptr;
         const bifolio_status status = bifolio_cache_manager(h.cache, unless(n, manager));
         CHECK(bifolio_manager_destroy(manager) == BIFOLIO_OK);
         return status;
       }},
      {"cache_engine",
       [&](auto& h, bool n) {
         bifolio_engine engine = nullptr;
         const bifolio_status status = bifolio_cache_engine(h.cache, unless(n, engine));
         CHECK(bifolio_engine_destroy(engine) == BIFOLIO_OK);
         return status;
       }},
      {"cache_open",
       [&](auto& h, bool n) {
         const bifolio_status status = bifolio_cache_open(h.cache, unless(n, a.prompt), &a.opened, nullptr);
         return status == BIFOLIO_OK ? bifolio_cache_free(h.cache, a.opened.seq) : status;
       }},
      {"cache_fork",
       [&](auto& h, bool n) {
         const bifolio_status status = bifolio_cache_fork(h.cache, h.seq, unless(n, a.seq));
         if (status != BIFOLIO_OK) return status;
         CHECK(bifolio_cache_truncate(h.cache, a.seq, 0) == BIFOLIO_OK);
         return bifolio_cache_free(h.cache, a.seq);
       }},
      {"cache_swap_out",
       [&](auto& h, bool n) { return bifolio_cache_swap_out(h.cache, unless(n, a.seq), n ? 1 : 0, nullptr); }},
      {"cache_swap_in",
       [&](auto& h, bool n) { return bifolio_cache_swap_in(h.cache, unless(n, a.seq), n ? 1 : 0, nullptr); }},
      {"step_get", [&](auto& h, bool n) { return bifolio_step_get(h.step, unless(n, a.view)); }},
      {"step_attend",
       [&](auto& h, bool n) {
         float out[12] = {};
         const bifolio_tensor to = bifolio_dense_tensor(out, BIFOLIO_F32, 3, 1, 4);
         return bifolio_step_attend(h.step, 0, unless(n, a.tensor), &a.tensor, &a.tensor, &to);
       }},
      {"step_attend_with",
       [&](auto& h, bool n) {
         float out[12] = {};
         auto params = a.params;
         params.q = a.tensor;
         params.out = bifolio_dense_tensor(out, BIFOLIO_F32, 3, 1, 4);
         return bifolio_step_attend_with(h.step, 1, unless(n, params), &a.tensor, &a.tensor);
       }},
      {"step_append", [&](auto& h, bool n) { return bifolio_step_append(h.step, 0, unless(n, a.tensor), &a.tensor); }},
      {"step_rotate_append",
       [&](auto& h, bool n) {
         return bifolio_step_rotate_append(h.step, 0, unless(n, a.rotate_params), &a.tensor, &a.tensor);
       }},
      {"step_attention",
       [&](auto& h, bool n) {
         float out[12] = {};
         auto params = a.params;
         params.q = a.tensor;
         params.out = bifolio_dense_tensor(out, BIFOLIO_F32, 3, 1, 4);
         return bifolio_step_attention(h.step, 1, unless(n, params));
       }},
      {"step_commit_sampled",
       [&](auto& h, bool n) {
         const bifolio_status status = bifolio_step_commit_sampled(h.step, nullptr, n ? 1 : 0, nullptr, nullptr);
         const bool is_of_rows = last_error().find("take no sampled tokens") != std::string::npos;
         return status == BIFOLIO_FAILED_PRECONDITION && is_of_rows ? bifolio_status{BIFOLIO_OK} : status;
       }},
  };
}

}  // namespace

TEST_CASE("every function does its work with good arguments, and refuses null pointers with a sentence") {
  everything all;
  arguments a;
  for (const probe& each : probes(a)) {
    CAPTURE(each.name);
    const bifolio_status good = each.call(all, false);
    CHECK_MESSAGE(good >= 0, last_error());
    if (each.null_is_fine) continue;
    CHECK(each.call(all, true) == BIFOLIO_INVALID_ARGUMENT);
    CHECK_MESSAGE(last_error().find("null") != std::string::npos, last_error());
  }
  all.destroy(1);
}

TEST_CASE("every function refuses handles that are null, stale, of another kind or made up") {
  everything all, stale;
  stale.destroy(2);
  everything null_handles;
  null_handles.destroy(3);
  arguments a;
  everything swapped;
  // Handles of one kind as another.
  const auto swap_in = [](everything& h) {
    std::swap(reinterpret_cast<void*&>(h.backend), reinterpret_cast<void*&>(h.pool));
    std::swap(reinterpret_cast<void*&>(h.event), reinterpret_cast<void*&>(h.plan));
    std::swap(reinterpret_cast<void*&>(h.manager), reinterpret_cast<void*&>(h.engine));
    std::swap(reinterpret_cast<void*&>(h.scheduler), reinterpret_cast<void*&>(h.cache));
    std::swap(reinterpret_cast<void*&>(h.step), reinterpret_cast<void*&>(h.batch));
  };
  swap_in(swapped);
  random_source random(hash_of(test_seed(), 5));
  CAPTURE(seed_note());
  for (const probe& each : probes(a)) {
    CAPTURE(each.name);
    CHECK(each.call(stale, false) == BIFOLIO_NOT_FOUND);
    CHECK_MESSAGE(last_error().find("is no open") != std::string::npos, last_error());
    CHECK(each.call(swapped, false) == BIFOLIO_NOT_FOUND);
    everything* const made_up = &null_handles;
    for (int i = 0; i < 20; ++i) {
      const auto any = [&](auto& handle, const void* good) {
        std::uint64_t bits = random.next();
        if (random.one_in(2))
          bits = reinterpret_cast<std::uint64_t>(good) ^ (std::uint64_t{1} << random.between(0, 63));
        std::memcpy(&handle, &bits, sizeof bits);
      };
      any(made_up->backend, all.backend), any(made_up->event, all.event), any(made_up->pool, all.pool);
      any(made_up->manager, all.manager), any(made_up->batch, all.batch), any(made_up->engine, all.engine);
      any(made_up->plan, all.plan), any(made_up->scheduler, all.scheduler), any(made_up->cache, all.cache);
      any(made_up->step, all.step);
      const bifolio_status status = each.call(*made_up, false);
      CHECK((status == BIFOLIO_NOT_FOUND || status == BIFOLIO_INVALID_ARGUMENT));
    }
    std::memset(static_cast<void*>(&made_up->backend), 0, 10 * sizeof(void*));
    CHECK(each.call(*made_up, false) == BIFOLIO_INVALID_ARGUMENT);
    CHECK_MESSAGE(last_error().find("is null") != std::string::npos, last_error());
  }
  CHECK(bifolio_cache_destroy(stale.cache) == BIFOLIO_NOT_FOUND);
  CHECK(bifolio_cache_destroy(nullptr) == BIFOLIO_OK);
  all.destroy(4);
  swap_in(swapped);
  swapped.destroy(5);
}

TEST_CASE("handles are destroyed in any order, and what others need lives on") {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    everything all;
    all.destroy(seed);
  }
  everything all;
  CHECK(bifolio_backend_destroy(all.backend) == BIFOLIO_OK);
  CHECK(bifolio_cache_destroy(all.cache) == BIFOLIO_OK);
  bifolio_step_view view{};
  view.size = sizeof view;
  REQUIRE(bifolio_step_get(all.step, &view) == BIFOLIO_OK);
  CHECK(view.num_tokens == 3);
  CHECK(view.tokens[2] == 3);
  CHECK(view.num_rows == 1);
  CHECK(bifolio_step_commit(all.step, nullptr, 0) == BIFOLIO_OK);
  CHECK(bifolio_step_commit(all.step, nullptr, 0) == BIFOLIO_NOT_FOUND);
  std::int64_t tokens = 0, committed = 0;
  CHECK(bifolio_manager_num_tokens(all.manager, all.seq, &tokens, &committed) == BIFOLIO_OK);
  CHECK(committed == 3);
  CHECK(bifolio_manager_free(all.manager, all.seq) == BIFOLIO_OK);
  CHECK(bifolio_manager_free(all.manager, all.seq) == BIFOLIO_NOT_FOUND);
  (void)bifolio_event_destroy(all.event), (void)bifolio_pool_destroy(all.pool), (void)bifolio_batch_destroy(all.batch);
  (void)bifolio_engine_destroy(all.engine), (void)bifolio_plan_destroy(all.plan);
  CHECK(bifolio_scheduler_destroy(all.scheduler) == BIFOLIO_OK);
  CHECK(bifolio_manager_destroy(all.manager) == BIFOLIO_OK);
}

TEST_CASE("structs say their size: shorter ones are refused, longer ones taken when what is unknown is 0") {
  bifolio_manager_config config;
  for (const std::size_t size : {std::size_t{0}, std::size_t{8}, sizeof config - 1, std::size_t{1} << 40}) {
    CHECK(bifolio_manager_config_init(&config, size) == BIFOLIO_INVALID_ARGUMENT);
    CHECK_MESSAGE(last_error().find("the size of config is " + std::to_string(size)) != std::string::npos,
                  last_error());
  }
  bifolio_manager manager = nullptr;
  config = made(bifolio_manager_config_init);
  config.num_blocks = 4;
  config.size = 3;
  CHECK(bifolio_manager_create(&config, &manager) == BIFOLIO_INVALID_ARGUMENT);
  struct later {
    bifolio_manager_config known;
    std::int64_t unknown;
  } longer;
  longer.unknown = 77;
  REQUIRE(bifolio_manager_config_init(&longer.known, sizeof longer) == BIFOLIO_OK);
  CHECK(longer.unknown == 0);
  CHECK(longer.known.size == sizeof longer);
  longer.known.num_blocks = 4;
  REQUIRE(bifolio_manager_create(&longer.known, &manager) == BIFOLIO_OK);
  CHECK(bifolio_manager_destroy(manager) == BIFOLIO_OK);
  longer.unknown = 1;
  CHECK(bifolio_manager_create(&longer.known, &manager) == BIFOLIO_UNSUPPORTED);
  CHECK(manager == nullptr);
  bifolio_cache_stats stats{};
  everything all;
  CHECK(bifolio_manager_stats(all.manager, &stats) == BIFOLIO_INVALID_ARGUMENT);
  stats.size = sizeof stats;
  CHECK(bifolio_manager_stats(all.manager, &stats) == BIFOLIO_OK);
  CHECK(stats.num_blocks == 32);
  all.destroy(6);
}

TEST_CASE("refusals keep the sentence of the library, each thread its own") {
  bifolio_backend backend = nullptr;
  CHECK(bifolio_backend_create("gpu:9", nullptr, &backend) == BIFOLIO_INVALID_ARGUMENT);
  const std::string sentence = last_error();
  CHECK_MESSAGE(sentence.find("cpu") != std::string::npos, sentence);
  std::thread([] { CHECK(last_error().empty()); }).join();
  CHECK(last_error() == sentence);
  CHECK(std::string(bifolio_status_name(BIFOLIO_DEVICE_LOST)) == "device_lost");
  CHECK(std::string(bifolio_status_name(BIFOLIO_NEVER)) == "never");
  CHECK(std::string(bifolio_status_name(-77)) == "unknown");
  bifolio_dtype type = -1;
  CHECK(bifolio_parse_dtype("bf16", &type) == BIFOLIO_OK);
  CHECK(type == BIFOLIO_BF16);
  CHECK(bifolio_parse_dtype("f17", &type) == BIFOLIO_INVALID_ARGUMENT);
  CHECK(bifolio_dtype_bytes(BIFOLIO_BF16) == 2);
  CHECK(bifolio_dtype_bytes(256) == 0);
  CHECK(bifolio_version() > 0);

  everything all;
  arguments a;
  // A layer's call explains itself.
  float out[12] = {};
  auto params = a.params;
  params.q = a.tensor;
  params.out = bifolio_dense_tensor(out, BIFOLIO_F32, 3, 1, 4);
  params.soft_cap = -2;
  CHECK(bifolio_step_attend_with(all.step, 0, &params, &a.tensor, &a.tensor) == BIFOLIO_INVALID_ARGUMENT);
  CHECK_MESSAGE(last_error().find("soft_cap is -2") != std::string::npos, last_error());
  auto typed = a.tensor;
  typed.type = 256;
  CHECK(bifolio_step_append(all.step, 0, &typed, &a.tensor) == BIFOLIO_INVALID_ARGUMENT);
  CHECK(bifolio_step_append(all.step, 7, &a.tensor, &a.tensor) == BIFOLIO_OUT_OF_RANGE);
  bifolio_rotate_params rotate = a.rotate_params;
  rotate.rotary_dim = 2;
  rotate.neighbours = 256;
  CHECK(bifolio_step_rotate_append(all.step, 0, &rotate, &a.tensor, &a.tensor) == BIFOLIO_INVALID_ARGUMENT);
  CHECK_MESSAGE(last_error().find("pairing is number 2") != std::string::npos, last_error());
  rotate.neighbours = 1;
  CHECK(bifolio_step_rotate_append(all.step, 7, &rotate, &a.tensor, &a.tensor) == BIFOLIO_OUT_OF_RANGE);
  rotate.num_positions = 1;
  CHECK(bifolio_step_rotate_append(all.step, 0, &rotate, &a.tensor, &a.tensor) == BIFOLIO_INVALID_ARGUMENT);
  CHECK_MESSAGE(last_error().find("cos_sin is null") != std::string::npos, last_error());
  CHECK(bifolio_cache_free(all.cache, all.seq) == BIFOLIO_FAILED_PRECONDITION);
  CHECK_MESSAGE(last_error().find("part of a step") != std::string::npos, last_error());
  bifolio_step step = nullptr;
  const bifolio_step_row row{all.seq, nullptr, 1};
  CHECK(bifolio_step_begin(all.cache, &row, 1, nullptr, &step) == BIFOLIO_FAILED_PRECONDITION);
  CHECK(bifolio_step_begin_scheduled(all.cache, all.scheduler, nullptr, &step) == BIFOLIO_FAILED_PRECONDITION);
  CHECK(bifolio_step_destroy(all.step) == BIFOLIO_OK);
  all.step = nullptr;
  CHECK(bifolio_step_begin_scheduled(all.cache, all.scheduler, nullptr, &step) == BIFOLIO_IDLE);
  const bifolio_step_row many{all.seq, nullptr, 100'000};
  CHECK(bifolio_step_begin(all.cache, &many, 1, nullptr, &step) == BIFOLIO_NEVER);
  all.destroy(7);
}

TEST_CASE("a caller's own threads run the workers") {
  struct pool {
    int num_calls = 0;
    static void run(void* user, std::int32_t num_workers, bifolio_worker function, void* context) {
      ++static_cast<pool*>(user)->num_calls;
      for (std::int32_t i = num_workers; i-- > 0;) function(context, i);
    }
  } own;
  auto options = made(bifolio_backend_options_init);
  options.run = pool::run;
  options.user = &own;
  bifolio_backend backend = nullptr;
  CHECK(bifolio_backend_create("cpu", &options, &backend) == BIFOLIO_INVALID_ARGUMENT);  // concurrency 0
  options.concurrency = 3;
  REQUIRE(bifolio_backend_create("cpu", &options, &backend) == BIFOLIO_OK);
  const char* text = nullptr;
  REQUIRE(bifolio_backend_description(backend, &text) == BIFOLIO_OK);
  CHECK_MESSAGE(std::string(text).find("callback") != std::string::npos, text);
  std::vector<float> rows(4096 * 8, 1.0f), out(rows.size()), lse(4096, 0.0f);
  const bifolio_tensor in = bifolio_dense_tensor(rows.data(), BIFOLIO_F32, 4096, 1, 8);
  const bifolio_tensor to = bifolio_dense_tensor(out.data(), BIFOLIO_F32, 4096, 1, 8);
  CHECK(bifolio_merge_states(backend, &in, lse.data(), &in, lse.data(), &to, nullptr, nullptr) == BIFOLIO_OK);
  CHECK(own.num_calls > 0);
  CHECK(out[5] == 1.0f);
  CHECK(bifolio_backend_destroy(backend) == BIFOLIO_OK);
}
