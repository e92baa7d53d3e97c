// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/cache_engine.hpp>
#include <bifolio/error.hpp>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "reference/cache_oracle.hpp"
#include "support/pretended_device.hpp"
#include "support/random.hpp"

namespace {

using namespace bifolio;
using namespace bifolio::test;

constexpr std::int32_t most32 = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();

cache_engine_config config_of(std::int32_t layers, std::int64_t blocks, layout_kind kind = layout_kind::hnd,
                              dtype type = dtype::f16, std::int32_t heads = 2, std::int32_t dims = 16,
                              std::int32_t block_size = 4) {
  return {layers, blocks, make_layout(kind, type, heads, dims, block_size)};
}

/// The sentence of the refusal, or "accepted". The code must be `expected`.
std::string refusal(errc expected, const std::function<void()>& call) {
  try {
    call();
  } catch (const error& problem) {
    CHECK(problem.code() == expected);
    return problem.what();
  }
  return "accepted";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void fill(cache_engine& engine, std::uint64_t seed) {
  for (std::size_t l = 0; l < engine.layers().size(); ++l) {
    const kv_cache_view& layer = engine.layers()[l];
    const auto bytes = static_cast<std::size_t>(layer.num_blocks * layer.layout.block_bytes());
    for (std::size_t i = 0; i < bytes; ++i)
      static_cast<unsigned char*>(layer.k)[i] = static_cast<unsigned char>(hash_of(seed, l, i));
  }
}

std::vector<std::vector<std::byte>> bytes_of(const cache_engine& engine) {
  std::vector<std::vector<std::byte>> all;
  for (const kv_cache_view& layer : engine.layers()) {
    const auto* first = static_cast<const std::byte*>(layer.k);
    all.emplace_back(first, first + layer.num_blocks * layer.layout.block_bytes());
  }
  return all;
}

/// The layer as the oracle reads it, over a copy of its bytes.
kv_cache_view over(std::vector<std::byte>& bytes, const kv_cache_view& like) {
  kv_cache_view view = like;
  view.k = bytes.data();
  view.v = bytes.data() + bytes.size() / 2;
  return view;
}

TEST_CASE("an engine holds one buffer a layer, the K plane before the V plane, in the config's layout") {
  const auto where = make_backend();
  counting_memory_resource memory(default_host_memory());
  {
    const cache_engine_config config = config_of(3, 10, layout_kind::nhd, dtype::bf16);
    const cache_engine engine(*where, config, &memory);
    const std::int64_t layer_bytes = 10 * config.layout.block_bytes();
    CHECK(memory.num_live() == 3);
    CHECK(memory.live_bytes() == 3 * layer_bytes);
    CHECK(engine.num_bytes() == static_cast<std::size_t>(3 * layer_bytes));
    REQUIRE(engine.layers().size() == 3);
    for (const kv_cache_view& layer : engine.layers()) {
      CHECK(static_cast<std::byte*>(layer.v) - static_cast<std::byte*>(layer.k) == layer_bytes / 2);
      CHECK(reinterpret_cast<std::uintptr_t>(layer.k) % 64 == 0);
      CHECK(layer.num_blocks == 10);
      CHECK(layer.layout == config.layout);
    }
    CHECK(&engine.where() == where.get());
    CHECK(engine.config().num_layers == 3);
  }
  CHECK(memory.num_live() == 0);
}

TEST_CASE("impossible configurations are refused with the value and the allowed ones, and nothing is allocated") {
  const auto where = make_backend();
  counting_memory_resource memory(default_host_memory());
  const auto sentence = [&](const cache_engine_config& config) {
    return refusal(errc::invalid_argument, [&] { const cache_engine engine(*where, config, &memory); });
  };
  for (const std::int32_t bad : {0, -1, std::numeric_limits<std::int32_t>::min()}) {
    CHECK(has(sentence(config_of(bad, 10)), "num_layers is " + std::to_string(bad) + "; it must be at least 1"));
  }
  for (const std::int64_t bad : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{2147480001}, most, -most - 1}) {
    CHECK(has(sentence(config_of(1, bad)), "num_blocks is " + std::to_string(bad) + "; it must be 1 to 2147480000"));
  }
  cache_engine_config config = config_of(1, 10);
  config.layout.num_kv_heads = 0;
  CHECK(has(sentence(config), "layout.num_kv_heads is 0"));
  config = config_of(1, 10);
  config.layout.k.head_dim = -4;
  CHECK(has(sentence(config), "layout.k.head_dim is -4"));
  config = config_of(1, 10);
  config.layout.block_size = 0;
  CHECK(has(sentence(config), "layout.block_size is 0"));
  config = config_of(1, 10);
  config.layout.k.code.type = static_cast<dtype>(77);
  CHECK(has(sentence(config), "layout.k.code.type is 77"));
  config = config_of(1, 10);
  config.layout.k.strides.head += 1;
  CHECK(has(sentence(config), "not those of make_layout"));
  CHECK(has(sentence({1, 10, kv_layout{}}), "layout.num_kv_heads is 0"));

  // 2^40 bytes a block and many of them.
  config = {most32, 2147480000, make_layout(layout_kind::hnd, dtype::f16, 1 << 18, 1 << 10, 1 << 10)};
  CHECK(has(sentence(config), "the largest allowed value is 4611686018427387904"));
  config = {1, std::int64_t{1} << 23, config.layout};
  CHECK(has(sentence(config), "(num_layers * num_blocks * bytes per block) is 1 * 8388608 * 1099511627776"));
  CHECK(memory.num_allocations() == 0);
}

TEST_CASE("a strided layout is taken when it stays within a layer and nests, and refused when not") {
  const auto where = make_backend();
  counting_memory_resource memory(default_host_memory());
  cache_engine_config config = config_of(2, 5, layout_kind::hnd, dtype::f32, 2, 8, 4);
  config.layout.kind = layout_kind::strided;
  // Blocks fastest: [num_kv_heads, block_size, num_blocks, head_dim].
  config.layout.k.strides = {.block = 8, .head = 4 * 5 * 8, .token = 5 * 8, .dim = 1, .chunk_stride = 8, .chunk = 8};
  config.layout.v = config.layout.k;
  {
    cache_engine engine(*where, config, &memory);
    fill(engine, 1);
    auto expected = bytes_of(engine);
    const std::vector<block_copy> pairs{{block_id{4}, block_id{0}}, {block_id{0}, block_id{2}}};
    REQUIRE(engine.copy_blocks(pairs) == errc::ok);
    for (std::size_t l = 0; l < expected.size(); ++l) {
      const kv_cache_view view = over(expected[l], engine.layers()[l]);
      oracle_move_blocks(view, view, pairs);
    }
    CHECK(bytes_of(engine) == expected);
  }
  const std::int64_t before = memory.num_allocations();
  const auto sentence = [&](const cache_engine_config& bad) {
    return refusal(errc::invalid_argument, [&] { const cache_engine engine(*where, bad, &memory); });
  };
  cache_engine_config bad = config;
  bad.layout.k.strides.head += 1;
  CHECK(has(sentence(bad), "reaches 321 elements"));
  bad = config;
  bad.layout.v.strides.token = 7;
  CHECK(has(sentence(bad), "do not nest"));
  bad = config;
  bad.layout.v.strides.chunk = 0;
  CHECK(has(sentence(bad), "do not nest"));
  bad = config;
  bad.layout.k.strides.block = most;
  CHECK(has(sentence(bad), "do not nest"));
  CHECK(memory.num_allocations() == before);
}

TEST_CASE("an engine whose V is part of K holds K alone, and moves it") {
  const auto where = make_backend();
  const kv_layout layout = make_layout(layout_kind::hnd, {dtype::bf16}, {dtype::bf16}, 1, 24, 16, 4, true);
  constexpr std::int64_t block_bytes = 24 * 4 * 2;
  CHECK(num_blocks_for_memory(10 * 3 * block_bytes, layout, 3) == 10);
  CHECK(num_blocks_for_memory(10 * 3 * block_bytes - 1, layout, 3) == 9);
  cache_engine engine(*where, {3, 10, layout});
  cache_engine other(*where, {3, 4, layout});
  CHECK(engine.num_bytes() == 3 * 10 * block_bytes);
  for (const kv_cache_view& layer : engine.layers()) CHECK(layer.v == layer.k);
  fill(engine, 1);
  fill(other, 2);
  auto expected = bytes_of(other);
  const auto source = bytes_of(engine);
  const std::vector<block_copy> pairs{{block_id{9}, block_id{0}}, {block_id{2}, block_id{3}}};
  REQUIRE(engine.swap_blocks_to(other, pairs) == errc::ok);
  for (std::size_t l = 0; l < expected.size(); ++l) {
    for (const block_copy& pair : pairs) {
      std::memcpy(expected[l].data() + to_index(pair.dst) * block_bytes,
                  source[l].data() + to_index(pair.src) * block_bytes, block_bytes);
    }
  }
  CHECK(bytes_of(other) == expected);
  CHECK(bytes_of(engine) == source);

  // Rows of k alone, and back.
  const std::vector<float> k(2 * 24, 1.5f);
  std::vector<float> back(k.size());
  const std::vector<std::int64_t> slots{5, 17};
  const auto rows = dense_view<const void>(k.data(), dtype::f32, 2, 1, 24);
  REQUIRE(engine.append(1, rows, {}, slots.data()) == errc::ok);
  gather_params gather{engine.layers()[1], dense_view<void>(back.data(), dtype::f32, 2, 1, 24), {}, slots.data()};
  REQUIRE(where->gather(gather) == errc::ok);
  CHECK(back == k);

  const kv_layout apart = make_layout(layout_kind::hnd, {dtype::bf16}, {dtype::bf16}, 1, 24, 16, 4);
  cache_engine with_v(*where, {3, 4, apart});
  CHECK(with_v.num_bytes() == 3 * 4 * (24 + 16) * 4 * 2);
  CHECK(engine.swap_blocks_to(with_v, pairs) == errc::failed_precondition);
  CHECK(engine.convert_blocks_to(with_v, pairs) == errc::failed_precondition);
}

TEST_CASE("an engine refuses codes that are not implemented, and V in K with strides of its own, by name") {
  const auto where = make_backend();
  counting_memory_resource memory(default_host_memory());
  const auto sentence = [&](errc code, const kv_layout& layout) {
    return refusal(code, [&] { const cache_engine engine(*where, {1, 4, layout}, &memory); });
  };
  for (const layout_kind kind : {layout_kind::hnd, layout_kind::strided}) {
    kv_layout layout = make_layout(layout_kind::hnd, dtype::f16, 2, 8, 4);
    layout.kind = kind;
    layout.k.code.granularity = scale_granularity::token_head;
    CHECK(has(sentence(errc::unsupported, layout),
              "code 'f16, scale per token_head (f32)' of the K plane is not supported"));
    layout.k.code = {dtype::f16};
    layout.v.code = {dtype::i8};
    CHECK(has(sentence(errc::unsupported, layout), "code 'i8' of the V plane is not supported"));
  }
  kv_layout layout = make_layout(layout_kind::hnd, {dtype::f16}, {dtype::f16}, 2, 8, 4, 4, true);
  layout.kind = layout_kind::strided;
  layout.v.strides.token += 1;
  CHECK(has(sentence(errc::invalid_argument, layout), "strides of V that are not those of K"));
  CHECK(memory.num_allocations() == 0);
}

TEST_CASE("static scales are checked, copied to the device and part of an engine's fingerprint") {
  const auto where = make_backend();
  counting_memory_resource memory(default_host_memory());
  const kv_code per_layer{dtype::e4m3, scale_granularity::layer};
  const kv_code per_head{dtype::i8, scale_granularity::head};
  const kv_layout layout = make_layout(layout_kind::hnd, per_layer, per_head, 2, 8, 8, 4);
  const auto config_with = [&](std::vector<float> k, std::vector<float> v) {
    return cache_engine_config{.num_layers = 3, .num_blocks = 4, .layout = layout, .k_scales = k, .v_scales = v};
  };
  const std::vector<float> k{0.5f, 1.0f, 2.0f};
  const std::vector<float> v{1, 2, 3, 4, 5, 6};
  const auto sentence = [&](const std::vector<float>& bad_k, const std::vector<float>& bad_v) {
    return refusal(errc::invalid_argument,
                   [&] { const cache_engine engine(*where, config_with(bad_k, bad_v), &memory); });
  };
  constexpr float infinity = std::numeric_limits<float>::infinity();
  CHECK(has(sentence({}, v), "k_scales holds 0 numbers; it must hold 3: 1 for each of 3 layers"));
  CHECK(has(sentence({1, 1}, v), "k_scales holds 2 numbers"));
  CHECK(has(sentence(k, {1, 2, 3}), "v_scales holds 3 numbers; it must hold 6: 2 for each of 3 layers"));
  CHECK(has(sentence({0.5f, 0.0f, 1.0f}, v), "k_scales[1] is 0; a scale must be finite and from 2^-100 to 2^100"));
  CHECK(has(sentence({0.5f, 1.0f, -2.0f}, v), "k_scales[2] is -2; a scale must be finite"));
  CHECK(has(sentence({infinity, 1.0f, 1.0f}, v), "k_scales[0] is inf; a scale must be finite"));
  CHECK(has(sentence(k, {1, 2, 3, std::nanf(""), 5, 6}), "v_scales[3] is nan; a scale must be finite"));
  CHECK(has(sentence({0x1p-101f, 1.0f, 1.0f}, v), "k_scales[0] is 3.9"));
  CHECK(has(refusal(errc::invalid_argument,
                    [&] {
                      const cache_engine engine(
                          *where, {.num_layers = 1, .num_blocks = 4, .layout = config_of(1, 4).layout, .k_scales = {1}},
                          &memory);
                    }),
            "k_scales holds 1 numbers; it must hold 0"));
  CHECK(memory.num_allocations() == 0);

  cache_engine engine(*where, config_with(k, v));
  REQUIRE(engine.layers().size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(*engine.layers()[i].k_scales == k[i]);
    CHECK(engine.layers()[i].v_scales[0] == v[2 * i]);
    CHECK(engine.layers()[i].v_scales[1] == v[2 * i + 1]);
  }
  CHECK(engine.num_bytes() == static_cast<std::size_t>(3 * 4 * layout.block_bytes()) + 9 * sizeof(float));

  cache_engine same(*where, config_with(k, v));
  cache_engine other(*where, config_with(k, {1, 2, 3, 4, 5, 7}));
  CHECK(engine.fingerprint() == same.fingerprint());
  CHECK(engine.fingerprint() != other.fingerprint());
  CHECK(!engine.find_difference(same));
  const std::vector<block_copy> pairs{{block_id{0}, block_id{1}}};
  CHECK(engine.swap_blocks_to(same, pairs) == errc::ok);
  CHECK(engine.swap_blocks_to(other, pairs) == errc::failed_precondition);
  CHECK(engine.convert_blocks_to(other, pairs) == errc::ok);
  REQUIRE(engine.find_difference(other));
  CHECK(has(engine.find_difference(other)->what(), "the engines differ in v_scales[5]: 6 and 7"));
  cache_engine_config changed = config_with(k, {});
  changed.layout = make_layout(layout_kind::hnd, per_layer, {dtype::i8, scale_granularity::token_head}, 2, 8, 8, 4);
  cache_engine by_token(*where, changed);
  CHECK(by_token.fingerprint() != engine.fingerprint());
  CHECK(engine.swap_blocks_to(by_token, pairs) == errc::failed_precondition);
  CHECK(has(engine.find_difference(by_token)->what(),
            "the engines differ in the code of V: i8, scale per head (f32) and i8, scale per token_head (f32)"));
}

TEST_CASE("V starts on a line of its own where planes differ in element size, and memory for tails is counted") {
  const auto where = make_backend();
  const kv_layout layout = make_layout(layout_kind::hnd, {dtype::e4m3}, {dtype::f32}, 1, 5, 3, 3);
  cache_engine engine(*where, {3, 7, layout});
  const auto* const k = static_cast<const std::byte*>(engine.layers()[0].k);
  CHECK(static_cast<const std::byte*>(engine.layers()[0].v) - k == 128);  // 7 blocks of 15 bytes
  CHECK(engine.num_bytes() == 3 * (128 + 7 * 36));
  CHECK(num_blocks_for_memory(3 * (15 + 36) * 7, layout, 3) < 7);
  CHECK(num_blocks_for_memory(3 * (15 + 36) * 7 + 3 * 127, layout, 3) == 7);

  const kv_code token{dtype::i8, scale_granularity::token_head};
  const kv_layout tails = make_layout(layout_kind::hnd, token, token, 8, 128, 128, 16);
  CHECK(tails.block_bytes() == 2 * (16 * 8 * 128 + 16 * 8 * 4));
  CHECK(num_blocks_for_memory(std::int64_t{1} << 30, tails, 4) == ((std::int64_t{1} << 30) - 4 * 127) / (4 * 33792));
}

TEST_CASE("a backend that only uploads clears in pieces, and no byte more") {
  pretended_device where;
  constexpr std::size_t num_bytes = 3 * (1 << 16) + 100;
  std::vector<std::byte> memory(num_bytes + 4096, std::byte{7});
  REQUIRE(where.clear(memory.data(), num_bytes, {}) == errc::ok);
  CHECK(std::all_of(memory.begin(), memory.begin() + num_bytes, [](std::byte b) { return b == std::byte{0}; }));
  CHECK(std::all_of(memory.begin() + num_bytes, memory.end(), [](std::byte b) { return b == std::byte{7}; }));
  CHECK(where.num_uploads() == 4);
}

TEST_CASE("memory of another device than the backend's is refused") {
  const auto where = make_backend();
  pretended_device_memory elsewhere(default_host_memory());
  const std::string sentence =
      refusal(errc::invalid_argument, [&] { const cache_engine engine(*where, config_of(1, 4), &elsewhere); });
  CHECK(has(sentence, "cuda:0"));
  CHECK(has(sentence, "cpu"));
}

TEST_CASE("whichever allocation of a construction fails, the error is out_of_memory and nothing is kept") {
  const auto where = make_backend();
  counting_memory_resource counting(default_host_memory());
  failing_memory_resource failing(counting);
  for (std::int64_t nth = 1; nth <= 5; ++nth) {
    failing.fail_at(nth);
    const std::string sentence =
        refusal(errc::out_of_memory, [&] { const cache_engine engine(*where, config_of(5, 7), &failing); });
    CHECK(sentence != "accepted");
    CHECK(counting.num_live() == 0);
  }
  failing.fail_at(6);
  CHECK_NOTHROW(cache_engine(*where, config_of(5, 7), &failing));
  failing.fail_at(0);
}

TEST_CASE("more layers than a limit allows are refused and the first ones given back") {
  const auto where = make_backend();
  const cache_engine_config config = config_of(4, 8);
  const std::int64_t layer = 8 * config.layout.block_bytes();
  limiting_memory_resource limited(default_host_memory(), static_cast<std::size_t>(3 * layer));
  CHECK(refusal(errc::out_of_memory, [&] { const cache_engine engine(*where, config, &limited); }) != "accepted");
  CHECK(limited.used_bytes() == 0);
}

TEST_CASE("the number of blocks for a budget is the largest that fits") {
  const kv_layout layout = make_layout(layout_kind::x_split, dtype::bf16, 8, 128, 16);  // 64 KiB a block and layer
  CHECK(num_blocks_for_memory(std::int64_t{1} << 30, layout, 32) == 512);
  CHECK(num_blocks_for_memory((std::int64_t{1} << 30) - 1, layout, 32) == 511);
  CHECK(num_blocks_for_memory((std::int64_t{1} << 16) * 32 - 1, layout, 32) == 0);
  CHECK(num_blocks_for_memory(0, layout, 1) == 0);
  CHECK(num_blocks_for_memory(most, make_layout(layout_kind::hnd, dtype::f16, 1, 1, 1), 1) == 2147480000);
  CHECK(
      has(refusal(errc::invalid_argument, [&] { (void)num_blocks_for_memory(-1, layout, 1); }), "memory_bytes is -1"));
  CHECK(has(refusal(errc::invalid_argument, [&] { (void)num_blocks_for_memory(1, layout, 0); }), "num_layers is 0"));
  CHECK(has(refusal(errc::invalid_argument, [&] { (void)num_blocks_for_memory(1, {}, 1); }), "num_kv_heads is 0"));
  const kv_layout large = make_layout(layout_kind::hnd, dtype::f16, 1 << 18, 1 << 10, 1 << 10);
  CHECK(has(refusal(errc::invalid_argument, [&] { (void)num_blocks_for_memory(most, large, most32); }),
            "the largest allowed value is 4611686018427387904"));
  // What it says fits, fits; one more does not.
  const auto where = make_backend();
  const cache_engine_config small = config_of(3, 1);
  const std::int64_t budget = 100'000;
  const std::int64_t fits = num_blocks_for_memory(budget, small.layout, 3);
  limiting_memory_resource limited(default_host_memory(), static_cast<std::size_t>(budget));
  cache_engine_config config = small;
  config.num_blocks = fits;
  CHECK_NOTHROW(cache_engine(*where, config, &limited));
  config.num_blocks = fits + 1;
  CHECK_THROWS_AS(cache_engine(*where, config, &limited), error);
}

step_batch some_batch(std::int32_t num_seqs, std::int32_t width) {
  step_batch batch;
  batch.query_start_loc.push_back(0);
  batch.block_table_stride = width;
  for (std::int32_t i = 0; i < num_seqs; ++i) {
    batch.seq_lens.push_back(10 + i);
    if (num_seqs % 2 == 0) batch.query_positions.push_back(i - 3);
    batch.query_start_loc.push_back(batch.query_start_loc.back() + i % 3 + 1);
    for (std::int32_t j = 0; j < width; ++j) batch.block_tables.push_back(i * 100 + j);
  }
  for (std::int32_t i = 0; i < batch.query_start_loc.back(); ++i) batch.slot_mapping.push_back(7000000000 + i);
  return batch;
}

TEST_CASE("on the CPU an upload is a view of the arrays themselves") {
  const auto where = make_backend();
  cache_engine engine(*where, config_of(1, 4));
  const step_batch batch = some_batch(5, 3);
  const device_step_view view = engine.upload(batch);
  CHECK(view.seq_lens == batch.seq_lens.data());
  CHECK(view.query_start_loc == batch.query_start_loc.data());
  CHECK(view.block_tables == batch.block_tables.data());
  CHECK(view.slot_mapping == batch.slot_mapping.data());
  CHECK(view.num_seqs == 5);
  CHECK(view.num_tokens == batch.query_start_loc.back());
  CHECK(view.block_table_stride == 3);
}

template <class T>
bool equal_arrays(const T* copied, const std::vector<T>& original) {
  return copied != original.data() && std::equal(original.begin(), original.end(), copied);
}

TEST_CASE("on a device an upload is one transfer of aligned copies, and capacity is kept") {
  pretended_device where;
  cache_engine engine(where, config_of(1, 4));
  for (const std::int32_t num_seqs : {3, 200, 1, 0, 200, 350}) {
    const step_batch batch = some_batch(num_seqs, 7);
    const int transfers = where.num_uploads();
    const device_step_view view = engine.upload(batch);
    CHECK(where.num_uploads() == transfers + 1);
    CHECK(equal_arrays(view.seq_lens, batch.seq_lens));
    CHECK(equal_arrays(view.query_start_loc, batch.query_start_loc));
    CHECK(equal_arrays(view.block_tables, batch.block_tables));
    CHECK(equal_arrays(view.slot_mapping, batch.slot_mapping));
    CHECK((view.query_positions == nullptr) == batch.query_positions.empty());
    if (view.query_positions != nullptr) CHECK(equal_arrays(view.query_positions, batch.query_positions));
    CHECK(reinterpret_cast<std::uintptr_t>(view.slot_mapping) % 64 == 0);
    CHECK(view.num_seqs == num_seqs);
    CHECK(view.block_table_stride == 7);
  }
  const std::int64_t allocations = where.counted().num_allocations();
  (void)engine.upload(some_batch(300, 7));
  CHECK(where.counted().num_allocations() == allocations);
}

TEST_CASE("an upload that finds no memory throws, and the engine goes on with what it had") {
  pretended_device where;
  cache_engine engine(where, config_of(1, 4));
  (void)engine.upload(some_batch(2, 3));
  for (const std::int64_t nth : {1, 2}) {
    where.failing().fail_at(nth);
    CHECK(refusal(errc::out_of_memory, [&] { (void)engine.upload(some_batch(500, 3)); }) != "accepted");
    where.failing().fail_at(0);
    const step_batch batch = some_batch(2, 3);
    const device_step_view view = engine.upload(batch);
    CHECK(equal_arrays(view.slot_mapping, batch.slot_mapping));
  }
  where.lose();
  CHECK(refusal(errc::device_lost, [&] { (void)engine.upload(some_batch(2, 3)); }) != "accepted");
}

/// The arrays as the device has them; the pretended device copies at once.
struct uploaded {
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int64_t> slots;
  explicit uploaded(const device_step_view& view)
      : seq_lens(view.seq_lens, view.seq_lens + view.num_seqs),
        slots(view.slot_mapping, view.slot_mapping + view.num_tokens) {}
};

TEST_CASE(
    "uploads wait for nothing until as many copies are in flight as there are staging slots, then for the oldest") {
  for (const std::int32_t num_slots : {1, 2, 4, 7}) {
    CAPTURE(num_slots);
    pretended_device where;
    cache_engine_config config = config_of(1, 4);
    config.num_staging_slots = num_slots;
    {
      cache_engine engine(where, config);
      where.stop_stream(true);
      for (std::int32_t step = 0; step < 3 * num_slots; ++step) {
        const step_batch batch = some_batch(step % 5 + 1, 3);
        const device_step_view view = engine.upload(batch);
        CHECK(equal_arrays(view.seq_lens, batch.seq_lens));
        CHECK(equal_arrays(view.slot_mapping, batch.slot_mapping));
        CHECK(where.num_event_waits() == std::max(0, step + 1 - num_slots));
      }
      CHECK(where.num_stream_waits() == 0);
    }
    CHECK(where.num_event_waits() == 3 * num_slots);  // the engine's end waits for the copies that read its memory
  }
  // A stream that keeps up is never waited for.
  pretended_device where;
  cache_engine engine(where, config_of(1, 4));
  for (int step = 0; step < 20; ++step) (void)engine.upload(some_batch(4, 3));
  CHECK(where.num_event_waits() == 0);
  CHECK(where.num_stream_waits() == 0);
}

TEST_CASE("a staging slot whose copy is in flight is not written") {
  // Copies that are made when their event is waited for would read what the host has written since: the pretended
  // device copies at once, so the staging memory itself is looked at.
  pretended_device where;
  cache_engine_config config = config_of(1, 4);
  config.num_staging_slots = 3;
  cache_engine engine(where, config);
  where.stop_stream(true);
  std::vector<const void*> sources;
  std::vector<std::vector<std::byte>> contents;
  for (int step = 0; step < 3; ++step) {
    (void)engine.upload(some_batch(2 + step, 3));
    const auto* const bytes = static_cast<const std::byte*>(where.last_source());
    sources.push_back(bytes);
    contents.emplace_back(bytes, bytes + 64);
    for (std::size_t earlier = 0; earlier < sources.size(); ++earlier) {
      CHECK(std::memcmp(sources[earlier], contents[earlier].data(), 64) == 0);
    }
  }
  CHECK(where.num_event_waits() == 0);
  (void)engine.upload(some_batch(9, 3));
  CHECK(where.last_source() == sources[0]);
  CHECK(where.num_event_waits() == 1);
}

TEST_CASE("the copies of a step stay in one place while they fit into what was reserved, and nothing is allocated") {
  pretended_device where;
  cache_engine engine(where, config_of(1, 4));
  engine.reserve_upload(200, 400, 7);
  const std::int64_t allocations = where.counted().num_allocations();
  const std::int32_t* place = nullptr;
  for (const std::int32_t num_seqs : {200, 1, 0, 133, 200}) {
    const device_step_view view = engine.upload(some_batch(num_seqs, 7));
    if (place == nullptr) place = view.query_start_loc;
    CHECK(view.query_start_loc == place);
  }
  engine.reserve_upload(10, 10, 10);
  CHECK(where.counted().num_allocations() == allocations);
  CHECK(where.num_stream_waits() == 0);
  // More than was reserved: the steps in flight are waited for.
  where.stop_stream(true);
  (void)engine.upload(some_batch(200, 7));
  (void)engine.upload(some_batch(2000, 7));
  CHECK(where.num_stream_waits() == 1);
  CHECK(where.num_event_waits() == 1);
  CHECK(where.counted().num_allocations() == allocations + 2);

  const auto sentence = [&](std::int32_t num_seqs, std::int64_t num_tokens, std::int64_t stride) {
    return refusal(errc::invalid_argument, [&] { engine.reserve_upload(num_seqs, num_tokens, stride); });
  };
  CHECK(has(sentence(-1, 1, 1), "max_num_seqs is -1"));
  CHECK(has(sentence(1, -1, 1), "max_num_tokens is -1"));
  CHECK(has(sentence(1, 1, -1), "max_block_table_stride is -1"));
  CHECK(has(sentence(1, most, 1), "max_num_tokens is 9223372036854775807; it must be at most 2^58"));
  CHECK(has(sentence(most32, 1, most), "max_num_seqs * max_block_table_stride"));
  const auto host = make_backend();
  cache_engine on_host(*host, config_of(1, 4));
  CHECK_NOTHROW(on_host.reserve_upload(1000, 1000, 1000));
  for (const std::int32_t bad : {0, -1, 65, most32}) {
    cache_engine_config config = config_of(1, 4);
    config.num_staging_slots = bad;
    CHECK(has(refusal(errc::invalid_argument, [&] { const cache_engine refused(where, config); }),
              "num_staging_slots is " + std::to_string(bad) + "; it must be 1 to 64"));
  }
}

TEST_CASE("an upload whose event cannot be recorded is waited for instead") {
  pretended_device where;
  cache_engine engine(where, config_of(1, 4));
  where.stop_stream(true);
  where.fail_record(errc::internal);
  const step_batch batch = some_batch(5, 3);
  const device_step_view view = engine.upload(batch);
  CHECK(equal_arrays(view.slot_mapping, batch.slot_mapping));
  CHECK(where.num_stream_waits() == 1);
  for (int step = 0; step < 3; ++step) (void)engine.upload(batch);
  CHECK(where.num_event_waits() == 0);  // the slot of the first copy is free
  CHECK(where.num_stream_waits() == 1);
}

TEST_CASE("a refused upload leaves the copies of the step before") {
  pretended_device where;
  cache_engine engine(where, config_of(1, 4));
  const step_batch batch = some_batch(4, 3);
  const device_step_view view = engine.upload(batch);
  const uploaded before(view);
  where.failing().fail_at(1);
  CHECK(refusal(errc::out_of_memory, [&] { (void)engine.upload(some_batch(900, 3)); }) != "accepted");
  where.lose();
  CHECK(refusal(errc::device_lost, [&] { (void)engine.upload(some_batch(3, 3)); }) != "accepted");
  CHECK(refusal(errc::device_lost, [&] { (void)engine.upload(some_batch(900, 3)); }) != "accepted");
  const uploaded after(view);
  CHECK(after.seq_lens == before.seq_lens);
  CHECK(after.slots == before.slots);
}

TEST_CASE("a moved engine takes its staging slots along, and what it was moved from starts anew") {
  pretended_device where;
  cache_engine first(where, config_of(1, 4));
  where.stop_stream(true);
  const std::int32_t* const place = first.upload(some_batch(4, 3)).query_start_loc;
  cache_engine second(std::move(first));
  CHECK(second.upload(some_batch(4, 3)).query_start_loc == place);
  const step_batch batch = some_batch(2, 3);
  CHECK(equal_arrays(first.upload(batch).seq_lens, batch.seq_lens));
  second = std::move(first);
  CHECK(where.num_event_waits() == 2);  // the two copies of the engine that was assigned to
}

TEST_CASE("append goes to the layer that is named and to no other; a layer that is not there is out_of_range") {
  const auto where = make_backend();
  cache_engine engine(*where, config_of(3, 4, layout_kind::nhd, dtype::f32));
  fill(engine, 2);
  auto expected = bytes_of(engine);
  std::vector<float> k(2 * 2 * 16);
  std::vector<float> v(k.size());
  for (std::size_t i = 0; i < k.size(); ++i) {
    k[i] = normal_from(hash_of(3, i));
    v[i] = normal_from(hash_of(4, i));
  }
  const auto k_rows = dense_view<const void>(k.data(), dtype::f32, 2, 2, 16);
  const auto v_rows = dense_view<const void>(v.data(), dtype::f32, 2, 2, 16);
  const std::int64_t slots[] = {3, 13};
  for (const std::int32_t layer : {-1, 3, most32, std::numeric_limits<std::int32_t>::min()}) {
    CHECK(engine.append(layer, k_rows, v_rows, slots) == errc::out_of_range);
  }
  CHECK(bytes_of(engine) == expected);
  CHECK(engine.append(1, k_rows, v_rows, slots) == errc::ok);
  oracle_append(over(expected[1], engine.layers()[1]), k_rows, v_rows, slots);
  CHECK(bytes_of(engine) == expected);
  const std::int64_t past[] = {3, 16};
  CHECK(engine.append(1, k_rows, v_rows, past) == errc::out_of_range);
  CHECK(bytes_of(engine) == expected);
}

std::vector<block_copy> some_pairs(random_source& random, std::int64_t count, std::int64_t num_src,
                                   std::int64_t num_dst) {
  std::vector<block_copy> pairs;
  for (std::int64_t i = 0; i < count; ++i) {
    pairs.push_back({block_id{static_cast<std::int32_t>(random.between(0, num_src - 1))},
                     block_id{static_cast<std::int32_t>(random.between(0, num_dst - 1))}});
  }
  return pairs;
}

TEST_CASE("copies, swaps and conversions reach every layer and equal the oracle") {
  random_source random(test_seed());
  CAPTURE(seed_note());
  const auto where = make_backend();
  for (int round = 0; round < 10; ++round) {
    constexpr layout_kind kinds[] = {layout_kind::hnd, layout_kind::nhd, layout_kind::x_split};
    const layout_kind kind = random.pick(kinds);
    const dtype type = random.pick(tensor_dtypes);
    cache_engine a(*where, config_of(3, 6, kind, type));
    cache_engine b(*where, config_of(3, 9, kind, type));
    cache_engine c(*where, config_of(3, 5, random.pick(kinds), random.pick(tensor_dtypes)));
    fill(a, random.next());
    fill(b, random.next());
    fill(c, random.next());
    auto bytes_a = bytes_of(a);
    auto bytes_b = bytes_of(b);
    auto bytes_c = bytes_of(c);
    const auto within = some_pairs(random, 7, 6, 6);
    const auto across = some_pairs(random, 5, 6, 9);
    const auto converted = some_pairs(random, 5, 9, 5);
    CHECK(a.copy_blocks(within) == errc::ok);
    CHECK(a.swap_blocks_to(b, across) == errc::ok);
    CHECK(b.convert_blocks_to(c, converted) == errc::ok);
    for (std::size_t l = 0; l < 3; ++l) {
      const kv_cache_view va = over(bytes_a[l], a.layers()[l]);
      const kv_cache_view vb = over(bytes_b[l], b.layers()[l]);
      oracle_move_blocks(va, va, within);
      oracle_move_blocks(va, vb, across);
      oracle_move_blocks(vb, over(bytes_c[l], c.layers()[l]), converted);
    }
    CHECK(bytes_of(a) == bytes_a);
    CHECK(bytes_of(b) == bytes_b);
    CHECK(bytes_of(c) == bytes_c);
  }
}

TEST_CASE(
    "engines that do not fit together are failed_precondition, bad ids out_of_range, oneself invalid; all unchanged") {
  const auto where = make_backend();
  cache_engine engine(*where, config_of(2, 6));
  fill(engine, 8);
  const auto before = bytes_of(engine);
  const std::vector<block_copy> pair{{block_id{0}, block_id{1}}};
  struct mismatch {
    cache_engine_config config;
    bool converts;
  };
  const mismatch mismatches[] = {
      {config_of(3, 6), false},
      {config_of(2, 6, layout_kind::hnd, dtype::f16, 1), false},
      {config_of(2, 6, layout_kind::hnd, dtype::f16, 2, 8), false},
      {config_of(2, 6, layout_kind::hnd, dtype::f16, 2, 16, 2), false},
      {config_of(2, 6, layout_kind::nhd), true},
      {config_of(2, 6, layout_kind::hnd, dtype::bf16), true},
  };
  for (const mismatch& m : mismatches) {
    cache_engine other(*where, m.config);
    fill(other, 9);
    const auto other_before = bytes_of(other);
    CHECK(engine.swap_blocks_to(other, pair) == errc::failed_precondition);
    CHECK(other.swap_blocks_to(engine, pair) == errc::failed_precondition);
    if (!m.converts) {
      CHECK(engine.convert_blocks_to(other, pair) == errc::failed_precondition);
      CHECK(other.convert_blocks_to(engine, pair) == errc::failed_precondition);
    }
    CHECK(bytes_of(other) == other_before);
  }
  CHECK(engine.swap_blocks_to(engine, pair) == errc::invalid_argument);
  CHECK(engine.convert_blocks_to(engine, pair) == errc::invalid_argument);
  cache_engine smaller(*where, config_of(2, 3));
  fill(smaller, 10);
  const auto smaller_before = bytes_of(smaller);
  for (const std::int32_t bad : {-1, 6, most32}) {
    const std::vector<block_copy> bad_src{{block_id{0}, block_id{1}}, {block_id{bad}, block_id{1}}};
    const std::vector<block_copy> bad_dst{{block_id{0}, block_id{1}}, {block_id{1}, block_id{bad}}};
    for (const auto& pairs : {bad_src, bad_dst}) {
      CHECK(engine.copy_blocks(pairs) == errc::out_of_range);
      CHECK(engine.swap_blocks_to(smaller, pairs) == errc::out_of_range);
      CHECK(engine.convert_blocks_to(smaller, pairs) == errc::out_of_range);
    }
  }
  // In the pool of the one, past that of the other.
  const std::vector<block_copy> too_far{{block_id{0}, block_id{3}}};
  CHECK(engine.swap_blocks_to(smaller, too_far) == errc::out_of_range);
  CHECK(engine.convert_blocks_to(smaller, too_far) == errc::out_of_range);
  CHECK(bytes_of(engine) == before);
  CHECK(bytes_of(smaller) == smaller_before);
}

TEST_CASE("a swap runs on whichever of the two backends is not the CPU, a conversion wants one device") {
  const auto host = make_backend();
  pretended_device device;
  cache_engine on_host(*host, config_of(2, 4));
  cache_engine on_device(device, config_of(2, 4));
  fill(on_host, 11);
  fill(on_device, 12);
  const std::vector<block_copy> pair{{block_id{3}, block_id{1}}};
  CHECK(on_host.swap_blocks_to(on_device, pair) == errc::ok);
  CHECK(device.num_swaps() == 1);
  CHECK(on_device.swap_blocks_to(on_host, pair) == errc::ok);
  CHECK(device.num_swaps() == 2);
  CHECK(on_host.convert_blocks_to(on_device, pair) == errc::failed_precondition);
  CHECK(on_device.convert_blocks_to(on_host, pair) == errc::failed_precondition);
}

TEST_CASE("a moved engine keeps its storage; what it was moved from has no layers") {
  const auto where = make_backend();
  counting_memory_resource memory(default_host_memory());
  {
    cache_engine first(*where, config_of(2, 4), &memory);
    void* const k = first.layers()[1].k;
    cache_engine second(std::move(first));
    CHECK(second.layers()[1].k == k);
    CHECK(first.append(0, {}, {}, nullptr) == errc::out_of_range);
    CHECK(memory.num_live() == 2);
  }
  CHECK(memory.num_live() == 0);
}

TEST_CASE("two engines work in two threads at once") {
  const auto run = [](backend& where, std::uint64_t seed, bool& equal) {
    random_source random(seed);
    cache_engine engine(where, config_of(4, 30, layout_kind::hnd, dtype::f32, 4, 64, 16));
    cache_engine other(where, config_of(4, 30, layout_kind::x_split, dtype::bf16, 4, 64, 16));
    fill(engine, seed);
    fill(other, seed + 1);
    auto bytes = bytes_of(engine);
    auto other_bytes = bytes_of(other);
    std::vector<float> rows(300 * 4 * 64, static_cast<float>(seed));
    std::vector<std::int64_t> slots;
    for (std::int64_t i = 0; i < 300; ++i) slots.push_back(479 - i);
    const auto view = dense_view<const void>(rows.data(), dtype::f32, 300, 4, 64);
    equal = true;
    for (int round = 0; round < 3; ++round) {
      const auto pairs = some_pairs(random, 20, 30, 30);
      equal = equal && engine.append(round, view, view, slots.data()) == errc::ok;
      oracle_append(over(bytes[static_cast<std::size_t>(round)], engine.layers()[0]), view, view, slots.data());
      equal = equal && engine.copy_blocks(pairs) == errc::ok;
      equal = equal && engine.convert_blocks_to(other, pairs) == errc::ok;
      for (std::size_t l = 0; l < 4; ++l) {
        const kv_cache_view layer = over(bytes[l], engine.layers()[l]);
        oracle_move_blocks(layer, layer, pairs);
        oracle_move_blocks(layer, over(other_bytes[l], other.layers()[l]), pairs);
      }
    }
    equal = equal && bytes_of(engine) == bytes && bytes_of(other) == other_bytes;
  };
  const auto shared = make_backend();
  const auto own = make_backend();
  for (backend* second : {shared.get(), own.get()}) {
    bool a = false;
    bool b = false;
    std::thread one([&] { run(*shared, 1, a); });
    std::thread two([&] { run(*second, 2, b); });
    one.join();
    two.join();
    CHECK(a);
    CHECK(b);
  }
}

}  // namespace
