// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The one virtual seam: everything that touches the contents of a cache goes through it. It knows tensors, layouts,
/// slots and block ids; it never learns of sequences. Each backend passes the same conformance suite.

#include <bifolio/attention.hpp>
#include <bifolio/device.hpp>
#include <bifolio/error.hpp>
#include <bifolio/event.hpp>
#include <bifolio/executor.hpp>
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
#include <string>
#include <vector>

namespace bifolio::inline v0_2 {

/// Store new tokens: row i of k and v goes to slot_mapping[i] of the layer, as the codes of the planes say. Where V is
/// part of K (layout.v_in_k) the rows of k are all there is: v.data is null, and nothing else of v is looked at.
struct append_params {
  kv_cache_view kv{};
  const_tensor_view k{};                       ///< [num_tokens, num_kv_heads, head_dim of K]
  const_tensor_view v{};                       ///< [num_tokens, num_kv_heads, head_dim of V], of the dtype of k
  const std::int64_t* slot_mapping = nullptr;  ///< [num_tokens] on the device; negative = skip; see `append`
};

/// Read tokens back: row i of k and v comes from slot_mapping[i], the values of its codes rounded to the dtype of the
/// rows; a negative slot leaves its row as it was. Where V is
/// part of K, v.data is null as for `append`.
struct gather_params {
  kv_cache_view kv{};
  tensor_view k{};
  tensor_view v{};
  const std::int64_t* slot_mapping = nullptr;
};

struct rotate_append_params;  // bifolio/rotate_append.hpp

/// Thread-safety: calls on different caches, plans and outputs may run at once (on CUDA, in different streams).
/// Streams: calls are ordered within a stream; the CPU ignores it and has finished when a call returns.
/// Errors: `plan_attention` and `make_event` throw; all others return an errc, allocate nothing, and after a refusal
/// nothing was written.
class BIFOLIO_API backend {
 public:
  virtual ~backend();

  [[nodiscard]] virtual device where() const noexcept = 0;
  /// One line for people, e.g. "cpu: avx512, threads x 2".
  [[nodiscard]] virtual std::string description() const = 0;
  /// errc::ok; device_lost once a sticky error was seen; failed_precondition in a child made by fork() that cannot go
  /// on where its parent was: on CUDA always, on the CPU as `executor::health` says. Calls that compute or copy then
  /// return it, and `plan_attention` throws it.
  [[nodiscard]] virtual errc health() const noexcept = 0;

  /// The backend that computes: another one only of those that hand calls on (`trace_backend`, `cuda::nvtx_backend`).
  /// For functions that belong to one kind of device.
  [[nodiscard]] virtual backend& unwrapped() noexcept { return *this; }

  /// Memory that this backend's kernels read and write.
  [[nodiscard]] virtual memory_resource& memory() noexcept = 0;
  /// Host memory from which uploads are fast (pinned on CUDA, ordinary on the CPU).
  [[nodiscard]] virtual memory_resource& staging_memory() noexcept = 0;
  /// How much of `memory()` there is. As inherited: `host_memory_amount`. Throws `error` (device_lost, …).
  [[nodiscard]] virtual memory_amount amount_of_memory() const;
  [[nodiscard]] virtual errc upload(void* dst, const void* host_src, std::size_t num_bytes, stream_ref) noexcept = 0;
  [[nodiscard]] virtual errc download(void* host_dst, const void* src, std::size_t num_bytes, stream_ref) noexcept = 0;
  [[nodiscard]] virtual errc synchronize(stream_ref) noexcept = 0;
  /// Zeros. On the CPU the workers write them, each a part of its own, so that pages come to be where the workers are.
  /// As inherited: uploads of zeros.
  [[nodiscard]] virtual errc clear(void* dst, std::size_t num_bytes, stream_ref) noexcept;

