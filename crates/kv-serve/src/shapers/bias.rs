//! Numbers that are added to tokens' logits.

use kv_models::LogitsShaper;

/// `logit_bias`.
pub(crate) struct Bias {
    tokens: Vec<(u32, f32)>,
}

impl Bias {
    /// Adds a number to each of these tokens' logits.
    pub(crate) fn new(tokens: Vec<(u32, f32)>) -> Self {
        Self { tokens }
    }
}

impl LogitsShaper for Bias {
    fn shape(&mut self, logits: &mut [f32]) -> Result<(), String> {
        for &(token, bias) in &self.tokens {
            if let Some(logit) = logits.get_mut(token as usize) {
                // As OpenAI has it, -100 bans a token, whatever its logit.
                *logit = if bias <= -100.0 { f32::NEG_INFINITY } else { *logit + bias };
            }
        }
        Ok(())
    }

    fn accept(&mut self, _token: u32) -> Result<bool, String> {
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bias_is_added_and_the_lowest_bans() {
        let mut logits = [1.0, 1.0, 500.0];
        Bias::new(vec![(0, 2.0), (2, -100.0), (9, 1.0)]).shape(&mut logits).unwrap();
        assert_eq!(logits, [3.0, 1.0, f32::NEG_INFINITY]);
    }
}
