// SPDX-License-Identifier: Apache-2.0
#include "conformance/attention_tables.hpp"

#include <algorithm>
#include <functional>
#include <string>

#include "support/covering.hpp"
#include "support/random.hpp"

namespace bifolio::test {
namespace {

// Multiply-adds of the oracle that one case may cost: some tens of milliseconds.
constexpr std::int64_t work_limit = 8'000'000;

enum class batch_kind : std::uint8_t { decode, prefill, chunk, mixed, overhang };
constexpr batch_kind batch_kinds[] = {batch_kind::decode, batch_kind::prefill, batch_kind::chunk, batch_kind::mixed,
                                      batch_kind::overhang};

enum class mask_kind : std::uint8_t { causal, full, left, left_tight, causal_left_right, both_sides, right_only };
constexpr mask_kind mask_kinds[] = {mask_kind::causal,     mask_kind::full,       mask_kind::left,
                                    mask_kind::left_tight, mask_kind::both_sides, mask_kind::causal_left_right,
                                    mask_kind::right_only};

void set_mask(attention_case& c, mask_kind kind) {
  c.causal = kind == mask_kind::causal || kind == mask_kind::left || kind == mask_kind::left_tight ||
             kind == mask_kind::causal_left_right;
  if (kind == mask_kind::left) c.window_left = 40;
  if (kind == mask_kind::left_tight) c.window_left = 0;
  if (kind == mask_kind::causal_left_right) {
    c.window_left = 33;
    c.window_right = 7;
  }
  if (kind == mask_kind::both_sides) {
    c.window_left = 19;
    c.window_right = 5;
  }
  if (kind == mask_kind::right_only) c.window_right = 3;
}

constexpr bias_kind bias_kinds[] = {bias_kind::none,      bias_kind::full,    bias_kind::one_head,
                                    bias_kind::one_token, bias_kind::one_row, bias_kind::masked};

// A query length for a sequence of `seq_len` that keeps the case's work within its limit.
std::int32_t affordable(const attention_case& c, std::int32_t seq_len, std::int32_t wanted) {
  const std::int64_t per_query = static_cast<std::int64_t>(std::max(seq_len, 1)) * c.num_q_heads() * c.head_dim;
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(work_limit / 2 / per_query, 1, std::max(wanted, 1)));
}

std::vector<batch_seq> make_batch(const attention_case& c, batch_kind kind, std::int32_t length,
                                  random_source& random) {
  // Companions are short: they are there to be neighbours.
  const auto companion = [&] { return static_cast<std::int32_t>(random.between(1, 40)); };
  switch (kind) {
    case batch_kind::decode: {
      const std::int32_t other = companion();
      return {{1, other}, {length > 0 ? 1 : 0, length}, {1, companion()}};
    }
    case batch_kind::prefill: {
      const std::int32_t short_length = std::min(length, 200);
      if (affordable(c, short_length, short_length) < short_length) {
        return {{affordable(c, length, 24), length}, {3, 3}};
      }
      return {{short_length, short_length}, {3, 3}};
    }
    case batch_kind::chunk:
      return {{std::min(length, affordable(c, length, 37)), length}, {5, 5 + companion()}};
    case batch_kind::mixed: {
      const std::int32_t prompt = companion();
      return {{prompt, prompt}, {0, length}, {std::min(length, affordable(c, length, 20)), length},
              {1, companion()}, {0, 0},      {1, 1}};
    }
    case batch_kind::overhang:
      return {{affordable(c, length, 12), std::min(length, 9)}, {1, length > 0 ? length : 1}, {4, 0}};
  }
  return {};
}

std::vector<batch_seq> usual_batch() { return {{1, 70}, {33, 50}, {1, 1}, {20, 20}, {1, 129}}; }

std::vector<attention_case> with_dtypes_in_turn(std::vector<attention_case> cases) {
  for (std::size_t n = 0; n < cases.size(); ++n) {
    cases[n].q_type = cases[n].kv_type = cases[n].out_type = dtypes[n % 3];
    cases[n].seed = n + 1;
  }
  return cases;
}

struct named_option {
  const char* name;
  std::function<void(attention_case&)> apply;
};

// Each option alone, and all at once.
std::vector<named_option> all_options() {
  return {
      {"no option", [](attention_case&) {}},
      {"no LSE", [](attention_case& c) { c.lse = false; }},
      {"scale", [](attention_case& c) { c.scale = 0.7f; }},
      {"negative scale", [](attention_case& c) { c.scale = -0.3f; }},
      {"tiny scale", [](attention_case& c) { c.scale = 1e-20f; }},
      {"window left", [](attention_case& c) { c.window_left = 20; }},
      {"window left 0", [](attention_case& c) { c.window_left = 0; }},
      {"window left of a block", [](attention_case& c) { c.window_left = 15; }},
      {"window left beyond the sequence", [](attention_case& c) { c.window_left = 100000; }},
      {"largest windows",
       [](attention_case& c) {
         c.causal = false;
         c.window_left = c.window_right = 0x7fffffff;
       }},
      {"causal with window right", [](attention_case& c) { c.window_right = 4; }},
      {"not causal", [](attention_case& c) { c.causal = false; }},
      {"not causal, window right",
       [](attention_case& c) {
         c.causal = false;
         c.window_right = 4;
       }},
      {"not causal, window right 0",
       [](attention_case& c) {
         c.causal = false;
         c.window_right = 0;
       }},
      {"not causal, windows on both sides",
       [](attention_case& c) {
         c.causal = false;
         c.window_left = 17;
         c.window_right = 6;
       }},
      {"soft cap", [](attention_case& c) { c.soft_cap = 1.5f; }},
      {"soft cap far above the logits", [](attention_case& c) { c.soft_cap = 50; }},
      {"ALiBi", [](attention_case& c) { c.alibi = true; }},
      {"ALiBi, not causal",
       [](attention_case& c) {
         c.alibi = true;
         c.causal = false;
       }},
      {"sinks", [](attention_case& c) { c.sinks = true; }},
      {"bias", [](attention_case& c) { c.bias = bias_kind::full; }},
      {"bias of f16",
       [](attention_case& c) {
         c.bias = bias_kind::full;
         c.bias_type = dtype::f16;
       }},
      {"bias of bf16, not causal",
       [](attention_case& c) {
         c.bias = bias_kind::full;
         c.bias_type = dtype::bf16;
         c.causal = false;
       }},
      {"bias of one head", [](attention_case& c) { c.bias = bias_kind::one_head; }},
      {"bias of one token, window left",
       [](attention_case& c) {
         c.bias = bias_kind::one_token;
         c.window_left = 45;
       }},
      {"bias of one row for all", [](attention_case& c) { c.bias = bias_kind::one_row; }},
      {"bias that hides keys and rows", [](attention_case& c) { c.bias = bias_kind::masked; }},
      {"bias that hides keys and rows, sinks",
       [](attention_case& c) {
         c.bias = bias_kind::masked;
         c.sinks = true;
       }},
      {"bias of the lowest number", [](attention_case& c) { c.bias = bias_kind::lowest; }},
      {"bias of the lowest f16, not causal",
       [](attention_case& c) {
         c.bias = bias_kind::lowest;
         c.bias_type = dtype::f16;
         c.causal = false;
       }},
      {"bias after a soft cap",
       [](attention_case& c) {
         c.bias = bias_kind::full;
         c.soft_cap = 1.5f;
       }},
      {"everything at once",
       [](attention_case& c) {
         c.scale = 0.4f;
         c.soft_cap = 4;
         c.alibi = c.sinks = true;
         c.window_left = 60;
       }},
      {"everything at once, with a bias",
       [](attention_case& c) {
         c.scale = 0.4f;
         c.soft_cap = 4;
         c.alibi = c.sinks = true;
         c.window_left = 60;
         c.bias = bias_kind::full;
         c.bias_type = dtype::f16;
       }},
  };
}

// A case of one 16-bit type that the tensor-core kernels of GPUs take: 16 query heads on 4 KV heads, so that a prefill
// of 128 tokens is worth the prefill kernel.
attention_case half_precision_case(std::string what, dtype type, std::int32_t head_dim) {
  return {.what = std::move(what),
          .num_kv_heads = 4,
          .group_size = 4,
          .head_dim = head_dim,
          .q_type = type,
          .kv_type = type,
          .out_type = type,
          .seqs = {{1, 70}, {128, 128}, {1, 1}, {70, 150}, {3, 90}, {1, 600}},
          .aligned = true,
          .seed = static_cast<std::uint64_t>(head_dim)};
}

constexpr std::int32_t half_precision_dims[] = {64, 128, 256};
constexpr dtype half_precision_types[] = {dtype::f16, dtype::bf16};

// Calls add(type, head_dim) for each shape.
template <class Add>
void for_each_half_precision_shape(const Add& add) {
  for (const dtype type : half_precision_types) {
    for (const std::int32_t head_dim : half_precision_dims) add(type, head_dim);
  }
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
  return cases;
}

std::vector<attention_case> covering_cases(std::uint64_t seed) {
  const auto count = [](const auto& axis) { return std::size(axis); };
  const std::vector<std::size_t> sizes{count(head_dims),
                                       count(block_sizes),
                                       count(group_sizes),
                                       count(lengths),
                                       27,
                                       count(all_arrangements),
                                       count(batch_kinds),
                                       count(mask_kinds),
                                       2,
                                       2,
                                       2,
                                       2,
                                       3,
                                       count(bias_kinds)};
  random_source random(hash_of(seed, 0xc0));
  std::vector<attention_case> cases;
  for (const std::vector<std::size_t>& row : pairwise_rows(sizes, seed)) {
    attention_case c{.what = "covering design, row " + std::to_string(cases.size()),
                     .num_kv_heads = static_cast<std::int32_t>(row[12] + 1),
                     .group_size = group_sizes[row[2]],
                     .head_dim = head_dims[row[0]],
                     .block_size = block_sizes[row[1]],
                     .q_type = dtypes[row[4] % 3],
                     .kv_type = dtypes[row[4] / 3 % 3],
                     .out_type = dtypes[row[4] / 9],
                     .layout = all_arrangements[row[5]],
                     .soft_cap = row[8] != 0 ? 3.0f : 0.0f,
                     .alibi = row[9] != 0,
                     .sinks = row[10] != 0,
                     .lse = row[11] != 0,
                     .deterministic = cases.size() % 2 != 0,
                     .seed = random.next()};
    const std::int32_t length = lengths[row[3]];
    while (c.num_kv_heads > 1 && affordable(c, length, 2) < 2) --c.num_kv_heads;
    // Calls of one dtype have kernels of their own where there is no bias: the few rows of one keep to those.
    if (c.q_type != c.kv_type || c.out_type != c.kv_type) {
      c.bias = bias_kinds[row[13]];
      c.bias_type = dtypes[cases.size() % 3];
    }
    set_mask(c, mask_kinds[row[7]]);
    c.seqs = make_batch(c, batch_kinds[row[6]], length, random);
    cases.push_back(std::move(c));
  }
  return cases;
}

std::vector<attention_case> random_cases(std::uint64_t seed, int count) {
  random_source random(hash_of(seed, 0x7a4d));
  std::vector<attention_case> cases;
  for (int n = 0; n < count; ++n) {
    attention_case c{.what = "random case " + std::to_string(n),
                     .num_kv_heads = static_cast<std::int32_t>(random.between(1, 4)),
                     .group_size = static_cast<std::int32_t>(random.between(1, 9)),
                     .head_dim = static_cast<std::int32_t>(random.between(1, 160)),
                     .block_size = static_cast<std::int32_t>(random.between(1, 70)),
                     .q_type = random.pick(dtypes),
                     .kv_type = random.pick(dtypes),
                     .out_type = random.pick(dtypes),
                     .layout = random.pick(all_arrangements),
                     .causal = !random.one_in(3),
                     .window_left = random.one_in(3) ? static_cast<std::int32_t>(random.between(0, 300)) : -1,
                     .window_right = random.one_in(4) ? static_cast<std::int32_t>(random.between(0, 60)) : -1,
                     .scale = random.one_in(3) ? 0.05f + 0.5f * random.unit() : 0.0f,
                     .soft_cap = random.one_in(3) ? 0.5f + 30.0f * random.unit() : 0.0f,
                     .alibi = random.one_in(3),
                     .sinks = random.one_in(3),
                     .bias = random.one_in(3) ? random.pick(bias_kinds) : bias_kind::none,
                     .bias_type = random.pick(dtypes),
                     .lse = !random.one_in(4),
                     .deterministic = n % 2 != 0,
                     .seed = random.next()};
    const std::int64_t num_seqs = random.between(1, 6);
    for (std::int64_t s = 0; s < num_seqs; ++s) {
      const auto longest = std::vector<std::int64_t>{20, 200, 900}[static_cast<std::size_t>(random.between(0, 2))];
      const auto seq_len = static_cast<std::int32_t>(random.between(0, longest));
      const auto wanted = random.one_in(2) ? 1 : static_cast<std::int32_t>(random.between(0, seq_len + 2));
      c.seqs.push_back({std::min(wanted, affordable(c, seq_len, 150)), seq_len});
    }
    cases.push_back(std::move(c));
  }
  return cases;
}

std::vector<attention_case> random_plane_cases(std::uint64_t seed, int count) {
  random_source random(hash_of(seed, 0x91a0e5));
  std::vector<attention_case> cases = random_cases(seed + 1, count);
  for (attention_case& c : cases) {
    c.what = "planes, " + c.what;
    c.v_in_k = random.one_in(3);
    c.v_head_dim = static_cast<std::int32_t>(random.between(1, c.v_in_k ? c.head_dim : 160));
  }
  return cases;
}

std::vector<attention_case> half_precision_cases(std::uint64_t seed, int count) {
  random_source random(hash_of(seed, 0x16b1));
  const std::vector<std::int32_t> dims{64, 128, 256, 64, 128, 256, 24, 80, 96, 112, 152, 192, 240};
  const std::vector<std::int32_t> groups{1, 1, 2, 3, 4, 4, 7, 8, 16, 71};
  const std::vector<std::int32_t> blocks{1, 5, 8, 16, 16, 16, 32, 64, 128, 256};
  const std::vector<arrangement> layouts{arrangement::hnd, arrangement::hnd, arrangement::nhd, arrangement::padded};
  std::vector<attention_case> cases;
  for (int n = 0; n < count; ++n) {
    const bool options = n % 3 != 0;
    const dtype type = random.one_in(2) ? dtype::bf16 : dtype::f16;
    attention_case c{
        .what = "16-bit case " + std::to_string(n),
        .num_kv_heads = static_cast<std::int32_t>(random.between(1, 3)),
        .group_size = random.pick(groups),
        .head_dim = random.pick(dims),
        .block_size = random.pick(blocks),
        .q_type = type,
        .kv_type = type,
        .out_type = type,
        .layout = random.pick(layouts),
        .causal = !random.one_in(4),
        .window_left = options && random.one_in(3) ? static_cast<std::int32_t>(random.between(0, 400)) : -1,
        .window_right = options && random.one_in(4) ? static_cast<std::int32_t>(random.between(0, 60)) : -1,
        .soft_cap = options && random.one_in(3) ? 0.5f + 30.0f * random.unit() : 0.0f,
        .alibi = options && random.one_in(3),
        .sinks = options && random.one_in(3),
        .bias = options && random.one_in(5) ? random.pick(bias_kinds) : bias_kind::none,
        .bias_type = random.pick(dtypes),
        .lse = !random.one_in(4),
        .deterministic = random.one_in(2),
        .seed = random.next()};
    const std::int64_t num_seqs = random.between(1, 5);
    for (std::int64_t s = 0; s < num_seqs; ++s) {
      const auto longest = std::vector<std::int64_t>{70, 300, 2600}[static_cast<std::size_t>(random.between(0, 2))];
      const auto seq_len = static_cast<std::int32_t>(random.between(0, longest));
      const auto wanted = random.one_in(2) ? 1 : static_cast<std::int32_t>(random.between(0, seq_len + 2));
      c.seqs.push_back({std::min(wanted, affordable(c, seq_len, 300)), seq_len});
    }
    cases.push_back(std::move(c));
  }
  return cases;
}

std::vector<attention_case> half_precision_option_cases() {
  std::vector<attention_case> cases;
  for (const named_option& option : all_options()) {
    for_each_half_precision_shape([&](dtype type, std::int32_t head_dim) {
      attention_case c = half_precision_case(std::string("16-bit option: ") + option.name, type, head_dim);
      option.apply(c);
      // Deterministic plans, and blocks of 16, have kernels of their own on GPUs.
      const std::size_t turn = cases.size();
      c.deterministic = turn % 7 == 2;
      c.block_size = turn % 5 == 1 ? 32 : turn % 5 == 3 ? 8 : 16;
      c.seed = turn + 1;
      cases.push_back(c);
    });
  }
  return cases;
}

std::vector<attention_case> half_precision_value_cases() {
  std::vector<attention_case> cases;
  for (const value_kind values : {value_kind::equal_logits, value_kind::dominant_key, value_kind::huge_logits,
                                  value_kind::denormal, value_kind::max_finite}) {
    for_each_half_precision_shape([&](dtype type, std::int32_t head_dim) {
      attention_case c = half_precision_case("16-bit extreme values", type, head_dim);
      c.values = values;
      cases.push_back(c);
    });
  }
  return cases;
}

std::vector<attention_case> half_precision_length_cases() {
  std::vector<attention_case> cases;
  std::vector<batch_seq> decodes;
  for (const std::int32_t length : lengths) decodes.push_back({length > 0 ? 1 : 0, length});
  for_each_half_precision_shape([&](dtype type, std::int32_t head_dim) {
    attention_case all = half_precision_case("16-bit decodes of all lengths", type, head_dim);
    all.num_kv_heads = 1;
    all.seqs = decodes;
    cases.push_back(all);
    // Around the tiles of the prefill kernels: 64 and 128 rows, 128 keys.
    for (const std::int32_t length : {100, 127, 128, 129, 255, 257}) {
      attention_case c = half_precision_case("16-bit prefill length", type, head_dim);
      c.seqs = {{length, length}, {1, length}};
      cases.push_back(c);
    }
  });
  return cases;
}

std::vector<attention_case> half_precision_shape_cases() {
  std::vector<attention_case> cases;
  const auto add = [&](const char* what, dtype type, std::int32_t head_dim) -> attention_case& {
    cases.push_back(half_precision_case(what, type, head_dim));
    return cases.back();
  };
  for_each_half_precision_shape([&](dtype type, std::int32_t head_dim) {
    for (const std::int32_t block_size : {1, 5, 8, 16, 32, 48, 64, 128, 256}) {
      add("16-bit block_size", type, head_dim).block_size = block_size;
    }
    for (const std::int32_t group : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 32, 33, 71}) {
      attention_case& c = add("16-bit group_size", type, head_dim);
      c.num_kv_heads = group <= 4 ? 4 : group <= 8 ? 2 : 1;
      c.group_size = group;
    }
    for (const arrangement layout : all_arrangements) add("16-bit layout", type, head_dim).layout = layout;
    for (const bool q_differs : {true, false}) {
      for (const dtype other : {dtype::f32, type == dtype::f16 ? dtype::bf16 : dtype::f16}) {
        attention_case& c = add("16-bit KV, another dtype beside it", type, head_dim);
        (q_differs ? c.q_type : c.out_type) = other;
        c.seqs = usual_batch();
      }
    }
  });
  return cases;
}

