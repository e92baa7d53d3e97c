// SPDX-License-Identifier: Apache-2.0
#pragma once

/* The library for C99 and whatever calls C. docs/c.md has the conventions; in short:
 *
 * - Calls return a bifolio_status: 0, a positive answer (blocks are lacking, nothing to do), or a negative error, whose
 *   sentence bifolio_last_error() holds for the calling thread. No C++ exception leaves the library.
 * - Handles are numbered, never addresses: one that was destroyed, or is of another kind, is refused with
 *   BIFOLIO_NOT_FOUND. They are destroyed in any order; what another one still needs lives until that is destroyed.
 *   Null is refused with BIFOLIO_INVALID_ARGUMENT, and does nothing in a destroy call.
 * - Structs with defaults begin with `size`. Fill them with their _init function, which is given sizeof the struct as
 *   the caller knows it; later versions add fields at the end. Structs without `size` never change.
 * - Pointers that a call returns belong to the library and hold until the next call on the same handle, unless the
 *   call says otherwise. Text is UTF-8 and ends with 0.
 * - A handle is used by one thread at a time; bifolio_scheduler_submit and _post_abort may be called from any thread.
 */

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define BIFOLIO_C_API __attribute__((visibility("default")))
#else
#define BIFOLIO_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- General ---- */

typedef int32_t bifolio_status;
enum {
  BIFOLIO_OK = 0,
  BIFOLIO_LATER = 1, /* not now: freeing or preempting other sequences can make it succeed */
  BIFOLIO_NEVER = 2, /* larger than the whole pool can ever give */
  BIFOLIO_IDLE = 3,  /* a scheduler has nothing to do before a step is committed or a request comes */
  BIFOLIO_INVALID_ARGUMENT = -1,
  BIFOLIO_OUT_OF_RANGE = -2,
  BIFOLIO_NOT_FOUND = -3,
  BIFOLIO_ALREADY_EXISTS = -4,
  BIFOLIO_FAILED_PRECONDITION = -5,
  BIFOLIO_OUT_OF_MEMORY = -6,
  BIFOLIO_UNSUPPORTED = -7,
  BIFOLIO_DEVICE_LOST = -8,
  BIFOLIO_INTERNAL = -9
};

/* major * 10000 + minor * 100 + patch of the library that is running. */
BIFOLIO_C_API uint32_t bifolio_version(void);
/* "ok", "later", "invalid_argument", ...; "unknown" for other numbers. Static. */
BIFOLIO_C_API const char* bifolio_status_name(bifolio_status status);
/* The sentence of the last call of this thread that returned a negative status; "" before any. */
BIFOLIO_C_API const char* bifolio_last_error(void);

/* Handles. */
typedef struct bifolio_backend_tag* bifolio_backend;
typedef struct bifolio_event_tag* bifolio_event;
typedef struct bifolio_pool_tag* bifolio_pool;
typedef struct bifolio_manager_tag* bifolio_manager;
typedef struct bifolio_batch_tag* bifolio_batch;
typedef struct bifolio_engine_tag* bifolio_engine;
typedef struct bifolio_plan_tag* bifolio_plan;
typedef struct bifolio_scheduler_tag* bifolio_scheduler;
typedef struct bifolio_cache_tag* bifolio_cache;
typedef struct bifolio_step_tag* bifolio_step;

/* Ids, as in types.hpp. */
typedef int32_t bifolio_block; /* -1: none */
typedef uint64_t bifolio_seq;  /* 0: none */
typedef int32_t bifolio_token;
typedef uint64_t bifolio_request_id; /* 0: none */

/* cudaStream_t on CUDA; null for the default stream, and on the CPU. */
typedef void* bifolio_stream;

/* Element types and layouts by name ("f32", "bf16"; "hnd", "nhd", "x_split"); bifolio_parse_* give the numbers. */
typedef int32_t bifolio_dtype;
enum { BIFOLIO_F32 = 0, BIFOLIO_F16 = 1, BIFOLIO_BF16 = 2 };
enum { BIFOLIO_HND = 0, BIFOLIO_NHD = 1, BIFOLIO_X_SPLIT = 2 };
BIFOLIO_C_API bifolio_status bifolio_parse_dtype(const char* name, bifolio_dtype* out);
/* Bytes of an element; 0 for what is no dtype. */
BIFOLIO_C_API size_t bifolio_dtype_bytes(bifolio_dtype type);

typedef struct bifolio_block_copy {
  bifolio_block src, dst;
} bifolio_block_copy;

