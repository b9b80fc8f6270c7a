//! Sketches.

use burn::backend::{DType, Flex, Shape};
use burn_flex::FlexTensor;

use super::buffers::{owned, rounded, rounding, slice, wide};
use crate::count_sketch::reference::HostSketch;
use crate::extension::{
    Revised, Revision, SketchAttended, SketchOps, SketchTensors, SketchTokens, SlotPools,
};
use crate::revise_sketch::reference::{Host, HostLogits};
use crate::sketch_attention::reference::Problem;

impl SketchOps for Flex {
    fn sketch_insert(
        sketch: SketchTensors<Self>,
        tokens: FlexTensor,
        keys: FlexTensor,
        values: FlexTensor,
        sign: f32,
    ) -> (FlexTensor, FlexTensor) {
        let tables = tables(&sketch);
        let host = host(&sketch, &tables);
        let [_, count] = dims(&tokens);
        let tokens = tokens.to_contiguous();
        let (keys, values) = (wide(&keys), wide(&values));
        let (mut to_keys, mut to_values) = (owned(sketch.keys), owned(sketch.values));
        // Summed up first, and added to the entries at once, which rounds them once.
        let [mut key_sums, mut value_sums] = [&to_keys, &to_values]
            .map(|entries| vec![0.0f32; entries.layout().shape().num_elements()]);
        for (at, token) in slice::<i32>(&tokens).iter().enumerate() {
            let range = at / count;
            let Some(token) = host.sketched(range, *token) else { continue };
            let row = at * host.head_dim..(at + 1) * host.head_dim;
            host.add(
                [&mut key_sums, &mut value_sums],
                [range, token],
                [&keys[row.clone()], &values[row]],
                sign,
            );
        }
        for (entries, sums) in [(&mut to_keys, key_sums), (&mut to_values, value_sums)] {
            entries
                .storage_mut::<f32>()
                .iter_mut()
                .zip(sums)
                .for_each(|(entry, sum)| *entry += sum);
        }
        (to_keys, to_values)
    }

    fn sketch_query(
        sketch: SketchTensors<Self>,
        tokens: FlexTensor,
        dtype: DType,
    ) -> (FlexTensor, FlexTensor) {
        let tables = tables(&sketch);
        let host = host(&sketch, &tables);
        let entries = [&sketch.keys, &sketch.values].map(wide);
        let [ranges, count] = dims(&tokens);
        let tokens = tokens.to_contiguous();
        let mut found = [Vec::new(), Vec::new()];
        for (at, token) in slice::<i32>(&tokens).iter().enumerate() {
            let range = at / count;
            let rows = match host.sketched(range, *token) {
                Some(token) => host.query([&entries[0], &entries[1]], range, token),
                None => [vec![0.0; host.head_dim], vec![0.0; host.head_dim]],
            };
            found.iter_mut().zip(rows).for_each(|(found, row)| found.extend(row));
        }
        let [keys, values] =
            found.map(|rows| rounded(rows, Shape::from([ranges, count, host.head_dim]), dtype));
        (keys, values)
    }

    fn sketch_attention(
        query: FlexTensor,
        keys: FlexTensor,
        values: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        tokens: SketchTokens<Self>,
        scale: f32,
        _longest: usize,
    ) -> SketchAttended<Self> {
        let sketch = tokens.sketch;
        let tables = tables(&sketch);
        let (count, [batch, heads, head_dim]) = (dims::<2>(&keys)[0], dims(&query));
        let pairs = offsets.layout().shape().num_elements();
        let group = batch * heads / pairs;
        let slots = [keys, values].map(|tensor| wide(&tensor));
        let entries = [&sketch.keys, &sketch.values].map(wide);
        let ranges = [offsets, lengths].map(|tensor| tensor.to_contiguous());
        let (scores, newest) = (wide(&tokens.scores), tokens.newest.to_contiguous());
        let solution = Problem {
            query: &wide(&query),
            slots: [&slots[0], &slots[1]],
            ranges: [slice(&ranges[0]), slice(&ranges[1])],
            sketch: host(&sketch, &tables),
            entries: [&entries[0], &entries[1]],
            scores: &scores,
            newest: slice(&newest),
            scale,
            round: rounding(query.dtype()),
        }
        .solve();
        let floats = |values, shape: Shape| rounded(values, shape, DType::F32);
        SketchAttended {
            output: rounded(solution.output, [batch, heads, head_dim], query.dtype()),
            log_sum_exp: floats(solution.log_sum_exp, Shape::from([batch, heads])),
            slot_logits: floats(solution.slot_logits, Shape::from([count, group])),
            token_logits: floats(solution.token_logits, Shape::from([scores.len(), group])),
        }
    }

