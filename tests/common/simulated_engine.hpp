// SPDX-License-Identifier: Apache-2.0
#pragma once

/// An engine without a model, and the same model computed without cache, blocks or batches.
///
/// What the cache holds for a token represents its K and V: a hash of the token, its position and everything before it
/// (prompt, salt, adapter, extra keys), made from what the cache holds for the position before. What is sampled is a
/// hash of everything that attention may see. So any token that is lost, doubled, overwritten, computed after other
/// tokens or read from another sequence changes all tokens after it.
///
/// Steps are executed in order: swap_outs, copies, the tokens, and swap_ins at any time after the copies and before the
/// next step. Tokens that were not known when the step was built are taken from the results of the step that samples
/// them.

#include <algorithm>
#include <bifolio/scheduler.hpp>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "support/random.hpp"

namespace bifolio::test {

inline constexpr std::int32_t simulated_vocabulary = 50000;

/// What the cache holds before a request's first token.
inline std::uint64_t simulated_root(const request& what) {
  std::uint64_t h = hash_of(1, what.adapter_id);
  for (const char c : what.prefix_salt) h = mix(h ^ static_cast<std::uint64_t>(c));
  return h;
}

/// What the cache holds for `token` at `position`.
inline std::uint64_t simulated_kv(std::uint64_t before, token_id token, std::int64_t position, const request& what) {
  std::uint64_t h = hash_of(before, to_index(token), position);
  for (const owned_extra_key& extra : what.extras) {
    if (extra.position != position) continue;
    for (const std::byte byte : extra.value) h = mix(h ^ (static_cast<std::uint64_t>(byte) + extra.kind));
  }
  return h;
}

inline std::uint64_t simulated_attention(std::int64_t first, const std::uint64_t* visible, std::int64_t count) {
  std::uint64_t h = hash_of(2, first);
  for (std::int64_t i = 0; i < count; ++i) h = mix(h ^ visible[i]);
  return h;
}

/// As in real sampling, the samples of a prompt differ from their first token on.
inline token_id simulated_token(std::uint64_t attention, std::int32_t sample) {
  return token_id{
      static_cast<std::int32_t>(hash_of(attention, sample) % static_cast<std::uint64_t>(simulated_vocabulary))};
}

/// About one token in `one_in` ends its sequence.
inline bool simulated_stop(token_id token, std::int32_t one_in) { return one_in > 0 && to_index(token) % one_in == 0; }

/// The continuations that a beam search chooses: entry j becomes beam `beams[j]`.
inline std::vector<sampled_token> simulated_beams(const std::vector<std::int32_t>& beams,
                                                  const std::vector<std::uint64_t>& attention,
                                                  std::int32_t stop_one_in) {
  std::uint64_t all = 3;
  for (const std::uint64_t one : attention) all = mix(all ^ one);
  std::vector<sampled_token> chosen;
  for (std::size_t j = 0; j < beams.size(); ++j) {
    const std::uint64_t h = hash_of(all, beams[j]);
    // Mostly itself or the first, so that some beams multiply and others are dropped.
    const std::size_t from = h % 3 == 0 ? j : h % 3 == 1 ? 0 : h / 3 % beams.size();
    const token_id token = simulated_token(attention[from], beams[j] + 100);
    const bool named = from != j || h % 2 == 0;
    chosen.push_back({token, simulated_stop(token, stop_one_in), named ? beams[from] : -1});
  }
  return chosen;
}

/// The model alone with one request.
class serial_model {
 public:
  serial_model(const request& what, std::int32_t window, std::int32_t stop_one_in)
      : what_(what), window_(window), stop_one_in_(stop_one_in) {}

  /// What each sample says.
  [[nodiscard]] std::vector<std::vector<token_id>> answers() const {
    std::vector<std::uint64_t> prompt;
    for (const token_id token : what_.prompt) extend(prompt, token);
    const auto width = static_cast<std::size_t>(std::max(what_.num_samples, what_.beam_width));
    std::vector<std::vector<token_id>> said(width);
    if (what_.beam_width > 0) {
      search(prompt, said);
    } else {
      for (std::size_t k = 0; k < width; ++k) said[k] = sample(prompt, width > 1 ? static_cast<std::int32_t>(k) : 0);
    }
    return said;
  }

