// SPDX-License-Identifier: Apache-2.0
#include "cpu/cache_ops.hpp"

namespace bifolio::cpu {

errc append(const kernel_table&, executor&, const append_params&) noexcept { return errc::unsupported; }
errc gather(const kernel_table&, executor&, const gather_params&) noexcept { return errc::unsupported; }
errc copy_blocks(const kernel_table&, executor&, std::span<const kv_cache_view>, std::span<const block_copy>) noexcept {
  return errc::unsupported;
}
errc convert_blocks(const kernel_table&, executor&, const kv_cache_view&, const kv_cache_view&,
                    std::span<const block_copy>) noexcept {
  return errc::unsupported;
}
errc swap_blocks(const kernel_table&, executor&, std::span<const kv_cache_view>, std::span<const kv_cache_view>,
                 std::span<const block_copy>) noexcept {
  return errc::unsupported;
}

}  // namespace bifolio::cpu
