//! The repetition penalty: logits of tokens that a sequence has already.

use std::collections::BTreeSet;

use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor, TensorData};

use crate::Sampling;

/// A penalty on the tokens that each sequence has already.
///
/// As `RepetitionPenaltyLogitsProcessor` of `transformers`: a token that is in the prompt or was
/// generated has its logit divided by the penalty if it is positive, else multiplied by it, however
/// often it occurs.
#[derive(Debug)]
pub(super) struct Penalty {
    /// Penalties of the sequences, `[B, 1]`.
    factors: Tensor<2>,
    /// Above 0 for tokens that a sequence has, `[B, vocabulary]`.
    seen: Tensor<2>,
}

impl Penalty {
    /// The penalty for sequences of these tokens, each below `vocabulary`.
    pub(super) fn new(
        samplings: &[Sampling],
        histories: &[Vec<u32>],
        vocabulary: usize,
        device: &Device,
    ) -> Self {
        let batch = samplings.len();
        let mut seen = vec![0f32; batch * vocabulary];
        for (row, history) in histories.iter().enumerate() {
            for token in history.iter().collect::<BTreeSet<_>>() {
                seen[row * vocabulary + *token as usize] = 1.0;
            }
        }
        let factors = samplings.iter().map(|sampling| sampling.repetition_penalty as f32).collect();
        let upload = |values: Vec<f32>, width: usize| {
            Tensor::from_data(TensorData::new(values, [batch, width]), (device, DType::F32))
        };
        Self { factors: upload(factors, 1), seen: upload(seen, vocabulary) }
    }

    /// Adds a token `[B]` to each sequence.
    pub(super) fn add(&mut self, tokens: Tensor<1, Int>) {
        let tokens = tokens.unsqueeze_dim::<2>(1);
        let ones = self.factors.ones_like();
        self.seen = self.seen.clone().scatter(1, tokens, ones, IndexingUpdateOp::Add);
    }

    /// Logits `[B, vocabulary]`; the logits of tokens that a sequence has are lowered.
    pub(super) fn apply(&self, logits: Tensor<2>) -> Tensor<2> {
        let negative = logits.clone().lower_elem(0.0);
        let raised = logits.clone() * self.factors.clone();
        let lowered = (logits.clone() / self.factors.clone()).mask_where(negative, raised);
        logits.mask_where(self.seen.clone().greater_elem(0.0), lowered)
    }
}
