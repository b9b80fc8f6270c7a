//! What single policies add to a decode step: the choice of an eviction, merges, sketches, parts of a cache.

use burn::tensor::{DType, Tensor};
use criterion::Criterion;
use kv_kernels::{
    AverageWeights, DecodeAttentionOptions, EvictionOptions, GUARD, GroupReduction, HEAD_FIELDS,
    HeldSlots, IndexSets, KeyRule, MergeOptions, MergingSlots, NearestOptions, PageSpan,
    RetrieveOptions, ScoreReduction, SetRule, Share, SimilarityReduction, SketchHashes, SketchPool,
    SketchSource, SketchedTokens, SlotLists, SlotView, add_probabilities, average_scores,
    decode_attention, evicting_attention, log_norms, merge_nearest, nearest_slots, page_bounds,
    page_rows, retrieving_attention, sketch_attention, sketch_insert, sketch_query,
};

use crate::inputs::{BATCH, CAPACITY, GROUP, HEAD_DIM, Inputs, KV_HEADS, bench};

const PAIRS: usize = BATCH * KV_HEADS;
const SLOTS: usize = PAIRS * CAPACITY;
/// Slots that a list names, and entries of a sketch's bucket.
const FEW: usize = CAPACITY / 8;
const BUCKETS: usize = 3;
const PAGE: usize = 16;

/// Weights, lists, scores, and the slot to overwrite.
pub(crate) fn attention(criterion: &mut Criterion, name: &str, inputs: &mut Inputs) {
    let device = inputs.device.clone();
    let query = inputs.floats([BATCH, KV_HEADS * GROUP, HEAD_DIM]);
    let (keys, values) = (inputs.floats([SLOTS, HEAD_DIM]), inputs.floats([SLOTS, HEAD_DIM]));
    let ranges = inputs.ranges(CAPACITY);
    let weights = inputs.floats([SLOTS]);
    let list = SlotView::List {
        slots: inputs.ints([BATCH, KV_HEADS, FEW], |i| i * (CAPACITY / FEW)),
        counts: inputs.ints([BATCH, KV_HEADS], |_| FEW),
    };
    let plain = DecodeAttentionOptions::default;
    for (op, weights, options) in [
        ("decode_attention_weighted", Some(weights), plain()),
        ("decode_attention_list", None, DecodeAttentionOptions { view: list, ..plain() }),
        (
            "decode_attention_probabilities",
            None,
            DecodeAttentionOptions { probabilities: true, ..plain() },
        ),
    ] {
        bench(criterion, op, name, &device, || {
            let (query, keys, values) = (query.clone(), keys.clone(), values.clone());
            decode_attention(query, keys, values, weights.clone(), &ranges, options.clone())
                .unwrap();
        });
    }
    let norms = log_norms(values.clone());
    let mut places = inputs.ints([BATCH, KV_HEADS], |_| CAPACITY - 1);
    bench(criterion, "evicting_attention", name, &device, || {
        let held = HeldSlots {
            log_norms: norms.clone(),
            limits: ranges.lengths.clone(),
            places: &mut places,
        };
        let pool = [keys.clone(), values.clone()];
        let options = EvictionOptions::default();
        evicting_attention(query.clone(), pool, None, &ranges, held, options).unwrap();
    });
    let (logits, sums) = (inputs.floats([SLOTS, GROUP]), inputs.floats([BATCH, KV_HEADS * GROUP]));
    let mut track = inputs.floats([SLOTS]);
    bench(criterion, "add_probabilities", name, &device, || {
        let (logits, sums) = (logits.clone(), sums.clone());
        add_probabilities(&mut track, logits, sums, &ranges, GroupReduction::Sum).unwrap();
    });
}

