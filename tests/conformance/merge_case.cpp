// SPDX-License-Identifier: Apache-2.0
#include "conformance/merge_case.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "reference/attention_accuracy.hpp"
#include "reference/attention_oracle.hpp"
#include "support/elements.hpp"
#include "support/random.hpp"

namespace bifolio::test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t guard = 16;

}  // namespace

host_state random_state(dtype type, std::int64_t rows, std::int32_t head_dim, std::uint64_t seed) {
  host_state state;
  for (std::int64_t n = 0; n < rows * head_dim; ++n) {
    state.out.push_back(stored_as(type, normal_from(hash_of(seed, n))));
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::uint64_t bits = hash_of(seed, 77, r);
    state.lse.push_back(bits % 7 == 0 ? -infinity : bits % 7 == 1 ? 90.0f * normal_from(bits) : normal_from(bits));
  }
  return state;
}

device_state::device_state(const tested_backend& tested, dtype type, std::int64_t tokens, std::int32_t heads,
                           std::int32_t head_dim, const std::vector<float>& out, const std::vector<float>& lse,
                           std::int64_t gap)
    : type_(type),
      tokens_(tokens),
      heads_(heads),
      head_dim_(head_dim),
      head_stride_(head_dim + gap),
      token_stride_(heads * head_stride_ + 3 * gap) {
  const std::int64_t span = tokens == 0 ? 0 : (tokens - 1) * token_stride_ + (heads - 1) * head_stride_ + head_dim;
  std::vector<std::byte> image(static_cast<std::size_t>(span + 2 * guard) * size_of(type));
  poison(image, type);
  std::vector<std::byte> lse_image(static_cast<std::size_t>(tokens * heads + 2 * guard) * sizeof(float));
  poison(lse_image, dtype::f32);
  for (std::size_t n = 0; n < out.size(); ++n) store_element(image.data(), type, at(n), out[n]);
  for (std::size_t n = 0; n < lse.size(); ++n) {
    store_element(lse_image.data(), dtype::f32, guard + static_cast<std::int64_t>(n), lse[n]);
  }
  out_bytes = device_bytes(tested.get(), std::move(image), size_of(type));
  lse_bytes = device_bytes(tested.get(), std::move(lse_image), sizeof(float));
}

std::int64_t device_state::at(std::size_t n) const {
  const auto index = static_cast<std::int64_t>(n);
  const std::int64_t row = index / head_dim_;
  return guard + row / heads_ * token_stride_ + row % heads_ * head_stride_ + index % head_dim_;
}

tensor_view device_state::view() {
  return {out_bytes.data() + guard * static_cast<std::int64_t>(size_of(type_)),
          type_,
          tokens_,
          heads_,
          head_dim_,
          token_stride_,
          head_stride_};
}

float* device_state::lse() { return reinterpret_cast<float*>(lse_bytes.data()) + guard; }

attention_output device_state::read(bool& clean) {
  attention_output result;
  const std::vector<std::byte> bytes = out_bytes.read();
  std::vector<bool> mine(bytes.size() / size_of(type_), false);
  for (std::size_t n = 0; n < static_cast<std::size_t>(tokens_ * heads_ * head_dim_); ++n) {
    mine[static_cast<std::size_t>(at(n))] = true;
    result.out.push_back(load_element(bytes.data(), type_, at(n)));
  }
  clean = true;
  for (std::size_t n = 0; n < mine.size(); ++n) {
    clean = clean && (mine[n] || is_poison(bytes.data(), type_, static_cast<std::int64_t>(n)));
  }
  const std::vector<std::byte> lse_raw = lse_bytes.read();
  for (std::int64_t n = 0; n < tokens_ * heads_ + 2 * guard; ++n) {
    const bool inside = n >= guard && n < guard + tokens_ * heads_;
    if (inside) result.lse.push_back(load_element(lse_raw.data(), dtype::f32, n));
    if (!inside) clean = clean && is_poison(lse_raw.data(), dtype::f32, n);
  }
  return result;
}

