// SPDX-License-Identifier: Apache-2.0
/// A manager under an engine that does everything late. Steps are planned ahead of the ones in flight, and each is
/// carried out as a whole in the documented order: pairs of swap_out, copies, new rows, reads, pairs of swap_in. The
/// simulated memory holds a hash of each token and all before it, so every read says whether a block was handed out,
/// copied over or taken from the cache or the host too early.

#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/kv_cache_manager.hpp>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"

namespace bifolio::test {
namespace {

struct engine_shape {
  std::int32_t block_size;
  std::int64_t num_blocks;
  std::int32_t sliding_window;
  std::int64_t num_host_blocks;
  int max_in_flight;  ///< steps
  bool deduplicate;
  std::int64_t longest;  ///< prompt
};

class late_engine {
 public:
  late_engine(const engine_shape& how, std::uint64_t seed)
      : how_(how),
        manager_(config_of(how)),
        random_(seed),
        memory_(to_size(how.num_blocks * how.block_size), 1),
        host_memory_(to_size(how.num_host_blocks * how.block_size), 2) {}

  std::string run(int num_steps) {
    for (int i = 0; i < num_steps; ++i) {
      plan();
      while (steps_.size() > to_size(random_.between(0, how_.max_in_flight - 1))) carry_out();
      if (i % 500 == 499 && problem_.empty()) problem_ = manager_.check();
      if (!problem_.empty()) return "step " + std::to_string(i) + ": " + problem_;
    }
    while (!steps_.empty()) carry_out();
    for (const one_sequence& one : seqs_) {
      if (one.id != invalid_seq) manager_.free(one.id);
    }
    if (manager_.num_free_blocks() != how_.num_blocks) return "blocks were lost";
    if (manager_.num_free_host_blocks() != how_.num_host_blocks) return "host blocks were lost";
    return problem_.empty() ? manager_.check() : problem_;
  }
  std::int64_t num_reads = 0, num_hits = 0, num_copies = 0, num_swaps = 0, num_aborts_in_flight = 0;

 private:
  struct one_sequence {
    seq_id id = invalid_seq;  ///< invalid: ended
    int document = 0;
    std::vector<token_id> known;          ///< its prompt, and beyond it what has slots
    std::vector<std::uint64_t> contents;  ///< of all known
    int num_in_flight = 0;
    bool swapped = false;
    bool scheduled = false;  ///< in the step that is being planned
  };
  using value_at = std::pair<std::int64_t, std::uint64_t>;
  struct one_step {
    std::vector<block_copy> outs, copies, ins;
    std::vector<value_at> writes, reads;
    std::vector<std::pair<std::size_t, std::int64_t>> commits;  ///< sequence, tokens
    fence_id fence{};
  };

  static std::size_t to_size(std::int64_t n) { return static_cast<std::size_t>(n); }
  static kv_cache_config config_of(const engine_shape& how) {
    kv_cache_config config{.block_size = how.block_size,
                           .num_blocks = how.num_blocks,
                           .sliding_window = how.sliding_window,
                           .max_sequences = 64,
                           .num_host_blocks = how.num_host_blocks};
    config.prefix.enabled = true;
    config.prefix.deduplicate = how.deduplicate;
    return config;
  }

  // --- planning: manager calls alone, memory is not touched

  void plan() {
    one_step step;
    for (one_sequence& one : seqs_) one.scheduled = false;
    for (int i = 0; i < 2; ++i) end_or_roll_back();
    if (how_.num_host_blocks > 0 && random_.one_in(3)) swap_out(step);
    for (std::int64_t i = random_.between(1, 5); i > 0; --i) {
      if (random_.one_in(3) || seqs_.empty()) {
        open(step);
      } else if (one_sequence& one = any(); can_run(one)) {
        random_.one_in(6) && one.num_in_flight == 0 ? fork(one) : extend(one, step);
      }
    }
    if (how_.num_host_blocks > 0 && random_.one_in(2)) swap_in(step);
    step.fence = manager_.open_fence();
    steps_.push_back(std::move(step));
  }

