// SPDX-License-Identifier: Apache-2.0
//! The C interface as declared in bifolio/c/bifolio.h, as far as the safe part of this crate uses it.

#![allow(missing_docs)]

use std::os::raw::{c_char, c_void};

macro_rules! handles {
    ($($name:ident),*) => {$(
        #[repr(C)]
        pub struct $name { _opaque: [u8; 0] }
    )*};
}
handles!(BackendTag, ManagerTag, SchedulerTag, CacheTag, StepTag);
pub type Backend = *mut BackendTag;
pub type Manager = *mut ManagerTag;
pub type Scheduler = *mut SchedulerTag;
pub type Cache = *mut CacheTag;
pub type Step = *mut StepTag;
pub type Status = i32;
pub type Stream = *mut c_void;

pub const OK: Status = 0;
pub const LATER: Status = 1;
pub const NEVER: Status = 2;
pub const IDLE: Status = 3;

/// A struct that begins with `size`: all zeros until its _init function fills it.
macro_rules! structs {
    ($($(#[$meta:meta])* pub struct $name:ident { $(pub $field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub struct $name { $(pub $field: $type),* }
        impl $name {
            /// All bits 0: numbers 0, pointers null.
            pub fn zeroed() -> Self {
                // SAFETY: every field is a number or a raw pointer, for which zero bits are a value.
                unsafe { std::mem::zeroed() }
            }
        }
    )*};
}
structs! {
    pub struct Tensor {
        pub data: *mut c_void, pub dtype: i32, pub num_heads: i32, pub num_tokens: i64, pub head_dim: i32,
        pub reserved: i32, pub token_stride: i64, pub head_stride: i64,
    }
    pub struct BackendOptions {
        pub size: usize, pub num_threads: i32, pub concurrency: i32, pub executor: *const c_char,
        pub isa: *const c_char,
        pub run: Option<unsafe extern "C" fn(*mut c_void, i32, unsafe extern "C" fn(*mut c_void, i32), *mut c_void)>,
        pub user: *mut c_void,
    }
    pub struct AttentionSpec {
        pub size: usize, pub num_q_heads: i32, pub num_kv_heads: i32, pub qk_head_dim: i32, pub v_head_dim: i32,
        pub block_size: i32, pub q_type: i32, pub out_type: i32, pub v_in_k: i32, pub causal: i32,
        pub window_left: i32, pub window_right: i32, pub deterministic: i32, pub k_code: *const c_char,
        pub v_code: *const c_char, pub implementation: *const c_char,
    }
    pub struct AttentionParams {
        pub size: usize, pub q: Tensor, pub out: Tensor, pub lse: *mut f32, pub scale: f32, pub has_scale: i32,
        pub soft_cap: f32, pub bias_type: i32, pub alibi_slopes: *const f32, pub sinks: *const f32,
        pub bias: *const c_void, pub bias_num_tokens: i64, pub bias_token_stride: i64, pub bias_head_stride: i64,
        pub bias_num_heads: i32, pub bias_num_keys: i32,
    }
    pub struct ManagerConfig {
        pub size: usize, pub block_size: i32, pub sliding_window: i32, pub num_blocks: i64, pub num_host_blocks: i64,
        pub watermark: f64, pub max_sequences: i32, pub max_seq_len: i32, pub first_generation: u32,
        pub prefix_caching: i32, pub record_events: i32, pub deduplicate: i32, pub has_seed: i32, pub reserved: i32,
        pub seed_low: u64, pub seed_high: u64,
        pub on_event: Option<unsafe extern "C" fn(*mut c_void, *const CacheEvent, *const i32, usize, i32)>,
        pub on_event_user: *mut c_void,
    }
    pub struct Prompt {
        pub size: usize, pub tokens: *const i32, pub num_tokens: usize, pub salt: *const c_void,
        pub salt_bytes: usize, pub adapter_id: u64, pub extras: *const c_void, pub num_extras: usize,
        pub retention: i32, pub reserved: i32, pub expires_at: i64,
    }
    pub struct OpenResult { pub seq: u64, pub num_cached_tokens: i64, pub copy: [i32; 2] }
    pub struct CacheEvent { pub kind: i32, pub block: i32, pub key: [u64; 2], pub parent: [u64; 2] }
    pub struct CacheStats {
        pub size: usize, pub num_blocks: i64, pub num_free_blocks: i64, pub num_used_blocks: i64,
        pub peak_used_blocks: i64, pub num_sequences: i64, pub num_tokens: i64, pub num_table_entries: i64,
        pub num_allocated_blocks: i64, pub num_copied_blocks: i64, pub num_forks: i64, pub num_host_blocks: i64,
        pub num_free_host_blocks: i64, pub num_swapped_sequences: i64, pub num_swapped_out_blocks: i64,
        pub num_swapped_in_blocks: i64,
    }
    pub struct PrefixStats {
        pub size: usize, pub num_lookups: i64, pub num_looked_up_blocks: i64, pub num_hit_blocks: i64,
        pub num_published_blocks: i64, pub num_duplicate_blocks: i64, pub num_evicted_blocks: i64,
        pub num_cached_blocks: i64,
    }
    pub struct SchedulerConfig {
        pub size: usize, pub max_tokens_per_step: i32, pub max_running: i32, pub max_chunk_tokens: i32,
        pub vocab_size: i32, pub max_steps_in_flight: i32, pub preemption: i32, pub swap_block_cost: f64,
        pub priority_span: i32,
    }
    pub struct Request {
        pub size: usize, pub prompt: *const Prompt, pub max_new_tokens: i32, pub num_samples: i32,
        pub beam_width: i32, pub max_draft_tokens: i32, pub priority: i32,
    }
    #[derive(Debug, PartialEq, Eq)]
    pub struct SampledToken { pub token: i32, pub stop: i32, pub from_sample: i32 }
    pub struct Finished {
        pub request: u64, pub sample: i32, pub stopped: i32, pub tokens: *const i32, pub num_tokens: usize,
        pub num_cached_tokens: i64,
    }
    #[derive(Debug, PartialEq, Eq)]
    pub struct ScheduledRow {
        pub seq: u64, pub request: u64, pub query_len: i32, pub seq_len: i32, pub sample: i32, pub num_samples: i32,
        pub num_drafts: i32, pub num_cached_tokens: i32,
    }
    #[derive(Debug, PartialEq, Eq)]
    pub struct Placeholder { pub step: i64, pub sampled: i32, pub position: i32 }
    pub struct SchedulerStats {
        pub size: usize, pub num_waiting: i64, pub num_running: i64, pub num_swapped: i64, pub num_steps: i64,
        pub num_scheduled_tokens: i64, pub num_cached_tokens: i64, pub num_sampled_tokens: i64,
        pub num_draft_tokens: i64, pub num_accepted_drafts: i64, pub num_preemptions: i64, pub num_swap_outs: i64,
        pub num_swap_ins: i64, pub num_failed_swaps: i64, pub num_finished: i64, pub num_aborted: i64,
    }
    pub struct CacheConfig {
        pub size: usize, pub num_layers: i32, pub layout: i32, pub attention: *const AttentionSpec,
        pub manager: *const ManagerConfig, pub memory_bytes: i64, pub host_memory_bytes: i64,
        pub layer_windows: *const i32, pub k_scales: *const f32, pub v_scales: *const f32, pub num_k_scales: usize,
        pub num_v_scales: usize, pub max_steps_in_flight: i32,
    }
    pub struct StepRow { pub seq: u64, pub tokens: *const i32, pub num_tokens: usize }
    pub struct BatchView {
        pub num_seqs: i32, pub reserved: i32, pub num_tokens: i64, pub query_start_loc: *const i32,
        pub seq_lens: *const i32, pub block_tables: *const i32, pub block_table_stride: i64,
        pub slot_mapping: *const i64, pub query_positions: *const i32,
    }
    pub struct StepView {
        pub size: usize, pub step: i64, pub num_tokens: i64, pub tokens: *const i32, pub positions: *const i32,
        pub sample_rows: *const i32, pub num_sample_rows: usize, pub placeholders: *const Placeholder,
        pub num_placeholders: usize, pub rows: *const ScheduledRow, pub num_rows: usize, pub batch: BatchView,
    }
}

#[link(name = "bifolio_c")]
extern "C" {
    pub fn bifolio_version() -> u32;
    pub fn bifolio_status_name(status: Status) -> *const c_char;
    pub fn bifolio_last_error() -> *const c_char;
    pub fn bifolio_parse_dtype(name: *const c_char, out: *mut i32) -> Status;
    pub fn bifolio_backend_options_init(options: *mut BackendOptions, size: usize) -> Status;
    pub fn bifolio_backend_create(device: *const c_char, options: *const BackendOptions, out: *mut Backend) -> Status;
    pub fn bifolio_backend_destroy(backend: Backend) -> Status;
    pub fn bifolio_backend_description(backend: Backend, text: *mut *const c_char) -> Status;
    pub fn bifolio_attention_spec_init(spec: *mut AttentionSpec, size: usize) -> Status;
    pub fn bifolio_attention_params_init(params: *mut AttentionParams, size: usize) -> Status;
    pub fn bifolio_manager_config_init(config: *mut ManagerConfig, size: usize) -> Status;
    pub fn bifolio_prompt_init(prompt: *mut Prompt, size: usize) -> Status;
    pub fn bifolio_manager_destroy(manager: Manager) -> Status;
    pub fn bifolio_manager_num_tokens(manager: Manager, seq: u64, tokens: *mut i64, committed: *mut i64) -> Status;
    pub fn bifolio_manager_stats(manager: Manager, stats: *mut CacheStats) -> Status;
    pub fn bifolio_manager_prefix_stats(manager: Manager, stats: *mut PrefixStats) -> Status;
    pub fn bifolio_manager_match(manager: Manager, prompt: *const Prompt, num_tokens: *mut i64) -> Status;
    pub fn bifolio_manager_drain_events(manager: Manager, events: *mut *const CacheEvent, count: *mut usize) -> Status;
    pub fn bifolio_manager_digest(manager: Manager, out: *mut u64) -> Status;
    pub fn bifolio_manager_check(manager: Manager) -> Status;
    pub fn bifolio_metrics_text(
        manager: Manager, scheduler: Scheduler, names: *const *const c_char, values: *const *const c_char,
        num_labels: usize, text: *mut *const c_char,
    ) -> Status;
    pub fn bifolio_scheduler_config_init(config: *mut SchedulerConfig, size: usize) -> Status;
    pub fn bifolio_request_init(request: *mut Request, size: usize) -> Status;
    pub fn bifolio_scheduler_create(manager: Manager, config: *const SchedulerConfig, out: *mut Scheduler) -> Status;
    pub fn bifolio_scheduler_destroy(scheduler: Scheduler) -> Status;
    pub fn bifolio_scheduler_submit(scheduler: Scheduler, request: *const Request, out: *mut u64) -> Status;
    pub fn bifolio_scheduler_post_abort(scheduler: Scheduler, request: u64) -> Status;
    pub fn bifolio_scheduler_abort(scheduler: Scheduler, request: u64) -> Status;
    pub fn bifolio_scheduler_propose(s: Scheduler, request: u64, sample: i32, drafts: *const i32, n: usize) -> Status;
    pub fn bifolio_scheduler_has_work(scheduler: Scheduler, out: *mut i32) -> Status;
    pub fn bifolio_scheduler_output(
        s: Scheduler, request: u64, sample: i32, tokens: *mut *const i32, count: *mut usize,
    ) -> Status;
    pub fn bifolio_scheduler_stats_get(scheduler: Scheduler, stats: *mut SchedulerStats) -> Status;
    pub fn bifolio_scheduler_digest(scheduler: Scheduler, out: *mut u64) -> Status;
    pub fn bifolio_scheduler_check(scheduler: Scheduler) -> Status;
    pub fn bifolio_cache_config_init(config: *mut CacheConfig, size: usize) -> Status;
    pub fn bifolio_cache_create(backend: Backend, config: *const CacheConfig, out: *mut Cache) -> Status;
    pub fn bifolio_cache_destroy(cache: Cache) -> Status;
    pub fn bifolio_cache_manager(cache: Cache, out: *mut Manager) -> Status;
    pub fn bifolio_cache_open(cache: Cache, prompt: *const Prompt, result: *mut OpenResult, stream: Stream) -> Status;
    pub fn bifolio_cache_fork(cache: Cache, seq: u64, out: *mut u64) -> Status;
    pub fn bifolio_cache_truncate(cache: Cache, seq: u64, num_tokens: i64) -> Status;
    pub fn bifolio_cache_free(cache: Cache, seq: u64) -> Status;
    pub fn bifolio_cache_swap_out(cache: Cache, seqs: *const u64, num_seqs: usize, stream: Stream) -> Status;
    pub fn bifolio_cache_swap_in(cache: Cache, seqs: *const u64, num_seqs: usize, stream: Stream) -> Status;
    pub fn bifolio_step_begin(
        cache: Cache, rows: *const StepRow, num_rows: usize, stream: Stream, out: *mut Step,
    ) -> Status;
    pub fn bifolio_step_begin_scheduled(cache: Cache, scheduler: Scheduler, stream: Stream, out: *mut Step) -> Status;
    pub fn bifolio_step_get(step: Step, view: *mut StepView) -> Status;
    pub fn bifolio_step_attend_with(
        step: Step, layer: i32, params: *const AttentionParams, k: *const Tensor, v: *const Tensor,
    ) -> Status;
    pub fn bifolio_step_commit(step: Step, num_accepted: *const i32, num_rows: usize) -> Status;
    pub fn bifolio_step_commit_sampled(
        step: Step, sampled: *const SampledToken, num_sampled: usize,
        on_finished: Option<unsafe extern "C" fn(*mut c_void, *const Finished)>, user: *mut c_void,
    ) -> Status;
    pub fn bifolio_step_destroy(step: Step) -> Status;
}
