// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/prefill/plan.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>

#include "common/attention/visibility.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

// Costs are estimates in eighths of the time that a KV tile takes; that time, for 128 rows and keys of head_dim 128,
// and what is not divided among the SMs, in microseconds on an H200.
constexpr std::int32_t tile_cost = 8;
constexpr std::int32_t fixed_cost = 6;  // queries, first tile, epilogue
constexpr std::int32_t combine_cost = 15;
// Row tiles of a sequence and head: fewer read nearly the same keys wherever they are cut.
constexpr std::int64_t few_row_tiles = 4;
constexpr double cost_us = 1.87 / tile_cost;
constexpr double launch_us = 3.5;
// What a KV tile takes where K or V has 16 bits beside codes: its producer is what the kernel waits for.
constexpr double bf16_beside_codes = 1.55;
constexpr double f16_beside_codes = 1.2;

double cost_of_planes(const attention_spec& spec) noexcept {
  if (size_of(spec.k_code.type) == size_of(spec.v_code.type)) return 1;
  const bool has_bf16 = spec.k_code.type == dtype::bf16 || spec.v_code.type == dtype::bf16;
  return has_bf16 ? bf16_beside_codes : f16_beside_codes;
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

std::int32_t group_of(const attention_spec& spec) noexcept { return spec.num_q_heads / spec.num_kv_heads; }

/// Row tiles of a sequence: how many, and each.
class sequence_tiles {
 public:
  sequence_tiles(const attention_spec& spec, const prefill_packing& packing, std::int32_t query_len,
                 std::int32_t seq_len) noexcept
      : window_(attn::window_of(spec)),
        packing_(packing),
        tiling_(prefill_tiling_of(spec)),
        query_len_(query_len),
        seq_len_(seq_len) {}

  [[nodiscard]] std::int32_t size() const noexcept {
    return static_cast<std::int32_t>(divide_up(query_len_, packing_.tokens_per_tile()));
  }
  [[nodiscard]] prefill_plan::row_tile at(std::int32_t seq, std::int32_t tile) const noexcept {
    const std::int64_t tokens = packing_.tokens_per_tile();
    const std::int64_t first = tile * tokens;
    const std::int64_t last = std::min<std::int64_t>(query_len_, first + tokens) - 1;
    const std::int64_t offset = std::int64_t{seq_len_} - query_len_;
    const auto [begin, end] = window_.of_run(offset + first, offset + last, seq_len_);
    prefill_plan::row_tile t = {seq, tile, 0, 0, fixed_cost};
    if (begin >= end) return t;
    t.tile_begin = static_cast<std::int32_t>(begin / tiling_.keys);
    t.tile_end = static_cast<std::int32_t>(divide_up(end, tiling_.keys));
    const bool one_warpgroup = last - first < packing_.tokens_per_warpgroup;
    t.cost += (t.tile_end - t.tile_begin) * (one_warpgroup ? tiling_.one_warpgroup_cost : tile_cost);
    return t;
  }

 private:
  attn::attention_window window_;
  prefill_packing packing_;
  prefill_tiling tiling_;
  std::int32_t query_len_, seq_len_;
};

/// Row tiles of all sequences, of each the longest first. Returns the sum of their costs.
std::int64_t list_row_tiles(const plan_input& input, const std::vector<std::int32_t>& seqs,
                            const prefill_packing& packing, std::vector<prefill_plan::row_tile>& tiles) {
  tiles.clear();
  std::int64_t total = 0;
  for (const std::int32_t seq : seqs) {
    const std::int32_t query_len = input.query_start_loc[seq + 1] - input.query_start_loc[seq];
    const sequence_tiles of_seq(input.spec, packing, query_len, input.seq_lens[seq]);
    for (std::int32_t tile = of_seq.size() - 1; tile >= 0; --tile) {
      tiles.push_back(of_seq.at(seq, tile));
      total += tiles.back().cost;
    }
  }
  return total;
}

prefill_work_tile work_tile_of(const plan_input& input, const prefill_plan::row_tile& t, std::int32_t head) noexcept {
  const std::int32_t query_start = input.query_start_loc[t.seq];
  return {t.seq,        input.seq_lens[t.seq],
          query_start,  input.query_start_loc[t.seq + 1] - query_start,
          t.tile,       head,
          t.tile_begin, t.tile_end,
          -1,           {}};
}

/// Plans the step of one packing.
class planner {
  static constexpr int cta_bits = 16;  // of a load and a CTA in one number

 public:
  planner(const plan_input& input, std::int64_t total_cost, prefill_plan& plan) noexcept
      : input_(input),
        plan_(plan),
        num_sms_(input.device.num_sms),
        num_heads_(input.spec.num_q_heads / plan.packing.heads),
        total_cost_(total_cost * num_heads_) {}

  void run() {
    sort_row_tiles();
    list_whole_tiles();
    const std::int64_t num_items = plan_.header.num_items;
    if (num_items > std::int64_t{prefill_max_tiles_per_sm_to_cut} * num_sms_) return;
    if (input_.spec.deterministic) {
      if (!prefill_has_tree(prefill_tiling_of(input_.spec).dims)) give_out_parts();
      return;
    }
    // Shares end together; a list ends when the last CTA does, at most one work tile after the first.
    const std::int64_t even = divide_up(total_cost_, num_sms_);
    const std::int64_t longest = plan_.order.empty() ? 0 : static_cast<std::int64_t>(plan_.order.front() >> 32);
    const std::int64_t shares_end = even + fixed_cost + combine_cost;
    if (shares_end >= std::min(even + longest, list_end())) return;
    if (cut_alike(shares_end)) return;
    for (std::int64_t share = even + fixed_cost; !cut_into_shares(share); share += 1 + share / 64) {
    }
  }

 private:
  void sort_row_tiles() {
    plan_.order.clear();
    std::uint32_t index = 0;
    // The later index first among equals only where tiles are sorted at all: any order is as good.
    for (const prefill_plan::row_tile& t : plan_.row_tiles) {
      plan_.order.push_back((static_cast<std::uint64_t>(static_cast<std::uint32_t>(t.cost)) << 32) | ~index++);
    }
    if (!std::is_sorted(plan_.order.begin(), plan_.order.end(), std::greater<>())) {
      std::sort(plan_.order.begin(), plan_.order.end(), std::greater<>());
    }
  }
  [[nodiscard]] const prefill_plan::row_tile& in_order(std::uint64_t key) const noexcept {
    return plan_.row_tiles[static_cast<std::uint32_t>(~key)];
  }

  // One entry stands for all heads, which go in equal groups, as few as keep a group's keys in the cache.
  void list_whole_tiles() {
    kv_bytes_per_head_ = 0;
    for (const std::int32_t seq : plan_.seqs) {
      kv_bytes_per_head_ +=
          std::int64_t{input_.seq_lens[seq]} * input_.spec.qk_head_dim *
          static_cast<std::int64_t>(size_of(input_.spec.k_code.type) + size_of(input_.spec.v_code.type));
    }
    std::int32_t heads_in_group = num_heads_;
    while (heads_in_group > 1 && heads_in_group % 2 == 0 && heads_in_group * kv_bytes_per_head_ > cache_bytes()) {
      heads_in_group /= 2;
    }
    plan_.work_tiles.clear();
    for (const std::uint64_t key : plan_.order) plan_.work_tiles.push_back(work_tile_of(input_, in_order(key), 0));
    plan_.header = {static_cast<std::int32_t>(plan_.work_tiles.size()) * num_heads_,
                    static_cast<std::int32_t>(plan_.work_tiles.size()), heads_in_group, 0};
    plan_.split_outputs.clear();
    plan_.num_partials = 0;
  }

  [[nodiscard]] std::int64_t cache_bytes() const noexcept {
    return static_cast<std::int64_t>(input_.device.l2_bytes) * 5 / 8;
  }

  // Where several row tiles read keys that the L2 does not hold: cuts all row tiles into as many equal parts as there
  // are CTAs for, so that row tiles read the same keys at the same time. False: that would not keep the SMs as busy.
  [[nodiscard]] bool cut_alike(std::int64_t shares_end) {
    const std::vector<prefill_plan::row_tile>& tiles = plan_.row_tiles;
    const auto num_tiles = static_cast<std::int64_t>(tiles.size());
    if (num_tiles < few_row_tiles * static_cast<std::int64_t>(plan_.seqs.size()) || num_tiles * num_heads_ > num_sms_ ||
        input_.spec.num_kv_heads * kv_bytes_per_head_ <= cache_bytes()) {
      return false;
    }
    const auto parts = static_cast<std::int32_t>(num_sms_ / (num_tiles * num_heads_));
    for (const prefill_plan::row_tile& t : tiles) {
      const std::int32_t num_keys = t.tile_end - t.tile_begin;
      if (num_keys < 2 * parts) return false;
      const std::int64_t part_cost = divide_up(num_keys, parts) * ((t.cost - fixed_cost) / num_keys) + fixed_cost;
      if ((part_cost + (parts > 1 ? combine_cost : 0)) * 20 > shares_end * 21) return false;
    }
    if (parts == 1) return true;  // whole tiles, as listed

    plan_.work_tiles.clear();
    for (std::size_t begin = 0; begin < tiles.size();) {
      std::size_t end = begin + 1;
      while (end < tiles.size() && tiles[end].seq == tiles[begin].seq) ++end;
      for (std::int32_t head = 0; head < num_heads_; ++head) {
        for (std::int32_t part = 0; part < parts; ++part) {
          for (std::size_t i = begin; i < end; ++i) {
            const prefill_plan::row_tile& t = tiles[i];
            const std::int64_t num_keys = t.tile_end - t.tile_begin;
            if (part == 0) {
              plan_.split_outputs.push_back(
                  {static_cast<std::int32_t>(plan_.work_tiles.size()), plan_.num_partials, parts, 0});
              plan_.num_partials += parts;
            }
            const std::size_t output = plan_.split_outputs.size() - (part == 0 ? 1 : end - i);
            prefill_work_tile& work =
                plan_.work_tiles.emplace_back(work_tile_of(input_, t, head * plan_.packing.heads));
            work.tile_begin = t.tile_begin + static_cast<std::int32_t>(num_keys * part / parts);
            work.tile_end = t.tile_begin + static_cast<std::int32_t>(num_keys * (part + 1) / parts);
            work.partial = plan_.split_outputs[output].first_partial + part;
          }
        }
      }
      begin = end;
    }
    const auto num_work_tiles = static_cast<std::int32_t>(plan_.work_tiles.size());
    plan_.shares.resize(static_cast<std::size_t>(num_sms_) + 1);
    for (std::size_t cta = 0; cta < plan_.shares.size(); ++cta) {
      plan_.shares[cta] = std::min(static_cast<std::int32_t>(cta), num_work_tiles);
    }
    plan_.header = {num_work_tiles, num_work_tiles, 0, static_cast<std::int32_t>(plan_.split_outputs.size())};
    return true;
  }

  // Of deterministic plans: makes each part of the longest row tiles a work tile, as long as they are longer than an
  // equal share and there is room for their results, where CTAs are estimated to end earlier then.
  void give_out_parts() {
    const std::int64_t whole_end = list_end();
    const std::int64_t even = divide_up(total_cost_, num_sms_);
    const std::int32_t part_tiles = prefill_part_keys / prefill_tiling_of(input_.spec).keys;
    const std::int64_t room = std::int64_t{prefill_max_partials(num_sms_, true)} * prefill_warpgroup_rows;
    std::int64_t num_parts = 0;
    plan_.cut_tiles.clear();
    plan_.outputs.clear();
    std::vector<std::uint64_t>& costs = plan_.whole;  // of the work tiles, and their numbers
    costs.clear();
    const auto add = [&](const prefill_work_tile& work, std::int64_t cost, std::int32_t output) {
      costs.push_back(static_cast<std::uint64_t>(cost) << 32 | static_cast<std::uint32_t>(~plan_.cut_tiles.size()));
      plan_.cut_tiles.push_back(work);
      plan_.outputs.push_back(output);
    };
    for (const std::uint64_t key : plan_.order) {
      const prefill_plan::row_tile& t = in_order(key);
      const std::int32_t first_part = t.tile_begin / part_tiles;
      const std::int32_t parts = t.tile_begin < t.tile_end ? (t.tile_end - 1) / part_tiles + 1 - first_part : 1;
      const std::int32_t rows = rows_of(t);
      const std::int64_t outputs = static_cast<std::int64_t>(plan_.split_outputs.size()) + num_heads_;
      const bool is_cut =
          t.cost > even && parts > 1 && outputs <= num_sms_ &&
          plan_.num_partials + std::int64_t{num_heads_} * parts * rows <= room &&
          num_parts + std::int64_t{num_heads_} * parts <= std::int64_t{prefill_max_parts_per_sm} * num_sms_;
      for (std::int32_t head = 0; head < num_heads_; ++head) {
        prefill_work_tile work = work_tile_of(input_, t, head * plan_.packing.heads);
        if (!is_cut) {
          add(work, t.cost, -1);
          continue;
        }
        const auto output = static_cast<std::int32_t>(plan_.split_outputs.size());
        plan_.split_outputs.push_back({0, plan_.num_partials, parts, rows});
        const std::int64_t per_tile = (t.cost - fixed_cost) / (t.tile_end - t.tile_begin);
        for (std::int32_t part = first_part; part < first_part + parts; ++part) {
          work.tile_begin = std::max(t.tile_begin, part * part_tiles);
          work.tile_end = std::min(t.tile_end, (part + 1) * part_tiles);
          work.partial = plan_.num_partials;
          plan_.num_partials += rows;
          add(work, fixed_cost + per_tile * (work.tile_end - work.tile_begin), output);
        }
      }
      if (is_cut) num_parts += std::int64_t{num_heads_} * parts;
    }
    if (num_parts == 0 || deal_out(costs) + combine_cost >= whole_end) list_whole_tiles();
  }

  // Rows of a row tile that tokens have.
  [[nodiscard]] std::int32_t rows_of(const prefill_plan::row_tile& t) const noexcept {
    const std::int32_t query_len = input_.query_start_loc[t.seq + 1] - input_.query_start_loc[t.seq];
    const std::int32_t tokens = plan_.packing.tokens_per_tile();
    return std::min(query_len - t.tile * tokens, tokens) * plan_.packing.heads;
  }

  // Gives work tiles, the most expensive first, to the CTA with the least to do. Returns when the last one ends.
  [[nodiscard]] std::int64_t deal_out(std::vector<std::uint64_t>& costs) {
    std::sort(costs.begin(), costs.end(), std::greater<>());
    std::vector<std::int64_t>& ready = plan_.ready;  // load and CTA in one number
    ready.clear();
    for (std::int32_t cta = 0; cta < num_sms_; ++cta) ready.push_back(cta);
    std::int64_t end = 0;
    for (std::size_t place = 0; place < costs.size(); ++place) {
      std::pop_heap(ready.begin(), ready.end(), std::greater<>());
      const std::uint64_t cta = static_cast<std::uint64_t>(ready.back()) & ((1u << cta_bits) - 1);
      ready.back() += static_cast<std::int64_t>(costs[place] >> 32) << cta_bits;
      end = std::max(end, ready.back() >> cta_bits);
      std::push_heap(ready.begin(), ready.end(), std::greater<>());
      costs[place] = cta << 48 | static_cast<std::uint64_t>(place) << 24 | static_cast<std::uint32_t>(~costs[place]);
    }
    std::sort(costs.begin(), costs.end());
    plan_.work_tiles.clear();
    plan_.shares.assign(static_cast<std::size_t>(num_sms_) + 1, 0);
    for (const std::uint64_t at : costs) {
      const std::size_t number = at & 0xffffff;
      const std::int32_t output = plan_.outputs[number];
      if (output >= 0) {
        plan_.split_outputs[static_cast<std::size_t>(output)].work_tile =
            static_cast<std::int32_t>(plan_.work_tiles.size());
      }
      plan_.work_tiles.push_back(plan_.cut_tiles[number]);
      plan_.shares[(at >> 48) + 1] = static_cast<std::int32_t>(plan_.work_tiles.size());
    }
    for (std::size_t cta = 1; cta < plan_.shares.size(); ++cta) {
      plan_.shares[cta] = std::max(plan_.shares[cta], plan_.shares[cta - 1]);
    }
    const auto num_work_tiles = static_cast<std::int32_t>(plan_.work_tiles.size());
    plan_.header = {num_work_tiles, num_work_tiles, 0, static_cast<std::int32_t>(plan_.split_outputs.size())};
    return end;
  }

  // When the last CTA is ready, if each takes the next work tile as soon as it is.
  [[nodiscard]] std::int64_t list_end() {
    std::vector<std::int64_t>& loads = plan_.loads;
    loads.assign(static_cast<std::size_t>(num_sms_), 0);
    const std::int32_t heads_in_group = plan_.header.heads_in_group;
    for (std::int32_t group = 0; group < num_heads_; group += heads_in_group) {
      for (const std::uint64_t key : plan_.order) {
        for (std::int32_t head = 0; head < heads_in_group; ++head) {
          std::pop_heap(loads.begin(), loads.end(), std::greater<>());
          loads.back() += static_cast<std::int64_t>(key >> 32);
          std::push_heap(loads.begin(), loads.end(), std::greater<>());
        }
      }
    }
    return *std::max_element(loads.begin(), loads.end());
  }

  // A row tile of a head: its number in `whole` and `is_whole`.
  [[nodiscard]] std::size_t number_of(std::int32_t head, std::size_t tile) const noexcept {
    return static_cast<std::size_t>(head) * plan_.row_tiles.size() + tile;
  }

  // Gives each CTA whole row tiles in the list's order, the next one to the CTA with the least to do, as long as half
  // of another has room in its share after them: CTAs then read the same keys at the same time. What is left over is
  // cut.
  void assign_whole_tiles(std::int64_t share) {
    plan_.whole.clear();
    plan_.is_whole.assign(number_of(num_heads_, 0), 0);
    plan_.loads.assign(static_cast<std::size_t>(num_sms_), 0);
    std::vector<std::int64_t>& ready = plan_.ready;  // load and CTA in one number
    ready.clear();
    for (std::int32_t cta = 0; cta < num_sms_; ++cta) ready.push_back(cta);
    const std::int32_t heads_in_group = plan_.header.heads_in_group;
    for (std::int32_t group = 0; group < num_heads_; group += heads_in_group) {
      for (const std::uint64_t key : plan_.order) {
        const auto cost = static_cast<std::int64_t>(key >> 32);
        for (std::int32_t head = group; head < group + heads_in_group; ++head) {
          if ((ready.front() >> cta_bits) + cost + cost / 2 > share) continue;
          std::pop_heap(ready.begin(), ready.end(), std::greater<>());
          const auto cta = static_cast<std::uint64_t>(ready.back()) & ((1u << cta_bits) - 1);
          ready.back() += cost << cta_bits;
          std::push_heap(ready.begin(), ready.end(), std::greater<>());
          plan_.loads[cta] += cost;
          const std::size_t number = number_of(head, static_cast<std::uint32_t>(~key));
          plan_.is_whole[number] = 1;
          plan_.whole.push_back(cta << 48 | static_cast<std::uint64_t>(plan_.whole.size()) << 24 | number);
        }
      }
    }
    std::sort(plan_.whole.begin(), plan_.whole.end());
  }

  // A CTA's share begins with its whole row tiles; returns what it has room for after them.
  [[nodiscard]] std::int64_t begin_share(std::int32_t cta, std::int64_t share) {
    plan_.shares[static_cast<std::size_t>(cta)] = static_cast<std::int32_t>(plan_.work_tiles.size());
    for (; next_whole_ < plan_.whole.size() && plan_.whole[next_whole_] >> 48 == static_cast<std::uint64_t>(cta);
         ++next_whole_) {
      const std::size_t number = plan_.whole[next_whole_] & 0xffffff;
      const std::size_t num_tiles = plan_.row_tiles.size();
      plan_.work_tiles.push_back(work_tile_of(input_, plan_.row_tiles[number % num_tiles],
                                              static_cast<std::int32_t>(number / num_tiles) * plan_.packing.heads));
    }
    return share - plan_.loads[static_cast<std::size_t>(cta)];
  }

  // False: shares of this cost do not hold everything. Row tiles of a sequence and head that are cut follow each other,
  // so that their keys are read at nearly the same time.
  [[nodiscard]] bool cut_into_shares(std::int64_t share) {
    plan_.work_tiles.clear();
    plan_.split_outputs.clear();
    plan_.num_partials = 0;
    plan_.shares.resize(static_cast<std::size_t>(num_sms_) + 1);
    assign_whole_tiles(share);
    next_whole_ = 0;
    std::int32_t cta = 0;
    std::int64_t left = begin_share(cta, share);
    const std::vector<prefill_plan::row_tile>& tiles = plan_.row_tiles;
    for (std::size_t begin = 0; begin < tiles.size();) {
      std::size_t end = begin + 1;
      while (end < tiles.size() && tiles[end].seq == tiles[begin].seq) ++end;
      for (std::int32_t head = 0; head < num_heads_; ++head) {
        for (std::size_t i = begin; i < end; ++i) {
          if (plan_.is_whole[number_of(head, i)] != 0) continue;
          if (!cut_row_tile(tiles[i], head * plan_.packing.heads, share, cta, left)) return false;
        }
      }
      begin = end;
    }
    while (++cta < num_sms_) (void)begin_share(cta, share);
    const auto num_work_tiles = static_cast<std::int32_t>(plan_.work_tiles.size());
    plan_.shares.back() = num_work_tiles;
    plan_.header = {num_work_tiles, num_work_tiles, 0, static_cast<std::int32_t>(plan_.split_outputs.size())};
    return true;
  }

  [[nodiscard]] bool cut_row_tile(const prefill_plan::row_tile& t, std::int32_t head, std::int64_t share,
                                  std::int32_t& cta, std::int64_t& left) {
    plan_.parts.clear();
    std::int32_t begin = t.tile_begin;
    const std::int32_t num_tiles = t.tile_end - t.tile_begin;
    const std::int32_t per_tile = num_tiles == 0 ? tile_cost : (t.cost - fixed_cost) / num_tiles;
    // Even an empty share is too little.
    if (share < fixed_cost + std::int64_t{per_tile} * std::min(num_tiles, 2)) return false;
    do {
      const std::int32_t rest = t.tile_end - begin;
      const std::int64_t fits = (left - fixed_cost) / per_tile;
      // A part of one tile costs more than it is worth, unless it is all there is.
      if (left < fixed_cost || fits < std::min(rest, 2)) {
        if (++cta == num_sms_) return false;
        left = begin_share(cta, share);
        continue;
      }
      const auto taken = static_cast<std::int32_t>(std::min<std::int64_t>(rest, fits));
      plan_.parts.push_back(static_cast<std::int32_t>(plan_.work_tiles.size()));
      prefill_work_tile& work = plan_.work_tiles.emplace_back(work_tile_of(input_, t, head));
      work.tile_begin = begin;
      work.tile_end = begin + taken;
      begin += taken;
      left -= fixed_cost + std::int64_t{per_tile} * taken;
    } while (begin < t.tile_end || plan_.parts.empty());

    const auto num_parts = static_cast<std::int32_t>(plan_.parts.size());
    if (num_parts == 1) return true;
    plan_.split_outputs.push_back({plan_.parts.front(), plan_.num_partials, num_parts, 0});
    for (const std::int32_t part : plan_.parts) {
      plan_.work_tiles[static_cast<std::size_t>(part)].partial = plan_.num_partials++;
    }
    return true;
  }

  const plan_input& input_;
  prefill_plan& plan_;
  std::int32_t num_sms_;
  std::int32_t num_heads_;
  std::int64_t total_cost_;
  std::int64_t kv_bytes_per_head_ = 0;
  std::size_t next_whole_ = 0;
};

prefill_cta first_of(const prefill_plan& plan, std::int32_t cta) noexcept {
  prefill_cta record = {};
  record.first.seq = -1;
  if (plan.header.heads_in_group == 0) {
    const auto share = plan.shares.begin() + cta;
    record.next = share[0] + 1;
    record.end = share[1];
    if (share[0] < share[1]) record.first = plan.work_tiles[static_cast<std::size_t>(share[0])];
    return record;
  }
  record.next = -1;
  record.end = plan.header.num_items;
  if (cta >= plan.header.num_items) return record;
  const prefill_place place = prefill_place_of(plan.header, cta);
  record.first = plan.work_tiles[static_cast<std::size_t>(place.entry)];
  record.first.head = place.head * plan.packing.heads;
  return record;
}

}  // namespace

