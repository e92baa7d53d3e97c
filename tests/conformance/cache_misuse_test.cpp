// SPDX-License-Identifier: Apache-2.0
// Every cache call with every class of bad argument: the documented code, and not a byte written.
#include <doctest/doctest.h>

#include <array>
#include <bifolio/backend.hpp>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support/backends.hpp"
#include "support/cache_pair.hpp"
#include "support/random.hpp"

namespace {

using namespace bifolio;
using namespace bifolio::test;

constexpr std::int32_t heads = 2;
constexpr std::int32_t dims = 8;
constexpr std::int32_t block_size = 4;
constexpr std::int64_t num_blocks = 3;
constexpr std::int64_t num_tokens = 4;
constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
constexpr std::int32_t most32 = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t least32 = std::numeric_limits<std::int32_t>::min();

void* moved(const void* pointer, std::int64_t bytes) {
  return const_cast<std::byte*>(static_cast<const std::byte*>(pointer)) + bytes;
}

/// One bad cache view: what is wrong, and how to make it from a good one.
struct bad_view {
  const char* what;
  std::function<void(kv_cache_view&)> spoil;
};

// All of these are invalid_argument in every call that takes a view.
std::vector<bad_view> bad_views() {
  return {
      {"k is null", [](kv_cache_view& v) { v.k = nullptr; }},
      {"v is null", [](kv_cache_view& v) { v.v = nullptr; }},
      {"k is not aligned to its element", [](kv_cache_view& v) { v.k = moved(v.k, 1); }},
      {"v is not aligned to its element", [](kv_cache_view& v) { v.v = moved(v.v, 1); }},
      {"K and V are the same memory", [](kv_cache_view& v) { v.v = v.k; }},
      {"V begins within K", [](kv_cache_view& v) { v.v = moved(v.k, 64); }},
      {"num_blocks is negative", [](kv_cache_view& v) { v.num_blocks = -1; }},
      {"num_blocks is the least number", [](kv_cache_view& v) { v.num_blocks = -most - 1; }},
      {"num_blocks is more than block ids can name", [](kv_cache_view& v) { v.num_blocks = (1ll << 31) + 1; }},
      {"num_blocks is the largest number", [](kv_cache_view& v) { v.num_blocks = most; }},
      {"the dtype is unknown", [](kv_cache_view& v) { v.layout.k.code.type = static_cast<dtype>(7); }},
      {"num_kv_heads is 0", [](kv_cache_view& v) { v.layout.num_kv_heads = 0; }},
      {"num_kv_heads is negative", [](kv_cache_view& v) { v.layout.num_kv_heads = least32; }},
      {"head_dim is 0", [](kv_cache_view& v) { v.layout.k.head_dim = 0; }},
      {"head_dim is negative", [](kv_cache_view& v) { v.layout.k.head_dim = -8; }},
      {"head_dim of V is 0", [](kv_cache_view& v) { v.layout.v.head_dim = 0; }},
      {"head_dim of V is the largest number", [](kv_cache_view& v) { v.layout.v.head_dim = most32; }},
      {"V is part of K and has more dims",
       [](kv_cache_view& v) {
         v.layout.v_in_k = true;
         v.layout.v.head_dim = 2 * dims;
       }},
      {"V is part of K and has strides of its own",
       [](kv_cache_view& v) {
         v.layout.v_in_k = true;
         v.layout.v.strides.token += 1;
       }},
      {"block_size is 0", [](kv_cache_view& v) { v.layout.block_size = 0; }},
      {"block_size is negative", [](kv_cache_view& v) { v.layout.block_size = least32; }},
      {"block_size is huge", [](kv_cache_view& v) { v.layout.block_size = most32; }},
      {"chunk is 0", [](kv_cache_view& v) { v.layout.k.strides.chunk = 0; }},
      {"chunk is negative", [](kv_cache_view& v) { v.layout.v.strides.chunk = -8; }},
      {"chunk exceeds head_dim", [](kv_cache_view& v) { v.layout.k.strides.chunk = 16; }},
      {"chunk does not divide head_dim", [](kv_cache_view& v) { v.layout.v.strides.chunk = 3; }},
      {"two blocks share their elements", [](kv_cache_view& v) { v.layout.k.strides.block -= 1; }},
      {"the block stride is 0", [](kv_cache_view& v) { v.layout.v.strides.block = 0; }},
      {"the block stride is negative", [](kv_cache_view& v) { v.layout.v.strides.block = -v.layout.v.strides.block; }},
      {"the block stride wraps", [](kv_cache_view& v) { v.layout.k.strides.block = most; }},
      {"the span wraps", [](kv_cache_view& v) { v.layout.k.strides.block = 1ll << 62; }},
      {"the span passes 2^62 bytes", [](kv_cache_view& v) { v.layout.v.strides.block = 1ll << 60; }},
      {"the head stride is 0", [](kv_cache_view& v) { v.layout.k.strides.head = 0; }},
      {"the token stride is negative", [](kv_cache_view& v) { v.layout.k.strides.token = -1; }},
      {"the dim stride is 0", [](kv_cache_view& v) { v.layout.v.strides.dim = 0; }},
      {"the token stride is that of the heads",
       [](kv_cache_view& v) { v.layout.v.strides.token = v.layout.v.strides.head; }},
  };
}

// What is named but not implemented: unsupported in every call that takes a view.
std::vector<bad_view> unsupported_views() {
  return {
      {"K has a scale per token and head",
       [](kv_cache_view& v) { v.layout.k.code.granularity = scale_granularity::token_head; }},
      {"V has a scale per token and head",
       [](kv_cache_view& v) { v.layout.v.code.granularity = scale_granularity::token_head; }},
      {"K has a scale per layer", [](kv_cache_view& v) { v.layout.k.code.granularity = scale_granularity::layer; }},
      {"V has a scale per head", [](kv_cache_view& v) { v.layout.v.code.granularity = scale_granularity::head; }},
      {"V is integers without scales", [](kv_cache_view& v) { v.layout.v.code.type = dtype::u8; }},
  };
}

/// Bad rows of k or v. All invalid_argument.
struct bad_rows {
  const char* what;
  std::function<void(tensor_view&)> spoil;
  bool only_when_written = false;
};

std::vector<bad_rows> bad_row_views() {
  return {
      {"the rows are null", [](tensor_view& r) { r.data = nullptr; }},
      {"the rows are not aligned", [](tensor_view& r) { r.data = moved(r.data, 1); }},
      {"the rows' dtype is unknown", [](tensor_view& r) { r.type = static_cast<dtype>(3); }},
      {"one side's dtype differs", [](tensor_view& r) { r.type = dtype::bf16; }},
      {"one side has fewer tokens", [](tensor_view& r) { --r.num_tokens; }},
      {"one side has no tokens", [](tensor_view& r) { r.num_tokens = 0; }},
      {"the token count is negative", [](tensor_view& r) { r.num_tokens = -1; }},
      {"the heads differ", [](tensor_view& r) { r.num_heads = 1; }},
      {"there are more heads", [](tensor_view& r) { r.num_heads = most32; }},
      {"the head_dim differs", [](tensor_view& r) { r.head_dim = 4; }},
      {"the head_dim is 0", [](tensor_view& r) { r.head_dim = 0; }},
      {"the token stride is negative", [](tensor_view& r) { r.token_stride = -16; }},
      {"the head stride is negative", [](tensor_view& r) { r.head_stride = -8; }},
      {"the token stride wraps", [](tensor_view& r) { r.token_stride = most; }},
      {"the head stride passes 2^62 bytes", [](tensor_view& r) { r.head_stride = 1ll << 61; }},
      {"the rows share their elements", [](tensor_view& r) { r.token_stride = 15; }, true},
      {"the heads share their elements", [](tensor_view& r) { r.head_stride = 0; }, true},
  };
}

/// A small world on one backend; every refusal must leave all of it as it was.
struct world {
  backend& where;
  random_source random{hash_of(test_seed(), 99)};
  cache_pair cache;
  cache_pair other;
  rows_pair rows;
  std::vector<std::int64_t> slot_list{0, 5, -1, 11};
  device_bytes slots;

