// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The compiled decode kernels and their launch.

#include <bifolio/dtype.hpp>
#include <cstddef>
#include <cstdint>

#include "cuda/host/kernel_args.hpp"
#include "cuda/host/runtime.hpp"

namespace bifolio::cuda {

struct decode_args;

/// One compiled shape: the plain variant, whose only mask is the causal one, and the masked variant, which has windows,
/// the logits transform (soft cap, ALiBi) and sinks.
struct decode_entry {
  void (*plain)(decode_args);
  void (*masked)(decode_args);
  int threads;
  int shared_bytes;
  int ctas_per_sm;
};

/// Null for a shape that is not compiled: 16-bit types, head_dim 64, 128, 256.
[[nodiscard]] const decode_entry* find_decode_entry(dtype type, std::int32_t head_dim) noexcept;

/// Whether the layout and alignment of this call suit the kernel, which adds no bias.
[[nodiscard]] bool decode_serves(const attention_kernel_args& args) noexcept;

/// `words`: what decode_planner wrote for `grid` CTAs.
[[nodiscard]] cudaError_t launch_decode(const runtime_api& api, const attention_kernel_args& args,
                                        const decode_entry& entry, const std::int32_t* words, std::int32_t grid,
                                        bool dependent, cudaStream_t stream) noexcept;

// One per translation unit.
extern const decode_entry decode_bf16_64, decode_bf16_128, decode_bf16_256;
extern const decode_entry decode_f16_64, decode_f16_128, decode_f16_256;

}  // namespace bifolio::cuda
