// SPDX-License-Identifier: Apache-2.0
// rotate_append on every backend: the bits of the promised arithmetic, that arithmetic against float64, and refusals.
#include <doctest/doctest.h>

#include <array>
#include <bifolio/backend.hpp>
#include <bifolio/rotate_append.hpp>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "reference/rotate_oracle.hpp"
#include "support/backends.hpp"
#include "support/coded_pair.hpp"
#include "support/covering.hpp"
#include "support/random.hpp"

namespace {

using namespace bifolio;
using namespace bifolio::test;

constexpr std::array<std::int32_t, 9> head_dims{2, 8, 48, 71, 64, 128, 256, 300, 576};
constexpr std::array<std::int32_t, 4> block_sizes{1, 5, 16, 32};
constexpr std::array<std::int32_t, 3> head_counts{1, 3, 8};

template <class T>
const T* array_at(device_bytes& bytes) {
  return bytes.image().empty() ? nullptr : reinterpret_cast<const T*>(bytes.data());
}

/// Which dims are rotated.
enum class rotary_kind : std::uint8_t { none, all, first_part, last_part, middle };
constexpr std::size_t num_rotary_kinds = 5;
/// Who says the position of a pair.
enum class axes_kind : std::uint8_t { one, sections, interleaved };
constexpr std::size_t num_axes_kinds = 3;
enum class queries_kind : std::uint8_t { none, in_place, apart, narrow };  // narrow: of another type, in turn
constexpr std::size_t num_queries_kinds = 4;

/// Rows of queries with gaps between heads and tokens, on the device and on the host.
class queries_pair {
 public:
  queries_pair(backend& where, dtype type, std::int64_t tokens, std::int32_t heads, std::int32_t dims, bool dense,
               random_source& random)
      : view_(dense_view<void>(nullptr, type, tokens, heads, dims)) {
    if (!dense) {
      view_.head_stride += 3;
      view_.token_stride = heads * view_.head_stride + 5;
    }
    host_ = hard_elements(random, type, tokens * view_.token_stride + 1);
    soften(host(), random);
    device_ = device_bytes(where, host_, size_of(type));
  }

  [[nodiscard]] tensor_view device() noexcept { return at(device_.data()); }
  [[nodiscard]] tensor_view host() noexcept { return at(host_.data()); }
  [[nodiscard]] bool equal() const { return device_.holds(host_); }
  [[nodiscard]] std::vector<std::byte> read() const { return device_.read(); }

 private:
  [[nodiscard]] tensor_view at(std::byte* base) const noexcept {
    tensor_view view = view_;
    view.data = base;
    return view;
  }

