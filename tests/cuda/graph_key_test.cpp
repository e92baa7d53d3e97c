// SPDX-License-Identifier: Apache-2.0
// Keys of captured graphs over a pretended CUDA runtime: steps with equal keys launch the same kernels with the same
// values, so that one captured graph serves them all, and keys come back when steps do.
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/model_cache.hpp>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/fake_runtime.hpp"
#include "cuda/host/backend.hpp"
#include "cuda/host/kernel_args.hpp"
#include "support/random.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

using graph_key = std::vector<std::uint64_t>;

constexpr std::int32_t num_layers = 2, num_q_heads = 8, num_kv_heads = 2, head_dim = 128, most_tokens = 2048;

model_cache_config config_of(layout_kind layout, dtype type) {
  model_cache_config config;
  config.num_layers = num_layers;
  config.layout = layout;
  config.attention.num_q_heads = num_q_heads;
  config.attention.num_kv_heads = num_kv_heads;
  config.attention.qk_head_dim = head_dim;
  config.attention.q_type = config.attention.out_type = type;
  config.attention.k_code = config.attention.v_code = kv_code{type};
  config.layer_windows = {-1, 100};  // two plans
  config.cache = {.block_size = 16, .num_blocks = 2000, .max_sequences = 16};
  return config;
}

/// What a launch of attention holds of its step by value.
struct captured_launch {
  const void* function;
  std::tuple<unsigned, unsigned, unsigned> grid;
  std::size_t shared_bytes;
  const void *query_start_loc, *seq_lens, *query_positions, *block_tables;
  std::int64_t block_table_stride, num_tokens;
  std::int32_t num_seqs, min_query_len;
  const void *workspace, *counters;
  friend bool operator==(const captured_launch&, const captured_launch&) = default;
};

struct captured_step {
  std::vector<captured_launch> attention;
  std::vector<const void*> appends;
  const std::int64_t* slot_mapping = nullptr;
  friend bool operator==(const captured_step&, const captured_step&) = default;
};

struct world {
  fake_runtime runtime;
  cuda::cuda_backend opened;
  model_cache cache;
  dtype type;
  buffer rows, outs;

  explicit world(layout_kind layout = layout_kind::hnd, dtype of = dtype::bf16)
      : opened((runtime.encodes_tensor_maps = true, runtime.api()), 0),
        cache(opened, config_of(layout, of)),
        type(of),
        rows(where().memory(), most_tokens * num_q_heads * head_dim * sizeof(float)),
        outs(where().memory(), rows.num_bytes()) {}

  [[nodiscard]] backend& where() { return opened; }

  [[nodiscard]] seq_id open() {
    const allocate_result made = cache.manager().allocate(1);
    REQUIRE(made.status == alloc_status::ok);
    return made.seq;
  }

  /// The launches of all layers, and the key.
  std::pair<graph_key, captured_step> compute(std::span<const step_row> given) {
    model_step step = cache.begin_step(given);
    REQUIRE(static_cast<bool>(step));
    const auto view = [&](std::int32_t heads) {
      return as_const(dense_view(rows.data(), type, step.num_tokens(), heads, head_dim));
    };
    attention_params params;
    params.q = view(num_q_heads);
    params.out = dense_view(outs.data(), type, step.num_tokens(), num_q_heads, head_dim);
    captured_step said;
    said.slot_mapping = step.batch().slot_mapping;
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
      runtime.launches.clear();
      REQUIRE(step.append(layer, view(num_kv_heads), view(num_kv_heads)) == errc::ok);
      for (const fake_launch& each : runtime.launches) said.appends.push_back(each.function);
      runtime.launches.clear();
      std::vector<cuda::attention_kernel_args> args;  // every kernel of attention begins its argument with these
      runtime.on_launch = [&](void** of) { args.push_back(*static_cast<const cuda::attention_kernel_args*>(of[0])); };
      REQUIRE(step.attention(layer, params) == errc::ok);
      runtime.on_launch = nullptr;
      for (std::size_t i = 0; i < args.size(); ++i) {
        const fake_launch& launch = runtime.launches[i];
        const cuda::attention_kernel_args& a = args[i];
        said.attention.push_back({launch.function,
                                  {launch.grid.x, launch.grid.y, launch.grid.z},
                                  launch.shared_bytes,
                                  a.query_start_loc,
                                  a.seq_lens,
                                  a.query_positions,
                                  a.block_tables,
                                  a.block_table_stride,
                                  a.num_tokens,
                                  a.num_seqs,
                                  a.min_query_len,
                                  a.workspace,
                                  a.counters});
      }
    }
    graph_key key = step.graph_key();
    step.commit();
    return {std::move(key), std::move(said)};
  }

  graph_key key_of(std::vector<step_row> given) { return compute(given).first; }
};

step_row next(seq_id seq, std::int32_t num_tokens = 1) { return {.seq = seq, .num_tokens = num_tokens}; }

}  // namespace

