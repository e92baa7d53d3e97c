// SPDX-License-Identifier: Apache-2.0
// Blocks and rows past 2^31 and 2^32 elements, in memory that is only there where it is touched.
#include <doctest/doctest.h>

#include "conformance/attention_tables.hpp"
#include "support/elements.hpp"
#include "support/skip.hpp"
#include "support/sparse_memory.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

// 2 heads · 16 tokens · 64 dims = 2^11 elements a block: block 2^20 starts at element 2^31, block 2^21 at 2^32.
constexpr std::int32_t far_blocks[] = {0,       (1 << 20) - 1, 1 << 20,      (1 << 20) + 1, (1 << 21) - 1,
                                       1 << 21, (1 << 21) + 1, (1 << 21) + 9};

attention_case far_case(dtype type) {
  return {.what = "far blocks",
          .q_type = type,
          .kv_type = type,
          .out_type = type,
          .seqs = {{1, 60}, {30, 60}},
          .alibi = true};
}

}  // namespace

TEST_CASE("attention reads blocks past 2^31 and 2^32 elements like any other") {
  for (const dtype type : {dtype::bf16, dtype::f32}) {
    const attention_case near_case = far_case(type);
    const attention_contents contents(near_case);
    const std::int64_t num_blocks = (std::int64_t{1} << 21) + 10;
    const auto element = static_cast<std::int64_t>(size_of(type));
    sparse_memory memory(
        static_cast<std::size_t>((2 * num_blocks * 2048 + 6 * num_blocks * 2048 + 5 * num_blocks) * element));
    if (memory.data() == nullptr) return skip("this machine gives no sparse mapping of 70 GB");
    for (const arrangement how : {arrangement::hnd, arrangement::nhd, arrangement::x_split, arrangement::block_major}) {
      const arranged_layout arranged = arrange(how, {type, 2, 64, 64, 16}, num_blocks);
      const kv_cache_view far_view{memory.data() + arranged.k_start * element,
                                   memory.data() + arranged.v_start * element, num_blocks, arranged.layout};
      std::vector<std::int32_t> tables;
      for (std::size_t s = 0; s < 2; ++s) {
        for (std::size_t b = 0; b < 4; ++b) tables.push_back(far_blocks[b * 2 + s]);
        for (std::int32_t j = 0; j < 60; ++j) {
          const block_id block{tables[s * 4 + static_cast<std::size_t>(j / 16)]};
          for (std::int32_t h = 0; h < 2; ++h) {
            for (std::int32_t i = 0; i < 64; ++i) {
              const auto from = static_cast<std::size_t>((j * 2 + h) * 64 + i);
              store_element(far_view.k, type, arranged.layout.k.strides.offset(block, h, j % 16, i),
                            contents.seqs[s].k[from]);
              store_element(far_view.v, type, arranged.layout.v.strides.offset(block, h, j % 16, i),
                            contents.seqs[s].v[from]);
            }
          }
        }
      }
      for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(how))) {
        if (!tested->is_host) continue;
        const attention_output expected = run_attention(*tested, near_case, contents);
        attention_call call(*tested, near_case, contents);
        call.params.kv = far_view;
        call.host_batch.block_tables = call.params.batch.block_tables = tables.data();
        call.host_batch.block_table_stride = call.params.batch.block_table_stride = 4;
        call.num_blocks = num_blocks;
        call.plan();
        REQUIRE(call.run() == errc::ok);
        std::string problem;
        const std::string difference = bit_difference(expected, call.read(problem));
        CHECK_MESSAGE(difference.empty(), tested->name, ", ", to_string(how), ", ", to_string(type), ": ", difference);
      }
    }
  }
}

TEST_CASE("rows of q and out may be past 2^31 and 2^32 elements") {
  const attention_case c = far_case(dtype::f16);
  const attention_contents contents(c);
  const std::int64_t tokens = c.num_tokens();
  const std::int64_t stride = (std::int64_t{1} << 32) / tokens + 4097;  // the last rows are past 2^32
  sparse_memory q_memory(static_cast<std::size_t>(stride * tokens) * 2);
  sparse_memory out_memory(static_cast<std::size_t>(stride * tokens) * 2);
  if (q_memory.data() == nullptr || out_memory.data() == nullptr) return skip("this machine gives no sparse mapping");
  for (const tested_backend* tested : one_per_family(0)) {
    if (!tested->is_host) continue;
    const attention_output expected = run_attention(*tested, c, contents);
    attention_call call(*tested, c, contents);
    const std::int64_t row = c.num_q_heads() * c.head_dim;
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < c.num_q_heads(); ++h) {
        for (std::int64_t i = 0; i < c.head_dim; ++i) {
          const float value = load_element(call.params.q.data, dtype::f16,
                                           t * call.params.q.token_stride + h * call.params.q.head_stride + i);
          store_element(q_memory.data(), dtype::f16, t * stride + h * c.head_dim + i, value);
        }
      }
    }
    call.params.q.data = q_memory.data();
    call.params.out.data = out_memory.data();
    call.params.q.token_stride = call.params.out.token_stride = stride;
    call.params.q.head_stride = call.params.out.head_stride = c.head_dim;
    call.plan();
    REQUIRE(call.run() == errc::ok);
    std::int64_t wrong = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t n = 0; n < row; ++n) {
        const float got = load_element(out_memory.data(), dtype::f16, t * stride + n);
        wrong += got == expected.out[static_cast<std::size_t>(t * row + n)] ? 0 : 1;
      }
    }
    CHECK_MESSAGE(wrong == 0, tested->name);
  }
}
