// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of nanoseconds an operation, in CPU time of the thread: what is measured with it runs on one core and never
// waits.

#include <chrono>
#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

#include "report.hpp"

namespace bifolio::bench {

class row_timer {
 public:
  explicit row_timer(report& out) : out_(out) {}

  struct clock {
    using duration = std::chrono::nanoseconds;
    using rep = duration::rep;
    using period = duration::period;
    using time_point = std::chrono::time_point<clock>;
    static time_point now() {
      timespec at{};
      ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &at);
      return time_point(std::chrono::seconds(at.tv_sec) + std::chrono::nanoseconds(at.tv_nsec));
    }
  };

  /// Runs `body`, which does `count` operations, and keeps nanoseconds an operation.
  template <class Body>
  void time(std::vector<double>& samples, std::int64_t count, const Body& body) {
    const auto start = clock::now();
    body();
    const double seconds = std::chrono::duration<double>(clock::now() - start).count();
    samples.push_back(seconds * 1e9 / static_cast<double>(count));
  }

  void add(const std::string& operation, const std::string& order, const std::string& per,
           const std::vector<double>& samples) {
    const summary ns = summarize(samples);
    out_.add({{"operation", operation},
              {"order", order},
              {"per", per},
              {"ns", ns.median},
              {"p10_ns", ns.p10},
              {"p90_ns", ns.p90}});
  }

 private:
  report& out_;
};

}  // namespace bifolio::bench
