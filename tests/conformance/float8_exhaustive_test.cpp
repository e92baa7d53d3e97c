// SPDX-License-Identifier: Apache-2.0
// All 2^32 float32 numbers as 8-bit floats: what every backend's append stores, dtype.hpp, and, where it is installed,
// the host path of CUDA's own header.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <bifolio/backend.hpp>
#include <bifolio/dtype.hpp>
#include <bit>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if BIFOLIO_HAS_CUDA_FP8
#include <cuda_fp8.h>
#endif

#include "support/backends.hpp"
#include "support/cache_pair.hpp"
#include "support/device_bytes.hpp"

namespace {

using namespace bifolio;
using namespace bifolio::test;

/// Calls `body(first, last)` for parts of [0, count) on all cores and adds up what it returns.
template <class Body>
std::int64_t sum_over(std::int64_t count, const Body& body) {
  const std::int64_t num_threads = std::clamp<std::int64_t>(std::thread::hardware_concurrency(), 1, 16);
  std::atomic<std::int64_t> sum{0};
  std::vector<std::thread> threads;
  for (std::int64_t i = 0; i < num_threads; ++i) {
    threads.emplace_back([&, i] { sum += body(count * i / num_threads, count * (i + 1) / num_threads); });
  }
  for (std::thread& thread : threads) thread.join();
  return sum;
}

#if BIFOLIO_HAS_CUDA_FP8
TEST_CASE("every float32 narrows to 8 bits as CUDA's header says") {
  const std::int64_t wrong = sum_over(std::int64_t{1} << 32, [](std::int64_t first, std::int64_t last) {
    std::int64_t different = 0;
    for (std::int64_t i = first; i < last; ++i) {
      const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(i));
      different += from_float<float8_e4m3>(value).bits != __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
      different += from_float<float8_e5m2>(value).bits != __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2);
    }
    return different;
  });
  CHECK(wrong == 0);
}
#endif

TEST_CASE("every float32 is stored as e4m3 and e5m2 as dtype.hpp says, by one backend of each family") {
  constexpr std::int64_t dims = 256;
  constexpr std::int64_t tokens = std::int64_t{1} << 16;
  constexpr std::int64_t part = dims * tokens;  // 2^24 numbers
  const kv_layout layout = make_layout(layout_kind::nhd, {dtype::e4m3}, {dtype::e5m2}, 1, dims, dims, 1 << 10);
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < tokens; ++i) slots.push_back(i);
  for (const tested_backend* tested : one_per_family(0)) {
    backend& where = tested->get();
    device_bytes slots_there = upload_array(where, slots);
    device_bytes cache(where, std::vector<std::byte>(2 * part), 16);
    device_bytes rows(where, std::vector<std::byte>(4 * part), 16);
    const kv_cache_view view{cache.data(), cache.data() + part, tokens >> 10, layout};
    const const_tensor_view given{rows.data(), dtype::f32, tokens, 1, dims, dims, dims};
    std::vector<std::uint32_t> numbers(part);
    std::vector<std::uint8_t> stored(2 * part);
    std::int64_t wrong = 0;
    for (std::int64_t first = 0; first < std::int64_t{1} << 32; first += part) {
      for (std::int64_t i = 0; i < part; ++i) {
        numbers[static_cast<std::size_t>(i)] = static_cast<std::uint32_t>(first + i);
      }
      require_ok(where.upload(rows.data(), numbers.data(), 4 * part, {}), "upload");
      REQUIRE(where.append({view, given, given, reinterpret_cast<const std::int64_t*>(slots_there.data())}) ==
              errc::ok);
      require_ok(where.download(stored.data(), cache.data(), stored.size(), {}), "download");
      require_ok(where.synchronize({}), "synchronize");
      wrong += sum_over(part, [&](std::int64_t begin, std::int64_t end) {
        std::int64_t different = 0;
        for (std::int64_t i = begin; i < end; ++i) {
          const auto at = static_cast<std::size_t>(i);
          const auto value = std::bit_cast<float>(numbers[at]);
          different += from_float<float8_e4m3>(value).bits != stored[at];
          different += from_float<float8_e5m2>(value).bits != stored[at + part];
        }
        return different;
      });
    }
    CAPTURE(tested->name);
    CHECK(wrong == 0);
  }
}

}  // namespace
