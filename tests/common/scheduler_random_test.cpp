// SPDX-License-Identifier: Apache-2.0
/// Whole runs of scheduler, manager and a simulated engine against the model alone: whatever was batched, chunked,
/// preempted, swapped, forked, found in the prefix cache, guessed, scheduled ahead or aborted, each sequence ends with
/// the tokens that it would have alone, and everything is back at its place in the end.

#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/scheduler.hpp>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/cache_logic_helpers.hpp"
#include "common/scheduler_helpers.hpp"
#include "common/simulated_engine.hpp"
#include "support/random.hpp"

namespace bifolio::test {
namespace {

struct shape {
  std::string name;
  std::int32_t block_size = 4;
  std::int64_t num_blocks = 24;
  std::int32_t max_running = 8;
  std::int32_t max_tokens_per_step = 32;
  std::int32_t max_chunk_tokens = 0;
  std::int32_t longest_prompt = 40;
  std::int32_t longest_answer = 40;
  std::int32_t most_samples = 1;
  std::int32_t most_beams = 0;  ///< of every other request
  std::int32_t most_drafts = 0;
  std::int32_t sliding_window = 0;
  std::int32_t abort_one_in = 0;  ///< steps; 0: never
  bool prefix_caching = false;
  bool deduplicate = false;
  std::int64_t num_host_blocks = 0;
  preemption_mode preemption = preemption_mode::automatic;
  std::int32_t fail_one_in = 0;  ///< steps with swaps
  std::int32_t steps_in_flight = 1;
  std::int32_t most_priority = 0;
  std::vector<group_config> groups{};  ///< else one of the fields above
};

struct outcome {
  std::string problem;
  scheduler_stats stats;
  cache_stats cache;
  std::int64_t num_late = 0;
};

class world {
 public:
  world(const shape& how, std::uint64_t seed)
      : how_(how),
        random_(seed),
        manager_({.block_size = how.block_size,
                  .num_blocks = how.num_blocks,
                  .sliding_window = how.sliding_window,
                  .max_sequences = how.max_running + (how.num_host_blocks > 0 ? 6 : 0),
                  .prefix = {.enabled = how.prefix_caching,
                             .seed = hash_seed{seed, 1},
                             .record_events = how.prefix_caching && seed % 2 == 0,
                             .deduplicate = how.deduplicate},
                  .num_host_blocks = how.num_host_blocks,
                  .groups = how.groups}),
        plans_(manager_, {.max_tokens_per_step = how.max_tokens_per_step,
                          .max_running = how.max_running,
                          .max_chunk_tokens = how.max_chunk_tokens,
                          .vocab_size = simulated_vocabulary,
                          .max_steps_in_flight = how.steps_in_flight,
                          .preemption = how.preemption,
                          .priority_span = 5}),
        engine_(manager_, stop_one_in, seed) {}

  outcome run(std::int32_t num_requests) {
    std::string problem = play(num_requests);
    if (problem.empty()) problem = plans_.check();
    if (problem.empty()) problem = compare();
    if (!problem.empty()) problem = "step " + std::to_string(plans_.stats().num_steps) + ": " + problem;
    return {problem, plans_.stats(), manager_.stats(), num_placeholders_};
  }

 private:
  static constexpr std::int32_t stop_one_in = 40;

  struct flight {
    step_plan plan;
    step_inputs inputs;
    bool fails = false;
    bool is_executed = false;
    std::vector<sampled_token> sampled;
  };

  std::string play(std::int32_t num_requests) {
    std::int32_t submitted = 0;
    for (std::int64_t round = 0; submitted < num_requests || plans_.has_work(); ++round) {
      if (round > 400000) return "no end in sight";
      while (submitted < num_requests && (random_.one_in(2) || !plans_.has_work())) {
        ++submitted;
        ask();
        if (random_.one_in(3)) break;
      }
      maybe_abort();
      if (how_.most_drafts > 0) guess();
      if (std::string problem = advance(); !problem.empty()) return problem;
      if (round % 16 == 0) {
        if (std::string problem = plans_.check(); !problem.empty()) return "check(): " + problem;
      }
      if (how_.prefix_caching && random_.one_in(8)) manager_.drain_events(events_);
    }
    return {};
  }

