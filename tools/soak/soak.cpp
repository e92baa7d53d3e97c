// SPDX-License-Identifier: Apache-2.0
#include "soak.hpp"

#include <algorithm>
#include <bifolio/bifolio.hpp>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "support/device_bytes.hpp"
#include "support/random.hpp"

namespace soak {
namespace {

using namespace bifolio;
using test::device_bytes;
using test::hash_of;
using test::require_ok;

constexpr std::int32_t num_layers = 2;
constexpr std::int32_t num_kv_heads = 2;
constexpr std::int32_t num_q_heads = 4;
constexpr std::int32_t head_dim = 64;
constexpr std::int32_t vocab_size = 32000;
constexpr std::int32_t longest_prompt = 600;
constexpr std::int32_t longest_answer = 120;
constexpr std::int32_t most_running = 16;
constexpr std::size_t most_asked = 24;
constexpr std::int64_t most_steps_at_the_end = 200000;

enum what_is_stored : std::uint8_t { key = 1, value, query };

/// An eighth between −1 and 1: exact in bfloat16.
float element_of(what_is_stored what, std::int32_t layer, token_id token, std::int64_t position, std::int64_t index) {
  const std::uint64_t h = hash_of(what, layer, to_index(token), position, index);
  return static_cast<float>(static_cast<std::int32_t>(h % 17) - 8) / 8.0f;
}

token_id token_of(std::uint64_t h) { return token_id{static_cast<std::int32_t>(h % vocab_size)}; }

struct asked_request {
  std::vector<token_id> prompt;
  std::vector<std::vector<token_id>> said;  // by sample
};

class round {
 public:
  round(backend& where, const trace_replay::trace& requests, std::size_t& next, const settings& how, std::uint64_t seed,
        counts& sum)
      : where_(where),
        trace_(requests),
        next_(next),
        how_(how),
        random_(seed),
        sum_(sum),
        block_size_(8 << random_.between(0, 2)),
        num_blocks_(how.num_blocks > 0 ? how.num_blocks : random_.between(800, 3500) / block_size_),
        num_host_blocks_(random_.one_in(4) ? 1 : std::max<std::int64_t>(1, num_blocks_ / 2)),
        manager_({.block_size = block_size_,
                  .num_blocks = num_blocks_,
                  .max_sequences = 4 * most_running,
                  .prefix = {.enabled = true, .deduplicate = random_.one_in(3)},
                  .num_host_blocks = num_host_blocks_}),
        plans_(manager_, {.max_tokens_per_step = static_cast<std::int32_t>(random_.between(64, 512)),
                          .max_running = most_running,
                          .max_chunk_tokens = random_.one_in(2) ? 64 : 0,
                          .vocab_size = vocab_size,
                          .preemption = random_.one_in(4) ? preemption_mode::automatic : preemption_mode::swap}),
        layout_(make_layout(layout_kind::hnd, dtype::bf16, num_kv_heads, head_dim, block_size_)),
        cache_(where, {num_layers, num_blocks_, layout_}),
        host_backend_(make_backend()),
        host_(*host_backend_, {num_layers, num_host_blocks_, layout_}, &where.staging_memory()) {}

  std::string run() {
    for (std::int64_t n = 0; n < how_.steps_per_round; ++n) {
      for (std::size_t tries = 0; live_.size() < most_asked && tries < most_asked; ++tries) ask();
      maybe_abort();
      if (std::string problem = step(); !problem.empty()) return at_step(problem);
    }
    for (std::int64_t n = 0; plans_.has_work(); ++n) {
      if (n > most_steps_at_the_end) return at_step("requests do not come to their end");
      if (std::string problem = step(); !problem.empty()) return at_step(problem);
    }
    const scheduler_stats& stats = plans_.stats();
    sum_.num_finished += stats.num_finished;
    sum_.num_aborted += stats.num_aborted;
    sum_.num_preemptions += stats.num_preemptions;
    sum_.num_swap_outs += stats.num_swap_outs;
    sum_.num_swap_ins += stats.num_swap_ins;
    sum_.num_failed_swaps += stats.num_failed_swaps;
    sum_.num_cached_tokens += stats.num_cached_tokens;
    ++sum_.num_rounds;
    if (manager_.num_free_blocks() != num_blocks_) return "blocks were lost";
    if (manager_.num_free_host_blocks() != num_host_blocks_) return "host blocks were lost";
    if (manager_.stats().num_sequences != 0) return "sequences were left open";
    return plans_.check();
  }

