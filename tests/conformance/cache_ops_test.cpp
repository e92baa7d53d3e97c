// SPDX-License-Identifier: Apache-2.0
// append, gather, copy_blocks, convert_blocks and swap_blocks of every backend against the element-by-element oracle:
// all bytes equal, those that nobody asked to change included.
#include <doctest/doctest.h>

#include <array>
#include <bifolio/backend.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "reference/cache_oracle.hpp"
#include "support/backends.hpp"
#include "support/cache_pair.hpp"
#include "support/covering.hpp"
#include "support/random.hpp"

namespace {

using namespace bifolio;
using namespace bifolio::test;

constexpr auto dtypes = std::to_array(tensor_dtypes);
constexpr std::array<std::int32_t, 8> head_dims{1, 2, 8, 48, 71, 80, 128, 256};
constexpr std::array<std::int32_t, 5> block_sizes{1, 5, 8, 16, 64};
constexpr std::array<std::int32_t, 3> head_counts{1, 3, 8};

/// V next to K: of the same head_dim, of a smaller and a larger one, and as part of K.
enum class v_kind : std::uint8_t { same, smaller, larger, k_itself, part_of_k };
constexpr std::size_t num_v_kinds = 5;

cache_shape shape_of(dtype type, std::int32_t heads, std::int32_t dims, std::int32_t block_size, std::size_t kind) {
  cache_shape shape{type, heads, dims, dims, block_size};
  switch (static_cast<v_kind>(kind)) {
    case v_kind::same:
      break;
    case v_kind::smaller:
      shape.v_head_dim = (2 * dims + 2) / 3;
      break;
    case v_kind::larger:
      shape.v_head_dim = dims + 24;
      break;
    case v_kind::k_itself:
      shape.v_in_k = true;
      break;
    case v_kind::part_of_k:
      shape.v_in_k = true;
      shape.v_head_dim = (dims + 1) / 2;
      break;
  }
  return shape;
}

std::string text_of(const kv_layout& layout, arrangement how) {
  return std::string(to_string(how)) + " " + std::string(to_string(layout.k.code.type)) + " heads " +
         std::to_string(layout.num_kv_heads) + " dims " + std::to_string(layout.k.head_dim) + " and " +
         std::to_string(layout.v.head_dim) + (layout.v_in_k ? " in k" : "") + " block " +
         std::to_string(layout.block_size);
}

errc append_to(backend& where, const kv_cache_view& kv, rows_pair& rows, const device_bytes& slots) {
  auto& mutable_slots = const_cast<device_bytes&>(slots);
  return where.append({kv, as_const(rows.device_k()), as_const(rows.device_v()),
                       reinterpret_cast<const std::int64_t*>(mutable_slots.data())});
}

/// One append and one gather of the same rows, against the oracle.
void check_append_and_gather(const tested_backend& tested, arrangement how, const cache_shape& shape, dtype row_type,
                             row_order order, std::int64_t num_tokens, std::int64_t num_blocks, std::uint64_t seed) {
  random_source random(seed);
  backend& where = tested.get();
  const std::int32_t v_dims = shape.v_in_k ? 0 : shape.v_head_dim;
  cache_pair cache(where, how, shape, num_blocks, random);
  rows_pair rows(where, order, row_type, num_tokens, shape.num_kv_heads, shape.qk_head_dim, v_dims, random);
  const std::string what = tested.name + " " + text_of(cache.layout(), how) + " rows " +
                           std::string(to_string(row_type)) + " order " + std::to_string(static_cast<int>(order)) +
                           " case " + std::to_string(seed) + " " + seed_note();
  CAPTURE(what);

  // Repeated slots are the host's promise alone: a GPU's threads have no order.
  const std::vector<std::int64_t> slots =
      random_slots(random, num_tokens, num_blocks, shape.block_size, tested.is_host);
  device_bytes device_slots = upload_array(where, slots);
  REQUIRE(append_to(where, cache.device(), rows, device_slots) == errc::ok);
  oracle_append(cache.host(), as_const(rows.host_k()), as_const(rows.host_v()), slots.data());
  CHECK(cache.equal());
  CHECK(rows.equal());

  rows_pair back(where, order, row_type, num_tokens, shape.num_kv_heads, shape.qk_head_dim, v_dims, random);
  REQUIRE(where.gather({cache.device(), back.device_k(), back.device_v(),
                        reinterpret_cast<const std::int64_t*>(device_slots.data())}) == errc::ok);
  oracle_gather(cache.host(), back.host_k(), back.host_v(), slots.data());
  CHECK(back.equal());
  CHECK(cache.equal());
}

TEST_CASE("append and gather move every element bit for bit and touch nothing else") {
  std::size_t turn = 0;
  for (std::uint64_t round = 0; round < 4; ++round) {
    const auto rows = pairwise_rows({std::size(all_arrangements), dtypes.size(), dtypes.size(), head_dims.size(),
                                     block_sizes.size(), head_counts.size(), std::size(all_row_orders), num_v_kinds},
                                    hash_of(test_seed(), round));
    for (const auto& row : rows) {
      ++turn;
      for (const tested_backend* tested : one_per_family(turn)) {
        random_source shape(hash_of(test_seed(), turn));
        const std::int32_t block_size = block_sizes[row[4]];
        check_append_and_gather(*tested, all_arrangements[row[0]],
                                shape_of(dtypes[row[1]], head_counts[row[5]], head_dims[row[3]], block_size, row[7]),
                                dtypes[row[2]], all_row_orders[row[6]], shape.between(1, 2 * block_size + 5),
                                shape.between(1, 5), hash_of(test_seed(), turn, 1));
      }
    }
  }
}

TEST_CASE("work that is shared out to many workers gives the same bytes as one worker") {
  std::uint64_t turn = 0;
  for (const tested_backend& tested : all_backends()) {
    for (const arrangement how : {arrangement::hnd, arrangement::x_split, arrangement::block_major}) {
      for (const dtype cache_type : dtypes) {
        ++turn;
        // 400 tokens of 8 heads of 64 dims: more than a megabyte goes through, several workers' worth.
        check_append_and_gather(tested, how, shape_of(cache_type, 8, 64, 16, turn % num_v_kinds),
                                dtypes[turn % dtypes.size()], row_order::fused, 400, 12, hash_of(test_seed(), turn, 2));
      }
    }
  }
}

TEST_CASE("copying a list of pairs gives what doing them one after another gives, chains and self-copies included") {
  std::uint64_t turn = 0;
  const auto rows = pairwise_rows({std::size(all_arrangements), dtypes.size(), head_dims.size(), block_sizes.size(),
                                   head_counts.size(), all_backends().size(), num_v_kinds},
                                  test_seed());
  for (const auto& row : rows) {
    const tested_backend& tested = all_backends()[row[5]];
    random_source random(hash_of(test_seed(), ++turn, 3));
    const std::int64_t num_blocks = random.between(1, 7);
    auto layers =
        make_layers(tested.get(), all_arrangements[row[0]],
                    shape_of(dtypes[row[1]], head_counts[row[4]], head_dims[row[2]], block_sizes[row[3]], row[6]),
                    num_blocks, static_cast<std::size_t>(random.between(1, 3)), random);
    const std::string what = tested.name + " " + text_of(layers[0].layout(), all_arrangements[row[0]]) + " case " +
                             std::to_string(turn) + " " + seed_note();
    CAPTURE(what);
    const auto pairs = random_pairs(random, random.between(0, 12), num_blocks, num_blocks);
    REQUIRE(tested.get().copy_blocks(device_views(layers), pairs) == errc::ok);
    for (cache_pair& layer : layers) {
      oracle_move_blocks(layer.host(), layer.host(), pairs);
      CHECK(layer.equal());
    }
  }
}

TEST_CASE("a chain through all blocks copies in order when it is shared out to many workers") {
  for (const tested_backend& tested : all_backends()) {
    for (const arrangement how : {arrangement::hnd, arrangement::block_major, arrangement::scattered}) {
      for (const std::size_t num_layers : {std::size_t{1}, std::size_t{5}}) {
        random_source random(hash_of(test_seed(), num_layers, 4));
        constexpr std::int32_t num_blocks = 30;
        auto layers = make_layers(tested.get(), how, dtype::f32, 4, 64, 16, num_blocks, num_layers, random);
        std::vector<block_copy> chain;  // 0 → 1 → 2 …: all blocks become block 0
        for (std::int32_t i = 0; i + 1 < num_blocks; ++i) chain.push_back({block_id{i}, block_id{i + 1}});
        REQUIRE(tested.get().copy_blocks(device_views(layers), chain) == errc::ok);
        CAPTURE(tested.name);
        for (cache_pair& layer : layers) {
          oracle_move_blocks(layer.host(), layer.host(), chain);
          CHECK(layer.equal());
        }
      }
    }
  }
}

TEST_CASE("blocks convert between all layouts and dtypes bit for bit") {
  std::uint64_t turn = 0;
  for (std::uint64_t round = 0; round < 3; ++round) {
    const auto rows =
        pairwise_rows({std::size(all_arrangements), std::size(all_arrangements), dtypes.size(), dtypes.size(),
                       head_dims.size(), block_sizes.size(), head_counts.size(), num_v_kinds},
                      hash_of(test_seed(), round, 5));
    for (const auto& row : rows) {
      ++turn;
      for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(turn))) {
        random_source random(hash_of(test_seed(), turn, 6));
        const std::int64_t num_src = random.between(1, 4);
        const std::int64_t num_dst = random.between(1, 6);
        cache_shape shape =
            shape_of(dtypes[row[2]], head_counts[row[6]], head_dims[row[4]], block_sizes[row[5]], row[7]);
        cache_pair src(tested->get(), all_arrangements[row[0]], shape, num_src, random);
        shape.type = dtypes[row[3]];
        cache_pair dst(tested->get(), all_arrangements[row[1]], shape, num_dst, random);
        const std::string what = tested->name + " from " + text_of(src.layout(), all_arrangements[row[0]]) + " to " +
                                 text_of(dst.layout(), all_arrangements[row[1]]) + " case " + std::to_string(turn) +
                                 " " + seed_note();
        CAPTURE(what);
        const auto pairs = random_pairs(random, random.between(0, 5), num_src, num_dst);
        REQUIRE(tested->get().convert_blocks(src.device(), dst.device(), pairs) == errc::ok);
        oracle_move_blocks(src.host(), dst.host(), pairs);
        CHECK(src.equal());
        CHECK(dst.equal());
      }
    }
  }
}