  tensor_view view_;
  std::vector<std::byte> host_;
  device_bytes device_;
};

/// A table, positions, axes and weights, on the device and on the host.
class rotation_pair {
 public:
  rotation_pair(backend& where, rope_pairing pairing, rotary_kind kind, axes_kind axes, bool q_norm, bool k_norm,
                std::int64_t num_tokens, std::int32_t head_dim, random_source& random) {
    const std::int32_t whole = head_dim / 2 * 2;
    host_.pairing = pairing;
    host_.rotary_dim = kind == rotary_kind::none ? 0 : kind == rotary_kind::all ? whole : (whole + 2) / 4 * 2;
    // Of the dims that kernels like, multiples of 16, as well as of others.
    if (kind == rotary_kind::middle && head_dim >= 64 && random.one_in(2)) host_.rotary_dim = 32;
    if (kind == rotary_kind::last_part) host_.rotary_offset = head_dim - host_.rotary_dim;
    if (kind == rotary_kind::middle)
      host_.rotary_offset = std::min((head_dim - host_.rotary_dim) / 2 / 8 * 8 + 8, head_dim - host_.rotary_dim);
    host_.num_positions = random.between(1, 40);
    host_.num_axes = axes == axes_kind::one ? 1 : 3;
    const std::int32_t pairs = host_.rotary_dim / 2;
    for (std::int64_t p = 0; p < host_.num_positions; ++p) {
      for (const bool sine : {false, true}) {
        for (std::int32_t i = 0; i < pairs; ++i) {
          const double angle = static_cast<double>(p) * std::pow(100.0, -static_cast<double>(i) / pairs);
          table_.push_back(static_cast<float>(sine ? std::sin(angle) : std::cos(angle)));
        }
      }
    }
    for (std::int64_t i = 0; i < host_.num_axes * num_tokens; ++i) {
      positions_.push_back(static_cast<std::int32_t>(random.between(0, host_.num_positions - 1)));
    }
    for (std::int32_t i = 0; i < pairs && axes != axes_kind::one; ++i) {
      axes_.push_back(static_cast<std::uint8_t>(axes == axes_kind::interleaved ? i % 3 : 3 * i / pairs));
    }
    for (std::int32_t d = 0; d < head_dim; ++d) {
      if (q_norm) q_weights_.push_back(normal_from(random.next()));
      if (k_norm) k_weights_.push_back(1.0f + 0.1f * normal_from(random.next()));
    }
    device_table_ = upload_array(where, table_);
    device_positions_ = upload_array(where, positions_);
    device_axes_ = upload_array(where, axes_);
    device_q_weights_ = upload_array(where, q_weights_);
    device_k_weights_ = upload_array(where, k_weights_);
  }

  void set(rotate_append_params& params, bool on_device) {
    params.rotary = host_;
    params.rotary.cos_sin = on_device ? array_at<float>(device_table_) : table_.data();
    params.rotary.positions = on_device ? array_at<std::int32_t>(device_positions_) : positions_.data();
    params.rotary.axis_of_pair = axes_.empty() ? nullptr
                                 : on_device   ? array_at<std::uint8_t>(device_axes_)
                                               : axes_.data();
    const auto weights = [&](std::vector<float>& host, device_bytes& device) -> const float* {
      return host.empty() ? nullptr : on_device ? array_at<float>(device) : host.data();
    };
    params.norm = {weights(q_weights_, device_q_weights_), weights(k_weights_, device_k_weights_), 1e-5f};
  }

