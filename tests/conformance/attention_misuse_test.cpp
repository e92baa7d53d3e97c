// SPDX-License-Identifier: Apache-2.0
// Each argument of planning, attention and merging, wrong in each way it can be: the documented code, a sentence that
// names what was received, nothing written, and everything as usable as before.
#include <doctest/doctest.h>

#include <functional>
#include <limits>
#include <optional>
#include <utility>

#include "conformance/attention_tables.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr std::int32_t largest = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t smallest = std::numeric_limits<std::int32_t>::min();

attention_case sound_case() {
  return {.what = "sound call",
          .head_dim = 16,
          .block_size = 4,
          .kv_type = dtype::bf16,
          .seqs = {{1, 9}, {3, 6}, {1, 5}},
          .alibi = true,
          .sinks = true,
          .bias = bias_kind::full,
          .bias_type = dtype::f16};
}

// Host arrays of a step that a row of the table may bend.
struct step_arrays {
  attention_spec spec;
  std::vector<std::int32_t> starts, lens, tables;
  host_step_view view;
  std::int64_t num_blocks = 0;
};

struct bad_plan {
  const char* what;
  errc code;
  std::vector<const char*> words;  // all of them are in the sentence
  std::function<void(step_arrays&)> bend;
};

const std::vector<bad_plan>& bad_plans() {
  static const std::vector<bad_plan> table{
      {"no query heads", errc::invalid_argument, {"num_q_heads", "0"}, [](auto& a) { a.spec.num_q_heads = 0; }},
      {"negative query heads", errc::invalid_argument, {"num_q_heads", "-4"}, [](auto& a) { a.spec.num_q_heads = -4; }},
      {"no KV heads", errc::invalid_argument, {"num_kv_heads", "0"}, [](auto& a) { a.spec.num_kv_heads = 0; }},
      {"negative KV heads", errc::invalid_argument, {"num_kv_heads", "-2"}, [](auto& a) { a.spec.num_kv_heads = -2; }},
      {"heads ratio not whole",
       errc::invalid_argument,
       {"num_q_heads", "5", "2"},
       [](auto& a) { a.spec.num_q_heads = 5; }},
      {"fewer query heads than KV heads",
       errc::invalid_argument,
       {"num_q_heads", "1", "2"},
       [](auto& a) { a.spec.num_q_heads = 1; }},
      {"qk_head_dim 0", errc::invalid_argument, {"qk_head_dim", "0"}, [](auto& a) { a.spec.qk_head_dim = 0; }},
      {"v_head_dim 0", errc::invalid_argument, {"v_head_dim", "0"}, [](auto& a) { a.spec.v_head_dim = 0; }},
      {"smallest head_dim",
       errc::invalid_argument,
       {"head_dim", "-2147483648"},
       [](auto& a) { a.spec.v_head_dim = smallest; }},
      {"block_size 0", errc::invalid_argument, {"block_size", "0"}, [](auto& a) { a.spec.block_size = 0; }},
      {"negative block_size", errc::invalid_argument, {"block_size", "-16"}, [](auto& a) { a.spec.block_size = -16; }},
      {"unknown q dtype", errc::invalid_argument, {"dtype", "99"}, [](auto& a) { a.spec.q_type = dtype{99}; }},
      {"unknown K dtype",
       errc::invalid_argument,
       {"dtype of k", "99"},
       [](auto& a) { a.spec.k_code.type = dtype{99}; }},
      {"unknown V dtype",
       errc::invalid_argument,
       {"dtype of v", "99"},
       [](auto& a) { a.spec.v_code.type = dtype{99}; }},
      {"K with scales",
       errc::unsupported,
       {"scale per token_head", "K plane is not supported"},
       [](auto& a) { a.spec.k_code.granularity = scale_granularity::token_head; }},
      {"V with scales",
       errc::unsupported,
       {"scale per head", "V plane is not supported"},
       [](auto& a) { a.spec.v_code.granularity = scale_granularity::head; }},
      {"integers without scales",
       errc::unsupported,
       {"code 'i8'", "V plane is not supported", "there are f32, f16, bf16"},
       [](auto& a) { a.spec.v_code.type = dtype::i8; }},
      {"queries that no tensor has",
       errc::invalid_argument,
       {"dtype of q is e5m2", "f32, f16, bf16"},
       [](auto& a) { a.spec.q_type = dtype::e5m2; }},
      {"V as part of K with another code",
       errc::invalid_argument,
       {"the code of V is f16", "must be that of K"},
       [](auto& a) {
         a.spec.v_in_k = true;
         a.spec.v_head_dim = a.spec.qk_head_dim;
         a.spec.v_code.type = dtype::f16;
       }},
      {"V as part of K with more dims",
       errc::invalid_argument,
       {"v_head_dim", "17", "16"},
       [](auto& a) {
         a.spec.v_in_k = true;
         a.spec.v_head_dim = 17;
       }},
      {"unknown output dtype", errc::invalid_argument, {"dtype", "255"}, [](auto& a) { a.spec.out_type = dtype{255}; }},
      {"negative num_seqs", errc::invalid_argument, {"num_seqs", "-1"}, [](auto& a) { a.view.num_seqs = -1; }},
      {"negative num_tokens", errc::invalid_argument, {"num_tokens", "-1"}, [](auto& a) { a.view.num_tokens = -1; }},
      {"num_tokens other than the sum",
       errc::invalid_argument,
       {"num_tokens", "6", "5"},
       [](auto& a) { a.view.num_tokens = 6; }},
      {"starts that do not begin at 0",
       errc::invalid_argument,
       {"query_start_loc", "starts at 9"},
       [](auto& a) { a.starts[0] = 9; }},
      {"starts that decrease", errc::invalid_argument, {"query_start_loc"}, [](auto& a) { a.starts[1] = 5; }},
      {"a negative start", errc::invalid_argument, {"query_start_loc", "-7"}, [](auto& a) { a.starts[1] = -7; }},
      {"a negative seq_len", errc::invalid_argument, {"seq_lens", "-1"}, [](auto& a) { a.lens[1] = -1; }},
      {"null query_start_loc",
       errc::invalid_argument,
       {"query_start_loc", "null"},
       [](auto& a) { a.view.query_start_loc = nullptr; }},
      {"null seq_lens", errc::invalid_argument, {"seq_lens", "null"}, [](auto& a) { a.view.seq_lens = nullptr; }},
      {"null block_tables",
       errc::invalid_argument,
       {"block_tables", "null"},
       [](auto& a) { a.view.block_tables = nullptr; }},
      {"negative block_table_stride",
       errc::invalid_argument,
       {"block_table_stride", "-1"},
       [](auto& a) { a.view.block_table_stride = -1; }},
      {"a length past its table row", errc::out_of_range, {"100"}, [](auto& a) { a.lens[0] = 100; }},
      {"the largest length", errc::out_of_range, {"2147483647"}, [](auto& a) { a.lens[2] = largest; }},
      {"a table row that is too short", errc::out_of_range, {"9"}, [](auto& a) { a.view.block_table_stride = 2; }},
      {"a negative block id", errc::out_of_range, {"-1"}, [](auto& a) { a.tables[0] = -1; }},
      {"a block id of the pool's size",
       errc::out_of_range,
       {"block"},
       [](auto& a) { a.tables[1] = static_cast<std::int32_t>(a.num_blocks); }},
      {"a free table entry within the length",
       errc::out_of_range,
       {"2147480000"},
       [](auto& a) { a.tables[2] = padding_entry; }},
      {"query positions past 2^31",
       errc::invalid_argument,
       {"query_positions", "2147483647", "2147483648"},
       [](auto& a) {
         static const std::vector<std::int32_t> positions(8, largest);
         a.view.query_positions = positions.data();
       }},
      {"an empty pool", errc::out_of_range, {"block"}, [](auto& a) { a.num_blocks = 0; }},
      {"a negative pool", errc::invalid_argument, {"num_blocks", "-3"}, [](auto& a) { a.num_blocks = -3; }},
  };
  return table;
}

