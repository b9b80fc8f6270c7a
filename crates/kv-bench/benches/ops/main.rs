//! Ops at a small size, on every device that is compiled in and there:
//! `cargo bench -p kv-bench [--features wgpu] [-- FILTER]`. Here are the ops of a prompt and of
//! a plain decode step; ops of single policies are in `policies.rs`, `sketches.rs` and
//! `reading.rs`.
//!
//! Times include the launch and the wait for the device. For large sizes there is the suite
//! `kernels`.

#![allow(clippy::unwrap_used)]

mod inputs;
mod policies;
mod reading;
mod sketches;

use criterion::{Criterion, criterion_group, criterion_main};
use kv_kernels::{
    BalanceOptions, BalanceStrategy, Centre, Choice, DecodeAttentionOptions, DrawSettings,
    DrawState, Draws, HeadLayout, KeepLists, LinearOptions, Placement, PrefillOptions,
    PrefillWindow, RotaryTable, RowNorm, SlotPool, SlotRanges, SlotSource, add_rms_norm,
    argmin_slots, assign, assign_ints, balance, compact_slots, copy_slots, decode_attention, draw,
    linear, prefill_attention, rms_norm, scatter_ints, scatter_rows, scatter_scalars, split_heads,
    split_keys_values, swiglu, top_slots, uniforms, write_heads,
};
use kv_testing::{Numbers, devices};

use inputs::{
    BATCH, CAPACITY, GROUP, HEAD_DIM, HIDDEN, Inputs, KV_HEADS, PROMPT, VOCABULARY, bench,
};

fn ops(criterion: &mut Criterion) {
    for tested in devices() {
        let mut inputs = Inputs { device: tested.device.clone(), numbers: Numbers::new(1) };
        attention(criterion, tested.name, &mut inputs);
        products(criterion, tested.name, &mut inputs);
        slots(criterion, tested.name, &mut inputs);
        tokens(criterion, tested.name, &mut inputs);
        policies::attention(criterion, tested.name, &mut inputs);
        policies::merging(criterion, tested.name, &mut inputs);
        sketches::sketches(criterion, tested.name, &mut inputs);
        sketches::archives(criterion, tested.name, &mut inputs);
        reading::reading(criterion, tested.name, &mut inputs);
    }
}

fn attention(criterion: &mut Criterion, name: &str, inputs: &mut Inputs) {
    let device = inputs.device.clone();
    let slots = BATCH * KV_HEADS * CAPACITY;
    let query = inputs.floats([BATCH, KV_HEADS * GROUP, HEAD_DIM]);
    let (keys, values) = (inputs.floats([slots, HEAD_DIM]), inputs.floats([slots, HEAD_DIM]));
    let ranges = inputs.ranges(CAPACITY);
    bench(criterion, "decode_attention", name, &device, || {
        let options = DecodeAttentionOptions::default();
        let (query, keys, values) = (query.clone(), keys.clone(), values.clone());
        decode_attention(query, keys, values, None, &ranges, options).unwrap();
    });
    let query = inputs.floats([1, KV_HEADS * GROUP, PROMPT, HEAD_DIM]);
    let keys = inputs.floats([1, KV_HEADS, PROMPT, HEAD_DIM]);
    let all = PrefillOptions::default();
    let sums = PrefillOptions { column_sums: Some(usize::MAX), ..all };
    let window = PrefillOptions { window: PrefillWindow::Last(32), sinks: 4, ..all };
    for (op, options) in [
        ("prefill_attention", all),
        ("prefill_attention_column_sums", sums),
        ("prefill_attention_window", window),
    ] {
        bench(criterion, op, name, &device, || {
            prefill_attention(&query, &keys, &keys, &options).unwrap();
        });
    }
}

