// SPDX-License-Identifier: Apache-2.0
#include "run.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bifolio/error.hpp>
#include <charconv>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <thread>

#include "attention_checks.hpp"
#include "cache_checks.hpp"
#include "merge_checks.hpp"

namespace selftest {
namespace {

using bifolio::errc;
using bifolio::error;
using bifolio::test::attention_case;
using clock = std::chrono::steady_clock;

constexpr double share_of_a_kind = 0.04;          // of the time, for each kind but attention, which has the rest
constexpr std::size_t least_cases_of_a_kind = 8;  // the eighth is a large one
constexpr std::size_t least_attention_cases = 15;
constexpr std::size_t most_cases = 100'000;

/// Seconds since it was made.
class stopwatch {
 public:
  [[nodiscard]] double seconds() const { return std::chrono::duration<double>(clock::now() - start_).count(); }

 private:
  clock::time_point start_ = clock::now();
};

void check_cache_on(const target& where, operation what, std::uint64_t seed, std::size_t n, report& said) {
  // Every other case meets another executor.
  const bool other = n % 2 != 0 && !where.others.empty();
  const auto& tested = other ? where.others[n / 2 % where.others.size()] : where.main;
  const std::string problem = check_cache_case(what, tested, seed, n);
  tally& cases = said.row(where.device, where.isa, what).cases;
  ++cases.num_compared;
  if (problem.empty()) return;
  ++cases.num_failed;
  said.add({where.device, where.isa, std::string(to_string(what)), "bytes", fmt::format("{}:{}", to_string(what), n),
            problem});
}

/// Prepares cases ahead of their use, in threads of their own: the oracle costs more than the calls.
class preparation {
 public:
  explicit preparation(const std::vector<attention_case>& cases) : cases_(cases) {
    const unsigned cores = std::max(2u, std::thread::hardware_concurrency());
    for (unsigned i = 0; i < std::min(cores - 1, 16u); ++i) send();
  }
  [[nodiscard]] std::unique_ptr<prepared_case> next() {
    std::unique_ptr<prepared_case> first = waiting_.front().get();
    waiting_.pop_front();
    send();
    return first;
  }
  [[nodiscard]] bool at_end() const { return waiting_.empty(); }

 private:
  void send() {
    if (sent_ == cases_.size()) return;
    waiting_.push_back(
        std::async(std::launch::async, [this, n = sent_] { return std::make_unique<prepared_case>(n, cases_[n]); }));
    ++sent_;
  }

