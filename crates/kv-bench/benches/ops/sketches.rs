//! Count-sketches and archives.

use burn::tensor::{DType, Tensor};
use criterion::Criterion;
use kv_kernels::{
    ArchivePool, ArchivedAttentionOptions, AttendedSlots, HEAD_FIELDS, SignatureScoresOptions,
    SignatureStrategy, SketchHashes, SketchPool, SketchScores, SketchSource, SketchStrategy,
    SketchUpdateOptions, SketchedTokens, SlotPool, StepLogits, archive_slots, archived_attention,
    signature_scores, sketch_attention, sketch_insert, sketch_query, update_sketch,
};

use crate::inputs::{BATCH, CAPACITY, FEW, GROUP, HEAD_DIM, Inputs, KV_HEADS, PAIRS, SLOTS, bench};

const BUCKETS: usize = 3;

/// Tokens into a sketch, out of it, and attention to it.
pub(crate) fn sketches(criterion: &mut Criterion, name: &str, inputs: &mut Inputs) {
    let device = inputs.device.clone();
    let most_entries = BUCKETS * FEW;
    let mut rows = || inputs.floats([PAIRS * most_entries, HEAD_DIM]);
    let (mut keys, mut values) = (rows(), rows());
    let heads = inputs.ints([PAIRS, HEAD_FIELDS], |i| match i % HEAD_FIELDS {
        0 => i / HEAD_FIELDS * most_entries,
        2 => i / HEAD_FIELDS * CAPACITY,
        3 => CAPACITY,
        // Entries of a bucket, and slots that are kept exactly, of which half are recent.
        5 => FEW / 2,
        _ => FEW,
    });
    let seeds: Vec<[u32; 2]> = (0..PAIRS as u32).map(|pair| [pair, 1]).collect();
    let hashes = SketchHashes::seeded(&seeds, BUCKETS, &device);
    let tokens = inputs.ints([PAIRS, FEW], |i| i % FEW);
    let (new_keys, new_values) =
        (inputs.floats([PAIRS, FEW, HEAD_DIM]), inputs.floats([PAIRS, FEW, HEAD_DIM]));
    bench(criterion, "sketch_insert", name, &device, || {
        let pool = SketchPool {
            keys: &mut keys,
            values: &mut values,
            heads: &heads,
            most_entries,
            hashes: &hashes,
            signed_keys: false,
        };
        let (keys, values) = (new_keys.clone(), new_values.clone());
        sketch_insert(pool, tokens.clone(), keys, values, 1.0).unwrap();
    });
    let sketch = SketchSource {
        keys: &keys,
        values: &values,
        heads: &heads,
        most_entries,
        hashes: &hashes,
        signed_keys: false,
    };
    bench(criterion, "sketch_query", name, &device, || {
        sketch_query(sketch, tokens.clone(), DType::F32).unwrap();
    });
    let query = inputs.floats([BATCH, KV_HEADS * GROUP, HEAD_DIM]);
    let pool = [inputs.floats([SLOTS, HEAD_DIM]), inputs.floats([SLOTS, HEAD_DIM])];
    let ranges = inputs.ranges(FEW);
    let scores = Tensor::<1>::ones([SLOTS], (&device, DType::F32));
    let newest = inputs.ints([BATCH], |_| CAPACITY - 1);
    bench(criterion, "sketch_attention", name, &device, || {
        let tokens = SketchedTokens {
            sketch,
            scores: &scores,
            newest: &newest,
            longest: CAPACITY,
            strategy: SketchStrategy::Auto,
        };
        sketch_attention(query.clone(), pool.clone(), &ranges, CAPACITY, tokens).unwrap();
    });
    let [mut slot_keys, mut slot_values] = pool;
    let mut positions = inputs.ints([SLOTS], |slot| slot % CAPACITY);
    let (mut slot_scores, mut token_scores) = (inputs.floats([SLOTS]), scores);
    let mut moved = inputs.ints([PAIRS, 2], |_| 0);
    let logits = StepLogits {
        slots: Some(inputs.floats([SLOTS, GROUP])),
        tokens: inputs.floats([SLOTS, GROUP]),
        log_sum_exp: inputs.floats([BATCH, KV_HEADS * GROUP]),
    };
    bench(criterion, "update_sketch", name, &device, || {
        let sketch = SketchPool {
            keys: &mut keys,
            values: &mut values,
            heads: &heads,
            most_entries,
            hashes: &hashes,
            signed_keys: false,
        };
        let pool = SlotPool {
            keys: &mut slot_keys,
            values: &mut slot_values,
            positions: &mut positions,
            log_weights: None,
        };
        let scores =
            SketchScores { slots: &mut slot_scores, tokens: &mut token_scores, moved: &mut moved };
        // Nothing moves.
        let options =
            SketchUpdateOptions { slack: CAPACITY, replace_rate: f32::INFINITY, longest: CAPACITY };
        let (logits, newest) = (logits.clone(), newest.clone());
        update_sketch(sketch, pool, &mut ranges.clone(), scores, logits, newest, options).unwrap();
    });
}

/// Slots into an archive, their scores, and attention to them.
pub(crate) fn archives(criterion: &mut Criterion, name: &str, inputs: &mut Inputs) {
    let device = inputs.device.clone();
    let [keys, values] = [(); 2].map(|()| inputs.floats([SLOTS, HEAD_DIM]));
    let blocks = CAPACITY / ArchivePool::BLOCK;
    let mut pool = ArchivePool::new(PAIRS * blocks, HEAD_DIM, keys.dtype(), true, &device);
    let from = inputs.ints([PAIRS, CAPACITY], |slot| slot);
    let to = inputs.ints([PAIRS], |pair| pair * blocks);
    bench(criterion, "archive_slots", name, &device, || {
        archive_slots(&mut pool, keys.clone(), values.clone(), from.clone(), to.clone()).unwrap();
    });
    let query = inputs.floats([BATCH, KV_HEADS * GROUP, HEAD_DIM]);
    let attended = AttendedSlots {
        output: inputs.floats([BATCH, KV_HEADS * GROUP, HEAD_DIM]),
        log_sum_exp: Tensor::zeros([BATCH, KV_HEADS * GROUP], (&device, DType::F32)),
    };
    let ranges = inputs.ranges(CAPACITY);
    bench(criterion, "signature_scores", name, &device, || {
        let sums = &attended.log_sum_exp;
        let options = SignatureScoresOptions {
            scale: None,
            longest: CAPACITY,
            wanted: FEW,
            strategy: SignatureStrategy::Auto,
        };
        signature_scores(&query, &pool, &ranges, sums, options).unwrap();
    });
    bench(criterion, "archived_attention", name, &device, || {
        let options = ArchivedAttentionOptions { scale: None, longest: CAPACITY, revived: FEW };
        archived_attention(query.clone(), &pool, &ranges, attended.clone(), options).unwrap();
    });
}
