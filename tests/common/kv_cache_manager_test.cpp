// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/memory_resource.hpp>
#include <set>
#include <string>
#include <vector>

#include "common/cache_logic_helpers.hpp"

namespace bifolio::test {
namespace {

seq_id opened(kv_cache_manager& manager, std::int64_t num_tokens) {
  const allocate_result got = manager.allocate(num_tokens);
  REQUIRE(got.status == alloc_status::ok);
  return got.seq;
}

seq_id forked(kv_cache_manager& manager, seq_id parent) {
  const allocate_result got = manager.fork(parent);
  REQUIRE(got.status == alloc_status::ok);
  return got.seq;
}

block_copy appended(kv_cache_manager& manager, seq_id seq, std::int64_t num_tokens, std::int64_t lookahead = 0) {
  const append_result got = manager.append(seq, num_tokens, lookahead);
  REQUIRE(got.status == alloc_status::ok);
  return got.copy;
}

TEST_CASE("a forked prompt is counted once, and is evicted after private tails and never-used blocks, tail first") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 10});
  const seq_id parent = opened(manager, 14);  // three full blocks and a tail
  manager.commit(parent, 14);
  const seq_id child = forked(manager, parent);
  CHECK(manager.num_free_blocks() == 6);
  for (int b = 0; b < 4; ++b) CHECK(manager.pool().num_refs(block_id{b}) == 2);
  const block_copy copy = appended(manager, child, 1);
  CHECK(copy == block_copy{block_id{3}, block_id{4}});
  CHECK(manager.num_free_blocks() == 5);
  CHECK(table_of(manager, parent) == std::vector<int>{0, 1, 2, 3});
  CHECK(table_of(manager, child) == std::vector<int>{0, 1, 2, 4});
  manager.free(parent);
  manager.free(child);
  CHECK(free_order(manager.pool()) == std::vector<int>{4, 3, 5, 6, 7, 8, 9, 2, 1, 0});
  CHECK(manager.check() == "");
}

TEST_CASE("b beams take the shared blocks once and a tail each, and give all of them back") {
  for (const std::int64_t prompt : {9, 12, 40, 301, 1000}) {
    CAPTURE(prompt);
    kv_cache_manager manager({.block_size = 4, .num_blocks = 600, .max_sequences = 8});
    const std::int64_t blocks = (prompt + 3) / 4;
    const bool has_tail = prompt % 4 != 0;
    std::vector<seq_id> beams{opened(manager, prompt)};
    for (int k = 1; k < 5; ++k) beams.push_back(forked(manager, beams[0]));
    CHECK(manager.num_free_blocks() == 600 - blocks);
    int copies = 0;
    for (const seq_id beam : beams) copies += appended(manager, beam, 1).src != invalid_block;
    // The last to write finds the tail its own.
    CHECK(copies == (has_tail ? 4 : 0));
    CHECK(manager.num_free_blocks() == 600 - blocks - (has_tail ? 4 : 5));
    CHECK(manager.stats().num_table_entries == 5 * (blocks + (has_tail ? 0 : 1)));
    std::set<std::int64_t> tails;
    for (const seq_id beam : beams) tails.insert(to_index(manager.slot_at(beam, prompt)) / 4);
    CHECK(tails.size() == 5);
    for (const seq_id beam : beams) {
      manager.free(beam);
      CHECK(manager.check() == "");
    }
    CHECK(manager.num_free_blocks() == 600);
  }
}

TEST_CASE("a child stays valid when its parent goes") {
  kv_cache_manager manager({.block_size = 2, .num_blocks = 200});
  const seq_id parent = opened(manager, 311);
  const seq_id child = forked(manager, parent);
  const std::vector<int> before = table_of(manager, child);
  manager.free(parent);
  CHECK(table_of(manager, child) == before);
  CHECK(manager.num_free_blocks() == 200 - 156);
  CHECK(appended(manager, child, 1).src == invalid_block);
  CHECK(manager.check() == "");
}

