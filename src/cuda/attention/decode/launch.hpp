// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The compiled decode kernels and their launch.

#include <driver_types.h>

#include <bifolio/dtype.hpp>
#include <cstdint>

#include "cuda/attention/decode/metadata.hpp"
#include "cuda/host/kernel_args.hpp"

namespace bifolio::inline v0_2::cuda {

struct decode_args;
struct decode_plan;
struct device_numbers;
struct runtime_api;

/// One compiled shape. [deterministic]: the scheduler of deterministic plans is another.
struct decode_entry {
  void (*kernels[2])(decode_args);
  void (*few_rows[2])(decode_args);  // for plans of few rows; null where there are none
  int head_dim;                      // of the shape
  bool padded;
  int threads;
  int shared_bytes;
  int ctas_per_sm;
};

/// Null for a shape that is not compiled: rows of K and V are whole vectors of 16 bytes, of up to 256 dims, of float32
/// up to 128. All 8-bit types have the same entry.
[[nodiscard]] const decode_entry* find_decode_entry(dtype type, std::int32_t head_dim) noexcept;

/// The same for K and V of these types: one of 16 bits beside codes of the other has shapes of its own.
[[nodiscard]] const decode_entry* find_decode_entry(dtype k_type, dtype v_type, std::int32_t head_dim) noexcept;

/// For calls that suit tensor cores. `metadata`: that of `plan` on the device.
[[nodiscard]] cudaError_t launch_decode(const runtime_api& api, const attention_kernel_args& args,
                                        const decode_plan& plan, const decode_metadata& metadata,
                                        const device_numbers& device, cudaStream_t stream) noexcept;

extern const decode_entry decode_f32_64_padded, decode_f32_128_padded;
extern const decode_entry decode_bf16_64, decode_bf16_128, decode_bf16_256;
extern const decode_entry decode_f16_64, decode_f16_128, decode_f16_256;
extern const decode_entry decode_bf16_64_padded, decode_bf16_80_padded, decode_bf16_96_padded, decode_bf16_128_padded,
    decode_bf16_160_padded, decode_bf16_192_padded, decode_bf16_256_padded;
extern const decode_entry decode_f16_64_padded, decode_f16_80_padded, decode_f16_96_padded, decode_f16_128_padded,
    decode_f16_160_padded, decode_f16_192_padded, decode_f16_256_padded;
extern const decode_entry decode_coded_64, decode_coded_128, decode_coded_256;
extern const decode_entry decode_coded_64_padded, decode_coded_96_padded, decode_coded_128_padded,
    decode_coded_160_padded, decode_coded_192_padded, decode_coded_256_padded;
extern const decode_entry decode_coded_v_64_padded, decode_coded_v_96_padded, decode_coded_v_128_padded,
    decode_coded_v_160_padded, decode_coded_v_192_padded, decode_coded_v_256_padded;
extern const decode_entry decode_coded_k_64_padded, decode_coded_k_96_padded, decode_coded_k_128_padded,
    decode_coded_k_160_padded, decode_coded_k_192_padded, decode_coded_k_256_padded;

}  // namespace bifolio::inline v0_2::cuda
