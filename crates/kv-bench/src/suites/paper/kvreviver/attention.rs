//! KVReviver's attention in a decode step: over the sketch, over the cache rebuilt from it, and
//! over a full cache.

use anyhow::ensure;
use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use kv_core::{
    ACCUMULATED, CacheOptions, DecodeAttentionOptions, LayerCache, Sketch, SketchHead,
    SketchOptions, SlotLayout, StepLogits,
};

use crate::args::Paper;
use crate::bench::Bench;
use crate::progress::Progress;
use crate::record::{Case, FULL, metric};
use crate::suites::kernels::Clock;
use crate::suites::paper::SUITE;

/// Heads of a layer.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    name: &'static str,
    pub(super) query: usize,
    pub(super) kv: usize,
    dim: usize,
}

const MODELS: [Heads; 2] = [
    Heads { name: "Llama-2-7B", query: 32, kv: 32, dim: 128 },
    Heads { name: "Llama-3.1-8B", query: 32, kv: 8, dim: 128 },
];
const QUICK: Heads = Heads { name: "small", query: 4, kv: 2, dim: 64 };
const LENGTHS: [usize; 4] = [2_048, 4_096, 32_768, 131_072];
const BATCHES: [usize; 2] = [1, 8];
/// Tokens over all sequences beyond which a case is left out.
const MOST: usize = 8 * 32_768;
/// Share kept, and what of it the sketch has.
const BUDGET: f64 = 0.1;
const VAGUE: f64 = 0.1;
pub(super) const BUCKETS: usize = 3;
pub(super) const SLACK: usize = 16;

/// Heads, tokens and sequences at once.
type Sizes = (Heads, usize, usize);

/// The cases that are timed, of the `lengths` and `batches` that are asked for, or else of the
/// figure's own.
///
/// # Errors
/// Where all of them are too large to be measured.
fn cases(quick: bool, lengths: &[usize], batches: &[usize]) -> anyhow::Result<Vec<Sizes>> {
    if quick {
        return Ok(vec![(QUICK, 512, 1)]);
    }
    let lengths = if lengths.is_empty() { &LENGTHS } else { lengths };
    let batches = if batches.is_empty() { &BATCHES } else { batches };
    let sizes = MODELS
        .into_iter()
        .flat_map(|heads| lengths.iter().map(move |&length| (heads, length)))
        .flat_map(|(heads, length)| batches.iter().map(move |&batch| (heads, length, batch)));
    let all: Vec<_> = sizes.filter(|(_, length, batch)| length * batch <= MOST).collect();
    ensure!(
        !all.is_empty(),
        "--lengths, --batches: kvreviver-attention times up to {MOST} tokens of all sequences \
         together"
    );
    Ok(all)
}

/// Runs the figure.
///
/// # Errors
/// Where the device refuses.
pub(crate) fn run(bench: &mut Bench, options: &Paper) -> anyhow::Result<()> {
    let cases = cases(bench.common.quick, &options.lengths, &options.batches)?;
    let (device, dtype) = (&bench.device.clone(), bench.dtype());
    let clock = Clock::new(device.clone());
    let mut progress = Progress::new(cases.len(), "kvreviver-attention");
    for (heads, length, batch) in cases {
        let lab = Lab { device, dtype, clock: &clock, heads, length, batch };
        for (policy, part, seconds) in lab.measure()? {
            let case = Case {
                task: Some(format!("kvreviver-attention {part}, {}", heads.name)),
                length: Some(length),
                batch: Some(batch),
                ..Case::default()
            };
            let setup = (policy, (policy != FULL).then_some(BUDGET));
            bench.record(SUITE, &case, setup, metric::TIME_US, seconds * 1e6, "us");
        }
        progress.step();
    }
    progress.finish();
    Ok(())
}

/// One case.
pub(super) struct Lab<'a> {
    pub(super) device: &'a Device,
    dtype: DType,
    pub(super) clock: &'a Clock,
    pub(super) heads: Heads,
    pub(super) length: usize,
    pub(super) batch: usize,
}