  explicit world(backend& b)
      : where(b),
        cache(b, arrangement::hnd, dtype::f16, heads, dims, block_size, num_blocks, random),
        other(b, arrangement::hnd, dtype::f16, heads, dims, block_size, num_blocks, random),
        rows(b, row_order::dense, dtype::f32, num_tokens, heads, dims, random),
        slots(upload_array(b, slot_list)) {}

  [[nodiscard]] bool untouched() const { return cache.equal() && other.equal() && rows.equal() && slots.unchanged(); }
  [[nodiscard]] const std::int64_t* slot_pointer() { return reinterpret_cast<const std::int64_t*>(slots.data()); }
  [[nodiscard]] append_params append() {
    return {cache.device(), as_const(rows.device_k()), as_const(rows.device_v()), slot_pointer()};
  }
  [[nodiscard]] gather_params gather() { return {cache.device(), rows.device_k(), rows.device_v(), slot_pointer()}; }
};

constexpr std::array<block_copy, 2> good_pairs{block_copy{block_id{0}, block_id{1}},
                                               block_copy{block_id{1}, block_id{2}}};

TEST_CASE("a bad cache view is refused by every call and nothing is written") {
  for (const tested_backend& tested : all_backends()) {
    world w(tested.get());
    CAPTURE(tested.name);
    for (const bad_view& bad : bad_views()) {
      CAPTURE(bad.what);
      append_params append = w.append();
      bad.spoil(append.kv);
      CHECK(w.where.append(append) == errc::invalid_argument);
      gather_params gather = w.gather();
      bad.spoil(gather.kv);
      CHECK(w.where.gather(gather) == errc::invalid_argument);

      kv_cache_view spoilt = w.cache.device();
      bad.spoil(spoilt);
      // A good layer first: nothing of it may be copied before the bad one is seen.
      const std::array<kv_cache_view, 2> layers{w.other.device(), spoilt};
      const std::array<kv_cache_view, 2> good{w.other.device(), w.other.device()};
      CHECK(w.where.copy_blocks(layers, good_pairs) == errc::invalid_argument);
      CHECK(w.where.convert_blocks(spoilt, w.other.device(), good_pairs) == errc::invalid_argument);
      CHECK(w.where.convert_blocks(w.other.device(), spoilt, good_pairs) == errc::invalid_argument);
      CHECK(w.where.swap_blocks(layers, good, good_pairs) == errc::invalid_argument);
      CHECK(w.where.swap_blocks(good, layers, good_pairs) == errc::invalid_argument);
    }
    CHECK(w.untouched());
  }
}

TEST_CASE("a cache of a code that is not implemented is refused by every call and nothing is written") {
  for (const tested_backend& tested : all_backends()) {
    world w(tested.get());
    CAPTURE(tested.name);
    for (const bad_view& bad : unsupported_views()) {
      CAPTURE(bad.what);
      append_params append = w.append();
      bad.spoil(append.kv);
      CHECK(w.where.append(append) == errc::unsupported);
      gather_params gather = w.gather();
      bad.spoil(gather.kv);
      CHECK(w.where.gather(gather) == errc::unsupported);
      kv_cache_view spoilt = w.cache.device();
      bad.spoil(spoilt);
      const std::array<kv_cache_view, 1> layers{spoilt};
      const std::array<kv_cache_view, 1> good{w.other.device()};
      CHECK(w.where.copy_blocks(layers, good_pairs) == errc::unsupported);
      CHECK(w.where.convert_blocks(spoilt, w.other.device(), good_pairs) == errc::unsupported);
      CHECK(w.where.swap_blocks(good, layers, good_pairs) == errc::unsupported);
    }
    CHECK(w.untouched());
  }
}

TEST_CASE("where V is part of K, rows of v are refused, and caches with a V plane do not fit") {
  for (const tested_backend& tested : all_backends()) {
    world w(tested.get());
    CAPTURE(tested.name);
    const cache_shape shape{dtype::f16, heads, dims, dims / 2, block_size, true};
    cache_pair in_k(tested.get(), arrangement::hnd, shape, num_blocks, w.random);
    gather_params gather = w.gather();
    gather.kv = in_k.device();
    CHECK(gather.kv.v == nullptr);
    CHECK(w.where.gather(gather) == errc::invalid_argument);
    const append_params append{gather.kv, as_const(gather.k), as_const(gather.v), gather.slot_mapping};
    CHECK(w.where.append(append) == errc::invalid_argument);
    const std::array<kv_cache_view, 1> with{in_k.device()};
    const std::array<kv_cache_view, 1> without{w.other.device()};
    CHECK(w.where.swap_blocks(with, without, good_pairs) == errc::invalid_argument);
    CHECK(w.where.convert_blocks(without[0], with[0], good_pairs) == errc::invalid_argument);
    CHECK(in_k.equal());
    CHECK(w.untouched());
  }
}

TEST_CASE("bad rows are refused by append and gather and nothing is written") {
  for (const tested_backend& tested : all_backends()) {
    world w(tested.get());
    CAPTURE(tested.name);
    for (const bad_rows& bad : bad_row_views()) {
      CAPTURE(bad.what);
      for (const bool spoil_k : {true, false}) {
        gather_params gather = w.gather();
        bad.spoil(spoil_k ? gather.k : gather.v);
        CHECK(w.where.gather(gather) == errc::invalid_argument);
        if (bad.only_when_written) continue;
        const append_params append{gather.kv, as_const(gather.k), as_const(gather.v), gather.slot_mapping};
        CHECK(w.where.append(append) == errc::invalid_argument);
      }
    }
    CHECK(w.untouched());
  }
}

TEST_CASE("rows may repeat one head or one token as a source") {
  for (const tested_backend& tested : all_backends()) {
    world w(tested.get());
    append_params append = w.append();
    append.k.token_stride = 0;
    append.v.head_stride = 0;
    CHECK(w.where.append(append) == errc::ok);
  }
}

TEST_CASE("rows inside the cache are refused, and so are k and v rows that overlap when they are written") {
  for (const tested_backend& tested : all_backends()) {
    world w(tested.get());
    CAPTURE(tested.name);
    for (const std::int64_t ahead : {0ll, 64ll, -16ll}) {
      // Rows of the cache's own dtype, so that the addresses are aligned.
      gather_params gather = w.gather();
      gather.k.type = gather.v.type = dtype::f16;
      gather.k.data = moved(gather.kv.v, ahead);
      CHECK(w.where.gather(gather) == errc::invalid_argument);
      CHECK(w.where.append({gather.kv, as_const(gather.k), as_const(gather.v), gather.slot_mapping}) ==
            errc::invalid_argument);
      gather = w.gather();
      gather.k.type = gather.v.type = dtype::f16;
      gather.v.data = moved(gather.kv.k, ahead);
      CHECK(w.where.gather(gather) == errc::invalid_argument);
      CHECK(w.where.append({gather.kv, as_const(gather.k), as_const(gather.v), gather.slot_mapping}) ==
            errc::invalid_argument);
    }
    gather_params gather = w.gather();
    gather.v.data = moved(gather.k.data, 32);
    CHECK(w.where.gather(gather) == errc::invalid_argument);
    CHECK(w.untouched());
  }
}

TEST_CASE("bad slots are refused before the good ones are stored") {
  for (const tested_backend& tested : all_backends()) {
    if (!tested.is_host) continue;  // a device's slots are not read on the host
    world w(tested.get());
    CAPTURE(tested.name);
    append_params append = w.append();
    append.slot_mapping = nullptr;
    CHECK(w.where.append(append) == errc::invalid_argument);
    append.slot_mapping = static_cast<const std::int64_t*>(moved(w.slot_pointer(), 4));
    CHECK(w.where.append(append) == errc::invalid_argument);
    gather_params gather = w.gather();
    gather.slot_mapping = nullptr;
    CHECK(w.where.gather(gather) == errc::invalid_argument);

    for (const std::int64_t bad :
         {num_blocks * block_size, num_blocks * block_size + 1, std::int64_t{1} << 31, std::int64_t{1} << 32, most}) {
      for (std::size_t at = 0; at < 4; ++at) {
        std::vector<std::int64_t> list{0, 1, 2, 3};
        list[at] = bad;
        device_bytes slots = upload_array(w.where, list);
        append.slot_mapping = gather.slot_mapping = reinterpret_cast<const std::int64_t*>(slots.data());
        CHECK(w.where.append(append) == errc::out_of_range);
        CHECK(w.where.gather(gather) == errc::out_of_range);
      }
    }
    CHECK(w.untouched());
  }
}

TEST_CASE("ids outside the pool are refused before the good pairs are carried out") {
  for (const tested_backend& tested : all_backends()) {
    world w(tested.get());
    CAPTURE(tested.name);
    const std::array<kv_cache_view, 1> from{w.cache.device()};
    const std::array<kv_cache_view, 1> to{w.other.device()};
    for (const std::int32_t id : {-1, least32, static_cast<std::int32_t>(num_blocks), most32}) {
      for (const bool spoil_src : {true, false}) {
        for (std::size_t at = 0; at < 3; ++at) {
          std::vector<block_copy> pairs(3, block_copy{block_id{0}, block_id{1}});
          (spoil_src ? pairs[at].src : pairs[at].dst) = block_id{id};
          CHECK(w.where.copy_blocks(from, pairs) == errc::out_of_range);
          CHECK(w.where.convert_blocks(from[0], to[0], pairs) == errc::out_of_range);
          CHECK(w.where.swap_blocks(from, to, pairs) == errc::out_of_range);
        }
      }
    }
    CHECK(w.untouched());
  }
}

TEST_CASE("an id that is too large for the smallest of several layers is refused") {
  for (const tested_backend& tested : all_backends()) {
    world w(tested.get());
    kv_cache_view small = w.cache.device();
    small.num_blocks = 2;
    const std::array<kv_cache_view, 2> layers{w.other.device(), small};
    CHECK(w.where.copy_blocks(layers, good_pairs) == errc::out_of_range);
    CHECK(w.untouched());
  }
}

TEST_CASE("caches that do not fit together are refused") {
  for (const tested_backend& tested : all_backends()) {
    world w(tested.get());
    CAPTURE(tested.name);
    struct mismatch {
      const char* what;
      layout_kind kind;
      dtype type;
      std::int32_t heads, dims, tokens;
      bool converts;
    };
    for (const mismatch& m : {mismatch{"heads", layout_kind::hnd, dtype::f16, 1, dims, block_size, false},
                              mismatch{"dims", layout_kind::hnd, dtype::f16, heads, 4, block_size, false},
                              mismatch{"tokens", layout_kind::hnd, dtype::f16, heads, dims, 2, false},
                              mismatch{"heads for dims", layout_kind::hnd, dtype::f16, dims, heads, block_size, false},
                              mismatch{"dtype", layout_kind::hnd, dtype::bf16, heads, dims, block_size, true},
                              mismatch{"layout", layout_kind::nhd, dtype::f16, heads, dims, block_size, true}}) {
      CAPTURE(m.what);
      kv_cache_view src = w.cache.device();
      src.layout = make_layout(m.kind, m.type, m.heads, m.dims, m.tokens);
      src.num_blocks = 1;
      const std::array<kv_cache_view, 1> from{src};
      const std::array<kv_cache_view, 1> to{w.other.device()};
      constexpr std::array<block_copy, 1> pair{block_copy{block_id{0}, block_id{0}}};
      CHECK(w.where.swap_blocks(from, to, pair) == errc::invalid_argument);
      CHECK(w.where.swap_blocks(to, from, pair) == errc::invalid_argument);
      if (!m.converts) CHECK(w.where.convert_blocks(src, w.other.device(), pair) == errc::invalid_argument);
    }
    const std::array<kv_cache_view, 1> one{w.cache.device()};
    const std::array<kv_cache_view, 2> two{w.other.device(), w.other.device()};
    CHECK(w.where.swap_blocks(one, two, good_pairs) == errc::invalid_argument);
    CHECK(w.where.swap_blocks(two, one, good_pairs) == errc::invalid_argument);
    CHECK(w.untouched());
  }
}

TEST_CASE("converting or swapping within one cache, or between caches that share memory, is refused") {
  for (const tested_backend& tested : all_backends()) {
    world w(tested.get());
    CAPTURE(tested.name);
    const kv_cache_view cache = w.cache.device();
    CHECK(w.where.convert_blocks(cache, cache, good_pairs) == errc::invalid_argument);
    const std::array<kv_cache_view, 1> layer{cache};
    CHECK(w.where.swap_blocks(layer, layer, good_pairs) == errc::invalid_argument);
    // The second block of the same cache posing as a cache.
    kv_cache_view inside = cache;
    inside.k = moved(cache.k, 2 * cache.layout.block_elements(cache.layout.k));
    inside.v = moved(cache.v, 2 * cache.layout.block_elements(cache.layout.k));
    inside.num_blocks = 2;
    constexpr std::array<block_copy, 1> pair{block_copy{block_id{0}, block_id{0}}};
    CHECK(w.where.convert_blocks(cache, inside, pair) == errc::invalid_argument);
    CHECK(w.where.convert_blocks(inside, cache, pair) == errc::invalid_argument);
    const std::array<kv_cache_view, 2> src{w.other.device(), cache};
    const std::array<kv_cache_view, 2> dst{inside, inside};
    CHECK(w.where.swap_blocks(src, dst, pair) == errc::invalid_argument);
    CHECK(w.untouched());
  }
}

TEST_CASE("nothing to do is ok, with null pointers where there is nothing to point to") {
  for (const tested_backend& tested : all_backends()) {
    world w(tested.get());
    CAPTURE(tested.name);
    append_params append = w.append();
    append.k.num_tokens = append.v.num_tokens = 0;
    append.k.data = append.v.data = nullptr;
    append.slot_mapping = nullptr;
    CHECK(w.where.append(append) == errc::ok);
    gather_params gather = w.gather();
    gather.k.num_tokens = gather.v.num_tokens = 0;
    gather.k.data = gather.v.data = nullptr;
    gather.slot_mapping = nullptr;
    CHECK(w.where.gather(gather) == errc::ok);
    const std::array<kv_cache_view, 1> from{w.cache.device()};
    const std::array<kv_cache_view, 1> to{w.other.device()};
    CHECK(w.where.copy_blocks(from, {}) == errc::ok);
    CHECK(w.where.copy_blocks({}, good_pairs) == errc::ok);
    CHECK(w.where.convert_blocks(from[0], to[0], {}) == errc::ok);
    CHECK(w.where.swap_blocks(from, to, {}) == errc::ok);
    CHECK(w.where.swap_blocks({}, {}, good_pairs) == errc::ok);

    kv_cache_view none = w.cache.device();
    none.k = none.v = nullptr;
    none.num_blocks = 0;
    append = w.append();
    append.kv = none;
    // Its slots are not there, which the host sees only where it can read them.
    CHECK(w.where.append(append) == (tested.is_host ? errc::out_of_range : errc::ok));
    const std::vector<std::int64_t> skipped(static_cast<std::size_t>(num_tokens), -1);
    device_bytes skip_slots = upload_array(w.where, skipped);
    append.slot_mapping = reinterpret_cast<const std::int64_t*>(skip_slots.data());
    CHECK(w.where.append(append) == errc::ok);
    CHECK(w.where.convert_blocks(none, none, {}) == errc::ok);
    CHECK(w.where.convert_blocks(none, to[0], good_pairs) == errc::out_of_range);
    CHECK(w.untouched());
  }
}

}  // namespace
