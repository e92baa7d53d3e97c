// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <bifolio/calibration.hpp>
#include <bifolio/error.hpp>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace bifolio;

const_tensor_view rows_of(const std::vector<float>& values, std::int32_t heads, std::int32_t dims) {
  const auto tokens = static_cast<std::int64_t>(values.size()) / (heads * dims);
  return {values.data(), dtype::f32, tokens, heads, dims, heads * dims, dims};
}

TEST_CASE("static scales bring the largest magnitude of a layer, or of each head, to the largest code") {
  // Two tokens of two heads of two dims.
  const std::vector<float> values{1, -2, 0.5f, 0, 3, 1, -7, 0.25f};
  scale_sampler layer({dtype::i8, scale_granularity::layer}, 2);
  layer.add(rows_of(values, 2, 2));
  CHECK(layer.scales() == std::vector<float>{7.0f / 127.0f});
  scale_sampler heads({dtype::e4m3, scale_granularity::head}, 2);
  heads.add(rows_of(values, 2, 2));
  CHECK(heads.scales() == std::vector<float>{3.0f / 448.0f, 7.0f / 448.0f});
  scale_sampler wide({dtype::e5m2, scale_granularity::layer}, 2);
  wide.add(rows_of(values, 2, 2));
  wide.add(rows_of({100, 0, 0, 0}, 2, 2));
  CHECK(wide.scales() == std::vector<float>{100.0f / 57344.0f});
}

TEST_CASE("a percentile leaves outliers above the largest code, to an eighth of an octave") {
  std::vector<float> values(1000, 1.0f);
  for (std::size_t i = 0; i < 10; ++i) values[i * 100] = 50.0f;
  scale_sampler sampler({dtype::i8, scale_granularity::layer}, 1);
  sampler.add(rows_of(values, 1, 10));
  CHECK(sampler.scales(100)[0] == 50.0f / 127.0f);
  const float most = sampler.scales(98)[0] * 127.0f;
  CHECK(most >= 1.0f);
  CHECK(most <= 1.125f);
  CHECK(sampler.scales(99.5)[0] == 50.0f / 127.0f);
  CHECK(sampler.scales(99.05)[0] == 50.0f / 127.0f);  // half a number more than the 990 small ones
}

TEST_CASE("numbers that are not finite are left out of a sample, and one of zeros gives 1") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  scale_sampler sampler({dtype::e4m3, scale_granularity::head}, 2);
  sampler.add(rows_of({infinity, 2, 0, 0, -infinity, std::numeric_limits<float>::quiet_NaN(), 0, 0}, 2, 2));
  CHECK(sampler.scales() == std::vector<float>{2.0f / 448.0f, 1.0f});
  scale_sampler tiny({dtype::e4m3, scale_granularity::layer}, 1);
  tiny.add(rows_of({1e-38f, 0}, 1, 2));
  CHECK(tiny.scales()[0] == least_scale);
}

TEST_CASE("samplers refuse codes without static scales, other heads and percentiles, by name") {
  const auto sentence = [](auto body) {
    try {
      body();
    } catch (const error& problem) {
      CHECK(problem.code() == errc::invalid_argument);
      return std::string(problem.what());
    }
    return std::string();
  };
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  CHECK(has(sentence([] {
              (void)scale_sampler({dtype::i8, scale_granularity::token_head}, 1);
            }),
            "the code is i8, scale per token_head (f32); it must be e4m3, e5m2 or i8 with a scale per layer or head"));
  CHECK(has(sentence([] { (void)scale_sampler({dtype::u8, scale_granularity::layer}, 1); }), "the code is u8"));
  CHECK(has(sentence([] { (void)scale_sampler({dtype::i8, scale_granularity::layer}, 0); }), "num_kv_heads is 0"));
  scale_sampler sampler({dtype::i8, scale_granularity::layer}, 2);
  const std::vector<float> values(6, 1.0f);
  CHECK(has(sentence([&] { sampler.add(rows_of(values, 3, 2)); }), "the rows have 3 heads; they must have 2"));
  const_tensor_view bytes = rows_of(values, 2, 3);
  bytes.type = dtype::e4m3;
  CHECK(has(sentence([&] { sampler.add(bytes); }), "the dtype of the rows is e4m3; it must be one of f32, f16, bf16"));
  for (const double percentile : {0.0, -1.0, 100.5}) {
    CHECK(has(sentence([&] { (void)sampler.scales(percentile); }), "it must be above 0 and at most 100"));
  }
}

}  // namespace
