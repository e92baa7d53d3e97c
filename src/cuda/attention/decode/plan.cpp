// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/plan.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <span>

#include "common/attention/visibility.hpp"
#include "cuda/host/divisor.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

std::int64_t divide_up(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

dtype shape_type_of(const attention_spec& spec) noexcept {
  return decode_shape_type(spec.k_code.type, spec.v_code.type);
}

/// Splits of one output tile of the sequence when a split is `split_tiles` tiles.
std::int32_t splits_of(const decode_seq& s, std::int32_t split_tiles) noexcept {
  if (s.num_tiles == 0) return 1;
  return (s.first_tile + s.num_tiles - 1) / split_tiles - s.first_tile / split_tiles + 1;
}

/// Constant for a device, so that a captured graph survives other lengths.
std::int32_t partials_per_range(const attention_spec& spec, std::int32_t grid) noexcept {
  return spec.deterministic ? decode_splits_per_cta * grid : grid;
}

}  // namespace

std::size_t decode_workspace_bytes(const attention_spec& spec, std::int32_t grid) noexcept {
  const std::int64_t partials = decode_num_partials(spec.deterministic, partials_per_range(spec, grid), grid);
  const auto dims = static_cast<std::size_t>(decode_padded_dim(shape_type_of(spec), spec.v_head_dim));
  const std::size_t of_rows = decode_tile_rows * (dims + 2) * sizeof(float);
  return static_cast<std::size_t>(partials) * (of_rows + (spec.deterministic ? sizeof(std::int32_t) : 0));
}

std::size_t decode_num_counters(const attention_spec& spec, std::int32_t grid) noexcept {
  return 2 * static_cast<std::size_t>(partials_per_range(spec, grid));
}

void write_metadata(const decode_plan& plan, std::byte* begin) noexcept {
  std::memcpy(begin, &plan.header, sizeof(plan.header));
  begin += sizeof(plan.header);
  const std::size_t cta_bytes = static_cast<std::size_t>(plan.grid) * sizeof(decode_cta);
  std::memcpy(begin, plan.ctas.data(), cta_bytes);
  begin += cta_bytes;
  const std::size_t part_bytes = plan.parts.size() * sizeof(decode_parts);
  if (part_bytes > 0) std::memcpy(begin, plan.parts.data(), part_bytes);
  std::memcpy(begin + part_bytes, plan.seqs.data(), static_cast<std::size_t>(plan.num_seqs) * sizeof(decode_seq));
}

decode_metadata decode_metadata_at(const std::byte* begin, std::int32_t grid, bool deterministic) noexcept {
  const auto* const header = reinterpret_cast<const decode_header*>(begin);
  const auto* const ctas = reinterpret_cast<const decode_cta*>(header + 1);
  const auto* const parts = reinterpret_cast<const decode_parts*>(ctas + grid);
  if (!deterministic) return {header, ctas, nullptr, reinterpret_cast<const decode_seq*>(parts)};
  return {header, ctas, parts, reinterpret_cast<const decode_seq*>(parts + grid)};
}

decode_planner::decode_planner(const plan_input& input, std::int32_t grid, decode_plan& plan)
    : input_(input), plan_(plan) {
  plan_.grid = grid;
  plan_.num_seqs = 0;
  const attention_spec& spec = input_.spec;
  plan_.few_rows = decode_has_few_rows(shape_type_of(spec), spec.qk_head_dim);
  // Everything is written before it is read: what an earlier step left need not be cleared.
  const auto most = static_cast<std::size_t>(input_.num_seqs);
  if (plan_.seqs.size() < most) plan_.seqs.resize(most);
}

void decode_planner::add(std::int32_t seq) {
  const attention_spec& spec = input_.spec;
  // Made in place: a record that is built elsewhere is copied before its parts are stored, which stalls (half of the
  // planning time of 256 sequences).
  decode_seq& s = plan_.seqs[static_cast<std::size_t>(plan_.num_seqs++)];
  s.row = seq;
  s.seq_len = input_.seq_lens[seq];
  s.query_start = input_.query_start_loc[seq];
  s.query_len = input_.query_start_loc[seq + 1] - s.query_start;
  const std::int32_t group = spec.num_q_heads / spec.num_kv_heads;
  plan_.few_rows = plan_.few_rows && std::int64_t{s.query_len} * group <= decode_few_rows;
  s.row_tiles = static_cast<std::int32_t>(divide_up(std::int64_t{s.query_len} * group, std::int64_t{decode_tile_rows}));

  // Positions that some row attends to.
  const std::int64_t offset = std::int64_t{s.seq_len} - s.query_len;
  const auto [begin, end] = attn::window_of(spec).of_run(offset, std::int64_t{s.seq_len} - 1, s.seq_len);
  s.first_tile = static_cast<std::int32_t>(begin / decode_tile_tokens);
  s.num_tiles = begin < end ? static_cast<std::int32_t>(divide_up(end, decode_tile_tokens)) - s.first_tile : 0;
}