  std::string advance() {
    const auto most = static_cast<std::size_t>(how_.steps_in_flight);
    if (flights_.size() < most && (flights_.empty() || !random_.one_in(4))) {
      const bool waits_for_fences = manager_.has_fenced_blocks();
      const step_plan& plan = plans_.schedule();
      if (waits_for_fences && (!plan.preempted.empty() || !plan.swapped_out.empty())) {
        return "a sequence is preempted while blocks are on their way back";
      }
      for (const request_id id : plan.aborted) aborted_[to_index(id)] = true;
      if (std::string problem = look_at(plan); !problem.empty()) return problem;
      if (plan.empty()) {
        if (flights_.empty()) {
          if (plans_.has_work()) return "an empty plan while there is work and nothing is in flight";
          (void)plans_.commit(plan, {});
          return {};
        }
      } else {
        if (random_.one_in(16)) maybe_abort();  // the step goes on
        flights_.push_back({plan, {}, false, false, {}});
        plans_.build(inputs_);
        flights_.back().inputs = inputs_;
        step_inputs fresh;
        plans_.build(fresh);
        if (std::string problem = difference(fresh.batch, inputs_.batch); !problem.empty()) {
          return "a row of the last step was kept wrongly: " + problem;
        }
        for (std::size_t g = 0; g < fresh.groups.size(); ++g) {
          if (std::string problem = difference(fresh.groups[g], inputs_.groups[g]); !problem.empty()) {
            return "a row of group " + std::to_string(g + 1) + " was kept wrongly: " + problem;
          }
        }
        num_placeholders_ += static_cast<std::int64_t>(flights_.back().inputs.placeholders.size());
        if (how_.fail_one_in > 0 && !(plan.swap_ins.empty() && plan.swap_outs.empty())) {
          flights_.back().fails = random_.one_in(how_.fail_one_in);
        }
        maybe_abort();
        if (flights_.size() < most) return {};
      }
    }
    if (flights_.empty()) return {};
    // Some steps run ahead of their commits, some do not.
    const std::size_t num_executed = random_.one_in(2) ? 1 : flights_.size();
    for (std::size_t i = 0; i < num_executed; ++i) {
      flight& one = flights_[i];
      if (!one.is_executed) one.sampled = engine_.execute(one.plan, one.inputs, one.fails);
      one.is_executed = true;
    }
    flight one = std::move(flights_.front());
    flights_.pop_front();
    if (one.fails) num_failed_ += plans_.fail_swaps(one.plan);
    maybe_abort();
    for (finished_sequence& done : plans_.commit(one.plan, one.sampled)) {
      if (aborted_.contains(to_index(done.request))) return "an aborted sequence finished";
      if (!ended_.emplace(std::pair{to_index(done.request), done.sample}, std::move(done.tokens)).second) {
        return "a sequence finished twice";
      }
    }
    return {};
  }

  [[nodiscard]] std::string look_at(const step_plan& plan) const {
    if (plan.num_tokens > how_.max_tokens_per_step) return "token budget exceeded";
    if (plans_.stats().num_running > how_.max_running) return "max_running exceeded";
    std::int64_t tokens = 0;
    for (const scheduled_seq& row : plan.seqs) {
      tokens += row.query_len;
      if (how_.max_chunk_tokens > 0 && row.query_len > how_.max_chunk_tokens) return "chunk too long";
      if (row.num_cached_tokens > 0 && row.num_cached_tokens != row.seq_len - row.query_len) return "cached tokens";
      if (row.num_drafts > how_.most_drafts) return "more drafts than allowed";
      if (std::find(plan.swapped_in.begin(), plan.swapped_in.end(), row.seq) != plan.swapped_in.end()) {
        return "a sequence is computed in the step that brings it back";
      }
    }
    if (tokens != plan.num_tokens) return "num_tokens";
    if (repeats_a_sequence(plan)) return "a sequence stands in a step twice";
    const bool preempts = !plan.preempted.empty() || !plan.swapped_out.empty();
    if (preempts && !plan.swapped_in.empty()) return "sequences go and come in one step";
    if (parse_step_plan(to_string(plan)) != plan) return "the plan does not come back from its JSON";
    return {};
  }

