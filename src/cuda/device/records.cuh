// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Records of latent attention (kv_record) in device code: runs of their codes, of their scales and of their rotated
/// dims. A record begins at a multiple of 4 bytes, and `aligned` ones at a multiple of 16.

#include <bifolio/kv_layout.hpp>
#include <cstdint>

namespace bifolio::inline v0_2::cuda {

/// The scale of the latent dim `dim`.
__device__ __forceinline__ float record_scale(const void* record, std::int32_t dim) {
  return reinterpret_cast<const float*>(static_cast<const unsigned char*>(record) +
                                        kv_record::scales_offset)[dim / kv_record::dims_per_scale];
}

/// 16 bytes of a record, `offset` bytes from its beginning, a multiple of 16.
__device__ __forceinline__ uint4 load_record_16(const void* record, std::int32_t offset, bool aligned) {
  const void* const from = static_cast<const unsigned char*>(record) + offset;
  if (aligned) return *static_cast<const uint4*>(from);
  const auto* const words = static_cast<const std::uint32_t*>(from);
  return make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ __forceinline__ void store_record_16(void* record, std::int32_t offset, bool aligned, const uint4& value) {
  void* const to = static_cast<unsigned char*>(record) + offset;
  if (aligned) {
    *static_cast<uint4*>(to) = value;
    return;
  }
  auto* const words = static_cast<std::uint32_t*>(to);
  words[0] = value.x;
  words[1] = value.y;
  words[2] = value.z;
  words[3] = value.w;
}

}  // namespace bifolio::inline v0_2::cuda
