// SPDX-License-Identifier: Apache-2.0
#include "linear.hpp"

#include <cstring>

#include "parallel.hpp"

namespace generate {
namespace {

using bifolio::bfloat16;

constexpr std::int32_t panel_width = linear::panel_width;
constexpr std::int64_t tile_tokens = 6;  // 6 × 16 sums fit the registers of AVX2 next to the weights

/// The vectors of one instruction set: floats, and the integers that bf16 is widened with.
struct vectors128 {
  typedef float floats __attribute__((vector_size(16)));
  typedef std::uint32_t words __attribute__((vector_size(16)));
  typedef std::uint16_t halves __attribute__((vector_size(8)));
};
struct vectors256 {
  typedef float floats __attribute__((vector_size(32)));
  typedef std::uint32_t words __attribute__((vector_size(32)));
  typedef std::uint16_t halves __attribute__((vector_size(16)));
};
struct vectors512 {
  typedef float floats __attribute__((vector_size(64)));
  typedef std::uint32_t words __attribute__((vector_size(64)));
  typedef std::uint16_t halves __attribute__((vector_size(32)));
};

template <class Vectors>
[[gnu::always_inline]] inline void load(const float* from, typename Vectors::floats& to) noexcept {
  std::memcpy(&to, from, sizeof(to));
}

template <class Vectors>
[[gnu::always_inline]] inline void load(const bfloat16* from, typename Vectors::floats& to) noexcept {
  typename Vectors::halves bits;
  std::memcpy(&bits, from, sizeof(bits));
  const typename Vectors::words widened = __builtin_convertvector(bits, typename Vectors::words) << 16;
  std::memcpy(&to, &widened, sizeof(to));
}

/// The same sums for vectors of each width: every one runs over the inputs in order, whatever the width or the tile.
template <class Vectors, std::size_t NumTokens, class Weight>
[[gnu::always_inline]] inline void multiply_tile(const Weight* panel, const float* x, std::int64_t num_inputs,
                                                 float* sums) noexcept {
  using floats = typename Vectors::floats;
  constexpr std::size_t lanes = sizeof(floats) / sizeof(float);
  constexpr std::size_t parts = panel_width / lanes;
  const auto stride = static_cast<std::size_t>(num_inputs);
  floats sum[NumTokens][parts] = {};
  for (std::size_t i = 0; i < stride; ++i) {
    floats weight[parts];
    for (std::size_t p = 0; p < parts; ++p) load<Vectors>(panel + i * panel_width + p * lanes, weight[p]);
    for (std::size_t t = 0; t < NumTokens; ++t) {
      for (std::size_t p = 0; p < parts; ++p) sum[t][p] += weight[p] * x[t * stride + i];
    }
  }
  std::memcpy(sums, sum, sizeof(sum));
}

/// One panel times up to `tile_tokens` tokens; sums [num_tokens, 16].
template <class Vectors, class Weight>
[[gnu::always_inline]] inline void multiply(const Weight* panel, const float* x, std::int64_t num_tokens,
                                            std::int64_t num_inputs, float* sums) noexcept {
  switch (num_tokens) {
    case 1:
      return multiply_tile<Vectors, 1>(panel, x, num_inputs, sums);
    case 2:
      return multiply_tile<Vectors, 2>(panel, x, num_inputs, sums);
    case 3:
      return multiply_tile<Vectors, 3>(panel, x, num_inputs, sums);
    case 4:
      return multiply_tile<Vectors, 4>(panel, x, num_inputs, sums);
    case 5:
      return multiply_tile<Vectors, 5>(panel, x, num_inputs, sums);
    default:
      return multiply_tile<Vectors, 6>(panel, x, num_inputs, sums);
  }
}

template <class Weight>
using kernel = void (*)(const Weight*, const float*, std::int64_t, std::int64_t, float*) noexcept;

template <class Weight>
void multiply_baseline(const Weight* panel, const float* x, std::int64_t num_tokens, std::int64_t num_inputs,
                       float* sums) noexcept {
  multiply<vectors128>(panel, x, num_tokens, num_inputs, sums);
}

#if defined(__x86_64__)
template <class Weight>
[[gnu::target("avx2,fma")]] void multiply_avx2(const Weight* panel, const float* x, std::int64_t num_tokens,
                                               std::int64_t num_inputs, float* sums) noexcept {
  multiply<vectors256>(panel, x, num_tokens, num_inputs, sums);
}

template <class Weight>
[[gnu::target("avx512f")]] void multiply_avx512(const Weight* panel, const float* x, std::int64_t num_tokens,
                                                std::int64_t num_inputs, float* sums) noexcept {
  multiply<vectors512>(panel, x, num_tokens, num_inputs, sums);
}
#endif

enum class level : std::uint8_t { baseline, avx2, avx512 };

level best_level() noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return level::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return level::avx2;
#endif
  return level::baseline;
}

template <class Weight>
kernel<Weight> best_kernel() noexcept {
#if defined(__x86_64__)
  switch (best_level()) {
    case level::avx512:
      return multiply_avx512<Weight>;
    case level::avx2:
      return multiply_avx2<Weight>;
    case level::baseline:
      break;
  }
#endif
  return multiply_baseline<Weight>;
}

template <class Weight>
void multiply_matrix(bifolio::executor& workers, const Weight* weights, std::int32_t num_outputs,
                     std::int32_t num_inputs, const float* x, std::int64_t num_tokens, float* y) noexcept {
  static const kernel<Weight> run = best_kernel<Weight>();
  const std::int64_t num_panels = (num_outputs + panel_width - 1) / panel_width;
  // A worker pays from some 2^16 multiplications.
  const std::int64_t grain = (std::int64_t{1} << 16) / (std::int64_t{num_inputs} * panel_width * num_tokens + 1) + 1;
  parallel_ranges(workers, num_panels, grain, [&](std::int64_t begin, std::int64_t end) noexcept {
    alignas(64) float sums[tile_tokens * panel_width];
    for (std::int64_t panel = begin; panel < end; ++panel) {
      const std::int64_t first = panel * panel_width;
      const std::int64_t width = std::min<std::int64_t>(panel_width, num_outputs - first);
      for (std::int64_t t = 0; t < num_tokens; t += tile_tokens) {
        const std::int64_t tile = std::min(tile_tokens, num_tokens - t);
        run(weights + first * num_inputs, x + t * num_inputs, tile, num_inputs, sums);
        for (std::int64_t j = 0; j < tile; ++j) {
          std::memcpy(y + (t + j) * num_outputs + first, sums + j * panel_width,
                      static_cast<std::size_t>(width) * sizeof(float));
        }
      }
    }
  });
}

}  // namespace