std::vector<attention_case> padded_head_dim_cases() {
  // The ends of what each padded shape of the tensor-core kernels takes, what models have, and the first beyond.
  constexpr std::int32_t of_16_bits[] = {8,   16,  40,  56,  72,  80,  88,  96,  104, 112,
                                         120, 136, 160, 168, 192, 200, 224, 248, 264};
  constexpr std::int32_t of_f32[] = {4, 16, 60, 64, 68, 80, 96, 128, 132};
  std::vector<attention_case> cases;
  const auto add = [&](dtype type, std::int32_t head_dim) {
    attention_case c = half_precision_case("head_dim", type, head_dim);
    c.seqs = {{1, 70}, {1, 1}, {37, 150}, {3, 90}, {1, 600}, {1, 0}};
    cases.push_back(c);
    c.what = "head_dim, long, in blocks of 5";
    c.group_size = 1;
    c.block_size = 5;
    c.seqs = {{1, 2100}, {1, 17}, {2, 1025}};
    cases.push_back(c);
    c.what = "head_dim, deterministic";
    c.deterministic = true;
    c.layout = arrangement::nhd;
    c.block_size = 16;
    cases.push_back(c);
    c.what = "head_dim, with options";
    c.deterministic = cases.size() / 4 % 2 == 0;
    c.group_size = 3;
    c.window_left = 90;
    c.soft_cap = 4;
    c.alibi = c.sinks = true;
    cases.push_back(c);
  };
  for (const std::int32_t head_dim : of_16_bits) {
    add(dtype::f16, head_dim);
    add(dtype::bf16, head_dim);
  }
  for (const std::int32_t head_dim : of_f32) add(dtype::f32, head_dim);
  // Float32 takes three products of TensorFloat-32 on a GPU.
  for (const value_kind values : {value_kind::equal_logits, value_kind::dominant_key, value_kind::huge_logits,
                                  value_kind::denormal, value_kind::max_finite}) {
    for (const std::int32_t head_dim : {64, 80, 128}) {
      attention_case c = half_precision_case("float32, extreme values", dtype::f32, head_dim);
      c.values = values;
      cases.push_back(c);
    }
  }
  for (const named_option& option : all_options()) {
    attention_case c = half_precision_case(std::string("float32 option: ") + option.name, dtype::f32, 128);
    option.apply(c);
    c.deterministic = cases.size() % 3 == 0;
    cases.push_back(c);
  }
  return cases;
}

