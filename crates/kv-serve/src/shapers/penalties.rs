//! Penalties of tokens that were generated before.

use std::collections::HashMap;

use kv_models::LogitsShaper;

/// `frequency_penalty` and `presence_penalty`: OpenAI's, over new tokens alone.
pub(crate) struct Penalties {
    frequency: f32,
    presence: f32,
    counts: HashMap<u32, u32>,
}

impl Penalties {
    /// Takes `frequency` for each time that a token was generated, and `presence` once.
    pub(crate) fn new(frequency: f32, presence: f32) -> Self {
        Self { frequency, presence, counts: HashMap::new() }
    }
}

impl LogitsShaper for Penalties {
    fn shape(&mut self, logits: &mut [f32]) -> Result<(), String> {
        for (&token, &count) in &self.counts {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= self.frequency * count as f32 + self.presence;
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<bool, String> {
        *self.counts.entry(token).or_default() += 1;
        Ok(false)
    }
}
