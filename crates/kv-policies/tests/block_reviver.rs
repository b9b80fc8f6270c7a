//! KVReviver with a vague part in blocks, quantised, archived or summed up: against exact
//! attention, in batches, across files, and where it refuses.

use burn::tensor::{DType, Int, Tensor};
use kv_core::{KvCache, LayerCache, Origin, read_f32};
use kv_kernels::QuantizedPool;
use kv_policies::{Policy, Step, VagueTokens, build};
use kv_testing::{TestDevice, devices, quick_devices, relative_error};
use serde_json::{Value, json};

use super::kvreviver::{DIM, Run, close, exact};
use super::support::{LAYER, policy, step};

const BLOCK: usize = QuantizedPool::BLOCK;

fn quantized(budget: Value, bits: usize) -> Value {
    json!({"policy": "kvreviver", "vague": "quantized", "budget": budget, "key_bits": bits,
        "value_bits": bits})
}

fn archived(budget: Value, revived: usize) -> Value {
    json!({"policy": "kvreviver", "vague": "archive", "budget": budget, "revived": revived})
}

fn vague(cache: &LayerCache) -> Vec<usize> {
    VagueTokens::of(cache).unwrap().lengths()
}

/// With eight bits no token is lost, and attention differs from the full cache's by rounding
/// alone, behind the prompt and while blocks move; with fewer bits by more.
#[test]
fn every_token_is_attended_to() {
    for tested in quick_devices("block_reviver") {
        let run = Run::new(1, 2, 400, 150, &tested.device);
        let full = policy(json!({"policy": "full"}));
        // All 550 tokens find room: of 16 dimensions a slot of 8 bits takes 0.58 of 16 bits.
        let errors = [8, 4, 2].map(|bits| {
            let reviver = policy(quantized(json!(430), bits));
            let mut cache = run.prompt.compress(&*reviver, run.steps());
            let mut whole = run.prompt.compress(&*full, run.steps());
            let at_first = vague(&cache)[0];
            let mut worst = 0.0f64;
            for index in 0..run.steps() {
                let output = run.step(&*reviver, &mut cache, index);
                let expected = run.step(&*full, &mut whole, index);
                let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
                worst = worst.max(relative_error(&output, &expected));
                let all = cache.layout().lengths()[0] + vague(&cache)[0];
                assert_eq!(all, 400 + index + 1, "{} {bits} bits", tested.name);
            }
            assert!(vague(&cache)[0] >= at_first + 2 * BLOCK, "{bits} bits: {at_first}");
            worst
        });
        let [eight, four, two] = errors;
        assert!(eight < 0.02 && eight < four && four < two, "{}: {errors:?}", tested.name);
    }
}

/// Where all archived tokens come back, attention is the full cache's; with fewer it is further
/// off.
#[test]
fn archived_tokens_come_back_exactly() {
    for tested in quick_devices("block_reviver") {
        let run = Run::new(1, 2, 400, 150, &tested.device);
        let full = policy(json!({"policy": "full"}));
        let errors = [600, 100, 5].map(|revived| {
            let reviver = policy(archived(json!(300), revived));
            let mut cache = run.prompt.compress(&*reviver, run.steps());
            let mut whole = run.prompt.compress(&*full, run.steps());
            let mut worst = 0.0f64;
            for index in 0..run.steps() {
                let output = run.step(&*reviver, &mut cache, index);
                let expected = run.step(&*full, &mut whole, index);
                let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
                worst = worst.max(relative_error(&output, &expected));
                let all = cache.layout().lengths()[0] + vague(&cache)[0];
                assert_eq!(all, 400 + index + 1, "{} {revived}", tested.name);
            }
            assert!(vague(&cache)[0] >= 4 * BLOCK, "{revived}: {:?}", vague(&cache));
            worst
        });
        let [all, many, few] = errors;
        assert!(all < 1e-5 && all < many && many < few, "{}: {errors:?}", tested.name);
    }
}

