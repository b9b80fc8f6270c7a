mod follow;

use std::collections::BTreeSet;

use burn::tensor::{DType, Device, Tensor};
use follow::{Layer, Steps, attended, follow, follow_steps, ints, options, rule};
use kv_kernels::{
    CisSelectOptions, CisStrategy, DecodeAttentionOptions, Dilation, Earlier, IndexSets, RangeSets,
    ScoreReduction, SetRule, Share, SimilarityReduction, SlotRanges, SlotView, cis_attention,
    cis_select, decode_attention,
};
use kv_testing::{Golden, Numbers, devices, golden_files, quick_devices, relative_error, timed};

use super::strategies::force;

#[test]
fn steps_attend_as_the_paper_says() {
    for tested in devices() {
        let device = &tested.device;
        let cases = [
            (1, ScoreReduction::Sum, SimilarityReduction::Mean),
            (4, ScoreReduction::Sum, SimilarityReduction::Mean),
            (2, ScoreReduction::Max, SimilarityReduction::Min),
        ];
        for (group, reduction, similarity) in tested.some(cases, 2) {
            let layer = Layer::new(2, 2, group, 32, 300);
            let mut retrieved = Vec::new();
            for (earlier, dilation) in
                [(Earlier::Any, Dilation::Shared), (Earlier::Retrieved, Dilation::All)]
            {
                let options =
                    CisSelectOptions { reduction, similarity, earlier, dilation, ..options() };
                let context = format!("{} {reduction:?} {similarity:?} {earlier:?}", tested.name);
                let rules = (rule(24), &options);
                retrieved.push(follow(&layer, &[190, 20], 0, 20, rules, device, &context));
            }
            let [any, only] = retrieved[..] else { unreachable!() };
            let context = format!("{} group {group}: {retrieved:?} of 80 retrieve", tested.name);
            assert!(only < 4 * 20 / 2, "{context}: hardly any set is shared");
            assert!(any < only, "{context}: no step shares with one that shared");
        }
    }
}

#[test]
fn windows_hide_and_freed_tokens_have_no_slots() {
    for tested in quick_devices("cis_select") {
        let device = &tested.device;
        let layer = Layer::new(2, 1, 1, 32, 300);
        let hidden = Share::new(0.3);
        let context = |what: &str| format!("{} {what}", tested.name);
        let options = CisSelectOptions { hidden, ..options() };
        follow(&layer, &[200, 280], 0, 10, (rule(16), &options), device, &context("hidden"));
        // What the window hides may be gone: tokens 4 to 53 of 200.
        follow(&layer, &[200, 230], 50, 20, (rule(16), &options), device, &context("freed"));
    }
}

#[test]
fn ranges_are_replaced_in_place() {
    for tested in quick_devices("cis_select") {
        let sets = |ranges: usize, top: usize, width: usize| {
            IndexSets::new(&vec![rule(top); ranges], 4, width, 1, 8, &tested.device)
        };
        let mut own = sets(4, 8, 32);
        own.replace(2, sets(2, 6, 20)).unwrap();
        let tops: Vec<usize> = own.read().unwrap().iter().map(|range| range.top).collect();
        assert_eq!(tops, [8, 8, 6, 6], "{}", tested.name);
        assert_eq!(own.width(), 32);
        // Wider sets, more to take, and ranges that are not there.
        for (first, from) in [(0, sets(1, 8, 33)), (0, sets(1, 40, 32)), (3, sets(2, 8, 32))] {
            let error = own.replace(first, from).unwrap_err().to_string();
            assert!(error.contains("ranges to put in"), "{error}");
        }
        let other = IndexSets::new(&[rule(8)], 4, 32, 1, 16, &tested.device);
        assert!(!own.accepts(&other), "vectors of another length");
    }
}

