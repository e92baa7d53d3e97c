// SPDX-License-Identifier: Apache-2.0
// The audit of copies that a manager announces: what is forgotten is reported, what is not, is not.
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/cache_engine.hpp>
#include <bifolio/copy_audit.hpp>
#include <bifolio/error.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/log.hpp>
#include <memory>
#include <string>
#include <vector>

#include "common/cache_logic_helpers.hpp"
#include "support/random.hpp"

namespace bifolio::test {
namespace {

constexpr std::int32_t block_size = 4;
constexpr std::int64_t num_blocks = 16;

kv_cache_config config_with(copy_audit* audit, std::int64_t blocks = num_blocks) {
  kv_cache_config config{.block_size = block_size,
                         .num_blocks = blocks,
                         .watermark = 0,
                         .max_sequences = 12,
                         .max_seq_len = 4096,
                         .first_generation = 1,
                         .num_host_blocks = num_blocks};
  config.audit = audit;
  config.prefix.enabled = true;
  config.prefix.seed = hash_seed{1, 2};
  return config;
}

/// Tells the audit that the sequence is used again.
void build(const kv_cache_manager& manager, seq_id seq) {
  step_plan plan;
  const auto num_tokens = static_cast<std::int32_t>(manager.num_tokens(seq));
  plan.seqs.push_back({.seq = seq, .query_len = 1, .seq_len = num_tokens});
  step_batch batch;
  manager.build(batch, plan);
}

/// A sequence of `count` computed tokens.
seq_id computed(kv_cache_manager& manager, int count) {
  const seq_id seq = manager.allocate(count).seq;
  manager.commit(seq, count);
  return seq;
}

struct world {
  copy_audit audit;
  kv_cache_manager manager{config_with(&audit)};
};

TEST_CASE("a copy on write that nobody carried out is reported when its tokens are committed and read") {
  world w;
  const seq_id a = computed(w.manager, 6);
  const seq_id b = w.manager.fork(a).seq;
  const append_result grown = w.manager.append(b, 1);
  REQUIRE(grown.has_copy());
  CHECK(w.audit.num_outstanding() == 1);
  build(w.manager, b);  // of the step that announced it: the copy may still come
  CHECK(w.audit.num_missed() == 0);
  w.manager.commit(b, 1);
  REQUIRE(w.manager.append(b, 1).status == alloc_status::ok);
  build(w.manager, b);
  CHECK(w.audit.num_outstanding() == 0);
  REQUIRE(w.audit.missed().size() == 1);
  CHECK(w.audit.missed()[0].copy == grown.copy);
  CHECK(w.audit.missed()[0].kind == copy_kind::on_write);
  const auto problem = w.audit.find_problem();
  REQUIRE(problem.has_value());
  CHECK(problem->code() == errc::failed_precondition);
  CHECK(std::string(problem->what()) == "copy on write of block " + std::to_string(to_index(grown.copy.src)) +
                                            " to block " + std::to_string(to_index(grown.copy.dst)) +
                                            ", announced when sequence " + std::to_string(to_index(b)) +
                                            " had 6 tokens, was never carried out");
  build(w.manager, b);
  CHECK(w.audit.num_missed() == 1);  // once
}

TEST_CASE("the missed copy is in the log") {
  std::string said;
  set_log(
      [](void* user, log_level level, const char* message) {
        if (level == log_level::warning) *static_cast<std::string*>(user) += message;
      },
      &said);
  world w;
  const seq_id b = w.manager.fork(computed(w.manager, 6)).seq;
  REQUIRE(w.manager.append(b, 1).has_copy());
  w.manager.commit(b, 1);
  w.manager.free(b);
  set_log(nullptr);
  CHECK_MESSAGE(said.find("copy on write") == 0, said);
}

TEST_CASE("what was carried out, by an engine or by hand, is not reported") {
  world w;
  const auto where = make_backend();
  const auto layout = make_layout(layout_kind::hnd, dtype::f32, 1, 4, block_size);
  cache_engine engine(*where, {.num_layers = 1, .num_blocks = num_blocks, .layout = layout, .audit = &w.audit});
  cache_engine host(*where, {.num_layers = 1, .num_blocks = num_blocks, .layout = layout});
  const seq_id a = computed(w.manager, 6);
  const seq_id b = w.manager.fork(a).seq;
  const block_copy on_write = w.manager.append(b, 1).copy;
  CHECK(w.audit.num_outstanding() == 1);
  REQUIRE(engine.copy_blocks({&on_write, 1}) == errc::ok);
  CHECK(w.audit.num_outstanding() == 0);

  std::vector<block_copy> outs, ins;
  const std::vector<seq_id> both{a, b};
  w.manager.commit(b, 1);
  REQUIRE(w.manager.swap_out(both, outs) == alloc_status::ok);
  REQUIRE(outs.size() == 3);  // the first is shared
  CHECK(w.audit.num_outstanding() == 6);
  const std::vector<block_copy> wrong{{block_id{999}, block_id{0}}};
  CHECK(engine.swap_blocks_to(host, wrong) != errc::ok);
  CHECK(w.audit.num_outstanding() == 6);
  REQUIRE(engine.swap_blocks_to(host, outs) == errc::ok);
  CHECK(w.audit.num_outstanding() == 0);
  REQUIRE(w.manager.swap_in(both, ins) == alloc_status::ok);
  CHECK(w.audit.num_outstanding() == static_cast<std::int64_t>(2 * ins.size()));
  REQUIRE(host.swap_blocks_to(engine, ins) == errc::ok);
  CHECK(w.audit.num_outstanding() == 0);

  const append_result by_hand = w.manager.append(w.manager.fork(a).seq, 1);
  REQUIRE(by_hand.has_copy());
  w.audit.carried_out(copy_kind::on_write, 0, {&by_hand.copy, 1});
  CHECK(w.audit.num_outstanding() == 0);
  CHECK(!w.audit.find_problem());
}

TEST_CASE("a prompt that is cached to its end announces the copy of its last block") {
  world w;
  const std::vector<token_id> prompt = tokens_of({1, 2, 3, 4, 5, 6, 7, 8});
  const open_result first = w.manager.open({.tokens = prompt}, 8);
  w.manager.commit(first.seq, prompt);
  const open_result second = w.manager.open({.tokens = prompt}, 8);
  REQUIRE(second.has_copy());
  w.manager.commit(second.seq, std::span(prompt).last(1));
  w.manager.free(second.seq);
  REQUIRE(w.audit.missed().size() == 1);
  CHECK(w.audit.missed()[0].copy == second.copy);
  CHECK(w.audit.missed()[0].num_tokens == 7);
}

TEST_CASE("forgotten swaps are reported, each by its kind") {
  for (const copy_kind forgotten : {copy_kind::swap_out, copy_kind::swap_in}) {
    world w;
    const seq_id a = computed(w.manager, 6);
    std::vector<block_copy> outs, ins;
    const std::vector<seq_id> one{a};
    REQUIRE(w.manager.swap_out(one, outs) == alloc_status::ok);
    if (forgotten != copy_kind::swap_out) w.audit.carried_out(copy_kind::swap_out, 0, outs);
    const seq_id other = computed(w.manager, 64);  // takes the device blocks
    w.manager.free(other);
    REQUIRE(w.manager.swap_in(one, ins) == alloc_status::ok);
    REQUIRE(!ins.empty());
    if (forgotten != copy_kind::swap_in) w.audit.carried_out(copy_kind::swap_in, 0, ins);
    const append_result grown = w.manager.append(a, 1);
    REQUIRE(grown.status == alloc_status::ok);
    w.manager.commit(a, 1);
    build(w.manager, a);
    const std::vector<announced_copy> missed = w.audit.missed();
    REQUIRE(!missed.empty());
    for (const announced_copy& each : missed) CHECK(each.kind == forgotten);
  }
}

TEST_CASE("swaps that failed and were taken back, and sequences that ended, leave nothing to report") {
  world w;
  const seq_id a = computed(w.manager, 6);
  const std::vector<seq_id> one{a};
  std::vector<block_copy> outs;
  REQUIRE(w.manager.swap_out(one, outs) == alloc_status::ok);
  w.manager.forget_copies(outs, {});
  CHECK(w.audit.num_outstanding() == 0);
  w.manager.free(a);

  const seq_id b = w.manager.fork(computed(w.manager, 6)).seq;
  REQUIRE(w.manager.append(b, 1).has_copy());
  w.manager.free(b);  // aborted before the step
  CHECK(w.audit.num_outstanding() == 0);
  CHECK(w.audit.num_missed() == 0);
}

TEST_CASE("a fork takes over what its parent waits for; a block that is given back is not waited for") {
  world w;
  const seq_id b = w.manager.fork(computed(w.manager, 6)).seq;
  REQUIRE(w.manager.append(b, 3).has_copy());
  const seq_id c = w.manager.fork(b).seq;
  CHECK(w.audit.num_outstanding() == 2);
  w.manager.commit(c, 3);
  build(w.manager, c);
  CHECK(w.audit.num_missed() == 1);
  CHECK(w.audit.missed()[0].seq == c);
  w.manager.truncate(b, 4);  // the copied block held tokens 4 and 5
  REQUIRE(w.manager.append(b, 5).status == alloc_status::ok);
  w.manager.commit(b, 5);
  build(w.manager, b);
  CHECK(w.audit.num_missed() == 1);
  CHECK(w.audit.num_outstanding() == 0);
}

TEST_CASE("a block that was given back and comes again for other tokens is not taken for the copy that it never got") {
  copy_audit audit;
  kv_cache_manager manager(config_with(&audit, 3));  // two blocks of the parent, and the one to copy to
  const seq_id b = manager.fork(computed(manager, 6)).seq;
  const append_result grown = manager.append(b, 1);
  REQUIRE(grown.has_copy());
  manager.truncate(b, 5);  // the block is still there, and its first slot is read
  CHECK(audit.num_outstanding() == 1);
  manager.truncate(b, 4);
  CHECK(audit.num_outstanding() == 0);
  REQUIRE(manager.append(b, 3).status == alloc_status::ok);
  REQUIRE(manager.block_at(b, 1) == grown.copy.dst);
  manager.commit(b, 3);
  build(manager, b);
  CHECK(audit.num_missed() == 0);
}

TEST_CASE("copies of a group that stores nothing are not waited for") {
  copy_audit audit;
  kv_cache_config config{.watermark = 0, .max_sequences = 4, .max_seq_len = 256, .first_generation = 1};
  config.audit = &audit;
  config.groups = {{.kind = group_kind::full, .block_size = 4, .num_blocks = 16},  // an index of texts
                   {.kind = group_kind::window, .block_size = 8, .num_blocks = 16, .window = 64}};
  kv_cache_manager manager(config);
  audit.ignore_group(0);
  audit.ignore_group(-1), audit.ignore_group(max_layer_groups);
  const seq_id b = manager.fork(computed(manager, 6)).seq;
  REQUIRE(manager.append(b, 1).has_copy());
  CHECK(audit.num_outstanding() == 1);  // of the second group
  std::vector<block_copy> copies;
  manager.drain_copies(1, copies);
  audit.carried_out(copy_kind::on_write, 1, copies);
  manager.commit(b, 1);
  manager.free(b);
  CHECK(audit.num_missed() == 0);
}

TEST_CASE("copies of further layer groups are watched as well") {
  copy_audit audit;
  kv_cache_config config{.watermark = 0, .max_sequences = 4, .max_seq_len = 256, .first_generation = 1};
  config.audit = &audit;
  config.groups = {{.kind = group_kind::full, .block_size = 4, .num_blocks = 16},
                   {.kind = group_kind::window, .block_size = 8, .num_blocks = 16, .window = 64}};
  kv_cache_manager manager(config);
  const seq_id a = computed(manager, 8);
  const seq_id b = manager.fork(a).seq;
  REQUIRE(!manager.append(b, 4).has_copy());
  const seq_id c = manager.fork(b).seq;  // 12 tokens: the tail of the second group alone is shared
  REQUIRE(!manager.append(c, 1).has_copy());
  std::vector<block_copy> copies;
  manager.drain_copies(1, copies);
  REQUIRE(copies.size() == 1);
  CHECK(audit.num_outstanding() == 1);
  manager.commit(c, 5);
  manager.free(c);
  REQUIRE(audit.missed().size() == 1);
  CHECK(audit.missed()[0].group == 1);
  CHECK(audit.missed()[0].copy == copies[0]);
}

/// A random mix of calls, with a twin without an audit. Copies are dropped with a chance of one in `drop`; 0: never.
struct random_run {
  copy_audit audit;
  kv_cache_manager manager{config_with(&audit)};
  kv_cache_manager twin{config_with(nullptr)};
  random_source random;
  std::int64_t drop;
  std::vector<seq_id> open;
  std::vector<block_copy> dropped;
  std::int64_t num_copies = 0;

