// SPDX-License-Identifier: Apache-2.0
// The work tiles of prefill: every KV tile of every row tile and head is in exactly one of them, partial results are
// numbered in the order of their keys, buffers hold whatever is planned, and the SMs are busy.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <queue>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "cuda/attention/prefill/plan.hpp"
#include "support/random.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

struct step {
  attention_spec spec;
  std::int32_t tile_keys = 0;
  std::vector<std::int32_t> starts{0};
  std::vector<std::int32_t> lens;
  std::int32_t num_sms = 132;
  std::size_t l2_bytes = std::size_t{60} << 20;
  cuda::prefill_plan planned;

  step(std::int32_t group, std::int32_t kv_heads, std::int32_t head_dim = 128, dtype type = dtype::bf16) {
    spec.num_q_heads = group * kv_heads;
    spec.num_kv_heads = kv_heads;
    spec.qk_head_dim = spec.v_head_dim = head_dim;
    spec.block_size = 16;
    spec.q_type = spec.out_type = spec.k_code.type = spec.v_code.type = type;
    tile_keys = cuda::prefill_tiling_of(spec).keys;
  }
  step& add(std::int32_t query_len, std::int32_t seq_len, int count = 1) {
    for (int i = 0; i < count; ++i) {
      starts.push_back(starts.back() + query_len);
      lens.push_back(seq_len);
    }
    return *this;
  }
  [[nodiscard]] cuda::plan_input input() const {
    cuda::plan_input in;
    in.spec = spec;
    in.num_seqs = static_cast<std::int32_t>(lens.size());
    in.query_start_loc = starts.data();
    in.seq_lens = lens.data();
    in.num_tokens = starts.back();
    in.device.num_sms = num_sms;
    in.device.l2_bytes = l2_bytes;
    return in;
  }
  step& plan() {
    planned.seqs.clear();
    for (std::int32_t seq = 0; seq < static_cast<std::int32_t>(lens.size()); ++seq) {
      if (query_len(seq) > 0) planned.seqs.push_back(seq);
    }
    cuda::plan_prefill(input(), planned);
    return *this;
  }
  [[nodiscard]] std::int32_t query_len(std::int32_t seq) const {
    const auto i = static_cast<std::size_t>(seq);
    return starts[i + 1] - starts[i];
  }
  [[nodiscard]] bool has_shares() const { return planned.header.heads_in_group == 0; }

  /// What the n-th item is on the device.
  [[nodiscard]] cuda::prefill_work_tile item(std::int32_t n, const cuda::prefill_metadata& m) const {
    if (has_shares()) return m.work_tiles[n];
    const cuda::prefill_place place = cuda::prefill_place_of(*m.header, n);
    cuda::prefill_work_tile work = m.work_tiles[place.entry];
    work.head = place.head * planned.packing.heads;
    return work;
  }
  /// The metadata as a kernel finds it on the device.
  [[nodiscard]] std::vector<std::byte> metadata() const {
    std::vector<std::byte> bytes(
        cuda::prefill_metadata_bytes(static_cast<std::int64_t>(planned.work_tiles.size()), num_sms));
    cuda::write_metadata(planned, num_sms, bytes.data());
    return bytes;
  }