  void ask() {
    request what;
    if (how_.prefix_caching && random_.one_in(2)) {
      // One of a few common beginnings.
      const std::uint64_t which = static_cast<std::uint64_t>(random_.between(0, 2));
      const std::int64_t length = random_.between(1, how_.longest_prompt);
      for (std::int64_t i = 0; i < length; ++i) what.prompt.push_back(token_of(hash_of(which, i)));
      if (random_.one_in(4)) what.prompt.back() = token_of(random_.next());
      if (random_.one_in(4)) what.prefix_salt = random_.one_in(2) ? "one" : "two";
      if (random_.one_in(6)) what.adapter_id = 7;
      if (random_.one_in(4)) {
        what.extras.push_back({.position = random_.between(0, length - 1),
                               .kind = static_cast<std::uint32_t>(random_.between(1, 2)),
                               .value = {std::byte{1}, static_cast<std::byte>(random_.between(0, 1))}});
      }
      what.retention.priority = static_cast<block_level>(random_.between(1, 7));
    } else {
      const std::int64_t length = random_.between(1, how_.longest_prompt);
      for (std::int64_t i = 0; i < length; ++i) what.prompt.push_back(token_of(random_.next()));
    }
    what.max_new_tokens = static_cast<std::int32_t>(random_.between(1, how_.longest_answer));
    if (how_.most_beams > 0 && random_.one_in(2)) {
      what.beam_width = static_cast<std::int32_t>(random_.between(1, how_.most_beams));
    } else {
      what.num_samples = static_cast<std::int32_t>(random_.between(1, how_.most_samples));
      what.max_draft_tokens = static_cast<std::int32_t>(random_.between(0, how_.most_drafts));
    }
    if (how_.most_priority > 0) {
      what.priority = static_cast<std::int32_t>(random_.between(-how_.most_priority, how_.most_priority));
    }
    for (const group_config& group : how_.groups) {
      if (group.kind != group_kind::cross || random_.one_in(3)) continue;
      what.num_cross_tokens = static_cast<std::int32_t>(random_.between(1, group.max_tokens));
      if (random_.one_in(2)) what.num_cross_tokens = group.max_tokens;
      what.cross_digest = {static_cast<std::byte>(what.num_cross_tokens),
                           static_cast<std::byte>(random_.between(0, 1))};
    }
    const submit_result got = plans_.submit(what);
    if (got.status == alloc_status::never) return;
    engine_.note(got.id, what);
    expected_[to_index(got.id)] = serial_model(what, how_.sliding_window, stop_one_in, how_.groups).answers();
    asked_[to_index(got.id)] = std::move(what);
  }

  static token_id token_of(std::uint64_t h) { return token_id{static_cast<std::int32_t>(h % simulated_vocabulary)}; }

  /// Proposes what comes next, or nearly.
  void guess() {
    for (const auto& [id, what] : asked_) {
      if (what.max_draft_tokens == 0 || random_.one_in(3)) continue;
      for (std::int32_t sample = 0; sample < what.num_samples; ++sample) {
        const std::span<const token_id> said = plans_.output(request_id{id}, sample);
        if (said.empty()) continue;
        const std::vector<token_id>& all = expected_.at(id)[static_cast<std::size_t>(sample)];
        std::vector<token_id> drafts;
        const auto most = static_cast<std::size_t>(random_.between(0, what.max_draft_tokens));
        for (std::size_t i = said.size(); i < all.size() && drafts.size() < most; ++i) drafts.push_back(all[i]);
        if (!drafts.empty() && random_.one_in(2)) {
          drafts[static_cast<std::size_t>(random_.between(0, std::ssize(drafts) - 1))] = token_of(random_.next());
        }
        try {
          plans_.propose(request_id{id}, sample, drafts);
        } catch (const error& refused) {
          if (refused.code() != errc::failed_precondition) throw;
        }
      }
    }
  }

  void maybe_abort() {
    if (how_.abort_one_in == 0 || asked_.empty() || !random_.one_in(how_.abort_one_in)) return;
    auto victim = asked_.begin();
    std::advance(victim, random_.between(0, static_cast<std::int64_t>(asked_.size()) - 1));
    if (random_.one_in(2)) {
      plans_.post_abort(request_id{victim->first});
    } else if (plans_.abort(request_id{victim->first}) == errc::ok) {
      aborted_[victim->first] = true;
    }
  }

