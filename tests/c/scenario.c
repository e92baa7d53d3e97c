// SPDX-License-Identifier: Apache-2.0
// One run of everything that an engine does, through the C interface: prefill, decode, fork, drafts that are refused, a
// prefix hit, swapping, and a scheduler with a small pool and an abort. It prints digests of the outputs' bits and of the
// states; scenario.cpp, scenario.rs and scenario.go do the same and print the same.
#include <bifolio/c/bifolio.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { num_layers = 2, num_q_heads = 4, num_kv_heads = 2, head_dim = 8, block_size = 4, vocab = 50, max_rows = 256 };

static void expect(bifolio_status status, const char* call) {
  if (status == BIFOLIO_OK) return;
  fprintf(stderr, "%s: %s: %s\n", call, bifolio_status_name(status), bifolio_last_error());
  exit(1);
}
#define EXPECT(call) expect(call, #call)

static uint64_t mix(uint64_t x) {
  x += UINT64_C(0x9e3779b97f4a7c15);
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

// Element i of the row of q (0), k (1) or v (2) for a token.
static float value(uint64_t what, int32_t layer, int32_t token, int32_t position, int32_t i) {
  uint64_t h = mix(what);
  h = mix(h ^ (uint64_t)layer);
  h = mix(h ^ (uint64_t)token);
  h = mix(h ^ (uint64_t)position);
  h = mix(h ^ (uint64_t)i);
  return (float)(h >> 40) * (1.0f / 8388608.0f) - 1.0f;
}

static uint64_t fnv(uint64_t hash, const void* data, size_t num_bytes) {
  const unsigned char* bytes = data;
  for (size_t i = 0; i < num_bytes; ++i) hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
  return hash;
}
static const uint64_t fnv_start = UINT64_C(0xcbf29ce484222325);

static float q_rows[max_rows * num_q_heads * head_dim], k_rows[max_rows * num_kv_heads * head_dim];
static float v_rows[max_rows * num_kv_heads * head_dim], out_rows[max_rows * num_q_heads * head_dim];

static void fill(float* rows, uint64_t what, int32_t layer, int32_t num_heads, const bifolio_step_view* step) {
  for (int64_t t = 0; t < step->num_tokens; ++t) {
    for (int32_t i = 0; i < num_heads * head_dim; ++i) {
      *rows++ = value(what, layer, step->tokens[t], step->positions[t], i);
    }
  }
}

// All layers of a step; the digest of their outputs. out_rows is then that of the last layer.
static uint64_t run_layers(bifolio_step step, bifolio_step_view* view) {
  uint64_t hash = fnv_start;
  view->size = sizeof *view;
  EXPECT(bifolio_step_get(step, view));
  const int64_t n = view->num_tokens;
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    fill(q_rows, 0, layer, num_q_heads, view);
    fill(k_rows, 1, layer, num_kv_heads, view);
    fill(v_rows, 2, layer, num_kv_heads, view);
    const bifolio_tensor q = bifolio_dense_tensor(q_rows, BIFOLIO_F32, n, num_q_heads, head_dim);
    const bifolio_tensor k = bifolio_dense_tensor(k_rows, BIFOLIO_F32, n, num_kv_heads, head_dim);
    const bifolio_tensor v = bifolio_dense_tensor(v_rows, BIFOLIO_F32, n, num_kv_heads, head_dim);
    const bifolio_tensor out = bifolio_dense_tensor(out_rows, BIFOLIO_F32, n, num_q_heads, head_dim);
    EXPECT(bifolio_step_attend(step, layer, &q, &k, &v, &out));
    hash = fnv(hash, out_rows, (size_t)n * num_q_heads * head_dim * sizeof(float));
  }
  return hash;
}

static bifolio_cache cache;
static bifolio_manager manager;

static void say(const char* what, uint64_t hash) {
  uint64_t digest = 0;
  EXPECT(bifolio_manager_digest(manager, &digest));
  EXPECT(bifolio_manager_check(manager));
  printf("%s %016" PRIx64 " %016" PRIx64 "\n", what, hash, digest);
}

