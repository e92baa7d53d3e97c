// SPDX-License-Identifier: Apache-2.0
// Sequences of calls in which every call into the CUDA runtime fails in turn, once and from then on: the documented
// code or exception, nothing kept, the caller's device and the last-error slot as they were, and a lost device stays
// lost.
#include <doctest/doctest.h>

#include <bifolio/buffer.hpp>
#include <bifolio/cache_engine.hpp>
#include <bifolio/cuda.hpp>
#include <bifolio/rotate_append.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/fake_runtime.hpp"
#include "cuda/host/backend.hpp"
#include "support/random.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

constexpr std::int32_t heads = 2;
constexpr std::int32_t dims = 64;
constexpr std::int32_t block_size = 16;
constexpr std::int64_t num_blocks = 8;

/// A backend, two engines and what steps need, made and used by a sequence of calls that a seed chooses. Everything is
/// made inside the sequence: what fails may be the making.
class sequence {
 public:
  explicit sequence(fake_runtime& runtime) : runtime_(runtime) {}

  /// Makes `num_calls` calls. A refused one is counted, and the sequence goes on with what it has.
  void run(std::uint64_t seed, int num_calls) {
    random_source random(seed);
    for (int n = 0; n < num_calls; ++n) {
      if (backend_ == nullptr) {
        make([&] { backend_ = std::make_unique<cuda::cuda_backend>(runtime_.api(), 0); });
        continue;
      }
      if (engine_ == nullptr || other_ == nullptr || !rows_ || !mark_) {
        make_what_is_missing();
        continue;
      }
      one_call(random);
    }
  }

  /// What is documented for a failed call: these codes, and no exception but `error`.
  std::vector<errc> refusals;
  std::string problem;
  [[nodiscard]] bool is_lost() const { return backend_ != nullptr && backend_->health() == errc::device_lost; }

 private:
  template <class Call>
  void make(Call call) {
    try {
      call();
    } catch (const error& refused) {
      note(refused.code());
    } catch (const std::exception& other) {
      problem = std::string("a call throws something else: ") + other.what();
    }
  }
  void note(errc code) {
    if (code != errc::ok) refusals.push_back(code);
    if (runtime_.current_device != 1) problem = "the caller's device was not restored";
    if (runtime_.last_error != cudaSuccess) problem = "the last-error slot was left";
    const bool now_lost = is_lost();
    if (was_lost_ && !now_lost) problem = "a lost device came back";
    if (was_lost_ && code == errc::ok) problem = "a call on a lost device succeeded";
    was_lost_ = now_lost;
  }

  void make_what_is_missing() {
    const kv_layout layout = make_layout(layout_kind::hnd, dtype::bf16, heads, dims, block_size);
    const cache_engine_config config{2, num_blocks, layout};
    if (engine_ == nullptr) return make([&] { engine_ = std::make_unique<cache_engine>(*backend_, config); });
    if (other_ == nullptr) return make([&] { other_ = std::make_unique<cache_engine>(*backend_, config); });
    if (!rows_) return make([&] { rows_.emplace(backend_->memory(), 3 * 4 * dims * 4); });
    make([&] { mark_.emplace(backend_->make_event()); });
  }

  [[nodiscard]] step_batch batch() const {
    step_batch made;
    made.query_start_loc = {0, 1, 3};
    made.seq_lens = {20, 40};
    made.block_tables = {0, 1, 0, 2, 3, 4};
    made.block_table_stride = 3;
    made.slot_mapping = {19, 70, 71};
    return made;
  }
  [[nodiscard]] static attention_spec spec() {
    attention_spec s;
    s.num_q_heads = 4;
    s.num_kv_heads = heads;
    s.qk_head_dim = s.v_head_dim = dims;
    s.block_size = block_size;
    s.k_code.type = s.v_code.type = dtype::bf16;
    return s;
  }

  [[nodiscard]] errc make_out(buffer& out) {
    try {
      out = buffer(backend_->memory(), 3 * 4 * dims * 4);
      return errc::ok;
    } catch (const error& refused) {
      return refused.code();
    }
  }

