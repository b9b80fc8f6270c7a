//! Attention over slots and over prompts.

use burn::tensor::{DType, Distribution, Int, Tensor, TensorData};
use kv_kernels::{
    DecodeAttentionOptions, EvictionOptions, EvictionScope, HeldSlots, Memory, NO_RECORD,
    PrefillOptions, PrefillWindow, Share, SlotRanges, SlotView, decode_attention,
    evicting_attention, log_norms, prefill_attention,
};

use super::KernelBench;
use super::cases::Attention;
use super::clock::Clock;

/// Share of the slots that index lists name.
const LISTED: usize = 8;

/// Plain, weighted, with an eviction, and over an index list.
pub(super) fn decode(bench: &mut KernelBench<'_>, case: &Attention) -> anyhow::Result<()> {
    let (pairs, dim) = (case.pairs(), case.head_dim);
    let slots = pairs * case.tokens;
    let bytes = 2 * slots * dim * bench.dtype.size();
    let sets = Clock::sets(bytes);
    // Of an eighth of the bytes, more sets must pass before one comes again.
    let list_sets = Clock::sets(bytes / LISTED);
    let (device, dtype) = (bench.device.clone(), bench.dtype);
    let random = |shape: [usize; 2]| {
        Tensor::<2>::random(shape, Distribution::Normal(0.0, 1.0), (&device, DType::F32))
            .cast(dtype)
    };
    let pools: Vec<[Tensor<2>; 2]> =
        (0..list_sets).map(|_| [random([slots, dim]), random([slots, dim])]).collect();
    let query = random([case.batch * case.query_heads, dim]);
    let query = query.reshape([case.batch, case.query_heads, dim]);
    let ints = |values: Vec<i32>, shape: [usize; 2]| {
        Tensor::<2, Int>::from_data(TensorData::new(values, shape), (&device, DType::I32))
    };
    let shape = [case.batch, case.kv_heads];
    let first = |pair: usize| (pair * case.tokens) as i32;
    let ranges = SlotRanges {
        offsets: ints((0..pairs).map(first).collect(), shape),
        lengths: ints(vec![case.tokens as i32; pairs], shape),
    };
    let task = format!("decode_attention {}", case.name());
    let options = || DecodeAttentionOptions {
        longest: Some(case.tokens),
        ..DecodeAttentionOptions::default()
    };
    let attend = |i: usize, weights: Option<Tensor<1>>, options| {
        let [keys, values]: [Tensor<2>; 2] = pools[i].clone();
        Ok(decode_attention(query.clone(), keys, values, weights, &ranges, options)?.output)
    };
    let work = [bytes as f64, 0.0];
    bench.measure(&task, "", sets, work, |i| attend(i, None, options()))?;
    let weights: Vec<Tensor<1>> =
        (0..sets).map(|_| Tensor::zeros([slots], (&device, DType::F32))).collect();
    bench.measure(&task, "weighted", sets, work, |i| {
        attend(i, Some(weights[i].clone()), options())
    })?;
    evicting(bench, case, &query, &pools[..sets], &ranges)?;

    let listed = case.tokens / LISTED;
    // Ascending and irregular: one of every eight.
    let of_pair = |pair: usize| {
        (0..listed).map(move |i| first(pair) + (i * LISTED + (i * 5 + pair * 3) % LISTED) as i32)
    };
    let list: Vec<i32> = (0..pairs).flat_map(of_pair).collect();
    let list = Tensor::<1, Int>::from_data(list.as_slice(), (&device, DType::I32));
    let list = list.reshape([case.batch, case.kv_heads, listed]);
    let counts = ints(vec![listed as i32; pairs], shape);
    // Each in memory of its own.
    let lists: Vec<_> = (0..list_sets).map(|_| list.clone().add_scalar(0)).collect();
    let work = [bytes as f64 / LISTED as f64, 0.0];
    bench.measure(&task, "list of 1/8", list_sets, work, |i| {
        let view = SlotView::List { slots: lists[i].clone(), counts: counts.clone() };
        attend(i, None, DecodeAttentionOptions { view, ..options() })
    })
}