/* [num_tokens, num_heads, head_dim], elements of a head contiguous, strides in elements. */
typedef struct bifolio_tensor {
  void* data; /* what a call only reads is not written */
  bifolio_dtype type;
  int32_t num_heads;
  int64_t num_tokens;
  int32_t head_dim;
  int32_t reserved; /* 0 */
  int64_t token_stride;
  int64_t head_stride;
} bifolio_tensor;
/* A dense one: token_stride = num_heads * head_dim, head_stride = head_dim. */
BIFOLIO_C_API bifolio_tensor bifolio_dense_tensor(const void* data, bifolio_dtype type, int64_t num_tokens,
                                                  int32_t num_heads, int32_t head_dim);

/* ---- Log ---- */

enum { BIFOLIO_LOG_ERROR = 0, BIFOLIO_LOG_WARNING = 1, BIFOLIO_LOG_INFO = 2 };
/* Gets what the library has to say, a sentence at a time, from any thread; see bifolio/log.hpp. Null: nobody, which is
 * how it begins. The function before is not running any more when this returns. It must not call the library. */
BIFOLIO_C_API void bifolio_set_log(void (*function)(void* user, int32_t level, const char* message), void* user);

/* ---- Devices ---- */

/* Workers of a caller's own thread pool: `run` calls function(context, worker) once for each worker 0 ... num_workers -
 * 1, in any order and from any threads, and returns when all have returned. */
typedef void (*bifolio_worker)(void* context, int32_t worker);
typedef struct bifolio_backend_options {
  size_t size;
  int32_t num_threads;  /* 0: what the runtime takes */
  int32_t concurrency;  /* of `run`, >= 1 */
  const char* executor; /* "openmp", "tbb", "serial"; null: the default */
  const char* isa;      /* "avx512", ...; null: the best */
  void (*run)(void* user, int32_t num_workers, bifolio_worker function, void* context); /* null: none */
  void* user;
} bifolio_backend_options;
BIFOLIO_C_API bifolio_status bifolio_backend_options_init(bifolio_backend_options* options, size_t size);

/* "cpu", "cuda:0", ...; `options` may be null. */
BIFOLIO_C_API bifolio_status bifolio_backend_create(const char* device, const bifolio_backend_options* options,
                                                    bifolio_backend* out);
BIFOLIO_C_API bifolio_status bifolio_backend_destroy(bifolio_backend backend);
BIFOLIO_C_API bifolio_status bifolio_backend_description(bifolio_backend backend, const char** text);
BIFOLIO_C_API bifolio_status bifolio_backend_health(bifolio_backend backend);
/* How many bytes a cache can be given: what is free now less a reserve, the larger of a fraction of all memory (0 ...
 * 1; 0.1 is usual) and a number of bytes. */
BIFOLIO_C_API bifolio_status bifolio_backend_memory_budget(bifolio_backend backend, double reserved_fraction,
                                                           int64_t reserved_bytes, int64_t* out);
/* Memory of the device. It has to be freed before the last handle that keeps the backend. */
BIFOLIO_C_API bifolio_status bifolio_backend_allocate(bifolio_backend backend, size_t num_bytes, void** out);
BIFOLIO_C_API bifolio_status bifolio_backend_free(bifolio_backend backend, void* pointer, size_t num_bytes);
BIFOLIO_C_API bifolio_status bifolio_backend_upload(bifolio_backend backend, void* dst, const void* host_src,
                                                    size_t num_bytes, bifolio_stream stream);
BIFOLIO_C_API bifolio_status bifolio_backend_download(bifolio_backend backend, void* host_dst, const void* src,
                                                      size_t num_bytes, bifolio_stream stream);
BIFOLIO_C_API bifolio_status bifolio_backend_synchronize(bifolio_backend backend, bifolio_stream stream);

BIFOLIO_C_API bifolio_status bifolio_event_create(bifolio_backend backend, bifolio_event* out);
BIFOLIO_C_API bifolio_status bifolio_event_destroy(bifolio_event event);
BIFOLIO_C_API bifolio_status bifolio_event_record(bifolio_event event, bifolio_backend backend, bifolio_stream stream);
BIFOLIO_C_API bifolio_status bifolio_event_wait(bifolio_event event, bifolio_backend backend, bifolio_stream stream);
BIFOLIO_C_API bifolio_status bifolio_event_query(bifolio_event event, int32_t* done);
BIFOLIO_C_API bifolio_status bifolio_event_synchronize(bifolio_event event);

/* ---- Attention ---- */

