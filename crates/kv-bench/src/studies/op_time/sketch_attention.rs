//! KVReviver's attention in a decode step: over the sketch, over the cache rebuilt from it, and
//! over a full cache; and the launch behind it, which adds up scores and evicts in bulk.

use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use kv_core::{CacheOptions, LayerCache, PolicyState, SlotLayout};
use kv_kernels::{
    ABSENT, DecodeAttentionOptions, HEAD_FIELDS, SketchHashes, SketchPool, SketchScores,
    SketchUpdateOptions, SlotPool, SlotRanges, StepLogits, update_sketch,
};
use kv_policies::{Sketch, SketchHead, SketchOptions};

use super::{Heads, OpBench, Sink, Timed};
use crate::record::FULL;
use crate::suites::kernels::Clock;

/// Share of the budget that the sketch has.
const VAGUE: f64 = 0.1;
const BUCKETS: usize = 3;
/// The names of the sketch and of the form that rebuilds, as policies of other suites have them.
const SKETCH: &str = "kvreviver vague=sketch";
const REBUILT: &str = "kvreviver rebuild=true vague=sketch";
const SLACK: usize = 16;

/// A case at a budget, which is a share of the tokens.
struct Sketched<'a, 'b> {
    ops: &'a OpBench<'b>,
    budget: f64,
}

/// Times one case.
///
/// # Errors
/// Where the device refuses.
pub(crate) fn time(ops: &OpBench<'_>, budget: f64, found: Sink<'_>) -> anyhow::Result<()> {
    Sketched { ops, budget }.time(found)
}

