//! Whole keys and values of a prompt, for prompts that begin alike.

use burn::tensor::Tensor;

/// Keys and values of a prompt's tokens in all layers, before any compression. The attention is
/// causal, so that they are the keys and values of every prompt that begins with these tokens.
#[derive(Debug)]
pub struct PromptPrefix {
    pub(crate) tokens: Vec<u32>,
    pub(crate) layers: Vec<PrefixLayer>,
}

/// One layer of a [`PromptPrefix`].
#[derive(Debug)]
pub(crate) struct PrefixLayer {
    /// After RoPE, `[1, Hkv, P, D]`.
    pub(crate) keys: Tensor<4>,
    /// `[1, Hkv, P, D]`
    pub(crate) values: Tensor<4>,
    /// Column sums of the attention of all `P` queries, `[1, Hq, P]`, where a policy needed them.
    pub(crate) column_sums: Option<Tensor<3>>,
}

/// The first tokens of a prefix, which a prompt shares with it.
#[derive(Debug, Clone)]
pub(crate) struct SharedPrefix {
    pub(crate) prefix: std::sync::Arc<PromptPrefix>,
    /// How many of its tokens.
    pub(crate) tokens: usize,
}

impl PromptPrefix {
    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Bytes of keys, values and column sums.
    pub fn bytes(&self) -> usize {
        let of = |dims: &[usize], size: usize| dims.iter().product::<usize>() * size;
        let layer = |layer: &PrefixLayer| {
            let pair = of(&layer.keys.dims(), 2 * layer.keys.dtype().size());
            let sums = layer.column_sums.as_ref().map_or(0, |sums| of(&sums.dims(), 4));
            pair + sums
        };
        self.layers.iter().map(layer).sum()
    }

    /// Whether all layers have column sums.
    pub(crate) fn has_column_sums(&self) -> bool {
        self.layers.iter().all(|layer| layer.column_sums.is_some())
    }
}
