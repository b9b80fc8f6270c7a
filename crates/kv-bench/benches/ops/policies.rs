//! What single policies add to a decode step: the choice of an eviction, and merges.

use criterion::Criterion;
use kv_kernels::{
    AverageWeights, DecodeAttentionOptions, EvictionOptions, GUARD, GroupReduction, HeldSlots,
    KeyRule, MergeLists, MergeOptions, MergingSlots, NearestOptions, NearestSlotsOptions, Share,
    SlotLists, SlotPool, SlotView, add_contributions, add_probabilities, average_scores,
    decode_attention, drop_slots, evicting_attention, group_priority_ranks, log_norms,
    merge_nearest, merge_slots, nearest_slots, rankings, reset_last, window_starts,
};

use crate::inputs::{BATCH, CAPACITY, FEW, GROUP, HEAD_DIM, Inputs, KV_HEADS, PAIRS, SLOTS, bench};

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
    let mut arrivals = inputs.ints([BATCH, HeldSlots::ARRIVALS], |_| 0);
    bench(criterion, "evicting_attention", name, &device, || {
        let held = HeldSlots {
            log_norms: norms.clone(),
            limits: ranges.lengths.clone(),
            places: &mut places,
            arrivals: &mut arrivals,
            memory: None,
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
    let (logits, sums) = (inputs.floats([SLOTS, GROUP]), inputs.floats([BATCH, KV_HEADS * GROUP]));
    let (mut track, mut norms) = (inputs.floats([SLOTS]), inputs.floats([SLOTS]));
    bench(criterion, "add_contributions", name, &device, || {
        let (track, norms, sum) = (&mut track, &mut norms, GroupReduction::Sum);
        let (logits, sums) = (logits.clone(), sums.clone());
        add_contributions(track, norms, &values, logits, sums, &ranges, sum).unwrap();
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
        nearest_slots(keys.clone(), &of, &among, NearestSlotsOptions::default()).unwrap();
    });
    let scores = inputs.floats([PAIRS, CAPACITY]);
    bench(criterion, "rankings", name, &device, || {
        rankings(scores.clone()).unwrap();
    });
    let ranked = rankings(scores.clone()).unwrap();
    // Every third joins the one before it.
    let leaders = inputs.ints([PAIRS, CAPACITY], |i| (i % CAPACITY).saturating_sub(1));
    let alone = inputs.ints([PAIRS, CAPACITY], |i| i % 3).not_equal_scalar(2);
    let leaders = leaders.mask_fill(alone, -1);
    bench(criterion, "group_priority_ranks", name, &device, || {
        group_priority_ranks(scores.clone(), ranked.clone(), leaders.clone()).unwrap();
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
        takes: None,
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
            inherited: None,
        };
        merge_nearest(slots, &ranges, &victims, &goes, &options).unwrap();
    });
}
