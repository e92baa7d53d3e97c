// SPDX-License-Identifier: Apache-2.0
// The cut of decode work: thread blocks share the whole line, deterministic plans are cut between items alone, whatever
// an item is, and buffers do not depend on the lengths.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "cuda/attention/decode/plan.hpp"
#include "cuda/host/divisor.hpp"
#include "support/random.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

constexpr std::int32_t grid = 264;

struct step {
  attention_spec spec;
  std::vector<std::int32_t> starts{0};
  std::vector<std::int32_t> lens;
  std::vector<std::int32_t> words;

  step(std::int32_t group, std::int32_t kv_heads, bool deterministic) {
    spec.num_q_heads = group * kv_heads;
    spec.num_kv_heads = kv_heads;
    spec.qk_head_dim = spec.v_head_dim = 128;
    spec.block_size = 16;
    spec.deterministic = deterministic;
  }
  void add(std::int32_t query_len, std::int32_t seq_len) {
    starts.push_back(starts.back() + query_len);
    lens.push_back(seq_len);
  }
  /// Plans into `words`; the planner's workspace and counters.
  std::pair<std::size_t, std::size_t> plan() {
    cuda::plan_input in;
    in.spec = spec;
    in.num_seqs = static_cast<std::int32_t>(lens.size());
    in.query_start_loc = starts.data();
    in.seq_lens = lens.data();
    in.num_tokens = starts.back();
    words.clear();
    cuda::decode_planner planner(in, grid, words);
    for (std::int32_t seq = 0; seq < in.num_seqs; ++seq) {
      if (starts[static_cast<std::size_t>(seq) + 1] > starts[static_cast<std::size_t>(seq)]) planner.add(seq);
    }
    REQUIRE(planner.finish());
    return {planner.workspace_floats(), planner.num_counters()};
  }
  [[nodiscard]] cuda::decode_header header() const { return at<cuda::decode_header>(0); }
  [[nodiscard]] cuda::decode_cta cta(std::int32_t i) const {
    return at<cuda::decode_cta>(sizeof(cuda::decode_header) + static_cast<std::size_t>(i) * sizeof(cuda::decode_cta));
  }
  [[nodiscard]] std::vector<cuda::decode_seq> seqs() const {
    const auto first = static_cast<std::size_t>(cuda::decode_seqs_offset(grid)) * sizeof(std::int32_t);
    std::vector<cuda::decode_seq> all((words.size() * sizeof(std::int32_t) - first) / sizeof(cuda::decode_seq));
    std::memcpy(all.data(), reinterpret_cast<const std::byte*>(words.data()) + first,
                all.size() * sizeof(cuda::decode_seq));
    return all;
  }

 private:
  template <class T>
  [[nodiscard]] T at(std::size_t byte) const {
    T value;
    std::memcpy(&value, reinterpret_cast<const std::byte*>(words.data()) + byte, sizeof(T));
    return value;
  }
};

}  // namespace

TEST_CASE("thread blocks share the line of decode work without gap or overlap") {
  std::mt19937_64 random(test_seed());
  CAPTURE(seed_note());
  const auto below = [&](std::uint64_t n) { return static_cast<std::int32_t>(random() % n); };
  for (int round = 0; round < 400; ++round) {
    const bool deterministic = round % 2 == 0;
    step s(1 + below(9), 1 + below(8), deterministic);
    s.spec.causal = below(4) != 0;
    if (below(3) == 0) s.spec.window_left = below(9000);
    const int num_seqs = 1 + below(below(3) == 0 ? 300 : 6);
    s.add(1, below(20000));
    for (int i = 1; i < num_seqs; ++i) s.add(below(3) == 0 ? below(400) : 1, below(20000));
    (void)s.plan();
    const cuda::decode_header header = s.header();
    const std::vector<cuda::decode_seq> seqs = s.seqs();
    std::int64_t total = 0;
    for (const cuda::decode_seq& seq : seqs) {
      CHECK(seq.start == total);
      const std::int64_t units = std::int64_t{s.spec.num_kv_heads} * seq.row_tiles * seq.num_items;
      total += units * seq.unit_length;
      if (deterministic && seq.num_tiles > 0) {
        // Items lie on a grid that begins at position 0, and reach the last visible tile.
        const std::int64_t first = seq.first_tile / header.item_tiles;
        CHECK((first + seq.num_items) * std::int64_t{header.item_tiles} >= seq.first_tile + seq.num_tiles);
        CHECK((first + seq.num_items - 1) * std::int64_t{header.item_tiles} < seq.first_tile + seq.num_tiles);
      }
    }
    CHECK(header.total == total);
    CHECK(header.num_ctas <= grid);
    CHECK((header.item_tiles != 0) == deterministic);
    std::int32_t end = 0;
    for (std::int32_t i = 0; i < header.num_ctas; ++i) {
      const cuda::decode_cta cta = s.cta(i);
      CHECK(cta.position == end);
      CHECK(cta.end >= cta.position);
      end = cta.end;
      CHECK(std::memcmp(&cta.first, &seqs[static_cast<std::size_t>(cta.index)], sizeof(cta.first)) == 0);
      CHECK(cta.first.start <= cta.position);
      if (deterministic) CHECK((cta.position - cta.first.start) % cta.first.unit_length == 0);
    }
    CHECK(end == header.total);
  }
}

TEST_CASE("a deterministic plan makes items of chunks, runs or whole units, as the batch needs") {
  step alone(4, 8, true);
  alone.add(1, 8192);
  const auto sizes = alone.plan();
  CHECK(alone.header().item_tiles == cuda::decode_chunk_tiles);
  step very_long(4, 8, true);
  very_long.add(1, 131072);
  CHECK(very_long.plan() == sizes);
  CHECK(very_long.header().item_tiles == cuda::decode_run_tiles);
  step many(4, 8, true);
  for (int i = 0; i < 256; ++i) many.add(1, 1024);
  CHECK(many.plan() == sizes);
  CHECK(many.header().item_tiles == cuda::decode_whole_tiles);
  step prompt(4, 8, true);
  prompt.add(8192, 8192);
  CHECK(prompt.plan() == sizes);
  CHECK(prompt.header().item_tiles == cuda::decode_whole_tiles);
}

TEST_CASE("a divisor divides as the compiler would") {
  std::mt19937_64 random(test_seed());
  CAPTURE(seed_note());
  for (int round = 0; round < 200000; ++round) {
    const auto by = static_cast<std::int32_t>(1 + (random() & 0x7ffffffeu) % (1u << (random() % 31 + (round == 0))));
    auto what = static_cast<std::int32_t>(random() & 0x7fffffffu) >> (random() % 31);
    if (round % 3 == 0) what = static_cast<std::int32_t>(std::int64_t{what} / by * by);
    if (round % 3 == 1) what = std::max(static_cast<std::int32_t>(std::int64_t{what} / by * by - 1), 0);
    REQUIRE(cuda::divisor(by).quotient(what) == what / by);
  }
  CHECK(cuda::divisor(0x7fffffff).quotient(0x7fffffff) == 1);
  CHECK(cuda::divisor(1).quotient(0x7fffffff) == 0x7fffffff);
}