TEST_CASE("full blocks stay shared when the sequence grows, the tail alone is copied") {
  kv_cache_manager manager({.block_size = 1, .num_blocks = 2000});
  const seq_id parent = opened(manager, 1000);
  const seq_id child = forked(manager, parent);
  CHECK(appended(manager, child, 5).src == invalid_block);  // block size 1: no tail
  CHECK(manager.num_free_blocks() == 995);
  manager.truncate(child, 500);  // in the middle of a shared chunk
  CHECK(manager.num_free_blocks() == 1000);
  CHECK(appended(manager, child, 1).src == invalid_block);
  CHECK(manager.block_at(child, 499) == manager.block_at(parent, 499));
  CHECK(manager.block_at(child, 500) != manager.block_at(parent, 500));
  CHECK(manager.check() == "");
}

TEST_CASE("rolling back across a block border returns exactly the emptied blocks") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 50});
  const seq_id seq = opened(manager, 10);
  for (std::int64_t drafted = 1; drafted < 30; ++drafted) {
    appended(manager, seq, drafted);
    for (std::int64_t kept = 10 + drafted; kept >= 10; --kept) {
      manager.truncate(seq, kept);
      REQUIRE(manager.num_free_blocks() == 50 - (kept + 3) / 4);
    }
  }
  CHECK(manager.check() == "");
}

TEST_CASE("rejected drafts leave the accepted tokens' slots as they were") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 50});
  const seq_id seq = opened(manager, 6);
  manager.commit(seq, 6);
  const slot_id fifth = manager.slot_at(seq, 5);
  appended(manager, seq, 1, 8);  // one token, eight speculated ones reserved
  CHECK(manager.num_table_blocks(seq) == 4);
  appended(manager, seq, 8);
  CHECK(manager.num_table_blocks(seq) == 4);  // they were reserved
  manager.commit(seq, 3);
  manager.truncate(seq, 9);
  CHECK(manager.num_tokens(seq) == 9);
  CHECK(manager.num_committed(seq) == 9);
  CHECK(manager.slot_at(seq, 5) == fifth);
  CHECK(manager.num_free_blocks() == 47);
}

TEST_CASE("a rolled-back block that another sequence reads is copied before it is written") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 50});
  const seq_id parent = opened(manager, 16);
  const seq_id child = forked(manager, parent);
  manager.truncate(child, 9);
  const block_copy copy = appended(manager, child, 1);
  CHECK(copy.src == manager.block_at(parent, 2));
  CHECK(copy.dst == manager.block_at(child, 2));
  CHECK(copy.src != copy.dst);
}

TEST_CASE("a sliding window gives back what no later token attends to, and not before the tokens are committed") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 20, .watermark = 0, .sliding_window = 6});
  const seq_id seq = opened(manager, 16);
  CHECK(manager.num_free_blocks() == 16);
  manager.commit(seq, 8);  // position 8 attends to 3 … 8: block 0 is still read
  CHECK(manager.num_released_blocks(seq) == 0);
  manager.commit(seq, 1);  // position 9 attends to 4 … 9
  CHECK(manager.num_released_blocks(seq) == 1);
  CHECK(manager.num_free_blocks() == 17);
  CHECK(manager.block_at(seq, 0) == invalid_block);
  CHECK(manager.slot_at(seq, 3) == no_slot);
  CHECK(to_index(manager.slot_at(seq, 4)) >= 0);
  const std::vector<int> order = free_order(manager.pool());
  CHECK(order.front() == 0);  // scratch is reused first
  manager.commit(seq, 7);
  CHECK(manager.num_free_blocks() == 18);
  manager.free(seq);
  CHECK(manager.num_free_blocks() == 20);
  CHECK(manager.check() == "");
}

