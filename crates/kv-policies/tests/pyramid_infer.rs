//! PyramidInfer's decode steps against plain loops that store every row of attention.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{CacheOptions, LayerCache, read_f32};
use kv_policies::{LayerContext, Policy};
use kv_testing::{Numbers, quick_devices};
use serde_json::json;

use super::support::{Prompt, kept, policy, step};

const STEPS: usize = 120;
const LAYER: LayerContext = LayerContext { index: 1, count: 4 };
const HEADS: usize = 2;
const GROUP: usize = 2;
const DIM: usize = 8;

struct Sequence {
    tokens: usize,
    prompt: Prompt,
    query: Tensor<4>,
    keys: Tensor<4>,
    values: Tensor<4>,
}

fn sequence(tokens: usize, device: &Device) -> Sequence {
    let mut numbers = Numbers::new(tokens as u64);
    let mut draw = |heads: usize, count: usize| numbers.tensor([1, heads, count, DIM], device);
    let prompt = [HEADS * GROUP, HEADS, HEADS].map(|heads| draw(heads, tokens));
    let [q, k, v] = prompt;
    let [query, keys, values] =
        [HEADS * GROUP, HEADS, HEADS].map(|heads| draw(heads, STEPS).mul_scalar(2.0));
    Sequence { tokens, prompt: Prompt::new(q, k, v), query, keys, values }
}

impl Sequence {
    fn cache(&self, policy: &dyn Policy) -> LayerCache {
        self.prompt.observed(|seen| {
            let mut seen = seen.clone();
            seen.layer = LAYER;
            let options = CacheOptions::new(&seen.keys.device(), DType::F32);
            policy.prefill(&seen, STEPS, options).unwrap()
        })
    }

    /// Kept positions after all steps, and how many slots there ever were at once.
    fn expected(&self) -> (Vec<u32>, usize) {
        let all = |prompt: &Tensor<4>, new: &Tensor<4>| {
            read_f32("all", Tensor::cat(vec![prompt.clone(), new.clone()], 2)).unwrap()
        };
        let (queries, keys) =
            (all(&self.prompt.query, &self.query), all(&self.prompt.keys, &self.keys));
        let length = self.tokens + STEPS;
        let row = |data: &[f32], head: usize, token: usize| {
            data[(head * length + token) * DIM..][..DIM].to_vec()
        };
        let mut slots: Vec<usize> = (0..self.tokens).collect();
        // As the first layer would hold: 14 of every 16.
        let mut first_layer: usize = self.tokens;
        let mut shrunk = 0;
        let mut most = 0;
        let mut rows: BTreeMap<usize, BTreeMap<usize, f64>> = BTreeMap::new();
        for now in self.tokens..length {
            slots.push(now);
            first_layer += 1;
            most = most.max(slots.len());
            let mut mean = BTreeMap::new();
            for head in 0..HEADS * GROUP {
                let query = row(&queries, head, now);
                let logits = slots.iter().map(|&token| {
                    let key = row(&keys, head / GROUP, token);
                    let dot: f32 = query.iter().zip(&key).map(|(q, k)| q * k).sum();
                    f64::from(dot) / (DIM as f64).sqrt()
                });
                let weights: Vec<f64> = logits.map(f64::exp).collect();
                let sum: f64 = weights.iter().sum();
                for (token, weight) in slots.iter().zip(weights) {
                    *mean.entry(*token).or_default() += weight / sum;
                }
            }
            rows.insert(now, mean);
            let recents = first_layer / 5;
            let block = self.tokens + 16 * shrunk;
            if now + 1 < block + 16 + recents + 1 {
                continue;
            }
            assert_eq!(now - recents, block + 16, "the rows behind the block are the recents");
            let weight = |row: usize| 1.0 + 0.2 * (row + recents - now) as f64 / recents as f64;
            let score = |token: usize| -> f64 {
                (now - recents..=now).map(|row| weight(row) * rows[&row][&token]).sum()
            };
            let mut order: Vec<usize> = (block..block + 16).collect();
            order.sort_by(|a, b| score(*b).total_cmp(&score(*a)));
            // 14.4 (0.1 + 0.9 (1 + cos(pi / 4)) / 2) = 12.5
            let dropped = &order[12..];
            slots.retain(|token| !dropped.contains(token));
            first_layer -= 2;
            shrunk += 1;
        }
        assert!(shrunk >= 3, "{shrunk} blocks shrank");
        (slots.into_iter().map(|token| token as u32).collect(), most)
    }
}

/// Two sequences of different lengths in one batch shrink at their own steps.
#[test]
fn pyramid_infer_shrinks_generated_blocks() {
    for tested in quick_devices("pyramid_infer") {
        let policy = policy(json!({"policy": "pyramidinfer"}));
        let sequences = [sequence(40, &tested.device), sequence(61, &tested.device)];
        let caches = sequences.iter().map(|sequence| sequence.cache(&*policy)).collect();
        let mut cache = LayerCache::concat(caches).unwrap();
        let batch = |of: fn(&Sequence) -> &Tensor<4>| {
            Tensor::cat(sequences.iter().map(|sequence| of(sequence).clone()).collect(), 0)
        };
        let (query, keys, values) = (batch(|s| &s.query), batch(|s| &s.keys), batch(|s| &s.values));
        for index in 0..STEPS {
            let mut step = step(&query, &keys, &values, index, 0);
            let position = sequences.each_ref().map(|sequence| (sequence.tokens + index) as i32);
            step.position = Tensor::<1, Int>::from_data(position, (&tested.device, DType::I32));
            let before = cache.layout().lengths().to_vec();
            let recordable = policy.plan(LAYER, &cache).unwrap().recordable;
            policy.step(LAYER, &mut cache, step).unwrap();
            let grown = cache.layout().lengths().iter().zip(before).all(|(now, was)| *now > was);
            assert_eq!(recordable, grown, "step {index} on {}", tested.name);
        }
        for (row, sequence) in sequences.iter().enumerate() {
            let (expected, most) = sequence.expected();
            for range in row * HEADS..(row + 1) * HEADS {
                assert_eq!(kept(&cache, range), expected, "row {row} on {}", tested.name);
                assert_eq!(cache.layout().capacities()[range], most, "row {row}: reserved");
            }
        }
    }
}
