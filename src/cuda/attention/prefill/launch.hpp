// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The compiled prefill kernels and their launch.

#include <bifolio/dtype.hpp>
#include <cstdint>
#include <string>

#include "cuda/attention/prefill/plan.hpp"
#include "cuda/host/kernel_args.hpp"
#include "cuda/host/plan_input.hpp"
#include "cuda/host/runtime.hpp"

namespace bifolio::cuda {

struct prefill_args;

/// A CUtensorMap, passed to kernels by value. Maps of q are [token][head][dim], those of K and V
/// [block][head][chunk of 64 dims][token][dim of the chunk].
struct alignas(64) tensor_map {
  std::uint64_t words[16];
};

using prefill_function = void (*)(prefill_args, tensor_map q, tensor_map k, tensor_map v);

/// One compiled shape; [0]: the plain variant, whose only mask is the causal one, [1]: the masked variant, which has
/// windows, the logits transform (soft cap, ALiBi) and sinks.
struct prefill_entry {
  prefill_function rows[2];   // any block
  prefill_function pairs[2];  // blocks of 16
  int shared_bytes;
};

/// Null for a shape that is not compiled: 16-bit types, head_dim 64 and 128.
[[nodiscard]] const prefill_entry* find_prefill_entry(dtype type, std::int32_t head_dim) noexcept;

/// Whether blocks of this size can be copied in boxes: a multiple of 8 that divides 128, or a multiple of 128.
[[nodiscard]] constexpr bool prefill_block_size(std::int32_t block_size) noexcept {
  return block_size % 8 == 0 && (block_size % 128 == 0 || 128 % block_size == 0);
}

/// Whether the kernel for pairs of boxes of 16 tokens is taken.
[[nodiscard]] constexpr bool prefill_takes_pairs(std::int32_t block_size) noexcept { return block_size == 16; }

/// Whether the strides and pointers of this call suit the kernel, on tensor cores. `why`: null, or receives what
/// does not.
[[nodiscard]] bool prefill_accepts_call(const attention_kernel_args& args, std::string* why) noexcept;

/// `metadata`: that of `plan` on the device. `device` has an encode_tensor_map.
[[nodiscard]] cudaError_t launch_prefill(const runtime_api& api, const attention_kernel_args& args,
                                         const prefill_plan& plan, const prefill_metadata& metadata,
                                         const device_numbers& device, cudaStream_t stream) noexcept;

/// Launches the combine of partial results, after the kernel that writes them.
[[nodiscard]] cudaError_t launch_prefill_combine(const runtime_api& api, const prefill_args& args,
                                                 const device_numbers& device, cudaStream_t stream) noexcept;

// One per translation unit.
extern const prefill_entry prefill_bf16_64, prefill_bf16_128, prefill_f16_64, prefill_f16_128;

}  // namespace bifolio::cuda
