// SPDX-License-Identifier: Apache-2.0
#include "cache_checks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bifolio/buffer.hpp>
#include <stdexcept>
#include <vector>

#include "conformance/attention_tables.hpp"
#include "reference/cache_oracle.hpp"
#include "support/cache_pair.hpp"

namespace selftest {
namespace {

using namespace bifolio;
using namespace bifolio::test;

/// What every operation needs to choose.
struct cache_shape {
  arrangement how = arrangement::hnd;
  dtype type = dtype::f32;
  std::int32_t heads = 1, dims = 1, block_size = 1;
};

cache_shape random_shape(random_source& random, bool large) {
  constexpr std::array<std::int32_t, 8> dims{1, 2, 8, 48, 71, 80, 128, 256};
  constexpr std::array<std::int32_t, 5> blocks{1, 5, 8, 16, 64};
  constexpr std::array<std::int32_t, 3> heads{1, 3, 8};
  cache_shape shape{random.pick(all_arrangements), random.pick(dtypes), random.pick(heads), random.pick(dims),
                    random.pick(blocks)};
  // More than a megabyte: several workers' worth.
  if (large) shape.heads = 8, shape.dims = 64, shape.block_size = 16;
  return shape;
}

/// Blocks of a pool that the naive model walks through in some milliseconds.
std::int64_t random_num_blocks(random_source& random, const cache_shape& shape, std::int64_t most) {
  const std::int64_t block = std::int64_t{shape.heads} * shape.dims * shape.block_size;
  return random.between(1, std::clamp<std::int64_t>((std::int64_t{1} << 18) / block, 1, most));
}

std::string words(const cache_shape& shape) {
  return fmt::format("{} {}, {} heads, head_dim {}, block_size {}", to_string(shape.how), to_string(shape.type),
                     shape.heads, shape.dims, shape.block_size);
}

cache_pair make_pair(backend& where, const cache_shape& shape, std::int64_t num_blocks, random_source& random) {
  return {where, shape.how, shape.type, shape.heads, shape.dims, shape.block_size, num_blocks, random};
}

/// Pairs whose destinations are all different: where one comes twice only the host promises an order.
std::vector<block_copy> distinct_pairs(random_source& random, std::int64_t num_src, std::int64_t num_dst) {
  std::vector<std::int32_t> dst;
  for (std::int32_t i = 0; i < num_dst; ++i) dst.push_back(i);
  random.shuffle(dst);
  std::vector<block_copy> pairs;
  const std::int64_t count = random.between(0, num_dst);
  for (std::int64_t i = 0; i < count; ++i) {
    pairs.push_back({block_id{static_cast<std::int32_t>(random.between(0, num_src - 1))},
                     block_id{dst[static_cast<std::size_t>(i)]}});
  }
  return pairs;
}

/// Throws when a call was refused.
void require_ok(errc code) {
  if (code != errc::ok) throw std::runtime_error(fmt::format("refused with {}", to_string(code)));
}

std::string complaint(bool equal, const char* which) { return equal ? "" : fmt::format("bytes of {} differ; ", which); }

std::string move_rows(operation what, const tested_backend& tested, random_source& random, bool large,
                      std::string& text) {
  backend& where = tested.get();
  const cache_shape shape = random_shape(random, large);
  const std::int64_t num_blocks = large ? 12 : random_num_blocks(random, shape, 5);
  const std::int64_t num_tokens = large ? 400 : random.between(1, 2 * shape.block_size + 5);
  const dtype row_type = random.pick(dtypes);
  const row_order order = random.pick(all_row_orders);
  text = fmt::format("{}, {} blocks, {} rows of {}, row order {}", words(shape), num_blocks, num_tokens,
                     to_string(row_type), static_cast<int>(order));
  cache_pair cache = make_pair(where, shape, num_blocks, random);
  rows_pair rows(where, order, row_type, num_tokens, shape.heads, shape.dims, random);
  const std::vector<std::int64_t> slots =
      random_slots(random, num_tokens, num_blocks, shape.block_size, what == operation::gather || tested.is_host);
  device_bytes device_slots = upload_array(where, slots);
  const auto* slot_mapping = reinterpret_cast<const std::int64_t*>(device_slots.data());
  if (what == operation::append) {
    require_ok(where.append({cache.device(), as_const(rows.device_k()), as_const(rows.device_v()), slot_mapping}));
    oracle_append(cache.host(), as_const(rows.host_k()), as_const(rows.host_v()), slots.data());
  } else {
    require_ok(where.gather({cache.device(), rows.device_k(), rows.device_v(), slot_mapping}));
    oracle_gather(cache.host(), rows.host_k(), rows.host_v(), slots.data());
  }
  return complaint(cache.equal(), "the cache") + complaint(rows.equal(), "the rows") +
         complaint(device_slots.unchanged(), "the slots");
}

std::string copy_inside(const tested_backend& tested, random_source& random, bool large, std::string& text) {
  const cache_shape shape = random_shape(random, large);
  const std::int64_t num_blocks = large ? 30 : random_num_blocks(random, shape, 7);
  const auto num_layers = static_cast<std::size_t>(random.between(1, 3));
  // Chains and blocks that are copied onto themselves included: the order of pairs is part of the contract.
  const auto pairs = random_pairs(random, random.between(0, large ? 40 : 12), num_blocks, num_blocks);
  text = fmt::format("{}, {} blocks, {} layers, {} pairs", words(shape), num_blocks, num_layers, pairs.size());
  auto layers = make_layers(tested.get(), shape.how, shape.type, shape.heads, shape.dims, shape.block_size, num_blocks,
                            num_layers, random);
  require_ok(tested.get().copy_blocks(device_views(layers), pairs));
  std::string problem;
  for (cache_pair& layer : layers) {
    oracle_move_blocks(layer.host(), layer.host(), pairs);
    problem += complaint(layer.equal(), "a layer");
  }
  return problem;
}

std::string convert_between(const tested_backend& tested, random_source& random, bool large, std::string& text) {
  const cache_shape shape = random_shape(random, large);
  cache_shape other = shape;
  other.how = random.pick(all_arrangements);
  other.type = random.pick(dtypes);
  const std::int64_t num_src = large ? 20 : random_num_blocks(random, shape, 4);
  const std::int64_t num_dst = large ? 25 : random_num_blocks(random, shape, 6);
  const auto pairs = distinct_pairs(random, num_src, num_dst);
  text = fmt::format("{}, {} blocks, to {} {}, {} blocks, {} pairs", words(shape), num_src, to_string(other.how),
                     to_string(other.type), num_dst, pairs.size());
  cache_pair src = make_pair(tested.get(), shape, num_src, random);
  cache_pair dst = make_pair(tested.get(), other, num_dst, random);
  require_ok(tested.get().convert_blocks(src.device(), dst.device(), pairs));
  oracle_move_blocks(src.host(), dst.host(), pairs);
  return complaint(src.equal(), "the source") + complaint(dst.equal(), "the destination");
}

/// A cache in host memory, as `swap_blocks` takes it together with one on the device.
class host_cache {
 public:
  host_cache(backend& where, const cache_shape& shape, std::int64_t num_blocks)
      : arranged_(arrange(shape.how, {shape.type, shape.heads, shape.dims, shape.dims, shape.block_size}, num_blocks)),
        num_blocks_(num_blocks),
        bytes_(where.staging_memory(), static_cast<std::size_t>(arranged_.elements) * size_of(shape.type)) {
    std::fill_n(bytes_.as<std::byte>(), bytes_.num_bytes(), std::byte{0});
  }
  [[nodiscard]] kv_cache_view view() noexcept {
    const auto element = static_cast<std::int64_t>(size_of(arranged_.layout.k.code.type));
    return {bytes_.as<std::byte>() + arranged_.k_start * element, bytes_.as<std::byte>() + arranged_.v_start * element,
            num_blocks_, arranged_.layout};
  }

