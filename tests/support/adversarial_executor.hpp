// SPDX-License-Identifier: Apache-2.0
#pragma once

/// An executor that decides who runs. Its workers are std::threads of which one runs at a time; at each stop the
/// running one may have to leave its turn to another. A stop is where a worker begins, where it ends, and where its
/// code calls `stop()`. The same schedule gives the same order again.
///
/// Turns are handed on by one relaxed atomic, which orders nothing else: to ThreadSanitizer the workers of a call run
/// free of one another, and what they share without synchronisation of its own is a race that it reports.

#include <atomic>
#include <bifolio/executor.hpp>
#include <cstdint>
#include <string_view>
#include <vector>

namespace bifolio::test {

class adversarial_executor final : public executor {
 public:
  /// At most 32 workers. Until a schedule is set every run takes the next seed.
  explicit adversarial_executor(std::int32_t concurrency) noexcept : concurrency_(concurrency) {}
  [[nodiscard]] std::int32_t concurrency() const noexcept override { return concurrency_; }
  [[nodiscard]] std::string_view name() const noexcept override { return "adversarial"; }
  void run(std::int32_t num_workers, worker_function function, void* context) noexcept override;

  // What sets a schedule, or asks for the last run's, is for runs that come one after another.

  /// The order of the following runs, from a seed. Their kinds take turns: another worker at each stop; workers one
  /// after another, in any order; one worker that is late, held at some stop until all others have ended; each in turn.
  void set_seed(std::uint64_t seed) noexcept;
  /// Decision i takes the choices[i]-th of the workers that have not ended, the first when there is no choices[i].
  void set_choices(std::vector<std::uint8_t> choices);
  /// How many workers each decision of the last run could take.
  [[nodiscard]] const std::vector<std::uint8_t>& alternatives() const noexcept { return alternatives_; }

  /// In a worker's code: another worker may run now. Elsewhere it does nothing.
  static void stop() noexcept;

 private:
  struct call;

  std::int32_t concurrency_;
  bool is_seeded_ = false;
  bool has_choices_ = false;
  std::atomic<std::uint64_t> seed_{0};
  std::vector<std::uint8_t> choices_;
  std::vector<std::uint8_t> alternatives_;
};

/// Calls run(executor) once for each order of stops of `num_workers` workers that there is, up to `most`; when it makes
/// several calls of the executor they take the same order. Returns how many.
template <class Run>
std::int64_t for_each_interleaving(std::int32_t num_workers, std::int64_t most, const Run& run) {
  adversarial_executor workers(num_workers);
  std::vector<std::uint8_t> choices;
  for (std::int64_t count = 1; count <= most; ++count) {
    workers.set_choices(choices);
    run(workers);
    // The last decision that has another choice left takes it; what comes after it begins anew.
    const std::vector<std::uint8_t>& alternatives = workers.alternatives();
    choices.resize(alternatives.size(), 0);
    while (!choices.empty() && choices.back() + 1 >= alternatives[choices.size() - 1]) choices.pop_back();
    if (choices.empty()) return count;
    ++choices.back();
  }
  return most + 1;
}

}  // namespace bifolio::test
