// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/attention_plan.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "common/base/refuse.hpp"

namespace bifolio::cuda {

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