typedef struct bifolio_attention_spec {
  size_t size;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t qk_head_dim;
  int32_t v_head_dim; /* 0: qk_head_dim */
  int32_t block_size; /* 0: that of the manager's configuration; in bifolio_plan_attention: >= 1 */
  bifolio_dtype q_type;
  bifolio_dtype out_type;
  int32_t v_in_k;             /* 0 or 1 */
  int32_t causal;             /* 0 or 1; 1 by _init */
  int32_t window_left;        /* < 0: all */
  int32_t window_right;       /* < 0: all */
  int32_t deterministic;      /* 0 or 1 */
  const char* k_code;         /* how K is stored: "bf16", "e4m3", "i8-token", ... (parse_kv_code); null: "f32" */
  const char* v_code;         /* null: as K */
  const char* implementation; /* null: the first that accepts and needs no name */
} bifolio_attention_spec;
BIFOLIO_C_API bifolio_status bifolio_attention_spec_init(bifolio_attention_spec* spec, size_t size);

/* What a layer has besides q, k, v and out. Pointers are of the device. */
typedef struct bifolio_attention_params {
  size_t size;
  bifolio_tensor q;
  bifolio_tensor out;
  float* lse;
  float scale;       /* with has_scale */
  int32_t has_scale; /* 0: 1 / sqrt(qk_head_dim) */
  float soft_cap;
  bifolio_dtype bias_type;
  const float* alibi_slopes;
  const float* sinks;
  const void* bias; /* [bias_num_tokens, bias_num_heads, bias_num_keys] */
  int64_t bias_num_tokens;
  int64_t bias_token_stride;
  int64_t bias_head_stride;
  int32_t bias_num_heads;
  int32_t bias_num_keys;
} bifolio_attention_params;
BIFOLIO_C_API bifolio_status bifolio_attention_params_init(bifolio_attention_params* params, size_t size);

/* What rotate_append does besides storing k and v; as rotate_append.hpp. Pointers are of the device. */
typedef struct bifolio_rotate_params {
  size_t size;
  bifolio_tensor q;     /* no heads: no queries */
  bifolio_tensor q_out; /* may be q */
  int32_t neighbours;   /* pairs of dims: 0 halves (neox), 1 neighbours (gptj) */
  int32_t rotary_dim;   /* 0: nothing is rotated */
  int32_t rotary_offset;
  int32_t num_axes;     /* 1 by _init */
  const float* cos_sin; /* [num_positions, rotary_dim]: cosines, then sines */
  int64_t num_positions;
  const int32_t* positions;    /* [num_axes, num_tokens] */
  const uint8_t* axis_of_pair; /* [rotary_dim / 2], or null: 0 */
  const float* q_norm;         /* [head_dim of K], or null: none */
  const float* k_norm;
  float norm_epsilon; /* 1e-6 by _init */
  int32_t reserved;   /* 0 */
} bifolio_rotate_params;
BIFOLIO_C_API bifolio_status bifolio_rotate_params_init(bifolio_rotate_params* params, size_t size);

/* A step's flat arrays on the device; as device_step_view in step.hpp. */
typedef struct bifolio_batch_view {
  int32_t num_seqs;
  int32_t reserved; /* 0 */
  int64_t num_tokens;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  int64_t block_table_stride;
  const int64_t* slot_mapping;
  const int32_t* query_positions; /* or null */
} bifolio_batch_view;

/* The same fields, of host arrays: a type of its own, as neither is right in the place of the other. */
typedef struct bifolio_host_batch_view {
  int32_t num_seqs;
  int32_t reserved; /* 0 */
  int64_t num_tokens;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  int64_t block_table_stride;
  const int64_t* slot_mapping;
  const int32_t* query_positions; /* or null */
} bifolio_host_batch_view;

BIFOLIO_C_API bifolio_status bifolio_plan_create(bifolio_plan* out);
BIFOLIO_C_API bifolio_status bifolio_plan_destroy(bifolio_plan plan);
BIFOLIO_C_API bifolio_status bifolio_plan_attention(bifolio_backend backend, bifolio_plan plan,
                                                    const bifolio_attention_spec* spec,
                                                    const bifolio_host_batch_view* host_batch, int64_t num_blocks,
                                                    bifolio_stream stream);
/* Arrays on the device; the cache is that of `layer`. */
BIFOLIO_C_API bifolio_status bifolio_attention(bifolio_engine engine, int32_t layer, bifolio_plan plan,
                                               const bifolio_attention_params* params, const bifolio_batch_view* batch,
                                               bifolio_stream stream);
/* Joins two partial results; lse_out may be null. */
BIFOLIO_C_API bifolio_status bifolio_merge_states(bifolio_backend backend, const bifolio_tensor* out_a,
                                                  const float* lse_a, const bifolio_tensor* out_b, const float* lse_b,
                                                  const bifolio_tensor* out, float* lse_out, bifolio_stream stream);

