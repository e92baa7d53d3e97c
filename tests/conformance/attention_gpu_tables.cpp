// SPDX-License-Identifier: Apache-2.0
// Around what the tensor-core kernels of GPUs tell apart: shapes, tiles, loads.
#include <string>

#include "conformance/attention_table_parts.hpp"
#include "conformance/attention_tables.hpp"

namespace bifolio::test {
namespace {

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
  constexpr std::int32_t of_16_bits[] = {8,   16,  40,  56,  72,  80,  88,  96,  104, 112, 120,
                                         136, 160, 168, 192, 200, 224, 248, 264, 320, 512, 520};
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
  // On a GPU three products of TensorFloat-32, of few rows ordinary ones.
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
  // Float32 by ordinary multiplications, and in deterministic plans by products with eight columns or twice as many: up
  // to four, up to eight and more rows, in blocks that hold all rows of a warp and in others; and more than sixteen.
  std::size_t turn = 0;
  for (const std::int32_t head_dim : of_f32) {
    for (const std::int32_t group : {1, 3, 4, 5, 7, 8, 9, 16, 17}) {
      if (group > 9 && head_dim % 64 != 0) continue;
      constexpr std::int32_t blocks[] = {16, 32, 8, 64, 24, 5};
      attention_case c = half_precision_case("float32, few rows", dtype::f32, head_dim);
      c.group_size = group;
      c.block_size = blocks[turn++ % std::size(blocks)];
      c.seqs = {{1, 1605}, {1, 2000}, {1, 64}, {1, 17}, {1, 1}, {1, 0}};
      if (group <= 4) c.seqs.push_back({2, 700});
      if (turn % 3 == 2) c.window_left = 1000;
      c.seed = turn;
      cases.push_back(c);
      c.what = "float32, few rows, deterministic";
      c.deterministic = true;
      if (turn % 4 == 1) c.soft_cap = 5;
      if (turn % 4 == 3) c.alibi = c.sinks = true;
      cases.push_back(c);
    }
  }
  return cases;
}

std::vector<attention_case> deterministic_prompt_cases() {
  // Prompts that are worth a prefill kernel in plans that sum as decode does: of each compiled width and loading.
  std::vector<attention_case> cases;
  for (const dtype type : {dtype::f16, dtype::bf16, dtype::f32}) {
    for (const std::int32_t head_dim : {40, 64, 80, 96, 112, 128, 136, 160, 192, 200, 248, 256, 264, 512}) {
      if (type == dtype::f32 && head_dim > 128) continue;
      attention_case c = half_precision_case("deterministic prompt", type, head_dim);
      c.deterministic = true;
      c.seqs = {{300, 300}, {1, 70}, {200, 450}, {1, 600}};
      cases.push_back(c);
      c.what = "deterministic prompt in blocks of 5, with options";
      c.block_size = 5;
      c.window_left = 190;
      c.soft_cap = 4;
      c.alibi = c.sinks = true;
      cases.push_back(c);
      if (head_dim != 512) continue;
      c.what = "deterministic prompt with a soft cap";  // has a kernel of its own, with TMA as well
      c.block_size = 16;
      c.alibi = false;
      cases.push_back(c);
    }
  }
  for (const value_kind values : {value_kind::equal_logits, value_kind::dominant_key, value_kind::huge_logits,
                                  value_kind::denormal, value_kind::max_finite}) {
    for (const std::int32_t head_dim : {64, 80, 128}) {
      attention_case c = half_precision_case("deterministic prompt, extreme values", dtype::f32, head_dim);
      c.deterministic = true;
      c.values = values;
      cases.push_back(c);
    }
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

std::vector<attention_case> coded_decode_cases() {
  using g = scale_granularity;
  struct code_pair {
    kv_code k, v;
  };
  const std::vector<code_pair> pairs{
      {{dtype::e4m3}, {dtype::e4m3}},
      {{dtype::i8, g::token_head}, {dtype::i8, g::token_head}},
      {{dtype::e5m2}, {dtype::e5m2}},
      {{dtype::e4m3, g::layer}, {dtype::e4m3, g::layer}},
      {{dtype::e4m3, g::token_head}, {dtype::e4m3, g::token_head}},
      {{dtype::i8, g::layer}, {dtype::i8, g::layer}},
      {{dtype::i8, g::token_head}, {dtype::e4m3, g::token_head}},
      {{dtype::e4m3, g::head}, {dtype::i8, g::head}},
      {{dtype::e5m2, g::layer}, {dtype::e4m3}},
      {{dtype::e4m3, g::token_head}, {dtype::i8, g::token_head}},
      {{dtype::i8, g::head}, {dtype::e5m2, g::head}},
      {{dtype::u8, g::token_head}, {dtype::u8, g::token_head}},
      {{dtype::u8, g::token_head}, {dtype::e4m3, g::layer}},
      {{dtype::i8, g::token_head}, {dtype::u8, g::token_head}},
  };
  const std::size_t few_rows_pairs[] = {0, 1, 2, 3, 4, 5, 11};
  constexpr std::int32_t dims[] = {16, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 240, 256};
  std::vector<attention_case> cases;
  const auto add = [&](std::string what, const code_pair& codes, std::int32_t head_dim) -> attention_case& {
    const std::size_t turn = cases.size();
    attention_case c = half_precision_case(std::move(what), turn / 2 % 2 == 0 ? dtype::f16 : dtype::bf16, head_dim);
    c.kv_type = dtype::f32;
    c.k_code = codes.k;
    c.v_code = codes.v;
    c.layout = turn % 5 < 3 ? arrangement::hnd : arrangement::nhd;
    c.seqs = {{1, 70}, {1, 1}, {37, 150}, {3, 90}, {1, 600}, {1, 0}};
    c.seed = turn + 1;
    cases.push_back(std::move(c));
    return cases.back();
  };
  // Output tiles of at most eight rows, over several tiles, in blocks that hold all rows of a warp and in others.
  for (std::size_t d = 0; d < std::size(dims); ++d) {
    for (std::size_t p = 0; p < std::size(few_rows_pairs); ++p) {
      constexpr std::int32_t few_rows_groups[] = {4, 8, 1, 7};
      constexpr std::int32_t few_rows_blocks[] = {16, 32, 64, 128, 48, 24};
      attention_case& c = add("codes, few rows", pairs[few_rows_pairs[p]], dims[d]);
      c.group_size = few_rows_groups[(d + p) % 4];
      c.block_size = few_rows_blocks[(d + 2 * p) % 6];
      c.deterministic = (d + p) % 5 == 4;
      c.seqs = {{1, 1605}, {1, 2000}, {1, 64}, {1, 17}, {1, 1}, {1, 0}};
      if (c.group_size <= 4) c.seqs.push_back({2, 700});
      if ((d + p) % 3 == 2) c.window_left = 1000;
    }
  }
  for (std::size_t d = 0; d < std::size(dims); ++d) {
    for (std::size_t p = 0; p < pairs.size(); ++p) {
      const std::size_t variant = (d + p) % 4;
      attention_case& c = add("codes, head_dim", pairs[p], dims[d]);
      c.deterministic = variant >= 2;
      c.group_size = variant == 1 ? 1 : variant == 3 ? 3 : 4;
      if (variant % 2 == 0) continue;
      c.block_size = variant == 1 ? 5 : 32;
      c.seqs = {{1, 2100}, {1, 17}, {2, 1025}};
      if (variant != 3) continue;
      c.window_left = 90;
      c.soft_cap = 4;
      c.alibi = c.sinks = true;
    }
  }
  std::size_t turn = 0;
  for (const named_option& option : all_options()) {
    for (const std::int32_t head_dim : half_precision_dims) {
      attention_case& c = add(std::string("codes, ") + option.name, pairs[turn++ * 5 % pairs.size()], head_dim);
      option.apply(c);
      c.deterministic = turn % 7 == 2;
      if (c.bias == bias_kind::none) continue;
      --turn;
      cases.pop_back();
    }
  }
  // Zero points of every kind, of K, of V and of both, beside tails of other lengths.
  const code_pair with_zeros[] = {pairs[11],
                                  pairs[12],
                                  pairs[13],
                                  {{dtype::u8, g::token_head}, {dtype::i8, g::token_head}},
                                  {{dtype::e5m2}, {dtype::u8, g::token_head}}};
  for (std::size_t d = 0; d < std::size(dims); ++d) {
    for (std::size_t p = 0; p < std::size(with_zeros); ++p) {
      attention_case& c = add("codes, zero points", with_zeros[p], dims[d]);
      c.values = value_kind::zero_points;
      c.group_size = (d + p) % 2 == 0 ? 4 : 16;
      c.deterministic = (d + p) % 3 == 2;
      c.block_size = (d + p) % 4 == 1 ? 24 : 16;
      c.seqs = {{1, 700}, {1, 1300}, {2, 90}, {1, 333}, {1, 2000}};
      if ((d + p) % 5 == 1) c.soft_cap = 5;
      if ((d + p) % 5 == 2) c.alibi = c.sinks = true;
      if ((d + p) % 5 == 3) c.window_left = 250;
    }
  }
  // One group beyond the rows of a tile, and blocks of one token.
  for (const code_pair& codes : pairs) {
    attention_case& c = add("codes, a group of 20", codes, 128);
    c.num_kv_heads = 1;
    c.group_size = 20;
    c.block_size = 1;
  }
  return cases;
}

std::vector<attention_case> prefill_border_cases() {
  // Both sides of every width that has a kernel, and of what its loads ask for.
  const std::vector<std::int32_t> dims{8,   40,  64,  72,  80,  96,  104, 112, 128,
                                       136, 160, 192, 200, 248, 256, 264, 448, 512};
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
  // Edges of windows before, at and after the edges of tiles of 32, 80, 96 and 128 keys.
  for (const std::int32_t left : {0, 1, 31, 32, 33, 63, 79, 80, 81, 95, 96, 97, 127, 128, 129, 160}) {
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
  const std::vector<std::int32_t> widths{64, 96, 128, 192, 256, 512};
  const std::vector<std::int32_t> f32_dims{4, 36, 60, 64, 68, 80, 96, 124, 128};
  const std::vector<std::int32_t> f32_widths{64, 128};
  for (const dtype type : {dtype::f16, dtype::bf16, dtype::f32}) {
    const bool is_f32 = type == dtype::f32;
    for (const std::int32_t head_dim : is_f32 ? f32_dims : dims) {
      for (std::size_t n = 0; n < num_plain; ++n) {
        // The two types take turns with options of the widest kernel, which is slow to check.
        if (head_dim <= 256 || n % 2 == (type == dtype::f16 ? 0u : 1u)) add(type, head_dim, options[n]);
      }
    }
    for (const std::int32_t head_dim : is_f32 ? f32_widths : widths) {
      if (head_dim == 96) continue;
      for (std::size_t n = num_plain; n < options.size(); ++n) {
        if (head_dim <= 256 || n % 4 == (type == dtype::f16 ? 0u : 1u)) add(type, head_dim, options[n]);
      }
    }
    // Every block size meets every width.
    for (const std::int32_t head_dim : is_f32 ? f32_widths : widths) {
      for (const std::int32_t block_size : blocks) {
        add(type, head_dim, options[0]);
        cases.back().block_size = block_size;
        cases.back().layout = arrangement::hnd;
      }
    }
  }
  for (const value_kind values : {value_kind::equal_logits, value_kind::dominant_key, value_kind::huge_logits,
                                  value_kind::denormal, value_kind::max_finite}) {
    for (const std::int32_t head_dim : f32_dims) {
      add(dtype::f32, head_dim, {"extreme values", [values](attention_case& c) { c.values = values; }});
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

}  // namespace bifolio::test
