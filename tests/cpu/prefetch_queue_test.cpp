// SPDX-License-Identifier: Apache-2.0
// Software prefetch issues the right lines at the right time. A mistake there changes no result, only the speed.
#define BIFOLIO_ISA tested
#include "cpu/kernels/attention/prefetch_queue.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <set>
#include <vector>

#include "support/random.hpp"

namespace {

using namespace bifolio::cpu::tested;

using address = std::uintptr_t;

std::vector<address> issued;

struct recorder {
  void operator()(address line) const { issued.push_back(line); }
};

using recording_prefetcher = basic_prefetcher<recorder>;

// The ranges of one iteration, somewhere in an address space of their own; nothing is read there.
struct iteration_ranges {
  std::vector<const char*> ranges;
  int range_bytes = 0;

  [[nodiscard]] std::set<address> lines() const {
    std::set<address> all;
    for (const char* range : ranges) {
      for (int byte = 0; byte < range_bytes; byte += cache_line_bytes) {
        all.insert(reinterpret_cast<address>(range) + static_cast<address>(byte));
      }
    }
    return all;
  }
};

class range_maker {
 public:
  iteration_ranges make(int num_ranges, int range_bytes) {
    iteration_ranges iteration;
    iteration.range_bytes = range_bytes;
    for (int i = 0; i < num_ranges; ++i) {
      iteration.ranges.push_back(reinterpret_cast<const char*>(next_));
      next_ += 1 << 20;
    }
    return iteration;
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

// As the mainloop does it; `polls` is what an iteration announces, `taken` what it makes.
struct recorded_loop {
  std::vector<std::size_t> issued_at;        // lines issued before iteration i,
  std::vector<std::size_t> issued_by_half;   // after half of its polls
  std::vector<std::size_t> issued_by_polls;  // and after all of them, before the flush

  recorded_loop(const std::vector<iteration_ranges>& iterations, int polls, int taken) {
    issued.clear();
    recording_prefetcher prefetch;
    const auto push = [&](std::size_t i) {
      if (i >= iterations.size()) return prefetch.push_end();
      const iteration_ranges& of = iterations[i];
      prefetch.push(of.ranges.data(), static_cast<int>(of.ranges.size()), of.range_bytes);
    };
    push(1);
    for (std::size_t i = 0; i < iterations.size(); ++i) {
      issued_at.push_back(issued.size());
      push(i + 2);
      prefetch.pace(polls);
      const auto poll = [&](int count) {
        // A poller issues one batch per poll at most; the even test's iterations hold at most 80 batches.
        if (i % 2 == 0 || polls < 80) {
          for (int n = 0; n < count; ++n) prefetch.poll();
        } else {
          basic_prefetch_poller<recorder> poller(prefetch);
          for (int n = 0; n < count; ++n) poller.poll();
        }
      };
      poll(taken / 2);
      issued_by_half.push_back(issued.size());
      poll(taken - taken / 2);
      issued_by_polls.push_back(issued.size());
      prefetch.flush();
    }
  }
};

void check_loop(const std::vector<iteration_ranges>& iterations, int polls, int taken) {
  const recorded_loop loop(iterations, polls, taken);
  std::set<address> all;
  for (std::size_t u = 1; u < iterations.size(); ++u) all.merge(iterations[u].lines());
  const std::set<address> found(issued.begin(), issued.end());
  CHECK(missing_in(found, all) == 0);
  CHECK(missing_in(all, found) == 0);  // nothing is prefetched that is not needed
}

}  // namespace

TEST_CASE("every line of every iteration but the first is prefetched, and no other") {
  INFO(bifolio::test::seed_note());
  bifolio::test::random_source random(bifolio::test::test_seed());
  const auto pick = [&](int low, int high) { return static_cast<int>(random.between(low, high)); };
  for (int round = 0; round < 300; ++round) {
    range_maker maker;
    const int usual_ranges = pick(1, 130);
    const int usual_bytes = pick(1, 70) * pick(1, 128);
    std::vector<iteration_ranges> iterations;
    for (int i = pick(1, 20); i > 0; --i) {
      const bool usual = pick(0, 4) > 0;
      iterations.push_back(maker.make(usual ? usual_ranges : pick(0, 130), usual ? usual_bytes : pick(1, 5000)));
    }
    const int polls = pick(1, 2000);
    CAPTURE(round);
    CAPTURE(usual_ranges);
    CAPTURE(usual_bytes);
    CAPTURE(polls);
    check_loop(iterations, polls, polls);
    check_loop(iterations, polls, pick(0, 2 * polls));
  }
}

TEST_CASE("prefetches come evenly, those of an iteration before it begins but for the ends of its later ranges") {
  range_maker maker;
  std::vector<iteration_ranges> iterations;
  for (int i = 0; i < 40; ++i) iterations.push_back(maker.make(8, 4096));
  for (const int polls : {36, 100, 768}) {
    const recorded_loop loop(iterations, polls, polls);
    const std::size_t iteration_lines = 512;
    for (std::size_t u = 3; u + 3 < iterations.size(); ++u) {
      CAPTURE(polls);
      CAPTURE(u);
      const auto between = static_cast<std::int64_t>(loop.issued_at[u + 1] - loop.issued_at[u]);
      CHECK(std::abs(between - static_cast<std::int64_t>(iteration_lines)) <= 2 * num_streams);
      CHECK(loop.issued_at[u + 1] - loop.issued_by_polls[u] <= 2 * num_streams);
      const auto by_half = static_cast<std::int64_t>(loop.issued_by_half[u] - loop.issued_at[u]);
      CHECK(std::abs(2 * by_half - between) <= 4 * num_streams);
      // Of range i, 80 − 8·i lines of 64 when the iteration begins.
      const std::set<address> before(issued.begin(), issued.begin() + static_cast<std::ptrdiff_t>(loop.issued_at[u]));
      for (int i = 0; i < 8; ++i) {
        const int lines = std::min(64, 80 - 8 * i) - 2;
        iteration_ranges started{{iterations[u].ranges[static_cast<std::size_t>(i)]}, lines * cache_line_bytes};
        CHECK(missing_in(before, started.lines()) == 0);
      }
    }
  }
}

TEST_CASE("eight streams are in flight at once and start their ranges one by one") {
  range_maker maker;
  const iteration_ranges first = maker.make(8, 4096);
  const iteration_ranges second = maker.make(8, 4096);
  issued.clear();
  prefetch_queue<recorder> queue;
  queue.push(first.ranges.data(), 8, 64);
  queue.push(second.ranges.data(), 8, 64);
  for (int batch = 0; batch < 64; ++batch) queue.issue();
  const std::size_t begin = issued.size();
  for (int batch = 64; batch < 128; ++batch) {
    queue.issue();
    std::set<address> streams;
    for (std::size_t i = issued.size() - 8; i < issued.size(); ++i) streams.insert(issued[i] >> 20);
    CHECK(streams.size() == 8);
  }
  std::map<address, int> started;  // ranges whose first line was prefetched, by batch
  for (std::size_t i = begin; i < issued.size(); ++i) {
    if ((issued[i] & 0xfffff) == 0) started[issued[i]] = static_cast<int>((i - begin) / 8);
  }
  CHECK(started.size() == 8);
  int batch = 0;
  for (const auto& [range, at] : started) {
    CHECK(at == batch);
    batch += 8;
  }
}
