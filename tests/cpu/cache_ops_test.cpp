// SPDX-License-Identifier: Apache-2.0
// What only the CPU can be asked: every conversion on every ISA, pools past 2^32 elements in a sparse mapping, any
// number of workers.
#include <doctest/doctest.h>

#include <array>
#include <bifolio/backend.hpp>
#include <bifolio/cpu.hpp>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "reference/cache_oracle.hpp"
#include "support/backends.hpp"
#include "support/cache_pair.hpp"
#include "support/elements.hpp"
#include "support/random.hpp"
#include "support/skip.hpp"
#include "support/sparse_memory.hpp"
#include "support/thread_executor.hpp"

namespace {

using namespace bifolio;
using namespace bifolio::test;

std::unique_ptr<backend> open(cpu_isa isa, executor_kind kind = executor_kind::serial, std::int32_t threads = 0) {
  backend_options options;
  options.isa = isa;
  options.executor_choice = kind;
  options.num_threads = threads;
  return make_backend({}, options);
}

/// `values` appended as rows of `dims` to a cache of another dtype, and how many elements differ from dtype.hpp.
template <class To, class From>
std::int64_t wrong_conversions(backend& where, const std::vector<From>& values, std::int32_t dims) {
  const std::int64_t tokens = static_cast<std::int64_t>(values.size()) / dims;
  const kv_layout layout = make_layout(layout_kind::hnd, dtype_of<To>, 1, dims, 16);
  const std::int64_t blocks = blocks_for(tokens, 16);
  std::vector<To> k(static_cast<std::size_t>(blocks * layout.block_elements(layout.k)));
  std::vector<To> v(k.size());
  std::vector<std::int64_t> slots(static_cast<std::size_t>(tokens));
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i);
  const auto rows = dense_view<const void>(values.data(), dtype_of<From>, tokens, 1, dims);
  REQUIRE(where.append({{k.data(), v.data(), blocks, layout}, rows, rows, slots.data()}) == errc::ok);
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(tokens * dims); ++i) {
    To expected;
    oracle_move_element(&expected, dtype_of<To>, 0, &values[i], dtype_of<From>, 0);
    wrong += std::memcmp(&expected, &k[i], sizeof(To)) != 0;
    wrong += std::memcmp(&expected, &v[i], sizeof(To)) != 0;
  }
  return wrong;
}

// Widths of rows that reach every tail of every vector width.
constexpr std::array<std::int32_t, 12> row_widths{1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 19, 64};

TEST_CASE("every 16-bit pattern converts on every ISA as dtype.hpp says") {
  std::vector<float16> halves(65536);
  std::vector<bfloat16> brains(65536);
  for (std::size_t i = 0; i < 65536; ++i) {
    halves[i].bits = static_cast<std::uint16_t>(i);
    brains[i].bits = static_cast<std::uint16_t>(i);
  }
  for (const cpu_isa isa : supported_isas()) {
    const auto where = open(isa);
    CAPTURE(to_string(isa));
    for (const std::int32_t dims : row_widths) {
      CAPTURE(dims);
      CHECK(wrong_conversions<float>(*where, halves, dims) == 0);
      CHECK(wrong_conversions<bfloat16>(*where, halves, dims) == 0);
      CHECK(wrong_conversions<float16>(*where, halves, dims) == 0);
      CHECK(wrong_conversions<float>(*where, brains, dims) == 0);
      CHECK(wrong_conversions<float16>(*where, brains, dims) == 0);
      CHECK(wrong_conversions<bfloat16>(*where, brains, dims) == 0);
    }
  }
}

