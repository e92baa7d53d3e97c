// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/attention_plan.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "common/attention/visibility.hpp"
#include "common/base/refuse.hpp"
#include "cuda/attention/x_split/args.hpp"
#include "cuda/host/divisor.hpp"

namespace bifolio::cuda {
namespace {

// Thread blocks of the general kernel that run at once on one multiprocessor, roughly.
constexpr std::int64_t blocks_per_sm = 4;

std::int64_t divide_up(std::int64_t a, std::int64_t b) noexcept { return (a + b - 1) / b; }

/// Rows of one sequence that one thread block takes, and the splits that they see together.
struct row_tile {
  std::int32_t seq = 0;
  std::int64_t first_row = 0;
  std::int64_t first_split = 0;
  std::int64_t num_splits = 0;
};

/// Calls visit(row_tile) in the order of the items: the last tokens of a sequence first, because under a causal mask
/// they see most.
template <class Visit>
void for_each_tile(const plan_input& input, std::int32_t rows_per_tile, const Visit& visit) {
  const std::int32_t group = input.spec.num_q_heads / input.spec.num_kv_heads;
  const attn::attention_window window = attn::window_of(input.spec);
  const divisor by_group(group);
  const auto token_of = [&](std::int64_t row) -> std::int64_t {
    return row <= std::numeric_limits<std::int32_t>::max() ? by_group.quotient(static_cast<std::int32_t>(row))
                                                           : row / group;
  };
  const int tile_shift = rows_per_tile == few_rows ? 2 : 4;
  static_assert(few_rows == 1 << 2 && many_rows == 1 << 4);
  for (std::int32_t seq = 0; seq < input.num_seqs; ++seq) {
    const std::int64_t query_len = input.query_start_loc[seq + 1] - input.query_start_loc[seq];
    const std::int64_t seq_len = input.seq_lens[seq];
    const std::int64_t first = attn::first_query_position(input.query_positions, seq, query_len, seq_len);
    const std::int64_t num_rows = query_len * group;
    for (std::int64_t tile = ((num_rows + rows_per_tile - 1) >> tile_shift) - 1; tile >= 0; --tile) {
      row_tile t;
      t.seq = seq;
      t.first_row = tile * rows_per_tile;
      const std::int64_t last_row = std::min(t.first_row + rows_per_tile, num_rows) - 1;
      const std::int64_t first_position = first + token_of(t.first_row);
      const std::int64_t last_position = first + token_of(last_row);
      const auto [begin, end] = window.of_run(first_position, last_position, seq_len);
      if (begin < end) {
        t.first_split = begin / split_positions;
        t.num_splits = divide_up(end, split_positions) - t.first_split;
      }
      visit(t);
    }
  }
}

/// Partitions of 512 positions that x_split's v1 walks for a row at the end of `seq_len` keys.
std::int64_t walked_partitions(const attention_spec& spec, std::int64_t seq_len) noexcept {
  const attn::visible_range visible = attn::window_of(spec).of(seq_len - 1, seq_len);
  return divide_up(std::max<std::int64_t>(visible.end - visible.begin, 0), x_split_positions);
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

std::size_t general_plan::workspace_floats(const attention_spec& spec) const noexcept {
  return static_cast<std::size_t>(num_partials * spec.num_kv_heads * num_dim_tiles *
                                  partial_floats(rows_per_tile, spec.v_head_dim));
}

std::size_t general_plan::num_counters(const attention_spec& spec) const noexcept {
  return static_cast<std::size_t>(num_tiles * spec.num_kv_heads * num_dim_tiles);
}

void plan_general(const plan_input& input, general_plan& plan) {
  const attention_spec& spec = input.spec;
  const std::int64_t group = spec.num_q_heads / spec.num_kv_heads;
  plan.rows_per_tile = input.max_query_len * group <= few_rows ? few_rows : many_rows;
  plan.num_dim_tiles = static_cast<std::int32_t>(divide_up(spec.v_head_dim, dims_per_tile));
  plan.has_query_positions = input.query_positions != nullptr;
  plan.items.clear();
  plan.num_tiles = 0;
  plan.num_partials = 0;

  std::int64_t num_tiles = 0;
  std::int64_t num_splits = 0;
  for_each_tile(input, plan.rows_per_tile, [&](const row_tile& t) {
    ++num_tiles;
    num_splits += t.num_splits;
  });
  // Splits that one of the tiles working at the same time would take in an even share. Longer tiles are cut.
  const std::int64_t blocks_per_item = static_cast<std::int64_t>(spec.num_kv_heads) * plan.num_dim_tiles;
  const std::int64_t at_once = std::max<std::int64_t>(1, input.device.num_sms * blocks_per_sm / blocks_per_item);
  const std::int64_t even_share = std::max<std::int64_t>(1, num_splits / at_once);
  const std::int64_t partial_bytes =
      blocks_per_item * partial_floats(plan.rows_per_tile, spec.v_head_dim) * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t max_partials = static_cast<std::int64_t>(max_partial_bytes) / partial_bytes;

  for_each_tile(input, plan.rows_per_tile, [&](const row_tile& t) {
    general_item item = {};
    item.seq = t.seq;
    item.first_row = static_cast<std::int32_t>(t.first_row);
    item.first_split = static_cast<std::int32_t>(t.first_split);
    item.num_splits = static_cast<std::int32_t>(t.num_splits);
    item.tile = -1;
    if (2 * t.num_splits <= 3 * even_share || plan.num_partials + t.num_splits > max_partials) {
      plan.items.push_back(item);
      return;
    }
    item.tile = static_cast<std::int32_t>(plan.num_tiles++);
    item.first_partial = static_cast<std::int32_t>(plan.num_partials);
    item.num_partials = item.num_splits;
    item.num_splits = 1;
    for (std::int32_t split = 0; split < item.num_partials; ++split) {
      item.partial = item.first_partial + split;
      plan.items.push_back(item);
      ++item.first_split;
    }
    plan.num_partials += item.num_partials;
  });

  constexpr std::int64_t max_rows = std::numeric_limits<std::int32_t>::max();
  if (input.max_query_len * group > max_rows || static_cast<std::int64_t>(plan.items.size()) > max_rows) {
    detail::refuse(errc::unsupported, "a sequence of ", input.max_query_len, " new tokens with ", group,
                   " query heads to a KV head has more rows than the largest allowed number, ", max_rows);
  }
}

x_split_plan plan_x_split(const plan_input& input, std::int32_t least_partitions) noexcept {
  x_split_plan plan;
  const attention_spec& spec = input.spec;
  if (spec.deterministic || !has_plain_planes(spec) || input.query_positions != nullptr) return plan;
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
  const std::int32_t head_tiles = x_split_head_tiles(
      spec.num_q_heads / spec.num_kv_heads, x_split_on_tensor_cores(spec.q_type, spec.k_code.type, spec.out_type));
  const std::int64_t blocks_per_seq = static_cast<std::int64_t>(spec.num_kv_heads) * head_tiles;
  const std::int64_t max_blocks = max_blocks_per_sm * input.device.num_sms;
  const std::int64_t floats_per_seq =
      static_cast<std::int64_t>(spec.num_q_heads) * plan.max_partitions * (spec.v_head_dim + 2);
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
  if (one_walk_is_faster(walks, input.device.num_sms * x_split_blocks_per_sm(spec.v_head_dim))) return plan;
  const std::int32_t most = std::min(plan.max_partitions, most_splits);
  while (2 * plan.num_splits <= most && 2 * plan.num_splits * input.num_seqs * blocks_per_seq <= max_blocks) {
    plan.num_splits *= 2;
  }
  return plan;
}

cuda_plan_state::cuda_plan_state(std::shared_ptr<const device_state> state) noexcept
    : attention_plan_state(state.get()), state_(std::move(state)), device_memory_(state_), pinned_memory_(state_) {}

cuda_plan_state::~cuda_plan_state() {
  if (state_->health() == errc::failed_precondition) return;
  const device_guard guard(state_->api(), state_->index());
  for (staging_slot& slot : staging_) {
    // The pinned words of a copy under way are given back by cudaFreeHost, which waits for it.
    if (slot.copied != nullptr) (void)state_->report(state_->api().event_destroy(slot.copied));
  }
}

void cuda_plan_state::compute(const plan_input& input) {
  plan_general(input, next_general_);
  next_x_split_ = plan_x_split(input, least_partitions_);
  plan_fast(input, next_fast_);
  next_query_lens_.resize(static_cast<std::size_t>(input.num_seqs));
  for (std::int32_t seq = 0; seq < input.num_seqs; ++seq) {
    next_query_lens_[static_cast<std::size_t>(seq)] = input.query_start_loc[seq + 1] - input.query_start_loc[seq];
  }
}

cuda_plan_state::room cuda_plan_state::room_for_next(const attention_spec& spec) const noexcept {
  room needed;
  needed.general_bytes = sizeof(general_header) + next_general_.items.size() * sizeof(general_item);
  needed.fast_bytes = next_fast_.words.size() * sizeof(std::int32_t);
  needed.workspace_bytes = std::max({next_general_.workspace_floats(spec) * sizeof(float),
                                     next_x_split_.workspace_floats * sizeof(float), next_fast_.workspace_bytes});
  needed.counter_bytes = std::max(next_general_.num_counters(spec), next_fast_.num_counters) * sizeof(std::uint32_t);
  return needed;
}

cuda_plan_state::larger_buffers cuda_plan_state::make_room(const room& needed, cudaStream_t stream) {
  const runtime_api& api = state_->api();
  const auto grown = [](std::size_t num_bytes, std::size_t held) {
    constexpr std::size_t grain = 4096;
    return num_bytes <= held ? held : (std::max(num_bytes, 2 * held) + grain - 1) / grain * grain;
  };
  larger_buffers larger;
  const std::size_t new_general = grown(needed.general_bytes, fast_words_offset_);
  const std::size_t new_fast = grown(needed.fast_bytes, words_.num_bytes() - fast_words_offset_);
  if (new_general + new_fast > words_.num_bytes()) {
    for (staging_slot& slot : staging_) {
      if (slot.pending) state_->require(api.event_synchronize(slot.copied), "the upload of an earlier plan failed");
      slot.pending = false;
    }
    larger.fast_words_offset = new_general;
    larger.words = buffer(device_memory_, new_general + new_fast);
    for (buffer& one : larger.pinned) one = buffer(pinned_memory_, new_general + new_fast);
  }
  // Partial results are not kept from call to call, and may be large: no room to spare.
  if (needed.workspace_bytes > workspace_.num_bytes()) {
    larger.workspace = buffer(device_memory_, needed.workspace_bytes);
  }
  if (needed.counter_bytes > counters_.num_bytes()) {
    larger.counters = buffer(device_memory_, grown(needed.counter_bytes, counters_.num_bytes()));
    state_->require(api.memset_async(larger.counters.data(), 0, larger.counters.num_bytes(), stream),
                    "the plan's counters cannot be cleared");
  }
  for (staging_slot& slot : staging_) {
    if (slot.copied != nullptr) continue;
    state_->require(api.event_create(&slot.copied, cudaEventDisableTiming), "an event cannot be created");
  }
  return larger;
}

void cuda_plan_state::commit(larger_buffers& larger) noexcept {
  // Old buffers may still be read by launches of earlier steps: releasing device memory waits for them.
  bool changed = false;
  if (larger.words.num_bytes() > 0) {
    changed = true;
    words_.swap(larger.words);
    fast_words_offset_ = larger.fast_words_offset;
    for (std::size_t i = 0; i < staging_.size(); ++i) staging_[i].words.swap(larger.pinned[i]);
  }
  if (larger.workspace.num_bytes() > 0) {
    changed = true;
    workspace_.swap(larger.workspace);
  }
  if (larger.counters.num_bytes() > 0) {
    changed = true;
    counters_.swap(larger.counters);
  }
  if (changed) ++epoch_;
}

void cuda_plan_state::reserve(const attention_spec& spec, std::span<const plan_input> inputs) {
  room most;
  std::int32_t partitions = least_partitions_;
  for (const plan_input& input : inputs) {
    compute(input);
    const room needed = room_for_next(spec);
    most.general_bytes = std::max(most.general_bytes, needed.general_bytes);
    most.fast_bytes = std::max(most.fast_bytes, needed.fast_bytes);
    most.workspace_bytes =
        std::max({most.workspace_bytes, needed.workspace_bytes, next_x_split_.max_workspace_floats * sizeof(float)});
    most.counter_bytes = std::max(most.counter_bytes, needed.counter_bytes);
    partitions = std::max(partitions, next_x_split_.max_partitions);
  }
  larger_buffers larger = make_room(most, nullptr);
  // Other streams need not wait for the default one, which clears the counters here.
  if (larger.counters.num_bytes() > 0) {
    state_->require(state_->api().stream_synchronize(nullptr), "the plan's counters cannot be cleared");
  }
  commit(larger);
  least_partitions_ = partitions;
}

void cuda_plan_state::adopt(const attention_spec& spec, cudaStream_t stream) {
  const runtime_api& api = state_->api();
  const room needed = room_for_next(spec);
  larger_buffers larger = make_room(needed, stream);

  // The staging words of four steps ago: their copy has long been made.
  staging_slot& slot = staging_[next_slot_];
  if (slot.pending) {
    state_->require(api.event_synchronize(slot.copied), "the upload of an earlier plan failed");
    slot.pending = false;
  }
  const bool words_grow = larger.words.num_bytes() > 0;
  auto* const host_words = words_grow ? larger.pinned[next_slot_].as<std::byte>() : slot.words.as<std::byte>();
  auto* const device_words = words_grow ? larger.words.as<std::byte>() : words_.as<std::byte>();
  const std::size_t fast_words_offset = words_grow ? larger.fast_words_offset : fast_words_offset_;
  const general_header header = {static_cast<std::int32_t>(next_general_.items.size()), {}};
  std::memcpy(host_words, &header, sizeof(header));
  if (!next_general_.items.empty()) {
    std::memcpy(host_words + sizeof(header), next_general_.items.data(), needed.general_bytes - sizeof(header));
  }
  if (needed.fast_bytes > 0) std::memcpy(host_words + fast_words_offset, next_fast_.words.data(), needed.fast_bytes);
  // One copy, so that the device holds either the old plan or the new one.
  const std::size_t num_bytes = needed.fast_bytes > 0 ? fast_words_offset + needed.fast_bytes : needed.general_bytes;
  state_->require(api.memcpy_async(device_words, host_words, num_bytes, cudaMemcpyHostToDevice, stream),
                  "the plan cannot be uploaded");
  const cudaError_t recorded = api.event_record(slot.copied, stream);
  slot.pending = recorded == cudaSuccess;
  if (!slot.pending) {
    (void)state_->report(recorded);
    state_->require(api.stream_synchronize(stream), "the plan cannot be uploaded");
  }
  next_slot_ = (next_slot_ + 1) % staging_.size();
  commit(larger);

  // Not x_split's number of splits: what a launch was captured with stays right for all lengths of max_partitions.
  const bool same_kernels =
      general_.has_query_positions == next_general_.has_query_positions &&
      general_.rows_per_tile == next_general_.rows_per_tile && general_.num_dim_tiles == next_general_.num_dim_tiles &&
      x_split_.has_decodes == next_x_split_.has_decodes && x_split_.has_others == next_x_split_.has_others &&
      x_split_.max_partitions == next_x_split_.max_partitions && fast_.usable == next_fast_.usable &&
      fast_.family == next_fast_.family &&
      std::equal(std::begin(fast_.numbers), std::end(fast_.numbers), std::begin(next_fast_.numbers));
  if (!same_kernels || epoch_ == 0) ++epoch_;
  std::swap(general_, next_general_);
  std::swap(x_split_, next_x_split_);
  std::swap(fast_, next_fast_);
  std::swap(query_lens_, next_query_lens_);
}

void cuda_plan_state::fill(attention_kernel_args& args) const noexcept {
  const auto* const words = words_.as<std::byte>();
  args.general_words = reinterpret_cast<const std::int32_t*>(words);
  args.fast_words = reinterpret_cast<const std::int32_t*>(words + fast_words_offset_);
  args.workspace = const_cast<float*>(workspace_.as<float>());
  args.counters = const_cast<std::uint32_t*>(counters_.as<std::uint32_t>());
}

}  // namespace bifolio::cuda
