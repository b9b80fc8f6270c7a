//! Every kernel of the ops that have several, forced, at a few shapes: the measurements behind the
//! choice that an op makes on its own.

use std::fmt::Debug;

use burn::tensor::{DType, Distribution, Int, Tensor, TensorData};
use kv_kernels::{
    BalanceStrategy, CisSelectOptions, CisStrategy, DecodeAttentionOptions, DecodeStrategy,
    Dilation, Earlier, EvictionOptions, EvictionScope, EvictionStrategy, HEAD_FIELDS, HeldSlots,
    IndexSets, KernelError, LinearOptions, LinearStrategy, NearestSlotsOptions,
    NearestSlotsStrategy, PrefillOptions, PrefillStrategy, ScoreReduction, SetRule, Share,
    SimilarityReduction, SketchHashes, SketchSource, SketchStrategy, SketchedTokens, SlotLists,
    SlotRanges, cis_attention, decode_attention, evicting_attention, linear, log_norms,
    nearest_slots, prefill_attention, sketch_attention,
};

use super::KernelBench;
use super::cases::{Attention, Halving, Product};
use super::clock::{Clock, LaunchOutput};
use super::slots::Lists;

/// Heads of Llama 3.1 8B.
const HEADS: [usize; 3] = [32, 8, 128];
/// Sequences and slots of decode attention.
const DECODE: [[usize; 2]; 11] = [
    [1, 1_024],
    [1, 2_048],
    [1, 3_200],
    [1, 4_096],
    [1, 16_384],
    [2, 2_048],
    [2, 3_200],
    [4, 3_200],
    [8, 3_200],
    [16, 4_096],
    [128, 3_200],
];
/// Sequences and tokens of attention over slots and sketches.
const SKETCHED: [[usize; 2]; 4] = [[1, 4_096], [1, 32_768], [8, 4_096], [16, 32_768]];
/// Of so many tokens one is a slot, and all others are in the sketch.
const EXACT: usize = 8;
/// Buckets of a sketch, and slots for each entry of a bucket.
const BUCKETS: [usize; 2] = [3, 27];
/// Tokens of a prompt.
const PREFILL: [usize; 3] = [128, 1_024, 8_192];
/// Rows of a product.
const ROWS: [usize; 7] = [1, 16, 32, 64, 128, 512, 2_048];
/// Inputs and outputs of a product.
const WIDTHS: [usize; 2] = [4_096, 4_096];
/// Lists, and slots of each. Every slot's nearest slot is sought in a second list of as many slots.
const LISTS: [[usize; 2]; 3] = [[8, 512], [8, 4_096], [128, 2_048]];
/// Lists that BalanceKV halves.
const HALVED: [Halving; 2] = [
    Halving { lists: 8, tokens: 4_096, block: 128, head_dim: HEADS[2] },
    Halving { lists: 128, tokens: 4_096, block: 128, head_dim: HEADS[2] },
];
/// Sequences and slots of CIS.
const CIS: [[usize; 2]; 6] =
    [[1, 2_048], [1, 8_192], [1, 32_768], [16, 2_048], [16, 8_192], [16, 32_768]];
/// Slots that CIS attends to: sinks, slots of the highest attention, locals (PrHS, section V).
const CIS_READ: [usize; 3] = [16, 432, 64];

/// Times every kernel that the device has.
///
/// # Errors
/// Where a kernel refuses a shape that it serves.
pub(super) fn run(bench: &mut KernelBench<'_>) -> anyhow::Result<()> {
    DECODE.into_iter().try_for_each(|sizes| decode(bench, sizes))?;
    DECODE.into_iter().try_for_each(|sizes| evicting(bench, sizes))?;
    SKETCHED.into_iter().try_for_each(|sizes| sketched(bench, sizes))?;
    PREFILL.into_iter().try_for_each(|tokens| prefill(bench, tokens))?;
    ROWS.into_iter().try_for_each(|rows| product(bench, rows))?;
    LISTS.into_iter().try_for_each(|sizes| nearest(bench, sizes))?;
    HALVED.iter().try_for_each(|case| halve(bench, case))?;
    CIS.into_iter().try_for_each(|sizes| cis(bench, sizes))
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
    fn new(bench: &KernelBench<'_>, op: &str, [batch, tokens]: [usize; 2]) -> Self {
        let [query_heads, kv_heads, head_dim] = HEADS;
        let case = Attention { batch, query_heads, kv_heads, tokens, head_dim };
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

fn decode(bench: &mut KernelBench<'_>, sizes: [usize; 2]) -> anyhow::Result<()> {
    let Step { query, pools, ranges, task, bytes } = Step::new(bench, "decode_attention", sizes);
    let strategies =
        [DecodeStrategy::Portable, DecodeStrategy::TensorCore, DecodeStrategy::TensorCoreCluster];
    each(bench, &task, pools.len(), [bytes as f64, 0.0], &strategies, |i, strategy| {
        let [keys, values] = pools[i].clone();
        let longest = Some(sizes[1]);
        let options =
            DecodeAttentionOptions { longest, strategy, ..DecodeAttentionOptions::default() };
        Ok(decode_attention(query.clone(), keys, values, None, &ranges, options)?.output)
    })
}

/// With a slot for each head to overwrite, and with one for all heads of a layer.
fn evicting(bench: &mut KernelBench<'_>, sizes: [usize; 2]) -> anyhow::Result<()> {
    let Step { query, pools, ranges, task, bytes } = Step::new(bench, "evicting_attention", sizes);
    let norms: Vec<_> = pools.iter().map(|[_, values]| log_norms(values.clone())).collect();
    let mut places = ranges.lengths.clone().sub_scalar(1);
    let counters = [sizes[0], HeldSlots::ARRIVALS];
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
            };
            let longest = Some(sizes[1]);
            let options =
                EvictionOptions { longest, scope, strategy, ..EvictionOptions::default() };
            let pool = pools[i].clone();
            Ok(evicting_attention(query.clone(), pool, None, &ranges, held, options)?.output)
        })?;
    }
    Ok(())
}

