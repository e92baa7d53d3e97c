// SPDX-License-Identifier: Apache-2.0
//! Paged KV cache and attention for your own inference engine: a safe wrapper of bifolio's C interface.
//!
//! A [`Cache`] is the cache of one model on one device. Its sequences grow by [`Step`]s, named row by row or decided by
//! a [`Scheduler`]. Handles keep what they need: they may be dropped in any order. None is `Send`, because those of one
//! cache belong to one thread.
//!
//! Blocks that are lacking are [`Error::Later`] and [`Error::Never`]; everything else that is refused has the library's
//! sentence.

#![warn(missing_docs)]

pub mod ffi;

use std::ffi::{CStr, CString};
use std::fmt;
use std::os::raw::{c_char, c_void};
use std::ptr;

/// Why a call did not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// Not now: freeing or preempting other sequences can make it succeed.
    Later,
    /// Larger than the whole pool can ever give.
    Never,
    /// Wrong use or a broken environment.
    Refused {
        /// The library's code, such as "invalid_argument".
        code: String,
        /// A sentence with the value received and the values allowed.
        message: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Later => write!(to, "not now: too few blocks are free"),
            Error::Never => write!(to, "the pool has fewer blocks than that"),
            Error::Refused { code, message } => write!(to, "{code}: {message}"),
        }
    }
}
impl std::error::Error for Error {}

/// What calls return.
pub type Result<T> = std::result::Result<T, Error>;

fn text(from: *const c_char) -> String {
    // SAFETY: the library returns text that ends with 0, and holds until the next call of this thread.
    unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned()
}

fn refused(code: &str, message: &str) -> Error {
    Error::Refused { code: code.into(), message: message.into() }
}

fn check(status: ffi::Status) -> Result<()> {
    match status {
        ffi::OK => Ok(()),
        ffi::LATER => Err(Error::Later),
        ffi::NEVER => Err(Error::Never),
        // SAFETY: both return text of the library.
        _ => Err(refused(&text(unsafe { ffi::bifolio_status_name(status) }), &text(unsafe { ffi::bifolio_last_error() }))),
    }
}

fn c_text(from: &str) -> Result<CString> {
    CString::new(from).map_err(|_| refused("invalid_argument", "a name has a 0 in it"))
}

/// Fills a struct by its _init function.
fn made<T: Copy>(zero: T, init: unsafe extern "C" fn(*mut T, usize) -> ffi::Status) -> Result<T> {
    let mut value = zero;
    // SAFETY: the function writes at most the size that it is given.
    check(unsafe { init(&mut value, std::mem::size_of::<T>()) })?;
    Ok(value)
}

/// Like slice::from_raw_parts, for arrays that may be null when they are empty.
///
/// # Safety
/// As for `from_raw_parts`, unless `count` is 0.
unsafe fn slice<'a, T>(first: *const T, count: usize) -> &'a [T] {
    if count == 0 {
        &[]
    } else {
        std::slice::from_raw_parts(first, count)
    }
}

/// major · 10000 + minor · 100 + patch of the library.
pub fn version() -> u32 {
    // SAFETY: no arguments.
    unsafe { ffi::bifolio_version() }
}

macro_rules! owner {
    ($name:ident, $raw:ty, $destroy:ident) => {
        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: the handle is this object's own.
                unsafe { ffi::$destroy(self.raw) };
            }
        }
        impl $name {
            /// The handle, for calls of [`ffi`].
            pub fn as_raw(&self) -> $raw {
                self.raw
            }
        }
    };
}

/// A device.
pub struct Backend {
    raw: ffi::Backend,
    is_host: bool,
}
owner!(Backend, ffi::Backend, bifolio_backend_destroy);

/// What a CPU backend is opened with; empty and 0 are the library's choice.
#[derive(Debug, Clone, Default)]
pub struct BackendOptions {
    /// Workers.
    pub num_threads: i32,
    /// "openmp", "tbb" or "serial".
    pub executor: String,
    /// "avx512", …
    pub isa: String,
}