  /// Share of the SMs' time in which they have KV tiles to process, until the last one has none. A tile costs 8, and 5
  /// where its rows are in one half, or 6 in float32.
  [[nodiscard]] double busy() const {
    const std::vector<std::byte> bytes = metadata();
    const cuda::prefill_metadata m = cuda::prefill_metadata_at(bytes.data(), num_sms);
    std::int64_t total = 0;
    std::int64_t last = 0;
    const auto tiles_of = [&](std::int32_t n) {
      const cuda::prefill_work_tile work = item(n, m);
      const std::int32_t tokens = work.query_len - work.row_tile * planned.packing.tokens_per_tile();
      return (std::int64_t{work.tile_end} - work.tile_begin) * (tokens > planned.packing.tokens_per_warpgroup ? 8
                                                                : spec.q_type == dtype::f32                   ? 6
                                                                                                              : 5);
    };
    if (has_shares()) {
      for (std::int32_t cta = 0; cta < num_sms; ++cta) {
        std::int64_t share = 0;
        for (std::int32_t n = m.ctas[cta].next - 1; n < m.ctas[cta].end; ++n) share += tiles_of(n);
        total += share;
        last = std::max(last, share);
      }
    } else {
      // Each CTA takes the next one when it is ready.
      std::priority_queue<std::int64_t, std::vector<std::int64_t>, std::greater<>> ready;
      for (std::int32_t cta = 0; cta < num_sms; ++cta) ready.push(0);
      for (std::int32_t n = 0; n < m.header->num_items; ++n) {
        const std::int64_t end = ready.top() + tiles_of(n);
        ready.pop();
        ready.push(end);
        total += tiles_of(n);
        last = std::max(last, end);
      }
    }
    return static_cast<double>(total) / static_cast<double>(last * num_sms);
  }
};

