// SPDX-License-Identifier: Apache-2.0
// The models on a GPU say what they say on the CPU, in every setting of the cache, and no sequence attends to its
// neighbours.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "cuda/cuda_llama.hpp"
#include "generation_fixture.hpp"
#include "loaded_model.hpp"
#include "model_fixtures.hpp"
#include "model_kinds.hpp"
#include "reference_files.hpp"
#include "support/random.hpp"
#include "support/skip.hpp"
#include "support/token_ids.hpp"

namespace {

using namespace bifolio::test;
using bifolio::dtype;
using bifolio::layout_kind;
using bifolio::token_id;

using prompt_list = std::vector<std::vector<token_id>>;

/// True where there is nothing to test on, which is then said.
bool nothing_to_run_on() {
  const std::string problem = generate::find_cuda_problem();
  if (problem.empty()) return false;
  skip(problem);
  return true;
}

generation_setup on_cuda(generation_setup setup) {
  setup.device = "cuda";
  return setup;
}

std::vector<std::pair<const char*, generation_setup>> settings_of(const generation_setup& plain) {
  std::vector<std::pair<const char*, generation_setup>> settings;
  const auto with = [&](const char* name, auto change) { change(settings.emplace_back(name, plain).second); };
  with("as it is", [](generation_setup&) {});
  with("nhd, blocks of 5", [](generation_setup& s) { s.layout = layout_kind::nhd, s.block_size = 5; });
  with("x_split", [](generation_setup& s) { s.layout = layout_kind::x_split; });
  with("7 tokens a step", [](generation_setup& s) { s.max_batch_tokens = 7; });
  with("3 sequences a step", [](generation_setup& s) { s.max_batch_seqs = 3; });
  with("3 samples", [](generation_setup& s) { s.num_samples = 3; });
  with("a pool that preempts",
       [](generation_setup& s) { s.num_blocks = bifolio::blocks_for(s.max_positions, s.block_size) + 8; });
  return settings;
}

/// Greedy ids in f32 are `expected` in every setting; in the narrow types they are the CPU's.
void check_greedy(const generate::checkpoint& weights, const prompt_list& prompts, const prompt_list& expected,
                  const generation_setup& plain) {
  for (const auto& named : settings_of(plain)) {
    CAPTURE(named.first);
    const generation_setup& setup = named.second;
    const generation_result got = continue_prompts(weights, prompts, on_cuda(setup));
    REQUIRE(got.outputs.size() == expected.size() * static_cast<std::size_t>(setup.num_samples));
    for (std::size_t i = 0; i < got.outputs.size(); ++i) {
      CAPTURE(i);
      CHECK(got.outputs[i] == expected[i / static_cast<std::size_t>(setup.num_samples)]);
    }
    if (setup.num_blocks < plain.num_blocks) CHECK(got.stats.schedule.num_preemptions > 0);
    if (setup.num_samples > 1) CHECK(got.stats.cache.num_copied_blocks > 0);
    CHECK(got.stats.attention_seconds > 0);
  }
  for (const dtype narrow : {dtype::f16, dtype::bf16}) {
    CAPTURE(std::string(to_string(narrow)));
    generation_setup setup = plain;
    setup.kv_type = narrow;
    setup.num_threads = 0;
    CHECK(continue_prompts(weights, prompts, on_cuda(setup)).outputs ==
          continue_prompts(weights, prompts, setup).outputs);
  }
}

/// What `--device cuda` does unless told otherwise, in another 16-bit type.
generation_setup with_fast_plans(dtype type) {
  generation_setup setup;
  setup.query_type = setup.kv_type = type;
  setup.deterministic = false;
  setup.num_threads = 0;
  return setup;
}

/// Logits after every token of a text, and how probable the model finds it, in every type of queries and cache.
void check_logits(const generate::checkpoint& weights, const std::vector<token_id>& ids) {
  const auto mean_nll = [&](const generation_setup& setup) { return score_text(weights, ids, setup, 64).mean_nll; };
  const double exact = mean_nll({});
  for (const dtype type : bifolio::tensor_dtypes) {
    CAPTURE(std::string(to_string(type)));
    const generation_setup setup = with_fast_plans(type);
    const double worst =
        largest_difference(paged_logits(weights, ids, 64, setup), paged_logits(weights, ids, 64, on_cuda(setup)));
    const double nll = mean_nll(on_cuda(setup));
    MESSAGE("between the CPU and CUDA in " << to_string(type) << ": largest difference of a logit " << worst
                                           << ", of the loss " << nll - mean_nll(setup) << ", to float32 "
                                           << nll - exact);
    CHECK(worst > 0);  // two devices were compared, not one with itself
    CHECK(worst <= logit_bound(weights, ids, type));
    CHECK(std::abs(nll - mean_nll(setup)) <= nll_bound);
    CHECK(std::abs(nll - exact) <= nll_bound);
  }
}

/// Changes the device within `ids`, both ways, in 16-bit types, bf16 in two layouts; returns the kernels that computed
/// it.
std::set<std::string> check_moves(const std::string& name, const generate::checkpoint& weights,
                                  const std::vector<token_id>& ids) {
  std::set<std::string> met;
  for (const dtype type : {dtype::bf16, dtype::f16}) {
    const double bound = logit_bound(weights, ids, type);
    for (const layout_kind layout : {layout_kind::hnd, layout_kind::x_split}) {
      if (layout == layout_kind::x_split && type != dtype::bf16) continue;
      for (const bool back : {false, true}) {
        generation_setup on_cpu = with_fast_plans(type);
        on_cpu.layout = layout;
        const generation_setup there = on_cuda(on_cpu);
        const moved_text moved = move_text(weights, ids, 500, back ? there : on_cpu, back ? on_cpu : there);
        const std::string what = name + ", " + std::string(to_string(type)) + " " + std::string(to_string(layout)) +
                                 (back ? ", CUDA to CPU" : ", CPU to CUDA");
        CAPTURE(what);
        MESSAGE(what << ": largest difference of a logit " << moved.logits_against_begun
                     << " to the device it began on, " << moved.logits_against_ended << " to the other, allowed "
                     << bound << "; of the loss " << moved.nll_against_begun << " and " << moved.nll_against_ended);
        CHECK(moved.equal_bytes);
        CHECK(moved.logits_against_begun > 0);  // it did move
        CHECK(moved.logits_against_begun <= bound);
        CHECK(moved.logits_against_ended <= bound);
        CHECK(moved.nll_against_begun <= nll_bound);
        CHECK(moved.nll_against_ended <= nll_bound);
        met.insert(moved.kernels.begin(), moved.kernels.end());
      }
    }
  }
  return met;
}

void check_likelihoods(const generate::checkpoint& weights, const std::vector<token_id>& ids, double expected) {
  const auto mean_nll = [&](dtype kv_type) {
    generation_setup setup;
    setup.kv_type = kv_type;
    return score_text(weights, ids, on_cuda(setup), 128).mean_nll;
  };
  const double f32 = mean_nll(dtype::f32);
  CHECK(std::abs(f32 - expected) < 1e-5);
  for (const dtype narrow : {dtype::f16, dtype::bf16}) {
    const double moved = mean_nll(narrow) - f32;
    CHECK(moved != 0);  // the narrow types are in use
    CHECK(std::abs(moved) <= 2e-3);
  }
}

void check_reference_model(const char* name) {
  if (nothing_to_run_on()) return;
  const auto reference = find_reference_model(name);
  if (!reference) return skip("the folder of the reference models is absent");
  const auto weights = generate::load_llama2c(reference->weights);
  prompt_list prompts, expected;
  for (const reference_row& row : reference->rows) {
    prompts.push_back(to_ids(row.prompt_ids));
    expected.push_back(to_ids(row.output_ids));
  }
  check_greedy(weights, prompts, expected, {});
  for (const reference_nll& text : reference->texts) {
    check_logits(weights, to_ids(text.ids));
    check_likelihoods(weights, to_ids(text.ids), text.mean);
  }
}

}  // namespace