impl Backend {
    /// Opens "cpu", "cuda:0", ….
    pub fn new(device: &str, options: &BackendOptions) -> Result<Self> {
        let (name, executor, isa) = (c_text(device)?, c_text(&options.executor)?, c_text(&options.isa)?);
        let mut given = made(ffi::BackendOptions::zeroed(), ffi::bifolio_backend_options_init)?;
        given.num_threads = options.num_threads;
        if !options.executor.is_empty() {
            given.executor = executor.as_ptr();
        }
        if !options.isa.is_empty() {
            given.isa = isa.as_ptr();
        }
        let is_set = given.num_threads != 0 || !given.executor.is_null() || !given.isa.is_null();
        let mut raw = ptr::null_mut();
        // SAFETY: the texts live until the call returns.
        check(unsafe { ffi::bifolio_backend_create(name.as_ptr(), if is_set { &given } else { ptr::null() }, &mut raw) })?;
        Ok(Backend { raw, is_host: device == "cpu" })
    }

    /// One line for people.
    pub fn description(&self) -> Result<String> {
        let mut line = ptr::null();
        // SAFETY: the handle is open.
        check(unsafe { ffi::bifolio_backend_description(self.raw, &mut line) })?;
        Ok(text(line))
    }
}

/// Element types of slices that a step takes.
pub trait Element: Copy {
    /// The library's name of the type.
    const NAME: &'static str;
}
impl Element for f32 {
    const NAME: &'static str = "f32";
}
/// Bits of an IEEE binary16 number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct F16(pub u16);
impl Element for F16 {
    const NAME: &'static str = "f16";
}
/// The upper half of an IEEE binary32 number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Bf16(pub u16);
impl Element for Bf16 {
    const NAME: &'static str = "bf16";
}

fn dtype(name: &str) -> Result<i32> {
    let (name, mut number) = (c_text(name)?, 0);
    // SAFETY: the text lives until the call returns.
    check(unsafe { ffi::bifolio_parse_dtype(name.as_ptr(), &mut number) })?;
    Ok(number)
}

/// Attention of a model's layers.
#[derive(Debug, Clone)]
pub struct AttentionSpec {
    /// Query heads, a multiple of the KV heads.
    pub num_q_heads: i32,
    /// Heads of K and V.
    pub num_kv_heads: i32,
    /// Of queries and K; of V too.
    pub head_dim: i32,
    /// Type of queries, by name.
    pub q_type: &'static str,
    /// How the cache stores K and V: "bf16", "i8-token", ….
    pub kv_code: &'static str,
    /// Type of outputs.
    pub out_type: &'static str,
    /// Positions visible before a token's own; negative: all.
    pub window_left: i32,
    /// The same bits whatever else is in the batch.
    pub deterministic: bool,
}

impl Default for AttentionSpec {
    fn default() -> Self {
        AttentionSpec {
            num_q_heads: 0,
            num_kv_heads: 0,
            head_dim: 0,
            q_type: "f32",
            kv_code: "f32",
            out_type: "f32",
            window_left: -1,
            deterministic: false,
        }
    }
}

/// The cache of a model. Numbers that are 0 are the library's defaults, but for one of `num_blocks` and `memory_bytes`.
#[derive(Debug, Clone, Default)]
pub struct CacheConfig {
    /// Layers of the model.
    pub num_layers: i32,
    /// Their attention.
    pub attention: AttentionSpec,
    /// Tokens in a block.
    pub block_size: i32,
    /// Blocks on the device.
    pub num_blocks: i64,
    /// Bytes on the device, instead of `num_blocks`.
    pub memory_bytes: i64,
    /// Blocks of the host, for swapping.
    pub num_host_blocks: i64,
    /// Bytes of the host, instead of `num_host_blocks`.
    pub host_memory_bytes: i64,
    /// Sequences open at once.
    pub max_sequences: i32,
    /// Tokens that a token attends to, itself included; 0: all.
    pub sliding_window: i32,
    /// Whether blocks of prompts are found again.
    pub prefix_caching: bool,
    /// Whether [`Manager::drain_events`] has something to say.
    pub record_events: bool,
    /// Secret of the prefix cache; set it to replay a run.
    pub seed: Option<(u64, u64)>,
    /// Generation of the first sequence; set it to replay a run.
    pub first_generation: u32,
    /// Steps of a scheduler that may be begun before the first is committed.
    pub max_steps_in_flight: i32,
}

/// A sequence of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Seq(pub u64);
/// A request of a scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Known tokens, and the scope in which their blocks are shared.
#[derive(Debug, Clone, Copy, Default)]
pub struct Prompt<'a> {
    /// At least one.
    pub tokens: &'a [i32],
    /// E.g. a tenant.
    pub salt: &'a [u8],
    /// E.g. of a LoRA.
    pub adapter_id: u64,
}