/// Every token and head has a row; every KV tile that a row tile attends to is in one work tile of it.
void check_plan(const step& s) {
  const std::vector<std::byte> bytes = s.metadata();
  const cuda::prefill_metadata m = cuda::prefill_metadata_at(bytes.data(), s.num_sms);
  const cuda::prefill_plan& plan = s.planned;
  CHECK(m.header->num_split_outputs < std::max(s.num_sms, 2));
  // Partial results of deterministic plans are numbered by rows.
  const std::int32_t most_partials = cuda::prefill_max_partials(s.num_sms, s.spec.deterministic);
  CHECK(plan.num_partials <= most_partials * (s.spec.deterministic ? cuda::prefill_warpgroup_rows : 1));
  // CTAs have consecutive shares, or begin with consecutive items.
  std::int32_t end = 0;
  for (std::int32_t cta = 0; cta < s.num_sms; ++cta) {
    const cuda::prefill_cta& mine = m.ctas[cta];
    const std::int32_t first = s.has_shares() ? mine.next - 1 : cta;
    const std::int32_t own_end = s.has_shares() ? mine.end : m.header->num_items;
    if (s.has_shares()) {
      CHECK(first == end);
      CHECK(first <= mine.end);
    } else {
      CHECK(mine.next == -1);
      CHECK(mine.end == m.header->num_items);
    }
    end = own_end;
    CHECK((mine.first.seq >= 0) == (first < own_end));
    if (first >= own_end) continue;
    const cuda::prefill_work_tile wanted = s.item(first, m);
    CHECK(std::memcmp(&mine.first, &wanted, sizeof(wanted)) == 0);
  }
  CHECK(end == m.header->num_items);

  struct part {
    std::int32_t begin, end, partial;
  };
  std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t>, std::vector<part>> parts;
  for (std::int32_t n = 0; n < m.header->num_items; ++n) {
    const cuda::prefill_work_tile work = s.item(n, m);
    REQUIRE(work.seq >= 0);
    CHECK(work.seq_len == s.lens[static_cast<std::size_t>(work.seq)]);
    CHECK(work.query_start == s.starts[static_cast<std::size_t>(work.seq)]);
    CHECK(work.query_len == s.query_len(work.seq));
    parts[{work.seq, work.row_tile, work.head}].push_back({work.tile_begin, work.tile_end, work.partial});
  }
  const std::int32_t tokens_per_tile = plan.packing.tokens_per_tile();
  CHECK(plan.packing.tokens_per_warpgroup * plan.packing.heads <= cuda::prefill_warpgroup_rows);
  const std::int32_t group = s.spec.num_q_heads / s.spec.num_kv_heads;
  CHECK((plan.packing.heads == 1 || plan.packing.heads == group));
  std::size_t expected = 0;
  std::set<std::int32_t> partials;
  for (const std::int32_t seq : plan.seqs) {
    for (std::int32_t tile = 0; tile * tokens_per_tile < s.query_len(seq); ++tile) {
      // Key by key, as no formula of the planner does it.
      const std::int32_t seq_len = s.lens[static_cast<std::size_t>(seq)];
      std::vector<bool> needed(static_cast<std::size_t>(seq_len / s.tile_keys + 1));
      const std::int32_t last = std::min(s.query_len(seq), (tile + 1) * tokens_per_tile) - 1;
      for (const std::int32_t token : {tile * tokens_per_tile, last}) {
        const std::int64_t position = std::int64_t{seq_len} - s.query_len(seq) + token;
        for (std::int32_t key = 0; key < seq_len; ++key) {
          if (s.spec.causal && key > position) continue;
          if (!s.spec.causal && s.spec.window_right >= 0 && key > position + s.spec.window_right) continue;
          if (s.spec.window_left >= 0 && key < position - s.spec.window_left) continue;
          needed[static_cast<std::size_t>(key / s.tile_keys)] = true;
        }
      }
      for (std::int32_t head = 0; head < s.spec.num_q_heads; head += plan.packing.heads) {
        const auto found = parts.find({seq, tile, head});
        REQUIRE(found != parts.end());
        ++expected;
        std::vector<part>& here = found->second;
        // Those of deterministic plans are dealt out in any order.
        if (s.spec.deterministic) {
          std::sort(here.begin(), here.end(), [](const part& a, const part& b) { return a.begin < b.begin; });
        }
        const std::int32_t rows =
            std::min(s.query_len(seq) - tile * tokens_per_tile, tokens_per_tile) * plan.packing.heads;
        const std::int32_t step = s.spec.deterministic ? rows : 1;
        const bool in_parts = here.size() > 1;
        for (std::size_t i = 0; i < here.size(); ++i) {
          if (i > 0) CHECK(here[i].begin == here[i - 1].end);
          CHECK((here[i].partial >= 0) == in_parts);
          if (in_parts) {
            CHECK(here[i].begin < here[i].end);
            CHECK(here[i].partial == here[0].partial + static_cast<std::int32_t>(i) * step);
            for (std::int32_t n = 0; n < step; ++n) CHECK(partials.insert(here[i].partial + n).second);
            if (s.spec.deterministic) {
              const std::int32_t part_tiles = cuda::prefill_part_keys / s.tile_keys;
              CHECK(here[i].begin / part_tiles == (here[i].end - 1) / part_tiles);
            }
          }
        }
        for (std::size_t i = 0; i < needed.size(); ++i) {
          const auto t = static_cast<std::int32_t>(i);
          if (needed[i]) CHECK((here.front().begin <= t && t < here.back().end));
        }
        if (here.front().begin < here.back().end) {
          CHECK(needed[static_cast<std::size_t>(here.front().begin)]);
          CHECK(needed[static_cast<std::size_t>(here.back().end) - 1]);
        }
      }
    }
  }
  CHECK(parts.size() == expected);
  CHECK(static_cast<std::int32_t>(partials.size()) == plan.num_partials);
  CHECK((partials.empty() || *partials.rbegin() == plan.num_partials - 1));
  CHECK(plan.combines == !partials.empty());
  std::int32_t next = 0;
  for (std::int32_t i = 0; i < m.header->num_split_outputs; ++i) {
    const cuda::prefill_split_output& output = m.split_outputs[i];
    CHECK(output.first_partial == next);
    CHECK(output.num_partials > 1);
    const std::int32_t step = s.spec.deterministic ? output.partial_rows : 1;
    next += output.num_partials * step;
    const std::int32_t of_tile = m.work_tiles[output.work_tile].partial - output.first_partial;
    CHECK(of_tile % step == 0);
    CHECK((s.spec.deterministic ? of_tile >= 0 && of_tile / step < output.num_partials : of_tile == 0));
  }
  CHECK(next == plan.num_partials);
}

}  // namespace