/// Averages of scores, the search for the most similar key, and a step's merge.
pub(crate) fn merging(criterion: &mut Criterion, name: &str, inputs: &mut Inputs) {
    let device = inputs.device.clone();
    let logits = inputs.floats([SLOTS, GROUP]);
    let mut tracks = [0; 5].map(|_| inputs.floats([SLOTS]));
    let [log_weights, log_scores, log_samples, votes, votes_high] = &mut tracks;
    bench(criterion, "average_scores", name, &device, || {
        let weights = AverageWeights { new: 0.1, old: 0.9 };
        average_scores(log_scores, log_samples, logits.clone(), None, weights).unwrap();
    });
    let (mut keys, mut values) =
        (inputs.floats([SLOTS, HEAD_DIM]), inputs.floats([SLOTS, HEAD_DIM]));
    let lists = |first: usize, count: usize| SlotLists {
        slots: inputs.ints([PAIRS, count], |i| i / count * CAPACITY + first + i % count),
        counts: inputs.ints([PAIRS], |_| count),
    };
    let (of, among) = (lists(0, CAPACITY - FEW), lists(CAPACITY - FEW, FEW));
    bench(criterion, "nearest_slots", name, &device, || {
        nearest_slots(keys.clone(), &of, &among, false).unwrap();
    });
    let ranges = inputs.ranges(CAPACITY);
    let victims = inputs.ints([BATCH, KV_HEADS], |pair| pair * CAPACITY + 7);
    let goes = inputs.ints([BATCH, KV_HEADS], |_| 1);
    let options = NearestOptions {
        threshold: 0.0,
        epsilon: 1e-6,
        queries: None,
        average: None,
        merge: MergeOptions { rule: KeyRule::Paper, guard: GUARD, scale: None, queries: None },
    };
    bench(criterion, "merge_nearest", name, &device, || {
        let slots = MergingSlots {
            keys: &mut keys,
            values: &mut values,
            log_weights,
            log_scores,
            log_samples,
            votes,
            votes_high,
        };
        merge_nearest(slots, &ranges, &victims, &goes, &options).unwrap();
    });
}

/// Tokens into a sketch, out of it, and attention to it.
pub(crate) fn sketches(criterion: &mut Criterion, name: &str, inputs: &mut Inputs) {
    let device = inputs.device.clone();
    let most_entries = BUCKETS * FEW;
    let mut rows = || inputs.floats([PAIRS * most_entries, HEAD_DIM]);
    let (mut keys, mut values) = (rows(), rows());
    let heads = inputs.ints([PAIRS, HEAD_FIELDS], |i| match i % HEAD_FIELDS {
        0 => i / HEAD_FIELDS * most_entries,
        1 => FEW,
        _ => 0,
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
        let tokens = SketchedTokens { sketch, scores: &scores, newest: &newest, longest: CAPACITY };
        sketch_attention(query.clone(), pool.clone(), &ranges, CAPACITY, tokens).unwrap();
    });
}

/// Bounds of pages, and sets that are retrieved and attended to.
pub(crate) fn reading(criterion: &mut Criterion, name: &str, inputs: &mut Inputs) {
    let device = inputs.device.clone();
    let (keys, values) = (inputs.floats([SLOTS, HEAD_DIM]), inputs.floats([SLOTS, HEAD_DIM]));
    let ranges = inputs.ranges(CAPACITY);
    let mut bounds = inputs.floats([page_rows(SLOTS, PAIRS, PAGE), HEAD_DIM]);
    bench(criterion, "page_bounds", name, &device, || {
        let span = PageSpan::All { longest: CAPACITY };
        page_bounds(&keys, &ranges, &mut bounds, PAGE, span).unwrap();
    });
    let query = inputs.floats([BATCH, KV_HEADS * GROUP, HEAD_DIM]);
    let vectors = query.clone().reshape([PAIRS, GROUP, HEAD_DIM]);
    // No set is ever shared: every step retrieves.
    let rule =
        SetRule { sinks: 4, locals: 8, top: FEW, dilated: 0.3, threshold: 2.0, wanted: None };
    let mut sets = IndexSets::new(&[rule; PAIRS], 8, rule.width(1), GROUP, HEAD_DIM, &device);
    let newest = inputs.ints([BATCH], |_| CAPACITY - 1);
    bench(criterion, "retrieving_attention", name, &device, || {
        let options = RetrieveOptions {
            scale: None,
            radius: 1,
            block: 8,
            reduction: ScoreReduction::Sum,
            similarity: SimilarityReduction::Mean,
            hidden: Share::default(),
            certified: false,
            longest: Some(CAPACITY),
        };
        let pool = [keys.clone(), values.clone()];
        let (query, vectors, newest) = (query.clone(), vectors.clone(), newest.clone());
        retrieving_attention(query, vectors, pool, &ranges, newest, &mut sets, options).unwrap();
    });
}