 private:
  std::string at_step(const std::string& problem) const {
    return "step " + std::to_string(plans_.stats().num_steps) + ": " + problem;
  }

  void ask() {
    const trace_replay::trace_request& from = trace_.requests[next_++ % trace_.requests.size()];
    asked_request asked;
    // A small pool gets small requests: what cannot ever be served is refused, and tests nothing.
    const auto room = static_cast<std::int32_t>(std::min<std::int64_t>(num_blocks_ * block_size_, 1 << 20));
    const auto length = std::clamp(from.num_input_tokens / how_.shrink, 1, std::clamp(room / 2, 1, longest_prompt));
    const std::int32_t block_tokens = std::max(1, 512 / how_.shrink);
    const auto ids = trace_.ids_of(from);
    for (std::int32_t i = 0; i < length; ++i) {
      const auto block = static_cast<std::size_t>(i / block_tokens);
      const std::uint64_t content =
          block < ids.size() ? static_cast<std::uint64_t>(to_index(ids[block])) : random_.next();
      asked.prompt.push_back(token_of(hash_of(content, i % block_tokens)));
    }
    request what;
    what.prompt = asked.prompt;
    what.max_new_tokens = std::clamp(from.num_output_tokens / how_.shrink, 1, std::clamp(room / 8, 1, longest_answer));
    what.num_samples = random_.one_in(5) ? static_cast<std::int32_t>(random_.between(2, 4)) : 1;
    asked.said.resize(static_cast<std::size_t>(what.num_samples));
    const submit_result got = plans_.submit(std::move(what));
    if (got.status == alloc_status::ok) live_[to_index(got.id)] = std::move(asked);
  }

  void maybe_abort() {
    if (!random_.one_in(30) || live_.empty()) return;
    auto victim = live_.begin();
    std::advance(victim, random_.between(0, std::ssize(live_) - 1));
    const request_id id{victim->first};
    if (random_.one_in(2)) {
      plans_.post_abort(id);
    } else if (plans_.abort(id) == errc::ok) {
      ended_.push_back(victim->first);
    }
  }

  [[nodiscard]] token_id token_at(const scheduled_seq& row, std::int64_t position) const {
    const asked_request& asked = live_.at(to_index(row.request));
    const auto at = static_cast<std::size_t>(position);
    if (at < asked.prompt.size()) return asked.prompt[at];
    return asked.said[static_cast<std::size_t>(row.sample)].at(at - asked.prompt.size());
  }

  std::string step() {
    const step_plan& plan = plans_.schedule();
    for (const request_id id : plan.aborted) ended_.push_back(to_index(id));
    if (plan.empty()) {
      (void)plans_.commit(plan, {});
      forget_ended();
      return plans_.has_work() ? "an empty plan while there is work" : "";
    }
    const bool moves = !plan.swap_outs.empty() || !plan.swap_ins.empty();
    const bool fails = moves && random_.one_in(8);
    if (!fails) require_ok(cache_.swap_blocks_to(host_, plan.swap_outs), "swap out");
    require_ok(cache_.copy_blocks(plan.copies), "copy");
    plans_.build(inputs_);
    std::string problem;
    if (!plan.seqs.empty()) problem = compute(plan);
    if (!fails) require_ok(host_.swap_blocks_to(cache_, plan.swap_ins), "swap in");
    require_ok(where_.synchronize({}), "synchronize");
    if (!problem.empty()) return problem;
    if (fails) (void)plans_.fail_swaps(plan);

    std::vector<sampled_token> sampled;
    for (const scheduled_seq& row : plan.seqs) {
      for (std::int32_t j = 0; j < row.num_samples; ++j) {
        const std::int32_t sample = row.num_samples > 1 ? j : row.sample;
        sampled.push_back({token_of(random_.next()), random_.one_in(200)});
        live_.at(to_index(row.request)).said[static_cast<std::size_t>(sample)].push_back(sampled.back().token);
      }
    }
    sum_.num_tokens += plan.num_tokens;
    ++sum_.num_steps;
    for (const finished_sequence& done : plans_.commit(plan, sampled)) {
      asked_request& asked = live_.at(to_index(done.request));
      std::vector<token_id>& said = asked.said[static_cast<std::size_t>(done.sample)];
      if (done.tokens != said) return "a finished sequence has other tokens than were sampled";
      if (++num_done_[to_index(done.request)] == std::ssize(asked.said)) ended_.push_back(to_index(done.request));
    }
    forget_ended();
    return sum_.num_steps % 64 == 0 ? plans_.check() : "";
  }

