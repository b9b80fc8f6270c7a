//! What single policies add to a decode step: the choice of an eviction, merges, sketches, parts of a cache.

use burn::tensor::{DType, Tensor};
use criterion::Criterion;
use kv_kernels::{
    AverageWeights, Choice, DecodeAttentionOptions, EvictionOptions, GUARD, GroupReduction,
    HEAD_FIELDS, HeldSlots, IndexSets, KeyRule, ListTable, MergeLists, MergeOptions, MergingSlots,
    NearestOptions, PageHeads, PageOptions, PageSpan, RetrieveOptions, ReviseOptions,
    RevisedScores, ScoreReduction, SetRule, Share, SimilarityReduction, SketchHashes, SketchPool,
    SketchSource, SketchedTokens, SlotLists, SlotPool, SlotView, SteerOptions, StepLogits,
    add_probabilities, average_scores, decode_attention, drop_slots, evicting_attention,
    keep_lists, label_scores, list_slots, log_norms, merge_nearest, merge_slots, nearest_slots,
    page_bounds, page_rows, page_scores, page_slots, reset_last, retrieve_slots,
    retrieving_attention, revise_sketch, sketch_attention, sketch_insert, sketch_query, steer_sets,
    top_slots, window_starts,
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
    bench(criterion, "reset_last", name, &device, || {
        reset_last(&mut [(&mut track, 0.0)], &ranges).unwrap();
    });
    let (mut keys, mut values) = (keys, values);
    let mut positions = inputs.ints([SLOTS], |slot| slot);
    let victims = inputs.ints([BATCH, KV_HEADS], |pair| pair * CAPACITY + 7);
    let goes = inputs.ints([BATCH, KV_HEADS], |_| 1);
    bench(criterion, "drop_slots", name, &device, || {
        // Ranges that are whole again.
        let mut ranges = ranges.clone();
        let pool = SlotPool {
            keys: &mut keys,
            values: &mut values,
            positions: &mut positions,
            log_weights: None,
        };
        drop_slots(pool, &mut [&mut track], &mut ranges, &victims, &goes).unwrap();
    });
    let newest = inputs.ints([BATCH], |_| CAPACITY);
    bench(criterion, "window_starts", name, &device, || {
        window_starts(&positions, &ranges, &newest, Share::new(0.3)).unwrap();
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
    let gone = CAPACITY - FEW;
    let merged = MergeLists {
        victims: of.clone(),
        targets: inputs.ints([PAIRS, gone], |i| i % FEW),
        victim_weights: inputs.floats([PAIRS, gone, 2]),
        kept: among.clone(),
        kept_weights: inputs.floats([PAIRS, FEW, 2]),
    };
    bench(criterion, "merge_slots", name, &device, || {
        let options = MergeOptions { rule: KeyRule::Mean, ..MergeOptions::default() };
        merge_slots(None, [&mut keys, &mut values], &merged, &options).unwrap();
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
        let tokens = SketchedTokens { sketch, scores: &scores, newest: &newest, longest: CAPACITY };
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
    bench(criterion, "revise_sketch", name, &device, || {
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
            RevisedScores { slots: &mut slot_scores, tokens: &mut token_scores, moved: &mut moved };
        // Nothing moves.
        let options =
            ReviseOptions { slack: CAPACITY, replace_rate: f32::INFINITY, longest: CAPACITY };
        let (logits, newest) = (logits.clone(), newest.clone());
        revise_sketch(sketch, pool, &mut ranges.clone(), scores, logits, newest, options).unwrap();
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
    let heads = KV_HEADS * GROUP;
    let budgets = inputs.floats([BATCH, heads, 3]).zeros_like().add_scalar(FEW as f64);
    let pages = CAPACITY / PAGE;
    let options = PageOptions { page: PAGE, heads: PageHeads::Query, always_last: true };
    bench(criterion, "page_scores", name, &device, || {
        page_scores(query.clone(), &bounds, &ranges, &budgets, pages, options).unwrap();
    });
    let chosen = inputs.ints([BATCH * heads, 4], |i| i % 4);
    let found = inputs.ints([BATCH * heads], |_| 4);
    bench(criterion, "page_slots", name, &device, || {
        page_slots(chosen.clone(), found.clone(), &ranges, PAGE, true).unwrap();
    });
    let channels = inputs.ints([BATCH, heads, 8], |i| i % 8).float();
    let scored = || {
        let query = query.clone();
        label_scores(query, &keys, &channels, &budgets, &ranges, CAPACITY, None).unwrap()
    };
    bench(criterion, "label_scores", name, &device, || drop(scored()));
    let scored = scored();
    let wanted = scored.wanted.clone();
    let choice = Choice::Top(scored.wanted);
    let chosen = top_slots(scored.scores, Some(scored.candidates), choice, FEW).unwrap();
    let mut lists = inputs.floats([BATCH, heads, 3 + FEW]).zeros_like().sub_scalar(1.0);
    bench(criterion, "keep_lists", name, &device, || {
        keep_lists(&mut lists, &chosen, &wanted, &budgets, &ranges, None).unwrap();
    });
    let sources = inputs.ints([BATCH, heads, 1], |i| i % heads).float();
    bench(criterion, "list_slots", name, &device, || {
        let table = ListTable::Own(&lists);
        list_slots(table, &sources, &budgets, &ranges, 3 * FEW).unwrap();
    });
    let vectors = query.clone().reshape([PAIRS, GROUP, HEAD_DIM]);
    // No set is ever shared: every step retrieves.
    let rule =
        SetRule { sinks: 4, locals: 8, top: FEW, dilated: 0.3, threshold: 2.0, wanted: None };
    let mut sets = IndexSets::new(&[rule; PAIRS], 8, rule.width(1), GROUP, HEAD_DIM, &device);
    let newest = inputs.ints([BATCH], |_| CAPACITY - 1);
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
    bench(criterion, "retrieve_slots", name, &device, || {
        let (query, vectors, keys) = (query.clone(), vectors.clone(), keys.clone());
        let newest = newest.clone();
        retrieve_slots(query, vectors, keys, &ranges, newest, &mut sets, options, false).unwrap();
    });
    bench(criterion, "retrieving_attention", name, &device, || {
        let pool = [keys.clone(), values.clone()];
        let (query, vectors, newest) = (query.clone(), vectors.clone(), newest.clone());
        retrieving_attention(query, vectors, pool, &ranges, newest, &mut sets, options).unwrap();
    });
    let dropped = inputs.floats([PAIRS, GROUP]).abs();
    bench(criterion, "steer_sets", name, &device, || {
        let options = SteerOptions { target: 0.05, gain: 0.1, most: FEW };
        steer_sets(&mut sets, dropped.clone(), options).unwrap();
    });
}
