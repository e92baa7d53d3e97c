// SPDX-License-Identifier: Apache-2.0
// The stream-K schedule of decode: CTAs share the whole work range, deterministic plans are cut between splits only,
// whatever a split is, and buffers do not depend on the lengths.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <random>
#include <set>
#include <span>
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
  cuda::decode_plan planned;

  std::int32_t max_query_len = 0;
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
  /// Workspace and counters of the plan.
  std::pair<std::size_t, std::size_t> plan() {
    cuda::plan_input in;
    in.spec = spec;
    in.num_seqs = static_cast<std::int32_t>(lens.size());
    in.query_start_loc = starts.data();
    in.seq_lens = lens.data();
    in.num_tokens = starts.back();
    in.max_query_len = max_query_len;
    cuda::decode_planner planner(in, grid, planned);
    for (std::int32_t seq = 0; seq < in.num_seqs; ++seq) {
      if (starts[static_cast<std::size_t>(seq) + 1] > starts[static_cast<std::size_t>(seq)]) planner.add(seq);
    }
    REQUIRE(planner.finish());
    return {planned.workspace_bytes, planned.num_counters};
  }
  /// The metadata as a kernel finds it on the device.
  [[nodiscard]] std::vector<std::byte> metadata() const {
    std::vector<std::byte> bytes(cuda::decode_metadata_bytes(planned.grid, planned.num_seqs, spec.deterministic));
    cuda::write_metadata(planned, bytes.data());
    return bytes;
  }
};

}  // namespace

TEST_CASE("CTAs share the work range of decode without gap or overlap") {
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
    const std::vector<std::byte> bytes = s.metadata();
    const cuda::decode_metadata metadata = cuda::decode_metadata_at(bytes.data(), grid, deterministic);
    const cuda::decode_header& header = *metadata.header;
    const std::span<const cuda::decode_seq> seqs(metadata.seqs, static_cast<std::size_t>(s.planned.num_seqs));
    std::int64_t total = 0;
    for (const cuda::decode_seq& seq : seqs) {
      CHECK(seq.work_begin == total);
      const std::int64_t outputs = std::int64_t{s.spec.num_kv_heads} * seq.row_tiles * seq.num_splits;
      total += outputs * seq.work_length;
      if (deterministic && seq.num_tiles > 0) {
        // Splits are on a grid that begins at position 0, and reach the last visible tile.
        const std::int64_t first = seq.first_tile / header.split_tiles;
        CHECK((first + seq.num_splits) * std::int64_t{header.split_tiles} >= seq.first_tile + seq.num_tiles);
        CHECK((first + seq.num_splits - 1) * std::int64_t{header.split_tiles} < seq.first_tile + seq.num_tiles);
      }
    }
    CHECK(header.total == total);
    CHECK(header.num_ctas <= grid);
    CHECK((header.split_tiles != 0) == deterministic);
    std::int32_t end = 0;
    for (std::int32_t i = 0; i < header.num_ctas; ++i) {
      const cuda::decode_cta& cta = metadata.ctas[i];
      CHECK(cta.begin == end);
      CHECK(cta.end >= cta.begin);
      end = cta.end;
      CHECK(std::memcmp(&cta.first, &seqs[static_cast<std::size_t>(cta.seq_index)], sizeof(cta.first)) == 0);
      CHECK(cta.first.work_begin <= cta.begin);
      if (header.split_tiles == cuda::decode_leaf_tiles) {
        CHECK((cta.begin - cta.first.work_begin) % cta.first.work_length == 0);
      }
    }
    CHECK(end == header.total);
  }
}

