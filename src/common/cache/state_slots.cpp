// SPDX-License-Identifier: Apache-2.0
#include "common/cache/state_slots.hpp"

#include <algorithm>
#include <iterator>

#include "common/base/hash.hpp"
#include "common/base/refuse.hpp"
#include "common/cache/group_config.hpp"

namespace bifolio::inline v0_2::detail {
namespace {

// Steps in flight and the one being planned, each with drafts, and the committed state.
std::uint32_t capacity_for(const group_config& group) noexcept {
  return (block_pool::max_open_fences + 1) * (1 + static_cast<std::uint32_t>(group.num_draft_slots)) + 1;
}

}  // namespace

state_slots::state_slots(const group_config& group, const kv_cache_config& options, std::uint64_t first_serial)
    : num_draft_slots_(group.num_draft_slots),
      num_records_(static_cast<std::uint32_t>(options.max_sequences)),
      capacity_(capacity_for(group)),
      pool_(group.num_blocks, *options.memory),
      storage_(*options.memory,
               std::size_t{num_records_} * (capacity_ * sizeof(held_state) + sizeof(std::uint32_t) + 1)) {
  entries_ = storage_.as<held_state>();
  counts_ = reinterpret_cast<std::uint32_t*>(entries_ + std::size_t{num_records_} * capacity_);
  out_ = reinterpret_cast<std::uint8_t*>(counts_ + num_records_);
  std::uninitialized_fill_n(entries_, std::size_t{num_records_} * capacity_, held_state{0, invalid_block});
  std::fill_n(counts_, num_records_, 0U);
  std::fill_n(out_, num_records_, std::uint8_t{0});
  if (group.num_host_blocks > 0) host_ = std::make_unique<block_pool>(group.num_host_blocks, *options.memory);
  if (options.prefix.enabled) {
    prefix_ = std::make_unique<prefix_cache>(pool_, prefix_cache_config{.block_size = 1,
                                                                        .seed = hash_seed{},
                                                                        .record_events = options.prefix.record_events,
                                                                        .policy = options.prefix.policy,
                                                                        .memory = options.memory,
                                                                        .first_serial = first_serial});
  }
}

void state_slots::require_room(std::uint32_t record, std::int64_t num_tokens) const {
  if (has_room(record, num_tokens)) return;
  refuse(errc::failed_precondition, "sequence ", record, " has ", counts_[record],
         " states, of a step each, and room for ", capacity_, "; commit steps before more are appended");
}

void state_slots::open(std::uint32_t record, std::int64_t position, block_id snapshot) noexcept {
  if (position == 0) return;
  prefix_->pin({&snapshot, 1});
  entries_[std::size_t{record} * capacity_] = {static_cast<std::int32_t>(position), snapshot};
  counts_[record] = 1;
  ++num_entries_;
}

void state_slots::truncate(std::uint32_t record, std::int64_t position) noexcept {
  const held_state* states = entries_ + std::size_t{record} * capacity_;
  while (counts_[record] > 0 && states[counts_[record] - 1].position > position) {
    release(states[--counts_[record]].slot, false);
    --num_entries_;
  }
}

void state_slots::fork(std::uint32_t parent, std::uint32_t child) noexcept {
  const std::span<const held_state> states = of(parent);
  std::copy(states.begin(), states.end(), entries_ + std::size_t{child} * capacity_);
  for (const held_state& state : states) pool_.retain(state.slot);
  counts_[child] = counts_[parent];
  num_entries_ += counts_[child];
}

void state_slots::free(std::uint32_t record) noexcept {
  const bool out = is_out(record);
  const std::span<const held_state> states = of(record);
  for (std::size_t i = states.size(); i-- > 0;) release(states[i].slot, out);
  if (out) {
    --num_swapped_;
    out_[record] = 0;
  } else {
    num_entries_ -= counts_[record];
  }
  counts_[record] = 0;
}

// --- swapping

void state_slots::reserve_move(std::span<const std::uint32_t> records, std::vector<block_copy>& copies) const {
  std::size_t num_slots = 0;
  for (const std::uint32_t record : records) num_slots += counts_[record];
  moving_.reserve(num_slots);
  copies.reserve(copies.size() + num_slots);
}

std::int64_t state_slots::slots_to_move(std::span<const std::uint32_t> records) const noexcept {
  moving_.clear();
  for (const std::uint32_t record : records) {
    for (const held_state& state : of(record)) moving_.push_back(state.slot);
  }
  std::sort(moving_.begin(), moving_.end());
  return std::unique(moving_.begin(), moving_.end()) - moving_.begin();
}

void state_slots::move(std::span<const std::uint32_t> records, bool out, std::vector<block_copy>& copies) noexcept {
  block_pool& to = out ? *host_ : pool_;
  const auto first = static_cast<std::ptrdiff_t>(copies.size());
  for (const std::uint32_t record : records) {
    held_state* states = entries_ + std::size_t{record} * capacity_;
    for (std::uint32_t i = 0; i < counts_[record]; ++i) {
      const block_id slot = states[i].slot;
      const auto known = std::find_if(std::next(copies.begin(), first), copies.end(),
                                      [&](const block_copy& pair) { return pair.src == slot; });
      if (known != copies.end()) {
        to.retain(known->dst);
        states[i].slot = known->dst;
      } else {
        states[i].slot = out ? host_->allocate_one() : take();
        copies.push_back({slot, states[i].slot});
        ++(out ? num_slots_out_ : num_slots_in_);
      }
      release(slot, !out);
    }
    out_[record] = out ? 1 : 0;
    num_swapped_ += out ? 1 : -1;
    num_entries_ += out ? -std::int64_t{counts_[record]} : std::int64_t{counts_[record]};
  }
  peak_used_ = std::max(peak_used_, pool_.num_used());
}

cache_stats state_slots::stats() const noexcept {
  return {.num_blocks = pool_.num_blocks(),
          .num_free_blocks = pool_.num_free(),
          .num_used_blocks = pool_.num_used(),
          .peak_used_blocks = peak_used_,
          .num_table_entries = num_entries_,
          .num_allocated_blocks = num_allocated_,
          .num_host_blocks = host_ ? host_->num_blocks() : 0,
          .num_free_host_blocks = host_ ? host_->num_free() : 0,
          .num_swapped_sequences = num_swapped_,
          .num_swapped_out_blocks = num_slots_out_,
          .num_swapped_in_blocks = num_slots_in_};
}

std::string state_slots::check() const {
  if (std::string problem = pool_.check(); !problem.empty()) return problem;
  std::vector<std::uint32_t> refs(static_cast<std::size_t>(pool_.num_blocks()), 0);
  std::vector<std::uint32_t> host_refs(host_ ? static_cast<std::size_t>(host_->num_blocks()) : 0, 0);
  std::int64_t num_entries = 0;
  for (std::uint32_t record = 0; record < num_records_; ++record) {
    std::int32_t before = 0;
    for (const held_state& state : of(record)) {
      if (state.position <= before) return "sequence " + std::to_string(record) + ": states are out of order";
      before = state.position;
      ++(is_out(record) ? host_refs : refs).at(static_cast<std::size_t>(to_index(state.slot)));
      num_entries += is_out(record) ? 0 : 1;
    }
  }
  const auto compare = [](const std::vector<std::uint32_t>& wanted, const block_pool& pool) -> std::string {
    for (std::size_t b = 0; b < wanted.size(); ++b) {
      const std::uint32_t held = pool.num_refs(block_id{static_cast<std::int32_t>(b)});
      if (held == wanted[b]) continue;
      return "slot " + std::to_string(b) + " has " + std::to_string(held) + " references, sequences hold " +
             std::to_string(wanted[b]);
    }
    return {};
  };
  if (std::string problem = compare(refs, pool_); !problem.empty()) return problem;
  if (num_entries != num_entries_) return "the counter of states is off";
  if (host_) {
    if (std::string problem = host_->check(); !problem.empty()) return "host pool: " + problem;
    if (std::string problem = compare(host_refs, *host_); !problem.empty()) return "host pool: " + problem;
  }
  return prefix_ ? prefix_->check() : std::string();
}

void state_slots::add_to(digest_builder& hash) const noexcept {
  hash.add(pool_.digest());
  if (host_) hash.add(host_->digest());
  for (std::uint32_t record = 0; record < num_records_; ++record) {
    hash.add(counts_[record] * 2 + out_[record]);
    for (const held_state& state : of(record)) {
      hash.add(static_cast<std::uint64_t>(state.position));
      hash.add(static_cast<std::uint64_t>(to_index(state.slot)));
    }
  }
  if (prefix_) hash.add(prefix_->digest());
}

}  // namespace bifolio::inline v0_2::detail
