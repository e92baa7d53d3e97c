// SPDX-License-Identifier: Apache-2.0
#pragma once

/// One call that continues prompts in process and gives everything that came out.

#include <algorithm>
#include <bifolio/backend.hpp>
#include <bifolio/cpu.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/model_cache.hpp>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "cache_shape.hpp"
#include "generation.hpp"
#include "paged_attention.hpp"
#include "parallel.hpp"
#include "placement.hpp"
#include "sampler.hpp"
#include "scoring.hpp"
#include "support/random.hpp"

namespace bifolio::test {

struct generation_setup {
  std::string device = "cpu";
  std::int32_t max_positions = 200;
  std::int32_t num_samples = 1;
  generate::sampling how{0, 1};
  std::uint64_t seed = 1;
  std::int32_t max_batch_tokens = 256;
  std::int32_t max_batch_seqs = 64;
  dtype kv_type = dtype::f32;
  dtype query_type = dtype::f32;
  bool deterministic = true;   ///< text is compared in any company
  std::optional<cpu_isa> isa;  ///< of a CPU; default: the best here
  layout_kind layout = layout_kind::hnd;
  std::int32_t block_size = 16;
  std::int64_t num_blocks = 1024;
  std::int32_t num_threads = 1;
  bool prefix_caching = false;
  std::int64_t num_host_blocks = 0;  ///< swaps whenever it preempts, if there are any
  bool keeps_all = false;            ///< layers with windows too: one group
};

struct generation_result {
  std::vector<std::vector<token_id>> outputs;  // by sequence
  std::vector<std::string> ended_by;
  generate::generation_stats stats;
};

inline generate::placed_model place_on(const generation_setup& setup, const generate::checkpoint& weights,
                                       executor& workers) {
  return generate::place_model(setup.device, weights, workers, {setup.query_type, bifolio::kv_code{setup.kv_type}},
                               setup.isa);
}

inline generate::cache_shape shape_of(const generation_setup& setup) {
  const kv_code code{setup.kv_type};
  return {.layout = setup.layout,
          .k_code = code,
          .v_code = code,
          .block_size = setup.block_size,
          .num_blocks = setup.num_blocks,
          .num_host_blocks = setup.num_host_blocks,
          .keeps_all = setup.keeps_all};
}

class collecting_observer final : public generate::generation_observer {
 public:
  explicit collecting_observer(generation_result& result) : result_(result) {}
  bool on_token(const generate::new_token& token) override {
    result_.outputs[token.sequence].push_back(token.id);
    return false;
  }
  void on_end(std::size_t sequence, generate::ending how) override {
    result_.ended_by[sequence] += generate::to_string(how);  // twice would show
  }
  void on_step(const generate::generation_progress&) override {}

 private:
  generation_result& result_;
};

inline generation_result continue_prompts(const generate::checkpoint& weights,
                                          const std::vector<std::vector<token_id>>& prompts,
                                          const generation_setup& setup) {
  const auto workers = generate::make_workers(setup.num_threads);
  const generate::placed_model placed = place_on(setup, weights, *workers);
  generate::generation_config config;
  config.deterministic = setup.deterministic;
  config.max_positions = setup.max_positions;
  config.num_samples = setup.num_samples;
  config.how = setup.how;
  config.seed = setup.seed;
  config.max_batch_tokens = setup.max_batch_tokens;
  config.max_running = setup.max_batch_seqs;
  config.prefix_caching = setup.prefix_caching;
  config.preemption = setup.num_host_blocks > 0 ? preemption_mode::swap : preemption_mode::recompute;
  generation_result result;
  const std::size_t num_sequences = prompts.size() * static_cast<std::size_t>(setup.num_samples);
  result.outputs.resize(num_sequences);
  result.ended_by.resize(num_sequences);
  collecting_observer observer(result);
  result.stats = generate_all(*placed.runner, *placed.where, shape_of(setup), config, prompts, observer);
  return result;
}

/// One sequence on one device, fed some tokens at a time, in the fewest lines that use a paged cache: no scheduler.
class fed_text {
 public:
  /// `num_others` blocks belong to somebody else, so that two devices hold the same text in blocks of other numbers.
  fed_text(const generate::checkpoint& weights, const generation_setup& setup, std::int64_t num_others = 0)
      : workers_(generate::make_workers(setup.num_threads)),
        placed_(place_on(setup, weights, *workers_)),
        cache_(*placed_.where, generate::cache_config(weights.config, setup.query_type, shape_of(setup),
                                                      {.max_positions = weights.config.max_positions,
                                                       .max_sequences = 2,
                                                       .deterministic = setup.deterministic})),
        attention_(cache_, weights.config) {
    if (num_others > 0) static_cast<void>(cache_.manager().allocate(num_others * setup.block_size));
  }

