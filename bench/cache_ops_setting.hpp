// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the benchmarks of cache operations of all devices share: options, which rows there are, pools, the row.

#include <bifolio/buffer.hpp>
#include <bifolio/kv_layout.hpp>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "report.hpp"

namespace bifolio::bench {

struct cache_ops_options {
  std::string device = "cpu";
  std::vector<std::string> ops{"append", "rotate_append", "gather", "copy", "swap", "convert"};
  std::vector<std::string> dtypes{"f32", "bf16"};
  std::vector<std::string> kv_dtypes{"bf16"};  ///< names of codes
  std::vector<std::string> layouts{"hnd", "nhd", "x_split"};
  std::int32_t tokens = 4096;
  std::int32_t kv_heads = 8;
  std::int32_t q_heads = 32;  ///< of rotate_append
  std::int32_t head_dim = 128;
  std::int32_t block_size = 16;
  std::int64_t pool_mib = 256;
  std::int32_t threads = 0;
  std::string executor = "threads";
  std::string isa;
  std::int32_t repeats = 15;
  double seconds = 0.5;
  std::uint64_t seed = 1;
};

/// Every row that the options select, in order: `transfer(op, layout, type of the rows)` for append,
/// rotate_append and gather,
/// `move_blocks(op, from, to)` for copy and swap (`from` and `to` are the same) and convert (they are not). Throws
/// `error` (invalid_argument) for an operation of another name.
void for_each_row(const cache_ops_options& options,
                  const std::function<void(const std::string&, const kv_layout&, dtype)>& transfer,
                  const std::function<void(const std::string&, const kv_layout&, const kv_layout&)>& move_blocks);

[[nodiscard]] std::int64_t blocks_per_call(const cache_ops_options& options);
/// As many as fill `options.pool_mib`, or `num_calls` disjoint pairs of sources and targets if that is more.
[[nodiscard]] std::int64_t pool_blocks(const cache_ops_options& options, const kv_layout& layout,
                                       std::int64_t num_calls);
[[nodiscard]] std::vector<std::int32_t> shuffled_blocks(std::int64_t count, std::mt19937_64& random);

/// A pool of one layer.
struct pool {
  buffer memory;
  buffer scales;  ///< static ones, which the caller fills
  kv_cache_view view;
  pool(memory_resource& from, const kv_layout& layout, std::int64_t num_blocks);
};

/// "hnd bf16"
[[nodiscard]] std::string name_of(const kv_layout& layout);

/// What one row measures.
struct cache_op {
  std::string name;
  std::string from;
  std::string to;
  double num_bytes = 0;  ///< that a call moves, as GB/s count them
};
/// append, rotate_append or gather; counts bytes read and bytes written.
[[nodiscard]] cache_op transfer_op(const cache_ops_options& options, const std::string& name, const kv_layout& layout,
                                   dtype rows_type);
[[nodiscard]] row cache_ops_row(const cache_ops_options& options, const cache_op& op, const summary& time,
                                double memcpy_gb_s);

/// Measures on a CUDA device. Throws `error`: unsupported without one.
void run_cuda_cache_ops(const cache_ops_options& options, report& out);

}  // namespace bifolio::bench
