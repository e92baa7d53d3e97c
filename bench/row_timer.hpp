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
  /// `latency_ns`: of memory, in which rows at random places are counted as well; 0 = unknown.
  explicit row_timer(report& out, double latency_ns = 0) : out_(out), latency_ns_(latency_ns) {}

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
    const bool counts = latency_ns_ > 0 && order.starts_with("random");
    out_.add({{"operation", operation},
              {"order", order},
              {"per", per},
              {"ns", ns.median},
              {"p10_ns", ns.p10},
              {"p90_ns", ns.p90},
              {"latencies", counts ? cell(ns.median / latency_ns_) : cell(std::string())}});
  }

 private:
  report& out_;
  double latency_ns_;
};

}  // namespace bifolio::bench
