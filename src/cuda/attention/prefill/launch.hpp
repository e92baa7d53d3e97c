// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The compiled prefill kernels and their launch.

#include <driver_types.h>

#include <bifolio/dtype.hpp>
#include <cstdint>
#include <string>

#include "cuda/attention/prefill/metadata.hpp"
#include "cuda/host/kernel_args.hpp"

namespace bifolio::inline v0_2::cuda {

struct device_numbers;
struct kv_loading;
struct prefill_args;
struct prefill_plan;
struct runtime_api;

/// A CUtensorMap, passed to kernels by value. Maps of q are [token][head][dim], those of K and V
/// [block][group of 8 tokens][chunk of 64 dims][token of the group][dim of the chunk], with the heads of a block in the
/// groups or in the chunks (`kv_loading`).
struct alignas(64) tensor_map {
  std::uint64_t words[16];
};

using prefill_function = void (*)(prefill_args, tensor_map q, tensor_map k, tensor_map v);

/// A kernel, the dynamic shared memory that it takes and the threads of a CTA. Null: there is none.
struct prefill_choice {
  prefill_function kernel = nullptr;
  int shared_bytes = 0;
  int num_threads = 0;
};

/// One compiled shape, over K and V of one 16-bit type, of float32 or of codes; what others take is null. Of two
/// kernels, [0]: a positive scale, [1]: with the logits transform (soft cap, ALiBi), which a single one has. Masks,
/// windows and sinks are in all.
struct prefill_entry {
  prefill_choice plain[2];
  prefill_choice deterministic;  // up to 256 dims one kernel for all options
  prefill_choice coded[2];
  prefill_choice coded_by_token[2];
  prefill_choice coded_by_zero[2];
  prefill_choice deterministic_transform;  // above 256 dims

  [[nodiscard]] prefill_choice choose(prefill_kind kind, bool transforms) const noexcept;
};

/// `type`: of K and V. Null for a shape that is not compiled: 16-bit types with head_dims that are multiples of 8 up to
/// 512, float32 with multiples of 4 up to 128, codes, beside queries of either 16-bit type, with multiples of 16 up to
/// 256.
[[nodiscard]] const prefill_entry* find_prefill_entry(dtype type, std::int32_t head_dim) noexcept;
/// The same of K and V of different types: 16 bits beside codes are taken by kernels of codes.
[[nodiscard]] const prefill_entry* find_prefill_entry(dtype k_type, dtype v_type, std::int32_t head_dim) noexcept;

/// Whether the kernel with the logits transform is taken.
[[nodiscard]] inline bool prefill_transforms(const attention_kernel_args& args) noexcept {
  return !(args.scale > 0) || args.soft_cap > 0 || args.alibi_slopes != nullptr;
}

/// What the kernel of this call must be compiled for.
[[nodiscard]] prefill_kind prefill_kind_of(const attention_kernel_args& args) noexcept;

/// How K and V of this call are loaded.
[[nodiscard]] kv_loading prefill_loading(const attention_kernel_args& args) noexcept;

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
extern const prefill_entry prefill_bf16_64, prefill_bf16_96, prefill_bf16_128, prefill_bf16_192, prefill_bf16_256,
    prefill_bf16_512;
extern const prefill_entry prefill_coded_64, prefill_coded_96, prefill_coded_128, prefill_coded_192, prefill_coded_256;
extern const prefill_entry prefill_f32_64, prefill_f32_128;
extern const prefill_entry prefill_f16_64, prefill_f16_96, prefill_f16_128, prefill_f16_192, prefill_f16_256,
    prefill_f16_512;

}  // namespace bifolio::inline v0_2::cuda