  void one_call(random_source& random) {
    const std::vector<block_copy> pairs{{block_id{0}, block_id{4}}, {block_id{1}, block_id{6}}};
    const auto rows = as_const(dense_view(rows_->data(), dtype::f32, 3, heads, dims));
    const std::int64_t slots[] = {19, 70, 71};
    switch (random.between(0, 13)) {
      case 0:
        return make([&] {
          const step_batch host = batch();
          (void)engine_->upload(host);
          note(errc::ok);
        });
      case 1:
        return make([&] {
          const step_batch host = batch();
          backend_->plan_attention(plan_, spec(), host.view(), num_blocks, {});
          note(errc::ok);
        });
      case 2:
        return note(engine_->append(static_cast<std::int32_t>(random.between(0, 1)), rows, rows, slots));
      case 3:
        return note(engine_->copy_blocks(pairs));
      case 4:
        return note(engine_->swap_blocks_to(*other_, pairs));
      case 5: {
        if (plan_.num_seqs == 0) return;
        buffer out;
        if (const errc refused = make_out(out); refused != errc::ok) return note(refused);
        attention_params p;
        p.q = as_const(dense_view(rows_->data(), dtype::f32, 3, 4, dims));
        p.out = dense_view(out.data(), dtype::f32, 3, 4, dims);
        p.kv = engine_->layers()[0];
        const step_batch host = batch();
        p.batch = as_device_view(host.view());
        p.scale = 0.125f;
        return note(backend_->attention(plan_, p, {}));
      }
      case 6:
        return note(backend_->record(*mark_, {}));
      case 7:
        return note(backend_->wait(*mark_, {}));
      case 8:
        return note(mark_->synchronize());
      case 9:
        return note(backend_->synchronize({}));
      case 10:
        return make([&] {
          const buffer made(backend_->staging_memory(), 4096);
          note(errc::ok);
        });
      case 11:
        return note(backend_->clear(rows_->data(), 256, {}));
      case 12: {
        buffer out;
        if (const errc refused = make_out(out); refused != errc::ok) return note(refused);
        const std::int32_t positions[] = {19, 38, 39};
        rotate_append_params p;
        p.append.k = p.append.v = rows;
        p.append.slot_mapping = slots;
        p.q = as_const(dense_view(rows_->data(), dtype::f32, 3, 4, dims));
        p.q_out = dense_view(out.data(), dtype::f32, 3, 4, dims);
        p.rotary = {.rotary_dim = dims,
                    .cos_sin = static_cast<const float*>(rows_->data()),
                    .num_positions = 40,
                    .positions = positions};
        return note(engine_->rotate_append(1, p));
      }
      default:
        engine_.reset();  // frees, and is made again
        return;
    }
  }

  fake_runtime& runtime_;
  std::unique_ptr<backend> backend_;
  std::unique_ptr<cache_engine> engine_, other_;
  std::optional<buffer> rows_;
  std::optional<event> mark_;
  attention_plan plan_;
  bool was_lost_ = false;
};

struct outcome {
  std::string problem;
  std::size_t num_refusals = 0;
  bool is_lost = false;
};

/// One sequence whose `nth` call into the runtime fails with `status`: that one, or it and all that follow.
outcome play(std::uint64_t seed, std::int64_t nth, cudaError_t status, bool for_good, bool& reached) {
  fake_runtime runtime;
  runtime.current_device = 1;
  runtime.fail_at(nth, status, for_good);
  outcome result;
  {
    sequence calls(runtime);
    calls.run(seed, 24);
    result = {calls.problem, calls.refusals.size(), calls.is_lost()};
    for (const errc code : calls.refusals) {
      const bool expected = code == cuda::to_errc(status) || code == errc::device_lost || code == errc::unsupported;
      if (!expected) result.problem = "refused with " + std::string(to_string(code));
    }
  }
  reached = runtime.num_failed > 0;
  if (result.problem.empty() && runtime.live_device_blocks != 0) result.problem = "device memory was kept";
  if (result.problem.empty() && runtime.live_host_blocks != 0) result.problem = "pinned memory was kept";
  if (result.problem.empty() && runtime.live_events != 0) result.problem = "events were kept";
  return result;
}

}  // namespace

TEST_CASE("every call into the runtime may fail, once or for good, in any sequence of calls") {
  MESSAGE(seed_note());
  std::int64_t num_sequences = 0;
  for (const cudaError_t status : {cudaErrorMemoryAllocation, cudaErrorInvalidValue, cudaErrorIllegalAddress}) {
    for (const bool for_good : {false, true}) {
      for (std::uint64_t n = 0; n < 8; ++n) {
        const std::uint64_t seed = hash_of(test_seed(), n);
        bool reached = true;
        for (std::int64_t nth = 1; reached; ++nth, ++num_sequences) {
          CAPTURE(static_cast<int>(status));
          CAPTURE(for_good);
          CAPTURE(n);
          CAPTURE(nth);
          const outcome got = play(seed, nth, status, for_good, reached);
          REQUIRE(got.problem == "");
          if (reached && for_good) CHECK(got.num_refusals > 0);
          REQUIRE(nth < 2000);
        }
      }
    }
  }
  MESSAGE(num_sequences, " sequences");
  CHECK(num_sequences >= 1000);
}
