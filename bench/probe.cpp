// SPDX-License-Identifier: Apache-2.0
#include "probe.hpp"

#include <algorithm>
#include <atomic>
#include <bifolio/backend.hpp>
#include <vector>

#include "report.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bifolio::bench {
namespace {

// Prefetch distance of a pass that prefetches.
constexpr std::size_t bytes_ahead = 4096;

struct read_pass {
  const std::byte* begin = nullptr;
  std::size_t num_bytes = 0;
  std::size_t ahead = 0;  // 0: nothing is asked for before its load
  std::int32_t num_workers = 1;
};

typedef std::uint64_t word_pair __attribute__((vector_size(16), aligned(1), may_alias));

// A volatile use follows, because GCC 12 deletes a function whose only effect is a prefetch.
inline void ask_for(const std::byte* p) noexcept {
  __builtin_prefetch(p, 0, 2);
  __asm__ volatile("" : : "r"(p));
}

// Whole pieces of 256 bytes with the vectors that every machine has.
std::uint64_t read_words(const std::byte* p, std::size_t num_bytes, std::size_t ahead) noexcept {
  word_pair a[4] = {};
  for (std::size_t i = 0; i < num_bytes; i += 64) {
    if (ahead > 0) ask_for(p + i + ahead);
    for (std::size_t c = 0; c < 4; ++c) a[c] ^= *reinterpret_cast<const word_pair*>(p + i + 16 * c);
  }
  const word_pair all = (a[0] ^ a[1]) ^ (a[2] ^ a[3]);
  return all[0] ^ all[1];
}

#if defined(__x86_64__)
// The same, a cache line a load: with narrower ones a core waits for fewer lines at a time.
__attribute__((target("avx512f"))) std::uint64_t read_lines(const std::byte* p, std::size_t num_bytes,
                                                            std::size_t ahead) noexcept {
  __m512i a[4] = {};
  for (std::size_t i = 0; i < num_bytes; i += 256) {
    for (std::size_t c = 0; c < 4; ++c) {
      if (ahead > 0) ask_for(p + i + 64 * c + ahead);
      a[c] = _mm512_xor_si512(a[c], _mm512_loadu_si512(p + i + 64 * c));
    }
  }
  std::uint64_t words[8];
  _mm512_storeu_si512(words, _mm512_xor_si512(_mm512_xor_si512(a[0], a[1]), _mm512_xor_si512(a[2], a[3])));
  for (std::size_t c = 1; c < 8; ++c) words[0] ^= words[c];
  return words[0];
}
#endif

void read_worker(void* context, std::int32_t worker) noexcept {
  const auto& pass = *static_cast<const read_pass*>(context);
  const std::size_t part = pass.num_bytes / static_cast<std::size_t>(pass.num_workers) / 64 * 64;
  consume(read_bytes(pass.begin + static_cast<std::size_t>(worker) * part, part, pass.ahead));
}

// 24 independent chains: more than latency × throughput of any core so far.
constexpr int num_chains = 24;
constexpr std::int64_t fma_rounds = 100'000;

#if defined(__x86_64__)
__attribute__((target("avx512f"))) double fma_avx512() noexcept {
  __m512 acc[num_chains];
  for (auto& a : acc) a = _mm512_set1_ps(1.0f);
  const __m512 x = _mm512_set1_ps(0.999f);
  const __m512 y = _mm512_set1_ps(0.001f);
  for (std::int64_t i = 0; i < fma_rounds; ++i) {
#pragma GCC unroll 24
    for (int c = 0; c < num_chains; ++c) acc[c] = _mm512_fmadd_ps(acc[c], x, y);
  }
  __m512 sum = acc[0];
  for (int c = 1; c < num_chains; ++c) sum = _mm512_add_ps(sum, acc[c]);
  float parts[16];
  _mm512_storeu_ps(parts, sum);
  consume(static_cast<std::uint64_t>(parts[0]));
  return 2.0 * 16 * num_chains * static_cast<double>(fma_rounds);
}

__attribute__((target("avx2,fma"))) double fma_avx2() noexcept {
  constexpr int chains = 12;
  __m256 acc[chains];
  for (auto& a : acc) a = _mm256_set1_ps(1.0f);
  const __m256 x = _mm256_set1_ps(0.999f);
  const __m256 y = _mm256_set1_ps(0.001f);
  for (std::int64_t i = 0; i < fma_rounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) acc[c] = _mm256_fmadd_ps(acc[c], x, y);
  }
  __m256 sum = acc[0];
  for (int c = 1; c < chains; ++c) sum = _mm256_add_ps(sum, acc[c]);
  float parts[8];
  _mm256_storeu_ps(parts, sum);
  consume(static_cast<std::uint64_t>(parts[0]));
  return 2.0 * 8 * chains * static_cast<double>(fma_rounds);
}
#endif