/* ---- Storage of all layers ---- */

typedef struct bifolio_engine_config {
  size_t size;
  int32_t num_layers;
  int32_t layout; /* BIFOLIO_HND, ... */
  int64_t num_blocks;
  int32_t num_kv_heads;
  int32_t qk_head_dim;
  int32_t v_head_dim; /* 0: qk_head_dim */
  int32_t block_size;
  int32_t v_in_k;
  const char* k_code; /* as in bifolio_attention_spec */
  const char* v_code;
  const float* k_scales; /* static ones: [num_layers] or [num_layers, num_kv_heads], as the code says */
  const float* v_scales;
  size_t num_k_scales;
  size_t num_v_scales;
  int32_t on_host; /* 1: in host memory from which the backend's transfers are fast, for swapping */
} bifolio_engine_config;
BIFOLIO_C_API bifolio_status bifolio_engine_config_init(bifolio_engine_config* config, size_t size);
BIFOLIO_C_API bifolio_status bifolio_engine_create(bifolio_backend backend, const bifolio_engine_config* config,
                                                   bifolio_engine* out);
BIFOLIO_C_API bifolio_status bifolio_engine_destroy(bifolio_engine engine);
/* The two planes of a layer; they hold as long as the engine. Any out pointer may be null. */
BIFOLIO_C_API bifolio_status bifolio_engine_layer(bifolio_engine engine, int32_t layer, void** k, void** v,
                                                  int64_t* num_blocks, int64_t* block_bytes);
/* The arrays of `batch` on the device, valid until the next upload. */
BIFOLIO_C_API bifolio_status bifolio_engine_upload(bifolio_engine engine, bifolio_batch batch, bifolio_batch_view* out,
                                                   bifolio_stream stream);
/* v is null where V is part of K. */
BIFOLIO_C_API bifolio_status bifolio_engine_append(bifolio_engine engine, int32_t layer, const bifolio_tensor* k,
                                                   const bifolio_tensor* v, const int64_t* slot_mapping,
                                                   bifolio_stream stream);
BIFOLIO_C_API bifolio_status bifolio_engine_rotate_append(bifolio_engine engine, int32_t layer,
                                                          const bifolio_rotate_params* params, const bifolio_tensor* k,
                                                          const bifolio_tensor* v, const int64_t* slot_mapping,
                                                          bifolio_stream stream);
BIFOLIO_C_API bifolio_status bifolio_engine_gather(bifolio_engine engine, int32_t layer, const bifolio_tensor* k,
                                                   const bifolio_tensor* v, const int64_t* slot_mapping,
                                                   bifolio_stream stream);
BIFOLIO_C_API bifolio_status bifolio_engine_copy_blocks(bifolio_engine engine, const bifolio_block_copy* copies,
                                                        size_t num_copies, bifolio_stream stream);
BIFOLIO_C_API bifolio_status bifolio_engine_swap_blocks(bifolio_engine src, bifolio_engine dst,
                                                        const bifolio_block_copy* copies, size_t num_copies,
                                                        bifolio_stream stream);
BIFOLIO_C_API bifolio_status bifolio_engine_convert_blocks(bifolio_engine src, bifolio_engine dst,
                                                           const bifolio_block_copy* copies, size_t num_copies,
                                                           bifolio_stream stream);

/* ---- Block pool ---- */

BIFOLIO_C_API bifolio_status bifolio_pool_create(int64_t num_blocks, bifolio_pool* out);
BIFOLIO_C_API bifolio_status bifolio_pool_destroy(bifolio_pool pool);
/* All of them, or BIFOLIO_LATER or BIFOLIO_NEVER. */
BIFOLIO_C_API bifolio_status bifolio_pool_allocate(bifolio_pool pool, bifolio_block* blocks, size_t num_blocks);
BIFOLIO_C_API bifolio_status bifolio_pool_retain(bifolio_pool pool, const bifolio_block* blocks, size_t num_blocks);
BIFOLIO_C_API bifolio_status bifolio_pool_release(bifolio_pool pool, const bifolio_block* blocks, size_t num_blocks);
BIFOLIO_C_API bifolio_status bifolio_pool_num_free(bifolio_pool pool, int64_t* out);
BIFOLIO_C_API bifolio_status bifolio_pool_num_refs(bifolio_pool pool, bifolio_block block, uint32_t* out);
BIFOLIO_C_API bifolio_status bifolio_pool_digest(bifolio_pool pool, uint64_t* out);

/* ---- Sequences and the prefix cache ---- */

