//! Scoring a cache's slots as if they were a prompt.

use burn::tensor::{DType, Tensor};
use kv_core::LayerCache;

use crate::{LayerContext, Observation, QUERIES, RAW_QUERIES, Result, Scorer, Step};

/// Appends a step's queries to a state of the last `count` ones, `[B, Hq, count * D]`.
pub(crate) fn remember(cache: &mut LayerCache, name: &str, query: &Tensor<3>, count: usize) {
    let query = query.clone().cast(DType::F32);
    let head_dim = query.dims()[2];
    let all = match cache.state(name) {
        Some(seen) => Tensor::cat(vec![seen.clone(), query], 2),
        None => query,
    };
    let width = all.dims()[2];
    let most = (count * head_dim).min(width);
    cache.set_state(name, all.narrow(2, width - most, most));
}

/// Scores of all slots, `[S]`: each (sequence, head) by itself, since they may hold different
/// numbers of slots. Slots beyond a head's length get −∞. `group` query heads share a key-value head.
pub(crate) fn rescore<S: Scorer>(
    scorer: &S,
    layer: LayerContext,
    cache: &LayerCache,
    step: &Step,
    group: usize,
) -> Result<Tensor<1>> {
    let layout = cache.layout();
    let device = &cache.options().device;
    let (kv_heads, head_dim) = (layout.kv_heads(), cache.head_dim());
    let seen = kv_core::read_i32("position", step.position.clone())?;
    let mut scores = Vec::new();
    for pair in 0..layout.pairs() {
        let (row, head) = (pair / kv_heads, pair % kv_heads);
        let live = layout.live(pair);
        let count = live.len();
        let free = layout.capacities()[pair] - count;
        if count > 0 {
            let rows =
                |pool: &Tensor<2>| pool.clone().narrow(0, live.start, count).unsqueeze::<4>();
            let (keys, values) = (rows(cache.keys()), rows(cache.values()));
            let positions = cache.positions().clone().narrow(0, live.start, count);
            let queries = |name: &str| {
                cache.state(name).map(|state| {
                    let own = state.clone().narrow(0, row, 1).narrow(1, head * group, group);
                    let held = own.dims()[2] / head_dim;
                    own.reshape([1, group, held, head_dim])
                })
            };
            let observation = Observation {
                layer,
                keys: &keys,
                values: &values,
                positions: &positions.unsqueeze(),
                prompt_tokens: seen[row] as usize + 1,
                window: queries(QUERIES),
                column_sums: None,
                raw_queries: queries(RAW_QUERIES),
                decoding: true,
                inverse_frequencies: &step.inverse_frequencies,
                seeds: &[],
            };
            scores.push(scorer.prefill(&observation, count)?.reshape([count]));
        }
        if free > 0 {
            scores.push(Tensor::full([free], f32::NEG_INFINITY, (device, DType::F32)));
        }
    }
    Ok(Tensor::cat(scores, 0))
}
