// SPDX-License-Identifier: Apache-2.0
#include "common/engine/upload_ring.hpp"

#include <algorithm>
#include <bifolio/error.hpp>

#include "common/base/refuse.hpp"

namespace bifolio::detail {
namespace {

void require_ok(errc code) {
  if (code != errc::ok) refuse(code, "the upload of the step's arrays failed: ", to_string(code));
}

}  // namespace

upload_ring::upload_ring(backend& where, std::int32_t num_slots) : where_(&where) {
  slots_.resize(static_cast<std::size_t>(num_slots));
  for (slot& one : slots_) one.copied = where.make_event();
}

upload_ring::~upload_ring() {
  for (slot& one : slots_) {
    if (one.pending) (void)one.copied.synchronize();
  }
}

void upload_ring::wait_for(slot& one) {
  if (!one.pending) return;
  require_ok(one.copied.synchronize());
  one.pending = false;
}

void upload_ring::reserve(std::size_t num_bytes, stream_ref stream) {
  if (num_bytes <= capacity_) return;
  if (capacity_ > 0) {
    // Steps in flight read the memory that is about to go.
    require_ok(where_->synchronize(stream));
    for (slot& one : slots_) wait_for(one);
  }
  constexpr std::size_t page = 4096;
  const std::size_t capacity = (std::max(num_bytes, 2 * capacity_) + page - 1) / page * page;
  buffer staging(where_->staging_memory(), slots_.size() * capacity);
  buffer on_device(where_->memory(), capacity);
  staging_.swap(staging);
  device_.swap(on_device);
  capacity_ = capacity;
}

std::byte* upload_ring::open(std::size_t num_bytes, stream_ref stream) {
  reserve(num_bytes, stream);
  wait_for(slots_[next_]);
  return staging_.as<std::byte>() + next_ * capacity_;
}

const std::byte* upload_ring::send(std::size_t num_bytes, stream_ref stream) {
  slot& one = slots_[next_];
  require_ok(where_->upload(device_.data(), staging_.as<std::byte>() + next_ * capacity_, num_bytes, stream));
  bool done = true;
  errc recorded = where_->record(one.copied, stream);
  if (recorded == errc::ok) recorded = one.copied.query(done);
  // Without an event that can be asked, as in a stream that captures, the copy has to be finished here.
  if (recorded != errc::ok) require_ok(where_->synchronize(stream));
  one.pending = recorded == errc::ok && !done;
  next_ = (next_ + 1) % slots_.size();
  return device_.as<std::byte>();
}

}  // namespace bifolio::detail