struct bad_params {
  const char* what;
  errc code;
  std::vector<const char*> words;
  std::function<void(attention_params&)> bend;
};

template <class Pointer>
Pointer shifted(Pointer pointer, std::ptrdiff_t bytes) {
  return reinterpret_cast<Pointer>(reinterpret_cast<std::uintptr_t>(pointer) + static_cast<std::uintptr_t>(bytes));
}

const std::vector<bad_params>& bad_attention_params() {
  constexpr errc invalid = errc::invalid_argument;
  static const std::vector<bad_params> table{
      {"NaN scale", invalid, {"scale", "nan", "finite"}, [](auto& p) { p.scale = not_a_number; }},
      {"infinite scale", invalid, {"scale", "inf", "finite"}, [](auto& p) { p.scale = -infinity; }},
      {"negative soft cap", invalid, {"soft_cap", "-1"}, [](auto& p) { p.soft_cap = -1; }},
      {"NaN soft cap", invalid, {"soft_cap", "nan"}, [](auto& p) { p.soft_cap = not_a_number; }},
      {"infinite soft cap", invalid, {"soft_cap", "inf"}, [](auto& p) { p.soft_cap = infinity; }},
      {"null q", invalid, {"q", "null"}, [](auto& p) { p.q.data = nullptr; }},
      {"null out", invalid, {"out", "null"}, [](auto& p) { p.out.data = nullptr; }},
      {"null K", invalid, {"kv.k", "null"}, [](auto& p) { p.kv.k = nullptr; }},
      {"null V", invalid, {"kv.v", "null"}, [](auto& p) { p.kv.v = nullptr; }},
      {"null query_start_loc",
       invalid,
       {"query_start_loc", "null"},
       [](auto& p) { p.batch.query_start_loc = nullptr; }},
      {"null seq_lens", invalid, {"seq_lens", "null"}, [](auto& p) { p.batch.seq_lens = nullptr; }},
      {"null block_tables", invalid, {"block_tables", "null"}, [](auto& p) { p.batch.block_tables = nullptr; }},
      {"query positions that were not planned with",
       invalid,
       {"query_positions", "plan"},
       [](auto& p) { p.batch.query_positions = p.batch.seq_lens; }},
      {"q of another dtype", invalid, {"q", "f16", "f32"}, [](auto& p) { p.q.type = dtype::f16; }},
      {"out of another dtype", invalid, {"out", "bf16", "f32"}, [](auto& p) { p.out.type = dtype::bf16; }},
      {"K of another dtype",
       invalid,
       {"dtype of k", "f32", "bf16"},
       [](auto& p) { p.kv.layout.k.code.type = dtype::f32; }},
      {"more tokens in q", invalid, {"q", "6", "5"}, [](auto& p) { p.q.num_tokens = 6; }},
      {"fewer tokens in out", invalid, {"out", "4", "5"}, [](auto& p) { p.out.num_tokens = 4; }},
      {"negative tokens in q", invalid, {"q", "-5", "5"}, [](auto& p) { p.q.num_tokens = -5; }},
      {"other heads in q", invalid, {"q", "2", "4"}, [](auto& p) { p.q.num_heads = 2; }},
      {"other heads in out", invalid, {"out", "8", "4"}, [](auto& p) { p.out.num_heads = 8; }},
      {"other head_dim in q", invalid, {"q", "32", "16"}, [](auto& p) { p.q.head_dim = 32; }},
      {"other head_dim in out", invalid, {"out", "8", "16"}, [](auto& p) { p.out.head_dim = 8; }},
      {"other num_seqs", invalid, {"num_seqs", "2", "3"}, [](auto& p) { p.batch.num_seqs = 2; }},
      {"other num_tokens", invalid, {"num_tokens", "7", "5"}, [](auto& p) { p.batch.num_tokens = 7; }},
      {"negative block_table_stride",
       invalid,
       {"block_table_stride", "-1"},
       [](auto& p) { p.batch.block_table_stride = -1; }},
      {"table rows that are too short",
       errc::out_of_range,
       {"block_table_stride", "2", "3"},
       [](auto& p) { p.batch.block_table_stride = 2; }},
      {"negative token stride in q", invalid, {"q", "-64"}, [](auto& p) { p.q.token_stride = -64; }},
      {"negative head stride in q", invalid, {"q", "-16"}, [](auto& p) { p.q.head_stride = -16; }},
      {"negative token stride in out", invalid, {"out", "-64"}, [](auto& p) { p.out.token_stride = -64; }},
      {"output tokens on top of each other", invalid, {"out", "0"}, [](auto& p) { p.out.token_stride = 0; }},
      {"output heads that overlap", invalid, {"out", "15"}, [](auto& p) { p.out.head_stride = 15; }},
      {"misaligned q", invalid, {"q", "align"}, [](auto& p) { p.q.data = shifted(p.q.data, 1); }},
      {"misaligned out", invalid, {"out", "align"}, [](auto& p) { p.out.data = shifted(p.out.data, 2); }},
      {"misaligned LSE", invalid, {"lse", "align"}, [](auto& p) { p.lse = shifted(p.lse, 2); }},
      {"misaligned K", invalid, {"kv.k", "align"}, [](auto& p) { p.kv.k = shifted(p.kv.k, 1); }},
      {"misaligned V", invalid, {"kv.v", "align"}, [](auto& p) { p.kv.v = shifted(p.kv.v, 1); }},
      {"misaligned slopes",
       invalid,
       {"alibi_slopes", "align"},
       [](auto& p) { p.alibi_slopes = shifted(p.alibi_slopes, 1); }},
      {"misaligned sinks", invalid, {"sinks", "align"}, [](auto& p) { p.sinks = shifted(p.sinks, 3); }},
      {"out on top of q", invalid, {"out", "q"}, [](auto& p) { p.out.data = const_cast<void*>(p.q.data); }},
      {"out over the end of q",
       invalid,
       {"out", "q", "overlap"},
       [](auto& p) { p.out.data = shifted(const_cast<void*>(p.q.data), 4 * 64 * 4); }},
      {"out in front of q and into it",
       invalid,
       {"out", "q", "overlap"},
       [](auto& p) { p.out.data = shifted(const_cast<void*>(p.q.data), -4 * 64 * 4 - 4); }},
      {"out in K", invalid, {"out", "kv.k", "overlap"}, [](auto& p) { p.out.data = p.kv.k; }},
      {"out in V", invalid, {"out", "kv.v", "overlap"}, [](auto& p) { p.out.data = shifted(p.kv.v, 64); }},
      {"the bias in out", invalid, {"out", "bias", "overlap"}, [](auto& p) { p.bias.data = p.out.data; }},
      {"LSE in out",
       invalid,
       {"lse", "out", "overlap"},
       [](auto& p) { p.lse = static_cast<float*>(p.out.data) + 319; }},
      {"LSE in q",
       invalid,
       {"lse", "q", "overlap"},
       [](auto& p) { p.lse = static_cast<float*>(const_cast<void*>(p.q.data)); }},
      {"LSE in K", invalid, {"lse", "kv.k", "overlap"}, [](auto& p) { p.lse = static_cast<float*>(p.kv.k); }},
      {"unknown bias dtype", invalid, {"bias", "dtype", "9"}, [](auto& p) { p.bias.type = dtype{9}; }},
      {"misaligned bias", invalid, {"bias", "align"}, [](auto& p) { p.bias.data = shifted(p.bias.data, 1); }},
      {"bias of other tokens", invalid, {"num_tokens", "bias", "4", "5"}, [](auto& p) { p.bias.num_tokens = 4; }},
      {"bias of no tokens", invalid, {"num_tokens", "bias", "0", "5"}, [](auto& p) { p.bias.num_tokens = 0; }},
      {"bias of other heads", invalid, {"num_heads", "bias", "2", "4"}, [](auto& p) { p.bias.num_heads = 2; }},
      {"bias of too few keys",
       errc::out_of_range,
       {"num_keys", "bias", "8", "9"},
       [](auto& p) { p.bias.num_keys = 8; }},
      {"bias of negative keys",
       errc::out_of_range,
       {"num_keys", "bias", "-1", "9"},
       [](auto& p) { p.bias.num_keys = -1; }},
      {"broadcasting over tokens by a stride of 0",
       invalid,
       {"bias", "token", "stride", "0"},
       [](auto& p) { p.bias.token_stride = 0; }},
      {"broadcasting over heads by a stride of 0",
       invalid,
       {"bias", "head", "stride", "0"},
       [](auto& p) { p.bias.head_stride = 0; }},
      {"negative token stride in the bias",
       invalid,
       {"bias", "stride", "-9"},
       [](auto& p) { p.bias.token_stride = -9; }},
      {"other KV heads", invalid, {"num_kv_heads", "4", "2"}, [](auto& p) { p.kv.layout.num_kv_heads = 4; }},
      {"other head_dim of K", invalid, {"head_dim of k", "8", "16"}, [](auto& p) { p.kv.layout.k.head_dim = 8; }},
      {"other head_dim of V", invalid, {"head_dim of v", "8", "16"}, [](auto& p) { p.kv.layout.v.head_dim = 8; }},
      {"V of another dtype",
       invalid,
       {"dtype of v", "f16", "bf16"},
       [](auto& p) { p.kv.layout.v.code.type = dtype::f16; }},
      {"scales that were not planned",
       invalid,
       {"code of k", "token_head", "bf16"},
       [](auto& p) { p.kv.layout.k.code.granularity = scale_granularity::token_head; }},
      {"V as part of K, which was not planned",
       invalid,
       {"v_in_k", "true"},
       [](auto& p) { p.kv.layout.v_in_k = true; }},
      {"other block_size", invalid, {"block_size", "16", "4"}, [](auto& p) { p.kv.layout.block_size = 16; }},
      {"no chunk", invalid, {"chunk", "0"}, [](auto& p) { p.kv.layout.k.strides.chunk = 0; }},
      {"negative chunk", invalid, {"chunk", "-16"}, [](auto& p) { p.kv.layout.v.strides.chunk = -16; }},
      {"a smaller pool", errc::out_of_range, {"block", "1"}, [](auto& p) { p.kv.num_blocks = 1; }},
      {"a negative pool", errc::invalid_argument, {"num_blocks", "-1"}, [](auto& p) { p.kv.num_blocks = -1; }},
  };
  return table;
}

