// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What generate and serve are told alike: the model, its device, its cache, its batches.

#include <bifolio/cpu.hpp>
#include <bifolio/dtype.hpp>
#include <bifolio/executor.hpp>
#include <bifolio/kv_layout.hpp>
#include <bifolio/scheduler.hpp>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "placement.hpp"

namespace generate {

class command_line;

struct engine_options {
  std::filesystem::path model;      ///< empty: the bundled one
  std::filesystem::path tokenizer;  ///< empty: what is next to the model, or bytes
  std::int32_t max_positions = 0;   ///< 0: the model's own limit
  std::string device = "auto";
  attention_types types;  ///< those that were named
  bool deterministic = false;
  bifolio::layout_kind layout = bifolio::layout_kind::hnd;
  std::int32_t block_size = 16;
  std::int64_t num_blocks = 0;  ///< 0: what the prompts can need, within cache_mebibytes
  std::int64_t cache_mebibytes = 1024;
  std::int32_t max_batch_tokens = 256;
  std::int32_t max_batch_seqs = 64;
  bool prefix_caching = true;
  std::int64_t num_host_blocks = 0;  ///< 0: nothing is swapped
  bifolio::preemption_mode preemption = bifolio::preemption_mode::automatic;
  bifolio::executor_kind executor = bifolio::default_executor();
  std::int32_t num_threads = 0;  ///< 0: what the executor takes
  std::optional<bifolio::cpu_isa> isa;
  std::filesystem::path scales_file;       ///< of static scales; empty: from the first prompt
  std::filesystem::path save_scales_file;  ///< where these go; empty: nowhere
  std::filesystem::path events;            ///< a log of the pool; empty: none
};

void add_engine_options(command_line& line, engine_options& o);

/// Throws input_error for options that do not go together. To be called when the line was parsed.
void check_engine_options(const engine_options& o);

}  // namespace generate
