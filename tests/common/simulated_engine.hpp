// SPDX-License-Identifier: Apache-2.0
#pragma once

/// An engine without a model: its cache holds one token per slot, it carries out a plan's copies, stores the step's
/// tokens through slot_mapping, reads every visible position back through the block tables, and "samples" a hash of
/// what it read. Any token that is lost, doubled, overwritten or read from another sequence changes all tokens after
/// it. `continue_serially` computes the same without cache, blocks or batches.

#include <bifolio/scheduler.hpp>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"

namespace bifolio::test {

inline constexpr std::int32_t simulated_vocabulary = 50000;

/// What the "model" says after reading tokens at positions [first, first + tokens.size()).
inline token_id simulated_next(std::int64_t first, const std::vector<std::int64_t>& tokens, std::int32_t sample,
                               bool prompt_just_ended) {
  std::uint64_t h = static_cast<std::uint64_t>(first);
  for (const std::int64_t token : tokens) h = mix(h ^ static_cast<std::uint64_t>(token));
  // As in real sampling the samples of a prompt differ from their first token on.
  if (prompt_just_ended) h = mix(h + static_cast<std::uint64_t>(sample) + 1);
  return token_id{static_cast<std::int32_t>(h % simulated_vocabulary)};
}

/// About one token in `one_in` ends its sequence.
inline bool simulated_stop(token_id token, std::int32_t one_in) { return one_in > 0 && to_index(token) % one_in == 0; }

inline std::vector<token_id> continue_serially(const request& what, std::int32_t sample, std::int32_t window,
                                               std::int32_t stop_one_in) {
  std::vector<std::int64_t> known;
  for (const token_id token : what.prompt) known.push_back(to_index(token));
  std::vector<token_id> sampled;
  while (static_cast<std::int32_t>(sampled.size()) < what.max_new_tokens) {
    const auto length = static_cast<std::int64_t>(known.size());
    const std::int64_t first = window == 0 ? 0 : std::max<std::int64_t>(0, length - window);
    const std::vector<std::int64_t> visible(known.begin() + first, known.end());
    sampled.push_back(simulated_next(first, visible, sample, known.size() == what.prompt.size()));
    known.push_back(to_index(sampled.back()));
    if (simulated_stop(sampled.back(), stop_one_in)) break;
  }
  return sampled;
}

class simulated_engine {
 public:
  simulated_engine(const kv_cache_manager& manager, std::int32_t stop_one_in)
      : block_size_(static_cast<std::size_t>(manager.config().block_size)),
        window_(manager.config().sliding_window),
        stop_one_in_(stop_one_in),
        slots_(static_cast<std::size_t>(manager.config().num_blocks) * block_size_, -1) {}

  void note_prompt(request_id id, std::size_t length) { prompt_lengths_[to_index(id)] = length; }

  /// What a caller does between build and commit.
  std::vector<sampled_token> compute(const step_plan& plan, const step_inputs& inputs) {
    for (const block_copy& copy : plan.copies) {
      for (std::size_t k = 0; k < block_size_; ++k) {
        slots_[static_cast<std::size_t>(to_index(copy.dst)) * block_size_ + k] =
            slots_[static_cast<std::size_t>(to_index(copy.src)) * block_size_ + k];
      }
    }
    const step_batch_view batch = inputs.batch.view();
    for (std::int64_t t = 0; t < batch.num_tokens; ++t) {
      slots_.at(static_cast<std::size_t>(batch.slot_mapping[t])) = to_index(inputs.tokens[static_cast<std::size_t>(t)]);
    }
    std::vector<sampled_token> sampled;
    for (std::int32_t i = 0; i < batch.num_seqs; ++i) {
      const scheduled_seq& row = plan.seqs[static_cast<std::size_t>(i)];
      if (row.num_samples == 0) continue;
      const std::int64_t length = batch.seq_lens[i];
      const std::int64_t first = window_ == 0 ? 0 : std::max<std::int64_t>(0, length - window_);
      std::vector<std::int64_t> visible;
      for (std::int64_t p = first; p < length; ++p) {
        const auto at = static_cast<std::size_t>(p);
        const std::int32_t block = batch.block_tables[i * batch.block_table_stride + p / std::int64_t(block_size_)];
        visible.push_back(slots_.at(static_cast<std::size_t>(block) * block_size_ + at % block_size_));
      }
      const bool prompt_just_ended = static_cast<std::size_t>(length) == prompt_lengths_.at(to_index(row.request));
      for (std::int32_t k = 0; k < row.num_samples; ++k) {
        const std::int32_t sample = row.num_samples > 1 ? k : row.sample;
        const token_id token = simulated_next(first, visible, sample, prompt_just_ended);
        sampled.push_back({token, simulated_stop(token, stop_one_in_)});
      }
    }
    return sampled;
  }

 private:
  std::size_t block_size_;
  std::int32_t window_;
  std::int32_t stop_one_in_;
  std::vector<std::int64_t> slots_;  // [num_blocks · block_size], the token stored there
  std::map<std::uint64_t, std::size_t> prompt_lengths_;
};

}  // namespace bifolio::test