// Which of `words` is missing in the sentence; empty when all are there.
std::string missing_word(const std::string& sentence, const std::vector<const char*>& words) {
  for (const char* word : words) {
    if (sentence.find(word) == std::string::npos) return word;
  }
  return {};
}

}  // namespace

TEST_CASE("planning refuses each bad argument by name and leaves the plan as it was") {
  const attention_case c = sound_case();
  const attention_contents contents(c);
  for (const tested_backend* tested : one_per_family(0)) {
    attention_call call(*tested, c, contents);
    call.plan();
    REQUIRE(call.run() == errc::ok);
    std::string problem;
    const attention_output expected = call.read(problem);

    for (const bad_plan& bad : bad_plans()) {
      CAPTURE(tested->name);
      CAPTURE(std::string(bad.what));
      step_arrays arrays{call.spec, {}, {}, {}, call.host_batch, call.num_blocks};
      const auto num_seqs = static_cast<std::size_t>(call.host_batch.num_seqs);
      arrays.starts.assign(call.host_batch.query_start_loc, call.host_batch.query_start_loc + num_seqs + 1);
      arrays.lens.assign(call.host_batch.seq_lens, call.host_batch.seq_lens + num_seqs);
      arrays.tables.assign(
          call.host_batch.block_tables,
          call.host_batch.block_tables + num_seqs * static_cast<std::size_t>(call.host_batch.block_table_stride));
      arrays.view.query_start_loc = arrays.starts.data();
      arrays.view.seq_lens = arrays.lens.data();
      arrays.view.block_tables = arrays.tables.data();
      bad.bend(arrays);

      errc code = errc::ok;
      std::string sentence;
      try {
        tested->get().plan_attention(call.planned, arrays.spec, arrays.view, arrays.num_blocks);
      } catch (const error& refusal) {
        code = refusal.code();
        sentence = refusal.what();
      }
      CHECK(to_string(code) == to_string(bad.code));
      const std::string missing = missing_word(sentence, bad.words);
      CHECK_MESSAGE(missing.empty(), "'", missing, "' is missing in: ", sentence);

      call.reset_outputs();
      REQUIRE(call.run() == errc::ok);  // the old plan still serves
      CHECK(bit_difference(expected, call.read(problem)).empty());
    }
  }
}

