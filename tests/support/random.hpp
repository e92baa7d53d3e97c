// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Reproducible randomness. Two forms: a stream (`random_source`) for choices, and a hash of coordinates (`hash_of`)
/// for contents, so that element (sequence, token, head, dim) has the same value however a batch is cut, ordered or
/// laid out. Generator and finaliser: SplitMix64 (Steele, Lea, Flood 2014).

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

namespace bifolio::test {

/// The seed of this run: BIFOLIO_TEST_SEED when set, else a constant. Tests put it into their failure messages.
[[nodiscard]] inline std::uint64_t test_seed() {
  const char* text = std::getenv("BIFOLIO_TEST_SEED");
  return text == nullptr ? 20260119u : std::strtoull(text, nullptr, 0);
}

/// "BIFOLIO_TEST_SEED=…": what to set to see this run again.
[[nodiscard]] inline std::string seed_note() { return "BIFOLIO_TEST_SEED=" + std::to_string(test_seed()); }

/// How many times their everyday length the long random tests run: BIFOLIO_TEST_RUNS when set, else 1.
[[nodiscard]] inline std::int64_t num_test_runs() {
  const char* text = std::getenv("BIFOLIO_TEST_RUNS");
  return text == nullptr ? 1 : std::strtoll(text, nullptr, 10);
}

[[nodiscard]] constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

template <class... Parts>
[[nodiscard]] constexpr std::uint64_t hash_of(std::uint64_t seed, Parts... parts) noexcept {
  std::uint64_t h = mix(seed);
  ((h = mix(h ^ static_cast<std::uint64_t>(parts))), ...);
  return h;
}

/// About N(0, 1): the sum of four 16-bit uniforms, centred and scaled to variance 1. Range ±2√3.
[[nodiscard]] inline float normal_from(std::uint64_t bits) noexcept {
  const auto sum = static_cast<float>((bits & 0xffffu) + ((bits >> 16) & 0xffffu) + ((bits >> 32) & 0xffffu) +
                                      ((bits >> 48) & 0xffffu));
  return (sum / 65536.0f - 2.0f) * 1.7320508f;
}

/// Uniform in [0, 1).
[[nodiscard]] constexpr float unit_from(std::uint64_t bits) noexcept {
  return static_cast<float>(bits >> 40) * 0x1p-24f;
}

class random_source {
 public:
  explicit random_source(std::uint64_t seed) noexcept : state_(mix(seed)) {}
  /// The first choices are these, two bytes each; a fuzzer's input, which outlives the source.
  explicit random_source(std::span<const std::uint8_t> choices) noexcept : state_(0), choices_(choices) {}

  std::uint64_t next() noexcept {
    if (choices_.size() < 2) return mix(state_++);
    const std::uint64_t choice = choices_[0] + std::uint64_t{256} * choices_[1];
    choices_ = choices_.subspan(2);
    return choice;
  }
  /// Uniform in [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) noexcept {
    return low + static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(high - low + 1));
  }
  float unit() noexcept { return unit_from(next()); }
  bool one_in(std::int64_t n) noexcept { return between(1, n) == 1; }
  template <class Range>
  const auto& pick(const Range& range) noexcept {
    return range[static_cast<std::size_t>(between(0, static_cast<std::int64_t>(std::size(range)) - 1))];
  }
  template <class Range>
  void shuffle(Range& range) noexcept {
    for (std::size_t i = std::size(range); i > 1; --i) {
      std::swap(range[i - 1], range[static_cast<std::size_t>(next() % i)]);
    }
  }

 private:
  std::uint64_t state_;
  std::span<const std::uint8_t> choices_{};
};

}  // namespace bifolio::test