TEST_CASE("float32 narrows on every ISA as dtype.hpp says, at every exponent next to every tie and at random") {
  std::vector<float> values;
  for (std::uint32_t sign_exponent = 0; sign_exponent < 512; ++sign_exponent) {
    for (int low_bits = 13; low_bits <= 23; ++low_bits) {
      const std::uint32_t tie = 1u << (low_bits - 1);
      for (std::uint32_t high = 0; high < (1u << 23); high += std::max(1u << low_bits, 0x51000u & ~(tie - 1))) {
        for (const std::uint32_t low : {0u, 1u, tie - 1, tie, tie + 1, 2 * tie - 1}) {
          values.push_back(std::bit_cast<float>((sign_exponent << 23) | (high & 0x7fffffu & ~(2 * tie - 1)) | low));
        }
      }
    }
  }
  random_source random(test_seed());
  for (int i = 0; i < 200'000; ++i) values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random.next())));
  for (const cpu_isa isa : supported_isas()) {
    const auto where = open(isa);
    CAPTURE(to_string(isa));
    CAPTURE(seed_note());
    for (const std::int32_t dims : {1, 3, 4, 7, 8, 15, 64}) {
      CAPTURE(dims);
      CHECK(wrong_conversions<float16>(*where, values, dims) == 0);
      CHECK(wrong_conversions<bfloat16>(*where, values, dims) == 0);
      CHECK(wrong_conversions<float>(*where, values, dims) == 0);
    }
  }
}

TEST_CASE("conversions do not depend on a mode that flushes subnormals") {
  std::vector<float16> halves(2048);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i].bits = static_cast<std::uint16_t>(i);
  std::vector<float> tiny;
  for (std::uint32_t bits = 0; bits < 4096; ++bits) tiny.push_back(std::bit_cast<float>(bits << 11));
  for (std::uint32_t bits = 0x33000000u; bits < 0x38900000u; bits += 0xfff) tiny.push_back(std::bit_cast<float>(bits));
  for (const cpu_isa isa : supported_isas()) {
    const auto where = open(isa);
    const flush_subnormals flushed;
    CAPTURE(to_string(isa));
    for (const std::int32_t dims : {3, 16}) {
      CHECK(wrong_conversions<float>(*where, halves, dims) == 0);
      CHECK(wrong_conversions<float16>(*where, tiny, dims) == 0);
      CHECK(wrong_conversions<bfloat16>(*where, tiny, dims) == 0);
    }
  }
}

/// Rows of k and v with contents of their own, dense float32.
struct plain_rows {
  std::vector<float> k;
  std::vector<float> v;
  const_tensor_view k_view;
  const_tensor_view v_view;

  plain_rows(std::int64_t tokens, std::int32_t heads, std::int32_t dims, std::uint64_t seed) {
    const auto count = static_cast<std::size_t>(tokens * heads * dims);
    for (std::size_t i = 0; i < count; ++i) {
      k.push_back(normal_from(hash_of(seed, i, 0)));
      v.push_back(normal_from(hash_of(seed, i, 1)));
    }
    k_view = dense_view<const void>(k.data(), dtype::f32, tokens, heads, dims);
    v_view = dense_view<const void>(v.data(), dtype::f32, tokens, heads, dims);
  }
};

/// Whether token `slot` of the cache holds row `row`, read element by element.
bool holds_row(const kv_cache_view& kv, std::int64_t slot, const plain_rows& rows, std::int64_t row) {
  const kv_layout& layout = kv.layout;
  const block_id block{static_cast<std::int32_t>(slot / layout.block_size)};
  const auto token = static_cast<std::int32_t>(slot % layout.block_size);
  bool equal = true;
  for_each_element(layout, layout.k, [&](std::int32_t h, std::int32_t d) {
    std::uint32_t expected = 0;
    const auto index = row_index(rows.k_view, row, h, d);
    const auto size = static_cast<std::int64_t>(size_of(layout.k.code.type));
    oracle_move_element(&expected, layout.k.code.type, 0, rows.k.data(), dtype::f32, index);
    equal = equal && std::memcmp(static_cast<std::byte*>(kv.k) + layout.k.strides.offset(block, h, token, d) * size,
                                 &expected, size_of(layout.k.code.type)) == 0;
    oracle_move_element(&expected, layout.k.code.type, 0, rows.v.data(), dtype::f32, index);
    equal = equal && std::memcmp(static_cast<std::byte*>(kv.v) + layout.v.strides.offset(block, h, token, d) * size,
                                 &expected, size_of(layout.k.code.type)) == 0;
  });
  return equal;
}

