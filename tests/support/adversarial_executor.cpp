// SPDX-License-Identifier: Apache-2.0
#include "support/adversarial_executor.hpp"

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <thread>
#include <utility>

#include "support/random.hpp"

namespace bifolio::test {
namespace {

/// Who has the turn, the decisions so far, and who has not ended, in one word: there is nothing to be ordered.
struct turn_state {
  std::int32_t turn;
  std::int32_t step;
  std::uint32_t alive;

  [[nodiscard]] std::uint64_t packed() const noexcept {
    return std::uint64_t{alive} << 32 | static_cast<std::uint64_t>(step & 0xff'ffff) << 8 |
           static_cast<std::uint64_t>(turn);
  }
  [[nodiscard]] static turn_state of(std::uint64_t word) noexcept {
    return {static_cast<std::int32_t>(word & 0xff), static_cast<std::int32_t>(word >> 8 & 0xff'ffff),
            static_cast<std::uint32_t>(word >> 32)};
  }
};

std::int32_t nth_of(std::uint32_t alive, std::uint64_t n) noexcept {
  for (n %= static_cast<std::uint64_t>(std::popcount(alive)); n > 0; --n) alive &= alive - 1;
  return std::countr_zero(alive);
}

constexpr std::size_t most_recorded = 4096;

}  // namespace

struct adversarial_executor::call {
  worker_function function;
  void* context;
  std::int32_t num_workers;
  std::uint64_t seed;
  const std::vector<std::uint8_t>* choices;  ///< null: the seed decides
  std::atomic<std::uint64_t> state{0};
  std::array<std::atomic<std::uint8_t>, most_recorded> alternatives{};

  [[nodiscard]] std::int32_t choose(std::int32_t step, std::uint32_t alive, std::int32_t current) const noexcept;
  void decide(std::int32_t step, std::uint32_t alive, std::int32_t current) noexcept {
    const turn_state next{choose(step, alive, current), step + 1, alive};
    if (static_cast<std::size_t>(step) < most_recorded) {
      alternatives[static_cast<std::size_t>(step)].store(static_cast<std::uint8_t>(std::popcount(alive)),
                                                         std::memory_order_relaxed);
    }
    state.store(next.packed(), std::memory_order_relaxed);
  }
  void wait_for_turn(std::int32_t worker) const noexcept {
    while (turn_state::of(state.load(std::memory_order_relaxed)).turn != worker) std::this_thread::yield();
  }
  void hand_on(std::int32_t worker) noexcept {
    const turn_state now = turn_state::of(state.load(std::memory_order_relaxed));
    decide(now.step, now.alive, worker);
    wait_for_turn(worker);
  }
  void work(std::int32_t worker) noexcept;
};

namespace {

struct running_worker {
  void* call = nullptr;  // adversarial_executor::call, which is private
  std::int32_t worker = 0;
};
thread_local running_worker running;

}  // namespace

void adversarial_executor::call::work(std::int32_t worker) noexcept {
  wait_for_turn(worker);
  const running_worker outer = std::exchange(running, {this, worker});
  function(context, worker);
  running = outer;
  const turn_state now = turn_state::of(state.load(std::memory_order_relaxed));
  const std::uint32_t others = now.alive & ~(std::uint32_t{1} << worker);
  if (others != 0) decide(now.step, others, -1);
}

void adversarial_executor::stop() noexcept {
  if (running.call != nullptr) static_cast<call*>(running.call)->hand_on(running.worker);
}

void adversarial_executor::set_seed(std::uint64_t seed) noexcept {
  seed_ = seed;
  is_seeded_ = true;
  has_choices_ = false;
}

void adversarial_executor::set_choices(std::vector<std::uint8_t> choices) {
  choices_ = std::move(choices);
  has_choices_ = true;
}

std::int32_t adversarial_executor::call::choose(std::int32_t step, std::uint32_t alive,
                                                std::int32_t current) const noexcept {
  if (choices != nullptr) {
    const auto index = static_cast<std::size_t>(step);
    return nth_of(alive, index < choices->size() ? (*choices)[index] : 0);
  }
  const std::uint64_t random = hash_of(seed, step);
  switch (seed % 4) {
    case 0:
      return nth_of(alive, random);
    case 1:
      return current >= 0 ? current : nth_of(alive, random);
    case 2: {
      const auto late = static_cast<std::int32_t>(hash_of(seed, 0x1a7e) % static_cast<std::uint64_t>(num_workers));
      const bool is_held = step >= static_cast<std::int32_t>(hash_of(seed, 0x1a7f) % 12);
      const std::uint32_t others = alive & ~(std::uint32_t{1} << late);
      return nth_of(is_held && others != 0 ? others : alive, random);
    }
    default: {
      const std::uint32_t later = current >= 0 ? alive & (~std::uint32_t{1} << current) : alive;
      return std::countr_zero(later != 0 ? later : alive);
    }
  }
}

void adversarial_executor::run(std::int32_t num_workers, worker_function function, void* context) noexcept {
  call mine{function, context, num_workers, is_seeded_ ? seed_.load() : seed_.fetch_add(1),
            has_choices_ ? &choices_ : nullptr};
  mine.decide(0, static_cast<std::uint32_t>((std::uint64_t{1} << num_workers) - 1), -1);
  std::vector<std::thread> threads;
  for (std::int32_t worker = 1; worker < num_workers; ++worker) {
    threads.emplace_back([&mine, worker] { mine.work(worker); });
  }
  mine.work(0);
  for (std::thread& thread : threads) thread.join();
  if (!has_choices_) return;
  const turn_state end = turn_state::of(mine.state.load(std::memory_order_relaxed));
  alternatives_.clear();
  for (std::size_t i = 0; i < static_cast<std::size_t>(end.step) && i < most_recorded; ++i) {
    alternatives_.push_back(mine.alternatives[i].load(std::memory_order_relaxed));
  }
}

}  // namespace bifolio::test
