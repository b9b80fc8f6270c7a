//! Every kernel of the ops that have several, forced, at a few shapes: the measurements behind the
//! choice that an op makes on its own.

use std::fmt::Debug;

use burn::tensor::{DType, Distribution, Int, Tensor, TensorData};
use kv_kernels::{
    BalanceStrategy, CisSelectOptions, CisStrategy, DecodeAttentionOptions, DecodeStrategy,
    Dilation, Earlier, EvictionOptions, EvictionScope, EvictionStrategy, HEAD_FIELDS, HeldSlots,
    IndexSets, KernelError, LinearOptions, LinearStrategy, NearestSlotsOptions,
    NearestSlotsStrategy, PrefillOptions, PrefillStrategy, QuantizedStrategy, ScoreReduction,
    SetRule, Share, SignatureStrategy, SimilarityReduction, SketchHashes, SketchSource,
    SketchStrategy, SketchedTokens, SlotLists, SlotRanges, cis_attention, decode_attention,
    evicting_attention, linear, log_norms, nearest_slots, prefill_attention, sketch_attention,
};

use super::KernelBench;
use super::archive::ArchivedStep;
use super::cases::{
    Archived, Attention, Halving, Nearest, Product, Quantized, Sketched, Strategies,
};
use super::clock::{Clock, LaunchOutput};
use super::quantized::QuantizedStep;
use super::slots::Lists;
use crate::options::Op;

/// Slots that CIS attends to: sinks, slots of the highest attention, locals (PrHS, section V).
const CIS_READ: [usize; 3] = [16, 432, 64];

/// Times every kernel that the device has.
///
/// # Errors
/// Where a kernel refuses a shape that it serves.
pub(super) fn run(
    bench: &mut KernelBench<'_>,
    cases: &Strategies,
    wanted: impl Fn(Op) -> bool,
) -> anyhow::Result<()> {
    if wanted(Op::DecodeAttention) {
        cases.decode_attention.iter().try_for_each(|case| decode(bench, case))?;
        cases.decode_attention.iter().try_for_each(|case| evicting(bench, case))?;
    }
    if wanted(Op::SketchAttention) {
        cases.sketch_attention.iter().try_for_each(|case| sketched(bench, case))?;
    }
    if wanted(Op::QuantizedAttention) {
        cases.quantized_attention.iter().try_for_each(|case| quantized(bench, case))?;
    }
    if wanted(Op::ArchivedAttention) {
        cases.archived_attention.iter().try_for_each(|case| archived(bench, case))?;
    }
    if wanted(Op::PrefillAttention) {
        cases.prefill_attention.iter().try_for_each(|case| prefill(bench, case))?;
    }
    if wanted(Op::Linear) {
        cases.linear.iter().try_for_each(|case| product(bench, case))?;
    }
    if wanted(Op::NearestSlots) {
        cases.nearest_slots.iter().try_for_each(|case| nearest(bench, case))?;
    }
    if wanted(Op::Balance) {
        cases.balance.iter().try_for_each(|case| halve(bench, case))?;
    }
    if wanted(Op::CisAttention) {
        cases.cis_attention.iter().try_for_each(|case| cis(bench, case))?;
    }
    Ok(())
}

/// Times each strategy that serves a case.
fn each<S: Copy + Debug, L: LaunchOutput>(
    bench: &mut KernelBench<'_>,
    task: &str,
    sets: usize,
    work: [f64; 2],
    strategies: &[S],
    mut call: impl FnMut(usize, S) -> Result<L, KernelError>,
) -> anyhow::Result<()> {
    for &strategy in strategies {
        match call(0, strategy) {
            Err(KernelError::Unavailable { .. }) => continue,
            first => first?.check()?,
        }
        let variant = format!("{strategy:?}");
        bench.measure(task, &variant, sets, work, |i| Ok(call(i, strategy)?))?;
    }
    Ok(())
}

/// Queries, pools of keys and values, and ranges of a decode step.
struct Step {
    query: Tensor<3>,
    pools: Vec<[Tensor<2>; 2]>,
    ranges: SlotRanges,
    task: String,
    bytes: usize,
}

