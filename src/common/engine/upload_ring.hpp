// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Host arrays of one step after another on their way to one place on a device, without waiting for the stream.
///
///   host arrays ─ memcpy ─► staging slot 0 … n − 1 (pinned, in turn) ─ upload ─► device memory (one place)
///
/// A staging slot belongs to its copy until the event that was recorded after the copy is done; only then the host
/// writes it again. The device memory needs no such care: the next copy follows in the stream whatever reads it. It
/// never moves while it is large enough, so that a captured graph finds the arrays of later steps there.

#include <bifolio/backend.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/event.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bifolio::inline v0_2::detail {

/// One thread at a time.
class upload_ring {
 public:
  /// `where` is borrowed. Throws what `make_event` throws, and std::bad_alloc.
  upload_ring(backend& where, std::int32_t num_slots);
  /// Waits for the copies that still read staging slots.
  ~upload_ring();
  upload_ring(const upload_ring&) = delete;
  upload_ring& operator=(const upload_ring&) = delete;

  /// Room for uploads of `num_bytes`. Where there is not enough, waits for `stream` and for all copies, then replaces
  /// the memory. Throws `error`: out_of_memory, or what the waiting met; the room is then as before.
  void reserve(std::size_t num_bytes, stream_ref stream);

  /// The next staging slot, with room for `num_bytes`: waits for that slot's last copy, and as `reserve` where the room
  /// is too small. Larger memory takes the place of the old one only when `send` succeeds. Throws `error` likewise.
  [[nodiscard]] std::byte* open(std::size_t num_bytes, stream_ref stream);

  /// Copies the opened slot to the device. Throws `error` with what the backend answered; the slot is then the next one
  /// again, and memory that `open` made is given back.
  [[nodiscard]] const std::byte* send(std::size_t num_bytes, stream_ref stream);

 private:
  struct slot {
    event copied;
    bool pending = false;
  };

  /// Staging slots, one after another, and the place on the device.
  struct room {
    std::size_t capacity = 0;  ///< bytes per slot, and on the device
    buffer staging;
    buffer device;
  };

  void wait_for(slot& next);
  /// Waits for all that reads the present room, and makes a larger one.
  [[nodiscard]] room larger_room(std::size_t num_bytes, stream_ref stream);
  void copy_to_device(room& used, std::size_t num_bytes, stream_ref stream);

  backend* where_;
  std::vector<slot> slots_;
  std::size_t next_ = 0;
  room room_;
  room opened_;  // between `open` and `send`, where it has to grow
};

}  // namespace bifolio::inline v0_2::detail