void plan_prefill(const plan_input& input, prefill_plan& plan) {
  const std::int32_t group = group_of(input.spec);
  plan.num_tokens = input.num_tokens;
  plan.packing = prefill_packing_of(group <= prefill_warpgroup_rows ? group : 1, input.spec);
  std::int64_t cost = list_row_tiles(input, plan.seqs, plan.packing, plan.row_tiles);
  // Groups that do not divide 64 leave rows unused; a head at a time uses all, where there are tokens enough.
  if (prefill_warpgroup_rows % plan.packing.heads != 0) {
    const prefill_packing other = prefill_packing_of(1, input.spec);
    const std::int64_t other_cost = list_row_tiles(input, plan.seqs, other, plan.other_row_tiles);
    if (other_cost * group < cost) {
      plan.packing = other;
      plan.row_tiles.swap(plan.other_row_tiles);
      cost = other_cost;
    }
  }
  planner(input, cost, plan).run();
  plan_combine(input, input.spec.v_head_dim, plan);
}

prefill_estimate estimate_prefill(const plan_input& input, std::int32_t query_len, std::int32_t seq_len) noexcept {
  const attention_spec& spec = input.spec;
  const std::int32_t group = group_of(spec);
  const prefill_tiling tiling = prefill_tiling_of(spec);
  const double unit_us =
      cost_us * cost_of_planes(spec) * tiling.cost * tiling.dims / 128 * tiling.keys / 128 * tiling.rows() / 128;
  prefill_estimate best = {std::numeric_limits<double>::infinity(), 0};
  for (const std::int32_t packed : {group, 1}) {
    if (packed > prefill_warpgroup_rows) continue;
    const sequence_tiles of_seq(spec, prefill_packing_of(packed, spec), query_len, seq_len);
    const std::int64_t heads = spec.num_q_heads / packed;
    const std::int64_t num_items = of_seq.size() * heads;
    const prefill_plan::row_tile first = of_seq.at(0, 0);
    const prefill_plan::row_tile last = of_seq.at(0, of_seq.size() - 1);
    // Tiles lengthen evenly from the first to the last.
    const double even = (first.cost + last.cost) / 2.0 * static_cast<double>(num_items) / input.device.num_sms;
    const double longest = std::max(first.cost, last.cost);
    const double whole = num_items <= input.device.num_sms ? longest : even + longest / 2;
    const bool may_cut =
        !spec.deterministic && num_items <= std::int64_t{prefill_max_tiles_per_sm_to_cut} * input.device.num_sms;
    const double end = may_cut ? std::min(whole, even + fixed_cost + combine_cost) : whole;
    if (end * unit_us + launch_us < best.alone_us) best = {end * unit_us + launch_us, even * unit_us};
  }
  return best;
}