namespace {

/// Random steps, of which few kinds differ in numbers of sequences and tokens: keys are met again and again, and what
/// else they depend on has to tell the steps apart.
class random_steps {
 public:
  random_steps(world& where, random_source& random, bool in_one_place)
      : where_(where), random_(random), in_one_place_(in_one_place) {
    if (!in_one_place) return;
    // The step's arrays never move: the tables have room for a long sequence, which is in every step.
    where.cache.engine().reserve_upload(8, most_tokens, 400);
    long_ = where.open();
    (void)where.key_of({next(long_, 1200)});
  }

  std::vector<step_row> draw() {
    while (lengths_.size() < 6) lengths_[where_.open()] = 0;
    constexpr std::int32_t totals[] = {0, 0, 40, 300};  // of tokens, beyond one of each sequence
    std::int32_t left = totals[random_.between(0, 3)];
    std::vector<step_row> rows;
    if (in_one_place_) rows.push_back(next(long_));
    for (auto& [seq, length] : lengths_) {
      if (rows.size() > 3) break;
      if (random_.between(0, 4) == 0) continue;
      const auto more = static_cast<std::int32_t>(random_.between(0, 1) == 0 ? left : random_.between(0, left));
      left -= more;
      rows.push_back(next(seq, 1 + more));
      length += 1 + more;
    }
    return rows;
  }

  /// Frees sequences that have become long.
  void tidy() {
    std::erase_if(lengths_, [&](const auto& each) {
      if (each.second < 1500) return false;
      where_.cache.free(each.first);
      return true;
    });
  }

 private:
  world& where_;
  random_source& random_;
  bool in_one_place_;
  seq_id long_ = invalid_seq;
  std::map<seq_id, std::int64_t> lengths_;
};

}  // namespace

TEST_CASE("steps with equal graph keys launch the same kernels with the same values") {
  random_source random(test_seed());
  CAPTURE(seed_note());
  for (const auto& [layout, type] : {std::pair(layout_kind::hnd, dtype::bf16), std::pair(layout_kind::hnd, dtype::f32),
                                     std::pair(layout_kind::x_split, dtype::f32)}) {
    for (const bool in_one_place : {false, true}) {
      CAPTURE(to_string(layout));
      CAPTURE(in_one_place);
      world w(layout, type);
      random_steps steps(w, random, in_one_place);
      std::map<graph_key, captured_step> met;
      std::int64_t num_met_again = 0;
      for (int n = 0; n < 400; ++n) {
        CAPTURE(n);
        const std::vector<step_row> rows = steps.draw();
        if (rows.empty()) continue;
        auto [key, said] = w.compute(rows);
        REQUIRE(!said.attention.empty());
        const auto [before, is_new] = met.try_emplace(std::move(key), said);
        if (!is_new) ++num_met_again;
        CHECK(before->second.appends == said.appends);
        CHECK(before->second.slot_mapping == said.slot_mapping);
        // x_split takes one CTA for a row or several, each right for all lengths of a key.
        if (layout != layout_kind::x_split) CHECK(before->second.attention == said.attention);
        CHECK(before->second.attention.front().block_tables == said.attention.front().block_tables);
        CHECK(before->second.attention.front().num_seqs == said.attention.front().num_seqs);
        CHECK(before->second.attention.front().workspace == said.attention.front().workspace);
        steps.tidy();
      }
      CHECK(num_met_again > 100);
    }
  }
}

TEST_CASE("a decode step has its graph key again after prompts and other numbers of sequences") {
  world w;
  const seq_id a = w.open(), b = w.open(), c = w.open();
  (void)w.key_of({next(a, 300), next(b, 70), next(c, 33)});
  (void)w.key_of({next(a, 15), next(b)});  // the block tables have room for longer sequences from here on
  const graph_key two = w.key_of({next(a), next(b)});
  const graph_key three = w.key_of({next(a), next(b), next(c)});
  CHECK(two != three);
  const seq_id prompt = w.open();
  std::set<graph_key> of_prompts;
  for (const std::int32_t count : {200, 201}) of_prompts.insert(w.key_of({next(prompt, count)}));
  CHECK(of_prompts.size() == 2);
  for (int n = 0; n < 30; ++n) {
    CHECK(w.key_of({next(a), next(b)}) == two);
    CHECK(w.key_of({next(c), next(a), next(b)}) == three);
  }
  // More blocks than a row of the tables has.
  const graph_key longer = w.key_of({next(a, 400), next(b)});
  CHECK(w.key_of({next(a), next(b)}) != two);
  CHECK(w.key_of({next(a), next(b)}) != longer);
}

TEST_CASE("graph keys of two caches differ, and those of the CPU are empty") {
  world one;
  // A second cache may get the memory of one that is gone.
  std::set<graph_key> keys;
  for (int n = 0; n < 4; ++n) {
    model_cache cache(one.where(), config_of(layout_kind::hnd, dtype::bf16));
    const seq_id seq = cache.manager().allocate(1).seq;
    model_step step = cache.begin_step({next(seq)});
    keys.insert(step.graph_key());
  }
  CHECK(keys.size() == 4);
  const auto cpu = make_backend();
  model_cache on_cpu(*cpu, config_of(layout_kind::hnd, dtype::bf16));
  const seq_id seq = on_cpu.manager().allocate(1).seq;
  CHECK(on_cpu.begin_step({next(seq)}).graph_key().empty());
}