  [[nodiscard]] std::string compare() const {
    for (std::int32_t g = 0; g < manager_.num_groups(); ++g) {
      if (manager_.num_free_blocks(g) != manager_.pool(g).num_blocks()) return "blocks were lost";
      if (manager_.pool(g).num_fenced() != 0 || manager_.pool(g).num_open_fences() != 0) return "fences were left";
      if (manager_.num_free_host_blocks(g) != manager_.stats(g).num_host_blocks) return "host blocks were lost";
    }
    if (manager_.stats().num_sequences != 0) return "sequences were left open";
    for (const auto& [id, answers] : expected_) {
      for (std::size_t sample = 0; sample < answers.size(); ++sample) {
        const auto found = ended_.find({id, static_cast<std::int32_t>(sample)});
        if (found == ended_.end()) {
          if (!aborted_.contains(id)) return "request " + std::to_string(id) + " never finished";
        } else if (found->second != answers[sample]) {
          std::size_t at = 0;
          while (at < found->second.size() && at < answers[sample].size() && found->second[at] == answers[sample][at]) {
            ++at;
          }
          return "request " + std::to_string(id) + " sample " + std::to_string(sample) +
                 " differs from what it gives alone, from token " + std::to_string(at) + " of " +
                 std::to_string(answers[sample].size());
        }
      }
    }
    return {};
  }

