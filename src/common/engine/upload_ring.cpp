// SPDX-License-Identifier: Apache-2.0
#include "common/engine/upload_ring.hpp"

#include <algorithm>
#include <bifolio/error.hpp>
#include <utility>

#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2::detail {
namespace {

void require_ok(errc code) {
  if (code != errc::ok) refuse(code, "the upload of the step's arrays failed: ", to_string(code));
}

}  // namespace

upload_ring::upload_ring(backend& where, std::int32_t num_slots) : where_(&where) {
  slots_.resize(static_cast<std::size_t>(num_slots));
  for (slot& each : slots_) each.copied = where.make_event();
}

upload_ring::~upload_ring() {
  for (slot& each : slots_) {
    if (each.pending) (void)each.copied.synchronize();
  }
}

void upload_ring::wait_for(slot& next) {
  if (!next.pending) return;
  require_ok(next.copied.synchronize());
  next.pending = false;
}

upload_ring::room upload_ring::larger_room(std::size_t num_bytes, stream_ref stream) {
  if (room_.capacity > 0) {
    // Steps in flight read the memory that is about to go.
    require_ok(where_->synchronize(stream));
    for (slot& each : slots_) wait_for(each);
  }
  constexpr std::size_t page = 4096;
  room larger;
  larger.capacity = (std::max(num_bytes, 2 * room_.capacity) + page - 1) / page * page;
  larger.staging = buffer(where_->staging_memory(), slots_.size() * larger.capacity);
  larger.device = buffer(where_->memory(), larger.capacity);
  return larger;
}

void upload_ring::reserve(std::size_t num_bytes, stream_ref stream) {
  if (num_bytes > room_.capacity) room_ = larger_room(num_bytes, stream);
}

std::byte* upload_ring::open(std::size_t num_bytes, stream_ref stream) {
  opened_ = num_bytes > room_.capacity ? larger_room(num_bytes, stream) : room{};
  wait_for(slots_[next_]);
  room& used = opened_.capacity > 0 ? opened_ : room_;
  return used.staging.as<std::byte>() + next_ * used.capacity;
}

void upload_ring::copy_to_device(room& used, std::size_t num_bytes, stream_ref stream) {
  slot& next = slots_[next_];
  require_ok(
      where_->upload(used.device.data(), used.staging.as<std::byte>() + next_ * used.capacity, num_bytes, stream));
  bool done = true;
  errc recorded = where_->record(next.copied, stream);
  if (recorded == errc::ok) recorded = next.copied.query(done);
  // Without an event that can be asked, as in a stream that captures, the copy has to be finished here.
  if (recorded != errc::ok) require_ok(where_->synchronize(stream));
  next.pending = recorded == errc::ok && !done;
  next_ = (next_ + 1) % slots_.size();
}

const std::byte* upload_ring::send(std::size_t num_bytes, stream_ref stream) {
  if (opened_.capacity == 0) {
    copy_to_device(room_, num_bytes, stream);
  } else {
    room larger = std::move(opened_);
    opened_ = room{};
    copy_to_device(larger, num_bytes, stream);
    room_ = std::move(larger);
  }
  return room_.device.as<std::byte>();
}

}  // namespace bifolio::inline v0_2::detail