TEST_CASE("a prompt longer than the pool is admitted when the window recycles, and refused without one") {
  kv_cache_manager whole({.block_size = 4, .num_blocks = 10, .watermark = 0});
  CHECK(whole.can_allocate(400, 8) == alloc_status::never);
  kv_cache_manager manager({.block_size = 4, .num_blocks = 10, .watermark = 0, .sliding_window = 12});
  CHECK(manager.can_allocate(400, 8) == alloc_status::ok);
  CHECK(manager.can_allocate(400, 0) == alloc_status::never);  // in one go
  const seq_id seq = opened(manager, 8);
  manager.commit(seq, 8);
  std::int64_t most = 0;
  for (int chunk = 1; chunk < 50; ++chunk) {
    appended(manager, seq, 8);
    most = std::max(most, 10 - manager.num_free_blocks());
    manager.commit(seq, 8);
  }
  CHECK(manager.num_tokens(seq) == 400);
  CHECK(most <= manager.blocks_at_peak(400, 8));
  CHECK(manager.check() == "");
}

TEST_CASE("admission leaves the watermark free and says never for what could never be admitted") {
  kv_cache_manager manager({.block_size = 16, .num_blocks = 100, .watermark = 0.05});
  CHECK(manager.watermark_blocks() == 5);
  CHECK(manager.can_allocate(95 * 16) == alloc_status::ok);
  CHECK(manager.can_allocate(95 * 16 + 1) == alloc_status::never);
  const seq_id seq = opened(manager, 60 * 16);
  CHECK(manager.can_allocate(35 * 16) == alloc_status::ok);
  CHECK(manager.can_allocate(35 * 16, 0, 1) == alloc_status::later);
  CHECK(manager.can_allocate(36 * 16) == alloc_status::later);
  appended(manager, seq, 40 * 16);  // growth may use it
  CHECK(manager.num_free_blocks() == 0);
  CHECK(manager.append(seq, 1).status == alloc_status::never);
}

TEST_CASE("what can_append foretells is what append does, to the last block") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 6});
  const seq_id a = opened(manager, 7);
  const seq_id b = forked(manager, a);
  const seq_id c = opened(manager, 16);  // the pool is full
  CHECK(manager.num_free_blocks() == 0);
  const std::uint64_t before = manager.digest();
  CHECK(manager.can_append(a, 1) == alloc_status::later);  // it would need a copy
  CHECK(manager.append(a, 1).status == alloc_status::later);
  CHECK(manager.can_append(c, 1) == alloc_status::later);
  CHECK(manager.can_append(c, 9) == alloc_status::never);
  CHECK(manager.append(c, 9).status == alloc_status::never);
  CHECK(manager.digest() == before);
  manager.free(b);
  CHECK(manager.append(a, 1).status == alloc_status::ok);  // the tail is its own again
  CHECK(manager.num_free_blocks() == 0);
}

TEST_CASE("when all sequence records are open, allocate and fork say later") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 6, .max_sequences = 2});
  const seq_id a = opened(manager, 1);
  const seq_id b = opened(manager, 1);
  const std::uint64_t before = manager.digest();
  CHECK(manager.allocate(1).status == alloc_status::later);
  CHECK(manager.fork(a).status == alloc_status::later);
  CHECK(manager.can_allocate(1) == alloc_status::later);
  CHECK(manager.digest() == before);
  manager.free(b);
  CHECK(manager.fork(a).status == alloc_status::ok);
}

TEST_CASE("the arrays for kernels hold tables, lengths and slots of each row, and poison elsewhere") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 20});
  const seq_id a = opened(manager, 9);
  const seq_id b = opened(manager, 2);
  appended(manager, b, 1, 12);  // reserved blocks are not shown
  step_plan plan;
  plan.seqs = {{.seq = a, .query_len = 3, .seq_len = 9}, {.seq = b, .query_len = 1, .seq_len = 3}};
  step_batch batch;
  batch.query_positions = {5};  // of an earlier step that its caller made
  manager.build(batch, plan);
  CHECK(batch.query_positions.empty());
  CHECK(batch.view().query_positions == nullptr);
  CHECK(batch.query_start_loc == std::vector<std::int32_t>{0, 3, 4});
  CHECK(batch.seq_lens == std::vector<std::int32_t>{9, 3});
  CHECK(batch.block_table_stride == 3);
  CHECK(batch.block_tables == std::vector<std::int32_t>{0, 1, 2, 3, padding_entry, padding_entry});
  CHECK(batch.slot_mapping == std::vector<std::int64_t>{6, 7, 8, 14});
  plan.seqs.clear();
  manager.build(batch, plan);
  CHECK(batch.view().num_seqs == 0);
  CHECK(batch.view().num_tokens == 0);
  CHECK(batch.query_start_loc == std::vector<std::int32_t>{0});
}