 private:
  rotary_params host_;
  std::vector<float> table_;
  std::vector<std::int32_t> positions_;
  std::vector<std::uint8_t> axes_;
  std::vector<float> q_weights_;
  std::vector<float> k_weights_;
  device_bytes device_table_, device_positions_, device_axes_, device_q_weights_, device_k_weights_;
};

TEST_CASE("rotate_append writes the promised bits of q, k and v and touches nothing else") {
  std::size_t turn = 0;
  for (std::uint64_t round = 0; round < 2; ++round) {
    const auto cases =
        pairwise_rows({std::size(all_code_orders), all_codes().size(), all_codes().size(), num_v_kinds,
                       head_dims.size(), block_sizes.size(), head_counts.size(), num_tensor_dtypes,
                       std::size(all_row_orders), num_rotary_kinds, num_axes_kinds, num_queries_kinds, 2, 4},
                      hash_of(test_seed(), round, 70));
    for (const auto& c : cases) {
      ++turn;
      const coded_shape shape = coded_shape_of(c[1], c[2], c[3], head_counts[c[6]], head_dims[c[4]], block_sizes[c[5]]);
      const kv_layout layout = coded_layout(all_code_orders[c[0]], shape);
      const dtype type = tensor_dtypes[c[7]];
      const auto queries = static_cast<queries_kind>(c[11]);
      for (const tested_backend* tested : one_per_family(turn)) {
        random_source random(hash_of(test_seed(), turn, 71));
        backend& where = tested->get();
        const std::int64_t num_blocks = random.between(1, 4);
        const std::int64_t num_tokens = random.between(1, 2 * shape.block_size + 5);
        coded_pair cache(where, layout, num_blocks, random);
        rows_pair rows(where, all_row_orders[c[8]], type, num_tokens, shape.num_kv_heads, shape.qk_head_dim,
                       shape.v_in_k ? 0 : shape.v_head_dim, random);
        soften(rows.host_k(), random);
        soften(rows.host_v(), random);
        rows.upload();
        rotation_pair rotation(where, c[12] == 0 ? rope_pairing::neox : rope_pairing::gptj,
                               static_cast<rotary_kind>(c[9]), static_cast<axes_kind>(c[10]), (c[13] & 1) != 0,
                               (c[13] & 2) != 0, num_tokens, shape.qk_head_dim, random);
        const std::int32_t num_q_heads = shape.num_kv_heads * (random.one_in(2) ? 1 : 4);
        queries_pair q(where, type, num_tokens, num_q_heads, shape.qk_head_dim, random.one_in(2), random);
        queries_pair q_out(where, queries == queries_kind::narrow ? tensor_dtypes[turn % num_tensor_dtypes] : type,
                           num_tokens, num_q_heads, shape.qk_head_dim, random.one_in(2), random);
        const std::vector<std::int64_t> slots =
            random_slots(random, num_tokens, num_blocks, shape.block_size, tested->is_host);
        device_bytes device_slots = upload_array(where, slots);

        rotate_append_params params;
        params.append = {cache.device(), as_const(rows.device_k()), as_const(rows.device_v()),
                         array_at<std::int64_t>(device_slots)};
        rotate_append_params expected;
        expected.append = {cache.host(), as_const(rows.host_k()), as_const(rows.host_v()), slots.data()};
        if (queries != queries_kind::none) {
          const bool in_place = queries == queries_kind::in_place;
          params.q = as_const(q.device());
          params.q_out = in_place ? q.device() : q_out.device();
          expected.q = as_const(q.host());
          expected.q_out = in_place ? q.host() : q_out.host();
        }
        rotation.set(params, true);
        rotation.set(expected, false);
        const std::string what = tested->name + " " + text_of_codes(layout) + " rows " + std::string(to_string(type)) +
                                 " rotary " + std::to_string(params.rotary.rotary_dim) + " from " +
                                 std::to_string(params.rotary.rotary_offset) + (c[12] == 0 ? " neox" : " gptj") +
                                 " axes " + std::to_string(params.rotary.num_axes) + " norms " + std::to_string(c[13]) +
                                 " queries " + std::to_string(c[11]) + " case " + std::to_string(turn) + " " +
                                 seed_note();
        CAPTURE(what);
        REQUIRE(where.rotate_append(params) == errc::ok);
        oracle_rotate_append(expected);
        REQUIRE(cache.difference() == "");
        REQUIRE(q.equal());
        REQUIRE(q_out.equal());
        REQUIRE(rows.equal());
      }
    }
  }
}

// Devices may have a kernel for heads that come and go in runs.
TEST_CASE("rotate_append of aligned heads of every type stores every code bit for bit") {
  constexpr std::int32_t run_dims[] = {64, 128, 256};
  constexpr std::int64_t num_tokens = 29;
  std::size_t turn = 0;
  for (const dtype type : tensor_dtypes) {
    for (const kv_code& code : all_codes()) {
      for (const bool norm : {true, false}) {
        ++turn;
        const std::int32_t dims = run_dims[turn % std::size(run_dims)];
        const kv_code v = turn % 4 == 0 ? kv_code{type} : code;
        for (const tested_backend* tested : one_per_family(turn)) {
          random_source random(hash_of(test_seed(), turn, 76));
          backend& where = tested->get();
          const kv_layout layout =
              coded_layout(turn % 2 == 0 ? code_order::hnd : code_order::nhd, {code, v, 3, dims, dims, 16, false});
          coded_pair cache(where, layout, 3, random, true);
          rows_pair rows(where, row_order::dense, type, num_tokens, 3, dims, random);
          soften(rows.host_k(), random);
          soften(rows.host_v(), random);
          rows.upload();
          rotation_pair rotation(where, turn % 3 == 0 ? rope_pairing::gptj : rope_pairing::neox,
                                 turn % 5 == 0 ? rotary_kind::middle : rotary_kind::all,
                                 turn % 7 == 0 ? axes_kind::interleaved : axes_kind::one, norm, norm, num_tokens, dims,
                                 random);
          queries_pair q(where, type, num_tokens, 6, dims, true, random);
          const std::vector<std::int64_t> slots = random_slots(random, num_tokens, 3, 16, tested->is_host);
          device_bytes device_slots = upload_array(where, slots);
          rotate_append_params params;
          params.append = {cache.device(), as_const(rows.device_k()), as_const(rows.device_v()),
                           array_at<std::int64_t>(device_slots)};
          params.q = as_const(q.device());
          params.q_out = q.device();
          rotate_append_params expected;
          expected.append = {cache.host(), as_const(rows.host_k()), as_const(rows.host_v()), slots.data()};
          expected.q = as_const(q.host());
          expected.q_out = q.host();
          rotation.set(params, true);
          rotation.set(expected, false);
          const std::string what = tested->name + " " + text_of_codes(layout) + " rows " +
                                   std::string(to_string(type)) + (norm ? " norm" : "") + " case " +
                                   std::to_string(turn) + " " + seed_note();
          CAPTURE(what);
          REQUIRE(where.rotate_append(params) == errc::ok);
          oracle_rotate_append(expected);
          REQUIRE(cache.difference() == "");
          REQUIRE(q.equal());
        }
      }
    }
  }
}

TEST_CASE("rotate_append stores records, whichever dims it rotates: latent attention wants the last 64") {
  const kv_code record{dtype::e4m3, scale_granularity::record};
  constexpr code_order orders[] = {code_order::hnd, code_order::nhd, code_order::padded};
  constexpr std::int64_t num_tokens = 21;
  std::size_t turn = 0;
  for (const rotary_kind kind : {rotary_kind::all, rotary_kind::none, rotary_kind::last_part, rotary_kind::middle}) {
    for (const rope_pairing pairing : {rope_pairing::neox, rope_pairing::gptj}) {
      for (const dtype type : tensor_dtypes) {
        for (const bool at_packs : {true, false}) {
          ++turn;
          for (const tested_backend* tested : one_per_family(turn)) {
            random_source random(hash_of(test_seed(), turn, 75));
            backend& where = tested->get();
            const std::int32_t heads = random.one_in(3) ? 2 : 1;
            const kv_layout layout =
                coded_layout(orders[turn / 2 % std::size(orders)], {record, record, heads, 576, 512, 16, true});
            coded_pair cache(where, layout, 3, random);
            rows_pair rows(where, at_packs ? row_order::dense : row_order::spread, type, num_tokens, heads, 576, 0,
                           random);
            soften(rows.host_k(), random);
            rows.upload();
            const bool latent = kind == rotary_kind::all;  // 64 dims of their own
            const bool norm = !latent && random.one_in(2);
            rotation_pair rotation(where, pairing, kind, axes_kind::one, norm, norm, num_tokens, latent ? 64 : 576,
                                   random);
            queries_pair q(where, type, num_tokens, 4 * heads, 576, at_packs, random);
            queries_pair q_out(where, type, num_tokens, 4 * heads, 576, true, random);
            const std::vector<std::int64_t> slots = random_slots(random, num_tokens, 3, 16, tested->is_host);
            device_bytes device_slots = upload_array(where, slots);
            rotate_append_params params;
            params.append = {cache.device(), as_const(rows.device_k()), {}, array_at<std::int64_t>(device_slots)};
            rotate_append_params expected;
            expected.append = {cache.host(), as_const(rows.host_k()), {}, slots.data()};
            if (random.one_in(2)) {
              params.q = as_const(q.device());
              params.q_out = q_out.device();
              expected.q = as_const(q.host());
              expected.q_out = q_out.host();
            }
            rotation.set(params, true);
            rotation.set(expected, false);
            if (latent) params.rotary.rotary_offset = expected.rotary.rotary_offset = 512;
            const std::string what =
                tested->name + " " + text_of_codes(layout) + " rows " + std::string(to_string(type)) + " rotary " +
                std::to_string(params.rotary.rotary_dim) + " from " + std::to_string(params.rotary.rotary_offset) +
                " case " + std::to_string(turn) + " " + seed_note();
            CAPTURE(what);
            REQUIRE(where.rotate_append(params) == errc::ok);
            oracle_rotate_append(expected);
            REQUIRE(cache.difference() == "");
            REQUIRE(q_out.equal());
          }
        }
      }
    }
  }
}

TEST_CASE("the promised arithmetic of rotate_append is that of float64 within a few roundings") {
  constexpr std::int64_t num_tokens = 9;
  for (const tested_backend& tested : all_backends()) {
    for (const std::int32_t dims : {64, 128, 256, 576}) {
      for (const rope_pairing pairing : {rope_pairing::neox, rope_pairing::gptj}) {
        for (const bool norm : {false, true}) {
          random_source random(hash_of(test_seed(), dims, 72));
          backend& where = tested.get();
          coded_pair cache(where, make_layout(layout_kind::hnd, dtype::f32, 1, dims, 16), 1, random);
          rows_pair rows(where, row_order::dense, dtype::f32, num_tokens, 1, dims, random);
          rotation_pair rotation(where, pairing, rotary_kind::all, axes_kind::sections, norm, norm, num_tokens, dims,
                                 random);
          queries_pair q(where, dtype::f32, num_tokens, 2, dims, true, random);
          queries_pair out(where, dtype::f32, num_tokens, 2, dims, true, random);
          const std::vector<std::int64_t> slots(num_tokens, -1);
          device_bytes device_slots = upload_array(where, slots);
          rotate_append_params params;
          params.append = {cache.device(), as_const(rows.device_k()), as_const(rows.device_v()),
                           array_at<std::int64_t>(device_slots)};
          params.q = as_const(q.device());
          params.q_out = out.device();
          rotation.set(params, true);
          REQUIRE(where.rotate_append(params) == errc::ok);
          const std::vector<std::byte> result = out.read();
          rotate_append_params host = params;
          rotation.set(host, false);
          std::int64_t outside = 0;
          std::int64_t compared = 0;
          for (std::int64_t token = 0; token < num_tokens; ++token) {
            const oracle_angles angles = angles_of(host.rotary, num_tokens, token);
            for (std::int32_t head = 0; head < 2; ++head) {
              const std::vector<float> given = head_values(as_const(q.host()), token, head);
              double largest = 0;
              double squares = 0;
              for (const float value : given) {
                largest = std::fmax(largest, std::fabs(static_cast<double>(value)));
                squares += static_cast<double>(value) * static_cast<double>(value);
              }
              // Hard rows are for the bits; here the squares stay inside the range of float32.
              if (!std::isfinite(squares) || largest > 0x1p50 || (norm && largest < 0x1p-50)) continue;
              const std::vector<double> expected =
                  oracle_rotate({given.begin(), given.end()}, host.rotary, angles, host.norm.q_weight, 1e-5f);
              // What a pair has in it, through norm and weights alone.
              rotary_params still = host.rotary;
              still.rotary_dim = 0;
              const std::vector<double> before =
                  oracle_rotate({given.begin(), given.end()}, still, {}, host.norm.q_weight, 1e-5f);
              const double roundings = norm ? static_cast<double>(dims) / 64 + 16 : 2;
              for (std::size_t i = 0; i < angles.cosines.size(); ++i) {
                const auto [a, b] = pair_of(host.rotary, i);
                const double allowed = roundings * 0x1p-24 * (std::fabs(before[a]) + std::fabs(before[b])) + 0x1p-148;
                for (const std::size_t dim : {a, b}) {
                  const std::int64_t index = row_index(out.host(), token, head, static_cast<std::int32_t>(dim));
                  const auto got = static_cast<double>(load_element(result.data(), dtype::f32, index));
                  outside += !(std::fabs(got - expected[dim]) <= allowed);
                  ++compared;
                }
              }
            }
          }
          const std::string what = tested.name + " dims " + std::to_string(dims) + (norm ? " norm " : " ") +
                                   std::to_string(compared) + " compared " + seed_note();
          CAPTURE(what);
          CHECK(outside == 0);
          CHECK(compared > 8 * dims);
          CHECK(cache.equal());
        }
      }
    }
  }
}

/// A small world on one backend.
struct rotate_world {
  static constexpr std::int64_t num_tokens = 4;
  backend& where;
  random_source random{hash_of(test_seed(), 73)};
  coded_pair cache;
  rows_pair rows;
  queries_pair q;
  queries_pair q_out;
  rotation_pair rotation;
  std::vector<std::int64_t> slots{0, 5, -1, 11};
  device_bytes device_slots;

