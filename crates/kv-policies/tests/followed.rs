//! LongFlow step by step beside an unfused reference in f64.

use burn::tensor::{DType, Int, Tensor};
use kv_core::{CacheOptions, LayerCache, read_f32, read_i32};
use kv_policies::{LayerContext, Observation, Policy, Step, WriteSlots, build};
use kv_testing::relative_error;
use serde_json::json;

const LAYER: LayerContext = LayerContext { index: 0, count: 1 };

/// Queries, keys and values `[B, H, N, D]` of a prompt and of what follows.
pub(crate) struct Trace {
    pub(crate) query: Tensor<4>,
    pub(crate) keys: Tensor<4>,
    pub(crate) values: Tensor<4>,
}

impl Trace {
    /// The cache that a policy makes of the first `prompt` tokens, with room for the others.
    fn compress(&self, policy: &dyn Policy, prompt: usize) -> LayerCache {
        let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, prompt);
        let (keys, values) = (part(&self.keys), part(&self.values));
        let [batch, _, tokens, _] = self.keys.dims();
        let device = keys.device();
        let positions = Tensor::<1, Int>::arange(0..prompt as i64, (&device, DType::I32));
        let positions = positions.unsqueeze::<2>().expand([batch, prompt]);
        let seeds = vec![0; batch];
        let observation = Observation::new(&keys, &values, &positions)
            .with_window(part(&self.query))
            .with_seeds(&seeds);
        let options = CacheOptions::new(&device, DType::F32);
        policy.prefill(&observation, tokens - prompt, options).unwrap()
    }

    fn step(&self, token: usize) -> Step {
        let pick = |tensor: &Tensor<4>| tensor.clone().narrow(2, token, 1).squeeze_dim::<3>(2);
        let (batch, device) = (self.keys.dims()[0], self.keys.device());
        let position = Tensor::full([batch], token as i32, (&device, DType::I32));
        Step::new(pick(&self.query), pick(&self.keys), pick(&self.values), position)
    }
}

/// A head's static cache in f64, straight from algorithm 1 with a running maximum.
struct Head {
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
    /// Every slot's largest importance so far, decayed, or its importance at the last step.
    scores: Vec<f64>,
    /// Every slot's token.
    tokens: Vec<usize>,
    limit: usize,
    /// Where the next token goes.
    place: usize,
}

/// How slots are compared, as the policy's options say.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Rule {
    /// Whether the heads of a layer give up one token.
    pub(crate) layer: bool,
    pub(crate) memory: Option<f64>,
    pub(crate) ties: Option<f64>,
}

impl Rule {
    fn rank(self, score: f64) -> f64 {
        self.ties.map_or(score.ln(), |factor| score.ln() / factor.ln())
    }
}

impl Head {
    /// Attends with the group's queries; returns outputs and the importance of every slot.
    fn attend(&self, queries: &[Vec<f64>]) -> (Vec<f64>, Vec<f64>) {
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let mut importance = vec![0.0; self.keys.len()];
        let mut outputs = Vec::new();
        for query in queries {
            let scale = (query.len() as f64).sqrt();
            let logits: Vec<f64> = self.keys.iter().map(|key| dot(query, key) / scale).collect();
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
            let mut output = vec![0.0; query.len()];
            for ((logit, value), importance) in logits.iter().zip(&self.values).zip(&mut importance)
            {
                let share = (logit - max).exp() / sum;
                *importance += share * value.iter().map(|v| v.abs()).sum::<f64>();
                output.iter_mut().zip(value).for_each(|(o, v)| *o += share * v);
            }
            outputs.extend(output);
        }
        (outputs, importance)
    }

    /// Chooses the next place by importances.
    fn choose(&mut self, importance: &[f64], newest: usize, rule: Rule) {
        self.scores.resize(importance.len(), 0.0);
        for (slot, (score, importance)) in self.scores.iter_mut().zip(importance).enumerate() {
            let before = rule.memory.filter(|_| slot != newest).map_or(0.0, |decay| decay * *score);
            *score = importance.max(before);
        }
        let key = |slot: &usize| {
            let rank = rule.rank(self.scores[*slot]);
            if rule.ties.is_some() { (rank.floor(), self.tokens[*slot]) } else { (rank, *slot) }
        };
        let others = (0..importance.len()).filter(|&slot| slot != newest);
        let least = others.min_by(|a, b| key(a).partial_cmp(&key(b)).unwrap());
        let full = self.keys.len() >= self.limit;
        self.place = if full { least.unwrap_or(newest) } else { self.keys.len() };
    }

    /// How far apart rounding may have brought two slots, one of which was chosen: their ranks, or
    /// the nearest border of a level.
    fn margin(&self, chosen: usize, rule: Rule) -> f64 {
        let [a, b] = [self.place, chosen].map(|slot| rule.rank(self.scores[slot]));
        if rule.ties.is_none() {
            return (a - b).abs();
        }
        let border = |rank: f64| (rank - rank.round()).abs();
        border(a).min(border(b))
    }

