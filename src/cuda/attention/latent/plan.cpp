// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/latent/plan.hpp"

#include <algorithm>
#include <functional>

#include "common/attention/visibility.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

// Costs are estimates in eighths of the time that a KV tile takes, about 1.8 µs on an H200.
constexpr std::int32_t tile_cost = 8;
constexpr std::int32_t fixed_cost = 6;        // queries, first tile, epilogue
constexpr std::int32_t combine_cost = 15;     // the second kernel, and partial results of few rows
constexpr std::int32_t partial_cost = 24;     // what those of all rows of a tile add to it
constexpr std::int32_t least_part_tiles = 2;  // a shorter part costs more than it is worth

std::int64_t divide_up(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

/// Plans a step. CTAs form `num_groups_` of `num_head_tiles_` neighbours; what a group gets, each of its CTAs gets for
/// its own heads.
class planner {
 public:
  planner(const plan_input& input, latent_plan& plan) noexcept
      : input_(input),
        plan_(plan),
        num_head_tiles_(input.spec.num_q_heads / plan.packing.heads),
        num_groups_(std::max(1, input.device.num_sms / num_head_tiles_)) {}

  void run() {
    list_row_tiles();
    const std::int64_t whole_end = deal_whole_tiles();
    const std::int64_t even = divide_up(total_cost_, num_groups_);
    const std::int64_t rows =
        std::min<std::int64_t>(latent_tile_rows, std::int64_t{input_.max_query_len} * plan_.packing.heads);
    const std::int64_t shares_end = even + fixed_cost + combine_cost + partial_cost * rows / latent_tile_rows;
    if (shares_end >= whole_end) {
      assemble();
      return;
    }
    for (std::int64_t share = even + fixed_cost; !cut_into_shares(share); share += 1 + share / 64) {
    }
    assemble();
  }

 private:
  using row_tile = prefill_plan::row_tile;
  using part = latent_plan::part;

  void list_row_tiles() {
    const attn::attention_window window = attn::window_of(input_.spec);
    const std::int64_t tokens = plan_.packing.tokens_per_tile();
    plan_.row_tiles.clear();
    total_cost_ = 0;
    for (const std::int32_t seq : plan_.seqs) {
      const std::int64_t query_len = input_.query_start_loc[seq + 1] - input_.query_start_loc[seq];
      const std::int64_t seq_len = input_.seq_lens[seq];
      const auto count = static_cast<std::int32_t>(divide_up(query_len, tokens));
      for (std::int32_t tile = count - 1; tile >= 0; --tile) {  // the longest first
        const std::int64_t first = seq_len - query_len + tile * tokens;
        const auto [begin, end] = window.of_run(first, std::min(first + tokens, seq_len) - 1, seq_len);
        row_tile t = {seq, tile, 0, 0, fixed_cost};
        if (begin < end) {
          t.tile_begin = static_cast<std::int32_t>(begin / latent_tile_keys);
          t.tile_end = static_cast<std::int32_t>(divide_up(end, latent_tile_keys));
          t.cost += (t.tile_end - t.tile_begin) * tile_cost;
        }
        plan_.row_tiles.push_back(t);
        total_cost_ += t.cost;
      }
    }
  }

  // Gives whole row tiles to the groups of CTAs, the longest first, each to the group that is ready first. Returns when
  // the last one is.
  [[nodiscard]] std::int64_t deal_whole_tiles() {
    plan_.order.clear();
    std::uint32_t index = 0;
    for (const row_tile& t : plan_.row_tiles) {
      plan_.order.push_back((static_cast<std::uint64_t>(static_cast<std::uint32_t>(t.cost)) << 32) | ~index++);
    }
    if (!std::is_sorted(plan_.order.begin(), plan_.order.end(), std::greater<>())) {
      std::sort(plan_.order.begin(), plan_.order.end(), std::greater<>());
    }
    // Load and group in one number, so that the least comes first.
    std::vector<std::int64_t>& loads = plan_.loads;
    loads.resize(static_cast<std::size_t>(num_groups_));
    for (std::int64_t group = 0; group < num_groups_; ++group) loads[static_cast<std::size_t>(group)] = group;
    std::int64_t last = 0;
    plan_.parts.clear();
    for (const std::uint64_t key : plan_.order) {
      std::pop_heap(loads.begin(), loads.end(), std::greater<>());
      const auto group = static_cast<std::int32_t>(loads.back() & group_mask);
      const auto number = static_cast<std::uint32_t>(~key);
      const row_tile& t = plan_.row_tiles[number];
      plan_.parts.push_back({group, static_cast<std::int32_t>(number), t.tile_begin, t.tile_end});
      loads.back() += static_cast<std::int64_t>(t.cost) << group_bits;
      last = std::max(last, loads.back() >> group_bits);
      std::push_heap(loads.begin(), loads.end(), std::greater<>());
    }
    std::stable_sort(plan_.parts.begin(), plan_.parts.end(),
                     [](const part& a, const part& b) { return a.group < b.group; });
    return last;
  }

  // False: shares of this cost do not hold everything.
  [[nodiscard]] bool cut_into_shares(std::int64_t share) {
    plan_.parts.clear();
    std::int32_t group = 0;
    std::int64_t left = share;
    for (std::size_t number = 0; number < plan_.row_tiles.size(); ++number) {
      const row_tile& t = plan_.row_tiles[number];
      std::int32_t begin = t.tile_begin;
      do {
        const std::int32_t rest = t.tile_end - begin;
        const std::int64_t fits = (left - fixed_cost) / tile_cost;
        const std::int32_t least = std::min(rest, least_part_tiles);
        if (left < fixed_cost || fits < least) {
          if (share < fixed_cost + std::int64_t{tile_cost} * least || ++group == num_groups_) return false;
          left = share;
          continue;
        }
        const auto taken = static_cast<std::int32_t>(std::min<std::int64_t>(rest, fits));
        plan_.parts.push_back({group, static_cast<std::int32_t>(number), begin, begin + taken});
        begin += taken;
        left -= fixed_cost + std::int64_t{tile_cost} * taken;
      } while (begin < t.tile_end);
    }
    return true;
  }

  // Writes the parts, which are in the order of groups, as work tiles of each CTA, and the outputs that are in parts.
  void assemble() {
    const auto num_sms = static_cast<std::size_t>(input_.device.num_sms);
    plan_.work_tiles.clear();
    plan_.split_outputs.clear();
    plan_.num_partials = 0;
    plan_.shares.assign(num_sms + 1, 0);
    const auto split_of = [&](const part& p) {
      const row_tile& t = plan_.row_tiles[static_cast<std::size_t>(p.row_tile)];
      return p.tile_begin != t.tile_begin || p.tile_end != t.tile_end;
    };
    std::size_t cta = 0;
    for (std::size_t begin = 0; begin < plan_.parts.size();) {
      std::size_t end = begin + 1;
      while (end < plan_.parts.size() && plan_.parts[end].group == plan_.parts[begin].group) ++end;
      for (std::int32_t tile = 0; tile < num_head_tiles_; ++tile, ++cta) {
        for (std::size_t i = begin; i < end; ++i) {
          plan_.work_tiles.push_back(work_tile_of(plan_.parts[i], tile * plan_.packing.heads));
          if (split_of(plan_.parts[i])) plan_.work_tiles.back().partial = 0;  // numbered below
        }
        plan_.shares[cta + 1] = static_cast<std::int32_t>(plan_.work_tiles.size());
      }
      begin = end;
    }
    std::fill(plan_.shares.begin() + static_cast<std::ptrdiff_t>(cta) + 1, plan_.shares.end(),
              static_cast<std::int32_t>(plan_.work_tiles.size()));
    number_partials();
    const auto num_work_tiles = static_cast<std::int32_t>(plan_.work_tiles.size());
    plan_.header = {num_work_tiles, num_work_tiles, 0, static_cast<std::int32_t>(plan_.split_outputs.size())};
  }

  // Partial results of an output follow each other in the order of their keys, which is that of groups. For one tile of
  // heads after the other, all parts are gone through.
  void number_partials() {
    for (std::int32_t tile = 0; tile < num_head_tiles_; ++tile) {
      const std::int32_t head = tile * plan_.packing.heads;
      for (std::size_t i = 0; i < plan_.work_tiles.size(); ++i) {
        prefill_work_tile& work = plan_.work_tiles[i];
        if (work.partial < 0 || work.head != head) continue;
        const bool begins = plan_.split_outputs.empty() || !same_output(work, plan_.split_outputs.back().work_tile);
        if (begins) plan_.split_outputs.push_back({static_cast<std::int32_t>(i), plan_.num_partials, 0, 0});
        ++plan_.split_outputs.back().num_partials;
        work.partial = plan_.num_partials++;
      }
    }
  }
  [[nodiscard]] bool same_output(const prefill_work_tile& work, std::int32_t other) const noexcept {
    const prefill_work_tile& o = plan_.work_tiles[static_cast<std::size_t>(other)];
    return work.seq == o.seq && work.row_tile == o.row_tile && work.head == o.head;
  }

  [[nodiscard]] prefill_work_tile work_tile_of(const part& p, std::int32_t head) const noexcept {
    const row_tile& t = plan_.row_tiles[static_cast<std::size_t>(p.row_tile)];
    const std::int32_t query_start = input_.query_start_loc[t.seq];
    return {t.seq,        input_.seq_lens[t.seq],
            query_start,  input_.query_start_loc[t.seq + 1] - query_start,
            t.tile,       head,
            p.tile_begin, p.tile_end,
            -1,           {}};
  }

  static constexpr int group_bits = 16;
  static constexpr std::int64_t group_mask = (1 << group_bits) - 1;

  const plan_input& input_;
  latent_plan& plan_;
  std::int32_t num_head_tiles_;
  std::int32_t num_groups_;
  std::int64_t total_cost_ = 0;
};

}  // namespace

void plan_latent(const plan_input& input, latent_plan& plan) {
  const std::int32_t heads = latent_packed_heads(input.spec.num_q_heads);
  plan.num_tokens = input.num_tokens;
  plan.few_rows = input.max_query_len * std::int64_t{input.spec.num_q_heads} <= latent_few_rows;
  plan.packing = {heads, (plan.few_rows ? latent_few_rows : latent_tile_rows) / heads, 1};
  planner(input, plan).run();
  plan_combine(input, latent_v_dims, plan);
}

std::int64_t max_latent_work_tiles(const attention_spec& spec, const step_limits& limits,
                                   std::int32_t num_sms) noexcept {
  const std::int32_t heads = latent_packed_heads(spec.num_q_heads);
  const std::int64_t per_tile = latent_tile_rows / heads;
  // ⌈tokens / per tile⌉, summed over the sequences that can have new tokens; and a further part for each cut.
  const std::int64_t row_tiles = (limits.num_tokens + limits.num_seqs_with_tokens() * (per_tile - 1)) / per_tile;
  return row_tiles * (spec.num_q_heads / heads) + num_sms;
}

}  // namespace bifolio::inline v0_2::cuda
