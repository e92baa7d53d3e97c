// SPDX-License-Identifier: Apache-2.0
// 7. Latent attention.
//
// A decoder like DeepSeek-V2: each token leaves one latent vector and one rotated key for all heads, and keys and
// values of a head are what its matrices make of the latent. The reference does that, in float64, for every token
// again. bifolio's path never does: the key's matrix is applied to the query instead and the value's to the result
// ("absorbed"), so that attention runs over the latents themselves, one KV head whose first `rank` dims are also V.
//
//   07_latent_attention            random weights, a small shape and DeepSeek's own 512 + 64
//   07_latent_attention FILE id…   a model's numbers and weights (tests/examples/frameworks_test.py writes them) and a
//                                  prompt; prints the ids that follow

#include <algorithm>
#include <bifolio/bifolio.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <random>
#include <vector>

#include "expect.hpp"

namespace {

using namespace bifolio;

constexpr double norm_epsilon = 1e-6, rope_base = 10000;

struct shape {
  std::int32_t vocab, dim, num_layers, num_heads, rank, nope, rope, value, hidden;
  [[nodiscard]] std::int32_t key() const { return nope + rope; }  ///< of a head of the reference
};

/// Row-major, an output a row.
struct matrix {
  std::int32_t num_outputs = 0, num_inputs = 0;
  std::vector<float> weights;

  template <class Real>
  [[nodiscard]] std::vector<Real> operator()(const Real* x) const {
    std::vector<Real> y(static_cast<std::size_t>(num_outputs));
    const float* row = weights.data();
    for (Real& sum : y) {
      for (std::int32_t i = 0; i < num_inputs; ++i) sum += static_cast<Real>(row[i]) * x[i];
      row += num_inputs;
    }
    return y;
  }
  [[nodiscard]] const float* row(std::int64_t output) const { return weights.data() + output * num_inputs; }
};

struct layer {
  matrix attention_norm, q, latent, latent_norm, up, out, mlp_norm, gate, mlp_up, down;  ///< norms have one row
};

struct model {
  shape s;
  matrix embedding, final_norm, head;
  std::vector<layer> layers;

  /// `fill(matrix)` is called in the order of a file.
  template <class Fill>
  model(const shape& given, const Fill& fill) : s(given), layers(static_cast<std::size_t>(given.num_layers)) {
    const auto make = [&](matrix& m, std::int32_t outputs, std::int32_t inputs) {
      m = {outputs, inputs, std::vector<float>(static_cast<std::size_t>(outputs) * static_cast<std::size_t>(inputs))};
      fill(m);
    };
    make(embedding, s.vocab, s.dim);
    for (layer& l : layers) {
      make(l.attention_norm, 1, s.dim);
      make(l.q, s.num_heads * s.key(), s.dim);
      make(l.latent, s.rank + s.rope, s.dim);
      make(l.latent_norm, 1, s.rank);
      make(l.up, s.num_heads * (s.nope + s.value), s.rank);  // of each head: what makes its key, then its value
      make(l.out, s.dim, s.num_heads * s.value);
      make(l.mlp_norm, 1, s.dim);
      make(l.gate, s.hidden, s.dim);
      make(l.mlp_up, s.hidden, s.dim);
      make(l.down, s.dim, s.hidden);
    }
    make(final_norm, 1, s.dim);
    make(head, s.vocab, s.dim);
  }
};

template <class Real>
std::vector<Real> normalised(const Real* x, const matrix& weight) {
  const auto count = static_cast<std::size_t>(weight.num_inputs);
  Real squares = 0;
  for (std::size_t i = 0; i < count; ++i) squares += x[i] * x[i];
  const Real factor = 1 / std::sqrt(squares / static_cast<Real>(count) + static_cast<Real>(norm_epsilon));
  std::vector<Real> y(count);
  for (std::size_t i = 0; i < count; ++i) y[i] = x[i] * factor * static_cast<Real>(weight.weights[i]);
  return y;
}

template <class Real>
void add(std::vector<Real>& x, const std::vector<Real>& y) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

/// What both paths share: everything but attention. `attend(layer, normalised rows)` returns the heads' values of each
/// row.
template <class Real, class Attend>
std::vector<std::vector<Real>> logits_of(const model& m, const std::vector<token_id>& tokens, const Attend& attend) {
  std::vector<std::vector<Real>> rows;
  for (const token_id token : tokens) {
    const float* row = m.embedding.row(to_index(token));
    rows.emplace_back(row, row + m.s.dim);
  }
  for (std::size_t l = 0; l < m.layers.size(); ++l) {
    const layer& weights = m.layers[l];
    std::vector<std::vector<Real>> inputs;
    for (const auto& x : rows) inputs.push_back(normalised(x.data(), weights.attention_norm));
    const std::vector<std::vector<Real>> attended = attend(l, inputs);
    for (std::size_t t = 0; t < rows.size(); ++t) {
      add(rows[t], weights.out(attended[t].data()));
      const std::vector<Real> x = normalised(rows[t].data(), weights.mlp_norm);
      std::vector<Real> gate = weights.gate(x.data());
      const std::vector<Real> up = weights.mlp_up(x.data());
      for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
      add(rows[t], weights.down(gate.data()));
    }
  }
  for (auto& x : rows) x = m.head(normalised(x.data(), m.final_norm).data());
  return rows;
}

/// Keys and values of every head from the latents of all tokens before, in float64.
class reference {
 public:
  explicit reference(const model& m) : m_(m), held_(m.layers.size()) {}

