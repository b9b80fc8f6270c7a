//! The embedded model in plain loops over f64, with windows and frozen tokens: nothing is shared
//! with the decoder but the weights.

use burn::tensor::{DType, Device};
use kv_core::read_f32;
use kv_models::Weights;

const HIDDEN: usize = 128;
const INNER: usize = 352;
const LAYERS: usize = 4;
const HEADS: usize = 4;
const GROUP: usize = 2;
const DIM: usize = 32;
const VOCABULARY: usize = 1024;
const EPSILON: f64 = 1e-5;

type Rows = Vec<Vec<f64>>;

/// What changes a prompt's computation, by layer.
pub(crate) struct Changes<'a> {
    /// Whether the query at an index sees the key at another, both of a layer.
    pub(crate) sees: &'a dyn Fn(usize, usize, usize) -> bool,
    /// Whether a layer freezes a token.
    pub(crate) frozen: &'a dyn Fn(usize, usize) -> bool,
    /// Whether frozen tokens have the keys and values of the layer below.
    pub(crate) copies: bool,
}

impl Changes<'_> {
    pub(crate) const NONE: Changes<'static> =
        Changes { sees: &|_, _, _| true, frozen: &|_, _| false, copies: false };
}

/// What a layer leaves.
pub(crate) struct LayerState {
    /// Queries after RoPE, `[T]` of `[Hq * D]`; those of frozen tokens are not computed by the
    /// model.
    pub(crate) queries: Rows,
    /// Keys that are attended to, `[T]` of `[Hkv * D]`.
    pub(crate) keys: Rows,
    /// Values, likewise.
    pub(crate) values: Rows,
    /// Attention, by query head and query.
    pub(crate) attention: Vec<Rows>,
}

pub(crate) struct PlainModel {
    weights: Weights,
}

impl PlainModel {
    pub(crate) fn new() -> Self {
        let bytes: &'static [u8] = include_bytes!("../assets/needle-1m/model.safetensors");
        Self { weights: Weights::from_bytes(bytes).unwrap() }
    }

    fn weights<const D: usize>(&self, name: &str, shape: [usize; D]) -> Vec<f64> {
        let tensor = self.weights.tensor(name, shape, DType::F32, &Device::flex()).unwrap();
        read_f32("weights", tensor).unwrap().into_iter().map(f64::from).collect()
    }

    /// Hidden states of all tokens behind the final norm, and what every layer left.
    pub(crate) fn run(&self, tokens: &[u32], changes: &Changes<'_>) -> (Rows, Vec<LayerState>) {
        let embedding = self.weights("model.embed_tokens.weight", [VOCABULARY, HIDDEN]);
        let row = |token: &u32| embedding[*token as usize * HIDDEN..][..HIDDEN].to_vec();
        let mut hidden: Rows = tokens.iter().map(row).collect();
        let mut states: Vec<LayerState> = Vec::new();
        for layer in 0..LAYERS {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            let matrix =
                |part: &str, out: usize, from: usize| self.weights(&name(part), [out, from]);
            let vector = |part: &str| self.weights(&name(part), [HIDDEN]);
            let normed = norm(&hidden, &vector("input_layernorm"));
            let keys_width = HEADS / GROUP * DIM;
            let heads = |part: &str, width: usize| {
                product(&normed, &matrix(&format!("self_attn.{part}_proj"), width, HIDDEN), width)
            };
            let queries = rotated(heads("q", HEADS * DIM));
            let (mut keys, mut values) = (rotated(heads("k", keys_width)), heads("v", keys_width));
            if let (true, Some(below)) = (changes.copies, states.last()) {
                for token in (0..tokens.len()).filter(|&token| (changes.frozen)(layer, token)) {
                    keys[token].clone_from(&below.keys[token]);
                    values[token].clone_from(&below.values[token]);
                }
            }
            let sees = |query: usize, key: usize| (changes.sees)(layer, query, key);
            let attention = attention(&queries, &keys, sees);
            let mixed = mixed(&attention, &values);
            let output = matrix("self_attn.o_proj", HIDDEN, HEADS * DIM);
            let attended = sum(&hidden, &product(&mixed, &output, HIDDEN));
            let normed = norm(&attended, &vector("post_attention_layernorm"));
            let gate = product(&normed, &matrix("mlp.gate_proj", INNER, HIDDEN), INNER);
            let up = product(&normed, &matrix("mlp.up_proj", INNER, HIDDEN), INNER);
            let inner = gate.iter().zip(&up).map(|(gate, up)| {
                gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
            });
            let inner: Rows = inner.collect();
            let down = product(&inner, &matrix("mlp.down_proj", HIDDEN, INNER), HIDDEN);
            let next = sum(&attended, &down);
            for (token, (hidden, next)) in hidden.iter_mut().zip(next).enumerate() {
                if !(changes.frozen)(layer, token) {
                    *hidden = next;
                }
            }
            states.push(LayerState { queries, keys, values, attention });
        }
        (norm(&hidden, &self.weights("model.norm.weight", [HIDDEN])), states)
    }
}