  random_run(std::uint64_t seed, std::int64_t one_in) : random(seed), drop(one_in) {}

  void carry_out(copy_kind kind, const std::vector<block_copy>& copies) {
    for (const block_copy& copy : copies) {
      ++num_copies;
      if (drop != 0 && random.one_in(drop)) {
        dropped.push_back(copy);
      } else {
        audit.carried_out(kind, 0, {&copy, 1});
      }
    }
  }
  std::vector<token_id> some_tokens(std::int64_t count) {
    std::vector<token_id> tokens(static_cast<std::size_t>(count));
    for (token_id& each : tokens) each = token_id{static_cast<std::int32_t>(random.between(0, 1))};
    return tokens;
  }
  void commit_all(seq_id seq) {
    const std::vector<token_id> tokens = some_tokens(manager.num_tokens(seq) - manager.num_committed(seq));
    manager.commit(seq, tokens);
    twin.commit(seq, tokens);
  }
  void one_step() {
    if (open.empty() || (open.size() < 6 && random.one_in(4))) {
      const std::vector<token_id> tokens = some_tokens(random.between(1, 3) * block_size + random.between(0, 1));
      const open_result opened = manager.open({.tokens = tokens}, 64);
      const open_result same = twin.open({.tokens = tokens}, 64);
      CHECK(same.status == opened.status);
      CHECK(same.copy == opened.copy);
      if (opened.status != alloc_status::ok) return;
      if (opened.has_copy()) carry_out(copy_kind::on_write, {opened.copy});
      const auto rest = std::span(tokens).subspan(static_cast<std::size_t>(opened.num_cached_tokens));
      manager.commit(opened.seq, rest);
      twin.commit(opened.seq, rest);
      return open.push_back(opened.seq);
    }
    const std::size_t at = static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(open.size()) - 1));
    const seq_id seq = open[at];
    const std::vector<seq_id> one{seq};
    if (manager.is_swapped_out(seq)) {
      std::vector<block_copy> ins, same;
      CHECK(manager.swap_in(one, ins) == twin.swap_in(one, same));
      CHECK(ins == same);
      return carry_out(copy_kind::swap_in, ins);
    }
    switch (random.between(0, 9)) {
      case 0: {
        manager.free(seq);
        twin.free(seq);
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
        return;
      }
      case 1: {
        const allocate_result forked = manager.fork(seq);
        CHECK(twin.fork(seq).seq == forked.seq);
        if (forked.status == alloc_status::ok) open.push_back(forked.seq);
        return;
      }
      case 2: {
        std::vector<block_copy> outs, same;
        CHECK(manager.swap_out(one, outs) == twin.swap_out(one, same));
        CHECK(outs == same);
        return carry_out(copy_kind::swap_out, outs);
      }
      case 3: {
        const std::int64_t kept = random.between(0, manager.num_tokens(seq));
        manager.truncate(seq, kept);
        return twin.truncate(seq, kept);
      }
      default: {
        const std::int64_t count = random.between(1, 5);
        const append_result grown = manager.append(seq, count);
        const append_result same = twin.append(seq, count);
        CHECK(same.status == grown.status);
        CHECK(same.copy == grown.copy);
        if (grown.status != alloc_status::ok) return;
        if (grown.has_copy()) carry_out(copy_kind::on_write, {grown.copy});
        build(manager, seq);
        commit_all(seq);
      }
    }
  }
  void run(int num_steps) {
    for (int i = 0; i < num_steps; ++i) {
      one_step();
      if (i % 256 == 0) CHECK(manager.digest() == twin.digest());
    }
    while (!open.empty()) {
      manager.free(open.back());
      twin.free(open.back());
      open.pop_back();
    }
    CHECK(manager.digest() == twin.digest());
    CHECK(manager.check().empty());
  }
};

TEST_CASE("a random engine that carries out everything is never blamed, and decides as without an audit") {
  const std::uint64_t seed = test_seed();
  INFO(seed_note());
  random_run all(seed, 0);
  all.run(40000);
  CHECK(all.num_copies > 2000);
  CHECK_MESSAGE(all.audit.num_missed() == 0, all.audit.find_problem()->what());
  CHECK(all.audit.num_outstanding() == 0);
}

TEST_CASE("a random engine that forgets copies is blamed for those that it forgot, and for no others") {
  const std::uint64_t seed = test_seed();
  INFO(seed_note());
  random_run some(seed, 10);
  some.run(40000);
  REQUIRE(some.dropped.size() > 100);
  CHECK(some.audit.num_missed() > static_cast<std::int64_t>(some.dropped.size()) / 4);
  for (const announced_copy& each : some.audit.missed()) {
    CHECK(std::find(some.dropped.begin(), some.dropped.end(), each.copy) != some.dropped.end());
  }
}

}  // namespace
}  // namespace bifolio::test
