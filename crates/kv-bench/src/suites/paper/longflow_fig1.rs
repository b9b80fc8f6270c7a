//! LongFlow, figure 1: a decode step's attention with an eviction behind it, LongFlow's and H2O's,
//! beside attention alone.

use std::sync::Arc;

use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use kv_core::{CacheOptions, DecodeAttentionOptions, HeadLayout, LayerCache, SlotLayout};
use kv_policies::{LayerContext, Policy, SCORE, Step, VALUE_NORMS, build};
use serde_json::json;

use super::SUITE;
use crate::bench::Bench;
use crate::progress::Progress;
use crate::record::{Case, FULL, metric};
use crate::suites::kernels::Clock;

/// Heads and sizes of one layer.
#[derive(Clone, Copy)]
struct Size {
    batch: usize,
    query_heads: usize,
    kv_heads: usize,
    tokens: usize,
    head_dim: usize,
}

/// Qwen3-8B at batch 128 and 3,200 tokens, as in the paper; small enough for a laptop.
const PAPER: Size = Size { batch: 128, query_heads: 32, kv_heads: 8, tokens: 3200, head_dim: 128 };
const QUICK: Size = Size { batch: 4, query_heads: 8, kv_heads: 2, tokens: 400, head_dim: 64 };
/// Results of the paper's figure, in µs, on an A100.
const PUBLISHED: [(&str, f64); 2] =
    [("A100, published: h2o", 47e3), ("A100, published: longflow", 8e3)];
const LAYER: LayerContext = LayerContext { index: 0, count: 1 };

/// Runs the figure.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut Bench) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let size = if quick { QUICK } else { PAPER };
    let (device, dtype) = (&bench.device.clone(), bench.dtype());
    let clock = Clock::new(device.clone());
    // On the CPU a step this small says nothing of memory.
    let copy = if bench.is_cpu() { None } else { Some(clock.copy_bandwidth()?) };
    let bytes = 2 * size.batch * size.kv_heads * size.tokens * size.head_dim * dtype.size();
    let case = Case {
        task: Some("longflow-fig1".into()),
        batch: Some(size.batch),
        length: Some(size.tokens),
        ..Case::default()
    };
    let mut record = |policy: &str, seconds: f64, ours: bool| {
        let setup = (policy, None);
        bench.record(SUITE, &case, setup, metric::TIME_US, seconds * 1e6, "us");
        if let Some(copy) = copy.filter(|_| ours) {
            let share = bytes as f64 / seconds / copy;
            bench.record(SUITE, &case, setup, metric::BANDWIDTH_FRACTION, share, "share");
        }
    };
    let mut progress = Progress::new(4, "longflow-fig1");
    let sets = Clock::sets(bytes).min(2);

    let pools = (0..sets).map(|_| cache(size, dtype, device, None));
    let pools = pools.collect::<anyhow::Result<Vec<_>>>()?;
    let query = random(device, dtype, [size.batch * size.query_heads, size.head_dim]).reshape([
        size.batch,
        size.query_heads,
        size.head_dim,
    ]);
    let seconds = clock.seconds(sets, |i| {
        Ok(pools[i].attend(query.clone(), DecodeAttentionOptions::default())?.output)
    })?;
    drop(pools);
    record(FULL, seconds, true);
    progress.step();
    for (label, config) in [
        ("longflow", json!({"policy": "longflow", "budget": size.tokens})),
        ("h2o", json!({"policy": "h2o", "budget": size.tokens})),
        ("vatp", json!({"policy": "vatp", "budget": size.tokens})),
    ] {
        let policy = build(&config)?;
        let caches = (0..sets).map(|_| cache(size, dtype, device, Some(&*policy)));
        let mut caches = caches.collect::<anyhow::Result<Vec<_>>>()?;
        let layout = Arc::new(HeadLayout {
            query_heads: size.query_heads,
            kv_heads: size.kv_heads,
            head_dim: size.head_dim,
            rope: None,
            norms: None,
        });
        let projected = random(device, dtype, [size.batch, layout.width()]);
        let position = Tensor::full([size.batch], size.tokens as i32, (device, DType::I32));
        let seconds = clock.seconds(sets, |i| {
            let (projected, layout) = (projected.clone(), layout.clone());
            let step = Step::projected(projected, layout, position.clone(), Arc::default());
            Ok(policy.step(LAYER, &mut caches[i], step)?)
        })?;
        record(label, seconds, true);
        progress.step();
    }
    progress.finish();
    if !quick {
        PUBLISHED.iter().for_each(|(label, us)| record(label, us / 1e6, false));
    }
    Ok(())
}

fn random(device: &Device, dtype: DType, shape: [usize; 2]) -> Tensor<2> {
    let normal = Distribution::Normal(0.0, 1.0);
    Tensor::<2>::random(shape, normal, (device, DType::F32)).cast(dtype)
}

/// A layer's cache at its limit.
fn cache(
    size: Size,
    dtype: DType,
    device: &Device,
    policy: Option<&dyn Policy>,
) -> anyhow::Result<LayerCache> {
    let Size { batch, kv_heads, tokens, head_dim, .. } = size;
    let pairs = batch * kv_heads;
    // A slot more than the limit, for steps that append before they evict.
    let layout = SlotLayout::new(kv_heads, vec![tokens + 1; pairs]);
    let mut cache = LayerCache::new(layout, head_dim, CacheOptions::new(device, dtype));
    let rows = || {
        random(device, dtype, [pairs * tokens, head_dim])
            .reshape([batch, kv_heads, tokens, head_dim])
    };
    let positions = Tensor::<1, Int>::arange(0..tokens as i64, (device, DType::I32));
    cache.extend(rows(), rows(), positions.unsqueeze::<2>().expand([batch, tokens]))?;
    let Some(policy) = policy else { return Ok(cache) };
    cache.set_limits(vec![tokens; pairs])?;
    if policy.name() == "longflow" {
        cache.hold_at_limits()?;
    } else {
        let slots = cache.layout().total();
        cache.set_track(SCORE, Tensor::zeros([slots], (device, DType::F32)), 0.0)?;
        if policy.name() == "vatp" {
            cache.set_value_norms(VALUE_NORMS)?;
        }
    }
    Ok(cache)
}