TEST_CASE("chunks of two layouts that do not nest convert as well") {
  // 12 dims in chunks of 4 on one side and of 6 on the other.
  for (const tested_backend& tested : all_backends()) {
    random_source random(hash_of(test_seed(), 7));
    constexpr std::int32_t heads = 2;
    constexpr std::int32_t dims = 12;
    constexpr std::int32_t tokens = 3;
    const auto split = [&](dtype type, std::int32_t chunk) {
      kv_layout layout = make_layout(layout_kind::hnd, type, heads, dims, tokens);
      layout.kind = layout_kind::strided;
      layout.k.strides = {.block = heads * dims * tokens,
                          .head = dims * tokens,
                          .token = chunk,
                          .dim = 1,
                          .chunk_stride = tokens * chunk,
                          .chunk = chunk};
      layout.v = layout.k;
      return layout;
    };
    constexpr std::int64_t num_blocks = 3;
    const kv_layout src_layout = split(dtype::f32, 4);
    const kv_layout dst_layout = split(dtype::bf16, 6);
    const std::int64_t half = num_blocks * src_layout.block_elements(src_layout.k);
    std::vector<std::byte> src_host = hard_elements(random, dtype::f32, 2 * half);
    std::vector<std::byte> dst_host = hard_elements(random, dtype::bf16, 2 * half);
    device_bytes src(tested.get(), src_host, 4);
    device_bytes dst(tested.get(), dst_host, 2);
    const auto view = [&](std::byte* base, const kv_layout& layout) {
      return kv_cache_view{base, base + half * static_cast<std::int64_t>(size_of(layout.k.code.type)), num_blocks,
                           layout};
    };
    const auto pairs = random_pairs(random, 4, num_blocks, num_blocks);
    REQUIRE(tested.get().convert_blocks(view(src.data(), src_layout), view(dst.data(), dst_layout), pairs) == errc::ok);
    oracle_move_blocks(view(src_host.data(), src_layout), view(dst_host.data(), dst_layout), pairs);
    CAPTURE(tested.name);
    CHECK(dst.read() == dst_host);
  }
}

