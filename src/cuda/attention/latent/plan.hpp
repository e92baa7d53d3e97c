// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The host side of the latent kernel's tile scheduler, for attention whose V is the first dims of K (multi-head latent
/// attention). A row tile is 64 query rows of one sequence: as many heads as divide the query heads evenly, and as many
/// tokens as fit with them. Work tiles, their records and the combine of partial results are those of prefill
/// (prefill/plan.hpp); only who gets what is decided here: the row tiles of the same tokens and other heads read the
/// same keys, so neighbouring CTAs, one for each tile of heads, get the same ranges of KV tiles at the same time.

#include "cuda/attention/latent/metadata.hpp"
#include "cuda/attention/prefill/plan.hpp"

namespace bifolio::inline v0_2::cuda {

/// The latent kernel's part of a step. The vectors keep their capacity.
struct latent_plan : prefill_plan {
  /// Used while planning: a range of KV tiles of a row tile, and the CTAs that get it, one for each tile of heads.
  struct part {
    std::int32_t group;
    std::int32_t row_tile;  // its number
    std::int32_t tile_begin, tile_end;
  };
  std::vector<part> parts;
  bool few_rows = false;  ///< of every sequence
};

/// Makes the work tiles of `plan.seqs`; sets `combines` where there are partial results. May throw std::bad_alloc.
void plan_latent(const plan_input& input, latent_plan& plan);

/// Most work tiles of steps within these limits.
[[nodiscard]] std::int64_t max_latent_work_tiles(const attention_spec& spec, const step_limits& limits,
                                                 std::int32_t num_sms) noexcept;

/// Bytes of partial results: outputs of the rows of a tile, then their maxima and sums.
[[nodiscard]] constexpr std::size_t latent_workspace_bytes(std::int32_t num_sms) noexcept {
  return static_cast<std::size_t>(prefill_max_partials(num_sms)) * latent_tile_rows * (latent_v_dims + 2) *
         sizeof(float);
}

}  // namespace bifolio::inline v0_2::cuda