TEST_CASE("query positions that were planned with must be given") {
  attention_case c = sound_case();
  for (batch_seq& seq : c.seqs) seq.query_position = 0;
  const attention_contents contents(c);
  for (const tested_backend* tested : one_per_family(0)) {
    attention_call call(*tested, c, contents);
    call.plan();
    const std::int32_t* const positions = std::exchange(call.params.batch.query_positions, nullptr);
    CHECK_MESSAGE(call.run() == errc::invalid_argument, tested->name);
    const std::optional<error> problem = find_problem(call.planned, call.params);
    REQUIRE(problem);
    CHECK(std::string(problem->what()).find("query_positions") != std::string::npos);
    CHECK(call.untouched());
    call.params.batch.query_positions = positions;
    CHECK_MESSAGE(call.run() == errc::ok, tested->name);
  }
}

TEST_CASE("planning a shape too large for any memory is refused, not attempted") {
  for (const tested_backend* tested : one_per_family(0)) {
    const std::vector<std::int32_t> starts{0, 1};
    const std::vector<std::int32_t> lens{1};
    const std::vector<std::int32_t> tables{0};
    const host_step_view batch{1, 1, starts.data(), lens.data(), tables.data(), 1, nullptr};
    const attention_spec spec{
        .num_q_heads = 1 << 30, .num_kv_heads = 1, .qk_head_dim = largest, .v_head_dim = largest, .block_size = 16};
    attention_plan plan;
    errc code = errc::ok;
    try {
      tested->get().plan_attention(plan, spec, batch, 1);
    } catch (const error& refusal) {
      code = refusal.code();
    }
    CHECK_MESSAGE((code == errc::invalid_argument || code == errc::unsupported || code == errc::out_of_memory),
                  tested->name, ": ", to_string(code));
    CHECK(plan.state == nullptr);
  }
}

