// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/x_split/plan.hpp"

#include <algorithm>
#include <cmath>

#include "cuda/attention/x_split/args.hpp"

namespace bifolio::cuda {
namespace {

std::int64_t divide_up(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

/// Partitions of 512 positions that x_split's v1 walks for a row at the end of `seq_len` keys.
std::int64_t walked_partitions(const attention_spec& spec, std::int64_t seq_len) noexcept {
  const std::int64_t seen = spec.window_left < 0 ? seq_len : std::min<std::int64_t>(seq_len, spec.window_left + 1LL);
  return divide_up(std::max<std::int64_t>(seen, 0), x_split_positions);
}

/// Thread blocks of x_split's v1, and the partitions they walk.
struct x_split_walks {
  std::int64_t num_blocks = 0;
  std::int64_t num_partitions = 0;
  std::int64_t longest = 0;
};

/// Whether v1 takes no longer than v2. Unit: a partition's time while all of the `at_once` thread blocks that fit on
/// the device share its memory. docs/kernels/attention_cuda_x_split.md has the measurements behind it.
bool one_walk_is_faster(const x_split_walks& walks, std::int32_t at_once) noexcept {
  constexpr double least_time = 0.65;    // a partition's, in a thread block that has the memory to itself
  constexpr double partial_work = 1.12;  // a partition's, where its result is written and read again
  const auto num_partitions = static_cast<double>(walks.num_partitions);
  const double waves = static_cast<double>(walks.num_blocks) / at_once;
  const double full_waves = std::floor(waves);
  const double last_wave = waves > full_waves ? std::max(waves - full_waves, least_time) : 0.0;
  const double mean = num_partitions / static_cast<double>(walks.num_blocks);
  const double v1 = std::max(mean * (full_waves + last_wave), least_time * static_cast<double>(walks.longest));
  const double v2 = partial_work * num_partitions / at_once + least_time;  // the second kernel takes about as long
  return v1 <= v2;
}

}  // namespace

x_split_plan plan_x_split(const plan_input& input, std::int32_t least_partitions) noexcept {
  x_split_plan plan;
  const attention_spec& spec = input.spec;
  if (spec.deterministic) return plan;
  std::int32_t max_seq_len = 0;
  x_split_walks walks;  // of one KV head
  for (std::int32_t seq = 0; seq < input.num_seqs; ++seq) {
    const std::int32_t query_len = input.query_start_loc[seq + 1] - input.query_start_loc[seq];
    plan.has_others = plan.has_others || query_len > 1;
    if (query_len != 1) continue;
    plan.has_decodes = true;
    max_seq_len = std::max(max_seq_len, input.seq_lens[seq]);
    ++walks.num_blocks;
    walks.num_partitions += walked_partitions(spec, input.seq_lens[seq]);
  }
  if (!plan.has_decodes) return plan;
  plan.max_partitions = least_partitions;
  while (static_cast<std::int64_t>(plan.max_partitions) * x_split_positions < max_seq_len) plan.max_partitions *= 2;
  if (plan.max_partitions == 1) return plan;

  // No more thread blocks than this, because those of short sequences beside long ones find nothing to do.
  constexpr std::int64_t max_blocks_per_sm = 64;
  constexpr std::int32_t most_splits = 1 << 15;  // a grid's z is below 2^16
  const std::int32_t head_tiles = x_split_head_tiles(spec.num_q_heads / spec.num_kv_heads,
                                                     x_split_on_tensor_cores(spec.q_type, spec.kv_type, spec.out_type));
  const std::int64_t blocks_per_seq = static_cast<std::int64_t>(spec.num_kv_heads) * head_tiles;
  const std::int64_t max_blocks = max_blocks_per_sm * input.device.num_sms;
  const std::int64_t floats_per_seq =
      static_cast<std::int64_t>(spec.num_q_heads) * plan.max_partitions * (spec.head_dim + 2);
  const std::int64_t max_seqs = std::min(static_cast<std::int64_t>(max_partial_bytes / sizeof(float)) / floats_per_seq,
                                         max_blocks / (2 * blocks_per_seq));
  plan.max_workspace_floats =
      static_cast<std::size_t>(floats_per_seq * std::min<std::int64_t>(input.num_seqs, max_seqs));
  if (input.num_seqs > max_seqs) return plan;
  plan.workspace_floats = plan.max_workspace_floats;

  walks.num_blocks *= blocks_per_seq;
  walks.num_partitions *= blocks_per_seq;
  // A captured graph may meet lengths up to those reserved.
  walks.longest = walked_partitions(
      spec, std::max<std::int64_t>(max_seq_len, static_cast<std::int64_t>(least_partitions) * x_split_positions));
  if (one_walk_is_faster(walks, input.device.num_sms * x_split_blocks_per_sm(spec.head_dim))) return plan;
  const std::int32_t most = std::min(plan.max_partitions, most_splits);
  while (2 * plan.num_splits <= most && 2 * plan.num_splits * input.num_seqs * blocks_per_seq <= max_blocks) {
    plan.num_splits *= 2;
  }
  return plan;
}

}  // namespace bifolio::cuda