impl Prompt<'_> {
    fn to_c(self) -> Result<ffi::Prompt> {
        let mut prompt = made(ffi::Prompt::zeroed(), ffi::bifolio_prompt_init)?;
        prompt.tokens = self.tokens.as_ptr();
        prompt.num_tokens = self.tokens.len();
        prompt.salt = self.salt.as_ptr().cast();
        prompt.salt_bytes = self.salt.len();
        prompt.adapter_id = self.adapter_id;
        Ok(prompt)
    }
}

/// A sequence that was opened, and how many of its tokens were cached already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    /// The new sequence.
    pub seq: Seq,
    /// Leading tokens that need not be computed.
    pub num_cached_tokens: usize,
}

/// One sequence's part of a step: its next tokens.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// Whose tokens.
    pub seq: Seq,
    /// At least one.
    pub tokens: &'a [i32],
}

/// The cache of one model on one device.
pub struct Cache {
    raw: ffi::Cache,
    shape: AttentionSpec,
    is_host: bool,
}
owner!(Cache, ffi::Cache, bifolio_cache_destroy);

impl Cache {
    /// Allocates everything that a run needs.
    pub fn new(backend: &Backend, config: &CacheConfig) -> Result<Self> {
        let shape = &config.attention;
        let mut spec = made(ffi::AttentionSpec::zeroed(), ffi::bifolio_attention_spec_init)?;
        spec.num_q_heads = shape.num_q_heads;
        spec.num_kv_heads = shape.num_kv_heads;
        spec.qk_head_dim = shape.head_dim;
        spec.q_type = dtype(shape.q_type)?;
        spec.out_type = dtype(shape.out_type)?;
        let code = c_text(shape.kv_code)?;
        spec.k_code = code.as_ptr();
        spec.window_left = shape.window_left;
        spec.deterministic = shape.deterministic.into();
        let mut logic = made(ffi::ManagerConfig::zeroed(), ffi::bifolio_manager_config_init)?;
        if config.block_size != 0 {
            logic.block_size = config.block_size;
        }
        if config.max_sequences != 0 {
            logic.max_sequences = config.max_sequences;
        }
        logic.num_blocks = config.num_blocks;
        logic.num_host_blocks = config.num_host_blocks;
        logic.sliding_window = config.sliding_window;
        logic.prefix_caching = config.prefix_caching.into();
        logic.record_events = config.record_events.into();
        logic.first_generation = config.first_generation;
        if let Some((low, high)) = config.seed {
            (logic.has_seed, logic.seed_low, logic.seed_high) = (1, low, high);
        }
        let mut whole = made(ffi::CacheConfig::zeroed(), ffi::bifolio_cache_config_init)?;
        whole.num_layers = config.num_layers;
        whole.attention = &spec;
        whole.manager = &logic;
        whole.memory_bytes = config.memory_bytes;
        whole.host_memory_bytes = config.host_memory_bytes;
        if config.max_steps_in_flight != 0 {
            whole.max_steps_in_flight = config.max_steps_in_flight;
        }
        let mut raw = ptr::null_mut();
        // SAFETY: what the configuration points to lives until the call returns.
        check(unsafe { ffi::bifolio_cache_create(backend.raw, &whole, &mut raw) })?;
        Ok(Cache { raw, shape: shape.clone(), is_host: backend.is_host })
    }

    /// Opens a sequence with slots for its whole prompt.
    pub fn open(&self, prompt: Prompt<'_>) -> Result<Opened> {
        let mut result = ffi::OpenResult::zeroed();
        // SAFETY: the prompt's arrays live until the call returns.
        check(unsafe { ffi::bifolio_cache_open(self.raw, &prompt.to_c()?, &mut result, ptr::null_mut()) })?;
        Ok(Opened { seq: Seq(result.seq), num_cached_tokens: result.num_cached_tokens as usize })
    }

    /// A second sequence with the committed tokens of the first.
    pub fn fork(&self, seq: Seq) -> Result<Seq> {
        let mut forked = 0;
        // SAFETY: the handle is open.
        check(unsafe { ffi::bifolio_cache_fork(self.raw, seq.0, &mut forked) })?;
        Ok(Seq(forked))
    }

    /// Back to the first `num_tokens` tokens.
    pub fn truncate(&self, seq: Seq, num_tokens: i64) -> Result<()> {
        // SAFETY: the handle is open.
        check(unsafe { ffi::bifolio_cache_truncate(self.raw, seq.0, num_tokens) })
    }

    /// Ends a sequence.
    pub fn free(&self, seq: Seq) -> Result<()> {
        // SAFETY: the handle is open.
        check(unsafe { ffi::bifolio_cache_free(self.raw, seq.0) })
    }

