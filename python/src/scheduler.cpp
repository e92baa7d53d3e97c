// SPDX-License-Identifier: Apache-2.0
/// Schedulers, and their steps.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "cache.hpp"

using namespace bifolio;

namespace bifolio_python {
namespace {

constexpr std::array<std::pair<std::string_view, preemption_mode>, 3> preemption_names{
    {{"recompute", preemption_mode::recompute},
     {"swap", preemption_mode::swap},
     {"automatic", preemption_mode::automatic}}};

preemption_mode parse_preemption(const std::string& text) {
  for (const auto& [name, mode] : preemption_names) {
    if (name == text) return mode;
  }
  refuse(errc::invalid_argument, "preemption is '" + text + "'; it must be recompute, swap or automatic");
}

std::vector<std::int32_t> numbers_of(std::span<const token_id> tokens) {
  std::vector<std::int32_t> numbers;
  numbers.reserve(tokens.size());
  for (const token_id token : tokens) numbers.push_back(static_cast<std::int32_t>(token));
  return numbers;
}

scheduler_config config_of(const nb::dict& given) {
  const auto number = [&](const char* name) { return nb::cast<std::int32_t>(given[name]); };
  return {.max_tokens_per_step = number("max_tokens_per_step"),
          .max_running = number("max_running"),
          .max_chunk_tokens = number("max_chunk_tokens"),
          .vocab_size = number("vocab_size"),
          .preemption = parse_preemption(nb::cast<std::string>(given["preemption"])),
          .swap_block_cost = nb::cast<double>(given["swap_block_cost"]),
          .priority_span = number("priority_span")};
}

}  // namespace

std::uint64_t core_scheduler::submit(request what, std::vector<std::int32_t> stop_tokens) {
  const submit_result queued = requests_.submit(std::move(what));
  require_blocks(queued.status);
  const auto id = static_cast<std::uint64_t>(to_index(queued.id));
  if (!stop_tokens.empty()) {
    const std::lock_guard lock(submissions_);
    stop_tokens_[id] = std::move(stop_tokens);
  }
  return id;
}

void core_scheduler::forget(std::uint64_t request) {
  const std::lock_guard lock(submissions_);
  aborted_.insert(request);
  stop_tokens_.erase(request);
  num_reported_.erase(num_reported_.lower_bound({request, 0}), num_reported_.lower_bound({request + 1, 0}));
}

std::vector<new_tokens> core_scheduler::commit(model_step& step, const std::vector<std::int32_t>& tokens) {
  const std::vector<scheduled_seq> rows = step.plan().seqs;
  std::size_t num_wanted = 0, num_sample_rows = 0;
  for (const scheduled_seq& row : rows) {
    num_wanted += static_cast<std::size_t>(row.num_samples);
    if (row.num_samples > 0) num_sample_rows += 1 + static_cast<std::size_t>(row.num_drafts);
  }
  const bool one_per_row = tokens.size() == num_sample_rows;
  if (tokens.size() != num_wanted && !one_per_row) {
    refuse(errc::invalid_argument, "sample got " + std::to_string(tokens.size()) + " tokens; the step wants " +
                                       std::to_string(num_wanted) + ", or one for each of its " +
                                       std::to_string(num_sample_rows) + " rows to sample from");
  }
  std::vector<sampled_token> sampled;
  {
    const std::lock_guard lock(submissions_);
    std::size_t at = 0;
    for (const scheduled_seq& row : rows) {
      const auto stops = stop_tokens_.find(static_cast<std::uint64_t>(to_index(row.request)));
      // Samples that fork here are given the row's one token.
      const bool repeats = one_per_row && row.num_drafts == 0 && row.num_samples > 1;
      for (std::int32_t i = 0; i < row.num_samples; ++i) {
        const std::int32_t token = tokens[at];
        if (!repeats || i + 1 == row.num_samples) ++at;
        const bool stop = stops != stop_tokens_.end() &&
                          std::find(stops->second.begin(), stops->second.end(), token) != stops->second.end();
        sampled.push_back({.token = token_id{token}, .stop = stop});
      }
    }
  }
  const std::vector<finished_sequence> finished = step.commit(sampled);

  std::vector<new_tokens> said;
  const auto say = [&](std::uint64_t request, std::int32_t sample, std::span<const token_id> all, std::string why) {
    std::size_t& reported = num_reported_[{request, sample}];
    if (all.size() <= reported && why.empty()) return;
    said.emplace_back(request, sample, numbers_of(all.subspan(std::min(reported, all.size()))), std::move(why));
    reported = all.size();
  };
  const std::lock_guard lock(submissions_);
  for (const scheduled_seq& row : rows) {
    if (row.num_samples == 0 || aborted_.contains(static_cast<std::uint64_t>(to_index(row.request)))) continue;
    const bool forks = row.num_drafts == 0 && row.num_samples > 1;
    const std::int32_t last = forks ? row.num_samples - 1 : row.sample;
    for (std::int32_t sample = row.sample; sample <= last; ++sample) {
      const auto ended = std::find_if(finished.begin(), finished.end(), [&](const finished_sequence& one) {
        return one.request == row.request && one.sample == sample;
      });
      const auto request = static_cast<std::uint64_t>(to_index(row.request));
      if (ended == finished.end()) {
        say(request, sample, requests_.output(row.request, sample), {});
      } else {
        say(request, sample, ended->tokens, std::string(to_string(ended->reason)));
        num_reported_.erase({request, sample});
      }
    }
  }
  aborted_.clear();  // the next `schedule` drops them
  return said;
}

core_step::core_step(core_scheduler& requests, std::uintptr_t stream)
    : cache_(&requests.cache()), requests_(&requests) {
  const nb::gil_scoped_release unlocked;
  const std::lock_guard lock(cache_->changes());
  step_ = cache_->cache().begin_step(requests.requests(), stream_ref{reinterpret_cast<void*>(stream)});
}

std::vector<new_tokens> core_step::commit_sampled(const std::vector<std::int32_t>& tokens) {
  model_step& open = step();
  if (requests_ == nullptr) refuse(errc::failed_precondition, "sample: the step is not of a scheduler; commit it");
  const std::lock_guard lock(cache_->changes());
  return requests_->commit(open, tokens);
}

void define_scheduler(nb::module_& module) {
  nb::class_<core_scheduler>(module, "Scheduler")
      .def(
          "__init__",
          [](core_scheduler* self, core_cache& cache, const settings_dict& settings) {
            new (self) core_scheduler(cache, config_of(settings));
          },
          nb::arg("cache"), nb::arg("settings"), nb::keep_alive<1, 2>())
      .def(
          "submit",
          [](core_scheduler& self, const std::vector<std::int32_t>& prompt, std::int32_t max_new_tokens,
             std::int32_t samples, std::int32_t max_draft_tokens, std::int32_t priority, const nb::bytes& salt,
             std::uint64_t adapter, std::vector<std::int32_t> stop) {
            request what;
            what.prompt = to_tokens(prompt);
            what.max_new_tokens = max_new_tokens;
            what.num_samples = samples;
            what.max_draft_tokens = max_draft_tokens;
            what.priority = priority;
            what.prefix_salt.assign(salt.c_str(), salt.size());
            what.adapter_id = adapter;
            return self.submit(std::move(what), std::move(stop));
          },
          nb::arg("prompt"), nb::arg("max_new_tokens"), nb::arg("samples"), nb::arg("max_draft_tokens"),
          nb::arg("priority"), nb::arg("salt"), nb::arg("adapter_id"), nb::arg("stop"))
      .def(
          "abort",
          [](core_scheduler& self, std::uint64_t request) {
            self.requests().post_abort(request_id{request});
            self.forget(request);
          },
          nb::arg("request"))
      .def(
          "propose",
          [](core_scheduler& self, std::uint64_t request, std::int32_t sample,
             const std::vector<std::int32_t>& drafts) {
            self.requests().propose(request_id{request}, sample, to_tokens(drafts));
          },
          nb::arg("request"), nb::arg("sample"), nb::arg("drafts"))
      .def(
          "output",
          [](core_scheduler& self, std::uint64_t request, std::int32_t sample) {
            return numbers_of(self.requests().output(request_id{request}, sample));
          },
          nb::arg("request"), nb::arg("sample"))
      .def("has_work", [](core_scheduler& self) { return self.requests().has_work(); })
      .def("check", [](core_scheduler& self) { return self.requests().check(); });
}

}  // namespace bifolio_python