fn products(criterion: &mut Criterion, name: &str, inputs: &mut Inputs) {
    let device = inputs.device.clone();
    let x = inputs.floats([BATCH, HIDDEN]);
    let weight = inputs.floats([2 * HIDDEN, HIDDEN]);
    let gain = inputs.floats([HIDDEN]);
    let wide = inputs.floats([BATCH, 2 * HIDDEN]);
    bench(criterion, "linear", name, &device, || {
        linear(x.clone(), weight.clone(), LinearOptions::default()).unwrap();
    });
    bench(criterion, "linear_gated", name, &device, || {
        let options = LinearOptions { gated: true, ..Default::default() };
        linear(x.clone(), weight.clone(), options).unwrap();
    });
    bench(criterion, "linear_norm_residual", name, &device, || {
        let norm = Some(RowNorm { weight: gain.clone(), epsilon: 1e-5 });
        let options = LinearOptions { norm, residual: Some(wide.clone()), ..Default::default() };
        linear(x.clone(), weight.clone(), options).unwrap();
    });
    bench(criterion, "rms_norm", name, &device, || {
        rms_norm(x.clone(), gain.clone(), 1e-5).unwrap();
    });
    bench(criterion, "add_rms_norm", name, &device, || {
        add_rms_norm(x.clone(), x.clone(), gain.clone(), 1e-5).unwrap();
    });
    bench(criterion, "swiglu", name, &device, || {
        swiglu(x.clone()).unwrap();
    });
}

fn slots(criterion: &mut Criterion, name: &str, inputs: &mut Inputs) {
    let device = inputs.device.clone();
    let pairs = BATCH * KV_HEADS;
    let slots = pairs * CAPACITY;
    let (mut keys, mut values) =
        (inputs.floats([slots, HEAD_DIM]), inputs.floats([slots, HEAD_DIM]));
    let mut positions = inputs.ints([slots], |slot| slot);
    let scores = inputs.floats([slots]);
    let ranges = inputs.ranges(CAPACITY);
    bench(criterion, "argmin_slots", name, &device, || {
        argmin_slots(scores.clone(), &ranges, None).unwrap();
    });
    let lists = inputs.ints([pairs, CAPACITY], |slot| slot);
    let counts = inputs.ints([pairs], |_| CAPACITY);
    let seeds = inputs.ints([pairs, 2], |seed| seed);
    let log_gamma = inputs.floats([pairs]);
    bench(criterion, "balance", name, &device, || {
        let options = BalanceOptions {
            block: 256,
            span: 1,
            scale: None,
            log_gamma: log_gamma.clone(),
            value_offset: 0.025,
            centre: Centre::None,
            weights: None,
            draws: Draws::Seeds(seeds.clone()),
            halves: true,
            strategy: BalanceStrategy::Auto,
        };
        let values = Some(values.clone());
        balance(keys.clone(), values, lists.clone(), counts.clone(), options).unwrap();
    });
    let rows = scores.reshape([pairs, CAPACITY]);
    let counts = inputs.ints([pairs], |_| CAPACITY / 4);
    bench(criterion, "top_slots", name, &device, || {
        top_slots(rows.clone(), None, Choice::Top(counts.clone()), CAPACITY / 4).unwrap();
    });
    let kept = CAPACITY / 4;
    let lists = KeepLists {
        kept: inputs.ints([pairs * kept], |i| i % kept * 4),
        starts: inputs.ints([BATCH, KV_HEADS], |pair| pair * kept),
        counts: inputs.ints([BATCH, KV_HEADS], |_| kept),
        most: kept,
    };
    bench(criterion, "compact_slots", name, &device, || {
        let (keys, values, positions) = (&mut keys, &mut values, &mut positions);
        let pool = SlotPool { keys, values, positions, log_weights: None };
        compact_slots(pool, &ranges.offsets, &lists).unwrap();
    });
    let from = (inputs.floats([slots, HEAD_DIM]), inputs.ints([slots], |slot| slot));
    let taken = inputs.ints([pairs * kept], |i| i * 4);
    let to = inputs.ints([pairs * kept], |i| i);
    bench(criterion, "copy_slots", name, &device, || {
        let source =
            SlotSource { keys: &from.0, values: &from.0, positions: &from.1, log_weights: None };
        let (keys, values, positions) = (&mut keys, &mut values, &mut positions);
        let pool = SlotPool { keys, values, positions, log_weights: None };
        copy_slots(source, taken.clone(), pool, to.clone()).unwrap();
    });
    let rows = inputs.floats([pairs, HEAD_DIM]);
    let last = inputs.ints([pairs], |pair| pair * CAPACITY);
    bench(criterion, "scatter_rows", name, &device, || {
        scatter_rows(&mut keys, last.clone(), rows.clone()).unwrap();
    });
    let mut scalars = inputs.floats([slots]);
    let numbers = inputs.floats([pairs]);
    bench(criterion, "scatter_scalars", name, &device, || {
        scatter_scalars(&mut scalars, last.clone(), numbers.clone()).unwrap();
    });
    bench(criterion, "scatter_ints", name, &device, || {
        scatter_ints(&mut positions, last.clone(), last.clone()).unwrap();
    });
    let (floats, ints) = (inputs.floats([slots]), inputs.ints([slots], |slot| slot));
    bench(criterion, "assign", name, &device, || {
        assign(&mut scalars, floats.clone()).unwrap();
    });
    bench(criterion, "assign_ints", name, &device, || {
        assign_ints(&mut positions, ints.clone()).unwrap();
    });
}