impl Step {
    fn new(bench: &KernelBench<'_>, op: &str, case: &Attention) -> Self {
        let Attention { batch, query_heads, kv_heads, tokens, head_dim } = *case;
        let slots = case.pairs() * tokens;
        let bytes = 2 * slots * head_dim * bench.dtype.size();
        let pool = || normal(bench, [slots, head_dim]);
        let pools = (0..Clock::sets(bytes)).map(|_| [pool(), pool()]).collect();
        let query = normal(bench, [batch * query_heads, head_dim]);
        let query = query.reshape([batch, query_heads, head_dim]);
        let ints = |value: &dyn Fn(usize) -> usize| {
            let values: Vec<i32> = (0..case.pairs()).map(|pair| value(pair) as i32).collect();
            let data = TensorData::new(values, [batch, kv_heads]);
            Tensor::<2, Int>::from_data(data, (&bench.device, DType::I32))
        };
        let ranges =
            SlotRanges { offsets: ints(&|pair| pair * tokens), lengths: ints(&|_| tokens) };
        Self { query, pools, ranges, task: format!("{op} {}", case.name()), bytes }
    }
}

fn decode(bench: &mut KernelBench<'_>, case: &Attention) -> anyhow::Result<()> {
    let Step { query, pools, ranges, task, bytes } = Step::new(bench, "decode_attention", case);
    let strategies =
        [DecodeStrategy::Portable, DecodeStrategy::TensorCore, DecodeStrategy::TensorCoreCluster];
    each(bench, &task, pools.len(), [bytes as f64, 0.0], &strategies, |i, strategy| {
        let [keys, values] = pools[i].clone();
        let longest = Some(case.tokens);
        let options =
            DecodeAttentionOptions { longest, strategy, ..DecodeAttentionOptions::default() };
        Ok(decode_attention(query.clone(), keys, values, None, &ranges, options)?.output)
    })
}

/// With a slot for each head to overwrite, and with one for all heads of a layer.
fn evicting(bench: &mut KernelBench<'_>, case: &Attention) -> anyhow::Result<()> {
    let Step { query, pools, ranges, task, bytes } = Step::new(bench, "evicting_attention", case);
    let norms: Vec<_> = pools.iter().map(|[_, values]| log_norms(values.clone())).collect();
    let mut places = ranges.lengths.clone().sub_scalar(1);
    let counters = [case.batch, HeldSlots::ARRIVALS];
    let mut arrivals = Tensor::zeros(counters, (&bench.device, DType::I32));
    let strategies = [
        EvictionStrategy::Portable,
        EvictionStrategy::TensorCore,
        EvictionStrategy::TensorCoreInPlace,
        EvictionStrategy::TensorCoreCluster,
    ];
    for (scope, what) in [(EvictionScope::Head, "a head"), (EvictionScope::Layer, "a layer")] {
        let task = format!("{task}, for {what}");
        let work = [bytes as f64, 0.0];
        each(bench, &task, pools.len(), work, &strategies, |i, strategy| {
            let held = HeldSlots {
                log_norms: norms[i].clone(),
                limits: ranges.lengths.clone(),
                places: &mut places,
                arrivals: &mut arrivals,
                memory: None,
            };
            let longest = Some(case.tokens);
            let options =
                EvictionOptions { longest, scope, strategy, ..EvictionOptions::default() };
            let pool = pools[i].clone();
            Ok(evicting_attention(query.clone(), pool, None, &ranges, held, options)?.output)
        })?;
    }
    Ok(())
}