TEST_CASE("swapping moves blocks byte for byte between caches of one layout, layer by layer") {
  std::uint64_t turn = 0;
  const auto rows = pairwise_rows({std::size(all_arrangements), dtypes.size(), head_dims.size(), block_sizes.size(),
                                   head_counts.size(), all_backends().size(), num_v_kinds},
                                  hash_of(test_seed(), 8));
  for (const auto& row : rows) {
    const tested_backend& tested = all_backends()[row[5]];
    random_source random(hash_of(test_seed(), ++turn, 9));
    const std::int64_t num_src = random.between(1, 6);
    const std::int64_t num_dst = random.between(1, 6);
    const auto num_layers = static_cast<std::size_t>(random.between(1, 3));
    const cache_shape shape =
        shape_of(dtypes[row[1]], head_counts[row[4]], head_dims[row[2]], block_sizes[row[3]], row[6]);
    auto src = make_layers(tested.get(), all_arrangements[row[0]], shape, num_src, num_layers, random);
    auto dst = make_layers(tested.get(), all_arrangements[row[0]], shape, num_dst, num_layers, random);
    const std::string what = tested.name + " " + text_of(src[0].layout(), all_arrangements[row[0]]) + " case " +
                             std::to_string(turn) + " " + seed_note();
    CAPTURE(what);
    const auto pairs = random_pairs(random, random.between(0, 8), num_src, num_dst);
    REQUIRE(tested.get().swap_blocks(device_views(src), device_views(dst), pairs) == errc::ok);
    for (std::size_t i = 0; i < num_layers; ++i) {
      oracle_move_blocks(src[i].host(), dst[i].host(), pairs);
      CHECK(src[i].equal());
      CHECK(dst[i].equal());
    }
  }
}

