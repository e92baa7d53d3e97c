// SPDX-License-Identifier: Apache-2.0
// Which of prefill and decode computes a sequence: few rows, many rows, many sequences of some rows, mixed batches.
#include "cuda/host/assignment.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/attention/prefill/plan.hpp"

using namespace bifolio;

namespace {

struct seqs_of {
  std::int32_t query_len, seq_len;
  int count = 1;
};

/// Sequences that go to prefill, of calls with `group` query heads for each of `kv_heads`, on 132 SMs.
std::vector<std::int32_t> of_prefill(std::int32_t group, std::int32_t kv_heads, const std::vector<seqs_of>& batch,
                                     dtype type = dtype::bf16) {
  std::vector<std::int32_t> starts{0};
  std::vector<std::int32_t> query_lens;
  std::vector<std::int32_t> lens;
  for (const seqs_of& s : batch) {
    for (int i = 0; i < s.count; ++i) {
      starts.push_back(starts.back() + s.query_len);
      query_lens.push_back(s.query_len);
      lens.push_back(s.seq_len);
    }
  }
  cuda::plan_input in;
  in.spec.num_q_heads = group * kv_heads;
  in.spec.num_kv_heads = kv_heads;
  in.spec.qk_head_dim = in.spec.v_head_dim = 128;
  in.spec.block_size = 16;
  in.spec.q_type = in.spec.out_type = in.spec.k_code.type = in.spec.v_code.type = type;
  in.num_seqs = static_cast<std::int32_t>(lens.size());
  in.query_start_loc = starts.data();
  in.seq_lens = lens.data();
  in.num_tokens = starts.back();
  in.device.num_sms = 132;
  std::vector<std::int32_t> seqs{-1};
  cuda::choose_prefill_seqs(in, query_lens, seqs);
  return seqs;
}

}  // namespace

TEST_CASE("sequences of at most 16 rows decode") {
  CHECK(of_prefill(4, 8, {{1, 8192, 64}}).empty());
  CHECK(of_prefill(4, 8, {{4, 131072}}).empty());
  CHECK(of_prefill(16, 2, {{1, 8192, 3}, {0, 100}}).empty());
  CHECK(of_prefill(4, 8, {}).empty());
}

TEST_CASE("more rows go to prefill on long contexts, one sequence or many") {
  for (const std::int32_t tokens : {8, 16, 64, 128, 2048}) {
    CAPTURE(tokens);
    CHECK(of_prefill(4, 8, {{tokens, 32768}}).size() == 1);
    CHECK(of_prefill(4, 8, {{tokens, 4096, 64}}).size() == 64);
    CHECK(of_prefill(4, 8, {{tokens, 32768}}, dtype::f32).size() == 1);
    CHECK(of_prefill(4, 8, {{tokens, 4096, 64}}, dtype::f32).size() == 64);
  }
}

TEST_CASE("16 bits beside codes are estimated to cost prefill more, bf16 more than f16") {
  const auto estimate = [](dtype k, dtype v) {
    cuda::plan_input in;
    in.spec.num_q_heads = 32;
    in.spec.num_kv_heads = 8;
    in.spec.qk_head_dim = in.spec.v_head_dim = 128;
    in.spec.block_size = 16;
    in.spec.q_type = in.spec.out_type = dtype::bf16;
    in.spec.k_code.type = k;
    in.spec.v_code.type = v;
    in.device.num_sms = 132;
    return cuda::estimate_prefill(in, 2048, 2048).share_us;
  };
  const double codes = estimate(dtype::e4m3, dtype::e4m3);
  CHECK(codes == estimate(dtype::bf16, dtype::bf16));
  CHECK(estimate(dtype::f16, dtype::e4m3) > codes);
  CHECK(estimate(dtype::bf16, dtype::e4m3) > estimate(dtype::f16, dtype::e4m3));
  CHECK(estimate(dtype::e4m3, dtype::bf16) == estimate(dtype::bf16, dtype::e4m3));
}

TEST_CASE("a mixed batch is one launch where that is estimated to be faster") {
  CHECK(of_prefill(4, 8, {{2048, 2048}, {0, 9}, {1, 4096, 63}}).size() == 64);
  // The device waits for memory either way, or for the longest sequence.
  CHECK(of_prefill(4, 8, {{128, 4096}, {1, 16384, 200}}) == std::vector<std::int32_t>{0});
  CHECK(of_prefill(4, 8, {{2048, 2048}, {1, 200000}}) == std::vector<std::int32_t>{0});
  // Many decodes on few keys: each costs prefill more than its tiles.
  CHECK(of_prefill(4, 8, {{1024, 1024, 4}, {1, 2000, 100}}).size() == 104);
  CHECK(of_prefill(4, 8, {{4096, 4096}, {1, 700, 200}}) == std::vector<std::int32_t>{0});
}