typedef struct bifolio_cache_event {
  int32_t kind; /* 0 stored, 1 removed, 2 cleared */
  bifolio_block block;
  uint64_t key_low, key_high;
  uint64_t parent_low, parent_high;
} bifolio_cache_event;
typedef struct bifolio_manager_config {
  size_t size;
  int32_t block_size; /* 16 by _init */
  int32_t sliding_window;
  int64_t num_blocks;
  int64_t num_host_blocks;
  double watermark;      /* 0.01 by _init */
  int32_t max_sequences; /* 1024 by _init */
  int32_t max_seq_len;   /* 2^20 by _init */
  uint32_t first_generation;
  int32_t prefix_caching; /* 0 or 1, as the next three */
  int32_t record_events;
  int32_t deduplicate;
  int32_t has_seed; /* 0: a random one */
  int32_t reserved; /* 0 */
  uint64_t seed_low, seed_high;
  /* Told of each event of the prefix cache in the call that causes it, with or without record_events. The tokens are
   * those of a stored block and hold during the call; `is_first` is 1 for a stored block whose parent is no block. It
   * must not call the library. Null: nobody. */
  void (*on_event)(void* user, const bifolio_cache_event* event, const bifolio_token* tokens, size_t num_tokens,
                   int32_t is_first);
  void* on_event_user;
} bifolio_manager_config;
BIFOLIO_C_API bifolio_status bifolio_manager_config_init(bifolio_manager_config* config, size_t size);

typedef struct bifolio_extra_key {
  int64_t position;
  uint32_t kind;
  uint32_t reserved; /* 0 */
  const void* value;
  size_t num_bytes;
} bifolio_extra_key;
typedef struct bifolio_prompt {
  size_t size;
  const bifolio_token* tokens;
  size_t num_tokens;
  const void* salt;
  size_t salt_bytes;
  uint64_t adapter_id;
  const bifolio_extra_key* extras; /* by rising position */
  size_t num_extras;
  int32_t retention; /* 1 ... 7; 4, the normal one, by _init */
  int32_t reserved;  /* 0 */
  int64_t expires_at;
} bifolio_prompt;
BIFOLIO_C_API bifolio_status bifolio_prompt_init(bifolio_prompt* prompt, size_t size);

typedef struct bifolio_open_result {
  bifolio_seq seq;
  int64_t num_cached_tokens;
  bifolio_block_copy copy; /* src -1: none. To be carried out before the new slots are written */
} bifolio_open_result;
typedef struct bifolio_plan_row {
  bifolio_seq seq;
  int32_t query_len;
  int32_t seq_len;
} bifolio_plan_row;
typedef struct bifolio_cache_stats {
  size_t size;
  int64_t num_blocks, num_free_blocks, num_used_blocks, peak_used_blocks;
  int64_t num_sequences, num_tokens, num_table_entries;
  int64_t num_allocated_blocks, num_copied_blocks, num_forks;
  int64_t num_host_blocks, num_free_host_blocks, num_swapped_sequences;
  int64_t num_swapped_out_blocks, num_swapped_in_blocks;
} bifolio_cache_stats;
typedef struct bifolio_prefix_stats {
  size_t size;
  int64_t num_lookups, num_looked_up_blocks, num_hit_blocks, num_published_blocks;
  int64_t num_duplicate_blocks, num_evicted_blocks, num_cached_blocks;
} bifolio_prefix_stats;

BIFOLIO_C_API bifolio_status bifolio_manager_create(const bifolio_manager_config* config, bifolio_manager* out);
BIFOLIO_C_API bifolio_status bifolio_manager_destroy(bifolio_manager manager);
BIFOLIO_C_API bifolio_status bifolio_manager_can_allocate(bifolio_manager manager, int64_t num_tokens);
BIFOLIO_C_API bifolio_status bifolio_manager_allocate(bifolio_manager manager, int64_t num_tokens, bifolio_seq* out);
BIFOLIO_C_API bifolio_status bifolio_manager_open(bifolio_manager manager, const bifolio_prompt* prompt,
                                                  int64_t num_new_tokens, bifolio_open_result* out);
/* *copy as in bifolio_open_result. */
BIFOLIO_C_API bifolio_status bifolio_manager_append(bifolio_manager manager, bifolio_seq seq, int64_t num_tokens,
                                                    int64_t num_lookahead, bifolio_block_copy* copy);
/* `tokens` may be null where nothing is to be published. */
BIFOLIO_C_API bifolio_status bifolio_manager_commit(bifolio_manager manager, bifolio_seq seq,
                                                    const bifolio_token* tokens, size_t num_tokens);