  /// Feeds `ids`, `chunk` a step, and appends the logits after every one of them.
  void feed(std::span<const token_id> ids, std::int32_t chunk, std::vector<std::vector<float>>& logits) {
    const auto vocab = static_cast<std::size_t>(placed_.runner->config().vocab_size);
    const stream_ref stream = placed_.runner->stream();
    for (std::size_t first = 0; first < ids.size(); first += static_cast<std::size_t>(chunk)) {
      const auto now = ids.subspan(first, std::min(static_cast<std::size_t>(chunk), ids.size() - first));
      if (seq_ == invalid_seq) seq_ = require(cache_.open(now, stream).seq);
      model_step step = cache_.begin_step({{seq_, now}}, stream);
      require(step.status());
      attention_.use(step);
      std::vector<std::int32_t> rows(now.size());
      std::iota(rows.begin(), rows.end(), 0);
      const auto all = placed_.runner->forward(now, step.inputs().positions, rows, attention_);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const auto row = all.subspan(i * vocab, vocab);
        logits.emplace_back(row.begin(), row.end());
      }
      for (const std::string& name : attention_.kernels()) kernels_.insert(name);
      step.commit();
    }
  }
  /// Of attention, that computed any of it.
  [[nodiscard]] const std::set<std::string>& kernels() const noexcept { return kernels_; }

  /// Goes on with the text of `other` from here: its blocks are copied to this device. This one was fed nothing yet.
  /// For models whose layers are in one group.
  void take_over(fed_text& other) {
    kv_cache_manager& manager = cache_.manager();
    const kv_cache_manager& from = other.cache_.manager();
    const std::int64_t length = from.num_committed(other.seq_);
    const allocate_result opened = manager.allocate(length);
    require(opened.status);
    seq_ = opened.seq;
    std::vector<block_copy> copies;
    for (std::int64_t i = 0; i < from.num_table_blocks(other.seq_); ++i) {
      copies.push_back({from.block_at(other.seq_, i), manager.block_at(seq_, i)});
    }
    // The transfer runs on whichever of the two is not a CPU.
    generate::placed_model& mover = other.placed_.where->where().type == device_type::cpu ? placed_ : other.placed_;
    require(other.cache_.engine().swap_blocks_to(cache_.engine(), copies, mover.runner->stream()));
    require(mover.where->synchronize(mover.runner->stream()));
    manager.commit(seq_, length);
  }

  /// The blocks of the text as they are in memory: layer after layer, first K, then V.
  [[nodiscard]] std::vector<std::byte> stored() {
    const cache_engine& engine = cache_.engine();
    const auto half = static_cast<std::size_t>(engine.config().layout.block_bytes() / 2);
    std::vector<std::byte> bytes;
    for (const kv_cache_view& layer : engine.layers()) {
      for (const void* from : {layer.k, layer.v}) {
        for (std::int64_t i = 0; i < cache_.manager().num_table_blocks(seq_); ++i) {
          const auto block = static_cast<std::size_t>(to_index(cache_.manager().block_at(seq_, i)));
          bytes.resize(bytes.size() + half);
          require(placed_.where->download(bytes.data() + bytes.size() - half,
                                          static_cast<const std::byte*>(from) + block * half, half, {}));
          require(placed_.where->synchronize({}));
        }
      }
    }
    return bytes;
  }

 private:
  static void require(errc code) {
    if (code != errc::ok) throw error(code, "the test's own call failed");
  }
  static void require(alloc_status status) {
    if (status != alloc_status::ok) throw error(errc::invalid_argument, "the test's pool is too small");
  }
  static seq_id require(seq_id seq) {
    require(seq == invalid_seq ? alloc_status::never : alloc_status::ok);
    return seq;
  }

  std::unique_ptr<executor> workers_;
  generate::placed_model placed_;
  model_cache cache_;
  generate::paged_attention attention_;
  seq_id seq_ = invalid_seq;
  std::set<std::string> kernels_;
};

/// Logits after every token of one sequence.
inline std::vector<std::vector<float>> paged_logits(const generate::checkpoint& weights,
                                                    const std::vector<token_id>& ids, std::int32_t chunk,
                                                    const generation_setup& setup = {}) {
  fed_text text(weights, setup);
  std::vector<std::vector<float>> logits;
  text.feed(ids, chunk, logits);
  return logits;
}

/// The largest difference of two texts' logits; infinite when any is no number.
inline double largest_difference(std::span<const std::vector<float>> a, std::span<const std::vector<float>> b) {
  double worst = a.size() == b.size() ? 0 : HUGE_VAL;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    for (std::size_t j = 0; j < a[i].size(); ++j) {
      const double difference = std::abs(static_cast<double>(a[i][j]) - static_cast<double>(b[i][j]));
      worst = std::isnan(difference) ? HUGE_VAL : std::max(worst, difference);
    }
  }
  return worst;
}

