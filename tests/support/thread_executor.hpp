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
  explicit thread_executor(std::int32_t concurrency) noexcept : concurrency_(concurrency) {}
  [[nodiscard]] std::int32_t concurrency() const noexcept override { return concurrency_; }
  void run(std::int32_t num_workers, worker_function function, void* context) noexcept override {
    std::vector<std::thread> threads;
    for (std::int32_t worker = 1; worker < num_workers; ++worker) threads.emplace_back(function, context, worker);
    function(context, 0);
    for (std::thread& thread : threads) thread.join();
  }
  [[nodiscard]] std::string_view name() const noexcept override { return "threads"; }

 private:
  std::int32_t concurrency_;
};

}  // namespace bifolio::test