    /// Moves sequences to host blocks, all or none.
    pub fn swap_out(&self, seqs: &[Seq]) -> Result<()> {
        let ids: Vec<u64> = seqs.iter().map(|seq| seq.0).collect();
        // SAFETY: the array lives until the call returns.
        check(unsafe { ffi::bifolio_cache_swap_out(self.raw, ids.as_ptr(), ids.len(), ptr::null_mut()) })
    }

    /// The way back.
    pub fn swap_in(&self, seqs: &[Seq]) -> Result<()> {
        let ids: Vec<u64> = seqs.iter().map(|seq| seq.0).collect();
        // SAFETY: the array lives until the call returns.
        check(unsafe { ffi::bifolio_cache_swap_in(self.raw, ids.as_ptr(), ids.len(), ptr::null_mut()) })
    }

    /// Begins a step that computes each row's tokens, all rows or none.
    pub fn begin(&self, rows: &[Row<'_>]) -> Result<Step<'_>> {
        let given: Vec<ffi::StepRow> = rows
            .iter()
            .map(|row| ffi::StepRow { seq: row.seq.0, tokens: row.tokens.as_ptr(), num_tokens: row.tokens.len() })
            .collect();
        let mut raw = ptr::null_mut();
        // SAFETY: the library copies the rows and their tokens.
        check(unsafe { ffi::bifolio_step_begin(self.raw, given.as_ptr(), given.len(), ptr::null_mut(), &mut raw) })?;
        Step::new(self, raw)
    }

    /// Begins the next step of a scheduler of this cache's manager; `None` when it has nothing to do.
    pub fn begin_scheduled(&self, scheduler: &Scheduler) -> Result<Option<Step<'_>>> {
        let mut raw = ptr::null_mut();
        // SAFETY: the handles are open.
        let status =
            unsafe { ffi::bifolio_step_begin_scheduled(self.raw, scheduler.raw, ptr::null_mut(), &mut raw) };
        if status == ffi::IDLE {
            return Ok(None);
        }
        check(status)?;
        Step::new(self, raw).map(Some)
    }

    /// The manager inside.
    pub fn manager(&self) -> Result<Manager> {
        let mut raw = ptr::null_mut();
        // SAFETY: the handle is open.
        check(unsafe { ffi::bifolio_cache_manager(self.raw, &mut raw) })?;
        Ok(Manager { raw })
    }
}

/// What a layer has besides q, k, v and out.
#[derive(Debug, Clone, Copy, Default)]
pub struct Scores {
    /// `None`: 1/√head_dim.
    pub scale: Option<f32>,
    /// 0: none.
    pub soft_cap: f32,
}

/// One step that was begun. Dropped before a commit, it gives its slots back (a scheduler's stays in flight there).
pub struct Step<'a> {
    raw: ffi::Step,
    cache: &'a Cache,
    view: ffi::StepView,
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is this object's own; null after a commit, which destroyed it.
        unsafe { ffi::bifolio_step_destroy(self.raw) };
    }
}

impl<'a> Step<'a> {
    fn new(cache: &'a Cache, raw: ffi::Step) -> Result<Self> {
        let mut step = Step { raw, cache, view: ffi::StepView::zeroed() };
        step.view.size = std::mem::size_of::<ffi::StepView>();
        // SAFETY: the view's size is its own.
        check(unsafe { ffi::bifolio_step_get(raw, &mut step.view) })?;
        Ok(step)
    }

    /// Tokens of all rows, one row after another.
    pub fn tokens(&self) -> &[i32] {
        // SAFETY: the library's arrays hold as long as the step.
        unsafe { slice(self.view.tokens, self.view.num_tokens as usize) }
    }
    /// The position of each in its sequence.
    pub fn positions(&self) -> &[i32] {
        // SAFETY: as above.
        unsafe { slice(self.view.positions, self.view.num_tokens as usize) }
    }
    /// Rows of the output to sample from.
    pub fn sample_rows(&self) -> &[i32] {
        // SAFETY: as above.
        unsafe { slice(self.view.sample_rows, self.view.num_sample_rows) }
    }
    /// Whose tokens they are.
    pub fn rows(&self) -> &[ffi::ScheduledRow] {
        // SAFETY: as above.
        unsafe { slice(self.view.rows, self.view.num_rows) }
    }
    /// Tokens that were not known yet, with several steps in flight.
    pub fn placeholders(&self) -> &[ffi::Placeholder] {
        // SAFETY: as above.
        unsafe { slice(self.view.placeholders, self.view.num_placeholders) }
    }

