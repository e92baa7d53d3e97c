// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The cache calls of the CUDA backend: checks, and the cut into launches and transfers. The contracts are those of
/// `backend`; the device is current.

#include <bifolio/backend.hpp>
#include <bifolio/rotate_append.hpp>
#include <span>

#include "cuda/host/device_state.hpp"

namespace bifolio::inline v0_2::cuda {

[[nodiscard]] errc append(const device_state& state, const append_params& params, stream_ref stream) noexcept;
[[nodiscard]] errc gather(const device_state& state, const gather_params& params, stream_ref stream) noexcept;
[[nodiscard]] errc rotate_append(const device_state& state, const rotate_append_params& params,
                                 stream_ref stream) noexcept;
[[nodiscard]] errc copy_blocks(const device_state& state, std::span<const kv_cache_view> layers,
                               std::span<const block_copy> copies, stream_ref stream) noexcept;
[[nodiscard]] errc convert_blocks(const device_state& state, const kv_cache_view& src, const kv_cache_view& dst,
                                  std::span<const block_copy> copies, stream_ref stream) noexcept;
[[nodiscard]] errc swap_blocks(const device_state& state, std::span<const kv_cache_view> src,
                               std::span<const kv_cache_view> dst, std::span<const block_copy> copies,
                               stream_ref stream) noexcept;

}  // namespace bifolio::inline v0_2::cuda