std::vector<attention_case> half_precision_batch_cases() {
  // Many sequences of one length: on a GPU of 132 SMs 128 output tiles are split equally, 136 and 264 are cut evenly or
  // not at all.
  std::vector<attention_case> cases;
  for (const std::size_t batch : {16u, 17u, 24u, 33u}) {
    for (const std::int32_t length : {200, 1100}) {
      attention_case c =
          half_precision_case("16-bit batch of equal lengths", cases.size() % 2 == 0 ? dtype::bf16 : dtype::f16, 64);
      c.num_kv_heads = 8;
      c.group_size = 1;
      c.seqs.assign(batch, {1, length});
      cases.push_back(c);
    }
  }
  return cases;
}

std::vector<attention_case> half_precision_transform_cases() {
  // Around the borders of tiles of 64 keys, where masks begin and end, with each transform of logits.
  std::vector<attention_case> cases;
  for_each_half_precision_shape([&](dtype type, std::int32_t head_dim) {
    for (const std::int32_t window : {0, 62, 63, 64, 65, 127, 128, 500}) {
      for (const bool transforms : {false, true}) {
        attention_case c = half_precision_case("16-bit window at a border of tiles", type, head_dim);
        c.num_kv_heads = 1;
        c.seqs = {{1, 64}, {1, 65}, {1, 128}, {1, 129}, {3, 191}, {5, 640}, {1, 700}};
        c.window_left = window;
        c.deterministic = cases.size() % 3 == 0;
        if (transforms) {
          c.alibi = true;
          c.soft_cap = cases.size() % 4 == 1 ? 0.5f : 30.0f;
        }
        if (window == 500) {
          c.causal = false;
          c.window_right = 2;
        }
        c.seed = cases.size() + 1;
        cases.push_back(std::move(c));
      }
    }
    for (const float cap : {0.01f, 1.0f, 50.0f, 1000.0f}) {
      attention_case c = half_precision_case("16-bit soft cap", type, head_dim);
      c.seqs = {{1, 1}, {1, 70}, {2, 300}};
      c.soft_cap = cap;
      c.scale = 1;
      cases.push_back(std::move(c));
    }
  });
  return cases;
}

