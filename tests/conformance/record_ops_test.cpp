// SPDX-License-Identifier: Apache-2.0
// Records of latent attention (kv_record): the cache calls against the oracle and against bytes that another program
// made, and what is refused.
#include <doctest/doctest.h>

#include <array>
#include <bifolio/backend.hpp>
#include <bifolio/cache_engine.hpp>
#include <bifolio/error.hpp>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "conformance/records/vectors.hpp"
#include "reference/code_oracle.hpp"
#include "support/backends.hpp"
#include "support/coded_pair.hpp"
#include "support/random.hpp"

namespace {

using namespace bifolio;
using namespace bifolio::test;

constexpr kv_code record{dtype::e4m3, scale_granularity::record};
constexpr code_order orders[] = {code_order::hnd, code_order::nhd, code_order::padded};

coded_shape shape_of(const kv_code& code, std::int32_t heads, std::int32_t block_size) {
  return {code, code, heads, 576, 512, block_size, true};
}

const std::int64_t* slots_at(device_bytes& slots) { return reinterpret_cast<const std::int64_t*>(slots.data()); }

/// The bfloat16 bits of a row of records/make_vectors.py.
std::vector<std::uint16_t> bits_of_row(std::size_t index) {
  constexpr int none = -1;
  constexpr int exponents[][5] = {
      {120, 127, 124, 130, 126}, {96, 140, none, 100, 110}, {127, 128, 129, 126, 135}, {85, 200, 133, 118, 127}};
  std::vector<std::uint16_t> bits(576, 0);
  auto state = static_cast<std::uint32_t>(index + 1);
  for (std::size_t dim = 0; dim < 576; ++dim) {
    state = state * 1664525u + 1013904223u;
    const int exponent = exponents[index][dim / 128];
    if (exponent == none) continue;
    const std::uint32_t stored = static_cast<std::uint32_t>(exponent) - (state >> 24 & 7);
    bits[dim] = static_cast<std::uint16_t>(state >> 31 << 15 | stored << 7 | (state >> 16 & 0x7f));
  }
  if (index == 2) {
    bits[5] = 0x43e0;
    bits[130] = 0x43e1;
  }
  return bits;
}

int byte_of_digits(const char* digits) {
  const auto value = [](char digit) { return digit <= '9' ? digit - '0' : digit - 'a' + 10; };
  return 16 * value(digits[0]) + value(digits[1]);
}

TEST_CASE("records have the bytes of FlashMLA's format, as another program makes them") {
  constexpr std::size_t num_rows = std::size(record_digits);
  for (const tested_backend& tested : all_backends()) {
    for (const dtype type : {dtype::bf16, dtype::f32}) {
      random_source random(hash_of(test_seed(), 90));
      const kv_layout layout = make_layout(layout_kind::hnd, record, record, 1, 576, 512, 64, true);
      coded_pair cache(tested.get(), layout, 1, random);
      rows_pair rows(tested.get(), row_order::dense, type, num_rows, 1, 576, 0, random);
      for (std::size_t row = 0; row < num_rows; ++row) {
        const std::vector<std::uint16_t> bits = bits_of_row(row);
        for (std::size_t dim = 0; dim < bits.size(); ++dim) {
          store_element(rows.host_k().data, type, static_cast<std::int64_t>(576 * row + dim),
                        std::bit_cast<float>(std::uint32_t{bits[dim]} << 16));
        }
      }
      rows.upload();
      std::vector<std::int64_t> slots;
      for (std::size_t row = 0; row < num_rows; ++row) slots.push_back(static_cast<std::int64_t>(17 * row + 1));
      device_bytes device_slots = upload_array(tested.get(), slots);
      REQUIRE(tested.get().append({cache.device(), as_const(rows.device_k()), {}, slots_at(device_slots)}) == errc::ok);
      for (std::size_t row = 0; row < num_rows; ++row) {
        auto* const expected = static_cast<std::uint8_t*>(cache.host().k) + 656 * slots[row];
        for (std::size_t i = 0; i < 656; ++i) {
          expected[i] = static_cast<std::uint8_t>(byte_of_digits(record_digits[row] + 2 * i));
        }
      }
      CAPTURE(tested.name);
      CHECK(cache.difference() == "");
    }
  }
}

TEST_CASE("append, gather, copies, swaps and conversions of records are those of the oracle, bit for bit") {
  std::size_t turn = 0;
  for (const code_order order : orders) {
    for (const std::int32_t block_size : {1, 5, 64}) {
      for (const dtype type : tensor_dtypes) {
        ++turn;
        for (const tested_backend* tested : one_per_family(turn)) {
          random_source random(hash_of(test_seed(), turn, 91));
          backend& where = tested->get();
          const std::int32_t heads = random.one_in(3) ? 2 : 1;
          const kv_layout layout = coded_layout(order, shape_of(record, heads, block_size));
          const std::int64_t num_blocks = random.between(1, 4);
          const std::int64_t num_tokens = random.between(1, 2 * block_size + 5);
          coded_pair cache(where, layout, num_blocks, random);
          rows_pair rows(where, all_row_orders[turn % std::size(all_row_orders)], type, num_tokens, heads, 576, 0,
                         random);
          soften(rows.host_k(), random);
          rows.upload();
          const std::vector<std::int64_t> slots =
              random_slots(random, num_tokens, num_blocks, block_size, tested->is_host);
          device_bytes device_slots = upload_array(where, slots);
          const std::string what = tested->name + " " + text_of_codes(layout) + " rows " +
                                   std::string(to_string(type)) + " case " + std::to_string(turn) + " " + seed_note();
          CAPTURE(what);
          REQUIRE(where.append({cache.device(), as_const(rows.device_k()), {}, slots_at(device_slots)}) == errc::ok);
          oracle_code_transfer<true>(cache.host(), as_const(rows.host_k()), const_tensor_view{}, slots.data());
          REQUIRE(cache.difference() == "");
          rows_pair back(where, row_order::dense, type, num_tokens, heads, 576, 0, random);
          REQUIRE(where.gather({cache.device(), back.device_k(), {}, slots_at(device_slots)}) == errc::ok);
          oracle_code_transfer<false>(cache.host(), back.host_k(), tensor_view{}, slots.data());
          REQUIRE(back.equal());

          const auto copies = random_pairs(random, 5, num_blocks, num_blocks);
          const std::array<kv_cache_view, 1> layer{cache.device()};
          REQUIRE(where.copy_blocks(layer, copies) == errc::ok);
          oracle_copy_code_blocks(cache.host(), cache.host(), copies);
          REQUIRE(cache.difference() == "");
          coded_pair other(where, layout, 3, random);
          const std::array<kv_cache_view, 1> to{other.device()};
          const auto swaps = random_pairs(random, 3, num_blocks, 3);
          REQUIRE(where.swap_blocks(layer, to, swaps) == errc::ok);
          oracle_copy_code_blocks(cache.host(), other.host(), swaps);
          REQUIRE(other.difference() == "");

          // To records of another order, to every other code, and back.
          for (std::size_t code = 0; code <= all_codes().size(); ++code) {
            const bool to_record = code == all_codes().size();
            const kv_layout wide = coded_layout(orders[(turn + code) % std::size(orders)],
                                                shape_of(to_record ? record : all_codes()[code], heads, block_size));
            coded_pair values(where, wide, 2, random);
            CAPTURE(text_of_codes(wide));
            const auto pairs = random_pairs(random, 3, num_blocks, 2);
            REQUIRE(where.convert_blocks(cache.device(), values.device(), pairs) == errc::ok);
            oracle_move_code_blocks(cache.host(), values.host(), pairs);
            REQUIRE(values.difference() == "");
            const auto back_again = random_pairs(random, 3, 2, num_blocks);
            REQUIRE(where.convert_blocks(values.device(), cache.device(), back_again) == errc::ok);
            oracle_move_code_blocks(values.host(), cache.host(), back_again);
            REQUIRE(cache.difference() == "");
          }
        }
      }
    }
  }
}

TEST_CASE("a value that is not finite spoils the 128 dims of its record that share its scale") {
  for (const tested_backend* tested : one_per_family(0)) {
    for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      random_source random(hash_of(test_seed(), 92));
      const kv_layout layout = make_layout(layout_kind::hnd, record, record, 1, 576, 512, 4, true);
      coded_pair cache(tested->get(), layout, 1, random);
      rows_pair rows(tested->get(), row_order::dense, dtype::f32, 3, 1, 576, 0, random);
      for (std::int64_t i = 0; i < std::int64_t{3} * 576; ++i) {
        store_element(rows.host_k().data, dtype::f32, i, normal_from(random.next()));
      }
      store_element(rows.host_k().data, dtype::f32, 576 + 300, bad);
      rows.upload();
      const std::vector<std::int64_t> slots{0, 1, 2};
      device_bytes device_slots = upload_array(tested->get(), slots);
      REQUIRE(tested->get().append({cache.device(), as_const(rows.device_k()), {}, slots_at(device_slots)}) ==
              errc::ok);
      rows_pair back(tested->get(), row_order::dense, dtype::f32, 3, 1, 576, 0, random);
      REQUIRE(tested->get().gather({cache.device(), back.device_k(), {}, slots_at(device_slots)}) == errc::ok);
      const std::vector<float> k = back.read_k();
      std::int64_t wrong = 0;
      for (std::size_t i = 0; i < k.size(); ++i) wrong += std::isnan(k[i]) != (i / 576 == 1 && i % 576 / 128 == 2);
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("what is no record is refused by name") {
  for (const tested_backend* tested : one_per_family(0)) {
    random_source random(hash_of(test_seed(), 93));
    const kv_layout layout = make_layout(layout_kind::hnd, record, record, 1, 576, 512, 4, true);
    coded_pair cache(tested->get(), layout, 2, random);
    rows_pair rows(tested->get(), row_order::dense, dtype::f32, 1, 1, 576, 0, random);
    device_bytes slots = upload_array(tested->get(), std::vector<std::int64_t>{0});
    append_params params{cache.device(), as_const(rows.device_k()), {}, slots_at(slots)};
    const auto sentence = [&] {
      const auto problem = find_problem(params, tested->get().where());
      return problem ? std::string(problem->what()) : std::string();
    };
    CHECK(sentence() == "");
    const auto expect = [&](const char* part) {
      CAPTURE(sentence());
      CHECK(sentence().find(part) != std::string::npos);
      CHECK(tested->get().append(params) == errc::invalid_argument);
      params.kv = cache.device();
    };
    params.kv.layout.k.strides.dim = 2;
    params.kv.layout.v.strides.dim = 2;
    expect("or are not those of records: dim 1, one chunk, multiples of 4");
    params.kv.layout.k.strides.token = params.kv.layout.v.strides.token = 655;
    expect("let elements share a place");
    params.kv.layout.k.strides.token = params.kv.layout.v.strides.token = 658;
    expect("or are not those of records");
    params.kv.layout.v.head_dim = 448;
    expect("of kv a code has scales per record with head dims 576 and 448 and V part of K");
    params.kv.k = static_cast<std::byte*>(params.kv.k) + 2;
    expect("kv.k is not aligned to its scales of 4 bytes");
    CHECK(cache.equal());
  }
}

TEST_CASE("an engine stores records, and one whose records are a plain code refuses to swap with it") {
  for (const tested_backend* tested : one_per_family(1)) {
    cache_engine_config config;
    config.num_layers = 2;
    config.num_blocks = 3;
    config.layout = make_layout(layout_kind::nhd, record, record, 1, 576, 512, 16, true);
    const cache_engine engine(tested->get(), config);
    cache_engine_config plain = config;
    const kv_code e4m3{dtype::e4m3};
    plain.layout = make_layout(layout_kind::nhd, e4m3, e4m3, 1, 576, 512, 16, true);
    const cache_engine other(tested->get(), plain);
    CHECK(engine.fingerprint() != other.fingerprint());
    CHECK(engine.find_difference(other).has_value());
    CHECK(num_blocks_for_memory(std::int64_t{2} * 16 * 656 * 10, config.layout, 2) == 10);
  }
}

}  // namespace
