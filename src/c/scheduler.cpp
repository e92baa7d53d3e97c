// SPDX-License-Identifier: Apache-2.0
/// Schedulers of the C interface. Their steps are those of a cache (cache.cpp).

#include <bifolio/metrics.hpp>

#include "c/objects.hpp"
#include "common/base/require.hpp"

using namespace bifolio;
using c::at;
using c::done;
using c::get;
using c::guarded;
using c::scheduler_object;

bifolio_status bifolio_scheduler_config_init(bifolio_scheduler_config* config, size_t size) {
  const scheduler_config usual;
  bifolio_scheduler_config defaults{};
  defaults.max_tokens_per_step = usual.max_tokens_per_step;
  defaults.max_running = usual.max_running;
  defaults.max_steps_in_flight = usual.max_steps_in_flight;
  defaults.preemption = static_cast<std::int32_t>(usual.preemption);
  defaults.swap_block_cost = usual.swap_block_cost;
  defaults.priority_span = usual.priority_span;
  return c::init_struct(config, size, defaults, "config");
}

bifolio_status bifolio_request_init(bifolio_request* request, size_t size) {
  const bifolio::request usual;
  bifolio_request defaults{};
  defaults.max_new_tokens = usual.max_new_tokens;
  defaults.num_samples = usual.num_samples;
  return c::init_struct(request, size, defaults, "request");
}

bifolio_status bifolio_scheduler_create(bifolio_manager manager, const bifolio_scheduler_config* config,
                                        bifolio_scheduler* out) {
  return done([&] {
    at(out, "out") = nullptr;
    const auto of = c::share<c::manager_object>(manager);
    const bifolio_scheduler_config from = c::read_struct(config, "config");
    detail::require_between("preemption", from.preemption, 0, static_cast<std::int32_t>(preemption_mode::automatic));
    const scheduler_config wanted{.max_tokens_per_step = from.max_tokens_per_step,
                                  .max_running = from.max_running,
                                  .max_chunk_tokens = from.max_chunk_tokens,
                                  .vocab_size = from.vocab_size,
                                  .max_steps_in_flight = from.max_steps_in_flight,
                                  .preemption = static_cast<preemption_mode>(from.preemption),
                                  .swap_block_cost = from.swap_block_cost,
                                  .priority_span = from.priority_span};
    *out = c::open_handle(std::make_shared<scheduler_object>(of, wanted));
  });
}

bifolio_status bifolio_scheduler_destroy(bifolio_scheduler scheduler) {
  return c::destroy<scheduler_object>(scheduler);
}

bifolio_status bifolio_scheduler_submit(bifolio_scheduler scheduler, const bifolio_request* what,
                                        bifolio_request_id* out) {
  return guarded([&] {
    bifolio_request_id& id = at(out, "out");
    scheduler_object& to = get<scheduler_object>(scheduler);
    const bifolio_request from = c::read_struct(what, "request");
    const c::prompt_of prompt(from.prompt);
    const prompt_view& view = prompt.view();
    request asked;
    asked.prompt.assign(view.tokens.begin(), view.tokens.end());
    asked.max_new_tokens = from.max_new_tokens;
    asked.num_samples = from.num_samples;
    asked.beam_width = from.beam_width;
    asked.max_draft_tokens = from.max_draft_tokens;
    asked.priority = from.priority;
    asked.prefix_salt = view.scope.salt;
    asked.adapter_id = view.scope.adapter_id;
    for (const extra_key& extra : view.extras) {
      asked.extras.push_back({extra.position, extra.kind, {extra.value.begin(), extra.value.end()}});
    }
    asked.retention = view.retention;
    const submit_result got = to.requests.submit(std::move(asked));
    id = to_index(got.id);
    return c::status_of(got.status);
  });
}

bifolio_status bifolio_scheduler_post_abort(bifolio_scheduler scheduler, bifolio_request_id request) {
  return done([&] { get<scheduler_object>(scheduler).requests.post_abort(request_id{request}); });
}