TEST_CASE("attention refuses each bad argument with the code and the sentence of find_problem, and writes nothing") {
  const attention_case c = sound_case();
  const attention_contents contents(c);
  for (const tested_backend* tested : one_per_family(1)) {
    attention_call call(*tested, c, contents, {{1, 3, 2}, 0, 0, 0, 0, 0, 0, 0});
    call.plan();
    const attention_params sound = call.params;
    REQUIRE_FALSE(find_problem(call.planned, sound).has_value());
    for (const bad_params& bad : bad_attention_params()) {
      CAPTURE(tested->name);
      CAPTURE(std::string(bad.what));
      call.params = sound;
      bad.bend(call.params);
      const std::optional<error> problem = find_problem(call.planned, call.params);
      CHECK_MESSAGE(problem.has_value(), "find_problem sees nothing wrong");
      if (!problem.has_value()) continue;  // running it could be anything
      CHECK(to_string(problem->code()) == to_string(bad.code));
      const std::string missing = missing_word(problem->what(), bad.words);
      CHECK_MESSAGE(missing.empty(), "'", missing, "' is missing in: ", problem->what());
      CHECK(to_string(call.run()) == to_string(bad.code));
      CHECK(call.untouched());
    }
    call.params = sound;
    CHECK(call.run() == errc::ok);
  }
}

