// SPDX-License-Identifier: Apache-2.0
/// Attention and the storage of all layers in the C interface.

#include <bifolio/executor.hpp>

#include "c/objects.hpp"
#include "common/base/require.hpp"

using namespace bifolio;
using c::at;
using c::done;
using c::engine_object;
using c::get;
using c::plan_object;
using c::report;
using c::to_stream;

namespace {

std::span<const block_copy> to_copies(const bifolio_block_copy* copies, std::size_t num_copies) {
  return c::to_ids<block_copy>(copies, num_copies, "copies");
}

const kv_cache_view& layer_of(const engine_object& engine, std::int32_t layer) {
  const std::span<const kv_cache_view> layers = engine.engine->layers();
  if (layer >= 0 && static_cast<std::size_t>(layer) < layers.size()) return layers[static_cast<std::size_t>(layer)];
  detail::refuse(errc::out_of_range, "layer ", layer, " is not one of the ", layers.size(), " layers");
}

}  // namespace

bifolio_status bifolio_attention_spec_init(bifolio_attention_spec* spec, size_t size) {
  bifolio_attention_spec defaults{};
  defaults.causal = 1;
  defaults.window_left = defaults.window_right = -1;
  return c::init_struct(spec, size, defaults, "spec");
}

bifolio_status bifolio_attention_params_init(bifolio_attention_params* params, size_t size) {
  return c::init_struct(params, size, bifolio_attention_params{}, "params");
}

bifolio_status bifolio_rotate_params_init(bifolio_rotate_params* params, size_t size) {
  bifolio_rotate_params defaults{};
  defaults.num_axes = rotary_params{}.num_axes;
  defaults.norm_epsilon = head_norm_params{}.epsilon;
  return c::init_struct(params, size, defaults, "params");
}

bifolio_status bifolio_plan_create(bifolio_plan* out) {
  return done([&] {
    at(out, "out") = nullptr;
    *out = c::open_handle(std::make_shared<plan_object>());
  });
}

bifolio_status bifolio_plan_destroy(bifolio_plan plan) { return c::destroy<plan_object>(plan); }

bifolio_status bifolio_plan_attention(bifolio_backend backend, bifolio_plan plan, const bifolio_attention_spec* spec,
                                      const bifolio_host_batch_view* host_batch, int64_t num_blocks,
                                      bifolio_stream stream) {
  return done([&] {
    plan_object& planned = get<plan_object>(plan);
    const auto where = c::share<c::backend_object>(backend);
    const attention_spec wanted = c::to_spec(spec, "spec");
    const host_step_view batch = c::to_view(at(host_batch, "host_batch"));
    if (planned.where != where) {
      attention_plan fresh;
      where->device->plan_attention(fresh, wanted, batch, num_blocks, to_stream(stream));
      planned.plan = std::move(fresh);
      planned.where = where;
    } else {
      where->device->plan_attention(planned.plan, wanted, batch, num_blocks, to_stream(stream));
    }
  });
}

bifolio_status bifolio_attention(bifolio_engine engine, int32_t layer, bifolio_plan plan,
                                 const bifolio_attention_params* params, const bifolio_batch_view* batch,
                                 bifolio_stream stream) {
  return c::guarded([&] {
    const engine_object& in = get<engine_object>(engine);
    const plan_object& planned = get<plan_object>(plan);
    attention_params whole = c::to_params(params);
    whole.kv = layer_of(in, layer);
    whole.batch = c::to_view(at(batch, "batch"));
    return report(in.engine->where().attention(planned.plan, whole, to_stream(stream)), "attention",
                  [&] { return find_problem(planned.plan, whole); });
  });
}

bifolio_status bifolio_merge_states(bifolio_backend backend, const bifolio_tensor* out_a, const float* lse_a,
                                    const bifolio_tensor* out_b, const float* lse_b, const bifolio_tensor* out,
                                    float* lse_out, bifolio_stream stream) {
  return c::guarded([&] {
    const merge_params params{{c::to_view(at(out_a, "out_a")), lse_a},
                              {c::to_view(at(out_b, "out_b")), lse_b},
                              c::to_view(at(out, "out")),
                              lse_out};
    return report(get<c::backend_object>(backend).device->merge_states(params, to_stream(stream)), "merge_states",
                  [&] { return find_problem(params); });
  });
}

bifolio_status bifolio_engine_config_init(bifolio_engine_config* config, size_t size) {
  bifolio_engine_config defaults{};
  defaults.block_size = 16;
  return c::init_struct(config, size, defaults, "config");
}

bifolio_status bifolio_engine_create(bifolio_backend backend, const bifolio_engine_config* config,
                                     bifolio_engine* out) {
  return done([&] {
    at(out, "out") = nullptr;
    auto made = std::make_shared<engine_object>();
    const auto where = c::share<c::backend_object>(backend);
    const bifolio_engine_config from = c::read_struct(config, "config");
    const kv_code k_code = c::to_k_code(from.k_code);
    const kv_layout layout = make_layout(
        c::to_layout(from.layout), k_code, c::to_v_code(from.v_code, k_code), from.num_kv_heads, from.qk_head_dim,
        from.v_head_dim == 0 ? from.qk_head_dim : from.v_head_dim, from.block_size, from.v_in_k != 0);
    const cache_engine_config size{.num_layers = from.num_layers,
                                   .num_blocks = from.num_blocks,
                                   .layout = layout,
                                   .k_scales = c::to_scales(from.k_scales, from.num_k_scales, "k_scales"),
                                   .v_scales = c::to_scales(from.v_scales, from.num_v_scales, "v_scales")};
    made->owner = where;
    if (from.on_host != 0) {
      made->host = make_backend({}, {.executor_choice = executor_kind::serial});
      made->own.emplace(*made->host, size, &where->device->staging_memory());
    } else {
      made->own.emplace(*where->device, size);
    }
    made->engine = &*made->own;
    *out = c::open_handle(std::move(made));
  });
}