  const std::vector<attention_case>& cases_;
  std::deque<std::future<std::unique_ptr<prepared_case>>> waiting_;
  std::size_t sent_ = 0;
};

/// All kinds of cases but attention, whose cases are a list: each can be run at any number, on one target.
struct endless_kind {
  std::string_view name;
  std::function<void(const target&, std::uint64_t seed, std::size_t n, report&)> check;
};

std::vector<endless_kind> endless_kinds() {
  std::vector<endless_kind> kinds;
  for (const operation what : all_operations) {
    kinds.push_back({to_string(what), [what](const target& where, std::uint64_t seed, std::size_t n, report& said) {
                       check_cache_on(where, what, seed, n, said);
                     }});
  }
  kinds.push_back({"merge", check_merge_case});
  return kinds;
}

void run_one(const run_settings& settings, const std::vector<target>& targets, report& said) {
  const case_name& wanted = *settings.only;
  for (const endless_kind& kind : endless_kinds()) {
    if (kind.name != wanted.kind) continue;
    for (const target& where : targets) kind.check(where, settings.seed, wanted.number, said);
    return;
  }
  const std::vector<attention_case> cases = attention_cases(settings.seed);
  if (wanted.number >= cases.size()) {
    throw error(errc::invalid_argument, fmt::format("--case is 'attention:{}', allowed are attention:0 to attention:{}",
                                                    wanted.number, cases.size() - 1));
  }
  const prepared_case what(wanted.number, cases[wanted.number]);
  for (const target& where : targets) check_attention_case(where, what, said);
}

void run_endless_kinds(const run_settings& settings, const std::vector<target>& targets, report& said) {
  double done = 0;
  for (const endless_kind& kind : endless_kinds()) {
    const stopwatch time;
    const double allowed = share_of_a_kind * settings.seconds;
    for (std::size_t n = 0; n < most_cases && (n < least_cases_of_a_kind || time.seconds() < allowed); ++n) {
      settings.progress(done, kind.name);
      for (const target& where : targets) kind.check(where, settings.seed, n, said);
    }
    done += share_of_a_kind;
  }
}

void run_attention_checks(const run_settings& settings, const std::vector<target>& targets, double from, report& said) {
  const stopwatch time;
  const std::vector<attention_case> cases = attention_cases(settings.seed);
  preparation ahead(cases);
  const double allowed = settings.seconds - from;
  std::size_t n = 0;
  for (; !ahead.at_end() && (n < least_attention_cases || time.seconds() < allowed); ++n) {
    settings.progress((from + time.seconds()) / settings.seconds, fmt::format("attention, case {}", n));
    const std::unique_ptr<prepared_case> what = ahead.next();
    for (const target& where : targets) check_attention_case(where, *what, said);
  }
  if (n < cases.size()) {
    said.left_out.push_back(fmt::format("attention cases {} to {} were not run: the time was up (--seconds {})", n,
                                        cases.size() - 1, settings.seconds));
  }
}

void note_kernels_not_reached(const std::vector<target>& targets, report& said) {
  for (const target& where : targets) {
    for (const std::string& kernel : known_kernels(where.main.get())) {
      const bool met = std::any_of(said.attention.begin(), said.attention.end(), [&](const attention_row& row) {
        return row.device == where.device && row.isa == where.isa && row.kernel == kernel;
      });
      if (!met) said.not_reached.push_back(fmt::format("{}: {}", where.device, kernel));
    }
  }
}

/// Rows in the order of the targets and, within one, of the backend's own list; kernels of another name last.
void sort_rows(const std::vector<target>& targets, report& said) {
  std::vector<attention_row> sorted;
  const auto take = [&](const auto& belongs) {
    const auto rest = std::stable_partition(said.attention.begin(), said.attention.end(), belongs);
    std::move(said.attention.begin(), rest, std::back_inserter(sorted));
    said.attention.erase(said.attention.begin(), rest);
  };
  for (const target& where : targets) {
    const auto of_target = [&](const attention_row& row) { return row.device == where.device && row.isa == where.isa; };
    for (const std::string& kernel : known_kernels(where.main.get())) {
      take([&](const attention_row& row) { return of_target(row) && row.kernel == kernel; });
    }
    take(of_target);
  }
  said.attention = std::move(sorted);
}

}  // namespace

case_name parse_case(std::string_view text) {
  const std::size_t colon = text.find(':');
  case_name result{std::string(text.substr(0, colon))};
  std::vector<std::string_view> kinds{"attention"};
  for (const endless_kind& kind : endless_kinds()) kinds.push_back(kind.name);
  if (colon != std::string_view::npos && std::find(kinds.begin(), kinds.end(), result.kind) != kinds.end()) {
    const std::string_view digits = text.substr(colon + 1);
    const auto [end, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), result.number);
    if (problem == std::errc() && end == digits.data() + digits.size() && result.number < most_cases) return result;
  }
  throw error(errc::invalid_argument,
              fmt::format("--case is '{}'; allowed is KIND:N with KIND one of {} and N a number from 0 to {}", text,
                          fmt::join(kinds, ", "), most_cases - 1));
}

void run_checks(const run_settings& settings, const std::vector<target>& targets, report& said) {
  const stopwatch time;
  said.seed = settings.seed;
  if (settings.only) {
    run_one(settings, targets, said);
  } else {
    run_endless_kinds(settings, targets, said);
    run_attention_checks(settings, targets, time.seconds(), said);
    note_kernels_not_reached(targets, said);
  }
  sort_rows(targets, said);
  said.seconds = time.seconds();
}

}  // namespace selftest