    fn write(&mut self, token: usize, key: Vec<f64>, value: Vec<f64>) {
        if self.place == self.keys.len() {
            self.keys.push(key);
            self.values.push(value);
            self.tokens.push(token);
        } else {
            self.keys[self.place] = key;
            self.values[self.place] = value;
            self.tokens[self.place] = token;
        }
    }
}

/// Rows of a tensor `[B, H, N, D]` as f64, by (sequence, head) and token.
fn rows(tensor: &Tensor<4>) -> Vec<Vec<Vec<f64>>> {
    let [_, _, tokens, dim] = tensor.dims();
    let all = read_f32("rows", tensor.clone()).unwrap();
    let head = |head: &[f32]| -> Vec<Vec<f64>> {
        head.chunks(dim).map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect()
    };
    all.chunks(tokens * dim).map(head).collect()
}

/// One step of all heads, `kv_heads` a layer; returns all outputs.
fn advance(
    heads: &mut [Head],
    queries: impl Fn(usize) -> Vec<Vec<f64>>,
    newest: &[usize],
    kv_heads: usize,
    rule: Rule,
) -> Vec<f64> {
    let together = if rule.layer { kv_heads } else { 1 };
    let (mut outputs, mut importances) = (Vec::new(), Vec::new());
    for (range, head) in heads.iter().enumerate() {
        let (output, importance) = head.attend(&queries(range));
        outputs.extend(output);
        importances.push(importance);
    }
    for (range, head) in heads.iter_mut().enumerate() {
        let layer = range / together * together..(range / together + 1) * together;
        let summed = (0..importances[range].len())
            .map(|slot| layer.clone().map(|range| importances[range][slot]).sum());
        head.choose(&summed.collect::<Vec<f64>>(), newest[range], rule);
    }
    outputs
}

/// Decodes the trace behind a prompt under LongFlow, by a rule, and in f64. The places must be the
/// same, but where two slots differ by less than rounding; those steps are counted and go on alike.
pub(crate) fn follow(
    trace: &Trace,
    prompt: usize,
    budget: usize,
    rule: Rule,
    context: &str,
) -> usize {
    let Rule { layer, memory, ties } = rule;
    let scope = if layer { "layer" } else { "head" };
    let config = json!({
        "policy": "longflow", "budget": budget, "scope": scope, "memory": memory, "ties": ties,
    });
    let policy = build(&config).unwrap();
    let [batch, kv_heads, tokens, dim] = trace.keys.dims();
    let group = trace.query.dims()[1] / kv_heads;
    let mut cache = trace.compress(&*policy, prompt);
    let (queries, keys, values) = (rows(&trace.query), rows(&trace.keys), rows(&trace.values));
    let positions = cache.read_positions().unwrap();
    let group_at = |range: usize, token: usize| -> Vec<Vec<f64>> {
        (0..group).map(|g| queries[range * group + g][token].clone()).collect()
    };
    let mut heads: Vec<Head> = (0..batch * kv_heads)
        .map(|range| {
            let live = cache.layout().live(range).map(|slot| positions[slot] as usize);
            let live: Vec<usize> = live.collect();
            let of = |all: &[Vec<Vec<f64>>]| live.iter().map(|&t| all[range][t].clone()).collect();
            let (keys, values) = (of(&keys), of(&values));
            Head { keys, values, scores: vec![], tokens: live, limit: budget, place: 0 }
        })
        .collect();
    let last: Vec<usize> = heads.iter().map(|head| head.keys.len() - 1).collect();
    advance(&mut heads, |range| group_at(range, prompt - 1), &last, kv_heads, rule);
    let mut near = 0;
    for token in prompt..tokens {
        let step = trace.step(token);
        let output = read_f32("output", policy.step(LAYER, &mut cache, step).unwrap()).unwrap();
        let places = read_i32("places", WriteSlots::next(&cache).unwrap().clone()).unwrap();
        let newest: Vec<usize> = heads.iter().map(|head| head.place).collect();
        for (range, head) in heads.iter_mut().enumerate() {
            head.write(token, keys[range][token].clone(), values[range][token].clone());
        }
        let exact = advance(&mut heads, |range| group_at(range, token), &newest, kv_heads, rule);
        for (range, head) in heads.iter_mut().enumerate() {
            if places[range] as usize != head.place {
                let margin = head.margin(places[range] as usize, rule);
                assert!(margin < 1e-4, "{context}: step {token}, head {range}, margin {margin}");
                near += 1;
                head.place = places[range] as usize;
            }
        }
        let error = relative_error(&output, &exact);
        assert!(error < 1e-5, "{context}: step {token} off by {error}");
        assert_eq!(output.len(), batch * kv_heads * group * dim);
    }
    near
}