/// Tokens that leave the locals stay readable until the next retrieval.
#[test]
fn a_tail_is_read_until_the_next_retrieval() {
    for tested in quick_devices("cis_select") {
        let device = &tested.device;
        let layer = Layer::new(2, 2, 2, 32, 300);
        let context = |what: &str| format!("{} {what}", tested.name);
        for (earlier, dilation) in
            [(Earlier::Any, Dilation::Shared), (Earlier::Retrieved, Dilation::All)]
        {
            let options = CisSelectOptions { tail: true, earlier, dilation, ..options() };
            let rules = (SetRule { threshold: 0.3, ..rule(24) }, &options);
            follow(&layer, &[190, 20], 0, 20, rules, device, &context("tail"));
            let hidden = Share::new(0.3);
            let options = CisSelectOptions { hidden, radius: 0, ..options };
            let rules = (SetRule { threshold: -1.0, ..rule(16) }, &options);
            follow(&layer, &[200, 230], 50, 20, rules, device, &context("freed tail"));
        }
        let long = Layer::new(1, 2, 4, 32, 4_400);
        let options = CisSelectOptions { tail: true, longest: Some(4_400), ..options() };
        let rules = (SetRule { threshold: 0.3, ..rule(64) }, &options);
        follow(&long, &[4_330], 0, 12, rules, device, &context("long tail"));
    }
}

/// Sets that more queries choose together than attend, and sets chosen by a few channels.
#[test]
fn many_queries_vote() {
    const TOP: usize = 40;
    for tested in quick_devices("cis_select") {
        let device = &tested.device;
        for dtype in tested.float_dtypes() {
            let cases =
                [(12, 300, 64), (32, 700, 64), (24, 4_400, 64), (1, 700, 4), (12, 4_400, 8)];
            for (votes, length, dim) in tested.some(cases, 2) {
                let layer = Layer::new(1, 2, 1, dim, length).in_dtype(dtype);
                let queries = Numbers::new(5).normal(2 * votes * dim);
                let queries = follow::rounded(&queries, dtype);
                let on = Tensor::<1>::from_data(queries.as_slice(), (device, DType::F32));
                let on = on.reshape([1, 2 * votes, dim]).cast(dtype);
                let vectors = on.clone().narrow(1, 0, 2).reshape([2, 1, dim]);
                let mut sets = IndexSets::new(&[rule(TOP); 2], 1, TOP, 1, dim, device);
                let options =
                    CisSelectOptions { block: 1, radius: 0, longest: Some(length), ..options() };
                let keys = layer.pool(&layer.keys, device);
                let (ranges, newest) =
                    (layer.ranges(&[length], device), ints(&[length as i32 - 1], device));
                cis_select(on, vectors, keys, &ranges, newest, &mut sets, options).unwrap();
                let all: Vec<usize> = (0..length).collect();
                for (pair, own) in sets.read().unwrap().iter().enumerate() {
                    let mut score = vec![0.0; length];
                    for query in queries[pair * votes * dim..][..votes * dim].chunks(dim) {
                        let weights = layer.weights(pair, query, &all);
                        score.iter_mut().zip(weights).for_each(|(score, own)| *score += own);
                    }
                    let mut ranked: Vec<usize> = (4..length - 8).collect();
                    ranked.sort_by(|a, b| score[*b].total_cmp(&score[*a]));
                    let least = score[ranked[TOP - 1]];
                    let context = format!("{} {dtype:?}, {votes} of {length}, {dim}", tested.name);
                    assert_eq!(own.set.len(), TOP, "{context}");
                    for token in &own.set {
                        // Rounding may order two slots otherwise.
                        let found = score[*token as usize];
                        assert!(found > least * 0.999, "{context}: {found} for {least}");
                    }
                }
            }
        }
    }
}

#[test]
fn long_ranges_are_scored_in_parts() {
    for tested in devices() {
        let device = &tested.device;
        // One range on many processors, ranges longer than a part, than shared memory has room for,
        // and than are sifted.
        let cases = [
            (2, 5_000, None),
            (1, 5_000, None),
            (1, 60_000, None),
            (2, 60_000, None),
            (1, 5_000, Some(600_000)),
            (2, 3_000, Some(600_000)),
        ];
        for (group, room, longest) in tested.some(cases, 2) {
            let layer = Layer::new(1, 1, group, 32, room);
            let options = CisSelectOptions { longest, ..options() };
            let context = format!("{} {room} slots", tested.name);
            follow(&layer, &[room - 100], 0, 3, (rule(200), &options), device, &context);
        }
    }
}

