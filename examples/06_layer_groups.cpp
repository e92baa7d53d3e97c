// SPDX-License-Identifier: Apache-2.0
// 6. Layer groups.
//
// A decoder whose four layers keep different things of a sequence: attention to all tokens, attention to the last six,
// a recurrent state, and attention to an encoder's output. Each is a group with a pool of its own; the manager and the
// scheduler treat a sequence as one thing. Requests share beginnings and images, two samples fork from each prompt, and
// pools that are too small preempt, swap and evict. What everybody says is what a computation without any cache says,
// in float64.

#include <algorithm>
#include <array>
#include <bifolio/bifolio.hpp>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "expect.hpp"

namespace {

using namespace bifolio;

constexpr std::size_t all = 0, slides = 1, recurs = 2, crosses = 3;  // layers, and their groups
constexpr std::int32_t num_q_heads = 2, head_dim = 8, dim = num_q_heads * head_dim, vocab = 40;
constexpr std::int32_t block_size = 4, window = 6, image_tokens = 10, max_new = 12;
constexpr std::size_t num_samples = 2;

template <class Real>
using row = std::vector<Real>;

struct matrix {
  std::size_t num_outputs = 0;
  std::vector<float> weights;  // [num_outputs, dim]

  template <class Real>
  row<Real> operator()(const row<Real>& x) const {
    row<Real> result(num_outputs);
    for (std::size_t i = 0; i < weights.size(); ++i) result[i / dim] += static_cast<Real>(weights[i]) * x[i % dim];
    return result;
  }
};

struct model {
  std::mt19937 random{11};
  matrix embedding = make(vocab), head = make(vocab);
  std::array<matrix, 4> q{make(dim), make(dim), make(dim), make(dim)}, out = q;
  std::array<matrix, 4> k{make(head_dim), make(head_dim), make(head_dim), make(head_dim)}, v = k;

  model() {
    for (std::size_t layer = 0; layer < 4; ++layer) out[layer] = make(dim), v[layer] = make(head_dim);
  }
  matrix make(std::size_t num_outputs) {
    matrix made{num_outputs, std::vector<float>(num_outputs * dim)};
    for (float& weight : made.weights) weight = (static_cast<float>(random() % 2001) - 1000.0f) / 2000.0f;
    return made;
  }
  template <class Real>
  row<Real> embed(token_id token, std::int32_t position) const {
    const auto first = embedding.weights.begin() + std::ptrdiff_t{to_index(token)} * dim;
    row<Real> x(first, first + dim);
    for (std::size_t i = 0; i < dim; ++i)
      x[i] += static_cast<Real>(std::sin(0.37f * static_cast<float>(position + 1) * static_cast<float>(i + 1)));
    return x;
  }
  /// What an encoder made of an image.
  template <class Real>
  static row<Real> encoded(std::int32_t image, std::int32_t token) {
    row<Real> x;
    for (std::int32_t i = 0; i < dim; ++i)
      x.push_back(static_cast<Real>(std::sin(1.7f * static_cast<float>(image) + 0.9f * static_cast<float>(token) +
                                             0.31f * static_cast<float>(i))));
    return x;
  }
  /// The state after one more token, in place.
  template <class Real>
  void advance(row<Real>& state, const row<Real>& x) const {
    const row<Real> added = q[recurs](x);
    for (std::size_t i = 0; i < dim; ++i) state[i] = static_cast<Real>(0.8f) * state[i] + added[i];
  }
  /// The token of that rank: 0 is the most likely.
  template <class Real>
  [[nodiscard]] token_id choose(const row<Real>& x, std::size_t rank) const {
    const row<Real> logits = head(x);
    std::vector<std::int32_t> ids(vocab);
    std::iota(ids.begin(), ids.end(), 0);
    std::sort(ids.begin(), ids.end(), [&](std::int32_t a, std::int32_t b) {
      return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)];
    });
    return token_id{ids[rank]};
  }
};

template <class Real>
void add(row<Real>& x, const row<Real>& added) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += added[i];
}

// --- without any cache

row<double> attend(const row<double>& q, const std::vector<row<double>>& k, const std::vector<row<double>>& v,
                   std::size_t first) {
  row<double> result(dim);
  for (std::size_t h = 0; h < num_q_heads; ++h) {
    double sum = 0;
    for (std::size_t j = first; j < k.size(); ++j) {
      const double score =
          std::inner_product(k[j].begin(), k[j].end(), q.begin() + static_cast<std::ptrdiff_t>(h * head_dim), 0.0);
      const double weight = std::exp(score / std::sqrt(double{head_dim}));
      for (std::size_t i = 0; i < head_dim; ++i) result[h * head_dim + i] += weight * v[j][i];
      sum += weight;
    }
    for (std::size_t i = 0; i < head_dim; ++i) result[h * head_dim + i] /= sum;
  }
  return result;
}

