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
/// next step. With layer groups each has its memory: window groups the same as the first, state groups what their
/// blocks say (what the cache holds for the last token, made from the state that the step reads), cross groups the
/// encoder's output; what is sampled depends on all of them. Tokens that were not known when the step was built are
/// taken from the results of the step that samples them.

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

/// The encoder's output at a position.
inline std::uint64_t simulated_encoding(const request& what, std::int64_t position) {
  std::uint64_t h = hash_of(4, position, what.num_cross_tokens);
  for (const std::byte byte : what.cross_digest) h = mix(h ^ static_cast<std::uint64_t>(byte));
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
  serial_model(const request& what, std::int32_t window, std::int32_t stop_one_in,
               std::vector<group_config> groups = {})
      : what_(what), window_(window), stop_one_in_(stop_one_in), groups_(std::move(groups)) {}

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
    const auto over = [&](std::int32_t window) {
      const std::int64_t first = window == 0 ? 0 : std::max<std::int64_t>(0, length - window);
      return simulated_attention(first, kv.data() + first, length - first);
    };
    std::uint64_t h = over(window_);
    for (std::size_t g = 1; g < groups_.size(); ++g) {
      if (groups_[g].kind == group_kind::full || groups_[g].kind == group_kind::window) {
        h = mix(h ^ over(groups_[g].window));
      } else if (groups_[g].kind == group_kind::state) {
        h = mix(h ^ kv.back());
      }
      for (std::int64_t p = 0; groups_[g].kind == group_kind::cross && p < what_.num_cross_tokens; ++p) {
        h = mix(h ^ simulated_encoding(what_, p));
      }
    }
    return h;
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
  std::vector<group_config> groups_;
};

class simulated_engine {
 public:
  simulated_engine(const kv_cache_manager& manager, std::int32_t stop_one_in, std::uint64_t seed = 1)
      : groups_(manager.config().groups), stop_one_in_(stop_one_in), random_(seed) {
    const kv_cache_config& config = manager.config();
    if (groups_.empty()) {
      groups_.push_back({.kind = config.sliding_window > 0 ? group_kind::window : group_kind::full,
                         .block_size = config.block_size,
                         .num_blocks = config.num_blocks,
                         .num_host_blocks = config.num_host_blocks,
                         .window = config.sliding_window});
    }
    for (const group_config& group : groups_) {
      device_.emplace_back(static_cast<std::size_t>(group.num_blocks * group.block_size), poison);
      host_.emplace_back(static_cast<std::size_t>(group.num_host_blocks * group.block_size), poison);
    }
    due_.resize(groups_.size());
  }

  void note(request_id id, const request& what) { requests_[to_index(id)] = what; }