  explicit rotate_world(backend& b)
      : where(b),
        cache(b, make_layout(layout_kind::hnd, dtype::f16, 2, 16, 4), 3, random),
        rows(b, row_order::dense, dtype::f32, num_tokens, 2, 16, random),
        q(b, dtype::f32, num_tokens, 4, 16, true, random),
        q_out(b, dtype::bf16, num_tokens, 4, 16, true, random),
        rotation(b, rope_pairing::neox, rotary_kind::all, axes_kind::sections, true, true, num_tokens, 16, random),
        device_slots(upload_array(b, slots)) {}

  [[nodiscard]] rotate_append_params params() {
    rotate_append_params result;
    result.append = {cache.device(), as_const(rows.device_k()), as_const(rows.device_v()),
                     array_at<std::int64_t>(device_slots)};
    result.q = as_const(q.device());
    result.q_out = q_out.device();
    rotation.set(result, true);
    return result;
  }
  [[nodiscard]] bool untouched() const {
    return cache.equal() && rows.equal() && q.equal() && q_out.equal() && device_slots.unchanged();
  }
};

struct bad_params {
  errc code;
  const char* part;  ///< of the sentence
  std::function<void(rotate_append_params&)> spoil;
};

template <class T>
T* shifted(T* pointer) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(pointer) + 1);
}

