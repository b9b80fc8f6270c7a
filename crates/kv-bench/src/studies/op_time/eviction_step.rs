//! A decode step's attention with an eviction behind it, of policies that evict at every step,
//! beside attention alone (LongFlow, figure 1).

use std::sync::Arc;

use burn::tensor::{DType, Int, Tensor};
use kv_core::{CacheOptions, LayerCache, SlotLayout};
use kv_kernels::{DecodeAttentionOptions, HeadLayout};
use kv_policies::{LayerContext, Policy, Step, StepUpdate, TokenSlot, WriteSlots, build};
use serde_json::json;

use super::{Heads, OpBench, Sink, Timed};
use crate::options::Common;
use crate::record::FULL;
use crate::suites::kernels::Clock;

const LAYER: LayerContext = LayerContext { index: 0, count: 1 };

/// Times attention alone, and steps of policies whose caches are at their limit.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn time(bench: &OpBench<'_>, _: &Common, found: Sink<'_>) -> anyhow::Result<()> {
    let OpBench { device, clock, heads, length, batch, .. } = *bench;
    let Heads { query: query_heads, kv: kv_heads, dim: head_dim, .. } = heads;
    let bytes = bench.cache_bytes();
    let sets = Clock::sets(bytes).min(2);
    let mut timed = |policy: &str, seconds: f64| {
        let bytes = Some(bytes as f64);
        found(Timed { bytes, ..Timed::of(policy.into(), None, seconds) });
    };
    let pools = (0..sets).map(|_| cache(bench, None)).collect::<anyhow::Result<Vec<_>>>()?;
    let query = bench.random(batch * query_heads).reshape([batch, query_heads, head_dim]);
    let seconds = clock.seconds(sets, |i| {
        Ok(pools[i].attend(query.clone(), DecodeAttentionOptions::default())?.output)
    })?;
    drop(pools);
    timed(FULL, seconds);
    for name in ["longflow", "h2o", "vatp"] {
        let policy = build(&json!({"policy": name, "budget": length}))?;
        let caches = (0..sets).map(|_| cache(bench, Some(&*policy)));
        let mut caches = caches.collect::<anyhow::Result<Vec<_>>>()?;
        let layout =
            Arc::new(HeadLayout { query_heads, kv_heads, head_dim, rope: None, norms: None });
        let projected = bench.random_of([batch, layout.width()]);
        let position = Tensor::full([batch], length as i32, (device, DType::I32));
        let seconds = clock.seconds(sets, |i| {
            let (projected, layout) = (projected.clone(), layout.clone());
            let step = Step::projected(projected, layout, position.clone(), Arc::default());
            Ok(policy.step(LAYER, &mut caches[i], step)?)
        })?;
        timed(name, seconds);
    }
    Ok(())
}

/// A layer's cache at its limit.
fn cache(bench: &OpBench<'_>, policy: Option<&dyn Policy>) -> anyhow::Result<LayerCache> {
    let OpBench { device, dtype, batch, length: tokens, .. } = *bench;
    let Heads { kv, dim, .. } = bench.heads;
    let pairs = batch * kv;
    // A slot more than the limit, for steps that append before they evict.
    let layout = SlotLayout::new(kv, vec![tokens + 1; pairs]);
    let mut cache = LayerCache::new(layout, dim, CacheOptions::new(device, dtype));
    let rows = || bench.random(pairs * tokens).reshape([batch, kv, tokens, dim]);
    let positions = Tensor::<1, Int>::arange(0..tokens as i64, (device, DType::I32));
    cache.extend(rows(), rows(), positions.unsqueeze::<2>().expand([batch, tokens]))?;
    let Some(policy) = policy else { return Ok(cache) };
    cache.set_limits(vec![tokens; pairs])?;
    let plan = policy.plan(LAYER, &cache)?;
    if plan.slot == TokenSlot::Overwrite {
        WriteSlots::enable(&mut cache)?;
    }
    let slots = cache.layout().total();
    let zeros = || Tensor::zeros([slots], (device, DType::F32));
    match plan.update {
        Some(StepUpdate::AddProbabilities { sums, .. }) => cache.set_track(sums, zeros(), 0.0)?,
        Some(StepUpdate::AddContributions { sums, norms, .. }) => {
            cache.set_track(sums, zeros(), 0.0)?;
            cache.set_value_norms(norms)?;
        }
        Some(StepUpdate::Own(_)) | None => {}
    }
    Ok(cache)
}