#[test]
fn long_ranges_are_sifted_by_many_cubes() {
    for tested in devices() {
        let device = &tested.device;
        // Lengths about the one from which on ranges are sifted, of groups that fill a team and
        // that do not.
        let cases = [
            (1, [9_000, 200], ScoreReduction::Sum),
            (2, [8_500, 19_000], ScoreReduction::Sum),
            (3, [12_345, 40], ScoreReduction::Max),
            (8, [10_000, 7_000], ScoreReduction::Max),
            (4, [2_100, 1_500], ScoreReduction::Sum),
        ];
        for (group, lengths, reduction) in tested.some(cases, 2) {
            let room = lengths[0].max(lengths[1]) + 64;
            let layer = Layer::new(2, 2, group, 32, room);
            let longest = Some(room);
            let options = CisSelectOptions { reduction, longest, ..options() };
            let context = format!("{} group {group}", tested.name);
            // The fourth step measures what it shares, too.
            follow(&layer, &lengths, 0, 4, (rule(700), &options), device, &context);
        }
        // Many ranges, of few parts each, whose cubes go round; none of the best brings its
        // neighbours along.
        let layer = Layer::new(2, 40, 2, 16, 4_300);
        let alone = SetRule { dilated: 0.0, ..rule(300) };
        let few = CisSelectOptions { longest: Some(4_300), ..options() };
        let context = format!("{} many ranges", tested.name);
        follow(&layer, &[4_200, 3_000], 0, 1, (alone, &few), device, &context);
        // More ranges than cubes and than a cube's units, of which one has next to nothing.
        let layer = Layer::new(4, 80, 2, 16, 2_200);
        let few = CisSelectOptions { longest: Some(2_200), ..options() };
        let context = format!("{} more ranges than cubes", tested.name);
        follow(&layer, &[2_150, 2_100, 3, 1_000], 0, 1, (rule(100), &few), device, &context);
        // The best bring more neighbours along, of which some are locals, and more than a narrow
        // set has room for.
        for width in [None, Some(500)] {
            let layer = Layer::new(1, 2, 2, 32, 2_500);
            let wide = CisSelectOptions { radius: 20, longest: Some(2_500), ..options() };
            let best = SetRule { dilated: 1.0, ..rule(100) };
            let context = format!("{} {width:?} neighbours", tested.name);
            let steps = Steps { count: 4, width, ..Steps::default() };
            follow_steps(&layer, &[2_400], 0, steps, (best, &wide), device, &context).unwrap();
        }
        // Among equals the first ones are taken, whether or not one cube has room for all of them.
        for (distinct, group) in tested.some([(30, 2), (5, 1), (1, 2), (30, 1), (5, 2)], 2) {
            let mut layer = Layer::new(1, 1, group, 32, 9_100);
            for slot in distinct..layer.room {
                let (from, to) = (slot % distinct * 32, slot * 32);
                layer.keys.copy_within(from..from + 32, to);
            }
            let context = format!("{} {distinct} keys", tested.name);
            follow(&layer, &[9_000], 0, 2, (rule(1_000), &options()), device, &context);
        }
        // Windows hide first tokens, of which some are freed.
        let layer = Layer::new(1, 2, 2, 32, 9_500);
        let (hidden, longest) = (Share::new(0.25), Some(9_500));
        let hidden = CisSelectOptions { hidden, longest, ..options() };
        let context = format!("{} hidden", tested.name);
        follow(&layer, &[9_000], 500, 3, (rule(300), &hidden), device, &context);
        // Lists so long that not all of their tokens are read for those that are hidden, or locals,
        // by now.
        let context = format!("{} long lists", tested.name);
        follow(&layer, &[9_000], 0, 8, (rule(2_500), &hidden), device, &context);
        // Unless it is more of them than are looked at first.
        let far = CisSelectOptions { block: 1_024, hidden: Share::new(0.5), ..hidden };
        let always = SetRule { threshold: -1.0, ..rule(2_500) };
        let steps = Steps { count: 3, apart: 300, ..Steps::default() };
        follow_steps(&layer, &[8_200], 0, steps, (always, &far), device, &context).unwrap();
    }
}

