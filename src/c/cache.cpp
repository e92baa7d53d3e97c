// SPDX-License-Identifier: Apache-2.0
/// The cache of a model and its steps in the C interface.

#include "c/objects.hpp"
#include "common/base/require.hpp"

using namespace bifolio;
using c::at;
using c::cache_object;
using c::done;
using c::get;
using c::guarded;
using c::status_of;
using c::step_object;
using c::to_stream;

bifolio_status bifolio_cache_config_init(bifolio_cache_config* config, size_t size) {
  bifolio_cache_config defaults{};
  defaults.max_steps_in_flight = 1;
  return c::init_struct(config, size, defaults, "config");
}

bifolio_status bifolio_cache_create(bifolio_backend backend, const bifolio_cache_config* config, bifolio_cache* out) {
  return done([&] {
    at(out, "out") = nullptr;
    const auto where = c::share<c::backend_object>(backend);
    const bifolio_cache_config from = c::read_struct(config, "config");
    model_cache_config wanted;
    wanted.num_layers = from.num_layers;
    wanted.layout = c::to_layout(from.layout);
    wanted.attention = c::to_spec(from.attention, "attention");
    auto receiver = std::make_unique<c::event_receiver>();
    if (from.manager != nullptr) wanted.cache = c::to_config(from.manager, *receiver);
    wanted.memory_bytes = from.memory_bytes;
    wanted.host_memory_bytes = from.host_memory_bytes;
    if (from.layer_windows != nullptr && from.num_layers > 0) {
      wanted.layer_windows.assign(from.layer_windows, from.layer_windows + from.num_layers);
    }
    wanted.k_scales = c::to_scales(from.k_scales, from.num_k_scales, "k_scales");
    wanted.v_scales = c::to_scales(from.v_scales, from.num_v_scales, "v_scales");
    wanted.max_steps_in_flight = from.max_steps_in_flight;
    *out = c::open_handle(std::make_shared<cache_object>(where, wanted, std::move(receiver)));
  });
}

bifolio_status bifolio_cache_destroy(bifolio_cache cache) { return c::destroy<cache_object>(cache); }

namespace {

/// A handle of a part of a cache, which the cache stays for. `set` lets the object point to the part.
template <class Object, class Handle, class Set>
bifolio_status open_part(bifolio_cache cache, Handle* out, const Set& set) {
  return done([&] {
    at(out, "out") = nullptr;
    const auto of = c::share<cache_object>(cache);
    auto made = std::make_shared<Object>();
    made->owner = of;
    set(*made, of->cache);
    *out = c::open_handle(std::move(made));
  });
}

}  // namespace

bifolio_status bifolio_cache_manager(bifolio_cache cache, bifolio_manager* out) {
  return open_part<c::manager_object>(cache, out, [](auto& part, model_cache& of) { part.manager = &of.manager(); });
}

bifolio_status bifolio_cache_engine(bifolio_cache cache, bifolio_engine* out) {
  return open_part<c::engine_object>(cache, out, [](auto& part, model_cache& of) { part.engine = &of.engine(); });
}

bifolio_status bifolio_cache_open(bifolio_cache cache, const bifolio_prompt* prompt, bifolio_open_result* result,
                                  bifolio_stream stream) {
  return guarded([&] {
    bifolio_open_result& to = at(result, "result");
    const open_result got = get<cache_object>(cache).cache.open(c::prompt_of(prompt).view(), to_stream(stream));
    to = {to_index(got.seq), got.num_cached_tokens, {-1, -1}};
    return status_of(got.status);
  });
}

bifolio_status bifolio_cache_fork(bifolio_cache cache, bifolio_seq seq, bifolio_seq* out) {
  return guarded([&] {
    bifolio_seq& forked = at(out, "out");
    const allocate_result got = get<cache_object>(cache).cache.fork(seq_id{seq});
    forked = to_index(got.seq);
    return status_of(got.status);
  });
}

bifolio_status bifolio_cache_truncate(bifolio_cache cache, bifolio_seq seq, int64_t num_tokens) {
  return done([&] { get<cache_object>(cache).cache.truncate(seq_id{seq}, num_tokens); });
}