linear::linear(std::int32_t num_outputs, std::int32_t num_inputs, bifolio::dtype type)
    : num_outputs_(num_outputs), num_inputs_(num_inputs) {
  const auto num_panels = static_cast<std::size_t>((num_outputs + panel_width - 1) / panel_width);
  const std::size_t count = num_panels * static_cast<std::size_t>(num_inputs) * panel_width;
  switch (type) {
    case bifolio::dtype::bf16:
      bf16_.resize(count);
      break;
    case bifolio::dtype::f32:
    case bifolio::dtype::f16:
    case bifolio::dtype::e4m3:
    case bifolio::dtype::e5m2:
    case bifolio::dtype::i8:
    case bifolio::dtype::u8:
      f32_.resize(count);
      break;
  }
}

void linear::set_rows(std::int32_t first_output, const float* rows, std::int32_t num_rows) noexcept {
  for (std::int32_t r = 0; r < num_rows; ++r) {
    for (std::int32_t i = 0; i < num_inputs_; ++i) {
      const float value = rows[std::int64_t{r} * num_inputs_ + i];
      const auto at = static_cast<std::size_t>(index(first_output + r, i));
      if (f32_.empty()) {
        bf16_[at] = bifolio::from_float<bfloat16>(value);
      } else {
        f32_[at] = value;
      }
    }
  }
}

void linear::copy_row(std::int32_t output, float* destination) const noexcept {
  for (std::int32_t i = 0; i < num_inputs_; ++i) {
    const auto at = static_cast<std::size_t>(index(output, i));
    destination[i] = f32_.empty() ? bifolio::to_float(bf16_[at]) : f32_[at];
  }
}

void linear::apply(bifolio::executor& workers, const float* x, std::int64_t num_tokens, float* y) const noexcept {
  if (f32_.empty()) {
    multiply_matrix(workers, bf16_.data(), num_outputs_, num_inputs_, x, num_tokens, y);
  } else {
    multiply_matrix(workers, f32_.data(), num_outputs_, num_inputs_, x, num_tokens, y);
  }
}

const char* linear_isa() noexcept {
  switch (best_level()) {
    case level::avx512:
      return "avx512";
    case level::avx2:
      return "avx2";
    case level::baseline:
      break;
  }
  return "baseline";
}

}  // namespace generate