#[test]
fn halves_are_scored_in_full() {
    for tested in devices() {
        let device = &tested.device;
        for dtype in tested.float_dtypes().into_iter().filter(|dtype| *dtype != DType::F32) {
            // Groups that fill half a tile's columns and that do not, ranges that are sifted and
            // that are not. Groups that fill half a tile's columns and that do not, ranges that are
            // sifted and that are not, and rows that are no whole number of a team's vectors.
            let cases = [
                (1, 128, [9_000, 300]),
                (2, 64, [2_500, 40]),
                (4, 128, [3_333, 1_000]),
                (1, 64, [700, 33]),
                (3, 32, [400, 170]),
                (8, 128, [2_200, 2_100]),
                (2, 80, [2_200, 90]),
            ];
            // Each in one dtype.
            let own = |case: &usize| case.is_multiple_of(2) == (dtype == DType::F16);
            for (group, dim, lengths) in (0..cases.len()).filter(own).map(|case| cases[case]) {
                let room = lengths[0].max(lengths[1]) + 64;
                let layer = Layer::new(2, 1, group, dim, room).in_dtype(dtype);
                let options = CisSelectOptions { longest: Some(room), ..options() };
                let context = format!("{} {dtype:?} group {group}, {dim}", tested.name);
                follow(&layer, &lengths, 0, 4, (rule(150), &options), device, &context);
            }
        }
    }
}

#[test]
fn every_strategy_attends_as_the_paper_says() {
    use CisStrategy::{Histogram, Radix, SplitRadix};
    let timed = timed("cis_attention", ["query_heads", "kv_heads", "tokens"]).into_iter();
    let timed = timed.filter(|[.., tokens]| *tokens < 10_000);
    let mut cases = vec![(1, [300, 40]), (2, [2_500, 33]), (4, [700, 150]), (1, [9_000, 300])];
    cases.extend(timed.map(|[heads, kv_heads, tokens]| (heads / kv_heads, [tokens; 2])));
    for tested in devices() {
        let strategies = [Radix, SplitRadix, Histogram];
        let cases: Vec<_> = tested.some(cases.iter().copied(), 3).collect();
        force("cis_select", &tested, &strategies, &cases, |strategy, (group, lengths)| {
            let room = lengths[0] + 64;
            let layer = Layer::new(2, 1, *group, 32, room);
            let options = CisSelectOptions { longest: Some(room), strategy, ..options() };
            let context = format!("{} {strategy:?} group {group} {lengths:?}", tested.name);
            let (steps, rules) = (Steps { count: 4, ..Steps::default() }, (rule(24), &options));
            follow_steps(&layer, lengths, 0, steps, rules, &tested.device, &context).map(drop)
        });
    }
}

#[test]
fn thresholds_never_and_always() {
    for tested in devices() {
        let device = &tested.device;
        let layer = Layer::new(1, 2, 1, 32, 200);
        let never = SetRule { threshold: 1.0, ..rule(16) };
        let retrieved = follow(&layer, &[100], 0, 16, (never, &options()), device, "never");
        assert_eq!(retrieved, 2 * 16);
        // Blocks begin at 104, 112 and 120.
        let always = SetRule { threshold: -1.0, ..rule(16) };
        let retrieved = follow(&layer, &[104], 0, 20, (always, &options()), device, "always");
        assert_eq!(retrieved, 2 * 3);
        let alone = CisSelectOptions { block: 1, ..options() };
        assert_eq!(
            follow(&layer, &[100], 0, 5, (rule(16), &alone), device, "blocks of one"),
            2 * 5
        );
    }
}

#[test]
fn sizes_come_to_what_is_wanted() {
    for tested in devices() {
        let device = &tested.device;
        let mut numbers = Numbers::new(5);
        let keys = numbers.normal(400 * 16);
        let mut own = rule(40);
        own.wanted = Some(40);
        let mut sets = IndexSets::new(&[own], 1, own.width(1), 1, 16, device);
        let mut sizes = Vec::new();
        for _ in 0..40 {
            let query = numbers.normal(16);
            let all = CisSelectOptions { dilation: Dilation::All, ..options() };
            let step = one_step(query, keys.clone(), &mut sets, 399, all, device);
            sizes.push(step.set.len() as f64);
        }
        assert!(sizes[0] > 45.0, "{}: {sizes:?}", tested.name);
        let mean = sizes[8..].iter().sum::<f64>() / 32.0;
        assert!((mean - 40.0).abs() < 1.0, "{}: {mean} of {sizes:?}", tested.name);
    }
}

