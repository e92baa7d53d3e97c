// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <bifolio/error.hpp>
#include <bifolio/kv_layout.hpp>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace bifolio;

constexpr layout_kind kinds[] = {layout_kind::hnd, layout_kind::nhd, layout_kind::x_split};

// Whether the strides of `plane` send the elements of `num_blocks` blocks onto 0 … num_blocks · block_elements − 1, one
// each.
bool is_bijection(const kv_layout& layout, const kv_plane& plane, std::int32_t num_blocks) {
  std::vector<bool> taken(static_cast<std::size_t>(num_blocks * layout.block_elements(plane)), false);
  for (std::int32_t b = 0; b < num_blocks; ++b) {
    for (std::int32_t h = 0; h < layout.num_kv_heads; ++h) {
      for (std::int32_t t = 0; t < layout.block_size; ++t) {
        for (std::int32_t d = 0; d < plane.head_dim; ++d) {
          const std::int64_t at = plane.strides.offset(block_id{b}, h, t, d);
          if (at < 0 || at >= static_cast<std::int64_t>(taken.size()) || taken[static_cast<std::size_t>(at)])
            return false;
          taken[static_cast<std::size_t>(at)] = true;
        }
      }
    }
  }
  return true;
}

TEST_CASE("every layout places each element of a block once and leaves no gap") {
  for (const layout_kind kind : kinds) {
    for (const dtype type : tensor_dtypes) {
      for (const std::int32_t heads : {1, 2, 3, 8}) {
        for (const std::int32_t dims : {1, 2, 6, 8, 48, 71, 80, 128}) {
          for (const std::int32_t tokens : {1, 5, 8, 16}) {
            const kv_layout layout = make_layout(kind, type, heads, dims, tokens);
            CAPTURE(to_string(kind));
            CAPTURE(heads);
            CAPTURE(dims);
            CAPTURE(tokens);
            CHECK(is_bijection(layout, layout.k, 2));
            CHECK(is_bijection(layout, layout.v, 2));
          }
        }
      }
    }
  }
}

TEST_CASE("hnd is [num_kv_heads, block_size, head_dim] and nhd is [block_size, num_kv_heads, head_dim]") {
  constexpr std::int64_t heads = 3;
  constexpr std::int64_t dims = 10;
  constexpr std::int64_t tokens = 4;
  const kv_layout hnd = make_layout(layout_kind::hnd, dtype::f16, heads, dims, tokens);
  const kv_layout nhd = make_layout(layout_kind::nhd, dtype::f16, heads, dims, tokens);
  for (std::int32_t h = 0; h < heads; ++h) {
    for (std::int32_t t = 0; t < tokens; ++t) {
      for (std::int32_t d = 0; d < dims; ++d) {
        const std::int64_t block = 7 * heads * dims * tokens;
        CHECK(hnd.k.strides.offset(block_id{7}, h, t, d) == block + (h * tokens + t) * dims + d);
        CHECK(nhd.v.strides.offset(block_id{7}, h, t, d) == block + (t * heads + h) * dims + d);
      }
    }
  }
}

TEST_CASE("x_split is vLLM's K [heads, head_dim / x, block_size, x] and V [heads, head_dim, block_size]") {
  for (const dtype type : tensor_dtypes) {
    constexpr std::int64_t heads = 2;
    constexpr std::int64_t dims = 48;
    constexpr std::int64_t tokens = 5;
    const auto x = static_cast<std::int64_t>(16 / size_of(type));
    const kv_layout layout = make_layout(layout_kind::x_split, type, heads, dims, tokens);
    CHECK(layout.k.strides.chunk == x);
    for (std::int32_t h = 0; h < heads; ++h) {
      for (std::int32_t t = 0; t < tokens; ++t) {
        for (std::int32_t d = 0; d < dims; ++d) {
          const std::int64_t block = 3 * heads * dims * tokens;
          CHECK(layout.k.strides.offset(block_id{3}, h, t, d) ==
                block + ((h * (dims / x) + d / x) * tokens + t) * x + d % x);
          CHECK(layout.v.strides.offset(block_id{3}, h, t, d) == block + (h * dims + d) * tokens + t);
        }
      }
    }
  }
}

TEST_CASE("x of x_split is halved until it divides head_dim") {
  CHECK(make_layout(layout_kind::x_split, dtype::f16, 1, 12, 4).k.strides.chunk == 4);
  CHECK(make_layout(layout_kind::x_split, dtype::f16, 1, 6, 4).k.strides.chunk == 2);
  CHECK(make_layout(layout_kind::x_split, dtype::bf16, 1, 71, 4).k.strides.chunk == 1);
  CHECK(make_layout(layout_kind::x_split, dtype::f32, 1, 6, 4).k.strides.chunk == 2);
}

