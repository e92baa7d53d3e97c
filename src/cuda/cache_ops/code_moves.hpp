// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Launchers of append, gather and convert_blocks for planes with codes, and for K and V of different types: rows are
/// decoded into float32 and encoded with the scales of where they go. One kernel for all codes, types and layouts; what
/// differs is decided per row. Arguments have been checked, and the pairs of one call are independent of each other.

#include <bifolio/kv_layout.hpp>
#include <bifolio/step.hpp>
#include <cstdint>
#include <span>

#include "cuda/cache_ops/transfer.hpp"
#include "cuda/host/code_scales.hpp"
#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {

/// Append, or gather where not `to_cache`. `args` as for the kernels without codes, but for their cache_type.
[[nodiscard]] cudaError_t launch_code_transfer(const runtime_api& api, const transfer_args& args,
                                               const kv_cache_view& kv, bool to_cache, bool dependent,
                                               cudaStream_t stream) noexcept;

/// `keep_bits`: both sides have one code, and elements and scales are copied whatever the static scales.
[[nodiscard]] cudaError_t launch_code_convert(const runtime_api& api, const kv_cache_view& src,
                                              const kv_cache_view& dst, std::span<const block_copy> copies,
                                              bool keep_bits, bool dependent, cudaStream_t stream) noexcept;

/// Whether an append's rows and planes of codes come in aligned runs of 16 dims, for the kernel of its own.
[[nodiscard]] bool appends_in_packs(const transfer_args& args, const kv_cache_view& kv) noexcept;
[[nodiscard]] cudaError_t launch_append_codes(const runtime_api& api, const transfer_args& args,
                                              const kv_cache_view& kv, bool dependent, cudaStream_t stream) noexcept;

}  // namespace bifolio::inline v0_2::cuda