/// One step of given queries over 64 tokens, one range.
fn one_step(
    query: Vec<f32>,
    keys: Vec<f32>,
    sets: &mut IndexSets,
    at: i32,
    options: CisSelectOptions,
    device: &Device,
) -> RangeSets {
    let dim = query.len();
    let tokens = keys.len() / dim;
    let on = Tensor::<1>::from_data(query.as_slice(), (device, DType::F32)).reshape([1, 1, dim]);
    let int = |value: i32| Tensor::full([1, 1], value, (device, DType::I32));
    let ranges = SlotRanges { offsets: int(0), lengths: int(tokens as i32) };
    let keys = Tensor::<1>::from_data(keys.as_slice(), (device, DType::F32)).reshape([tokens, dim]);
    let options = CisSelectOptions { block: sets.sets(), ..options };
    cis_select(on.clone(), on, keys, &ranges, ints(&[at], device), sets, options).unwrap();
    sets.read().unwrap().remove(0)
}

#[test]
fn equal_weights_go_by_index_and_zero_queries_are_like_none() {
    for tested in devices() {
        let device = &tested.device;
        let mut sets = IndexSets::new(&[rule(9)], 8, rule(9).width(1), 1, 4, device);
        let mut step = |query: f32| {
            one_step(vec![query; 4], vec![1.0; 64 * 4], &mut sets, 63, options(), device)
        };
        let first = step(1.0);
        // Nine, of which the first three bring a neighbour along; the lowest is behind the
        // sinks.
        assert_eq!(first.set, (4..13).collect::<Vec<u32>>(), "{}", tested.name);
        assert_eq!(step(0.0).retrieves, Some(true), "{}", tested.name);
        assert_eq!(step(0.0).retrieves, Some(true), "{}", tested.name);
        let shared = step(2.0);
        assert_eq!((shared.retrieves, shared.set), (Some(false), first.set), "{}", tested.name);
    }
}

#[test]
fn golden_selections() {
    for file in golden_files("cis_select", "prhs_select_gqa") {
        for tested in devices() {
            selections(&file, &tested.device, &format!("{} {}", file.name, tested.name));
        }
    }
}

