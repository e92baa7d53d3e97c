// SPDX-License-Identifier: Apache-2.0
// The work tiles of latent attention: every KV tile of every row tile and tile of heads is in exactly one of them, the
// CTAs of a group get the same keys at the same time, partial results are numbered in the order of their keys, and what
// is planned fits into its buffers.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "cuda/attention/latent/plan.hpp"
#include "support/random.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

struct step {
  attention_spec spec;
  std::vector<std::int32_t> starts{0};
  std::vector<std::int32_t> lens;
  std::int32_t num_sms = 132;
  cuda::latent_plan planned;

  explicit step(std::int32_t heads) {
    spec.num_q_heads = heads;
    spec.num_kv_heads = 1;
    spec.qk_head_dim = cuda::latent_qk_dims;
    spec.v_head_dim = cuda::latent_v_dims;
    spec.v_in_k = true;
    spec.block_size = 64;
  }
  step& add(std::int32_t query_len, std::int32_t seq_len, int count = 1) {
    for (int i = 0; i < count; ++i) {
      starts.push_back(starts.back() + query_len);
      lens.push_back(seq_len);
    }
    return *this;
  }
  step& plan() {
    cuda::plan_input in;
    in.spec = spec;
    in.num_seqs = static_cast<std::int32_t>(lens.size());
    in.query_start_loc = starts.data();
    in.seq_lens = lens.data();
    in.num_tokens = starts.back();
    in.device.num_sms = num_sms;
    planned.seqs.clear();
    for (std::int32_t seq = 0; seq < in.num_seqs; ++seq) {
      const auto i = static_cast<std::size_t>(seq);
      in.max_query_len = std::max(in.max_query_len, starts[i + 1] - starts[i]);
      if (starts[i + 1] > starts[i]) planned.seqs.push_back(seq);
    }
    cuda::plan_latent(in, planned);
    return *this;
  }
  [[nodiscard]] std::int32_t head_tiles() const { return spec.num_q_heads / planned.packing.heads; }
  [[nodiscard]] std::int64_t tiles_of_cta(std::size_t cta) const {
    std::int64_t total = 0;
    for (std::int32_t n = planned.shares[cta]; n < planned.shares[cta + 1]; ++n) {
      const cuda::prefill_work_tile& work = planned.work_tiles[static_cast<std::size_t>(n)];
      total += work.tile_end - work.tile_begin;
    }
    return total;
  }
  [[nodiscard]] std::int64_t most_tiles() const {
    std::int64_t most = 0;
    for (std::size_t cta = 0; cta < static_cast<std::size_t>(num_sms); ++cta) {
      most = std::max(most, tiles_of_cta(cta));
    }
    return most;
  }
};