    fn tensor<T: Element>(&self, name: &str, first: *const T, count: usize, num_heads: i32) -> Result<ffi::Tensor> {
        let (tokens, dim) = (self.view.num_tokens, self.cache.shape.head_dim);
        let expected = tokens as usize * num_heads as usize * dim as usize;
        if count != expected {
            let sentence = format!("{name} has {count} elements; the step's {tokens} tokens need {expected}");
            return Err(refused("invalid_argument", &sentence));
        }
        Ok(ffi::Tensor {
            data: first as *mut c_void,
            dtype: dtype(T::NAME)?,
            num_heads,
            num_tokens: tokens,
            head_dim: dim,
            reserved: 0,
            token_stride: i64::from(num_heads) * i64::from(dim),
            head_stride: dim.into(),
        })
    }

    /// Stores k and v, then attends: dense slices [tokens, heads, head_dim] in host memory, so on the CPU alone.
    pub fn attend<Q: Element, K: Element, O: Element>(
        &mut self,
        layer: i32,
        q: &[Q],
        k: &[K],
        v: &[K],
        out: &mut [O],
        scores: &Scores,
    ) -> Result<()> {
        if !self.cache.is_host {
            return Err(refused("unsupported", "slices are host memory; use ffi::bifolio_step_attend_with on a device"));
        }
        let shape = &self.cache.shape;
        let k = self.tensor("k", k.as_ptr(), k.len(), shape.num_kv_heads)?;
        let v = self.tensor("v", v.as_ptr(), v.len(), shape.num_kv_heads)?;
        let mut params = made(ffi::AttentionParams::zeroed(), ffi::bifolio_attention_params_init)?;
        params.q = self.tensor("q", q.as_ptr(), q.len(), shape.num_q_heads)?;
        params.out = self.tensor("out", out.as_mut_ptr(), out.len(), shape.num_q_heads)?;
        if let Some(scale) = scores.scale {
            (params.scale, params.has_scale) = (scale, 1);
        }
        params.soft_cap = scores.soft_cap;
        // SAFETY: the tensors lie within their slices, and on the CPU the call has finished when it returns.
        check(unsafe { ffi::bifolio_step_attend_with(self.raw, layer, &params, &k, &v) })
    }

    /// All tokens of a step of rows are computed for good.
    pub fn commit(self) -> Result<()> {
        self.commit_rows(ptr::null(), 0)
    }

    /// The first `accepted[i]` tokens of row i; the slots of the others are taken back.
    pub fn commit_accepted(self, accepted: &[i32]) -> Result<()> {
        self.commit_rows(accepted.as_ptr(), accepted.len())
    }

    fn commit_rows(mut self, accepted: *const i32, count: usize) -> Result<()> {
        // SAFETY: the array lives until the call returns, which destroys the handle when it succeeds.
        check(unsafe { ffi::bifolio_step_commit(self.raw, accepted, count) })?;
        self.raw = ptr::null_mut();
        Ok(())
    }

    /// Ends a scheduler's step with its sampled tokens; the sequences that ended.
    pub fn commit_sampled(mut self, sampled: &[ffi::SampledToken]) -> Result<Vec<Finished>> {
        unsafe extern "C" fn keep(user: *mut c_void, what: *const ffi::Finished) {
            let (list, what) = (&mut *user.cast::<Vec<Finished>>(), &*what);
            list.push(Finished {
                request: RequestId(what.request),
                sample: what.sample,
                stopped: what.stopped != 0,
                tokens: slice(what.tokens, what.num_tokens).to_vec(),
                num_cached_tokens: what.num_cached_tokens,
            });
        }
        let mut finished: Vec<Finished> = Vec::new();
        let user = (&mut finished as *mut Vec<Finished>).cast();
        // SAFETY: `keep` gets what it is made for; it aborts rather than unwinds when memory is out.
        check(unsafe {
            ffi::bifolio_step_commit_sampled(self.raw, sampled.as_ptr(), sampled.len(), Some(keep), user)
        })?;
        self.raw = ptr::null_mut();
        Ok(finished)
    }
}

/// A sequence of a scheduler that ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    /// Whose.
    pub request: RequestId,
    /// Which of its samples.
    pub sample: i32,
    /// By a stop, not by length.
    pub stopped: bool,
    /// What was sampled.
    pub tokens: Vec<i32>,
    /// Of the prompt, found in the prefix cache.
    pub num_cached_tokens: i64,
}

