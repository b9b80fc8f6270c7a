//! The decoder in plain tensor operations, which Burn can differentiate, unlike the kernels that
//! prefill and decode run: one whole sequence, in f32 whatever the weights are.

use burn::tensor::activation::{log_softmax, silu};
use burn::tensor::{DType, Int, Tensor};
use kv_policies::window_attention;

use super::Llama;
use super::layer::{Layer, RmsNorm};
use super::linear::Linear;
use crate::ModelConfig;

/// What all layers share for sequences of one length `T`.
pub(super) struct Plain<'a> {
    llama: &'a Llama,
    /// `[T, D / 2]`
    cos: Tensor<2>,
    sin: Tensor<2>,
}

impl<'a> Plain<'a> {
    pub(super) fn new(llama: &'a Llama, tokens: usize) -> Self {
        let rope = llama.prompt_rope(tokens);
        let rows = |table: Tensor<2>| table.narrow(0, 0, tokens);
        Self { llama, cos: rows(rope.cos), sin: rows(rope.sin) }
    }

    fn config(&self) -> &ModelConfig {
        &self.llama.config
    }

    /// Embeddings of tokens `[T]`, `[T, hidden]`.
    pub(super) fn embed(&self, tokens: Tensor<1, Int>) -> Tensor<2> {
        self.llama.embedding.val().select(0, tokens).cast(DType::F32)
    }

    /// A layer's key and value weights, each `[Hkv * D, hidden]`.
    pub(super) fn key_value_weights(&self, layer: &Layer) -> [Tensor<2>; 2] {
        let [queries, keys] = self.widths();
        [queries, queries + keys].map(|start| layer.qkv.rows(start..start + keys).0)
    }

    /// A layer with given key and value weights; from hidden states `[T, hidden]` to hidden states
    /// `[T, hidden]`.
    pub(super) fn layer(
        &self,
        layer: &Layer,
        hidden: Tensor<2>,
        [key, value]: [Tensor<2>; 2],
    ) -> Tensor<2> {
        let [queries, keys] = self.widths();
        let config = self.config();
        let normed = norm(hidden.clone(), &layer.attention_norm);
        let bias = |start: usize| layer.qkv.rows(start..start + keys).1;
        let query = self.heads(part(normed.clone(), &layer.qkv, 0, queries));
        let key = self.heads(product(normed.clone(), key, bias(queries)));
        let value = self.heads(product(normed, value, bias(queries + keys)));
        let query = self.rotated(head_norm(query, layer.query_norm.as_ref()));
        let key = self.rotated(head_norm(key, layer.key_norm.as_ref()));

        let [tokens, _] = hidden.dims();
        // All queries of a group attend to the same keys and values.
        let rows = [1, config.num_kv_heads, config.group_size() * tokens];
        let attention = window_attention(&query, &key).reshape([rows[0], rows[1], rows[2], tokens]);
        let heads = [1, config.num_query_heads, tokens, config.head_dim];
        let attended = attention.matmul(value).reshape(heads).swap_dims(1, 2);
        let attended = attended.reshape([tokens, queries]);
        let hidden = hidden + whole(attended, &layer.output);

        let normed = norm(hidden.clone(), &layer.mlp_norm);
        let inner = config.intermediate_size;
        let gate = part(normed.clone(), &layer.gate_up, 0, inner);
        let up = part(normed, &layer.gate_up, inner, inner);
        hidden + whole(silu(gate) * up, &layer.down)
    }

    /// Logits of the last layer's hidden states `[T, hidden]`, `[T, vocabulary]`.
    pub(super) fn logits(&self, hidden: Tensor<2>) -> Tensor<2> {
        let hidden = norm(hidden, &self.llama.norm);
        match &self.llama.head {
            Some(head) => whole(hidden, head),
            None => product(hidden, self.llama.embedding.val().cast(DType::F32), None),
        }
    }

    /// Mean negative log-likelihood of the tokens `next` `[T]` behind the last layer's hidden
    /// states `[T, hidden]`, in nats, `[1]`.
    pub(super) fn loss(&self, hidden: Tensor<2>, next: Tensor<1, Int>) -> Tensor<1> {
        log_softmax(self.logits(hidden), 1).gather(1, next.unsqueeze_dim(1)).mean().neg()
    }

    /// Rows of all query heads, and of all key (or value) heads.
    fn widths(&self) -> [usize; 2] {
        let config = self.config();
        [config.num_query_heads, config.num_kv_heads].map(|heads| heads * config.head_dim)
    }

    /// `[T, H * D]` to `[1, H, T, D]`.
    fn heads(&self, projected: Tensor<2>) -> Tensor<4> {
        let ([tokens, width], dim) = (projected.dims(), self.config().head_dim);
        projected.reshape([1, tokens, width / dim, dim]).swap_dims(1, 2)
    }

    /// Rotates heads `[1, H, T, D]` to their positions.
    fn rotated(&self, heads: Tensor<4>) -> Tensor<4> {
        let half = self.config().head_dim / 2;
        let (first, second) = (heads.clone().narrow(3, 0, half), heads.narrow(3, half, half));
        let (cos, sin) = (self.cos.clone().unsqueeze(), self.sin.clone().unsqueeze());
        let turned = [
            first.clone() * cos.clone() - second.clone() * sin.clone(),
            second * cos + first * sin,
        ];
        Tensor::cat(turned.into(), 3)
    }
}

/// `x Wᵀ + b`
fn product(x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<2> {
    let product = x.matmul(weight.transpose());
    match bias {
        Some(bias) => product + bias.unsqueeze(),
        None => product,
    }
}

/// The product with `count` rows of a matrix from row `start`.
fn part(x: Tensor<2>, linear: &Linear, start: usize, count: usize) -> Tensor<2> {
    let (weight, bias) = linear.rows(start..start + count);
    product(x, weight, bias)
}

fn whole(x: Tensor<2>, linear: &Linear) -> Tensor<2> {
    part(x, linear, 0, linear.width())
}

/// Normalises the last dimension.
fn norm<const D: usize>(x: Tensor<D>, norm: &RmsNorm) -> Tensor<D> {
    let mean = x.clone().square().mean_dim(D - 1);
    x / mean.add_scalar(norm.epsilon()).sqrt() * norm.weight().cast(DType::F32).unsqueeze()
}

fn head_norm(heads: Tensor<4>, of: Option<&RmsNorm>) -> Tensor<4> {
    match of {
        Some(of) => norm(heads, of),
        None => heads,
    }
}