fn selections(file: &Golden, device: &Device, context: &str) {
    let [batch, heads, dim] = file.tensor("q").dims();
    let [_, kv_heads, tokens, _] = file.tensor("k").dims();
    let number = |name: &str| file.number(name) as usize;
    let keys = file.tensor("k").on::<4>(device).reshape([batch * kv_heads * tokens, dim]);
    let query = file.tensor("q").on::<3>(device);
    let group = heads / kv_heads;
    let newest = ints(&vec![tokens as i32 - 1; batch], device);
    let dilated = number("m") as f32 / number("k") as f32;
    let (sinks, locals) = (number("C_sink"), number("C_local"));
    let top = number("k");
    let rule = SetRule { sinks, locals, top, dilated, threshold: -1.0, wanted: None };
    // A step retrieves, and its queries' next step shares.
    let choose = |shares: bool, of: usize| {
        let pairs = batch * of;
        let options = CisSelectOptions { radius: number("r"), block: tokens, ..options() };
        let width = rule.width(options.radius);
        let mut sets = IndexSets::new(&vec![rule; pairs], tokens, width, heads / of, dim, device);
        let offset =
            |pair: usize| ((pair / of * kv_heads + pair % of * kv_heads / of) * tokens) as i32;
        let offsets: Vec<i32> = (0..pairs).map(offset).collect();
        let ranges = SlotRanges {
            offsets: ints(&offsets, device).reshape([batch, of]),
            lengths: Tensor::full([batch, of], tokens as i32, (device, DType::I32)),
        };
        let vectors = query.clone().reshape([pairs, heads / of, dim]);
        let (keys, newest) = (keys.clone(), newest.clone());
        let step = |sets: &mut IndexSets| {
            let (query, vectors, newest) = (query.clone(), vectors.clone(), newest.clone());
            let options = CisSelectOptions { measures: true, ..options };
            cis_select(query, vectors, keys.clone(), &ranges, newest, sets, options).unwrap()
        };
        let mut sums = step(&mut sets);
        if shares {
            sums = step(&mut sets);
        }
        let view = SlotView::Sets(sets.clone());
        let asked = DecodeAttentionOptions { view, log_sum_exp: true, ..Default::default() };
        let own =
            decode_attention(query.clone(), keys.clone(), keys, None, &ranges, asked).unwrap();
        let dropped = (own.log_sum_exp.unwrap() - sums.unwrap()).exp().neg().add_scalar(1.0);
        (sets.read().unwrap(), dropped.reshape([-1]).try_into_vec_as::<f32>().unwrap())
    };
    // A list a query head: neighbours are read by the step that shares.
    for (kind, mask, shares) in [(0, "mask_topk", false), (2, "mask_cis_clip_all", true)] {
        let (sets, dropped) = choose(shares, heads);
        let expected = file.tensor(mask).indices();
        let delta = file.tensor("delta").values;
        for (head, own) in sets.iter().enumerate() {
            let slots = attended(own, rule.sinks, [tokens, 0]);
            let mask: BTreeSet<usize> =
                (0..tokens).filter(|slot| expected[head * tokens + slot] > 0).collect();
            assert_eq!(slots, mask, "{context} {kind} {head}");
            let delta = delta[kind * batch * heads + head];
            assert!((f64::from(dropped[head]) - delta).abs() < 1e-5, "{context} {kind} {head}");
        }
    }
    let (sets, _) = choose(false, kv_heads);
    let expected = file.tensor("topk_group_mean").indices();
    for (pair, own) in sets.iter().enumerate() {
        let mut best = expected[pair * rule.top..][..rule.top].to_vec();
        best.sort_unstable();
        assert_eq!(own.set, best, "{context} group {group}");
    }
}

#[test]
fn refuses_what_does_not_fit() {
    for tested in devices() {
        let device = &tested.device;
        let query = Tensor::<3>::zeros([1, 2, 8], (device, DType::F32));
        let keys = Tensor::<2>::zeros([16, 8], (device, DType::F32));
        let int = |value: i32| Tensor::full([1, 2], value, (device, DType::I32));
        let ranges = SlotRanges { offsets: int(0), lengths: int(16) };
        let try_with = |sets: &mut IndexSets, vectors: [usize; 3], options: CisSelectOptions| {
            let vectors = Tensor::<3>::zeros(vectors, (device, DType::F32));
            let newest = ints(&[15], device);
            cis_select(query.clone(), vectors, keys.clone(), &ranges, newest, sets, options)
                .unwrap_err()
                .to_string()
        };
        let mut sets = IndexSets::new(&[rule(4); 2], 8, 4, 1, 8, device);
        let error = try_with(&mut sets, [2, 1, 4], options());
        assert!(error.contains("vectors"), "{error}");
        let error = try_with(&mut sets, [2, 1, 8], CisSelectOptions { block: 9, ..options() });
        assert!(error.contains("sets") && error.contains('8'), "{error}");
        let error = try_with(&mut sets, [2, 1, 8], CisSelectOptions { block: 0, ..options() });
        assert!(error.contains("block"), "{error}");
    }
}

