// SPDX-License-Identifier: Apache-2.0
#include "cache_ops_setting.hpp"

#include <algorithm>
#include <bifolio/error.hpp>
#include <numeric>

namespace bifolio::bench {
namespace {

void for_each_layout(const cache_ops_options& options, const std::function<void(const kv_layout&)>& body) {
  for (const auto& kind : options.layouts) {
    for (const auto& type : options.kv_dtypes) {
      const kv_code code = parse_kv_code(type);
      body(make_layout(parse_layout(kind), code, code, options.kv_heads, options.head_dim, options.head_dim,
                       options.block_size));
    }
  }
}

}  // namespace

void for_each_row(const cache_ops_options& options,
                  const std::function<void(const std::string&, const kv_layout&, dtype)>& transfer,
                  const std::function<void(const std::string&, const kv_layout&, const kv_layout&)>& move_blocks) {
  for (const auto& op : options.ops) {
    for_each_layout(options, [&](const kv_layout& layout) {
      if (op == "append" || op == "rotate_append" || op == "gather") {
        for (const auto& type : options.dtypes) transfer(op, layout, parse_dtype(type));
      } else if (op == "copy" || op == "swap") {
        move_blocks(op, layout, layout);
      } else if (op == "convert") {
        for_each_layout(options, [&](const kv_layout& to) {
          if (layout != to) move_blocks(op, layout, to);
        });
      } else {
        throw error(errc::invalid_argument,
                    "--ops '" + op + "' is not one of append, rotate_append, gather, copy, swap, convert");
      }
    });
  }
}

std::int64_t blocks_per_call(const cache_ops_options& options) {
  return blocks_for(options.tokens, options.block_size);
}

std::int64_t pool_blocks(const cache_ops_options& options, const kv_layout& layout, std::int64_t num_calls) {
  return std::max((options.pool_mib << 20) / layout.block_bytes(), 2 * num_calls * blocks_per_call(options));
}

std::vector<std::int32_t> shuffled_blocks(std::int64_t count, std::mt19937_64& random) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);
  return ids;
}

pool::pool(memory_resource& from, const kv_layout& layout, std::int64_t num_blocks)
    : memory(from, static_cast<std::size_t>(num_blocks * layout.block_bytes())),
      scales(from, static_cast<std::size_t>(layout.num_kv_heads) * sizeof(float)),
      view{memory.data(),     memory.as<std::byte>() + memory.num_bytes() / 2, num_blocks, layout, scales.as<float>(),
           scales.as<float>()} {}

std::string name_of(const kv_layout& layout) {
  return std::string(to_string(layout.kind)) + " " + std::string(short_name(layout.k.code));
}

cache_op transfer_op(const cache_ops_options& options, const std::string& name, const kv_layout& layout,
                     dtype rows_type) {
  const std::string rows = "rows " + std::string(to_string(rows_type));
  const std::int64_t elements = std::int64_t{2} * options.tokens * layout.num_kv_heads * layout.k.head_dim;
  const std::int64_t scales = std::int64_t{2} * options.tokens * layout.num_kv_heads * layout.k.code.tail_floats();
  const std::int64_t queries =
      name == "rotate_append" ? std::int64_t{options.tokens} * options.q_heads * layout.k.head_dim : 0;
  const double bytes =
      2.0 * static_cast<double>(queries) * static_cast<double>(size_of(rows_type)) +
      static_cast<double>(elements) * static_cast<double>(size_of(rows_type) + size_of(layout.k.code.type)) +
      static_cast<double>(scales) * static_cast<double>(sizeof(float));
  return name != "gather" ? cache_op{name, rows, name_of(layout), bytes} : cache_op{name, name_of(layout), rows, bytes};
}

row cache_ops_row(const cache_ops_options& options, const cache_op& op, const summary& time, double memcpy_gb_s) {
  const double gb_s = op.num_bytes / time.median * 1e-9;
  return {{"op", op.name},
          {"from", op.from},
          {"to", op.to},
          {"tokens", std::int64_t{options.tokens}},
          {"time_us", time.median * 1e6},
          {"p10_us", time.p10 * 1e6},
          {"p90_us", time.p90 * 1e6},
          {"gb_s", gb_s},
          {"memcpy_gb_s", memcpy_gb_s},
          {"share_of_memcpy", gb_s / memcpy_gb_s}};
}

}  // namespace bifolio::bench