/// A summary has the means that an archive has, and no tokens in host memory.
#[test]
fn a_summary_keeps_means_alone() {
    for tested in quick_devices("block_reviver") {
        let run = Run::new(1, 2, 400, 150, &tested.device);
        let of = |vague: &str| json!({"policy": "kvreviver", "vague": vague, "budget": 300});
        let [summary, archive] = ["summary", "archive"].map(|vague| {
            let reviver = policy(of(vague));
            let mut cache = run.prompt.compress(&*reviver, run.steps());
            let output = run.step(&*reviver, &mut cache, 0);
            assert!(vague_tokens(&cache) > 0 && output.iter().all(|x| x.is_finite()));
            let [device, host] = VagueTokens::of(&cache).unwrap().pool().bytes();
            (device, host, vague_tokens(&cache))
        });
        // A block of 16 dimensions has 16 words of statistics and 8 of means; there is room for
        // more blocks.
        let bytes = |tokens: usize, words: usize| tokens / BLOCK * words * 4;
        assert!(summary.0 >= bytes(summary.2, 16 + 8), "{summary:?}");
        assert!(summary.0 <= bytes(summary.2 + 8 * BLOCK, 16 + 8), "{summary:?}");
        assert!(summary.1 == 0 && archive.0 > summary.0, "{summary:?} {archive:?}");
    }
}

fn vague_tokens(cache: &LayerCache) -> usize {
    vague(cache).iter().sum()
}

/// Exact slots over the limit move block by block: the weakest that are not recent. A full vague
/// part overwrites its oldest block, so that bytes stay.
#[test]
fn blocks_move_when_the_exact_part_is_full() {
    for tested in quick_devices("block_reviver") {
        check_moves(&tested, quantized(json!(200), 2));
        // All vague tokens come back, those in blocks that were written over included.
        check_moves(&tested, archived(json!(120), 300));
    }
}

fn check_moves(tested: &TestDevice, config: Value) {
    let run = Run::new(1, 1, 300, 300, &tested.device);
    let reviver = policy(config.clone());
    let mut cache = run.prompt.compress(&*reviver, run.steps());
    let bytes = cache.memory().total();
    let limit = cache.limits().unwrap()[0];
    let mut moves = 0;
    for index in 0..run.steps() {
        let before = cache.layout().lengths()[0];
        run.step(&*reviver, &mut cache, index);
        let length = cache.layout().lengths()[0];
        if length < before {
            moves += 1;
            assert_eq!((before, length), (limit + BLOCK - 1, limit), "step {index}");
            // The most recent tokens stay.
            let newest = 300 + index;
            for range in exact(&cache) {
                let recent = range.iter().rev().take(limit / 2).rev();
                assert!(recent.eq(&(newest + 1 - limit / 2..=newest).collect::<Vec<_>>()));
            }
        }
        assert!(length < limit + BLOCK);
    }
    assert_eq!(moves, (run.steps() + exact_at_start(&run, &config, limit)) / BLOCK);
    assert_eq!(cache.memory().total(), bytes, "{}", tested.name);
}

/// Exact slots beyond the limit behind the prompt.
fn exact_at_start(run: &Run, config: &Value, limit: usize) -> usize {
    let reviver = policy(config.clone());
    run.prompt.compress(&*reviver, run.steps()).layout().lengths()[0] - limit
}

/// The parts take no more than the budget, in bytes of 16-bit slots.
#[test]
fn parts_fit_the_budget() {
    let device = &devices()[0].device;
    for (tokens, share, steps) in [(2_000, 0.5, 10), (2_000, 0.25, 100), (1_000, 0.1, 64)] {
        let run = Run::new(1, 1, tokens, steps, device);
        let reviver = policy(quantized(json!(share), 2));
        let cache = run.prompt.compress(&*reviver, steps);
        let [pool, _] = VagueTokens::of(&cache).unwrap().pool().bytes();
        // Slots of f32 here; the budget counts 16 bits a number.
        let slots = cache.layout().capacities().iter().sum::<usize>() * DIM * 4;
        let budget = 2.0 * share * tokens as f64 * (DIM * 4) as f64;
        let taken = (slots + pool) as f64;
        assert!(taken <= budget, "{tokens} {share}: {taken} of {budget}");
        assert!(taken > 0.95 * budget - 64.0 * 40.0, "{tokens} {share}: {taken} of {budget}");
    }
}

/// Budgets without room for a block keep exact slots alone, and do not grow.
#[test]
fn small_budgets_hold_while_decoding() {
    for tested in quick_devices("block_reviver") {
        for budget in [2, 5, 16, 40] {
            let run = Run::new(1, 2, 120, 90, &tested.device);
            let reviver = policy(quantized(json!(budget), 2));
            let mut cache = run.prompt.compress(&*reviver, run.steps());
            assert_eq!(vague(&cache), [0, 0], "{budget}");
            for index in 0..run.steps() {
                run.step(&*reviver, &mut cache, index);
                let slots = cache.layout().lengths()[0];
                assert!(slots <= budget.max(3), "{} {budget}: {slots} at {index}", tested.name);
            }
            let capacity = cache.layout().capacities()[0];
            assert!(capacity <= budget.max(3), "{budget}: room for {capacity}");
        }
    }
}