TEST_CASE("block and slot arithmetic does not wrap past 2^31 and 2^32 elements") {
  const kv_layout layout = make_layout(layout_kind::hnd, dtype::f16, 8, 128, 16);
  constexpr std::int32_t far = std::numeric_limits<std::int32_t>::max();
  CHECK(layout.k.strides.offset(block_id{far}, 7, 15, 127) == (std::int64_t{far} + 1) * 16 * 8 * 128 - 1);
  CHECK(to_index(make_slot(block_id{far}, 15, 16)) == std::int64_t{far} * 16 + 15);
  CHECK(blocks_for(0, 16) == 0);
  CHECK(blocks_for(1, 16) == 1);
  CHECK(blocks_for(16, 16) == 1);
  CHECK(blocks_for(17, 16) == 2);
  CHECK(blocks_for(std::numeric_limits<std::int64_t>::max(), 16) == (std::int64_t{1} << 59));
  const kv_layout wide = make_layout(layout_kind::nhd, dtype::f32, 1 << 10, 1 << 10, 1 << 10);
  CHECK(wide.block_elements(wide.k) == std::int64_t{1} << 30);
  CHECK(wide.block_bytes() == std::int64_t{1} << 33);
}

void check_refused(layout_kind kind, dtype type, std::int32_t heads, std::int32_t dims, std::int32_t tokens,
                   const std::string& part_of_sentence) {
  try {
    (void)make_layout(kind, type, heads, dims, tokens);
    FAIL("accepted " << heads << " " << dims << " " << tokens);
  } catch (const error& problem) {
    CHECK(problem.code() == errc::invalid_argument);
    const std::string sentence = problem.what();
    CAPTURE(sentence);
    CHECK(sentence.find(part_of_sentence) != std::string::npos);
  }
}

TEST_CASE("make_layout refuses what it cannot lay out and names the value") {
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  constexpr std::int32_t least = std::numeric_limits<std::int32_t>::min();
  for (const layout_kind kind : kinds) {
    for (const std::int32_t bad : {0, -1, least}) {
      check_refused(kind, dtype::f32, bad, 8, 8, "num_kv_heads is " + std::to_string(bad) + "; it must be at least 1");
      check_refused(kind, dtype::f32, 8, bad, 8, "head_dim is " + std::to_string(bad));
      check_refused(kind, dtype::f32, 8, 8, bad, "block_size is " + std::to_string(bad));
    }
    check_refused(kind, dtype::f16, most, most, most, "2147483647 * 2147483647 * 2147483647");
    check_refused(kind, dtype::f16, 1 << 20, 1 << 10, 1 << 10, "the largest allowed value is 1099511627776");
    check_refused(kind, static_cast<dtype>(9), 8, 8, 8, "dtype number 9");
  }
  check_refused(layout_kind::strided, dtype::f32, 8, 8, 8, "strided");
  CHECK_NOTHROW((void)make_layout(layout_kind::hnd, dtype::f16, 1 << 18, 1 << 10, 1 << 10));  // 2^40 bytes exactly
}

TEST_CASE("layout names read back, and other names are refused with the allowed ones") {
  for (const layout_kind kind : kinds) CHECK(parse_layout(to_string(kind)) == kind);
  for (const char* text : {"", "HND", "strided", "xsplit"}) {
    try {
      (void)parse_layout(text);
      FAIL("accepted " << text);
    } catch (const error& problem) {
      CHECK(problem.code() == errc::invalid_argument);
      CHECK(std::string(problem.what()) == "layout '" + std::string(text) + "' is not one of hnd, nhd, x_split");
    }
  }
}

TEST_CASE("planes of different head_dim are laid out like layouts of their own") {
  for (const layout_kind kind : kinds) {
    for (const dtype type : tensor_dtypes) {
      for (const auto& dims : {std::pair{6, 8}, {33, 17}, {17, 33}, {192, 128}, {1, 5}}) {
        const kv_layout layout = make_layout(kind, {type}, {type}, 3, dims.first, dims.second, 5);
        CHECK(layout.k == make_layout(kind, type, 3, dims.first, 5).k);
        CHECK(layout.v == make_layout(kind, type, 3, dims.second, 5).v);
        CHECK(is_bijection(layout, layout.k, 2));
        CHECK(is_bijection(layout, layout.v, 2));
        const auto element = static_cast<std::int64_t>(size_of(type));
        CHECK(layout.block_bytes(layout.k) == 3 * 5 * dims.first * element);
        CHECK(layout.block_bytes(layout.v) == 3 * 5 * dims.second * element);
        CHECK(layout.block_bytes() == 3 * 5 * (dims.first + dims.second) * element);
      }
      CHECK(make_layout(kind, {type}, {type}, 2, 48, 48, 5) == make_layout(kind, type, 2, 48, 5));
    }
  }
}

