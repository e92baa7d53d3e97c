// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/x_split/plan.hpp"

#include <algorithm>
#include <cmath>

#include "common/attention/visibility.hpp"
#include "cuda/attention/x_split/args.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

std::int64_t divide_up(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

/// Partitions of 512 positions that x_split's v1 walks for a row at the end of `seq_len` keys.
std::int64_t walked_partitions(const attention_spec& spec, std::int64_t seq_len) noexcept {
  const attn::visible_range visible = attn::window_of(spec).of(seq_len - 1, seq_len);
  return divide_up(std::max<std::int64_t>(visible.end - visible.begin, 0), x_split_positions);
}

/// CTAs of x_split's v1, and the partitions they walk.
struct x_split_walks {
  std::int64_t num_ctas = 0;
  std::int64_t num_partitions = 0;
  std::int64_t longest = 0;
};

/// Whether v1 takes no longer than v2. Unit: a partition's time while all of the `concurrent` CTAs that fit on the
/// device share its memory. docs/kernels/attention_cuda_x_split.md has the measurements.
bool one_walk_is_faster(const x_split_walks& walks, std::int32_t concurrent) noexcept {
  constexpr double least_time = 0.65;    // a partition's, in a CTA that has the memory to itself
  constexpr double partial_work = 1.12;  // a partition's, where its result is written and read again
  const auto num_partitions = static_cast<double>(walks.num_partitions);
  const double waves = static_cast<double>(walks.num_ctas) / concurrent;
  const double full_waves = std::floor(waves);
  const double last_wave = waves > full_waves ? std::max(waves - full_waves, least_time) : 0.0;
  const double mean = num_partitions / static_cast<double>(walks.num_ctas);
  const double v1 = std::max(mean * (full_waves + last_wave), least_time * static_cast<double>(walks.longest));
  const double v2 = partial_work * num_partitions / concurrent + least_time;  // the second kernel takes about as long
  return v1 <= v2;
}

/// What depends on the spec, the device and the number of partitions alone.
struct x_split_limits {
  std::int64_t ctas_per_seq = 0;
  std::int64_t max_ctas = 0;
  std::int64_t floats_per_seq = 0;  ///< of v2's workspace
  std::int64_t max_seqs = 0;        ///< of a step that v2 takes
};

x_split_limits shape_of(const attention_spec& spec, const device_numbers& device,
                        std::int32_t max_partitions) noexcept {
  // No more CTAs than this, because those of short sequences next to long ones find nothing to do.
  constexpr std::int64_t max_ctas_per_sm = 64;
  const std::int32_t head_tiles = x_split_head_tiles(spec.num_q_heads / spec.num_kv_heads,
                                                     suit_tensor_cores(spec.q_type, spec.k_code.type, spec.out_type));
  x_split_limits shape;
  shape.ctas_per_seq = static_cast<std::int64_t>(spec.num_kv_heads) * head_tiles;
  shape.max_ctas = max_ctas_per_sm * device.num_sms;
  shape.floats_per_seq = static_cast<std::int64_t>(spec.num_q_heads) * max_partitions * (spec.v_head_dim + 2);
  shape.max_seqs = std::min(static_cast<std::int64_t>(max_partial_bytes / sizeof(float)) / shape.floats_per_seq,
                            shape.max_ctas / (2 * shape.ctas_per_seq));
  return shape;
}

std::int32_t partitions_for(std::int32_t seq_len, std::int32_t least_partitions) noexcept {
  std::int32_t partitions = least_partitions;
  while (static_cast<std::int64_t>(partitions) * x_split_positions < seq_len) partitions *= 2;
  return partitions;
}

}  // namespace

x_split_plan plan_x_split(const plan_input& input, std::int32_t least_partitions) noexcept {
  x_split_plan plan;
  const attention_spec& spec = input.spec;
  std::int32_t max_seq_len = 0;
  x_split_walks walks;  // of one KV head
  for (std::int32_t seq = 0; seq < input.num_seqs; ++seq) {
    const std::int32_t query_len = input.query_start_loc[seq + 1] - input.query_start_loc[seq];
    plan.has_others = plan.has_others || query_len > 1;
    if (query_len != 1) continue;
    plan.has_decodes = true;
    max_seq_len = std::max(max_seq_len, input.seq_lens[seq]);
    ++walks.num_ctas;
    walks.num_partitions += walked_partitions(spec, input.seq_lens[seq]);
  }
  if (!plan.has_decodes) return plan;
  plan.max_partitions = partitions_for(max_seq_len, least_partitions);
  if (plan.max_partitions == 1) return plan;

  const x_split_limits shape = shape_of(spec, input.device, plan.max_partitions);
  if (input.num_seqs > shape.max_seqs) return plan;
  plan.workspace_floats = static_cast<std::size_t>(shape.floats_per_seq * input.num_seqs);

  walks.num_ctas *= shape.ctas_per_seq;
  walks.num_partitions *= shape.ctas_per_seq;
  // A captured graph may meet lengths up to those reserved.
  walks.longest = walked_partitions(
      spec, std::max<std::int64_t>(max_seq_len, static_cast<std::int64_t>(least_partitions) * x_split_positions));
  if (one_walk_is_faster(walks, input.device.num_sms * x_split_ctas_per_sm(spec.v_head_dim))) return plan;
  constexpr std::int32_t most_splits = 1 << 15;  // a grid's z is below 2^16
  const std::int32_t most = std::min(plan.max_partitions, most_splits);
  while (2 * plan.num_splits <= most && 2 * plan.num_splits * input.num_seqs * shape.ctas_per_seq <= shape.max_ctas) {
    plan.num_splits *= 2;
  }
  return plan;
}

x_split_room max_x_split_room(const attention_spec& spec, const step_limits& limits, const device_numbers& device,
                              std::int32_t least_partitions) noexcept {
  x_split_room room;
  room.max_partitions = partitions_for(limits.seq_len, least_partitions);
  if (room.max_partitions == 1) return room;
  const x_split_limits shape = shape_of(spec, device, room.max_partitions);
  room.workspace_floats = static_cast<std::size_t>(
      shape.floats_per_seq * std::min(limits.num_seqs, std::max<std::int64_t>(shape.max_seqs, 0)));
  return room;
}

}  // namespace bifolio::inline v0_2::cuda