fn sketched(bench: &mut KernelBench<'_>, case: &Sketched) -> anyhow::Result<()> {
    let Sketched { attention, slots, buckets, entries } = *case;
    let Attention { batch, tokens, head_dim, .. } = attention;
    let total_kv_heads = attention.pairs();
    let exact = Attention { tokens: slots, ..attention };
    let step = Step::new(bench, "sketch_attention", &exact);
    let most_entries = buckets * entries;
    let heads = (0..total_kv_heads)
        .flat_map(|head| [head * most_entries, entries, head * tokens, tokens, slots, slots / 2]);
    let heads: Vec<i32> = heads.map(|field| field as i32).collect();
    let heads = TensorData::new(heads, [total_kv_heads, HEAD_FIELDS]);
    let heads = Tensor::<2, Int>::from_data(heads, (&bench.device, DType::I32));
    let rows = || normal(bench, [total_kv_heads * most_entries, head_dim]).cast(DType::F32);
    let [keys, values] = [rows(), rows()];
    let seeds: Vec<[u32; 2]> = (0..total_kv_heads as u32).map(|head| [head, 1]).collect();
    let hashes = SketchHashes::seeded(&seeds, buckets, &bench.device);
    let sketch = SketchSource {
        keys: &keys,
        values: &values,
        heads: &heads,
        most_entries,
        hashes: &hashes,
        signed_keys: true,
    };
    let scores = Tensor::<1>::ones([total_kv_heads * tokens], (&bench.device, DType::F32));
    let newest = Tensor::full([batch], tokens as i32 - 1, (&bench.device, DType::I32));
    let name = attention.name();
    let task = format!("sketch_attention {name}, {slots} slots and {buckets}x{entries} entries");
    let bytes = step.bytes + 2 * total_kv_heads * most_entries * head_dim * DType::F32.size();
    let work = [bytes as f64, 0.0];
    let strategies =
        [SketchStrategy::Portable, SketchStrategy::TensorCore, SketchStrategy::TensorCoreCluster];
    each(bench, &task, step.pools.len(), work, &strategies, |i, strategy| {
        let longest = tokens;
        let tokens = SketchedTokens { sketch, scores: &scores, newest: &newest, longest, strategy };
        let (query, pool) = (step.query.clone(), step.pools[i].clone());
        Ok(sketch_attention(query, pool, &step.ranges, slots, tokens)?.output)
    })
}

/// Scores alone: attention over archived slots has one kernel.
fn archived(bench: &mut KernelBench<'_>, case: &Archived) -> anyhow::Result<()> {
    let step = ArchivedStep::new(bench, case)?;
    let task = format!("signature_scores {}", case.name());
    let strategies = [SignatureStrategy::Portable, SignatureStrategy::TensorCore];
    each(bench, &task, 1, step.scored(), &strategies, |_, strategy| step.score(strategy))
}

fn quantized(bench: &mut KernelBench<'_>, case: &Quantized) -> anyhow::Result<()> {
    let step = QuantizedStep::new(bench, case)?;
    let task = format!("quantized_attention {}", case.name());
    let strategies = [QuantizedStrategy::Portable, QuantizedStrategy::TensorCore];
    each(bench, &task, step.pools.len(), step.work, &strategies, |i, strategy| {
        step.attend(i, strategy)
    })
}

fn prefill(bench: &mut KernelBench<'_>, case: &Attention) -> anyhow::Result<()> {
    let Attention { batch, query_heads, kv_heads, tokens, head_dim } = *case;
    let rows = |heads: usize| {
        let rows = normal(bench, [batch * heads * tokens, head_dim]);
        rows.reshape([batch, heads, tokens, head_dim])
    };
    let [query, keys, values] = [query_heads, kv_heads, kv_heads].map(rows);
    let bytes = 2 * batch * (query_heads + kv_heads) * tokens * head_dim * bench.dtype.size();
    let operations = 2.0 * (batch * query_heads * head_dim) as f64 * (tokens as f64).powi(2);
    let task = format!("prefill_attention {}", case.name());
    let strategies = [PrefillStrategy::Blocks, PrefillStrategy::Hopper];
    each(bench, &task, 1, [bytes as f64, operations], &strategies, |_, strategy| {
        let options = PrefillOptions { strategy, ..PrefillOptions::default() };
        Ok(prefill_attention(&query, &keys, &values, &options)?.output)
    })
}

fn product(bench: &mut KernelBench<'_>, case: &Product) -> anyhow::Result<()> {
    let Product { rows, inputs, outputs } = *case;
    let size = bench.dtype.size();
    let weight_bytes = inputs * outputs * size;
    let weights: Vec<Tensor<2>> =
        (0..Clock::sets(weight_bytes)).map(|_| normal(bench, [outputs, inputs])).collect();
    let x = normal(bench, [rows, inputs]);
    let bytes = weight_bytes + rows * (inputs + outputs) * size;
    let operations = 2.0 * rows as f64 * (inputs * outputs) as f64;
    let task = format!("linear {}", case.name());
    let strategies = [
        LinearStrategy::Portable,
        LinearStrategy::TensorCore,
        LinearStrategy::HopperSkinny,
        LinearStrategy::HopperSplit,
        LinearStrategy::HopperWide,
        LinearStrategy::Matmul,
    ];
    each(bench, &task, weights.len(), [bytes as f64, operations], &strategies, |i, strategy| {
        let options = LinearOptions { strategy, ..LinearOptions::default() };
        linear(x.clone(), weights[i].clone(), options)
    })
}