/// A launch that chooses and attends does both as one for each does: where heads fill the device,
/// it is one launch.
#[test]
fn choosing_and_attending_at_once_changes_nothing() {
    for tested in devices() {
        let device = &tested.device;
        // As many ranges as fill a GPU.
        let many = if tested.name == "cuda" { 24 } else { 1 };
        let hidden = Share::new(0.3);
        // Kernels that take matrix instructions, where there are any: each case in another dtype.
        let halves = [DType::BF16, DType::F16]
            .map(|half| if device.supports_dtype(half) { half } else { DType::F32 });
        let cases = [
            (3, 2 * many, 1, 128, 300, options()),
            // One part, as ranges are short, and as they are many.
            (3, 2 * many, 1, 64, 200, options()),
            (3, 16 * many, 1, 32, 600, options()),
            (3, 2 * many, 1, 64, 300, CisSelectOptions { hidden, ..options() }),
            // Cubes of fewer planes, so that all are under way at once.
            (3, 6 * many, 1, 64, 300, options()),
            (3, 2 * many, 1, 64, 300, CisSelectOptions { block: 1, ..options() }),
            (3, many, 4, 64, 300, options()),
            (3, 2 * many, 2, 128, 300, options()),
            (2, many, 8, 128, 300, options()),
        ];
        let cases: Vec<_> = tested.some(cases.into_iter().enumerate(), 3).collect();
        let strategies = [CisStrategy::Auto, CisStrategy::Fused, CisStrategy::SplitRadix];
        force("cis_attention", &tested, &strategies, &cases, |strategy, (case, sizes)| {
            let (batch, kv_heads, group, dim, room, change) = *sizes;
            let dtype = halves[case % 2];
            let tolerance = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
            let options = CisSelectOptions { longest: Some(room), ..change };
            let layer = Layer::new(batch, kv_heads, group, dim, room);
            let lengths: Vec<usize> = [room, 170, 0][..batch].to_vec();
            let ranges = layer.ranges(&lengths, device);
            let pools =
                [&layer.keys, &layer.values].map(|pool| layer.pool(pool, device).cast(dtype));
            let pairs = batch * kv_heads;
            let width = rule(40).width(1);
            let new = || IndexSets::new(&vec![rule(40); pairs], 8, width, group, dim, device);
            let (mut sets, mut other) = (new(), new());
            let mut numbers = Numbers::new(3);
            let base = numbers.normal(pairs * group * dim);
            for step in 0..4 {
                let jumps = numbers.normal(pairs * group * dim);
                // Every third range finds another query at every step.
                let row = |i: usize| {
                    if (i / (group * dim)).is_multiple_of(3) {
                        jumps[i]
                    } else {
                        base[i] + 0.1 * jumps[i]
                    }
                };
                let query: Vec<f32> = (0..pairs * group * dim).map(row).collect();
                let query = Tensor::<1>::from_data(query.as_slice(), (device, DType::F32));
                let vectors = query.clone().reshape([pairs, group, dim]).cast(dtype);
                let query = query.reshape([batch, kv_heads * group, dim]).cast(dtype);
                let newest: Vec<i32> =
                    lengths.iter().map(|length| *length as i32 - 1 + step / 3).collect();
                let newest = ints(&newest, device);
                let fused = cis_attention(
                    query.clone(),
                    vectors.clone(),
                    pools.clone(),
                    &ranges,
                    newest.clone(),
                    &mut sets,
                    CisSelectOptions { strategy, ..options },
                )?;
                let [keys, values] = pools.clone();
                cis_select(
                    query.clone(),
                    vectors,
                    keys.clone(),
                    &ranges,
                    newest,
                    &mut other,
                    options,
                )
                .unwrap();
                let attention = DecodeAttentionOptions {
                    view: SlotView::Sets(other.clone()),
                    longest: Some(other.most()),
                    ..Default::default()
                };
                let apart =
                    decode_attention(query, keys, values, None, &ranges, attention).unwrap();
                let (own, expected) = (sets.read().unwrap(), other.read().unwrap());
                for (own, expected) in own.iter().zip(&expected) {
                    assert_eq!(own.set, expected.set, "{} {dtype:?} step {step}", tested.name);
                    let did = |sets: &RangeSets| (sets.retrieves, sets.number);
                    assert_eq!(did(own), did(expected));
                    assert_eq!((own.tokens, own.steps), (expected.tokens, expected.steps));
                }
                assert!(own.iter().any(|own| own.retrieves == Some(true)));
                let shares = options.block > 1 && step > 0;
                assert!(!shares || own.iter().any(|own| own.retrieves == Some(false)));
                let of = |tensor: Tensor<3>| {
                    tensor.cast(DType::F32).into_data().try_to_vec::<f32>().unwrap()
                };
                let expected: Vec<f64> = of(apart.output).into_iter().map(f64::from).collect();
                let error = relative_error(&of(fused), &expected);
                assert!(error < tolerance, "{} {dtype:?} {strategy:?}: {error}", tested.name);
            }
            Ok(())
        });
    }
}