TEST_CASE("every KV tile that rows of prefill attend to is in one work tile") {
  std::mt19937_64 random(test_seed());
  CAPTURE(seed_note());
  const auto below = [&](std::uint64_t n) { return static_cast<std::int32_t>(random() % n); };
  int with_shares = 0;
  int with_partials = 0;
  for (int round = 0; round < 300; ++round) {
    const std::int32_t head_dims[] = {64, 80, 128, 192, 256, 512};
    const std::int32_t head_dim = head_dims[below(6)];
    const dtype type = head_dim <= 128 && below(3) == 0 ? dtype::f32 : dtype::bf16;
    step s(1 + below(below(4) == 0 ? 80 : 9), 1 + below(8), head_dim, type);
    if (type != dtype::f32 && head_dim <= 256 && below(2) == 0) {
      s.spec.k_code = {dtype::e4m3};
      s.spec.v_code = {dtype::i8, below(2) == 0 ? scale_granularity::token_head : scale_granularity::layer};
      s.tile_keys = cuda::prefill_tiling_of(s.spec).keys;
    }
    s.num_sms = 1 + below(140);
    if (below(2) == 0) s.l2_bytes = 1 << 20;
    s.spec.causal = below(3) != 0;
    if (below(3) == 0) s.spec.window_left = below(2000);
    if (below(3) == 0) s.spec.window_right = below(100);
    const int num_seqs = 1 + below(below(3) == 0 ? 40 : 4);
    for (int i = 0; i < num_seqs; ++i) {
      const std::int32_t query_len = below(4) == 0 ? below(600) : below(40);
      s.add(query_len, query_len + below(below(2) == 0 ? 6000 : 300));
    }
    s.plan();
    check_plan(s);
    with_shares += s.has_shares();
    with_partials += s.planned.num_partials > 0;
    const cuda::step_limits limits{num_seqs, s.starts.back(), 1 << 20};
    CHECK(static_cast<std::int64_t>(s.planned.work_tiles.size()) <=
          cuda::max_prefill_work_tiles(s.spec, limits, s.num_sms));
  }
  CHECK(with_shares > 30);
  CHECK(with_shares < 270);
  CHECK(with_partials > 30);
}

TEST_CASE("tiles of codes have the keys of 16-bit ones up to 192 dims, and 64 above") {
  using g = scale_granularity;
  for (const std::int32_t head_dim : {64, 96, 128, 144, 192, 208, 256}) {
    const std::int32_t wide = step(4, 8, head_dim).tile_keys;
    CHECK(wide == (head_dim <= 128 ? 128 : head_dim <= 192 ? 96 : 80));
    step s(4, 8, head_dim);
    const auto keys_of = [&](const kv_code& k, const kv_code& v) {
      s.spec.k_code = k;
      s.spec.v_code = v;
      return cuda::prefill_tiling_of(s.spec).keys;
    };
    const std::int32_t coded = head_dim > 192 ? 64 : wide;
    CHECK(keys_of({dtype::e4m3}, {dtype::i8, g::head}) == coded);
    CHECK(keys_of({dtype::e4m3, g::token_head}, {dtype::e4m3}) == coded);
    CHECK(keys_of({dtype::u8, g::token_head}, {dtype::u8, g::token_head}) == coded);
  }
}

TEST_CASE("prefill keeps at least 0.97 of 132 SMs busy") {
  struct shape {
    std::int32_t group, kv_heads, query_len, seq_len;
    int batch;
  };
  for (const shape& c :
       {shape{4, 8, 8192, 8192, 1}, shape{1, 32, 8192, 8192, 1}, shape{1, 16, 8192, 8192, 1},
        shape{1, 8, 8192, 8192, 1}, shape{1, 32, 4096, 4096, 1}, shape{1, 32, 2048, 2048, 8},
        shape{4, 8, 2048, 2048, 8}, shape{8, 8, 8192, 8192, 1}, shape{5, 8, 8192, 8192, 1}, shape{6, 8, 8192, 8192, 1},
        shape{7, 4, 8192, 8192, 1}, shape{4, 8, 512, 8192, 8}, shape{5, 8, 512, 8192, 1}, shape{6, 8, 512, 8192, 1},
        shape{7, 8, 512, 8192, 1}, shape{8, 8, 512, 8192, 1}, shape{4, 8, 512, 8192, 1}}) {
    for (const std::int32_t head_dim : {64, 128}) {
      for (const dtype type : {dtype::bf16, dtype::f32}) {
        step s(c.group, c.kv_heads, head_dim, type);
        s.add(c.query_len, c.seq_len, c.batch).plan();
        CAPTURE(head_dim);
        CAPTURE(to_string(type));
        CAPTURE(c.group);
        CAPTURE(c.kv_heads);
        CAPTURE(c.query_len);
        CAPTURE(c.batch);
        CAPTURE(s.has_shares());
        CHECK(s.busy() >= 0.97);
      }
    }
  }
}