/// Softmax over what each query sees, by query head.
fn attention(queries: &Rows, keys: &Rows, sees: impl Fn(usize, usize) -> bool) -> Vec<Rows> {
    let of_head = |head: usize| {
        let at = head / GROUP * DIM;
        let of_query = |index: usize| {
            let query = &queries[index][head * DIM..][..DIM];
            softmax((0..=index).map(|key| {
                let dot: f64 = query.iter().zip(&keys[key][at..]).map(|(q, k)| q * k).sum();
                if sees(index, key) { dot / (DIM as f64).sqrt() } else { f64::NEG_INFINITY }
            }))
        };
        (0..queries.len()).map(of_query).collect()
    };
    (0..HEADS).map(of_head).collect()
}

pub(crate) fn softmax(logits: impl Iterator<Item = f64>) -> Vec<f64> {
    let logits: Vec<f64> = logits.collect();
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
    logits.iter().map(|logit| (logit - max).exp() / sum).collect()
}

/// Values by their attention, all heads of a token in a row.
fn mixed(attention: &[Rows], values: &Rows) -> Rows {
    let of_token = |index: usize| {
        let mut row = vec![0.0; HEADS * DIM];
        for (head, queries) in attention.iter().enumerate() {
            for (share, value) in queries[index].iter().zip(values) {
                let value = &value[head / GROUP * DIM..][..DIM];
                row[head * DIM..][..DIM].iter_mut().zip(value).for_each(|(o, v)| *o += share * v);
            }
        }
        row
    };
    (0..values.len()).map(of_token).collect()
}

/// `x Wᵀ` with `W` `[out, in]`.
fn product(x: &Rows, weight: &[f64], out: usize) -> Rows {
    let of_row = |row: &Vec<f64>| {
        let weights = weight.chunks(row.len()).take(out);
        weights.map(|weights| row.iter().zip(weights).map(|(x, w)| x * w).sum()).collect()
    };
    x.iter().map(of_row).collect()
}

fn norm(x: &Rows, weight: &[f64]) -> Rows {
    let of_row = |row: &Vec<f64>| {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        row.iter().zip(weight).map(|(x, w)| x / (mean + EPSILON).sqrt() * w).collect()
    };
    x.iter().map(of_row).collect()
}

/// Half-split RoPE; tokens stand at their indices.
fn rotated(mut heads: Rows) -> Rows {
    for (position, row) in heads.iter_mut().enumerate() {
        for head in row.chunks_mut(DIM) {
            for i in 0..DIM / 2 {
                let frequency = 10_000f64.powf(-((2 * i) as f64) / DIM as f64);
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                let (a, b) = (head[i], head[i + DIM / 2]);
                head[i] = a * cos - b * sin;
                head[i + DIM / 2] = b * cos + a * sin;
            }
        }
    }
    heads
}

fn sum(a: &Rows, b: &Rows) -> Rows {
    let rows = a.iter().zip(b);
    rows.map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect()
}
