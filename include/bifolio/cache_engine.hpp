// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Owns the storage of all layers on one device and carries out what the cache logic decided: uploads of step arrays,
/// appends, block copies, swaps. It allocates everything when it is made, and never learns of sequences.

#include <bifolio/backend.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/device.hpp>
#include <bifolio/error.hpp>
#include <bifolio/export.hpp>
#include <bifolio/kv_layout.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/step.hpp>
#include <bifolio/tensor_view.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace bifolio::inline v0_2 {

namespace detail {
class upload_ring;
}
class copy_audit;  // bifolio/copy_audit.hpp

struct cache_engine_config {
  std::int32_t num_layers = 0;
  std::int64_t num_blocks = 0;
  kv_layout layout{};  ///< from make_layout
  /// Steps whose arrays may be on their way to the device before `upload` waits for the oldest of them; 1 to 64.
  std::int32_t num_staging_slots = 4;
  /// Static scales of the planes whose code has them, else empty: [num_layers] or [num_layers, num_kv_heads], each from
  /// least_scale to largest_scale. Where V is part of K, v_scales is empty.
  std::vector<float> k_scales{};
  std::vector<float> v_scales{};
  /// For debugging, borrowed: is told of the copies that `copy_blocks` and `swap_blocks_to` carried out, in both
  /// directions. Of the engine of device blocks alone; `audit_group` is its layer group. See copy_audit.hpp.
  copy_audit* audit = nullptr;
  std::int32_t audit_group = 0;
  /// Layers begin as zeros (`backend::clear`), so that no page is new to the first steps. Else their contents are
  /// undefined.
  bool zero_fill = false;
};

/// How many blocks of `layout`, tails included, over `num_layers` layers fit into `memory_bytes`. Throws `error`
/// (invalid_argument).
[[nodiscard]] BIFOLIO_API std::int64_t num_blocks_for_memory(std::int64_t memory_bytes, const kv_layout& layout,
                                                             std::int32_t num_layers);

/// Thread-safety: one thread at a time; two engines may run in two threads.
class BIFOLIO_API cache_engine {
 public:
  /// `where` is borrowed and must outlive the engine; `memory` defaults to where.memory(). Each layer is one allocation
  /// of num_blocks · layout.block_bytes() bytes, the K plane before the V plane, contents as `zero_fill` says; where
  /// the planes differ in element size or have tails, V starts at a multiple of 128. Static scales are one allocation
  /// more. Throws `error`: invalid_argument (a number below 1, a size past 2^62 bytes, static scales that are missing,
  /// of the wrong count or out of range), unsupported (a code that is not implemented), out_of_memory (nothing is
  /// kept), and what uploading the static scales throws.
  cache_engine(backend& where, const cache_engine_config& config, memory_resource* memory = nullptr);
  /// Waits for the copies of uploads that are still to come.
  ~cache_engine();
  cache_engine(cache_engine&& other) noexcept;
  cache_engine& operator=(cache_engine&& other) noexcept;

  [[nodiscard]] const cache_engine_config& config() const noexcept { return config_; }
  [[nodiscard]] backend& where() const noexcept { return *backend_; }
  [[nodiscard]] std::size_t num_bytes() const noexcept;
  /// A number made from all that gives a block's bytes their meaning: layers, heads, head dims, block_size, codes,
  /// static scales, and the order inside a block. Engines of different numbers do not exchange blocks byte for byte.
  [[nodiscard]] std::uint64_t fingerprint() const noexcept;
  /// Why blocks cannot be swapped between the two, as a sentence that names the field that differs; empty where they
  /// can.
  [[nodiscard]] std::optional<error> find_difference(const cache_engine& other) const;
  [[nodiscard]] std::span<const kv_cache_view> layers() const noexcept { return layers_; }

  /// Copies a step's host arrays to the device in one transfer and returns a view of the copies. `batch` may be changed
  /// when the call returns. On the CPU the arrays are used where they are and must stay alive.
  ///
  /// Does not wait for the stream. The arrays travel through `num_staging_slots` staging slots in turn; when the copies
  /// of that many uploads are still to come, the call waits for the oldest of them.
  ///
  /// The copies have one place, which the next upload overwrites in the order of its stream. So a step that is
  /// submitted to the same stream before the next upload reads its own arrays, with any number of steps in flight. A
  /// step in another stream has to be joined first: `record` an event after it, and `wait` for that in the stream of
  /// the next upload. The place changes, and the call waits for the stream, only when the arrays are larger than all
  /// before and than what `reserve_upload` made room for.
  ///
  /// Throws `error`: invalid_argument (a batch that a manager of another block_size, or of more blocks, built);
  /// out_of_memory; device_lost; failed_precondition in a stream that captures. The copies of the
  /// upload before are then as they were, unless the device is lost.
  [[nodiscard]] device_step_view upload(const step_batch& batch, stream_ref stream = {});

  /// Makes room for uploads of steps of up to these numbers, so that they neither allocate nor move the copies. Does
  /// nothing on the CPU. Throws `error`: invalid_argument (a number below 0, or too large), and as `upload`.
  void reserve_upload(std::int32_t max_num_seqs, std::int64_t max_num_tokens, std::int64_t max_block_table_stride,
                      stream_ref stream = {});

  /// Stores rows of k and v into `layer` (of k alone where V is part of K, v then being {}); out_of_range for a layer
  /// that is not there.
  [[nodiscard]] errc append(std::int32_t layer, const const_tensor_view& k, const const_tensor_view& v,
                            const std::int64_t* slot_mapping, stream_ref stream = {}) noexcept;

  /// Normalises and rotates heads of q and k and stores k and v into `layer` (bifolio/rotate_append.hpp);
  /// `params.append.kv` is not looked at. out_of_range for a layer that is not there.
  [[nodiscard]] errc rotate_append(std::int32_t layer, const rotate_append_params& params,
                                   stream_ref stream = {}) noexcept;

  /// All layers, in the order of the list.
  [[nodiscard]] errc copy_blocks(std::span<const block_copy> copies, stream_ref stream = {}) noexcept;

  /// Copies blocks of this engine (src) to blocks of `other` (dst), byte for byte. failed_precondition when the two
  /// differ in layout, static scales or number of layers: `find_difference` says in which. The transfer runs on
  /// whichever of the two backends is not the CPU.
  [[nodiscard]] errc swap_blocks_to(cache_engine& other, std::span<const block_copy> copies,
                                    stream_ref stream = {}) noexcept;

  /// The same across layouts, codes and scales; both engines on one device. failed_precondition when heads, head
  /// dimensions, block_size, v_in_k or layers differ.
  [[nodiscard]] errc convert_blocks_to(cache_engine& other, std::span<const block_copy> copies,
                                       stream_ref stream = {}) noexcept;

 private:
  detail::upload_ring& uploads();
  void upload_scales(memory_resource& source);

  backend* backend_;
  cache_engine_config config_;
  std::vector<buffer> storage_;                   // one per layer
  buffer scales_;                                 // static ones, those of K before those of V
  std::vector<kv_cache_view> layers_;             // views into storage_ and scales_
  std::unique_ptr<detail::upload_ring> uploads_;  // from the first upload on; null on the CPU
};

}  // namespace bifolio::inline v0_2
