// SPDX-License-Identifier: Apache-2.0
#pragma once

/// An executor of plain std::threads, started anew for each call. Slow, and all that a race detector can see through:
/// OpenMP's and oneTBB's runtimes are not instrumented.

#include <bifolio/executor.hpp>
#include <cstdint>
#include <string_view>
#include <thread>
#include <vector>

namespace bifolio::test {

class thread_executor final : public executor {
 public:
  explicit thread_executor(std::int32_t width) noexcept : width_(width) {}
  [[nodiscard]] std::int32_t width() const noexcept override { return width_; }
  void run(std::int32_t num_lanes, lane_function function, void* context) noexcept override {
    std::vector<std::thread> threads;
    for (std::int32_t lane = 1; lane < num_lanes; ++lane) threads.emplace_back(function, context, lane);
    function(context, 0);
    for (std::thread& thread : threads) thread.join();
  }
  [[nodiscard]] std::string_view name() const noexcept override { return "threads"; }

 private:
  std::int32_t width_;
};

}  // namespace bifolio::test
