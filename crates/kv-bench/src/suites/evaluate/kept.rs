//! What a policy holds of each prompt once it is compressed, as a strip of positions.
//!
//! A strip is a text: the prompt in up to [`STRETCHES`] stretches of equal length, a hexadecimal
//! digit each. The digit is the share of the stretch that is held, over its tokens, all layers and
//! all key-value heads: `0` says that none of it is held, `f` that all of it is.
//!
//! What counts is what lies in slots. Of tokens that were merged, the slot's own position counts.
//! A policy that keeps all tokens and reads some of them holds everything. Tokens that a policy
//! keeps beside the slots, such as in a sketch, an archive or as means, do not count.

use anyhow::Context;
use burn::tensor::Tensor;
use kv_core::read_i32;
use kv_models::Session;

/// Stretches of a strip; a shorter prompt has a stretch a token.
const STRETCHES: usize = 96;

/// Each sequence's strip. `None` where the policy numbers its tokens anew, so that their positions
/// in the prompt are not known.
///
/// Reads all layers' positions at once.
///
/// # Errors
/// Where the positions cannot be read.
pub(super) fn strips(session: &Session<'_>) -> anyhow::Result<Vec<Option<String>>> {
    let cache = session.cache();
    if session.policy().capabilities().renumbers {
        return Ok(vec![None; cache.batch()]);
    }
    let pools: Vec<_> = cache.layers.iter().map(|layer| layer.positions().clone()).collect();
    let sizes: Vec<usize> = pools.iter().map(|pool| pool.dims()[0]).collect();
    let positions = read_i32("positions", Tensor::cat(pools, 0))?;
    let mut counts: Vec<Counts> = cache.seen.iter().map(|&tokens| Counts::new(tokens)).collect();
    let mut rest = &positions[..];
    for (layer, size) in cache.layers.iter().zip(sizes) {
        let (own, others) = rest.split_at_checked(size).context("positions are missing")?;
        rest = others;
        let layout = layer.layout();
        for range in 0..layout.head_ranges() {
            counts[range / layout.kv_heads()].add(&own[layout.live(range)]);
        }
    }
    Ok(counts.iter().map(|counts| Some(counts.strip())).collect())
}

/// Slots of one prompt, by stretch.
struct Counts {
    tokens: usize,
    slots: Vec<usize>,
    /// Heads of all layers.
    heads: usize,
}

impl Counts {
    fn new(tokens: usize) -> Self {
        Self { tokens, slots: vec![0; tokens.min(STRETCHES)], heads: 0 }
    }

    /// Adds the positions that one head holds.
    fn add(&mut self, positions: &[i32]) {
        self.heads += 1;
        for &position in positions {
            let Ok(position) = usize::try_from(position) else { continue };
            let stretch = position * self.slots.len() / self.tokens.max(1);
            if let Some(slots) = self.slots.get_mut(stretch) {
                *slots += 1;
            }
        }
    }

    fn strip(&self) -> String {
        let stretches = self.slots.len();
        let begin = |stretch: usize| (stretch * self.tokens).div_ceil(stretches);
        let digit = |(stretch, &slots): (usize, &usize)| {
            let all = (begin(stretch + 1) - begin(stretch)) * self.heads;
            let digit = match slots {
                0 => 0,
                // Several slots may have one position.
                slots if slots >= all => 15,
                slots => (15 * slots / all).clamp(1, 14),
            };
            char::from_digit(digit as u32, 16).unwrap_or_default()
        };
        self.slots.iter().enumerate().map(digit).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stretch_is_as_dark_as_it_is_held() {
        let mut counts = Counts::new(192);
        let all: Vec<i32> = (0..192).collect();
        counts.add(&all);
        counts.add(&all[190..]);
        assert_eq!(counts.strip(), "7".repeat(95) + "f");
        // A single token of many is seen, and none but all is whole.
        let mut counts = Counts::new(9600);
        counts.add(&[50]);
        assert_eq!(counts.strip(), "1".to_string() + &"0".repeat(95));
        let most: Vec<i32> = (1..100).collect();
        let mut counts = Counts::new(9600);
        counts.add(&most);
        assert!(counts.strip().starts_with("e0"));
    }

    #[test]
    fn stretches_of_short_and_odd_prompts_cover_all_tokens() {
        for tokens in [1, 5, 96, 97, 100, 191] {
            let mut counts = Counts::new(tokens);
            counts.add(&(0..tokens as i32).collect::<Vec<_>>());
            assert_eq!(counts.strip(), "f".repeat(tokens.min(96)), "{tokens}");
        }
        // Positions that the prompt does not have.
        let mut counts = Counts::new(5);
        counts.add(&[-1, i32::MIN, 5, 6]);
        assert_eq!(counts.strip(), "00000");
    }
}