  /// A new event of this device, not recorded. Throws `error`: out_of_memory, device_lost, failed_precondition (as
  /// `health`).
  [[nodiscard]] virtual event make_event() = 0;
  /// Sets `point` to all that the stream was given so far. invalid_argument for an event that is empty or of another
  /// device.
  [[nodiscard]] virtual errc record(event& point, stream_ref = {}) noexcept = 0;
  /// What the stream is given from now on starts when `point`, as last recorded, is done; at once when it was never
  /// recorded. The event may be of any device: where the two have streams in common (CUDA devices of one machine) the
  /// call does not wait itself, otherwise it returns when the event is done. In particular the CPU, whose calls are
  /// finished when they return, waits on the host. invalid_argument for an empty event, device_lost when the event's
  /// device is.
  [[nodiscard]] virtual errc wait(const event& point, stream_ref = {}) noexcept = 0;

  /// A slot past the end of the cache: out_of_range on the CPU; on a GPU, where the host cannot see slots without
  /// waiting, that row alone is skipped. The same for `gather`.
  [[nodiscard]] virtual errc append(const append_params&, stream_ref = {}) noexcept = 0;
  [[nodiscard]] virtual errc gather(const gather_params&, stream_ref = {}) noexcept = 0;
  /// Normalises and rotates heads of q and k, and stores k and v as `append` does (bifolio/rotate_append.hpp). A
  /// negative slot is not stored; its q is rotated. `find_problem` says why a call is refused. unsupported for a
  /// backend that does not have it.
  [[nodiscard]] virtual errc rotate_append(const rotate_append_params&, stream_ref = {}) noexcept;
  /// Copies blocks inside each layer, as if pair after pair. `layers` and `copies` are host arrays.
  [[nodiscard]] virtual errc copy_blocks(std::span<const kv_cache_view> layers, std::span<const block_copy> copies,
                                         stream_ref = {}) noexcept = 0;
  /// Copies blocks of `src` (this device) to blocks of `dst` (this device) across layouts, codes and scales; the
  /// numbers of heads, the head dimensions, block_size and v_in_k are equal. Where both sides have one code and, of
  /// static ones, one scale, bits stay as they are; else the values are stored anew. src and dst do not overlap.
  [[nodiscard]] virtual errc convert_blocks(const kv_cache_view& src, const kv_cache_view& dst,
                                            std::span<const block_copy> copies, stream_ref = {}) noexcept = 0;
  /// Copies blocks byte for byte between two caches of equal layout, layer by layer, where either may lie in host
  /// memory (`staging_memory` for speed). src and dst do not overlap.
  [[nodiscard]] virtual errc swap_blocks(std::span<const kv_cache_view> src, std::span<const kv_cache_view> dst,
                                         std::span<const block_copy> copies, stream_ref = {}) noexcept = 0;