TEST_CASE("a batch that is filled again shows the tables as they are now") {
  const kv_cache_config config{.block_size = 4, .num_blocks = 40, .first_generation = 1000, .num_host_blocks = 8};
  kv_cache_manager manager(config);
  step_batch kept;
  const auto is_as_new = [&](const kv_cache_manager& of, seq_id seq, std::int32_t seq_len) {
    step_plan plan;
    plan.seqs = {{.seq = seq, .query_len = 1, .seq_len = seq_len}};
    of.build(kept, plan);
    step_batch fresh;
    of.build(fresh, plan);
    return difference(kept, fresh).empty();
  };
  (void)opened(manager, 20);
  const seq_id a = opened(manager, 12);
  CHECK(is_as_new(manager, a, 12));
  // Another manager with the same handles, after as many changes.
  kv_cache_manager other(config);
  (void)opened(other, 4);
  const seq_id twin = opened(other, 12);
  REQUIRE(twin == a);
  REQUIRE(other.block_at(twin, 0) != manager.block_at(a, 0));
  CHECK(is_as_new(other, twin, 12));
  CHECK(is_as_new(manager, a, 12));
  // Fewer tokens of a table that did not change, in a batch whose stride another sequence keeps.
  const seq_id lengthy = opened(manager, 20);
  step_plan plan;
  plan.seqs = {{.seq = a, .query_len = 1, .seq_len = 12}, {.seq = lengthy, .query_len = 1, .seq_len = 20}};
  manager.build(kept, plan);
  plan.seqs[0].seq_len = 3;
  manager.build(kept, plan);
  CHECK(kept.block_tables[1] == padding_entry);
  CHECK(kept.block_tables[2] == padding_entry);
  // Out and back, with no step between.
  manager.commit(a, 12);
  CHECK(is_as_new(manager, a, 12));
  const block_id before = manager.block_at(a, 0);
  std::vector<block_copy> copies;
  REQUIRE(manager.swap_out(std::span(&a, 1), copies) == alloc_status::ok);
  manager.free(opened(manager, 4 * manager.num_free_blocks()));
  REQUIRE(manager.swap_in(std::span(&a, 1), copies) == alloc_status::ok);
  REQUIRE(manager.block_at(a, 0) != before);
  CHECK(is_as_new(manager, a, 12));
  // Another sequence in the record of one that ended.
  const block_id of_a = manager.block_at(a, 0);
  manager.free(a);
  const seq_id b = opened(manager, 12);
  REQUIRE(static_cast<std::uint32_t>(to_index(a)) == static_cast<std::uint32_t>(to_index(b)));
  REQUIRE(manager.block_at(b, 0) != of_a);
  CHECK(is_as_new(manager, b, 12));
}