/// Everything is computed again for every token.
std::vector<token_id> say_uncached(const model& m, std::vector<token_id> text, std::int32_t image, std::size_t sample) {
  const std::size_t prompt = text.size();
  std::vector<row<double>> image_k, image_v;
  for (std::int32_t t = 0; t < image_tokens; ++t) {
    image_k.push_back(m.k[crosses](model::encoded<double>(image, t)));
    image_v.push_back(m.v[crosses](model::encoded<double>(image, t)));
  }
  while (text.size() < prompt + max_new) {
    std::array<std::vector<row<double>>, 2> k, v;
    row<double> state(dim), x;
    for (std::size_t p = 0; p < text.size(); ++p) {
      x = m.embed<double>(text[p], static_cast<std::int32_t>(p));
      for (const std::size_t layer : {all, slides}) {
        k[layer].push_back(m.k[layer](x));
        v[layer].push_back(m.v[layer](x));
        const std::size_t first = layer == slides && p + 1 > window ? p + 1 - window : 0;
        add(x, m.out[layer](attend(m.q[layer](x), k[layer], v[layer], first)));
      }
      m.advance(state, x);
      add(x, m.out[recurs](state));
      add(x, m.out[crosses](attend(m.q[crosses](x), image_k, image_v, 0)));
    }
    text.push_back(m.choose(x, text.size() == prompt ? sample : 0));
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt), text.end()};
}

// --- with groups

struct asked {
  std::vector<token_id> prompt;
  std::int32_t image = 0;
};

class engine {
 public:
  engine(const model& m, std::int64_t scarcity)
      : model_(m),
        manager_(config_of(scarcity)),
        requests_(
            manager_,
            {.max_tokens_per_step = 16, .max_running = 16, .vocab_size = vocab, .preemption = preemption_mode::swap}) {
    for (const std::size_t g : {all, slides, crosses}) {
      const group_config& group = manager_.config().groups[g];
      const kv_layout layout = make_layout(layout_kind::hnd, dtype::f32, 1, head_dim, block_size);
      caches_[g] = std::make_unique<cache_engine>(*cpu_, cache_engine_config{1, group.num_blocks, layout});
      hosts_[g] = std::make_unique<cache_engine>(*cpu_, cache_engine_config{1, group.num_host_blocks, layout});
    }
    const group_config& recurrent = manager_.config().groups[recurs];
    states_.resize(static_cast<std::size_t>(recurrent.num_blocks), row<float>(dim));
    host_states_.resize(static_cast<std::size_t>(recurrent.num_host_blocks), row<float>(dim));
  }

  /// What each sample of each request says.
  std::vector<std::vector<token_id>> serve(const std::vector<asked>& all_asked) {
    std::vector<std::vector<token_id>> said(all_asked.size() * num_samples);
    const std::uint64_t first_id = num_asked_ + 1;
    for (const asked& one : all_asked) {
      request submitted{.prompt = one.prompt, .max_new_tokens = max_new, .num_samples = num_samples};
      submitted.num_cross_tokens = image_tokens;
      submitted.cross_digest.assign(sizeof(one.image), std::byte{static_cast<unsigned char>(one.image)});
      expect(requests_.submit(std::move(submitted)).status == alloc_status::ok, "each would fit by itself");
      ++num_asked_;
    }
    const auto image_of = [&](request_id id) { return all_asked[to_index(id) - first_id].image; };
    for (;;) {
      const step_plan& plan = requests_.schedule();
      if (plan.empty()) break;
      move(
          plan, [](const auto& group) -> const auto& { return group.swap_outs; }, caches_, hosts_, states_,
          host_states_);
      move(
          plan, [](const auto& group) -> const auto& { return group.copies; }, caches_, caches_, states_, states_);
      if (!plan.seqs.empty()) compute(plan, image_of);
      move(
          plan, [](const auto& group) -> const auto& { return group.swap_ins; }, hosts_, caches_, host_states_,
          states_);
      std::vector<sampled_token> sampled;
      auto last = inputs_.sample_rows.begin();
      for (const scheduled_seq& one : plan.seqs) {
        if (one.num_samples == 0) continue;
        const row<float>& x = x_[static_cast<std::size_t>(*last++)];
        // The samples of a prompt begin with the likeliest token, the second likeliest, and so on.
        for (std::size_t k = 0; k < static_cast<std::size_t>(one.num_samples); ++k)
          sampled.push_back({model_.choose(x, k)});
      }
      for (auto& done : requests_.commit(plan, sampled)) {
        said[(to_index(done.request) - first_id) * num_samples + static_cast<std::size_t>(done.sample)] =
            std::move(done.tokens);
      }
    }
    expect(manager_.check().empty(), "every invariant holds");
    return said;
  }
  [[nodiscard]] scheduler_stats stats() const { return requests_.stats(); }
  [[nodiscard]] const kv_cache_manager& manager() const { return manager_; }