 private:
  void extend(std::vector<std::uint64_t>& kv, token_id token) const {
    kv.push_back(simulated_kv(kv.empty() ? simulated_root(what_) : kv.back(), token,
                              static_cast<std::int64_t>(kv.size()), what_));
  }
  [[nodiscard]] std::uint64_t attend(const std::vector<std::uint64_t>& kv) const {
    const auto length = static_cast<std::int64_t>(kv.size());
    const std::int64_t first = window_ == 0 ? 0 : std::max<std::int64_t>(0, length - window_);
    return simulated_attention(first, kv.data() + first, length - first);
  }
  [[nodiscard]] std::vector<token_id> sample(std::vector<std::uint64_t> kv, std::int32_t first_sample) const {
    std::vector<token_id> said;
    while (static_cast<std::int32_t>(said.size()) < what_.max_new_tokens) {
      said.push_back(simulated_token(attend(kv), said.empty() ? first_sample : 0));
      if (simulated_stop(said.back(), stop_one_in_)) break;
      extend(kv, said.back());
    }
    return said;
  }
  void search(const std::vector<std::uint64_t>& prompt, std::vector<std::vector<token_id>>& said) const {
    std::vector<std::vector<std::uint64_t>> kv(said.size(), prompt);
    std::vector<std::int32_t> live;
    for (std::size_t j = 0; j < said.size(); ++j) {
      said[j].push_back(simulated_token(attend(prompt), static_cast<std::int32_t>(j)));
      extend(kv[j], said[j].back());
      if (!simulated_stop(said[j].back(), stop_one_in_)) live.push_back(static_cast<std::int32_t>(j));
    }
    for (std::int32_t step = 1; step < what_.max_new_tokens && !live.empty(); ++step) {
      std::vector<std::uint64_t> attention;
      for (const std::int32_t beam : live) attention.push_back(attend(kv[static_cast<std::size_t>(beam)]));
      const std::vector<sampled_token> chosen = simulated_beams(live, attention, stop_one_in_);
      const auto old_kv = kv;
      const auto old_said = said;
      std::vector<std::int32_t> still;
      for (std::size_t j = 0; j < live.size(); ++j) {
        const auto to = static_cast<std::size_t>(live[j]);
        const auto from = static_cast<std::size_t>(chosen[j].from_sample < 0 ? live[j] : chosen[j].from_sample);
        said[to] = old_said[from];
        said[to].push_back(chosen[j].token);
        kv[to] = old_kv[from];
        extend(kv[to], chosen[j].token);
        if (!chosen[j].stop) still.push_back(live[j]);
      }
      live = still;
    }
  }

  const request& what_;
  std::int32_t window_;
  std::int32_t stop_one_in_;
};

class simulated_engine {
 public:
  simulated_engine(const kv_cache_manager& manager, std::int32_t stop_one_in, std::uint64_t seed = 1)
      : block_size_(manager.config().block_size),
        window_(manager.config().sliding_window),
        stop_one_in_(stop_one_in),
        device_(cells(manager.config().num_blocks)),
        host_(cells(manager.config().num_host_blocks)),
        random_(seed) {}

  void note(request_id id, const request& what) { requests_[to_index(id)] = what; }

  /// Executes a step; its results are what `commit` takes. With `fail_swaps` the step's swaps write garbage instead.
  const std::vector<sampled_token>& execute(const step_plan& plan, step_inputs inputs, bool fail_swaps = false) {
    finish_swap_ins();
    for (const block_copy& pair : plan.swap_outs) copy(device_, pair.src, host_, pair.dst, fail_swaps);
    for (const block_copy& pair : plan.copies) copy(device_, pair.src, device_, pair.dst, false);
    due_ = plan.swap_ins;
    due_fail_ = fail_swaps;
    if (random_.one_in(3)) finish_swap_ins();
    for (const token_placeholder& placeholder : inputs.placeholders) {
      inputs.tokens[static_cast<std::size_t>(placeholder.position)] =
          results_.at(placeholder.step).at(static_cast<std::size_t>(placeholder.sampled)).token;
    }
    std::vector<sampled_token>& sampled = results_[plan.step];
    sampled.clear();
    const step_batch_view batch = inputs.batch.view();
    // All rows are stored before any is read, as a layer does it.
    for (std::int32_t i = 0; i < batch.num_seqs; ++i) store(plan, inputs, batch, i);
    for (std::int32_t i = 0; i < batch.num_seqs;) i += sample(plan, batch, i, sampled);
    if (random_.one_in(3)) finish_swap_ins();
    results_.erase(plan.step - 64);
    return sampled;
  }

 private:
  static constexpr std::uint64_t poison = 0xdeadbeefdeadbeef;

