// SPDX-License-Identifier: Apache-2.0
// What scenario.c does, through the C++ interface: the reference of the C interface and of its bindings.
#include <bifolio/model_cache.hpp>
#include <cinttypes>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

using namespace bifolio;

namespace {

constexpr std::int32_t num_layers = 2, num_q_heads = 4, num_kv_heads = 2, head_dim = 8, block_size = 4, vocab = 50;
constexpr std::uint64_t fnv_start = 0xcbf29ce484222325;

std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

std::uint64_t fnv(std::uint64_t hash, const void* data, std::size_t num_bytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < num_bytes; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;
  return hash;
}

std::vector<float> rows_of(std::uint64_t what, std::int32_t layer, std::int32_t num_heads, const step_inputs& inputs) {
  std::vector<float> rows;
  for (std::size_t t = 0; t < inputs.tokens.size(); ++t) {
    for (std::int32_t i = 0; i < num_heads * head_dim; ++i) {
      std::uint64_t h = mix(what);
      for (const std::int32_t part : {layer, to_index(inputs.tokens[t]), inputs.positions[t], i}) {
        h = mix(h ^ static_cast<std::uint64_t>(part));
      }
      rows.push_back(static_cast<float>(h >> 40) * (1.0f / 8388608.0f) - 1.0f);
    }
  }
  return rows;
}

class scenario {
 public:
  void run() {
    run_rows();
    run_scheduler();
  }

 private:
  static model_cache_config config() {
    model_cache_config config;
    config.num_layers = num_layers;
    config.attention.num_q_heads = num_q_heads;
    config.attention.num_kv_heads = num_kv_heads;
    config.attention.qk_head_dim = head_dim;
    config.cache.block_size = block_size;
    config.cache.num_blocks = 18;
    config.cache.num_host_blocks = 40;
    config.cache.max_sequences = 64;
    config.cache.first_generation = 1;
    config.cache.prefix = {.enabled = true, .seed = hash_seed{1, 2}};
    return config;
  }

  std::uint64_t run_layers(model_step& step) {
    std::uint64_t hash = fnv_start;
    const std::int64_t n = step.num_tokens();
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
      const auto q = rows_of(0, layer, num_q_heads, step.inputs()), k = rows_of(1, layer, num_kv_heads, step.inputs());
      const auto v = rows_of(2, layer, num_kv_heads, step.inputs());
      out_.assign(q.size(), 0.0f);
      const errc code = step.attend(
          layer, dense_view(q.data(), n, num_q_heads, head_dim), dense_view(k.data(), n, num_kv_heads, head_dim),
          dense_view(v.data(), n, num_kv_heads, head_dim), dense_view(out_.data(), n, num_q_heads, head_dim));
      if (code != errc::ok) throw error(code, "attend");
      hash = fnv(hash, out_.data(), out_.size() * sizeof(float));
    }
    return hash;
  }

  void say(const char* what, std::uint64_t hash) {
    std::printf("%s %016" PRIx64 " %016" PRIx64 "\n", what, hash, cache_.manager().digest());
  }

  void step_of(const char* what, std::initializer_list<step_row> rows, std::span<const std::int32_t> accepted = {}) {
    model_step step = cache_.begin_step(rows);
    if (!step) throw std::runtime_error("no blocks are left");
    const std::uint64_t hash = run_layers(step);
    step.commit(accepted);
    say(what, hash);
  }