void check_plan(const step& s) {
  const cuda::latent_plan& plan = s.planned;
  const auto num_sms = static_cast<std::size_t>(s.num_sms);
  CHECK(plan.num_partials <= cuda::prefill_max_partials(s.num_sms));
  CHECK(static_cast<std::int32_t>(plan.split_outputs.size()) <= s.num_sms);
  CHECK(plan.header.heads_in_group == 0);
  CHECK(plan.header.num_split_outputs == static_cast<std::int32_t>(plan.split_outputs.size()));
  REQUIRE(plan.shares.size() == num_sms + 1);
  CHECK(plan.shares.front() == 0);
  CHECK(plan.shares.back() == static_cast<std::int32_t>(plan.work_tiles.size()));
  CHECK(std::is_sorted(plan.shares.begin(), plan.shares.end()));

  // The CTAs of a group have the same ranges of keys for one tile of heads after the other.
  const auto heads = static_cast<std::size_t>(s.head_tiles());
  for (std::size_t cta = 0; cta + heads <= num_sms; cta += heads) {
    const std::int32_t count = plan.shares[cta + 1] - plan.shares[cta];
    for (std::size_t h = 1; h < heads; ++h) {
      REQUIRE(plan.shares[cta + h + 1] - plan.shares[cta + h] == count);
      for (std::int32_t n = 0; n < count; ++n) {
        const auto& a = plan.work_tiles[static_cast<std::size_t>(plan.shares[cta] + n)];
        const auto& b = plan.work_tiles[static_cast<std::size_t>(plan.shares[cta + h] + n)];
        CHECK(std::tie(a.seq, a.row_tile, a.tile_begin, a.tile_end) ==
              std::tie(b.seq, b.row_tile, b.tile_begin, b.tile_end));
        CHECK(b.head == static_cast<std::int32_t>(h) * plan.packing.heads);
      }
    }
  }

  // Ranges of each output, by where they begin.
  using output = std::tuple<std::int32_t, std::int32_t, std::int32_t>;  // sequence, row tile, head
  std::map<output, std::map<std::int32_t, cuda::prefill_work_tile>> parts;
  for (const cuda::prefill_work_tile& work : plan.work_tiles) {
    CHECK(parts[{work.seq, work.row_tile, work.head}].emplace(work.tile_begin, work).second);
  }
  std::size_t num_outputs = 0;
  std::int32_t num_partials = 0;
  for (const std::int32_t seq : plan.seqs) {
    const auto i = static_cast<std::size_t>(seq);
    const std::int32_t query_len = s.starts[i + 1] - s.starts[i];
    const std::int32_t tokens = plan.packing.tokens_per_tile();
    for (std::int32_t tile = 0; tile * tokens < query_len; ++tile) {
      const std::int32_t last = s.lens[i] - query_len + std::min(query_len, (tile + 1) * tokens) - 1;
      const std::int32_t end = s.spec.causal ? last + 1 : s.lens[i];
      const std::int32_t num_tiles = (std::max(0, end) + cuda::latent_tile_keys - 1) / cuda::latent_tile_keys;
      for (std::int32_t head = 0; head < s.spec.num_q_heads; head += plan.packing.heads) {
        ++num_outputs;
        const auto found = parts.find({seq, tile, head});
        REQUIRE(found != parts.end());
        std::int32_t next = 0;
        std::int32_t partial = found->second.begin()->second.partial;
        if (found->second.size() == 1) CHECK(partial == -1);
        for (const auto& [begin, work] : found->second) {
          CHECK(begin == next);
          CHECK(work.query_len == query_len);
          CHECK(work.query_start == s.starts[i]);
          CHECK(work.seq_len == s.lens[i]);
          next = work.tile_end;
          if (found->second.size() == 1) continue;
          CHECK(work.partial == partial++);
          ++num_partials;
        }
        CHECK(next == num_tiles);
      }
    }
  }
  CHECK(parts.size() == num_outputs);
  CHECK(num_partials == plan.num_partials);
  num_partials = 0;
  for (const cuda::prefill_split_output& split : plan.split_outputs) {
    CHECK(split.first_partial == num_partials);
    CHECK(plan.work_tiles[static_cast<std::size_t>(split.work_tile)].partial == split.first_partial);
    num_partials += split.num_partials;
  }
  CHECK(num_partials == plan.num_partials);

  // Groups of lanes of the combine: each has more than three quarters of a batch of the longest output's parts, and the
  // grid a warp for each piece of a row.
  const std::int32_t groups = 1 << plan.header.log_combine_groups;
  REQUIRE((groups >= 1 && groups <= 8));
  if (groups == 1) return;
  std::int32_t longest = 0;
  for (const cuda::prefill_split_output& split : plan.split_outputs) longest = std::max(longest, split.num_partials);
  CHECK(4 * longest > 3 * cuda::prefill_combine_batch * groups);
  const std::int64_t rows = std::int64_t{plan.packing.tokens_per_tile()} * plan.packing.heads;
  const std::int64_t pieces = static_cast<std::int64_t>(plan.split_outputs.size()) * rows * cuda::latent_v_dims /
                              cuda::prefill_combine_columns * groups;
  CHECK(pieces <= std::int64_t{cuda::prefill_combine_warps} * cuda::prefill_combine_ctas_per_sm * s.num_sms);
}

}  // namespace