std::vector<bad_params> all_bad_params() {
  using p = rotate_append_params;
  constexpr errc bad = errc::invalid_argument;
  constexpr float inf = std::numeric_limits<float>::infinity();
  return {
      {bad, "kv.k is null", [](p& x) { x.append.kv.k = nullptr; }},
      {bad, "slot_mapping is null", [](p& x) { x.append.slot_mapping = nullptr; }},
      {bad, "k has 4 rows and v 3", [](p& x) { x.append.v.num_tokens = 3; }},
      {bad, "rotary_dim is 7;", [](p& x) { x.rotary.rotary_dim = 7; }},
      {bad, "rotary_dim is -2;", [](p& x) { x.rotary.rotary_dim = -2; }},
      {bad, "from 0 to head_dim, 16", [](p& x) { x.rotary.rotary_dim = 18; }},
      {bad, "rotary_offset is 1; it must be from 0 to 0", [](p& x) { x.rotary.rotary_offset = 1; }},
      {bad, "rotary_offset is -1;", [](p& x) { x.rotary.rotary_offset = -1; }},
      {bad, "pairing is number 2", [](p& x) { x.rotary.pairing = static_cast<rope_pairing>(2); }},
      {bad, "num_axes is 0; it must be from 1 to 255", [](p& x) { x.rotary.num_axes = 0; }},
      {bad, "num_axes is 256", [](p& x) { x.rotary.num_axes = 256; }},
      {bad, "num_positions is 0", [](p& x) { x.rotary.num_positions = 0; }},
      {bad, "cos_sin is null", [](p& x) { x.rotary.cos_sin = nullptr; }},
      {bad, "cos_sin is not aligned", [](p& x) { x.rotary.cos_sin = shifted(x.rotary.cos_sin); }},
      {bad, "positions is null", [](p& x) { x.rotary.positions = nullptr; }},
      {bad, "positions is not aligned", [](p& x) { x.rotary.positions = shifted(x.rotary.positions); }},
      {bad, "q_weight is not aligned", [](p& x) { x.norm.q_weight = shifted(x.norm.q_weight); }},
      {bad, "k_weight is not aligned", [](p& x) { x.norm.k_weight = shifted(x.norm.k_weight); }},
      {bad, "epsilon is -1", [](p& x) { x.norm.epsilon = -1; }},
      {bad, "epsilon is ", [=](p& x) { x.norm.epsilon = inf; }},
      {bad, "num_heads of q is -1", [](p& x) { x.q.num_heads = -1; }},
      {bad, "q has 3 tokens", [](p& x) { x.q.num_tokens = 3; }},
      {bad, "a head_dim of 8; k has 4 and 16", [](p& x) { x.q.head_dim = 8; }},
      {bad, "q_out has the shape [4, 3, 16]", [](p& x) { x.q_out.num_heads = 3; }},
      {bad, "the dtype of q is f16; that of k is f32", [](p& x) { x.q.type = dtype::f16; }},
      {bad, "the dtype of q is e4m3", [](p& x) { x.q.type = dtype::e4m3; }},
      {bad, "the dtype of q_out is i8", [](p& x) { x.q_out.type = dtype::i8; }},
      {bad, "the data pointer of q is null", [](p& x) { x.q.data = nullptr; }},
      {bad, "the data pointer of q_out is null", [](p& x) { x.q_out.data = nullptr; }},
      {bad, "the data pointer of q_out is not aligned",
       [](p& x) { x.q_out.data = shifted(static_cast<char*>(x.q_out.data)); }},
      {bad, "let its rows overlap", [](p& x) { x.q_out.head_stride = 15; }},
      {bad, "q and q_out overlap", [](p& x) { x.q_out.data = const_cast<void*>(x.q.data); }},
      {bad, "q_out and k overlap", [](p& x) { x.q_out.data = const_cast<void*>(x.append.k.data); }},
      {bad, "q_out and v overlap", [](p& x) { x.q_out.data = const_cast<void*>(x.append.v.data); }},
      {bad, "the K plane of the cache overlap", [](p& x) { x.q_out.data = x.append.kv.k; }},
      {bad, "the V plane of the cache overlap", [](p& x) { x.q_out.data = x.append.kv.v; }},
  };
}