TEST_CASE("a few tokens on a long context are cut over all SMs") {
  for (const std::int32_t tokens : {5, 16, 17, 32, 33, 64, 128, 129, 256}) {
    for (const dtype type : {dtype::bf16, dtype::f32}) {
      step s(4, 8, 128, type);
      s.add(tokens, 32768).plan();
      CAPTURE(tokens);
      CAPTURE(to_string(type));
      CHECK(s.has_shares());
      CHECK(s.planned.num_partials > 0);
      CHECK(s.busy() >= 0.9);
      check_plan(s);
    }
  }
}

TEST_CASE("row tiles that share more keys than the L2 holds are cut at the same keys, if that keeps the SMs busy") {
  struct row {
    std::int32_t tokens, context, num_parts;
  };
  // 32 tokens of a group of 4 are a row tile; there are 8 KV heads. 0: cut unlike one another.
  for (const row& r :
       {row{256, 131072, 2}, row{128, 131072, 4}, row{512, 131072, 1}, row{96, 131072, 0}, row{160, 131072, 0}}) {
    CAPTURE(r.tokens);
    CAPTURE(r.context);
    step s(4, 8);
    s.add(r.tokens, r.context).plan();
    check_plan(s);
    CHECK(s.busy() >= 0.96);
    const std::vector<cuda::prefill_work_tile>& works = s.planned.work_tiles;
    const std::size_t row_tiles = static_cast<std::size_t>(r.tokens / 32);
    if (r.num_parts == 0) {
      CHECK(works.size() % (row_tiles * 8) != 0);
      continue;
    }
    CHECK(s.has_shares() == (r.num_parts > 1));
    REQUIRE(works.size() == row_tiles * static_cast<std::size_t>(r.num_parts > 1 ? 8 * r.num_parts : 1));
    for (std::size_t i = 0; i + 1 < works.size(); ++i) {
      if ((i + 1) % row_tiles == 0) continue;  // those next to each other read the same keys
      CHECK(std::abs(works[i].tile_begin - works[i + 1].tile_begin) <= 1);
      CHECK(std::abs(works[i].tile_end - works[i + 1].tile_end) <= 1);
    }
  }
}

TEST_CASE("of several row tiles for each SM only the last are cut, and CTAs begin with those that share keys") {
  for (const std::int32_t query_len : {256, 512}) {
    CAPTURE(query_len);
    step s(4, 8);
    s.add(query_len, 8192, 8).plan();
    check_plan(s);
    REQUIRE(s.has_shares());
    CHECK(s.busy() >= 0.98);
    const std::int32_t whole = query_len / 32 * 8 * 8 / s.num_sms - 1;  // for each CTA, at least
    REQUIRE(whole > 1);
    for (std::int32_t place = 0; place < whole; ++place) {
      CAPTURE(place);
      std::set<std::pair<std::int32_t, std::int32_t>> read;
      for (std::size_t cta = 0; cta < static_cast<std::size_t>(s.num_sms); ++cta) {
        REQUIRE(s.planned.shares[cta] + place < s.planned.shares[cta + 1]);
        const cuda::prefill_work_tile& work =
            s.planned.work_tiles[static_cast<std::size_t>(s.planned.shares[cta] + place)];
        CHECK(work.partial < 0);
        read.insert({work.seq, work.head});
      }
      // 16 or 8 row tiles share the keys of a sequence and head; 132 CTAs begin with those of nine or 17, and of some
      // whose first row tiles were taken a place before.
      CHECK(read.size() <= 24);
    }
  }
}

