//! The paper's words in plain sets, and steps that are held against them.

use std::collections::{BTreeMap, BTreeSet};

use burn::tensor::{DType, Device, Int, Tensor};
use half::{bf16, f16};
use kv_kernels::{
    CisSelectOptions, CisStrategy, DecodeAttentionOptions, Dilation, Earlier, IndexSets,
    KernelError, RangeSets, ScoreReduction, SetRule, Share, SimilarityReduction, SlotRanges,
    SlotView, cis_select, decode_attention,
};
use kv_testing::{Numbers, relative_error};

pub(crate) fn rule(top: usize) -> SetRule {
    SetRule { sinks: 4, locals: 8, top, dilated: 1.0 / 3.0, threshold: 0.8, wanted: None }
}

pub(crate) fn options() -> CisSelectOptions {
    CisSelectOptions {
        scale: None,
        radius: 1,
        dilation: Dilation::Shared,
        block: 8,
        earlier: Earlier::Any,
        tail: false,
        reduction: ScoreReduction::Sum,
        similarity: SimilarityReduction::Mean,
        hidden: Share::default(),
        longest: None,
        measures: false,
        strategy: CisStrategy::Auto,
    }
}

pub(crate) fn ints(values: &[i32], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(values, (device, DType::I32))
}

/// Ranges of equal room in a pool, a row of a batch after another.
pub(crate) struct Layer {
    pub(crate) kv_heads: usize,
    pub(crate) group: usize,
    pub(crate) head_dim: usize,
    pub(crate) room: usize,
    pub(crate) dtype: DType,
    pub(crate) keys: Vec<f32>,
    pub(crate) values: Vec<f32>,
}

/// Numbers that a dtype has.
pub(crate) fn rounded(numbers: &[f32], dtype: DType) -> Vec<f32> {
    let round = |number: &f32| match dtype {
        DType::BF16 => bf16::from_f32(*number).to_f32(),
        DType::F16 => f16::from_f32(*number).to_f32(),
        _ => *number,
    };
    numbers.iter().map(round).collect()
}

impl Layer {
    pub(crate) fn new(
        batch: usize,
        kv_heads: usize,
        group: usize,
        head_dim: usize,
        room: usize,
    ) -> Self {
        let mut numbers = Numbers::new(7);
        let count = batch * kv_heads * room * head_dim;
        let (keys, values) = (numbers.normal(count), numbers.normal(count));
        Self { kv_heads, group, head_dim, room, dtype: DType::F32, keys, values }
    }

    pub(crate) fn in_dtype(self, dtype: DType) -> Self {
        let [keys, values] = [&self.keys, &self.values].map(|pool| rounded(pool, dtype));
        Self { dtype, keys, values, ..self }
    }

    pub(crate) fn ranges(&self, lengths: &[usize], device: &Device) -> SlotRanges {
        let shape = [lengths.len(), self.kv_heads];
        let pairs = lengths.len() * self.kv_heads;
        let offsets: Vec<i32> = (0..pairs).map(|pair| (pair * self.room) as i32).collect();
        let lengths: Vec<i32> =
            lengths.iter().flat_map(|length| vec![*length as i32; self.kv_heads]).collect();
        SlotRanges {
            offsets: ints(&offsets, device).reshape(shape),
            lengths: ints(&lengths, device).reshape(shape),
        }
    }

    pub(crate) fn pool(&self, values: &[f32], device: &Device) -> Tensor<2> {
        let rows = values.len() / self.head_dim;
        let pool = Tensor::<1>::from_data(values, (device, DType::F32));
        pool.reshape([rows, self.head_dim]).cast(self.dtype)
    }

    /// Attention weights of a query head over slots in sight, f64, by slot.
    pub(crate) fn weights(&self, pair: usize, query: &[f32], seen: &[usize]) -> Vec<f64> {
        let dim = self.head_dim;
        let logit = |slot: usize| {
            let key = &self.keys[(pair * self.room + slot) * dim..][..dim];
            let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            dot / (dim as f64).sqrt()
        };
        let logits: Vec<f64> = seen.iter().map(|slot| logit(*slot)).collect();
        let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - top).exp()).sum();
        let mut weights = vec![0.0; self.room];
        for (slot, logit) in seen.iter().zip(logits) {
            weights[*slot] = (logit - top).exp() / sum;
        }
        weights
    }
}