fn sketched(bench: &mut KernelBench<'_>, [batch, tokens]: [usize; 2]) -> anyhow::Result<()> {
    let exact = tokens / EXACT;
    let step = Step::new(bench, "sketch_attention", [batch, exact]);
    let [query_heads, kv_heads, head_dim] = HEADS;
    let total_kv_heads = batch * kv_heads;
    let [buckets, each_entry] = BUCKETS;
    let entries = exact / each_entry;
    let most_entries = buckets * entries;
    let heads = (0..total_kv_heads)
        .flat_map(|head| [head * most_entries, entries, head * tokens, tokens, exact, exact / 2]);
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
    let task = format!(
        "sketch_attention {batch}x{query_heads}x{kv_heads}x{tokens}, {exact} slots and \
         {buckets}x{entries} entries"
    );
    let bytes = step.bytes + 2 * total_kv_heads * most_entries * head_dim * DType::F32.size();
    let work = [bytes as f64, 0.0];
    let strategies =
        [SketchStrategy::Portable, SketchStrategy::TensorCore, SketchStrategy::TensorCoreCluster];
    each(bench, &task, step.pools.len(), work, &strategies, |i, strategy| {
        let longest = tokens;
        let tokens = SketchedTokens { sketch, scores: &scores, newest: &newest, longest, strategy };
        let (query, pool) = (step.query.clone(), step.pools[i].clone());
        Ok(sketch_attention(query, pool, &step.ranges, exact, tokens)?.output)
    })
}

fn prefill(bench: &mut KernelBench<'_>, tokens: usize) -> anyhow::Result<()> {
    let [query_heads, kv_heads, head_dim] = HEADS;
    let rows = |heads: usize| {
        normal(bench, [heads * tokens, head_dim]).reshape([1, heads, tokens, head_dim])
    };
    let [query, keys, values] = [query_heads, kv_heads, kv_heads].map(rows);
    let bytes = 2 * (query_heads + kv_heads) * tokens * head_dim * bench.dtype.size();
    let operations = 2.0 * (query_heads * head_dim) as f64 * (tokens as f64).powi(2);
    let task = format!("prefill_attention 1x{query_heads}x{kv_heads}x{tokens}");
    let strategies = [PrefillStrategy::Blocks, PrefillStrategy::Hopper];
    each(bench, &task, 1, [bytes as f64, operations], &strategies, |_, strategy| {
        let options = PrefillOptions { strategy, ..PrefillOptions::default() };
        Ok(prefill_attention(&query, &keys, &values, &options)?.output)
    })
}

fn product(bench: &mut KernelBench<'_>, rows: usize) -> anyhow::Result<()> {
    let [inputs, outputs] = WIDTHS;
    let size = bench.dtype.size();
    let weight_bytes = inputs * outputs * size;
    let weights: Vec<Tensor<2>> =
        (0..Clock::sets(weight_bytes)).map(|_| normal(bench, [outputs, inputs])).collect();
    let x = normal(bench, [rows, inputs]);
    let bytes = weight_bytes + rows * (inputs + outputs) * size;
    let operations = 2.0 * rows as f64 * (inputs * outputs) as f64;
    let task = format!("linear {}", Product { rows, inputs, outputs }.name());
    let strategies = [
        LinearStrategy::Portable,
        LinearStrategy::TensorCore,
        LinearStrategy::HopperSkinny,
        LinearStrategy::HopperWide,
        LinearStrategy::Matmul,
    ];
    each(bench, &task, weights.len(), [bytes as f64, operations], &strategies, |i, strategy| {
        let options = LinearOptions { strategy, ..LinearOptions::default() };
        linear(x.clone(), weights[i].clone(), options)
    })
}

fn nearest(bench: &mut KernelBench<'_>, [lists, tokens]: [usize; 2]) -> anyhow::Result<()> {
    let [.., head_dim] = HEADS;
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
fn cis(bench: &mut KernelBench<'_>, sizes: [usize; 2]) -> anyhow::Result<()> {
    let step = Step::new(bench, "cis_attention", sizes);
    let [query_heads, kv_heads, head_dim] = HEADS;
    let total_kv_heads = sizes[0] * kv_heads;
    let parts = query_heads / kv_heads;
    let vectors = normal(bench, [total_kv_heads * parts, head_dim]);
    let vectors = vectors.reshape([total_kv_heads, parts, head_dim]);
    let newest = Tensor::full([sizes[0]], sizes[1] as i32 - 1, (&bench.device, DType::I32));
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
        let bytes = scored + step.bytes * (sinks + top + locals) / sizes[1];
        let work = [bytes as f64, 0.0];
        each(bench, &task, step.pools.len(), work, &strategies, |i, strategy| {
            let options = CisSelectOptions {
                scale: None,
                radius: 0,
                dilation: Dilation::Shared,
                block,
                earlier: Earlier::Any,
                reduction: ScoreReduction::Sum,
                similarity: SimilarityReduction::Mean,
                hidden: Share::default(),
                longest: Some(sizes[1]),
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
