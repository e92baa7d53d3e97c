// SPDX-License-Identifier: Apache-2.0
#include "memory_latency.hpp"

#include <algorithm>
#include <bifolio/buffer.hpp>
#include <bifolio/memory_resource.hpp>
#include <random>
#include <utility>
#include <vector>

#include "probe.hpp"
#include "report.hpp"
#include "row_timer.hpp"

namespace bifolio::bench {

double memory_latency_ns(std::int64_t num_bytes, std::uint64_t seed) {
  struct alignas(64) line {
    std::uint32_t next;
  };
  const auto count = static_cast<std::uint32_t>(std::clamp<std::int64_t>(num_bytes / 64, 2, std::int64_t{1} << 31));
  buffer memory(default_host_memory(), count * sizeof(line), alignof(line));
  line* const lines = memory.as<line>();
  for (std::uint32_t i = 0; i < count; ++i) lines[i].next = i;
  std::mt19937_64 random(seed);
  for (std::uint32_t i = count - 1; i > 0; --i) {  // Sattolo: one cycle through all
    std::swap(lines[i].next, lines[std::uniform_int_distribution<std::uint32_t>(0, i - 1)(random)].next);
  }
  const std::uint32_t steps = std::min<std::uint32_t>(count, 1'000'000);
  std::vector<double> samples;
  std::uint32_t at = 0;
  for (int pass = 0; pass < 7; ++pass) {
    const auto start = row_timer::clock::now();
    for (std::uint32_t i = 0; i < steps; ++i) at = lines[at].next;
    const std::chrono::duration<double, std::nano> spent = row_timer::clock::now() - start;
    samples.push_back(spent.count() / steps);
  }
  consume(at);
  return summarize(samples).median;
}

}  // namespace bifolio::bench