static void step_of(const char* what, const bifolio_step_row* rows, size_t num_rows, const int32_t* num_accepted) {
  bifolio_step step;
  bifolio_step_view view;
  EXPECT(bifolio_step_begin(cache, rows, num_rows, NULL, &step));
  const uint64_t hash = run_layers(step, &view);
  EXPECT(bifolio_step_commit(step, num_accepted, num_rows));
  say(what, hash);
}

static bifolio_seq open_prompt(const bifolio_token* tokens, size_t num_tokens, int64_t* num_cached) {
  bifolio_prompt prompt;
  bifolio_open_result opened;
  EXPECT(bifolio_prompt_init(&prompt, sizeof prompt));
  prompt.tokens = tokens;
  prompt.num_tokens = num_tokens;
  prompt.salt = "tenant";
  prompt.salt_bytes = 6;
  EXPECT(bifolio_cache_open(cache, &prompt, &opened, NULL));
  *num_cached = opened.num_cached_tokens;
  return opened.seq;
}

static void run_rows(void) {
  bifolio_token prompt[10];
  int64_t cached = 0;
  for (int32_t i = 0; i < 10; ++i) prompt[i] = i * 7 % vocab;
  const bifolio_seq a = open_prompt(prompt, 10, &cached);
  step_of("prefill", &(bifolio_step_row){a, prompt, 10}, 1, NULL);
  for (bifolio_token token = 1; token <= 3; ++token) step_of("decode", &(bifolio_step_row){a, &token, 1}, 1, NULL);
  bifolio_seq b;
  EXPECT(bifolio_cache_fork(cache, a, &b));
  const bifolio_token next[] = {4, 5, 6, 7, 8};
  const bifolio_step_row both[] = {{a, &next[0], 1}, {b, &next[1], 1}};
  step_of("fork", both, 2, NULL);
  step_of("drafts", &(bifolio_step_row){a, &next[2], 3}, 1, (const int32_t[]){1});
  EXPECT(bifolio_cache_free(cache, a));
  EXPECT(bifolio_cache_free(cache, b));
  const bifolio_seq again = open_prompt(prompt, 10, &cached);
  printf("cached %" PRId64 "\n", cached);
  step_of("hit", &(bifolio_step_row){again, prompt + cached, 10 - (size_t)cached}, 1, NULL);
  EXPECT(bifolio_cache_swap_out(cache, &again, 1, NULL));
  say("out", 0);
  EXPECT(bifolio_cache_swap_in(cache, &again, 1, NULL));
  step_of("in", &(bifolio_step_row){again, &next[3], 1}, 1, NULL);
  EXPECT(bifolio_cache_free(cache, again));
  bifolio_prefix_stats stats;
  stats.size = sizeof stats;
  EXPECT(bifolio_manager_prefix_stats(manager, &stats));
  printf("prefix %" PRId64 " of %" PRId64 "\n", stats.num_hit_blocks, stats.num_looked_up_blocks);
}

static void print_finished(void* user, const bifolio_finished* what) {
  ++*(int*)user;
  printf("finished %" PRIu64 " %d %d %zu %016" PRIx64 "\n", what->request, (int)what->sample, (int)what->stopped,
         what->num_tokens, fnv(fnv_start, what->tokens, what->num_tokens * sizeof *what->tokens));
}

