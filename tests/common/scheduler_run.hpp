// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Whole runs of scheduler, manager and a simulated engine against the model alone: whatever was batched, chunked,
/// preempted, swapped, forked, found in the prefix cache, guessed, scheduled ahead or aborted, each sequence ends with
/// the tokens that it would have alone, and everything is back at its place in the end.

#include <algorithm>
#include <bifolio/scheduler.hpp>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/cache_logic_helpers.hpp"
#include "common/scheduler_helpers.hpp"
#include "common/simulated_engine.hpp"
#include "support/random.hpp"

namespace bifolio::test {

struct scheduler_shape {
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

struct scheduler_outcome {
  std::string problem;
  scheduler_stats stats;
  cache_stats cache;
  std::int64_t num_late = 0;
};

/// Makes the calls of a run that the library may refuse for lack of memory: a test lets them fail, and makes them
/// again.
class scheduler_caller {
 public:
  virtual ~scheduler_caller() = default;
  virtual void call(const scheduler& plans, const std::function<void()>& make) = 0;
};

class scheduler_run {
 public:
  scheduler_run(const scheduler_shape& how, std::uint64_t seed, scheduler_caller* caller = nullptr)
      : scheduler_run(how, seed, random_source(seed), caller) {}
  /// Its choices come from `random`, a fuzzer's input for instance.
  scheduler_run(const scheduler_shape& how, std::uint64_t seed, random_source random,
                scheduler_caller* caller = nullptr)
      : how_(how),
        caller_(caller),
        random_(random),
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

  scheduler_outcome run(std::int32_t num_requests) {
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
      if (how_.prefix_caching && (random_.one_in(8) || caller_ != nullptr)) {
        // Into a vector without room, where memory fails: the next event then needs some.
        if (caller_ != nullptr) std::vector<cache_event>().swap(events_);
        manager_.drain_events(events_);
      }
    }
    return {};
  }

  template <class Call>
  void call(const Call& make) {
    if (caller_ == nullptr) return make();
    caller_->call(plans_, make);
  }

  std::string advance() {
    const auto most = static_cast<std::size_t>(how_.steps_in_flight);
    if (flights_.size() < most && (flights_.empty() || !random_.one_in(4))) {
      const bool waits_for_fences = manager_.has_fenced_blocks();
      const step_plan* scheduled = nullptr;
      call([&] { scheduled = &plans_.schedule(); });
      const step_plan& plan = *scheduled;
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
        call([&] { plans_.build(inputs_); });
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
    std::vector<finished_sequence> finished;
    call([&] { finished = plans_.commit(one.plan, one.sampled); });
    for (finished_sequence& done : finished) {
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
          call([&, asked = request_id{id}] { plans_.propose(asked, sample, drafts); });
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

  scheduler_shape how_;
  scheduler_caller* caller_;
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

}  // namespace bifolio::test
