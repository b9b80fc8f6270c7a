//! PrHS, table 4: time of a step's attention, choices included, over caches that are kept whole;
//! and times at lengths beyond the paper's.

use anyhow::{bail, ensure};
use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use kv_core::{CacheOptions, DecodeAttentionOptions, LayerCache};
use kv_policies::{LayerContext, Observation, Policy, Reads, Step};
use serde_json::{Value, json};

use super::{HSHARE, cis, contenders, hshare};
use crate::args::{Figure, Paper};
use crate::bench::Bench;
use crate::contenders::Contender;
use crate::progress::Progress;
use crate::record::{Case, FULL, metric};
use crate::suites::kernels::Clock;
use crate::suites::paper::SUITE;

/// Heads of a layer.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    name: &'static str,
    query: usize,
    kv: usize,
    dim: usize,
}

const LLAMA_2: Heads = Heads { name: "Llama-2-7B", query: 32, kv: 32, dim: 128 };
/// Groups of 4 and 8.
const GROUPED: [Heads; 2] = [
    Heads { name: "groups of 4", query: 32, kv: 8, dim: 128 },
    Heads { name: "groups of 8", query: 64, kv: 8, dim: 128 },
];
const QUICK: Heads = Heads { name: "small", query: 4, kv: 2, dim: 64 };
/// The paper's lengths and batches.
const PAPER: ([usize; 3], [usize; 2]) = ([1_024, 2_048, 4_096], [8, 16]);
/// Beyond it.
const LONG: ([usize; 3], [usize; 3]) = ([8_192, 32_768, 131_072], [1, 8, 16]);
/// Tokens of all key-value heads and sequences beyond which a case is left out: with 128 numbers
/// each, kernels could not count them in 32 bits.
const MOST: usize = 16 << 20;
/// Share of the tokens that is read.
const SHARE: f64 = 0.125;
/// Steps of a block.
const BLOCKS: [usize; 2] = [8, 16];
/// Share of a step's heads that retrieve within a block: the paper's 8.7 % of all at 16 steps a
/// block.
const JUMPING: f64 = 0.026;
/// HShare's steps choose at every second token.
const PERIOD: usize = 2;
/// Tokens of which an eighth is a page of Quest's.
const FEWEST: usize = 128;
/// Bytes that a rotation reads, at least: beyond any cache.
const ROTATED: usize = 200 << 20;

/// Runs the table; a note says how many cases it leaves out.
///
/// # Errors
/// Where the device refuses.
pub(crate) fn run(bench: &mut Bench, options: &Paper) -> anyhow::Result<()> {
    let (long, quick) = (options.figure == Figure::PrhsLong, bench.common.quick);
    let cases = cases(long, quick, &options.lengths, &options.batches)?;
    let (device, dtype) = (&bench.device.clone(), bench.dtype());
    let clock = Clock::new(device.clone());
    let name = cases.figure;
    let copy = clock.copy_bandwidth()?;
    // As many in all cases.
    let each = contenders(&bench.common, &configs(cases.all[0].1))?.len();
    let mut progress = Progress::new(cases.all.len() * each, name);
    for &(heads, length, batch) in &cases.all {
        let lab = Lab { device, dtype, clock: &clock, heads, length, batch };
        for contender in contenders(&bench.common, &configs(length))? {
            let measured = lab.measure(&contender)?;
            let case = Case {
                task: Some(format!("{name}, {}", heads.name)),
                length: Some(length),
                batch: Some(batch),
                ..Case::default()
            };
            let on_cpu = bench.is_cpu();
            let setup = (contender.label.as_str(), contender.budget);
            let mut record = |metric: &str, value: f64, unit: &str| {
                bench.record(SUITE, &case, setup, metric, value, unit);
            };
            record(metric::TIME_US, measured.seconds * 1e6, "us");
            // A processor's copy of so little comes from its caches.
            if let Some(bytes) = measured.bytes.filter(|_| !on_cpu) {
                let share = bytes / measured.seconds / copy;
                record(metric::BANDWIDTH_FRACTION, share, "share");
            }
            if measured.reads.steps > 0 {
                let reads = measured.reads;
                record(metric::RETRIEVAL_RATIO, reads.ratio(), "share");
                record(metric::TOKENS_READ, reads.slots_each(), "tokens");
            }
            progress.step();
        }
    }
    progress.finish();
    if cases.left_out > 0 {
        bench.note(format!(
            "{} cases of more than {MOST} tokens of all key-value heads and sequences together are \
             left out",
            cases.left_out
        ));
    }
    Ok(())
}

/// The cases that are timed: heads, tokens and sequences.
pub(crate) struct Cases {
    figure: &'static str,
    pub(super) all: Vec<(Heads, usize, usize)>,
    /// How many are too large.
    left_out: usize,
}

