// SPDX-License-Identifier: Apache-2.0
/// Layer groups one behaviour at a time: what a configuration must fulfil, hits that every group has, states, encoder
/// outputs, and the mistakes that others made with groups.

#include <doctest/doctest.h>

#include <array>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/layer_groups.hpp>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "common/cache_logic_helpers.hpp"

namespace bifolio::test {
namespace {

group_config full(std::int32_t block_size, std::int64_t num_blocks) {
  return {.kind = group_kind::full, .block_size = block_size, .num_blocks = num_blocks};
}
group_config window(std::int32_t block_size, std::int64_t num_blocks, std::int32_t width) {
  return {.kind = group_kind::window, .block_size = block_size, .num_blocks = num_blocks, .window = width};
}
group_config states(std::int64_t num_blocks, std::int32_t interval = 0, std::int32_t num_drafts = 0) {
  return {.kind = group_kind::state,
          .block_size = 1,
          .num_blocks = num_blocks,
          .snapshot_interval = interval,
          .num_draft_slots = num_drafts};
}
group_config cross(std::int32_t block_size, std::int64_t num_blocks, std::int32_t max_tokens) {
  return {.kind = group_kind::cross, .block_size = block_size, .num_blocks = num_blocks, .max_tokens = max_tokens};
}

kv_cache_config with_groups(std::vector<group_config> groups, bool prefix = true) {
  kv_cache_config config{.watermark = 0, .max_sequences = 16, .max_seq_len = 4096, .first_generation = 1};
  config.prefix.enabled = prefix;
  config.prefix.seed = hash_seed{1, 2};
  config.groups = std::move(groups);
  return config;
}

std::vector<token_id> text(int count, int salt = 0) {
  std::vector<token_id> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(token_id{i * 7 + salt});
  return tokens;
}

/// Computes a whole prompt, in steps as long as the manager wants them; the sequence stays open.
seq_id compute(kv_cache_manager& manager, const std::vector<token_id>& prompt, std::int64_t* num_cached = nullptr,
               std::int64_t most = 4096) {
  const open_result opened = manager.open({.tokens = prompt}, most);
  REQUIRE(opened.status == alloc_status::ok);
  if (num_cached != nullptr) *num_cached = opened.num_cached_tokens;
  for (;;) {
    const std::int64_t done = manager.num_committed(opened.seq);
    const std::int64_t end = manager.num_tokens(opened.seq);
    manager.commit(opened.seq,
                   std::span(prompt).subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(end - done)));
    const std::int64_t left = static_cast<std::int64_t>(prompt.size()) - end;
    if (left == 0) return opened.seq;
    const std::int64_t step = std::min({left, most, manager.step_limit(opened.seq)});
    REQUIRE(manager.append(opened.seq, step).status == alloc_status::ok);
  }
}

std::string refusal_of(const kv_cache_config& config) {
  try {
    kv_cache_manager manager(config);
  } catch (const error& refused) {
    return refused.code() == errc::invalid_argument ? refused.what() : "another code";
  }
  return "not refused";
}

TEST_CASE("one group in the list is the manager without a list, to the digest") {
  kv_cache_config plain{
      .block_size = 4, .num_blocks = 30, .sliding_window = 9, .max_sequences = 4, .first_generation = 1};
  kv_cache_config listed{.max_sequences = 4, .first_generation = 1};
  listed.groups = {window(4, 30, 9)};
  kv_cache_manager a(plain), b(listed);
  CHECK(b.num_groups() == 1);
  CHECK(b.config().block_size == 4);
  for (kv_cache_manager* manager : {&a, &b}) {
    const seq_id seq = manager->allocate(22).seq;
    manager->commit(seq, 20);
    CHECK(manager->append(seq, 3).status == alloc_status::ok);
    CHECK(manager->num_released_blocks(seq, 0) == 3);
  }
  CHECK(a.digest() == b.digest());
  CHECK_THROWS_AS((void)a.pool(1), error);
}

TEST_CASE("a configuration that groups cannot have is refused in one sentence that names the group") {
  struct example {
    std::vector<group_config> groups;
    const char* words;
  };
  group_config hosted = window(4, 9, 4);
  hosted.num_host_blocks = 3;
  group_config spaced = window(4, 9, 4);
  spaced.snapshot_interval = 12;
  group_config first_spaced = window(4, 9, 4);
  first_spaced.snapshot_interval = 4;
  group_config wide = full(4, 9);
  wide.window = 5;
  group_config paired = states(4);
  paired.block_size = 2;
  const std::vector<example> examples{
      {{full(4, 9), window(4, 9, 0)}, "group 1: window 0 is not between 1 and"},
      {{full(4, 9), full(4, 0)}, "group 1: num_blocks 0 is not between 1 and"},
      {{full(0, 9)}, "group 0: block_size 0 is not between 1 and"},
      {{full(4, 9), paired}, "group 1: block_size 2 is not between 1 and 1"},
      {{full(4, 9), states(4, 6)}, "group 1: snapshot_interval 6 is no multiple of the first group's block_size 4"},
      {{full(4, 9), states(4, 4), states(4, 8)}, "group 2: snapshot_interval 8"},
      {{full(4, 9), spaced, states(4, 8)}, "group 2: snapshot_interval 8 differs from the 12 of an earlier group"},
      {{first_spaced, full(4, 9)}, "group 0: snapshot_interval of a group that has no states and no window, or is the"},
      {{full(4, 9), states(4, 0, 1), states(4)}, "group 2: num_draft_slots 0 differ from the 1 of an earlier group"},
      {{full(4, 9), states(4, 0, 65)}, "group 1: num_draft_slots 65 is not between 0 and 64"},
      {{full(4, 9), window(6, 9, 4)}, "group 1: block_size 6 is neither a multiple nor a divisor"},
      {{full(4, 9), cross(4, 9, 0)}, "group 1: max_tokens 0 is not between 1 and"},
      {{full(4, 9), cross(4, 9, 8), cross(4, 9, 8)}, "group 2: a second group of kind cross"},
      {{states(4), full(4, 9)}, "group 0: kind state cannot be the first"},
      {{window(4, 9, 4), full(4, 9)}, "group 0: kind window cannot be the first of several with prefix caching"},
      {{full(4, 9), hosted}, "group 1: num_host_blocks 3 does not go with the first group's 0"},
      {{full(4, 9), wide}, "group 1: window of a group that is no window group 5 is not between 0 and 0"},
      {std::vector<group_config>(9, full(4, 9)), "number of groups 9 is not between 1 and 8"},
  };
  for (const example& one : examples) {
    const std::string said = refusal_of(with_groups(one.groups));
    CAPTURE(said);
    CHECK(said.find(one.words) != std::string::npos);
    CHECK(said.find('\n') == std::string::npos);
  }
  // Without prefix caching nothing has to match.
  CHECK(refusal_of(with_groups({window(4, 9, 4), full(3, 9), window(5, 9, 2)}, false)) == "not refused");
}

TEST_CASE("groups take or refuse together, and a refusal leaves the digest of all as it was") {
  kv_cache_manager manager(with_groups({full(4, 100), window(2, 6, 5), states(3)}, false));
  CHECK(manager.allocate(13).status == alloc_status::never);  // 7 blocks of the window group at once
  CHECK(manager.can_allocate(100, 4) == alloc_status::ok);    // but 4 at a time it never holds more than 5
  CHECK(manager.can_allocate(100, 0) == alloc_status::never);
  const seq_id seq = manager.allocate(8).seq;
  const std::uint64_t before = manager.digest();
  CHECK(manager.append(seq, 8).status == alloc_status::never);
  CHECK(manager.can_append(seq, 5) == alloc_status::never);
  const seq_id other = manager.allocate(1).seq;
  CHECK(manager.append(seq, 4).status == alloc_status::later);
  manager.free(other);
  CHECK(manager.num_free_blocks(1) == 2);
  CHECK(manager.append(seq, 4).status == alloc_status::ok);
  manager.truncate(seq, 8);
  CHECK(manager.check() == "");
  CHECK(before != 0);
  // Each in its own units: position 7 is in the second block of four and the fourth of two.
  CHECK(manager.slot_at(seq, 7, 0) == slot_id{to_index(manager.block_at(seq, 1, 0)) * 4 + 3});
  CHECK(manager.slot_at(seq, 7, 1) == slot_id{to_index(manager.block_at(seq, 3, 1)) * 2 + 1});
  CHECK(manager.blocks_to_append(seq, 1, 0, 0) == 1);
  CHECK(manager.blocks_to_append(seq, 5, 0, 1) == 3);
  CHECK(manager.blocks_to_append(seq, 5, 0, 2) == 1);
}

TEST_CASE("a window group holds at most the blocks of its window, the step and one more") {
  kv_cache_manager manager(with_groups({full(4, 200), window(4, 40, 10)}, false));
  const seq_id seq = manager.allocate(7).seq;
  std::int64_t most = 0;
  for (int step = 0; step < 90; ++step) {
    manager.commit(seq, manager.num_tokens(seq) - manager.num_committed(seq));
    CHECK(manager.append(seq, 7).status == alloc_status::ok);
    most = std::max(most, manager.num_held_blocks(seq, 1));
  }
  CHECK(most <= manager.blocks_at_peak(637, 7, 1));
  CHECK(manager.blocks_at_peak(637, 7, 1) == (10 - 1 + 7 + 2) / 4 + 1);  // ceil((w - 1 + in flight - 1) / 4) + 1
  CHECK(manager.num_held_blocks(seq, 0) == manager.num_table_blocks(seq, 0));
}

TEST_CASE("a block that a window gave back is its next user's, whatever becomes of the sequence that had it") {
  kv_cache_manager manager(with_groups({full(4, 100), window(4, 5, 8)}, false));
  const seq_id first = manager.allocate(8).seq;
  manager.commit(first, 8);
  CHECK(manager.append(first, 8).status == alloc_status::ok);
  manager.commit(first, 8);
  CHECK(manager.num_released_blocks(first, 1) == 2);
  CHECK(manager.slot_at(first, 3, 1) == no_slot);
  const seq_id second = manager.allocate(8).seq;
  const block_id taken = manager.block_at(second, 0, 1);
  manager.truncate(first, 15);
  CHECK(code_of([&] { manager.truncate(first, 7); }) == errc::invalid_argument);
  CHECK(manager.block_at(first, 0, 1) == invalid_block);
  manager.free(first);
  CHECK(manager.pool(1).num_refs(taken) == 1);
  CHECK(manager.num_free_blocks(1) == 3);
  CHECK(manager.check() == "");
}

TEST_CASE("what two sequences compute at once is registered once in every group, and the other's blocks are given up") {
  kv_cache_manager manager(with_groups({full(4, 40), window(4, 30, 8), states(12)}));
  const std::vector<token_id> prompt = text(13);
  std::vector<seq_id> both;
  for (int i = 0; i < 2; ++i) both.push_back(manager.open({.tokens = prompt}, 13).seq);
  for (const seq_id seq : both) {
    CHECK(manager.num_tokens(seq) == 12);  // where the snapshot is left
    manager.commit(seq, std::span(prompt).first(12));
  }
  for (const std::int32_t group : {0, 1}) {
    CHECK(manager.prefix(group)->stats().num_cached_blocks == 3);
    CHECK(manager.prefix(group)->stats().num_duplicate_blocks == 3);
  }
  CHECK(manager.prefix(2)->stats().num_cached_blocks == 1);
  CHECK(manager.prefix(2)->stats().num_duplicate_blocks == 1);
  for (const seq_id seq : {both[1], both[0]}) {
    manager.free(seq);
    CHECK(manager.can_open({.tokens = prompt}).num_cached_tokens == 12);
  }
  CHECK(manager.reset_prefix_cache());
  CHECK(manager.check() == "");
}

TEST_CASE("free blocks return to each pool with the tail of the sequence first") {
  kv_cache_manager manager(with_groups({full(2, 6), window(1, 8, 8)}));
  const std::vector<token_id> prompt = text(4);
  const seq_id seq = compute(manager, prompt);
  manager.free(seq);
  CHECK(free_order(manager.pool(0)) == std::vector<int>{2, 3, 4, 5, 1, 0});
  CHECK(free_order(manager.pool(1)) == std::vector<int>{4, 5, 6, 7, 3, 2, 1, 0});
}

TEST_CASE("a hit that one group lacks is a hit of none, and of the next shorter length that all have") {
  kv_cache_manager manager(with_groups({full(4, 40), window(4, 6, 8)}));
  const std::vector<token_id> prompt = text(41);
  std::int64_t num_cached = 0;
  manager.free(compute(manager, prompt, &num_cached, 4));
  // All ten blocks are there in the first group, and of the window group those before 40.
  seq_id seq = compute(manager, prompt, &num_cached, 4);
  CHECK(num_cached == 40);
  CHECK(manager.num_released_blocks(seq, 1) == 8);
  CHECK(manager.block_at(seq, 7, 1) == invalid_block);
  manager.free(seq);
  // Others take the window group's blocks.
  seq = manager.allocate(20).seq;
  CHECK(manager.can_open({.tokens = prompt}).num_cached_tokens == 0);
  const std::uint64_t before = manager.digest();
  CHECK(manager.open({.tokens = prompt}, 41).status == alloc_status::never);  // eleven of six blocks
  CHECK(manager.open({.tokens = prompt}, 8).status == alloc_status::later);
  CHECK(manager.digest() == before);
  manager.free(seq);
  CHECK(manager.check() == "");
}

TEST_CASE("when the first group loses contents, others lose what belonged to them") {
  kv_cache_manager manager(with_groups({full(4, 4), window(4, 20, 9), states(12)}));
  const std::vector<token_id> prompt = text(13);
  manager.free(compute(manager, prompt));
  CHECK(manager.prefix(1)->stats().num_cached_blocks == 3);
  CHECK(manager.prefix(2)->stats().num_cached_blocks > 0);
  const seq_id other = manager.allocate(16).seq;  // takes all blocks of the first group
  CHECK(manager.prefix(0)->stats().num_cached_blocks == 0);
  CHECK(manager.prefix(1)->stats().num_cached_blocks == 0);
  CHECK(manager.prefix(2)->stats().num_cached_blocks == 0);
  manager.free(other);
  // Computed anew, the same text is registered anew; nothing stale is found under it.
  manager.free(compute(manager, prompt));
  std::int64_t num_cached = 0;
  manager.free(compute(manager, prompt, &num_cached));
  CHECK(num_cached == 12);
  CHECK(manager.check() == "");
}

TEST_CASE("a state is only found where a snapshot was taken, and one is taken where a look-up missed it") {
  kv_cache_manager manager(with_groups({full(4, 200), states(30)}));
  std::vector<token_id> first = text(40);
  manager.free(compute(manager, first));
  // Another question after the same first 30 tokens: the first group has 28 of them, the states none of those.
  std::vector<token_id> second = first;
  for (std::size_t i = 30; i < second.size(); ++i) second[i] = token_id{9000 + static_cast<int>(i)};
  std::int64_t num_cached = -1;
  manager.free(compute(manager, second, &num_cached));
  CHECK(num_cached == 0);
  // It computed them again, and left a snapshot where the hit would have ended.
  std::vector<token_id> third = first;
  for (std::size_t i = 30; i < third.size(); ++i) third[i] = token_id{5000 + static_cast<int>(i)};
  manager.free(compute(manager, third, &num_cached));
  CHECK(num_cached == 28);
  // The end of a prompt always leaves one, whatever the length is to the interval.
  for (const int length : {64, 100, 101, 163}) {
    const std::vector<token_id> prompt = text(length, 1000 * length);
    manager.free(compute(manager, prompt));
    std::vector<token_id> longer = prompt;
    for (int i = 0; i < 9; ++i) longer.push_back(token_id{i});
    manager.free(compute(manager, longer, &num_cached));
    CHECK(num_cached == length / 4 * 4);
  }
  CHECK(manager.check() == "");
}

TEST_CASE("snapshots at an interval are given up before those where prompts end") {
  kv_cache_manager manager(with_groups({full(4, 400), states(10, 8)}));
  manager.free(compute(manager, text(100)));
  std::int64_t num_cached = 0;
  std::vector<token_id> shorter = text(100);
  shorter.resize(60);
  shorter.push_back(token_id{-1});
  manager.free(compute(manager, shorter, &num_cached));
  CHECK(num_cached == 56);
  // Ten slots, of which the twelve of a long other prompt evict those at the interval, and not the end of the first.
  manager.free(compute(manager, text(100, 50000)));
  manager.free(compute(manager, text(101), &num_cached));
  CHECK(num_cached == 100);
}

TEST_CASE("of a prompt's snapshots those far from a likely place go first, and the last at the interval goes last") {
  kv_cache_manager manager(with_groups({full(4, 400), states(14, 8)}));
  manager.free(compute(manager, text(90)));
  std::vector<std::int64_t> given_up;
  std::vector<std::int64_t> there;
  for (std::int64_t length = 8; length < 90; length += 8) there.push_back(length);
  for (int taken = 0; taken < 14; ++taken) {
    const seq_id seq = manager.allocate(1).seq;
    CHECK(seq != invalid_seq);
    std::erase_if(there, [&](std::int64_t length) {
      const std::vector<token_id> asked = text(static_cast<int>(length) + 1);
      if (manager.can_open({.tokens = asked}).num_cached_tokens == length) return false;
      given_up.push_back(length);
      return true;
    });
  }
  CHECK(given_up == std::vector<std::int64_t>{8, 16, 32, 40, 48, 64, 24, 56, 72, 80, 88});
}

TEST_CASE("states that decoding left are kept as long as others only where prompts go on from them") {
  kv_cache_manager manager(with_groups({full(4, 4000), states(2000, 8)}));
  int salt = 1000;
  // A prompt of 10 tokens and two sampled ones: decoding passes the border at 12. Says the level of the state there.
  std::vector<token_id> said;
  const auto converse = [&] {
    said = text(10, salt += 1000);
    const seq_id seq = compute(manager, said);
    for (int i = 0; i < 2; ++i) {
      said.push_back(token_id{i + 1});
      REQUIRE(manager.append(seq, 1).status == alloc_status::ok);
      manager.commit(seq, std::span(&said.back(), 1));
    }
    const block_level level = manager.pool(1).level(manager.state_at(seq, 12, 1));
    manager.free(seq);
    return level;
  };
  CHECK(converse() == retention_hint::normal);

  // Prompts that share their beginning alone: no one goes on from what others sampled.
  std::int64_t num_cached = 0;
  for (int i = 0; i < 70; ++i) {
    std::vector<token_id> prompt = text(9, 5);
    for (int k = 0; k < 3; ++k) prompt.push_back(token_id{500 + 3 * i + k});
    manager.free(compute(manager, prompt, &num_cached));
  }
  CHECK(num_cached == 8);
  int num_lowest = 0;
  for (int i = 0; i < 32; ++i) num_lowest += converse() == retention_hint::lowest ? 1 : 0;
  CHECK(num_lowest == 30);  // and a sample of one in 16

  // Conversations: the next turn begins with what was said.
  for (int i = 0; i < 10; ++i) {
    (void)converse();
    for (int k = 0; k < 3; ++k) said.push_back(token_id{700 + k});
    manager.free(compute(manager, said, &num_cached));
    CHECK(num_cached == 12);
  }
  CHECK(converse() == retention_hint::normal);
  CHECK(manager.check() == "");
}

TEST_CASE("a window's blocks are kept as long as the snapshots that need them") {
  group_config slides = window(4, 60, 9);
  slides.snapshot_interval = 8;
  // Whatever decides for the first group.
  const std::unique_ptr<eviction_policy> remembering = make_s3_fifo_policy();
  kv_cache_config config = with_groups({full(4, 400), slides});
  SUBCASE("by priorities") {}
  SUBCASE("with a policy that has a memory of its own") { config.prefix.policy = remembering.get(); }
  kv_cache_manager manager(config);
  manager.free(compute(manager, text(90)));
  // In the windows before 88; before 80, 72, 56 and 24; and in none of these.
  std::array<int, num_block_levels> counts{};
  for (int b = 0; b < 60; ++b) ++counts.at(manager.pool(1).level(block_id{b}));
  CHECK(counts[retention_hint::normal] == 2);
  CHECK(counts[retention_hint::lowest + 1] == 8);
  CHECK(counts[retention_hint::lowest] == 12);
  // Where a prompt goes on they are likely from then on, also where another computes them again.
  std::int64_t num_cached = 0;
  std::vector<token_id> other = text(57);
  other.push_back(token_id{-1});
  manager.free(compute(manager, other, &num_cached));
  CHECK(num_cached == 56);
  counts = {};
  for (int b = 0; b < 60; ++b) ++counts.at(manager.pool(1).level(block_id{b}));
  CHECK(counts[retention_hint::normal] == 4);
  CHECK(counts[retention_hint::lowest + 1] == 6);
}

TEST_CASE("a state can be rolled back to the committed step and to each draft, and to nothing else") {
  kv_cache_manager manager(with_groups({full(4, 50), states(12, 0, 3)}));
  const std::vector<token_id> prompt = text(10);
  const seq_id seq = compute(manager, prompt);
  CHECK(manager.state_at(seq, 10, 1) != invalid_block);
  const block_id kept = manager.state_at(seq, 10, 1);
  CHECK(manager.append(seq, 4).status == alloc_status::ok);  // a token and three drafts: a state after each
  for (const std::int64_t position : {11, 12, 13, 14}) CHECK(manager.state_at(seq, position, 1) != invalid_block);
  manager.commit(seq, 2);
  manager.truncate(seq, 12);
  CHECK(manager.num_held_blocks(seq, 1) == 1);
  CHECK(manager.state_at(seq, 10, 1) == invalid_block);
  CHECK(manager.append(seq, 1).status == alloc_status::ok);  // an aborted step leaves the state before it
  manager.truncate(seq, 12);
  const std::uint64_t before = manager.digest();
  CHECK(code_of([&] { manager.truncate(seq, 11); }) == errc::invalid_argument);
  CHECK(manager.digest() == before);
  CHECK(manager.append(seq, 9).status == alloc_status::ok);  // a long step has one state, at its end
  CHECK(code_of([&] { manager.truncate(seq, 15); }) == errc::invalid_argument);
  manager.truncate(seq, 0);
  CHECK(manager.num_held_blocks(seq, 1) == 0);
  CHECK(kept != invalid_block);
  CHECK(manager.check() == "");
}

TEST_CASE("samples share a state until they compute, and each step reads one block and writes others") {
  kv_cache_manager manager(with_groups({full(4, 50), states(12), window(2, 30, 5)}));
  const std::vector<token_id> prompt = text(9);
  const seq_id parent = compute(manager, prompt);
  const seq_id child = manager.fork(parent).seq;
  CHECK(manager.state_at(parent, 9, 1) == manager.state_at(child, 9, 1));
  step_plan plan;
  for (const seq_id seq : {parent, child}) {
    CHECK(manager.append(seq, 1).status == alloc_status::ok);
    plan.seqs.push_back({.seq = seq, .query_len = 1, .seq_len = 10});
  }
  std::vector<block_copy> copies;
  manager.drain_copies(2, copies);
  CHECK(copies.size() == 1);  // the window group's tail; the state needs none
  step_batch first;
  std::vector<step_batch> others(2);
  manager.build(first, others, plan);
  const step_batch& state = others[0];
  CHECK(state.query_start_loc == first.query_start_loc);
  CHECK(state.seq_lens == first.seq_lens);
  CHECK(state.block_table_stride == 2);
  CHECK(state.block_tables[0] == state.block_tables[2]);
  CHECK(state.block_tables[1] != state.block_tables[3]);
  CHECK(state.block_tables[0] == to_index(manager.state_at(parent, 9, 1)));
  CHECK(state.block_tables[3] == to_index(manager.state_at(child, 10, 1)));
  CHECK(others[1].query_start_loc == first.query_start_loc);
  CHECK(others[1].slot_mapping[1] == to_index(manager.slot_at(child, 9, 2)));
  CHECK(others[1].block_tables[0] == padding_entry);  // left of the window
  // Rows that are no step of their own are refused, and no batch is changed.
  plan.seqs[1].query_len = 2;
  const step_batch was = others[0];
  CHECK(code_of([&] { manager.build(first, others, plan); }) == errc::out_of_range);
  CHECK(others[0].block_tables == was.block_tables);
  CHECK(first.query_start_loc.back() == 2);
}

TEST_CASE("two steps in one row of a batch are refused where the row has no place for the state between them") {
  kv_cache_manager manager(with_groups({full(4, 50), states(12)}, false));
  const seq_id seq = manager.allocate(4).seq;
  for (int step = 0; step < 2; ++step) CHECK(manager.append(seq, 1).status == alloc_status::ok);
  step_plan plan;
  plan.seqs.push_back({.seq = seq, .query_len = 2, .seq_len = 6});
  step_batch first;
  std::vector<step_batch> others(1);
  CHECK(code_of([&] { manager.build(first, others, plan); }) == errc::out_of_range);
  CHECK(others[0].block_tables.empty());
  plan.seqs[0] = {.seq = seq, .query_len = 1, .seq_len = 6};
  manager.build(first, others, plan);
  CHECK(others[0].block_tables ==
        std::vector<std::int32_t>{to_index(manager.state_at(seq, 5, 1)), to_index(manager.state_at(seq, 6, 1))});
}

TEST_CASE("steps that are never committed are refused before their states have no room") {
  kv_cache_manager manager(with_groups({full(4, 50), states(40)}, false));
  const seq_id seq = manager.allocate(1).seq;
  int count = 0;
  while (code_of([&] { (void)manager.append(seq, 1); }) == errc::ok) ++count;
  CHECK(count == 17);
  manager.commit(seq, 10);
  CHECK(manager.append(seq, 1).status == alloc_status::ok);
  CHECK(manager.check() == "");
}

TEST_CASE("an encoder's output is stored once for all samples and all requests with its digest") {
  kv_cache_manager manager(with_groups({full(4, 50), cross(4, 9, 20)}));
  const std::string image = "the digest of an image";
  const std::vector<token_id> prompt = text(10);
  prompt_view view{.tokens = prompt};
  view.cross = {18, std::as_bytes(std::span(image.data(), image.size()))};
  const open_result first = manager.open(view, 10);
  CHECK(first.num_cached_cross_tokens == 0);
  CHECK(manager.num_table_blocks(first.seq, 1) == 5);
  manager.commit(first.seq, prompt);
  const seq_id sample = manager.fork(first.seq).seq;
  CHECK(manager.num_free_blocks(1) == 4);
  const open_result second = manager.open(view, 10);
  CHECK(second.num_cached_cross_tokens == 18);
  CHECK(second.num_cached_tokens == 8);
  CHECK(manager.num_free_blocks(1) == 4);
  // The same words about another image share nothing; about an unknown one neither.
  const std::string other = "the digest of another image";
  view.cross.digest = std::as_bytes(std::span(other.data(), other.size()));
  CHECK(manager.can_open(view).num_cached_tokens == 0);
  CHECK(manager.open(view, 10).status == alloc_status::later);
  view.cross.digest = {};
  CHECK(manager.can_open(view).num_cached_tokens == 0);
  for (const seq_id seq : {first.seq, sample, second.seq}) manager.free(seq);
  step_plan plan;
  const open_result third = manager.open(view, 10);
  plan.seqs.push_back({.seq = third.seq, .query_len = 10, .seq_len = 10});
  step_batch batch;
  std::vector<step_batch> others(1);
  manager.build(batch, others, plan);
  CHECK(others[0].seq_lens == std::vector<std::int32_t>{18});
  CHECK(others[0].block_size == 4);
  CHECK(others[0].query_start_loc == batch.query_start_loc);
  CHECK(others[0].slot_mapping == std::vector<std::int64_t>(10, -1));
  CHECK(manager.num_cross_tokens(third.seq) == 18);
  CHECK(manager.check() == "");
  // Nine blocks of four hold no second output of 18 tokens, and never one of 40.
  CHECK(manager.can_allocate(10, 10, {}, 12) == alloc_status::ok);
  CHECK(manager.can_allocate(10, 10, {}, 18) == alloc_status::later);
  kv_cache_manager small(with_groups({full(4, 50), cross(4, 9, 40)}));
  CHECK(small.can_allocate(10, 10, {}, 36) == alloc_status::ok);
  CHECK(small.can_allocate(10, 10, {}, 37) == alloc_status::never);
}

TEST_CASE("states that are swapped out say how many blocks they come back to, and have no block size in a batch") {
  group_config kept = states(6);
  kept.num_host_blocks = 6;
  group_config first = full(4, 20);
  first.num_host_blocks = 20;
  kv_cache_manager manager(with_groups({first, kept}));
  const seq_id seq = compute(manager, text(10));
  step_plan plan;
  REQUIRE(manager.append(seq, 1).status == alloc_status::ok);
  plan.seqs.push_back({.seq = seq, .query_len = 1, .seq_len = 11});
  step_batch batch;
  std::vector<step_batch> others(1);
  manager.build(batch, others, plan);
  CHECK(batch.block_size == 4);
  CHECK(others[0].block_size == 0);
  manager.truncate(seq, 10);
  std::vector<std::vector<block_copy>> out(2), in(2);
  REQUIRE(manager.swap_out({&seq, 1}, out) == alloc_status::ok);
  CHECK(out[1].size() >= 1);
  const std::int64_t expected = manager.blocks_to_swap_in({&seq, 1}, 1);
  CHECK(expected >= 1);
  const std::int64_t num_free = manager.num_free_blocks(1);
  REQUIRE(manager.swap_in({&seq, 1}, in) == alloc_status::ok);
  CHECK(num_free - manager.num_free_blocks(1) == expected);
  CHECK(manager.check() == "");
}

TEST_CASE("a memory budget is divided so that no pool is full before the others") {
  const std::vector<group_shape> shapes{
      {.kind = group_kind::full, .block_size = 16, .block_bytes = 16 << 10},
      {.kind = group_kind::window, .block_size = 16, .window = 1024, .block_bytes = 80 << 10},
      {.kind = group_kind::state, .block_size = 1, .block_bytes = 1 << 20},
      {.kind = group_kind::cross, .block_size = 16, .block_bytes = 16 << 10},
  };
  const group_load load{
      .num_sequences = 64, .tokens_each = 8192, .step_tokens = 512, .cross_tokens_each = 1500, .snapshots_each = 2};
  const std::int64_t budget = std::int64_t{4} << 30;
  const group_memory_plan plan = plan_group_memory(budget, shapes, load);
  std::int64_t num_bytes = 0;
  for (std::size_t g = 0; g < shapes.size(); ++g) num_bytes += plan.num_blocks[g] * shapes[g].block_bytes;
  CHECK(plan.num_bytes == num_bytes);
  CHECK(num_bytes <= budget);
  CHECK(num_bytes > budget - budget / 100);
  CHECK(plan.assumptions.find("Group 1 (window): 97 blocks") != std::string::npos);
  // The sequences that it promises fit, and one more does not.
  kv_cache_config config = with_groups({full(16, plan.num_blocks[0]), window(16, plan.num_blocks[1], 1024),
                                        states(plan.num_blocks[2]), cross(16, plan.num_blocks[3], 1500)});
  config.max_sequences = 512;
  config.max_seq_len = 1 << 14;
  kv_cache_manager manager(config);
  group_blocks promised{};
  std::int64_t count = 0;
  while (manager.can_allocate(8192, 512, promised, 1500) == alloc_status::ok) {
    ++count;
    for (std::int32_t g = 0; g < 4; ++g) {
      promised[static_cast<std::size_t>(g)] += g == 3 ? 94 : manager.blocks_at_peak(8192, 512, g);
    }
  }
  CHECK(count >= plan.num_sequences);
  CHECK(plan.num_sequences > 50);
  CHECK_THROWS_AS((void)plan_group_memory(1 << 20, shapes, load), error);
  const auto refusal_of_plan = [&](group_shape shape, group_load asked) {
    try {
      (void)plan_group_memory(budget, {&shape, 1}, asked);
    } catch (const error& refused) {
      return std::string(refused.what());
    }
    return std::string("not refused");
  };
  group_shape no_tokens = shapes[0];
  no_tokens.block_size = 0;
  CHECK(refusal_of_plan(no_tokens, load).find("group 0: block_size 0 is not between 1 and") != std::string::npos);
  group_load nothing = load;
  nothing.tokens_each = 0;
  CHECK(refusal_of_plan(shapes[0], nothing).find("tokens_each 0 is not between 1 and") != std::string::npos);
  // One group takes all memory; only the rounding of a quotient may leave a block.
  const group_shape only{.kind = group_kind::full, .block_size = 16, .block_bytes = 1000};
  const group_load few{.num_sequences = 8, .tokens_each = 64, .step_tokens = 64};
  int num_whole = 0;
  for (std::int64_t blocks = 100; blocks < 200; ++blocks) {
    num_whole += plan_group_memory(1000 * blocks, {&only, 1}, few).num_blocks[0] == blocks ? 1 : 0;
  }
  CHECK(num_whole > 50);
  CHECK_THROWS_AS((void)plan_group_memory(budget, {}, load), error);
}

TEST_CASE("the least budget that is taken is enough for a sequence, with the narrowest window") {
  const std::vector<group_shape> shapes{
      {.kind = group_kind::full, .block_size = 16, .block_bytes = 1000},
      {.kind = group_kind::window, .block_size = 1, .window = 1, .block_bytes = 1000},
  };
  const group_load load{.num_sequences = 8, .tokens_each = 100, .step_tokens = 2, .watermark = 0.1};
  int num_taken = 0;
  for (std::int64_t budget = 1000; num_taken < 12; budget += 500) {
    REQUIRE(budget < 100000);
    try {
      const group_memory_plan plan = plan_group_memory(budget, shapes, load);
      ++num_taken;
      CAPTURE(budget);
      CHECK(plan.num_sequences >= 1);
      CHECK(plan.num_bytes <= budget);
    } catch (const error& refused) {
      CHECK(refused.code() == errc::invalid_argument);
      CHECK(num_taken == 0);
    }
  }
}

TEST_CASE("a plan with groups goes through a log and comes back") {
  step_plan plan;
  plan.step = 3;
  plan.groups.resize(2);
  plan.groups[1].copies = {{block_id{1}, block_id{2}}};
  plan.groups[0].swap_ins = {{block_id{5}, block_id{4}}, {block_id{3}, block_id{9}}};
  plan.encoded = {seq_id{77}};
  CHECK(parse_step_plan(to_string(plan)) == plan);
  CHECK(to_string(step_plan{}).find("groups") == std::string::npos);
}

}  // namespace
}  // namespace bifolio::test
