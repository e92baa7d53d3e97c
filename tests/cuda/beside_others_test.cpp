// SPDX-License-Identifier: Apache-2.0
// Decode whose CTAs wait for one another, beside kernels of other streams that leave it few SMs: it ends, with the bits
// that it has alone.
#include <doctest/doctest.h>

#include <bifolio/cuda.hpp>
#include <memory>
#include <string>
#include <vector>

#include "conformance/attention_case.hpp"
#include "cuda/own_stream.hpp"
#include "support/skip.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

const attention_placement dense{{1, 3, 2}, 0, 0, 0, 0, 0, 0, 0};

attention_case of_one_kv_head(dtype type, std::int32_t head_dim, std::vector<batch_seq> seqs) {
  return {.what = "beside other streams",
          .num_kv_heads = 1,
          .group_size = 8,
          .head_dim = head_dim,
          .q_type = type,
          .kv_type = type,
          .out_type = type,
          .seqs = std::move(seqs)};
}

}  // namespace

TEST_CASE("splits that are combined together give the same bits beside kernels of other streams") {
  const tested_backend* tested = nullptr;
  for (const tested_backend& each : all_backends()) {
    if (each.get().where().type == device_type::cuda) tested = &each;
  }
  if (tested == nullptr) return skip("no CUDA device");
  backend& where = tested->get();

  // A prompt keeps every SM for some 100 µs, longer than a CTA waits for the others.
  const attention_case prompt = of_one_kv_head(dtype::bf16, 128, {{3000, 3000}});
  const attention_contents prompt_contents(prompt);
  attention_call prefill(*tested, prompt, prompt_contents, dense);
  prefill.plan();
  own_stream of_prefill;

  struct decode {
    std::unique_ptr<attention_call> call;
    attention_output alone;
    own_stream stream;
  };
  std::vector<std::unique_ptr<decode>> decodes;
  for (const attention_case& c :
       {of_one_kv_head(dtype::bf16, 128, {{1, 8000}}), of_one_kv_head(dtype::f16, 64, {{1, 20000}}),
        of_one_kv_head(dtype::bf16, 256, {{2, 9000}}), of_one_kv_head(dtype::f32, 128, {{1, 9000}}),
        of_one_kv_head(dtype::bf16, 128, {{1, 3000}, {1, 3000}})}) {
    const attention_contents contents(c);
    auto d = std::make_unique<decode>();
    d->call = std::make_unique<attention_call>(*tested, c, contents, dense);
    d->call->plan();
    REQUIRE(d->call->run() == errc::ok);
    std::string problem;
    d->alone = d->call->read(problem);
    problem += attention_expectation(c, contents)
                   .problem_of(d->alone, tested->numbers_for(c.q_type, c.kv_type, c.out_type, c.head_dim));
    CHECK_MESSAGE(problem.empty(), problem, " [", describe(c), "]");
    decodes.push_back(std::move(d));
  }
  for (int round = 0; round < 30; ++round) {
    for (const auto& d : decodes) d->call->reset_outputs();
    REQUIRE(where.synchronize({}) == errc::ok);
    for (int i = 0; i < 3; ++i) {
      REQUIRE(where.attention(prefill.planned, prefill.params, of_prefill.ref()) == errc::ok);
      for (const auto& d : decodes) {
        for (int again = 0; again < 3; ++again) {
          REQUIRE(where.attention(d->call->planned, d->call->params, d->stream.ref()) == errc::ok);
        }
      }
    }
    REQUIRE(where.synchronize(of_prefill.ref()) == errc::ok);
    for (const auto& d : decodes) {
      REQUIRE(where.synchronize(d->stream.ref()) == errc::ok);
      std::string problem;
      CHECK(bit_difference(d->alone, d->call->read(problem)) == "");
      CHECK(problem.empty());
    }
  }
}