TEST_CASE("rows get wider in steps, and narrower when the long ones have gone") {
  constexpr std::int32_t longest = 4000;
  kv_cache_manager manager({.block_size = 1, .num_blocks = 2 * longest, .max_seq_len = longest});
  const seq_id lengthy = opened(manager, 1);
  const seq_id brief = opened(manager, 3);
  step_batch kept, fresh;
  const auto build = [&](std::vector<scheduled_seq> rows) {
    step_plan plan;
    plan.seqs = std::move(rows);
    manager.build(kept, plan);
    fresh = {};
    manager.build(fresh, plan);
    REQUIRE(difference(kept, fresh) == "");
  };
  std::int32_t num_strides = 0;
  std::int64_t last = 0;
  for (std::int32_t length = 1; length <= longest; ++length) {
    if (length > 1) (void)appended(manager, lengthy, 1);
    build({{.seq = lengthy, .query_len = 1, .seq_len = length}, {.seq = brief, .query_len = 1, .seq_len = 3}});
    CHECK(fresh.block_table_stride == std::max(length, 3));
    CHECK(kept.block_table_stride <= length + 16 + length / 8);
    num_strides += kept.block_table_stride != last ? 1 : 0;
    last = kept.block_table_stride;
    if (length == 19) CHECK(num_strides <= 2);  // rows of a few entries do not go to and fro
  }
  CHECK(num_strides <= 40);
  // A row that comes and goes does not move the others; rows much narrower than the stride do.
  build({{.seq = brief, .query_len = 1, .seq_len = 3}, {.seq = lengthy, .query_len = 1, .seq_len = longest / 2 + 1}});
  CHECK(kept.block_table_stride >= longest / 2 + 1);
  build({{.seq = brief, .query_len = 1, .seq_len = 3}});
  CHECK(kept.block_table_stride <= 19);
}

TEST_CASE("rows of a windowed sequence show the free entry where blocks were given back") {
  kv_cache_manager manager({.block_size = 2, .num_blocks = 300, .sliding_window = 4});
  const seq_id seq = opened(manager, 400);
  manager.commit(seq, 397);
  step_plan plan;
  plan.seqs = {{.seq = seq, .query_len = 3, .seq_len = 400}};
  step_batch batch;
  manager.build(batch, plan);
  REQUIRE(batch.block_table_stride == 200);
  for (std::size_t i = 0; i < 197; ++i) REQUIRE(batch.block_tables[i] == padding_entry);
  for (std::size_t i = 197; i < 200; ++i) {
    CHECK(batch.block_tables[i] == to_index(manager.block_at(seq, static_cast<std::int64_t>(i))));
  }
  CHECK(batch.slot_mapping[0] == to_index(manager.slot_at(seq, 397)));
}

TEST_CASE("tokens are divided into blocks exactly, for any block size and length") {
  for (const std::int32_t block_size : {1,
                                        2,
                                        3,
                                        5,
                                        7,
                                        16,
                                        48,
                                        100,
                                        127,
                                        128,
                                        129,
                                        1000,
                                        4095,
                                        4097,
                                        65535,
                                        999983,
                                        (1 << 29) - 1,
                                        1 << 29,
                                        (1 << 29) + 1,
                                        (1 << 30) - 1,
                                        1 << 30}) {
    const std::int64_t most = std::min<std::int64_t>(1 << 30, std::int64_t{block_size} * 3000);
    kv_cache_manager manager({.block_size = block_size, .num_blocks = 3000, .max_seq_len = 1 << 30});
    for (const std::int64_t around : {std::int64_t{1}, most / 7, most / 2, most - block_size, most}) {
      for (std::int64_t multiple = around / block_size; multiple <= around / block_size + 1; ++multiple) {
        for (const std::int64_t tokens :
             {multiple * block_size - 1, multiple * block_size, multiple * block_size + 1}) {
          if (tokens < 1 || tokens > most) continue;
          CAPTURE(block_size);
          CAPTURE(tokens);
          const seq_id seq = opened(manager, tokens);
          REQUIRE(manager.num_table_blocks(seq) == tokens / block_size + (tokens % block_size != 0 ? 1 : 0));
          const block_id last = manager.block_at(seq, manager.num_table_blocks(seq) - 1);
          REQUIRE(to_index(manager.slot_at(seq, tokens - 1)) ==
                  std::int64_t{to_index(last)} * block_size + (tokens - 1) % block_size);
          manager.free(seq);
        }
      }
    }
  }
}

