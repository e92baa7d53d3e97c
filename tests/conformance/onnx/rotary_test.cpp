// SPDX-License-Identifier: Apache-2.0
// ONNX's own test cases for RotaryEmbedding on every backend: outputs that come neither from this library nor from its
// oracle. The heads of X are rotated as q and as k; k is read back from a float32 cache.
//
// Tolerance. Both compute in float32 with at most two roundings of products and one of a sum; the cases' numbers are
// below 2.
#include <doctest/doctest.h>

#include <bifolio/backend.hpp>
#include <bifolio/rotate_append.hpp>
#include <cmath>
#include <vector>

#include "conformance/onnx/fixture.hpp"
#include "support/backends.hpp"
#include "support/device_bytes.hpp"
#include "support/elements.hpp"

using namespace bifolio;
using namespace bifolio::test;
using namespace bifolio::test::onnx;

namespace {

constexpr std::size_t num_cases = 8;
constexpr double tolerance = 8 * 0x1p-24;

/// X as rows [batch · sequence, heads, head_dim], the table with a row for each position, and who is at which.
struct rotary_case {
  std::int32_t num_heads = 0;
  std::int32_t head_dim = 0;
  std::vector<float> rows;
  std::vector<double> expected;  ///< in the order of rows
  rotary_params how;
  std::vector<float> table;
  std::vector<std::int32_t> positions;
};

rotary_case read(const node_case& from) {
  rotary_case read;
  const tensor& x = *from.input("X");
  const tensor& y = *from.output("Y");
  const tensor& cosines = *from.input("cos_cache");
  const tensor& sines = *from.input("sin_cache");
  const bool packed = x.shape.size() == 3;  // heads inside the last extent, else before the sequence
  const std::int64_t batch = x.shape[0];
  const std::int64_t sequence = packed ? x.shape[1] : x.shape[2];
  const std::int64_t heads = packed ? static_cast<std::int64_t>(from.number("num_heads", 0)) : x.shape[1];
  const std::int64_t dims = packed ? x.shape[2] / heads : x.shape[3];
  read.num_heads = static_cast<std::int32_t>(heads);
  read.head_dim = static_cast<std::int32_t>(dims);
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t s = 0; s < sequence; ++s) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t d = 0; d < dims; ++d) {
          const std::int64_t index =
              packed ? ((b * sequence + s) * heads + h) * dims + d : ((b * heads + h) * sequence + s) * dims + d;
          read.rows.push_back(static_cast<float>(x.values[static_cast<std::size_t>(index)]));
          read.expected.push_back(y.values[static_cast<std::size_t>(index)]);
        }
      }
    }
  }
  const auto pairs = static_cast<std::size_t>(cosines.shape.back());
  read.how.pairing = from.number("interleaved", 0) != 0 ? rope_pairing::gptj : rope_pairing::neox;
  read.how.rotary_dim = static_cast<std::int32_t>(2 * pairs);
  REQUIRE(read.how.rotary_dim ==
          static_cast<std::int32_t>(from.number("rotary_embedding_dim", static_cast<double>(dims))));
  for (std::size_t row = 0; row < cosines.values.size() / pairs; ++row) {
    for (const tensor* half : {&cosines, &sines}) {
      for (std::size_t i = 0; i < pairs; ++i) read.table.push_back(static_cast<float>(half->values[row * pairs + i]));
    }
  }
  read.how.num_positions = static_cast<std::int64_t>(cosines.values.size() / pairs);
  const tensor* const ids = from.input("position_ids");  // without them the table has a row for each token
  for (std::int64_t t = 0; t < batch * sequence; ++t) {
    read.positions.push_back(
        static_cast<std::int32_t>(ids == nullptr ? static_cast<double>(t) : ids->values[static_cast<std::size_t>(t)]));
  }
  return read;
}

std::int64_t count_wrong(const std::vector<std::byte>& bytes, const std::vector<double>& expected) {
  std::int64_t wrong = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto got = static_cast<double>(load_element(bytes.data(), dtype::f32, static_cast<std::int64_t>(i)));
    wrong += !(std::fabs(got - expected[i]) <= tolerance);
  }
  return wrong;
}

}  // namespace

TEST_CASE("rotate_append gives ONNX's results for all of its cases of RotaryEmbedding") {
  std::size_t num_read = 0;
  for (const node_case& each : read_fixture(in_tree("tests/conformance/onnx")).cases) {
    if (each.op != "RotaryEmbedding") continue;
    ++num_read;
    const rotary_case c = read(each);
    const auto num_tokens = static_cast<std::int64_t>(c.positions.size());
    const kv_layout layout = make_layout(layout_kind::hnd, dtype::f32, c.num_heads, c.head_dim, 4);
    const std::int64_t num_blocks = blocks_for(num_tokens, layout.block_size);
    for (const tested_backend& tested : all_backends()) {
      CAPTURE(each.name);
      CAPTURE(tested.name);
      backend& where = tested.get();
      const auto upload = [&](const auto& values) { return device_bytes(where, bytes_of(values), 4); };
      device_bytes rows = upload(c.rows);
      device_bytes rotated = upload(std::vector<float>(c.rows.size()));
      device_bytes back = upload(std::vector<float>(c.rows.size()));
      device_bytes ignored = upload(std::vector<float>(c.rows.size()));
      device_bytes table = upload(c.table);
      device_bytes positions = upload(c.positions);
      std::vector<std::int64_t> list;
      for (std::int64_t t = 0; t < num_tokens; ++t) list.push_back(t);
      device_bytes slots(where, bytes_of(list), 8);
      device_bytes cache =
          upload(std::vector<float>(static_cast<std::size_t>(2 * num_blocks * layout.block_elements(layout.k))));
      const kv_cache_view kv{cache.data(), cache.data() + num_blocks * layout.block_bytes(layout.k), num_blocks,
                             layout};
      const auto view = [&](device_bytes& bytes) {
        return dense_view<void>(bytes.data(), dtype::f32, num_tokens, c.num_heads, c.head_dim);
      };
      rotate_append_params params;
      const auto* const slot_list = reinterpret_cast<const std::int64_t*>(slots.data());
      params.append = {kv, as_const(view(rows)), as_const(view(rows)), slot_list};
      params.q = as_const(view(rows));
      params.q_out = view(rotated);
      params.rotary = c.how;
      params.rotary.cos_sin = reinterpret_cast<const float*>(table.data());
      params.rotary.positions = reinterpret_cast<const std::int32_t*>(positions.data());
      REQUIRE(where.rotate_append(params) == errc::ok);
      REQUIRE(where.gather({kv, view(back), view(ignored), slot_list}) == errc::ok);
      CHECK(count_wrong(rotated.read(), c.expected) == 0);
      CHECK(count_wrong(back.read(), c.expected) == 0);
      CHECK(ignored.holds(bytes_of(c.rows)));
    }
  }
  CHECK(num_read == num_cases);
}