std::vector<attention_case> prefill_border_cases() {
  // Both sides of every width that has a kernel, and of what its loads ask for.
  const std::vector<std::int32_t> dims{8, 40, 64, 72, 80, 96, 104, 112, 128, 136, 160, 192, 200, 248, 256};
  const std::vector<std::int32_t> blocks{16, 1, 8, 5, 64, 48, 24, 128, 32, 80, 256};
  const std::vector<std::int32_t> groups{4, 1, 3, 2, 1};
  std::vector<named_option> options{
      {"none", [](attention_case&) {}},
      {"soft cap with small arguments", [](attention_case& c) { c.soft_cap = 40; }},
      {"soft cap with middle arguments", [](attention_case& c) { c.soft_cap = 5; }},
      {"soft cap with large arguments", [](attention_case& c) { c.soft_cap = 0.8f; }},
      {"ALiBi", [](attention_case& c) { c.alibi = true; }},
      {"soft cap and ALiBi",
       [](attention_case& c) {
         c.soft_cap = 20;
         c.alibi = true;
       }},
      {"negative scale and ALiBi",
       [](attention_case& c) {
         c.scale = -0.2f;
         c.alibi = true;
       }},
      {"sinks", [](attention_case& c) { c.sinks = true; }},
      {"not causal", [](attention_case& c) { c.causal = false; }},
  };
  const std::size_t num_plain = options.size();
  // Edges of windows before, at and after the edges of tiles of 80, 96 and 128 keys.
  for (const std::int32_t left : {0, 1, 63, 79, 80, 81, 95, 96, 97, 127, 128, 129, 160}) {
    options.push_back({"window left", [left](attention_case& c) { c.window_left = left; }});
    options.push_back({"window left and right", [left](attention_case& c) {
                         c.causal = false;
                         c.window_left = left;
                         c.window_right = 160 - left;
                         c.sinks = left % 2 == 1;
                       }});
  }
  std::vector<attention_case> cases;
  const auto add = [&](dtype type, std::int32_t head_dim, const named_option& option) {
    const std::size_t turn = cases.size();
    attention_case c{.what = std::string("prefill border, ") + option.name,
                     .num_kv_heads = turn % 5 == 1 ? 2 : 1,
                     .group_size = groups[turn % groups.size()],
                     .head_dim = head_dim,
                     .block_size = blocks[turn % blocks.size()],
                     .q_type = type,
                     .kv_type = type,
                     .out_type = type,
                     .layout = turn % 4 == 1 ? arrangement::nhd : arrangement::hnd,
                     .seqs = {{130, 130}, {1, 1}, {0, 20}, {65, 333}, {33, 161 + static_cast<std::int32_t>(turn % 7)}},
                     .aligned = true,
                     .seed = turn + 1};
    option.apply(c);
    cases.push_back(std::move(c));
  };
  for (const dtype type : half_precision_types) {
    for (const std::int32_t head_dim : dims) {
      for (std::size_t n = 0; n < num_plain; ++n) add(type, head_dim, options[n]);
    }
    for (const std::int32_t head_dim : {64, 128, 192, 256}) {
      for (std::size_t n = num_plain; n < options.size(); ++n) add(type, head_dim, options[n]);
    }
    // Every block size meets every width.
    for (const std::int32_t head_dim : {64, 96, 128, 192, 256}) {
      for (const std::int32_t block_size : blocks) {
        add(type, head_dim, options[0]);
        cases.back().block_size = block_size;
        cases.back().layout = arrangement::hnd;
      }
    }
  }
  return cases;
}

