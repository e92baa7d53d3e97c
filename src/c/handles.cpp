// SPDX-License-Identifier: Apache-2.0
#include "c/handles.hpp"

#include <bifolio/error.hpp>
#include <new>
#include <utility>

namespace bifolio::inline v0_2::c {

std::uint64_t handle_table::insert(handle_kind kind, std::shared_ptr<void> object) {
  const std::scoped_lock lock(changing_);
  if (closed_.empty()) {
    if (num_slots_ == max_slots) throw error(errc::failed_precondition, "2^24 handles are open; destroy some");
    std::atomic<chunk*>& at = chunks_[num_slots_ / slots_per_chunk];
    // Room for closing every slot, so that `take` allocates nothing.
    closed_.reserve((num_slots_ / slots_per_chunk + 1) * slots_per_chunk);
    if (at.load(std::memory_order_relaxed) == nullptr) at.store(new chunk, std::memory_order_release);
    closed_.push_back(num_slots_++);
  }
  const std::uint32_t index = closed_.back();
  closed_.pop_back();
  slot& used = *slot_of(index);
  const std::uint64_t handle = static_cast<std::uint64_t>(kind) << 56 | std::uint64_t{++used.generation} << 24 | index;
  used.object = std::move(object);
  used.handle.store(handle, std::memory_order_release);
  return handle;
}

std::shared_ptr<void> handle_table::take(std::uint64_t handle, handle_kind kind) noexcept {
  const std::scoped_lock lock(changing_);
  if (find(handle, kind) == nullptr) return nullptr;
  slot& used = *slot_of(handle);
  used.handle.store(0, std::memory_order_release);
  closed_.push_back(static_cast<std::uint32_t>(handle & (max_slots - 1)));
  return std::exchange(used.object, nullptr);
}

handle_table& handles() noexcept {
  // Constructed in place: allocating it could fail, and destroying it could come before the last call.
  alignas(handle_table) static std::byte storage[sizeof(handle_table)];
  static handle_table* const table = new (storage) handle_table;
  return *table;
}

}  // namespace bifolio::inline v0_2::c