/// Sequences of a batch get what they get alone, whatever their lengths.
#[test]
fn rows_do_not_disturb_each_other() {
    for tested in quick_devices("block_reviver") {
        check_rows(&tested, quantized(json!(0.5), 2));
        check_rows(&tested, archived(json!(0.5), 20));
        check_rows(&tested, json!({"policy": "kvreviver", "vague": "summary", "budget": 0.5}));
    }
}

fn check_rows(tested: &TestDevice, config: Value) {
    let reviver = policy(config);
    let device = &tested.device;
    let runs = [300, 500, 30].map(|tokens| Run::new(1, 2, tokens, 80, device));
    let mut alone: Vec<LayerCache> =
        runs.iter().map(|run| run.prompt.compress(&*reviver, 80)).collect();
    let mut joined = LayerCache::concat(alone.clone()).unwrap();
    for index in 0..80 {
        let all = |of: fn(&Run) -> &Tensor<4>| {
            Tensor::cat(runs.iter().map(|run| of(run).clone()).collect(), 0)
        };
        let mut together =
            step(&all(|run| &run.query), &all(|run| &run.keys), &all(|run| &run.values), index, 0);
        let positions: Vec<i32> = runs.iter().map(|run| (run.tokens + index) as i32).collect();
        together.position = Tensor::<1, Int>::from_data(positions.as_slice(), (device, DType::I32));
        let output = reviver.step(LAYER, &mut joined, together).unwrap();
        let output = read_f32("output", output).unwrap();
        let each: Vec<f32> = runs
            .iter()
            .zip(&mut alone)
            .flat_map(|(run, cache)| run.step(&*reviver, cache, index))
            .collect();
        close(&format!("{} step {index}", tested.name), &output, &each);
    }
    let each: Vec<Vec<usize>> = alone.iter().flat_map(exact).collect();
    assert_eq!(exact(&joined), each, "{}", tested.name);
    let each: Vec<usize> = alone.iter().flat_map(vague).collect();
    assert_eq!(vague(&joined), each, "{}", tested.name);
}

/// A sequence takes the place of a longer one in its row. Both rows attend as they do alone, also
/// once they are saved and loaded. A sequence that needs more blocks than the row has is refused.
#[test]
fn a_row_is_replaced_by_a_shorter_sequence() {
    for tested in quick_devices("block_reviver") {
        let device = &tested.device;
        let reviver = policy(quantized(json!(0.5), 3));
        let [first, long, short, longer] =
            [500, 480, 300, 900].map(|tokens| Run::new(1, 2, tokens, 140, device));
        let compress = |run: &Run| run.prompt.compress(&*reviver, 140);
        let mut rows = LayerCache::concat(vec![compress(&first), compress(&long)]).unwrap();
        let (mut one, mut other) = (compress(&first), compress(&short));
        for index in 0..20 {
            rows_step(&*reviver, &mut rows, [(&first, index), (&long, index)]);
            first.step(&*reviver, &mut one, index);
        }
        for index in 0..10 {
            short.step(&*reviver, &mut other, index);
        }
        assert!(!rows.accepts(&compress(&longer)), "{}", tested.name);
        rows.replace_row(1, &compress(&longer)).unwrap_err();
        assert!(rows.accepts(&other), "{}", tested.name);
        rows.replace_row(1, &other).unwrap();
        for index in 0..100 {
            if index == 70 {
                let file = tempfile::NamedTempFile::new().unwrap();
                let whole = KvCache {
                    layers: vec![rows.clone()],
                    seen: vec![590, 380],
                    origin: Origin::default(),
                };
                whole.save(file.path()).unwrap();
                rows = KvCache::load(file.path(), device).unwrap().layers.remove(0);
                reviver.restore(&mut rows).unwrap();
            }
            let steps = [(&first, index + 20), (&short, index + 10)];
            let output = rows_step(&*reviver, &mut rows, steps);
            let mut each = first.step(&*reviver, &mut one, index + 20);
            each.extend(short.step(&*reviver, &mut other, index + 10));
            close(&format!("{} step {index}", tested.name), &output, &each);
        }
        assert_eq!(vague(&rows), [vague(&one), vague(&other)].concat(), "{}", tested.name);
        assert_eq!(exact(&rows), [exact(&one), exact(&other)].concat(), "{}", tested.name);
    }
}