std::vector<attention_case> x_split_cases() {
  enum class launch { one_partition, many_rows, partitioned, with_prefills };
  const auto options = all_options();
  const std::vector<std::int32_t> groups{1, 4, 8, 2, 7, 3, 16, 5, 71};
  std::vector<attention_case> cases;
  std::size_t turn = 0;
  for (const dtype type : dtypes) {
    const auto smallest = static_cast<std::int32_t>(16 / size_of(type));
    for (const std::int32_t head_dim : half_precision_dims) {
      for (const std::int32_t block_size : {smallest, 16, 32, 64, 80}) {
        for (const launch kind :
             {launch::one_partition, launch::many_rows, launch::partitioned, launch::with_prefills}) {
          attention_case c{.what = "x_split",
                           .num_kv_heads = 2,
                           .group_size = groups[turn % groups.size()],
                           .head_dim = head_dim,
                           .block_size = block_size,
                           .q_type = type,
                           .kv_type = type,
                           .out_type = type,
                           .layout = arrangement::x_split,
                           .aligned = true,
                           .seed = turn + 1};
          // Another dtype next to the cache's now and then.
          if (turn % 5 == 3) c.q_type = dtypes[turn % 3];
          if (turn % 7 == 3) c.out_type = dtypes[turn % 3];
          options[turn % options.size()].apply(c);
          switch (kind) {
            case launch::one_partition:
              c.seqs = {{1, 70}, {1, 1}, {1, 300}, {0, 9}};
              break;
            case launch::many_rows:  // enough to fill a GPU, so that no partition has a CTA of its own
              c.num_kv_heads = 64;
              c.group_size = 1;
              for (int n = 0; n < 15; ++n) c.seqs.push_back({1, 1 + n % 3});
              c.seqs.push_back({1, 530});
              break;
            case launch::partitioned:
              c.seqs = {{1, 513}, {1, 1100}, {1, 20}, {0, 0}, {1, 1024}};
              break;
            case launch::with_prefills:
              c.seqs = {{1, 40}, {17, 30}, {1, 700}, {5, 600}, {1, 1}};
              break;
          }
          cases.push_back(std::move(c));
          ++turn;
        }
        ++turn;  // so that groups and options meet other launches
      }
    }
  }
  return cases;
}