double fma_portable() noexcept {
  typedef float vec4 __attribute__((vector_size(16)));
  constexpr int chains = 12;
  vec4 acc[chains];
  for (auto& a : acc) a = vec4{1, 1, 1, 1};
  const vec4 x = {0.999f, 0.999f, 0.999f, 0.999f};
  const vec4 y = {0.001f, 0.001f, 0.001f, 0.001f};
  for (std::int64_t i = 0; i < fma_rounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) acc[c] = acc[c] * x + y;  // contracted to fmla on Arm
  }
  vec4 sum = acc[0];
  for (int c = 1; c < chains; ++c) sum += acc[c];
  consume(static_cast<std::uint64_t>(sum[0]));
  return 2.0 * 4 * chains * static_cast<double>(fma_rounds);
}

double fma_once() noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return fma_avx512();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return fma_avx2();
#endif
  return fma_portable();
}

struct fma_pass {
  std::atomic<std::int64_t> operations{0};
};

void fma_worker(void* context, std::int32_t) noexcept {
  auto& pass = *static_cast<fma_pass*>(context);
  pass.operations.fetch_add(static_cast<std::int64_t>(fma_once()), std::memory_order_relaxed);
}

}  // namespace

std::uint64_t read_bytes(const void* begin, std::size_t num_bytes, std::size_t ahead) noexcept {
  const auto* p = static_cast<const std::byte*>(begin);
  const std::size_t whole = num_bytes / 256 * 256;
#if defined(__x86_64__)
  static const bool has_lines = __builtin_cpu_supports("avx512f") != 0;
  std::uint64_t all = has_lines ? read_lines(p, whole, ahead) : read_words(p, whole, ahead);
#else
  std::uint64_t all = read_words(p, whole, ahead);
#endif
  for (std::size_t i = whole; i < num_bytes; ++i) all ^= static_cast<std::uint64_t>(p[i]);
  return all;
}

void consume(std::uint64_t value) noexcept { __asm__ volatile("" : : "r"(value) : "memory"); }

double read_probe::gb_per_second(double seconds) {
  read_pass pass{memory_, num_bytes_, 0, workers_->concurrency()};
  workers_->run(pass.num_workers, &read_worker, &pass);
  std::vector<double> plain;
  std::vector<double> prefetching;
  const auto begin = std::chrono::steady_clock::now();
  while (prefetching.size() < 3 || seconds_since(begin) < seconds) {
    for (const std::size_t ahead : {std::size_t{0}, bytes_ahead}) {
      pass.ahead = ahead;
      const auto start = std::chrono::steady_clock::now();
      workers_->run(pass.num_workers, &read_worker, &pass);
      (ahead == 0 ? plain : prefetching).push_back(static_cast<double>(num_bytes_) / seconds_since(start) * 1e-9);
    }
  }
  return std::max(summarize(plain).median, summarize(prefetching).median);
}

double fma_gflop_per_second(executor& workers, double seconds) {
  std::vector<double> samples;
  const auto begin = std::chrono::steady_clock::now();
  while (samples.size() < 5 || seconds_since(begin) < seconds) {
    fma_pass pass;
    const auto start = std::chrono::steady_clock::now();
    workers.run(workers.concurrency(), &fma_worker, &pass);
    samples.push_back(static_cast<double>(pass.operations.load()) / seconds_since(start) * 1e-9);
  }
  return summarize(samples).median;
}

const char* fma_vectors() noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return "avx512";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
  return "baseline";
#elif defined(__aarch64__)
  return "neon";
#else
  return "baseline";
#endif
}

}  // namespace bifolio::bench