    fn revise_sketch(revision: Revision<Self>) -> Revised<Self> {
        let Revision { sketch, pool, by_token, options, .. } = revision;
        let tables = tables(&sketch);
        let (shape, dtype) = (dims::<2>(&pool.keys), pool.keys.dtype());
        let (mut keys, mut values) = (wide(&pool.keys), wide(&pool.values));
        let [mut positions, mut lengths, mut moved] =
            [pool.positions, revision.lengths, revision.moved].map(owned);
        let [mut slot_scores, mut token_scores] =
            [revision.slot_scores, revision.token_scores].map(owned);
        let host = host(&sketch, &tables);
        let [mut sketch_keys, mut sketch_values] = [sketch.keys, sketch.values].map(owned);
        let [offsets, newest] =
            [revision.offsets, revision.newest].map(|ints| ints.to_contiguous());
        let [slot_logits, token_logits, log_sum_exp] =
            [revision.slot_logits, revision.token_logits, revision.log_sum_exp]
                .map(|tensor| tensor.to_contiguous());
        Host {
            sketch: host,
            entries: [sketch_keys.storage_mut::<f32>(), sketch_values.storage_mut::<f32>()],
            slots: [&mut keys, &mut values],
            positions: positions.storage_mut::<i32>(),
            offsets: slice(&offsets),
            lengths: lengths.storage_mut::<i32>(),
            slot_scores: slot_scores.storage_mut::<f32>(),
            token_scores: token_scores.storage_mut::<f32>(),
            moved: moved.storage_mut::<i32>(),
            round: rounding(dtype),
        }
        .revise(
            &HostLogits {
                slots: (!by_token).then(|| slice(&slot_logits)),
                tokens: slice(&token_logits),
                log_sum_exp: slice(&log_sum_exp),
            },
            slice(&newest),
            options,
        );
        let [heads, hashes] = tables;
        Revised {
            sketch: SketchTensors {
                keys: sketch_keys,
                values: sketch_values,
                heads,
                hashes,
                most_entries: sketch.most_entries,
                config: sketch.config,
            },
            pool: SlotPools {
                keys: rounded(keys, shape, dtype),
                values: rounded(values, shape, dtype),
                positions,
                log_weights: pool.log_weights,
                weighted: pool.weighted,
            },
            lengths,
            slot_scores,
            token_scores,
            moved,
        }
    }
}

fn dims<const D: usize>(tensor: &FlexTensor) -> [usize; D] {
    tensor.layout().shape().dims()
}

/// Heads and hashes, packed.
fn tables(sketch: &SketchTensors<Flex>) -> [FlexTensor; 2] {
    [&sketch.heads, &sketch.hashes].map(FlexTensor::to_contiguous)
}

fn host<'a>(sketch: &SketchTensors<Flex>, tables: &'a [FlexTensor; 2]) -> HostSketch<'a> {
    HostSketch {
        heads: slice(&tables[0]),
        hashes: slice(&tables[1]),
        config: sketch.config,
        head_dim: dims::<2>(&sketch.keys)[1],
    }
}