BIFOLIO_C_API bifolio_status bifolio_manager_fork(bifolio_manager manager, bifolio_seq seq, bifolio_seq* out);
BIFOLIO_C_API bifolio_status bifolio_manager_truncate(bifolio_manager manager, bifolio_seq seq, int64_t num_tokens);
BIFOLIO_C_API bifolio_status bifolio_manager_free(bifolio_manager manager, bifolio_seq seq);
BIFOLIO_C_API bifolio_status bifolio_manager_swap_out(bifolio_manager manager, const bifolio_seq* seqs, size_t num_seqs,
                                                      const bifolio_block_copy** copies, size_t* num_copies);
BIFOLIO_C_API bifolio_status bifolio_manager_swap_in(bifolio_manager manager, const bifolio_seq* seqs, size_t num_seqs,
                                                     const bifolio_block_copy** copies, size_t* num_copies);
BIFOLIO_C_API bifolio_status bifolio_manager_num_tokens(bifolio_manager manager, bifolio_seq seq, int64_t* num_tokens,
                                                        int64_t* num_committed);
BIFOLIO_C_API bifolio_status bifolio_manager_slot_at(bifolio_manager manager, bifolio_seq seq, int64_t position,
                                                     int64_t* slot);
BIFOLIO_C_API bifolio_status bifolio_manager_stats(bifolio_manager manager, bifolio_cache_stats* stats);
/* Of the prefix cache; BIFOLIO_FAILED_PRECONDITION without one, as the next three. */
BIFOLIO_C_API bifolio_status bifolio_manager_prefix_stats(bifolio_manager manager, bifolio_prefix_stats* stats);
/* Full blocks that the prompt begins with and that are cached, in tokens. Changes nothing. */
BIFOLIO_C_API bifolio_status bifolio_manager_match(bifolio_manager manager, const bifolio_prompt* prompt,
                                                   int64_t* num_tokens);
BIFOLIO_C_API bifolio_status bifolio_manager_drain_events(bifolio_manager manager, const bifolio_cache_event** events,
                                                          size_t* num_events);
BIFOLIO_C_API bifolio_status bifolio_manager_reset_prefix_cache(bifolio_manager manager);
BIFOLIO_C_API bifolio_status bifolio_manager_advance_clock(bifolio_manager manager, int64_t now);
BIFOLIO_C_API bifolio_status bifolio_manager_digest(bifolio_manager manager, uint64_t* out);
/* BIFOLIO_INTERNAL with the broken invariant as the last error. */
BIFOLIO_C_API bifolio_status bifolio_manager_check(bifolio_manager manager);

BIFOLIO_C_API bifolio_status bifolio_batch_create(bifolio_batch* out);
BIFOLIO_C_API bifolio_status bifolio_batch_destroy(bifolio_batch batch);
BIFOLIO_C_API bifolio_status bifolio_batch_build(bifolio_batch batch, bifolio_manager manager,
                                                 const bifolio_plan_row* rows, size_t num_rows);
/* The host arrays, valid until the next build. */
BIFOLIO_C_API bifolio_status bifolio_batch_get(bifolio_batch batch, bifolio_host_batch_view* out);

/* ---- Continuous batching ---- */

typedef struct bifolio_scheduler_config {
  size_t size;
  int32_t max_tokens_per_step; /* 2048 by _init */
  int32_t max_running;         /* 256 by _init */
  int32_t max_chunk_tokens;
  int32_t vocab_size;
  int32_t max_steps_in_flight; /* 1 by _init */
  int32_t preemption;          /* 0 recompute, 1 swap, 2 automatic; 2 by _init */
  double swap_block_cost;      /* 4 by _init */
  int32_t priority_span;       /* 1000 by _init */
} bifolio_scheduler_config;
BIFOLIO_C_API bifolio_status bifolio_scheduler_config_init(bifolio_scheduler_config* config, size_t size);

typedef struct bifolio_request {
  size_t size;
  const bifolio_prompt* prompt; /* copied by submit */
  int32_t max_new_tokens;       /* 16 by _init */
  int32_t num_samples;          /* 1 by _init */
  int32_t beam_width;
  int32_t max_draft_tokens;
  int32_t priority;
} bifolio_request;
BIFOLIO_C_API bifolio_status bifolio_request_init(bifolio_request* request, size_t size);