  std::vector<double> step(const std::vector<token_id>& tokens) {
    return logits_of<double>(m_, tokens,
                             [&](std::size_t l, const std::vector<std::vector<double>>& rows) {
                               std::vector<std::vector<double>> out;
                               for (const auto& row : rows) out.push_back(attend(l, row));
                               return out;
                             })
        .back();
  }

 private:
  struct token {
    std::vector<double> latent, key;  ///< the latent, and the rotated key that all heads share
  };

  std::vector<double> attend(std::size_t l, const std::vector<double>& x) {
    const shape& s = m_.s;
    const layer& weights = m_.layers[l];
    const std::size_t position = held_[l].size();
    const std::vector<double> latent = weights.latent(x.data());
    std::vector<double> key(latent.begin() + s.rank, latent.end());
    rotate(key.data(), position);
    held_[l].push_back({normalised(latent.data(), weights.latent_norm), key});
    std::vector<double> q = weights.q(x.data());
    std::vector<double> out;
    std::vector<std::vector<double>> expanded;  // of each token: keys without positions and values of all heads
    for (const token& t : held_[l]) expanded.push_back(weights.up(t.latent.data()));
    for (std::int32_t h = 0; h < s.num_heads; ++h) {
      double* const query = q.data() + h * s.key();
      rotate(query + s.nope, position);
      std::vector<double> scores;
      for (std::size_t j = 0; j < expanded.size(); ++j) {
        const double* const own = expanded[j].data() + h * (s.nope + s.value);
        double score = 0;
        for (std::int32_t i = 0; i < s.nope; ++i) score += query[i] * own[i];
        for (std::int32_t i = 0; i < s.rope; ++i) {
          score += query[s.nope + i] * held_[l][j].key[static_cast<std::size_t>(i)];
        }
        scores.push_back(score / std::sqrt(static_cast<double>(s.key())));
      }
      const double largest = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (double& score : scores) sum += score = std::exp(score - largest);
      for (std::int32_t i = 0; i < s.value; ++i) {
        double value = 0;
        for (std::size_t j = 0; j < expanded.size(); ++j) {
          value += scores[j] / sum * expanded[j][static_cast<std::size_t>(h * (s.nope + s.value) + s.nope + i)];
        }
        out.push_back(value);
      }
    }
    return out;
  }

  void rotate(double* x, std::size_t position) const {
    for (std::int32_t i = 0; i < m_.s.rope; i += 2) {
      const double angle = static_cast<double>(position) * std::pow(rope_base, -static_cast<double>(i) / m_.s.rope);
      const double a = x[i], b = x[i + 1];
      x[i] = a * std::cos(angle) - b * std::sin(angle);
      x[i + 1] = b * std::cos(angle) + a * std::sin(angle);
    }
  }

  const model& m_;
  std::vector<std::vector<token>> held_;
};

/// bifolio: latents in a paged cache, all heads on one KV head.
class absorbed {
 public:
  absorbed(const model& m, backend& where, const kv_code& code, std::int32_t num_positions)
      : m_(m), cache_(where, config_of(m.s, code, num_positions)), num_positions_(num_positions) {
    const std::int32_t pairs = m.s.rope / 2;
    for (std::int32_t p = 0; p < num_positions; ++p) {
      for (std::int32_t i = 0; i < m.s.rope; ++i) {
        const double angle = p * std::pow(rope_base, -2.0 * (i % pairs) / m.s.rope);
        table_.push_back(static_cast<float>(i < pairs ? std::cos(angle) : std::sin(angle)));
      }
    }
  }

