// SPDX-License-Identifier: Apache-2.0

// Package bifolio wraps the C interface of bifolio, a paged KV cache with attention. CGO_CFLAGS and CGO_LDFLAGS say where
// the header and libbifolio_c are.
//
// A Cache, its Manager, Schedulers and Steps belong to one goroutine at a time. Close releases a handle; they may be
// closed in any order. A call that lacks blocks returns ErrLater or ErrNever; every other refusal is an *Error with the
// library's sentence.
package bifolio

/*
#cgo LDFLAGS: -lbifolio_c
#include <bifolio/c/bifolio.h>
#include <stdlib.h>
#include <string.h>

// Structs that point to memory of Go must not be passed to C, so they are put together here.

static bifolio_status go_backend_create(const char* device, int32_t num_threads, const char* executor,
                                        bifolio_backend* out) {
  bifolio_backend_options options;
  bifolio_status status = bifolio_backend_options_init(&options, sizeof options);
  if (status != BIFOLIO_OK) return status;
  options.num_threads = num_threads;
  options.executor = executor;
  return bifolio_backend_create(device, num_threads == 0 && executor == NULL ? NULL : &options, out);
}

static bifolio_status go_cache_create(bifolio_backend backend, const bifolio_attention_spec* spec,
                                      const bifolio_manager_config* manager, int32_t num_layers, int64_t memory_bytes,
                                      int64_t host_memory_bytes, bifolio_cache* out) {
  bifolio_cache_config config;
  bifolio_status status = bifolio_cache_config_init(&config, sizeof config);
  if (status != BIFOLIO_OK) return status;
  config.num_layers = num_layers;
  config.attention = spec;
  config.manager = manager;
  config.memory_bytes = memory_bytes;
  config.host_memory_bytes = host_memory_bytes;
  return bifolio_cache_create(backend, &config, out);
}

static bifolio_status go_prompt(bifolio_prompt* prompt, const int32_t* tokens, size_t num_tokens, const void* salt,
                                size_t salt_bytes) {
  bifolio_status status = bifolio_prompt_init(prompt, sizeof *prompt);
  prompt->tokens = tokens;
  prompt->num_tokens = num_tokens;
  prompt->salt = salt;
  prompt->salt_bytes = salt_bytes;
  return status;
}

static bifolio_status go_cache_open(bifolio_cache cache, const int32_t* tokens, size_t num_tokens, const void* salt,
                                    size_t salt_bytes, bifolio_open_result* result) {
  bifolio_prompt prompt;
  bifolio_status status = go_prompt(&prompt, tokens, num_tokens, salt, salt_bytes);
  return status == BIFOLIO_OK ? bifolio_cache_open(cache, &prompt, result, NULL) : status;
}

static bifolio_status go_submit(bifolio_scheduler scheduler, const int32_t* tokens, size_t num_tokens, const void* salt,
                                size_t salt_bytes, int32_t max_new_tokens, int32_t num_samples, int32_t priority,
                                bifolio_request_id* out) {
  bifolio_prompt prompt;
  bifolio_request request;
  bifolio_status status = go_prompt(&prompt, tokens, num_tokens, salt, salt_bytes);
  if (status == BIFOLIO_OK) status = bifolio_request_init(&request, sizeof request);
  if (status != BIFOLIO_OK) return status;
  request.prompt = &prompt;
  request.max_new_tokens = max_new_tokens;
  request.num_samples = num_samples;
  request.priority = priority;
  return bifolio_scheduler_submit(scheduler, &request, out);
}

// Tokens of all rows one after another.
static bifolio_status go_step_begin(bifolio_cache cache, const uint64_t* seqs, const size_t* counts,
                                    const int32_t* tokens, size_t num_rows, bifolio_step* out) {
  bifolio_step_row* rows = calloc(num_rows + 1, sizeof *rows);
  bifolio_status status;
  if (rows == NULL) return BIFOLIO_OUT_OF_MEMORY;
  for (size_t i = 0; i < num_rows; ++i) {
    rows[i].seq = seqs[i];
    rows[i].tokens = tokens;
    rows[i].num_tokens = counts[i];
    tokens += counts[i];
  }
  status = bifolio_step_begin(cache, rows, num_rows, NULL, out);
  free(rows);
  return status;
}

static bifolio_status go_step_get(bifolio_step step, bifolio_step_view* view) {
  view->size = sizeof *view;
  return bifolio_step_get(step, view);
}

static bifolio_status go_step_attend(bifolio_step step, int32_t layer, int64_t num_tokens, int32_t num_q_heads,
                                     int32_t num_kv_heads, int32_t head_dim, const float* q, const float* k,
                                     const float* v, float* out) {
  const bifolio_tensor tq = bifolio_dense_tensor(q, BIFOLIO_F32, num_tokens, num_q_heads, head_dim);
  const bifolio_tensor tk = bifolio_dense_tensor(k, BIFOLIO_F32, num_tokens, num_kv_heads, head_dim);
  const bifolio_tensor tv = bifolio_dense_tensor(v, BIFOLIO_F32, num_tokens, num_kv_heads, head_dim);
  const bifolio_tensor to = bifolio_dense_tensor(out, BIFOLIO_F32, num_tokens, num_q_heads, head_dim);
  return bifolio_step_attend(step, layer, &tq, &tk, &tv, &to);
}

// What a commit reports is kept until Go has copied it.
typedef struct go_finished {
  bifolio_finished* items;
  size_t count;
  int failed;
} go_finished;

static void go_keep_finished(void* user, const bifolio_finished* what) {
  go_finished* list = user;
  bifolio_finished* grown = realloc(list->items, (list->count + 1) * sizeof *grown);
  int32_t* tokens = malloc(what->num_tokens * sizeof *tokens + 1);
  if (grown != NULL) list->items = grown;
  if (grown == NULL || tokens == NULL) {
    free(tokens);
    list->failed = 1;
    return;
  }
  memcpy(tokens, what->tokens, what->num_tokens * sizeof *tokens);
  grown[list->count] = *what;
  grown[list->count++].tokens = tokens;
}

static bifolio_status go_commit_sampled(bifolio_step step, const bifolio_sampled_token* sampled, size_t num_sampled,
                                        go_finished* finished) {
  return bifolio_step_commit_sampled(step, sampled, num_sampled, go_keep_finished, finished);
}

static void go_free_finished(go_finished* finished) {
  for (size_t i = 0; i < finished->count; ++i) free((void*)finished->items[i].tokens);
  free(finished->items);
}
*/
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"
)

