// SPDX-License-Identifier: Apache-2.0
// A pairwise covering design over all axes, and random cases.
#include <algorithm>
#include <string>

#include "conformance/attention_tables.hpp"
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

}  // namespace

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
  const std::vector<std::int32_t> dims{64, 128, 256, 64, 128, 256, 24, 80, 96, 112, 152, 192, 240, 320, 512};
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

}  // namespace bifolio::test
