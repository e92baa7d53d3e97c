// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the benchmarks of cache operations of all devices share.

#include <cstdint>
#include <string>
#include <vector>

#include "report.hpp"

namespace bifolio::bench {

struct cache_ops_options {
  std::string device = "cpu";
  std::vector<std::string> ops{"append", "gather", "copy", "swap", "convert"};
  std::vector<std::string> dtypes{"f32", "bf16"};
  std::vector<std::string> kv_dtypes{"bf16"};
  std::vector<std::string> layouts{"hnd", "nhd", "x_split"};
  std::int32_t tokens = 4096;
  std::int32_t kv_heads = 8;
  std::int32_t head_dim = 128;
  std::int32_t block_size = 16;
  std::int64_t pool_mib = 256;
  std::int32_t threads = 0;
  std::string executor = "openmp";
  std::string isa;
  std::int32_t repeats = 15;
  double seconds = 0.5;
  std::uint64_t seed = 1;
};

/// Measures on a CUDA device. Throws `error`: unsupported without one.
void run_cuda_cache_ops(const cache_ops_options& options, report& out);

}  // namespace bifolio::bench