typedef struct bifolio_sampled_token {
  bifolio_token token;
  int32_t stop;        /* 0 or 1 */
  int32_t from_sample; /* of a beam search; else -1 */
} bifolio_sampled_token;
typedef struct bifolio_finished {
  bifolio_request_id request;
  int32_t sample;
  int32_t stopped; /* 1 by a stop, 0 by length */
  const bifolio_token* tokens;
  size_t num_tokens;
  int64_t num_cached_tokens;
} bifolio_finished;
typedef struct bifolio_scheduled_row {
  bifolio_seq seq;
  bifolio_request_id request;
  int32_t query_len;
  int32_t seq_len;
  int32_t sample;
  int32_t num_samples;
  int32_t num_drafts;
  int32_t num_cached_tokens;
} bifolio_scheduled_row;
typedef struct bifolio_placeholder {
  int64_t step;
  int32_t sampled;
  int32_t position;
} bifolio_placeholder;
typedef struct bifolio_scheduler_stats {
  size_t size;
  int64_t num_waiting, num_running, num_swapped;
  int64_t num_steps, num_scheduled_tokens, num_cached_tokens, num_sampled_tokens;
  int64_t num_draft_tokens, num_accepted_drafts;
  int64_t num_preemptions, num_swap_outs, num_swap_ins, num_failed_swaps;
  int64_t num_finished, num_aborted;
} bifolio_scheduler_stats;

BIFOLIO_C_API bifolio_status bifolio_scheduler_create(bifolio_manager manager, const bifolio_scheduler_config* config,
                                                      bifolio_scheduler* out);
BIFOLIO_C_API bifolio_status bifolio_scheduler_destroy(bifolio_scheduler scheduler);
BIFOLIO_C_API bifolio_status bifolio_scheduler_submit(bifolio_scheduler scheduler, const bifolio_request* request,
                                                      bifolio_request_id* out);
BIFOLIO_C_API bifolio_status bifolio_scheduler_post_abort(bifolio_scheduler scheduler, bifolio_request_id request);
BIFOLIO_C_API bifolio_status bifolio_scheduler_abort(bifolio_scheduler scheduler, bifolio_request_id request);
BIFOLIO_C_API bifolio_status bifolio_scheduler_propose(bifolio_scheduler scheduler, bifolio_request_id request,
                                                       int32_t sample, const bifolio_token* drafts, size_t num_drafts);
/* *out is 0 or 1. */
BIFOLIO_C_API bifolio_status bifolio_scheduler_has_work(bifolio_scheduler scheduler, int32_t* out);
BIFOLIO_C_API bifolio_status bifolio_scheduler_output(bifolio_scheduler scheduler, bifolio_request_id request,
                                                      int32_t sample, const bifolio_token** tokens, size_t* num_tokens);
BIFOLIO_C_API bifolio_status bifolio_scheduler_stats_get(bifolio_scheduler scheduler, bifolio_scheduler_stats* stats);
BIFOLIO_C_API bifolio_status bifolio_scheduler_digest(bifolio_scheduler scheduler, uint64_t* out);
BIFOLIO_C_API bifolio_status bifolio_scheduler_check(bifolio_scheduler scheduler);

/* Counters of a manager, its prefix cache and, unless null, a scheduler: as Prometheus' text with the labels names[i] =
 * values[i], and as a line of JSON. The text holds until the next of these calls on the manager. */
BIFOLIO_C_API bifolio_status bifolio_metrics_text(bifolio_manager manager, bifolio_scheduler scheduler,
                                                  const char* const* names, const char* const* values,
                                                  size_t num_labels, const char** text);
BIFOLIO_C_API bifolio_status bifolio_metrics_json(bifolio_manager manager, bifolio_scheduler scheduler,
                                                  const char** text);

/* ---- The cache of a model ---- */

typedef struct bifolio_cache_config {
  size_t size;
  int32_t num_layers;
  int32_t layout;
  const bifolio_attention_spec* attention;
  const bifolio_manager_config* manager; /* null: as by _init */
  int64_t memory_bytes;                  /* sets num_blocks where that is 0 */
  int64_t host_memory_bytes;             /* sets num_host_blocks where that is 0 */
  const int32_t* layer_windows;          /* [num_layers], or null */
  const float* k_scales;                 /* as in bifolio_engine_config */
  const float* v_scales;
  size_t num_k_scales;
  size_t num_v_scales;
  int32_t max_steps_in_flight; /* 1 by _init */
} bifolio_cache_config;
BIFOLIO_C_API bifolio_status bifolio_cache_config_init(bifolio_cache_config* config, size_t size);

BIFOLIO_C_API bifolio_status bifolio_cache_create(bifolio_backend backend, const bifolio_cache_config* config,
                                                  bifolio_cache* out);
