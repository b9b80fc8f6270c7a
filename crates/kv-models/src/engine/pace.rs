//! How much of a prompt is computed between two decode steps.
//!
//! A turn of the engine is some layers of a prompt and a decode step of every group. It ends when
//! the host has read the tokens, so that its time is the device's, however far the host runs ahead.
//! Turns without a prompt show how long the steps take; the rest of the other turns is the
//! prompt's.

use std::time::Duration;

/// The weight of a new measurement in a running mean.
const NEWEST: f64 = 0.2;
/// So many turns with a prompt are followed by one without, which measures the steps alone.
const ALONE: usize = 32;

/// Running means of a turn's parts.
#[derive(Debug)]
pub(super) struct Pace {
    /// The share of a turn that prompts may take, below 1.
    share: f64,
    /// Seconds of the steps alone.
    steps: Option<f64>,
    /// Seconds of one layer, for each token of a prompt.
    layer: Option<f64>,
    /// Turns with a prompt since the last one without.
    turns: usize,
}

impl Pace {
    pub(super) fn new(share: f64) -> Self {
        Self { share: share.clamp(0.0, 0.95), steps: None, layer: None, turns: 0 }
    }

    /// The layers of a prompt of `tokens` tokens that fit between two steps: at least one, but for
    /// turns that measure the steps alone.
    pub(super) fn layers(&self, tokens: usize) -> usize {
        if self.turns >= ALONE {
            return 0;
        }
        let (Some(steps), Some(layer)) = (self.steps, self.layer) else { return 1 };
        let free = steps * self.share / (1.0 - self.share);
        ((free / (layer * tokens as f64).max(f64::MIN_POSITIVE)) as usize).max(1)
    }

    /// Notes a turn in which steps ran beside layers of prompts: `tokens` counts the prompts'
    /// tokens, once for each layer.
    pub(super) fn note(&mut self, tokens: usize, time: Duration) {
        let mean = |known: Option<f64>, new: f64| {
            Some(known.map_or(new, |known| known + NEWEST * (new - known)))
        };
        let time = time.as_secs_f64();
        if tokens == 0 {
            self.turns = 0;
            self.steps = mean(self.steps, time);
            return;
        }
        self.turns += 1;
        // Without a measurement of the steps alone, all of the time counts as the prompt's.
        let own = (time - self.steps.unwrap_or_default()).max(0.0);
        self.layer = mean(self.layer, own / tokens as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_get_their_share_of_a_turn() {
        // Steps of 20 ms, layers of 1 ms for 100 tokens.
        for (share, expected) in [(0.5, 10), (0.8, 40), (0.0, 1)] {
            let mut pace = Pace::new(share);
            assert_eq!(pace.layers(200), 1);
            for _ in 0..200 {
                let layers = pace.layers(200);
                let time = 0.02 + layers as f64 * 0.002;
                pace.note(layers * 200, Duration::from_secs_f64(time));
            }
            let layers = pace.layers(200).max(1);
            assert!(layers.abs_diff(expected) <= 1, "{share}: {layers}, expected {expected}");
        }
    }

    #[test]
    fn steps_are_measured_alone_now_and_then() {
        let mut pace = Pace::new(0.5);
        let alone = (0..100).filter(|_| {
            let layers = pace.layers(10);
            pace.note(layers * 10, Duration::from_millis(5));
            layers == 0
        });
        assert_eq!(alone.count(), 3);
    }
}
