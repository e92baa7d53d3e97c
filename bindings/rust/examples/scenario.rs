// SPDX-License-Identifier: Apache-2.0
//! What tests/c/scenario.c does, through the safe wrapper; it prints the same.

use bifolio::{
    ffi::SampledToken, AttentionSpec, Backend, BackendOptions, Cache, CacheConfig, Manager, Preemption, Prompt,
    Request, RequestId, Result, Row, Scheduler, SchedulerConfig, Scores, Step,
};

const NUM_LAYERS: i32 = 2;
const NUM_Q_HEADS: i32 = 4;
const NUM_KV_HEADS: i32 = 2;
const HEAD_DIM: i32 = 8;
const VOCAB: i32 = 50;
const FNV_START: u64 = 0xcbf29ce484222325;

fn mix(x: u64) -> u64 {
    let mut x = x.wrapping_add(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d049bb133111eb);
    x ^ (x >> 31)
}

fn fnv(start: u64, bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100000001b3))
}

fn fnv_floats(start: u64, values: &[f32]) -> u64 {
    fnv(start, values.iter().flat_map(|value| value.to_ne_bytes()))
}

fn rows_of(what: u64, layer: i32, num_heads: i32, step: &Step<'_>) -> Vec<f32> {
    let mut rows = Vec::new();
    for (token, position) in step.tokens().iter().zip(step.positions()) {
        for i in 0..num_heads * HEAD_DIM {
            let h = [layer, *token, *position, i].iter().fold(mix(what), |h, part| mix(h ^ *part as u64));
            rows.push((h >> 40) as f32 * (1.0 / 8388608.0) - 1.0);
        }
    }
    rows
}

fn run_layers(step: &mut Step<'_>) -> Result<(u64, Vec<f32>)> {
    let (mut hash, mut out) = (FNV_START, Vec::new());
    for layer in 0..NUM_LAYERS {
        let q = rows_of(0, layer, NUM_Q_HEADS, step);
        let (k, v) = (rows_of(1, layer, NUM_KV_HEADS, step), rows_of(2, layer, NUM_KV_HEADS, step));
        out = vec![0f32; q.len()];
        step.attend(layer, &q, &k, &v, &mut out, &Scores::default())?;
        hash = fnv_floats(hash, &out);
    }
    Ok((hash, out))
}

fn say(manager: &Manager, what: &str, hash: u64) -> Result<()> {
    manager.check()?;
    println!("{what} {hash:016x} {:016x}", manager.digest()?);
    Ok(())
}

