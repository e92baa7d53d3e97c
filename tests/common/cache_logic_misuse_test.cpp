// SPDX-License-Identifier: Apache-2.0
/// Each public call of manager and scheduler with each kind of bad argument: the documented code, a sentence, and a
/// state digest as it was.

#include <doctest/doctest.h>

#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/scheduler.hpp>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/cache_logic_helpers.hpp"
#include "common/scheduler_helpers.hpp"

namespace bifolio::test {
namespace {

constexpr std::int32_t least32 = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t most32 = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t bad_counts[] = {-1, std::int64_t{1} << 31, std::int64_t{1} << 62, INT64_MAX, INT64_MIN};

TEST_CASE("a manager with a field outside its range is refused before anything is allocated") {
  counting_memory_resource memory(default_host_memory());
  const kv_cache_config good{.num_blocks = 8, .memory = &memory};
  const auto refuses = [&](auto change) {
    kv_cache_config config = good;
    change(config);
    return code_of([&] { kv_cache_manager manager(config); }) == errc::invalid_argument;
  };
  for (const std::int32_t value : {0, -1, least32, most32}) {
    CAPTURE(value);
    CHECK(refuses([&](kv_cache_config& c) { c.block_size = value; }));
    CHECK(refuses([&](kv_cache_config& c) { c.max_sequences = value; }));
    CHECK(refuses([&](kv_cache_config& c) { c.max_seq_len = value; }));
    if (value != 0) CHECK(refuses([&](kv_cache_config& c) { c.sliding_window = value; }));
  }
  for (const std::int64_t value :
       {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 31, std::int64_t{1} << 62, INT64_MAX, INT64_MIN}) {
    CAPTURE(value);
    CHECK(refuses([&](kv_cache_config& c) { c.num_blocks = value; }));
  }
  for (const std::int64_t value : {std::int64_t{-1}, std::int64_t{1} << 31, std::int64_t{1} << 62, INT64_MIN}) {
    CAPTURE(value);
    CHECK(refuses([&](kv_cache_config& c) { c.num_host_blocks = value; }));
  }
  for (const std::int32_t value : {0, -1, 129, least32, most32}) {
    CAPTURE(value);
    CHECK(refuses([&](kv_cache_config& c) {
      c.prefix.enabled = true;
      c.prefix.key_bits = value;
    }));
  }
  for (const double value : {-0.1, 1.0, 2.0, std::nan(""), std::numeric_limits<double>::infinity(), -HUGE_VAL}) {
    CAPTURE(value);
    CHECK(refuses([&](kv_cache_config& c) { c.watermark = value; }));
  }
  CHECK(memory.num_allocations() == 0);
}

TEST_CASE("a manager that does not fit into memory leaves none behind") {
  limiting_memory_resource little(default_host_memory(), 1 << 16);
  CHECK(code_of([&] { kv_cache_manager manager({.num_blocks = 1 << 20, .memory = &little}); }) == errc::out_of_memory);
  CHECK(code_of([&] { kv_cache_manager manager({.num_blocks = 8, .max_sequences = 1 << 20, .memory = &little}); }) ==
        errc::out_of_memory);
  CHECK(code_of([&] { kv_cache_manager manager({.num_blocks = 8, .num_host_blocks = 1 << 20, .memory = &little}); }) ==
        errc::out_of_memory);
  kv_cache_config prefix{.num_blocks = 2000, .max_sequences = 8, .memory = &little};  // fits, but for the names
  CHECK(code_of([&] { kv_cache_manager manager(prefix); }) == errc::ok);
  prefix.prefix.enabled = true;
  CHECK(code_of([&] { kv_cache_manager manager(prefix); }) == errc::out_of_memory);
  CHECK(little.used_bytes() == 0);
}

struct open_manager {
  kv_cache_manager manager{{.block_size = 4, .num_blocks = 40, .max_sequences = 6, .max_seq_len = 100}};
  kv_cache_manager other{{.block_size = 4, .num_blocks = 40}};
  seq_id open = manager.allocate(10).seq;
  seq_id stale = manager.allocate(3).seq;
  seq_id foreign = other.allocate(10).seq;
  open_manager() { manager.free(stale); }
  std::vector<seq_id> unknown() const {
    return {stale,
            foreign,
            invalid_seq,
            seq_id{to_index(open) + 1},
            seq_id{to_index(open) ^ (std::uint64_t{1} << 32)},
            seq_id{to_index(open) | 0xffffffffu},
            seq_id{std::numeric_limits<std::uint64_t>::max()}};
  }
};

TEST_CASE("every call on an unknown, stale or foreign sequence reports not_found and changes nothing") {
  open_manager it;
  const std::uint64_t before = it.manager.digest();
  step_batch batch;
  for (const seq_id seq : it.unknown()) {
    CAPTURE(to_index(seq));
    CHECK(code_of([&] { (void)it.manager.append(seq, 1); }) == errc::not_found);
    CHECK(code_of([&] { (void)it.manager.append(seq, -1); }) == errc::not_found);
    CHECK(code_of([&] { (void)it.manager.can_append(seq, 1); }) == errc::not_found);
    CHECK(code_of([&] { it.manager.commit(seq, 0); }) == errc::not_found);
    CHECK(code_of([&] { (void)it.manager.fork(seq); }) == errc::not_found);
    CHECK(code_of([&] { it.manager.truncate(seq, 0); }) == errc::not_found);
    CHECK(code_of([&] { it.manager.free(seq); }) == errc::not_found);
    CHECK(code_of([&] { (void)it.manager.num_tokens(seq); }) == errc::not_found);
    CHECK(code_of([&] { (void)it.manager.num_committed(seq); }) == errc::not_found);
    CHECK(code_of([&] { (void)it.manager.num_table_blocks(seq); }) == errc::not_found);
    CHECK(code_of([&] { (void)it.manager.block_at(seq, 0); }) == errc::not_found);
    CHECK(code_of([&] { (void)it.manager.slot_at(seq, 0); }) == errc::not_found);
    it.manager.prefetch(seq);  // a hint takes anything
    step_plan plan;
    plan.seqs = {{.seq = it.open, .query_len = 1, .seq_len = 1}, {.seq = seq, .query_len = 1, .seq_len = 1}};
    CHECK(code_of([&] { it.manager.build(batch, plan); }) == errc::not_found);
    if (seq != invalid_seq) {  // which denotes a sequence to be opened
      CHECK(code_of([&] { it.manager.reserve_host_memory(std::vector<host_demand>{{seq, 1}}); }) == errc::not_found);
    }
  }
  CHECK(batch.query_start_loc.empty());
  CHECK(it.manager.digest() == before);
}

TEST_CASE("counts that are negative, too large or past the end are refused and change nothing") {
  open_manager it;
  const std::uint64_t before = it.manager.digest();
  for (const std::int64_t count : bad_counts) {
    CAPTURE(count);
    CHECK(code_of([&] { (void)it.manager.allocate(count); }) == errc::invalid_argument);
    CHECK(code_of([&] { (void)it.manager.can_allocate(count); }) == errc::invalid_argument);
    CHECK(code_of([&] { (void)it.manager.append(it.open, count); }) == errc::invalid_argument);
    CHECK(code_of([&] { (void)it.manager.append(it.open, 1, count); }) == errc::invalid_argument);
    CHECK(code_of([&] { (void)it.manager.append(it.open, count, count); }) == errc::invalid_argument);
    CHECK(code_of([&] { (void)it.manager.can_append(it.open, count); }) == errc::invalid_argument);
    CHECK(code_of([&] { it.manager.commit(it.open, count); }) == errc::invalid_argument);
    CHECK(code_of([&] { it.manager.truncate(it.open, count); }) == errc::invalid_argument);
    CHECK(code_of([&] { (void)it.manager.block_at(it.open, count); }) == errc::out_of_range);
    CHECK(code_of([&] { (void)it.manager.slot_at(it.open, count); }) == errc::out_of_range);
    CHECK(code_of([&] {
            it.manager.reserve_host_memory(std::vector<host_demand>{{it.open, count}});
          }) == errc::invalid_argument);
  }
  CHECK(code_of([&] { (void)it.manager.allocate(0); }) == errc::invalid_argument);
  CHECK(code_of([&] { (void)it.manager.allocate(101); }) == errc::invalid_argument);
  CHECK(code_of([&] { (void)it.manager.can_allocate(0); }) == errc::invalid_argument);
  CHECK(code_of([&] { (void)it.manager.can_allocate(1, -1); }) == errc::invalid_argument);
  CHECK(code_of([&] { (void)it.manager.can_allocate(1, 1, -1); }) == errc::invalid_argument);
  CHECK(code_of([&] { (void)it.manager.append(it.open, 91); }) == errc::invalid_argument);
  CHECK(code_of([&] { (void)it.manager.append(it.open, 1, 90); }) == errc::invalid_argument);
  CHECK(code_of([&] { it.manager.commit(it.open, 11); }) == errc::invalid_argument);
  CHECK(code_of([&] { it.manager.truncate(it.open, 11); }) == errc::invalid_argument);
  CHECK(code_of([&] { (void)it.manager.block_at(it.open, 3); }) == errc::out_of_range);
  CHECK(code_of([&] { (void)it.manager.slot_at(it.open, 10); }) == errc::out_of_range);
  CHECK(it.manager.append(it.open, 0).status == alloc_status::ok);
  it.manager.commit(it.open, 0);
  it.manager.truncate(it.open, 10);
  CHECK(it.manager.digest() == before);
  CHECK(it.manager.check() == "");
}

TEST_CASE("max_seq_len holds also where capacity is there already") {
  kv_cache_manager manager({.block_size = 64, .num_blocks = 4, .max_seq_len = 10});
  const seq_id seq = manager.allocate(9).seq;
  CHECK(manager.append(seq, 1).status == alloc_status::ok);
  CHECK(code_of([&] { (void)manager.append(seq, 1); }) == errc::invalid_argument);
  CHECK(manager.num_tokens(seq) == 10);
}

TEST_CASE("plans with impossible rows are refused and leave the batch as it was") {
  open_manager it;
  step_plan good;
  good.seqs = {{.seq = it.open, .query_len = 2, .seq_len = 10}};
  step_batch batch;
  it.manager.build(batch, good);
  const std::vector<std::int64_t> slots = batch.slot_mapping;
  const std::pair<scheduled_seq, errc> rows[] = {
      {{.seq = it.open, .query_len = 0, .seq_len = 10}, errc::invalid_argument},
      {{.seq = it.open, .query_len = -1, .seq_len = 10}, errc::invalid_argument},
      {{.seq = it.open, .query_len = least32, .seq_len = 10}, errc::invalid_argument},
      {{.seq = it.open, .query_len = 11, .seq_len = 10}, errc::invalid_argument},
      {{.seq = it.open, .query_len = 1, .seq_len = 0}, errc::invalid_argument},
      {{.seq = it.open, .query_len = 1, .seq_len = -4}, errc::invalid_argument},
      {{.seq = it.open, .query_len = 1, .seq_len = 11}, errc::out_of_range},
      {{.seq = it.open, .query_len = most32, .seq_len = most32}, errc::out_of_range},
  };
  for (const auto& one : rows) {
    const scheduled_seq& row = one.first;
    CAPTURE(row.query_len);
    CAPTURE(row.seq_len);
    step_plan plan = good;
    plan.seqs.push_back(row);
    CHECK(code_of([&] { it.manager.build(batch, plan); }) == one.second);
    CHECK(batch.slot_mapping == slots);
    CHECK(batch.seq_lens == std::vector<std::int32_t>{10});
  }
  kv_cache_manager windowed({.block_size = 2, .num_blocks = 40, .sliding_window = 4});
  const seq_id seq = windowed.allocate(20).seq;
  windowed.commit(seq, 20);
  step_plan past;
  past.seqs = {{.seq = seq, .query_len = 20, .seq_len = 20}};
  CHECK(code_of([&] { windowed.build(batch, past); }) == errc::out_of_range);
  const std::uint64_t before = windowed.digest();
  CHECK(code_of([&] { windowed.truncate(seq, 5); }) == errc::invalid_argument);
  CHECK(windowed.digest() == before);
}

std::vector<token_id> some_tokens(std::int64_t count) {
  return std::vector<token_id>(static_cast<std::size_t>(count), token_id{7});
}

kv_cache_config with_prefix_and_host() {
  kv_cache_config config{
      .block_size = 4, .num_blocks = 40, .max_sequences = 8, .max_seq_len = 100, .num_host_blocks = 20};
  config.prefix.enabled = true;
  config.prefix.record_events = true;
  return config;
}

/// Sequences of every kind: with cached blocks, forked, swapped out, and others that are gone.
struct full_manager {
  kv_cache_manager manager{with_prefix_and_host()};
  kv_cache_manager other{with_prefix_and_host()};
  std::vector<token_id> prompt = some_tokens(10);
  seq_id open = manager.open({.tokens = prompt}, 10).seq;
  seq_id fork = invalid_seq, out = invalid_seq, stale = invalid_seq;
  seq_id foreign = other.allocate(10).seq;
  std::vector<block_copy> copies;
  full_manager() {
    manager.commit(open, std::span(prompt).first(9));
    fork = manager.fork(open).seq;
    out = manager.allocate(9).seq;
    stale = manager.allocate(9).seq;
    CHECK(manager.swap_out(std::vector{out, stale}, copies) == alloc_status::ok);
    manager.free(stale);
    copies.clear();
  }
};

TEST_CASE("prompts that cannot be opened are refused and change nothing") {
  full_manager it;
  const std::uint64_t before = it.manager.digest();
  const prefix_stats stats = it.manager.prefix()->stats();
  const auto code = [&](const prompt_view& prompt, std::int64_t num_new) {
    return code_of([&] { (void)it.manager.open(prompt, num_new); });
  };
  const auto asked = [&](const prompt_view& prompt, std::int64_t step = 0, std::int64_t promised = 0) {
    return code_of([&] { (void)it.manager.can_open(prompt, step, promised); });
  };
  const std::vector<token_id> longest = some_tokens(100), too_long = some_tokens(101);
  CHECK(code({}, 1) == errc::invalid_argument);
  CHECK(asked({}) == errc::invalid_argument);
  CHECK(code({.tokens = too_long}, 1) == errc::invalid_argument);
  CHECK(asked({.tokens = too_long}) == errc::invalid_argument);
  CHECK(asked({.tokens = longest}) == errc::ok);
  for (const std::int64_t count : {std::int64_t{0}, std::int64_t{-1}, INT64_MIN}) {
    CHECK(code({.tokens = it.prompt}, count) == errc::invalid_argument);
    if (count != 0) CHECK(asked({.tokens = it.prompt}, count) == errc::invalid_argument);
    if (count != 0) CHECK(asked({.tokens = it.prompt}, 0, count) == errc::invalid_argument);
  }
  CHECK(asked({.tokens = it.prompt}, 0, INT64_MAX) == errc::invalid_argument);
  const std::vector<extra_key> bad_extras[] = {
      {{-1, 0, {}}},        {{INT64_MIN, 0, {}}},     {{100, 0, {}}},
      {{INT64_MAX, 0, {}}}, {{5, 0, {}}, {4, 0, {}}}, {{0, 0, {}}, {8, 0, {}}, {1, 0, {}}}};
  for (const std::vector<extra_key>& extras : bad_extras) {
    CHECK(code({.tokens = it.prompt, .extras = extras}, 1) == errc::invalid_argument);
    CHECK(asked({.tokens = it.prompt, .extras = extras}) == errc::invalid_argument);
  }
  const std::vector<extra_key> good{{0, 0, {}}, {0, 1, {}}, {99, 0, {}}};
  CHECK(asked({.tokens = it.prompt, .extras = good}) == errc::ok);
  // A salt, and all extra keys of a prompt together, have a largest size.
  const std::string salt(100'000'000, 's');
  const auto bytes = [&](std::size_t size) { return std::as_bytes(std::span(salt.data(), size)); };
  const auto salted = [&](std::size_t size) {
    return prompt_view{.tokens = it.prompt, .scope = {.salt = std::string_view(salt).substr(0, size)}};
  };
  CHECK(code(salted(salt.size()), 1) == errc::invalid_argument);
  CHECK(asked(salted(salt.size())) == errc::invalid_argument);
  CHECK(asked(salted(max_salt_bytes + 1)) == errc::invalid_argument);
  CHECK(asked(salted(max_salt_bytes)) == errc::ok);
  const std::vector<extra_key> fits{{0, 0, bytes(max_extras_bytes / 2 - 16)}, {0, 1, bytes(max_extras_bytes / 2 - 16)}};
  CHECK(asked({.tokens = it.prompt, .extras = fits}) == errc::ok);
  std::vector<extra_key> too_much = fits;
  too_much[1].value = bytes(max_extras_bytes / 2 - 15);
  CHECK(code({.tokens = it.prompt, .extras = too_much}, 1) == errc::invalid_argument);
  CHECK(asked({.tokens = it.prompt, .extras = too_much}) == errc::invalid_argument);
  too_much = {{0, 0, bytes(salt.size())}};
  CHECK(code({.tokens = it.prompt, .extras = too_much}, 1) == errc::invalid_argument);
  too_much.assign(max_extras_bytes / 16 + 1, {});  // empty values count as well
  CHECK(code({.tokens = it.prompt, .extras = too_much}, 1) == errc::invalid_argument);
  const prefix_cache& names = *it.manager.prefix();
  std::vector<content_key> keys;
  std::vector<block_id> out(4);
  CHECK(code_of([&] { names.append_keys(salted(salt.size()), keys); }) == errc::invalid_argument);
  CHECK(code_of([&] { (void)names.match(salted(salt.size()), out); }) == errc::invalid_argument);
  CHECK(code_of([&] { names.append_keys({.tokens = it.prompt, .extras = too_much}, keys); }) == errc::invalid_argument);
  CHECK(code_of([&] { (void)names.match({.tokens = it.prompt, .extras = too_much}, out); }) == errc::invalid_argument);
  CHECK(keys.empty());
  {
    block_pool pool(8);
    prefix_cache own(pool, {.block_size = 4});
    CHECK(code_of([&] { (void)own.acquire_scope({.salt = salt}); }) == errc::invalid_argument);
    CHECK(code_of([&] { (void)own.acquire_extras(too_much, 0); }) == errc::invalid_argument);
    CHECK(own.num_interned() == 0);
  }
  CHECK(it.manager.digest() == before);
  CHECK(it.manager.prefix()->stats() == stats);
  kv_cache_manager plain({.num_blocks = 8, .max_seq_len = 50});  // the same without prefix caching
  CHECK(code_of([&] { (void)plain.open({}, 1); }) == errc::invalid_argument);
  CHECK(code_of([&] { (void)plain.open({.tokens = longest}, 1); }) == errc::invalid_argument);
  CHECK(code_of([&] { (void)plain.open({.tokens = it.prompt, .extras = bad_extras[0]}, 1); }) ==
        errc::invalid_argument);
  CHECK(code_of([&] { (void)plain.open({.tokens = it.prompt}, 0); }) == errc::invalid_argument);
  CHECK(code_of([&] { (void)plain.open(salted(salt.size()), 1); }) == errc::invalid_argument);
}

TEST_CASE("the calls of prefix caching and swapping know unknown, stale and foreign sequences") {
  full_manager it;
  const std::uint64_t before = it.manager.digest();
  for (const seq_id seq : {it.stale, it.foreign, invalid_seq, seq_id{to_index(it.open) + 7},
                           seq_id{to_index(it.out) ^ (std::uint64_t{1} << 32)}, seq_id{UINT64_MAX}}) {
    CAPTURE(to_index(seq));
    const seq_id list[] = {it.open, seq};
    const seq_id out_list[] = {it.out, seq};
    CHECK(code_of([&] { it.manager.commit(seq, std::span(it.prompt).first(1)); }) == errc::not_found);
    CHECK(code_of([&] { (void)it.manager.swap_out(list, it.copies); }) == errc::not_found);
    CHECK(code_of([&] { (void)it.manager.swap_in(out_list, it.copies); }) == errc::not_found);
    CHECK(code_of([&] { (void)it.manager.blocks_to_swap_in(out_list); }) == errc::not_found);
    CHECK(code_of([&] { (void)it.manager.is_swapped_out(seq); }) == errc::not_found);
    CHECK(code_of([&] { (void)it.manager.num_released_blocks(seq); }) == errc::not_found);
  }
  CHECK(code_of([&] { it.manager.commit(it.open, it.prompt); }) == errc::invalid_argument);  // only one is left
  CHECK(it.copies.empty());
  CHECK(it.manager.digest() == before);
  it.manager.commit(it.open, std::span<const token_id>());
  CHECK(it.manager.digest() == before);
}

TEST_CASE("a sequence that is swapped out can be asked, freed and swapped in, and nothing else") {
  full_manager it;
  const std::uint64_t before = it.manager.digest();
  const seq_id list[] = {it.out};
  CHECK(code_of([&] { (void)it.manager.append(it.out, 1); }) == errc::failed_precondition);
  CHECK(code_of([&] { (void)it.manager.append(it.out, 0, 1); }) == errc::failed_precondition);
  CHECK(code_of([&] { (void)it.manager.append(it.out, 0); }) == errc::failed_precondition);
  CHECK(code_of([&] { (void)it.manager.can_append(it.out, 1); }) == errc::failed_precondition);
  CHECK(code_of([&] { it.manager.commit(it.out, 1); }) == errc::failed_precondition);
  CHECK(code_of([&] { it.manager.commit(it.out, std::span(it.prompt).first(1)); }) == errc::failed_precondition);
  CHECK(code_of([&] { (void)it.manager.fork(it.out); }) == errc::failed_precondition);
  CHECK(code_of([&] { it.manager.truncate(it.out, 5); }) == errc::failed_precondition);
  CHECK(code_of([&] { (void)it.manager.swap_out(list, it.copies); }) == errc::failed_precondition);
  CHECK(code_of([&] { (void)it.manager.slot_at(it.out, 0); }) == errc::failed_precondition);
  step_batch batch;
  step_plan plan;
  plan.seqs = {{.seq = it.open, .query_len = 1, .seq_len = 9}, {.seq = it.out, .query_len = 1, .seq_len = 9}};
  CHECK(code_of([&] { it.manager.build(batch, plan); }) == errc::failed_precondition);
  CHECK(batch.query_start_loc.empty());
  it.manager.prefetch(it.out);
  CHECK(it.manager.contains(it.out));
  CHECK(it.manager.num_tokens(it.out) == 9);
  CHECK(it.manager.num_committed(it.out) == 0);
  CHECK(it.manager.num_table_blocks(it.out) == 3);
  CHECK(to_index(it.manager.block_at(it.out, 2)) < 20);  // a host block
  CHECK(code_of([&] { (void)it.manager.block_at(it.out, 3); }) == errc::out_of_range);
  CHECK(it.manager.is_swapped_out(it.out));
  CHECK(it.manager.blocks_to_swap_in(list) == 3);
  CHECK(it.copies.empty());
  CHECK(it.manager.digest() == before);
  it.manager.free(it.out);
  CHECK(it.manager.num_free_host_blocks() == 20);
  CHECK(it.manager.check() == "");
}

TEST_CASE("lists of sequences to swap with a wrong one among them move none") {
  full_manager it;
  const std::uint64_t before = it.manager.digest();
  const auto out = [&](const std::vector<seq_id>& seqs) {
    return code_of([&] { (void)it.manager.swap_out(seqs, it.copies); });
  };
  const auto in = [&](const std::vector<seq_id>& seqs) {
    return code_of([&] { (void)it.manager.swap_in(seqs, it.copies); });
  };
  const auto asked = [&](const std::vector<seq_id>& seqs) {
    return code_of([&] { (void)it.manager.blocks_to_swap_in(seqs); });
  };
  CHECK(out({it.open, it.fork, it.open}) == errc::failed_precondition);
  CHECK(out({it.open, it.out}) == errc::failed_precondition);
  CHECK(in({it.out, it.out}) == errc::failed_precondition);
  CHECK(in({it.out, it.open}) == errc::failed_precondition);
  CHECK(asked({it.out, it.out}) == errc::failed_precondition);
  CHECK(asked({it.open}) == errc::failed_precondition);
  CHECK(it.copies.empty());
  CHECK(it.manager.swap_out({}, it.copies) == alloc_status::ok);
  CHECK(it.manager.swap_in({}, it.copies) == alloc_status::ok);
  CHECK(it.manager.blocks_to_swap_in({}) == 0);
  CHECK(it.manager.digest() == before);
  kv_cache_manager plain({.num_blocks = 8});  // has no host blocks
  const std::vector<seq_id> one{plain.allocate(3).seq};
  CHECK(code_of([&] { (void)plain.swap_out(one, it.copies); }) == errc::failed_precondition);
  CHECK(code_of([&] { (void)plain.swap_in(one, it.copies); }) == errc::failed_precondition);
  CHECK(code_of([&] { (void)plain.blocks_to_swap_in(one); }) == errc::failed_precondition);
  CHECK_FALSE(plain.is_swapped_out(one[0]));
}

TEST_CASE("fences retire in their order, each once, and no more than there may be are opened") {
  full_manager it;
  const std::uint64_t before = it.manager.digest();
  CHECK(code_of([&] { it.manager.retire(fence_id{1}); }) == errc::invalid_argument);
  CHECK(code_of([&] { it.manager.retire(fence_id{0}); }) == errc::invalid_argument);
  CHECK(it.manager.digest() == before);
  std::vector<fence_id> fences;
  for (std::uint32_t i = 0; i < block_pool::max_open_fences; ++i) fences.push_back(it.manager.open_fence());
  it.manager.free(it.open);
  it.manager.free(it.out);
  const std::uint64_t all_open = it.manager.digest();
  CHECK(code_of([&] { (void)it.manager.open_fence(); }) == errc::failed_precondition);
  CHECK(code_of([&] { it.manager.retire(fences[1]); }) == errc::invalid_argument);
  CHECK(code_of([&] { it.manager.retire(fences.back()); }) == errc::invalid_argument);
  CHECK(code_of([&] { it.manager.retire(fence_id{static_cast<std::uint64_t>(fences.back()) + 1}); }) ==
        errc::invalid_argument);
  CHECK(it.manager.digest() == all_open);
  it.manager.retire(fences[0]);
  const std::uint64_t one_less = it.manager.digest();
  CHECK(code_of([&] { it.manager.retire(fences[0]); }) == errc::invalid_argument);
  CHECK(it.manager.digest() == one_less);
  fences.push_back(it.manager.open_fence());
  for (std::size_t i = 1; i < fences.size(); ++i) it.manager.retire(fences[i]);
  CHECK(it.manager.num_free_host_blocks() == 20);
  CHECK(it.manager.check() == "");
}

TEST_CASE("without prefix caching its calls do nothing") {
  kv_cache_manager plain({.block_size = 4, .num_blocks = 8});
  const std::vector<token_id> prompt = some_tokens(8);
  const open_result got = plain.open({.tokens = prompt, .scope = {"tenant", 1}}, 3);
  CHECK(got.status == alloc_status::ok);
  CHECK(got.num_cached_tokens == 0);
  CHECK(plain.num_tokens(got.seq) == 3);
  plain.commit(got.seq, std::span(prompt).first(3));
  CHECK(plain.num_committed(got.seq) == 3);
  const std::uint64_t before = plain.digest();
  std::vector<cache_event> events(3);
  plain.drain_events(events);
  CHECK(events.empty());
  plain.advance_clock(100);
  CHECK(plain.reset_prefix_cache());
  CHECK(plain.can_open({.tokens = prompt}).num_cached_tokens == 0);
  CHECK(plain.digest() == before);
}

struct open_scheduler {
  kv_cache_manager manager{{.block_size = 4, .num_blocks = 40, .max_sequences = 8, .max_seq_len = 100}};
  scheduler plans{manager, {.max_tokens_per_step = 16, .max_running = 4, .vocab_size = 100}};
};

request asking(std::size_t prompt, std::int32_t max_new_tokens = 4, std::int32_t num_samples = 1) {
  return {std::vector<token_id>(prompt, token_id{7}), max_new_tokens, num_samples};
}

TEST_CASE("a scheduler with a field outside its range is refused") {
  kv_cache_manager manager({.num_blocks = 8, .max_sequences = 8});
  const auto refuses = [&](scheduler_config config) {
    return code_of([&] { scheduler plans(manager, config); }) == errc::invalid_argument;
  };
  for (const std::int32_t value : {0, -1, least32}) {
    CHECK(refuses({.max_tokens_per_step = value, .max_running = 4}));
    CHECK(refuses({.max_running = value}));
    if (value != 0) CHECK(refuses({.max_running = 4, .max_chunk_tokens = value}));
    if (value != 0) CHECK(refuses({.max_running = 4, .vocab_size = value}));
  }
  for (const std::int32_t value : {0, -1, least32, 17, most32}) {
    CHECK(refuses({.max_running = 4, .max_steps_in_flight = value}));
  }
  CHECK_FALSE(refuses({.max_running = 4, .max_steps_in_flight = 16}));
  CHECK(refuses({.max_running = 4, .preemption = static_cast<preemption_mode>(3)}));
  CHECK(refuses({.max_running = 4, .swap_block_cost = -1}));
  CHECK(refuses({.max_running = 4, .swap_block_cost = std::numeric_limits<double>::quiet_NaN()}));
  for (const std::int32_t value : {-1, least32, most32}) {
    CHECK(refuses({.max_running = 4, .priority_span = value}));
  }
  CHECK(refuses({.max_running = 9}));
  CHECK_FALSE(refuses({.max_running = 8}));
}

TEST_CASE("requests that cannot be served are refused when they are submitted") {
  open_scheduler it;
  const auto code = [&](request what) { return code_of([&] { (void)it.plans.submit(std::move(what)); }); };
  CHECK(code(asking(0)) == errc::invalid_argument);
  for (const std::int32_t value : {0, -1, least32}) {
    CHECK(code(asking(5, value)) == errc::invalid_argument);
    CHECK(code(asking(5, 4, value)) == errc::invalid_argument);
  }
  CHECK(code(asking(5, 4, 5)) == errc::invalid_argument);  // more samples than may run
  CHECK(code(asking(5, most32)) == errc::invalid_argument);
  CHECK(code(asking(101, 1)) == errc::invalid_argument);
  CHECK(code(asking(98, 4)) == errc::invalid_argument);
  for (const std::int32_t token : {-1, least32, 100, most32}) {
    request what = asking(5);
    what.prompt[3] = token_id{token};
    CHECK(code(what) == errc::invalid_argument);
  }
  const auto with = [](auto change) {
    request what = asking(5);
    change(what);
    return what;
  };
  for (const std::int32_t value : {-1, least32, 5, most32}) {  // more beams than may run
    CHECK(code(with([&](request& what) { what.beam_width = value; })) == errc::invalid_argument);
  }
  for (const std::int32_t value : {-1, least32, 16, most32}) {  // a chunk has 16 tokens
    CHECK(code(with([&](request& what) { what.max_draft_tokens = value; })) == errc::invalid_argument);
  }
  for (const std::int32_t value : {-1000001, least32, 1000001, most32}) {
    CHECK(code(with([&](request& what) { what.priority = value; })) == errc::invalid_argument);
  }
  CHECK(code(with([](request& what) { what.beam_width = what.num_samples = 2; })) == errc::invalid_argument);
  CHECK(code(with([](request& what) { what.beam_width = what.max_draft_tokens = 2; })) == errc::invalid_argument);
  for (const std::int64_t position : {std::int64_t{-1}, std::int64_t{5}, INT64_MAX, INT64_MIN}) {
    CHECK(code(with([&](request& what) { what.extras = {{.position = position}}; })) == errc::invalid_argument);
  }
  CHECK(code(with([](request& what) { what.extras = {{.position = 3}, {.position = 2}}; })) == errc::invalid_argument);
  CHECK(code(with([](request& what) { what.prefix_salt.assign(100'000'000, 's'); })) == errc::invalid_argument);
  CHECK(code(with([](request& what) { what.prefix_salt.assign(max_salt_bytes + 1, 's'); })) == errc::invalid_argument);
  CHECK(code(with([](request& what) { what.extras = {{.value = std::vector<std::byte>(max_extras_bytes - 15)}}; })) ==
        errc::invalid_argument);
  CHECK(code(with([](request& what) { what.extras.resize(max_extras_bytes / 16 + 1); })) == errc::invalid_argument);
  kv_cache_manager small({.block_size = 4, .num_blocks = 4, .max_sequences = 4});
  scheduler plans(small, {.max_running = 4});
  CHECK(plans.submit(with([](request& what) { what.beam_width = 4; })).status == alloc_status::never);
  CHECK(plans.submit(with([](request& what) { what.beam_width = 2; })).status == alloc_status::ok);
  CHECK(plans.submit(asking(10, 8)).status == alloc_status::never);
  CHECK(plans.submit(asking(10, 7)).status == alloc_status::ok);
  CHECK(it.plans.schedule().seqs.empty());
  CHECK_FALSE(it.plans.has_work());
}

TEST_CASE("steps out of turn are refused and change nothing") {
  open_scheduler it;
  step_inputs inputs;
  CHECK(code_of([&] { it.plans.build(inputs); }) == errc::failed_precondition);
  REQUIRE(it.plans.submit(asking(6)).status == alloc_status::ok);
  const step_plan plan = it.plans.schedule();
  REQUIRE(plan.seqs.size() == 1);
  REQUIRE(plan.seqs[0].num_samples == 1);
  const std::uint64_t before = it.plans.digest();
  CHECK(code_of([&] { (void)it.plans.schedule(); }) == errc::failed_precondition);
  step_plan absent = plan;
  absent.step += 7;
  CHECK(code_of([&] { (void)it.plans.fail_swaps(absent); }) == errc::failed_precondition);
  CHECK(it.plans.fail_swaps(plan) == 0);  // it has none
  const std::vector<sampled_token> one{{token_id{5}}};
  const std::vector<sampled_token> two{{token_id{5}}, {token_id{6}}};
  CHECK(code_of([&] { (void)it.plans.commit(plan, {}); }) == errc::invalid_argument);
  CHECK(code_of([&] { (void)it.plans.commit(plan, two); }) == errc::invalid_argument);
  for (const std::int32_t token : {-1, 100, most32}) {
    const std::vector<sampled_token> bad{{token_id{token}}};
    CHECK(code_of([&] { (void)it.plans.commit(plan, bad); }) == errc::invalid_argument);
  }
  step_plan other = plan;
  ++other.step;
  CHECK(code_of([&] { (void)it.plans.commit(other, one); }) == errc::invalid_argument);
  other = plan;
  other.seqs.clear();
  CHECK(code_of([&] { (void)it.plans.commit(other, {}); }) == errc::invalid_argument);
  CHECK(it.plans.digest() == before);
  CHECK(it.plans.commit(plan, one).empty());
  const std::uint64_t after = it.plans.digest();
  CHECK(code_of([&] { (void)it.plans.commit(plan, one); }) == errc::failed_precondition);
  CHECK(it.plans.digest() == after);
  CHECK(it.plans.check() == "");
}

TEST_CASE("aborting what is unknown, finished or aborted already is answered, and the others go on") {
  open_scheduler it;
  const request_id first = it.plans.submit(asking(6, 1)).id;
  const request_id second = it.plans.submit(asking(6, 2)).id;
  CHECK(it.plans.abort(first) == errc::not_found);  // no schedule has seen it
  const step_plan plan = it.plans.schedule();
  REQUIRE(plan.seqs.size() == 2);
  CHECK(it.plans.abort(invalid_request) == errc::not_found);
  CHECK(it.plans.abort(request_id{99}) == errc::not_found);
  CHECK(it.plans.abort(second) == errc::ok);
  CHECK(it.plans.abort(second) == errc::not_found);
  const std::vector<sampled_token> tokens{{token_id{5}}, {token_id{6}}};
  const std::vector<finished_sequence> done = it.plans.commit(plan, tokens);
  REQUIRE(done.size() == 1);
  CHECK(done[0].request == first);
  CHECK(it.plans.abort(first) == errc::not_found);
  CHECK(it.plans.output(first).empty());
  CHECK(it.plans.output(second, -1).empty());
  CHECK_FALSE(it.plans.has_work());
  CHECK(it.manager.num_free_blocks() == 40);
  CHECK(it.plans.check() == "");
}

/// What a caller may do by mistake to a sequence that belongs to a scheduler.
struct tampering {
  const char* name;
  void (*change)(kv_cache_manager&, seq_id);
  errc code;
};

const tampering tamperings[] = {
    {"freed", [](kv_cache_manager& manager, seq_id seq) { manager.free(seq); }, errc::not_found},
    {"freed, and its record used again",
     [](kv_cache_manager& manager, seq_id seq) {
       manager.free(seq);
       (void)manager.allocate(3);
     },
     errc::not_found},
    {"cut", [](kv_cache_manager& manager, seq_id seq) { manager.truncate(seq, 1); }, errc::failed_precondition},
    {"grown", [](kv_cache_manager& manager, seq_id seq) { (void)manager.append(seq, 1); }, errc::failed_precondition},
    {"grown to its limit",
     [](kv_cache_manager& manager, seq_id seq) { (void)manager.append(seq, 100 - manager.num_tokens(seq)); },
     errc::failed_precondition},
    {"swapped out",
     [](kv_cache_manager& manager, seq_id seq) {
       std::vector<block_copy> copies;
       (void)manager.swap_out(std::span(&seq, 1), copies);
     },
     errc::failed_precondition},
};

/// A scheduler whose first request was changed from outside, next to one that goes on.
struct tampered_scheduler {
  kv_cache_config cache;
  kv_cache_manager manager{cache};
  scheduler plans;
  request_id first{}, second{};