/// The figure's cases, of the `lengths` and `batches` that are asked for, or else of its own.
///
/// # Errors
/// Where all of them are too large to be measured.
pub(crate) fn cases(
    long: bool,
    quick: bool,
    lengths: &[usize],
    batches: &[usize],
) -> anyhow::Result<Cases> {
    let figure = if long { "prhs-long" } else { "prhs-table4" };
    if quick {
        return Ok(Cases { figure, all: vec![(QUICK, 512, 1)], left_out: 0 });
    }
    let (own_lengths, own_batches): (&[usize], &[usize]) =
        if long { (&LONG.0, &LONG.1) } else { (&PAPER.0, &PAPER.1) };
    let lengths = if lengths.is_empty() { own_lengths } else { lengths };
    let batches = if batches.is_empty() { own_batches } else { batches };
    if let Some(short) = lengths.iter().find(|length| **length < FEWEST) {
        bail!(
            "--lengths: {short} tokens, of which {figure} reads an eighth; expected {FEWEST}, at \
             least"
        );
    }
    let heads: &[Heads] = if long { &[LLAMA_2, GROUPED[0], GROUPED[1]] } else { &[LLAMA_2] };
    let mut all: Vec<_> = heads
        .iter()
        .flat_map(|&heads| lengths.iter().map(move |&length| (heads, length)))
        .flat_map(|(heads, length)| batches.iter().map(move |&batch| (heads, length, batch)))
        .collect();
    let asked = all.len();
    all.retain(|(heads, length, batch)| heads.kv * length * batch <= MOST);
    ensure!(
        !all.is_empty(),
        "--lengths, --batches: {figure} times up to {MOST} tokens of all key-value heads and \
         sequences together"
    );
    Ok(Cases { figure, left_out: asked - all.len(), all })
}

/// Who runs; the full cache first.
fn configs(length: usize) -> Vec<Value> {
    let budget = json!((length as f64 * SHARE) as usize);
    let mut configs = vec![json!({"policy": FULL})];
    for name in ["h2o", "top-k-oracle"] {
        configs.push(json!({"policy": name, "budget": budget}));
    }
    for name in ["quest", "double-sparsity"] {
        configs.push(json!({"policy": name, "budget": budget, "dense_layers": 0}));
    }
    configs.extend(HSHARE.map(|ratios| hshare(&budget, ratios)));
    for name in ["cis", "cpe"] {
        configs.extend(BLOCKS.map(|block| cis(name, &budget, block)));
    }

    configs
}

/// One case.
struct Lab<'a> {
    device: &'a Device,
    dtype: DType,
    clock: &'a Clock,
    heads: Heads,
    length: usize,
    batch: usize,
}

struct Measured {
    seconds: f64,
    /// Bytes that a step must read, where they are known.
    bytes: Option<f64>,
    reads: Reads,
}