std::int64_t max_prefill_work_tiles(const attention_spec& spec, const step_limits& limits,
                                    std::int32_t num_sms) noexcept {
  // ⌈tokens / per tile⌉, summed over the sequences that can have new tokens, in the packing that needs more.
  const std::int32_t group = group_of(spec);
  const prefill_packing packing = prefill_packing_of(group <= prefill_warpgroup_rows ? group : 1, spec);
  const std::int64_t per_tile = packing.tokens_per_tile();
  const std::int64_t row_tiles = (limits.num_tokens + limits.num_seqs_with_tokens() * (per_tile - 1)) / per_tile;
  // Once for all heads; where the range of KV tiles is cut, for each head, and a further part for each cut.
  const std::int64_t most_cut = std::int64_t{prefill_max_tiles_per_sm_to_cut} * num_sms;
  const std::int64_t parts = spec.deterministic ? std::int64_t{prefill_max_parts_per_sm} * num_sms : num_sms;
  const std::int64_t cut = std::min(row_tiles * spec.num_q_heads, most_cut) + parts;
  return std::max(row_tiles, cut);
}

void plan_combine(const plan_input& input, std::int32_t dims, prefill_plan& plan) noexcept {
  plan.header.log_combine_groups = 0;
  if (plan.num_partials == 0) return;
  plan.combines = true;
  if (input.spec.deterministic) return;  // adds the parts one after another
  // Twice as many while each has more than a batch and a half of the longest output's parts, and the grid will have a
  // warp for each piece of a row.
  std::int32_t longest = 0;
  for (const prefill_split_output& output : plan.split_outputs) longest = std::max(longest, output.num_partials);
  const std::int64_t pieces = static_cast<std::int64_t>(plan.split_outputs.size()) * plan.packing.tokens_per_tile() *
                              plan.packing.heads * divide_up(dims, prefill_combine_columns);
  const std::int64_t warps = std::int64_t{prefill_combine_warps} * prefill_combine_ctas_per_sm * input.device.num_sms;
  std::int32_t& log_groups = plan.header.log_combine_groups;
  while (log_groups < prefill_max_log_combine_groups && (3 * prefill_combine_batch << log_groups) / 2 < longest &&
         pieces << (log_groups + 1) <= warps) {
    ++log_groups;
  }
}