  [[nodiscard]] std::vector<std::uint64_t> cells(std::int64_t num_blocks) const {
    return std::vector<std::uint64_t>(static_cast<std::size_t>(num_blocks * block_size_), poison);
  }
  void copy(const std::vector<std::uint64_t>& from, block_id src, std::vector<std::uint64_t>& to, block_id dst,
            bool fails) {
    for (std::int64_t k = 0; k < block_size_; ++k) {
      to.at(static_cast<std::size_t>(to_index(dst) * block_size_ + k)) =
          fails ? random_.next() : from.at(static_cast<std::size_t>(to_index(src) * block_size_ + k));
    }
  }
  void finish_swap_ins() {
    for (const block_copy& pair : due_) copy(host_, pair.src, device_, pair.dst, due_fail_);
    due_.clear();
  }
  [[nodiscard]] std::uint64_t& cell(const step_batch_view& batch, std::int32_t row, std::int64_t position) {
    const std::int32_t block = batch.block_tables[row * batch.block_table_stride + position / block_size_];
    return device_.at(static_cast<std::size_t>(block * block_size_ + position % block_size_));
  }
  void store(const step_plan& plan, const step_inputs& inputs, const step_batch_view& batch, std::int32_t i) {
    const request& what = requests_.at(to_index(plan.seqs[static_cast<std::size_t>(i)].request));
    for (std::int32_t t = batch.query_start_loc[i]; t < batch.query_start_loc[i + 1]; ++t) {
      const std::int64_t position = inputs.positions[static_cast<std::size_t>(t)];
      const std::uint64_t before = position == 0 ? simulated_root(what) : cell(batch, i, position - 1);
      device_.at(static_cast<std::size_t>(batch.slot_mapping[t])) =
          simulated_kv(before, inputs.tokens[static_cast<std::size_t>(t)], position, what);
    }
  }
  [[nodiscard]] std::uint64_t attend(const step_batch_view& batch, std::int32_t i, std::int64_t length) {
    const std::int64_t first = window_ == 0 ? 0 : std::max<std::int64_t>(0, length - window_);
    std::vector<std::uint64_t> visible;
    for (std::int64_t p = first; p < length; ++p) visible.push_back(cell(batch, i, p));
    return simulated_attention(first, visible.data(), length - first);
  }
  /// Returns how many rows of the plan that were: the beams of a request are sampled together.
  std::int32_t sample(const step_plan& plan, const step_batch_view& batch, std::int32_t i,
                      std::vector<sampled_token>& sampled) {
    const scheduled_seq& row = plan.seqs[static_cast<std::size_t>(i)];
    if (row.num_samples == 0) return 1;
    const request& what = requests_.at(to_index(row.request));
    const bool completes_prompt = row.seq_len == static_cast<std::int32_t>(what.prompt.size());
    const auto add = [&](token_id token) { sampled.push_back({token, simulated_stop(token, stop_one_in_)}); };
    if (completes_prompt) {
      const std::uint64_t attention = attend(batch, i, row.seq_len);
      for (std::int32_t k = 0; k < row.num_samples; ++k) {
        add(simulated_token(attention, row.num_samples > 1 ? k : row.sample));
      }
      return 1;
    }
    if (what.beam_width == 0) {
      for (std::int32_t k = row.num_drafts; k >= 0; --k) add(simulated_token(attend(batch, i, row.seq_len - k), 0));
      return 1;
    }
    std::vector<std::int32_t> beams;
    std::vector<std::uint64_t> attention;
    for (std::int32_t k = i; k < batch.num_seqs; ++k) {
      const scheduled_seq& beam = plan.seqs[static_cast<std::size_t>(k)];
      if (beam.request != row.request) break;
      beams.push_back(beam.sample);
      attention.push_back(attend(batch, k, beam.seq_len));
    }
    for (const sampled_token& one : simulated_beams(beams, attention, stop_one_in_)) sampled.push_back(one);
    return static_cast<std::int32_t>(beams.size());
  }

  std::int64_t block_size_;
  std::int32_t window_;
  std::int32_t stop_one_in_;
  std::vector<std::uint64_t> device_;  // [num_blocks, block_size]
  std::vector<std::uint64_t> host_;    // [num_host_blocks, block_size]
  std::vector<block_copy> due_;        // swap_ins of the last step that are not done yet
  bool due_fail_ = false;
  random_source random_;
  std::map<std::uint64_t, request> requests_;
  std::map<std::int64_t, std::vector<sampled_token>> results_;  // by step
};

}  // namespace bifolio::test