attention_output merge_states_of(const tested_backend& tested, const merge_shape& shape, const host_state& a,
                                 const host_state& b) {
  const auto make = [&](dtype type, const host_state& from, std::int64_t gap) {
    return device_state(tested, type, shape.num_tokens, shape.num_heads, shape.head_dim, from.out, from.lse,
                        gap * shape.gap_unit);
  };
  device_state left = make(shape.type_a, a, 1);
  device_state right = make(shape.type_b, b, 2);
  device_state joined = make(shape.out_type, {}, 3);
  const errc code = tested.get().merge_states({left.state(), right.state(), joined.view(), joined.lse()});
  if (code != errc::ok) throw std::runtime_error(tested.name + " refused with " + std::string(to_string(code)));
  bool clean = false;
  attention_output got = joined.read(clean);
  if (!clean) throw std::runtime_error(tested.name + ": written beside the output");
  if (!left.out_bytes.unchanged() || !right.out_bytes.unchanged() || !left.lse_bytes.unchanged() ||
      !right.lse_bytes.unchanged()) {
    throw std::runtime_error(tested.name + ": an input was written to");
  }
  return got;
}

merge_verdict judge_merge(const merge_shape& shape, const host_state& a, const host_state& b,
                          const attention_output& got) {
  merge_verdict verdict;
  const auto rows = static_cast<std::size_t>(shape.num_tokens * shape.num_heads);
  const auto d = static_cast<std::size_t>(shape.head_dim);
  const auto row_of = [&](const host_state& state, std::size_t r) {
    const auto first = state.out.begin() + static_cast<std::ptrdiff_t>(r * d);
    return std::vector<double>(first, first + static_cast<std::ptrdiff_t>(d));
  };
  const auto judge = [&](const char* what, std::size_t r, double value, double want, double allowed) {
    const double error = std::abs(value - want);
    verdict.worst_share = std::max(verdict.worst_share, error / allowed);
    if (error <= allowed || !verdict.problem.empty()) return;  // a NaN is a refusal
    std::ostringstream text;
    text << what << " of row " << r << ": got " << value << ", expected " << want << ", allowed error " << allowed
         << ", LSE " << a.lse[r] << " and " << b.lse[r];
    verdict.problem = text.str();
  };
  for (std::size_t r = 0; r < rows; ++r) {
    const std::vector<double> row_a = row_of(a, r);
    const std::vector<double> row_b = row_of(b, r);
    const auto lse_a = static_cast<double>(a.lse[r]);
    const auto lse_b = static_cast<double>(b.lse[r]);
    const reference::merged_row want = reference::merge(row_a.data(), lse_a, row_b.data(), lse_b, shape.head_dim);
    const double gap = std::isinf(lse_a) || std::isinf(lse_b) ? 0 : std::abs(lse_a - lse_b);
    for (std::size_t i = 0; i < d; ++i) {
      // The weights carry the rounding of the difference of two LSE values.
      const double magnitude = std::max(std::abs(row_a[i]), std::abs(row_b[i]));
      const double allowed = (16 + 2 * gap) * 0x1p-24 * magnitude +
                             reference::unit_roundoff(shape.out_type) * std::abs(want.out[i]) +
                             static_cast<double>(smallest_subnormal(shape.out_type));
      judge("output", r, static_cast<double>(got.out[r * d + i]), want.out[i], allowed);
    }
    if (!std::isinf(want.lse)) {
      judge("LSE", r, static_cast<double>(got.lse[r]), want.lse, 8 * 0x1p-24 * (1 + std::abs(want.lse)));
    } else if (got.lse[r] != -infinity && verdict.problem.empty()) {
      verdict.problem = "LSE of row " + std::to_string(r) + " is not -inf";
    }
  }
  return verdict;
}

}  // namespace bifolio::test
