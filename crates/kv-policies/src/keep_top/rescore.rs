//! Scoring a cache's slots as if they were a prompt.

use burn::tensor::{DType, Tensor};
use kv_core::LayerCache;

use crate::policy::state_tensors::state;
use crate::{LayerContext, Observation, QUERIES, RAW_QUERIES, Result, Scorer, Step};

/// The state of the last `count` queries, `[B, Hq, count * D]`, from a prompt's last queries
/// `[B, Hq, N, D]`. Zeros stand before the queries of a shorter prompt, so that sequences of all
/// lengths can be joined.
pub(crate) fn last_of(queries: Tensor<4>, count: usize) -> Tensor<3> {
    let [batch, heads, given, head_dim] = queries.dims();
    // A copy: a view would keep the whole prompt's queries alive.
    let given_queries = queries.cast(DType::F32).mul_scalar(1.0);
    let given_queries = given_queries.reshape([batch, heads, given * head_dim]);
    if given == count {
        return given_queries;
    }
    let missing = [batch, heads, (count - given) * head_dim];
    let missing = Tensor::zeros(missing, (&given_queries.device(), DType::F32));
    Tensor::cat(vec![missing, given_queries], 2)
}

/// Adds a step's queries to the state of the last queries, in place of the oldest.
pub(crate) fn remember(
    policy: &'static str,
    cache: &mut LayerCache,
    name: &'static str,
    query: &Tensor<3>,
) -> Result<()> {
    let seen = state(policy, cache, name)?;
    let [_, _, width] = seen.dims();
    let query = query.clone().cast(DType::F32);
    let [_, _, head_dim] = query.dims();
    let last = match width - head_dim {
        0 => query,
        others => Tensor::cat(vec![seen.narrow(2, head_dim, others), query], 2),
    };
    cache.assign_state(name, last)?;
    Ok(())
}

/// The most slots whose scores are computed together, unless a head alone has more: a scorer's
/// temporaries are several times the size of the keys.
const TOGETHER: usize = 1 << 16;

/// Scores of all slots, `[S]`: of each head range by itself, since their lengths may differ. Slots
/// beyond a head's length get −∞. `group` query heads share a key-value head.
///
/// Neighbouring head ranges of equal length are scored together, each as a sequence of one head.
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
    // Head ranges that are scored together agree in their length, capacity and tokens seen.
    let common = |range: usize| {
        (layout.live(range).len(), layout.capacities()[range], seen[range / kv_heads])
    };
    let mut scores = Vec::new();
    let mut first = 0;
    while first < layout.head_ranges() {
        let (count, capacity, last_seen) = common(first);
        let most = (TOGETHER / capacity.max(1)).max(1);
        let alike =
            (first..layout.head_ranges()).take_while(|&range| common(range) == common(first));
        let taken = alike.take(most).count();
        let mut own = Vec::new();
        if count > 0 {
            let start = layout.live(first).start;
            let rows = |pool: &Tensor<2>| {
                let all = pool.clone().narrow(0, start, taken * capacity);
                let all = all.reshape([taken, 1, capacity, head_dim]);
                if count < capacity { all.narrow(2, 0, count) } else { all }
            };
            let (keys, values) = (rows(cache.keys()), rows(cache.values()));
            let positions = cache.positions().clone().narrow(0, start, taken * capacity);
            let positions = positions.reshape([taken, capacity]).narrow(1, 0, count);
            let queries = |name: &str| {
                cache.state(name).map(|state| {
                    let [batch, _, width] = state.dims();
                    let most = width / head_dim;
                    let all = state.clone().reshape([batch * kv_heads, group, most, head_dim]);
                    // Every token so far had a query.
                    let queries = most.min(last_seen as usize + 1);
                    all.narrow(0, first, taken).narrow(2, most - queries, queries)
                })
            };
            let observation = Observation::new(&keys, &values, &positions)
                .of_layer(layer)
                .of_prompt(last_seen as usize + 1)
                .with_window(queries(QUERIES))
                .with_raw_queries(queries(RAW_QUERIES))
                .with_frequencies(&step.inverse_frequencies)
                .during_decode();
            own.push(scorer.prefill(&observation, count)?.reshape([taken, count]));
        }
        if count < capacity {
            let free = [taken, capacity - count];
            own.push(Tensor::full(free, f32::NEG_INFINITY, (device, DType::F32)));
        }
        if capacity > 0 {
            scores.push(Tensor::cat(own, 1).reshape([taken * capacity]));
        }
        first += taken;
    }
    Ok(Tensor::cat(scores, 0))
}
