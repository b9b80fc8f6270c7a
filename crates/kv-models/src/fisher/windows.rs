//! Windows of a text, to measure on.

use crate::{FisherError, Model, Result};

/// Stretches of a text that do not overlap, equally long and evenly spread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextWindows {
    pub(super) tokens: Vec<Vec<u32>>,
}

impl TextWindows {
    /// `samples` windows of `window` tokens each. Every window begins as a prompt of the model
    /// does, with what its tokenizer puts before a text, which counts.
    ///
    /// # Errors
    /// [`FisherError::InvalidWindows`], [`FisherError::TextTooShort`]; the errors of
    /// [`Model::encode`].
    pub fn new(model: &Model, text: &str, window: usize, samples: usize) -> Result<Self> {
        let start = model.encode("")?;
        // A token to predict, and one before it.
        let (least, most) = (2.max(start.len() + 1), model.config().max_positions);
        if samples == 0 || !(least..=most).contains(&window) {
            return Err(FisherError::InvalidWindows { samples, window, least, most }.into());
        }
        let all = model.encode_continuation(text)?;
        let (tokens, window) = (all.len(), window - start.len());
        if samples.checked_mul(window).is_none_or(|needed| needed > tokens) {
            return Err(FisherError::TextTooShort { tokens, samples, window }.into());
        }
        let cut = |index: usize| {
            let first = (index as u128 * tokens as u128 / samples as u128) as usize;
            [&start[..], &all[first..first + window]].concat()
        };
        Ok(Self { tokens: (0..samples).map(cut).collect() })
    }

    /// The windows' tokens.
    pub fn tokens(&self) -> &[Vec<u32>] {
        &self.tokens
    }
}