TEST_CASE("no row tile of a deterministic plan is cut, and each CTA has room for what its tree keeps of one") {
  struct shape {
    std::int32_t head_dim, tile_keys;
    std::size_t floats_per_row;  // a root; above 128 dims and in float32 a node as well
    dtype type = dtype::bf16;
  };
  for (const shape& of : {shape{128, 128, 128}, shape{80, 128, 96}, shape{160, 64, 2 * 192}, shape{256, 64, 2 * 256},
                          shape{60, 32, 2 * 64, dtype::f32}, shape{128, 32, 2 * 128, dtype::f32}}) {
    for (const std::int32_t query_len : {8, 100, 2048}) {
      step s(4, 8, of.head_dim, of.type);
      s.spec.deterministic = true;
      s.tile_keys = cuda::prefill_tiling_of(s.spec).keys;
      CHECK(s.tile_keys == of.tile_keys);
      s.add(query_len, 100000).plan();
      CHECK_FALSE(s.has_shares());
      CHECK(s.planned.num_partials == 0);
      CHECK_FALSE(s.planned.combines);
      check_plan(s);
      CHECK(cuda::prefill_workspace_bytes(s.spec, s.num_sms) ==
            std::size_t{132} * 128 * of.floats_per_row * sizeof(float));
    }
  }
}

TEST_CASE("row tiles of deterministic plans above 256 dims are cut at multiples of the keys of a part, or not at all") {
  std::mt19937_64 random(test_seed());
  CAPTURE(seed_note());
  const auto below = [&](std::uint64_t n) { return static_cast<std::int32_t>(random() % n); };
  int with_partials = 0;
  for (int round = 0; round < 100; ++round) {
    step s(1 + below(9), 1 + below(8), below(2) == 0 ? 512 : 264);
    s.spec.deterministic = true;
    s.tile_keys = cuda::prefill_tiling_of(s.spec).keys;
    s.num_sms = 1 + below(140);
    if (below(3) == 0) s.spec.window_left = below(5000);
    const int num_seqs = 1 + below(below(3) == 0 ? 60 : 4);
    for (int i = 0; i < num_seqs; ++i) {
      const std::int32_t query_len = below(4) == 0 ? below(300) : 1;
      s.add(query_len, query_len + below(below(2) == 0 ? 20000 : 300));
    }
    s.plan();
    check_plan(s);
    with_partials += s.planned.num_partials > 0;
    const cuda::step_limits limits{num_seqs, s.starts.back(), 1 << 20};
    CHECK(static_cast<std::int64_t>(s.planned.work_tiles.size()) <=
          cuda::max_prefill_work_tiles(s.spec, limits, s.num_sms));
    CHECK(cuda::prefill_workspace_bytes(s.spec, s.num_sms) ==
          static_cast<std::size_t>(s.num_sms) * 64 * (4 * (static_cast<std::size_t>(s.spec.v_head_dim) + 2) + 512) *
              sizeof(float));
  }
  CHECK(with_partials > 20);
  // One token on 8192 keys keeps 64 CTAs busy, and sequences that fill the device are whole.
  step one(4, 8, 512);
  one.spec.deterministic = true;
  one.tile_keys = cuda::prefill_tiling_of(one.spec).keys;
  one.add(1, 8192).plan();
  CHECK(one.planned.work_tiles.size() == 64);
  step many(4, 8, 512);
  many.spec.deterministic = true;
  many.tile_keys = one.tile_keys;
  for (int i = 0; i < 64; ++i) many.add(1, 8192);
  many.plan();
  CHECK(many.planned.num_partials == 0);
}

TEST_CASE("heads of a group share row tiles, one at a time where that leaves fewer rows unused") {
  CHECK(step(4, 2).add(100, 100).plan().planned.packing.heads == 4);
  CHECK(step(5, 2).add(3, 5000).plan().planned.packing.heads == 5);
  CHECK(step(5, 2).add(4096, 4096).plan().planned.packing.heads == 1);
  CHECK(step(64, 1).add(100, 100).plan().planned.packing.tokens_per_warpgroup == 1);
  CHECK(step(65, 1).add(100, 100).plan().planned.packing.heads == 1);
}