TEST_CASE("a plan that was never planned is refused") {
  const attention_case c = sound_case();
  const attention_contents contents(c);
  for (const tested_backend* tested : one_per_family(2)) {
    attention_call call(*tested, c, contents);
    const std::optional<error> problem = find_problem(call.planned, call.params);
    REQUIRE(problem.has_value());
    CHECK(to_string(problem->code()) == to_string(errc::failed_precondition));
    CHECK(to_string(call.run()) == to_string(errc::failed_precondition));
    CHECK(call.untouched());
  }
}

TEST_CASE("a plan made for another shape is refused") {
  const attention_case c = sound_case();
  attention_case other = c;
  other.num_kv_heads = 1;
  other.group_size = 4;
  const attention_contents contents(c);
  const attention_contents other_contents(other);
  for (const tested_backend* tested : one_per_family(3)) {
    attention_call call(*tested, c, contents);
    attention_call planned_call(*tested, other, other_contents);
    planned_call.plan();
    call.planned = std::move(planned_call.planned);
    CHECK(to_string(call.run()) == to_string(errc::invalid_argument));
    CHECK(call.untouched());
  }
}

TEST_CASE("a plan made by another backend of the device serves or is refused, and never does something else") {
  const attention_case c = sound_case();
  const attention_contents contents(c);
  for (const tested_backend& planner : all_backends()) {
    for (const tested_backend& runner : all_backends()) {
      if (planner.get().where() != runner.get().where()) continue;
      attention_call call(runner, c, contents);
      planner.get().plan_attention(call.planned, call.spec, call.host_batch, call.num_blocks);
      const errc code = call.run();
      CAPTURE(planner.name);
      CAPTURE(runner.name);
      if (code != errc::ok) {
        CHECK(to_string(code) == to_string(errc::failed_precondition));
        CHECK(call.untouched());
        continue;
      }
      std::string problem;
      const attention_output got = call.read(problem);
      CHECK_MESSAGE(problem.empty(), problem);
      CHECK(bit_difference(run_attention(runner, c, contents), got).empty());
    }
  }
}