TEST_CASE("no CTA of a decode plan is without work, however short the step is") {
  // A CTA that finds its output tile by its number counts those of the tile before and after it.
  for (const std::int32_t head_dim : {64, 128, 256}) {
    for (const std::int32_t kv_heads : {1, 2, 8}) {
      for (const std::int32_t batch : {1, 2, 3, 8}) {
        for (std::int32_t tiles = 1; tiles <= 40; ++tiles) {
          step s(2, kv_heads, false);
          s.spec.qk_head_dim = s.spec.v_head_dim = head_dim;
          for (std::int32_t i = 0; i < batch; ++i) s.add(6, 64 * tiles - i);
          (void)s.plan();
          CAPTURE(head_dim);
          CAPTURE(kv_heads);
          CAPTURE(batch);
          CAPTURE(tiles);
          bool all_work = true;
          for (std::int32_t cta = 0; cta < s.planned.header.num_ctas; ++cta) {
            const cuda::decode_cta& share = s.planned.ctas[static_cast<std::size_t>(cta)];
            all_work = all_work && share.begin < share.end;
          }
          CHECK(all_work);
        }
      }
    }
  }
}

TEST_CASE("CTAs combine together only where each has one of many splits and nothing else") {
  std::mt19937_64 random(test_seed());
  CAPTURE(seed_note());
  const auto below = [&](std::uint64_t n) { return static_cast<std::int32_t>(random() % n); };
  int num_together = 0;
  for (int round = 0; round < 2000; ++round) {
    step s(1 + below(9), 1 + below(8), below(8) == 0);
    if (below(4) == 0) s.spec.window_left = below(9000);
    const std::int32_t batch = 1 + below(below(3) == 0 ? 300 : 6);
    const std::int32_t seq_len = 64 + below(below(2) == 0 ? 1000 : 40000);
    const std::int32_t query_len = 1 + below(6);
    const bool equal = below(4) != 0;
    for (std::int32_t i = 0; i < batch; ++i) s.add(query_len, equal ? seq_len : 64 + below(40000));
    s.max_query_len = query_len;
    (void)s.plan();
    const cuda::decode_header& header = s.planned.header;
    bool each_has_one = true;
    bool any_shared = false;
    std::int32_t outputs = 0;
    for (std::int32_t i = 0; i < s.planned.num_seqs; ++i) {
      outputs += s.spec.num_kv_heads * s.planned.seqs[static_cast<std::size_t>(i)].row_tiles;
    }
    for (std::int32_t i = 0; i < header.num_ctas; ++i) {
      const cuda::decode_cta& cta = s.planned.ctas[static_cast<std::size_t>(i)];
      // Where the output tiles are that the share begins and ends in; the sequences are alike where it matters.
      const std::int32_t length = cta.first.work_length;
      const std::int32_t inside = (cta.begin - cta.first.work_begin) % length;
      each_has_one = each_has_one && cta.begin < cta.end && inside + (cta.end - cta.begin) <= length;
      any_shared = any_shared || cta.end - cta.begin < length;
    }
    if (header.together != 0) {
      ++num_together;
      CHECK(each_has_one);
      CHECK(any_shared);
      CHECK(!s.spec.deterministic);
      CHECK(header.overhead == 0);
      CHECK(header.num_ctas <= grid);
      CHECK(header.num_ctas / outputs > cuda::decode_max_flat_splits);
    }
  }
  CHECK(num_together > 20);
}

TEST_CASE("equal lengths keep the CTAs busy at every batch") {
  // Busy: tiles of the whole step over all CTAs times the tiles of the one that has most. Short output tiles that
  // nearly fill the CTAs are not split: combining them costs more.
  struct heads {
    std::int32_t group, kv_heads;
  };
  struct length {
    std::int32_t context;
    double least_busy;
  };
  for (const heads& h : {heads{4, 8}, heads{1, 32}, heads{8, 1}, heads{8, 8}}) {
    for (const length& l : {length{1024, 0.75}, length{4096, 0.82}, length{8192, 0.87}}) {
      for (std::int32_t batch = 1; batch <= 256; ++batch) {
        step s(h.group, h.kv_heads, false);
        for (std::int32_t i = 0; i < batch; ++i) s.add(1, l.context);
        (void)s.plan();
        const std::int64_t tiles = std::int64_t{l.context} / cuda::decode_tile_tokens * batch * h.kv_heads;
        if (tiles < 8 * grid) continue;  // the fixed costs weigh more than the balance
        std::int32_t most = 0;
        for (const cuda::decode_cta& cta : s.planned.ctas) most = std::max(most, cta.end - cta.begin);
        const double busy = static_cast<double>(tiles) / (static_cast<double>(most) * grid);
        CHECK_MESSAGE(busy >= l.least_busy, "group ", h.group, ", ", h.kv_heads, " KV heads, context ", l.context,
                      ", batch ", batch, ": ", busy);
      }
    }
  }
}

