// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <bifolio/bifolio.hpp>
#include <functional>
#include <string>
#include <vector>

namespace bifolio::test {
namespace {

std::string sentence(const std::optional<error>& problem) { return problem ? problem->what() : "none"; }

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// A cache of one layer, rows for it, and the slots that they go to; all good until a case spoils one of them.
struct scene {
  std::unique_ptr<backend> where = make_backend();
  cache_engine engine{*where, {1, 4, make_layout(layout_kind::hnd, dtype::f32, 2, 8, 4)}};
  cache_engine other{*where, {1, 3, make_layout(layout_kind::hnd, dtype::f32, 2, 8, 4)}};
  std::vector<float> k = std::vector<float>(3 * 2 * 8), v = k, out = k;
  std::vector<std::int64_t> slots{0, 5, 15};
  append_params append{engine.layers()[0], dense_view(k.data(), 3, 2, 8), dense_view(v.data(), 3, 2, 8), slots.data()};
  gather_params gather{engine.layers()[0], dense_view(k.data(), 3, 2, 8), dense_view(v.data(), 3, 2, 8), slots.data()};
};

}  // namespace

TEST_CASE("find_problem of append and gather says what the calls refuse, with their code") {
  struct spoiled {
    const char* part;
    std::function<void(scene&, append_params&)> how;
  };
  const std::vector<spoiled> cases{
      {"num_heads of k is 3; the cache has 2 KV heads", [](scene&, append_params& p) { p.k.num_heads = 3; }},
      {"head_dim of v is 7; the cache has 8", [](scene&, append_params& p) { p.v.head_dim = 7; }},
      {"k has 3 rows and v 2", [](scene&, append_params& p) { p.v.num_tokens = 2; }},
      {"the dtype of k is f32 and that of v", [](scene&, append_params& p) { p.v.type = dtype::f16; }},
      {"the dtype of k is u8; it must be one of f32, f16, bf16",
       [](scene&, append_params& p) { p.k.type = dtype::u8; }},
      {"the data pointer of v is null", [](scene&, append_params& p) { p.v.data = nullptr; }},
      {"slot_mapping is null", [](scene&, append_params& p) { p.slot_mapping = nullptr; }},
      {"slot_mapping has the slot 16; the cache has 16 slots", [](scene& s, append_params&) { s.slots[1] = 16; }},
      {"the strides of k, -1 (token)", [](scene&, append_params& p) { p.k.token_stride = -1; }},
      {"num_blocks of kv is -1", [](scene&, append_params& p) { p.kv.num_blocks = -1; }},
      {"kv.v is null", [](scene&, append_params& p) { p.kv.v = nullptr; }},
      {"share memory with the cache", [](scene&, append_params& p) { p.k.data = p.kv.k; }},
      {"K plane and the V plane of kv share memory", [](scene&, append_params& p) { p.kv.v = p.kv.k; }},
      {"0 KV heads", [](scene&, append_params& p) { p.kv.layout.num_kv_heads = 0; }},
      {"head_dim of kv.k is 0", [](scene&, append_params& p) { p.kv.layout.k.head_dim = 0; }},
  };
  for (const spoiled& each : cases) {
    CAPTURE(each.part);
    scene s;
    CHECK(!find_problem(s.append));
    each.how(s, s.append);
    const auto problem = find_problem(s.append);
    REQUIRE(problem);
    CHECK_MESSAGE(has(problem->what(), each.part), problem->what());
    CHECK(s.where->append(s.append) == problem->code());
    CHECK(find_problem(s.append, device{device_type::cuda, 0}).has_value() == (problem->code() != errc::out_of_range));
  }
  scene s;
  CHECK(!find_problem(s.gather));
  s.gather.v.data = s.gather.k.data;
  CHECK(has(sentence(find_problem(s.gather)), "k and v share memory; both are written"));
  CHECK(s.where->gather(s.gather) == errc::invalid_argument);
}

TEST_CASE("rows between one another's rows share nothing, whichever come first") {
  scene s;
  std::vector<float> both(3 * 32);
  for (const std::ptrdiff_t first : {0, 16}) {
    gather_params woven = s.gather;
    woven.k = {both.data() + first, dtype::f32, 3, 2, 8, 32, 8};
    woven.v = {both.data() + 16 - first, dtype::f32, 3, 2, 8, 32, 8};
    CHECK(sentence(find_problem(woven)) == "none");
    woven.v.data = both.data() + (first == 0 ? 15 : 1);
    CHECK(has(sentence(find_problem(woven)), "share"));
  }
}

TEST_CASE("find_problem of copies, conversions, swaps and merges says what the calls refuse") {
  scene s;
  const auto src = s.engine.layers(), dst = s.other.layers();
  const std::vector<block_copy> good{{block_id{0}, block_id{1}}},
      bad{{block_id{0}, block_id{1}}, {block_id{3}, block_id{4}}};
  CHECK(!find_copy_problem(src, good));
  CHECK(has(sentence(find_copy_problem(src, bad)), "pair 1 of copies has the destination 4; blocks there are 0 to 3"));
  CHECK(s.where->copy_blocks(src, bad) == errc::out_of_range);
  CHECK(!find_swap_problem(src, dst, good));
  CHECK(has(sentence(find_swap_problem(dst, src, bad)), "pair 1 of copies has the source 3; blocks there are 0 to 2"));
  CHECK(has(sentence(find_swap_problem(src, {}, good)), "src has 1 layers and dst 0"));
  CHECK(has(sentence(find_swap_problem(src, src, good)), "src and dst share memory"));
  CHECK(!find_convert_problem(src[0], dst[0], good));
  kv_cache_view larger = dst[0];
  larger.layout = make_layout(layout_kind::hnd, dtype::f32, 2, 8, 2);
  CHECK(has(sentence(find_convert_problem(src[0], larger, good)),
            "blocks of src hold 4 tokens of 2 heads, those of dst 2"));
  std::vector<float> lse(6);
  merge_params merge;
  merge.a = merge.b = {dense_view(static_cast<const float*>(s.k.data()), 3, 2, 8), lse.data()};
  merge.out = dense_view(s.out.data(), 3, 2, 8);
  CHECK(!find_problem(merge));
  merge.b.lse = nullptr;
  CHECK(has(sentence(find_problem(merge)), "the lse of b is null"));
  CHECK(s.where->merge_states(merge) == errc::invalid_argument);
}

TEST_CASE("a step of a model's cache explains its layers") {
  const auto where = make_backend();
  model_cache cache(*where, {.num_layers = 2,
                             .attention = {.num_q_heads = 2, .num_kv_heads = 2, .qk_head_dim = 8},
                             .cache = {.block_size = 4, .num_blocks = 8},
                             .zero_fill = true});
  for (const kv_cache_view& layer : cache.engine().layers()) {
    const auto* const first = static_cast<const float*>(layer.k);
    CHECK(std::all_of(first, first + 8 * 2 * 2 * 8 * 4, [](float value) { return value == 0; }));
  }
  const std::vector<token_id> tokens{token_id{1}, token_id{2}};
  const seq_id seq = cache.open(tokens).seq;
  std::vector<float> rows(2 * 2 * 8), out(rows);
  const auto view = dense_view(std::span<const float>(rows), 2, 8);
  attention_params params;
  params.q = view;
  params.out = dense_view(std::span<float>(out), 2, 8);
  model_step step = cache.begin_step({{seq, tokens}});
  CHECK(!step.find_problem(0, params, view, view));
  CHECK(has(sentence(step.find_problem(2, params, view, view)), "layer 2 is not there; the model has 2"));
  CHECK(step.attend(2, params, view, view) == errc::out_of_range);
  const_tensor_view one = view;
  one.num_tokens = 1;
  CHECK(has(sentence(step.find_problem(0, params, one, one)), "k has 1 rows; the step has 2 tokens"));
  params.soft_cap = -1;
  CHECK(has(sentence(step.find_problem(0, params, view, view)), "soft_cap is -1"));
  step.commit();
  CHECK(has(sentence(step.find_problem(0, params, view, view)), "the step is empty"));
}

TEST_CASE(
    "a batch is refused by an engine of another block size or of fewer blocks, and a plan with a wrong sum by the "
    "manager") {
  const auto where = make_backend();
  kv_cache_manager manager({.block_size = 4, .num_blocks = 8});
  const seq_id seq = manager.allocate(3).seq;
  step_plan plan;
  plan.seqs = {{seq, 3, 3}};
  step_batch batch;
  manager.build(batch, plan);  // num_tokens need not be set
  CHECK(batch.block_size == 4);
  CHECK(batch.num_blocks == 8);
  CHECK(batch.view().num_tokens == 3);
  plan.num_tokens = 2;
  CHECK_THROWS_WITH_AS(manager.build(batch, plan),
                       "num_tokens of the plan is 2; its sequences compute 3 tokens, so it must be that, or 0", error);
  plan.num_tokens = 3;
  manager.build(batch, plan);
  cache_engine alike(*where, {1, 8, make_layout(layout_kind::hnd, dtype::f32, 1, 8, 4)});
  CHECK(alike.upload(batch).num_tokens == 3);
  cache_engine small(*where, {1, 7, make_layout(layout_kind::hnd, dtype::f32, 1, 8, 4)});
  CHECK_THROWS_WITH_AS((void)small.upload(batch),
                       "the batch is of a manager with 8 blocks of 4 tokens; the engine has 7 of 4", error);
  cache_engine other(*where, {1, 8, make_layout(layout_kind::hnd, dtype::f32, 1, 8, 2)});
  CHECK_THROWS_WITH_AS((void)other.upload(batch),
                       "the batch is of a manager with 8 blocks of 4 tokens; the engine has 8 of 2", error);
}

TEST_CASE("spans and half types have views") {
  static_assert(element_type<__half> == dtype::f16 && element_type<__nv_bfloat16> == dtype::bf16);
  std::vector<bfloat16> rows(5 * 3 * 8 + 7);
  const tensor_view view = dense_view(std::span<bfloat16>(rows), 3, 8);
  CHECK(view.type == dtype::bf16);
  CHECK(view.num_tokens == 5);
  CHECK(view.token_stride == 24);
  const const_tensor_view read = dense_view(std::span<const bfloat16>(rows), 3, 8);
  CHECK(read.data == rows.data());
#if defined(__FLT16_MAX__) && (defined(__x86_64__) || defined(__clang__) || __GNUC__ >= 13)
  __extension__ typedef _Float16 compilers_half;
  static_assert(element_type<compilers_half> == dtype::f16);
  const compilers_half half[8] = {};
  CHECK(dense_view(half, 1, 2, 4).type == dtype::f16);
#endif
#ifdef __STDCPP_FLOAT16_T__
  static_assert(element_type<std::float16_t> == dtype::f16);
#endif
#ifdef __STDCPP_BFLOAT16_T__
  static_assert(element_type<std::bfloat16_t> == dtype::bf16);
#endif
}

#ifdef __cpp_lib_mdspan
TEST_CASE("a view of an mdspan has its extents and strides") {
  std::vector<float> rows(2 * 3 * 8 + 48);
  const tensor_view dense = view_of(std::mdspan<float, std::extents<int, 2, 3, 8>>(rows.data()));
  CHECK(dense.num_tokens == 2);
  CHECK(dense.token_stride == 24);
  CHECK(dense.head_stride == 8);
  using extents = std::dextents<std::int64_t, 3>;
  const std::layout_stride::mapping<extents> every_other(extents(2, 3, 8), std::array<std::int64_t, 3>{48, 8, 1});
  const const_tensor_view slice =
      view_of(std::mdspan<const float, extents, std::layout_stride>(rows.data(), every_other));
  CHECK(slice.token_stride == 48);
  CHECK(slice.num_heads == 3);
}
#endif

}  // namespace bifolio::test