  /// Mostly one that has not ended.
  one_sequence& any() {
    const auto one_of_all = [this] { return random_.between(0, static_cast<std::int64_t>(seqs_.size()) - 1); };
    std::int64_t at = one_of_all();
    for (int i = 0; i < 10 && seqs_[to_size(at)].id == invalid_seq; ++i) at = one_of_all();
    return seqs_[to_size(at)];
  }
  /// A place for a sequence, maybe of one that has ended.
  std::size_t place() {
    for (std::size_t i = 0; i < seqs_.size(); ++i) {
      if (seqs_[i].id == invalid_seq && seqs_[i].num_in_flight == 0) return i;
    }
    seqs_.emplace_back();
    return seqs_.size() - 1;
  }
  static bool can_run(const one_sequence& one) { return one.id != invalid_seq && !one.swapped && !one.scheduled; }

  void end_or_roll_back() {
    if (seqs_.empty()) return;
    one_sequence& one = any();
    if (one.id == invalid_seq) return;
    if (random_.one_in(num_refused_ > 0 ? 2 : 30)) {  // at any time, also while its rows are still to be written
      num_refused_ = std::max(num_refused_ - 1, 0);
      num_aborts_in_flight += one.num_in_flight > 0 ? 1 : 0;
      manager_.free(one.id);
      one.id = invalid_seq;
    } else if (random_.one_in(6) && !one.swapped && one.num_in_flight == 0) {
      const std::int64_t now = manager_.num_tokens(one.id);
      const std::int64_t to = std::max<std::int64_t>(1, now - random_.between(1, 2 * how_.block_size));
      try {
        manager_.truncate(one.id, to);
      } catch (const error&) {
        return;  // the window has given back what that needs
      }
      one.known.resize(to_size(to));
      one.contents.resize(to_size(to));
    }
  }

  void swap_out(one_step& step) {
    std::vector<seq_id> ids;
    std::vector<one_sequence*> chosen;
    for (std::int64_t i = random_.between(1, 3); i > 0 && !seqs_.empty(); --i) {
      one_sequence& one = any();
      if (!can_run(one) || one.num_in_flight > 0 || std::count(chosen.begin(), chosen.end(), &one) > 0) continue;
      ids.push_back(one.id);
      chosen.push_back(&one);
    }
    if (manager_.swap_out(ids, step.outs) != alloc_status::ok) return;
    for (one_sequence* one : chosen) one->swapped = true;
    num_swaps += static_cast<std::int64_t>(chosen.size());
  }

  void swap_in(one_step& step) {
    for (one_sequence& one : seqs_) {
      if (one.id == invalid_seq || !one.swapped || random_.one_in(2)) continue;
      if (manager_.swap_in(std::span(&one.id, 1), step.ins) != alloc_status::ok) return;
      one.swapped = false;
      one.scheduled = true;  // computed from the next step on
    }
  }

  void open(one_step& step) {
    one_sequence one;
    one.document = static_cast<int>(random_.between(0, 5));
    for (std::int64_t p = random_.between(1, how_.longest); p > 0; --p) add_token(one);
    const open_result got = manager_.open({.tokens = one.known}, random_.between(1, 2 * how_.block_size));
    if (got.status != alloc_status::ok) {
      ++num_refused_;
      return;
    }
    num_hits += got.num_cached_tokens;
    if (got.has_copy()) step.copies.push_back(got.copy);
    one.id = got.seq;
    one.scheduled = true;
    const std::size_t at = place();
    seqs_[at] = std::move(one);
    run_rows(at, got.num_cached_tokens, step);
  }

  void fork(one_sequence& parent) {
    const allocate_result got = manager_.fork(parent.id);
    if (got.status != alloc_status::ok) return;
    one_sequence child = parent;
    child.id = got.seq;
    seqs_[place()] = std::move(child);
  }

  void extend(one_sequence& one, one_step& step) {
    const std::int64_t first = manager_.num_tokens(one.id);
    const std::int64_t n = random_.one_in(4) ? random_.between(1, how_.block_size + 1) : 1;
    const append_result got = manager_.append(one.id, n, random_.one_in(8) ? how_.block_size : 0);
    if (got.status != alloc_status::ok) return;
    if (got.has_copy()) step.copies.push_back(got.copy);
    while (static_cast<std::int64_t>(one.known.size()) < first + n) add_token(one);
    one.scheduled = true;
    run_rows(static_cast<std::size_t>(&one - seqs_.data()), first, step);
  }