TEST_CASE("swapping and converting much at once gives the same bytes on many workers") {
  for (const tested_backend& tested : all_backends()) {
    random_source random(hash_of(test_seed(), 10));
    auto src = make_layers(tested.get(), arrangement::hnd, dtype::f32, 4, 64, 16, 20, 3, random);
    auto dst = make_layers(tested.get(), arrangement::hnd, dtype::f32, 4, 64, 16, 25, 3, random);
    cache_pair converted(tested.get(), arrangement::x_split, dtype::f16, 4, 64, 16, 25, random);
    // On the host a destination that comes twice keeps the later one; a GPU does not promise it.
    std::vector<block_copy> pairs = random_pairs(random, 40, 20, 25);
    if (!tested.is_host) {
      pairs.clear();
      for (std::int32_t i = 0; i < 20; ++i) pairs.push_back({block_id{i}, block_id{24 - i}});
    }
    CAPTURE(tested.name);
    REQUIRE(tested.get().swap_blocks(device_views(src), device_views(dst), pairs) == errc::ok);
    for (std::size_t i = 0; i < src.size(); ++i) {
      oracle_move_blocks(src[i].host(), dst[i].host(), pairs);
      CHECK(dst[i].equal());
    }
    REQUIRE(tested.get().convert_blocks(src[0].device(), converted.device(), pairs) == errc::ok);
    oracle_move_blocks(src[0].host(), converted.host(), pairs);
    CHECK(converted.equal());
  }
}

TEST_CASE("layers of a block side by side in one buffer copy and swap without touching one another") {
  // [num_blocks][num_layers][K, V][block]: block-major. Every layer is a view into the same buffer.
  for (const tested_backend& tested : all_backends()) {
    random_source random(hash_of(test_seed(), 11));
    constexpr std::int64_t num_layers = 3;
    constexpr std::int64_t num_blocks = 4;
    kv_layout layout = make_layout(layout_kind::hnd, dtype::bf16, 2, 16, 4);
    const std::int64_t block = layout.block_elements(layout.k);
    layout.kind = layout_kind::strided;
    layout.k.strides.block = layout.v.strides.block = 2 * num_layers * block;
    const auto make_views = [&](std::byte* base) {
      std::vector<kv_cache_view> views;
      for (std::int64_t l = 0; l < num_layers; ++l) {
        views.push_back({base + 2 * (2 * l * block), base + 2 * ((2 * l + 1) * block), num_blocks, layout});
      }
      return views;
    };
    std::vector<std::byte> a_host = hard_elements(random, dtype::bf16, num_blocks * layout.k.strides.block);
    std::vector<std::byte> b_host = hard_elements(random, dtype::bf16, num_blocks * layout.k.strides.block);
    device_bytes a(tested.get(), a_host, 2);
    device_bytes b(tested.get(), b_host, 2);
    const auto pairs = random_pairs(random, 6, num_blocks, num_blocks);
    CAPTURE(tested.name);
    REQUIRE(tested.get().copy_blocks(make_views(a.data()), pairs) == errc::ok);
    for (const kv_cache_view& view : make_views(a_host.data())) oracle_move_blocks(view, view, pairs);
    CHECK(a.read() == a_host);

    REQUIRE(tested.get().swap_blocks(make_views(a.data()), make_views(b.data()), pairs) == errc::ok);
    for (std::size_t l = 0; l < num_layers; ++l) {
      oracle_move_blocks(make_views(a_host.data())[l], make_views(b_host.data())[l], pairs);
    }
    CHECK(a.read() == a_host);
    CHECK(b.read() == b_host);
  }
}