/// One pool far past 2^32 elements: rows go to its far ends and come back, blocks are copied and converted there.
void check_far(cpu_isa isa, layout_kind kind, dtype type, std::int32_t heads, std::int32_t dims,
               std::int32_t block_size, std::int64_t num_blocks, sparse_memory& memory, sparse_memory& other_memory) {
  const kv_layout layout = make_layout(kind, type, heads, dims, block_size);
  const std::int64_t half_bytes =
      num_blocks * layout.block_elements(layout.k) * static_cast<std::int64_t>(size_of(type));
  REQUIRE(memory.num_bytes() >= static_cast<std::size_t>(2 * half_bytes));
  const kv_cache_view kv{memory.data(), memory.data() + half_bytes, num_blocks, layout};
  const auto where = open(isa);
  const std::string what = std::string(to_string(isa)) + " " + std::string(to_string(kind));
  CAPTURE(what);

  const std::int64_t slot_elements = std::int64_t{heads} * dims;
  std::vector<std::int64_t> slots;
  for (const std::int64_t element : {std::int64_t{1} << 31, std::int64_t{1} << 32, std::int64_t{1} << 33}) {
    if (element / slot_elements + 1 < num_blocks * block_size) {
      slots.push_back(element / slot_elements - 1);
      slots.push_back(element / slot_elements);
    }
  }
  for (const std::int64_t slot : {std::int64_t{1} << 31, std::int64_t{1} << 32, std::int64_t{1} << 33}) {
    if (slot + 1 < num_blocks * block_size) slots.push_back(slot + 1);
  }
  slots.push_back(0);
  slots.push_back(num_blocks * block_size - 1);
  const auto num_tokens = static_cast<std::int64_t>(slots.size());
  const plain_rows rows(num_tokens, heads, dims, hash_of(test_seed(), static_cast<int>(kind)));
  REQUIRE(where->append({kv, rows.k_view, rows.v_view, slots.data()}) == errc::ok);
  for (std::int64_t i = 0; i < num_tokens; ++i) CHECK(holds_row(kv, slots[static_cast<std::size_t>(i)], rows, i));

  plain_rows back(num_tokens, heads, dims, 1);
  tensor_view back_k = dense_view<void>(back.k.data(), dtype::f32, num_tokens, heads, dims);
  tensor_view back_v = dense_view<void>(back.v.data(), dtype::f32, num_tokens, heads, dims);
  REQUIRE(where->gather({kv, back_k, back_v, slots.data()}) == errc::ok);
  for (std::size_t i = 0; i < back.k.size(); ++i) {
    CHECK(back.k[i] == stored_as(type, rows.k[i]));
    CHECK(back.v[i] == stored_as(type, rows.v[i]));
  }

  // The last block to the middle, and from there to the first block of a cache in another layout and dtype.
  const auto last = block_id{static_cast<std::int32_t>(num_blocks - 1)};
  const auto middle = block_id{static_cast<std::int32_t>(num_blocks / 2 + 3)};
  const std::array<kv_cache_view, 1> layers{kv};
  const std::array<block_copy, 1> copy{block_copy{last, middle}};
  REQUIRE(where->copy_blocks(layers, copy) == errc::ok);
  const std::int64_t copied_slot = to_index(make_slot(middle, block_size - 1, block_size));
  CHECK(holds_row(kv, copied_slot, rows, num_tokens - 1));

  const kv_layout other_layout = make_layout(layout_kind::nhd, dtype::f32, heads, dims, block_size);
  const std::int64_t other_half = num_blocks * other_layout.block_elements(other_layout.k) * 4;
  if (other_memory.num_bytes() >= static_cast<std::size_t>(2 * other_half)) {
    const kv_cache_view other{other_memory.data(), other_memory.data() + other_half, num_blocks, other_layout};
    const std::array<block_copy, 1> far_pair{block_copy{middle, last}};
    REQUIRE(where->convert_blocks(kv, other, far_pair) == errc::ok);
    const block_id block = last;
    const std::int32_t token = block_size - 1;
    for_each_element(other_layout, other_layout.k, [&](std::int32_t h, std::int32_t d) {
      const auto index = static_cast<std::size_t>(row_index(rows.k_view, num_tokens - 1, h, d));
      CHECK(load_element(other.k, dtype::f32, other_layout.k.strides.offset(block, h, token, d)) ==
            stored_as(type, rows.k[index]));
      CHECK(load_element(other.v, dtype::f32, other_layout.v.strides.offset(block, h, token, d)) ==
            stored_as(type, rows.v[index]));
    });
  }
}

