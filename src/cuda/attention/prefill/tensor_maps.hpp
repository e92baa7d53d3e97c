// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The tensor maps of a call, as prefill and the latent kernel take them (`tensor_map` says what their dimensions are).

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/launch.hpp"

namespace bifolio::inline v0_2::cuda {

/// A box has 64 dims of the packed heads and tokens of one warpgroup. False: the driver declines.
[[nodiscard]] bool encode_query_map(const device_numbers& device, const prefill_args& args, tensor_map& map) noexcept;

/// A box has box_tokens of one block and KV head. Does nothing where the plane is copied without boxes.
[[nodiscard]] bool encode_kv_map(const device_numbers& device, const prefill_args& args, const void* base,
                                 const kv_strides& strides, tensor_map& map) noexcept;

}  // namespace bifolio::inline v0_2::cuda