bifolio_status bifolio_engine_destroy(bifolio_engine engine) { return c::destroy<engine_object>(engine); }

bifolio_status bifolio_engine_layer(bifolio_engine engine, int32_t layer, void** k, void** v, int64_t* num_blocks,
                                    int64_t* block_bytes) {
  return done([&] {
    const kv_cache_view& view = layer_of(get<engine_object>(engine), layer);
    if (k != nullptr) *k = view.k;
    if (v != nullptr) *v = view.v_data();
    if (num_blocks != nullptr) *num_blocks = view.num_blocks;
    if (block_bytes != nullptr) *block_bytes = view.layout.block_bytes();
  });
}

bifolio_status bifolio_engine_upload(bifolio_engine engine, bifolio_batch batch, bifolio_batch_view* out,
                                     bifolio_stream stream) {
  return done([&] {
    bifolio_batch_view& result = at(out, "out");
    const engine_object& to = get<engine_object>(engine);
    result = c::from_view(to.engine->upload(get<c::batch_object>(batch).batch, to_stream(stream)));
  });
}

bifolio_status bifolio_engine_append(bifolio_engine engine, int32_t layer, const bifolio_tensor* k,
                                     const bifolio_tensor* v, const int64_t* slot_mapping, bifolio_stream stream) {
  return c::guarded([&] {
    const engine_object& to = get<engine_object>(engine);
    const append_params params{layer_of(to, layer), c::to_view(at(k, "k")), c::to_view(v), slot_mapping};
    backend& where = to.engine->where();
    return report(where.append(params, to_stream(stream)), "append",
                  [&] { return find_problem(params, where.where()); });
  });
}

bifolio_status bifolio_engine_rotate_append(bifolio_engine engine, int32_t layer, const bifolio_rotate_params* params,
                                            const bifolio_tensor* k, const bifolio_tensor* v,
                                            const int64_t* slot_mapping, bifolio_stream stream) {
  return c::guarded([&] {
    const engine_object& in = get<engine_object>(engine);
    rotate_append_params whole = c::to_params(params, at(k, "k"), v);
    whole.append.kv = layer_of(in, layer);
    whole.append.slot_mapping = slot_mapping;
    backend& where = in.engine->where();
    return report(where.rotate_append(whole, to_stream(stream)), "rotate_append",
                  [&] { return find_problem(whole, where.where()); });
  });
}

bifolio_status bifolio_engine_gather(bifolio_engine engine, int32_t layer, const bifolio_tensor* k,
                                     const bifolio_tensor* v, const int64_t* slot_mapping, bifolio_stream stream) {
  return c::guarded([&] {
    const engine_object& from = get<engine_object>(engine);
    const gather_params params{layer_of(from, layer), c::to_view(at(k, "k")), c::to_view(v), slot_mapping};
    backend& where = from.engine->where();
    return report(where.gather(params, to_stream(stream)), "gather",
                  [&] { return find_problem(params, where.where()); });
  });
}

bifolio_status bifolio_engine_copy_blocks(bifolio_engine engine, const bifolio_block_copy* copies, size_t num_copies,
                                          bifolio_stream stream) {
  return c::guarded([&] {
    cache_engine& of = *get<engine_object>(engine).engine;
    const std::span<const block_copy> list = to_copies(copies, num_copies);
    return report(of.copy_blocks(list, to_stream(stream)), "copy_blocks",
                  [&] { return find_copy_problem(of.layers(), list); });
  });
}

namespace {

/// Swap or conversion of blocks of one engine to another; `find` explains what `move` refused.
template <class Move, class Find>
bifolio_status move_blocks(bifolio_engine src, bifolio_engine dst, const bifolio_block_copy* copies, size_t num_copies,
                           const char* call, const Move& move, const Find& find) {
  return c::guarded([&] {
    cache_engine& from = *get<engine_object>(src).engine;
    cache_engine& to = *get<engine_object>(dst).engine;
    const std::span<const block_copy> list = to_copies(copies, num_copies);
    return report(move(from, to, list), call, [&] { return find(from, to, list); });
  });
}

}  // namespace

bifolio_status bifolio_engine_swap_blocks(bifolio_engine src, bifolio_engine dst, const bifolio_block_copy* copies,
                                          size_t num_copies, bifolio_stream stream) {
  return move_blocks(
      src, dst, copies, num_copies, "swap_blocks",
      [&](cache_engine& from, cache_engine& to, auto list) { return from.swap_blocks_to(to, list, to_stream(stream)); },
      [](cache_engine& from, cache_engine& to, auto list) {
        std::optional<error> problem = from.find_difference(to);
        return problem ? problem : find_swap_problem(from.layers(), to.layers(), list);
      });
}

bifolio_status bifolio_engine_convert_blocks(bifolio_engine src, bifolio_engine dst, const bifolio_block_copy* copies,
                                             size_t num_copies, bifolio_stream stream) {
  return move_blocks(
      src, dst, copies, num_copies, "convert_blocks",
      [&](cache_engine& from, cache_engine& to, auto list) {
        return from.convert_blocks_to(to, list, to_stream(stream));
      },
      [](cache_engine& from, cache_engine& to, auto list) {
        return find_convert_problem(from.layers().front(), to.layers().front(), list);
      });
}