/// Under a budget in tokens, a longer prompt has more blocks and fewer exact slots, so that neither
/// of two sequences fits into the other's row. A row that is widened takes both, and each attends
/// in it as it does alone.
#[test]
fn a_widened_row_takes_sequences_of_several_shapes() {
    for tested in quick_devices("block_reviver") {
        let device = &tested.device;
        let reviver = policy(quantized(json!(200), 3));
        let [short, long] = [260, 900].map(|tokens| Run::new(1, 2, tokens, 120, device));
        let compress = |run: &Run| run.prompt.compress(&*reviver, 120);
        let (mut one, mut other) = (compress(&short), compress(&long));
        assert!(!one.accepts(&other) && !other.accepts(&one), "{}", tested.name);
        let mut row = other.clone();
        row.widen_states(&one).unwrap();
        let layouts = [&one, &other].map(LayerCache::layout);
        let most = layouts.map(|layout| layout.most_capacity()).into_iter().max().unwrap();
        row.resize(vec![most; 2]).unwrap();
        // The blocks of a widened row have moved.
        for index in 0..40 {
            let output = long.step(&*reviver, &mut row, index);
            let alone = long.step(&*reviver, &mut other, index);
            close(&format!("{} step {index}", tested.name), &output, &alone);
        }
        let mut rows = LayerCache::concat(vec![row.clone(), row]).unwrap();
        assert!(rows.accepts(&one) && rows.accepts(&compress(&long)), "{}", tested.name);
        rows.replace_row(1, &one).unwrap();
        for index in 0..80 {
            let output = rows_step(&*reviver, &mut rows, [(&long, index + 40), (&short, index)]);
            let mut each = long.step(&*reviver, &mut other, index + 40);
            each.extend(short.step(&*reviver, &mut one, index));
            close(&format!("{} step {index} of both", tested.name), &output, &each);
        }
        assert_eq!(vague(&rows), [vague(&other), vague(&one)].concat(), "{}", tested.name);
    }
}

/// A sequence that takes a row's place leaves copies of the row as they were.
#[test]
fn copies_of_a_replaced_row_go_on() {
    for tested in quick_devices("block_reviver") {
        let device = &tested.device;
        let reviver = policy(quantized(json!(200), 3));
        let [long, short] = [900, 260].map(|tokens| Run::new(1, 2, tokens, 100, device));
        let compress = |run: &Run| run.prompt.compress(&*reviver, 100);
        let (mut row, mut alone, other) = (compress(&long), compress(&long), compress(&short));
        // The other sequence's exact part is full at more slots.
        row.resize(vec![other.layout().most_capacity(); 2]).unwrap();
        let mut copy = row.clone();
        row.replace_row(0, &other).unwrap();
        for index in 0..100 {
            let output = long.step(&*reviver, &mut copy, index);
            let expected = long.step(&*reviver, &mut alone, index);
            close(&format!("{} step {index}", tested.name), &output, &expected);
        }
    }
}

/// A step of a batch, of each run's token at an index of its own.
fn rows_step(policy: &dyn Policy, cache: &mut LayerCache, rows: [(&Run, usize); 2]) -> Vec<f32> {
    let of_runs = |of: fn(&Run) -> &Tensor<4>| {
        let each = rows.map(|(run, at)| of(run).clone().narrow(2, at, 1).squeeze_dim::<3>(2));
        Tensor::cat(each.to_vec(), 0)
    };
    let positions = rows.map(|(run, at)| (run.tokens + at) as i32);
    let position = Tensor::from_data(positions, (&cache.options().device, DType::I32));
    let (query, keys) = (of_runs(|run| &run.query), of_runs(|run| &run.keys));
    let together = Step::new(query, keys, of_runs(|run| &run.values), position);
    read_f32("output", policy.step(LAYER, cache, together).unwrap()).unwrap()
}

/// A saved cache goes on as it was, its vague tokens included; so does a copy, and one that
/// was moved.
#[test]
fn files_copies_and_moves_go_on_identically() {
    for tested in quick_devices("block_reviver") {
        check_files(&tested, quantized(json!(0.5), 3));
        check_files(&tested, archived(json!(0.5), 20));
        check_files(&tested, json!({"policy": "kvreviver", "vague": "summary", "budget": 0.5}));
    }
}