impl Lab<'_> {
    /// Policies, their cases, and the seconds.
    fn measure(&self) -> anyhow::Result<Vec<(&'static str, &'static str, f64)>> {
        let Heads { query, kv, dim, .. } = self.heads;
        let query = self.random(self.batch * query).reshape([self.batch, query, dim]);
        let newest = Tensor::full([self.batch], self.length as i32 - 1, (self.device, DType::I32));
        let mut times = Vec::new();
        let bytes = 2 * self.batch * kv * self.length * dim * self.dtype.size();
        let sets = Clock::sets(bytes).min(2);
        let caches = (0..sets).map(|_| self.cache(self.length));
        let caches = caches.collect::<anyhow::Result<Vec<_>>>()?;
        let seconds = self.clock.seconds(sets, |i| {
            Ok(caches[i].attend(query.clone(), DecodeAttentionOptions::default())?.output)
        })?;
        drop(caches);
        times.push((FULL, "attention", seconds));
        for (policy, rebuild) in [("kvreviver", false), ("kvreviver rebuild=true", true)] {
            let caches = (0..sets).map(|_| self.sketched(rebuild));
            let mut caches = caches.collect::<anyhow::Result<Vec<_>>>()?;
            let seconds = self
                .clock
                .seconds(sets, |i| Ok(caches[i].attend_sketched(query.clone(), &newest)?.output))?;
            times.push((policy, "attention", seconds));
            let logits = caches[0].attend_sketched(query.clone(), &newest)?.logits;
            let seconds = self.clock.seconds(sets, |i| {
                let StepLogits { slots, tokens, log_sum_exp } = logits.clone();
                let logits = StepLogits { slots, tokens, log_sum_exp };
                caches[i].revise_sketch(logits, newest.clone())?;
                Ok(caches[i].track(ACCUMULATED).cloned())
            })?;
            times.push((policy, "scores and swaps", seconds));
        }
        times.push(("kvreviver", "a bulk", self.bulk()?));
        Ok(times)
    }

    /// The last `slots` tokens of every sequence.
    fn cache(&self, slots: usize) -> anyhow::Result<LayerCache> {
        let Heads { kv, dim, .. } = self.heads;
        let layout = SlotLayout::new(kv, vec![slots + SLACK + 1; self.batch * kv]);
        let options = CacheOptions::new(self.device, self.dtype);
        let mut cache = LayerCache::new(layout, dim, options);
        let rows = || self.random(self.batch * kv * slots).reshape([self.batch, kv, slots, dim]);
        let (first, end) = ((self.length - slots) as i64, self.length as i64);
        let positions = Tensor::<1, Int>::arange(first..end, (self.device, DType::I32));
        cache.extend(rows(), rows(), positions.unsqueeze::<2>().expand([self.batch, slots]))?;
        Ok(cache)
    }

    /// The cache with a sketch, which has all tokens but the share that is kept exactly.
    fn sketched(&self, rebuild: bool) -> anyhow::Result<LayerCache> {
        let Heads { kv, dim, .. } = self.heads;
        let (entries, limit) = self.parts();
        let mut cache = self.cache(limit)?;
        let pairs = self.batch * kv;
        let head = SketchHead { entries, limit, recents: limit / 2 };
        let options = SketchOptions {
            buckets: BUCKETS,
            signed_keys: true,
            slack: SLACK,
            replace_rate: Some(1.1),
            rebuild,
        };
        let seeds: Vec<[u32; 2]> = (0..pairs as u32).map(|pair| [1, pair]).collect();
        let heads = vec![head; pairs];
        let mut sketch = Sketch::new(heads, self.length, dim, &seeds, options, self.device)?;
        sketch.assume(self.length - limit)?;
        let all = Tensor::<1, Int>::arange(0..entries as i64, (self.device, DType::I32));
        let all = all.unsqueeze_dim::<2>(0).expand([pairs, entries]);
        let rows = || self.random(pairs * entries).reshape([pairs, entries, dim]);
        sketch.add(all, rows(), rows(), 1.0)?;
        cache.set_sketch(sketch)?;
        let slots = cache.layout().total();
        // Beyond what any step gives: nothing changes places.
        let scores = Tensor::full([slots], 1e9, (self.device, DType::F32));
        cache.set_track(ACCUMULATED, scores, 0.0)?;
        Ok(cache)
    }

    /// Entries of a bucket, and slots that are kept exactly.
    pub(super) fn parts(&self) -> (usize, usize) {
        let budget = (self.length as f64 * BUDGET) as usize;
        let entries = ((budget as f64 * VAGUE) as usize / BUCKETS).max(1);
        (entries, budget - entries * BUCKETS)
    }

    /// Normal rows, `[rows, D]`.
    pub(super) fn random(&self, rows: usize) -> Tensor<2> {
        let normal = Distribution::Normal(0.0, 1.0);
        let shape = [rows, self.heads.dim];
        Tensor::<2>::random(shape, normal, (self.device, DType::F32)).cast(self.dtype)
    }
}