TEST_CASE("V in K is stored once, where K is") {
  for (const layout_kind kind : kinds) {
    const kv_layout layout = make_layout(kind, {dtype::bf16}, {dtype::bf16}, 1, 576, 512, 16, true);
    CHECK(layout.v_in_k);
    CHECK(layout.v.head_dim == 512);
    CHECK(layout.v.strides == layout.k.strides);
    CHECK(layout.block_bytes() == 576 * 16 * 2);
    CHECK(layout != make_layout(kind, {dtype::bf16}, {dtype::bf16}, 1, 576, 512, 16));
    CHECK(is_bijection(layout, layout.k, 2));
  }
  int memory = 0;
  int other = 0;
  kv_cache_view view{&memory, &other, 1, make_layout(layout_kind::hnd, dtype::f32, 1, 4, 4)};
  CHECK(view.v_data() == &other);
  view.layout.v_in_k = true;
  CHECK(view.v_data() == &memory);
}

TEST_CASE("a block's tail of scales counts, and codes say their names") {
  kv_layout layout = make_layout(layout_kind::hnd, dtype::f16, 2, 64, 16);
  CHECK(layout.block_tail_bytes(layout.k) == 0);
  CHECK(layout.block_tail_bytes(layout.v) == 0);
  layout.k.code = {dtype::f16, scale_granularity::token_head, dtype::f32};
  layout.v.code = {dtype::f16, scale_granularity::head, dtype::f32};
  CHECK(layout.block_tail_bytes(layout.k) == 2 * 16 * 4);
  CHECK(layout.block_tail_bytes(layout.v) == 0);
  CHECK(layout.block_bytes(layout.k) == 2 * 16 * 64 * 2 + 2 * 16 * 4);
  CHECK(layout.block_bytes() == layout.block_bytes(layout.k) + layout.block_bytes(layout.v));
  CHECK(to_string(kv_code{dtype::bf16}) == "bf16");
  CHECK(to_string(layout.k.code) == "f16, scale per token_head (f32)");
  CHECK(to_string(scale_granularity::none) == "none");
  CHECK(to_string(scale_granularity::layer) == "layer");
  CHECK(to_string(scale_granularity::head) == "head");
  CHECK(to_string(scale_granularity::token_head) == "token_head");
  CHECK(to_string(scale_granularity::record) == "record");
}

TEST_CASE("records are rows of 656 bytes, of one shape alone") {
  const kv_code record = parse_kv_code("e4m3-record");
  CHECK(record == kv_code{dtype::e4m3, scale_granularity::record});
  for (const layout_kind kind : {layout_kind::hnd, layout_kind::nhd}) {
    const kv_layout layout = make_layout(kind, record, record, 1, 576, 512, 64, true);
    CHECK(layout.block_bytes() == 64 * 656);
    CHECK(layout.k.strides.block == 64 * 656);
    CHECK(layout.k.strides.token == 656);
    CHECK(layout.k.strides.offset(block_id{2}, 0, 3, 511) == 2 * 64 * 656 + 3 * 656 + 511);
    CHECK(layout.v.strides == layout.k.strides);
  }
  CHECK(make_layout(layout_kind::hnd, record, record, 2, 576, 512, 16, true).k.strides.head == 16 * 656);
  CHECK(make_layout(layout_kind::nhd, record, record, 2, 576, 512, 16, true).k.strides.token == 2 * 656);
  const auto sentence = [&](layout_kind kind, kv_code v, std::int32_t qk_dims, std::int32_t v_dims, bool v_in_k) {
    try {
      (void)make_layout(kind, record, v, 1, qk_dims, v_dims, 16, v_in_k);
    } catch (const error& problem) {
      CHECK(problem.code() == errc::invalid_argument);
      return std::string(problem.what());
    }
    return std::string("accepted");
  };
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  CHECK(has(sentence(layout_kind::hnd, record, 192, 128, true),
            "scales per record with head dims 192 and 128 and V part of K; records have 576 and 512, and V is part"));
  CHECK(has(sentence(layout_kind::hnd, record, 576, 512, false), "576 and 512 and a V of its own; records have"));
  CHECK(has(sentence(layout_kind::hnd, {dtype::bf16}, 576, 512, false), "records have 576 and 512"));
  CHECK(has(sentence(layout_kind::x_split, record, 576, 512, true), "x_split divides rows"));
}