fn check_files(tested: &TestDevice, config: Value) {
    let reviver = policy(config);
    let run = Run::new(2, 2, 300, 160, &tested.device);
    let mut cache = run.prompt.compress(&*reviver, run.steps());
    for index in 0..70 {
        run.step(&*reviver, &mut cache, index);
    }
    let name = format!("quantized-{}-{}", std::process::id(), tested.name);
    let folder = std::env::temp_dir().join(name);
    let whole =
        KvCache { layers: vec![cache.clone()], seen: vec![370; 2], origin: Origin::default() };
    whole.save(&folder).unwrap();
    let mut loaded = KvCache::load(&folder, &tested.device).unwrap().layers.remove(0);
    std::fs::remove_file(&folder).unwrap();
    reviver.restore(&mut loaded).unwrap();
    let hosted = whole.clone().into_host().unwrap().into_device(&tested.device).unwrap();
    let mut hosted = hosted.layers.into_iter().next().unwrap();
    let mut moved = cache.clone().to_device(&tested.device);
    assert_eq!(loaded.memory(), cache.memory());
    for index in 70..160 {
        let expected = run.step(&*reviver, &mut cache, index);
        for other in [&mut loaded, &mut hosted, &mut moved] {
            let output = run.step(&*reviver, other, index);
            assert_eq!(output, expected, "{} step {index}", tested.name);
        }
    }
    assert_eq!(vague(&loaded), vague(&cache));
}

#[test]
fn forms_of_the_vague_part_are_chosen_by_name() {
    let form =
        |vague: Value| build(&json!({"policy": "kvreviver", "budget": 0.25, "vague": vague}));
    let config = form(json!("archive")).unwrap().config();
    assert_eq!((&config["vague"], &config["revived"]), (&json!("archive"), &json!(64)));
    assert_eq!(build(&config).unwrap().config(), config);
    let config = form(json!("quantized")).unwrap().config();
    assert_eq!(config["vague"], "quantized");
    assert_eq!(build(&config).unwrap().config(), config);
    let default = build(&json!({"policy": "kvreviver", "budget": 0.25})).unwrap();
    assert_eq!(default.config(), config);
    assert_eq!(config["candidates"]["policy"], "snapkv");
    // Accumulated attention.
    let own = json!({"policy": "kvreviver", "budget": 0.25, "candidates": null});
    let own = build(&own).unwrap().config();
    assert!(own["candidates"].is_null());
    assert_eq!(build(&own).unwrap().config(), own);
    // The paper's form, by an option that no other form has, too.
    for option in ["candidate", "sketch_share", "buckets", "slack", "replace_rate", "rebuild"] {
        let mut own = form(json!("sketch")).unwrap().config();
        let value = own[option].clone();
        own = json!({"policy": "kvreviver", "budget": 0.25});
        own[option] = value;
        assert_eq!(build(&own).unwrap().config()["vague"], "sketch", "{option}");
    }
    // The sketch's share by its earlier name.
    let paper = form(json!("sketch")).unwrap().config();
    assert_eq!(paper["sketch_share"], 0.1);
    let share = json!({"policy": "kvreviver", "budget": 0.25, "vague": 0.2, "recent": 0.4,
        "candidate": 0.4});
    assert_eq!(build(&share).unwrap().config()["sketch_share"], 0.2);
    let refused = |config: Value| build(&config).unwrap_err().to_string();
    let unknown = refused(json!({"policy": "kvreviver", "budget": 0.25, "vague": "fuzzy"}));
    assert!(unknown.contains("fuzzy") && unknown.contains("quantized"), "{unknown}");
    let bits = refused(quantized(json!(0.25), 9));
    assert!(bits.contains("`key_bits` is 9, expected 1 to 8"), "{bits}");
    let none = refused(archived(json!(0.25), 0));
    assert!(none.contains("`revived` is 0, expected at least 1"), "{none}");
    // Each form has options of its own.
    let mut other = archived(json!(0.25), 8);
    other["key_bits"] = json!(2);
    let other = refused(other);
    assert!(other.contains("unknown field `key_bits`") && other.contains("`revived`"), "{other}");
    let mut share = quantized(json!(0.25), 2);
    share["exact"] = json!(0.0);
    assert!(refused(share).contains("`exact` is 0"), "");
    let one = refused(quantized(json!(1), 2));
    assert!(one.contains("at least 2"), "{one}");
}