void write_metadata(const prefill_plan& plan, std::int32_t num_sms, std::byte* begin) noexcept {
  std::memcpy(begin, &plan.header, sizeof(plan.header));
  begin += sizeof(plan.header);
  for (std::int32_t cta = 0; cta < num_sms; ++cta, begin += sizeof(prefill_cta)) {
    const prefill_cta record = first_of(plan, cta);
    std::memcpy(begin, &record, sizeof(record));
  }
  if (!plan.split_outputs.empty()) {
    std::memcpy(begin, plan.split_outputs.data(), plan.split_outputs.size() * sizeof(plan.split_outputs[0]));
  }
  begin += static_cast<std::size_t>(num_sms) * sizeof(prefill_split_output);
  if (!plan.work_tiles.empty()) {
    std::memcpy(begin, plan.work_tiles.data(), plan.work_tiles.size() * sizeof(plan.work_tiles[0]));
  }
}

prefill_metadata prefill_metadata_at(const std::byte* begin, std::int32_t num_sms) noexcept {
  const auto size = static_cast<std::size_t>(num_sms);
  prefill_metadata m;
  m.header = reinterpret_cast<const prefill_header*>(begin);
  m.ctas = reinterpret_cast<const prefill_cta*>(m.header + 1);
  m.split_outputs = reinterpret_cast<const prefill_split_output*>(m.ctas + size);
  m.work_tiles = reinterpret_cast<const prefill_work_tile*>(m.split_outputs + size);
  return m;
}

}  // namespace bifolio::inline v0_2::cuda