/// The paper's words in plain sets: what a range remembers of its block.
#[derive(Default)]
struct Memory {
    block: usize,
    /// Of each step that is compared with later ones: its queries, and its set, with the set's
    /// number.
    sets: Vec<(Vec<Vec<f32>>, BTreeSet<usize>, usize)>,
    /// The first local token of the step that retrieved each set, by the set's number.
    locals: BTreeMap<usize, usize>,
}

/// What a step attends to: the slots, of those in sight, and whether it retrieved.
struct Expected {
    slots: BTreeSet<usize>,
    seen: BTreeSet<usize>,
    retrieved: Option<bool>,
    number: Option<usize>,
}

impl Memory {
    /// `queries` of a group; `tokens` so far, of which `freed` have no slot.
    fn step(
        &mut self,
        layer: &Layer,
        pair: usize,
        queries: &[&[f32]],
        [tokens, freed]: [usize; 2],
        (rule, width): (SetRule, usize),
        options: &CisSelectOptions,
    ) -> Expected {
        let length = tokens - freed;
        let hidden = f64::from(options.hidden.bits()) / 2f64.powi(32);
        let from = ((hidden * tokens as f64).floor() as usize).saturating_sub(1);
        let sinks = rule.sinks.min(length);
        let start = from.saturating_sub(freed).clamp(sinks, length);
        let local = length.saturating_sub(rule.locals).max(start);
        let always = |local: usize| (0..sinks).chain(local..length);
        let seen: BTreeSet<usize> = (0..sinks).chain(start..length).collect();
        let block = (tokens - 1) / options.block;
        if block != self.block {
            self.sets.clear();
            self.block = block;
        }
        if local - start <= rule.top {
            let slots = seen.clone();
            return Expected { slots, seen, retrieved: None, number: None };
        }
        let cosine = |a: &[f32], b: &[f32]| {
            let dot = |a: &[f32], b: &[f32]| -> f64 {
                a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            let norms = (dot(a, a) * dot(b, b)).sqrt();
            if norms > 0.0 { dot(a, b) / norms } else { 0.0 }
        };
        let similar = |others: &[Vec<f32>]| {
            let each = queries.iter().zip(others).map(|(a, b)| cosine(a, b));
            match options.similarity {
                SimilarityReduction::Mean => each.sum::<f64>() / queries.len() as f64,
                SimilarityReduction::Min => each.fold(1.0, f64::min),
            }
        };
        let threshold = f64::from(rule.threshold);
        let shared = self.sets.iter().rev().find(|(others, ..)| {
            threshold <= -1.0
                || (options.block > 1 && threshold < 1.0 && similar(others) > threshold)
        });
        if let Some((_, set, number)) = shared {
            let (set, number) = (set.clone(), *number);
            if options.earlier == Earlier::Any {
                let own = queries.iter().map(|query| query.to_vec()).collect();
                self.sets.push((own, set.clone(), number));
            }
            let set =
                set.iter().filter(|token| **token >= freed + start).map(|token| token - freed);
            let then =
                if options.tail { self.locals[&number].saturating_sub(freed) } else { local };
            let slots = always(then.max(start).min(local)).chain(set).collect();
            return Expected { slots, seen, retrieved: Some(false), number: Some(number) };
        }
        let weights: Vec<Vec<f64>> = queries
            .iter()
            .map(|query| {
                let seen: Vec<usize> = seen.iter().copied().collect();
                layer.weights(pair, query, &seen)
            })
            .collect();
        let score = |slot: usize| {
            let own = weights.iter().map(|weights| weights[slot]);
            match options.reduction {
                ScoreReduction::Sum => own.sum::<f64>(),
                ScoreReduction::Max => own.fold(0.0, f64::max),
            }
        };
        let mut ranked: Vec<usize> = (start..local).collect();
        ranked.sort_by(|a, b| score(*b).total_cmp(&score(*a)));
        ranked.truncate(rule.top);
        let mut set: BTreeSet<usize> = ranked.iter().copied().collect();
        // A third is less than one in f32.
        let dilated = (rule.top as f32 * rule.dilated + 1e-3) as usize;
        for slot in ranked.iter().take(dilated) {
            let reach = slot.saturating_sub(options.radius)..=slot + options.radius;
            set.extend(reach.filter(|slot| *slot >= start && *slot < length));
        }
        let set: BTreeSet<usize> = set.into_iter().take(width).collect();
        let tokens = set.iter().map(|slot| slot + freed).collect();
        let number = self.sets.len();
        self.locals.insert(number, local + freed);
        self.sets.push((queries.iter().map(|query| query.to_vec()).collect(), tokens, number));
        let reads = match options.dilation {
            Dilation::All => set,
            Dilation::Shared => {
                let best: BTreeSet<usize> = ranked.into_iter().collect();
                best.into_iter().take(width).collect()
            }
        };
        let slots = always(local).chain(reads).collect();
        Expected { slots, seen, retrieved: Some(true), number: Some(number) }
    }
}

/// Slots that a range's step attends to.
pub(crate) fn attended(
    own: &RangeSets,
    sinks: usize,
    [tokens, freed]: [usize; 2],
) -> BTreeSet<usize> {
    let length = tokens - freed;
    let listed = own.set.iter().map(|token| *token as usize - freed);
    (0..sinks.min(length)).chain(listed).chain(own.local..length).collect()
}

/// Steps of queries that drift, as many rows as `tokens`, which are those before the first step.
pub(crate) fn follow(
    layer: &Layer,
    tokens: &[usize],
    freed: usize,
    steps: usize,
    rules: (SetRule, &CisSelectOptions),
    device: &Device,
    context: &str,
) -> u64 {
    let steps = Steps { count: steps, ..Steps::default() };
    follow_steps(layer, tokens, freed, steps, rules, device, context).unwrap()
}

/// Steps so many tokens apart, of sets that have room for so many tokens, by default for all.
#[derive(Clone, Copy)]
pub(crate) struct Steps {
    pub(crate) count: usize,
    pub(crate) apart: usize,
    pub(crate) width: Option<usize>,
}

impl Default for Steps {
    fn default() -> Self {
        Self { count: 1, apart: 1, width: None }
    }
}

/// The same of any steps: how many steps of single ranges retrieved.
///
/// # Errors
/// Where a forced strategy does not serve them.
pub(crate) fn follow_steps(
    layer: &Layer,
    tokens: &[usize],
    freed: usize,
    steps: Steps,
    (rule, options): (SetRule, &CisSelectOptions),
    device: &Device,
    context: &str,
) -> Result<u64, KernelError> {
    let width = steps.width.unwrap_or(rule.width(options.radius));
    let (batch, dim) = (tokens.len(), layer.head_dim);
    let pairs = batch * layer.kv_heads;
    let heads = layer.kv_heads * layer.group;
    let mut numbers = Numbers::new(3);
    let mut drifting = numbers.normal(batch * heads * dim);
    let mut memories: Vec<Memory> = (0..pairs).map(|_| Memory::default()).collect();
    let mut sets =
        IndexSets::new(&vec![rule; pairs], options.block, width, layer.group, dim, device);
    let (mut retrieved, mut read) = (vec![0u64; pairs], vec![0u64; pairs]);
    for step in 0..steps.count {
        // Some drift, some jump.
        let speeds: Vec<f32> =
            (0..batch * heads).map(|_| [0.1, 0.3, 2.0][numbers.below(3)]).collect();
        let drift = numbers.normal(drifting.len());
        for (at, x) in drifting.iter_mut().enumerate() {
            *x = 0.98 * *x + speeds[at / dim] * drift[at];
        }
        let query = rounded(&drifting, layer.dtype);
        let seen: Vec<usize> =
            tokens.iter().map(|tokens| tokens + step * steps.apart + 1).collect();
        let lengths: Vec<usize> = seen.iter().map(|tokens| tokens - freed).collect();
        let newest: Vec<i32> = seen.iter().map(|tokens| *tokens as i32 - 1).collect();
        let ranges = layer.ranges(&lengths, device);
        let on = Tensor::<1>::from_data(query.as_slice(), (device, DType::F32));
        let on = on.reshape([batch, heads, dim]).cast(layer.dtype);
        let measures = step % 3 == 0;
        let sums = cis_select(
            on.clone(),
            on.clone().reshape([pairs, layer.group, dim]),
            layer.pool(&layer.keys, device),
            &ranges,
            ints(&newest, device),
            &mut sets,
            CisSelectOptions { measures, ..*options },
        )?;
        assert_eq!(sums.is_some(), measures);
        let view = SlotView::Sets(sets.clone());
        let output = decode_attention(
            on,
            layer.pool(&layer.keys, device),
            layer.pool(&layer.values, device),
            None,
            &ranges,
            DecodeAttentionOptions { view, log_sum_exp: true, ..Default::default() },
        )
        .unwrap();
        let read_back =
            |tensor: Tensor<1>| tensor.cast(DType::F32).try_into_vec_as::<f32>().unwrap();
        let of_set = read_back(output.log_sum_exp.unwrap().reshape([-1]));
        let of_all = sums.map(|sums| read_back(sums.reshape([-1])));
        let output = read_back(output.output.reshape([-1]));
        for (pair, own) in sets.read().unwrap().iter().enumerate() {
            let row = pair / layer.kv_heads;
            let context = format!("{context}, step {step}, range {pair}");
            let queries: Vec<&[f32]> =
                (0..layer.group).map(|g| &query[(pair * layer.group + g) * dim..][..dim]).collect();
            let counts = [seen[row], freed];
            let expected =
                memories[pair].step(layer, pair, &queries, counts, (rule, width), options);
            let slots = attended(own, rule.sinks, counts);
            let did = (own.retrieves, own.number);
            assert_eq!(did, (expected.retrieved, expected.number), "{context}");
            assert_eq!(slots, expected.slots, "{context}");
            retrieved[pair] += u64::from(expected.retrieved == Some(true));
            read[pair] += slots.len() as u64;
            assert_eq!([own.retrieved, own.tokens], [retrieved[pair], read[pair]], "{context}");
            assert_eq!(own.steps, step as u64 + 1, "{context}");
            let slots: Vec<usize> = slots.into_iter().collect();
            let seen_slots: Vec<usize> = expected.seen.into_iter().collect();
            let sinks = rule.sinks.min(lengths[row]);
            let in_sight = (0..sinks).chain(own.seen..lengths[row]);
            assert_eq!(in_sight.collect::<Vec<_>>(), seen_slots, "{context}");
            for (g, query) in queries.iter().enumerate() {
                let head = pair * layer.group + g;
                let weights = layer.weights(pair, query, &slots);
                let expected: Vec<f64> = (0..dim)
                    .map(|c| {
                        let value = |slot: usize| {
                            f64::from(layer.values[(pair * layer.room + slot) * dim + c])
                        };
                        slots.iter().map(|slot| weights[*slot] * value(*slot)).sum()
                    })
                    .collect();
                let error = relative_error(&output[head * dim..][..dim], &expected);
                // Weights are rounded, too.
                let tolerance = if layer.dtype == DType::F32 { 1e-4 } else { 1e-2 };
                assert!(error < tolerance, "{context}: output off by {error}");
                // What is dropped of what is in sight, by both log-sums.
                if measures {
                    let of_all = of_all.as_ref().unwrap();
                    let dropped = 1.0 - f64::from(of_set[head] - of_all[head]).exp();
                    let whole = layer.weights(pair, query, &seen_slots);
                    let kept: f64 = slots.iter().map(|slot| whole[*slot]).sum();
                    let error = (dropped - (1.0 - kept)).abs();
                    assert!(error < 1e-5, "{context}: {dropped} is off by {error}");
                }
            }
        }
    }
    Ok(retrieved.iter().sum())
}
