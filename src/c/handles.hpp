// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Handles of the C interface: numbers that lead to objects, so that a stale or foreign one is refused.
///
///   bits 63 … 56 kind, 55 … 24 generation of the slot, 23 … 0 index of the slot
///
/// A look-up reads two words and takes no lock. Objects are shared: what another object needs lives on when its own
/// handle is gone.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace bifolio::inline v0_2::c {

/// The kinds of objects, from 1.
enum class handle_kind : std::uint8_t {
  backend = 1,
  event,
  pool,
  manager,
  batch,
  engine,
  plan,
  scheduler,
  cache,
  step
};

/// Thread-safe, but for a handle that is used while another thread destroys it.
class handle_table {
 public:
  /// Throws std::bad_alloc, and `error` (failed_precondition) when 2^24 handles are open.
  [[nodiscard]] std::uint64_t insert(handle_kind kind, std::shared_ptr<void> object);

  /// Null for a number that is no open handle of this kind.
  [[nodiscard]] void* find(std::uint64_t handle, handle_kind kind) const noexcept {
    const slot* const at = slot_of(handle);
    const bool is_open = at != nullptr && at->handle.load(std::memory_order_acquire) == handle &&
                         handle >> 56 == static_cast<std::uint64_t>(kind);
    return is_open ? at->object.get() : nullptr;
  }
  /// The same, as an owner.
  [[nodiscard]] std::shared_ptr<void> share(std::uint64_t handle, handle_kind kind) const noexcept {
    return find(handle, kind) == nullptr ? nullptr : slot_of(handle)->object;
  }

  /// Closes a handle and returns its object, whose last owner the caller may be; null as in `find`.
  [[nodiscard]] std::shared_ptr<void> take(std::uint64_t handle, handle_kind kind) noexcept;

 private:
  struct slot {
    std::atomic<std::uint64_t> handle{0};  // 0: closed
    std::uint32_t generation = 0;
    std::shared_ptr<void> object;
  };
  static constexpr std::size_t slots_per_chunk = 1024;
  static constexpr std::size_t max_slots = std::size_t{1} << 24;
  using chunk = std::array<slot, slots_per_chunk>;

  [[nodiscard]] slot* slot_of(std::uint64_t handle) const noexcept {
    const std::size_t index = handle & (max_slots - 1);
    chunk* const in = chunks_[index / slots_per_chunk].load(std::memory_order_acquire);
    return in == nullptr ? nullptr : &(*in)[index % slots_per_chunk];
  }

  std::array<std::atomic<chunk*>, max_slots / slots_per_chunk> chunks_{};  // never given back
  std::mutex changing_;
  std::vector<std::uint32_t> closed_;  // slots to be used again
  std::uint32_t num_slots_ = 0;
};

/// The table of the process. It is never destroyed, so that handles may be used while the process ends.
[[nodiscard]] handle_table& handles() noexcept;

}  // namespace bifolio::inline v0_2::c