// Error is a refusal: the library's code, such as "invalid_argument", and its sentence.
type Error struct {
	Code    string
	Message string
}

func (e *Error) Error() string { return e.Code + ": " + e.Message }

// Blocks are lacking: for now, or for good.
var (
	ErrLater = errors.New("not now: too few blocks are free")
	ErrNever = errors.New("the pool has fewer blocks than that")
)

// check runs a call and turns its status into an error. The sentence belongs to the thread of the call, so the goroutine
// stays on it until the sentence is read.
func check(call func() C.bifolio_status) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	switch status := call(); status {
	case C.BIFOLIO_OK:
		return nil
	case C.BIFOLIO_LATER:
		return ErrLater
	case C.BIFOLIO_NEVER:
		return ErrNever
	default:
		return &Error{C.GoString(C.bifolio_status_name(status)), C.GoString(C.bifolio_last_error())}
	}
}

func tokensOf(tokens []int32) *C.int32_t {
	if len(tokens) == 0 {
		return nil
	}
	return (*C.int32_t)(unsafe.Pointer(&tokens[0]))
}

// Backend is a device.
type Backend struct{ raw C.bifolio_backend }

// NewBackend opens "cpu", "cuda:0", …; 0 threads and an empty executor are the library's choice.
func NewBackend(device string, numThreads int, executor string) (*Backend, error) {
	name := C.CString(device)
	defer C.free(unsafe.Pointer(name))
	var kind *C.char
	if executor != "" {
		kind = C.CString(executor)
		defer C.free(unsafe.Pointer(kind))
	}
	b := &Backend{}
	err := check(func() C.bifolio_status { return C.go_backend_create(name, C.int32_t(numThreads), kind, &b.raw) })
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Close releases the handle.
func (b *Backend) Close() { C.bifolio_backend_destroy(b.raw) }

// Config of a Cache. Numbers that are 0 are the library's defaults, but for one of NumBlocks and MemoryBytes.
type Config struct {
	NumLayers, NumQHeads, NumKVHeads, HeadDim int
	BlockSize, MaxSequences                   int
	NumBlocks, MemoryBytes                    int64
	NumHostBlocks, HostMemoryBytes            int64
	PrefixCaching                             bool
	Seed                                      *[2]uint64 // of the prefix cache; set it to replay a run
	FirstGeneration                           uint32     // of sequences; set it to replay a run
}

// Seq is a sequence of a cache.
type Seq uint64

// Cache is the cache of one model, in float32.
type Cache struct {
	raw    C.bifolio_cache
	config Config
}

func flag(b bool) C.int32_t {
	if b {
		return 1
	}
	return 0
}

// NewCache allocates everything that a run needs.
func NewCache(backend *Backend, config Config) (*Cache, error) {
	var spec C.bifolio_attention_spec
	var logic C.bifolio_manager_config
	err := check(func() C.bifolio_status { return C.bifolio_attention_spec_init(&spec, C.size_t(unsafe.Sizeof(spec))) })
	if err == nil {
		err = check(func() C.bifolio_status { return C.bifolio_manager_config_init(&logic, C.size_t(unsafe.Sizeof(logic))) })
	}
	if err != nil {
		return nil, err
	}
	spec.num_q_heads = C.int32_t(config.NumQHeads)
	spec.num_kv_heads = C.int32_t(config.NumKVHeads)
	spec.qk_head_dim = C.int32_t(config.HeadDim)
	if config.BlockSize != 0 {
		logic.block_size = C.int32_t(config.BlockSize)
	}
	if config.MaxSequences != 0 {
		logic.max_sequences = C.int32_t(config.MaxSequences)
	}
	logic.num_blocks = C.int64_t(config.NumBlocks)
	logic.num_host_blocks = C.int64_t(config.NumHostBlocks)
	logic.prefix_caching = flag(config.PrefixCaching)
	logic.first_generation = C.uint32_t(config.FirstGeneration)
	if config.Seed != nil {
		logic.has_seed, logic.seed_low, logic.seed_high = 1, C.uint64_t(config.Seed[0]), C.uint64_t(config.Seed[1])
	}
	c := &Cache{config: config}
	err = check(func() C.bifolio_status {
		return C.go_cache_create(backend.raw, &spec, &logic, C.int32_t(config.NumLayers), C.int64_t(config.MemoryBytes),
			C.int64_t(config.HostMemoryBytes), &c.raw)
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Close releases the handle.
func (c *Cache) Close() { C.bifolio_cache_destroy(c.raw) }

func saltOf(salt []byte) unsafe.Pointer {
	if len(salt) == 0 {
		return nil
	}
	return unsafe.Pointer(&salt[0])
}

// Open opens a sequence with slots for its whole prompt, and says how many tokens were cached already.
func (c *Cache) Open(tokens []int32, salt []byte) (Seq, int, error) {
	var result C.bifolio_open_result
	err := check(func() C.bifolio_status {
		return C.go_cache_open(c.raw, tokensOf(tokens), C.size_t(len(tokens)), saltOf(salt), C.size_t(len(salt)), &result)
	})
	return Seq(result.seq), int(result.num_cached_tokens), err
}

// Fork opens a second sequence with the committed tokens of the first.
func (c *Cache) Fork(seq Seq) (Seq, error) {
	var forked C.bifolio_seq
	err := check(func() C.bifolio_status { return C.bifolio_cache_fork(c.raw, C.bifolio_seq(seq), &forked) })
	return Seq(forked), err
}

// Truncate goes back to the first tokens.
func (c *Cache) Truncate(seq Seq, numTokens int) error {
	return check(func() C.bifolio_status {
		return C.bifolio_cache_truncate(c.raw, C.bifolio_seq(seq), C.int64_t(numTokens))
	})
}

// Free ends a sequence.
func (c *Cache) Free(seq Seq) error {
	return check(func() C.bifolio_status { return C.bifolio_cache_free(c.raw, C.bifolio_seq(seq)) })
}

func seqsOf(seqs []Seq) *C.bifolio_seq {
	if len(seqs) == 0 {
		return nil
	}
	return (*C.bifolio_seq)(unsafe.Pointer(&seqs[0]))
}

// SwapOut moves sequences to host blocks, all or none.
func (c *Cache) SwapOut(seqs ...Seq) error {
	return check(func() C.bifolio_status {
		return C.bifolio_cache_swap_out(c.raw, seqsOf(seqs), C.size_t(len(seqs)), nil)
	})
}

// SwapIn is the way back.
func (c *Cache) SwapIn(seqs ...Seq) error {
	return check(func() C.bifolio_status { return C.bifolio_cache_swap_in(c.raw, seqsOf(seqs), C.size_t(len(seqs)), nil) })
}

// Manager returns the manager inside.
func (c *Cache) Manager() (*Manager, error) {
	m := &Manager{}
	err := check(func() C.bifolio_status { return C.bifolio_cache_manager(c.raw, &m.raw) })
	if err != nil {
		return nil, err
	}
	return m, nil
}

// Row is one sequence's part of a step: its next tokens.
type Row struct {
	Seq    Seq
	Tokens []int32
}

// ScheduledRow says whose tokens a step computes.
type ScheduledRow struct {
	Seq                                                              Seq
	Request                                                          uint64
	QueryLen, SeqLen, Sample, NumSamples, NumDrafts, NumCachedTokens int
}

// Step was begun. Its slices are copies.
type Step struct {
	raw                           C.bifolio_step
	config                        Config
	Tokens, Positions, SampleRows []int32
	Rows                          []ScheduledRow
}

func copyOf(first *C.int32_t, count int) []int32 {
	to := make([]int32, count)
	if count > 0 {
		copy(to, unsafe.Slice((*int32)(unsafe.Pointer(first)), count))
	}
	return to
}

func newStep(raw C.bifolio_step, config Config) (*Step, error) {
	s := &Step{raw: raw, config: config}
	var view C.bifolio_step_view
	if err := check(func() C.bifolio_status { return C.go_step_get(raw, &view) }); err != nil {
		s.Close()
		return nil, err
	}
	n := int(view.num_tokens)
	s.Tokens, s.Positions = copyOf(view.tokens, n), copyOf(view.positions, n)
	s.SampleRows = copyOf(view.sample_rows, int(view.num_sample_rows))
	if view.num_rows > 0 {
		for _, row := range unsafe.Slice(view.rows, int(view.num_rows)) {
			s.Rows = append(s.Rows, ScheduledRow{Seq(row.seq), uint64(row.request), int(row.query_len), int(row.seq_len),
				int(row.sample), int(row.num_samples), int(row.num_drafts), int(row.num_cached_tokens)})
		}
	}
	return s, nil
}

// Begin begins a step that computes each row's tokens, all rows or none.
func (c *Cache) Begin(rows ...Row) (*Step, error) {
	seqs := make([]uint64, len(rows)+1)
	counts := make([]C.size_t, len(rows)+1)
	tokens := []int32{}
	for i, row := range rows {
		seqs[i], counts[i] = uint64(row.Seq), C.size_t(len(row.Tokens))
		tokens = append(tokens, row.Tokens...)
	}
	tokens = append(tokens, 0) // so that there is a first one
	var raw C.bifolio_step
	err := check(func() C.bifolio_status {
		return C.go_step_begin(c.raw, (*C.uint64_t)(&seqs[0]), &counts[0], tokensOf(tokens), C.size_t(len(rows)), &raw)
	})
	if err != nil {
		return nil, err
	}
	return newStep(raw, c.config)
}

// BeginScheduled begins the next step of a scheduler of this cache's manager; nil when it has nothing to do.
func (c *Cache) BeginScheduled(scheduler *Scheduler) (*Step, error) {
	var raw C.bifolio_step
	idle := false
	err := check(func() C.bifolio_status {
		status := C.bifolio_step_begin_scheduled(c.raw, scheduler.raw, nil, &raw)
		if status == C.BIFOLIO_IDLE {
			idle = true
			return C.BIFOLIO_OK
		}
		return status
	})
	if idle || err != nil {
		return nil, err
	}
	return newStep(raw, c.config)
}

// Attend stores k and v, then attends: dense slices [tokens, heads, head_dim], on the CPU.
func (s *Step) Attend(layer int, q, k, v, out []float32) error {
	n, c := len(s.Tokens), s.config
	if len(q) != n*c.NumQHeads*c.HeadDim || len(out) != len(q) || len(k) != n*c.NumKVHeads*c.HeadDim || len(v) != len(k) {
		return &Error{"invalid_argument", fmt.Sprintf(
			"q, k, v and out have %d, %d, %d and %d elements; the step's %d tokens need %d of q and out, %d of k and v",
			len(q), len(k), len(v), len(out), n, n*c.NumQHeads*c.HeadDim, n*c.NumKVHeads*c.HeadDim)}
	}
	if n == 0 {
		return nil
	}
	first := func(values []float32) *C.float { return (*C.float)(&values[0]) }
	return check(func() C.bifolio_status {
		return C.go_step_attend(s.raw, C.int32_t(layer), C.int64_t(n), C.int32_t(c.NumQHeads), C.int32_t(c.NumKVHeads),
			C.int32_t(c.HeadDim), first(q), first(k), first(v), first(out))
	})
}

// Commit ends a step of rows: all tokens, or of row i the first accepted[i]; the slots of the others are taken back.
func (s *Step) Commit(accepted ...int32) error {
	return check(func() C.bifolio_status {
		return C.bifolio_step_commit(s.raw, tokensOf(accepted), C.size_t(len(accepted)))
	})
}

// Sampled is what the caller sampled.
type Sampled struct {
	Token int32
	Stop  bool
}

// Finished is a sequence of a scheduler that ended.
type Finished struct {
	Request uint64
	Sample  int
	Stopped bool
	Tokens  []int32
}

// CommitSampled ends a scheduler's step.
func (s *Step) CommitSampled(sampled []Sampled) ([]Finished, error) {
	tokens := make([]C.bifolio_sampled_token, len(sampled)+1)
	for i, each := range sampled {
		tokens[i] = C.bifolio_sampled_token{token: C.bifolio_token(each.Token), stop: flag(each.Stop), from_sample: -1}
	}
	list := (*C.go_finished)(C.calloc(1, C.size_t(unsafe.Sizeof(C.go_finished{}))))
	defer C.free(unsafe.Pointer(list))
	defer C.go_free_finished(list)
	err := check(func() C.bifolio_status {
		return C.go_commit_sampled(s.raw, &tokens[0], C.size_t(len(sampled)), list)
	})
	if err == nil && list.failed != 0 {
		err = &Error{"out_of_memory", "the list of finished sequences has no room"}
	}
	finished := []Finished{}
	if list.count > 0 {
		for _, each := range unsafe.Slice(list.items, int(list.count)) {
			finished = append(finished, Finished{uint64(each.request), int(each.sample), each.stopped != 0,
				copyOf(each.tokens, int(each.num_tokens))})
		}
	}
	return finished, err
}

// Close drops a step that is not committed: one of rows takes back its slots.
func (s *Step) Close() { C.bifolio_step_destroy(s.raw) }

// Manager decides which block holds which token.
type Manager struct{ raw C.bifolio_manager }

// Close releases the handle.
func (m *Manager) Close() { C.bifolio_manager_destroy(m.raw) }

// Digest is a hash of everything that later answers depend on.
func (m *Manager) Digest() (uint64, error) {
	var digest C.uint64_t
	err := check(func() C.bifolio_status { return C.bifolio_manager_digest(m.raw, &digest) })
	return uint64(digest), err
}

// Check returns the first broken invariant.
func (m *Manager) Check() error {
	return check(func() C.bifolio_status { return C.bifolio_manager_check(m.raw) })
}

// NumTokens returns a sequence's tokens with slots, and the committed ones of them.
func (m *Manager) NumTokens(seq Seq) (int64, int64, error) {
	var tokens, committed C.int64_t
	err := check(func() C.bifolio_status {
		return C.bifolio_manager_num_tokens(m.raw, C.bifolio_seq(seq), &tokens, &committed)
	})
	return int64(tokens), int64(committed), err
}

// PrefixHits returns how many full blocks of prompts were found, and how many were looked up.
func (m *Manager) PrefixHits() (int64, int64, error) {
	var stats C.bifolio_prefix_stats
	stats.size = C.size_t(unsafe.Sizeof(stats))
	err := check(func() C.bifolio_status { return C.bifolio_manager_prefix_stats(m.raw, &stats) })
	return int64(stats.num_hit_blocks), int64(stats.num_looked_up_blocks), err
}

// SchedulerConfig: 0 is the library's default, but for VocabSize, where it is unknown.
type SchedulerConfig struct {
	MaxTokensPerStep, MaxRunning, VocabSize int
	Swap                                    bool // sequences move to host blocks rather than being recomputed
}

// Scheduler decides which sequences compute how many tokens in each step.
type Scheduler struct{ raw C.bifolio_scheduler }

// NewScheduler makes one for a manager's blocks.
func NewScheduler(manager *Manager, config SchedulerConfig) (*Scheduler, error) {
	var given C.bifolio_scheduler_config
	err := check(func() C.bifolio_status {
		return C.bifolio_scheduler_config_init(&given, C.size_t(unsafe.Sizeof(given)))
	})
	if err != nil {
		return nil, err
	}
	if config.MaxTokensPerStep != 0 {
		given.max_tokens_per_step = C.int32_t(config.MaxTokensPerStep)
	}
	if config.MaxRunning != 0 {
		given.max_running = C.int32_t(config.MaxRunning)
	}
	given.vocab_size = C.int32_t(config.VocabSize)
	if config.Swap {
		given.preemption = 1
	}
	s := &Scheduler{}
	if err = check(func() C.bifolio_status { return C.bifolio_scheduler_create(manager.raw, &given, &s.raw) }); err != nil {
		return nil, err
	}
	return s, nil
}

// Close releases the sequences that are still there.
func (s *Scheduler) Close() { C.bifolio_scheduler_destroy(s.raw) }

// Request is what a scheduler is asked for.
type Request struct {
	Tokens                             []int32
	Salt                               []byte
	MaxNewTokens, NumSamples, Priority int
}

// Submit queues a request. It may be called from any goroutine.
func (s *Scheduler) Submit(what Request) (uint64, error) {
	var id C.bifolio_request_id
	err := check(func() C.bifolio_status {
		return C.go_submit(s.raw, tokensOf(what.Tokens), C.size_t(len(what.Tokens)), saltOf(what.Salt),
			C.size_t(len(what.Salt)), C.int32_t(what.MaxNewTokens), C.int32_t(what.NumSamples), C.int32_t(what.Priority), &id)
	})
	return uint64(id), err
}

// PostAbort ends a request with the next step. It may be called from any goroutine.
func (s *Scheduler) PostAbort(id uint64) error {
	return check(func() C.bifolio_status { return C.bifolio_scheduler_post_abort(s.raw, C.bifolio_request_id(id)) })
}

// Digest is a hash of everything that later decisions depend on.
func (s *Scheduler) Digest() (uint64, error) {
	var digest C.uint64_t
	err := check(func() C.bifolio_status { return C.bifolio_scheduler_digest(s.raw, &digest) })
	return uint64(digest), err
}

// Check returns the first broken invariant.
func (s *Scheduler) Check() error {
	return check(func() C.bifolio_status { return C.bifolio_scheduler_check(s.raw) })
}

// Counters of a scheduler.
type Counters struct{ Preemptions, SwapIns, Aborted int64 }

// Stats returns the counters.
func (s *Scheduler) Stats() (Counters, error) {
	var stats C.bifolio_scheduler_stats
	stats.size = C.size_t(unsafe.Sizeof(stats))
	err := check(func() C.bifolio_status { return C.bifolio_scheduler_stats_get(s.raw, &stats) })
	return Counters{int64(stats.num_preemptions), int64(stats.num_swap_ins), int64(stats.num_aborted)}, err
}