TEST_CASE("a batch of nothing is a no-op, even without arrays and data") {
  for (const tested_backend& tested : all_backends()) {
    attention_plan plan;
    const attention_spec spec{.num_q_heads = 2, .num_kv_heads = 1, .qk_head_dim = 8, .v_head_dim = 8, .block_size = 16};
    tested.get().plan_attention(plan, spec, {}, 0);
    attention_params params;
    params.q = dense_view<const void>(nullptr, dtype::f32, 0, 2, 8);
    params.out = dense_view<void>(nullptr, dtype::f32, 0, 2, 8);
    params.kv.layout = make_layout(layout_kind::hnd, dtype::f32, 1, 8, 16);
    params.scale = 1;
    CHECK_MESSAGE(tested.get().attention(plan, params) == errc::ok, tested.name);
  }
}

TEST_CASE("merge_states refuses each bad argument and writes nothing") {
  constexpr std::int64_t tokens = 3;
  constexpr std::int32_t heads = 2;
  constexpr std::int32_t head_dim = 8;
  struct bad_merge {
    const char* what;
    std::function<void(merge_params&)> bend;
  };
  const std::vector<bad_merge> table{
      {"null a", [](auto& p) { p.a.out.data = nullptr; }},
      {"null b", [](auto& p) { p.b.out.data = nullptr; }},
      {"null out", [](auto& p) { p.out.data = nullptr; }},
      {"null LSE of a", [](auto& p) { p.a.lse = nullptr; }},
      {"null LSE of b", [](auto& p) { p.b.lse = nullptr; }},
      {"other tokens in a", [](auto& p) { p.a.out.num_tokens = 2; }},
      {"negative tokens", [](auto& p) { p.a.out.num_tokens = p.b.out.num_tokens = p.out.num_tokens = -1; }},
      {"other heads in b", [](auto& p) { p.b.out.num_heads = 1; }},
      {"other head_dim in out", [](auto& p) { p.out.head_dim = 4; }},
      {"negative head_dim", [](auto& p) { p.a.out.head_dim = p.b.out.head_dim = p.out.head_dim = -8; }},
      {"unknown dtype of a", [](auto& p) { p.a.out.type = dtype{7}; }},
      {"unknown dtype of out", [](auto& p) { p.out.type = dtype{77}; }},
      {"negative token stride", [](auto& p) { p.a.out.token_stride = -16; }},
      {"negative head stride", [](auto& p) { p.b.out.head_stride = -8; }},
      {"output tokens that overlap", [](auto& p) { p.out.token_stride = 0; }},
      {"output heads that overlap", [](auto& p) { p.out.head_stride = 7; }},
      {"misaligned a", [](auto& p) { p.a.out.data = shifted(p.a.out.data, 2); }},
      {"misaligned out", [](auto& p) { p.out.data = shifted(p.out.data, 1); }},
      {"misaligned LSE of b", [](auto& p) { p.b.lse = shifted(p.b.lse, 1); }},
      {"misaligned LSE output", [](auto& p) { p.lse = shifted(p.lse, 2); }},
      {"in place with another dtype",
       [](auto& p) {
         p.out.data = const_cast<void*>(p.a.out.data);
         p.out.type = dtype::bf16;
       }},
      {"in place with other strides",
       [](auto& p) {
         p.out.data = const_cast<void*>(p.b.out.data);
         p.out.token_stride = 24;
       }},
  };
  for (const tested_backend* tested : one_per_family(0)) {
    const auto floats = [&](std::size_t count, float value) {
      return device_bytes(tested->get(), bytes_of(std::vector<float>(count, value)), sizeof(float));
    };
    device_bytes a = floats(tokens * heads * head_dim, 1), b = floats(tokens * heads * head_dim, 2);
    device_bytes out = floats(tokens * heads * head_dim + 8, 3);
    device_bytes lse_a = floats(tokens * heads, 4), lse_b = floats(tokens * heads, 5), lse = floats(tokens * heads, 6);
    const auto as_floats = [](device_bytes& bytes) { return reinterpret_cast<float*>(bytes.data()); };
    const merge_params sound{{dense_view<const void>(a.data(), dtype::f32, tokens, heads, head_dim), as_floats(lse_a)},
                             {dense_view<const void>(b.data(), dtype::f32, tokens, heads, head_dim), as_floats(lse_b)},
                             dense_view<void>(out.data(), dtype::f32, tokens, heads, head_dim),
                             as_floats(lse)};
    for (const bad_merge& bad : table) {
      CAPTURE(tested->name);
      CAPTURE(std::string(bad.what));
      merge_params params = sound;
      bad.bend(params);
      CHECK(to_string(tested->get().merge_states(params)) == to_string(errc::invalid_argument));
      CHECK(out.unchanged());
      CHECK(lse.unchanged());
      CHECK(a.unchanged());
      CHECK(b.unchanged());
    }
    CHECK(tested->get().merge_states(sound) == errc::ok);
    CHECK_FALSE(out.unchanged());
    merge_params nothing;
    nothing.out = dense_view<void>(nullptr, dtype::f32, 0, 2, 8);
    nothing.a.out = nothing.b.out = as_const(nothing.out);
    CHECK_MESSAGE(tested->get().merge_states(nothing) == errc::ok, "a merge of no tokens");
  }
}