decode_planner::split_choice decode_planner::choose_splits() const noexcept {
  // The expected time of the busiest CTA, in tiles: the even share, or whole rounds of output tiles that are alike and
  // not cut, and what the cut adds to it: half of what is cut whole, the partial results of single leaves, and the
  // combine of the longest output tile.
  const std::span<const decode_seq> seqs(plan_.seqs.data(), static_cast<std::size_t>(plan_.num_seqs));
  std::int64_t num_outputs = 0;
  std::int64_t num_leaves = 0;
  std::int64_t total = 0;
  std::int64_t shortest = seqs[0].num_tiles;
  std::int64_t longest = 0;
  for (const decode_seq& s : seqs) {
    const std::int64_t outputs = std::int64_t{input_.spec.num_kv_heads} * s.row_tiles;
    num_outputs += outputs;
    num_leaves += outputs * splits_of(s, decode_leaf_tiles);
    total += outputs * (s.num_tiles + decode_fixed_overhead);
    shortest = std::min<std::int64_t>(shortest, s.num_tiles);
    longest = std::max<std::int64_t>(longest, s.num_tiles);
  }
  const auto grid = static_cast<double>(plan_.grid);
  const double share = static_cast<double>(total) / grid;
  const auto length = static_cast<double>(longest);
  const double ctas_per_output = length / share + 1;
  constexpr double combine_tiles = 3;       // its fixed part, and what goes before
  constexpr double partials_per_tile = 36;  // that are combined in the time of a tile
  // Partial results of half a node's leaves. Of float32 a leaf is no work tile of its own, and nothing waits for it.
  const bool takes_parts = shape_type_of(input_.spec) == dtype::f32;
  const double head_leaves = takes_parts ? 0.75 : 2.5;
  const auto combine = [&](double partials) { return combine_tiles + partials / partials_per_tile; };

  split_choice best{decode_root_tiles, decode_root_tiles};
  if (num_outputs > std::int64_t{32} * plan_.grid) return best;
  double best_time = shortest == longest
                         ? static_cast<double>(divide_up(num_outputs, plan_.grid)) * (length + decode_fixed_overhead)
                         : share + length / 2;
  const auto consider = [&](double time, split_choice choice) {
    if (time >= best_time) return;
    best_time = time;
    best = choice;
  };
  const double nodes = length / decode_node_tiles + 1;
  consider(share +
               (share <= decode_node_tiles && shortest == longest ? decode_node_tiles - share : decode_node_tiles / 2) +
               combine(nodes),
           {decode_root_tiles, decode_node_tiles});
  const std::int64_t leaves_of_cta = takes_parts && shortest == longest ? equal_leaves(num_outputs, longest) : 0;
  const double most_pieces = ctas_per_output * decode_combine_fan_in / 2;
  if (leaves_of_cta > 0) {
    consider(static_cast<double>(leaves_of_cta * decode_leaf_tiles + decode_fixed_overhead) + head_leaves +
                 combine(std::min(most_pieces, length / decode_leaf_tiles) + nodes),
             {decode_root_tiles, decode_leaf_tiles});
  } else {
    consider(share + decode_leaf_tiles / 2 + head_leaves + combine(most_pieces + nodes),
             {decode_root_tiles, decode_leaf_tiles});
  }
  if (num_leaves <= partials_per_range(input_.spec, plan_.grid)) {
    // Leaves one by one: each has an overhead, but they are combined by nodes at the same time.
    const double rounds = static_cast<double>(divide_up(num_leaves, plan_.grid));
    const double leaf = std::min<double>(length, decode_leaf_tiles) + decode_fixed_overhead;
    consider(rounds * leaf * 1.12 + combine_tiles, {decode_leaf_tiles, decode_leaf_tiles});
  }
  return best;
}

std::int64_t decode_planner::combine_rounds() const noexcept {
  const std::int64_t group = input_.spec.num_q_heads / input_.spec.num_kv_heads;
  const std::int64_t rows = std::min<std::int64_t>(group * input_.max_query_len, decode_tile_rows);
  return divide_up(rows * input_.spec.qk_head_dim / 4, 128);
}