TEST_CASE("block-major blocks swap with a cache whose blocks are alike inside and are elsewhere") {
  for (const tested_backend& tested : all_backends()) {
    random_source random(hash_of(test_seed(), 12));
    cache_pair major(tested.get(), arrangement::block_major, dtype::f16, 3, 20, 5, 4, random);
    cache_pair plain(tested.get(), arrangement::hnd, dtype::f16, 3, 20, 5, 6, random);
    const auto pairs = random_pairs(random, 5, 4, 6);
    const std::array<kv_cache_view, 1> from{major.device()};
    const std::array<kv_cache_view, 1> to{plain.device()};
    REQUIRE(tested.get().swap_blocks(from, to, pairs) == errc::ok);
    oracle_move_blocks(major.host(), plain.host(), pairs);
    CAPTURE(tested.name);
    CHECK(plain.equal());
    CHECK(major.equal());
  }
}

TEST_CASE("random rounds of all calls on one cache stay equal to the oracle") {
  for (const tested_backend& tested : all_backends()) {
    random_source random(hash_of(test_seed(), 13));
    MESSAGE(tested.name << ": " << seed_note());
    for (int world = 0; world < 6; ++world) {
      const arrangement how = random.pick(all_arrangements);
      const arrangement other_how = random.pick(all_arrangements);
      const std::int32_t dims = random.pick(head_dims);
      const std::int32_t heads = random.pick(head_counts);
      const std::int32_t block_size = random.pick(block_sizes);
      const std::int64_t num_blocks = random.between(2, 6);
      cache_pair cache(tested.get(), how, random.pick(dtypes), heads, dims, block_size, num_blocks, random);
      cache_pair other(tested.get(), other_how, random.pick(dtypes), heads, dims, block_size, num_blocks, random);
      const std::string what = text_of(cache.layout(), how) + " and " + text_of(other.layout(), other_how);
      CAPTURE(what);
      for (int round = 0; round < 12; ++round) {
        switch (random.between(0, 3)) {
          case 0: {
            const std::int64_t num_tokens = random.between(0, 20);
            rows_pair rows(tested.get(), random.pick(all_row_orders), random.pick(dtypes), num_tokens, heads, dims,
                           random);
            const auto slots = random_slots(random, num_tokens, num_blocks, block_size, tested.is_host);
            const device_bytes device_slots = upload_array(tested.get(), slots);
            REQUIRE(append_to(tested.get(), cache.device(), rows, device_slots) == errc::ok);
            oracle_append(cache.host(), as_const(rows.host_k()), as_const(rows.host_v()), slots.data());
            break;
          }
          case 1: {
            const auto pairs = random_pairs(random, random.between(0, 6), num_blocks, num_blocks);
            const std::array<kv_cache_view, 1> layer{cache.device()};
            REQUIRE(tested.get().copy_blocks(layer, pairs) == errc::ok);
            oracle_move_blocks(cache.host(), cache.host(), pairs);
            break;
          }
          case 2: {
            const auto pairs = random_pairs(random, 1, num_blocks, num_blocks);
            REQUIRE(tested.get().convert_blocks(cache.device(), other.device(), pairs) == errc::ok);
            oracle_move_blocks(cache.host(), other.host(), pairs);
            break;
          }
          default: {
            const auto pairs = random_pairs(random, 1, num_blocks, num_blocks);
            REQUIRE(tested.get().convert_blocks(other.device(), cache.device(), pairs) == errc::ok);
            oracle_move_blocks(other.host(), cache.host(), pairs);
            break;
          }
        }
        REQUIRE(cache.equal());
        REQUIRE(other.equal());
      }
    }
  }
}

}  // namespace