TEST_CASE("slots past 2^31 are computed in 64 bits") {
  kv_cache_manager manager({.block_size = 1 << 28, .num_blocks = 64, .max_seq_len = 1 << 30});
  seq_id seq{};
  for (int i = 0; i < 12; ++i) seq = opened(manager, 1 << 28);
  CHECK(to_index(manager.slot_at(seq, (1 << 28) - 1)) == (std::int64_t{12} << 28) - 1);
  step_plan plan;
  plan.seqs = {{.seq = seq, .query_len = 2, .seq_len = 1 << 28}};
  step_batch batch;
  manager.build(batch, plan);
  CHECK(batch.slot_mapping == std::vector<std::int64_t>{(std::int64_t{12} << 28) - 2, (std::int64_t{12} << 28) - 1});
}

TEST_CASE("statistics tell peak, sharing and copies") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 20});
  const seq_id a = opened(manager, 10);
  const seq_id b = forked(manager, a);
  appended(manager, b, 1);
  const seq_id c = opened(manager, 30);
  manager.free(c);
  const cache_stats stats = manager.stats();
  CHECK(stats.num_blocks == 20);
  CHECK(stats.num_used_blocks == 4);
  CHECK(stats.num_free_blocks == 16);
  CHECK(stats.peak_used_blocks == 12);
  CHECK(stats.num_sequences == 2);
  CHECK(stats.num_tokens == 21);
  CHECK(stats.num_table_entries == 6);
  CHECK(stats.num_allocated_blocks == 12);
  CHECK(stats.num_copied_blocks == 1);
  CHECK(stats.num_forks == 1);
}

TEST_CASE("equal histories of two managers give equal digests") {
  const auto play = [](kv_cache_manager& manager) {
    const seq_id a = opened(manager, 21);
    const seq_id b = forked(manager, a);
    appended(manager, b, 3);
    manager.free(a);
    return manager.digest();
  };
  kv_cache_manager one({.block_size = 4, .num_blocks = 20});
  kv_cache_manager two({.block_size = 4, .num_blocks = 20});
  CHECK(play(one) == play(two));
  kv_cache_manager pinned({.block_size = 4, .num_blocks = 20, .first_generation = 7});
  kv_cache_manager again({.block_size = 4, .num_blocks = 20, .first_generation = 7});
  CHECK(opened(pinned, 1) == opened(again, 1));
}

TEST_CASE("handles of freed sequences and of other managers are unknown") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 20});
  kv_cache_manager other({.block_size = 4, .num_blocks = 20});
  const seq_id a = opened(manager, 5);
  const seq_id foreign = opened(other, 5);
  CHECK(manager.contains(a));
  CHECK_FALSE(manager.contains(foreign));
  CHECK_FALSE(manager.contains(invalid_seq));
  CHECK_FALSE(manager.contains(seq_id{to_index(a) + 1}));
  manager.free(a);
  CHECK_FALSE(manager.contains(a));
  const seq_id reused = opened(manager, 5);
  CHECK_FALSE(manager.contains(a));
  CHECK(manager.contains(reused));
  // The record of a free sequence has a generation too, but no handle of it is valid.
  manager.free(reused);
  CHECK_FALSE(manager.contains(seq_id{to_index(reused) + (std::uint64_t{1} << 32)}));
}

TEST_CASE("memory of tables that are freed is used again") {
  counting_memory_resource memory(default_host_memory());
  kv_cache_manager manager({.block_size = 1, .num_blocks = 4000, .max_seq_len = 4000, .memory = &memory});
  std::int64_t after_first = 0;
  for (int round = 0; round < 20; ++round) {
    const seq_id a = opened(manager, 2000);
    const seq_id b = forked(manager, a);
    appended(manager, b, 500);
    manager.truncate(b, 700);
    manager.free(a);
    manager.free(b);
    if (round == 0) after_first = memory.num_allocations();
  }
  CHECK(memory.num_allocations() == after_first);
  CHECK(manager.check() == "");
}

}  // namespace
}  // namespace bifolio::test