  /// The rows from `first` on are written in this step, and read what each of them attends to.
  void run_rows(std::size_t index, std::int64_t first, one_step& step) {
    one_sequence& one = seqs_[index];
    const std::int64_t end = manager_.num_tokens(one.id);
    const std::int64_t seen = how_.sliding_window == 0 ? 0 : std::max<std::int64_t>(0, first - how_.sliding_window + 1);
    for (std::int64_t p = seen; p < end; ++p) {
      const std::int64_t slot = to_index(manager_.slot_at(one.id, p));
      if (slot < 0) {
        problem_ = "position " + std::to_string(p) + " is visible and has no slot";
        return;
      }
      step.reads.emplace_back(slot, one.contents[to_size(p)]);
      if (p >= first) step.writes.emplace_back(slot, one.contents[to_size(p)]);
    }
    step.commits.emplace_back(index, end - first);
    ++one.num_in_flight;
  }

  void add_token(one_sequence& one) {
    const auto p = static_cast<std::int64_t>(one.known.size());
    const bool strays = random_.one_in(30);
    const token_id token{static_cast<std::int32_t>((strays ? random_.next() : hash_of(3, one.document / 2, p)) % 3)};
    one.contents.push_back(hash_of(p == 0 ? 1 : one.contents.back(), to_index(token)));
    one.known.push_back(token);
  }

  // --- carrying out

  void copy(const std::vector<block_copy>& pairs, std::vector<std::uint64_t>& from, std::vector<std::uint64_t>& to) {
    for (const block_copy& pair : pairs) {
      std::copy_n(from.begin() + std::ptrdiff_t{to_index(pair.src)} * how_.block_size, how_.block_size,
                  to.begin() + std::ptrdiff_t{to_index(pair.dst)} * how_.block_size);
    }
  }

  void carry_out() {
    const one_step step = std::move(steps_.front());
    steps_.pop_front();
    copy(step.outs, memory_, host_memory_);
    copy(step.copies, memory_, memory_);
    num_copies += static_cast<std::int64_t>(step.copies.size());
    for (const auto& [slot, value] : step.writes) memory_[to_size(slot)] = value;
    for (const auto& [slot, value] : step.reads) {
      if (memory_[to_size(slot)] != value) problem_ = "slot " + std::to_string(slot) + " holds another text's token";
    }
    num_reads += static_cast<std::int64_t>(step.reads.size());
    copy(step.ins, host_memory_, memory_);
    manager_.retire(step.fence);
    for (const auto& [index, count] : step.commits) {
      one_sequence& one = seqs_[index];
      --one.num_in_flight;
      if (one.id == invalid_seq) continue;  // ended meanwhile
      const std::int64_t done = manager_.num_committed(one.id);
      manager_.commit(one.id, std::span(one.known).subspan(to_size(done), to_size(count)));
    }
  }

  engine_shape how_;
  kv_cache_manager manager_;
  random_source random_;
  std::vector<std::uint64_t> memory_, host_memory_;
  std::vector<one_sequence> seqs_;
  std::deque<one_step> steps_;
  std::string problem_;
  int num_refused_ = 0;  ///< and nobody has ended since
};

TEST_CASE("an engine that carries out steps late, in the documented order, reads every sequence's own tokens") {
  MESSAGE(seed_note());
  const engine_shape shapes[] = {
      {4, 40, 0, 0, 1, false, 40},    {4, 40, 0, 20, 1, false, 40},      {4, 60, 0, 30, 3, false, 40},
      {1, 60, 0, 60, 2, true, 20},    {3, 50, 0, 20, 4, true, 30},       {16, 40, 0, 40, 2, false, 150},
      {4, 50, 9, 20, 1, false, 60},   {4, 50, 9, 20, 3, true, 60},       {3, 40, 1, 10, 2, false, 40},
      {2, 400, 0, 200, 2, true, 300}, {1, 300, 150, 100, 3, false, 250},
  };
  std::int64_t reads = 0, hits = 0, copies = 0, swaps = 0, aborts = 0;
  for (std::size_t i = 0; i < std::size(shapes); ++i) {
    CAPTURE(i);
    late_engine engine(shapes[i], hash_of(test_seed(), i));
    CHECK(engine.run(20000) == "");
    reads += engine.num_reads;
    hits += engine.num_hits;
    copies += engine.num_copies;
    swaps += engine.num_swaps;
    aborts += engine.num_aborts_in_flight;
  }
  CHECK(reads > 2000000);
  CHECK(hits > 200000);
  CHECK(copies > 10000);
  CHECK(swaps > 10000);
  CHECK(aborts > 1000);
}

}  // namespace
}  // namespace bifolio::test