 private:
  arranged_layout arranged_;
  std::int64_t num_blocks_;
  buffer bytes_;
};

/// Device to device, then every block of that to host memory and back into a third cache.
std::string swap_between(const tested_backend& tested, random_source& random, bool large, std::string& text) {
  backend& where = tested.get();
  const cache_shape shape = random_shape(random, large);
  const std::int64_t num_src = large ? 20 : random_num_blocks(random, shape, 6);
  const std::int64_t num_dst = large ? 25 : random_num_blocks(random, shape, 6);
  const auto pairs = distinct_pairs(random, num_src, num_dst);
  text = fmt::format("{}, {} and {} blocks, {} pairs", words(shape), num_src, num_dst, pairs.size());
  cache_pair src = make_pair(where, shape, num_src, random);
  cache_pair dst = make_pair(where, shape, num_dst, random);
  cache_pair back = make_pair(where, shape, num_dst, random);
  host_cache staged(where, shape, num_dst);
  const auto swap = [&](kv_cache_view from, kv_cache_view to, const std::vector<block_copy>& list) {
    require_ok(where.swap_blocks({&from, 1}, {&to, 1}, list));
  };
  swap(src.device(), dst.device(), pairs);
  oracle_move_blocks(src.host(), dst.host(), pairs);
  std::vector<block_copy> all;
  for (std::int32_t i = 0; i < num_dst; ++i) all.push_back({block_id{i}, block_id{i}});
  swap(dst.device(), staged.view(), all);
  swap(staged.view(), back.device(), all);
  oracle_move_blocks(dst.host(), back.host(), all);
  return complaint(src.equal(), "the source") + complaint(dst.equal(), "the destination") +
         complaint(back.equal(), "the way through host memory");
}

std::string run_case(operation what, const tested_backend& tested, random_source& random, bool large,
                     std::string& text) {
  switch (what) {
    case operation::append:
    case operation::gather:
      return move_rows(what, tested, random, large, text);
    case operation::copy:
      return copy_inside(tested, random, large, text);
    case operation::convert:
      return convert_between(tested, random, large, text);
    case operation::swap:
      return swap_between(tested, random, large, text);
  }
  return "not an operation";
}

}  // namespace

std::string check_cache_case(operation what, const tested_backend& tested, std::uint64_t seed, std::size_t n) {
  random_source random(hash_of(seed, 0xcac4e, what, n));
  std::string text;
  std::string problem;
  try {
    problem = run_case(what, tested, random, n % 8 == 7, text);
  } catch (const std::exception& failure) {
    problem = failure.what();
  }
  return problem.empty() ? problem : fmt::format("{}: {} [{}]", tested.name, problem, text);
}

}  // namespace selftest
