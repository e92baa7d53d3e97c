// SPDX-License-Identifier: Apache-2.0
// A kernel that faults takes the device with it: the backend says so and why, and fails fast from then on.
#include <doctest/doctest.h>

#include <bifolio/buffer.hpp>
#include <bifolio/cuda.hpp>
#include <bifolio/error.hpp>
#include <bifolio/tensor_view.hpp>
#include <string>

#include "support/skip.hpp"

using namespace bifolio;

TEST_CASE("an illegal address loses the device and its cause is kept") {
  if (cuda::num_devices() == 0) return test::skip("no CUDA device");
  const auto where = make_backend({device_type::cuda, 0});
  const kv_layout layout = make_layout(layout_kind::hnd, dtype::f32, 1, 8, 4);
  buffer memory(where->memory(), 4096);
  // Bad pointers are not detected: slots far outside of any memory.
  const auto rows = as_const(dense_view(memory.data(), dtype::f32, 1, 1, 8));
  const kv_cache_view kv{memory.as<std::byte>() + 1024, memory.as<std::byte>() + 2048, 4, layout};
  auto* const nowhere = reinterpret_cast<const std::int64_t*>(std::uintptr_t{1} << 46);
  REQUIRE(where->health() == errc::ok);
  CHECK(where->append({kv, rows, rows, nowhere}) == errc::ok);
  CHECK(where->synchronize({}) == errc::device_lost);
  CHECK(where->health() == errc::device_lost);
  CHECK(where->append({kv, rows, rows, nowhere}) == errc::device_lost);
  CHECK(where->download(nullptr, nullptr, 0, {}) == errc::device_lost);
  CHECK(where->description().find("lost") != std::string::npos);
  try {
    (void)where->memory().allocate(16, 16);
    FAIL("a lost device gave memory");
  } catch (const error& e) {
    CHECK(e.code() == errc::device_lost);
    CHECK(std::string(e.what()).find("cudaError") != std::string::npos);
  }
}