static void run_scheduler(void) {
  bifolio_scheduler scheduler;
  bifolio_scheduler_config config;
  EXPECT(bifolio_scheduler_config_init(&config, sizeof config));
  config.max_tokens_per_step = 16;
  config.max_running = 8;
  config.vocab_size = vocab;
  config.preemption = 1;
  EXPECT(bifolio_scheduler_create(manager, &config, &scheduler));
  for (int32_t r = 0; r < 6; ++r) {
    bifolio_token tokens[64];
    bifolio_prompt prompt;
    bifolio_request request;
    bifolio_request_id id;
    for (int32_t i = 0; i < 3 + 7 * r; ++i) tokens[i] = (r * 13 + i * 7) % vocab;
    EXPECT(bifolio_prompt_init(&prompt, sizeof prompt));
    prompt.tokens = tokens;
    prompt.num_tokens = (size_t)(3 + 7 * r);
    EXPECT(bifolio_request_init(&request, sizeof request));
    request.prompt = &prompt;
    request.max_new_tokens = 24;
    request.num_samples = r == 1 ? 2 : 1;
    request.priority = r % 2;
    EXPECT(bifolio_scheduler_submit(scheduler, &request, &id));
  }
  uint64_t hash = fnv_start;
  int num_steps = 0, num_finished = 0;
  for (;; ++num_steps) {
    bifolio_step step;
    bifolio_step_view view;
    bifolio_sampled_token sampled[max_rows];
    if (num_steps == 20) EXPECT(bifolio_scheduler_post_abort(scheduler, 4));
    const bifolio_status begun = bifolio_step_begin_scheduled(cache, scheduler, NULL, &step);
    if (begun == BIFOLIO_IDLE) break;
    expect(begun, "bifolio_step_begin_scheduled");
    const uint64_t of_step = run_layers(step, &view);
    hash = fnv(hash, &of_step, sizeof of_step);
    size_t num_sampled = 0, at = 0;
    for (size_t i = 0; i < view.num_rows; ++i) {
      // The samples of a prompt that is complete differ; they come from one row.
      for (int32_t k = 0; k < view.rows[i].num_samples; ++k) {
        const float* row = out_rows + (size_t)view.sample_rows[at] * num_q_heads * head_dim;
        const uint64_t h = fnv(fnv_start + (uint64_t)k, row, num_q_heads * head_dim * sizeof(float));
        sampled[num_sampled++] = (bifolio_sampled_token){(bifolio_token)(h % vocab), h % 97 == 0, -1};
      }
      if (view.rows[i].num_samples > 0) ++at;
    }
    EXPECT(bifolio_step_commit_sampled(step, sampled, num_sampled, print_finished, &num_finished));
  }
  uint64_t digest = 0;
  bifolio_scheduler_stats stats;
  stats.size = sizeof stats;
  EXPECT(bifolio_scheduler_digest(scheduler, &digest));
  EXPECT(bifolio_scheduler_check(scheduler));
  EXPECT(bifolio_scheduler_stats_get(scheduler, &stats));
  printf("steps %d, finished %d, preemptions %" PRId64 ", swapped in %" PRId64 ", aborted %" PRId64 "\n", num_steps,
         num_finished, stats.num_preemptions, stats.num_swap_ins, stats.num_aborted);
  printf("scheduler %016" PRIx64 " %016" PRIx64 "\n", hash, digest);
  EXPECT(bifolio_scheduler_destroy(scheduler));
  say("end", 0);
}

int main(void) {
  bifolio_backend backend;
  bifolio_backend_options options;
  bifolio_attention_spec spec;
  bifolio_manager_config logic;
  bifolio_cache_config config;
  EXPECT(bifolio_backend_options_init(&options, sizeof options));
  options.executor = "serial";
  EXPECT(bifolio_backend_create("cpu", &options, &backend));
  EXPECT(bifolio_attention_spec_init(&spec, sizeof spec));
  spec.num_q_heads = num_q_heads;
  spec.num_kv_heads = num_kv_heads;
  spec.qk_head_dim = head_dim;
  EXPECT(bifolio_manager_config_init(&logic, sizeof logic));
  logic.block_size = block_size;
  logic.num_blocks = 18;
  logic.num_host_blocks = 40;
  logic.max_sequences = 64;
  logic.first_generation = 1;
  logic.prefix_caching = 1;
  logic.has_seed = 1;
  logic.seed_low = 1;
  logic.seed_high = 2;
  EXPECT(bifolio_cache_config_init(&config, sizeof config));
  config.num_layers = num_layers;
  config.attention = &spec;
  config.manager = &logic;
  EXPECT(bifolio_cache_create(backend, &config, &cache));
  EXPECT(bifolio_cache_manager(cache, &manager));
  EXPECT(bifolio_backend_destroy(backend));  // the cache keeps what it needs
  run_rows();
  run_scheduler();
  EXPECT(bifolio_cache_destroy(cache));
  EXPECT(bifolio_manager_destroy(manager));
  return 0;
}