 private:
  using caches = std::array<std::unique_ptr<cache_engine>, 4>;
  using states = std::vector<row<float>>;

  /// `scarcity` divides the pools.
  static kv_cache_config config_of(std::int64_t scarcity) {
    kv_cache_config config;
    config.max_sequences = 32;
    config.prefix.enabled = true;
    const std::int64_t blocks = 120 / scarcity;
    config.groups = {{.kind = group_kind::full, .block_size = block_size, .num_blocks = blocks, .num_host_blocks = 40},
                     {.kind = group_kind::window,
                      .block_size = block_size,
                      .num_blocks = blocks,
                      .num_host_blocks = 40,
                      .window = window},
                     {.kind = group_kind::state,
                      .block_size = 1,
                      .num_blocks = blocks,
                      .num_host_blocks = 40,
                      .snapshot_interval = 8},
                     {.kind = group_kind::cross,
                      .block_size = block_size,
                      .num_blocks = 15,
                      .num_host_blocks = 15,
                      .max_tokens = image_tokens}};
    return config;
  }

  /// One kind of moves in all groups: those of the first are in the plan itself.
  template <class Which>
  void move(const step_plan& plan, Which which, caches& from, caches& to, states& from_states, states& to_states) {
    for (std::size_t g = 0; g < 4; ++g) {
      const std::vector<block_copy>& pairs = g == 0 ? which(plan) : which(plan.groups[g - 1]);
      if (g == recurs) {
        for (const block_copy& pair : pairs)
          to_states[static_cast<std::size_t>(to_index(pair.dst))] =
              from_states[static_cast<std::size_t>(to_index(pair.src))];
      } else if (&from == &to) {
        expect(from[g]->copy_blocks(pairs) == errc::ok, "blocks are copied");
      } else {
        expect(from[g]->swap_blocks_to(*to[g], pairs) == errc::ok, "blocks are moved");
      }
    }
  }

  static const_tensor_view view_of(const std::vector<float>& rows, std::int32_t num_heads) {
    return dense_view<const void>(rows.data(), dtype::f32,
                                  static_cast<std::int64_t>(rows.size()) / (num_heads * head_dim), num_heads, head_dim);
  }
  static void extend(std::vector<float>& to, const row<float>& from) { to.insert(to.end(), from.begin(), from.end()); }

  template <class ImageOf>
  void compute(const step_plan& plan, const ImageOf& image_of) {
    requests_.build(inputs_);
    x_.clear();
    for (std::size_t t = 0; t < inputs_.tokens.size(); ++t)
      x_.push_back(model_.embed<float>(inputs_.tokens[t], inputs_.positions[t]));
    attend_to(all, inputs_.batch);
    attend_to(slides, inputs_.groups[slides - 1]);
    recur(inputs_.groups[recurs - 1]);
    for (const scheduled_seq& one : plan.seqs) {
      if (std::count(plan.encoded.begin(), plan.encoded.end(), one.seq) != 0) encode(one.seq, image_of(one.request));
    }
    attend_to(crosses, inputs_.groups[crosses - 1]);
  }

  void attend_to(std::size_t layer, const step_batch& batch) {
    std::vector<float> q, k, v, out(x_.size() * dim);
    for (const row<float>& x : x_)
      extend(q, model_.q[layer](x)), extend(k, model_.k[layer](x)), extend(v, model_.v[layer](x));
    cache_engine& cache = *caches_[layer];
    const device_step_view on_device = cache.upload(batch);
    if (layer != crosses)
      expect(cache.append(0, view_of(k, 1), view_of(v, 1), on_device.slot_mapping) == errc::ok,
             "keys and values are stored");
    attention_spec spec{.num_q_heads = num_q_heads,
                        .num_kv_heads = 1,
                        .qk_head_dim = head_dim,
                        .v_head_dim = head_dim,
                        .block_size = block_size};
    spec.causal = layer != crosses;
    spec.window_left = layer == slides ? window - 1 : -1;
    cpu_->plan_attention(work_, spec, batch.view(), cache.config().num_blocks);
    const attention_params params{
        .q = view_of(q, num_q_heads),
        .out = dense_view<void>(out.data(), dtype::f32, std::ssize(x_), num_q_heads, head_dim),
        .kv = cache.layers()[0],
        .batch = on_device,
        .scale = 1.0f / std::sqrt(static_cast<float>(head_dim))};
    expect(cpu_->attention(work_, params) == errc::ok, "attention runs");
    for (std::size_t t = 0; t < x_.size(); ++t) {
      const auto first = out.begin() + static_cast<std::ptrdiff_t>(t * dim);
      add(x_[t], model_.out[layer](row<float>(first, first + dim)));
    }
  }