TEST_CASE("the bundled model says the same on CUDA as on the CPU and as its reference") {
  if (nothing_to_run_on()) return;
  const auto model = generate::load_model(generate::find_bundled_model(), {});
  const auto reference = nlohmann::json::parse(std::ifstream(generate::find_bundled_model() / "reference.json"));
  prompt_list prompts, expected;
  for (const auto& row : reference.at("greedy")) {
    prompts.push_back(to_ids(row.at("prompt_ids").get<std::vector<std::int32_t>>()));
    expected.push_back(to_ids(row.at("output_ids").get<std::vector<std::int32_t>>()));
  }
  generation_setup setup;
  setup.max_positions = 300;  // the reference stops there
  check_greedy(model.weights, prompts, expected, setup);

  const auto& text = reference.at("teacher_forced");
  const auto ids = to_ids(text.at("ids").get<std::vector<std::int32_t>>());
  check_logits(model.weights, ids);
  check_likelihoods(model.weights, ids, text.at("mean_nll").get<double>());
}

TEST_CASE("stories260K says the same on CUDA as its reference") { check_reference_model("stories260K"); }

TEST_CASE("stories15M says the same on CUDA as its reference") { check_reference_model("stories15M"); }

TEST_CASE("a model on CUDA takes queries and cache in bf16 unless it is told otherwise, on the CPU in f32") {
  if (nothing_to_run_on()) return;
  const auto weights = generate::load_hugging_face(tiny_hugging_face("cuda_types", 3));
  const auto workers = generate::make_workers(1);
  using types = generate::attention_types;
  struct row {
    const char* device;
    types named;
    dtype query, kv;
  };
  for (const row& r : std::vector<row>{{"cuda", {}, dtype::bf16, dtype::bf16},
                                       {"cuda", {{}, bifolio::kv_code{dtype::f16}}, dtype::f16, dtype::f16},
                                       {"cuda", {{}, bifolio::kv_code{dtype::f32}}, dtype::f32, dtype::f32},
                                       {"cuda", {dtype::f32, {}}, dtype::f32, dtype::bf16},
                                       {"cpu", {}, dtype::f32, dtype::f32},
                                       {"cpu", {{}, bifolio::kv_code{dtype::bf16}}, dtype::f32, dtype::bf16},
                                       {"cpu", {dtype::bf16, {}}, dtype::bf16, dtype::f32}}) {
    const auto placed = generate::place_model(r.device, weights, *workers, r.named);
    CAPTURE(r.device);
    CHECK(placed.runner->query_type() == r.query);
    CHECK(placed.k_code.type == r.kv);
    CHECK(placed.v_code.type == r.kv);
  }
}