BIFOLIO_C_API bifolio_status bifolio_cache_destroy(bifolio_cache cache);
/* Handles of what the cache is made of, to be destroyed like others. */
BIFOLIO_C_API bifolio_status bifolio_cache_manager(bifolio_cache cache, bifolio_manager* out);
BIFOLIO_C_API bifolio_status bifolio_cache_engine(bifolio_cache cache, bifolio_engine* out);
/* Copies are carried out here, so that result->copy is none. */
BIFOLIO_C_API bifolio_status bifolio_cache_open(bifolio_cache cache, const bifolio_prompt* prompt,
                                                bifolio_open_result* result, bifolio_stream stream);
BIFOLIO_C_API bifolio_status bifolio_cache_fork(bifolio_cache cache, bifolio_seq seq, bifolio_seq* out);
BIFOLIO_C_API bifolio_status bifolio_cache_truncate(bifolio_cache cache, bifolio_seq seq, int64_t num_tokens);
BIFOLIO_C_API bifolio_status bifolio_cache_free(bifolio_cache cache, bifolio_seq seq);
BIFOLIO_C_API bifolio_status bifolio_cache_swap_out(bifolio_cache cache, const bifolio_seq* seqs, size_t num_seqs,
                                                    bifolio_stream stream);
BIFOLIO_C_API bifolio_status bifolio_cache_swap_in(bifolio_cache cache, const bifolio_seq* seqs, size_t num_seqs,
                                                   bifolio_stream stream);

typedef struct bifolio_step_row {
  bifolio_seq seq;
  const bifolio_token* tokens; /* null: num_tokens without their ids */
  size_t num_tokens;
} bifolio_step_row;
/* Host arrays of the step; they hold until it is committed or destroyed. */
typedef struct bifolio_step_view {
  size_t size;
  int64_t step;
  int64_t num_tokens;
  const bifolio_token* tokens;
  const int32_t* positions;
  const int32_t* sample_rows;
  size_t num_sample_rows;
  const bifolio_placeholder* placeholders;
  size_t num_placeholders;
  const bifolio_scheduled_row* rows;
  size_t num_rows;
  bifolio_batch_view batch; /* on the device */
} bifolio_step_view;

BIFOLIO_C_API bifolio_status bifolio_step_begin(bifolio_cache cache, const bifolio_step_row* rows, size_t num_rows,
                                                bifolio_stream stream, bifolio_step* out);
/* BIFOLIO_IDLE when the scheduler has nothing to do. */
BIFOLIO_C_API bifolio_status bifolio_step_begin_scheduled(bifolio_cache cache, bifolio_scheduler scheduler,
                                                          bifolio_stream stream, bifolio_step* out);
BIFOLIO_C_API bifolio_status bifolio_step_get(bifolio_step step, bifolio_step_view* view);
BIFOLIO_C_API bifolio_status bifolio_step_attend(bifolio_step step, int32_t layer, const bifolio_tensor* q,
                                                 const bifolio_tensor* k, const bifolio_tensor* v,
                                                 const bifolio_tensor* out);
/* v is null where V is part of K. */
BIFOLIO_C_API bifolio_status bifolio_step_attend_with(bifolio_step step, int32_t layer,
                                                      const bifolio_attention_params* params, const bifolio_tensor* k,
                                                      const bifolio_tensor* v);
BIFOLIO_C_API bifolio_status bifolio_step_append(bifolio_step step, int32_t layer, const bifolio_tensor* k,
                                                 const bifolio_tensor* v);
BIFOLIO_C_API bifolio_status bifolio_step_rotate_append(bifolio_step step, int32_t layer,
                                                        const bifolio_rotate_params* params, const bifolio_tensor* k,
                                                        const bifolio_tensor* v);
BIFOLIO_C_API bifolio_status bifolio_step_attention(bifolio_step step, int32_t layer,
                                                    const bifolio_attention_params* params);
/* num_accepted [num_rows], or null: all tokens. The handle is destroyed when the call succeeds. */
BIFOLIO_C_API bifolio_status bifolio_step_commit(bifolio_step step, const int32_t* num_accepted, size_t num_rows);
/* Of a scheduler's step. `on_finished` is called for each sequence that ended, with what holds during its call; it must
 * not call the library with handles of this scheduler. It may be null. The handle is destroyed when the call succeeds.
 */
BIFOLIO_C_API bifolio_status bifolio_step_commit_sampled(bifolio_step step, const bifolio_sampled_token* sampled,
                                                         size_t num_sampled,
                                                         void (*on_finished)(void* user, const bifolio_finished* what),
                                                         void* user);
/* Drops a step that is not committed: one of rows takes back its slots. */
BIFOLIO_C_API bifolio_status bifolio_step_destroy(bifolio_step step);

#ifdef __cplusplus
}
#endif