TEST_CASE("scales per token and head lie behind the elements of their block, and K and V may have different codes") {
  const kv_code k{dtype::i8, scale_granularity::token_head};
  const kv_code v{dtype::u8, scale_granularity::token_head};
  const kv_layout layout = make_layout(layout_kind::nhd, k, v, 3, 24, 10, 5);
  CHECK(layout.block_payload_bytes(layout.k) == 360);
  CHECK(layout.k.tail == kv_tail_strides{.offset = 384, .head = 20, .token = 4});
  CHECK(layout.block_tail_bytes(layout.k) == 60);
  CHECK(layout.block_bytes(layout.k) == 512);  // 384 + 60, up to a multiple of 128
  CHECK(layout.k.strides.block == 512);
  CHECK(layout.v.tail == kv_tail_strides{.offset = 192, .head = 40, .token = 8});
  CHECK(layout.block_bytes(layout.v) == 384);
  CHECK(layout.block_bytes() == 896);
  const kv_layout mixed = make_layout(layout_kind::x_split, {dtype::e4m3}, {dtype::bf16}, 2, 64, 64, 16);
  CHECK(mixed.k.strides.chunk == 16);  // 16 bytes of either
  CHECK(mixed.block_bytes(mixed.k) == 2 * 64 * 16);
  CHECK(mixed.block_bytes(mixed.v) == 2 * 64 * 16 * 2);
  const kv_layout latent = make_layout(layout_kind::hnd, k, k, 1, 576, 512, 16, true);
  CHECK(latent.v.tail == latent.k.tail);
  CHECK(latent.block_bytes() == 16 * 576 + 128);
}

TEST_CASE("codes have names for programs, and others are refused with the allowed ones") {
  for (const char* name : {"f32", "f16", "bf16", "e4m3", "e5m2", "i8", "e4m3-head", "e5m2-head", "i8-head",
                           "e4m3-token", "i8-token", "u8-token", "e4m3-record", "e4m3-unscaled", "e5m2-unscaled"}) {
    CHECK(short_name(parse_kv_code(name)) == name);
  }
  CHECK(parse_kv_code("e4m3") == kv_code{dtype::e4m3, scale_granularity::layer});
  CHECK(parse_kv_code("u8-token") == kv_code{dtype::u8, scale_granularity::token_head});
  CHECK(short_name({dtype::i8}) == "unknown");
  for (const char* name : {"", "fp8", "u8", "e4m3-layer", "E4M3"}) {
    try {
      (void)parse_kv_code(name);
      FAIL("accepted ", name);
    } catch (const error& problem) {
      CHECK(problem.code() == errc::invalid_argument);
      CHECK(std::string(problem.what()).find("is not one of f32, f16, bf16, e4m3, e5m2, i8") != std::string::npos);
    }
  }
}

TEST_CASE("make_layout refuses planes that it cannot lay out, by name") {
  const auto refused = [](kv_code k, kv_code v, std::int32_t qk_dims, std::int32_t v_dims, bool v_in_k, errc code,
                          const char* part) {
    try {
      (void)make_layout(layout_kind::hnd, k, v, 2, qk_dims, v_dims, 4, v_in_k);
      FAIL("accepted ", to_string(k), " and ", to_string(v));
    } catch (const error& problem) {
      CHECK(problem.code() == code);
      const std::string sentence = problem.what();
      CAPTURE(sentence);
      CHECK(sentence.find(part) != std::string::npos);
    }
  };
  const kv_code plain{dtype::f16};
  const auto scaled = [](scale_granularity granularity) { return kv_code{dtype::f16, granularity, dtype::f32}; };
  refused(scaled(scale_granularity::token_head), plain, 8, 8, false, errc::unsupported,
          "code 'f16, scale per token_head (f32)' of the K plane is not supported; there are f32, f16");
  refused(plain, scaled(scale_granularity::layer), 8, 8, false, errc::unsupported,
          "code 'f16, scale per layer (f32)' of the V plane is not supported");
  refused(scaled(scale_granularity::head), scaled(scale_granularity::head), 8, 8, true, errc::unsupported, "per head");
  for (const kv_code& code : {kv_code{dtype::i8}, kv_code{dtype::u8}, kv_code{dtype::u8, scale_granularity::layer},
                              kv_code{dtype::e5m2, scale_granularity::token_head},
                              kv_code{dtype::e4m3, scale_granularity::token_head, dtype::f16}}) {
    refused(code, plain, 8, 8, false, errc::unsupported, "of the K plane is not supported");
  }
  refused(plain, {dtype::bf16}, 8, 8, true, errc::invalid_argument, "the code of V is bf16");
  refused(plain, plain, 8, 9, true, errc::invalid_argument, "v_head_dim is 9; where V is part of K");
  refused(plain, plain, 0, 8, false, errc::invalid_argument, "qk_head_dim is 0");
  refused(plain, plain, 8, -1, false, errc::invalid_argument, "v_head_dim is -1");
  refused({static_cast<dtype>(9)}, plain, 8, 8, false, errc::invalid_argument, "dtype number 9 of the K plane");
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  try {
    (void)make_layout(layout_kind::hnd, plain, plain, most, 8, most, most);
    FAIL("accepted");
  } catch (const error& problem) {
    CHECK(problem.code() == errc::invalid_argument);
  }
}

}  // namespace