TEST_CASE("a text begun on one device and ended on the other keeps its bytes, and its logits nearly") {
  if (nothing_to_run_on()) return;
  CAPTURE(seed_note());
  const auto bundled = generate::load_model(generate::find_bundled_model(), {});
  const auto reference = nlohmann::json::parse(std::ifstream(generate::find_bundled_model() / "reference.json"));
  auto text = to_ids(reference.at("teacher_forced").at("ids").get<std::vector<std::int32_t>>());
  text.resize(std::min<std::size_t>(text.size(), 700));
  check_moves("the bundled model", bundled.weights, text);
  std::set<std::string> met;
  for (const std::int32_t head_dim : {64, 128}) {
    const model_shape shape{.num_kv_heads = head_dim == 64 ? 2 : 1, .head_dim = head_dim};
    const auto model = generate::load_model(random_hugging_face("cuda_moved", test_seed(), shape), {});
    met.merge(check_moves("random weights, head_dim " + std::to_string(head_dim), model.weights,
                          random_bytes(test_seed(), 700)));
  }
  // The tensor-core kernels computed it, prefill too where this device has that one.
  const auto meets = [&](const std::string& family) {
    return std::any_of(met.begin(), met.end(), [&](const std::string& name) { return name.rfind(family, 0) == 0; });
  };
  CHECK(meets("cuda decode bf16 d64"));
  CHECK(meets("cuda decode f16 d128"));
  CHECK(meets("cuda x_split bf16"));
  const auto where = bifolio::make_backend({bifolio::device_type::cuda, 0});
  for (const std::string& name : where->attention_kernels()) {
    if (name.rfind("cuda prefill bf16 d128", 0) == 0) CHECK(meets("cuda prefill bf16 d128"));
  }
}

TEST_CASE("on CUDA a sequence samples the same text alone, in company and in a batch of another size") {
  if (nothing_to_run_on()) return;
  prompt_list prompts;
  for (std::int32_t p = 0; p < 40; ++p) {
    prompts.emplace_back();
    for (std::int32_t i = 0; i <= p; ++i) prompts.back().push_back(token_id{(p * 37 + i * 11) % 255 + 1});
  }
  const auto check_alone = [&](const generate::checkpoint& weights, dtype type) {
    CAPTURE(std::string(to_string(type)));
    generation_setup setup = on_cuda({});  // with deterministic plans
    setup.query_type = setup.kv_type = type;
    setup.max_positions = 64;
    setup.how = {1.5f, 0.98f};
    setup.seed = 77;
    const generation_result together = continue_prompts(weights, prompts, setup);
    setup.max_batch_seqs = 3;
    CHECK(continue_prompts(weights, prompts, setup).outputs == together.outputs);
    const generation_result alone = continue_prompts(weights, {prompts[0]}, setup);
    CHECK(alone.outputs[0] == together.outputs[0]);  // the same number, and so the same random numbers
  };
  check_alone(generate::load_hugging_face(tiny_hugging_face("cuda_isolation", 11)), dtype::f32);
  // The tensor-core kernels keep the promise as well.
  check_alone(generate::load_hugging_face(random_hugging_face("cuda_isolation_64", 11, {.num_layers = 2})),
              dtype::bf16);
}

