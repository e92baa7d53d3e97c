// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the attention benchmarks of all devices share: options, one row's setting, contents, counted work, the row.

#include <bifolio/attention.hpp>
#include <bifolio/kv_layout.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "report.hpp"

namespace bifolio::bench {

struct attention_options {
  std::string device = "cpu";
  std::vector<std::string> q_dtypes{"bf16"};
  std::vector<std::string> kv_dtypes{"bf16"};
  std::vector<std::int32_t> batches{1};
  std::vector<std::int32_t> query_lens{1};
  std::vector<std::int32_t> contexts{16384};
  std::int32_t q_heads = 32;
  std::vector<std::int32_t> kv_heads{8};
  std::int32_t head_dim = 128;
  std::vector<std::int32_t> block_sizes{16};
  std::vector<std::string> layouts{"hnd"};
  std::int32_t threads = 0;
  std::string executor = "openmp";
  std::vector<std::string> isas;
  std::int32_t window = -1;
  float soft_cap = 0;
  bool non_causal = false;
  bool deterministic = false;
  std::int32_t repeats = 7;
  double seconds = 1.0;
  std::uint64_t seed = 1;
};

/// One row's settings.
struct setting {
  dtype q_type = dtype::bf16;
  dtype kv_type = dtype::bf16;
  std::int32_t batch = 1;
  std::int32_t query_len = 1;
  std::int32_t context = 0;
  std::int32_t kv_heads = 1;
  std::int32_t block_size = 16;
  layout_kind layout = layout_kind::hnd;
};

/// Finite values of about N(0, 1)/2 in any dtype.
void fill_values(void* data, dtype type, std::int64_t count, std::uint64_t seed);

struct visible_work {
  std::int64_t keys = 0;   ///< positions that the call reads
  std::int64_t pairs = 0;  ///< (query token, visible position)
};
[[nodiscard]] visible_work work_of(const setting& s, const attention_options& options);

[[nodiscard]] attention_spec spec_of(const setting& s, const attention_options& options);

/// What was measured, in seconds and GB/s.
struct attention_result {
  std::string device;
  std::string isa;
  std::int32_t threads = 0;
  summary time;
  double probe_gb_s = 0;
  double gather_gb_s = 0;
  double plan_seconds = 0;  ///< host time of planning a step; 0 = not measured
  double call_seconds = 0;  ///< host time of one layer's call on a device that runs beside the host; 0 = not measured
};
[[nodiscard]] row attention_row(const setting& s, const attention_options& options, const attention_result& result);

/// Measures all settings on a CUDA device. Throws `error`: unsupported without one.
void run_cuda_attention(const attention_options& options, const std::vector<setting>& settings, report& out);

}  // namespace bifolio::bench
