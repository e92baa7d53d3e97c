// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A backend with plain scalar attention and one flaw of choice, so that a test can show that the suite finds it.
/// Without a flaw it passes. Everything else goes to a real backend.

#include <bifolio/backend.hpp>
#include <cstdint>
#include <string_view>

#include "support/backends.hpp"

namespace bifolio::test {

enum class flaw : std::uint8_t {
  none,
  mask_one_too_far,    ///< causal rows also see the next key
  mask_one_too_short,  ///< causal rows do not see their own key
  top_left_alignment,  ///< positions counted from the first key instead of the last
  window_one_too_far,  ///< window_left lets one key more in
  sink_twice,          ///< the sink counts once per split
  sink_forgotten_in_lse,
  tail_multiplied_by_zero,   ///< the rest of the last block is weighted 0 instead of left out
  merge_without_rescaling,   ///< splits are added as if they had the same maximum
  wrong_head_map,            ///< query head h reads KV head h % num_kv_heads
  reads_next_block_in_pool,  ///< ignores the block table
  alibi_from_zero,           ///< slope · j instead of slope · (j − p)
  cap_before_scale,
  lse_in_base_2,
  nan_for_empty_rows,
  leaves_empty_rows,      ///< rows that see nothing are not written
  writes_past_head,       ///< one element after the last head_dim element of every row
  truncates_output,       ///< 16-bit outputs are cut instead of rounded
  half_precision_logits,  ///< logits rounded to bf16
  drops_last_key_of_split,
  bias_before_cap,
  bias_of_wrong_head,   ///< of the KV head's first query head
  bias_by_position,     ///< of the row of q whose number is the token's position
  nan_for_hidden_rows,  ///< rows whose scores are all −inf
  v_at_end_of_k,        ///< where V is part of K: the last dims of K, not the first
  // Of the calls that move contents, which the tables of attention cases never make.
  drops_last_copy,       ///< copy_blocks leaves out the last pair
  appends_before_slots,  ///< rows go to the slot before their own
};
/// Those of attention, `none` included.
inline constexpr int num_flaws = static_cast<int>(flaw::v_at_end_of_k) + 1;
inline constexpr flaw cache_flaws[] = {flaw::drops_last_copy, flaw::appends_before_slots};
[[nodiscard]] std::string_view to_string(flaw value) noexcept;

/// `real` is borrowed.
[[nodiscard]] tested_backend make_flawed_backend(backend& real, flaw value);

}  // namespace bifolio::test
