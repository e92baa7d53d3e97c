// SPDX-License-Identifier: Apache-2.0
// One axis at a time, and long contexts.
#include "conformance/attention_tables.hpp"

#include <string>

#include "conformance/attention_table_parts.hpp"

namespace bifolio::test {
namespace {

std::vector<attention_case> with_dtypes_in_turn(std::vector<attention_case> cases) {
  for (std::size_t n = 0; n < cases.size(); ++n) {
    cases[n].q_type = cases[n].kv_type = cases[n].out_type = dtypes[n % 3];
    cases[n].seed = n + 1;
  }
  return cases;
}

}  // namespace

std::vector<attention_case> decode_cases() {
  return {{.what = "decode", .seqs = {{1, 1}, {1, 17}, {1, 100}}},
          {.what = "decode of one long sequence", .seqs = {{1, 2000}}},
          {.what = "decode around a split", .seqs = {{1, 511}, {1, 512}, {1, 513}, {1, 1023}, {1, 1024}, {1, 1025}}}};
}

std::vector<attention_case> prefill_cases() {
  return {{.what = "prefill", .seqs = {{33, 33}, {1, 1}, {64, 64}}},
          {.what = "prefill, not causal", .seqs = {{33, 33}, {5, 5}}, .causal = false},
          {.what = "prefill of some hundred tokens", .head_dim = 32, .seqs = {{300, 300}}},
          {.what = "prefill over a split", .group_size = 1, .head_dim = 16, .seqs = {{530, 530}}},
          {.what = "chunks", .seqs = {{16, 100}, {7, 64}, {40, 41}}},
          {.what = "a chunk that starts and ends around a split", .head_dim = 16, .seqs = {{40, 530}, {3, 513}}}};
}

std::vector<attention_case> empty_cases() {
  std::vector<attention_case> cases{
      {.what = "empty sequences between others", .seqs = {{0, 0}, {1, 9}, {0, 12}, {3, 3}, {0, 0}}},
      {.what = "nothing but sequences without queries", .seqs = {{0, 0}, {0, 5}}},
      {.what = "queries without keys", .seqs = {{2, 0}, {1, 4}}},
      {.what = "only queries without keys", .seqs = {{70, 0}}},
      {.what = "more queries than keys", .seqs = {{9, 4}, {1, 4}}},
      {.what = "more queries than keys, not causal", .seqs = {{9, 4}, {1, 4}}, .causal = false},
      {.what = "a window that leaves early rows nothing",
       .seqs = {{40, 4}, {1, 4}},
       .causal = false,
       .window_left = 2,
       .window_right = 3},
      {.what = "rows that see only the sink", .seqs = {{9, 4}, {2, 0}}, .sinks = true},
      {.what = "an empty batch", .seqs = {}}};
  return with_dtypes_in_turn(std::move(cases));
}

std::vector<attention_case> head_dim_cases() {
  std::vector<attention_case> cases;
  for (const dtype type : dtypes) {
    for (const std::int32_t head_dim : head_dims) {
      cases.push_back({.what = "head_dim",
                       .group_size = 3,
                       .head_dim = head_dim,
                       .q_type = type,
                       .kv_type = type,
                       .out_type = type,
                       .seqs = usual_batch(),
                       .seed = static_cast<std::uint64_t>(head_dim)});
    }
  }
  for (const std::int32_t head_dim : {1, 2, 3, 15, 17, 33, 257, 576}) {
    cases.push_back({.what = "unusual head_dim", .num_kv_heads = 1, .head_dim = head_dim, .seqs = usual_batch()});
  }
  return cases;
}

std::vector<attention_case> plane_cases() {
  struct plane_shape {
    std::int32_t head_dim, v_head_dim;
    bool v_in_k;
    std::int32_t num_kv_heads, group_size;
  };
  constexpr plane_shape shapes[] = {
      {576, 512, true, 1, 16}, {192, 128, false, 2, 4}, {64, 128, false, 2, 2}, {96, 80, false, 3, 1},
      {33, 17, false, 1, 3},   {17, 33, false, 2, 5},   {33, 17, true, 2, 2},   {64, 64, true, 1, 8},
      {128, 64, true, 1, 20},  {1, 5, false, 2, 2},     {5, 1, true, 1, 2},     {20, 300, false, 1, 2},
      {300, 20, false, 1, 2},  {576, 512, false, 1, 2},
  };
  const auto case_of = [](const plane_shape& shape, std::size_t turn) {
    const bool large = shape.head_dim > 256;
    attention_case c{.what = shape.v_in_k ? "V in K" : "V of another head_dim",
                     .num_kv_heads = shape.num_kv_heads,
                     .group_size = shape.group_size,
                     .head_dim = shape.head_dim,
                     .v_head_dim = shape.v_head_dim,
                     .v_in_k = shape.v_in_k,
                     .q_type = dtypes[turn % num_tensor_dtypes],
                     .kv_type = dtypes[turn % num_tensor_dtypes],
                     .out_type = dtypes[turn % num_tensor_dtypes],
                     .seqs = usual_batch(),
                     .seed = turn + 1};
    if (large) c.seqs = {{1, 70}, {5, 33}, {1, 1}, {1, 129}};
    return c;
  };
  std::vector<attention_case> cases;
  for (const plane_shape& shape : shapes) {
    for (const arrangement layout : all_arrangements) {
      attention_case c = case_of(shape, cases.size());
      c.layout = layout;
      // Every other time queries and outputs are of other types than the cache.
      if (cases.size() / num_tensor_dtypes % 2 != 0) {
        c.q_type = dtypes[(cases.size() + 1) % num_tensor_dtypes];
        c.out_type = dtypes[(cases.size() + 2) % num_tensor_dtypes];
      }
      if (cases.size() % 5 == 0) c.block_size = 5;
      cases.push_back(std::move(c));
    }
  }
  std::size_t turn = 0;
  for (const named_option& option : all_options()) {
    for (const plane_shape& shape : {shapes[0], shapes[3], shapes[5], shapes[6]}) {
      attention_case c = case_of(shape, turn++);
      c.what += std::string(", ") + option.name;
      option.apply(c);
      cases.push_back(std::move(c));
    }
  }
  // Long enough for several splits of the keys, and for work that is shared out.
  for (const dtype type : dtypes) {
    attention_case c = case_of(shapes[0], static_cast<std::size_t>(type));
    c.seqs = {{1, 1500}, {1, 513}};
    cases.push_back(c);
    c = case_of(shapes[6], static_cast<std::size_t>(type));
    c.seqs = {{1, 2000}, {40, 700}, {200, 200}};
    cases.push_back(c);
  }
  return cases;
}

std::vector<attention_case> block_size_cases() {
  std::vector<attention_case> cases;
  for (const std::int32_t block_size : block_sizes) {
    for (const dtype type : {dtype::f32, dtype::bf16}) {
      cases.push_back({.what = "block_size",
                       .head_dim = 32,
                       .block_size = block_size,
                       .q_type = type,
                       .kv_type = type,
                       .out_type = type,
                       .seqs = usual_batch()});
    }
  }
  cases.push_back(
      {.what = "a block longer than the sequence", .head_dim = 32, .block_size = 700, .seqs = usual_batch()});
  return cases;
}

std::vector<attention_case> group_cases() {
  std::vector<attention_case> cases;
  for (const std::int32_t group : group_sizes) {
    for (const std::int32_t kv_heads : {1, 3}) {
      cases.push_back(
          {.what = "group_size", .num_kv_heads = kv_heads, .group_size = group, .head_dim = 32, .seqs = usual_batch()});
    }
  }
  cases.push_back({.what = "group of 71", .num_kv_heads = 1, .group_size = 71, .head_dim = 64, .seqs = usual_batch()});
  cases.push_back(
      {.what = "many KV heads", .num_kv_heads = 32, .group_size = 1, .head_dim = 16, .seqs = usual_batch()});
  return with_dtypes_in_turn(std::move(cases));
}

std::vector<attention_case> length_cases() {
  std::vector<attention_case> cases;
  std::vector<batch_seq> all;
  for (const std::int32_t length : lengths) all.push_back({length > 0 ? 1 : 0, length});
  for (const dtype type : dtypes) {
    cases.push_back({.what = "all lengths in one batch",
                     .q_type = type,
                     .kv_type = type,
                     .out_type = type,
                     .seqs = all,
                     .seed = 3});
  }
  for (const std::int32_t length : lengths) {
    cases.push_back({.what = "prefill length", .head_dim = 16, .seqs = {{std::min(length, 150), length}}});
  }
  return cases;
}

std::vector<attention_case> dtype_cases() {
  std::vector<attention_case> cases;
  for (const dtype q : dtypes) {
    for (const dtype kv : dtypes) {
      for (const dtype out : dtypes) {
        cases.push_back({.what = "dtypes",
                         .head_dim = 40,
                         .q_type = q,
                         .kv_type = kv,
                         .out_type = out,
                         .seqs = usual_batch(),
                         .seed = cases.size() + 1});
      }
    }
  }
  return cases;
}

std::vector<attention_case> layout_cases() {
  std::vector<attention_case> cases;
  for (const arrangement layout : all_arrangements) {
    for (const dtype type : dtypes) {
      cases.push_back({.what = "layout",
                       .num_kv_heads = 3,
                       .head_dim = 48,
                       .q_type = type,
                       .kv_type = type,
                       .out_type = type,
                       .layout = layout,
                       .seqs = usual_batch()});
    }
    cases.push_back({.what = "layout of an odd shape",
                     .num_kv_heads = 3,
                     .head_dim = 71,
                     .block_size = 5,
                     .q_type = dtype::bf16,
                     .kv_type = dtype::bf16,
                     .layout = layout,
                     .seqs = usual_batch()});
  }
  return cases;
}

std::vector<attention_case> option_cases() {
  std::vector<attention_case> cases;
  for (const auto& [name, apply] : all_options()) {
    for (const dtype type : {dtype::f32, dtype::bf16}) {
      attention_case c{.what = std::string("option: ") + name,
                       .head_dim = 32,
                       .q_type = type,
                       .kv_type = type,
                       .out_type = type,
                       .seqs = usual_batch()};
      c.seqs.push_back({1, 1100});
      c.seqs.push_back({3, 600});
      apply(c);
      cases.push_back(c);
    }
  }
  return cases;
}

std::vector<attention_case> value_cases() {
  std::vector<attention_case> cases;
  for (const value_kind values : {value_kind::equal_logits, value_kind::dominant_key, value_kind::huge_logits,
                                  value_kind::denormal, value_kind::max_finite}) {
    for (const dtype type : dtypes) {
      for (const dtype out : {type, dtype::f32}) {
        cases.push_back({.what = "extreme values",
                         .head_dim = 32,
                         .q_type = type,
                         .kv_type = type,
                         .out_type = out,
                         .seqs = {{1, 70}, {33, 50}, {1, 1}, {1, 700}, {0, 0}, {3, 3}},
                         .values = values});
      }
    }
  }
  cases.push_back({.what = "results beyond the range of f16 saturate",
                   .kv_type = dtype::bf16,
                   .out_type = dtype::f16,
                   .seqs = {{1, 1}, {4, 4}},
                   .values = value_kind::max_finite});
  cases.push_back({.what = "sinks far above all logits", .seqs = usual_batch(), .scale = 1e-3f, .sinks = true});
  for (const dtype type : dtypes) {
    cases.push_back({.what = "a bias that hides keys and whole rows over several splits",
                     .q_type = type,
                     .kv_type = type,
                     .out_type = type,
                     .seqs = {{12, 1600}, {1, 1100}},
                     .bias = bias_kind::masked});
  }
  return cases;
}

std::vector<attention_case> long_cases(std::uint64_t seed) {
  std::vector<attention_case> cases;
  for (const dtype type : dtypes) {
    cases.push_back({.what = "16 k keys",
                     .head_dim = 128,
                     .q_type = type,
                     .kv_type = type,
                     .out_type = type,
                     .seqs = {{1, 16384}, {5, 16383}, {1, 16385}},
                     .seed = seed});
    cases.push_back({.what = "128 k keys",
                     .num_kv_heads = 1,
                     .head_dim = 64,
                     .q_type = type,
                     .kv_type = type,
                     .out_type = type,
                     .seqs = {{1, 131072}, {1, 5}},
                     .sinks = true,
                     .seed = seed});
    cases.push_back({.what = "a whole prefill of 2 k",
                     .num_kv_heads = 1,
                     .group_size = 4,
                     .head_dim = 64,
                     .q_type = type,
                     .kv_type = type,
                     .out_type = type,
                     .seqs = {{2049, 2049}},
                     .seed = seed});
  }
  return cases;
}

}  // namespace bifolio::test
