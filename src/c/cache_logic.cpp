// SPDX-License-Identifier: Apache-2.0
/// Block pools, managers and batches of the C interface.

#include "c/objects.hpp"
#include "common/base/require.hpp"

using namespace bifolio;
using c::at;
using c::done;
using c::get;
using c::guarded;
using c::manager_object;
using c::pool_object;
using c::status_of;

bifolio_status bifolio_pool_create(int64_t num_blocks, bifolio_pool* out) {
  return done([&] {
    at(out, "out") = nullptr;
    *out = c::open_handle(std::make_shared<pool_object>(num_blocks));
  });
}

bifolio_status bifolio_pool_destroy(bifolio_pool pool) { return c::destroy<pool_object>(pool); }

bifolio_status bifolio_pool_allocate(bifolio_pool pool, bifolio_block* blocks, size_t num_blocks) {
  return guarded([&] {
    block_pool& from = get<pool_object>(pool).pool;
    auto* const ids = reinterpret_cast<block_id*>(c::array(blocks, num_blocks, "blocks"));
    return status_of(from.allocate({ids, num_blocks}));
  });
}

bifolio_status bifolio_pool_retain(bifolio_pool pool, const bifolio_block* blocks, size_t num_blocks) {
  return done([&] { get<pool_object>(pool).pool.retain(c::to_ids<block_id>(blocks, num_blocks, "blocks")); });
}

bifolio_status bifolio_pool_release(bifolio_pool pool, const bifolio_block* blocks, size_t num_blocks) {
  return done([&] { get<pool_object>(pool).pool.release(c::to_ids<block_id>(blocks, num_blocks, "blocks")); });
}

bifolio_status bifolio_pool_num_free(bifolio_pool pool, int64_t* out) {
  return done([&] { at(out, "out") = get<pool_object>(pool).pool.num_free(); });
}

bifolio_status bifolio_pool_num_refs(bifolio_pool pool, bifolio_block block, uint32_t* out) {
  return done([&] { at(out, "out") = get<pool_object>(pool).pool.num_refs(block_id{block}); });
}

bifolio_status bifolio_pool_digest(bifolio_pool pool, uint64_t* out) {
  return done([&] { at(out, "out") = get<pool_object>(pool).pool.digest(); });
}

bifolio_status bifolio_manager_config_init(bifolio_manager_config* config, size_t size) {
  const kv_cache_config usual;
  bifolio_manager_config defaults{};
  defaults.block_size = usual.block_size;
  defaults.watermark = usual.watermark;
  defaults.max_sequences = usual.max_sequences;
  defaults.max_seq_len = usual.max_seq_len;
  return c::init_struct(config, size, defaults, "config");
}

bifolio_status bifolio_prompt_init(bifolio_prompt* prompt, size_t size) {
  bifolio_prompt defaults{};
  defaults.retention = retention_hint::normal;
  return c::init_struct(prompt, size, defaults, "prompt");
}

namespace {

kv_cache_manager& manager_of(bifolio_manager manager) { return *get<manager_object>(manager).manager; }

void require_prefix_cache(const kv_cache_manager& manager) {
  if (manager.prefix() != nullptr) return;
  detail::refuse(errc::failed_precondition,
                 "the manager has no prefix cache: prefix_caching of its configuration is 0");
}

bifolio_block_copy from_copy(const block_copy& copy) { return {to_index(copy.src), to_index(copy.dst)}; }

template <class Move>
bifolio_status swap(bifolio_manager manager, const bifolio_block_copy** copies, std::size_t* num_copies,
                    const Move& move) {
  return guarded([&] {
    manager_object& of = get<manager_object>(manager);
    (void)at(copies, "copies");
    (void)at(num_copies, "num_copies");
    of.copies.clear();
    const alloc_status status = move(*of.manager, of.copies);
    *copies = c::from_ids<bifolio_block_copy>(of.copies.data());
    *num_copies = of.copies.size();
    return status_of(status);
  });
}

}  // namespace

bifolio_status bifolio_manager_create(const bifolio_manager_config* config, bifolio_manager* out) {
  return done([&] {
    at(out, "out") = nullptr;
    auto made = std::make_shared<manager_object>();
    made->own.emplace(c::to_config(config, made->receiver));
    made->manager = &*made->own;
    *out = c::open_handle(std::move(made));
  });
}

bifolio_status bifolio_manager_destroy(bifolio_manager manager) { return c::destroy<manager_object>(manager); }