  /// Cuts the work of one step. `host_batch` holds host arrays (slot_mapping may be null). Reuses what `plan` holds.
  /// Throws `error`: invalid_argument, out_of_range (a block id outside [0, num_blocks), a length past its table row),
  /// unsupported (also: the implementation that `spec` names declines), out_of_memory; `plan` is then as before.
  virtual void plan_attention(attention_plan& plan, const attention_spec& spec, const host_step_view& host_batch,
                              std::int64_t num_blocks, stream_ref = {}) = 0;
  [[nodiscard]] virtual errc attention(const attention_plan& plan, const attention_params&,
                                       stream_ref = {}) noexcept = 0;
  /// The kernels that `attention` chooses from on this device, by name, e.g. "cpu avx2 bf16 vectors" or "cuda decode
  /// bf16 d128 plain". A name denotes one compiled instance, or for a few that differ in tile shape alone. Empty for
  /// a backend that does not say.
  [[nodiscard]] virtual std::vector<std::string> attention_kernels() const;
  /// Which of them computes each sequence of this call: plan.num_seqs names, empty for a sequence without new tokens.
  /// Reads the structs alone, never what their pointers point to. Empty when `attention` would refuse the call.
  [[nodiscard]] virtual std::vector<std::string> describe(const attention_plan& plan, const attention_params&) const;
  /// The backend's list of attention implementations, fastest first, a sentence for each: which sequences of this plan
  /// it takes, or why it declines. "prefill declines: head_dim is 256; 64 and 128 are compiled". Every sentence begins
  /// with the implementation's name, as `attention_spec::implementation` takes it. Without a plan of this backend the
  /// names alone. Empty for a backend that does not say.
  [[nodiscard]] virtual std::vector<std::string> explain(const attention_plan& plan) const;
  /// out = (w_a·a + w_b·b) / (w_a + w_b) with w = exp(lse − max); lse = max + ln(w_a + w_b). A state with LSE −inf
  /// weighs nothing; two of them give 0 and −inf. (FlashInfer's recursive attention states, Milakov & Gimelshein 2018.)
  [[nodiscard]] virtual errc merge_states(const merge_params&, stream_ref = {}) noexcept = 0;
};

/// Why `backend::append`, `gather`, `merge_states`, `copy_blocks`, `convert_blocks` and `swap_blocks` would refuse
/// these arguments, as a sentence with the value received and the values allowed; empty when they would not. They read
/// what the calls read: structs, lists of copies and, where the backend is on the host (`where`), slots. `find_problem`
/// of attention is in attention.hpp. What only a device finds (device_lost) is not theirs to say.
[[nodiscard]] BIFOLIO_API std::optional<error> find_problem(const append_params& params, device where = {});
[[nodiscard]] BIFOLIO_API std::optional<error> find_problem(const gather_params& params, device where = {});
[[nodiscard]] BIFOLIO_API std::optional<error> find_problem(const merge_params& params);
[[nodiscard]] BIFOLIO_API std::optional<error> find_copy_problem(std::span<const kv_cache_view> layers,
                                                                 std::span<const block_copy> copies);
[[nodiscard]] BIFOLIO_API std::optional<error> find_convert_problem(const kv_cache_view& src, const kv_cache_view& dst,
                                                                    std::span<const block_copy> copies);
[[nodiscard]] BIFOLIO_API std::optional<error> find_swap_problem(std::span<const kv_cache_view> src,
                                                                 std::span<const kv_cache_view> dst,
                                                                 std::span<const block_copy> copies);

/// What is left to others: weights, activations, the driver, other programs. The larger of the two counts.
struct memory_reserve {
  double fraction = 0.1;   ///< of all memory, 0 … 1
  std::int64_t bytes = 0;  ///< ≥ 0
};

/// How many bytes a cache can be given of the backend's memory: what is free now, less the reserve; 0 when nothing is
/// left. Load the weights first. Throws `error`: invalid_argument (a reserve out of range), unsupported (the system
/// does not say what it has), and as `backend::amount_of_memory`.
[[nodiscard]] BIFOLIO_API std::int64_t memory_budget(const backend& where, const memory_reserve& reserve = {});

enum class cpu_isa : std::uint8_t;  // bifolio/cpu.hpp

/// What a backend is opened with. The CPU understands all of it, CUDA nothing: its kernels, threads and memory are not
/// the host's.
struct backend_options {
  std::int32_t num_threads = 0;                    ///< CPU workers; 0 = what the executor takes (docs/threads.md)
  std::optional<executor_kind> executor_choice{};  ///< default: `default_executor()`
  executor* own_executor = nullptr;                ///< borrowed; overrides the two above
  std::optional<cpu_isa> isa{};                    ///< default: `default_isa()`
  memory_resource* host_memory = nullptr;          ///< borrowed; default: `default_host_memory()`
};

/// Opens a device. Throws `error`: unsupported when the device is not linked or not there; invalid_argument for a
/// device type that nobody registered, an index that the type does not have, and an option that is not at its default
/// although the backend does not understand it; and what the backend's constructor throws.
[[nodiscard]] BIFOLIO_API std::unique_ptr<backend> make_backend(device where = {}, const backend_options& options = {});

}  // namespace bifolio::inline v0_2
