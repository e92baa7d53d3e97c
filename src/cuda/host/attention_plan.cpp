// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/attention_plan.hpp"

#include <algorithm>
#include <cstring>

namespace bifolio::inline v0_2::cuda {

cuda_plan_state::cuda_plan_state(std::shared_ptr<const device_state> state) noexcept
    : attention_plan_state(state.get()), state_(std::move(state)), device_memory_(state_), pinned_memory_(state_) {}

cuda_plan_state::~cuda_plan_state() {
  if (state_->health() == errc::failed_precondition) return;
  const device_guard guard(state_->api(), state_->index());
  for (staging_slot& slot : staging_) {
    // Pinned memory whose copy is under way is given back by cudaFreeHost, which waits for it.
    if (slot.copied != nullptr) (void)state_->report(state_->api().event_destroy(slot.copied));
  }
}

void cuda_plan_state::compute(const plan_input& input) {
  const planning_history history{general_was_needed_.load(std::memory_order_relaxed), least_partitions_,
                                 plans_.prefill.combines, plans_.latent.combines};
  plan_step(input, detail::forced_by(input.spec, state_->forced_implementation()), history, next_);
}

cuda_plan_state::room cuda_plan_state::room_for_next() const noexcept {
  const attention_spec& spec = next_.input.spec;
  room needed;
  if (!next_.decode.empty())
    needed.decode_bytes = decode_metadata_bytes(next_.decode.grid, next_.decode.num_seqs, spec.deterministic);
  if (!next_.prefill.empty()) {
    needed.prefill_bytes =
        prefill_metadata_bytes(static_cast<std::int64_t>(next_.prefill.work_tiles.size()), next_.input.device.num_sms);
  }
  if (!next_.latent.empty()) {
    needed.latent_bytes =
        prefill_metadata_bytes(static_cast<std::int64_t>(next_.latent.work_tiles.size()), next_.input.device.num_sms);
  }
  needed.item_bytes = next_.general.items.size() * sizeof(general_item);
  needed.workspace_bytes =
      std::max({next_.general.workspace_bytes(spec), next_.x_split.workspace_floats * sizeof(float),
                next_.decode.empty() ? 0 : next_.decode.workspace_bytes,
                next_.prefill.empty() || (next_.prefill.num_partials == 0 && !spec.deterministic)
                    ? 0
                    : prefill_workspace_bytes(spec, next_.input.device.num_sms),
                next_.latent.num_partials == 0 ? 0 : latent_workspace_bytes(next_.input.device.num_sms)});
  needed.counter_bytes =
      std::max({next_.general.num_counters(spec), next_.decode.empty() ? 0 : next_.decode.num_counters,
                next_.prefill.empty() ? 0 : prefill_num_counters}) *
      sizeof(std::uint32_t);
  return needed;
}

cuda_plan_state::larger_buffers cuda_plan_state::make_room(const room& needed, cudaStream_t stream) {
  const runtime_api& api = state_->api();
  const auto grown = [](std::size_t num_bytes, std::size_t held) {
    constexpr std::size_t grain = 4096;
    return num_bytes <= held ? held : (std::max(num_bytes, 2 * held) + grain - 1) / grain * grain;
  };
  larger_buffers larger;
  // Every part begins at a multiple of 16 bytes, as capacities are.
  offsets places;
  places.decode = sizeof(general_header);
  places.prefill = places.decode + grown(needed.decode_bytes, places_.prefill - places_.decode);
  places.latent = places.prefill + grown(needed.prefill_bytes, places_.latent - places_.prefill);
  places.items = places.latent + grown(needed.latent_bytes, places_.items - places_.latent);
  places.end = places.items + grown(needed.item_bytes, places_.end - places_.items);
  if (places.end > metadata_memory_.num_bytes()) {
    for (staging_slot& slot : staging_) {
      if (slot.pending) state_->require(api.event_synchronize(slot.copied), "the upload of an earlier plan failed");
      slot.pending = false;
    }
    larger.places = places;
    larger.metadata = buffer(device_memory_, places.end);
    for (buffer& pinned : larger.pinned) pinned = buffer(pinned_memory_, places.end);
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
  if (larger.metadata.num_bytes() > 0) {
    changed = true;
    metadata_memory_.swap(larger.metadata);
    places_ = larger.places;
    for (std::size_t i = 0; i < staging_.size(); ++i) staging_[i].metadata.swap(larger.pinned[i]);
  }
  if (larger.workspace.num_bytes() > 0) {
    changed = true;
    workspace_.swap(larger.workspace);
  }
  if (larger.counters.num_bytes() > 0) {
    changed = true;
    counters_.swap(larger.counters);
  }
  if (!changed) return;
  num_known_ = 0;
  epoch_ = ++last_epoch_;
}

void cuda_plan_state::reserve(const attention_spec& spec, const step_limits& limits) {
  const device_numbers& device = state_->numbers();
  // Each implementation that accepts an empty step of the spec may serve some step, and general any. A forced one must
  // accept it.
  plan_input empty;
  empty.spec = spec;
  empty.device = device;
  compute(empty);
  const auto may_serve = [&](implementation_id id) {
    const implementation& entry = implementations()[static_cast<std::size_t>(id)];
    return (!next_.forced || next_.input.spec.implementation == entry.name) && entry.accepts(empty, nullptr);
  };
  room most;
  const general_room general = max_general_room(spec, limits, device);
  most.item_bytes = static_cast<std::size_t>(general.num_items) * sizeof(general_item);
  most.workspace_bytes = general.workspace_bytes;
  std::size_t num_counters = general.num_counters;
  std::int32_t partitions = least_partitions_;
  if (may_serve(implementation_id::x_split)) {
    const x_split_room x_split = max_x_split_room(spec, limits, device, least_partitions_);
    most.workspace_bytes = std::max(most.workspace_bytes, x_split.workspace_floats * sizeof(float));
    partitions = x_split.max_partitions;
  }
  if (may_serve(implementation_id::decode)) {
    const std::int32_t grid = decode_grid(spec, device);
    most.decode_bytes = decode_metadata_bytes(grid, limits.num_seqs_with_tokens(), spec.deterministic);
    most.workspace_bytes = std::max(most.workspace_bytes, decode_workspace_bytes(spec, grid));
    num_counters = std::max(num_counters, decode_num_counters(spec, grid));
  }
  if (may_serve(implementation_id::prefill)) {
    most.prefill_bytes = prefill_metadata_bytes(max_prefill_work_tiles(spec, limits, device.num_sms), device.num_sms);
    most.workspace_bytes = std::max(most.workspace_bytes, prefill_workspace_bytes(spec, device.num_sms));
    num_counters = std::max(num_counters, prefill_num_counters);
  }
  if (may_serve(implementation_id::latent)) {
    most.latent_bytes = prefill_metadata_bytes(max_latent_work_tiles(spec, limits, device.num_sms), device.num_sms);
    most.workspace_bytes = std::max(most.workspace_bytes, latent_workspace_bytes(device.num_sms));
  }
  most.counter_bytes = num_counters * sizeof(std::uint32_t);

  larger_buffers larger = make_room(most, nullptr);
  // Other streams need not wait for the default one, which clears the counters here.
  if (larger.counters.num_bytes() > 0) {
    state_->require(state_->api().stream_synchronize(nullptr), "the plan's counters cannot be cleared");
  }
  commit(larger);
  least_partitions_ = partitions;
}

std::size_t cuda_plan_state::write_next(std::byte* begin, const offsets& places) const noexcept {
  std::size_t end = sizeof(general_header);
  const general_plan& general = next_.general;
  const general_header header = {
      general.has_items ? static_cast<std::int32_t>(general.items.size()) : -1, general.num_seqs, {}};
  std::memcpy(begin, &header, sizeof(header));
  if (!next_.decode.empty()) {
    write_metadata(next_.decode, begin + places.decode);
    end =
        places.decode + decode_metadata_bytes(next_.decode.grid, next_.decode.num_seqs, next_.input.spec.deterministic);
  }
  if (!next_.prefill.empty()) {
    const std::int32_t num_sms = next_.input.device.num_sms;
    write_metadata(next_.prefill, num_sms, begin + places.prefill);
    end = places.prefill + prefill_metadata_bytes(static_cast<std::int64_t>(next_.prefill.work_tiles.size()), num_sms);
  }
  if (!next_.latent.empty()) {
    const std::int32_t num_sms = next_.input.device.num_sms;
    write_metadata(next_.latent, num_sms, begin + places.latent);
    end = places.latent + prefill_metadata_bytes(static_cast<std::int64_t>(next_.latent.work_tiles.size()), num_sms);
  }
  if (!general.items.empty()) {
    std::memcpy(begin + places.items, general.items.data(), general.items.size() * sizeof(general_item));
    end = places.items + general.items.size() * sizeof(general_item);
  }
  return end;
}

cuda_plan_state::captured_values cuda_plan_state::captured_by(const step_plans& plans) noexcept {
  captured_values values;
  values.assigned = plans.assigned;
  values.has_query_positions = plans.general.has_query_positions;
  values.rows_per_tile = plans.general.rows_per_tile;
  values.num_dim_tiles = plans.general.num_dim_tiles;
  values.has_decodes = plans.x_split.has_decodes;
  values.has_others = plans.x_split.has_others;
  values.max_partitions = plans.x_split.max_partitions;
  values.decode_grid = plans.decode.grid;
  values.decode_few_rows = !plans.decode.empty() && plans.decode.few_rows;
  if (!plans.prefill.empty()) {
    values.prefill_tokens = plans.prefill.num_tokens;
    values.packed_heads = plans.prefill.packing.heads;
    values.prefill_combines = plans.prefill.combines;
  }
  if (!plans.latent.empty()) {
    values.latent_tokens = plans.latent.num_tokens;
    values.few_rows = plans.latent.few_rows;
    values.latent_combines = plans.latent.combines;
  }
  return values;
}

std::uint64_t cuda_plan_state::epoch_of(const captured_values& values) noexcept {
  const auto end = known_.begin() + static_cast<std::ptrdiff_t>(num_known_);
  auto found = std::find_if(known_.begin(), end, [&](const known_epoch& known) { return known.values == values; });
  if (found == end) {
    if (num_known_ < known_.size()) {
      ++num_known_;
    } else {
      --found;  // what was met longest ago is forgotten
    }
    *found = {values, ++last_epoch_};
  }
  std::rotate(known_.begin(), found, found + 1);
  return known_.front().epoch;
}

void cuda_plan_state::adopt(cudaStream_t stream) {
  const runtime_api& api = state_->api();
  larger_buffers larger = make_room(room_for_next(), stream);

  // The staging memory of four steps ago: its copy was made long ago.
  staging_slot& slot = staging_[next_slot_];
  if (slot.pending) {
    state_->require(api.event_synchronize(slot.copied), "the upload of an earlier plan failed");
    slot.pending = false;
  }
  const bool grows = larger.metadata.num_bytes() > 0;
  auto* const host = grows ? larger.pinned[next_slot_].as<std::byte>() : slot.metadata.as<std::byte>();
  auto* const on_device = grows ? larger.metadata.as<std::byte>() : metadata_memory_.as<std::byte>();
  const offsets& places = grows ? larger.places : places_;
  // One copy, so that the device holds either the old plan or the new one.
  const std::size_t num_bytes = write_next(host, places);
  state_->require(api.memcpy_async(on_device, host, num_bytes, cudaMemcpyHostToDevice, stream),
                  "the plan cannot be uploaded");
  const cudaError_t recorded = api.event_record(slot.copied, stream);
  slot.pending = recorded == cudaSuccess;
  if (!slot.pending) {
    (void)state_->report(recorded);
    state_->require(api.stream_synchronize(stream), "the plan cannot be uploaded");
  }
  next_slot_ = (next_slot_ + 1) % staging_.size();
  commit(larger);

  epoch_ = epoch_of(captured_by(next_));
  std::swap(plans_, next_);
  metadata_.general = {reinterpret_cast<const general_header*>(on_device),
                       reinterpret_cast<const general_item*>(on_device + places_.items)};
  metadata_.decode =
      decode_metadata_at(on_device + places_.decode, plans_.decode.grid, plans_.input.spec.deterministic);
  metadata_.prefill = prefill_metadata_at(on_device + places_.prefill, plans_.input.device.num_sms);
  metadata_.latent = prefill_metadata_at(on_device + places_.latent, plans_.input.device.num_sms);
}

void cuda_plan_state::fill(attention_kernel_args& args) const noexcept {
  args.workspace = const_cast<float*>(workspace_.as<float>());
  args.counters = const_cast<std::uint32_t*>(counters_.as<std::uint32_t>());
}

}  // namespace bifolio::inline v0_2::cuda