  shape how_;
  random_source random_;
  kv_cache_manager manager_;
  scheduler plans_;
  simulated_engine engine_;
  std::map<std::uint64_t, request> asked_;
  std::map<std::uint64_t, std::vector<std::vector<token_id>>> expected_;
  std::map<std::pair<std::uint64_t, std::int32_t>, std::vector<token_id>> ended_;
  std::map<std::uint64_t, bool> aborted_;
  std::deque<flight> flights_;
  step_inputs inputs_;
  std::vector<cache_event> events_;
  std::int64_t num_placeholders_ = 0;
  std::int64_t num_failed_ = 0;
};

/// Runs each shape, once or num_test_runs() times; the sums of one run's statistics.
outcome run_all(std::span<const shape> shapes, std::int32_t num_requests) {
  MESSAGE(seed_note());
  outcome sum;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    CAPTURE(i);
    CAPTURE(shapes[i].name);
    for (std::int64_t again = 1; again < num_test_runs(); ++again) {
      CAPTURE(again);
      CHECK(world(shapes[i], hash_of(test_seed(), i, again)).run(num_requests).problem == "");
    }
    const outcome got = world(shapes[i], hash_of(test_seed(), i)).run(num_requests);
    CHECK(got.problem == "");
    sum.stats.num_preemptions += got.stats.num_preemptions;
    sum.stats.num_swap_outs += got.stats.num_swap_outs;
    sum.stats.num_swap_ins += got.stats.num_swap_ins;
    sum.stats.num_failed_swaps += got.stats.num_failed_swaps;
    sum.stats.num_cached_tokens += got.stats.num_cached_tokens;
    sum.stats.num_draft_tokens += got.stats.num_draft_tokens;
    sum.stats.num_accepted_drafts += got.stats.num_accepted_drafts;
    sum.stats.num_aborted += got.stats.num_aborted;
    sum.stats.num_finished += got.stats.num_finished;
    sum.cache.num_copied_blocks += got.cache.num_copied_blocks;
    sum.cache.num_forks += got.cache.num_forks;
    sum.num_late += got.num_late;
  }
  return sum;
}

TEST_CASE("every sequence gives the tokens it gives alone, whatever was batched, chunked, preempted, forked, aborted") {
  const shape shapes[] = {
      {.name = "roomy", .num_blocks = 200, .max_running = 16, .max_tokens_per_step = 64},
      {.name = "preemption all the time"},
      {.name = "samples and short chunks", .max_chunk_tokens = 8, .most_samples = 4},
      {.name = "more runners than tokens in a step",
       .block_size = 1,
       .num_blocks = 80,
       .max_running = 32,
       .max_tokens_per_step = 16,
       .most_samples = 3},
      {.name = "a handful of blocks",
       .block_size = 16,
       .num_blocks = 6,
       .max_tokens_per_step = 2048,
       .longest_prompt = 60,
       .most_samples = 2},
      {.name = "aborts at any point",
       .num_blocks = 40,
       .max_running = 12,
       .max_chunk_tokens = 5,
       .most_samples = 5,
       .abort_one_in = 6},
      {.name = "a window: prompts longer than the pool",
       .num_blocks = 16,
       .max_tokens_per_step = 16,
       .max_chunk_tokens = 7,
       .longest_prompt = 90,
       .most_samples = 3,
       .sliding_window = 9,
       .abort_one_in = 9},
      {.name = "the smallest",
       .block_size = 1,
       .num_blocks = 4,
       .max_running = 4,
       .max_tokens_per_step = 4,
       .longest_prompt = 2,
       .longest_answer = 3,
       .most_samples = 4,
       .abort_one_in = 3},
      {.name = "tables of several chunks, shared",
       .block_size = 2,
       .num_blocks = 400,
       .max_running = 24,
       .max_tokens_per_step = 700,
       .longest_prompt = 300,
       .most_samples = 6},
      {.name = "old prompts in small chunks beside young decoders", .max_chunk_tokens = 2, .longest_prompt = 60},
      {.name = "priorities", .most_samples = 2, .most_priority = 4},
  };
  const outcome sum = run_all(shapes, 200);
  CHECK(sum.stats.num_finished > 2500);
  CHECK(sum.stats.num_preemptions > 300);
  CHECK(sum.cache.num_copied_blocks > 300);
  CHECK(sum.stats.num_aborted > 30);
}

TEST_CASE("a prefix that is hit gives the tokens that computing it gives") {
  const shape shapes[] = {
      {.name = "roomy", .num_blocks = 300, .most_samples = 3, .prefix_caching = true},
      {.name = "evicted all the time", .most_samples = 3, .prefix_caching = true, .most_priority = 2},
      {.name = "deduplicated", .num_blocks = 60, .most_samples = 3, .prefix_caching = true, .deduplicate = true},
      {.name = "block size 1", .block_size = 1, .num_blocks = 100, .most_samples = 2, .prefix_caching = true},
      {.name = "a window",
       .block_size = 3,
       .num_blocks = 30,
       .max_chunk_tokens = 7,
       .most_samples = 2,
       .sliding_window = 8,
       .abort_one_in = 20,
       .prefix_caching = true},
      {.name = "aborts", .num_blocks = 40, .most_samples = 3, .abort_one_in = 5, .prefix_caching = true},
  };
  const outcome sum = run_all(shapes, 300);
  CHECK(sum.stats.num_cached_tokens > 5000);
  CHECK(sum.stats.num_preemptions > 100);
  CHECK(sum.stats.num_aborted > 30);
}

TEST_CASE("a sequence that was swapped out and in gives the tokens that it gives alone") {
  const shape shapes[] = {
      {.name = "always", .num_host_blocks = 60, .preemption = preemption_mode::swap},
      {.name = "when it pays", .most_samples = 3, .num_host_blocks = 60},
      {.name = "a small host", .most_samples = 3, .num_host_blocks = 12, .preemption = preemption_mode::swap},
      {.name = "with prefixes",
       .num_blocks = 30,
       .most_samples = 3,
       .prefix_caching = true,
       .num_host_blocks = 40,
       .preemption = preemption_mode::swap},
      {.name = "aborts and priorities",
       .most_samples = 3,
       .abort_one_in = 8,
       .prefix_caching = true,
       .num_host_blocks = 40,
       .preemption = preemption_mode::swap,
       .most_priority = 3},
      {.name = "a window",
       .num_blocks = 16,
       .max_chunk_tokens = 7,
       .most_samples = 2,
       .sliding_window = 9,
       .num_host_blocks = 30,
       .preemption = preemption_mode::swap},
      {.name = "copies fail",
       .most_samples = 3,
       .abort_one_in = 20,
       .num_host_blocks = 40,
       .preemption = preemption_mode::swap,
       .fail_one_in = 3},
      {.name = "copies fail, prefixes",
       .num_blocks = 30,
       .most_samples = 2,
       .prefix_caching = true,
       .num_host_blocks = 40,
       .preemption = preemption_mode::swap,
       .fail_one_in = 4},
  };
  const outcome sum = run_all(shapes, 200);
  CHECK(sum.stats.num_swap_outs > 300);
  CHECK(sum.stats.num_swap_ins > 200);
  CHECK(sum.stats.num_failed_swaps > 30);
}

TEST_CASE("beams are forked, dropped, preempted and swapped together") {
  const shape shapes[] = {
      {.name = "roomy", .num_blocks = 200, .max_running = 16, .most_beams = 5},
      {.name = "tight",
       .num_blocks = 28,
       .max_running = 12,
       .longest_prompt = 14,
       .longest_answer = 16,
       .most_beams = 4},
      {.name = "tight, prefixes",
       .num_blocks = 28,
       .max_running = 12,
       .longest_prompt = 14,
       .longest_answer = 16,
       .most_samples = 3,
       .most_beams = 4,
       .prefix_caching = true},
      {.name = "swapped",
       .num_blocks = 28,
       .max_running = 12,
       .longest_prompt = 14,
       .longest_answer = 16,
       .most_beams = 4,
       .abort_one_in = 30,
       .num_host_blocks = 100,
       .preemption = preemption_mode::swap,
       .fail_one_in = 6},
      {.name = "a window",
       .num_blocks = 28,
       .max_running = 12,
       .longest_answer = 24,
       .most_beams = 4,
       .sliding_window = 9,
       .num_host_blocks = 60,
       .preemption = preemption_mode::swap},
      {.name = "small steps, tight",
       .block_size = 2,
       .num_blocks = 34,
       .max_running = 12,
       .max_tokens_per_step = 5,
       .max_chunk_tokens = 3,
       .longest_prompt = 5,
       .longest_answer = 14,
       .most_beams = 3},
      {.name = "small steps",
       .num_blocks = 40,
       .max_tokens_per_step = 5,
       .longest_prompt = 12,
       .longest_answer = 12,
       .most_beams = 5,
       .abort_one_in = 12},
  };
  const outcome sum = run_all(shapes, 200);
  CHECK(sum.stats.num_finished > 1000);
  CHECK(sum.cache.num_forks > 2000);
  CHECK(sum.stats.num_preemptions > 50);
  CHECK(sum.stats.num_swap_outs > 10);
}

TEST_CASE("drafts change no token, and those that fit are kept") {
  const shape shapes[] = {
      {.name = "roomy", .num_blocks = 200, .most_drafts = 6},
      {.name = "tight", .most_samples = 2, .most_drafts = 5},
      {.name = "prefixes", .num_blocks = 30, .most_samples = 3, .most_drafts = 5, .prefix_caching = true},
      {.name = "swapped",
       .most_samples = 2,
       .most_drafts = 4,
       .abort_one_in = 25,
       .num_host_blocks = 40,
       .preemption = preemption_mode::swap},
      {.name = "a window", .num_blocks = 16, .max_chunk_tokens = 7, .most_drafts = 4, .sliding_window = 9},
  };
  const outcome sum = run_all(shapes, 200);
  CHECK(sum.stats.num_draft_tokens > 3000);
  CHECK(sum.stats.num_accepted_drafts > 1000);
}

TEST_CASE("layer groups give the tokens that each sequence gives alone, whatever any of them lacks") {
  const auto full = [](std::int32_t size, std::int64_t count, std::int64_t host = 0) {
    return group_config{.kind = group_kind::full, .block_size = size, .num_blocks = count, .num_host_blocks = host};
  };
  const auto window = [](std::int32_t size, std::int64_t count, std::int32_t width, std::int64_t host = 0) {
    return group_config{
        .kind = group_kind::window, .block_size = size, .num_blocks = count, .num_host_blocks = host, .window = width};
  };
  const auto state = [](std::int64_t count, std::int32_t interval = 0, std::int32_t drafts = 0, std::int64_t host = 0) {
    return group_config{.kind = group_kind::state,
                        .block_size = 1,
                        .num_blocks = count,
                        .num_host_blocks = host,
                        .snapshot_interval = interval,
                        .num_draft_slots = drafts};
  };
  const auto cross = [](std::int32_t size, std::int64_t count, std::int32_t longest, std::int64_t host = 0) {
    return group_config{.kind = group_kind::cross,
                        .block_size = size,
                        .num_blocks = count,
                        .num_host_blocks = host,
                        .max_tokens = longest};
  };
  std::vector<shape> shapes;
  for (const bool caches : {false, true}) {
    for (const std::int32_t depth : {1, 3}) {
      shape common;
      common.prefix_caching = caches;
      common.steps_in_flight = depth;
      shape one = common;
      one.name = "a window, tight";
      one.most_samples = 2;
      one.max_chunk_tokens = 9;
      one.groups = {full(4, 40), window(2, 26, 7)};
      shapes.push_back(one);
      one = common;
      one.name = "states, few";
      one.most_samples = 3;
      one.groups = {full(4, 60), state(8)};
      shapes.push_back(one);
      one = common;
      one.name = "states, drafts, aborts";
      one.most_drafts = 3;
      one.abort_one_in = 12;
      one.groups = {full(4, 50), state(30, 8, 3), window(4, 30, 9)};
      one.max_chunk_tokens = 12;
      shapes.push_back(one);
      one = common;
      one.name = "swapped, copies fail";
      one.most_samples = 2;
      one.num_host_blocks = 40;
      one.fail_one_in = 5;
      one.preemption = preemption_mode::swap;
      one.max_chunk_tokens = 11;
      one.groups = {full(4, 30, 40), window(4, 16, 10, 30), state(14, 0, 0, 20), cross(2, 20, 6, 20)};
      shapes.push_back(one);
      one = common;
      one.name = "encoders and beams";
      one.longest_prompt = 14;
      one.longest_answer = 16;
      one.most_beams = 3;
      one.max_running = 12;
      one.abort_one_in = 25;
      one.groups = {full(4, 40), cross(4, 9, 12), state(24, 4)};
      shapes.push_back(one);
    }
  }
  const outcome sum = run_all(shapes, 150);
  CHECK(sum.stats.num_finished > 2500);
  CHECK(sum.stats.num_preemptions > 300);
  CHECK(sum.stats.num_swap_ins > 100);
  CHECK(sum.stats.num_cached_tokens > 1500);
  CHECK(sum.stats.num_accepted_drafts > 200);
}

TEST_CASE("steps that are scheduled before earlier ones are committed change no token") {
  std::vector<shape> shapes;
  for (const std::int32_t depth : {2, 3, 4}) {
    shapes.push_back({.name = "roomy", .num_blocks = 200, .most_samples = 2, .steps_in_flight = depth});
    shapes.push_back({.name = "tight", .most_samples = 2, .steps_in_flight = depth, .most_priority = 2});
    shapes.push_back(
        {.name = "aborts", .num_blocks = 40, .most_samples = 3, .abort_one_in = 6, .steps_in_flight = depth});
    shapes.push_back({.name = "a window",
                      .num_blocks = 16,
                      .max_chunk_tokens = 7,
                      .most_samples = 2,
                      .sliding_window = 9,
                      .abort_one_in = 20,
                      .steps_in_flight = depth});
    shapes.push_back({.name = "prefixes",
                      .num_blocks = 30,
                      .most_samples = 2,
                      .abort_one_in = 20,
                      .prefix_caching = true,
                      .steps_in_flight = depth});
    shapes.push_back({.name = "swapped",
                      .most_samples = 2,
                      .abort_one_in = 20,
                      .num_host_blocks = 40,
                      .preemption = preemption_mode::swap,
                      .steps_in_flight = depth});
    shapes.push_back({.name = "swapped, copies fail",
                      .most_samples = 2,
                      .num_host_blocks = 40,
                      .preemption = preemption_mode::swap,
                      .fail_one_in = 4,
                      .steps_in_flight = depth});
    shapes.push_back({.name = "drafts",
                      .num_blocks = 30,
                      .most_drafts = 4,
                      .abort_one_in = 20,
                      .num_host_blocks = 30,
                      .steps_in_flight = depth});
    shapes.push_back({.name = "everything",
                      .num_blocks = 36,
                      .max_running = 12,
                      .max_chunk_tokens = 9,
                      .longest_prompt = 20,
                      .longest_answer = 24,
                      .most_samples = 3,
                      .most_beams = 4,
                      .most_drafts = 4,
                      .abort_one_in = 15,
                      .prefix_caching = true,
                      .num_host_blocks = 40,
                      .preemption = preemption_mode::swap,
                      .fail_one_in = 5,
                      .steps_in_flight = depth,
                      .most_priority = 3});
  }
  const outcome sum = run_all(shapes, 150);
  CHECK(sum.num_late > 20000);
  CHECK(sum.stats.num_preemptions > 500);
  CHECK(sum.stats.num_swap_ins > 200);
  CHECK(sum.stats.num_failed_swaps > 20);
  CHECK(sum.stats.num_aborted > 100);
}

}  // namespace
}  // namespace bifolio::test
