// SPDX-License-Identifier: Apache-2.0
// Swapping blocks to pinned host memory on one stream while attention runs on another.
#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/backend.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/cuda.hpp>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/own_stream.hpp"
#include "support/device_bytes.hpp"
#include "support/skip.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

/// The least of some runs: the machine's own noise only adds.
template <class Body>
double best_milliseconds(Body body) {
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    body();
    best = std::min(best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

}  // namespace

// tools/gpu-check runs the suite `timing` when nothing else is on the device.
TEST_CASE("swapping blocks out on one stream and attention on another take less time together than one after another" *
          doctest::test_suite("timing")) {
  if (cuda::num_devices() == 0) return skip("no CUDA device");
  const auto gpu = make_backend({device_type::cuda, 0});
  backend& where = *gpu;
  for (const std::int32_t block_size : {128, 16}) {
    const kv_layout layout = make_layout(layout_kind::hnd, dtype::bf16, 8, 128, block_size);
    const std::int64_t num_blocks = (std::int64_t{64} << 20) / layout.block_bytes();
    buffer device_pool(where.memory(), static_cast<std::size_t>(num_blocks * layout.block_bytes()));
    buffer host_pool(where.staging_memory(), device_pool.num_bytes());
    std::vector<std::byte> pattern(device_pool.num_bytes());
    for (std::size_t i = 0; i < pattern.size(); ++i) pattern[i] = static_cast<std::byte>(i * 2654435761u >> 24 & 0x3f);
    REQUIRE(where.upload(device_pool.data(), pattern.data(), pattern.size(), {}) == errc::ok);
    std::memset(host_pool.data(), 0, host_pool.num_bytes());
    const auto half = device_pool.num_bytes() / 2;
    const kv_cache_view on_device{device_pool.data(), device_pool.as<std::byte>() + half, num_blocks, layout};
    const kv_cache_view on_host{host_pool.data(), host_pool.as<std::byte>() + half, num_blocks, layout};
    std::vector<block_copy> pairs;
    for (std::int32_t i = 0; i < num_blocks; ++i) {
      pairs.push_back({block_id{i}, block_id{static_cast<std::int32_t>(num_blocks) - 1 - i}});
    }

    // One sequence over the whole pool.
    attention_spec spec;
    spec.num_q_heads = 32;
    spec.num_kv_heads = 8;
    spec.qk_head_dim = spec.v_head_dim = 128;
    spec.block_size = block_size;
    spec.q_type = spec.k_code.type = spec.v_code.type = spec.out_type = dtype::bf16;
    const auto length = static_cast<std::int32_t>(num_blocks * block_size);
    const std::vector<std::int32_t> starts{0, 1};
    const std::vector<std::int32_t> lens{length};
    std::vector<std::int32_t> table(static_cast<std::size_t>(num_blocks));
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(i);
    device_bytes d_starts(where, bytes_of(starts), 4);
    device_bytes d_lens(where, bytes_of(lens), 4);
    device_bytes d_table(where, bytes_of(table), 4);
    buffer rows(where.memory(), 2 * 32 * 128 * 2);
    REQUIRE(where.upload(rows.data(), pattern.data(), rows.num_bytes(), {}) == errc::ok);
    REQUIRE(where.synchronize({}) == errc::ok);
    const host_step_view host{1, 1, starts.data(), lens.data(), table.data(), num_blocks, nullptr};
    own_stream compute;
    own_stream transfer;
    attention_plan plan;
    where.plan_attention(plan, spec, host, num_blocks, compute.ref());
    attention_params p;
    p.q = as_const(dense_view<void>(rows.data(), dtype::bf16, 1, 32, 128));
    p.out = dense_view<void>(rows.as<std::byte>() + 32 * 128 * 2, dtype::bf16, 1, 32, 128);
    p.kv = on_device;
    p.batch = as_device_view(host);
    p.batch.query_start_loc = reinterpret_cast<const std::int32_t*>(d_starts.data());
    p.batch.seq_lens = reinterpret_cast<const std::int32_t*>(d_lens.data());
    p.batch.block_tables = reinterpret_cast<const std::int32_t*>(d_table.data());
    p.scale = 0.01f;

    // Enough calls for about the time of the swap.
    constexpr int calls = 60;
    const auto attend = [&] {
      for (int i = 0; i < calls; ++i) REQUIRE(where.attention(plan, p, compute.ref()) == errc::ok);
    };
    const auto swap = [&] {
      REQUIRE(where.swap_blocks({&on_device, 1}, {&on_host, 1}, pairs, transfer.ref()) == errc::ok);
    };
    const auto wait = [&](const own_stream& stream) { REQUIRE(where.synchronize(stream.ref()) == errc::ok); };
    attend();
    swap();
    wait(compute);
    wait(transfer);
    const double attention_alone = best_milliseconds([&] { attend(), wait(compute); });
    const double swap_alone = best_milliseconds([&] { swap(), wait(transfer); });
    const double together = best_milliseconds([&] {
      swap();
      attend();
      wait(compute);
      wait(transfer);
    });
    const std::string figures = "blocks of " + std::to_string(block_size) + ": attention alone " +
                                std::to_string(attention_alone) + " ms, swap alone " + std::to_string(swap_alone) +
                                " ms, together " + std::to_string(together) + " ms";
    MESSAGE(figures);
    CHECK_MESSAGE(together < 0.95 * (attention_alone + swap_alone), figures);
    const auto block = static_cast<std::size_t>(layout.block_bytes() / 2);
    CHECK(std::memcmp(host_pool.data(), pattern.data() + half - block, block) == 0);
    CHECK(std::memcmp(host_pool.as<std::byte>() + 2 * half - block, pattern.data() + half, block) == 0);
  }
}
