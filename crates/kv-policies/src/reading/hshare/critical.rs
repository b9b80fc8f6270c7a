//! Critical tokens of a prompt's last queries, and how many of them heads and layers share.

use burn::tensor::{DType, Int, Tensor};
use kv_core::read_i32;
use kv_kernels::{Choice, top_slots};

use crate::Result;

/// Sets of tokens, a bit each, for every sequence, query head and query.
pub(super) struct Critical {
    bits: Vec<u64>,
    /// The number of words of a head, over all its queries.
    words: usize,
    /// `Hq`
    heads: usize,
}

impl Critical {
    /// The `heavy` tokens of the highest products by channels `[B, Hq, r]` for each of the last `W`
    /// queries, among those that it sees.
    ///
    /// # Shapes
    /// `queries` `[B, Hq, W, D]`, `keys` `[B, Hkv, T, D]`.
    pub(super) fn of(
        queries: &Tensor<4>,
        keys: &Tensor<4>,
        channels: &Tensor<3, Int>,
        heavy: usize,
    ) -> Result<Self> {
        let [batch, heads, window, head_dim] = queries.dims();
        let [_, kv_heads, tokens, _] = keys.dims();
        let device = queries.device();
        let mut masks = vec![0.0f32; batch * heads * head_dim];
        let labels = channels.dims()[2];
        for (head, own) in read_i32("channels", channels.clone())?.chunks(labels).enumerate() {
            own.iter().for_each(|&channel| masks[head * head_dim + channel as usize] = 1.0);
        }
        let masks = Tensor::<1>::from_data(masks.as_slice(), (&device, DType::F32));
        let masks = masks.reshape([batch, heads, 1, head_dim]);
        let rows = heads / kv_heads * window;
        let masked =
            (queries.clone().cast(DType::F32) * masks).reshape([batch, kv_heads, rows, head_dim]);
        let scores = masked.matmul(keys.clone().cast(DType::F32).swap_dims(2, 3));
        let scores = scores.reshape([batch * heads * window, tokens]);
        // The last query sees all tokens, the one before one less.
        let seen: Vec<i32> = (0..batch * heads * window)
            .map(|row| (tokens - window + row % window + 1) as i32)
            .collect();
        let seen = Tensor::<1, Int>::from_data(seen.as_slice(), (&device, DType::I32));
        let most = heavy.min(tokens);
        let wanted = Tensor::full([batch * heads * window], most as i32, (&device, DType::I32));
        let chosen = top_slots(scores, Some(seen), Choice::Top(wanted), most)?;
        let indices = read_i32("critical tokens", chosen.indices)?;
        let each = tokens.div_ceil(64);
        let mut bits = vec![0u64; batch * heads * window * each];
        for (row, own) in indices.chunks(most).enumerate() {
            for at in own.iter().filter_map(|&at| usize::try_from(at).ok()) {
                bits[row * each + at / 64] |= 1 << (at % 64);
            }
        }
        Ok(Self { bits, words: window * each, heads })
    }

    fn head(&self, row: usize, head: usize) -> &[u64] {
        &self.bits[(row * self.heads + head) * self.words..][..self.words]
    }

    /// Critical tokens that two heads of a sequence share, over all queries.
    pub(super) fn heads_share(&self, row: usize, a: usize, b: usize) -> u64 {
        shared(self.head(row, a), self.head(row, b))
    }

    /// Critical tokens that two layers share: each head with the other layer's head of its index.
    pub(super) fn layers_share(&self, other: &Self, row: usize) -> u64 {
        let heads = 0..self.heads;
        heads.map(|head| shared(self.head(row, head), other.head(row, head))).sum()
    }
}

fn shared(a: &[u64], b: &[u64]) -> u64 {
    a.iter().zip(b).map(|(a, b)| u64::from((a & b).count_ones())).sum()
}