  void run_rows() {
    std::vector<token_id> prompt;
    for (std::int32_t i = 0; i < 10; ++i) prompt.push_back(token_id{i * 7 % vocab});
    const prompt_view view{.tokens = prompt, .scope = {"tenant", 0}};
    const seq_id a = cache_.open(view).seq;
    step_of("prefill", {{a, prompt}});
    for (std::int32_t token = 1; token <= 3; ++token) {
      const token_id next{token};
      step_of("decode", {{a, {&next, 1}}});
    }
    const seq_id b = cache_.fork(a).seq;
    const token_id next[] = {token_id{4}, token_id{5}, token_id{6}, token_id{7}, token_id{8}};
    step_of("fork", {{a, {&next[0], 1}}, {b, {&next[1], 1}}});
    const std::int32_t accepted = 1;
    step_of("drafts", {{a, {&next[2], 3}}}, {&accepted, 1});
    cache_.free(a);
    cache_.free(b);
    const open_result again = cache_.open(view);
    std::printf("cached %" PRId64 "\n", again.num_cached_tokens);
    step_of("hit", {{again.seq, std::span(prompt).subspan(static_cast<std::size_t>(again.num_cached_tokens))}});
    (void)cache_.swap_out({&again.seq, 1});
    say("out", 0);
    (void)cache_.swap_in({&again.seq, 1});
    step_of("in", {{again.seq, {&next[3], 1}}});
    cache_.free(again.seq);
    const prefix_stats& stats = cache_.manager().prefix()->stats();
    std::printf("prefix %" PRId64 " of %" PRId64 "\n", stats.num_hit_blocks, stats.num_looked_up_blocks);
  }

  void run_scheduler() {
    {
      scheduler requests(
          cache_.manager(),
          {.max_tokens_per_step = 16, .max_running = 8, .vocab_size = vocab, .preemption = preemption_mode::swap});
      for (std::int32_t r = 0; r < 6; ++r) {
        request asked;
        for (std::int32_t i = 0; i < 3 + 7 * r; ++i) asked.prompt.push_back(token_id{(r * 13 + i * 7) % vocab});
        asked.max_new_tokens = 24;
        asked.num_samples = r == 1 ? 2 : 1;
        asked.priority = r % 2;
        (void)requests.submit(asked);
      }
      std::uint64_t hash = fnv_start;
      int num_steps = 0, num_finished = 0;
      for (;; ++num_steps) {
        if (num_steps == 20) requests.post_abort(request_id{4});
        model_step step = cache_.begin_step(requests);
        if (!step) break;
        const std::uint64_t of_step = run_layers(step);
        hash = fnv(hash, &of_step, sizeof of_step);
        std::vector<sampled_token> sampled;
        std::size_t at = 0;
        for (const scheduled_seq& row : step.plan().seqs) {
          for (std::int32_t k = 0; k < row.num_samples; ++k) {
            const float* values = out_.data() + step.inputs().sample_rows[at] * num_q_heads * head_dim;
            const std::uint64_t h =
                fnv(fnv_start + static_cast<std::uint64_t>(k), values, num_q_heads * head_dim * sizeof(float));
            sampled.push_back({token_id{static_cast<std::int32_t>(h % vocab)}, h % 97 == 0});
          }
          if (row.num_samples > 0) ++at;
        }
        for (const finished_sequence& each : step.commit(sampled)) {
          ++num_finished;
          std::printf("finished %" PRIu64 " %d %d %zu %016" PRIx64 "\n", to_index(each.request), each.sample,
                      each.reason == finish_reason::stop ? 1 : 0, each.tokens.size(),
                      fnv(fnv_start, each.tokens.data(), each.tokens.size() * sizeof(token_id)));
        }
      }
      const scheduler_stats stats = requests.stats();
      std::printf("steps %d, finished %d, preemptions %" PRId64 ", swapped in %" PRId64 ", aborted %" PRId64 "\n",
                  num_steps, num_finished, stats.num_preemptions, stats.num_swap_ins, stats.num_aborted);
      std::printf("scheduler %016" PRIx64 " %016" PRIx64 "\n", hash, requests.digest());
    }
    say("end", 0);
  }

  std::unique_ptr<backend> where_ = make_backend({}, {.executor_choice = executor_kind::serial});
  model_cache cache_{*where_, config()};
  std::vector<float> out_;
};

}  // namespace

int main() {
  try {
    scenario().run();
    return 0;
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 1;
  }
}
