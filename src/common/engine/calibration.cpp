// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bifolio/calibration.hpp>
#include <bifolio/error.hpp>
#include <bit>
#include <cmath>
#include <cstddef>

#include "common/base/kv_code.hpp"
#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2 {
namespace {

/// A class of magnitudes is what their upper bits have in common: exponent and three bits of mantissa.
constexpr int class_shift = 20;
constexpr std::size_t num_classes = std::size_t{1} << (31 - class_shift);

float largest_code_of(dtype type) noexcept { return type == dtype::e5m2 ? 57344.0f : detail::largest_code(type); }

}  // namespace

scale_sampler::scale_sampler(const kv_code& code, std::int32_t num_kv_heads) : code_(code), num_heads_(num_kv_heads) {
  if (!code.has_static_scales() || !detail::is_supported(code)) {
    detail::refuse(
        errc::invalid_argument, "the code is ", [&](std::string& text) { text += to_string(code); },
        "; it must be e4m3, e5m2 or i8 with a scale per layer or head");
  }
  if (num_kv_heads < 1) {
    detail::refuse(errc::invalid_argument, "num_kv_heads is ", num_kv_heads, "; it must be at least 1");
  }
  counts_.resize(static_cast<std::size_t>(num_kv_heads) * num_classes);
  largest_.resize(static_cast<std::size_t>(num_kv_heads));
}

void scale_sampler::add(const const_tensor_view& rows) {
  if (rows.num_heads != num_heads_) {
    detail::refuse(errc::invalid_argument, "the rows have ", rows.num_heads, " heads; they must have ", num_heads_);
  }
  if (!is_tensor_dtype(rows.type)) {
    detail::refuse(errc::invalid_argument, "the dtype of the rows is ", to_string(rows.type), "; it must be one of ",
                   tensor_dtype_names);
  }
  visit_tensor_dtype(rows.type, [&](auto traits) {
    const auto* const data = static_cast<const typename decltype(traits)::storage*>(rows.data);
    for (std::int64_t token = 0; token < rows.num_tokens; ++token) {
      for (std::int32_t head = 0; head < rows.num_heads; ++head) {
        const auto at = static_cast<std::size_t>(head);
        const auto* const row = data + token * rows.token_stride + head * rows.head_stride;
        for (std::int32_t d = 0; d < rows.head_dim; ++d) {
          const float magnitude = std::fabs(to_float(row[d]));
          if (!std::isfinite(magnitude)) continue;
          ++counts_[at * num_classes + (std::bit_cast<std::uint32_t>(magnitude) >> class_shift)];
          largest_[at] = std::max(largest_[at], magnitude);
        }
      }
    }
  });
}

std::vector<float> scale_sampler::scales(double percentile) const {
  if (!(percentile > 0 && percentile <= 100)) {
    detail::refuse(errc::invalid_argument, "percentile is ", percentile, "; it must be above 0 and at most 100");
  }
  const bool per_head = code_.granularity == scale_granularity::head;
  const auto num_heads = static_cast<std::size_t>(num_heads_);
  std::vector<float> result;
  for (std::size_t first = 0; first < num_heads; first += per_head ? 1 : num_heads) {
    const std::size_t last = per_head ? first + 1 : num_heads;
    const auto count_of = [&](std::size_t index) {
      std::uint64_t sum = 0;
      for (std::size_t head = first; head < last; ++head) sum += counts_[head * num_classes + index];
      return sum;
    };
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < num_classes; ++i) total += count_of(i);
    float magnitude = *std::max_element(largest_.begin() + static_cast<std::ptrdiff_t>(first),
                                        largest_.begin() + static_cast<std::ptrdiff_t>(last));
    const double wanted = static_cast<double>(total) * percentile / 100;
    std::uint64_t below = 0;
    for (std::size_t i = 0; i < num_classes && percentile < 100; ++i) {
      below += count_of(i);
      if (static_cast<double>(below) < wanted) continue;
      const float end = std::bit_cast<float>(static_cast<std::uint32_t>(i + 1) << class_shift);
      magnitude = std::min(magnitude, end);
      break;
    }
    const float scale = magnitude > 0 ? magnitude / largest_code_of(code_.type) : 1.0f;
    result.push_back(std::clamp(scale, least_scale, largest_scale));
  }
  return result;
}

}  // namespace bifolio::inline v0_2