  void forget_ended() {
    for (const std::uint64_t id : ended_) {
      live_.erase(id);
      num_done_.erase(id);
    }
    ended_.clear();
  }

  /// Rows of the step's tokens, [num_tokens, num_heads, head_dim].
  [[nodiscard]] std::vector<std::byte> rows_of(what_is_stored what, std::int32_t layer, std::int32_t num_heads) const {
    std::vector<bfloat16> rows;
    for (std::size_t t = 0; t < inputs_.tokens.size(); ++t) {
      for (std::int64_t i = 0; i < std::int64_t{num_heads} * head_dim; ++i) {
        rows.push_back(from_float<bfloat16>(element_of(what, layer, inputs_.tokens[t], inputs_.positions[t], i)));
      }
    }
    return test::bytes_of(rows);
  }

  std::string compute(const step_plan& plan) {
    std::size_t token = 0;
    for (const scheduled_seq& row : plan.seqs) {
      for (std::int64_t p = row.seq_len - row.query_len; p < row.seq_len; ++p, ++token) {
        if (inputs_.positions[token] != p) return "a token has another position than its place in the sequence";
        if (inputs_.tokens[token] != token_at(row, p)) return "a step computes another token than the sequence's";
      }
    }
    const device_step_view batch = cache_.upload(inputs_.batch);
    const attention_spec spec{.num_q_heads = num_q_heads,
                              .num_kv_heads = num_kv_heads,
                              .qk_head_dim = head_dim,
                              .v_head_dim = head_dim,
                              .block_size = block_size_,
                              .q_type = dtype::bf16,
                              .k_code = {dtype::bf16},
                              .v_code = {dtype::bf16},
                              .out_type = dtype::f32};
    where_.plan_attention(work_, spec, inputs_.batch.view(), num_blocks_);
    const auto view = [&](device_bytes& rows, std::int32_t heads) {
      return dense_view<const void>(rows.data(), dtype::bf16, plan.num_tokens, heads, head_dim);
    };
    const std::vector<float> nothing(static_cast<std::size_t>(plan.num_tokens) * num_q_heads * head_dim, 1e30f);
    device_bytes out(where_, test::bytes_of(nothing), 64);
    const auto checked_layer = static_cast<std::int32_t>(random_.between(0, num_layers - 1));
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
      device_bytes k(where_, rows_of(key, layer, num_kv_heads), 64);
      device_bytes v(where_, rows_of(value, layer, num_kv_heads), 64);
      require_ok(cache_.append(layer, view(k, num_kv_heads), view(v, num_kv_heads), batch.slot_mapping), "append");
      if (layer == checked_layer) {
        device_bytes q(where_, rows_of(query, layer, num_q_heads), 64);
        attention_params params{.q = view(q, num_q_heads),
                                .out = dense_view<void>(out.data(), dtype::f32, plan.num_tokens, num_q_heads, head_dim),
                                .kv = cache_.layers()[static_cast<std::size_t>(layer)],
                                .batch = batch,
                                .scale = 0.125f};
        require_ok(where_.attention(work_, params), "attention");
        require_ok(where_.synchronize({}), "synchronize");
      }
      require_ok(where_.synchronize({}), "synchronize");  // k and v go
    }
    const auto which = static_cast<std::size_t>(random_.between(0, std::ssize(plan.seqs) - 1));
    if (std::string problem = check_contents(plan.seqs[which], which); !problem.empty()) return problem;
    if (plans_.stats().num_steps % 32 == 0) {
      for (std::size_t i = 0; i < plan.seqs.size(); ++i) {
        if (std::string problem = check_contents(plan.seqs[i], i); !problem.empty()) return problem;
      }
    }
    return check_attention(plan.seqs[which], which, out.read(), checked_layer);
  }