TEST_CASE("rows of an output may touch and may not share an element, in whichever order they lie") {
  struct strides {
    std::int64_t tokens;
    std::int32_t heads;
    std::int64_t token_stride, head_stride;
    bool overlap;
  };
  constexpr std::int32_t head_dim = 8;
  constexpr strides table[] = {// The heads of a token together, then the next token's.
                               {3, 2, 16, 8, false},
                               {3, 2, 15, 8, true},
                               {3, 2, 16, 7, true},
                               {3, 2, 20, 12, false},
                               {3, 2, 19, 12, true},
                               // The tokens of a head together, then the next head's.
                               {3, 2, 8, 24, false},
                               {3, 2, 8, 23, true},
                               {3, 2, 7, 24, true},
                               {3, 2, 10, 28, false},
                               {3, 2, 10, 27, true},
                               // A stride that is never taken may be anything.
                               {3, 1, 8, 0, false},
                               {3, 1, 7, 0, true},
                               {1, 2, 0, 8, false},
                               {1, 2, 0, 7, true},
                               {1, 1, 0, 0, false}};
  for (const tested_backend* tested : one_per_family(0)) {
    device_bytes in(tested->get(), bytes_of(std::vector<float>(100, 1)), sizeof(float));
    device_bytes out(tested->get(), bytes_of(std::vector<float>(100, 2)), sizeof(float));
    const auto* const lse = reinterpret_cast<const float*>(in.data());
    for (const strides& one : table) {
      CAPTURE(one.token_stride);
      CAPTURE(one.head_stride);
      const auto from = dense_view<const void>(in.data(), dtype::f32, one.tokens, one.heads, head_dim);
      const tensor_view to{out.data(), dtype::f32, one.tokens, one.heads, head_dim, one.token_stride, one.head_stride};
      CHECK(tested->get().merge_states({{from, lse}, {from, lse}, to, nullptr}) ==
            (one.overlap ? errc::invalid_argument : errc::ok));
    }
  }
}