TEST_CASE("on CUDA the logits of a step have the same bits for a token alone and at any place of a full batch") {
  if (nothing_to_run_on()) return;
  const auto model = generate::load_model(generate::find_bundled_model(), {});
  const auto workers = generate::make_workers(1);
  const auto placed =
      generate::place_model("cuda", model.weights, *workers, {dtype::f32, bifolio::kv_code{dtype::f32}});
  // Attention over nothing else: what is compared are the model's own layers.
  class own_value final : public generate::attention_layer {
   public:
    own_value(bifolio::backend& where, bifolio::stream_ref stream) : where_(where), stream_(stream) {}
    void run(std::int32_t, const generate::layer_rows& given) override {
      const bifolio::const_tensor_view& q = given.q;
      const bifolio::tensor_view& out = given.out;
      const auto width = static_cast<std::size_t>(out.token_stride);
      std::vector<float> rows(width * static_cast<std::size_t>(out.num_tokens));
      for (std::int64_t t = 0; t < q.num_tokens; ++t) {
        REQUIRE(where_.download(rows.data() + static_cast<std::size_t>(t) * width,
                                static_cast<const float*>(q.data) + t * q.token_stride, width * sizeof(float),
                                stream_) == bifolio::errc::ok);
      }
      REQUIRE(where_.synchronize(stream_) == bifolio::errc::ok);
      REQUIRE(where_.upload(out.data, rows.data(), rows.size() * sizeof(float), stream_) == bifolio::errc::ok);
      REQUIRE(where_.synchronize(stream_) == bifolio::errc::ok);
    }

   private:
    bifolio::backend& where_;
    bifolio::stream_ref stream_;
  } attention(*placed.where, placed.runner->stream());

  const auto vocab = static_cast<std::size_t>(model.weights.config.vocab_size);
  const auto logits_of = [&](std::int32_t num_tokens, std::int32_t place) {
    std::vector<token_id> tokens;
    std::vector<std::int32_t> positions, rows;
    for (std::int32_t i = 0; i < num_tokens; ++i) {
      tokens.push_back(token_id{i == place ? 97 : (i * 31) % 255});
      positions.push_back(i == place ? 42 : i);
      rows.push_back(i);
    }
    const auto all = placed.runner->forward(tokens, positions, rows, attention);
    const auto row = all.subspan(static_cast<std::size_t>(place) * vocab, vocab);
    return std::vector<float>(row.begin(), row.end());
  };
  const std::vector<float> alone = logits_of(1, 0);
  for (const auto& batch :
       std::vector<std::pair<std::int32_t, std::int32_t>>{{2, 1}, {31, 17}, {32, 31}, {33, 32}, {200, 3}, {200, 77}}) {
    CAPTURE(batch.first);   // tokens
    CAPTURE(batch.second);  // the place among them
    CHECK(std::memcmp(logits_of(batch.first, batch.second).data(), alone.data(), vocab * sizeof(float)) == 0);
  }
}

TEST_CASE("a checkpoint of every architecture says on the GPU what transformers says with it") {
  if (nothing_to_run_on()) return;
  for (const std::string kind : gpu_model_kinds) {
    CAPTURE(kind);
    const model_fixture f(kind);
    prompt_list prompts, expected;
    for (const nlohmann::json& row : f.expected.at("rows")) {
      prompts.push_back(ids_in(row, "prompt_ids"));
      expected.push_back(ids_in(row, "output_ids"));
    }
    generation_setup setup = on_cuda({});
    setup.max_positions = f.expected.at("max_positions");
    CHECK(continue_prompts(f.model, prompts, setup).outputs == expected);
    CHECK(worst_logit(f.model, f.expected, setup) < 2e-4);
    // With the kernels that a user gets, attention in bf16.
    setup.query_type = setup.kv_type = dtype::bf16;
    setup.deterministic = false;
    generation_setup on_cpu = setup;
    on_cpu.device = "cpu";
    CHECK(worst_logit(f.model, f.expected, setup) < 3 * worst_logit(f.model, f.expected, on_cpu) + 2e-4);
  }
}
