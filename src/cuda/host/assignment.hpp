// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Which of prefill and decode computes the sequences of a step that both take, by estimates of their times on an H200.

#include <cstdint>
#include <span>
#include <vector>

#include "cuda/host/plan_input.hpp"

namespace bifolio::inline v0_2::cuda {

/// Puts the sequences that prefill is faster for into `seqs`, in their order. `query_lens`: new tokens of each. May
/// throw std::bad_alloc.
///
/// Sequences of more rows than decode has in a tile go to prefill where it is faster for them: decode reads the keys
/// once per 16 rows. If there are such and others too, prefill takes them all where one launch, whose work tiles that
/// wait for memory share the SMs with those that wait for tensor cores, is faster than two.
void choose_prefill_seqs(const plan_input& step, std::span<const std::int32_t> query_lens,
                         std::vector<std::int32_t>& seqs);

}  // namespace bifolio::inline v0_2::cuda
