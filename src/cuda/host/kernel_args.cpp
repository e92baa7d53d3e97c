// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/kernel_args.hpp"

#include "common/attention/implementations.hpp"

namespace bifolio::cuda {
namespace {

bool is_aligned(const void* pointer) noexcept { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

/// Strides in elements of 16 bits.
bool is_multiple(std::int64_t stride) noexcept { return stride % 8 == 0; }

bool has_aligned_plane(const char* plane, const void* data, const kv_strides& s, std::int32_t head_dim,
                       std::string* why) noexcept {
  if (s.dim != 1 || s.chunk < head_dim) {
    return detail::declines(why, "the dims of ", plane, " are not contiguous (stride ", s.dim, ", chunk ", s.chunk,
                            ")");
  }
  if (is_aligned(data) && is_multiple(s.block) && is_multiple(s.head) && is_multiple(s.token)) return true;
  return detail::declines(why, "rows of ", plane, " are not aligned to 16 bytes (strides: block ", s.block, ", head ",
                          s.head, ", token ", s.token, ")");
}

bool has_aligned_tensor(const char* tensor, const void* data, std::int64_t token_stride, std::int64_t head_stride,
                        std::string* why) noexcept {
  if (is_aligned(data) && is_multiple(token_stride) && is_multiple(head_stride)) return true;
  return detail::declines(why, "rows of ", tensor, " are not aligned to 16 bytes (strides: token ", token_stride,
                          ", head ", head_stride, ")");
}

}  // namespace

bool suits_tensor_cores(const attention_kernel_args& args, std::string* why) noexcept {
  if (args.bias != nullptr) return detail::declines(why, "the call has a bias");
  if (args.k_strides != args.v_strides) return detail::declines(why, "the strides of K and V differ");
  return has_aligned_plane("K", args.k, args.k_strides, args.head_dim, why) &&
         has_aligned_plane("V", args.v, args.v_strides, args.head_dim, why) &&
         has_aligned_tensor("q", args.q, args.q_token_stride, args.q_head_stride, why) &&
         has_aligned_tensor("out", args.out, args.out_token_stride, args.out_head_stride, why);
}

}  // namespace bifolio::cuda