impl Sketched<'_, '_> {
    /// Times attention over a full cache; attention over the sketch, or over the cache rebuilt from
    /// it; and the launch that follows the attention.
    fn time(&self, found: Sink<'_>) -> anyhow::Result<()> {
        let OpBench { device, clock, heads, length, batch, .. } = *self.ops;
        let query = self.ops.random(batch * heads.query).reshape([batch, heads.query, heads.dim]);
        let newest = Tensor::full([batch], length as i32 - 1, (device, DType::I32));
        let mut timed = |policy: &str, part: &'static str, seconds: f64| {
            let budget = (policy != FULL).then_some(self.budget);
            found(Timed { part, ..Timed::of(policy.into(), budget, seconds) });
        };
        let sets = Clock::sets(self.ops.cache_bytes()).min(2);
        let caches = (0..sets).map(|_| self.cache(length));
        let caches = caches.collect::<anyhow::Result<Vec<_>>>()?;
        let seconds = clock.seconds(sets, |i| {
            Ok(caches[i].attend(query.clone(), DecodeAttentionOptions::default())?.output)
        })?;
        drop(caches);
        timed(FULL, "attention", seconds);
        for (policy, rebuild) in [(SKETCH, false), (REBUILT, true)] {
            let caches = (0..sets).map(|_| self.sketched(rebuild));
            let mut caches = caches.collect::<anyhow::Result<Vec<_>>>()?;
            let attend =
                |cache: &LayerCache| Sketch::of(cache)?.attend(cache, query.clone(), &newest);
            let seconds = clock.seconds(sets, |i| Ok(attend(&caches[i])?.output))?;
            timed(policy, "attention", seconds);
            let logits = attend(&caches[0])?.logits;
            let seconds = clock.seconds(sets, |i| {
                Sketch::update(&mut caches[i], logits.clone(), newest.clone())?;
                Ok(caches[i].track(Sketch::SCORES).cloned())
            })?;
            timed(policy, "scores and swaps", seconds);
        }
        timed(SKETCH, "a bulk", self.bulk()?);
        Ok(())
    }

    /// The last `slots` tokens of every sequence.
    fn cache(&self, slots: usize) -> anyhow::Result<LayerCache> {
        let Heads { kv, dim, .. } = self.ops.heads;
        let layout = SlotLayout::new(kv, vec![slots + SLACK + 1; self.ops.batch * kv]);
        let options = CacheOptions::new(self.ops.device, self.ops.dtype);
        let mut cache = LayerCache::new(layout, dim, options);
        let rows = || {
            self.ops.random(self.ops.batch * kv * slots).reshape([self.ops.batch, kv, slots, dim])
        };
        let (first, end) = ((self.ops.length - slots) as i64, self.ops.length as i64);
        let positions = Tensor::<1, Int>::arange(first..end, (self.ops.device, DType::I32));
        cache.extend(rows(), rows(), positions.unsqueeze::<2>().expand([self.ops.batch, slots]))?;
        Ok(cache)
    }

    /// The cache with a sketch, which has all tokens but the share that is kept exactly.
    fn sketched(&self, rebuild: bool) -> anyhow::Result<LayerCache> {
        let Heads { kv, dim, .. } = self.ops.heads;
        let (entries, limit) = self.parts();
        let mut cache = self.cache(limit)?;
        let pairs = self.ops.batch * kv;
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
        let mut sketch =
            Sketch::new(heads, self.ops.length, dim, &seeds, options, self.ops.device)?;
        sketch.assume(self.ops.length - limit)?;
        let all = Tensor::<1, Int>::arange(0..entries as i64, (self.ops.device, DType::I32));
        let all = all.unsqueeze_dim::<2>(0).expand([pairs, entries]);
        let rows = || self.ops.random(pairs * entries).reshape([pairs, entries, dim]);
        sketch.add(all, rows(), rows(), 1.0)?;
        sketch.put_into(&mut cache)?;
        let slots = cache.layout().total();
        // No step adds as much, so that nothing changes places.
        let scores = Tensor::full([slots], 1e9, (self.ops.device, DType::F32));
        cache.set_track(Sketch::SCORES, scores, 0.0)?;
        Ok(cache)
    }

    /// Entries of a bucket, and slots that are kept exactly.
    fn parts(&self) -> (usize, usize) {
        let budget = (self.ops.length as f64 * self.budget) as usize;
        let entries = ((budget as f64 * VAGUE) as usize / BUCKETS).max(1);
        (entries, budget - entries * BUCKETS)
    }

    /// Seconds that the launch takes longer where every range holds one slot more than its slack
    /// allows, which every call brings about anew. Nothing changes places.
    fn bulk(&self) -> anyhow::Result<f64> {
        let device: &Device = self.ops.device;
        let pairs = self.ops.batch * self.ops.heads.kv;
        let group = self.ops.heads.query / self.ops.heads.kv;
        let (entries, limit) = self.parts();
        let held = limit + SLACK + 1;
        let ints = |values: Vec<usize>, shape: [usize; 2]| {
            let values: Vec<i32> = values.into_iter().map(|value| value as i32).collect();
            let flat = Tensor::<1, Int>::from_data(values.as_slice(), (device, DType::I32));
            flat.reshape(shape)
        };
        let shape = [self.ops.batch, self.ops.heads.kv];
        let each = |of: &dyn Fn(usize) -> usize| ints((0..pairs).map(of).collect(), shape);
        let heads = (0..pairs).flat_map(|pair| {
            let first = pair * BUCKETS * entries;
            [first, entries, pair * self.ops.length, self.ops.length, limit, limit / 2]
        });
        let heads = ints(heads.collect(), [pairs, HEAD_FIELDS]);
        let seeds: Vec<[u32; 2]> = (0..pairs as u32).map(|pair| [1, pair]).collect();
        let hashes = SketchHashes::seeded(&seeds, BUCKETS, device);
        let entry = || self.ops.random(pairs * BUCKETS * entries).cast(DType::F32);
        let [mut sketch_keys, mut sketch_values] = [entry(), entry()];
        let [mut keys, mut values] = [self.ops.random(pairs * held), self.ops.random(pairs * held)];
        let first = self.ops.length - held;
        let positions =
            ints((0..pairs * held).map(|slot| first + slot % held).collect(), [1, pairs * held]);
        let positions = positions.flatten::<1>(0, 1);
        let (slots, tokens) = (pairs * held, pairs * self.ops.length);
        let random = |count: usize| {
            Tensor::<1>::random([count], Distribution::Uniform(1.0, 2.0), (device, DType::F32))
        };
        let scores = random(slots);
        let mut token_scores = Tensor::full([tokens], ABSENT, (device, DType::F32));
        let mut moved = ints(vec![0; 2 * pairs], [pairs, 2]);
        let lengths = each(&|_| held);
        let offsets = each(&|pair| pair * held);
        let newest = Tensor::<1, Int>::full(
            [self.ops.batch],
            self.ops.length as i32 - 1,
            (device, DType::I32),
        );
        let logits = StepLogits {
            slots: Some(random(slots * group).reshape([slots, group])),
            tokens: random(tokens * group).reshape([tokens, group]),
            log_sum_exp: Tensor::full(
                [self.ops.batch, self.ops.heads.query],
                9.0,
                (device, DType::F32),
            ),
        };
        let options = SketchUpdateOptions {
            slack: SLACK,
            replace_rate: f32::INFINITY,
            longest: self.ops.length,
        };
        let mut call = |evicts: bool| -> anyhow::Result<Tensor<1>> {
            // Whatever the call before has changed.
            let mut positions = positions.clone().add_scalar(0);
            let mut scores = scores.clone().mul_scalar(1.0);
            let less = if evicts { 0 } else { -1 };
            let mut ranges =
                SlotRanges { offsets: offsets.clone(), lengths: lengths.clone().add_scalar(less) };
            update_sketch(
                SketchPool {
                    keys: &mut sketch_keys,
                    values: &mut sketch_values,
                    heads: &heads,
                    most_entries: BUCKETS * entries,
                    hashes: &hashes,
                    signed_keys: true,
                },
                SlotPool {
                    keys: &mut keys,
                    values: &mut values,
                    positions: &mut positions,
                    log_weights: None,
                },
                &mut ranges,
                SketchScores { slots: &mut scores, tokens: &mut token_scores, moved: &mut moved },
                logits.clone(),
                newest.clone(),
                options,
            )?;
            Ok(scores)
        };
        let with = self.ops.clock.seconds(1, |_| call(true))?;
        let without = self.ops.clock.seconds(1, |_| call(false))?;
        Ok((with - without).max(0.0))
    }
}