bifolio_status bifolio_manager_can_allocate(bifolio_manager manager, int64_t num_tokens) {
  return guarded([&] { return status_of(manager_of(manager).can_allocate(num_tokens)); });
}

bifolio_status bifolio_manager_allocate(bifolio_manager manager, int64_t num_tokens, bifolio_seq* out) {
  return guarded([&] {
    bifolio_seq& seq = at(out, "out");
    const allocate_result got = manager_of(manager).allocate(num_tokens);
    seq = to_index(got.seq);
    return status_of(got.status);
  });
}

bifolio_status bifolio_manager_open(bifolio_manager manager, const bifolio_prompt* prompt, int64_t num_new_tokens,
                                    bifolio_open_result* out) {
  return guarded([&] {
    bifolio_open_result& result = at(out, "out");
    const open_result got = manager_of(manager).open(c::prompt_of(prompt).view(), num_new_tokens);
    result = {to_index(got.seq), got.num_cached_tokens, from_copy(got.copy)};
    return status_of(got.status);
  });
}

bifolio_status bifolio_manager_append(bifolio_manager manager, bifolio_seq seq, int64_t num_tokens,
                                      int64_t num_lookahead, bifolio_block_copy* copy) {
  return guarded([&] {
    bifolio_block_copy& result = at(copy, "copy");
    const append_result got = manager_of(manager).append(seq_id{seq}, num_tokens, num_lookahead);
    result = from_copy(got.copy);
    return status_of(got.status);
  });
}

bifolio_status bifolio_manager_commit(bifolio_manager manager, bifolio_seq seq, const bifolio_token* tokens,
                                      size_t num_tokens) {
  return done([&] {
    kv_cache_manager& of = manager_of(manager);
    if (num_tokens > INT32_MAX)
      detail::refuse(errc::invalid_argument, "num_tokens ", num_tokens, " exceeds ", INT32_MAX);
    if (tokens == nullptr) {
      of.commit(seq_id{seq}, static_cast<std::int64_t>(num_tokens));
    } else {
      of.commit(seq_id{seq}, c::to_ids<token_id>(tokens, num_tokens, "tokens"));
    }
  });
}

bifolio_status bifolio_manager_fork(bifolio_manager manager, bifolio_seq seq, bifolio_seq* out) {
  return guarded([&] {
    bifolio_seq& forked = at(out, "out");
    const allocate_result got = manager_of(manager).fork(seq_id{seq});
    forked = to_index(got.seq);
    return status_of(got.status);
  });
}

bifolio_status bifolio_manager_truncate(bifolio_manager manager, bifolio_seq seq, int64_t num_tokens) {
  return done([&] { manager_of(manager).truncate(seq_id{seq}, num_tokens); });
}

bifolio_status bifolio_manager_free(bifolio_manager manager, bifolio_seq seq) {
  return done([&] { manager_of(manager).free(seq_id{seq}); });
}

bifolio_status bifolio_manager_swap_out(bifolio_manager manager, const bifolio_seq* seqs, size_t num_seqs,
                                        const bifolio_block_copy** copies, size_t* num_copies) {
  return swap(manager, copies, num_copies, [&](kv_cache_manager& of, std::vector<block_copy>& moves) {
    return of.swap_out(c::to_ids<seq_id>(seqs, num_seqs, "seqs"), moves);
  });
}

bifolio_status bifolio_manager_swap_in(bifolio_manager manager, const bifolio_seq* seqs, size_t num_seqs,
                                       const bifolio_block_copy** copies, size_t* num_copies) {
  return swap(manager, copies, num_copies, [&](kv_cache_manager& of, std::vector<block_copy>& moves) {
    return of.swap_in(c::to_ids<seq_id>(seqs, num_seqs, "seqs"), moves);
  });
}

bifolio_status bifolio_manager_num_tokens(bifolio_manager manager, bifolio_seq seq, int64_t* num_tokens,
                                          int64_t* num_committed) {
  return done([&] {
    const kv_cache_manager& of = manager_of(manager);
    const std::int64_t count = of.num_tokens(seq_id{seq});
    if (num_tokens != nullptr) *num_tokens = count;
    if (num_committed != nullptr) *num_committed = of.num_committed(seq_id{seq});
  });
}

bifolio_status bifolio_manager_slot_at(bifolio_manager manager, bifolio_seq seq, int64_t position, int64_t* slot) {
  return done([&] { at(slot, "slot") = to_index(manager_of(manager).slot_at(seq_id{seq}, position)); });
}

