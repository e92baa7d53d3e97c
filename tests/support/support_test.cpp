// SPDX-License-Identifier: Apache-2.0
// The tools that other tests lean on.
#include <doctest/doctest.h>

#include <cmath>
#include <set>
#include <string>

#include "support/backends.hpp"
#include "support/covering.hpp"
#include "support/elements.hpp"
#include "support/paged_cache.hpp"

using namespace bifolio;
using namespace bifolio::test;

TEST_CASE("a covering design holds every pair of values of every two axes") {
  const std::vector<std::size_t> sizes{5, 3, 7, 2, 4};
  const auto rows = pairwise_rows(sizes, 7);
  for (std::size_t a = 0; a < sizes.size(); ++a) {
    for (std::size_t b = a + 1; b < sizes.size(); ++b) {
      std::set<std::pair<std::size_t, std::size_t>> seen;
      for (const auto& row : rows) seen.emplace(row[a], row[b]);
      CHECK(seen.size() == sizes[a] * sizes[b]);
    }
  }
  CHECK(rows.size() < 70);  // the full product has 840
}

TEST_CASE("every supported ISA is among the backends under test") {
  if (std::getenv("BIFOLIO_TEST_BACKENDS") != nullptr) return;  // the list was narrowed on purpose
  for (const cpu_isa isa : supported_isas()) {
    bool found = false;
    for (const tested_backend& tested : all_backends()) {
      found = found || tested.family == "cpu-" + std::string(to_string(isa));
    }
    CHECK_MESSAGE(found, to_string(isa));
  }
  CHECK(one_per_family(0).size() >= supported_isas().size());
}

TEST_CASE("an arrangement gives every element of both planes an address of its own, inside the region") {
  for (const arrangement how : all_arrangements) {
    struct dims {
      std::int32_t qk, v;
      bool v_in_k;
    };
    for (const auto& [qk, v, v_in_k] : {dims{1, 1, false}, dims{6, 6, false}, dims{7, 7, false}, dims{16, 16, false},
                                        dims{6, 3, false}, dims{7, 16, false}, dims{16, 6, true}, dims{7, 7, true}}) {
      CAPTURE(to_string(how));
      const std::string what = std::to_string(qk) + ", " + std::to_string(v) + (v_in_k ? " in k" : "");
      CAPTURE(what);
      const arranged_layout arranged = arrange(how, {dtype::bf16, 3, qk, v, 5, v_in_k}, 4);
      const kv_layout& layout = arranged.layout;
      std::set<std::int64_t> seen;
      for (std::int32_t b = 0; b < 4; ++b) {
        for (std::int32_t h = 0; h < 3; ++h) {
          for (std::int32_t t = 0; t < 5; ++t) {
            for (std::int32_t i = 0; i < qk; ++i) {
              seen.insert(arranged.k_start + layout.k.strides.offset(block_id{b}, h, t, i));
            }
            for (std::int32_t i = 0; i < v; ++i) {
              const std::int64_t at = arranged.v_start + layout.v.strides.offset(block_id{b}, h, t, i);
              CHECK(seen.contains(at) == v_in_k);
              seen.insert(at);
            }
          }
        }
      }
      CHECK(seen.size() == 4u * 3u * 5u * static_cast<unsigned>(v_in_k ? qk : qk + v));
      CHECK(*seen.begin() >= 0);
      CHECK(*seen.rbegin() < arranged.elements);
    }
  }
}

TEST_CASE("a paged cache holds its sequences and poison everywhere else") {
  const tested_backend& tested = all_backends().front();
  const std::vector<float> k{1, 2, 3, 4, 5, 6};
  const std::vector<float> v{-1, -2, -3, -4, -5, -6};
  const paged_cache cache(tested.get(), arrangement::hnd, {dtype::f32, 1, 2, 2, 2}, {{3, k.data(), v.data()}},
                          {.order = 3, .spare_blocks = 1, .table_padding = 1});
  REQUIRE(tested.is_host);
  CHECK(cache.view().num_blocks == 3);
  CHECK(cache.table_stride() == 3);
  CHECK(cache.tables()[2] == padding_entry);
  const kv_layout& layout = cache.view().layout;
  for (std::int32_t j = 0; j < 4; ++j) {
    const block_id block{cache.tables()[static_cast<std::size_t>(j / 2)]};
    for (std::int32_t i = 0; i < 2; ++i) {
      const float got = load_element(cache.view().k, dtype::f32, layout.k.strides.offset(block, 0, j % 2, i));
      if (j < 3) CHECK(got == k[static_cast<std::size_t>(2 * j + i)]);
      if (j == 3) CHECK(std::isnan(got));
    }
  }
  CHECK(cache.unchanged());
  store_element(cache.view().v, dtype::f32, 0, 9.0f);
  CHECK_FALSE(cache.unchanged());
}

TEST_CASE("poison is a NaN that no conversion produces") {
  for (const dtype type : {dtype::f32, dtype::f16, dtype::bf16, dtype::e4m3, dtype::e5m2}) {
    std::byte bytes[4];
    poison({bytes, size_of(type)}, type);
    CHECK(is_poison(bytes, type, 0));
    CHECK(std::isnan(load_element(bytes, type, 0)));
    store_element(bytes, type, 0, std::nanf(""));
    CHECK_FALSE(is_poison(bytes, type, 0));
  }
}