/// Decides which block holds which token.
pub struct Manager {
    raw: ffi::Manager,
}
owner!(Manager, ffi::Manager, bifolio_manager_destroy);

impl Manager {
    /// Hash of everything that later answers depend on.
    pub fn digest(&self) -> Result<u64> {
        let mut digest = 0;
        // SAFETY: the handle is open.
        check(unsafe { ffi::bifolio_manager_digest(self.raw, &mut digest) })?;
        Ok(digest)
    }
    /// Refused with the first broken invariant.
    pub fn check(&self) -> Result<()> {
        // SAFETY: the handle is open.
        check(unsafe { ffi::bifolio_manager_check(self.raw) })
    }
    /// (Tokens with slots, committed tokens) of a sequence.
    pub fn num_tokens(&self, seq: Seq) -> Result<(i64, i64)> {
        let (mut tokens, mut committed) = (0, 0);
        // SAFETY: the handle is open.
        check(unsafe { ffi::bifolio_manager_num_tokens(self.raw, seq.0, &mut tokens, &mut committed) })?;
        Ok((tokens, committed))
    }
    /// Counters.
    pub fn stats(&self) -> Result<ffi::CacheStats> {
        let mut stats = ffi::CacheStats::zeroed();
        stats.size = std::mem::size_of::<ffi::CacheStats>();
        // SAFETY: the size is the struct's own.
        check(unsafe { ffi::bifolio_manager_stats(self.raw, &mut stats) })?;
        Ok(stats)
    }
    /// Counters of the prefix cache.
    pub fn prefix_stats(&self) -> Result<ffi::PrefixStats> {
        let mut stats = ffi::PrefixStats::zeroed();
        stats.size = std::mem::size_of::<ffi::PrefixStats>();
        // SAFETY: the size is the struct's own.
        check(unsafe { ffi::bifolio_manager_prefix_stats(self.raw, &mut stats) })?;
        Ok(stats)
    }
    /// Leading tokens of a prompt, in full blocks, that are cached.
    pub fn num_matched(&self, prompt: Prompt<'_>) -> Result<usize> {
        let mut tokens = 0;
        // SAFETY: the prompt's arrays live until the call returns.
        check(unsafe { ffi::bifolio_manager_match(self.raw, &prompt.to_c()?, &mut tokens) })?;
        Ok(tokens as usize)
    }
    /// Counters in Prometheus' text format.
    pub fn metrics_text(&mut self, scheduler: Option<&Scheduler>, labels: &[(&str, &str)]) -> Result<String> {
        let mut texts = Vec::new();
        for (name, value) in labels {
            texts.push((c_text(name)?, c_text(value)?));
        }
        let names: Vec<_> = texts.iter().map(|text| text.0.as_ptr()).collect();
        let values: Vec<_> = texts.iter().map(|text| text.1.as_ptr()).collect();
        let of = scheduler.map_or(ptr::null_mut(), |scheduler| scheduler.raw);
        let mut result = ptr::null();
        // SAFETY: the texts live until the call returns; the result is copied before the next.
        check(unsafe {
            ffi::bifolio_metrics_text(self.raw, of, names.as_ptr(), values.as_ptr(), labels.len(), &mut result)
        })?;
        Ok(text(result))
    }
    /// What happened to the set of cached blocks since the last call.
    pub fn drain_events(&mut self) -> Result<Vec<ffi::CacheEvent>> {
        let (mut first, mut count) = (ptr::null(), 0);
        // SAFETY: the array holds until the next call, and is copied here.
        check(unsafe { ffi::bifolio_manager_drain_events(self.raw, &mut first, &mut count) })?;
        Ok(unsafe { slice(first, count) }.to_vec())
    }
}

/// Continuous batching. 0 is the library's default, but for `max_chunk_tokens` and `vocab_size`, where it is no limit.
#[derive(Debug, Clone, Default)]
pub struct SchedulerConfig {
    /// Computed in one step.
    pub max_tokens_per_step: i32,
    /// Sequences with device blocks.
    pub max_running: i32,
    /// Of one sequence in one step.
    pub max_chunk_tokens: i32,
    /// Token ids are below it.
    pub vocab_size: i32,
    /// Steps scheduled before the first is committed.
    pub max_steps_in_flight: i32,
    /// How sequences give up their blocks.
    pub preemption: Preemption,
}