fn nearest(bench: &mut KernelBench<'_>, case: &Nearest) -> anyhow::Result<()> {
    let Nearest { lists, tokens, head_dim } = *case;
    let slots = lists * tokens;
    let keys = normal(bench, [slots, head_dim]);
    let all = Tensor::<1, Int>::arange(0..slots as i64, (&bench.device, DType::I32));
    let counts = Tensor::<1, Int>::full([lists], tokens as i32, (&bench.device, DType::I32));
    let slot_lists = SlotLists { slots: all.reshape([lists, tokens]), counts };
    let operations = 2.0 * (slots * tokens * head_dim) as f64;
    let bytes = (slots * head_dim * bench.dtype.size()) as f64;
    let task = format!("nearest_slots {lists}x{tokens}");
    let strategies = [NearestSlotsStrategy::Portable, NearestSlotsStrategy::TensorCore];
    each(bench, &task, 1, [bytes, operations], &strategies, |_, strategy| {
        let options = NearestSlotsOptions { earlier: true, strategy };
        Ok(nearest_slots(keys.clone(), &slot_lists, &slot_lists, options)?.cosines)
    })
}

fn halve(bench: &mut KernelBench<'_>, case: &Halving) -> anyhow::Result<()> {
    let lists = Lists::new(bench, case);
    let task = format!("balance {}", case.name());
    let strategies = [BalanceStrategy::Portable, BalanceStrategy::TensorCore];
    each(bench, &task, lists.pools.len(), lists.work, &strategies, |i, strategy| {
        lists.halve(i, strategy)
    })
}

/// Steps in which every range retrieves, in blocks of one step and of 16, and steps in which every
/// range shares.
fn cis(bench: &mut KernelBench<'_>, case: &Attention) -> anyhow::Result<()> {
    let step = Step::new(bench, "cis_attention", case);
    let Attention { batch, query_heads, kv_heads, tokens, head_dim } = *case;
    let total_kv_heads = case.pairs();
    let parts = query_heads / kv_heads;
    let vectors = normal(bench, [total_kv_heads * parts, head_dim]);
    let vectors = vectors.reshape([total_kv_heads, parts, head_dim]);
    let newest = Tensor::full([batch], tokens as i32 - 1, (&bench.device, DType::I32));
    let [sinks, top, locals] = CIS_READ;
    let strategies =
        [CisStrategy::Radix, CisStrategy::SplitRadix, CisStrategy::Histogram, CisStrategy::Fused];
    // No cosine is above 1, and all are above -2.
    for (block, threshold, what) in
        [(1, 1.0, "retrieve"), (16, 1.0, "retrieve"), (16, -2.0, "share")]
    {
        let rule = SetRule { sinks, locals, top, dilated: 0.0, threshold, wanted: None };
        let mut sets =
            IndexSets::new(&vec![rule; total_kv_heads], block, top, parts, head_dim, &bench.device);
        let task = format!("{}, blocks of {block}, all {what}", step.task);
        // The keys where ranges retrieve, and the rows attended to.
        let scored = if what == "share" { 0 } else { step.bytes / 2 };
        let bytes = scored + step.bytes * (sinks + top + locals) / tokens;
        let work = [bytes as f64, 0.0];
        each(bench, &task, step.pools.len(), work, &strategies, |i, strategy| {
            let options = CisSelectOptions {
                scale: None,
                radius: 0,
                dilation: Dilation::Shared,
                block,
                earlier: Earlier::Any,
                tail: false,
                reduction: ScoreReduction::Sum,
                similarity: SimilarityReduction::Mean,
                hidden: Share::default(),
                longest: Some(tokens),
                measures: false,
                strategy,
            };
            cis_attention(
                step.query.clone(),
                vectors.clone(),
                step.pools[i].clone(),
                &step.ranges,
                newest.clone(),
                &mut sets,
                options,
            )
        })?;
    }
    Ok(())
}

fn normal(bench: &KernelBench<'_>, shape: [usize; 2]) -> Tensor<2> {
    let normal = Distribution::Normal(0.0, 1.0);
    Tensor::<2>::random(shape, normal, (&bench.device, DType::F32)).cast(bench.dtype)
}