TEST_CASE("pieces of a deterministic plan cover every output tile in the order of its combine tree") {
  std::mt19937_64 random(test_seed());
  CAPTURE(seed_note());
  const auto below = [&](std::uint64_t n) { return static_cast<std::int32_t>(random() % n); };
  int num_cut = 0;
  for (int round = 0; round < 300; ++round) {
    step s(1 + below(9), 1 + below(8), true);
    if (below(2) == 0) s.spec.k_code.type = s.spec.v_code.type = dtype::f32;
    if (below(3) == 0) s.spec.window_left = below(30000);
    const int num_seqs = 1 + below(below(3) == 0 ? 200 : 12);
    const std::uint64_t longest = below(3) == 0 ? 200000 : 9000;
    s.add(1, 1 + below(longest));
    for (int i = 1; i < num_seqs; ++i) s.add(below(4) == 0 ? below(100) : 1, below(longest));
    (void)s.plan();
    const std::vector<std::byte> bytes = s.metadata();
    const cuda::decode_metadata metadata = cuda::decode_metadata_at(bytes.data(), grid, true);
    const cuda::decode_header& header = *metadata.header;
    if (header.split_tiles != cuda::decode_root_tiles) continue;
    ++num_cut;
    // The pieces of the output tile that begins at `tile_begin` in the work range, found as a CTA finds its own.
    std::int32_t cta = 0;
    std::int64_t tile_begin = 0;
    std::int32_t next_partial = 0;
    for (std::int32_t i = 0; i < s.planned.num_seqs; ++i) {
      const cuda::decode_seq& seq = metadata.seqs[i];
      for (std::int32_t output = 0; output < s.spec.num_kv_heads * seq.row_tiles; ++output) {
        const std::int64_t tile_end = tile_begin + seq.work_length;
        while (metadata.ctas[cta].end <= tile_begin) ++cta;
        const std::int32_t first_cta = cta;
        std::int32_t next_tile = seq.first_tile;
        std::int32_t num_parts = 0;
        std::int32_t num_pieces = 0;
        const bool is_shared = metadata.ctas[cta].end < tile_end;
        const cuda::decode_part& common = metadata.parts[first_cta].begun;
        for (; cta < header.num_ctas && metadata.ctas[cta].begin < tile_end; ++cta) {
          const cuda::decode_cta& share = metadata.ctas[cta];
          if (share.begin == share.end) continue;
          const auto begin = static_cast<std::int32_t>(std::max<std::int64_t>(share.begin - tile_begin, 0));
          const auto end = static_cast<std::int32_t>(std::min<std::int64_t>(share.end, tile_end) - tile_begin);
          const std::int32_t part_tile = seq.first_tile + std::max(begin - header.overhead, 0);
          const std::int32_t part_end = seq.first_tile + end - header.overhead;
          REQUIRE(part_tile == next_tile);
          if (begin > 0) REQUIRE((part_tile % header.cut_tiles == 0 && begin > header.overhead));
          ++num_parts;
          if (is_shared) {
            const cuda::decode_part& part = begin > 0 ? metadata.parts[cta].continued : metadata.parts[cta].begun;
            REQUIRE(part.partial == next_partial);
            REQUIRE(part.first_partial == common.first_partial);
            REQUIRE(part.num_partials == common.num_partials);
            REQUIRE(part.num_ctas == common.num_ctas);
            REQUIRE(part.first_cta == first_cta);
            for (std::int32_t tile = part_tile; tile < part_end;) {
              const std::int32_t piece_end = cuda::decode_piece_end(seq.first_tile, tile, part_end);
              REQUIRE(piece_end > tile);
              REQUIRE(cuda::decode_piece_ordinal(seq.first_tile, part_tile, tile) == next_partial - part.partial);
              // A piece begins a node, or it is one leaf.
              const bool begins_node = tile == seq.first_tile || tile % cuda::decode_node_tiles == 0;
              const std::int32_t whole = begins_node ? cuda::decode_node_tiles : cuda::decode_leaf_tiles;
              REQUIRE(tile / whole == (piece_end - 1) / whole);
              tile = piece_end;
              ++next_partial;
              ++num_pieces;
            }
          }
          next_tile = part_end;
          if (share.end > tile_end || (share.end == tile_end)) break;
        }
        REQUIRE(next_tile == seq.first_tile + seq.num_tiles);
        if (is_shared) {
          REQUIRE(common.num_ctas == num_parts);
          REQUIRE(common.num_partials == num_pieces);
        } else {
          REQUIRE(num_parts == 1);
        }
        tile_begin = tile_end;
      }
    }
    CHECK(next_partial <= 2 * header.num_partials);
  }
  CHECK(num_cut > 100);
}