bifolio_status bifolio_scheduler_abort(bifolio_scheduler scheduler, bifolio_request_id request) {
  return guarded(
      [&] { return c::report(get<scheduler_object>(scheduler).requests.abort(request_id{request}), "abort"); });
}

bifolio_status bifolio_scheduler_propose(bifolio_scheduler scheduler, bifolio_request_id request, int32_t sample,
                                         const bifolio_token* drafts, size_t num_drafts) {
  return done([&] {
    get<scheduler_object>(scheduler).requests.propose(request_id{request}, sample,
                                                      c::to_ids<token_id>(drafts, num_drafts, "drafts"));
  });
}

bifolio_status bifolio_scheduler_has_work(bifolio_scheduler scheduler, int32_t* out) {
  return done([&] { at(out, "out") = get<scheduler_object>(scheduler).requests.has_work() ? 1 : 0; });
}

bifolio_status bifolio_scheduler_output(bifolio_scheduler scheduler, bifolio_request_id request, int32_t sample,
                                        const bifolio_token** tokens, size_t* num_tokens) {
  return done([&] {
    (void)at(tokens, "tokens");
    (void)at(num_tokens, "num_tokens");
    const std::span<const token_id> said =
        get<scheduler_object>(scheduler).requests.output(request_id{request}, sample);
    *tokens = c::from_ids<bifolio_token>(said.data());
    *num_tokens = said.size();
  });
}

bifolio_status bifolio_scheduler_stats_get(bifolio_scheduler scheduler, bifolio_scheduler_stats* stats) {
  return done([&] {
    const scheduler_stats now = get<scheduler_object>(scheduler).requests.stats();
    c::write_struct(stats,
                    {sizeof(bifolio_scheduler_stats), now.num_waiting, now.num_running, now.num_swapped, now.num_steps,
                     now.num_scheduled_tokens, now.num_cached_tokens, now.num_sampled_tokens, now.num_draft_tokens,
                     now.num_accepted_drafts, now.num_preemptions, now.num_swap_outs, now.num_swap_ins,
                     now.num_failed_swaps, now.num_finished, now.num_aborted},
                    "stats");
  });
}

bifolio_status bifolio_scheduler_digest(bifolio_scheduler scheduler, uint64_t* out) {
  return done([&] { at(out, "out") = get<scheduler_object>(scheduler).requests.digest(); });
}

bifolio_status bifolio_scheduler_check(bifolio_scheduler scheduler) {
  return done([&] {
    const std::string problem = get<scheduler_object>(scheduler).requests.check();
    if (!problem.empty()) detail::refuse(errc::internal, problem);
  });
}

namespace {

metrics metrics_of(const c::manager_object& manager, bifolio_scheduler scheduler) {
  metrics now{.cache = manager.manager->stats()};
  if (manager.manager->prefix() != nullptr) now.prefix = manager.manager->prefix()->stats();
  if (scheduler != nullptr) now.scheduler = get<scheduler_object>(scheduler).requests.stats();
  return now;
}

}  // namespace

bifolio_status bifolio_metrics_text(bifolio_manager manager, bifolio_scheduler scheduler, const char* const* names,
                                    const char* const* values, size_t num_labels, const char** text) {
  return done([&] {
    const char*& result = at(text, "text");
    c::manager_object& of = get<c::manager_object>(manager);
    (void)c::array(names, num_labels, "names");
    (void)c::array(values, num_labels, "values");
    std::vector<metric_label> labels;
    for (std::size_t i = 0; i < num_labels; ++i) labels.emplace_back(&at(names[i], "name"), &at(values[i], "value"));
    of.text = prometheus_text(metrics_of(of, scheduler), labels);
    result = of.text.c_str();
  });
}

bifolio_status bifolio_metrics_json(bifolio_manager manager, bifolio_scheduler scheduler, const char** text) {
  return done([&] {
    const char*& result = at(text, "text");
    c::manager_object& of = get<c::manager_object>(manager);
    of.text = json_text(metrics_of(of, scheduler));
    result = of.text.c_str();
  });
}