/// How a sequence gives up its blocks to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Preemption {
    /// Its tokens are computed again.
    Recompute,
    /// It moves to host blocks whenever enough are free.
    Swap,
    /// The cheaper of the two.
    #[default]
    Automatic,
}

/// What a scheduler is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Known tokens.
    pub prompt: Prompt<'a>,
    /// Of each sample.
    pub max_new_tokens: i32,
    /// Independent continuations.
    pub num_samples: i32,
    /// Larger goes first.
    pub priority: i32,
}

/// Decides which sequences compute how many tokens in each step.
pub struct Scheduler {
    raw: ffi::Scheduler,
}
owner!(Scheduler, ffi::Scheduler, bifolio_scheduler_destroy);

impl Scheduler {
    /// A scheduler of a manager's blocks.
    pub fn new(manager: &Manager, config: &SchedulerConfig) -> Result<Self> {
        let mut given = made(ffi::SchedulerConfig::zeroed(), ffi::bifolio_scheduler_config_init)?;
        for (to, from) in [
            (&mut given.max_tokens_per_step, config.max_tokens_per_step),
            (&mut given.max_running, config.max_running),
            (&mut given.max_chunk_tokens, config.max_chunk_tokens),
            (&mut given.vocab_size, config.vocab_size),
            (&mut given.max_steps_in_flight, config.max_steps_in_flight),
        ] {
            if from != 0 {
                *to = from;
            }
        }
        given.preemption = config.preemption as i32;
        let mut raw = ptr::null_mut();
        // SAFETY: the handle is open.
        check(unsafe { ffi::bifolio_scheduler_create(manager.raw, &given, &mut raw) })?;
        Ok(Scheduler { raw })
    }
    /// Queues a request.
    pub fn submit(&self, what: &Request<'_>) -> Result<RequestId> {
        let prompt = what.prompt.to_c()?;
        let mut given = made(ffi::Request::zeroed(), ffi::bifolio_request_init)?;
        given.prompt = &prompt;
        given.max_new_tokens = what.max_new_tokens;
        given.num_samples = what.num_samples;
        given.priority = what.priority;
        let mut id = 0;
        // SAFETY: the library copies the request.
        check(unsafe { ffi::bifolio_scheduler_submit(self.raw, &given, &mut id) })?;
        Ok(RequestId(id))
    }
    /// Ends a request with the next step.
    pub fn post_abort(&self, id: RequestId) -> Result<()> {
        // SAFETY: the handle is open.
        check(unsafe { ffi::bifolio_scheduler_post_abort(self.raw, id.0) })
    }
    /// Ends a request now.
    pub fn abort(&self, id: RequestId) -> Result<()> {
        // SAFETY: the handle is open.
        check(unsafe { ffi::bifolio_scheduler_abort(self.raw, id.0) })
    }
    /// Whether any request has not ended.
    pub fn has_work(&self) -> Result<bool> {
        let mut answer = 0;
        // SAFETY: the handle is open.
        check(unsafe { ffi::bifolio_scheduler_has_work(self.raw, &mut answer) })?;
        Ok(answer != 0)
    }
    /// What a sample said so far; empty when it has ended.
    pub fn output(&self, id: RequestId, sample: i32) -> Result<Vec<i32>> {
        let (mut first, mut count) = (ptr::null(), 0);
        // SAFETY: the array holds until the next commit, and is copied here.
        check(unsafe { ffi::bifolio_scheduler_output(self.raw, id.0, sample, &mut first, &mut count) })?;
        Ok(unsafe { slice(first, count) }.to_vec())
    }
    /// Counters.
    pub fn stats(&self) -> Result<ffi::SchedulerStats> {
        let mut stats = ffi::SchedulerStats::zeroed();
        stats.size = std::mem::size_of::<ffi::SchedulerStats>();
        // SAFETY: the size is the struct's own.
        check(unsafe { ffi::bifolio_scheduler_stats_get(self.raw, &mut stats) })?;
        Ok(stats)
    }
    /// Hash of everything that later decisions depend on.
    pub fn digest(&self) -> Result<u64> {
        let mut digest = 0;
        // SAFETY: the handle is open.
        check(unsafe { ffi::bifolio_scheduler_digest(self.raw, &mut digest) })?;
        Ok(digest)
    }
    /// Refused with the first broken invariant.
    pub fn check(&self) -> Result<()> {
        // SAFETY: the handle is open.
        check(unsafe { ffi::bifolio_scheduler_check(self.raw) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(num_blocks: i64) -> Cache {
        let backend = Backend::new("cpu", &BackendOptions { executor: "serial".into(), ..Default::default() }).unwrap();
        let attention = AttentionSpec { num_q_heads: 2, num_kv_heads: 1, head_dim: 4, ..Default::default() };
        Cache::new(&backend, &CacheConfig { num_layers: 1, attention, num_blocks, ..Default::default() }).unwrap()
    }

    #[test]
    fn structs_are_as_long_as_the_library_says() {
        // _init refuses a struct that is shorter than its first version.
        made(ffi::AttentionSpec::zeroed(), ffi::bifolio_attention_spec_init).unwrap();
        made(ffi::AttentionParams::zeroed(), ffi::bifolio_attention_params_init).unwrap();
        made(ffi::ManagerConfig::zeroed(), ffi::bifolio_manager_config_init).unwrap();
        made(ffi::Prompt::zeroed(), ffi::bifolio_prompt_init).unwrap();
        made(ffi::SchedulerConfig::zeroed(), ffi::bifolio_scheduler_config_init).unwrap();
        made(ffi::Request::zeroed(), ffi::bifolio_request_init).unwrap();
        made(ffi::CacheConfig::zeroed(), ffi::bifolio_cache_config_init).unwrap();
        assert!(version() > 0);
    }

    #[test]
    fn refusals_have_the_sentence_of_the_library() {
        let refusal = Backend::new("gpu", &BackendOptions::default()).err().unwrap();
        assert!(matches!(&refusal, Error::Refused { code, message } if code == "invalid_argument" && message.contains("cpu")), "{refusal}");
        let cache = cache(4);
        assert!(cache.free(Seq(7)).err().unwrap().to_string().starts_with("not_found"));
        let seq = cache.open(Prompt { tokens: &[1, 2], ..Default::default() }).unwrap().seq;
        assert_eq!(cache.begin(&[Row { seq, tokens: &[1; 65] }]).err(), Some(Error::Never));
        let mut step = cache.begin(&[Row { seq, tokens: &[1, 2] }]).unwrap();
        assert!(cache.free(seq).err().unwrap().to_string().starts_with("failed_precondition"));
        let (q, kv, mut out) = ([0f32; 16], [0f32; 8], [0f32; 16]);
        let short = step.attend(0, &q[..8], &kv, &kv, &mut out, &Scores::default()).err().unwrap();
        assert!(short.to_string().contains("q has 8 elements; the step's 2 tokens need 16"), "{short}");
        let cap = Scores { soft_cap: -1.0, ..Default::default() };
        let capped = step.attend(0, &q, &kv, &kv, &mut out, &cap).err().unwrap();
        assert!(capped.to_string().contains("soft_cap is -1"), "{capped}");
        let halves = [Bf16(0); 16];
        assert!(step.attend(0, &halves, &kv, &kv, &mut out, &Scores::default()).is_err());
    }

    #[test]
    fn a_step_that_is_dropped_gives_its_slots_back() {
        let cache = cache(4);
        let mut manager = cache.manager().unwrap();
        let seq = cache.open(Prompt { tokens: &[1, 2], ..Default::default() }).unwrap().seq;
        drop(cache.begin(&[Row { seq, tokens: &[1, 2, 3, 4] }]).unwrap());
        assert_eq!(manager.num_tokens(seq).unwrap(), (2, 0));
        let mut step = cache.begin(&[Row { seq, tokens: &[1, 2, 3] }]).unwrap();
        assert_eq!((step.tokens(), step.positions(), step.sample_rows()), (&[1, 2, 3][..], &[0, 1, 2][..], &[2][..]));
        let (q, kv, mut out) = ([1f32; 24], [3f32; 12], [0f32; 24]);
        step.attend(0, &q, &kv, &kv, &mut out, &Scores { scale: Some(0.5), soft_cap: 0.0 }).unwrap();
        assert_eq!(out, [3f32; 24]);
        step.commit_accepted(&[2]).unwrap();
        assert_eq!(manager.num_tokens(seq).unwrap(), (2, 2));
        drop(cache); // the manager keeps what it needs
        manager.check().unwrap();
        assert_eq!(manager.stats().unwrap().num_used_blocks, 1);
        let text = manager.metrics_text(None, &[("model", "tiny")]).unwrap();
        assert!(text.contains("\nbifolio_used_blocks{model=\"tiny\"} 1\n"), "{text}");
        assert!(manager.metrics_text(None, &[("1", "")]).is_err());
    }
}