bool decode_planner::combines_together(std::int64_t outputs) const noexcept {
  // Where every CTA has one split and nothing else. It saves rounds of loads, but CTAs stay to the end, so that the
  // next kernel's first tiles come later: with one round, or one level, calls in a row take 0.1 to 1.5 µs longer
  // (H100).
  const std::int32_t ctas = plan_.header.num_ctas;
  return ctas % outputs == 0 && ctas / outputs > decode_max_flat_splits && combine_rounds() > 1;
}

double decode_planner::combine_us(std::int64_t splits) const noexcept {
  // Microseconds on an H200: a level of the combine; and each round of its loads, of up to decode_combine_fan_in
  // partial results, for the threads of a CTA.
  constexpr double level_us = 1.5;
  constexpr double round_us = 0.85;
  if (splits < 2) return 0;
  const std::int64_t rounds = combine_rounds();
  const bool two_levels = splits > decode_max_flat_splits;
  const std::int64_t loads = two_levels ? 1 + divide_up(divide_up(splits, decode_combine_fan_in), decode_combine_fan_in)
                                        : divide_up(splits, decode_combine_fan_in);
  return (two_levels ? 2 : 1) * level_us + round_us * static_cast<double>(rounds * loads);
}

std::int32_t decode_planner::choose_num_splits(std::int64_t tiles, std::int64_t most) const noexcept {
  constexpr double tile_us = 0.93;  // of a tile that waits for the previous one,
                                    // fitted to calls with little KV
  std::int64_t best = 1;
  double best_us = tile_us * static_cast<double>(tiles);
  for (std::int64_t splits = 2; splits <= std::min(tiles, most); ++splits) {
    const double us = tile_us * static_cast<double>(divide_up(tiles, splits)) + combine_us(splits);
    if (us <= best_us) {  // of equals the one with more CTAs at work
      best = splits;
      best_us = us;
    }
  }
  return static_cast<std::int32_t>(best);
}

std::int32_t decode_planner::choose_num_ctas(std::int64_t total, std::int64_t outputs, bool alike) const noexcept {
  const std::int64_t most = std::clamp<std::int64_t>(divide_up(total, decode_min_tiles_per_cta), 1, plan_.grid);
  // A few CTAs less, where CTAs then take whole output tiles: memory is as busy and nothing is combined. With many
  // output tiles per CTA combining is rare anyway.
  if (!alike || outputs > 8 * most) return static_cast<std::int32_t>(most);
  for (std::int64_t ctas = most; ctas * 100 >= most * 96; --ctas) {
    if (outputs % ctas == 0) return static_cast<std::int32_t>(ctas);
  }
  return static_cast<std::int32_t>(most);
}

std::int64_t decode_planner::equal_leaves(std::int64_t outputs, std::int64_t tiles) const noexcept {
  if (outputs == 0 || tiles == 0) return 0;
  const std::int32_t most = choose_num_ctas(outputs * (tiles + decode_fixed_overhead), outputs, false);
  const std::int64_t leaves = divide_up(tiles, decode_leaf_tiles);
  const std::int64_t of_cta = divide_up(outputs * leaves, most);
  return leaves % of_cta == 0 && outputs * (leaves / of_cta) * 100 >= std::int64_t{most} * 96 ? of_cta : 0;
}

std::int32_t decode_planner::choose_leaf_ctas(std::int64_t outputs, std::int64_t tiles) const noexcept {
  const std::int64_t of_cta = equal_leaves(outputs, tiles);
  if (of_cta == 0) return choose_num_ctas(outputs * (tiles + decode_fixed_overhead), outputs, false);
  return static_cast<std::int32_t>(outputs * (divide_up(tiles, decode_leaf_tiles) / of_cta));
}

std::int32_t decode_planner::cut_alike(std::int64_t outputs, std::int64_t tiles) const noexcept {
  const std::int64_t grid = plan_.grid;
  if (outputs > grid) return choose_num_ctas(outputs * tiles, outputs, true);
  const std::int64_t splits = choose_num_splits(tiles, grid / outputs);
  const auto equal = static_cast<std::int32_t>(outputs * splits);
  // Equal splits leave up to half of the CTAs without work: one of 264 where there are 133 output tiles. Then the work
  // range is cut into even shares wherever they end. A tile's time, in microseconds on an H200 at head_dim 128, is less
  // where fewer CTAs share the memory; a share that ends one output tile and begins the next has one more epilogue.
  const auto tile_us = [&](std::int64_t ctas) {
    return (1.28 + 0.0025 * static_cast<double>(ctas)) * input_.spec.qk_head_dim / 128;
  };
  constexpr double epilogue_us = 1.0;
  // The kernel counts the parts of an output tile by the numbers of its CTAs, so that none may be without work.
  if (outputs * tiles < decode_min_tiles_per_cta * grid) return equal;
  const std::int64_t share = divide_up(outputs * tiles, grid);
  const std::int64_t longest = divide_up(tiles, splits);
  if (share >= longest) return equal;
  const double equal_us = tile_us(equal) * static_cast<double>(longest) + combine_us(splits);
  const double even_us = tile_us(grid) * static_cast<double>(share) + combine_us(tiles / share + 2) + epilogue_us;
  return even_us < 0.97 * equal_us ? plan_.grid : equal;
}