fn tokens(criterion: &mut Criterion, name: &str, inputs: &mut Inputs) {
    let device = inputs.device.clone();
    let mut table = || inputs.floats([CAPACITY, HEAD_DIM / 2]);
    let rope = Some(RotaryTable { cos: table(), sin: table() });
    let layout = HeadLayout {
        query_heads: KV_HEADS * GROUP,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        rope,
        norms: None,
    };
    let prompt = inputs.floats([BATCH * 32, layout.width()]);
    let of_prompt = inputs.ints([BATCH, 32], |i| i % 32);
    bench(criterion, "split_heads", name, &device, || {
        split_heads(prompt.clone(), of_prompt.clone(), &layout).unwrap();
    });
    let without_queries = inputs.floats([BATCH * 32, 2 * KV_HEADS * HEAD_DIM]);
    bench(criterion, "split_keys_values", name, &device, || {
        split_keys_values(without_queries.clone(), of_prompt.clone(), &layout).unwrap();
    });
    let seeds = inputs.ints([BATCH, 2], |seed| seed);
    let draws = inputs.ints([BATCH], |draw| draw);
    bench(criterion, "uniforms", name, &device, || {
        uniforms(seeds.clone(), draws.clone()).unwrap();
    });
    let slots = BATCH * KV_HEADS * CAPACITY;
    let (mut keys, mut values) =
        (inputs.floats([slots, HEAD_DIM]), inputs.floats([slots, HEAD_DIM]));
    let mut positions = inputs.ints([slots], |slot| slot);
    let projected = inputs.floats([BATCH, layout.width()]);
    let now = inputs.ints([BATCH], |_| 7);
    let mut ranges = SlotRanges {
        offsets: inputs.ints([BATCH, KV_HEADS], |pair| pair * CAPACITY),
        lengths: inputs.ints([BATCH, KV_HEADS], |_| 8),
    };
    let next = inputs.ints([BATCH, KV_HEADS], |_| 7);
    let mut log_norms = inputs.floats([slots]);
    bench(criterion, "write_heads", name, &device, || {
        let (keys, values, positions) = (&mut keys, &mut values, &mut positions);
        let pool = SlotPool { keys, values, positions, log_weights: None };
        // Over the newest slot, so that lengths stay.
        let (ranges, log_norms) = (&mut ranges, &mut log_norms);
        let placement = Placement::Next { ranges, places: &next, log_norms };
        write_heads(projected.clone(), now.clone(), &layout, pool, placement).unwrap();
    });
    let logits = inputs.floats([BATCH, VOCABULARY]);
    let greedy = DrawSettings { temperature: 0.0, top_k: None, top_p: None, min_p: None, seed: 1 };
    let drawn =
        DrawSettings { temperature: 0.8, top_k: Some(50), top_p: Some(0.9), min_p: None, seed: 1 };
    for (op, settings) in [("draw_greedy", greedy), ("draw", drawn)] {
        let mut state = DrawState::new(&[settings; BATCH], &[0; BATCH], &device).unwrap();
        bench(criterion, op, name, &device, || {
            draw(logits.clone(), &mut state).unwrap();
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = ops
}
criterion_main!(benches);
