// SPDX-License-Identifier: Apache-2.0
// Prefetching asks for the right lines at the right time. A mistake there changes no result, only the speed.
#define BIFOLIO_ISA tested
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <set>
#include <vector>

#include "cpu/kernels/attention/prefetch_queue.hpp"
#include "support/random.hpp"

namespace {

using namespace bifolio::cpu::tested;

using address = std::uintptr_t;

std::vector<address> asked;

struct recorder {
  void operator()(address line) const { asked.push_back(line); }
};

using stream = paced_runs<recorder>;

// A unit's runs, somewhere in an address space of their own; nothing is read there.
struct unit_runs {
  std::vector<const char*> runs;
  int run_bytes = 0;

  [[nodiscard]] std::set<address> lines() const {
    std::set<address> all;
    for (const char* run : runs) {
      for (int byte = 0; byte < run_bytes; byte += cache_line_bytes) {
        all.insert(reinterpret_cast<address>(run) + static_cast<address>(byte));
      }
    }
    return all;
  }
};

class run_maker {
 public:
  unit_runs make(int num_runs, int run_bytes) {
    unit_runs unit;
    unit.run_bytes = run_bytes;
    for (int i = 0; i < num_runs; ++i) {
      unit.runs.push_back(reinterpret_cast<const char*>(next_));
      next_ += 1 << 20;
    }
    return unit;
  }

 private:
  address next_ = 1 << 20;
};

// How many of `wanted` are not in `all`.
std::size_t missing_in(const std::set<address>& all, const std::set<address>& wanted) {
  std::vector<address> missing;
  std::set_difference(wanted.begin(), wanted.end(), all.begin(), all.end(), std::back_inserter(missing));
  return missing.size();
}

// As the walk over an item does it; `turns` are those that a unit says it has, `taken` those that it takes.
struct item_run {
  std::vector<std::size_t> asked_at;        // asked before unit u was worked on,
  std::vector<std::size_t> asked_by_half;   // after half of its turns
  std::vector<std::size_t> asked_by_turns;  // and after all of them, before it caught up

  item_run(const std::vector<unit_runs>& units, int turns, int taken) {
    asked.clear();
    stream ahead;
    const auto push = [&](std::size_t unit) {
      if (unit >= units.size()) return ahead.push_none();
      ahead.push(units[unit].runs.data(), static_cast<int>(units[unit].runs.size()), units[unit].run_bytes);
    };
    push(1);
    for (std::size_t unit = 0; unit < units.size(); ++unit) {
      asked_at.push_back(asked.size());
      push(unit + 2);
      ahead.spread(turns);
      const auto turn = [&](int count) {
        // Loops ask for one batch a turn at most; here at most 80 in a unit, of the even test's size.
        if (unit % 2 == 0 || turns < 80) {
          for (int i = 0; i < count; ++i) ahead.turn();
        } else {
          loop_turns<recorder> loop(ahead);
          for (int i = 0; i < count; ++i) loop.turn();
        }
      };
      turn(taken / 2);
      asked_by_half.push_back(asked.size());
      turn(taken - taken / 2);
      asked_by_turns.push_back(asked.size());
      ahead.catch_up();
    }
  }
};

void check_item(const std::vector<unit_runs>& units, int turns, int taken) {
  const item_run item(units, turns, taken);
  std::set<address> all;
  for (std::size_t u = 1; u < units.size(); ++u) all.merge(units[u].lines());
  const std::set<address> found(asked.begin(), asked.end());
  CHECK(missing_in(found, all) == 0);
  CHECK(missing_in(all, found) == 0);  // nothing is asked for that is not needed
}

}  // namespace

TEST_CASE("every line of every unit but the first is asked for, and no other") {
  INFO(bifolio::test::seed_note());
  bifolio::test::random_source random(bifolio::test::test_seed());
  const auto pick = [&](int low, int high) { return static_cast<int>(random.between(low, high)); };
  for (int round = 0; round < 300; ++round) {
    run_maker maker;
    const int usual_runs = pick(1, 130);
    const int usual_bytes = pick(1, 70) * pick(1, 128);
    std::vector<unit_runs> units;
    for (int i = pick(1, 20); i > 0; --i) {
      const bool usual = pick(0, 4) > 0;
      units.push_back(maker.make(usual ? usual_runs : pick(0, 130), usual ? usual_bytes : pick(1, 5000)));
    }
    const int turns = pick(1, 2000);
    CAPTURE(round);
    CAPTURE(usual_runs);
    CAPTURE(usual_bytes);
    CAPTURE(turns);
    check_item(units, turns, turns);
    check_item(units, turns, pick(0, 2 * turns));
  }
}

TEST_CASE("requests come evenly, each unit's before it is worked on but for the ends of its later runs") {
  run_maker maker;
  std::vector<unit_runs> units;
  for (int i = 0; i < 40; ++i) units.push_back(maker.make(8, 4096));
  for (const int turns : {36, 100, 768}) {
    const item_run item(units, turns, turns);
    const std::size_t unit_lines = 512;
    for (std::size_t u = 3; u + 3 < units.size(); ++u) {
      CAPTURE(turns);
      CAPTURE(u);
      const auto between = static_cast<std::int64_t>(item.asked_at[u + 1] - item.asked_at[u]);
      CHECK(std::abs(between - static_cast<std::int64_t>(unit_lines)) <= 2 * stream_ways);
      CHECK(item.asked_at[u + 1] - item.asked_by_turns[u] <= 2 * stream_ways);
      const auto by_half = static_cast<std::int64_t>(item.asked_by_half[u] - item.asked_at[u]);
      CHECK(std::abs(2 * by_half - between) <= 4 * stream_ways);
      // Of run i, 80 − 8·i lines of 64 when the unit begins.
      const std::set<address> before(asked.begin(), asked.begin() + static_cast<std::ptrdiff_t>(item.asked_at[u]));
      for (int i = 0; i < 8; ++i) {
        const int lines = std::min(64, 80 - 8 * i) - 2;
        unit_runs begun{{units[u].runs[static_cast<std::size_t>(i)]}, lines * cache_line_bytes};
        CHECK(missing_in(before, begun.lines()) == 0);
      }
    }
  }
}

TEST_CASE("eight runs are under way at once and begin one by one") {
  run_maker maker;
  const unit_runs first = maker.make(8, 4096);
  const unit_runs second = maker.make(8, 4096);
  asked.clear();
  run_queue<recorder> queue;
  queue.push(first.runs.data(), 8, 64);
  queue.push(second.runs.data(), 8, 64);
  for (int batch = 0; batch < 64; ++batch) queue.batch();
  const std::size_t begin = asked.size();
  for (int batch = 64; batch < 128; ++batch) {
    queue.batch();
    std::set<address> runs;
    for (std::size_t i = asked.size() - 8; i < asked.size(); ++i) runs.insert(asked[i] >> 20);
    CHECK(runs.size() == 8);
  }
  std::map<address, int> begun;  // runs whose first line was asked for, by batch
  for (std::size_t i = begin; i < asked.size(); ++i) {
    if ((asked[i] & 0xfffff) == 0) begun[asked[i]] = static_cast<int>((i - begin) / 8);
  }
  CHECK(begun.size() == 8);
  int batch = 0;
  for (const auto& [run, at] : begun) {
    CHECK(at == batch);
    batch += 8;
  }
}
