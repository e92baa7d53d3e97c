// SPDX-License-Identifier: Apache-2.0
// The cache calls on planes with codes: elements, scales and tails bit-equal to the oracle on every backend, and
// nothing else touched.
#include <doctest/doctest.h>

#include <array>
#include <bifolio/backend.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "reference/code_oracle.hpp"
#include "support/backends.hpp"
#include "support/coded_pair.hpp"
#include "support/covering.hpp"
#include "support/random.hpp"

namespace {

using namespace bifolio;
using namespace bifolio::test;

constexpr std::array<std::int32_t, 8> head_dims{1, 2, 8, 48, 71, 128, 256, 300};
constexpr std::array<std::int32_t, 4> block_sizes{1, 5, 16, 32};
constexpr std::array<std::int32_t, 3> head_counts{1, 3, 8};

const std::int64_t* slots_at(device_bytes& slots) { return reinterpret_cast<const std::int64_t*>(slots.data()); }

void soften(rows_pair& rows, random_source& random) {
  soften(rows.host_k(), random);
  soften(rows.host_v(), random);
  rows.upload();
}

TEST_CASE("append and gather store codes and scales bit for bit and touch nothing else") {
  std::size_t turn = 0;
  for (std::uint64_t round = 0; round < 2; ++round) {
    const auto cases = pairwise_rows(
        {std::size(all_code_orders), all_codes().size(), all_codes().size(), num_v_kinds, head_dims.size(),
         block_sizes.size(), head_counts.size(), num_tensor_dtypes, std::size(all_row_orders)},
        hash_of(test_seed(), round, 20));
    for (const auto& c : cases) {
      ++turn;
      const coded_shape shape = coded_shape_of(c[1], c[2], c[3], head_counts[c[6]], head_dims[c[4]], block_sizes[c[5]]);
      const kv_layout layout = coded_layout(all_code_orders[c[0]], shape);
      for (const tested_backend* tested : one_per_family(turn)) {
        random_source random(hash_of(test_seed(), turn, 21));
        backend& where = tested->get();
        const std::int64_t num_blocks = random.between(1, 4);
        const std::int64_t num_tokens = random.between(1, 2 * shape.block_size + 5);
        coded_pair cache(where, layout, num_blocks, random);
        const std::int32_t v_dims = shape.v_in_k ? 0 : shape.v_head_dim;
        rows_pair rows(where, all_row_orders[c[8]], tensor_dtypes[c[7]], num_tokens, shape.num_kv_heads,
                       shape.qk_head_dim, v_dims, random);
        soften(rows, random);
        const std::vector<std::int64_t> slots =
            random_slots(random, num_tokens, num_blocks, shape.block_size, tested->is_host);
        device_bytes device_slots = upload_array(where, slots);
        const std::string what = tested->name + " " + text_of_codes(layout) + " rows " +
                                 std::string(to_string(tensor_dtypes[c[7]])) + " case " + std::to_string(turn) + " " +
                                 seed_note();
        CAPTURE(what);
        REQUIRE(where.append({cache.device(), as_const(rows.device_k()), as_const(rows.device_v()),
                              slots_at(device_slots)}) == errc::ok);
        oracle_code_transfer<true>(cache.host(), as_const(rows.host_k()), as_const(rows.host_v()), slots.data());
        REQUIRE(cache.difference() == "");
        REQUIRE(rows.equal());

        rows_pair back(where, all_row_orders[c[8]], tensor_dtypes[c[7]], num_tokens, shape.num_kv_heads,
                       shape.qk_head_dim, v_dims, random);
        REQUIRE(where.gather({cache.device(), back.device_k(), back.device_v(), slots_at(device_slots)}) == errc::ok);
        oracle_code_transfer<false>(cache.host(), back.host_k(), back.host_v(), slots.data());
        REQUIRE(back.equal());
        REQUIRE(cache.equal());
      }
    }
  }
}

// Devices may have a kernel for each row type, code and kind of scale where rows and planes come in packs.
TEST_CASE("append from rows of every type in packs of 16 dims stores every code bit for bit") {
  constexpr code_order orders[] = {code_order::hnd, code_order::nhd, code_order::x_split};
  constexpr std::int32_t packed_dims[] = {128, 16, 64, 48, 256, 512};
  std::size_t turn = 0;
  for (const dtype type : tensor_dtypes) {
    for (std::size_t k = 0; k < all_codes().size(); ++k) {
      for (const bool alike : {true, false}) {
        ++turn;
        const std::size_t v = alike ? k : (k + 1 + turn) % all_codes().size();
        // Tails take heads whose packs are a power of two.
        const std::int32_t dims = packed_dims[turn % 3 + (alike ? 0 : turn % 4)];
        const coded_shape shape = coded_shape_of(k, v, 0, head_counts[turn % head_counts.size()], dims, 16);
        for (const tested_backend* tested : one_per_family(turn)) {
          random_source random(hash_of(test_seed(), turn, 26));
          backend& where = tested->get();
          const kv_layout layout = coded_layout(orders[alike ? turn % 2 : turn % std::size(orders)], shape);
          constexpr std::int64_t num_tokens = 37;
          coded_pair cache(where, layout, 3, random, true);
          rows_pair rows(where, row_order::dense, type, num_tokens, shape.num_kv_heads, dims, dims, random);
          soften(rows, random);
          const std::vector<std::int64_t> slots = random_slots(random, num_tokens, 3, 16, tested->is_host);
          device_bytes device_slots = upload_array(where, slots);
          const std::string what = tested->name + " " + text_of_codes(layout) + " rows " +
                                   std::string(to_string(type)) + " case " + std::to_string(turn) + " " + seed_note();
          CAPTURE(what);
          REQUIRE(where.append({cache.device(), as_const(rows.device_k()), as_const(rows.device_v()),
                                slots_at(device_slots)}) == errc::ok);
          oracle_code_transfer<true>(cache.host(), as_const(rows.host_k()), as_const(rows.host_v()), slots.data());
          REQUIRE(cache.difference() == "");
        }
      }
    }
  }
}

TEST_CASE("blocks convert between all codes and layouts bit for bit") {
  std::size_t turn = 0;
  const auto cases =
      pairwise_rows({std::size(all_code_orders), std::size(all_code_orders), all_codes().size(), all_codes().size(),
                     num_v_kinds, head_dims.size(), block_sizes.size(), head_counts.size()},
                    hash_of(test_seed(), 22));
  for (const auto& c : cases) {
    ++turn;
    for (const tested_backend* tested : one_per_family(turn)) {
      random_source random(hash_of(test_seed(), turn, 23));
      backend& where = tested->get();
      const std::size_t other_v = (c[2] + c[3] + turn) % all_codes().size();
      const coded_shape from_shape =
          coded_shape_of(c[2], other_v, c[4], head_counts[c[7]], head_dims[c[5]], block_sizes[c[6]]);
      const coded_shape to_shape =
          coded_shape_of(c[3], turn % all_codes().size(), c[4], head_counts[c[7]], head_dims[c[5]], block_sizes[c[6]]);
      const std::int64_t num_src = random.between(1, 3);
      const std::int64_t num_dst = random.between(1, 3);
      coded_pair src(where, coded_layout(all_code_orders[c[0]], from_shape), num_src, random);
      coded_pair dst(where, coded_layout(all_code_orders[c[1]], to_shape), num_dst, random);
      const std::string what = tested->name + " from " + text_of_codes(src.layout()) + " to " +
                               text_of_codes(dst.layout()) + " case " + std::to_string(turn) + " " + seed_note();
      CAPTURE(what);
      const auto pairs = random_pairs(random, random.between(0, 4), num_src, num_dst);
      REQUIRE(where.convert_blocks(src.device(), dst.device(), pairs) == errc::ok);
      oracle_move_code_blocks(src.host(), dst.host(), pairs);
      REQUIRE(src.equal());
      REQUIRE(dst.difference() == "");
    }
  }
}

TEST_CASE("blocks of a code with tails change their layout, and every bit of them stays") {
  std::size_t turn = 0;
  for (std::size_t code = 0; code < all_codes().size(); ++code) {
    if (all_codes()[code].tail_floats() == 0) continue;
    for (const tested_backend* tested : one_per_family(++turn)) {
      random_source random(hash_of(test_seed(), turn, 28));
      const coded_shape shape = coded_shape_of(code, code, 0, 2, 48, 4);
      coded_pair src(tested->get(), coded_layout(code_order::hnd, shape), 2, random);
      coded_pair dst(tested->get(), coded_layout(code_order::nhd, shape), 2, random);
      const std::vector<block_copy> pairs{{block_id{0}, block_id{1}}, {block_id{1}, block_id{0}}};
      CAPTURE(tested->name);
      CAPTURE(text_of_codes(src.layout()));
      REQUIRE(tested->get().convert_blocks(src.device(), dst.device(), pairs) == errc::ok);
      oracle_move_code_blocks(src.host(), dst.host(), pairs);
      REQUIRE(dst.difference() == "");
    }
  }
}

TEST_CASE("copies and swaps move elements and tails byte for byte") {
  std::size_t turn = 0;
  const auto cases = pairwise_rows({std::size(all_code_orders), all_codes().size(), all_codes().size(), num_v_kinds,
                                    head_dims.size(), block_sizes.size(), head_counts.size()},
                                   hash_of(test_seed(), 24));
  for (const auto& c : cases) {
    ++turn;
    for (const tested_backend* tested : one_per_family(turn)) {
      random_source random(hash_of(test_seed(), turn, 25));
      backend& where = tested->get();
      const coded_shape shape = coded_shape_of(c[1], c[2], c[3], head_counts[c[6]], head_dims[c[4]], block_sizes[c[5]]);
      const kv_layout layout = coded_layout(all_code_orders[c[0]], shape);
      const std::int64_t num_blocks = random.between(1, 5);
      const std::int64_t num_other = random.between(1, 5);
      coded_pair cache(where, layout, num_blocks, random);
      coded_pair other(where, layout, num_other, random);
      const std::string what =
          tested->name + " " + text_of_codes(layout) + " case " + std::to_string(turn) + " " + seed_note();
      CAPTURE(what);
      const auto copies = random_pairs(random, random.between(0, 8), num_blocks, num_blocks);
      const std::array<kv_cache_view, 1> layer{cache.device()};
      REQUIRE(where.copy_blocks(layer, copies) == errc::ok);
      oracle_copy_code_blocks(cache.host(), cache.host(), copies);
      REQUIRE(cache.difference() == "");
      const auto swaps = random_pairs(random, random.between(0, 4), num_blocks, num_other);
      const std::array<kv_cache_view, 1> to{other.device()};
      REQUIRE(where.swap_blocks(layer, to, swaps) == errc::ok);
      oracle_copy_code_blocks(cache.host(), other.host(), swaps);
      REQUIRE(other.difference() == "");
      REQUIRE(cache.equal());
    }
  }
}

TEST_CASE("a value that is not finite spoils its own token and head alone, and shows in what is read") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (const tested_backend& tested : all_backends()) {
    for (const kv_code& code : all_codes()) {
      if (code.granularity != scale_granularity::token_head) continue;
      for (const float bad : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()}) {
        random_source random(hash_of(test_seed(), 26));
        constexpr std::int32_t heads = 2;
        constexpr std::int32_t dims = 40;
        const kv_layout layout = make_layout(layout_kind::hnd, code, code, heads, dims, dims, 4);
        coded_pair cache(tested.get(), layout, 2, random);
        rows_pair rows(tested.get(), row_order::dense, dtype::f32, 4, heads, dims, dims, random);
        for (const tensor_view& view : {rows.host_k(), rows.host_v()}) {
          for (std::int64_t i = 0; i < 4 * heads * dims; ++i) {
            store_element(view.data, dtype::f32, i, normal_from(random.next()));
          }
        }
        store_element(rows.host_k().data, dtype::f32, row_index(rows.host_k(), 2, 1, 17), bad);
        rows.upload();
        const std::vector<std::int64_t> slots{4, 5, 6, 7};
        device_bytes device_slots = upload_array(tested.get(), slots);
        REQUIRE(tested.get().append({cache.device(), as_const(rows.device_k()), as_const(rows.device_v()),
                                     slots_at(device_slots)}) == errc::ok);
        rows_pair back(tested.get(), row_order::dense, dtype::f32, 4, heads, dims, dims, random);
        REQUIRE(tested.get().gather({cache.device(), back.device_k(), back.device_v(), slots_at(device_slots)}) ==
                errc::ok);
        const std::vector<float> k = back.read_k();
        CAPTURE(tested.name);
        std::int64_t wrong = 0;
        for (std::int64_t t = 0; t < 4; ++t) {
          for (std::int64_t i = 0; i < heads * dims; ++i) {
            const bool spoiled = t == 2 && i / dims == 1;
            wrong += std::isnan(k[static_cast<std::size_t>(t * heads * dims + i)]) != spoiled;
          }
        }
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE("what was stored comes back within the bound of its code") {
  for (const tested_backend& tested : all_backends()) {
    for (const kv_code& code : all_codes()) {
      random_source random(hash_of(test_seed(), 27));
      constexpr std::int32_t dims = 128;
      const kv_layout layout = make_layout(layout_kind::nhd, code, code, 1, dims, dims, 8);
      coded_pair cache(tested.get(), layout, 4, random);
      rows_pair rows(tested.get(), row_order::dense, dtype::f32, 32, 1, dims, dims, random);
      const float static_scale = code.has_static_scales() ? cache.host().k_scales[0] : 1.0f;
      for (const tensor_view& view : {rows.host_k(), rows.host_v()}) {
        for (std::int64_t i = 0; i < 32 * dims; ++i) {
          store_element(view.data, dtype::f32, i, 20.0f * static_scale * normal_from(random.next()));
        }
      }
      rows.upload();
      std::vector<std::int64_t> slots;
      for (std::int64_t i = 0; i < 32; ++i) slots.push_back(i);
      device_bytes device_slots = upload_array(tested.get(), slots);
      REQUIRE(tested.get().append({cache.device(), as_const(rows.device_k()), as_const(rows.device_v()),
                                   slots_at(device_slots)}) == errc::ok);
      rows_pair back(tested.get(), row_order::dense, dtype::f32, 32, 1, dims, dims, random);
      REQUIRE(tested.get().gather({cache.device(), back.device_k(), back.device_v(), slots_at(device_slots)}) ==
              errc::ok);
      const std::vector<float> k = back.read_k();
      std::int64_t outside = 0;
      for (std::int64_t t = 0; t < 32; ++t) {
        float magnitude = 0;
        float least = std::numeric_limits<float>::infinity();
        float most = -least;
        const auto given = [&](std::int64_t d) { return load_element(rows.host_k().data, dtype::f32, t * dims + d); };
        for (std::int64_t d = 0; d < dims; ++d) {
          magnitude = std::fmax(magnitude, std::fabs(given(d)));
          least = std::fmin(least, given(d));
          most = std::fmax(most, given(d));
        }
        const bool own = code.granularity == scale_granularity::token_head;
        const float scale = !own                     ? static_scale
                            : code.type == dtype::u8 ? (most - least) / 255
                            : code.type == dtype::i8 ? magnitude / 127
                                                     : magnitude / 448;
        for (std::int64_t d = 0; d < dims; ++d) {
          const float error = std::fabs(k[static_cast<std::size_t>(t * dims + d)] - given(d));
          const element_facts facts = facts_of(code.type);
          const bool integer = code.type == dtype::i8 || code.type == dtype::u8;
          const float slack = 0x1p-20f * (std::fabs(given(d)) + magnitude);  // of the multiplications
          const float allowed =
              integer ? 0.5f * scale
                      : std::fmax(facts.unit_roundoff * std::fabs(given(d)), scale * facts.smallest_subnormal / 2);
          outside += error > allowed + slack;
        }
      }
      const std::string what = tested.name + " " + to_string(code) + " " + seed_note();
      CAPTURE(what);
      CHECK(outside == 0);
    }
  }
}

}  // namespace