std::vector<attention_case> steep_cases(std::uint64_t seed, int count) {
  random_source random(hash_of(seed, 0x57ee));
  const std::vector<std::int32_t> dims{1, 2, 8, 16, 31, 32};
  std::vector<attention_case> cases;
  for (int n = 0; n < count; ++n) {
    const dtype type = random.pick(dtypes);
    const bool one_type = random.one_in(2);
    attention_case c{.what = "steep case " + std::to_string(n),
                     .num_kv_heads = 1,
                     .group_size = static_cast<std::int32_t>(random.between(1, 4)),
                     .head_dim = random.pick(dims),
                     .q_type = type,
                     .kv_type = one_type ? type : random.pick(dtypes),
                     .out_type = one_type ? type : random.pick(dtypes),
                     .causal = random.one_in(2),
                     .window_left = random.one_in(3) ? static_cast<std::int32_t>(random.between(0, 60)) : -1,
                     .scale = random.one_in(3) ? 0.05f + 20.0f * random.unit() : 0.0f,
                     .soft_cap = random.one_in(4) ? 0.5f + 30.0f * random.unit() : 0.0f,
                     .alibi = true,
                     .alibi_factor = (random.one_in(4) ? -128.0f : 128.0f) * (random.one_in(3) ? random.unit() : 1.0f),
                     .sinks = random.one_in(4),
                     .bias = random.one_in(4) ? random.pick(bias_kinds) : bias_kind::none,
                     .bias_type = random.pick(dtypes),
                     .seed = random.next()};
    for (std::int64_t s = random.between(1, 3); s > 0; --s) {
      const auto seq_len = static_cast<std::int32_t>(random.between(1, random.one_in(3) ? 700 : 90));
      c.seqs.push_back({static_cast<std::int32_t>(random.between(1, std::min(seq_len, 5))), seq_len});
    }
    cases.push_back(std::move(c));
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
