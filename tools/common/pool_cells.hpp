// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Who uses which block of a manager, as cells of a picture.

#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/types.hpp>
#include <span>

#include "tools/common/pool_frame.hpp"

namespace tools {

struct lettered_sequence {
  bifolio::seq_id seq = bifolio::invalid_seq;
  char letter = '#';  ///< '#': one of more sequences than there are letters
};

/// Sets the cells of both pools, and those of the other layer groups. Blocks of sequences that are not listed are '#'.
void mark_cells(pool_frame& frame, const bifolio::kv_cache_manager& manager,
                std::span<const lettered_sequence> sequences);

/// Sets the counters of blocks and look-ups.
void count_blocks(pool_frame& frame, const bifolio::kv_cache_manager& manager);

}  // namespace tools