bool decode_planner::finish() {
  plan_.workspace_bytes = 0;
  plan_.num_counters = 0;
  if (plan_.empty()) return true;
  const std::span<decode_seq> seqs(plan_.seqs.data(), static_cast<std::size_t>(plan_.num_seqs));
  const bool deterministic = input_.spec.deterministic;
  const split_choice splits = deterministic ? choose_splits() : split_choice{};
  const std::int32_t split_tiles = splits.split_tiles;
  // Alike output tiles that are not empty are split equally where that keeps the CTAs busy. Others are not: there the
  // overhead evens out what each costs by itself.
  const std::int32_t num_tiles = seqs[0].num_tiles;
  const bool uniform = num_tiles > 0 && std::all_of(seqs.begin(), seqs.end(), [num_tiles](const decode_seq& s) {
                         return s.num_tiles == num_tiles;
                       });
  const bool alike = uniform && !deterministic;
  const bool cuts = split_tiles == decode_root_tiles && splits.cut_tiles != decode_root_tiles;
  const std::int32_t overhead = alike ? 0 : decode_fixed_overhead;
  std::int64_t total = 0;
  std::int64_t num_outputs = 0;
  for (decode_seq& s : seqs) {
    s.num_splits = deterministic ? splits_of(s, split_tiles) : 1;
    s.work_length = (deterministic ? std::min(s.num_tiles, split_tiles) : s.num_tiles) + overhead;
    s.work_begin = static_cast<std::int32_t>(total);
    s.first_split = static_cast<std::int32_t>(num_outputs);
    const std::int64_t outputs = std::int64_t{input_.spec.num_kv_heads} * s.row_tiles * s.num_splits;
    total += outputs * s.work_length;
    num_outputs += outputs;
    if (total >= (std::int64_t{1} << 31) || num_outputs >= (std::int64_t{1} << 27)) return false;
  }

  plan_.header = {};
  plan_.header.total = static_cast<std::int32_t>(total);
  plan_.header.num_ctas = alike ? cut_alike(num_outputs, num_tiles)
                          : uniform && cuts && splits.cut_tiles == decode_leaf_tiles
                              ? choose_leaf_ctas(num_outputs, num_tiles)
                              : choose_num_ctas(total, num_outputs, uniform && !cuts);
  plan_.header.together = alike && combines_together(num_outputs) ? 1 : 0;
  plan_.header.patience = decode_patience;
  plan_.header.split_tiles = split_tiles;
  plan_.header.num_partials = partials_per_range(input_.spec, plan_.grid);
  plan_.header.overhead = overhead;
  plan_.header.cut_tiles = splits.cut_tiles;
  plan_.workspace_bytes = decode_workspace_bytes(input_.spec, plan_.grid);
  plan_.num_counters = decode_num_counters(input_.spec, plan_.grid);
  share_work();
  plan_.parts.clear();
  if (!deterministic) return true;
  plan_.parts.resize(static_cast<std::size_t>(plan_.grid));
  while (split_tiles == decode_root_tiles && share_parts() > 2 * plan_.header.num_partials) {
    plan_.header.cut_tiles = plan_.header.cut_tiles == decode_leaf_tiles ? decode_node_tiles : decode_root_tiles;
    share_work();
  }
  return true;
}

std::int32_t decode_planner::cut_at(const decode_seq& s, std::int32_t inside) const noexcept {
  const decode_header& header = plan_.header;
  if (inside <= header.overhead || header.cut_tiles == decode_root_tiles) return 0;
  const std::int32_t tile = s.first_tile + inside - header.overhead;
  const std::int32_t nearest = (tile + header.cut_tiles / 2) / header.cut_tiles * header.cut_tiles;
  if (nearest <= s.first_tile) return 0;
  if (nearest >= s.first_tile + s.num_tiles) return s.work_length;
  return nearest - s.first_tile + header.overhead;
}