TEST_CASE("slots past 2^31 and 2^32 elements are written, read, copied and converted") {
  // 2^33 elements in each half, and slots numbered past 2^32; pages are there only where they are touched.
  constexpr std::size_t pool_bytes = (std::size_t{1} << 36) + (std::size_t{1} << 30);
  sparse_memory memory(pool_bytes);
  sparse_memory other(2 * pool_bytes);
  if (memory.data() == nullptr || other.data() == nullptr)
    return skip("this system gives no sparse mapping of 192 GiB");
  for (const cpu_isa isa : supported_isas()) {
    for (const layout_kind kind : {layout_kind::hnd, layout_kind::nhd, layout_kind::x_split}) {
      check_far(isa, kind, dtype::bf16, 8, 128, 16, (std::int64_t{1} << 19) + 7, memory, other);
      check_far(isa, kind, dtype::f16, 1, 2, 16, (std::int64_t{1} << 29) + 9, memory, other);
      check_far(isa, kind, dtype::f32, 1, 1, 5, (std::int64_t{1} << 30) + 1, memory, other);
    }
  }
}

/// Every call large enough for many workers, with rows and pairs that meet in the same places.
void check_many_workers(executor& workers) {
  for (const cpu_isa isa : supported_isas()) {
    backend_options options;
    options.isa = isa;
    options.own_executor = &workers;
    const auto where = make_backend({}, options);
    random_source random(hash_of(test_seed(), 21));
    constexpr std::int64_t num_tokens = 1500;
    cache_pair cache(*where, arrangement::hnd, dtype::f32, 8, 128, 16, 100, random);
    rows_pair rows(*where, row_order::dense, dtype::f32, num_tokens, 8, 128, random);
    std::vector<std::int64_t> slots;
    for (std::int64_t i = 0; i < num_tokens; ++i) slots.push_back(random.between(-3, 1599));
    REQUIRE(where->append({cache.device(), as_const(rows.device_k()), as_const(rows.device_v()), slots.data()}) ==
            errc::ok);
    oracle_append(cache.host(), as_const(rows.host_k()), as_const(rows.host_v()), slots.data());
    CAPTURE(to_string(isa));
    CHECK(cache.equal());
    std::vector<block_copy> chain;
    for (std::int32_t i = 0; i < 150; ++i) {
      chain.push_back({block_id{static_cast<std::int32_t>(random.between(0, 99))},
                       block_id{static_cast<std::int32_t>(random.between(0, 99))}});
    }
    const std::array<kv_cache_view, 1> layers{cache.device()};
    REQUIRE(where->copy_blocks(layers, chain) == errc::ok);
    oracle_move_blocks(cache.host(), cache.host(), chain);
    CHECK(cache.equal());

    cache_pair other(*where, arrangement::hnd, dtype::f32, 8, 128, 16, 100, random);
    cache_pair turned(*where, arrangement::x_split, dtype::bf16, 8, 128, 16, 100, random);
    const std::array<kv_cache_view, 1> targets{other.device()};
    REQUIRE(where->swap_blocks(layers, targets, chain) == errc::ok);
    oracle_move_blocks(cache.host(), other.host(), chain);
    CHECK(other.equal());
    REQUIRE(where->convert_blocks(cache.device(), turned.device(), chain) == errc::ok);
    oracle_move_blocks(cache.host(), turned.host(), chain);
    CHECK(turned.equal());
    REQUIRE(where->gather({turned.device(), rows.device_k(), rows.device_v(), slots.data()}) == errc::ok);
    oracle_gather(turned.host(), rows.host_k(), rows.host_v(), slots.data());
    CHECK(rows.equal());
  }
}

TEST_CASE("sixty-four workers give the same bytes as one, whatever their order") {
  const auto workers = make_reversed_executor(64);
  check_many_workers(*workers);
}

TEST_CASE("workers in threads of their own give the same bytes and do not race") {
  thread_executor workers(4);
  check_many_workers(workers);
}

}  // namespace