TEST_CASE("a deterministic plan shares work evenly, whatever the lengths are") {
  // As equal shares are, unless single leaves balance better.
  const auto busy = [](step& s) {
    (void)s.plan();
    std::int32_t most = 0;
    for (const cuda::decode_cta& cta : s.planned.ctas) most = std::max(most, cta.end - cta.begin);
    return static_cast<double>(s.planned.header.total) / (static_cast<double>(most) * grid);
  };
  step unequal(4, 8, true);
  for (int i = 0; i < 32; ++i) unequal.add(1, 128 << (i % 9));
  CHECK(busy(unequal) > 0.93);
  step many(4, 8, true);
  for (int i = 0; i < 256; ++i) many.add(1, 128 + 31 * i);
  CHECK(busy(many) > 0.95);
  step alike(4, 8, true);
  for (int i = 0; i < 18; ++i) alike.add(1, 4096);
  CHECK(busy(alike) > 0.9);
}

TEST_CASE("a deterministic plan of equal lengths gives each CTA as many leaves where that takes few CTAs less") {
  const auto leaves_of_ctas = [](std::int32_t num_seqs, std::int32_t seq_len) {
    step s(4, 8, true);
    for (std::int32_t i = 0; i < num_seqs; ++i) s.add(1, seq_len);
    (void)s.plan();
    CHECK(s.planned.header.cut_tiles == cuda::decode_leaf_tiles);
    const std::int32_t length = s.planned.seqs[0].work_length;
    std::set<std::int32_t> tiles;
    for (std::int32_t cta = 0; cta < s.planned.header.num_ctas; ++cta) {
      const cuda::decode_cta& share = s.planned.ctas[static_cast<std::size_t>(cta)];
      tiles.insert(share.end - share.begin - (share.begin % length == 0 ? s.planned.header.overhead : 0));
    }
    return tiles;
  };
  CHECK(leaves_of_ctas(16, 4096) == std::set<std::int32_t>{32});  // 256 of 264 CTAs, two of an output tile
  CHECK(leaves_of_ctas(18, 4096).size() > 1);                     // 288 parts of eight leaves are too many
}

