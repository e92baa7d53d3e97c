// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Whole steps on two backends side by side, in random order: one `kv_cache_manager` decides, and each backend carries
/// it out in a cache engine of its own. Prompts are appended whole or in chunks, sequences fork and copy on write,
/// decode, try draft tokens and roll back, are swapped to host blocks and back, and end.
///
/// After every step
///   - the caches of both backends and their host blocks hold the same bytes, all of them: what was never written still
///     holds the poison that it began with;
///   - every stored token of a sequence of the step reads back as what was appended, rounded to the cache's dtype;
///   - both outputs are within the published bound of the float64 oracle, and thereby within the sum of their two
///     bounds of each other.

#include <bifolio/kv_layout.hpp>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "support/backends.hpp"

namespace bifolio::test {

struct step_shape {
  dtype type = dtype::bf16;  ///< of queries, cache and output
  std::int32_t head_dim = 128;
  std::int32_t num_kv_heads = 2;
  std::int32_t group_size = 4;
  std::int32_t block_size = 16;
  layout_kind layout = layout_kind::hnd;
  bool fused = false;  ///< q, k and v are slices of one row; otherwise dense, and k and v float32
  bool deterministic = false;
  std::int32_t window = 0;  ///< tokens that a token attends to; the manager gives back what none will attend to. 0: all
  float soft_cap = 0;
  bool alibi = false;
  bool sinks = false;
};
[[nodiscard]] std::string describe(const step_shape& shape);

/// `count` shapes for the 16-bit kernels: one of every kind first, then random ones. Rows are aligned to 16 bytes.
[[nodiscard]] std::vector<step_shape> step_shapes(std::uint64_t seed, int count);

/// How often what happened, so that a test can say that its mix is worth its name.
struct steps_tally {
  std::int64_t num_steps = 0;
  std::int64_t num_prompts = 0;  ///< computed in one step
  std::int64_t num_chunks = 0;   ///< parts of prompts
  std::int64_t num_decodes = 0;
  std::int64_t num_drafts = 0;    ///< tokens tried beyond the first
  std::int64_t num_rejected = 0;  ///< of those, rolled back
  std::int64_t num_rollbacks = 0;
  std::int64_t num_forks = 0;
  std::int64_t num_copies = 0;  ///< blocks, on write
  std::int64_t num_blocks_out = 0;
  std::int64_t num_blocks_in = 0;
  double worst_share = 0;  ///< largest error over its bound, on either backend
  /// Sequences computed, by the kernel that served them (`backend::describe`), on either backend.
  std::map<std::string, std::int64_t> kernels;

  [[nodiscard]] std::string text() const;
};

/// Runs `num_steps` steps of `shape` and adds to `tally`. Returns what went wrong first, empty when nothing did.
[[nodiscard]] std::string run_whole_steps(const tested_backend& first, const tested_backend& second,
                                          const step_shape& shape, std::uint64_t seed, int num_steps,
                                          steps_tally& tally);

/// About `num_steps` steps over as many shapes as that allows, at least three steps each, on both backends. Returns
/// everything that went wrong, a line for each shape.
[[nodiscard]] std::string run_whole_steps(const tested_backend& first, const tested_backend& second, std::uint64_t seed,
                                          int num_steps, steps_tally& tally);

}  // namespace bifolio::test
