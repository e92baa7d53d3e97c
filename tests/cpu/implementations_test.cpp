// SPDX-License-Identifier: Apache-2.0
// Which CPU implementation computes a call, on a table of kernels with tile registers, which few machines have.
#include "cpu/implementations.hpp"

#include <doctest/doctest.h>

#include <bifolio/cpu.hpp>
#include <initializer_list>
#include <string>
#include <string_view>

#include "cpu/isa.hpp"

using namespace bifolio;

namespace {

using loops = cpu::attention_loops;

void no_item(const cpu::attention_args&, const cpu::attention_item&, const cpu::attention_scratch&) noexcept {}

/// With kernels of these loops over bfloat16. They are never run.
cpu::attention_kernels kernels_of(std::initializer_list<loops> present) {
  cpu::attention_kernels kernels = {};
  for (const loops each : present) {
    kernels.items[static_cast<std::size_t>(each)][static_cast<std::size_t>(dtype::bf16)] = {&no_item, &no_item};
  }
  return kernels;
}

struct machine {
  explicit machine(std::initializer_list<loops> present) : kernels(kernels_of(present)) {}

  /// Of K and V of `code`, q and out of bfloat16.
  [[nodiscard]] cpu::attention_problem problem(const kv_code& code, std::int32_t group_size) const {
    return {.table = table,
            .q_type = dtype::bf16,
            .k_code = code,
            .v_code = code,
            .out_type = dtype::bf16,
            .group_size = group_size};
  }
  [[nodiscard]] std::string_view taken(const kv_code& code, std::int32_t group_size, bool has_bias = false) const {
    cpu::attention_problem call = problem(code, group_size);
    call.has_bias = has_bias;
    const cpu::attention_implementation* const found = cpu::implementation_of(call, "");
    return found == nullptr ? "none" : found->name;
  }

  cpu::attention_kernels kernels;
  const cpu::kernel_table& usual = cpu::kernels_for(supported_isas().front());
  cpu::kernel_table table{usual.isa, usual.cache, usual.rotate, kernels};
};

constexpr kv_code bf16{dtype::bf16};
constexpr kv_code e4m3{dtype::e4m3, scale_granularity::layer};
constexpr kv_code i8{dtype::i8, scale_granularity::token_head};
constexpr kv_code u8{dtype::u8, scale_granularity::token_head};

}  // namespace

TEST_CASE("beside tiles, dots takes codes with one or two query heads on a KV head, and tiles those with eight") {
  const machine amx({loops::tiles, loops::dots, loops::vectors});
  for (const kv_code& code : {e4m3, i8}) {
    for (std::int32_t group = 1; group <= 16; ++group) {
      CAPTURE(group);
      CHECK(amx.taken(code, group) == (group <= 2 ? "dots" : group < 8 ? "vectors" : "tiles"));
    }
    CHECK(amx.taken(code, 8, true) == "vectors");
    CHECK(amx.taken(code, 2, true) == "dots");
  }
  CHECK(amx.taken(u8, 2) == "dots");
  CHECK(amx.taken(u8, 8) == "vectors");
  CHECK(amx.taken(bf16, 1) == "tiles");
  CHECK(amx.taken(bf16, 1, true) == "vectors");
}

TEST_CASE("without tiles dots takes bfloat16 and codes, whatever the query heads") {
  const machine avx512({loops::dots, loops::vectors});
  for (const kv_code& code : {bf16, e4m3, i8, u8}) {
    for (const std::int32_t group : {1, 2, 3, 8}) CHECK(avx512.taken(code, group) == "dots");
  }
}

TEST_CASE("a forced dots takes what it accepts beside tiles too, and explain says why it is not asked") {
  const machine amx({loops::tiles, loops::dots, loops::vectors});
  const cpu::attention_problem call = amx.problem(e4m3, 4);
  REQUIRE(cpu::implementation_of(call, "dots") != nullptr);
  CHECK(cpu::implementation_of(call, "dots")->name == "dots");
  CHECK(cpu::explain_implementations(call, "", 1)[1] ==
        "dots is not asked: where there are tiles it is for codes with at most 2 query heads on a KV head");
}
