// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What rotate_append is measured on: fused rows of q, k and v, as a projection leaves them, rotated whole (halves) in
/// place; positions as of one prompt.

#include <bifolio/backend.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/rotate_append.hpp>
#include <cstddef>
#include <cstdint>

#include "cache_ops_setting.hpp"

namespace bifolio::bench {

class rotate_rows {
 public:
  /// Rows for `num_sets` calls. They are not filled.
  rotate_rows(backend& where, const cache_ops_options& options, const kv_layout& layout, dtype rows_type,
              std::size_t num_sets);

  [[nodiscard]] buffer& memory() noexcept { return rows_; }
  /// `kv` and `slots` on the device of `where`.
  [[nodiscard]] rotate_append_params call(std::size_t set, const kv_cache_view& kv,
                                          const std::int64_t* slots) const noexcept;

 private:
  [[nodiscard]] std::int64_t row_elements() const noexcept;

  std::int64_t num_tokens_;
  std::int32_t num_q_heads_;
  std::int32_t num_kv_heads_;
  std::int32_t head_dim_;
  dtype type_;
  buffer rows_;
  buffer table_;
  buffer positions_;
};

}  // namespace bifolio::bench