  tampered_scheduler(const request& what, bool caches, std::int32_t window, std::int32_t steps_in_flight)
      : cache{.block_size = 4,
              .num_blocks = 80,
              .sliding_window = window,
              .max_sequences = 12,
              .max_seq_len = 100,
              .prefix = {.enabled = caches, .seed = hash_seed{1, 2}},
              .num_host_blocks = 40},
        plans(manager, {.max_tokens_per_step = 32, .max_running = 8, .max_steps_in_flight = steps_in_flight}) {
    first = ask(plans, what);
    second = ask(plans, {.prompt = tokens_from(50, 6), .max_new_tokens = 9});
  }
  /// Ends the others, and finds nothing out of order.
  void finish() {
    std::int64_t num_finished = 0;
    while (plans.has_work()) {
      const step_plan plan = plans.schedule();
      for (const finished_sequence& done : plans.commit(plan, any_tokens(plan))) {
        CHECK(done.request == second);
        CHECK(done.tokens.size() == 9);
        ++num_finished;
      }
      REQUIRE(plans.check() == "");
    }
    CHECK(num_finished == 1);
  }
};

TEST_CASE("a scheduler's sequence that the caller freed or changed is reported until its request is aborted") {
  for (const tampering& how : tamperings) {
    CAPTURE(how.name);
    for (const bool caches : {false, true}) {
      for (const std::int32_t window : {0, 16}) {
        for (const std::int32_t steps_in_flight : {1, 2}) {
          for (const std::int32_t kind : {0, 1, 2}) {  // plain, samples, beams
            for (const std::int32_t num_steps : {0, 1, 2}) {
              CAPTURE(caches);
              CAPTURE(window);
              CAPTURE(steps_in_flight);
              CAPTURE(kind);
              CAPTURE(num_steps);
              const request what{.prompt = tokens_from(10, 6),
                                 .max_new_tokens = 9,
                                 .num_samples = kind == 1 ? 3 : 1,
                                 .beam_width = kind == 2 ? 3 : 0};
              tampered_scheduler it(what, caches, window, steps_in_flight);
              for (std::int32_t i = 0; i < num_steps; ++i) (void)step(it.plans);
              // Found by commit.
              const step_plan plan = it.plans.schedule();
              const scheduled_seq* row = row_of(plan, it.first);
              REQUIRE(row != nullptr);
              how.change(it.manager, row->seq);
              const std::uint64_t before = it.plans.digest();
              CHECK(code_of([&] { (void)it.plans.commit(plan, any_tokens(plan)); }) == how.code);
              CHECK(it.plans.digest() == before);
              CHECK(it.plans.num_steps_in_flight() == 1);
              CHECK(it.plans.abort(it.first) == errc::ok);
              (void)it.plans.commit(plan, any_tokens(plan));
              CHECK(it.plans.check() == "");
              it.finish();
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a sequence changed between two steps is reported by schedule, unless its request is aborted there") {
  for (const tampering& how : tamperings) {
    CAPTURE(how.name);
    for (const std::int32_t kind : {0, 1, 2, 3}) {  // of 3, the scheduler is just let go
      CAPTURE(kind);
      tampered_scheduler it({.prompt = tokens_from(10, 6), .max_new_tokens = 9}, kind == 1, 0, 1);
      const step_plan plan = step(it.plans);
      REQUIRE(row_of(plan, it.first) != nullptr);
      how.change(it.manager, row_of(plan, it.first)->seq);
      if (kind == 3) continue;
      if (kind == 2) {
        it.plans.post_abort(it.first);
        const step_plan next = it.plans.schedule();
        CHECK(next.aborted == std::vector<request_id>{it.first});
        (void)it.plans.commit(next, any_tokens(next));
      } else {
        const std::uint64_t before = it.plans.digest();
        CHECK(code_of([&] { (void)it.plans.schedule(); }) == how.code);
        CHECK(it.plans.digest() == before);
        CHECK(it.plans.abort(it.first) == errc::ok);
      }
      CHECK(it.plans.check() == "");
      it.finish();
    }
  }
}

TEST_CASE("a sequence that ended and is freed by the caller while a step computes it is passed over") {
  tampered_scheduler it({.prompt = tokens_from(10, 6), .max_new_tokens = 9}, false, 0, 2);
  const step_plan plan = it.plans.schedule();
  REQUIRE(row_of(plan, it.first) != nullptr);
  CHECK(it.plans.abort(it.first) == errc::ok);
  it.manager.free(row_of(plan, it.first)->seq);
  (void)it.plans.commit(plan, any_tokens(plan));
  CHECK(it.plans.check() == "");
  it.finish();
}

TEST_CASE("a sequence that is swapped out and freed by the caller is reported, and its request can be aborted") {
  for (const bool fails_swaps : {false, true}) {
    kv_cache_manager manager({.block_size = 2, .num_blocks = 12, .watermark = 0, .num_host_blocks = 20});
    scheduler plans(manager, {.max_running = 4, .preemption = preemption_mode::swap});
    (void)ask(plans, {.prompt = tokens_from(10, 8), .max_new_tokens = 9});
    const request_id second = ask(plans, {.prompt = tokens_from(50, 8), .max_new_tokens = 9});
    step_plan plan;
    for (bool swapped = false; !swapped;) {
      plan = plans.schedule();
      swapped = !plan.swapped_out.empty();
      if (!swapped || !fails_swaps) (void)plans.commit(plan, any_tokens(plan));
    }
    manager.free(plan.swapped_out[0]);
    if (fails_swaps) {
      CHECK(plans.fail_swaps(plan) == 1);
      (void)plans.commit(plan, any_tokens(plan));
      CHECK(plans.check() == "");
    } else {
      CHECK(code_of([&] { (void)plans.schedule(); }) == errc::not_found);
      CHECK(plans.abort(second) == errc::ok);
    }
    while (plans.has_work()) (void)step(plans);
    CHECK(plans.stats().num_finished == (fails_swaps ? 2 : 1));
    require_baseline(manager);
  }
}

TEST_CASE("a step that finds no fence is refused before anything is decided") {
  tampered_scheduler it({.prompt = tokens_from(10, 6), .max_new_tokens = 9}, false, 0, 2);
  std::vector<fence_id> fences;
  for (std::uint32_t i = 0; i < block_pool::max_open_fences; ++i) fences.push_back(it.manager.open_fence());
  const std::uint64_t before = it.plans.digest();
  CHECK(code_of([&] { (void)it.plans.schedule(); }) == errc::failed_precondition);
  CHECK(it.plans.digest() == before);
  CHECK(it.plans.check() == "");
  for (const fence_id fence : fences) it.manager.retire(fence);
  const step_plan plan = it.plans.schedule();
  CHECK(plan.seqs.size() == 2);
  CHECK(it.plans.abort(it.first) == errc::ok);
  (void)it.plans.commit(plan, any_tokens(plan));
  it.finish();
}

TEST_CASE("a scheduler can go while somebody else has an older fence open") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 40, .max_sequences = 8});
  const fence_id older = manager.open_fence();
  {
    scheduler plans(manager, {.max_running = 4, .max_steps_in_flight = 2});
    (void)ask(plans, {.prompt = tokens_from(10, 6), .max_new_tokens = 9});
    REQUIRE(plans.schedule().seqs.size() == 1);
  }
  manager.retire(older);
  CHECK(manager.stats().num_sequences == 0);
  CHECK(manager.check() == "");
}

}  // namespace
}  // namespace bifolio::test
