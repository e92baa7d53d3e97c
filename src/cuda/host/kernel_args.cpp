// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/kernel_args.hpp"

#include "common/attention/implementations.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

bool is_aligned(const void* pointer) noexcept { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

/// Whether a stride of so many elements keeps rows aligned to 16 bytes.
bool keeps_aligned(std::int64_t stride, dtype type) noexcept {
  return stride % static_cast<std::int64_t>(16 / size_of(type)) == 0;
}

bool has_aligned_plane(const char* plane, const void* data, const kv_strides& s, dtype type, std::int32_t head_dim,
                       std::string* why) noexcept {
  if (s.dim != 1 || s.chunk < head_dim) {
    return detail::declines(why, "the dims of ", plane, " are not contiguous (stride ", s.dim, ", chunk ", s.chunk,
                            ")");
  }
  if (is_aligned(data) && keeps_aligned(s.block, type) && keeps_aligned(s.head, type) && keeps_aligned(s.token, type)) {
    return true;
  }
  return detail::declines(why, "rows of ", plane, " are not aligned to 16 bytes (strides: block ", s.block, ", head ",
                          s.head, ", token ", s.token, ")");
}

bool has_aligned_tensor(const char* tensor, const void* data, dtype type, std::int64_t token_stride,
                        std::int64_t head_stride, std::string* why) noexcept {
  if (is_aligned(data) && keeps_aligned(token_stride, type) && keeps_aligned(head_stride, type)) return true;
  return detail::declines(why, "rows of ", tensor, " are not aligned to 16 bytes (strides: token ", token_stride,
                          ", head ", head_stride, ")");
}

}  // namespace

bool suits_tensor_cores(const attention_kernel_args& args, std::string* why, bool blocks_may_differ) noexcept {
  if (args.bias != nullptr) return detail::declines(why, "the call has a bias");
  kv_strides v_strides = args.v_strides;
  if (blocks_may_differ) v_strides.block = args.k_strides.block;
  if (args.k_strides != v_strides) return detail::declines(why, "the strides of K and V differ");
  return has_aligned_plane("K", args.k, args.k_strides, args.kv_type, args.head_dim, why) &&
         has_aligned_plane("V", args.v, args.v_strides, args.is_coded ? args.v_type : args.kv_type, args.head_dim,
                           why) &&
         has_aligned_tensor("q", args.q, args.q_type, args.q_token_stride, args.q_head_stride, why) &&
         has_aligned_tensor("out", args.out, args.out_type, args.out_token_stride, args.out_head_stride, why);
}

}  // namespace bifolio::inline v0_2::cuda