  std::vector<float> step(const std::vector<token_id>& tokens) {
    if (seq_ == invalid_seq) seq_ = cache_.open(tokens).seq;
    model_step step = cache_.begin_step({{seq_, tokens}});
    expect(static_cast<bool>(step), "the pool has room");
    const std::vector<float> logits =
        logits_of<float>(m_, tokens, [&](std::size_t l, const std::vector<std::vector<float>>& rows) {
          return attend(step, l, rows);
        }).back();
    step.commit();
    return logits;
  }
  [[nodiscard]] std::int64_t bytes_per_token() const {
    const kv_layout& layout = cache_.engine().config().layout;
    return layout.block_bytes() / layout.block_size * m_.s.num_layers;
  }

 private:
  static model_cache_config config_of(const shape& s, const kv_code& code, std::int32_t num_positions) {
    model_cache_config config;
    config.num_layers = s.num_layers;
    config.attention.num_q_heads = s.num_heads;
    config.attention.num_kv_heads = 1;
    config.attention.qk_head_dim = s.rank + s.rope;
    config.attention.v_head_dim = s.rank;
    config.attention.v_in_k = true;  // V is the latent, which K begins with: stored once
    config.attention.k_code = config.attention.v_code = code;
    config.cache.block_size = 16;
    config.cache.num_blocks = blocks_for(num_positions, config.cache.block_size);
    return config;
  }

  std::vector<std::vector<float>> attend(model_step& step, std::size_t l, const std::vector<std::vector<float>>& rows) {
    const shape& s = m_.s;
    const layer& weights = m_.layers[l];
    const std::int32_t width = s.rank + s.rope;
    std::vector<float> q, k;
    for (const auto& x : rows) {
      const std::vector<float> latent = weights.latent(x.data());
      const std::vector<float> c = normalised(latent.data(), weights.latent_norm);
      k.insert(k.end(), c.begin(), c.end());
      k.insert(k.end(), latent.begin() + s.rank, latent.end());
      const std::vector<float> query = weights.q(x.data());
      for (std::int32_t h = 0; h < s.num_heads; ++h) {
        const float* const own = query.data() + h * s.key();
        std::vector<float> turned(static_cast<std::size_t>(s.rank));  // q · W instead of W · latent of every token
        for (std::int32_t i = 0; i < s.nope; ++i) {
          const float* const up = weights.up.row(h * (s.nope + s.value) + i);
          for (std::size_t r = 0; r < turned.size(); ++r) turned[r] += own[i] * up[r];
        }
        q.insert(q.end(), turned.begin(), turned.end());
        q.insert(q.end(), own + s.nope, own + s.key());
      }
    }
    const auto num_tokens = static_cast<std::int64_t>(rows.size());
    const tensor_view queries = dense_view<void>(q.data(), dtype::f32, num_tokens, s.num_heads, width);
    rotate_append_params stored;
    stored.append.k = dense_view<const void>(k.data(), dtype::f32, num_tokens, 1, width);
    stored.q = as_const(queries);
    stored.q_out = queries;
    stored.rotary = {.pairing = rope_pairing::gptj,
                     .rotary_dim = s.rope,
                     .rotary_offset = s.rank,  // behind the latent
                     .cos_sin = table_.data(),
                     .num_positions = num_positions_,
                     .positions = step.inputs().positions.data()};
    const auto index = static_cast<std::int32_t>(l);
    expect(step.rotate_append(index, stored) == errc::ok, "latents are stored");
    std::vector<float> out(static_cast<std::size_t>(num_tokens * s.num_heads * s.rank));
    const attention_params params{.q = as_const(queries),
                                  .out = dense_view<void>(out.data(), dtype::f32, num_tokens, s.num_heads, s.rank),
                                  .scale = 1.0f / std::sqrt(static_cast<float>(s.key()))};
    expect(step.attention(index, params) == errc::ok, "attention runs");

    std::vector<std::vector<float>> values(rows.size());
    for (std::size_t row = 0; row < values.size() * static_cast<std::size_t>(s.num_heads); ++row) {
      const auto h = static_cast<std::int32_t>(row % static_cast<std::size_t>(s.num_heads));
      const float* const latent = out.data() + row * static_cast<std::size_t>(s.rank);
      for (std::int32_t i = 0; i < s.value; ++i) {
        const float* const up = weights.up.row(h * (s.nope + s.value) + s.nope + i);
        float value = 0;
        for (std::int32_t r = 0; r < s.rank; ++r) value += up[r] * latent[r];
        values[row / static_cast<std::size_t>(s.num_heads)].push_back(value);
      }
    }
    return values;
  }

