// SPDX-License-Identifier: Apache-2.0
#include "rotate_rows.hpp"

#include <cmath>
#include <numeric>
#include <vector>

#include "checks.hpp"

namespace bifolio::bench {
namespace {

template <class T>
buffer uploaded(backend& where, const std::vector<T>& values) {
  buffer result(where.memory(), values.size() * sizeof(T));
  require_ok(where.upload(result.data(), values.data(), result.num_bytes(), {}), "an upload");
  require_ok(where.synchronize({}), "an upload");
  return result;
}

std::vector<float> table_of(std::int64_t num_positions, std::int32_t rotary_dim) {
  std::vector<float> table;
  for (std::int64_t p = 0; p < num_positions; ++p) {
    for (std::int32_t i = 0; i < rotary_dim; ++i) {
      const bool sine = i >= rotary_dim / 2;
      const double pair = i - (sine ? rotary_dim / 2 : 0);
      const double angle = static_cast<double>(p) * std::pow(10000.0, -2 * pair / rotary_dim);
      table.push_back(static_cast<float>(sine ? std::sin(angle) : std::cos(angle)));
    }
  }
  return table;
}

std::vector<std::int32_t> count_to(std::int64_t num_tokens) {
  std::vector<std::int32_t> positions(static_cast<std::size_t>(num_tokens));
  std::iota(positions.begin(), positions.end(), 0);
  return positions;
}

}  // namespace

rotate_rows::rotate_rows(backend& where, const cache_ops_options& options, const kv_layout& layout, dtype rows_type,
                         std::size_t num_sets)
    : num_tokens_(options.tokens),
      num_q_heads_(options.q_heads),
      num_kv_heads_(layout.num_kv_heads),
      head_dim_(layout.k.head_dim),
      type_(rows_type),
      rows_(where.memory(), num_sets * static_cast<std::size_t>(num_tokens_ * row_elements()) * size_of(rows_type)),
      table_(uploaded(where, table_of(num_tokens_, head_dim_ / 2 * 2))),
      positions_(uploaded(where, count_to(num_tokens_))) {}

std::int64_t rotate_rows::row_elements() const noexcept {
  return (std::int64_t{num_q_heads_} + 2 * std::int64_t{num_kv_heads_}) * head_dim_;
}

rotate_append_params rotate_rows::call(std::size_t set, const kv_cache_view& kv,
                                       const std::int64_t* slots) const noexcept {
  const std::int64_t stride = row_elements();
  const auto part = [&](std::int64_t first_head, std::int32_t num_heads) {
    const std::int64_t element = static_cast<std::int64_t>(set) * num_tokens_ * stride + first_head * head_dim_;
    auto* const data = static_cast<std::byte*>(const_cast<void*>(rows_.data()));
    return tensor_view{data + element * static_cast<std::int64_t>(size_of(type_)),
                       type_,
                       num_tokens_,
                       num_heads,
                       head_dim_,
                       stride,
                       head_dim_};
  };
  rotate_append_params params;
  const tensor_view q = part(0, num_q_heads_);
  params.q = as_const(q);
  params.q_out = q;
  params.append = {kv, as_const(part(num_q_heads_, num_kv_heads_)),
                   as_const(part(std::int64_t{num_q_heads_} + num_kv_heads_, num_kv_heads_)), slots};
  params.rotary.rotary_dim = head_dim_ / 2 * 2;
  params.rotary.cos_sin = table_.as<float>();
  params.rotary.num_positions = num_tokens_;
  params.rotary.positions = positions_.as<std::int32_t>();
  return params;
}

}  // namespace bifolio::bench