bifolio_status bifolio_cache_free(bifolio_cache cache, bifolio_seq seq) {
  return done([&] { get<cache_object>(cache).cache.free(seq_id{seq}); });
}

bifolio_status bifolio_cache_swap_out(bifolio_cache cache, const bifolio_seq* seqs, size_t num_seqs,
                                      bifolio_stream stream) {
  return guarded([&] {
    return status_of(
        get<cache_object>(cache).cache.swap_out(c::to_ids<seq_id>(seqs, num_seqs, "seqs"), to_stream(stream)));
  });
}

bifolio_status bifolio_cache_swap_in(bifolio_cache cache, const bifolio_seq* seqs, size_t num_seqs,
                                     bifolio_stream stream) {
  return guarded([&] {
    return status_of(
        get<cache_object>(cache).cache.swap_in(c::to_ids<seq_id>(seqs, num_seqs, "seqs"), to_stream(stream)));
  });
}

namespace {

model_step& step_of(step_object& object) { return object.step; }

/// K and V stored, then attention.
bifolio_status attend(model_step& of, std::int32_t layer, const attention_params& params, const bifolio_tensor* k,
                      const bifolio_tensor* v) {
  const const_tensor_view rows_k = c::to_view(at(k, "k")), rows_v = c::to_view(v);
  return c::report(of.attend(layer, params, rows_k, rows_v), "attend",
                   [&] { return of.find_problem(layer, params, rows_k, rows_v); });
}

}  // namespace

bifolio_status bifolio_step_begin(bifolio_cache cache, const bifolio_step_row* rows, size_t num_rows,
                                  bifolio_stream stream, bifolio_step* out) {
  return guarded([&] {
    at(out, "out") = nullptr;
    auto made = std::make_shared<step_object>();
    made->owner = c::share<cache_object>(cache);
    cache_object& of = *made->owner;
    (void)c::array(rows, num_rows, "rows");
    of.rows.clear();
    for (std::size_t i = 0; i < num_rows; ++i) {
      const bifolio_step_row& row = rows[i];
      const bool has_tokens = row.tokens != nullptr;
      if (row.num_tokens > INT32_MAX) {
        detail::refuse(errc::invalid_argument, "row ", i, " of a step has ", row.num_tokens, " tokens");
      }
      of.rows.push_back({seq_id{row.seq}, c::to_ids<token_id>(row.tokens, has_tokens ? row.num_tokens : 0, "tokens"),
                         has_tokens ? 0 : static_cast<std::int32_t>(row.num_tokens)});
    }
    made->step = of.cache.begin_step(of.rows, to_stream(stream));
    if (!made->step) return status_of(made->step.status());
    *out = c::open_handle(std::move(made));
    return bifolio_status{BIFOLIO_OK};
  });
}

bifolio_status bifolio_step_begin_scheduled(bifolio_cache cache, bifolio_scheduler scheduler, bifolio_stream stream,
                                            bifolio_step* out) {
  return guarded([&] {
    at(out, "out") = nullptr;
    auto made = std::make_shared<step_object>();
    made->owner = c::share<cache_object>(cache);
    made->requests = c::share<c::scheduler_object>(scheduler);
    made->step = made->owner->cache.begin_step(made->requests->requests, to_stream(stream));
    if (!made->step) return bifolio_status{BIFOLIO_IDLE};
    *out = c::open_handle(std::move(made));
    return bifolio_status{BIFOLIO_OK};
  });
}

bifolio_status bifolio_step_get(bifolio_step step, bifolio_step_view* view) {
  return done([&] {
    step_object& of = get<step_object>(step);
    const step_plan& plan = of.step.plan();
    const step_inputs& inputs = of.step.inputs();
    of.rows.clear();
    for (const scheduled_seq& row : plan.seqs) {
      of.rows.push_back({to_index(row.seq), to_index(row.request), row.query_len, row.seq_len, row.sample,
                         row.num_samples, row.num_drafts, row.num_cached_tokens});
    }
    of.placeholders.clear();
    for (const token_placeholder& each : inputs.placeholders) {
      of.placeholders.push_back({each.step, each.sampled, each.position});
    }
    c::write_struct(
        view,
        {sizeof(bifolio_step_view), plan.step, of.step.num_tokens(), c::from_ids<bifolio_token>(inputs.tokens.data()),
         inputs.positions.data(), inputs.sample_rows.data(), inputs.sample_rows.size(), of.placeholders.data(),
         of.placeholders.size(), of.rows.data(), of.rows.size(), c::from_view(of.step.batch())},
        "view");
  });
}