  /// Each sequence's row names the state that it reads and the one that it writes.
  void recur(const step_batch& batch) {
    for (std::size_t s = 0; s < batch.seq_lens.size(); ++s) {
      const std::int32_t* const named = &batch.block_tables[s * static_cast<std::size_t>(batch.block_table_stride)];
      row<float> state =
          block_id{named[0]} == invalid_block ? row<float>(dim) : states_[static_cast<std::size_t>(named[0])];
      for (auto t = static_cast<std::size_t>(batch.query_start_loc[s]);
           t < static_cast<std::size_t>(batch.query_start_loc[s + 1]); ++t) {
        model_.advance(state, x_[t]);
        add(x_[t], model_.out[recurs](state));
      }
      states_[static_cast<std::size_t>(named[1])] = state;
    }
  }

  /// The first step of a sequence whose image nobody has stored stores it for all that will ask about it.
  void encode(seq_id seq, std::int32_t image) {
    std::vector<float> k, v;
    std::vector<std::int64_t> slots;
    for (std::int32_t t = 0; t < image_tokens; ++t) {
      const row<float> e = model::encoded<float>(image, t);
      extend(k, model_.k[crosses](e)), extend(v, model_.v[crosses](e));
      slots.push_back(to_index(manager_.slot_at(seq, t, crosses)));
    }
    expect(caches_[crosses]->append(0, view_of(k, 1), view_of(v, 1), slots.data()) == errc::ok, "the image is stored");
    ++num_encoded_;
  }

  const model& model_;
  kv_cache_manager manager_;
  scheduler requests_;
  std::unique_ptr<backend> cpu_ = make_backend();
  caches caches_, hosts_;
  states states_, host_states_;
  attention_plan work_;
  step_inputs inputs_;
  std::vector<row<float>> x_;  // of each token of the step
  std::uint64_t num_asked_ = 0;

 public:
  std::int32_t num_encoded_ = 0;
};

void run() {
  const model weights;
  // Four prompts about two images, then each again with a few words more.
  std::vector<asked> first, again;
  for (std::int32_t r = 0; r < 4; ++r) {
    asked one{{}, r % 2};
    for (std::int32_t i = 0; i < 9 + 6 * r; ++i) one.prompt.push_back(token_id{(r * 13 + i * 7) % vocab});
    first.push_back(one);
    for (std::int32_t i = 0; i < 5; ++i) one.prompt.push_back(token_id{(r + i) % vocab});
    again.push_back(one);
  }
  const auto uncached = [&](const std::vector<asked>& what) {
    std::vector<std::vector<token_id>> said;
    for (const asked& one : what) {
      for (std::size_t sample = 0; sample < num_samples; ++sample)
        said.push_back(say_uncached(weights, one.prompt, one.image, sample));
    }
    return said;
  };
  const auto expected = uncached(first), expected_again = uncached(again);
  engine roomy(weights, 1), tight(weights, 4);
  for (engine* one : {&roomy, &tight}) {
    expect(one->serve(first) == expected, "all say what they say without a cache");
    expect(one->serve(again) == expected_again, "and so they do when they go on from what is cached");
  }
  expect(roomy.stats().num_cached_tokens > 0 && roomy.stats().num_preemptions == 0, "beginnings were found again");
  expect(roomy.num_encoded_ == 2, "each image was stored once, for eight sequences");
  expect(tight.stats().num_swap_ins > 0, "sequences left their pools and came back with all that they had");
  expect(roomy.manager().stats(slides).peak_used_blocks < roomy.manager().stats(all).peak_used_blocks,
         "windows let go of what they have passed");
  std::printf("large pools: %d tokens found, %d images stored\n", static_cast<int>(roomy.stats().num_cached_tokens),
              roomy.num_encoded_);
  std::printf("small pools: %d preemptions, %d of them swapped\n", static_cast<int>(tight.stats().num_preemptions),
              static_cast<int>(tight.stats().num_swap_outs));
  std::printf("all say what they say without a cache\n");
}

}  // namespace

int main() { return run_example(run); }
