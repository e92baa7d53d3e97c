// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What only the CUDA backend has. Needs the library bifolio::cuda; includes no CUDA header.
///
/// Programs that link bifolio::bifolio or bifolio::cuda (CMake, pkg-config) get `make_backend({device_type::cuda, N})`
/// without a call: the library registers itself as the program starts, also as a static library, because its link
/// options ask for the registering symbol by name. Callers that link the archive directly must call
/// `cuda::register_backend` first.

#include <bifolio/attention.hpp>
#include <bifolio/backend.hpp>
#include <bifolio/device.hpp>
#include <bifolio/export.hpp>
#include <bifolio/memory_resource.hpp>
#include <cstdint>
#include <memory>

namespace bifolio::inline v0_2::cuda {

/// Makes the CUDA backend known to `make_backend`. May be called again, from any thread. Throws `error`
/// (already_exists) when another backend was registered for the same device type.
BIFOLIO_API void register_backend();

/// Devices that the driver shows; 0 where there is no driver.
[[nodiscard]] BIFOLIO_API std::int32_t num_devices() noexcept;

/// Device memory from the stream-ordered pool (cudaMallocAsync): allocations and releases take effect in the order of
/// `stream`, which is borrowed. `where` must be a CUDA backend, or wrap one, and outlive the resource. Throws `error`:
/// invalid_argument for another backend.
[[nodiscard]] BIFOLIO_API std::unique_ptr<memory_resource> make_stream_memory(backend& where, stream_ref stream);

/// Grows a plan's device buffers to a bound of what steps of up to these numbers need, whatever their mix of lengths:
/// planning such steps allocates nothing on the device, and `graph_epoch` changes only where a step takes other kernels
/// than the one before. What the plan was made for is forgotten. Throws `error`: invalid_argument, unsupported (the
/// implementation that `spec` names declines), out_of_memory (the plan is then as before).
BIFOLIO_API void reserve_plan(backend& where, attention_plan& plan, const attention_spec& spec,
                              std::int32_t max_num_seqs, std::int64_t max_num_tokens, std::int32_t max_seq_len);

/// A CUDA graph that captured `attention` on this plan may be replayed after `plan_attention` changed the lengths
/// whenever this number is what it was at the capture. It changes when buffers moved, never to return, or when other
/// kernels were chosen: a later step that takes the kernels of an earlier one has its number again, so that decode
/// steps keep their graph across prompts. The plan remembers the last 64 choices of kernels. 0 for a plan that was
/// never made on CUDA.
[[nodiscard]] BIFOLIO_API std::uint64_t graph_epoch(const attention_plan& plan) noexcept;

/// A backend that hands every call on to `inner`, which is borrowed and may be of any device, with an NVTX range around
/// it for Nsight Systems and Compute: the call's name, its size (docs/metrics.md) as payload, in the domain "bifolio".
/// Whoever does not wrap pays nothing. Throws `error` (out_of_memory).
[[nodiscard]] BIFOLIO_API std::unique_ptr<backend> nvtx_backend(backend& inner);

}  // namespace bifolio::inline v0_2::cuda