/// Attention that chooses a slot to overwrite.
fn evicting(
    bench: &mut KernelBench<'_>,
    case: &Attention,
    query: &Tensor<3>,
    pools: &[[Tensor<2>; 2]],
    ranges: &SlotRanges,
) -> anyhow::Result<()> {
    let norms = pools.iter().map(|[_, values]| log_norms(values.clone()));
    let norms: Vec<Tensor<1>> = norms.collect();
    let limits = ranges.lengths.clone();
    let mut places = ranges.lengths.clone().sub_scalar(1);
    let counters = [case.batch, HeldSlots::ARRIVALS];
    let mut arrivals = Tensor::<2, Int>::zeros(counters, (&places.device(), DType::I32));
    let bytes = 2 * case.pairs() * case.tokens * case.head_dim * bench.dtype.size();
    let task = format!("decode_attention {}", case.name());
    let slots = norms[0].dims()[0];
    let mut records = Tensor::<1>::full([slots], NO_RECORD, (&places.device(), DType::F32));
    let now = Tensor::<1, Int>::full([case.batch], 1_000, (&places.device(), DType::I32));
    let scopes = [
        ("evicting", EvictionScope::Head, false),
        ("evicting for a layer", EvictionScope::Layer, false),
        ("evicting for a layer, remembering", EvictionScope::Layer, true),
    ];
    for (variant, scope, remembers) in scopes {
        bench.measure(&task, variant, pools.len(), [bytes as f64, 0.0], |i| {
            let longest = Some(case.tokens);
            let done = evicting_attention(
                query.clone(),
                pools[i].clone(),
                None,
                ranges,
                HeldSlots {
                    log_norms: norms[i].clone(),
                    limits: limits.clone(),
                    places: &mut places,
                    arrivals: &mut arrivals,
                    memory: remembers.then(|| Memory {
                        records: &mut records,
                        now: now.clone(),
                        decay: 0.99,
                    }),
                },
                EvictionOptions { longest, scope, ..EvictionOptions::default() },
            )?;
            Ok(done.output)
        })?;
    }
    Ok(())
}

/// Causal attention of a prompt, and its column sums.
pub(super) fn prefill(bench: &mut KernelBench<'_>, case: &Attention) -> anyhow::Result<()> {
    let (device, dtype) = (bench.device.clone(), bench.dtype);
    let random = |heads: usize| {
        let shape = [case.batch, heads, case.tokens, case.head_dim];
        Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), (&device, DType::F32))
            .cast(dtype)
    };
    let sets: Vec<[Tensor<4>; 3]> = (0..2)
        .map(|_| [random(case.query_heads), random(case.kv_heads), random(case.kv_heads)])
        .collect();
    let rows = (case.batch * case.tokens * case.head_dim * dtype.size()) as f64;
    let bytes = rows * (2 * case.query_heads + 2 * case.kv_heads) as f64;
    // Half of the matrix: two products of two operations.
    let operations =
        2.0 * (case.batch * case.query_heads * case.head_dim) as f64 * (case.tokens as f64).powi(2);
    let task = format!("prefill_attention {}", case.name());
    let all = PrefillOptions::default();
    let variants = [
        ("", all),
        ("column sums", PrefillOptions { column_sums: Some(usize::MAX), ..all }),
        ("last 32 queries' sums", PrefillOptions { column_sums: Some(32), ..all }),
        (
            "window 1024, 4 sinks",
            PrefillOptions { window: PrefillWindow::Last(1024), sinks: 4, ..all },
        ),
        (
            "window from 0.3 on, 16 sinks",
            PrefillOptions { window: PrefillWindow::From(Share::new(0.3)), sinks: 16, ..all },
        ),
    ];
    for (variant, options) in variants {
        bench.measure(&task, variant, sets.len(), [bytes, operations], |i| {
            let [query, keys, values] = &sets[i];
            let done = prefill_attention(query, keys, values, &options)?;
            Ok((done.output, done.column_sums))
        })?;
    }
    Ok(())
}