impl Lab<'_> {
    fn measure(&self, contender: &Contender) -> anyhow::Result<Measured> {
        let policy = &*contender.policy;
        // The last layer, where windows are narrowest.
        let layer = LayerContext { index: 31, count: 32 };
        let Heads { kv, dim, .. } = self.heads;
        let token = 2 * dim * self.dtype.size();
        let all = self.batch * kv * self.length * token;
        let read = if contender.budget.is_some() { all / 8 } else { all };
        let sets = ROTATED.div_ceil(read).clamp(1, 24).next_multiple_of(PERIOD);
        // Two of the longest blocks: a cycle must not come back to the sets of its own.
        let block = 2 * BLOCKS[1];
        // Nothing is appended, so that a cache's steps would all choose, or none, where every
        // second one does.
        let caches = (0..sets).map(|i| self.cache(policy, layer, self.length - i % PERIOD));
        let mut caches = caches.collect::<anyhow::Result<Vec<_>>>()?;
        let steps = (0..block).map(|step| self.step(step)).collect::<anyhow::Result<Vec<_>>>()?;
        let evicts =
            policy.changes_decode() && caches[0].limits().is_some() && caches[0].at_limits();
        let run = |cache: &mut LayerCache,
                   (step, query): &(Step, Tensor<3>)|
         -> anyhow::Result<Tensor<3>> {
            Ok(if evicts {
                // The attention alone, with what an eviction looks at.
                let logits = DecodeAttentionOptions {
                    logits: true,
                    log_sum_exp: true,
                    ..Default::default()
                };
                cache.attend(query.clone(), logits)?.output
            } else {
                policy.attend_appended(layer, cache, query.clone(), step)?
            })
        };
        // A cache's first steps allocate tensors that must be there before steps are recorded.
        for step in &steps[..2] {
            caches.iter_mut().try_for_each(|cache| run(cache, step).map(drop))?;
        }
        let seconds = self
            .clock
            .cycles(sets * block, |i| run(&mut caches[i % sets], &steps[i / sets % block]))?;
        let reads = caches.iter().map(|cache| Ok(policy.reads(cache)?.unwrap_or_default()));
        let reads: Reads = reads.sum::<anyhow::Result<Reads>>()?;
        let ranges = (self.batch * kv) as f64;
        let bytes = match reads.steps {
            0 if contender.budget.is_none() => Some(all as f64),
            0 => None,
            // Other lists are chosen by parts of keys or pages' bounds, which are not counted.
            _ if caches[0].index_sets().is_none() => None,
            // Listed tokens with their places, and the keys of those that retrieve.
            _ => {
                let listed = reads.slots_each() * (token + size_of::<i32>()) as f64;
                let keys = reads.ratio() * (self.length * token / 2) as f64;
                Some(ranges * (listed + keys))
            }
        };
        Ok(Measured { seconds, bytes, reads })
    }

    /// A primed cache of so many tokens.
    fn cache(
        &self,
        policy: &dyn Policy,
        layer: LayerContext,
        length: usize,
    ) -> anyhow::Result<LayerCache> {
        let Heads { query, kv, dim, .. } = self.heads;
        let rows = || self.rows(kv).narrow(2, 0, length);
        let (keys, values) = (rows(), rows());
        let positions = Tensor::<1, Int>::arange(0..length as i64, (self.device, DType::I32));
        let positions = positions.unsqueeze::<2>().expand([self.batch, length]);
        let needs = policy.needs();
        let window = needs.window.clamp(1, length);
        let queries = self.random(self.batch * query * window);
        let sums = || {
            Tensor::<3>::random(
                [self.batch, query, length],
                Distribution::Default,
                (self.device, DType::F32),
            )
        };
        let observation = Observation {
            layer,
            keys: &keys,
            values: &values,
            positions: &positions,
            prompt_tokens: length,
            window: Some(queries.reshape([self.batch, query, window, dim])),
            column_sums: needs.column_sums.then(sums),
            raw_queries: None,
            decoding: false,
            inverse_frequencies: &[],
            seeds: &vec![1; self.batch],
        };
        let options = CacheOptions::new(self.device, self.dtype);
        // A layer by itself: what HShare's layers share of each other is not part of it.
        Ok(policy.prefill(&observation, 1, options)?)
    }

    /// The `index`-th step: most heads' queries drift, some jump.
    fn step(&self, index: usize) -> anyhow::Result<(Step, Tensor<3>)> {
        let Heads { query, kv, dim, .. } = self.heads;
        // A block begins with the first step.
        let base = self.length.next_multiple_of(2 * BLOCKS[1]);
        let position = Tensor::full([self.batch], (base + index) as i32, (self.device, DType::I32));
        let jumps: Vec<f32> = (0..self.batch * kv)
            .flat_map(|pair| {
                let draw = (pair * 7_919 + index * 104_729) % 1_000;
                let jumps = (draw as f64) < JUMPING * 1_000.0;
                vec![f32::from(u8::from(jumps)); query / kv]
            })
            .collect();
        let jumps = Tensor::<1>::from_data(jumps.as_slice(), (self.device, DType::F32));
        let jumps = jumps.reshape([self.batch, query, 1]);
        let shape = [self.batch, query, dim];
        let drawn = || self.random(self.batch * query).cast(DType::F32).reshape(shape);
        self.device.seed(17);
        let base = drawn();
        self.device.seed(100 + index as u64);
        let drift = base.clone() + drawn().mul_scalar(0.3);
        let queries = (drift.clone() + (drawn() - drift) * jumps).cast(self.dtype);
        let rows = |heads: usize| self.random(self.batch * heads).reshape([self.batch, heads, dim]);
        Ok((Step::new(queries.clone(), rows(kv), rows(kv), position), queries))
    }

    /// Keys or values `[B, H, T, D]`: neighbours are alike, as in real prompts.
    fn rows(&self, heads: usize) -> Tensor<4> {
        let (length, dim) = (self.length, self.heads.dim);
        let all = self.random(self.batch * heads * (length + 2));
        let all = all.reshape([self.batch, heads, length + 2, dim]);
        let part = |from: usize| all.clone().narrow(2, from, length);
        (part(0) + part(1) + part(2)).mul_scalar(3f32.sqrt().recip())
    }

    /// Normal rows, `[rows, D]`.
    fn random(&self, rows: usize) -> Tensor<2> {
        let normal = Distribution::Normal(0.0, 1.0);
        let shape = [rows, self.heads.dim];
        Tensor::<2>::random(shape, normal, (self.device, DType::F32)).cast(self.dtype)
    }
}