  /// Reads every token of a row's sequence back, in all layers.
  std::string check_contents(const scheduled_seq& row, std::size_t index) {
    std::vector<std::int64_t> slots;
    const std::int32_t* table =
        inputs_.batch.block_tables.data() + index * static_cast<std::size_t>(inputs_.batch.block_table_stride);
    for (std::int32_t p = 0; p < row.seq_len; ++p) {
      slots.push_back(std::int64_t{table[p / block_size_]} * block_size_ + p % block_size_);
    }
    const std::vector<float> nothing(slots.size() * num_kv_heads * head_dim, 1e30f);
    device_bytes slots_there(where_, test::bytes_of(slots), 64);
    device_bytes k(where_, test::bytes_of(nothing), 64);
    device_bytes v(where_, test::bytes_of(nothing), 64);
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
      const auto view = [&](device_bytes& rows) {
        return dense_view<void>(rows.data(), dtype::f32, row.seq_len, num_kv_heads, head_dim);
      };
      require_ok(where_.gather({cache_.layers()[static_cast<std::size_t>(layer)], view(k), view(v),
                                reinterpret_cast<const std::int64_t*>(slots_there.data())}),
                 "gather");
      const std::vector<std::byte> k_bytes = k.read(), v_bytes = v.read();
      const auto* const k_is = reinterpret_cast<const float*>(k_bytes.data());
      const auto* const v_is = reinterpret_cast<const float*>(v_bytes.data());
      std::size_t at = 0;
      for (std::int32_t p = 0; p < row.seq_len; ++p) {
        const token_id token = token_at(row, p);
        for (std::int64_t i = 0; i < std::int64_t{num_kv_heads} * head_dim; ++i, ++at) {
          if (k_is[at] != element_of(key, layer, token, p, i) || v_is[at] != element_of(value, layer, token, p, i)) {
            return "layer " + std::to_string(layer) + ", position " + std::to_string(p) + " of " +
                   std::to_string(row.seq_len) + ": block " + std::to_string(table[p / block_size_]) +
                   " does not hold the K and V of its token";
          }
        }
      }
    }
    sum_.num_checked_tokens += row.seq_len;
    return {};
  }

  /// The last token's outputs against float64.
  std::string check_attention(const scheduled_seq& row, std::size_t index, const std::vector<std::byte>& out,
                              std::int32_t layer) {
    const std::int64_t last = inputs_.batch.query_start_loc[index + 1] - 1;
    const auto* const got = reinterpret_cast<const float*>(out.data()) + last * num_q_heads * head_dim;
    const token_id own = token_at(row, row.seq_len - 1);
    for (std::int32_t h = 0; h < num_q_heads; ++h) {
      const std::int32_t kv_head = h / (num_q_heads / num_kv_heads);
      double sum = 0;
      std::vector<double> expected(head_dim, 0.0);
      for (std::int32_t p = 0; p < row.seq_len; ++p) {
        const token_id token = token_at(row, p);
        double score = 0;
        for (std::int64_t i = 0; i < head_dim; ++i) {
          score += double{element_of(query, layer, own, row.seq_len - 1, h * head_dim + i)} *
                   double{element_of(key, layer, token, p, kv_head * head_dim + i)};
        }
        const double weight = std::exp(0.125 * score);  // scores stay small: no maximum is needed
        sum += weight;
        for (std::int64_t i = 0; i < head_dim; ++i) {
          expected[static_cast<std::size_t>(i)] +=
              weight * double{element_of(value, layer, token, p, kv_head * head_dim + i)};
        }
      }
      for (std::int64_t i = 0; i < head_dim; ++i) {
        // Probabilities may be rounded to bfloat16 on the way; values are at most 1.
        const double error = double{got[h * head_dim + i]} - expected[static_cast<std::size_t>(i)] / sum;
        if (!(std::abs(error) <= 0x1p-7)) {
          return "attention is off by " + std::to_string(error) + " in head " + std::to_string(h) +
                 " of a sequence of " + std::to_string(row.seq_len) + " tokens";
        }
      }
    }
    ++sum_.num_checked_rows;
    return {};
  }

  backend& where_;
  const trace_replay::trace& trace_;
  std::size_t& next_;
  const settings& how_;
  test::random_source random_;
  counts& sum_;
  std::int32_t block_size_;
  std::int64_t num_blocks_;
  std::int64_t num_host_blocks_;
  kv_cache_manager manager_;
  scheduler plans_;
  kv_layout layout_;
  cache_engine cache_;
  std::unique_ptr<backend> host_backend_;
  cache_engine host_;
  attention_plan work_;
  step_inputs inputs_;
  std::map<std::uint64_t, asked_request> live_;
  std::map<std::uint64_t, std::ptrdiff_t> num_done_;
  std::vector<std::uint64_t> ended_;
};

}  // namespace

std::string run_round(backend& where, const trace_replay::trace& requests, std::size_t& next, const settings& how,
                      counts& sum) {
  return round(where, requests, next, how, hash_of(how.seed, sum.num_rounds), sum).run();
}

}  // namespace soak
