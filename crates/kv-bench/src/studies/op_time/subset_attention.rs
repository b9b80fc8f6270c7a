//! A step's attention of policies that read a part of the tokens they keep, choices included, over
//! caches that are kept whole (PrHS, table 4).

use burn::tensor::{DType, Distribution, Int, Tensor};
use kv_core::{CacheOptions, LayerCache};
use kv_kernels::DecodeAttentionOptions;
use kv_policies::{CisIndex, LayerContext, Observation, Policy, Reads, Step};

use super::{Heads, OpBench, Sink, Timed};
use crate::policy_runs::PolicyRun;

/// Steps of the longest block.
const BLOCK: usize = 16;
/// Share of a step's heads that retrieve within a block: the paper's 8.7 % of all at 16 steps a
/// block.
const JUMPING: f64 = 0.026;
/// HShare's steps choose at every second token.
const PERIOD: usize = 2;
/// Bytes that a rotation reads, at least: beyond any cache.
const ROTATED: usize = 200 << 20;

/// One case.
struct Decoding<'a, 'b>(&'a OpBench<'b>);

/// Times the steps of policies.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn time(
    ops: &OpBench<'_>,
    policy_runs: &[PolicyRun],
    found: Sink<'_>,
) -> anyhow::Result<()> {
    for policy_run in policy_runs {
        found(Decoding(ops).time(policy_run)?);
    }
    Ok(())
}

impl Decoding<'_, '_> {
    /// Times one policy's steps.
    fn time(&self, policy_run: &PolicyRun) -> anyhow::Result<Timed> {
        let policy = &*policy_run.policy;
        // The last layer, where windows are narrowest.
        let layer = LayerContext { index: 31, count: 32 };
        let Heads { kv, dim, .. } = self.0.heads;
        let token = 2 * dim * self.0.dtype.size();
        let all = self.0.cache_bytes();
        let read = if policy_run.budget.is_some() { all / 8 } else { all };
        let sets = ROTATED.div_ceil(read).clamp(1, 24).next_multiple_of(PERIOD);
        // Two of the longest blocks: a cycle must not come back to the sets of its own.
        let block = 2 * BLOCK;
        // Nothing is appended, so that a cache's steps would all choose, or none, where every
        // second one does.
        let caches = (0..sets).map(|i| self.cache(policy, layer, self.0.length - i % PERIOD));
        let mut caches = caches.collect::<anyhow::Result<Vec<_>>>()?;
        let steps = (0..block).map(|step| self.step(step)).collect::<anyhow::Result<Vec<_>>>()?;
        let evicts = policy.capabilities().changes_decode
            && caches[0].limits().is_some()
            && caches[0].at_limits();
        let run = |cache: &mut LayerCache,
                   (step, query): &(Step, Tensor<3>)|
         -> anyhow::Result<Tensor<3>> {
            Ok(if evicts {
                // The attention alone, with the logits that an eviction needs.
                let logits = DecodeAttentionOptions {
                    logits: true,
                    log_sum_exp: true,
                    ..Default::default()
                };
                cache.attend(query.clone(), logits)?.output
            } else {
                policy.plan(layer, cache)?.attend(layer, cache, query.clone(), step)?
            })
        };
        // A cache's first steps allocate tensors that must be there before steps are recorded.
        for step in &steps[..2] {
            caches.iter_mut().try_for_each(|cache| run(cache, step).map(drop))?;
        }
        let seconds = self
            .0
            .clock
            .cycles(sets * block, |i| run(&mut caches[i % sets], &steps[i / sets % block]))?;
        let reads = caches.iter().map(|cache| Ok(Reads::of(cache)?.unwrap_or_default()));
        let reads: Reads = reads.sum::<anyhow::Result<Reads>>()?;
        let ranges = (self.0.batch * kv) as f64;
        let bytes = match reads.steps {
            0 if policy_run.budget.is_none() => Some(all as f64),
            0 => None,
            // Other lists are chosen by parts of keys or pages' bounds, which are not counted.
            _ if caches[0].policy_state::<CisIndex>().is_none() => None,
            // Listed tokens with their positions, and all keys for heads that retrieve.
            _ => {
                let listed = reads.slots_each() * (token + size_of::<i32>()) as f64;
                let keys = reads.ratio() * (self.0.length * token / 2) as f64;
                Some(ranges * (listed + keys))
            }
        };
        let (policy, budget) = (policy_run.label.clone(), policy_run.budget);
        Ok(Timed { bytes, reads, ..Timed::of(policy, budget, seconds) })
    }