std::int64_t decode_planner::share_parts() {
  const decode_header& header = plan_.header;
  std::int64_t num_partials = 0;
  decode_part open = {};  // the output tile that the shares so far have not ended
  std::fill(plan_.parts.begin(), plan_.parts.end(), decode_parts{});
  const auto part_at = [&](std::int32_t cta) -> decode_part& {
    decode_parts& parts = plan_.parts[static_cast<std::size_t>(cta)];
    return cta == open.first_cta ? parts.begun : parts.continued;
  };
  // Adds the part of `s` that begins and ends at these places of an output tile.
  const auto add = [&](std::int32_t cta, const decode_seq& s, std::int32_t begin, std::int32_t end) {
    const std::int32_t first = s.first_tile + std::max(begin - header.overhead, 0);
    const std::int32_t last = s.first_tile + end - header.overhead - 1;
    part_at(cta).partial = static_cast<std::int32_t>(num_partials);
    ++open.num_ctas;
    num_partials += decode_piece_ordinal(s.first_tile, first, last) + 1;
  };
  const std::span<const decode_seq> seqs(plan_.seqs.data(), static_cast<std::size_t>(plan_.num_seqs));
  std::size_t index = 0;
  for (std::int32_t cta = 0; cta < header.num_ctas; ++cta) {
    const decode_cta& share = plan_.ctas[static_cast<std::size_t>(cta)];
    if (share.begin == share.end) continue;
    const auto find = [&](std::int32_t position) -> const decode_seq& {
      while (index + 1 < seqs.size() && seqs[index + 1].work_begin <= position) ++index;
      return seqs[index];
    };
    const decode_seq& first = find(share.begin);
    const std::int32_t begin = (share.begin - first.work_begin) % first.work_length;
    if (begin > 0) {
      const std::int32_t length = std::min(share.end - share.begin, first.work_length - begin);
      add(cta, first, begin, begin + length);
      if (begin + length < first.work_length) continue;
      open.num_partials = static_cast<std::int32_t>(num_partials) - open.first_partial;
      for (std::int32_t i = open.first_cta; i <= cta; ++i) {
        decode_part& part = part_at(i);
        const std::int32_t partial = part.partial;
        part = open;
        part.partial = partial;
      }
    }
    const decode_seq& last = find(share.end - 1);
    const std::int32_t end = (share.end - last.work_begin) % last.work_length;
    if (end == 0) continue;
    open = {};
    open.first_cta = cta;
    open.first_partial = static_cast<std::int32_t>(num_partials);
    add(cta, last, 0, end);
  }
  return num_partials;
}

void decode_planner::share_work() {
  const decode_header& header = plan_.header;
  const std::span<const decode_seq> seqs(plan_.seqs.data(), static_cast<std::size_t>(plan_.num_seqs));
  const bool deterministic = header.split_tiles != 0;
  plan_.ctas.resize(static_cast<std::size_t>(plan_.grid));
  std::size_t index = 0;
  std::int32_t next_begin = seqs.size() > 1 ? seqs[1].work_begin : header.total;
  divisor by_length(seqs[0].work_length);
  // The even share of CTA c begins at ⌊total · c / num_ctas⌋.
  const std::int32_t stride = header.total / header.num_ctas;
  const std::int32_t remainder = header.total % header.num_ctas;
  std::int32_t even = 0;
  std::int32_t carried = 0;
  for (std::int32_t cta = 0; cta < plan_.grid; ++cta) {
    std::int32_t begin = header.total;
    if (cta < header.num_ctas) {
      while (next_begin <= even) {
        ++index;
        next_begin = index + 1 < seqs.size() ? seqs[index + 1].work_begin : header.total;
      }
      const decode_seq& s = seqs[index];
      if (by_length.value != static_cast<std::uint32_t>(s.work_length)) by_length = divisor(s.work_length);
      const std::int32_t inside = even - s.work_begin - by_length.quotient(even - s.work_begin) * s.work_length;
      if (header.split_tiles == decode_root_tiles) {
        begin = even - inside + cut_at(s, inside);
      } else {
        begin = inside <= header.overhead || deterministic ? even - inside : even;
      }
      even += stride;
      carried += remainder;
      if (carried >= header.num_ctas) {
        carried -= header.num_ctas;
        ++even;
      }
    }
    decode_cta& here = plan_.ctas[static_cast<std::size_t>(cta)];
    if (cta > 0) plan_.ctas[static_cast<std::size_t>(cta) - 1].end = begin;
    here.begin = begin;
    here.end = header.total;
    here.seq_index = static_cast<std::int32_t>(index);
    here.first = seqs[index];
    std::fill(std::begin(here.unused), std::end(here.unused), 0);
  }
}

}  // namespace bifolio::inline v0_2::cuda