  /// Executes a step; its results are what `commit` takes. With `fail_swaps` the step's swaps write garbage instead.
  const std::vector<sampled_token>& execute(const step_plan& plan, step_inputs inputs, bool fail_swaps = false) {
    finish_swap_ins();
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const bool is_first = g == 0;
      for (const block_copy& pair : is_first ? plan.swap_outs : plan.groups[g - 1].swap_outs) {
        copy(g, device_, pair.src, host_, pair.dst, fail_swaps);
      }
      for (const block_copy& pair : is_first ? plan.copies : plan.groups[g - 1].copies) {
        copy(g, device_, pair.src, device_, pair.dst, false);
      }
      due_[g] = is_first ? plan.swap_ins : plan.groups[g - 1].swap_ins;
    }
    due_fail_ = fail_swaps;
    if (random_.one_in(3)) finish_swap_ins();
    for (const token_placeholder& placeholder : inputs.placeholders) {
      inputs.tokens[static_cast<std::size_t>(placeholder.position)] =
          results_.at(placeholder.step).at(static_cast<std::size_t>(placeholder.sampled)).token;
    }
    std::vector<sampled_token>& sampled = results_[plan.step];
    sampled.clear();
    const host_step_view batch = inputs.batch.view();
    // All rows are stored before any is read, as a layer does it.
    for (std::int32_t i = 0; i < batch.num_seqs; ++i) store(plan, inputs, batch, i);
    for (std::int32_t i = 0; i < batch.num_seqs;) i += sample(plan, inputs, i, sampled);
    if (random_.one_in(3)) finish_swap_ins();
    results_.erase(plan.step - 64);
    return sampled;
  }

 private:
  static constexpr std::uint64_t poison = 0xdeadbeefdeadbeef;

  using memory_of_groups = std::vector<std::vector<std::uint64_t>>;

  void copy(std::size_t g, const memory_of_groups& from, block_id src, memory_of_groups& to, block_id dst, bool fails) {
    const std::int64_t size = groups_[g].block_size;
    for (std::int64_t k = 0; k < size; ++k) {
      to[g].at(static_cast<std::size_t>(to_index(dst) * size + k)) =
          fails ? random_.next() : from[g].at(static_cast<std::size_t>(to_index(src) * size + k));
    }
  }
  void finish_swap_ins() {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      for (const block_copy& pair : due_[g]) copy(g, host_, pair.src, device_, pair.dst, due_fail_);
      due_[g].clear();
    }
  }
  [[nodiscard]] static const step_batch& batch_of(const step_inputs& inputs, std::size_t g) {
    return g == 0 ? inputs.batch : inputs.groups.at(g - 1);
  }
  [[nodiscard]] std::int32_t entry(const step_inputs& inputs, std::size_t g, std::int32_t row, std::int64_t i) const {
    const step_batch& batch = batch_of(inputs, g);
    return batch.block_tables.at(static_cast<std::size_t>(row * batch.block_table_stride + i));
  }
  [[nodiscard]] std::uint64_t& cell(const step_inputs& inputs, std::size_t g, std::int32_t row, std::int64_t position) {
    const std::int64_t size = groups_[g].block_size;
    return device_[g].at(static_cast<std::size_t>(entry(inputs, g, row, position / size) * size + position % size));
  }
  /// The state after `position` tokens that the step read or wrote.
  [[nodiscard]] std::uint64_t& state(const step_inputs& inputs, std::size_t g, std::int32_t row,
                                     const scheduled_seq& what, std::int64_t position) {
    const std::int64_t begin = what.seq_len - what.query_len;
    const bool keeps_each = what.query_len <= 1 + groups_[g].num_draft_slots;
    const std::int64_t at = position == begin ? 0 : keeps_each ? position - begin : 1;
    return device_[g].at(static_cast<std::size_t>(entry(inputs, g, row, at)));
  }
  void store_in_group(const step_plan& plan, const step_inputs& inputs, std::size_t g, std::int32_t i) {
    const scheduled_seq& row = plan.seqs[static_cast<std::size_t>(i)];
    const request& what = requests_.at(to_index(row.request));
    if (groups_[g].kind == group_kind::cross) {
      if (std::find(plan.encoded.begin(), plan.encoded.end(), row.seq) == plan.encoded.end()) return;
      for (std::int64_t p = 0; p < what.num_cross_tokens; ++p) cell(inputs, g, i, p) = simulated_encoding(what, p);
      return;
    }
    const std::int32_t start = inputs.batch.query_start_loc[static_cast<std::size_t>(i)];
    const std::int64_t begin = row.seq_len - row.query_len;
    const bool is_state = groups_[g].kind == group_kind::state;
    std::uint64_t before = begin == 0 ? simulated_root(what)
                           : is_state ? state(inputs, g, i, row, begin)
                                      : cell(inputs, g, i, begin - 1);
    for (std::int64_t p = begin; p < row.seq_len; ++p) {
      const std::size_t t = static_cast<std::size_t>(start + p - begin);
      before = simulated_kv(before, inputs.tokens[t], p, what);
      if (!is_state) {
        device_[g].at(static_cast<std::size_t>(batch_of(inputs, g).slot_mapping[t])) = before;
      } else if (p + 1 == row.seq_len || row.query_len <= 1 + groups_[g].num_draft_slots) {
        state(inputs, g, i, row, p + 1) = before;
      }
    }
  }
  void store(const step_plan& plan, const step_inputs& inputs, const host_step_view& batch, std::int32_t i) {
    const request& what = requests_.at(to_index(plan.seqs[static_cast<std::size_t>(i)].request));
    for (std::int32_t t = batch.query_start_loc[i]; t < batch.query_start_loc[i + 1]; ++t) {
      const std::int64_t position = inputs.positions[static_cast<std::size_t>(t)];
      const std::uint64_t before = position == 0 ? simulated_root(what) : cell(inputs, 0, i, position - 1);
      device_[0].at(static_cast<std::size_t>(batch.slot_mapping[t])) =
          simulated_kv(before, inputs.tokens[static_cast<std::size_t>(t)], position, what);
    }
    for (std::size_t g = 1; g < groups_.size(); ++g) store_in_group(plan, inputs, g, i);
  }
  [[nodiscard]] std::uint64_t attend(const step_plan& plan, const step_inputs& inputs, std::int32_t i,
                                     std::int64_t length) {
    std::uint64_t h = 0;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      if (groups_[g].kind == group_kind::state) {
        h = mix(h ^ state(inputs, g, i, plan.seqs[static_cast<std::size_t>(i)], length));
        continue;
      }
      if (groups_[g].kind == group_kind::cross) {
        const std::int32_t num_tokens = batch_of(inputs, g).seq_lens[static_cast<std::size_t>(i)];
        for (std::int64_t p = 0; p < num_tokens; ++p) h = mix(h ^ cell(inputs, g, i, p));
        continue;
      }
      const std::int32_t window = groups_[g].window;
      const std::int64_t first = window == 0 ? 0 : std::max<std::int64_t>(0, length - window);
      std::vector<std::uint64_t> visible;
      for (std::int64_t p = first; p < length; ++p) visible.push_back(cell(inputs, g, i, p));
      const std::uint64_t one = simulated_attention(first, visible.data(), length - first);
      h = g == 0 ? one : mix(h ^ one);
    }
    return h;
  }
  /// Returns how many rows of the plan that were: the beams of a request are sampled together.
  std::int32_t sample(const step_plan& plan, const step_inputs& inputs, std::int32_t i,
                      std::vector<sampled_token>& sampled) {
    const scheduled_seq& row = plan.seqs[static_cast<std::size_t>(i)];
    if (row.num_samples == 0) return 1;
    const request& what = requests_.at(to_index(row.request));
    const bool completes_prompt = row.seq_len == static_cast<std::int32_t>(what.prompt.size());
    const auto add = [&](token_id token) { sampled.push_back({token, simulated_stop(token, stop_one_in_)}); };
    if (completes_prompt) {
      const std::uint64_t attention = attend(plan, inputs, i, row.seq_len);
      for (std::int32_t k = 0; k < row.num_samples; ++k) {
        add(simulated_token(attention, row.num_samples > 1 ? k : row.sample));
      }
      return 1;
    }
    if (what.beam_width == 0) {
      for (std::int32_t k = row.num_drafts; k >= 0; --k)
        add(simulated_token(attend(plan, inputs, i, row.seq_len - k), 0));
      return 1;
    }
    std::vector<std::int32_t> beams;
    std::vector<std::uint64_t> attention;
    for (std::int32_t k = i; k < static_cast<std::int32_t>(plan.seqs.size()); ++k) {
      const scheduled_seq& beam = plan.seqs[static_cast<std::size_t>(k)];
      if (beam.request != row.request) break;
      beams.push_back(beam.sample);
      attention.push_back(attend(plan, inputs, k, beam.seq_len));
    }
    for (const sampled_token& one : simulated_beams(beams, attention, stop_one_in_)) sampled.push_back(one);
    return static_cast<std::int32_t>(beams.size());
  }

  std::vector<group_config> groups_;  // the only one without layer groups
  std::int32_t stop_one_in_;
  memory_of_groups device_;                   // [group][num_blocks, block_size]
  memory_of_groups host_;                     // [group][num_host_blocks, block_size]
  std::vector<std::vector<block_copy>> due_;  // [group], swap_ins of the last step that are not done yet
  bool due_fail_ = false;
  random_source random_;
  std::map<std::uint64_t, request> requests_;
  std::map<std::int64_t, std::vector<sampled_token>> results_;  // by step
};

}  // namespace bifolio::test
