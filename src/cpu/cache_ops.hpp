// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The cache calls of the CPU backend: checks, the split over workers, and the kernels of `table`. The contracts are
/// those of `backend`.

#include <bifolio/backend.hpp>
#include <bifolio/executor.hpp>
#include <bifolio/rotate_append.hpp>
#include <cstddef>
#include <span>

#include "cpu/kernels/kernel_table.hpp"

namespace bifolio::inline v0_2::cpu {

[[nodiscard]] errc append(const kernel_table& table, executor& workers, const append_params& params) noexcept;
[[nodiscard]] errc gather(const kernel_table& table, executor& workers, const gather_params& params) noexcept;
[[nodiscard]] errc rotate_append(const kernel_table& table, executor& workers,
                                 const rotate_append_params& params) noexcept;
[[nodiscard]] errc copy_blocks(const kernel_table& table, executor& workers, std::span<const kv_cache_view> layers,
                               std::span<const block_copy> copies) noexcept;
[[nodiscard]] errc convert_blocks(const kernel_table& table, executor& workers, const kv_cache_view& src,
                                  const kv_cache_view& dst, std::span<const block_copy> copies) noexcept;
[[nodiscard]] errc swap_blocks(const kernel_table& table, executor& workers, std::span<const kv_cache_view> src,
                               std::span<const kv_cache_view> dst, std::span<const block_copy> copies) noexcept;

/// Zeros, each worker a part of its own.
void clear(executor& workers, void* dst, std::size_t num_bytes) noexcept;

}  // namespace bifolio::inline v0_2::cpu