fn step_of(cache: &Cache, manager: &Manager, what: &str, rows: &[Row<'_>], accepted: Option<&[i32]>) -> Result<()> {
    let mut step = cache.begin(rows)?;
    let (hash, _) = run_layers(&mut step)?;
    match accepted {
        Some(numbers) => step.commit_accepted(numbers)?,
        None => step.commit()?,
    }
    say(manager, what, hash)
}

fn run_rows(cache: &Cache, manager: &Manager) -> Result<()> {
    let tokens: Vec<i32> = (0..10).map(|i| i * 7 % VOCAB).collect();
    let prompt = Prompt { tokens: &tokens, salt: b"tenant", adapter_id: 0 };
    let a = cache.open(prompt)?.seq;
    step_of(cache, manager, "prefill", &[Row { seq: a, tokens: &tokens }], None)?;
    for token in 1..=3 {
        step_of(cache, manager, "decode", &[Row { seq: a, tokens: &[token] }], None)?;
    }
    let b = cache.fork(a)?;
    step_of(cache, manager, "fork", &[Row { seq: a, tokens: &[4] }, Row { seq: b, tokens: &[5] }], None)?;
    step_of(cache, manager, "drafts", &[Row { seq: a, tokens: &[6, 7, 8] }], Some(&[1]))?;
    cache.free(a)?;
    cache.free(b)?;
    let again = cache.open(prompt)?;
    println!("cached {}", again.num_cached_tokens);
    let rest = &tokens[again.num_cached_tokens..];
    step_of(cache, manager, "hit", &[Row { seq: again.seq, tokens: rest }], None)?;
    cache.swap_out(&[again.seq])?;
    say(manager, "out", 0)?;
    cache.swap_in(&[again.seq])?;
    step_of(cache, manager, "in", &[Row { seq: again.seq, tokens: &[7] }], None)?;
    cache.free(again.seq)?;
    let stats = manager.prefix_stats()?;
    println!("prefix {} of {}", stats.num_hit_blocks, stats.num_looked_up_blocks);
    Ok(())
}

fn run_scheduler(cache: &Cache, manager: &Manager) -> Result<()> {
    let config = SchedulerConfig {
        max_tokens_per_step: 16,
        max_running: 8,
        vocab_size: VOCAB,
        preemption: Preemption::Swap,
        ..Default::default()
    };
    let scheduler = Scheduler::new(manager, &config)?;
    for r in 0..6 {
        let tokens: Vec<i32> = (0..3 + 7 * r).map(|i| (r * 13 + i * 7) % VOCAB).collect();
        let prompt = Prompt { tokens: &tokens, ..Default::default() };
        let num_samples = if r == 1 { 2 } else { 1 };
        scheduler.submit(&Request { prompt, max_new_tokens: 24, num_samples, priority: r % 2 })?;
    }
    let (mut hash, mut num_steps, mut num_finished) = (FNV_START, 0, 0);
    loop {
        if num_steps == 20 {
            scheduler.post_abort(RequestId(4))?;
        }
        let mut step = match cache.begin_scheduled(&scheduler)? {
            Some(step) => step,
            None => break,
        };
        let (of_step, out) = run_layers(&mut step)?;
        hash = fnv(hash, of_step.to_ne_bytes());
        let (mut sampled, mut at) = (Vec::new(), 0);
        for row in step.rows() {
            // The samples of a prompt that is complete differ; they come from one row.
            for k in 0..row.num_samples {
                let width = (NUM_Q_HEADS * HEAD_DIM) as usize;
                let first = step.sample_rows()[at] as usize * width;
                let h = fnv_floats(FNV_START + k as u64, &out[first..first + width]);
                let token = (h % VOCAB as u64) as i32;
                sampled.push(SampledToken { token, stop: i32::from(h % 97 == 0), from_sample: -1 });
            }
            at += usize::from(row.num_samples > 0);
        }
        for done in step.commit_sampled(&sampled)? {
            num_finished += 1;
            let tokens = fnv(FNV_START, done.tokens.iter().flat_map(|token| token.to_ne_bytes()));
            let (id, stopped) = (done.request.0, i32::from(done.stopped));
            println!("finished {id} {} {stopped} {} {tokens:016x}", done.sample, done.tokens.len());
        }
        num_steps += 1;
    }
    scheduler.check()?;
    let stats = scheduler.stats()?;
    println!(
        "steps {num_steps}, finished {num_finished}, preemptions {}, swapped in {}, aborted {}",
        stats.num_preemptions, stats.num_swap_ins, stats.num_aborted
    );
    println!("scheduler {hash:016x} {:016x}", scheduler.digest()?);
    drop(scheduler);
    say(manager, "end", 0)
}

fn main() -> Result<()> {
    let backend = Backend::new("cpu", &BackendOptions { executor: "serial".into(), ..Default::default() })?;
    let attention = AttentionSpec {
        num_q_heads: NUM_Q_HEADS,
        num_kv_heads: NUM_KV_HEADS,
        head_dim: HEAD_DIM,
        ..Default::default()
    };
    let config = CacheConfig {
        num_layers: NUM_LAYERS,
        attention,
        block_size: 4,
        num_blocks: 18,
        num_host_blocks: 40,
        max_sequences: 64,
        prefix_caching: true,
        seed: Some((1, 2)),
        first_generation: 1,
        ..Default::default()
    };
    let cache = Cache::new(&backend, &config)?;
    let manager = cache.manager()?;
    drop(backend); // the cache keeps what it needs
    run_rows(&cache, &manager)?;
    run_scheduler(&cache, &manager)
}
