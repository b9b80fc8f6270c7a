//! Choices of what a step reads of a whole cache.

use criterion::Criterion;
use kv_kernels::{
    Choice, CisSelectOptions, CisStrategy, Dilation, Earlier, IndexSets, ListTable, PageHeads,
    PageOptions, PageSpan, ScoreReduction, SetRule, Share, SimilarityReduction, SteerOptions,
    cis_attention, cis_select, copy_labels, keep_lists, label_scores, list_slots, page_bounds,
    page_rows, page_scores, page_slots, steer_sets, top_slots,
};

use crate::inputs::{BATCH, CAPACITY, FEW, GROUP, HEAD_DIM, Inputs, KV_HEADS, PAIRS, SLOTS, bench};

const PAGE: usize = 16;

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
    let budgets = inputs.ints([BATCH, heads, 3], |_| FEW);
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
    let channels = inputs.ints([BATCH, heads, 8], |i| i % 8);
    let scored = || {
        let query = query.clone();
        label_scores(query, &keys, &channels, &budgets, &ranges, CAPACITY, None).unwrap()
    };
    bench(criterion, "label_scores", name, &device, || drop(scored()));
    let (of, mut labels) =
        (inputs.ints([BATCH, KV_HEADS, 8], |i| i % 8), inputs.floats([SLOTS, 8]));
    bench(criterion, "copy_labels", name, &device, || {
        drop(copy_labels(query.clone(), &keys, &of, &ranges, &mut labels).unwrap());
    });
    let scored = scored();
    let wanted = scored.wanted.clone();
    let choice = Choice::Top(scored.wanted);
    let chosen = top_slots(scored.scores, Some(scored.candidates), choice, FEW).unwrap();
    let mut lists = inputs.ints([BATCH, heads, 3 + FEW], |_| 0).sub_scalar(1);
    bench(criterion, "keep_lists", name, &device, || {
        keep_lists(&mut lists, &chosen, &wanted, &budgets, &ranges, None).unwrap();
    });
    let sources = inputs.ints([BATCH, heads, 1], |i| i % heads);
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
    let options = CisSelectOptions {
        scale: None,
        radius: 1,
        dilation: Dilation::Shared,
        earlier: Earlier::Any,
        tail: false,
        block: 8,
        reduction: ScoreReduction::Sum,
        similarity: SimilarityReduction::Mean,
        hidden: Share::default(),
        longest: Some(CAPACITY),
        measures: false,
        strategy: CisStrategy::Auto,
    };
    bench(criterion, "cis_select", name, &device, || {
        let (query, vectors, keys) = (query.clone(), vectors.clone(), keys.clone());
        let newest = newest.clone();
        cis_select(query, vectors, keys, &ranges, newest, &mut sets, options).unwrap();
    });
    bench(criterion, "cis_attention", name, &device, || {
        let pool = [keys.clone(), values.clone()];
        let (query, vectors, newest) = (query.clone(), vectors.clone(), newest.clone());
        cis_attention(query, vectors, pool, &ranges, newest, &mut sets, options).unwrap();
    });
    let dropped = inputs.floats([PAIRS, GROUP]).abs();
    bench(criterion, "steer_sets", name, &device, || {
        let options = SteerOptions { target: 0.05, gain: 0.1, most: FEW };
        steer_sets(&mut sets, dropped.clone(), options).unwrap();
    });
}