bifolio_status bifolio_manager_stats(bifolio_manager manager, bifolio_cache_stats* stats) {
  return done([&] {
    const cache_stats now = manager_of(manager).stats();
    c::write_struct(
        stats,
        {sizeof(bifolio_cache_stats), now.num_blocks, now.num_free_blocks, now.num_used_blocks, now.peak_used_blocks,
         now.num_sequences, now.num_tokens, now.num_table_entries, now.num_allocated_blocks, now.num_copied_blocks,
         now.num_forks, now.num_host_blocks, now.num_free_host_blocks, now.num_swapped_sequences,
         now.num_swapped_out_blocks, now.num_swapped_in_blocks},
        "stats");
  });
}

bifolio_status bifolio_manager_prefix_stats(bifolio_manager manager, bifolio_prefix_stats* stats) {
  return done([&] {
    const kv_cache_manager& of = manager_of(manager);
    require_prefix_cache(of);
    const prefix_stats& now = of.prefix()->stats();
    c::write_struct(stats,
                    {sizeof(bifolio_prefix_stats), now.num_lookups, now.num_looked_up_blocks, now.num_hit_blocks,
                     now.num_published_blocks, now.num_duplicate_blocks, now.num_evicted_blocks, now.num_cached_blocks},
                    "stats");
  });
}

bifolio_status bifolio_manager_match(bifolio_manager manager, const bifolio_prompt* prompt, int64_t* num_tokens) {
  return done([&] {
    std::int64_t& result = at(num_tokens, "num_tokens");
    const kv_cache_manager& of = manager_of(manager);
    require_prefix_cache(of);
    const c::prompt_of given(prompt);
    const auto block_size = static_cast<std::size_t>(of.config().block_size);
    std::vector<block_id> hits(given.view().tokens.size() / block_size);
    result = of.prefix()->match(given.view(), hits).num_blocks * of.config().block_size;
  });
}

bifolio_status bifolio_manager_drain_events(bifolio_manager manager, const bifolio_cache_event** events,
                                            size_t* num_events) {
  return done([&] {
    manager_object& of = get<manager_object>(manager);
    (void)at(events, "events");
    (void)at(num_events, "num_events");
    require_prefix_cache(*of.manager);
    of.manager->drain_events(of.drained);
    of.events.clear();
    for (const cache_event& event : of.drained) of.events.push_back(c::from_event(event));
    *events = of.events.data();
    *num_events = of.events.size();
  });
}

bifolio_status bifolio_manager_reset_prefix_cache(bifolio_manager manager) {
  return guarded([&] {
    kv_cache_manager& of = manager_of(manager);
    require_prefix_cache(of);
    return bifolio_status{of.reset_prefix_cache() ? BIFOLIO_OK : BIFOLIO_LATER};
  });
}

bifolio_status bifolio_manager_advance_clock(bifolio_manager manager, int64_t now) {
  return done([&] { manager_of(manager).advance_clock(now); });
}

bifolio_status bifolio_manager_digest(bifolio_manager manager, uint64_t* out) {
  return done([&] { at(out, "out") = manager_of(manager).digest(); });
}

bifolio_status bifolio_manager_check(bifolio_manager manager) {
  return done([&] {
    if (const std::string problem = manager_of(manager).check(); !problem.empty()) {
      detail::refuse(errc::internal, problem);
    }
  });
}

bifolio_status bifolio_batch_create(bifolio_batch* out) {
  return done([&] {
    at(out, "out") = nullptr;
    *out = c::open_handle(std::make_shared<c::batch_object>());
  });
}

bifolio_status bifolio_batch_destroy(bifolio_batch batch) { return c::destroy<c::batch_object>(batch); }

bifolio_status bifolio_batch_build(bifolio_batch batch, bifolio_manager manager, const bifolio_plan_row* rows,
                                   size_t num_rows) {
  return done([&] {
    c::batch_object& to = get<c::batch_object>(batch);
    const kv_cache_manager& of = manager_of(manager);
    (void)c::array(rows, num_rows, "rows");
    to.plan.seqs.clear();
    for (std::size_t i = 0; i < num_rows; ++i) {
      to.plan.seqs.push_back({.seq = seq_id{rows[i].seq}, .query_len = rows[i].query_len, .seq_len = rows[i].seq_len});
    }
    of.build(to.batch, to.plan);
  });
}

bifolio_status bifolio_batch_get(bifolio_batch batch, bifolio_host_batch_view* out) {
  return done([&] { at(out, "out") = c::from_view(get<c::batch_object>(batch).batch.view()); });
}