/// What a change of device in the middle of a text does to it.
struct moved_text {
  bool equal_bytes = false;         ///< what the second device got is what the first one had
  std::set<std::string> kernels;    ///< of attention, on either device
  double logits_against_begun = 0;  ///< largest difference to the text on the first device alone, after the move
  double logits_against_ended = 0;  ///< and on the second
  double nll_against_begun = 0;     ///< the same of the mean negative log-likelihood of the tokens
  double nll_against_ended = 0;
};

/// Feeds `ids` on two devices: the first `num_before` on the one that `begun` describes, all but the last 8 of them as
/// a prompt of two chunks, then one by one; the rest one by one on the one that `ended` describes.
[[nodiscard]] inline moved_text move_text(const generate::checkpoint& weights, const std::vector<token_id>& ids,
                                          std::size_t num_before, const generation_setup& begun,
                                          const generation_setup& ended) {
  using rows = std::vector<std::vector<float>>;
  const std::span<const token_id> all(ids);
  const auto begin = [&](fed_text& text, rows& logits) {
    text.feed(all.first(num_before - 8), static_cast<std::int32_t>(num_before - 8) / 2 + 1, logits);
    text.feed(all.subspan(num_before - 8, 8), 1, logits);
  };
  const auto whole = [&](const generation_setup& setup) {
    fed_text text(weights, setup);
    rows logits;
    begin(text, logits);
    text.feed(all.subspan(num_before), 1, logits);
    return logits;
  };
  fed_text first(weights, begun);
  fed_text second(weights, ended, 3);
  rows logits;
  begin(first, logits);
  second.take_over(first);
  moved_text result;
  result.equal_bytes = first.stored() == second.stored();
  second.feed(all.subspan(num_before), 1, logits);
  result.kernels = first.kernels();
  result.kernels.insert(second.kernels().begin(), second.kernels().end());

  const auto mean_nll = [&](const rows& some) {
    double sum = 0;
    for (std::size_t i = num_before; i + 1 < ids.size(); ++i) {
      sum += generate::negative_log_likelihood(some[i], ids[i + 1]);
    }
    return sum / static_cast<double>(ids.size() - 1 - num_before);
  };
  const auto compare = [&](const rows& other, double& logit, double& nll) {
    logit = largest_difference(std::span(logits).subspan(num_before), std::span(other).subspan(num_before));
    nll = std::abs(mean_nll(logits) - mean_nll(other));
  };
  compare(whole(begun), result.logits_against_begun, result.nll_against_begun);
  compare(whole(ended), result.logits_against_ended, result.nll_against_ended);
  return result;
}

/// How far the logits of a text may be apart on two devices that round queries, cache and attention's results to
/// `type`: three times what that rounding moves them on the CPU. Each of the two moves them about as far, in directions
/// of its own, and some kernels round probabilities too. (Between two instruction sets that do and do not, the
/// difference was 0.3 to 1.1 times what the rounding did, in the models here.)
[[nodiscard]] inline double logit_bound(const generate::checkpoint& weights, const std::vector<token_id>& ids,
                                        dtype type) {
  if (type == dtype::f32) return 2e-4;
  generation_setup exact;
  exact.num_threads = 0;
  generation_setup rounded = exact;
  rounded.query_type = rounded.kv_type = type;
  return 3 * largest_difference(paged_logits(weights, ids, 64, exact), paged_logits(weights, ids, 64, rounded));
}
/// And how far its mean negative log-likelihoods, in any type.
inline constexpr double nll_bound = 2e-3;

/// A text of `count` bytes that no model has seen, begun as all are.
[[nodiscard]] inline std::vector<token_id> random_bytes(std::uint64_t seed, std::size_t count) {
  random_source random(seed);
  std::vector<token_id> ids{token_id{0}};
  while (ids.size() < count) ids.push_back(token_id{static_cast<std::int32_t>(random.between(1, 255))});
  return ids;
}

/// How probable the model finds a text, with the cache that `setup` describes in as many blocks as the text needs and
/// `chunk` tokens a step.
inline generate::score score_text(const generate::checkpoint& weights, const std::vector<token_id>& ids,
                                  const generation_setup& setup, std::int32_t chunk) {
  const auto workers = generate::make_workers(setup.num_threads);
  const generate::placed_model placed = place_on(setup, weights, *workers);
  generate::cache_shape shape = shape_of(setup);
  shape.num_blocks = blocks_for(std::ssize(ids), setup.block_size);
  shape.num_host_blocks = 0;
  return generate::score_tokens(*placed.runner, *placed.where, shape, ids, chunk, setup.deterministic);
}

}  // namespace bifolio::test