bifolio_status bifolio_step_attend(bifolio_step step, int32_t layer, const bifolio_tensor* q, const bifolio_tensor* k,
                                   const bifolio_tensor* v, const bifolio_tensor* out) {
  return guarded([&] {
    model_step& of = step_of(get<step_object>(step));
    attention_params params;
    params.q = c::to_view(at(q, "q"));
    params.out = c::to_view(at(out, "out"));
    return attend(of, layer, params, k, v);
  });
}

bifolio_status bifolio_step_attend_with(bifolio_step step, int32_t layer, const bifolio_attention_params* params,
                                        const bifolio_tensor* k, const bifolio_tensor* v) {
  return guarded([&] {
    model_step& of = step_of(get<step_object>(step));
    return attend(of, layer, c::to_params(params), k, v);
  });
}

bifolio_status bifolio_step_append(bifolio_step step, int32_t layer, const bifolio_tensor* k, const bifolio_tensor* v) {
  return guarded([&] {
    model_step& of = step_of(get<step_object>(step));
    return c::report(of.append(layer, c::to_view(at(k, "k")), c::to_view(v)), "append");
  });
}

bifolio_status bifolio_step_rotate_append(bifolio_step step, int32_t layer, const bifolio_rotate_params* params,
                                          const bifolio_tensor* k, const bifolio_tensor* v) {
  return guarded([&] {
    model_step& of = step_of(get<step_object>(step));
    const rotate_append_params given = c::to_params(params, at(k, "k"), v);
    return c::report(of.rotate_append(layer, given), "rotate_append", [&] { return of.find_problem(layer, given); });
  });
}

bifolio_status bifolio_step_attention(bifolio_step step, int32_t layer, const bifolio_attention_params* params) {
  return guarded([&] {
    model_step& of = step_of(get<step_object>(step));
    const attention_params given = c::to_params(params);
    return c::report(of.attention(layer, given), "attention", [&]() -> std::optional<error> {
      if (!of || layer < 0 ||
          static_cast<std::size_t>(layer) >= get<step_object>(step).owner->cache.engine().layers().size()) {
        return std::nullopt;
      }
      return find_problem(of.attention_plan_of(layer), of.complete(layer, given));
    });
  });
}

bifolio_status bifolio_step_commit(bifolio_step step, const int32_t* num_accepted, size_t num_rows) {
  return guarded([&] {
    model_step& of = step_of(get<step_object>(step));
    if (num_accepted == nullptr) {
      of.commit();
    } else {
      of.commit(std::span(num_accepted, num_rows));
    }
    return bifolio_step_destroy(step);
  });
}

bifolio_status bifolio_step_commit_sampled(bifolio_step step, const bifolio_sampled_token* sampled, size_t num_sampled,
                                           void (*on_finished)(void* user, const bifolio_finished* what), void* user) {
  return guarded([&] {
    step_object& of = get<step_object>(step);
    (void)c::array(sampled, num_sampled, "sampled");
    of.sampled.clear();
    for (std::size_t i = 0; i < num_sampled; ++i) {
      of.sampled.push_back({token_id{sampled[i].token}, sampled[i].stop != 0, sampled[i].from_sample});
    }
    const std::vector<finished_sequence> finished = of.step.commit(of.sampled);
    const bifolio_status destroyed = bifolio_step_destroy(step);
    if (on_finished == nullptr) return destroyed;
    for (const finished_sequence& each : finished) {
      const bifolio_finished what{to_index(each.request),
                                  each.sample,
                                  each.reason == finish_reason::stop ? 1 : 0,
                                  c::from_ids<bifolio_token>(each.tokens.data()),
                                  each.tokens.size(),
                                  each.num_cached_tokens};
      on_finished(user, &what);
    }
    return destroyed;
  });
}

bifolio_status bifolio_step_destroy(bifolio_step step) { return c::destroy<step_object>(step); }
