// SPDX-License-Identifier: Apache-2.0
// How many rows of a KV head the CPU's plans compute together, which no result depends on.
#include "cpu/attention_plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/backend.hpp>
#include <bifolio/cpu.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/attention/implementations.hpp"

using namespace bifolio;

namespace {

constexpr std::int32_t group = 4;

/// Most rows of an item of `query_len` new tokens, 8 KV heads, with `group` query heads each.
std::int32_t most_rows(backend& where, std::int32_t query_len, std::int32_t seq_len, const char* implementation = "") {
  attention_spec spec;
  spec.num_q_heads = 8 * group;
  spec.num_kv_heads = 8;
  spec.qk_head_dim = spec.v_head_dim = 64;
  spec.block_size = 16;
  spec.q_type = spec.out_type = spec.k_code.type = spec.v_code.type = dtype::bf16;
  spec.implementation = implementation;
  const std::vector<std::int32_t> starts{0, query_len};
  const std::vector<std::int32_t> table(static_cast<std::size_t>(seq_len / 16 + 1), 0);
  attention_plan plan;
  where.plan_attention(
      plan, spec,
      {1, query_len, starts.data(), &seq_len, table.data(), static_cast<std::int64_t>(table.size()), nullptr}, 1);
  const auto* const state = detail::state_of<cpu::cpu_attention_plan>(plan, &cpu::cpu_attention_plan::owner_address);
  REQUIRE(state != nullptr);
  std::int32_t most = 0;
  for (std::int32_t i = 0; i < state->num_items; ++i) most = std::max(most, state->items.data()[i].num_tokens * group);
  return most;
}

std::unique_ptr<backend> open(cpu_isa isa, executor_kind kind, std::int32_t threads) {
  backend_options options;
  options.isa = isa;
  options.executor_choice = kind;
  options.num_threads = threads;
  return make_backend({}, options);
}

bool has_tiles(const backend& where) {
  return std::ranges::any_of(where.attention_kernels(),
                             [](const std::string& kernel) { return kernel.find(" bf16 tiles") != std::string::npos; });
}

}  // namespace

TEST_CASE("prefill takes up to 192 rows of a KV head together, on tile registers 384") {
  for (const cpu_isa isa : supported_isas()) {
    CAPTURE(to_string(isa));
    const auto where = open(isa, executor_kind::serial, 0);
    const std::int32_t rows = most_rows(*where, 512, 2048, "vectors");
    CHECK(rows > 96);
    CHECK(rows <= 192);
    if (!has_tiles(*where)) continue;
    const std::int32_t tile_rows = most_rows(*where, 512, 2048, "tiles");
    CHECK(tile_rows > 192);
    CHECK(tile_rows <= 384);
  }
}

TEST_CASE("prefill takes up to 96 rows together where more would leave fewer than six items a worker") {
  const cpu_isa isa = supported_isas().front();
  const auto one = open(isa, executor_kind::serial, 0);
  const auto many = open(isa, executor_kind::threads, 12);
  // 48 tokens are 192 rows of each of eight KV heads, with keys in one split or in 16.
  CHECK(most_rows(*one, 48, 512) == 192);
  CHECK(most_rows(*many, 48, 512) == 96);
  CHECK(most_rows(*many, 48, 16 * 512) == 192);
}