    /// A cache of so many tokens, prepared for decode steps.
    fn cache(
        &self,
        policy: &dyn Policy,
        layer: LayerContext,
        length: usize,
    ) -> anyhow::Result<LayerCache> {
        let Heads { query, kv, dim, .. } = self.0.heads;
        let rows = || self.rows(kv).narrow(2, 0, length);
        let (keys, values) = (rows(), rows());
        let positions = Tensor::<1, Int>::arange(0..length as i64, (self.0.device, DType::I32));
        let positions = positions.unsqueeze::<2>().expand([self.0.batch, length]);
        let needs = policy.needs();
        let window = needs.window.clamp(1, length);
        let queries = self.0.random(self.0.batch * query * window);
        let sums = || {
            Tensor::<3>::random(
                [self.0.batch, query, length],
                Distribution::Default,
                (self.0.device, DType::F32),
            )
        };
        let seeds = vec![1; self.0.batch];
        let observation = Observation::new(&keys, &values, &positions)
            .of_layer(layer)
            .with_window(queries.reshape([self.0.batch, query, window, dim]))
            .with_column_sums(needs.column_sums.then(sums))
            .with_seeds(&seeds);
        let options = CacheOptions::new(self.0.device, self.0.dtype);
        // A layer by itself: lists that HShare's layers take from each other are not part of it.
        Ok(policy.prefill(&observation, 1, options)?)
    }

    /// The `index`-th step: most heads' queries drift, some jump.
    fn step(&self, index: usize) -> anyhow::Result<(Step, Tensor<3>)> {
        let Heads { query, kv, dim, .. } = self.0.heads;
        // A block begins with the first step.
        let base = self.0.length.next_multiple_of(2 * BLOCK);
        let position =
            Tensor::full([self.0.batch], (base + index) as i32, (self.0.device, DType::I32));
        let jumps: Vec<f32> = (0..self.0.batch * kv)
            .flat_map(|pair| {
                let draw = (pair * 7_919 + index * 104_729) % 1_000;
                let jumps = (draw as f64) < JUMPING * 1_000.0;
                vec![f32::from(u8::from(jumps)); query / kv]
            })
            .collect();
        let jumps = Tensor::<1>::from_data(jumps.as_slice(), (self.0.device, DType::F32));
        let jumps = jumps.reshape([self.0.batch, query, 1]);
        let shape = [self.0.batch, query, dim];
        let drawn = || self.0.random(self.0.batch * query).cast(DType::F32).reshape(shape);
        self.0.device.seed(17);
        let base = drawn();
        self.0.device.seed(100 + index as u64);
        let drift = base.clone() + drawn().mul_scalar(0.3);
        let queries = (drift.clone() + (drawn() - drift) * jumps).cast(self.0.dtype);
        let rows =
            |heads: usize| self.0.random(self.0.batch * heads).reshape([self.0.batch, heads, dim]);
        Ok((Step::new(queries.clone(), rows(kv), rows(kv), position), queries))
    }

    /// Keys or values `[B, H, T, D]`: neighbours are alike, as in real prompts.
    fn rows(&self, heads: usize) -> Tensor<4> {
        let (length, dim) = (self.0.length, self.0.heads.dim);
        let all = self.0.random(self.0.batch * heads * (length + 2));
        let all = all.reshape([self.0.batch, heads, length + 2, dim]);
        let part = |from: usize| all.clone().narrow(2, from, length);
        (part(0) + part(1) + part(2)).mul_scalar(3f32.sqrt().recip())
    }
}