TEST_CASE("rotate_append refuses each bad argument with the code and sentence of find_problem, and writes nothing") {
  for (const tested_backend& tested : all_backends()) {
    rotate_world w(tested.get());
    CAPTURE(tested.name);
    REQUIRE_FALSE(find_problem(w.params(), tested.get().where()).has_value());
    for (const bad_params& bad : all_bad_params()) {
      CAPTURE(bad.part);
      rotate_append_params params = w.params();
      bad.spoil(params);
      const auto problem = find_problem(params, tested.get().where());
      REQUIRE(problem.has_value());
      CHECK(problem->code() == bad.code);
      const std::string sentence = problem->what();
      CAPTURE(sentence);
      CHECK(sentence.find(bad.part) != std::string::npos);
      CHECK(w.where.rotate_append(params) == bad.code);
    }
    CHECK(w.untouched());
  }
}

TEST_CASE("heads of more dims than rotate_append takes are unsupported") {
  for (const tested_backend& tested : all_backends()) {
    random_source random(hash_of(test_seed(), 74));
    constexpr std::int32_t dims = largest_rotated_head_dim + 2;
    coded_pair cache(tested.get(), make_layout(layout_kind::hnd, dtype::f16, 1, dims, 1), 1, random);
    rows_pair rows(tested.get(), row_order::dense, dtype::f32, 1, 1, dims, random);
    device_bytes slots = upload_array(tested.get(), std::vector<std::int64_t>{0});
    rotate_append_params params;
    params.append = {cache.device(), as_const(rows.device_k()), as_const(rows.device_v()),
                     array_at<std::int64_t>(slots)};
    CHECK(tested.get().rotate_append(params) == errc::unsupported);
    CHECK(cache.equal());
  }
}

