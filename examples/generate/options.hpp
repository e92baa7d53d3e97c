// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The command line. What a value must be is checked here as far as the model need not be known for it.

#include <bifolio/backend.hpp>
#include <bifolio/cpu.hpp>
#include <bifolio/dtype.hpp>
#include <bifolio/kv_layout.hpp>
#include <bifolio/scheduler.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "placement.hpp"
#include "sampler.hpp"

namespace generate {

struct options {
  std::filesystem::path model;      ///< empty: the bundled one
  std::filesystem::path tokenizer;  ///< empty: what is next to the model, or bytes
  std::vector<std::string> prompts;
  std::vector<std::vector<bifolio::token_id>> prompt_ids;  ///< prompts that are token ids already
  std::filesystem::path prompts_file;
  std::filesystem::path score_file;  ///< instead of generating, say how probable this text is
  std::int32_t max_positions = 0;    ///< 0: the model's own limit
  sampling how{0.8f, 0.95f};
  std::uint64_t seed = 1;
  std::int32_t num_samples = 1;
  std::string device = "auto";
  attention_types types;                         ///< those that were named
  bifolio::dtype kv_type = bifolio::dtype::f32;  ///< of the cache; known with the device
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
  std::int32_t num_threads = 0;  ///< 0: what the default executor takes
  std::optional<bifolio::cpu_isa> isa;
  bool json = false;
  bool stats = false;
};

/// Throws `input_error` on anything that is not allowed. Returns nothing after --help, having printed it.
[[nodiscard]] std::optional<options> parse_options(int argc, const char* const* argv);

}  // namespace generate