TEST_CASE("a deterministic plan splits or cuts output tiles at leaves, at nodes or not at all, as the batch needs") {
  step alone(4, 8, true);
  alone.add(1, 8192);
  const auto sizes = alone.plan();
  CHECK(alone.planned.header.split_tiles == cuda::decode_leaf_tiles);
  step very_long(4, 8, true);
  very_long.add(1, 131072);
  CHECK(very_long.plan() == sizes);
  CHECK(very_long.planned.header.split_tiles == cuda::decode_root_tiles);
  CHECK(very_long.planned.header.cut_tiles == cuda::decode_node_tiles);
  step uneven(4, 8, true);
  for (int i = 0; i < 32; ++i) uneven.add(1, 128 << (i % 9));
  CHECK(uneven.plan() == sizes);
  CHECK(uneven.planned.header.split_tiles == cuda::decode_root_tiles);
  CHECK(uneven.planned.header.cut_tiles == cuda::decode_leaf_tiles);
  step many(4, 8, true);
  for (int i = 0; i < 256; ++i) many.add(1, 1024);
  CHECK(many.plan() == sizes);
  CHECK(many.planned.header.cut_tiles == cuda::decode_root_tiles);
  step prompt(4, 8, true);
  prompt.add(8192, 8192);
  CHECK(prompt.plan() == sizes);
  CHECK(prompt.planned.header.cut_tiles == cuda::decode_root_tiles);
}

TEST_CASE("a deterministic plan in float32 cuts output tiles at leaves where a CTA would have two of them") {
  const auto plan_of = [](dtype type, std::int32_t num_seqs) {
    step s(4, 8, true);
    s.spec.k_code.type = s.spec.v_code.type = type;
    for (std::int32_t i = 0; i < num_seqs; ++i) s.add(1, 8192);
    (void)s.plan();
    return s.planned;
  };
  CHECK(plan_of(dtype::f32, 1).header.split_tiles == cuda::decode_leaf_tiles);  // 256 leaves for 264 CTAs
  CHECK(plan_of(dtype::bf16, 2).header.split_tiles == cuda::decode_leaf_tiles);
  const cuda::decode_plan two = plan_of(dtype::f32, 2);
  CHECK(two.header.split_tiles == cuda::decode_root_tiles);
  CHECK(two.header.cut_tiles == cuda::decode_leaf_tiles);
  CHECK(two.header.num_ctas == 256);
  CHECK(two.parts[1].continued.num_ctas == 16);  // of an output tile of 32 leaves
}

TEST_CASE("a plan over codes is of few rows where every output tile has at most eight") {
  const auto is_of_few_rows = [](std::int32_t group, std::initializer_list<std::int32_t> query_lens, dtype k, dtype v) {
    step s(group, 2, false);
    s.spec.k_code.type = k;
    s.spec.v_code.type = v;
    for (const std::int32_t query_len : query_lens) s.add(query_len, 300);
    s.plan();
    return s.planned.few_rows;
  };
  CHECK(is_of_few_rows(8, {1, 1}, dtype::e4m3, dtype::e4m3));
  CHECK(is_of_few_rows(4, {1, 2}, dtype::i8, dtype::i8));
  CHECK_FALSE(is_of_few_rows(9, {1, 1}, dtype::e4m3, dtype::e4m3));
  CHECK_FALSE(is_of_few_rows(4, {1, 3, 1}, dtype::e4m3, dtype::e4m3));
  CHECK(is_of_few_rows(8, {1}, dtype::e4m3, dtype::i8));
  CHECK_FALSE(is_of_few_rows(8, {1}, dtype::bf16, dtype::bf16));
}

TEST_CASE("a plan over float32 is of few rows where every output tile has at most eight, deterministic or not") {
  const auto is_of_few_rows = [](std::int32_t group, std::int32_t query_len, bool deterministic) {
    step s(group, 2, deterministic);
    s.spec.k_code.type = s.spec.v_code.type = dtype::f32;
    s.add(query_len, 300);
    s.plan();
    return s.planned.few_rows;
  };
  for (const bool deterministic : {false, true}) {
    CAPTURE(deterministic);
    CHECK(is_of_few_rows(8, 1, deterministic));
    CHECK(is_of_few_rows(4, 2, deterministic));
    CHECK_FALSE(is_of_few_rows(4, 3, deterministic));
    CHECK_FALSE(is_of_few_rows(9, 1, deterministic));
  }
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