TEST_CASE("latent attention packs all heads that fit into a row tile") {
  CHECK(cuda::latent_packed_heads(1) == 1);
  CHECK(cuda::latent_packed_heads(16) == 16);
  CHECK(cuda::latent_packed_heads(64) == 64);
  CHECK(cuda::latent_packed_heads(65) == 13);
  CHECK(cuda::latent_packed_heads(96) == 48);
  CHECK(cuda::latent_packed_heads(128) == 64);
  CHECK(cuda::latent_packed_heads(71) == 0);
  CHECK(cuda::latent_packed_heads(512) == 64);
  CHECK(cuda::latent_packed_heads(576) == 0);
}

TEST_CASE("few rows have a kernel of their own") {
  CHECK(step(16).add(1, 100, 3).plan().planned.few_rows);
  CHECK_FALSE(step(16).add(1, 100, 3).add(2, 100).plan().planned.few_rows);
  CHECK(step(4).add(4, 100).plan().planned.few_rows);
  CHECK_FALSE(step(17).add(1, 100).plan().planned.few_rows);
}

TEST_CASE("latent attention's usual steps keep all multiprocessors busy") {
  for (const std::int32_t heads : {16, 64, 128}) {
    CAPTURE(heads);
    for (const std::int32_t batch : {1, 2, 8, 64, 128, 200}) {
      CAPTURE(batch);
      step s(heads);
      s.add(1, 8192, batch).plan();
      check_plan(s);
      const std::int64_t total = std::int64_t{128} * batch * s.head_tiles();
      // A part has two tiles at least, and costs about one more.
      CHECK(s.most_tiles() <= (total + s.num_sms - 1) / s.num_sms + 4);
    }
  }
}

TEST_CASE("random steps of latent attention are planned completely") {
  std::mt19937_64 random(test_seed());
  CAPTURE(seed_note());
  const auto below = [&](std::uint64_t n) { return static_cast<std::int32_t>(random() % n); };
  constexpr std::int32_t head_counts[] = {1, 5, 16, 17, 64, 65, 96, 128, 512};
  for (int round = 0; round < 150; ++round) {
    step s(head_counts[below(9)]);
    s.num_sms = below(4) == 0 ? 8 + below(30) : 132;
    s.spec.causal = below(4) != 0;
    const std::int32_t num_seqs = 1 + below(round % 3 == 0 ? 200 : 6);
    std::int64_t num_tokens = 0;
    std::int64_t num_with_tokens = 0;
    for (std::int32_t i = 0; i < num_seqs; ++i) {
      const std::int32_t query_len = below(5) == 0 ? below(40) : below(3);
      s.add(query_len, query_len + below(below(4) == 0 ? 20000 : 300));
      num_tokens += query_len;
      num_with_tokens += query_len > 0 ? 1 : 0;
    }
    s.plan();
    CAPTURE(s.spec.num_q_heads);
    CAPTURE(num_seqs);
    check_plan(s);
    cuda::step_limits limits;
    limits.num_seqs = num_with_tokens;
    limits.num_tokens = num_tokens;
    limits.seq_len = *std::max_element(s.lens.begin(), s.lens.end());
    // Tiles of few rows hold fewer tokens; a step of the limits may be of those.
    CHECK(static_cast<std::int64_t>(s.planned.work_tiles.size()) <=
          cuda::max_latent_work_tiles(s.spec, limits, s.num_sms));
  }
}

TEST_CASE("many parts of few rows are combined by groups of lanes, few parts by whole warps") {
  const auto log_groups = [](std::int32_t heads, int num_seqs, std::int32_t seq_len) {
    step s(heads);
    s.add(1, seq_len, num_seqs).plan();
    check_plan(s);
    return s.planned.header.log_combine_groups;
  };
  CHECK(log_groups(16, 1, 8192) == 3);  // 64 parts
  CHECK(log_groups(16, 2, 8192) == 3);  // of each 64
  CHECK(log_groups(16, 4, 8192) == 2);  // 33
  CHECK(log_groups(16, 8, 8192) == 1);  // 17
  CHECK(log_groups(16, 16, 8192) == 0);
  CHECK(log_groups(16, 128, 4096) == 0);  // none is cut
  CHECK(log_groups(128, 1, 8192) == 3);   // two tiles of heads, of each 64 parts
}
