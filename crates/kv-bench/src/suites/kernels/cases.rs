//! The cases: the problems of `problems.json`. The peers' scripts read them too, and so do the
//! kernels' tests, which check those that are small enough (`kv_testing::timed`).

use anyhow::Context;
use serde::Deserialize;

use crate::options::Op;

const FILE: &str = include_str!("../../../problems.json");

/// All problems that are timed.
#[derive(Debug, Deserialize)]
pub(super) struct Problems {
    /// By the kernel that an op chooses, beside peers.
    pub(super) suite: Cases,
    /// By every kernel of an op that has several.
    pub(super) strategies: Strategies,
}

/// The suite's cases by op.
#[derive(Debug, Deserialize)]
pub(super) struct Cases {
    pub(super) decode_attention: Vec<Attention>,
    pub(super) prefill_attention: Vec<Attention>,
    pub(super) linear: Vec<Product>,
    pub(super) compact_slots: Vec<Compaction>,
    pub(super) top_slots: Vec<Ranking>,
    pub(super) balance: Vec<Halving>,
    pub(super) merge_nearest: Vec<Attention>,
    pub(super) quantized_attention: Vec<Quantized>,
    pub(super) archived_attention: Vec<Archived>,
}

/// The cases of every kernel by op.
#[derive(Debug, Deserialize)]
pub(super) struct Strategies {
    /// Evictions have the same cases.
    pub(super) decode_attention: Vec<Attention>,
    pub(super) sketch_attention: Vec<Sketched>,
    pub(super) quantized_attention: Vec<Quantized>,
    pub(super) archived_attention: Vec<Archived>,
    pub(super) prefill_attention: Vec<Attention>,
    pub(super) linear: Vec<Product>,
    pub(super) nearest_slots: Vec<Nearest>,
    pub(super) balance: Vec<Halving>,
    pub(super) cis_attention: Vec<Attention>,
}

/// The shape of an attention problem; merges that follow attention have the same shape.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Attention {
    pub(super) batch: usize,
    pub(super) query_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) tokens: usize,
    pub(super) head_dim: usize,
}

/// Attention over a sketch of all tokens, and over `slots` exact ones of each range.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Sketched {
    #[serde(flatten)]
    pub(super) attention: Attention,
    pub(super) slots: usize,
    pub(super) buckets: usize,
    /// Of each bucket.
    pub(super) entries: usize,
}

/// Attention over quantised slots, continued from attention over as good as none.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Quantized {
    #[serde(flatten)]
    pub(super) attention: Attention,
    pub(super) key_bits: usize,
    pub(super) value_bits: usize,
}

/// Attention over archived slots. A few slots of each range are read from host memory.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Archived {
    #[serde(flatten)]
    pub(super) attention: Attention,
    pub(super) revived: usize,
}

/// Lists, each of whose slots seeks its nearest in a second list of as many.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Nearest {
    pub(super) lists: usize,
    pub(super) tokens: usize,
    pub(super) head_dim: usize,
}

/// One product with a weight matrix.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Product {
    pub(super) rows: usize,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

/// Slots kept of every head, in every layer.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Compaction {
    pub(super) layers: usize,
    pub(super) batch: usize,
    pub(super) kv_heads: usize,
    pub(super) tokens: usize,
    pub(super) kept: usize,
    pub(super) head_dim: usize,
}

/// Scores chosen of every row.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Ranking {
    pub(super) rows: usize,
    pub(super) tokens: usize,
    pub(super) kept: usize,
}

/// Lists halved, a key-value head each.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct Halving {
    pub(super) lists: usize,
    pub(super) tokens: usize,
    pub(super) block: usize,
    pub(super) head_dim: usize,
}

impl Problems {
    pub(super) fn read() -> anyhow::Result<Self> {
        serde_json::from_str(FILE).context("problems.json")
    }
}

impl Cases {
    pub(super) fn count(&self, wanted: impl Fn(Op) -> bool) -> usize {
        let each = [
            (Op::DecodeAttention, self.decode_attention.len()),
            (Op::PrefillAttention, self.prefill_attention.len()),
            (Op::Linear, self.linear.len()),
            (Op::CompactSlots, self.compact_slots.len()),
            (Op::TopSlots, self.top_slots.len()),
            (Op::Balance, self.balance.len()),
            (Op::MergeNearest, self.merge_nearest.len()),
            (Op::QuantizedAttention, self.quantized_attention.len()),
            (Op::ArchivedAttention, self.archived_attention.len()),
        ];
        each.into_iter().filter(|(op, _)| wanted(*op)).map(|(_, count)| count).sum()
    }

    /// The first case of each op, of one layer.
    pub(super) fn shortened(mut self) -> Self {
        self.decode_attention.truncate(1);
        self.prefill_attention.truncate(1);
        self.linear.truncate(1);
        self.compact_slots.truncate(1);
        self.compact_slots.iter_mut().for_each(|case| case.layers = 1);
        self.top_slots.truncate(1);
        self.balance.truncate(1);
        self.merge_nearest.truncate(1);
        self.quantized_attention.truncate(1);
        self.archived_attention.truncate(1);
        self
    }
}

impl Attention {
    /// As the peers' scripts write it.
    pub(super) fn name(&self) -> String {
        format!("{}x{}x{}x{}", self.batch, self.query_heads, self.kv_heads, self.tokens)
    }

    /// `B * Hkv`
    pub(super) fn pairs(&self) -> usize {
        self.batch * self.kv_heads
    }
}

impl Quantized {
    /// The attention's name, and the bits of keys and values.
    pub(super) fn name(&self) -> String {
        let Self { attention, key_bits, value_bits } = self;
        format!("{} of {key_bits} and {value_bits} bits", attention.name())
    }
}

impl Archived {
    /// The attention's name, and how many slots come back.
    pub(super) fn name(&self) -> String {
        format!("{}, {} come back", self.attention.name(), self.revived)
    }
}

impl Compaction {
    /// As the peers' scripts write it.
    pub(super) fn name(&self) -> String {
        let Self { layers, batch, kv_heads, tokens, kept, .. } = self;
        format!("{layers}x{batch}x{kv_heads}x{tokens} to {kept}")
    }
}

impl Ranking {
    /// As the peers' scripts write it.
    pub(super) fn name(&self) -> String {
        format!("{} of {}x{}", self.kept, self.rows, self.tokens)
    }
}

impl Halving {
    /// Lists, tokens, block.
    pub(super) fn name(&self) -> String {
        format!("{}x{} by {}", self.lists, self.tokens, self.block)
    }
}

impl Product {
    /// As the peers' scripts write it.
    pub(super) fn name(&self) -> String {
        format!("{}x{}x{}", self.rows, self.inputs, self.outputs)
    }
}