TEST_CASE("positions and axes past their ends are refused on the host, and write nothing of their token on a device") {
  for (const tested_backend& tested : all_backends()) {
    CAPTURE(tested.name);
    for (const std::int32_t position : {-1, 1000, std::numeric_limits<std::int32_t>::max()}) {
      rotate_world w(tested.get());
      rotate_append_params params = w.params();
      const std::vector<std::int32_t> positions(3 * rotate_world::num_tokens, position);
      device_bytes device_positions = upload_array(tested.get(), positions);
      params.rotary.positions = array_at<std::int32_t>(device_positions);
      CHECK(w.where.rotate_append(params) == (tested.is_host ? errc::out_of_range : errc::ok));
      const auto problem = find_problem(params, tested.get().where());
      REQUIRE(problem.has_value() == tested.is_host);
      if (problem) {
        const std::string sentence = "positions[0] is " + std::to_string(position) + "; the table has ";
        CHECK(std::string(problem->what()).find(sentence) != std::string::npos);
      }
      CHECK(w.untouched());
    }
    if (!tested.is_host) continue;
    rotate_world w(tested.get());
    rotate_append_params params = w.params();
    const std::vector<std::uint8_t> axes{0, 1, 2, 3, 0, 0, 0, 0};
    params.rotary.axis_of_pair = axes.data();
    CHECK(w.where.rotate_append(params) == errc::out_of_range);
    const auto problem = find_problem(params);
    REQUIRE(problem.has_value());
    CHECK(std::string(problem->what()).find("axis_of_pair[3] is 3; it must be below num_axes, 3") != std::string::npos);
    std::vector<std::int64_t> past{0, 5, 12, 11};
    params = w.params();
    params.append.slot_mapping = past.data();
    CHECK(w.where.rotate_append(params) == errc::out_of_range);
    CHECK(w.untouched());
  }
}

TEST_CASE("a call without tokens does nothing, and one without blocks rotates queries") {
  for (const tested_backend& tested : all_backends()) {
    CAPTURE(tested.name);
    rotate_world w(tested.get());
    rotate_append_params params = w.params();
    params.append.k.num_tokens = params.append.v.num_tokens = params.q.num_tokens = params.q_out.num_tokens = 0;
    params.rotary.positions = nullptr;
    CHECK(w.where.rotate_append(params) == errc::ok);
    CHECK(w.untouched());

    params = w.params();
    const std::vector<std::int64_t> none(rotate_world::num_tokens, -1);
    device_bytes device_none = upload_array(tested.get(), none);
    params.append.slot_mapping = array_at<std::int64_t>(device_none);
    params.append.kv.num_blocks = 0;
    REQUIRE(w.where.rotate_append(params) == errc::ok);
    rotate_append_params expected = params;
    w.rotation.set(expected, false);
    expected.append = {w.cache.host(), as_const(w.rows.host_k()), as_const(w.rows.host_v()), none.data()};
    expected.q = as_const(w.q.host());
    expected.q_out = w.q_out.host();
    oracle_rotate_append(expected);
    CHECK(w.untouched());
  }
}

}  // namespace
