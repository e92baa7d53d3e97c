// SPDX-License-Identifier: Apache-2.0
// CUDA graphs: a captured attention call replays with the lengths of later plans.
#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <bifolio/cuda.hpp>
#include <string>
#include <vector>

#include "conformance/attention_case.hpp"
#include "support/skip.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

const tested_backend* cuda_backend_under_test() {
  for (const tested_backend& tested : all_backends()) {
    if (tested.get().where().type == device_type::cuda) return &tested;
  }
  return nullptr;
}

class captured_stream {
 public:
  captured_stream() { REQUIRE(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess); }
  ~captured_stream() {
    if (executable_ != nullptr) (void)cudaGraphExecDestroy(executable_);
    (void)cudaStreamDestroy(stream_);
  }
  [[nodiscard]] stream_ref ref() const { return {stream_}; }
  template <class Work>
  void capture(Work work) {
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    work();
    REQUIRE(cudaStreamEndCapture(stream_, &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&executable_, graph, 0) == cudaSuccess);
    REQUIRE(cudaGraphDestroy(graph) == cudaSuccess);
  }
  void replay() {
    REQUIRE(cudaGraphLaunch(executable_, stream_) == cudaSuccess);
    REQUIRE(cudaStreamSynchronize(stream_) == cudaSuccess);
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace

TEST_CASE("a captured attention call replays with the lengths of later plans") {
  const tested_backend* const tested = cuda_backend_under_test();
  if (tested == nullptr) return skip("no CUDA device");
  backend& where = tested->get();
  for (const arrangement layout : {arrangement::hnd, arrangement::x_split}) {
    for (const dtype type : {dtype::bf16, dtype::f32}) {
      attention_case c{.what = "graph replay",
                       .num_kv_heads = 2,
                       .group_size = 4,
                       .head_dim = 128,
                       .block_size = 16,
                       .q_type = type,
                       .kv_type = type,
                       .out_type = type,
                       .layout = layout,
                       .seqs = {{1, 5000}, {1, 3000}, {1, 4100}}};
      const attention_contents contents(c);
      attention_call call(*tested, c, contents);
      cuda::reserve_plan(where, call.planned, call.spec, 3, 3, 5000);
      captured_stream stream;
      where.plan_attention(call.planned, call.spec, call.host_batch, call.num_blocks, stream.ref());
      REQUIRE(where.synchronize(stream.ref()) == errc::ok);
      const std::uint64_t epoch = cuda::graph_epoch(call.planned);
      stream.capture([&] { REQUIRE(where.attention(call.planned, call.params, stream.ref()) == errc::ok); });

      // The same device arrays with other lengths; a truncated sequence attends to fewer of the same tokens.
      for (const std::vector<std::int32_t>& lens :
           {std::vector<std::int32_t>{5000, 3000, 4100}, std::vector<std::int32_t>{1, 2, 600},
            std::vector<std::int32_t>{512, 513, 0}, std::vector<std::int32_t>{4999, 2048, 17}}) {
        host_step_view host = call.host_batch;
        host.seq_lens = lens.data();
        auto* const device_lens = const_cast<std::int32_t*>(call.params.batch.seq_lens);
        REQUIRE(where.upload(device_lens, lens.data(), lens.size() * sizeof(std::int32_t), stream.ref()) == errc::ok);
        where.plan_attention(call.planned, call.spec, host, call.num_blocks, stream.ref());
        REQUIRE(cuda::graph_epoch(call.planned) == epoch);
        REQUIRE(where.synchronize(stream.ref()) == errc::ok);
        call.reset_outputs();
        stream.replay();
        std::string problem;
        const attention_output replayed = call.read(problem);

        // A call of its own over the same device arrays must give the same bits.
        attention_plan fresh;
        where.plan_attention(fresh, call.spec, host, call.num_blocks);
        call.reset_outputs();
        REQUIRE(where.attention(fresh, call.params) == errc::ok);
        REQUIRE(where.synchronize({}) == errc::ok);
        const attention_output direct = call.read(problem);
        CAPTURE(lens[0]);
        CHECK(bit_difference(replayed, direct) == "");
        // And the oracle agrees, given the same queries at their new positions.
        attention_contents cut = contents;
        attention_case cut_case = c;
        const std::size_t row = static_cast<std::size_t>(c.num_kv_heads) * static_cast<std::size_t>(c.head_dim);
        for (std::size_t s = 0; s < lens.size(); ++s) {
          cut_case.seqs[s].seq_len = lens[s];
          cut.seqs[s].k.resize(static_cast<std::size_t>(lens[s]) * row);
          cut.seqs[s].v.resize(static_cast<std::size_t>(lens[s]) * row);
        }
        CHECK(attention_expectation(cut_case, cut).problem_of(replayed, tested->numbers) == "");
      }
    }
  }
}

TEST_CASE("a captured prefill replays with other lengths and another split of its tokens into sequences") {
  const tested_backend* const tested = cuda_backend_under_test();
  if (tested == nullptr) return skip("no CUDA device");
  backend& where = tested->get();
  for (const bool deterministic : {false, true}) {
    attention_case c{.what = "prefill replay",
                     .num_kv_heads = 2,
                     .group_size = 4,
                     .head_dim = 128,
                     .block_size = 16,
                     .q_type = dtype::bf16,
                     .kv_type = dtype::bf16,
                     .out_type = dtype::bf16,
                     .seqs = {{1000, 1500}, {800, 1300}, {1, 500}},
                     .deterministic = deterministic};
    const attention_contents contents(c);
    attention_call call(*tested, c, contents,
                        {{1, 3, 2}, 0, 0, 0, 0, 0, 0, 0});  // rows without gaps, as tensor maps need them
    cuda::reserve_plan(where, call.planned, call.spec, 3, 1801, 1500);
    captured_stream stream;
    where.plan_attention(call.planned, call.spec, call.host_batch, call.num_blocks, stream.ref());
    REQUIRE(where.synchronize(stream.ref()) == errc::ok);
    const std::uint64_t epoch = cuda::graph_epoch(call.planned);
    stream.capture([&] { REQUIRE(where.attention(call.planned, call.params, stream.ref()) == errc::ok); });

    struct step {
      std::vector<std::int32_t> starts, lens;
    };
    bool moved = false;
    for (const step& s : {step{{0, 1000, 1800, 1801}, {1500, 1300, 500}}, step{{0, 1000, 1800, 1801}, {1100, 933, 1}},
                          step{{0, 950, 1800, 1801}, {1400, 1300, 499}}, step{{0, 999, 1800, 1801}, {1499, 822, 17}},
                          step{{0, 1000, 1799, 1800}, {1500, 1300, 500}}}) {
      host_step_view host = call.host_batch;
      host.seq_lens = s.lens.data();
      host.query_start_loc = s.starts.data();
      host.num_tokens = s.starts.back();
      const auto put = [&](const std::int32_t* device, const std::vector<std::int32_t>& values) {
        REQUIRE(where.upload(const_cast<std::int32_t*>(device), values.data(), values.size() * sizeof(std::int32_t),
                             stream.ref()) == errc::ok);
      };
      put(call.params.batch.seq_lens, s.lens);
      put(call.params.batch.query_start_loc, s.starts);
      where.plan_attention(call.planned, call.spec, host, call.num_blocks, stream.ref());
      REQUIRE(where.synchronize(stream.ref()) == errc::ok);
      CAPTURE(s.lens[0]);
      CAPTURE(deterministic);
      if (cuda::graph_epoch(call.planned) != epoch) {
        // The number of tokens is part of a captured prefill; lengths and the split into sequences are not.
        CHECK(host.num_tokens != 1801);
        moved = true;
        continue;
      }
      call.reset_outputs();
      stream.replay();
      std::string problem;
      const attention_output replayed = call.read(problem);
      attention_plan fresh;
      where.plan_attention(fresh, call.spec, host, call.num_blocks);
      attention_params params = call.params;
      params.batch.num_tokens = params.q.num_tokens = params.out.num_tokens = host.num_tokens;
      call.reset_outputs();
      REQUIRE(where.attention(fresh, params) == errc::ok);
      REQUIRE(where.synchronize({}) == errc::ok);
      const attention_output direct = call.read(problem);
      CHECK(bit_difference(replayed, direct) == "");
    }
    CHECK((moved || deterministic));
  }
}

TEST_CASE("append, copies of blocks and merging are capturable too") {
  const tested_backend* const tested = cuda_backend_under_test();
  if (tested == nullptr) return skip("no CUDA device");
  backend& where = tested->get();
  const kv_layout layout = make_layout(layout_kind::hnd, dtype::f32, 1, 8, 4);
  const auto half = static_cast<std::size_t>(4 * layout.block_elements(layout.k)) * sizeof(float);
  buffer cache(where.memory(), 2 * half);
  buffer rows(where.memory(), 2 * 8 * sizeof(float));
  buffer slots(where.memory(), 2 * sizeof(std::int64_t));
  const std::vector<kv_cache_view> layers{{cache.data(), cache.as<std::byte>() + half, 4, layout}};
  const auto view = as_const(dense_view(rows.data(), dtype::f32, 2, 1, 8));
  constexpr block_copy pair{block_id{0}, block_id{3}};
  captured_stream stream;
  stream.capture([&] {
    REQUIRE(where.append({layers[0], view, view, slots.as<std::int64_t>()}, stream.ref()) == errc::ok);
    REQUIRE(where.copy_blocks(layers, {&pair, 1}, stream.ref()) == errc::ok);
  });
  for (const float value : {1.0f, 2.0f}) {
    const std::vector<float> values(16, value);
    const std::vector<std::int64_t> places{1, -1};
    REQUIRE(where.upload(rows.data(), values.data(), 64, stream.ref()) == errc::ok);
    REQUIRE(where.upload(slots.data(), places.data(), 16, stream.ref()) == errc::ok);
    stream.replay();
    float got = 0;
    REQUIRE(where.download(&got, cache.as<float>() + 3 * layout.block_elements(layout.k) + 8, sizeof(got),
                           stream.ref()) == errc::ok);
    REQUIRE(where.synchronize(stream.ref()) == errc::ok);
    CHECK(got == value);
  }
}