  const model& m_;
  model_cache cache_;
  std::int32_t num_positions_;
  seq_id seq_ = invalid_seq;
  std::vector<float> table_;  // [num_positions, rope]: cosines, then sines
};

template <class Real>
token_id likeliest(const std::vector<Real>& logits) {
  return token_id{static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin())};
}

/// How much likelier the first is than the second.
double margin_of(std::vector<double> logits) {
  std::nth_element(logits.begin(), logits.begin() + 1, logits.end(), std::greater<>());
  return *std::max_element(logits.begin(), logits.begin() + 1) - logits[1];
}

void compare(const char* name, const shape& s, std::uint32_t seed, std::int32_t num_new) {
  std::mt19937 random(seed);
  const model m(s, [&](matrix& weights) {
    std::normal_distribution<float> normal(0, 1.4f / std::sqrt(static_cast<float>(weights.num_inputs)));
    for (float& weight : weights.weights) weight = weights.num_outputs == 1 ? 1.0f : normal(random);
    if (weights.num_outputs == s.vocab && weights.num_inputs == s.dim) {
      for (float& weight : weights.weights) weight *= 3;
    }
  });
  std::vector<token_id> prompt;
  for (std::int32_t i = 0; i < 37; ++i) prompt.push_back(token_id{i * 29 % s.vocab});
  const std::int32_t num_positions = static_cast<std::int32_t>(prompt.size()) + num_new;
  const auto cpu = make_backend();
  absorbed ours(m, *cpu, {dtype::f32}, num_positions);
  reference theirs(m);
  std::vector<token_id> tokens = prompt;
  double least_margin = 1e30, largest_error = 0;
  for (std::int32_t i = 0; i < num_new; ++i) {
    const std::vector<double> expected = theirs.step(tokens);
    const std::vector<float> logits = ours.step(tokens);
    for (std::size_t v = 0; v < logits.size(); ++v) {
      largest_error = std::max(largest_error, std::fabs(expected[v] - static_cast<double>(logits[v])));
    }
    least_margin = std::min(least_margin, margin_of(expected));
    expect(likeliest(logits) == likeliest(expected), "the absorbed path chooses the reference's token");
    tokens = {likeliest(expected)};
  }
  expect(largest_error < 1e-3 && largest_error < least_margin / 4, "the logits are the reference's");
  const std::int64_t expanded = std::int64_t{s.num_heads} * (s.key() + s.value) * 4 * s.num_layers;
  std::printf(
      "%s: %d tokens like the reference (logits within %.1e, least margin %.2g); %lld bytes a token, not %lld\n", name,
      static_cast<int>(num_new), largest_error, least_margin, static_cast<long long>(ours.bytes_per_token()),
      static_cast<long long>(expanded));
}

void run() {
  compare("rank 32 + 8",
          {.vocab = 96,
           .dim = 48,
           .num_layers = 3,
           .num_heads = 4,
           .rank = 32,
           .nope = 16,
           .rope = 8,
           .value = 16,
           .hidden = 64},
          12, 60);
  compare("rank 512 + 64",
          {.vocab = 64,
           .dim = 64,
           .num_layers = 1,
           .num_heads = 16,
           .rank = 512,
           .nope = 32,
           .rope = 64,
           .value = 32,
           .hidden = 96},
          6, 24);
}

/// Nine int32, then the weights.
void continue_prompt(const char* file, const std::vector<token_id>& prompt, std::int32_t num_new) {
  std::ifstream from(file, std::ios::binary);
  shape s{};
  from.read(reinterpret_cast<char*>(&s), sizeof s);
  const model m(s, [&](matrix& weights) {
    from.read(reinterpret_cast<char*>(weights.weights.data()),
              static_cast<std::streamsize>(weights.weights.size() * sizeof(float)));
  });
  expect(from.good() && from.peek() == std::ifstream::traits_type::eof(), "the file holds a model and nothing else");
  const auto cpu = make_backend();
  absorbed ours(m, *cpu, {dtype::f32}, static_cast<std::int32_t>(prompt.size()) + num_new);
  std::vector<token_id> tokens = prompt;
  for (std::int32_t i = 0; i < num_new; ++i) {
    tokens = {likeliest(ours.step(tokens))};
    std::printf("%d%c", static_cast<int>(to_index(tokens[0])), i + 1 < num_new ? ' ' : '\n');
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return run_example(run);
  try {
    std::vector<token_id> prompt;
    for (int i = 2; i < argc; ++i) prompt.push_back(token_id{std::atoi(argv[i])});
    continue_prompt(argv[1], prompt, 32);
    return 0;
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 1;
  }
}
