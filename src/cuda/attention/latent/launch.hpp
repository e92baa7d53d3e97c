// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The compiled latent kernels and their launch.

#include <driver_types.h>

#include <bifolio/dtype.hpp>
#include <bifolio/kv_layout.hpp>
#include <string>

#include "cuda/attention/prefill/launch.hpp"
#include "cuda/host/kernel_args.hpp"

namespace bifolio::inline v0_2::cuda {

struct latent_plan;

using latent_function = void (*)(prefill_args, tensor_map q, tensor_map k);

struct latent_kernel_entry {
  latent_function kernel;
  int shared_bytes;
  int num_threads;
};
struct latent_entry {
  latent_kernel_entry many_rows, few_rows;
};

/// The kernels for K of this code and queries and output of this type. Null for what is not compiled: all but one of
/// f16 and bf16 for all, and records with bf16.
[[nodiscard]] const latent_entry* find_latent_entry(const kv_code& code, dtype type) noexcept;

/// How K of this call is loaded.
[[nodiscard]] kv_loading latent_loading(const attention_kernel_args& args) noexcept;

/// Whether the strides, pointers and options of this call suit the kernel. `why`: null, or receives what does not.
[[nodiscard]] bool latent_accepts_call(const attention_kernel_args& args, std::string* why) noexcept;

/// `metadata`: that of `plan` on the device. `device` has an encode_tensor_map.
[[nodiscard]] cudaError_t launch_latent(const runtime_api& api, const attention_kernel_args& args,
                                        const latent_plan& plan, const prefill_metadata& metadata,
                                        const device_numbers& device, cudaStream_t stream) noexcept;

// One per translation unit.
extern const latent_entry latent_bf16, latent_f16, latent_records;

}  // namespace bifolio::inline v0_2::cuda
