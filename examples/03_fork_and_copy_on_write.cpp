// SPDX-License-Identifier: Apache-2.0
// 3. Fork and copy-on-write.
//
// Two continuations of one prompt share the prompt's blocks. Nothing is copied when a sequence is forked; the first of
// the two that writes into a half-full shared block gets a copy of it. The manager decides and reports the pair
// (src, dst); the cache engine carries it out, in every layer.

#include <bifolio/bifolio.hpp>
#include <cstdio>
#include <vector>

#include "expect.hpp"

namespace {

constexpr std::int32_t num_kv_heads = 1, head_dim = 4, block_size = 4;

/// Stores a token whose key and value are all `value`.
void store(bifolio::cache_engine& engine, bifolio::slot_id slot, float value) {
  const std::vector<float> row(num_kv_heads * head_dim, value);
  const auto view = bifolio::dense_view<const void>(row.data(), bifolio::dtype::f32, 1, num_kv_heads, head_dim);
  const std::int64_t where = to_index(slot);
  expect(engine.append(0, view, view, &where) == bifolio::errc::ok, "a token is stored");
}

/// The value that a sequence finds at a position.
float load(bifolio::cache_engine& engine, const bifolio::kv_cache_manager& manager, bifolio::seq_id seq,
           std::int64_t position) {
  std::vector<float> k(num_kv_heads * head_dim), v(k.size());
  const std::int64_t where = to_index(manager.slot_at(seq, position));
  bifolio::gather_params params;
  params.kv = engine.layers()[0];
  params.k = bifolio::dense_view<void>(k.data(), bifolio::dtype::f32, 1, num_kv_heads, head_dim);
  params.v = bifolio::dense_view<void>(v.data(), bifolio::dtype::f32, 1, num_kv_heads, head_dim);
  params.slot_mapping = &where;
  expect(engine.where().gather(params) == bifolio::errc::ok, "a token is read back");
  return v[0];
}

void run() {
  bifolio::kv_cache_config config;
  config.block_size = block_size;
  config.num_blocks = 8;
  bifolio::kv_cache_manager manager(config);
  const auto cpu = bifolio::make_backend();
  bifolio::cache_engine engine(
      *cpu, {1, config.num_blocks,
             bifolio::make_layout(bifolio::layout_kind::hnd, bifolio::dtype::f32, num_kv_heads, head_dim, block_size)});

  // A prompt of six tokens: one full block, and one with two tokens in it.
  const auto prompt = manager.allocate(6).seq;
  for (int i = 0; i < 6; ++i) store(engine, manager.slot_at(prompt, i), static_cast<float>(i));
  manager.commit(prompt, 6);

  // The fork has the same table. It took no block.
  const auto other = manager.fork(prompt).seq;
  expect(manager.num_free_blocks() == 6, "both use the same two blocks");
  expect(manager.block_at(other, 1) == manager.block_at(prompt, 1), "also the half-full one");

  // The fork goes on first: its tail block is shared, so it gets a copy.
  const auto forked = manager.append(other, 1);
  expect(forked.status == bifolio::alloc_status::ok && forked.has_copy(), "writing into a shared block copies it");
  std::printf("copy block %d to block %d\n", to_index(forked.copy.src), to_index(forked.copy.dst));
  expect(engine.copy_blocks({&forked.copy, 1}) == bifolio::errc::ok, "the engine copies, before anything is written");
  store(engine, manager.slot_at(other, 6), 200.0f);

  // The prompt's own sequence is the block's only user by now and writes in place.
  const auto continued = manager.append(prompt, 1);
  expect(continued.status == bifolio::alloc_status::ok && !continued.has_copy(), "nobody shares the tail any more");
  store(engine, manager.slot_at(prompt, 6), 100.0f);

  std::printf(
      "position 6: %g in one, %g in the other; position 5: %g and %g\n",
      static_cast<double>(load(engine, manager, prompt, 6)), static_cast<double>(load(engine, manager, other, 6)),
      static_cast<double>(load(engine, manager, prompt, 5)), static_cast<double>(load(engine, manager, other, 5)));
  expect(load(engine, manager, prompt, 6) == 100.0f && load(engine, manager, other, 6) == 200.0f,
         "each has its own seventh token");
  for (int i = 0; i < 6; ++i) {
    expect(load(engine, manager, prompt, i) == static_cast<float>(i), "the prompt is as it was");
    expect(load(engine, manager, other, i) == static_cast<float>(i), "in the fork as well");
  }
  expect(manager.num_free_blocks() == 5, "three blocks hold fourteen tokens of two sequences");

  manager.free(prompt);
  expect(load(engine, manager, other, 0) == 0.0f && manager.num_free_blocks() == 6, "the fork keeps what it uses");
  manager.free(other);
  expect(manager.num_free_blocks() == 8 && manager.check().empty(), "all blocks are free again");
}

}  // namespace

int main() { return run_example(run); }
